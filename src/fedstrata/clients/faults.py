"""Faults: what happens when a client does not answer, or answers with something that cannot be used.

Such a client is left out of that exchange, named and counted. An :class:`Inject` makes faults on purpose, the same ones
in every engine: for tests of one's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import numpy as np

from fedstrata.core import rng
from fedstrata.core.errors import FedstrataError, invalid
from fedstrata.core.options import Options, param

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


class Inject(Options, owner="the injected faults"):
    """Faults made on purpose: each with a probability, for every client, exchange and attempt."""

    words: ClassVar[str] = "an Inject, e.g. fs.Inject(drop=0.1)"
    drop: float = param(0.0, "probability that there is no answer", least=0, most=1)
    delay: float = param(0.0, "probability that the answer is held back for some seconds", least=0, most=1)
    crash: float = param(0.0, "probability that the client's process dies while it works", least=0, most=1)
    nan: float = param(0.0, "probability that the answer is full of NaN", least=0, most=1)
    garbage: float = param(0.0, "probability that the answer has the wrong shape", least=0, most=1)
    scale: float = param(0.0, "probability that the update is multiplied by factor", least=0, most=1)
    seconds: float = param(5.0, "how long a delayed answer is held back; beyond the timeout it comes too late", least=0)
    factor: float = param(1000.0, "what scale multiplies updates by")
    clients: Sequence[int] = param((), "numbers of the clients that fail, from 0; by default all of them", least=0)
    seed: int = param(0, "seed of who fails when", least=0)

    def __post_init__(self) -> None:
        total = sum(getattr(self, kind) for kind in KINDS)
        if total > 1:
            raise invalid("sum of the injected faults' probabilities", total, "at most 1")

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


class Faults(Options, owner="the faults"):
    """How a run deals with clients that fail."""

    words: ClassVar[str] = "Faults, e.g. fs.Faults(quorum=0.5)"
    quorum: int | float = param(0.5, "share or number of a cohort's clients that must answer")
    retries: int = param(2, "how often silent clients are asked again below the quorum; then the run stops", least=0)
    timeout: float = param(600.0, "seconds after which a client on another machine counts as silent", above=0)
    max_bytes: int | None = param(
        None,
        "largest answer of a client on another machine; by default 16 times the message and x, plus 1 MiB",
        least=1,
    )
    inject: Inject | None = param(None, "faults made on purpose, for tests of your own")

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
