"""Distributed clients: shared out over ranks. Every rank runs the server's round, and the work of its own clients.

A client belongs to one rank for good, and so does what it keeps. An exchange ends in one sum over the ranks, of one
flat buffer: the weighted answers, and what they took. All ranks end up with the same bits, so their servers agree.
"""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fedstrata.clients.base import Counts, Weighting, Work
from fedstrata.clients.client import Setting
from fedstrata.clients.simulated import SimulatedClients
from fedstrata.ranks import Ranks, dtype_named

DIGIT = 1 << 16
"""Counts travel as digits of this base: exact in any floating-point buffer for up to 256 ranks."""

DIGITS = 4


class DistributedClients(SimulatedClients):
    """Runs this rank's clients of the cohort in chunks, and reduces with the other ranks."""

    def __init__(
        self,
        setting: Setting,
        rounds: int,
        participation: int | float,
        weighting: Weighting,
        chunk: int,
        ranks: Ranks,
    ) -> None:
        super().__init__(setting, rounds, participation, weighting, chunk)
        self.ranks = ranks
        self.rank_of = shared_out(setting.data.train.sizes, ranks.size)
        self.mine = self.rank_of == ranks.rank
        self._used = Counts()
        self._forms: dict[tuple[object, ...], Any] = {}

    def _chunks(self) -> list[np.ndarray]:
        mine = np.flatnonzero(self.rank_of[self.cohort] == self.ranks.rank)
        if not len(mine):
            return []
        sizes = self._setting.data.train.sizes[self.cohort[mine]]
        order = mine[np.argsort(-sizes, kind="stable")]
        return np.array_split(order, math.ceil(len(order) / self.chunk))

    def _count(self, used: Counts) -> None:
        self._used = used  # the other ranks' is still to come

    def _together(
        self, work: Work, how: tuple[str, ...], leaves: list[torch.Tensor] | None, shape: TreeSpec | None
    ) -> Any:
        form = self._form(work, how, leaves, shape)
        like, shape = tree_flatten(form)
        kinds = how * len(like) if len(how) == 1 else how
        sums = [k != "max" for k in kinds]
        if leaves is None:
            leaves = [
                torch.zeros_like(t) if s else torch.full_like(t, -math.inf) for t, s in zip(like, sums, strict=True)
            ]
        summed = self._sum([leaf for leaf, s in zip(leaves, sums, strict=True) if s])
        largest = [self.ranks.max(leaf.contiguous()) for leaf, s in zip(leaves, sums, strict=True) if not s]
        parts = iter(summed), iter(largest)
        return tree_unflatten([next(parts[0] if s else parts[1]) for s in sums], shape)

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

    def _form(self, work: Work, how: tuple[str, ...], leaves: list[torch.Tensor] | None, shape: TreeSpec | None) -> Any:
        """Return what the answers look like, for ranks that have none: asked once, and the same ever after."""
        key = (getattr(work, "__qualname__", ""), how, self._round < 0, self._exchange[0], len(self.cohort))
        if key not in self._forms:
            mine = None if leaves is None or shape is None else _described(tree_unflatten(leaves, shape))
            found = next(form for form in self.ranks.all(mine) if form is not None)
            self._forms[key] = _like(found)
        return self._forms[key]


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
