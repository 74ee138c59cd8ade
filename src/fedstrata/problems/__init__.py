"""The problems, ten lines each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedstrata.data.federated import FederatedData
from fedstrata.problem import Problem
from fedstrata.problems.agnostic import agnostic
from fedstrata.problems.erm import erm
from fedstrata.problems.maml import damaml, maml
from fedstrata.problems.quadratic import Quadratic, composition, quadratic
from fedstrata.problems.robust import robust


@dataclass(frozen=True)
class ProblemKind:
    """A problem as a configuration file names it: built from a model, or bringing its own data."""

    build: Callable[..., Any]
    data: Callable[..., tuple[Problem, FederatedData]] | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """The names of its options, other than the model."""
        known = inspect.signature(self.build).parameters
        return tuple(p for p in known if p not in ("model", "dtype") and not (self.asks_clients and p == "clients"))

    @property
    def asks_clients(self) -> bool:
        """Whether it is built for a number of clients, which the data know."""
        return self.data is None and "clients" in inspect.signature(self.build).parameters


def _with_data(build: Callable[..., Quadratic]) -> ProblemKind:
    def data(**options: Any) -> tuple[Problem, FederatedData]:
        built = build(**options)
        return built.problem, built.data

    return ProblemKind(build, data)


PROBLEMS: dict[str, ProblemKind] = {
    "erm": ProblemKind(erm),
    "robust": ProblemKind(robust),
    "maml": ProblemKind(maml),
    "damaml": ProblemKind(damaml),
    "agnostic": ProblemKind(agnostic),
    "quadratic": _with_data(quadratic),
    "composition": _with_data(composition),
}

__all__ = [
    "PROBLEMS",
    "ProblemKind",
    "Quadratic",
    "agnostic",
    "composition",
    "damaml",
    "erm",
    "maml",
    "quadratic",
    "robust",
]
