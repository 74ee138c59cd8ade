"""Faults: what happens when a client does not answer, or answers with something that cannot be used.

Such a client is left out of that exchange, named and counted. An :class:`Inject` makes faults on purpose, the same ones
in every engine: for tests of one's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from fedstrata.core import rng
from fedstrata.core.errors import FedstrataError, invalid, is_number

SILENT = ("drop", "delay", "crash")
"""Kinds of injected faults after which there is no answer."""

KINDS = (*SILENT, "nan", "garbage", "scale")


class QuorumError(FedstrataError):
    """Too few clients answered, also when asked again."""


@dataclass(frozen=True)
class Fault:
    """A client that was left out of an attempt: what was wrong with its answer, or why there was none.

    left_out: whether it was left out of the exchange; not when it answered a later attempt.
    """

    round: int
    exchange: int
    attempt: int
    client: int
    kind: str
    detail: str = ""
    left_out: bool = True

    def row(self) -> dict[str, Any]:
        """Return it as a line of ``faults.jsonl``; rounds count from 1 there, 0 is what comes before the first."""
        return {**asdict(self), "round": self.round + 1}

    @staticmethod
    def of(row: dict[str, Any]) -> Fault:
        """Return the fault of a line of ``faults.jsonl``."""
        return Fault(**{f.name: row[f.name] for f in fields(Fault)} | {"round": row["round"] - 1})


@dataclass(frozen=True)
class Inject:
    """Faults made on purpose: each with a probability, for every client, exchange and attempt, by ``seed``.

    drop:    no answer.
    delay:   the answer comes after ``seconds``: too late, if that is more than the timeout.
    crash:   the client's process dies while it works.
    nan:     the answer is full of NaN.
    garbage: the answer has the wrong shape.
    scale:   the change that the answer makes is multiplied by ``factor``.
    clients: the clients that have faults; all of them when it is empty.
    """

    drop: float = 0.0
    delay: float = 0.0
    crash: float = 0.0
    nan: float = 0.0
    garbage: float = 0.0
    scale: float = 0.0
    seconds: float = 5.0
    factor: float = 1000.0
    clients: Sequence[int] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        shares = [getattr(self, kind) for kind in KINDS]
        for kind, share in zip(KINDS, shares, strict=True):
            if not (is_number(share) and 0 <= share <= 1):
                raise invalid(f"{kind} of the injected faults", share, "a probability, from 0 to 1")
        if sum(shares) > 1:
            raise invalid("sum of the injected faults' probabilities", sum(shares), "at most 1")
        if not (is_number(self.seconds) and 0 <= self.seconds < math.inf):
            raise invalid("seconds of the injected faults", self.seconds, "a number of at least 0")
        if not (is_number(self.factor) and math.isfinite(self.factor)):
            raise invalid("factor of the injected faults", self.factor, "a finite number")
        listed = isinstance(self.clients, list | tuple)
        if not listed or not all(type(k) is int and k >= 0 for k in self.clients):
            raise invalid("clients of the injected faults", self.clients, "a list of clients' numbers, from 0 on")
        object.__setattr__(self, "clients", tuple(self.clients))
        if type(self.seed) is not int or self.seed < 0:
            raise invalid("seed of the injected faults", self.seed, "a whole number of at least 0")

    def kinds(self, clients: np.ndarray, round: int, exchange: int, attempt: int) -> list[str | None]:
        """Return what goes wrong with each client in this attempt: a kind of fault, or None."""
        if not len(clients):
            return []
        key = rng.key_of(self.seed, "fault", round, exchange, attempt)
        chances = rng.uniforms(key, clients, np.zeros(1), 1)[:, 0]
        ends = np.cumsum([getattr(self, kind) for kind in KINDS])
        found = np.searchsorted(ends, chances, side="right")
        out: list[str | None] = []
        for client, index in zip(clients.tolist(), found.tolist(), strict=True):
            hit = index < len(KINDS) and (not self.clients or client in self.clients)
            out.append(KINDS[index] if hit else None)
        return out

    def factor_of(self, kind: str | None) -> float:
        """Return what a kind of fault multiplies an answer by."""
        return {"scale": self.factor, "nan": math.nan}.get(kind or "", 1.0)


@dataclass(frozen=True)
class Faults:
    """How a run deals with clients that fail.

    quorum:    how many clients of the cohort must answer, as a share (float) or a number (int).
    retries:   how often the silent ones are asked again when fewer do; then the run stops.
    timeout:   seconds until a client that is elsewhere counts as silent.
    max_bytes: the largest answer of a client that is elsewhere; None is sixteen times the message and x, and 1 MiB.
    inject:    faults made on purpose, for tests.
    """

    quorum: int | float = 0.5
    retries: int = 2
    timeout: float = 600.0
    max_bytes: int | None = None
    inject: Inject | None = None

    def __post_init__(self) -> None:
        good = is_number(self.quorum)
        if not good or (isinstance(self.quorum, float) and not 0 < self.quorum <= 1) or self.quorum <= 0:
            raise invalid("quorum", self.quorum, "a share in (0, 1] or a whole number of at least 1")
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or self.retries < 0:
            raise invalid("retries", self.retries, "a whole number of at least 0")
        if not (is_number(self.timeout) and 0 < self.timeout < math.inf):
            raise invalid("timeout", self.timeout, "seconds, above 0")
        if self.max_bytes is not None and (type(self.max_bytes) is not int or self.max_bytes < 1):
            raise invalid("max_bytes", self.max_bytes, "a whole number of at least 1")
        if self.inject is not None and not isinstance(self.inject, Inject):
            raise invalid("inject", self.inject, "an Inject, e.g. fs.Inject(drop=0.1), or left out")

    def needed(self, cohort: int) -> int:
        """Return how many of a cohort must answer."""
        if isinstance(self.quorum, float):
            return max(1, math.ceil(round(self.quorum * cohort, 9)))
        return min(self.quorum, cohort)


def in_words(faults: Sequence[Fault], names: Sequence[str], limit: int = 8) -> str:
    """Return faults in words: clients by name, with what was wrong."""
    called = [f"{names[f.client] if names else f'client {f.client}'} ({f.detail or f.kind})" for f in faults]
    more = f" and {len(called) - limit} more" if len(called) > limit else ""
    return ", ".join(called[:limit]) + more
