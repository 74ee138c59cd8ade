"""Clients distributed over ranks: every rank runs the server's round, and the work of its own clients.

A client and its state stay on one rank. An exchange ends in one sum over the ranks of a single flat buffer: the
weighted answers and their usage counts. All ranks get the same bits, so their servers agree.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from typing import Any

import numpy as np
import torch

from fedstrata.clients.channel import PLAIN, Channel
from fedstrata.clients.client_side import ClientSide
from fedstrata.clients.engine import Reduced, Request, Usage
from fedstrata.clients.faults import Fault, Faults
from fedstrata.clients.ranks import Ranks, empty, form_of
from fedstrata.clients.simulated import Simulated
from fedstrata.core.trees import TreeSpec, tree_flatten, tree_unflatten

EXACT_BITS, COUNT_BITS = 24, 64
"""Whole numbers below 2^24 are exact in any floating-point buffer; a count is below 2^64."""


class Distributed(Simulated):
    """Run this rank's clients of the cohort in chunks, and reduce over the ranks."""

    def __init__(
        self, side: ClientSide, chunk: int, channel: Channel = PLAIN, policy: Faults | None = None, *, ranks: Ranks
    ) -> None:
        super().__init__(side, chunk, channel, policy)
        self.ranks = ranks
        self.rank_of = shared_out(side.data.train.sizes, ranks.size)
        self.mine = self.rank_of == ranks.rank

    def describe(self, chunk: int | str, sampled: int) -> str:
        """Describe how clients are computed, for a line of progress."""
        mine = super().describe(chunk, math.ceil(sampled / self.ranks.size))
        return f"{mine} on each of {self.ranks.size} ranks"

    def _local_places(self, request: Request) -> np.ndarray:
        places: np.ndarray = request.places[self.rank_of[request.cohort[request.places]] == self.ranks.rank]
        return places

    def agree(self, answered: np.ndarray, faults: list[Fault]) -> tuple[np.ndarray, list[Fault]]:
        """Return who has answered and the faults of an attempt, over all ranks."""
        answered = self.ranks.sum(torch.from_numpy(answered.astype(np.int64))).numpy() > 0
        by_rank = self.ranks.all([dataclasses.asdict(fault) for fault in faults])
        return answered, [Fault(**fault) for rank in by_rank for fault in rank]

    def complete(self, request: Request, reduced: Reduced) -> Reduced:
        """Return the sums and maxima over all ranks."""
        leaves, shape, kinds = reduced.leaves, reduced.shape, reduced.kinds
        if len(np.unique(self.rank_of[request.cohort[reduced.answered]])) < self.ranks.size:
            like, shape = tree_flatten(self._form(leaves, shape))
            kinds = kinds * len(like) if len(kinds) == 1 else kinds
            leaves = [_nothing(t, kind) for t, kind in zip(like, kinds, strict=True)] if leaves is None else leaves
        assert leaves is not None and shape is not None
        kinds = kinds * len(leaves) if len(kinds) == 1 else kinds
        sums = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind != "max"]
        maxima = [leaf.contiguous() for leaf, kind in zip(leaves, kinds, strict=True) if kind == "max"]
        # A maximum over ranks ignores NaN, but a sum does not.
        marks = [torch.zeros_like(leaf).where(leaf == leaf, leaf) for leaf in maxima]
        added, used = self._sum([*sums, *marks], reduced.used)
        summed, nans = iter(added[: len(sums)]), iter(added[len(sums) :])
        largest = (torch.where(bad == bad, self.ranks.max(leaf), bad) for leaf, bad in zip(maxima, nans, strict=True))
        whole = [next(largest if kind == "max" else summed) for kind in kinds]
        return Reduced(whole, shape, kinds, used, reduced.answered)

    def _sum(self, leaves: list[torch.Tensor], used: Usage) -> tuple[list[torch.Tensor], Usage]:
        """Return the leaves and the usage summed over the ranks, in one buffer."""
        kinds = {leaf.dtype for leaf in leaves}
        dtype = kinds.pop() if len(kinds) == 1 else torch.float64
        dtype = dtype if dtype.is_floating_point else torch.float64
        bits = digit_bits(self.ranks.size)
        steps = [0] * self.ranks.size
        steps[self.ranks.rank] = used.steps
        counted = digits([used.bytes_up, used.samples, *steps], bits).to(dtype)
        buffer = self.ranks.sum(torch.cat([*(leaf.reshape(-1).to(dtype) for leaf in leaves), counted]))
        bytes_up, samples, *each = from_digits(buffer[-len(counted) :], bits)
        parts = torch.split(buffer[: -len(counted)], [leaf.numel() for leaf in leaves])
        whole = [p.reshape(leaf.shape).to(leaf.dtype) for p, leaf in zip(parts, leaves, strict=True)]
        return whole, Usage(max(each), samples, bytes_up)

    def _form(self, leaves: list[torch.Tensor] | None, shape: TreeSpec | None) -> Any:
        """Return the form of the answers, for ranks without any."""
        mine = None if leaves is None or shape is None else form_of(tree_unflatten(leaves, shape))
        return empty(next(form for form in self.ranks.all(mine) if form is not None))


def shared_out(sizes: np.ndarray, ranks: int) -> np.ndarray:
    """Return the rank of each client: the largest clients go first, each to the rank with the smallest load."""
    load = [(0, rank) for rank in range(ranks)]
    out = np.empty(len(sizes), dtype=np.int64)
    for client in np.argsort(-sizes, kind="stable"):
        least, rank = heapq.heappop(load)
        out[client] = rank
        heapq.heappush(load, (least + int(sizes[client]), rank))
    return out


def digit_bits(ranks: int) -> int:
    """Return the size of a digit in bits: counts are sent as digits whose sum over the ranks is exact."""
    return min(16, EXACT_BITS - (ranks - 1).bit_length())


def digits(counts: list[int], bits: int) -> torch.Tensor:
    """Return the digits of ``bits`` bits of all counts, the lowest digit of each first."""
    shifts = range(0, COUNT_BITS, bits)
    return torch.tensor([(count >> shift) % (1 << bits) for count in counts for shift in shifts])


def from_digits(sums: torch.Tensor, bits: int) -> list[int]:
    """Return the counts, given the sums of their digits over the ranks."""
    shifts = range(0, COUNT_BITS, bits)
    rows = sums.reshape(-1, len(shifts)).tolist()
    return [sum(int(digit) << shift for digit, shift in zip(row, shifts, strict=True)) for row in rows]


def _nothing(like: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the neutral element of the sum or maximum."""
    if kind != "max":
        return torch.zeros_like(like)
    return torch.full_like(like, -math.inf if like.is_floating_point() else torch.iinfo(like.dtype).min)
