"""What an algorithm sees of its clients' side: C clients that advance together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from fedstrata.clients.memory import Memory
from fedstrata.clients.setting import Setting
from fedstrata.clients.variables import Variables
from fedstrata.core.errors import FedstrataError, InputError
from fedstrata.core.schedules import Clock, Epochs, EqualSteps, Rate, Steps, rate_at, steps_at
from fedstrata.data.batch import NO_DATA, Batch
from fedstrata.data.sampling import Everything, Sampling, steps_per_epoch
from fedstrata.problems.oracles import Chain, Tensors
from fedstrata.problems.problem import Problem


class Client:
    """C clients that advance together: every vector is [C, d], row c belongs to ``ids[c]``.

    An algorithm's local method gets one of these and never learns how many clients it serves.
    """

    def __init__(self, setting: Setting, ids: np.ndarray, clock: Clock, exchange: int) -> None:
        self.ids = ids
        self.clock = clock
        self.samples = 0
        self.steps = 0
        self.looping = False
        self._setting = setting
        self._phase = 0
        self._exchange = exchange
        self._active = len(ids)
        self._samplers: dict[tuple[int, int, int], Sampling] = {}
        self._everything: dict[int, Batch] = {}
        self._reports: dict[str, Callable[[], torch.Tensor]] = {}
        self._memory = Memory(setting, ids)

    def __len__(self) -> int:
        return self._active

    @property
    def label(self) -> str:
        """Which clients these are, for error messages."""
        names = self._setting.data.client_names
        known = [names[c] if names else str(c) for c in self.ids[: self._active].tolist()]
        more = f" and {len(known) - 8} more" if len(known) > 8 else ""
        return f"client{'s' if len(known) > 1 else ''} {', '.join(known[:8])}{more}"

    @property
    def problem(self) -> Problem:
        """The problem to solve."""
        return self._setting.oracles.problem

    # --- data ---------------------------------------------------------------------------------------------------

    def draw(self, level: int = 0, stream: int = 0, batch_size: int | None = None) -> Batch:
        """Draw a batch for level ``level`` (0 is the outer function) in this step.

        The batch is named by (seed, client, round, exchange, step, level, stream), and by how many loops came before
        in the exchange: asking twice gives the same one, another ``stream`` an independent one. ``batch_size``
        overrides the run's; a smaller batch is the beginning of a larger one of the same name. A ``weighted`` sampling
        adds the samples' weights to the batch.
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
        """Return the gradients of the outer function in u and, when y is passed, in y.

        A problem without a dual takes a y of length 0, and returns one.
        """
        grads = self._setting.oracles.outer_grads(u, y, batch)
        return grads if y is None or self.problem.dual else (*grads, y)

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
        chain = self._setting.oracles.chain(x, y, batches, offsets, weight)
        return chain if y is None or self.problem.dual else chain._replace(outer_grads=(*chain.outer_grads, y))

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

    @property
    def first(self) -> bool:
        """Whether nobody has taken a local step yet: the first exchange of a run that takes any."""
        return self.clock.iteration == 0

    def rate(self, rate: Rate, ago: int = 0) -> float:
        """Return a rate, number or schedule, at this step, or so many iterations ago."""
        now = self.clock
        return rate_at(rate, Clock(now.round, now.rounds, now.step, now.iteration - ago) if ago else now)

    def variables(self, **values: Any) -> Variables:
        """Return these tensors [C, ...] as the variables of a local loop; a tuple of tensors becomes a list."""
        return Variables(**values)

    def keep(self, k: Variables | None = None, **values: torch.Tensor) -> None:
        """Keep rows [C, ...] on the clients until a later exchange: all variables of ``k``, and ``values``."""
        self._memory.keep(self._active, {**({} if k is None else vars(k)), **values})

    def recall(self, *names: str, **values: Any) -> Variables:
        """Return variables: those that every client kept under ``names``, and ``values`` as they are.

        A client that has not kept one of them, or has lost it, is an error that names the client.
        """
        return Variables(**{name: self._memory.recall(self._active, name, None) for name in names}, **values)

    def kept(self, name: str, default: torch.Tensor) -> torch.Tensor:
        """Return what each client kept under ``name``; ``default`` [C, ...] for clients that kept nothing yet."""
        return self._memory.recall(self._active, name, default)

    def commit(self, taken: np.ndarray) -> None:
        """Store what those clients kept whose answers the server has taken: a mask [C]."""
        self._memory.commit(taken)

    def steps_now(self, steps: EqualSteps) -> int:
        """Return the local steps of this round: a number, or what an interval has grown to."""
        return steps_at(steps, max(0, self.clock.round))

    def step_counts(self, steps: Steps) -> np.ndarray:
        """Return how many local steps each client takes: [C]."""
        if not isinstance(steps, Epochs):
            return np.full(self._active, self.steps_now(steps), dtype=np.int64)
        sizes = self._setting.data.train.sizes[self.ids[: self._active]]
        exact = steps.epochs * steps_per_epoch(sizes, self._setting.batch_size)
        return np.ceil(exact.round(9)).astype(np.int64)

    def report(self, **values: torch.Tensor | Callable[[], torch.Tensor]) -> None:
        """Pass what is inside this local step to diagnostics: tensors [C, ...], or functions that return them.

        A function is called only when its value is wanted. Without listeners, nothing happens.
        """
        if self._setting.listeners:
            for name, value in values.items():
                self._reports[name] = value if callable(value) else partial(_itself, value)

    def loop(self, steps: Steps, k: Variables) -> Iterator[int]:
        """Take local steps: the body of the loop runs as often as ``steps`` says for each client.

            for t in client.loop(self.steps, k):
                k.x = k.x - lr * client.grads(k.x, client.draw())

        A client that has done its steps leaves the loop, and its rows leave ``k`` until the end, so unequal numbers
        waste no work. Afterwards the clock's step is 0 again, and its iteration has advanced by a number of steps, not
        by epochs. A loop must run to its end, and cannot be inside another one.
        """
        if self.looping:
            raise FedstrataError(
                "A local loop cannot be inside another one, or follow one that was left early. Inside, use a plain "
                "loop, with streams for what its steps draw."
            )
        counts = self.step_counts(steps)
        if (np.diff(counts) > 0).any():
            raise InputError("Clients of a chunk must be in order of decreasing steps.")
        if not counts.any():
            return
        self.looping = True
        start, width = self.clock, self._active
        left: list[dict[str, Any]] = []
        for last in np.unique(counts):
            active = int((counts >= last).sum())
            if active < self._active:
                left.append(k._leave(active))
                self._active = active
            while self.clock.step < last:
                yield self.clock.step
                if left:
                    k._check(active)
                self._tick()
        for rows in reversed(left):
            k._return(rows)
        # What follows must not depend on how many steps the other clients of the chunk took.
        passed = 0 if isinstance(steps, Epochs) else self.steps_now(steps)
        self.clock = Clock(start.round, start.rounds, 0, start.iteration + passed)
        self.steps += int(counts.max())
        self._phase += 1
        self._samplers = {}
        self._active = width
        self.looping = False

    def _tick(self) -> None:
        """End a local step: pass on its reports, advance the clock."""
        now = self.clock
        for listener in self._setting.listeners:
            listener(now, self.ids[: self._active], self._reports)
        self._reports = {}
        self.clock = Clock(now.round, now.rounds, now.step + 1, now.iteration + 1)


def _itself(value: torch.Tensor) -> torch.Tensor:
    return value
