"""The registry of problems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from fedstrata.core.options import build, check, options_of
from fedstrata.core.registry import Registry
from fedstrata.data.federated import FederatedData
from fedstrata.problems.adversarial import adversarial
from fedstrata.problems.agnostic import agnostic
from fedstrata.problems.auc import auc
from fedstrata.problems.compositional_auc import compositional_auc
from fedstrata.problems.erm import erm
from fedstrata.problems.fair import fair
from fedstrata.problems.maml import damaml, maml
from fedstrata.problems.multilevel import multilevel, risk_averse
from fedstrata.problems.problem import Problem
from fedstrata.problems.quadratic import Quadratic, composition, quadratic, quadratic_saddle
from fedstrata.problems.robust import robust
from fedstrata.problems.tower import tower


@dataclass(frozen=True)
class ProblemKind:
    """A problem that a configuration file can name: built from a model, or with its own data.

    ``outputs`` is the number of outputs the model should have, if not one per class.
    """

    build: Callable[..., Any]
    data: Callable[..., tuple[Problem, FederatedData]] | None = None
    outputs: int | None = None

    @property
    def options(self) -> list[str]:
        """The options that a configuration file may set."""
        return [name for name, option in options_of(self.build).items() if option.in_file]

    def on(self, model: nn.Module, data: FederatedData, **options: Any) -> Problem:
        """Build the problem for a model; options that a file cannot set, such as ``clients``, come from the data."""
        facts = {"clients": data.clients, "classes": data.classes or None, "shape": data.train.arrays[0].shape[1:]}
        inferred = {name: facts[name] for name, option in options_of(self.build).items() if not option.in_file}
        problem: Problem = self.build(model, **inferred, **check(self.build, options))
        return problem


def _with_data(builder: Callable[..., Quadratic]) -> ProblemKind:
    def data(**options: Any) -> tuple[Problem, FederatedData]:
        built: Quadratic = build(builder, options)
        return built.problem, built.data

    return ProblemKind(builder, data)


_KINDS = {
    "erm": ProblemKind(erm),
    "robust": ProblemKind(robust),
    "maml": ProblemKind(maml),
    "damaml": ProblemKind(damaml),
    "agnostic": ProblemKind(agnostic),
    "fair": ProblemKind(fair),
    "auc": ProblemKind(auc, outputs=1),
    "compositional_auc": ProblemKind(compositional_auc, outputs=1),
    "risk_averse": ProblemKind(risk_averse),
    "adversarial": ProblemKind(adversarial),
    "quadratic": _with_data(quadratic),
    "composition": _with_data(composition),
    "quadratic_saddle": _with_data(quadratic_saddle),
    "tower": _with_data(tower),
}

PROBLEMS: Registry[ProblemKind] = Registry("problem", _KINDS)
"""All problems, by their names in configuration files."""

__all__ = [
    "PROBLEMS",
    "ProblemKind",
    "Quadratic",
    "adversarial",
    "agnostic",
    "auc",
    "composition",
    "compositional_auc",
    "damaml",
    "erm",
    "fair",
    "maml",
    "multilevel",
    "quadratic",
    "quadratic_saddle",
    "risk_averse",
    "robust",
    "tower",
]
