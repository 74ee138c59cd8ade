"""Sites as they are: few rows, one class, no positives. What is measured of each, and AUC within sites."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

import fedstrata as fs
from fedstrata.experiments import tables
from fedstrata.experiments.influence import rows_of, within_influence
from fedstrata.experiments.judge import Difference
from fedstrata.training.metrics.measures import pairs_of

COUNTS = [(30, 12), (9, 1), (1, 0), (12, 0), (0, 3), (5, 5), (4, 6), (1, 1)]
"""Negatives and positives of eight sites: large ones, one row, one class, one positive."""


def sites(counts: list[tuple[int, int]] = COUNTS, seed: int = 0, decimals: int = 1) -> fs.FederatedData:
    """Sites with these rows, whose levels differ: a model may rank well within sites and badly across them."""
    rng, clients = np.random.default_rng(seed), []
    for site, (negatives, positives) in enumerate(counts):
        targets = rng.permutation(np.repeat([0, 1], [negatives, positives]))
        inputs = rng.normal(size=(len(targets), 2)) + targets[:, None] + 3 * (site % 2)
        clients.append((np.round(inputs, decimals), targets))
    return fs.FederatedData.from_arrays(clients, classes=2)


def one_logit() -> fs.Problem:
    torch.manual_seed(0)
    return fs.erm(nn.Linear(2, 1, dtype=torch.float64), "binary_cross_entropy")


def scored(problem: fs.Problem, data: fs.FederatedData, client: int) -> tuple[np.ndarray, np.ndarray]:
    part = data.train if data.client_test is None else data.client_test
    inputs, targets = part.of_client(client)
    assert problem.predict is not None
    with torch.no_grad():
        return problem.predict(problem.x0, inputs).numpy().ravel(), targets.numpy()


def both(targets: np.ndarray) -> bool:
    return 0 < targets.sum() < len(targets)


@pytest.mark.parametrize("decimals", [0, 1, 8], ids=["many ties", "some ties", "no ties"])
def test_auc_within_is_that_of_scikit_learn_weighted_by_pairs(decimals: int) -> None:
    data, problem = sites(decimals=decimals), one_logit()
    measured = fs.Evaluation()(problem, data, problem.x0, None)
    each = [(s, t) for s, t in (scored(problem, data, k) for k in range(data.clients)) if both(t)]
    areas = [roc_auc_score(t, s) for s, t in each]
    pairs = [t.sum() * (1 - t).sum() for _, t in each]
    assert measured["auc_within"] == pytest.approx(np.average(areas, weights=pairs), abs=1e-12)
    right = sum(((s[t == 1][:, None] > s[t == 0]) + 0.5 * (s[t == 1][:, None] == s[t == 0])).sum() for s, t in each)
    assert measured["auc_within"] == pytest.approx(right / sum(pairs), abs=1e-15)
    assert measured["auc_within"] != pytest.approx(measured["auc"], abs=0.01)


@pytest.mark.parametrize("own_rows", [1, 2, 5, 100])
def test_small_sites_have_no_auc_of_their_own_and_never_the_worst_accuracy(own_rows: int) -> None:
    data, problem, evaluation = sites(), one_logit(), fs.Evaluation(own_rows=own_rows)
    measured = evaluation(problem, data, problem.x0, None)
    each = [scored(problem, data, k) for k in range(data.clients)]
    areas = [roc_auc_score(t, s) for s, t in each if min(t.sum(), (1 - t).sum()) >= own_rows]
    if areas:
        assert (measured["auc_mean"], measured["auc_worst"]) == (pytest.approx(np.mean(areas)), min(areas))
    else:
        assert not {"auc_mean", "auc_worst"} & set(measured)
    accuracies = [((s > 0) == t).mean() for s, t in each]
    large = [a for a, (_, t) in zip(accuracies, each, strict=True) if len(t) >= own_rows]
    assert measured["accuracy_mean"] == pytest.approx(np.mean(accuracies)), "the mean is over all sites"
    assert measured.get("accuracy_worst") == (min(large) if large else None)
    about = evaluation.about(problem, data, problem.x0, None)
    assert [v is not None for v in about["per_client"]["auc"]] == [min(c) >= own_rows for c in COUNTS]
    assert [v is not None for v in about["per_client"]["accuracy"]] == [sum(c) >= own_rows for c in COUNTS]
    assert None not in about["per_client"]["loss"]
    assert about["per_client"]["pairs"] == [a * b for a, b in COUNTS]
    assert about["measured_on"]["auc"] == f"{len(areas)} of 8 sites measured"
    assert about["measured_on"].get("accuracy") == (f"{len(large)} of 8 sites measured" if own_rows > 1 else None)


def test_nothing_is_said_of_sites_if_all_are_measured() -> None:
    data, problem = sites([(30, 12), (20, 9)]), one_logit()
    about = fs.Evaluation().about(problem, data, problem.x0, None)
    assert about["measured_on"] == {"pooled": "training data", "clients": "training data"}


def test_the_summary_and_the_print_out_say_how_many_sites_are_measured(tmp_path: Path) -> None:
    data, problem = sites(), one_logit()
    run = fs.train(problem, data, fs.FedAvg(lr=0.1, steps=2), rounds=2, batch_size=4, threads=1, out=tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["measured_on"]["auc"] == "2 of 8 sites measured" == run.summary["measured_on"]["auc"]
    said = tables.measured(summary)
    assert "A site's own AUC: 2 of 8 sites measured." in said
    assert "A site's own accuracy: 5 of 8 sites measured." in said


def test_without_a_site_with_both_classes_there_is_no_auc_within() -> None:
    data, problem = sites([(4, 0), (0, 3)]), one_logit()
    assert not {"auc_within", "auc_mean"} & set(fs.Evaluation()(problem, data, problem.x0, None))


def test_auc_within_can_be_tuned_watched_and_judged() -> None:
    data = sites([(40, 12), (30, 9), (20, 2), (15, 0)] * 2).with_holdout(0.3)

    def problem(seed: int) -> fs.Problem:
        torch.manual_seed(seed)
        return fs.erm(nn.Linear(2, 1, dtype=torch.float64), "binary_cross_entropy")

    options: dict[str, Any] = {"rounds": 4, "batch_size": 8, "threads": 1}
    methods = {"short": (problem, fs.FedAvg(lr=1e-4, steps=1)), "long": (problem, fs.FedAvg(lr=0.5, steps=10))}
    result = fs.compare(methods, data, seeds=3, measure="auc_within", **options)
    judged = result.differences()["long"]
    assert isinstance(judged, Difference) and judged.measure == "auc_within" and judged.over_rows
    assert "AUC within clients" in result.conditions and "test rows" in result.conditions
    run = fs.train(problem(0), data, fs.FedAvg(lr=0.5), patience=2, watch="auc_within", **options)
    assert 0 < run.history[0]["validation_auc_within"] < 1
    tuned = fs.tune({"long": methods["long"]}, data, trials=2, seeds=1, measure="auc_within", **options)
    assert tuned.best


# --- the uncertainty over rows ---------------------------------------------------------------------------------------


def within(score: np.ndarray, target: np.ndarray, owners: np.ndarray) -> float:
    order = np.argsort(owners, kind="stable")
    return pairs_of(score[order], target[order], np.bincount(owners)).within


def test_the_influence_of_a_row_is_what_its_removal_changes() -> None:
    rng = np.random.default_rng(0)
    owners = rng.integers(0, 12, 400)
    target = (rng.random(400) < 0.3).astype(np.int64)
    target[owners == 3] = 0
    score = np.round(rng.normal(size=400) + target + owners % 3, 1)
    influence, fewest = within_influence(score, target, owners)
    assert fewest == target.sum() and not influence[owners == 3].any()
    assert influence.mean() == pytest.approx(0, abs=1e-3)
    for row in (0, 7, 100, 399):
        kept = np.arange(400) != row
        change = within(score[kept], target[kept], owners[kept]) - within(score, target, owners)
        assert change == pytest.approx(-influence[row] / 400, abs=4e-5)


def test_the_variance_over_rows_is_that_of_the_bootstrap() -> None:
    rng = np.random.default_rng(1)
    owners, target = rng.integers(0, 6, 300), (rng.random(300) < 0.3).astype(np.int64)
    score = rng.normal(size=300) + target
    drawn = [within(score[r], target[r], owners[r]) for r in rng.integers(0, 300, (1500, 300))]
    influence, _ = within_influence(score, target, owners)
    assert (influence**2).sum() / 300**2 == pytest.approx(np.var(drawn), rel=0.15)


def test_a_site_alone_ranks_its_own_rows() -> None:
    """The local baseline: AUC within sites, by the pairs of each, and how many sites have an AUC of their own."""
    data = sites([(40, 12), (30, 9), (20, 4), (15, 0), (1, 0)]).with_holdout(0.3)
    problem = one_logit()
    local = fs.train_local(problem, data, fs.FedAvg(lr=0.3, steps=5), rounds=3, batch_size=8, threads=1)
    part = data.client_test
    assert part is not None
    right = pairs = 0.0
    for k, run in enumerate(local.runs):
        inputs, targets = (a.numpy() for a in part.of_client(k))
        if both(targets):
            score = run.problem.predict(run.x, torch.from_numpy(inputs)).numpy().ravel()  # type: ignore[misc]
            here = targets.sum() * (1 - targets).sum()
            right, pairs = right + roc_auc_score(targets, score) * here, pairs + here
    assert local.final["auc_within"] == pytest.approx(right / pairs, abs=1e-12)
    rows = rows_of(local, data)
    assert rows is not None and len(rows["auc_within"]) == len(rows["mark"])
