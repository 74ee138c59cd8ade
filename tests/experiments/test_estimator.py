"""The classifier for people who think in scikit-learn's terms."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import fedstrata as fs

SKIPPED = {"check_array_api_input"}
"""A check that scikit-learn itself skips without an environment variable."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_scikit_learn_accepts_it() -> None:
    results = check_estimator(fs.FederatedClassifier(rounds=30), on_fail=None)
    failed = [(r["check_name"], r["exception"]) for r in results if r["status"] != "passed"]
    assert {name for name, _ in failed} <= SKIPPED, failed
    assert len(results) > 40


def test_sites_reach_what_pooled_regression_reaches() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    sites = np.random.default_rng(0).integers(0, 5, len(x))
    train, test = np.arange(len(x)) % 3 > 0, np.arange(len(x)) % 3 == 0
    ours = fs.FederatedClassifier(rounds=60).fit(x[train], y[train], sites=sites[train])
    theirs = make_pipeline(StandardScaler(), LogisticRegression()).fit(x[train], y[train])
    assert len(ours.sites_) == 5
    mine, pooled = (roc_auc_score(y[test], model.predict_proba(x[test])[:, 1]) for model in (ours, theirs))
    assert mine > pooled - 0.005


def test_a_model_that_ranks_has_calibrated_probabilities() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    model = fs.FederatedClassifier("local_sgda", {"lr": 0.02, "dual_lr": 0.1}, problem="auc", rounds=100).fit(x, y)
    assert abs(model.predict_proba(x)[:, 1].mean() - y.mean()) < 0.03
    assert roc_auc_score(y, model.decision_function(x)) > 0.98


def test_several_classes_missing_cells_and_cross_validation() -> None:
    x, y = load_iris(return_X_y=True)
    x[::7, 2] = np.nan
    assert cross_val_score(fs.FederatedClassifier(rounds=40), x, y, cv=3).mean() > 0.85


def test_wrong_arguments_are_named() -> None:
    x, y = load_iris(return_X_y=True)
    with pytest.raises(fs.InputError, match="problem must be 'erm'"):
        fs.FederatedClassifier(problem="auc").fit(x, y)
    with pytest.raises(ValueError, match="150 entries"):
        fs.FederatedClassifier().fit(x, y, sites=[1, 2, 3])
    with pytest.raises(ValueError, match="two classes"):
        fs.FederatedClassifier().fit(x, np.zeros(len(x)))
