"""Problems by name; ``register`` adds your own."""

from fedstrata.problems.adversarial import adversarial
from fedstrata.problems.agnostic import agnostic
from fedstrata.problems.auc import auc
from fedstrata.problems.compositional_auc import compositional_auc
from fedstrata.problems.erm import erm
from fedstrata.problems.fair import fair
from fedstrata.problems.maml import damaml, maml
from fedstrata.problems.multilevel import multilevel, risk_averse
from fedstrata.problems.quadratic import Quadratic, composition, quadratic, quadratic_saddle
from fedstrata.problems.registry import PROBLEMS, ProblemKind, register
from fedstrata.problems.robust import robust
from fedstrata.problems.tower import tower

PROBLEMS.update(
    {
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
        "quadratic": ProblemKind(quadratic, brings_data=True),
        "composition": ProblemKind(composition, brings_data=True),
        "quadratic_saddle": ProblemKind(quadratic_saddle, brings_data=True),
        "tower": ProblemKind(tower, brings_data=True),
    }
)

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
    "register",
    "risk_averse",
    "robust",
    "tower",
]
