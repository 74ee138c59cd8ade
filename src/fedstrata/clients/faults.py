"""Faults: how a run handles clients that do not answer, or whose answer cannot be used.

Such a client is left out of the exchange; the run names and counts it. :class:`Inject` makes clients fail on purpose,
in the same way in every engine, for tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from fedstrata.core import rng
from fedstrata.core.errors import FedstrataError, invalid, listed
from fedstrata.core.options import Options, param
from fedstrata.core.trees import tree_leaves, tree_map
from fedstrata.data.federated import client_name

FaultKind = Literal["silent", "error", "nan", "shape", "type", "size", "stale", "forged", "lost"]
"""Why a client was left out: no answer, a failure, or an answer that cannot be used.

"lost" is a client that has lost what it kept. Only a federation checks for "size", "stale" and "forged".
"""

UNUSABLE: tuple[FaultKind, ...] = ("nan", "shape", "type", "size", "stale", "forged", "lost")
"""Kinds of fault for which asking again would not help."""

SILENT = ("drop", "delay", "crash")
"""Injected faults that leave the server without an answer."""

INJECTED = (*SILENT, "nan", "garbage", "scale")
"""All faults that :class:`Inject` can make."""


class QuorumError(FedstrataError):
    """Too few clients answered, even after retries."""


@dataclass(frozen=True)
class Fault:
    """A client that failed in an attempt: what was wrong with its answer, or why there was none.

    left_out: whether it was left out of the exchange; false if it answered a later attempt.
    """

    round: int
    exchange: int
    attempt: int
    client: int
    kind: FaultKind
    detail: str = ""
    left_out: bool = True

    def row(self) -> dict[str, Any]:
        """Return a line of ``faults.jsonl``, where rounds count from 1 and 0 is before the first."""
        return {**asdict(self), "round": self.round + 1}

    @staticmethod
    def of(row: dict[str, Any]) -> Fault:
        """Return the fault that a line of ``faults.jsonl`` describes."""
        return Fault(**{f.name: row[f.name] for f in fields(Fault)} | {"round": row["round"] - 1})


class Inject(Options, owner="the injected faults"):
    """Faults to inject, each with a probability per client, exchange and attempt."""

    words: ClassVar[str] = "an Inject, e.g. fs.Inject(drop=0.1)"
    drop: float = param(0.0, "probability that the client does not answer", least=0, most=1)
    delay: float = param(0.0, "probability that the answer is delayed", least=0, most=1)
    crash: float = param(0.0, "probability that the client's process dies while it works", least=0, most=1)
    nan: float = param(0.0, "probability that the answer is all NaN", least=0, most=1)
    garbage: float = param(0.0, "probability that the answer has the wrong shape", least=0, most=1)
    scale: float = param(0.0, "probability that the update is multiplied by factor", least=0, most=1)
    seconds: float = param(5.0, "delay of an answer in seconds; an answer after the timeout is dropped", least=0)
    factor: float = param(1000.0, "factor by which scale multiplies updates")
    clients: Sequence[int] = param((), "numbers of the clients that may fail, from 0; by default all", least=0)
    seed: int = param(0, "random seed of the faults", least=0)

    def __post_init__(self) -> None:
        total = sum(getattr(self, kind) for kind in INJECTED)
        if total > 1:
            raise invalid("sum of the injected faults' probabilities", total, "at most 1")

    def kinds(self, clients: np.ndarray, round: int, exchange: int, attempt: int) -> list[str | None]:
        """Return the kind of fault of each client in this attempt, or None."""
        if not len(clients):
            return []
        key = rng.key_of(self.seed, "fault", round, exchange, attempt)
        chances = rng.uniforms(key, clients, np.zeros(1), 1)[:, 0]
        ends = np.cumsum([getattr(self, kind) for kind in INJECTED])
        indices = np.searchsorted(ends, chances, side="right")
        out: list[str | None] = []
        for client, index in zip(clients.tolist(), indices.tolist(), strict=True):
            hit = index < len(INJECTED) and (not self.clients or client in self.clients)
            out.append(INJECTED[index] if hit else None)
        return out

    def factor_of(self, kind: str | None) -> float:
        """Return the factor by which a kind of fault multiplies an answer."""
        return {"scale": self.factor, "nan": math.nan}.get(kind or "", 1.0)

    def spoil(self, value: Any, kinds: Sequence[str | None]) -> tuple[Any, np.ndarray]:
        """Return an answer [C, ...] with the fault of each row applied, and a mask of the rows of the wrong shape.

        The engine makes those rows wrong, or drops them. Whole numbers cannot be NaN: they get the wrong shape instead.
        """
        if not any(leaf.is_floating_point() for leaf in tree_leaves(value)):
            kinds = ["garbage" if kind == "nan" else kind for kind in kinds]
        factors = torch.tensor([self.factor_of(kind) for kind in kinds])
        return tree_map(lambda leaf: _scaled(leaf, factors), value), np.array([kind == "garbage" for kind in kinds])


def _scaled(leaf: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return a tensor [C, ...] with each row multiplied by its factor; integers are left unchanged."""
    if not leaf.is_floating_point():
        return leaf
    return leaf * factors.to(leaf).view(-1, *[1] * (leaf.dim() - 1))


class Faults(Options, owner="the faults"):
    """How a run handles clients that fail."""

    words: ClassVar[str] = "Faults, e.g. fs.Faults(quorum=0.5)"
    quorum: int | float = param(0.5, "fraction or number of a cohort's clients that must answer")
    retries: int = param(
        2, "how often to ask missing clients again if there is no quorum, before the run stops", least=0
    )
    timeout: float = param(600.0, "seconds to wait for the answer of a remote client", above=0)
    max_bytes: int | None = param(
        None,
        "largest answer of a remote client in bytes; by default 16 times the size of the message and x, plus 1 MiB",
        least=1,
    )
    inject: Inject | None = param(None, "faults to inject, for tests")

    def needed(self, cohort: int) -> int:
        """Return how many clients of a cohort must answer."""
        if isinstance(self.quorum, float):
            return max(1, math.ceil(round(self.quorum * cohort, 9)))
        return min(self.quorum, cohort)


def in_words(faults: Sequence[Fault], names: Sequence[str]) -> str:
    """Return the clients by name and what was wrong with each, for a message."""
    return listed([f"{client_name(names, f.client)} ({f.detail or f.kind})" for f in faults])
