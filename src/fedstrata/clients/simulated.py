"""Simulated clients: all on this machine, C at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from fedstrata.clients.channel import Changes, bytes_of, send, unpacked
from fedstrata.clients.client import Client, Setting
from fedstrata.clients.clients import Answer, Clients, Terms, Work, for_each
from fedstrata.clients.faults import SILENT, Inject
from fedstrata.core.schedules import Clock


class SimulatedClients(Clients):
    """Runs the cohort in chunks of at most ``chunk`` clients, clients of similar size together."""

    def __init__(self, setting: Setting, terms: Terms, chunk: int) -> None:
        super().__init__(setting, terms)
        self.chunk = chunk
        self._pending: list[tuple[np.ndarray, Client]] = []

    def _answers(
        self, work: Work, message: tuple[Any, ...], clock: Clock, exchange: int, places: np.ndarray, attempt: int
    ) -> Iterator[Answer]:
        places = self._here(places)
        self._pending = []
        kinds: dict[int, str] = {}
        if self._policy is not None and self._policy.inject is not None:
            places, kinds = self._injected(places, exchange, attempt, self._policy.inject, self._policy.timeout)
        for chunk in self._chunks(places):
            client = Client(self._setting, self.cohort[chunk], clock, exchange)
            there = for_each(message, len(chunk))
            value = work(client, *there)
            answer = Answer(chunk, value, client.samples, client.steps)
            if self.channel.on_clients and self._passes(work):
                changes = Changes(work, there, value)
                parcel = send(self.channel, client, work, changes.matrix)
                arrived = changes.answers(unpacked(parcel, changes.matrix.shape[1]))
                answer = Answer(chunk, arrived, client.samples, client.steps, bytes_of(parcel))
            yield self._spoilt(work, there, answer, kinds, exchange, attempt) if kinds else answer
            if not self._setting.deferred:
                continue
            if len(np.unique(self.cohort)) < len(self.cohort):  # a client that comes again must not see it yet
                self._pending.append((chunk, client))
            else:
                client.commit(self._answered[chunk])

    def _commit(self) -> None:
        for places, client in self._pending:
            client.commit(self._answered[places])
        self._pending = []

    def _here(self, places: np.ndarray) -> np.ndarray:
        """Return which of these places of the cohort are worked on in this process."""
        return places

    def _chunks(self, places: np.ndarray) -> list[np.ndarray]:
        """Cut the cohort into chunks of nearly equal numbers, the largest clients first."""
        if not len(places):
            return []
        sizes = self._setting.data.train.sizes[self.cohort[places]]
        order = places[np.argsort(-sizes, kind="stable")]
        return np.array_split(order, math.ceil(len(order) / self.chunk))

    def _injected(
        self, places: np.ndarray, exchange: int, attempt: int, inject: Inject, timeout: float
    ) -> tuple[np.ndarray, dict[int, str]]:
        """Return the places that answer, and what is wrong with the answers of some of them."""
        found = inject.kinds(self.cohort[places], self._round, exchange, attempt)
        spoilt: dict[int, str] = {}
        silent = np.zeros(len(places), dtype=bool)
        for i, (place, kind) in enumerate(zip(places.tolist(), found, strict=True)):
            if kind is None or (kind == "delay" and inject.seconds <= timeout):
                continue
            if kind in SILENT:
                silent[i] = True
                why = f"answered after {inject.seconds:g} s" if kind == "delay" else "did not answer"
                self._fault(int(self.cohort[place]), exchange, attempt, "silent", why)
            else:
                spoilt[place] = kind
        return places[~silent], spoilt

    def _spoilt(
        self, work: Work, there: tuple[Any, ...], answer: Answer, kinds: dict[int, str], exchange: int, attempt: int
    ) -> Answer:
        """Return the answer as faults made on purpose leave it."""
        here = [kinds.get(place) for place in answer.places.tolist()]
        value = answer.value
        if not any(leaf.is_floating_point() for leaf in tree_leaves(value)):  # whole numbers have no NaN
            here = ["garbage" if kind == "nan" else kind for kind in here]
        assert self._policy is not None and self._policy.inject is not None
        if "scale" in here:
            rows = torch.tensor([kind == "scale" for kind in here])
            changes = Changes(work, there, value)
            value = changes.answers(torch.where(rows[:, None], self._policy.inject.factor, 1.0) * changes.matrix)
        if "nan" in here:
            rows = torch.tensor([kind == "nan" for kind in here])
            value = tree_map(lambda leaf: _with_nan(leaf, rows), value)
        if "garbage" in here:
            kept = torch.tensor([kind != "garbage" for kind in here])
            for place in answer.places[~kept.numpy()].tolist():
                self._fault(int(self.cohort[place]), exchange, attempt, "shape", "answered with the wrong shape")
            whole = sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(value))
            value = tree_map(lambda leaf: leaf[kept], value)
            sent = whole if answer.sent is None else answer.sent  # it was sent, whatever it was
            return Answer(answer.places[kept.numpy()], value, answer.samples, answer.steps, sent)
        return Answer(answer.places, value, answer.samples, answer.steps, answer.sent)


def _with_nan(leaf: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return a tensor with NaN in some rows; whole numbers have none, and stay as they are."""
    if not leaf.is_floating_point():
        return leaf
    leaf = leaf.clone()
    leaf[rows.to(leaf.device)] = math.nan
    return leaf
