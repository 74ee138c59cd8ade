"""What an algorithm sees of its clients' side: C clients that advance together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from fedstrata.clients.state import ClientState
from fedstrata.core.errors import InputError
from fedstrata.core.schedules import Clock, Epochs, EqualSteps, Rate, Steps, rate_at, steps_at
from fedstrata.data.batch import NO_DATA, Batch
from fedstrata.data.federated import FederatedData
from fedstrata.data.sampling import Everything, Sampling, steps_per_epoch
from fedstrata.problems.oracles import Chain, Oracles, Tensors
from fedstrata.problems.problem import Problem

Listener = Callable[[Clock, np.ndarray, dict[str, Callable[[], torch.Tensor]]], None]


@dataclass(frozen=True)
class Setting:
    """What the clients' side of a run knows: the problem, the data that are here, and how batches are drawn.

    ``listeners`` are called after every local step with the time, the clients, and what the step reported. With
    ``deferred`` what clients keep is theirs only once the server has taken their answers: see :meth:`Client.commit`.
    """

    oracles: Oracles
    data: FederatedData
    sampling: type[Sampling]
    batch_size: int | None
    seed: int
    state: ClientState
    listeners: tuple[Listener, ...] = ()
    deferred: bool = False


class Client:
    """C clients that advance together: every vector is [C, d], row c belongs to ``ids[c]``.

    An algorithm's local method gets one of these and never learns how many clients it serves.
    """

    def __init__(self, setting: Setting, ids: np.ndarray, clock: Clock, exchange: int) -> None:
        self.ids = ids
        self.clock = clock
        self.samples = 0
        self.steps = 0
        self._setting = setting
        self._phase = 0
        self._exchange = exchange
        self._active = len(ids)
        self._samplers: dict[tuple[int, int, int], Sampling] = {}
        self._everything: dict[int, Batch] = {}
        self._reports: dict[str, Callable[[], torch.Tensor]] = {}
        self._kept: list[tuple[int, dict[str, torch.Tensor]]] = []

    def __len__(self) -> int:
        return self._active

    @property
    def problem(self) -> Problem:
        """The problem that is solved."""
        return self._setting.oracles.problem

    # --- data ---------------------------------------------------------------------------------------------------

    def draw(self, level: int = 0, stream: int = 0, batch_size: int | None = None) -> Batch:
        """Draw a batch for level ``level`` (0 is the outer function) in this step.

        The batch is named by (seed, client, round, exchange, step, level, stream), and by how many times ``repeat`` was
        called before: asking twice gives the same one, another ``stream`` an independent one. ``batch_size`` overrides
        the run's; a smaller batch is the beginning of a larger one of the same name. A ``weighted`` sampling adds the
        samples' weights to the batch.
        """
        if level == 0 and not self.problem.outer_draws:
            return self._no_data()
        size = self._setting.batch_size if batch_size is None else batch_size
        if size is None:
            return self.all_data(level)
        name = (level, stream, size)
        sampler = self._samplers.get(name)
        if sampler is None:
            s = self._setting
            names: tuple[int | str, ...] = (s.seed, "batch", self.clock.round, self._exchange, level, stream)
            names += ("after", self._phase) if self._phase else ()
            part = s.data.part(level)
            counts = part.class_counts[self.ids] if s.sampling.weighted else None
            sampler = self._samplers[name] = s.sampling(names, self.ids, part.sizes[self.ids], size, counts)
        positions, lengths = sampler.positions(self.clock.step, self._active)
        self.samples += positions.size if lengths is None else int(lengths.sum())
        return self._gather(level, positions, lengths, positions.shape[1] == size, sampler.weights)

    def all_data(self, level: int = 0) -> Batch:
        """Return each client's whole data for level ``level`` as one batch."""
        if level == 0 and not self.problem.outer_draws:
            return self._no_data()
        part = self._setting.data.part(level)
        ids = self.ids[: self._active]
        batch = self._everything.get(level)
        if batch is None or batch.clients != self._active:
            everything = Everything((), ids, part.sizes[ids], 0).positions(0, self._active)
            batch = self._everything[level] = self._gather(level, *everything, bool(np.ptp(part.sizes) == 0))
        self.samples += int(part.sizes[ids].sum())
        return batch

    def _no_data(self) -> Batch:
        return NO_DATA.numbered(self.ids[: self._active]) if self.problem.numbered else NO_DATA

    def _gather(
        self,
        level: int,
        positions: np.ndarray,
        lengths: np.ndarray | None,
        usual: bool,
        weights: np.ndarray | None = None,
    ) -> Batch:
        traced = usual and self._active == len(self.ids)
        ids = self.ids[: self._active]
        batch = self._setting.data.part(level).gather(ids, positions, lengths, traced)
        if weights is not None:
            x0 = self.problem.x0
            batch = batch.weighted(torch.from_numpy(weights[: self._active]).to(device=x0.device, dtype=x0.dtype))
        return batch.numbered(ids) if level == 0 and self.problem.numbered else batch

    @property
    def sizes(self) -> torch.Tensor:
        """How many training samples each client has: [C]."""
        return torch.from_numpy(self._setting.data.sizes[self.ids[: self._active]])

    @property
    def class_counts(self) -> torch.Tensor:
        """How many training samples of each class each client has, [C, classes], in the vectors' dtype."""
        data = self._setting.data
        found = torch.from_numpy(data.train.class_counts[self.ids[: self._active]]).to(self.problem.x0)
        return torch.nn.functional.pad(found, (0, data.classes - found.shape[1]))

    # --- oracles ------------------------------------------------------------------------------------------------

    def loss(self, x: torch.Tensor, batch: Batch, y: torch.Tensor | None = None) -> torch.Tensor:
        """Return f for each client, [C]: the loss itself when there are no levels."""
        return self._setting.oracles.outer(x, y, batch)

    def grads(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the gradient of the loss, [C, d], of a problem without levels or dual."""
        return self._setting.oracles.outer_grads(x, None, batch)[0]

    def f_grads(self, u: torch.Tensor, batch: Batch, y: torch.Tensor | None = None) -> Tensors:
        """Return the gradients of the outer function in u, and in y when there is a dual."""
        return self._setting.oracles.outer_grads(u, y, batch)

    def best_y(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the dual, not projected, that maximises the outer function at x, [C, p]; of problems that know it."""
        return self._setting.oracles.best_y(x, batch)

    def g(self, k: int, u: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the value of level k (from 1) at u, [C, r]."""
        return self._setting.oracles.level(k, u, batch)

    def g_vjp(self, k: int, u: torch.Tensor, cotangent: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the transposed Jacobian of level k (from 1) at u times ``cotangent``, [C, d]."""
        return self._setting.oracles.level_vjp(k, u, cotangent, batch)

    def g_jacobian(self, k: int, u: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the value of level k (from 1) at u, [C, r], and its Jacobian, [C, r, d]."""
        return self._setting.oracles.level_jacobian(k, u, batch)

    def chain(
        self,
        x: torch.Tensor,
        batches: Sequence[Batch],
        y: torch.Tensor | None = None,
        offsets: Sequence[torch.Tensor] | None = None,
        weight: float = 1.0,
    ) -> Chain:
        """Go through all layers in one pass, u_k = offset_k + weight * g_k(u_{k-1}), then f, and back again.

        ``batches`` has one for each level and, last, one for the outer function. Returns the gradient
        J_1^T ... J_K^T grad f (the J without the weight), the levels' values g_k, and the gradients of f.
        """
        return self._setting.oracles.chain(x, y, batches, offsets, weight)

    def draw_all(self, stream: int = 0, batch_size: int | None = None) -> list[Batch]:
        """Draw a batch for each level and, last, one for the outer function: what :meth:`chain` takes."""
        levels = [*range(1, len(self.problem.levels) + 1), 0]
        return [self.draw(k, stream, batch_size) for k in levels]

    def worth(self, batches: int) -> int | None:
        """Return the samples of so many batches, to draw at once; None where a batch is all the data."""
        return None if self._setting.batch_size is None else batches * self._setting.batch_size

    def project_y(self, y: torch.Tensor) -> torch.Tensor:
        """Return the dual projected onto its set."""
        return self.problem.projected(y)

    # --- time and memory ----------------------------------------------------------------------------------------

    def rate(self, rate: Rate, ago: int = 0) -> float:
        """Return a rate, number or schedule, at this step, or so many iterations ago."""
        now = self.clock
        return rate_at(rate, Clock(now.round, now.rounds, now.step, now.iteration - ago) if ago else now)

    def keep(self, **values: torch.Tensor) -> None:
        """Keep rows [C, ...] on the clients until the next call or round."""
        if self._setting.deferred:
            self._kept.append((self._active, values))
        else:
            self._setting.state.keep(self.ids[: self._active], values)

    def recall(self, name: str, default: torch.Tensor) -> torch.Tensor:
        """Return what each client kept under ``name``; ``default`` [C, ...] for clients that kept nothing yet."""
        found = self._setting.state.recall(self.ids[: self._active], name, default)
        for active, values in self._kept:
            if name in values:
                rows = min(active, self._active)
                found = torch.cat([values[name][:rows], found[rows:]])
        return found

    def commit(self, taken: np.ndarray) -> None:
        """Make theirs what those clients kept whose answers the server has taken: a mask [C].

        Otherwise a client that was left out would go on from something that the server knows nothing of.
        """
        for active, values in self._kept:
            rows = np.flatnonzero(taken[:active])
            if len(rows):
                index = torch.from_numpy(rows)
                kept = {name: value[index.to(value.device)] for name, value in values.items()}
                self._setting.state.keep(self.ids[rows], kept)
        self._kept = []

    def steps_now(self, steps: EqualSteps) -> int:
        """Return the local steps of this round: a number, or what an interval has grown to."""
        return steps_at(steps, max(0, self.clock.round))

    def report(self, **values: torch.Tensor | Callable[[], torch.Tensor]) -> None:
        """Tell diagnostics what is inside this local step: tensors [C, ...], or functions that return them.

        A function is called only when its value is wanted. When nobody listens, nothing happens.
        """
        if self._setting.listeners:
            for name, value in values.items():
                self._reports[name] = value if callable(value) else partial(_itself, value)

    def step_counts(self, steps: Steps) -> np.ndarray:
        """Return how many local steps each client takes: [C]."""
        if not isinstance(steps, Epochs):
            return np.full(self._active, self.steps_now(steps), dtype=np.int64)
        sizes = self._setting.data.train.sizes[self.ids[: self._active]]
        exact = steps.epochs * steps_per_epoch(sizes, self._setting.batch_size)
        return np.ceil(exact.round(9)).astype(np.int64)

    def repeat(self, steps: Steps, step: Callable[..., Any], *state: Any) -> Any:
        """Take local steps: ``state = step(client, *state)``, as often as ``steps`` says for each client.

        What ``step`` returns replaces its first arguments; the others stay as they are. Returns what the last step
        returned. A client that has taken all its steps leaves the computation, so unequal numbers waste no work.
        Afterwards the clock's step is 0 again, and its iteration has moved on by a number of steps, not by epochs.
        """
        counts = self.step_counts(steps)
        start, width = self.clock, self._active
        if (np.diff(counts) > 0).any():
            raise InputError("Clients of a chunk must stand in order of decreasing steps.")
        changed = 0
        single = False
        finished: list[tuple[Any, ...]] = []
        for last in np.unique(counts):
            active = int((counts >= last).sum())
            if active < self._active:
                finished.append(_rows(state[:changed], slice(active, None)))
                state = _rows(state, slice(active))
                self._active = active
            while self.clock.step < last:
                out = step(self, *state)
                single = not isinstance(out, tuple)
                out = (out,) if single else out
                changed = len(out)
                state = out + state[changed:]
                now = self.clock
                for listener in self._setting.listeners:
                    listener(now, self.ids[: self._active], self._reports)
                self._reports = {}
                self.clock = Clock(now.round, now.rounds, now.step + 1, now.iteration + 1)
        # What follows must not depend on how long the other clients of the chunk went on.
        passed = 0 if isinstance(steps, Epochs) else self.steps_now(steps)
        self.clock = Clock(start.round, start.rounds, 0, start.iteration + passed)
        self.steps += int(counts.max())
        self._phase += 1
        self._samplers = {}
        self._active = width
        result = state[:changed]
        for rest in reversed(finished):
            result = tree_map(lambda a, b: torch.cat([a, b]) if isinstance(a, torch.Tensor) else a, result, rest)
        return result[0] if single else result


def _itself(value: torch.Tensor) -> torch.Tensor:
    return value


def _rows(state: tuple[Any, ...], rows: slice) -> tuple[Any, ...]:
    """Return some clients' rows of every tensor; plain numbers stay as they are."""
    out: tuple[Any, ...] = tree_map(lambda s: s[rows] if isinstance(s, torch.Tensor) else s, state)
    return out
