"""The problems, ten lines each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fedstrata.core.schedules import schedule
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
    """A problem as a configuration file names it: built from a model, or bringing its own data.

    ``outputs`` is how many the model should have, where that is not one for each class.
    """

    build: Callable[..., Any]
    data: Callable[..., tuple[Problem, FederatedData]] | None = None
    outputs: int | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """The names of its options, other than the model and what the data know."""
        known = inspect.signature(self.build).parameters
        return tuple(p for p in known if p not in ("model", "dtype", *self.asks))

    @property
    def asks(self) -> tuple[str, ...]:
        """What it is built with that the data know: the number of clients or classes, the shape of an input."""
        known = inspect.signature(self.build).parameters
        return tuple(p for p in known if self.data is None and p in ("clients", "classes", "shape"))

    def on(self, model: nn.Module, data: FederatedData, **options: Any) -> Problem:
        """Build the problem of a model for these data."""
        known = {
            "clients": data.clients,
            "classes": data.classes,
            "shape": tuple(data.train.arrays[0].shape[1:]),
        }
        built: Problem = self.build(model, **{k: known[k] for k in self.asks}, **_with_schedules(options))
        return built


def _with_schedules(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a problem's options with the schedules that a file holds as tables."""
    return {
        k: schedule(v, f"{k} of the problem") if isinstance(v, dict) and "schedule" in v else v
        for k, v in options.items()
    }


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
