"""Distributed clients: shared out over ranks. Every rank runs the server's round, and the work of its own clients.

A client belongs to one rank for good, and so does what it keeps. An exchange ends in one sum over the ranks, of one
flat buffer: the weighted answers, and what they took. All ranks end up with the same bits, so their servers agree.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fedstrata.clients.client import Setting
from fedstrata.clients.clients import Counts, Terms, Work
from fedstrata.clients.faults import Fault
from fedstrata.clients.ranks import Ranks, dtype_named
from fedstrata.clients.simulated import SimulatedClients

DIGIT = 1 << 16
"""Counts travel as digits of this base: exact in any floating-point buffer for up to 256 ranks."""

DIGITS = 4


class DistributedClients(SimulatedClients):
    """Runs this rank's clients of the cohort in chunks, and reduces with the other ranks."""

    def __init__(self, setting: Setting, terms: Terms, chunk: int, ranks: Ranks) -> None:
        super().__init__(setting, terms, chunk)
        self.ranks = ranks
        self.rank_of = shared_out(setting.data.train.sizes, ranks.size)
        self.mine = self.rank_of == ranks.rank
        self._used = Counts()

    def note(self, chunk: int | str) -> str:
        """Say how the clients of a cohort advance."""
        return f"{super().note(chunk)} on each of {self.ranks.size} ranks"

    def _here(self, places: np.ndarray) -> np.ndarray:
        here: np.ndarray = places[self.rank_of[self.cohort[places]] == self.ranks.rank]
        return here

    def _agree(self, known: int) -> None:
        self._answered = self.ranks.sum(torch.from_numpy(self._answered.astype(np.int64))).numpy() > 0
        told = self.ranks.all([dataclasses.asdict(fault) for fault in self.faults[known:]])
        self.faults[known:] = [Fault(**fault) for rank in told for fault in rank]

    def _count(self, used: Counts) -> None:
        self._used = used  # the other ranks' is still to come

    def _together(
        self, work: Work, how: tuple[str, ...], leaves: list[torch.Tensor] | None, shape: TreeSpec | None
    ) -> Any:
        if len(np.unique(self.rank_of[self.cohort[self._answered]])) < self.ranks.size:
            like, shape = tree_flatten(self._form(leaves, shape))
            kinds = how * len(like) if len(how) == 1 else how
            empty = [_nothing(t, kind) for t, kind in zip(like, kinds, strict=True)]
            leaves = empty if leaves is None else leaves
        assert leaves is not None and shape is not None
        kinds = how * len(leaves) if len(how) == 1 else how
        sums = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind != "max"]
        most = [leaf.contiguous() for leaf, kind in zip(leaves, kinds, strict=True) if kind == "max"]
        # A maximum over ranks passes NaN over, a sum does not.
        found = self._sum([*sums, *(torch.zeros_like(leaf).where(leaf == leaf, leaf) for leaf in most)])
        summed, spoilt = iter(found[: len(sums)]), iter(found[len(sums) :])
        largest = (torch.where(bad == bad, self.ranks.max(leaf), bad) for leaf, bad in zip(most, spoilt, strict=True))
        return tree_unflatten([next(largest if kind == "max" else summed) for kind in kinds], shape)

    def _sum(self, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the leaves summed over the ranks, and add up the counts, all in one buffer."""
        kinds = {leaf.dtype for leaf in leaves}
        dtype = kinds.pop() if len(kinds) == 1 else torch.float64
        dtype = dtype if dtype.is_floating_point else torch.float64
        counts = [*_digits(self._used.bytes_up), *_digits(self._used.samples)]
        steps = [0] * self.ranks.size
        steps[self.ranks.rank] = self._used.steps
        counted = torch.tensor([*counts, *(d for n in steps for d in _digits(n))], dtype=dtype)
        buffer = self.ranks.sum(torch.cat([*(leaf.reshape(-1).to(dtype) for leaf in leaves), counted]))
        numbers = buffer[-len(counted) :].double().reshape(-1, DIGITS) @ _POWERS
        bytes_up, samples, *each = (int(n) for n in numbers.tolist())
        super()._count(Counts(max(each), samples, bytes_up, 0))
        parts = torch.split(buffer[: -len(counted)], [leaf.numel() for leaf in leaves])
        return [p.reshape(leaf.shape).to(leaf.dtype) for p, leaf in zip(parts, leaves, strict=True)]

    def _form(self, leaves: list[torch.Tensor] | None, shape: TreeSpec | None) -> Any:
        """Return what the answers look like: some rank has none, and must know."""
        mine = None if leaves is None or shape is None else _described(tree_unflatten(leaves, shape))
        return _like(next(form for form in self.ranks.all(mine) if form is not None))


def shared_out(sizes: np.ndarray, ranks: int) -> np.ndarray:
    """Return the rank of each client: the largest clients first, each to the rank that has the least to do."""
    load = [(0, rank) for rank in range(ranks)]
    out = np.empty(len(sizes), dtype=np.int64)
    for client in np.argsort(-sizes, kind="stable"):
        least, rank = heapq.heappop(load)
        out[client] = rank
        heapq.heappush(load, (least + int(sizes[client]), rank))
    return out


_POWERS = torch.tensor([float(DIGIT) ** i for i in range(DIGITS)], dtype=torch.float64)


def _nothing(like: torch.Tensor, kind: str) -> torch.Tensor:
    """Return what changes no sum, or no maximum."""
    if kind != "max":
        return torch.zeros_like(like)
    return torch.full_like(like, -math.inf if like.is_floating_point() else torch.iinfo(like.dtype).min)


def _digits(number: int) -> list[int]:
    return [(number >> (16 * i)) % DIGIT for i in range(DIGITS)]


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"shape": list(value.shape), "dtype": str(value.dtype)}
    return [_described(v) for v in value]


def _like(form: Any) -> Any:
    if isinstance(form, dict):
        return torch.empty(form["shape"], dtype=dtype_named(form["dtype"]))
    return tuple(_like(f) for f in form)
