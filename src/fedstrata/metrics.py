"""What is measured at an evaluation: loss, accuracy and AUC, pooled and over clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from fedstrata.data.batch import Batch
from fedstrata.data.federated import FederatedData, Part
from fedstrata.errors import InputError, invalid
from fedstrata.oracles import Oracles
from fedstrata.problem import Arrays, Problem

_ROWS = 1024

Measures = dict[str, float]


@dataclass(frozen=True)
class Evaluation:
    """How to measure a model.

    clients: on which data the per-client measures are taken: "test" (each client's held-out part), "train", "none",
             or "auto": the held-out part if there is one, the training data otherwise.

    Gives ``loss``, ``accuracy`` (with classes) and ``auc`` (with two) on the pooled test set, on the training data when
    there is none; and over the clients ``loss_mean``, ``loss_worst``, ``accuracy_mean``, ``accuracy_worst``,
    ``accuracy_spread`` (standard deviation), ``auc_mean`` and ``auc_worst`` (of clients that have both classes). A
    problem without a model gives ``loss``, its objective, on the clients' held-out parts where all have one, else on
    the training data.
    """

    clients: Literal["auto", "test", "train", "none"] = "auto"

    def __post_init__(self) -> None:
        if self.clients not in ("auto", "test", "train", "none"):
            raise invalid("clients of the evaluation", self.clients, "'auto', 'test', 'train' or 'none'")

    def __call__(self, problem: Problem, data: FederatedData, x: torch.Tensor, y: torch.Tensor | None) -> Measures:
        """Return the measures at ``x`` (and ``y``)."""
        if problem.predict is None or problem.losses is None:
            return {"loss": objective(problem, data, x, y)}
        outputs, targets = predict(problem, x, pooled(data))
        measures = _pooled_measures(problem, data.classes, outputs, targets)
        for name, values in self.per_client(problem, data, x).items():
            if len(values) and not np.isnan(values).all():
                measures[f"{name}_mean"] = float(np.nanmean(values))
                measures[f"{name}_worst"] = float((np.nanmax if name == "loss" else np.nanmin)(values))
                if name == "accuracy":
                    measures["accuracy_spread"] = float(np.nanstd(values))
        return measures

    def per_client(self, problem: Problem, data: FederatedData, x: torch.Tensor) -> dict[str, np.ndarray]:
        """Return ``loss``, ``accuracy`` and ``auc`` of each client; NaN where a client has no samples to measure on."""
        part = self.part(data)
        if part is None or problem.predict is None or problem.losses is None:
            return {}
        outputs, targets = predict(problem, x, tuple(a[part.rows.to(a.device)] for a in part.arrays))
        owner = np.repeat(np.arange(len(part.sizes)), part.sizes)
        counts = np.maximum(part.sizes, 1)
        empty = part.sizes == 0

        def means(values: torch.Tensor) -> np.ndarray:
            sums = np.bincount(owner, weights=values.double().cpu().numpy(), minlength=len(counts))
            return np.where(empty, np.nan, sums / counts)

        found = {"loss": means(problem.losses(outputs, targets))}
        if classifies(problem, outputs, data.classes):
            found["accuracy"] = means(correct(outputs, targets))
        if data.classes == 2:
            pairs = zip(
                np.split(scores(outputs).cpu().numpy(), part.offsets[1:-1]),
                np.split(targets.cpu().numpy(), part.offsets[1:-1]),
                strict=True,
            )
            found["auc"] = np.array([auc(s, t) for s, t in pairs])
        return found

    def part(self, data: FederatedData) -> Part | None:
        """Return the clients' data that the per-client measures are taken on."""
        if self.clients == "test" and data.client_test is None:
            raise InputError("Clients have no held-out test data: split with holdout > 0, or evaluate on 'train'.")
        if self.clients == "none":
            return None
        return data.train if self.clients == "train" or data.client_test is None else data.client_test


def measured_on(data: FederatedData, evaluation: Evaluation) -> dict[str, str]:
    """Say in words what the measures were taken on."""
    part = evaluation.part(data)
    clients = "nothing" if part is None else "training data" if part is data.train else "held-out test data"
    return {"pooled": "training data" if pooled_is_training(data) else "test data", "clients": clients}


def pooled_is_training(data: FederatedData) -> bool:
    """Whether there is no test data at all."""
    return data.test is None and data.client_test is None


def pooled(data: FederatedData) -> Arrays:
    """Return the pooled test set: the set's own, else the clients' held-out parts, else the training data."""
    if data.test is not None:
        return data.test
    part = data.train if data.client_test is None else data.client_test
    return tuple(a[part.rows.to(a.device)] for a in part.arrays)


@torch.no_grad()
def predict(problem: Problem, x: torch.Tensor, arrays: Arrays) -> Arrays:
    """Return the model's outputs on all rows, and their targets."""
    assert problem.predict is not None
    inputs, targets = arrays
    parts = []
    for rows in torch.split(inputs, _ROWS):
        parts.append(problem.predict(x, rows if rows.is_floating_point() else rows.long()))
    return torch.cat(parts), targets


def _pooled_measures(problem: Problem, classes: int, outputs: torch.Tensor, targets: torch.Tensor) -> Measures:
    assert problem.losses is not None
    measures = {"loss": float(problem.losses(outputs, targets).double().mean())}
    if classifies(problem, outputs, classes):
        measures["accuracy"] = float(correct(outputs, targets).double().mean())
    if classes == 2:
        measures["auc"] = auc(scores(outputs).cpu().numpy(), targets.cpu().numpy())
    return measures


def scores(outputs: torch.Tensor) -> torch.Tensor:
    """Return one score per sample, larger for class 1: the logit, or the difference of two."""
    flat = outputs.reshape(len(outputs), -1)
    return flat[:, 0] if flat.shape[1] == 1 else flat[:, 1] - flat[:, 0]


def classifies(problem: Problem, outputs: torch.Tensor, classes: int) -> bool:
    """Whether outputs say which class: a column for each, or one logit for two. Squared errors have no classes."""
    columns = outputs.reshape(len(outputs), -1).shape[1]
    squared = getattr(problem.losses, "__name__", "") == "squared"
    return not squared and classes > 1 and (columns == classes or (columns == 1 and classes == 2))


def correct(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return 1 where the predicted class is the target, else 0."""
    flat = outputs.reshape(len(outputs), -1)
    predicted = (flat[:, 0] > 0).long() if flat.shape[1] == 1 else flat.argmax(1)
    return (predicted == targets).to(outputs.dtype)


def auc(scores: np.ndarray, targets: np.ndarray) -> float:
    """Return the area under the ROC curve, ties counted half; NaN when a class is missing."""
    positives = int(targets.sum())
    negatives = len(targets) - positives
    if positives == 0 or negatives == 0:
        return float("nan")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((ranks[targets == 1].sum() - positives * (positives + 1) / 2) / (positives * negatives))


@torch.no_grad()
def objective(problem: Problem, data: FederatedData, x: torch.Tensor, y: torch.Tensor | None) -> float:
    """Return M_k[ f_k(G_k(x), y) ], uniform over clients, one client at a time.

    It is taken on the clients' held-out parts where all of them have one, else on their training data. With a global
    inner mean f_k meets M_j[ G_j(x) ].
    """
    oracles = Oracles(problem)
    clients = range(data.clients)
    held = data.client_test if data.client_test is not None and data.client_test.sizes.all() else None

    def everything(client: int, level: int) -> Batch:
        part = held or data.part(level)
        return part.gather(np.array([client]), np.arange(part.sizes[client])[None], None, False)

    inner = [x.unsqueeze(0)] * data.clients
    for k in range(1, len(problem.levels) + 1):
        inner = [oracles.level(k, inner[c], everything(c, k)) for c in clients]
    if problem.inner_mean == "global":
        inner = [torch.stack(inner).mean(0)] * data.clients
    dual = None if y is None else y.unsqueeze(0)
    values = [oracles.outer(inner[c], dual, everything(c, 0)) for c in clients]
    return float(torch.cat(values).double().mean())
