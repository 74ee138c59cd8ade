"""Simulated clients: all on this machine, C at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from fedstrata.clients.base import Answer, Clients, Weighting, Work
from fedstrata.clients.client import Client, Setting
from fedstrata.schedules import Clock


class SimulatedClients(Clients):
    """Runs the cohort in chunks of at most ``chunk`` clients, clients of similar size together."""

    def __init__(
        self, setting: Setting, rounds: int, participation: int | float, weighting: Weighting, chunk: int
    ) -> None:
        super().__init__(setting, rounds, participation, weighting)
        self.chunk = chunk
        self.mine: np.ndarray | None = None

    def _answers(self, work: Work, message: tuple[Any, ...], clock: Clock, exchange: int) -> Iterator[Answer]:
        for places in self._chunks():
            client = Client(self._setting, self.cohort[places], clock, exchange)
            value = work(client, *_for_each(message, len(places)))
            yield Answer(places, value, client.samples, client.steps)

    def _chunks(self) -> list[np.ndarray]:
        """Cut the cohort into chunks of nearly equal numbers, the largest clients first."""
        sizes = self._setting.data.train.sizes[self.cohort]
        order = np.argsort(-sizes, kind="stable")
        return np.array_split(order, math.ceil(len(order) / self.chunk))


def _for_each(message: tuple[Any, ...], clients: int) -> tuple[Any, ...]:
    """Return the message with a leading client axis on its tensors: the same memory for everyone."""
    out: tuple[Any, ...] = tree_map(
        lambda t: t.expand(clients, *t.shape) if isinstance(t, torch.Tensor) else t, message
    )
    return out
