"""The problems, ten lines each."""

from fedstrata.problems.erm import erm
from fedstrata.problems.quadratic import Quadratic, quadratic

__all__ = ["Quadratic", "erm", "quadratic"]
