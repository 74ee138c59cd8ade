"""From scores to risks: Platt's curve or an increasing function, fitted to counts of the clients' scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from fedstrata.core.errors import InputError, invalid, is_finite
from fedstrata.training.risk.score_counts import ScoreCounts

Method = Literal["none", "platt", "isotonic"]


@dataclass(frozen=True)
class Calibration:
    """What turns the score of a row into its risk.

    method: "none" (the score is a logit), "platt" or "isotonic".
    slope, offset: of Platt's curve: the risk is 1 / (1 + exp(-(slope * score + offset))).
    scores, risks: the points between which an isotonic curve is straight.
    """

    method: Method
    slope: float = 1.0
    offset: float = 0.0
    scores: tuple[float, ...] = ()
    risks: tuple[float, ...] = ()

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """Return the risks of rows with these scores."""
        if self.method == "isotonic":
            risks: np.ndarray = np.interp(scores, self.scores, self.risks)
        else:
            risks = expit(self.slope * scores + self.offset)
        return risks

    def to_table(self) -> dict[str, Any]:
        """Return the calibration as JSON stores it."""
        table: dict[str, Any] = {"method": self.method}
        if self.method == "isotonic":
            return table | {"scores": list(self.scores), "risks": list(self.risks)}
        return table | {"slope": self.slope, "offset": self.offset}

    @staticmethod
    def from_table(table: Any, where: str) -> Calibration:
        """Return the calibration that :meth:`to_table` stored; raise if it is anything else."""
        if not isinstance(table, Mapping) or table.get("method") not in get_args(Method):
            raise invalid("calibration", type(table).__name__, "a table with a method", where)
        scores, risks = table.get("scores", []), table.get("risks", [])
        slope, offset = table.get("slope", 1.0), table.get("offset", 0.0)
        right = isinstance(scores, list) and isinstance(risks, list) and len(scores) == len(risks)
        right = right and (table["method"] == "isotonic") == bool(scores)
        if not right or not all(map(is_finite, [slope, offset, *scores, *risks])):
            raise InputError(f"The calibration in {where} is damaged: its numbers are missing or not finite.")
        curve = tuple(map(float, scores)), tuple(map(float, risks))
        return Calibration(table["method"], float(slope), float(offset), *curve)


def expit(logits: np.ndarray) -> np.ndarray:
    """Return the logistic function."""
    return 0.5 * (1 + np.tanh(0.5 * logits))


def calibrate(counts: ScoreCounts, method: Method) -> Calibration:
    """Fit a calibration to the counts of all clients."""
    if method == "none":
        return Calibration("none")
    counts.check_classes("Calibration")
    negatives, positives = counts.together
    return (_platt if method == "platt" else _isotonic)(counts.middles, positives, negatives)


def _platt(scores: np.ndarray, positives: np.ndarray, negatives: np.ndarray) -> Calibration:
    """Fit Platt's curve by Newton's method, with his targets, which keep it finite if the classes do not overlap.

    Platt, "Probabilistic outputs for support vector machines", 1999; scikit-learn's sigmoid calibration is the same.
    """
    n, p = negatives.sum(), positives.sum()
    weights, targets = positives + negatives, positives * (p + 1) / (p + 2) + negatives / (n + 2)
    centre = float((weights @ scores) / weights.sum())
    scale = float(np.sqrt(weights @ (scores - centre) ** 2 / weights.sum())) or 1.0
    design = np.stack([(scores - centre) / scale, np.ones_like(scores)], axis=1)
    theta = np.array([0.0, np.log((p + 1) / (n + 1))])

    def loss(theta: np.ndarray) -> float:
        margin = design @ theta
        return float((weights * np.logaddexp(0, margin) - targets * margin).sum())

    for _ in range(100):
        risks = expit(design @ theta)
        gradient = design.T @ (weights * risks - targets)
        hessian = (design * (weights * risks * (1 - risks))[:, None]).T @ design
        step = np.linalg.solve(hessian + 1e-10 * weights.sum() * np.eye(2), gradient)
        rate = 1.0
        while loss(theta - rate * step) > loss(theta) and rate > 1e-6:
            rate /= 2
        theta = theta - rate * step
        if np.abs(step).max() < 1e-10:
            break
    return Calibration("platt", float(theta[0] / scale), float(theta[1] - theta[0] * centre / scale))


def _isotonic(scores: np.ndarray, positives: np.ndarray, negatives: np.ndarray) -> Calibration:
    """Fit the increasing function that is nearest to the classes."""
    from sklearn.isotonic import IsotonicRegression  # takes a second to import

    weights = positives + negatives
    filled = weights > 0
    fitted = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip")
    fitted.fit(scores[filled], (positives / np.maximum(weights, 1))[filled], weights[filled])
    return Calibration("isotonic", 1.0, 0.0, tuple(fitted.X_thresholds_.tolist()), tuple(fitted.y_thresholds_.tolist()))
