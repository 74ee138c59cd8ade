"""The client side, as an algorithm sees it: C clients that advance together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from numbers import Integral
from typing import Any

import numpy as np
import torch

from fedstrata.clients.batches import Batches, Now
from fedstrata.clients.client_side import ClientSide
from fedstrata.clients.memory import Memory
from fedstrata.clients.oracle_calls import OracleCalls
from fedstrata.clients.variables import Variables
from fedstrata.core.clock import Clock
from fedstrata.core.errors import FedstrataError, invalid, listed
from fedstrata.core.schedules import Epochs, EqualSteps, Rate, Steps, rate_at, steps_at
from fedstrata.core.trees import tree_leaves, tree_map
from fedstrata.data.batch import Batch
from fedstrata.data.sampling import steps_per_epoch
from fedstrata.data.tables.preparation import Preparation
from fedstrata.problems.erm import scores


class Client(OracleCalls):
    """C clients that advance together: every vector is [C, d], row c belongs to ``ids[c]``.

    An algorithm's ``@remote`` methods get one of these; they need not know how many clients it stands for.

    ids:     the clients' numbers, also of those that have left the local loop.
    clock:   the time of this step.
    steps:   the local steps of the busiest client in this exchange, counted when a loop ends.
    looping: whether a local loop has begun and not ended.
    """

    def __init__(self, side: ClientSide, ids: np.ndarray, clock: Clock, exchange: int) -> None:
        self.ids = ids
        self.clock = clock
        self.steps = 0
        self.looping = False
        self._side = side
        self._active = len(ids)
        self._last = 0
        self._batches = Batches(side, ids, clock.round, exchange)
        self._reports: dict[str, Callable[[], torch.Tensor]] = {}
        self._memory = Memory(side, ids)
        self._received = frozenset()

    def __len__(self) -> int:
        return self._active

    def receive(self, message: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the server's message with a leading client axis on its tensors, which share the server's memory."""
        tensors = [leaf for leaf in tree_leaves(message) if isinstance(leaf, torch.Tensor)]
        self._received = frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel())
        expanded: tuple[Any, ...] = tree_map(
            lambda t: t.expand(len(self), *t.shape) if isinstance(t, torch.Tensor) else t, message
        )
        return expanded

    @property
    def label(self) -> str:
        """The names of these clients, for error messages."""
        shown = [self._side.data.name_of(c).removeprefix("client ") for c in self.ids[: self._active].tolist()]
        return f"client{'s' if len(shown) > 1 else ''} {listed(shown)}"

    # --- data ---------------------------------------------------------------------------------------------------

    def draw(self, level: int = 0, stream: int = 0, batch_size: int | None = None) -> Batch:
        """Draw this step's batch for level ``level``; 0 is the outer function.

        The batch is a function of seed, client, round, exchange, loop of the exchange, step, level and stream: drawing
        twice gives the same batch, another ``stream`` an independent one. ``batch_size`` overrides the run's; with
        uniform sampling, a smaller batch is the beginning of a larger one. A ``weighted`` sampling adds the samples'
        weights to the batch.
        """
        size = self._side.batch_size if batch_size is None else batch_size
        return self._batches.draw(level, stream, size, self._now)

    def all_data(self, level: int = 0) -> Batch:
        """Return all of each client's data for level ``level`` as one batch."""
        return self._batches.draw(level, 0, None, self._now)

    def draw_all(self, stream: int = 0, batch_size: int | None = None) -> list[Batch]:
        """Draw a batch for each level and, last, one for the outer function: what :meth:`chain` takes."""
        levels = [*range(1, len(self.problem.levels) + 1), 0]
        return [self.draw(k, stream, batch_size) for k in levels]

    def worth(self, batches: int) -> int | None:
        """Return the number of samples in ``batches`` batches, to draw them as one; None if a batch is all the data."""
        return None if self._side.batch_size is None else batches * self._side.batch_size

    @property
    def samples(self) -> int:
        """How many samples have been drawn in this exchange."""
        return self._batches.samples

    @property
    def _now(self) -> Now:
        return Now(self.clock.step, self._active, self._last - self.clock.step)

    @property
    def sizes(self) -> torch.Tensor:
        """How many training samples each client has: [C]."""
        return torch.from_numpy(self._side.data.sizes[self.ids[: self._active]])

    @property
    def class_counts(self) -> torch.Tensor:
        """How many training samples of each class each client has, [C, classes], in the vectors' dtype.

        For tables, no number below the smallest count that leaves a site is exact.
        """
        data, ids = self._side.data, self.ids[: self._active]
        if data.fitted is not None and data.fitted.plan.how.minimum > 1:
            told = [data.class_counts(k, data.fitted.plan.how.minimum) for k in ids.tolist()]
            return torch.from_numpy(np.stack(told)).to(self.problem.x0)
        counts = torch.from_numpy(data.train.class_counts[ids]).to(self.problem.x0)
        return torch.nn.functional.pad(counts, (0, data.classes - counts.shape[1]))

    @property
    def column_statistics(self) -> torch.Tensor:
        """What each client tells of the columns of its table, for their preparation: [C, s] in float64."""
        told = [self._side.data.statistics(k) for k in self.ids[: self._active].tolist()]
        return torch.from_numpy(np.stack(told)).to(self.problem.x0.device)

    @property
    def minimum(self) -> int:
        """The smallest count that a client tells: that of the preparation of its table."""
        fitted = self._side.data.fitted
        return (Preparation() if fitted is None else fitted.plan.how).minimum

    def scored(self, x: torch.Tensor, held_out: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the scores at x [C, d] and the targets of each client's rows: training rows, or held-out ones."""
        data, predict = self._side.data, self.problem.predict
        part = data.client_test if held_out else data.train
        assert predict is not None
        for point, client in zip(x, self.ids[: self._active].tolist(), strict=True):
            rows = None if part is None else part.of_client(client)
            if rows is None or not len(rows[0]):
                yield np.zeros(0), np.zeros(0)
                continue
            passes = zip(*(torch.split(a, 4096) for a in rows[:-1]), strict=True)
            outputs = torch.cat([predict(point, *some) for some in passes])
            yield scores(outputs).double().cpu().numpy(), rows[-1].cpu().numpy()

    # --- time and memory ----------------------------------------------------------------------------------------

    @property
    def first(self) -> bool:
        """Whether no local step of the run has been taken yet."""
        return self.clock.iteration == 0

    def rate(self, rate: Rate, ago: int = 0) -> float:
        """Return the value of a rate (a number or a schedule) at this step, or ``ago`` iterations earlier."""
        return rate_at(rate, self.clock.ago(ago) if ago else self.clock)

    def variables(self, **values: Any) -> Variables:
        """Return tensors [C, ...] as the variables of a local loop; a tuple of tensors becomes a list."""
        return Variables(**values)

    def keep(self, k: Variables | None = None, **values: torch.Tensor) -> None:
        """Keep rows [C, ...] on the clients for a later exchange: all variables of ``k``, and ``values``."""
        self._memory.keep(self._active, {**({} if k is None else vars(k)), **values})

    def recall(self, *names: str, **values: Any) -> Variables:
        """Return variables: what the clients kept under ``names``, and ``values`` as they are.

        Raises an error that names the clients that did not keep one of them, or have lost it.
        """
        return Variables(**{name: self._memory.recall(self._active, name, None) for name in names}, **values)

    def kept(self, name: str, default: torch.Tensor) -> torch.Tensor:
        """Return what each client kept under ``name``; ``default`` [C, ...] for clients that have kept nothing yet."""
        return self._memory.recall(self._active, name, default)

    def stamp(self, **numbers: int) -> None:
        """Keep numbers that say how recent the clients' state is, such as ``round=3``, for :meth:`require`."""
        rows = {_stamp(name): torch.full((self._active, 1), number) for name, number in numbers.items()}
        self._memory.keep(self._active, rows)

    def require(self, **numbers: int) -> None:
        """Raise an error that names the clients with other stamps, or without them: what they kept is out of date."""
        for name, number in numbers.items():
            no_stamp = torch.full((self._active, 1), number - 1)
            stamps = self._memory.recall(self._active, _stamp(name), no_stamp).flatten().cpu().numpy()
            self._memory.refuse(self.ids[: self._active][stamps != number], f"the state of {name} {number}")

    def commit(self, accepted: np.ndarray) -> None:
        """Store what clients kept, for those whose answers the server has accepted; ``accepted`` is a mask [C]."""
        self._memory.commit(accepted)

    def steps_now(self, steps: EqualSteps) -> int:
        """Return the number of local steps in this round."""
        return steps_at(steps, self.clock.round)

    def step_counts(self, steps: Steps) -> np.ndarray:
        """Return how many local steps each client takes: [C]."""
        if not isinstance(steps, Epochs):
            return np.full(self._active, self._equal(steps), dtype=np.int64)
        sizes = self._side.data.train.sizes[self.ids[: self._active]]
        exact = steps.epochs * steps_per_epoch(sizes, self._side.batch_size)
        return np.maximum(1, np.ceil(exact.round(9))).astype(np.int64)

    def report(self, **values: torch.Tensor | Callable[[], torch.Tensor]) -> None:
        """Report values of this local step to diagnostics: tensors [C, ...], or functions that return them.

        A function is called only if its value is needed. Without listeners, reports are ignored.
        """
        if self._side.listeners:
            for name, value in values.items():
                self._reports[name] = value if callable(value) else partial(_itself, value)

    def loop(self, steps: Steps, k: Variables) -> Iterator[int]:
        """Take local steps: the body of the loop runs ``steps`` times for each client.

            for t in client.loop(self.steps, k):
                k.x = k.x - lr * client.grads(k.x, client.draw())

        A client that has taken all its steps leaves the loop, and its rows leave ``k`` until the end, so unequal
        numbers of steps waste no work. Afterwards the clock's step is 0 again; its iteration has advanced by the
        steps, but not if they were given in epochs. A loop must run to its end, and cannot be inside another one.
        """
        if self.looping:
            raise FedstrataError(
                "A local loop cannot be inside another one, or follow one that was left early. Inside a loop, use a "
                "plain Python loop, with a different stream for each of its draws."
            )
        ends = self._ends(steps)
        if not ends:
            return
        self.looping = True
        start, width, self._last = self.clock, self._active, ends[-1][0]
        removed: list[dict[str, Any]] = []
        for last, active in ends:
            if active < self._active:
                removed.append(k._leave(active))
                self._active = active
            while self.clock.step < last:
                yield self.clock.step
                if removed:
                    k._check(active)
                self._tick()
        for rows in reversed(removed):
            k._return(rows)
        # What follows must not depend on how many steps the other clients of the chunk took.
        passed = 0 if isinstance(steps, Epochs) else self.steps_now(steps)
        self.clock = start.after_loop(passed)
        self.steps += self._last
        self._last = 0
        self._batches.end_loop()
        self._active = width
        self.looping = False

    def _equal(self, steps: EqualSteps) -> int:
        number = self.steps_now(steps)
        if not isinstance(number, Integral) or isinstance(number, bool) or number < 0:
            raise invalid("number of local steps", number, "a whole number of at least 0, epochs or an interval")
        return int(number)

    def _ends(self, steps: Steps) -> list[tuple[int, int]]:
        """Return the numbers of steps at which clients leave a loop, increasing, and how many are in it until then."""
        if not isinstance(steps, Epochs):
            number = self._equal(steps)
            return [(number, self._active)] if number else []
        counts = self.step_counts(steps)
        assert (np.diff(counts) <= 0).all(), "an engine orders the clients of a chunk by decreasing steps"
        return [(last, int((counts >= last).sum())) for last in np.unique(counts).tolist()]

    def _tick(self) -> None:
        """End a local step: pass on its reports, advance the clock."""
        for listener in self._side.listeners:
            listener(self.clock, self.ids[: self._active], self._reports)
        self._reports = {}
        self.clock = self.clock.tick()


def _stamp(name: str) -> str:
    """Return the name under which a stamp is kept: no variable can have it."""
    return f"{name}.stamp"


def _itself(value: torch.Tensor) -> torch.Tensor:
    return value
