"""What the client side of a run shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from fedstrata.clients.state import ClientState
from fedstrata.core.clock import Clock
from fedstrata.data.federated import FederatedData
from fedstrata.data.sampling import Sampling
from fedstrata.problems.oracles import Oracles

Listener = Callable[[Clock, np.ndarray, dict[str, Callable[[], torch.Tensor]]], None]


@dataclass(frozen=True)
class ClientSide:
    """What the client side of a run shares: the problem, the data in this process, and how batches are drawn.

    listeners: called after every local step, with the clock, the clients, and what the step reported.
    deferred:  whether what clients keep is stored only once the server has accepted their answers.
    """

    oracles: Oracles
    data: FederatedData
    sampling: type[Sampling]
    batch_size: int | None
    seed: int
    state: ClientState
    listeners: tuple[Listener, ...] = ()
    deferred: bool = False
