"""The influence of test rows on the measures of a run, from which their share of the uncertainty follows."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch

from fedstrata.data.federated import FederatedData
from fedstrata.problems.erm import scores
from fedstrata.problems.problem import Problem
from fedstrata.training.local import LocalRun
from fedstrata.training.metrics.catalogue import WITHIN
from fedstrata.training.metrics.evaluation import Evaluation, pooled
from fedstrata.training.metrics.measures import classifies, correct, has_auc, midranks, predict
from fedstrata.training.run import Run

FEWEST = {"auc": "fewest", WITHIN: "fewest_within"}
"""For each measure of a ranking, the name of the number of test rows that it rests on."""


@torch.no_grad()
def rows_of(
    run: Run | LocalRun, data: FederatedData, evaluation: Evaluation | None = None
) -> dict[str, np.ndarray] | None:
    """Return the influence of each row of the pooled test data on each measure, [rows]; None without a model.

    To first order, a measure changes by the mean of the influences of the rows that are drawn. Those of several models
    are averaged, as their measures are; in AUC within clients, each client's rows have its own model. That has
    influences only if the pooled rows are those that the clients are measured on.

    ``mark`` identifies the rows: equal marks mean the same test data. ``training_rows`` is the number of training rows,
    [1], and ``fewest`` that of test rows in the rarest class, [1]; ``fewest_within`` counts only clients with both.
    """
    runs = run.runs if isinstance(run, LocalRun) else [run]
    each = [_outputs(one, data) for one in runs]
    found = [one for one in each if one is not None]
    if len(found) < len(each):
        return None
    arrays = pooled(data)
    influences = [_influences(*one, data.classes) for one in found]
    means = {name: np.mean([one[name] for one in influences], axis=0) for name in influences[0]}
    targets, mark = arrays[-1].cpu().numpy(), marks_of(arrays)
    fewest = np.unique(targets, return_counts=True)[1].min() if "auc" in means else len(mark)
    about = {"training_rows": data.sizes.sum(keepdims=True), "fewest": np.array([fewest])}
    owners = _owners(data, evaluation or Evaluation())
    if "auc" in means and owners is not None:
        score = np.stack([scores(outputs).cpu().numpy() for _, outputs, _ in found])
        own = score[owners if isinstance(run, LocalRun) else 0, np.arange(len(owners))]
        means[WITHIN], fewest = within_influence(own, targets, owners)
        about[FEWEST[WITHIN]] = np.array([fewest])
    order = np.argsort(mark, kind="stable")  # the same order whoever holds the rows
    return {name: values[order] for name, values in means.items()} | {"mark": mark[order]} | about


def _owners(data: FederatedData, evaluation: Evaluation) -> np.ndarray | None:
    """Return which client has each of the pooled rows; None if clients are not measured on these."""
    part, whole = evaluation.part(data), data.train if data.client_test is None else data.client_test
    arrays = whole.arrays if data.test is None else data.test
    if part is None or not all(a is b for a, b in zip(arrays, part.arrays, strict=True)):
        return None
    rows = whole.rows.numpy() if data.test is None else np.arange(len(arrays[-1]))
    owners = np.full(len(arrays[-1]), -1)
    owners[part.rows.numpy()] = np.repeat(np.arange(len(part.sizes)), part.sizes)
    return owners[rows] if len(rows) == len(part.rows) and (owners[rows] >= 0).all() else None


def marks_of(arrays: Sequence[torch.Tensor]) -> np.ndarray:
    """Return a number for each row that identifies it: a digest of its inputs and its target."""
    columns = [np.ascontiguousarray(a.cpu().numpy()).reshape(len(a), -1) for a in arrays]
    rows = zip(*columns, strict=True)
    digests = [blake2b(b"".join(part.tobytes() for part in row), digest_size=8).digest() for row in rows]
    return np.frombuffer(b"".join(digests), dtype=np.uint64)


def _outputs(run: Run, data: FederatedData) -> tuple[Problem, torch.Tensor, torch.Tensor] | None:
    """Return the outputs of a run's model on the pooled rows, and their targets; None if losses are not finite."""
    problem, x = run.problem, run.x
    data = data if run.fitted is None or data.plan is None else data.prepared(run.fitted)
    if problem.predict is None or problem.losses is None:
        return None
    outputs, targets = predict(problem, x, pooled(data.to(x.device, x.dtype)))
    return (problem, outputs, targets) if bool(problem.losses(outputs, targets).isfinite().all()) else None


def _influences(problem: Problem, outputs: torch.Tensor, targets: torch.Tensor, classes: int) -> dict[str, np.ndarray]:
    assert problem.losses is not None
    losses = problem.losses(outputs, targets).double().cpu().numpy()
    influences = {"loss": losses - losses.mean()}
    if classifies(problem, outputs, classes):
        right = correct(outputs, targets).double().cpu().numpy()
        influences["accuracy"] = right - right.mean()
    if has_auc(outputs, classes):
        influences["auc"] = auc_influence(scores(outputs).cpu().numpy(), targets.cpu().numpy())
    return influences


def auc_influence(score: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the influence of each row on AUC: how far its share of won pairs is from the mean, over its class's share.

    DeLong, DeLong, Clarke-Pearson: "Comparing the areas under two or more correlated receiver operating characteristic
    curves", Biometrics 1988.
    """
    positive = target == 1
    influence = np.zeros(len(score))
    if positive.all() or not positive.any():
        return influence
    for own, other, sign in ((positive, ~positive, 1), (~positive, positive, -1)):
        others = np.sort(sign * score[other])
        mine = sign * score[own]
        won = (np.searchsorted(others, mine, "left") + np.searchsorted(others, mine, "right")) / (2 * len(others))
        count = own.sum()
        unbiased = np.sqrt(count / (count - 1)) if count > 1 else np.nan  # one row says nothing about its class
        influence[own] = (won - won.mean()) * len(score) / count * unbiased
    return influence


def within_influence(score: np.ndarray, target: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the influence of each row on AUC within clients, and how many rows of the rarer class that rests on.

    A row is in as many pairs as its client has rows of the other class. Its influence is how many more of them are in
    the right order than with the share of all pairs, relative to all pairs. ``owners`` has the client of each row.
    """
    influence, positive = np.zeros(len(score)), target == 1
    counts = np.stack([np.bincount(owners, own, owners.max() + 1) for own in (~positive, positive)])
    pairs = counts.prod(0).sum()
    if not pairs:
        return influence, 0
    below = midranks(score, owners) - midranks(score, 2 * owners + positive)  # of the other class, with ties half
    won = np.where(positive, below, counts[1][owners] - below)
    others = counts[1 - positive.astype(np.int64), owners]
    area = won[positive].sum() / pairs
    numbers = [int(of_class[counts.all(0)].sum()) for of_class in counts]
    for own, count in zip((~positive, positive), numbers, strict=True):
        unbiased = np.sqrt(count / (count - 1)) if count > 1 else np.nan
        influence[own] = (won - area * others)[own] * len(score) / pairs * unbiased
    return influence, min(numbers)
