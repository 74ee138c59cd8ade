"""The influence of test rows on the measures of a run, from which their share of the uncertainty follows."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch

from fedstrata.data.federated import FederatedData
from fedstrata.problems.erm import scores
from fedstrata.training.local import LocalRun
from fedstrata.training.metrics.evaluation import pooled
from fedstrata.training.metrics.measures import classifies, correct, has_auc, predict
from fedstrata.training.run import Run


@torch.no_grad()
def rows_of(run: Run | LocalRun, data: FederatedData) -> dict[str, np.ndarray] | None:
    """Return the influence of each row of the pooled test data on each measure, [rows]; None without a model.

    To first order, a measure changes by the mean of the influences of the rows that are drawn. Those of several models
    are averaged, as their measures are. ``mark`` identifies the rows: equal marks mean the same test data.
    ``training_rows`` is the number of training rows, [1], and ``fewest`` that of test rows in the rarest class, [1].
    """
    each = [_influences(one, data) for one in (run.runs if isinstance(run, LocalRun) else [run])]
    rows = [one for one in each if one is not None]
    if len(rows) < len(each):
        return None
    means = {name: np.mean([one[name] for one in rows], axis=0) for name in rows[0]}
    arrays = pooled(data)
    targets, mark = arrays[-1], marks_of(arrays)
    order = np.argsort(mark, kind="stable")  # the same order whoever holds the rows
    fewest = np.unique(targets.cpu().numpy(), return_counts=True)[1].min() if "auc" in means else len(mark)
    about = {"mark": mark[order], "training_rows": data.sizes.sum(keepdims=True), "fewest": np.array([fewest])}
    return {name: values[order] for name, values in means.items()} | about


def marks_of(arrays: Sequence[torch.Tensor]) -> np.ndarray:
    """Return a number for each row that identifies it: a digest of its inputs and its target."""
    columns = [np.ascontiguousarray(a.cpu().numpy()).reshape(len(a), -1) for a in arrays]
    rows = zip(*columns, strict=True)
    digests = [blake2b(b"".join(part.tobytes() for part in row), digest_size=8).digest() for row in rows]
    return np.frombuffer(b"".join(digests), dtype=np.uint64)


def _influences(run: Run, data: FederatedData) -> dict[str, np.ndarray] | None:
    problem, x = run.problem, run.x
    data = data if run.fitted is None or data.plan is None else data.prepared(run.fitted)
    if problem.predict is None or problem.losses is None:
        return None
    outputs, targets = predict(problem, x, pooled(data.to(x.device, x.dtype)))
    losses = problem.losses(outputs, targets).double().cpu().numpy()
    if not np.isfinite(losses).all():
        return None
    influences = {"loss": losses - losses.mean()}
    if classifies(problem, outputs, data.classes):
        right = correct(outputs, targets).double().cpu().numpy()
        influences["accuracy"] = right - right.mean()
    if has_auc(outputs, data.classes):
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
