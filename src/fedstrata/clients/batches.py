"""The batches that clients draw in an exchange, gathered for several steps at once."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from fedstrata.clients.client_side import ClientSide
from fedstrata.core import rng
from fedstrata.core.errors import invalid
from fedstrata.data.batch import NO_DATA, Arrays, Batch
from fedstrata.data.sampling import Everything

AHEAD = 8 << 20
"""Bytes of samples that are gathered ahead, for each level and stream."""

NOTHING = torch.empty(0, 0, 0, dtype=torch.int64)
"""The rows of no steps."""

POSITIONS_AHEAD = 1 << 18
"""How many positions of samples are drawn ahead."""


class Now(NamedTuple):
    """Which batch to draw: that of the first ``active`` clients in this ``step``; ``left`` steps of the loop remain."""

    step: int
    active: int
    left: int


class Batches:
    """The batches that C clients draw in one exchange.

    A batch is a function of names: seed, round, exchange, loop of the exchange, level, stream, client and step.

    samples: how many samples have been drawn.
    """

    def __init__(self, side: ClientSide, ids: np.ndarray, round: int, exchange: int) -> None:
        self.samples = 0
        self._side, self._ids = side, ids
        self._problem = side.oracles.problem
        self._device = self._problem.x0.device
        self._random = self._problem.flat is not None and self._problem.flat.random
        self._exchange = (side.seed, round, exchange)
        self._loops = 0
        self._draws: dict[tuple[int, int, int], Draws] = {}
        self._everything: dict[int, Batch] = {}
        self._layers: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}

    def draw(self, level: int, stream: int, size: int | None, now: Now) -> Batch:
        """Return ``size`` samples of each client for a level; None for all data."""
        if not self._problem.draws(level):
            return self._completed(level, NO_DATA, now)
        if size is None:
            batch, samples = self._all_data(level, self._ids[: now.active])
        else:
            draws = self._draws.get((level, stream, size)) or self._new_draws(level, stream, size)
            batch, samples = draws.batch(now)
        self.samples += samples
        batch = self._completed(level, batch, now)
        return batch.randomised(self._words(level, stream, now)) if self._random else batch

    @cached_property
    def _numbers(self) -> torch.Tensor:
        return torch.from_numpy(self._ids).to(self._device)

    def _completed(self, level: int, batch: Batch, now: Now) -> Batch:
        """Return the batch with the numbers of the clients, if the level takes them."""
        problem = self._problem
        return problem.completed(level, batch, self._numbers[: now.active]) if problem.numbered else batch

    def _words(self, level: int, stream: int, now: Now) -> torch.Tensor:
        """Return this step's words for random layers, [active, 2]; those of the next steps are drawn with them."""
        first, words = self._layers.get((level, stream), (now.step, None))
        index = now.step - first
        if words is None or not 0 <= index < len(words):
            key = rng.key_of(*self._names("layers", level, stream))
            steps = range(now.step, now.step + max(1, min(now.left, POSITIONS_AHEAD // len(self._ids))))
            words, index = rng.words_on(self._device, key, self._ids, steps, 2), 0
            self._layers[level, stream] = now.step, words
        return words[index, : now.active]

    def _new_draws(self, level: int, stream: int, size: int) -> Draws:
        if not isinstance(size, int) or size < 1:
            raise invalid("batch_size of a draw", size, "a whole number of at least 1")
        draws = Draws(self._side, self._ids, self._names("batch", level, stream), level, size)
        self._draws[level, stream, size] = draws
        return draws

    def _all_data(self, level: int, ids: np.ndarray) -> tuple[Batch, int]:
        part, active = self._side.data.part(level), len(ids)
        sizes = part.sizes[ids]
        batch = self._everything.get(level)
        if batch is None or batch.clients != active:
            positions, lengths = Everything((), ids, sizes, 0).positions(0, active)
            traced = active == len(self._ids) and bool(np.ptp(part.sizes) == 0)
            batch = self._everything[level] = part.gather(ids, positions, lengths, traced)
        return batch, int(sizes.sum())

    def end_loop(self) -> None:
        """Draw other batches from now on: those of the next loop, whose steps count from 0 again."""
        self._loops += 1
        self._draws, self._layers = {}, {}

    def _names(self, purpose: str, level: int, stream: int) -> tuple[int | str, ...]:
        seed, round, exchange = self._exchange
        names = (seed, purpose, round, exchange, level, stream)
        return (*names, "after", self._loops) if self._loops else names


class Draws:
    """The batches of ``size`` samples that C clients draw for one level, as a function of ``names``.

    The rows of the remaining steps of a loop are drawn together, and their samples gathered, as many as fit into
    ``AHEAD`` bytes: a few large operations instead of many small ones, and nothing that a device would have to wait for
    in each step. The samples of a single client, whose steps are long, are gathered step by step, which needs no more
    memory than one batch; so are those of a step in which some clients have fewer than ``size``. None of this changes
    which samples a batch holds.
    """

    def __init__(self, side: ClientSide, ids: np.ndarray, names: tuple[int | str, ...], level: int, size: int) -> None:
        self._part = part = side.data.part(level)
        counts = part.class_counts[ids] if side.sampling.weighted else None
        self._ids, self._size = ids, size
        self._sampler = side.sampling(names, ids, part.sizes[ids], size, counts)
        weights, x0 = self._sampler.weights, side.oracles.problem.x0
        self._weights = None if weights is None else torch.from_numpy(weights).to(x0)
        self._first = self._first_drawn = 0
        self._ready: list[Arrays] = []
        self._rows: torch.Tensor = NOTHING
        self._uneven: Uneven | None = None

    def batch(self, now: Now) -> tuple[Batch, int]:
        """Return the batch, and how many samples it holds."""
        active = now.active
        index = now.step - self._first
        if 0 <= index < len(self._ready) and len(self._ready[index][0]) >= active:
            arrays = self._ready[index]
        else:
            rows, full = self._drawn(now)
            if not full:
                return self._smaller(rows[0], now)
            arrays = self._gathered(rows[:full], now)
        if len(arrays[0]) != active:
            arrays = tuple(a[:active] for a in arrays)
        batch = Batch((arrays,), traced=active == len(self._ids), fields=self._part.fields)
        return (batch if self._weights is None else batch.weighted(self._weights[:active])), active * self._size

    def _gathered(self, rows: torch.Tensor, now: Now) -> Arrays:
        """Return the samples in the first of these rows [steps, active, B]; gather those of the next steps as well."""
        step_bytes = max(1, now.active * self._size * self._part.sample_bytes)
        steps = 1 if now.active == 1 else max(1, AHEAD // step_bytes)
        self._ready = []
        arrays = self._part.samples(rows if len(rows) <= steps else rows[:steps])
        self._ready = list(zip(*(a.unbind(0) for a in arrays), strict=True))
        self._first = now.step
        return self._ready[0]

    def _drawn(self, now: Now) -> tuple[torch.Tensor, int]:
        """Return the rows [steps, active, B] from this step on, and how many of the first steps have full batches."""
        index = now.step - self._first_drawn
        width = self._rows.shape[1] if self._uneven is None else self._uneven.active
        if not 0 <= index < len(self._rows) or width < now.active:
            affordable = POSITIONS_AHEAD // (now.active * self._size)
            steps = range(now.step, now.step + max(1, min(now.left, affordable)))
            drawn = self._sampler.draw(steps, now.active, self._part.device)
            self._rows = self._part.rows_at(self._ids[: now.active], drawn.positions)
            self._uneven = None if drawn.lengths is None else Uneven(drawn.lengths, self._part.device)
            self._first_drawn, index = now.step, 0
        exact = index == 0 and self._rows.shape[1] == now.active
        rows = self._rows if exact else self._rows[index:, : now.active]
        if self._uneven is None:
            return rows, len(rows)
        if self._uneven.active > now.active:
            self._uneven = self._uneven.only(now.active)
        return rows, self._uneven.full(index, self._size)

    def _smaller(self, rows: torch.Tensor, now: Now) -> tuple[Batch, int]:
        """Return the batch of a step in which some clients have fewer samples, in these rows [active, B]."""
        assert self._uneven is not None and self._weights is None
        groups, owners = self._uneven.groups(now.step - self._first_drawn)
        samples = sum(length * len(where) for length, where in groups)
        if len(groups) == 1:
            arrays = self._part.samples(rows[:, : groups[0][0]])
            return Batch((arrays,), traced=False, fields=self._part.fields), samples
        parts = tuple(self._part.samples(rows.index_select(0, where)[:, :length]) for length, where in groups)
        return Batch(parts, tuple(where for _, where in groups), False, self._part.fields, owners), samples


class Uneven:
    """How many samples clients have in steps that were drawn together: ``lengths`` [steps, active], on the host.

    Which clients have equally many is on the device: moved there once, not in every step.
    """

    def __init__(self, lengths: np.ndarray, device: torch.device) -> None:
        self.active = lengths.shape[1]
        self._lengths, self._device = lengths, device
        self._least = lengths.min(1)
        self._order = torch.from_numpy(np.argsort(lengths, axis=1, kind="stable")).to(device)

    def only(self, active: int) -> Uneven:
        """Return the numbers of the first clients, after others have finished."""
        return Uneven(self._lengths[:, :active], self._device)

    def full(self, step: int, size: int) -> int:
        """Return in how many steps, from this one on, every client has ``size`` samples."""
        less = self._least[step:] < size
        return int(less.argmax()) if less.any() else len(less)

    def groups(self, step: int) -> tuple[list[tuple[int, torch.Tensor]], np.ndarray]:
        """Return the numbers of samples in a step, each with the clients that have so many; and each client's group."""
        numbers, owners, counts = np.unique(self._lengths[step], return_inverse=True, return_counts=True)
        wheres = torch.split(self._order[step], counts.tolist())
        return list(zip(numbers.tolist(), wheres, strict=True)), owners
