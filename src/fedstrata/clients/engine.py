"""The interface of an engine, which runs work on clients, wherever they are."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from fedstrata.clients.channel import PLAIN, Channel
from fedstrata.clients.client_side import ClientSide
from fedstrata.clients.cohort import Weighting
from fedstrata.clients.faults import Fault, FaultKind, Faults
from fedstrata.clients.privacy import Ledger
from fedstrata.clients.queries import QUERIES
from fedstrata.core.clock import Clock
from fedstrata.core.errors import FedstrataError, invalid
from fedstrata.core.trees import TreeSpec, tree_leaves, tree_unflatten
from fedstrata.data.tables.fitted import Fitted
from fedstrata.problems.problem import Problem

Work = Callable[..., Any]


@dataclass
class Usage:
    """What a run has used so far: local steps (of the busiest client), samples drawn, bytes sent up and down.

    failed: how often a client was left out of an exchange.
    """

    steps: int = 0
    samples: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    failed: int = 0


class Request(NamedTuple):
    """One attempt of an exchange: run ``work(client, *message)`` on the clients at ``places`` of the cohort.

    answered: whose answers the server has accepted: a mask over the cohort, updated as answers arrive. What a client
              keeps in an exchange is stored only if its answer was accepted.
    rejoins:  whether the clients have lost some of what they kept, and keep it again; they still have the rest.
    pool:     how many numbers a client's collections may hold at most, if the answers are collections to pool.
    weighting: how clients are weighted, if nothing but the mean of their answers is wanted; otherwise None.
    """

    work: Work
    message: tuple[Any, ...]
    clock: Clock
    exchange: int
    cohort: np.ndarray
    places: np.ndarray
    answered: np.ndarray
    attempt: int = 0
    rejoins: bool = False
    pool: int | None = None
    weighting: Weighting | None = None

    @property
    def name(self) -> str:
        """The name of the method, by which a node finds it."""
        return _name_of(self.work)

    @property
    def query(self) -> bool:
        """Whether the work is a query of the problem, whose answers no channel changes."""
        return QUERIES.get(self.name) is self.work

    def packs(self, channel: Channel) -> bool:
        """Whether clients pack their answers for this channel."""
        return channel.on_clients and not self.query

    @property
    def label(self) -> str:
        """The work in error messages."""
        return label_of(self.work)

    def check_message(self) -> None:
        """Raise if a part of the message cannot be sent to another computer."""
        wrong = _unsendable(self.message)
        if wrong:
            raise FedstrataError(
                f"The message to {self.label} must be made of tensors, numbers, text and None, or tuples of them. "
                f"Got a {wrong}."
            )

    def check(self, leaves: list[Any], clients: int) -> None:
        """Raise if the leaves of an answer of ``clients`` clients are not tensors with a row for each of them."""
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) or leaf.shape[:1] != (clients,):
                got = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
                raise FedstrataError(
                    f"{self.label} must return tensors with a leading client axis of {clients}. Got {got}."
                )
        self._check_collections(leaves)

    def _check_collections(self, leaves: list[torch.Tensor]) -> None:
        """Raise if the answers are to be pooled but are not collections, or are too large."""
        if self.pool is None:
            return
        what = f"of the collections that {self.label} returns to pool"
        shapes = [tuple(leaf.shape[1:]) for leaf in leaves]
        if () in shapes:
            raise invalid(f"shape {what}", shapes, "(n, ...)")
        size = sum(math.prod(shape) for shape in shapes)
        if size > self.pool:
            raise invalid(f"size {what}", size, f"at most {self.pool} numbers per client")

    def fault(self, client: int, kind: FaultKind, detail: str) -> Fault:
        """Return the fault of a client that is left out of this attempt."""
        return Fault(self.clock.round, self.exchange, self.attempt, client, kind, detail)


class Answer(NamedTuple):
    """The answer of some clients of the cohort: ``value`` holds tensors [C, ...], a row for each of ``places``.

    sent:     the bytes sent, if they differ from those of the value.
    received: the bytes that the clients received beside the message.
    """

    places: np.ndarray
    value: Any
    samples: int
    steps: int
    sent: int | None = None
    received: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes sent."""
        return nbytes(self.value) if self.sent is None else self.sent


class Reduced(NamedTuple):
    """The sum ("mean") or the maximum ("max") of each tensor of some clients' answers, and what they used.

    leaves, shape: the tensors, flattened; None if no client answered.
    kinds:         how each tensor was reduced.
    """

    leaves: list[torch.Tensor] | None
    shape: TreeSpec | None
    kinds: tuple[str, ...]
    used: Usage
    answered: np.ndarray

    @property
    def tree(self) -> Any:
        """The result, in the form that the clients' method returns."""
        assert self.leaves is not None and self.shape is not None
        return tree_unflatten(self.leaves, self.shape)


Learned = torch.Tensor | None
"""What a problem has learned from the answers to a query; None if it was not asked."""


def as_lists(learned: Sequence[Learned]) -> list[list[float] | None]:
    """Return answers in a form that JSON can store."""
    return [None if vector is None else vector.tolist() for vector in learned]


def from_lists(lists: Sequence[Sequence[float] | None]) -> list[Learned]:
    """Return answers from that form."""
    return [None if numbers is None else torch.tensor(numbers, dtype=torch.float64) for numbers in lists]


class Engine(ABC):
    """Runs work on clients. Only :meth:`answers` must be implemented; the rest are hooks that most engines do not need.

    side:    what the client side of the run shares.
    channel: what updates pass through.
    policy:  how to handle clients that fail; without one (None), failures are errors.
    learned: the answers to the problem's queries so far; None for one that was not asked.
    ledger:  the noisy releases so far.
    outlier: a sentence on the last client whose numbers were much larger than all others'; empty if there was none.
    """

    chunk = 1
    """How many clients advance together."""

    mine: np.ndarray | None = None
    """Which clients' state is kept in this process, as a mask; None for all."""

    elsewhere = False
    """Whether the clients' data are in other processes, so that only they know whether rows are held out."""

    sums_only = False
    """Whether the server learns nothing but means over clients; a request without ``weighting`` is then an error."""

    secret_noise = False
    """Whether noise must be unpredictable; otherwise it is a function of names, and a run can be repeated."""

    def __init__(self, side: ClientSide, channel: Channel = PLAIN, policy: Faults | None = None) -> None:
        deferred = policy is not None or channel.compress != "none"
        self.side = replace(side, deferred=deferred)
        self.channel, self.policy = channel, policy
        self.learned: list[Learned] = []
        self.ledger = Ledger()
        self.outlier = ""

    @abstractmethod
    def answers(self, request: Request) -> Iterator[Answer | Fault]:
        """Yield the answers of the requested clients, and a fault for each client that does not answer."""

    def adopt(self, problem: Problem) -> None:
        """Switch to another problem: the one that knows the answer to its query, or the one of this round."""
        self.side = replace(self.side, oracles=self.side.oracles.of(problem))

    def prepare(self, fitted: Fitted) -> None:
        """Switch to the inputs that a preparation makes of the clients' tables."""
        x0 = self.side.oracles.problem.x0
        self.side = replace(self.side, data=self.side.data.prepared(fitted).to(x0.device, x0.dtype))

    def agree(self, answered: np.ndarray, faults: list[Fault]) -> tuple[np.ndarray, list[Fault]]:
        """Return who has answered and the faults of an attempt, over all processes of the engine."""
        return answered, faults

    def complete(self, request: Request, reduced: Reduced) -> Reduced:
        """Return the result of the whole cohort, given that of the clients in this process."""
        return reduced

    def describe(self, chunk: int | str, sampled: int) -> str:
        """Describe how clients are computed, for a line of progress; ``chunk`` is the user's setting."""
        return f"{min(self.chunk, sampled)} at a time (chunk = {chunk})"

    def saved(self, round: int) -> None:  # noqa: B027
        """Called once the checkpoint of ``round`` is written: the run can resume from it."""

    def extra(self) -> dict[str, Any]:
        """Return what a checkpoint must hold for the engine: plain numbers."""
        return {"learned": as_lists(self.learned), "releases": self.ledger.releases}

    def restore(self, extra: dict[str, Any]) -> None:
        """Resume from what :meth:`extra` returned."""
        self.learned = from_lists(extra["learned"])
        self.ledger.restore(extra["releases"])


def _name_of(work: Work) -> str:
    return str(getattr(work, "__name__", ""))


def label_of(work: Work) -> str:
    """Return what error messages call the work: ``local of fgda``."""
    name = _name_of(work) or str(work)
    owner = getattr(getattr(work, "__self__", None), "name", None)
    return f"{name} of {owner}" if owner else name


def nbytes(tree: Any) -> int:
    """Return the bytes of the tensors in a message or an answer."""
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _unsendable(message: Any) -> str:
    """Return the type of a part of a message that cannot be sent to a client; empty if there is none."""
    if isinstance(message, tuple | list):
        return next((wrong for wrong in map(_unsendable, message) if wrong), "")
    sendable = message is None or isinstance(message, torch.Tensor | bool | int | float | str)
    return "" if sendable else type(message).__name__
