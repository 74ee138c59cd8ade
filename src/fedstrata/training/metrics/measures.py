"""Measures of a model's outputs: loss, accuracy, AUC, and statistics of a measure over clients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from fedstrata.core.errors import invalid
from fedstrata.data.batch import stored
from fedstrata.problems.erm import scores, squared
from fedstrata.problems.problem import Arrays, Problem
from fedstrata.training.metrics.catalogue import measure

Measures = dict[str, float]

ROWS = 256
"""Rows per forward pass, more if they are small: activations of many more outgrow the caches."""

PASS_BYTES = 1 << 20
"""Bytes of small rows per forward pass."""


@torch.no_grad()
def predict(problem: Problem, x: torch.Tensor, arrays: Arrays) -> Arrays:
    """Return the model's outputs on all rows, and their targets."""
    assert problem.predict is not None
    *inputs, targets = arrays
    rows = max(ROWS, PASS_BYTES // max(1, sum(a[:1].nbytes for a in inputs)))
    passes = zip(*(torch.split(a, rows) for a in inputs), strict=True)
    return torch.cat([problem.predict(x, *map(stored, some)) for some in passes]), targets


def pooled_measures(problem: Problem, classes: int, outputs: torch.Tensor, targets: torch.Tensor) -> Measures:
    """Return the loss of the outputs on one set of samples, and accuracy and AUC where they apply."""
    assert problem.losses is not None
    measures = {"loss": float(problem.losses(outputs, targets).double().mean())}
    if classifies(problem, outputs, classes):
        right = correct(outputs, targets).double()
        measures["accuracy"] = float(right.mean())
        of_class, samples = targets.long(), torch.bincount(targets.long())
        accuracies = torch.bincount(of_class, right)[samples > 0] / samples[samples > 0]
        measures["accuracy_worst_class"] = float(accuracies.min())
    if has_auc(outputs, classes):
        measures["auc"] = auc(scores(outputs).cpu().numpy(), targets.cpu().numpy())
    return measures


def distances(known: tuple[torch.Tensor, torch.Tensor | None], x: torch.Tensor, y: torch.Tensor | None) -> Measures:
    """Return the distances of x and y from the known solution."""
    square = float(((x - known[0]) ** 2).sum())
    if y is None or known[1] is None:
        return {"distance": math.sqrt(square)}
    dual = float(((y - known[1]) ** 2).sum())
    return {"distance": math.sqrt(square + dual), "distance_dual": math.sqrt(dual)}


def over_clients(name: str, values: np.ndarray, large: np.ndarray | None = None) -> Measures:
    """Return the mean, the worst and, except for AUC, the spread of a measure given for each client.

    large: a mask of the clients that can be the worst; by default all. If there is none, there is no worst.
    """
    if not len(values):
        return {}
    measures = {f"{name}_mean": float(values.mean())}
    judged = values if large is None else values[large]
    if len(judged):
        worst = judged.min() if measure(f"{name}_worst").higher_is_better else judged.max()
        measures[f"{name}_worst"] = float(worst)
    if name != "auc":
        with np.errstate(invalid="ignore", over="ignore"):  # a loss may be infinite
            measures[f"{name}_spread"] = float(values.std())
    return measures


def classifies(problem: Problem, outputs: torch.Tensor, classes: int) -> bool:
    """Whether the outputs predict a class: one column per class, or one logit for two; not with the squared loss."""
    columns = outputs.reshape(len(outputs), -1).shape[1]
    return (
        problem.losses is not squared
        and not problem.ranks_only
        and classes > 1
        and (columns == classes or (columns == 1 and classes == 2))
    )


def has_auc(outputs: torch.Tensor, classes: int) -> bool:
    """Whether the outputs rank the samples of two classes: one score for each, or one per class."""
    return classes == 2 and outputs.reshape(len(outputs), -1).shape[1] <= 2


def correct(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return 1 where the predicted class is the target, else 0."""
    flat = outputs.reshape(len(outputs), -1)
    predicted = (flat[:, 0] > 0).long() if flat.shape[1] == 1 else flat.argmax(1)
    return (predicted == targets).to(outputs.dtype)


def auc(scores: np.ndarray, targets: np.ndarray) -> float:
    """Return the area under the ROC curve, with ties counted half; NaN if a class is missing."""
    return float(pairs_of(scores, targets, np.array([len(scores)])).areas[0])


class Pairs(NamedTuple):
    """The pairs of a positive and a negative of the same client, for each of C clients.

    ordered: how many of them are in the right order, with ties counted half: [C]. It is exact.
    positives, negatives: the number of samples of either class: [C].
    """

    ordered: np.ndarray
    positives: np.ndarray
    negatives: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """How many pairs each client has: [C]."""
        counts: np.ndarray = self.positives * self.negatives
        return counts

    @property
    def areas(self) -> np.ndarray:
        """The AUC of each client: [C]; NaN if a class is missing."""
        with np.errstate(invalid="ignore"):  # 0 / 0
            areas: np.ndarray = self.ordered / self.counts
        return areas

    @property
    def within(self) -> float:
        """The share of all pairs that are in the right order; NaN if there are none."""
        total = self.counts.sum()
        return float(self.ordered.sum() / total) if total else math.nan

    def large(self, rows: int) -> np.ndarray:
        """Return which clients have at least so many samples of each class: [C]."""
        large: np.ndarray = np.minimum(self.positives, self.negatives) >= rows
        return large


def pairs_of(scores: np.ndarray, targets: np.ndarray, sizes: np.ndarray) -> Pairs:
    """Return the pairs of each client, and how many are ordered; client k has the next ``sizes[k]`` of the samples."""
    owner = np.repeat(np.arange(len(sizes), dtype=np.min_scalar_type(len(sizes))), sizes)  # small numbers sort faster
    order, ranks = _ranked(scores, owner, sizes)
    owner, positive = owner[order], targets[order] == 1
    positives = np.bincount(owner, positive, len(sizes))
    above = np.bincount(owner, np.where(positive, ranks, 0), len(sizes)) - positives * (positives + 1) / 2
    return Pairs(above, positives, sizes - positives)


def _ranked(scores: np.ndarray, owner: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return an order of the samples by owner and score, and their ranks in this order, from 1 for each owner.

    Tied samples share the mean of their ranks: sums of ranks are exact.
    """
    order = np.argsort(scores)
    order = order[np.argsort(owner[order], kind="stable")]
    scores, owner = scores[order], owner[order]
    tied = (scores[1:] == scores[:-1]) | (np.isnan(scores[1:]) & np.isnan(scores[:-1]))
    first = np.flatnonzero(np.append(True, ~tied | (owner[1:] != owner[:-1]))[: len(scores)])
    counts = np.diff(first, append=len(scores))
    return order, np.repeat(first + (counts + 1) / 2, counts) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def midranks(scores: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Return the rank of each sample's score among those of the same owner, from 1; tied samples share the mean."""
    order, ranks = _ranked(scores, owner, np.bincount(owner))
    out = np.empty(len(scores))
    out[order] = ranks
    return out


TAKEN = ("algorithm", "variant", "method", "seed", "seeds", "diverged", "values", "errors")
ENDINGS = ("_std", "_seeds", "_low", "_high")
"""Names and endings of names that tables use themselves."""

LARGEST = 1e300
"""Larger numbers count as infinite: their mean would be."""


def as_numbers(measures: Any, row: Mapping[str, Any]) -> Measures:
    """Return what an evaluation measured as numbers; raise if it is anything else, or a name is already in the row."""
    wants = "a table of numbers by name, {'loss': 0.5}"
    if not isinstance(measures, Mapping):
        raise invalid("result of evaluate", type(measures).__name__, wants)
    numbers = {}
    for name, value in measures.items():
        if not isinstance(name, str):
            raise invalid("result of evaluate", measures, wants)
        if name in TAKEN or name.endswith(ENDINGS):
            ends = ", ".join(ENDINGS)
            raise invalid("name of a measure", name, f"other than those of tables ({', '.join(TAKEN)}, ...{ends})")
        if name in row:
            raise invalid("name of a measure", name, f"different from those of the row: {', '.join(row)}", "evaluate")
        numbers[name] = _number(name, value)
    return numbers


def _number(name: str, value: Any) -> float:
    try:
        if not isinstance(value, str):
            number = float(value)
            return math.copysign(math.inf, number) if abs(number) > LARGEST else number
    except (TypeError, ValueError, RuntimeError, OverflowError):  # a tensor of several numbers, for example
        pass
    raise invalid(f"measure {name!r} of evaluate", value, "a number")
