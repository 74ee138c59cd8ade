"""The interface an algorithm's round is written against: who takes part, and a few verbs."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from fedstrata.clients.channel import PLAIN, Changes, Channel, factors, named, noise, robust, words_of
from fedstrata.clients.client import Setting
from fedstrata.clients.faults import Fault, Faults, QuorumError, told
from fedstrata.clients.state import ClientState
from fedstrata.core import rng
from fedstrata.core.errors import FedstrataError, InputError, invalid, is_number
from fedstrata.core.schedules import Clock, EqualSteps, Rate, rate_at, steps_at
from fedstrata.problems.oracles import Oracles
from fedstrata.problems.problem import Problem
from fedstrata.problems.queries import is_question

Work = Callable[..., Any]
Weighting = Literal["uniform", "samples"]


@dataclass
class Counts:
    """What a run has used so far: local steps (of the busiest client), samples drawn, bytes sent up and down.

    failed:   how often a client was left out of an exchange.
    releases: what noise has to cover, as :func:`fedstrata.clients.privacy.epsilon` takes it.
    """

    steps: int = 0
    samples: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    failed: int = 0
    releases: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Terms:
    """On what terms clients take part in a run; the same for every engine.

    rounds:        how many there are.
    participation: the share (float) or number (int) of clients that take part in a round.
    weighting:     how the mean over clients weighs them.
    channel:       what answers go through.
    faults:        how to deal with clients that fail; None looks for none.
    """

    rounds: int
    participation: int | float = 1.0
    weighting: Weighting = "uniform"
    channel: Channel = PLAIN
    faults: Faults | None = None


@dataclass(frozen=True)
class Answer:
    """What some clients of the cohort answered: ``value`` holds tensors [C, ...], a row for each of ``places``.

    sent: the bytes that were sent, where they are not those of the value.
    """

    places: np.ndarray
    value: Any
    samples: int
    steps: int
    sent: int | None = None


class Clients(ABC):
    """The cohort of a round. ``mean``, ``max``, ``combine`` and ``gather`` run a method on every client of it.

    A message and an answer are tensors or nested tuples of tensors; plain Python numbers may go down too and count no
    bytes. On the client side every tensor has a leading client axis.
    """

    def __init__(self, setting: Setting, terms: Terms) -> None:
        self.counts = Counts()
        self.channel = terms.channel
        self.faults: list[Fault] = []
        self._policy = terms.faults
        self._setting = replace(setting, deferred=terms.faults is not None or terms.channel.compress != "none")
        self._rounds = terms.rounds
        self._weighting = check_weighting(terms.weighting)
        self.sampled = cohort_size(terms.participation, setting.data.clients)
        self._round = self._start = 0
        self._exchange = [0]
        self._choices = [0]
        self.cohort: np.ndarray = np.arange(setting.data.clients)
        self._answered = np.ones(self.total, dtype=bool)
        self._noisy = 0
        self._drawn_by = "uniform"

    chunk = 1
    """How many clients advance together."""

    learned: torch.Tensor | None = None
    """What the problem asked the clients before the first round, if anything."""

    mine: np.ndarray | None = None
    """Which clients' state is kept in this process, as a mask; None for all."""

    def note(self, chunk: int | str) -> str:
        """Say how the clients of a cohort advance, for a line of progress; ``chunk`` is what the user set."""
        return f"{min(self.chunk, self.sampled)} at a time (chunk = {chunk})"

    def saved(self, round: int) -> None:  # noqa: B027 (most engines do not care)
        """Know that a checkpoint was written after so many rounds: nobody will go back behind it."""

    # --- who takes part -----------------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        """N, the number of clients there are, in the cohort or not."""
        return self._setting.data.clients

    def __len__(self) -> int:
        return len(self.cohort)

    @property
    def weights(self) -> torch.Tensor:
        """What each client of the cohort weighs in a mean, uniformly or by samples as the run says: [cohort]."""
        return self._weights(self._weighting)

    @property
    def share(self) -> float:
        """The cohort's share of all clients' weight: |S| / N when the weighting is uniform.

        After an exchange those clients count that answered it.
        """
        there = self.cohort[self._answered]
        if self._weighting == "uniform":
            return len(there) / self.total
        sizes = self._setting.data.sizes
        return float(sizes[there].sum() / sizes.sum())

    def begin(self, round: int) -> None:
        """Start a round: name its cohort, and count its exchanges from zero.

        Round -1 comes before the first one and has every client: the problem and the algorithm prepare themselves.
        """
        self._round, self._start = round, self.counts.steps
        self._exchange, self._choices = [0], [0]
        self._noisy = 0
        self.cohort = np.arange(self.total)
        if self.sampled < self.total and round >= 0:
            self.cohort = rng.choose(rng.key_of(self._setting.seed, "cohort", round), self.total, self.sampled)
        self._answered = np.ones(len(self.cohort), dtype=bool)

    def choose(self, number: int | None = None, probabilities: np.ndarray | torch.Tensor | None = None) -> Clients:
        """Return these clients with another cohort for this round.

        Without ``probabilities``: ``number`` different clients, uniformly. With them: ``number`` draws with
        replacement, client k with probability ``probabilities[k]``; a client drawn twice counts twice.
        """
        number = len(self.cohort) if number is None else number
        most = self.total if probabilities is None else None
        if number < 1 or (most is not None and number > most):
            raise invalid("number of clients to choose", number, "at least 1" + (f", at most {most}" if most else ""))
        key = rng.key_of(self._setting.seed, "choice", self._round, self._choices[0])
        self._choices[0] += 1
        other = copy.copy(self)
        other._noisy = 0
        if probabilities is None:
            other.cohort = rng.choose(key, self.total, number)
            other._drawn_by = "uniform"
        else:
            weights = np.asarray(probabilities, dtype=np.float64)
            if weights.shape != (self.total,) or not (np.isfinite(weights) & (weights >= 0)).all() or not weights.any():
                wants = f"{self.total} numbers of at least 0, not all 0"
                raise invalid("probabilities", weights.tolist(), wants)
            other.cohort = rng.choose_weighted(key, weights, number)
            other._drawn_by = "weights"
        other._answered = np.ones(len(other.cohort), dtype=bool)
        return other

    def integer(self, low: int, high: int) -> int:
        """Return a random whole number from ``low`` to ``high``, both included, for the server in this round."""
        key = rng.key_of(self._setting.seed, "integer", self._round, self._choices[0])
        self._choices[0] += 1
        return low + int(rng.positions(key, np.zeros(1), np.zeros(1), 1, np.array([high - low + 1]))[0, 0])

    def rate(self, rate: Rate, after: int = 0) -> float:
        """Return a rate, number or schedule, at the start of this round, or after so many of its local steps."""
        return rate_at(rate, Clock(max(0, self._round), self._rounds, after, self._start + after))

    def steps_now(self, steps: EqualSteps) -> int:
        """Return the local steps of this round: a number, or what an interval has grown to."""
        return steps_at(steps, max(0, self._round))

    def adopt(self, problem: Problem) -> None:
        """Go on with another problem: the one that came out of its preparation, or the one of this round."""
        self._setting = replace(self._setting, oracles=Oracles(problem))

    @property
    def problem(self) -> Problem:
        """The problem that is solved."""
        return self._setting.oracles.problem

    def on_server(self, work: Work, *message: Any) -> Any:
        """Run ``work`` on the server's auxiliary set, each class of it in the place of a client.

        Returns what was returned for each class, [classes, ...]. Nothing is sent; the samples count.
        """
        from fedstrata.clients.chunk import choose_chunk
        from fedstrata.clients.simulated import SimulatedClients

        data, problem = self._setting.data, self.problem
        if data.auxiliary is None:
            raise InputError(f"There are no samples on the server (data {data.name!r}).")
        there = replace(data, train=data.auxiliary, support=None, auxiliary=None)
        state = ClientState(there.clients, 0, None)
        chunk = choose_chunk("auto", problem, there, self._setting.batch_size, problem.x0.device)
        setting = replace(self._setting, data=there, state=state, listeners=())
        server = SimulatedClients(setting, Terms(self._rounds), chunk)
        server._round, server._start, server._exchange = self._round, self._start, self._exchange
        server.counts.steps = self.counts.steps
        answer = server.gather(work, *message)
        self.counts.samples += server.counts.samples
        return answer

    @cached_property
    def inner_sizes(self) -> tuple[int, ...]:
        """How many numbers each level gives, r_1..r_K."""
        u, sizes = self.problem.x0.unsqueeze(0), []
        first, twice = np.zeros(1, dtype=np.int64), np.zeros((1, 2), dtype=np.int64)
        for k in range(1, len(self.problem.levels) + 1):
            u = self._setting.oracles.level(k, u, self._setting.data.part(k).gather(first, twice, None, False))
            if u.dim() != 2:
                what = f"value of level {k} of {self.problem.name}"
                raise invalid(what, f"shape {tuple(u.shape[1:])}", "a vector (1-d)")
            sizes.append(u.shape[1])
        return tuple(sizes)

    @property
    def classes(self) -> int:
        """How many classes the data have; 0 for regression."""
        return self._setting.data.classes

    @property
    def clock(self) -> Clock:
        """The time at the start of this round."""
        return Clock(self._round, self._rounds, 0, self._start)

    # --- the verbs ----------------------------------------------------------------------------------------------

    def mean(self, work: Work, *message: Any, weighting: Weighting | None = None) -> Any:
        """Run ``work(client, *message)`` on every client of the cohort; return the mean of what they return.

        The mean is uniform or weighted by the clients' numbers of samples, as the run says; ``weighting`` overrides.
        """
        weighting = self._weighting if weighting is None else check_weighting(weighting)
        if self.channel.noise and weighting != "uniform":
            raise invalid("weighting", weighting, "'uniform' where the channel has noise: sizes are private too")
        return self._reduce(work, message, self._weights(weighting), ("mean",))

    def max(self, work: Work, *message: Any) -> Any:
        """Run ``work(client, *message)`` on every client of the cohort; return the elementwise maximum."""
        return self._reduce(work, message, self.weights, ("max",))

    def combine(self, how: Sequence[str], work: Work, *message: Any) -> Any:
        """Run ``work(client, *message)``; return the mean or the maximum of each thing it returns.

        ``how`` says which: "mean" or "max" for each tensor, in their order.
        """
        if isinstance(how, str) or not how or any(word not in ("mean", "max") for word in how):
            raise invalid("how of combine", how, "a 'mean' or 'max' for each tensor that comes back")
        return self._reduce(work, message, self.weights, tuple(how))

    def gather(self, work: Work, *message: Any) -> Any:
        """Run ``work(client, *message)`` on every client; return what each returned, in cohort order: [cohort, ...].

        A client that was left out counts as an average one: its row is the mean of the others'.
        """
        if self.channel.reduce != "mean" and not is_question(work):
            raise InputError(
                f"A {self.channel.reduce} cannot protect {named(work)}, which tells the server what each single client "
                "answers. Choose an algorithm that only takes means, or the channel's bound."
            )
        if self.channel.noise:
            raise InputError(
                f"The noise of the channel cannot cover {named(work)}, which tells the server what each single client "
                "answers. Choose an algorithm that only takes means, or give the problem what it would ask for."
            )
        leaves, shape = self._rows(work, message)
        answered = torch.from_numpy(self._answered)
        if not answered.all():
            for leaf in leaves:
                others = leaf[answered]
                leaf[~answered] = (others if leaf.is_floating_point() else others.double()).mean(0).to(leaf)
        return tree_unflatten(leaves, shape)

    def _rows(self, work: Work, message: tuple[Any, ...]) -> tuple[list[torch.Tensor], TreeSpec]:
        """Make one exchange; return every client's answers, zeros for those that were left out: [cohort, ...] each."""
        rows: list[torch.Tensor] | None = None
        shape = None
        for answer in self._send(work, message):
            leaves, shape = tree_flatten(answer.value)
            if rows is None:
                rows = [leaf.new_zeros(len(self.cohort), *leaf.shape[1:]) for leaf in leaves]
            for row, leaf in zip(rows, leaves, strict=True):
                row[torch.from_numpy(answer.places)] = leaf
        return tree_flatten(self._together(work, ("mean",), rows, shape))

    def _reduce(self, work: Work, message: tuple[Any, ...], weights: torch.Tensor, how: tuple[str, ...]) -> Any:
        """Make one exchange, and reduce each tensor of the answers as ``how`` says; one word says it for all."""
        if self.channel.noise:
            self._check_noise(work, how)
        if self.channel.reduce != "mean":
            return self._robust(work, message, how)
        total: list[torch.Tensor] | None = None
        shape = None
        for answer in self._send(work, message):
            leaves, shape = tree_flatten(answer.value)
            kinds = how * len(leaves) if len(how) == 1 else how
            if len(kinds) != len(leaves):
                raise invalid("how of combine", how, f"as many words as tensors come back, {len(leaves)}")
            w = weights[torch.from_numpy(answer.places)]
            pairs = zip(kinds, leaves, strict=True)
            part = [_mean(leaf, w) if kind == "mean" else leaf.amax(0) for kind, leaf in pairs]
            if total is None:
                total = part
            else:
                both = zip(kinds, total, part, strict=True)
                total = [t.add_(p) if kind == "mean" else torch.maximum(t, p) for kind, t, p in both]
        found = self._together(work, how, total, shape)
        if self._answered.all() and not self.channel.noise:
            return found
        leaves, shape = tree_flatten(found)
        kinds = how * len(leaves) if len(how) == 1 else how
        weights = weights[torch.from_numpy(self._answered)]
        share = float(weights.sum())
        pairs = zip(kinds, leaves, strict=True)
        leaves = [leaf / share if kind == "mean" else leaf for kind, leaf in pairs]
        if self.channel.noise and any(leaf.numel() for leaf in leaves):
            self._release()
            leaves = self._noised(leaves, float(weights.max()) / share)
        return tree_unflatten(leaves, shape)

    def _robust(self, work: Work, message: tuple[Any, ...], how: tuple[str, ...]) -> Any:
        """Make one exchange, and reduce each tensor by a median or trimmed mean."""
        if "max" in how:
            raise InputError(
                f"A {self.channel.reduce} cannot protect the elementwise maximum that {named(work)} goes into. Choose "
                "an algorithm, or an option of it, that takes means."
            )
        leaves, shape = self._rows(work, message)
        answered = torch.from_numpy(self._answered)
        rows = [leaf[answered] if leaf.is_floating_point() else leaf[answered].double() for leaf in leaves]
        return tree_unflatten([robust(self.channel, row) for row in rows], shape)

    def _check_noise(self, work: Work, how: tuple[str, ...]) -> None:
        if "max" in how:
            raise InputError(
                f"The noise of the channel cannot cover the elementwise maximum that {named(work)} goes into: only "
                "means. Choose an algorithm, or an option of it, that takes means."
            )
        if self._drawn_by != "uniform":
            raise InputError(
                f"The noise of the channel cannot cover {named(work)}: its clients are drawn by weights, and may be "
                "drawn twice. Choose an algorithm that draws them uniformly."
            )

    def _release(self) -> None:
        """Count a noisy exchange of this cohort."""
        size, releases = len(self.cohort), self.counts.releases
        if self._noisy:
            before = f"{self._noisy} of {size}"
            releases[before] -= 1
            if not releases[before]:
                del releases[before]
        self._noisy += 1
        after = f"{self._noisy} of {size}"
        releases[after] = releases.get(after, 0) + 1

    def _noised(self, leaves: list[torch.Tensor], weight: float) -> list[torch.Tensor]:
        """Return the means with noise on them."""
        n = sum(leaf.numel() for leaf in leaves)
        drawn = noise(self.channel, weight, n, self._noise_names(), leaves[0])
        parts = torch.split(drawn, [leaf.numel() for leaf in leaves])
        return [leaf + part.reshape(leaf.shape).to(leaf) for leaf, part in zip(leaves, parts, strict=True)]

    def _noise_names(self) -> tuple[int, ...] | None:
        """Return what the noise of this exchange is drawn by."""
        return rng.key_of(self._setting.seed, "noise", self._round, self._exchange[0])

    def _together(
        self, work: Work, how: tuple[str, ...], leaves: list[torch.Tensor] | None, shape: TreeSpec | None
    ) -> Any:
        """Return the answers of the whole cohort from those reduced here: the sum, or the maximum, over all places."""
        assert leaves is not None and shape is not None
        return tree_unflatten(leaves, shape)

    def _weights(self, weighting: Weighting) -> torch.Tensor:
        if weighting == "uniform":
            return torch.full((len(self.cohort),), 1.0 / len(self.cohort), dtype=torch.float64)
        sizes = torch.from_numpy(self._setting.data.sizes[self.cohort]).double()
        return sizes / sizes.sum()

    def _send(self, work: Work, message: tuple[Any, ...]) -> Iterator[Answer]:
        """Make one exchange: send ``message``, have ``work`` done, yield the answers; count what it took."""
        exchange = self._exchange[0]
        self._exchange[0] += 1
        clock = Clock(self._round, self._rounds, 0, self.counts.steps)
        each = sum(_bytes(leaf) for leaf in tree_leaves(message))
        if self._passes(work):
            words_of(work)  # a clear error before anything is done
        used = Counts()
        self._answered = np.full(len(self.cohort), self._policy is None)
        asked, attempt, before = np.arange(len(self.cohort)), 0, len(self.faults)
        while True:
            known = len(self.faults)
            self.counts.bytes_down += len(asked) * each
            for answer in self._answers(work, message, clock, exchange, asked, attempt):
                leaves = tree_leaves(answer.value)
                for leaf in leaves:
                    _check_answer(leaf, len(answer.places), work)
                used.bytes_up += sum(_bytes(leaf) for leaf in leaves) if answer.sent is None else answer.sent
                used.samples += answer.samples
                used.steps = max(used.steps, answer.steps)
                if self._policy is not None:
                    answer = self._sound(answer, exchange, attempt)
                if len(answer.places):
                    yield self._bounded(work, message, answer)
            self._commit()
            if self._policy is None:
                break
            self._agree(known)
            there = set(self.cohort[self._answered].tolist())
            self.faults[before:] = [replace(f, left_out=f.client not in there) for f in self.faults[before:]]
            asked = self._ask_again(work, attempt, self.faults[before:], self._policy)
            if not len(asked):
                break
            attempt += 1
        self._count(used)

    def _sound(self, answer: Answer, exchange: int, attempt: int) -> Answer:
        """Return the answer without the clients whose numbers are not finite."""
        good = torch.ones(len(answer.places), dtype=torch.bool)
        for leaf in tree_leaves(answer.value):
            if leaf.is_floating_point() and leaf.numel():
                good &= torch.isfinite(leaf.reshape(len(leaf), -1)).all(1).cpu()
        places = answer.places[good.numpy()]
        self._answered[places] = True
        if len(places) == len(answer.places):
            return answer
        for client in self.cohort[answer.places[~good.numpy()]].tolist():
            self._fault(client, exchange, attempt, "nan", "answered with NaN or infinity")
        kept, shape = tree_flatten(answer.value)
        return replace(answer, places=places, value=tree_unflatten([leaf[good] for leaf in kept], shape))

    def _fault(self, client: int, exchange: int, attempt: int, kind: str, detail: str) -> None:
        """Write down that a client is left out of an attempt."""
        self.faults.append(Fault(self._round, exchange, attempt, client, kind, detail))

    def _ask_again(self, work: Work, attempt: int, faults: list[Fault], policy: Faults) -> np.ndarray:
        """Return the places of the clients to ask again: none if enough have answered, an error if there is no hope.

        Clients that answered with something that cannot be used are not asked again: they would again.
        """
        needed = policy.needed(len(self.cohort))
        if self._answered.sum() < needed and attempt < policy.retries:
            silent = ~self._answered & ~np.isin(self.cohort, [f.client for f in faults if f.kind in BAD])
            if silent.any():
                return np.flatnonzero(silent)
        self.counts.failed += int((~self._answered).sum())
        if self._answered.sum() >= needed:
            return np.empty(0, dtype=np.int64)
        last = {f.client: f for f in faults}
        missing = [last[k] for k in np.unique(self.cohort[~self._answered]).tolist() if k in last]
        hint = ""
        if not self._answered.any() and all(f.kind == "nan" for f in missing):
            hint = " All of them did: a smaller learning rate is the usual remedy."
        again = f" after asking {attempt + 1} times" if attempt else ""
        raise QuorumError(
            f"Only {int(self._answered.sum())} of {len(self.cohort)} clients answered {named(work)} in round "
            f"{self._round + 1}{again}, fewer than the quorum of {needed}. Left out: "
            f"{told(missing, self._setting.data.client_names)}.{hint}"
        )

    def _agree(self, known: int) -> None:  # noqa: B027 (one process agrees with itself)
        """Let all processes of the engine know who has answered, and the faults from number ``known`` on."""

    def _commit(self) -> None:  # noqa: B027 (an engine whose clients are elsewhere has nothing here)
        """Make the clients' own what they kept in this attempt, if their answers were taken."""

    def extra(self) -> dict[str, Any]:
        """Return what a checkpoint must hold for the clients besides counts and rows: plain numbers."""
        return {} if self.learned is None else {"learned": self.learned.tolist()}

    def restore(self, extra: dict[str, Any]) -> None:
        """Go on with what :meth:`extra` returned."""
        if "learned" in extra:
            self.learned = torch.tensor(extra["learned"], dtype=torch.float64)

    def _passes(self, work: Work) -> bool:
        """Whether the answers are changes to the channel; those to a problem's questions are not."""
        return self.channel.of_changes and not is_question(work)

    def _bounded(self, work: Work, message: tuple[Any, ...], answer: Answer) -> Answer:
        """Return the answer with changes of at most the norm that the channel's bound says."""
        if self.channel.bound is None or not self._passes(work):
            return answer
        changes = Changes(work, for_each(message, len(answer.places)), answer.value)
        bounded = changes.matrix * factors(changes.matrix, self.channel.bound)
        return replace(answer, value=changes.answers(bounded))

    def _count(self, used: Counts) -> None:
        """Add what the answers of an exchange took."""
        self.counts.bytes_up += used.bytes_up
        self.counts.samples += used.samples
        self.counts.steps += used.steps

    @abstractmethod
    def _answers(
        self, work: Work, message: tuple[Any, ...], clock: Clock, exchange: int, places: np.ndarray, attempt: int
    ) -> Iterator[Answer]:
        """Yield the answers of the cohort's clients at ``places``; write down those that do not answer as faults."""


BAD = ("nan", "shape", "type", "size", "stale", "forged")
"""Kinds of faults where a client answered, with something that cannot be used."""


def for_each(message: tuple[Any, ...], clients: int) -> tuple[Any, ...]:
    """Return the message with a leading client axis on its tensors: the same memory for everyone."""
    out: tuple[Any, ...] = tree_map(
        lambda t: t.expand(clients, *t.shape) if isinstance(t, torch.Tensor) else t, message
    )
    return out


def _mean(leaf: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    leaf = leaf if leaf.is_floating_point() else leaf.double()
    mean: torch.Tensor = torch.tensordot(weights.to(leaf), leaf, dims=1)
    return mean


def _bytes(leaf: Any) -> int:
    return leaf.numel() * leaf.element_size() if isinstance(leaf, torch.Tensor) else 0


def _check_answer(leaf: Any, clients: int, work: Work) -> None:
    if not isinstance(leaf, torch.Tensor) or leaf.shape[:1] != (clients,):
        got = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
        name = getattr(work, "__qualname__", repr(work))
        raise FedstrataError(f"{name} must return tensors with a leading client axis of {clients}. Got {got}.")


def cohort_size(participation: int | float, clients: int) -> int:
    """Return how many clients take part in a round: a number of them, or a share of all."""
    wanted = f"a share in (0, 1] or a whole number from 1 to {clients}"
    if not is_number(participation):
        raise invalid("participation", participation, wanted)
    if isinstance(participation, float):
        if not 0 < participation <= 1:
            raise invalid("participation", participation, wanted)
        return max(1, round(participation * clients))
    if not 1 <= participation <= clients:
        raise invalid("participation", participation, wanted)
    return participation


def check_weighting(weighting: str) -> Weighting:
    """Return the weighting, or raise the error that lists the two there are."""
    if weighting == "uniform":
        return "uniform"
    if weighting == "samples":
        return "samples"
    raise invalid("weighting", weighting, "'uniform' or 'samples'")
