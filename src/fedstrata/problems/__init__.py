"""The problems, ten lines each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedstrata.data.federated import FederatedData
from fedstrata.problem import Problem
from fedstrata.problems.erm import erm
from fedstrata.problems.quadratic import Quadratic, quadratic


@dataclass(frozen=True)
class ProblemKind:
    """A problem as a configuration file names it: built from a model, or bringing its own data."""

    build: Callable[..., Any]
    data: Callable[..., tuple[Problem, FederatedData]] | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """The names of its options, other than the model."""
        return tuple(p for p in inspect.signature(self.build).parameters if p not in ("model", "dtype"))


def _quadratic(**options: Any) -> tuple[Problem, FederatedData]:
    built = quadratic(**options)
    return built.problem, built.data


PROBLEMS: dict[str, ProblemKind] = {"erm": ProblemKind(erm), "quadratic": ProblemKind(quadratic, _quadratic)}

__all__ = ["PROBLEMS", "ProblemKind", "Quadratic", "erm", "quadratic"]
