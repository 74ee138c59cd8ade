"""What the clients' side of a run knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from fedstrata.clients.state import ClientState
from fedstrata.core.schedules import Clock
from fedstrata.data.federated import FederatedData
from fedstrata.data.sampling import Sampling
from fedstrata.problems.oracles import Oracles

Listener = Callable[[Clock, np.ndarray, dict[str, Callable[[], torch.Tensor]]], None]


@dataclass(frozen=True)
class Setting:
    """What the clients' side of a run knows: the problem, the data that are here, and how batches are drawn.

    ``listeners`` are called after every local step with the time, the clients, and what the step reported. With
    ``deferred``, clients keep something only once the server has taken their answers.
    """

    oracles: Oracles
    data: FederatedData
    sampling: type[Sampling]
    batch_size: int | None
    seed: int
    state: ClientState
    listeners: tuple[Listener, ...] = ()
    deferred: bool = False
