"""The clients, as an algorithm's round sees them: who takes part, and methods that run work on them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Integral
from typing import Any

import numpy as np
import torch

from fedstrata.clients import reduce
from fedstrata.clients.cohort import Weighting, check_weighting, cohort_size, uniform_weights
from fedstrata.clients.engine import Engine, Reduced, Request, Usage, Work, label_of
from fedstrata.clients.exchange import Exchange, Rejoin
from fedstrata.clients.faults import Fault
from fedstrata.clients.simulated import on_auxiliary
from fedstrata.clients.work import check_pool, is_remote
from fedstrata.core import rng
from fedstrata.core.clock import Clock, Progress
from fedstrata.core.errors import invalid
from fedstrata.core.schedules import EqualSteps, Rate, rate_at, steps_at
from fedstrata.core.trees import tree_map
from fedstrata.problems.levels import level_sizes
from fedstrata.problems.problem import Problem


class Clients:
    """The cohort of a round. ``mean``, ``max``, ``combine``, ``gather`` and ``pool`` run a method on its clients.

    A message and an answer are tensors or nested tuples of tensors; a message may also contain Python numbers, whose
    bytes are not counted. On the client side every tensor has a leading client axis. An answer is an update, a gradient
    or a number, never a point, so that a channel can clip and compress it.

    engine:   runs the work.
    cohort:   the numbers of the clients that take part; a client chosen twice is in it twice.
    sampled:  how many clients take part in a round, unless the algorithm chooses others.
    progress: how far the run is: its round, exchanges and local iterations.
    usage:    what the run has used.
    faults:   the clients that were left out since the list was last emptied.
    unmarked: methods without ``@remote`` that a warning has named; None for no warnings.
    """

    def __init__(
        self, engine: Engine, rounds: int, participation: int | float = 1.0, weighting: Weighting = "uniform"
    ) -> None:
        self.engine = engine
        self.usage = Usage()
        self.faults: list[Fault] = []
        self.progress = Progress(rounds)
        self.sampled = cohort_size(participation, engine.side.data.clients)
        self.weighting = check_weighting(weighting)
        self.unmarked: set[str] | None = None
        self._rejoin: Rejoin | None = None
        self._join(self._everyone)

    # --- who takes part -----------------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        """N, the number of all clients, in the cohort or not."""
        return self.engine.side.data.clients

    @cached_property
    def _everyone(self) -> np.ndarray:
        return np.arange(self.total)

    def __len__(self) -> int:
        return len(self.cohort)

    @property
    def weights(self) -> torch.Tensor:
        """The weight of each client of the cohort in a mean, by the run's weighting: [cohort]."""
        return self._weights(self.weighting).clone()

    @property
    def share(self) -> float:
        """The cohort's share of all clients' weight: |S| / N if the weighting is uniform.

        After an exchange, only the clients that answered it count.
        """
        answered = self.cohort[self._answered]
        if self.weighting == "uniform":
            return len(answered) / self.total
        sizes = self.engine.side.data.sizes
        return float(sizes[answered].sum() / sizes.sum())

    def begin(self, round: int, rejoin: Rejoin | None = None) -> None:
        """Start a round: choose its cohort, and count its exchanges from zero.

        Round -1, before the first one, has every client: the problem and the algorithm may need all of them to start.

        rejoin: lets clients that have lost what they kept rejoin before the first exchange, if it would otherwise have
                no quorum.
        """
        self.progress.begin(round)
        self._rejoin = rejoin
        cohort = self._everyone
        if self.sampled < self.total and round >= 0:
            cohort = rng.choose(rng.key_of(self.engine.side.seed, "cohort", round), self.total, self.sampled)
        self._join(cohort)

    def choose(self, number: int | None = None, probabilities: np.ndarray | torch.Tensor | None = None) -> Clients:
        """Return these clients with another cohort for this round.

        Without ``probabilities``: ``number`` different clients, uniformly. With them: ``number`` draws with
        replacement, client k with probability ``probabilities[k]``; a client drawn twice counts twice.
        """
        number = len(self.cohort) if number is None else number
        most = self.total if probabilities is None else None
        whole = isinstance(number, Integral) and not isinstance(number, bool)
        if not whole or number < 1 or (most is not None and number > most):
            wants = "a whole number of at least 1" + (f" and at most {most}" if most else "")
            raise invalid("number of clients to choose", number, wants)
        key = self._choice("choice")
        if probabilities is None:
            return self.with_cohort(rng.choose(key, self.total, number))
        weights = np.asarray(probabilities, dtype=np.float64)
        if weights.shape != (self.total,) or not (np.isfinite(weights) & (weights >= 0)).all() or not weights.any():
            raise invalid("probabilities", weights.tolist(), f"{self.total} numbers of at least 0, not all 0")
        return self.with_cohort(rng.choose_weighted(key, weights, number), by_weights=True)

    def with_cohort(self, cohort: np.ndarray, by_weights: bool = False) -> Clients:
        """Return these clients with another cohort; ``by_weights``: whether it was drawn by weights."""
        other = copy.copy(self)
        other._join(cohort, by_weights)
        return other

    def integer(self, low: int, high: int) -> int:
        """Return a random whole number from ``low`` to ``high``, both included, for the server in this round."""
        key = self._choice("integer")
        return low + int(rng.positions(key, np.zeros(1), np.zeros(1), 1, np.array([high - low + 1]))[0, 0])

    def _choice(self, kind: str) -> tuple[int, int]:
        self.progress.choices += 1
        return rng.key_of(self.engine.side.seed, kind, self.progress.round, self.progress.choices - 1)

    def _join(self, cohort: np.ndarray, by_weights: bool = False) -> None:
        """Make these clients the cohort."""
        self.cohort = cohort
        self._answered = np.ones(len(cohort), dtype=bool)
        self._by_weights = by_weights
        self._noisy = 0

    # --- the run ------------------------------------------------------------------------------------------------

    @property
    def problem(self) -> Problem:
        """The problem to solve."""
        return self.engine.side.oracles.problem

    @property
    def classes(self) -> int:
        """How many classes the data have; 0 for regression."""
        return self.engine.side.data.classes

    @property
    def clock(self) -> Clock:
        """The time at the start of this round."""
        return self.progress.round_start

    def rate(self, rate: Rate, after: int = 0) -> float:
        """Return the value of a rate (a number or a schedule) at the start of this round, or ``after`` local steps."""
        return rate_at(rate, self.clock.after(after))

    def steps_now(self, steps: EqualSteps) -> int:
        """Return the number of local steps in this round."""
        return steps_at(steps, self.progress.round)

    def project_y(self, y: torch.Tensor) -> torch.Tensor:
        """Return the dual projected onto its set."""
        return self.problem.projected(y)

    @cached_property
    def inner_sizes(self) -> tuple[int, ...]:
        """The lengths of the levels' values, r_1..r_K."""
        return tuple(level_sizes(self.problem, self.engine.side.data))

    # --- exchanges ----------------------------------------------------------------------------------------------

    def mean(self, work: Work, *message: Any, weighting: Weighting | None = None) -> Any:
        """Run ``work(client, *message)`` on every client of the cohort; return the mean of their answers.

        The mean is uniform or weighted by the clients' numbers of samples; ``weighting`` overrides that of the run.
        """
        weighting = self.weighting if weighting is None else check_weighting(weighting)
        return self._reduce(work, message, weighting, ("mean",))

    def max(self, work: Work, *message: Any) -> Any:
        """Run ``work(client, *message)`` on every client of the cohort; return the elementwise maximum."""
        return self._reduce(work, message, self.weighting, ("max",))

    def combine(self, how: Sequence[str], work: Work, *message: Any) -> Any:
        """Run ``work(client, *message)``; return the mean or the maximum of each tensor of the answers.

        ``how`` has a "mean" or "max" for each tensor, in order.
        """
        if isinstance(how, str) or not how or any(word not in ("mean", "max") for word in how):
            raise invalid("how of combine", how, f"a 'mean' or 'max' for each tensor that {label_of(work)} returns")
        return self._reduce(work, message, self.weighting, tuple(how))

    def gather(self, work: Work, *message: Any) -> Any:
        """Run ``work(client, *message)``; return every client's answer, in the order of the cohort: [cohort, ...].

        The row of a client that was left out is the mean of the others.
        """
        rows = self._rows(work, message)
        if not self._answered.all():
            for leaf in rows.leaves or ():
                answered = torch.from_numpy(self._answered).to(leaf.device)
                others = leaf[answered]
                leaf[~answered] = (others if leaf.is_floating_point() else others.double()).mean(0).to(leaf)
        return rows.tree

    def pool(self, work: Work, *message: Any, limit: int = 1 << 20) -> Any:
        """Run ``work(client, *message)``, which returns collections [C, n, ...]; return them pooled: [cohort * n, ...].

        The method must be marked ``@remote(pool=True)``. A client may return at most ``limit`` numbers. Clients that
        were left out add nothing. A node of a federation may refuse to answer, and a channel that changes answers is
        refused.
        """
        rows = self._rows(work, message, pool=limit)
        answered = torch.from_numpy(self._answered)
        return tree_map(lambda leaf: leaf[answered.to(leaf.device)].flatten(0, 1), rows.tree)

    def restore(self, work: Work, *message: Any) -> None:
        """Run ``work(client, *message)`` on clients that have lost what they kept, so that they keep it again.

        Their answers are dropped, and no quorum is needed: a client that does not answer still lacks what it lost.
        """
        self._finish(reduce.nothing(self._exchange(work, message, rejoins=True)))

    def on_server(self, work: Work, *message: Any) -> Any:
        """Run ``work`` on the server's auxiliary set, with each class as a client: [classes, ...].

        Nothing is sent; the samples are counted.
        """
        server = Clients(on_auxiliary(self.engine.side), self.progress.rounds)
        server.progress = replace(self.progress)
        answer = server.gather(work, *message)
        self.progress.exchanges = server.progress.exchanges
        self.usage.samples += server.usage.samples
        return answer

    def _weights(self, weighting: Weighting) -> torch.Tensor:
        if weighting == "uniform":
            return uniform_weights(len(self.cohort))
        sizes = torch.from_numpy(self.engine.side.data.sizes[self.cohort]).double()
        return sizes / sizes.sum()

    def _exchange(
        self,
        work: Work,
        message: tuple[Any, ...],
        rejoins: bool = False,
        pool: int | None = None,
        weighting: Weighting | None = None,
    ) -> Exchange:
        places, answered = np.arange(len(self.cohort)), np.zeros(len(self.cohort), dtype=bool)
        clock, exchange = self.progress.now, self.progress.exchanges
        request = Request(work, message, clock, exchange, self.cohort, places, answered, 0, rejoins, pool, weighting)
        request.check_message()
        check_pool(request)
        self.progress.exchanges += 1
        if self.unmarked is not None and not (is_remote(work) or request.query or request.label in self.unmarked):
            self.unmarked.add(request.label)
            hint = "mark it with @fs.remote, or nodes will refuse to run it"
            warnings.warn(f"{request.label} runs on clients: {hint}.", stacklevel=4)
        rejoin, self._rejoin = None if exchange else self._rejoin, None
        return Exchange(self.engine, request, self.usage, self.faults, rejoin)

    def _finish(self, answers: Reduced) -> Reduced:
        """Count what an exchange used, and remember who answered."""
        self._answered = answers.answered
        self.usage.bytes_up += answers.used.bytes_up
        self.usage.samples += answers.used.samples
        self.usage.steps += answers.used.steps
        self.progress.iteration += answers.used.steps
        return answers

    def _rows(self, work: Work, message: tuple[Any, ...], pool: int | None = None) -> Reduced:
        """Make one exchange; return every client's answer."""
        exchange = self._exchange(work, message, pool=pool)
        reduce.check_rows(self.engine.channel, exchange.request)
        return self._finish(reduce.rows(exchange))

    def _reduce(self, work: Work, message: tuple[Any, ...], weighting: Weighting, how: tuple[str, ...]) -> Any:
        """Make one exchange, and reduce each tensor of the answers as ``how`` and the channel say."""
        means = weighting if set(how) == {"mean"} else None
        exchange, channel = self._exchange(work, message, weighting=means), self.engine.channel
        weights = self._weights(weighting)
        reduce.check_means(channel, exchange.request, how, weighting, self._by_weights)
        answers = self._finish(reduce.by_channel(exchange, weights, how))
        if reduce.needs_noise(channel, answers):
            self._noisy += 1
            self.engine.ledger.add(self._noisy, len(self.cohort))
            answers = reduce.with_noise(exchange, answers, weights)
        return answers.tree
