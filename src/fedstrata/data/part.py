"""Rows of shared arrays, grouped by client: one copy of the data, however many clients and parts there are."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from fedstrata.core.errors import invalid
from fedstrata.data.batch import Arrays, Batch, Fields, stored
from fedstrata.data.intake import are_labels


@dataclass(frozen=True)
class Part:
    """Rows of shared arrays, grouped by client and, within a client, sorted by class.

    arrays:  tensors whose first axis runs over all rows: ``(inputs, targets)``, or several inputs, then the targets.
    rows:    row numbers, one client after another; one row, expanded, as a placeholder for data that are elsewhere.
    offsets: client k has ``rows[offsets[k]:offsets[k + 1]]``.
    """

    arrays: Arrays
    rows: torch.Tensor
    offsets: np.ndarray

    @staticmethod
    def of(arrays: Arrays, owned: Sequence[np.ndarray]) -> Part:
        """Build a part from the row numbers of each client."""
        offsets = np.concatenate([[0], np.cumsum([len(r) for r in owned])]).astype(np.int64)
        rows = np.concatenate([np.asarray(r, dtype=np.int64) for r in owned])
        targets = arrays[-1]
        if are_labels(targets):
            owner = np.repeat(np.arange(len(owned)), np.diff(offsets))
            rows = rows[np.lexsort((rows, targets.cpu().numpy()[rows], owner))]
        return Part(arrays, torch.from_numpy(rows), offsets)

    @property
    def stored_rows(self) -> torch.Tensor:
        """The row numbers in memory: of a placeholder, which may stand for any number of rows, only one."""
        return self.rows[:1] if self.rows.stride(0) == 0 else self.rows

    @cached_property
    def sizes(self) -> np.ndarray:
        """Number of samples of each client."""
        return np.diff(self.offsets)

    @cached_property
    def class_counts(self) -> np.ndarray:
        """Number of samples of each client and class, [clients, classes], up to the last class that occurs."""
        targets = self.arrays[-1]
        if not are_labels(targets):
            raise invalid("targets", f"{targets.dtype} of shape {tuple(targets.shape)}", "class numbers, one per row")
        labels = targets.cpu().numpy()[self.stored_rows.numpy()].astype(np.int64)
        if labels.min() < 0:
            raise invalid("labels of the data", int(labels.min()), "class numbers, which start at 0")
        if len(labels) < len(self.rows):
            return np.outer(self.sizes, np.arange(labels[0] + 1) == labels[0])
        owner = np.repeat(np.arange(len(self.sizes)), self.sizes)
        shape = (len(self.sizes), int(labels.max()) + 1)
        return np.bincount(owner * shape[1] + labels, minlength=shape[0] * shape[1]).reshape(shape)

    def only(self, clients: np.ndarray) -> Part:
        """Return the rows of these clients, in this order."""
        sizes = self.sizes[clients]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        places = np.arange(offsets[-1]) + np.repeat(self.offsets[clients] - offsets[:-1], sizes)
        return Part(self.arrays, self.rows[torch.from_numpy(places)], offsets)

    def joined(self) -> Part:
        """Return the rows of all clients as those of a single one."""
        return Part.of(self.arrays, [self.rows.numpy()])

    def of_client(self, client: int) -> Arrays:
        """Return the samples of one client."""
        rows = self.rows[self.offsets[client] : self.offsets[client + 1]]
        return tuple(a[rows.to(a.device)] for a in self.arrays)

    def hold_out(
        self, share: float, seed: int, keep: int = 1, site: str | None = None, by_chance: bool = False
    ) -> tuple[Part, Part]:
        """Split off a random ``share`` of each client's rows, stratified by class; return the rest and that share.

        Of n rows of a client, round(share * n) are split off, at most n - 1. Each class contributes its share rounded
        down or up; at least ``keep`` (0 or 1) of its rows stay, so a class with a single row is not split. Regression
        targets count as one class.

        by_chance: of two classes, whether the rarer one of a client, if less than one row of it is due, gives one with
                   that probability: many clients with one or two positives then give their share of them together.
        site:      the name of the only client, so that sites that use the same seed do not all do the same.
        """
        if not 0 < share < 1:
            raise invalid("share to hold out", share, "between 0 and 1, exclusive")
        seeds = [seed] if site is None else [seed, zlib.crc32(site.encode())]
        generator = np.random.default_rng(seed if site is None else seeds)
        chances = np.random.default_rng([*seeds, len(self.rows)]).random(len(self.sizes))
        targets = self.arrays[-1]
        labels = targets.cpu().numpy() if are_labels(targets) else np.zeros(len(targets))
        kept, held = [], []
        for rows, chance in zip(np.split(self.rows.numpy(), self.offsets[1:-1]), chances, strict=True):
            shuffled = generator.permutation(rows)
            chosen = _stratified(labels[shuffled], share, keep, chance if by_chance else None)
            kept.append(shuffled[~chosen])
            held.append(shuffled[chosen])
        return Part.of(self.arrays, kept), Part.of(self.arrays, held)

    def gather(self, clients: np.ndarray, positions: np.ndarray, lengths: np.ndarray | None, traced: bool) -> Batch:
        """Return the samples at ``positions`` [C, B] of each client; with ``lengths`` [C], only that many of them."""
        if lengths is None:
            return Batch((self._at(clients, positions),), traced=traced, fields=self.fields)
        numbers, owners = np.unique(lengths, return_inverse=True)
        where = [np.flatnonzero(owners == i) for i in range(len(numbers))]
        parts = [self._at(clients[w], positions[w, :n]) for w, n in zip(where, numbers, strict=True)]
        moved = tuple(torch.from_numpy(w).to(self.device) for w in where)
        return Batch(tuple(parts), moved, False, self.fields, owners)

    def _at(self, clients: np.ndarray, positions: np.ndarray) -> Arrays:
        at = torch.from_numpy(np.require(positions, requirements=["C", "W"]))
        return self.samples(self.rows_at(clients, at.to(self.device)))

    def rows_at(self, clients: np.ndarray, positions: torch.Tensor) -> torch.Tensor:
        """Return the row numbers at ``positions`` [..., C, B] of each client, all on the device of the arrays."""
        starts = torch.from_numpy(self.offsets[clients][:, None])
        return self._device_rows.take((starts if positions.is_cpu else starts.to(self.device)) + positions)

    @cached_property
    def device(self) -> torch.device:
        """Where the arrays are."""
        return self.arrays[0].device

    @cached_property
    def _device_rows(self) -> torch.Tensor:
        return self.rows.to(self.device)

    def samples(self, rows: torch.Tensor) -> Arrays:
        """Return the samples in these rows [...] of the arrays: [..., sample]."""
        flat, out = rows.reshape(-1), []
        for array in self.arrays:
            chosen = stored(array.index_select(0, flat))
            out.append(chosen.view(rows.shape + array.shape[1:]))
        return tuple(out)

    @cached_property
    def sample_bytes(self) -> int:
        """The bytes of one sample in a batch."""
        return sum(stored(a[:1]).nbytes for a in self.arrays)

    @cached_property
    def fields(self) -> Fields:
        """What the arrays of a batch are."""
        return Fields(inputs=len(self.arrays) - 1)


def _stratified(labels: np.ndarray, share: float, keep: int, chance: float | None = None) -> np.ndarray:
    """Return a mask that selects ``share`` of the shuffled rows, and of each class up to rounding.

    Each class contributes its share rounded down. The rows still missing come from the classes with the largest
    remainders; equal remainders are ordered by the shuffle. With a ``chance``, a number from 0 to 1, the rarer of two
    classes contributes a row if less than one is due, but more than the chance; the other class contributes the rest.
    """
    _, first, member, sizes = np.unique(labels, return_index=True, return_inverse=True, return_counts=True)
    exact = share * sizes
    quota = np.minimum(exact.astype(np.int64), sizes - 1)
    total = min(round(share * len(labels)), len(labels) - 1)
    due = total * sizes / max(1, len(labels))
    if chance is not None and len(sizes) == 2 and due.min() < 1:
        rare = int(due[1] <= due[0])
        quota[rare] = chance < due[rare]
        quota[1 - rare] = total - quota[rare]
    else:
        partial = np.flatnonzero((quota < sizes - keep) & (exact - quota > 1e-9))
        order = partial[np.lexsort((first[partial], (quota - exact)[partial]))]
        quota[order[: max(0, total - quota.sum())]] += 1
    by_class = np.argsort(member, kind="stable")
    rank = np.empty(len(labels), np.int64)
    rank[by_class] = np.arange(len(labels)) - (np.cumsum(sizes) - sizes)[member[by_class]]
    chosen: np.ndarray = rank < quota[member]
    return chosen
