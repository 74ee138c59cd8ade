"""Simulated clients: all on this machine, C at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from fedstrata.clients.base import Clients, Weighting, Work
from fedstrata.clients.client import Client, Setting


class SimulatedClients(Clients):
    """Runs the cohort in chunks of at most ``chunk`` clients, clients of similar size together."""

    def __init__(self, setting: Setting, participation: int | float, weighting: Weighting, chunk: int) -> None:
        super().__init__(setting, participation, weighting)
        self.chunk = chunk

    def _answers(self, work: Work, message: tuple[Any, ...], exchange: int) -> Iterator[tuple[np.ndarray, Client, Any]]:
        for places in self._chunks():
            ids = self.cohort[places]
            client = Client(self._setting, ids, self._round, exchange)
            mine = tree_map(lambda t: t.expand(len(ids), *t.shape) if isinstance(t, torch.Tensor) else t, message)  # noqa: B023
            yield places, client, work(client, *mine)

    def _chunks(self) -> list[np.ndarray]:
        """Cut the cohort into chunks of nearly equal numbers, the largest clients first."""
        sizes = self._setting.data.train.sizes[self.cohort]
        order = np.argsort(-sizes, kind="stable")
        return np.array_split(order, math.ceil(len(order) / self.chunk))
