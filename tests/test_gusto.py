"""Forty thousand patients of sixteen regions: federated regression is as good, and as calibrated, as the pooled one."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from sklearn.compose import make_column_transformer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import brier_score_loss, roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import fedstrata as fs
from fedstrata.experiments.build import schema_of
from fedstrata.experiments.config import read

ROOT = Path(__file__).parents[1]
FILE = Path(os.environ.get("FEDSTRATA_DATA", "")) / "sites" / "gusto" / "gusto.csv.gz"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("FEDSTRATA_DATA" not in os.environ, reason="needs the regions' file"),
    pytest.mark.filterwarnings("ignore:.*rows (equal|that are also):UserWarning"),
]


class Pooled(NamedTuple):
    """The regions' data, and what scikit-learn's regression on all training rows in one place reaches."""

    data: fs.FederatedData
    values: np.ndarray
    targets: np.ndarray
    auc: float
    brier: float


@cache
def pooled(split: int) -> Pooled:
    schema = schema_of(read(ROOT / "experiments" / "sites" / "gusto.toml", tuned=False))
    data = fs.FederatedData.from_tables(FILE, schema, holdout=0.3, seed=split)
    assert data.clients == 16 and data.client_test is not None
    (rows, classes), (values, targets) = (
        [a.numpy() for a in part.joined().of_client(0)] for part in (data.train, data.client_test)
    )
    encoded = [j for j, column in enumerate(schema.features) if column.kind == "category"]
    scaled = [j for j, column in enumerate(schema.features) if column.kind == "numeric"]
    prepare = make_column_transformer((OneHotEncoder(), encoded), (StandardScaler(), scaled), remainder="passthrough")
    model = make_pipeline(prepare, LogisticRegression(C=np.inf, max_iter=1000)).fit(rows, classes)
    platt = LogisticRegression(C=np.inf).fit(model.decision_function(rows)[:, None], classes)
    scores = model.decision_function(values)
    brier = brier_score_loss(targets, platt.predict_proba(scores[:, None])[:, 1])
    return Pooled(data, values, targets, roc_auc_score(targets, scores), brier)


METHODS = {
    "fedavg": (lambda net: fs.erm(net, "binary_cross_entropy"), fs.FedAvg(lr=0.3, steps=10)),
    "local_sgda": (lambda net: fs.auc(net, score="none"), fs.LocalSGDA(lr=0.2, dual_lr=0.5, steps=10)),
}


@pytest.mark.parametrize("split", range(3))
@pytest.mark.parametrize("name", METHODS)
def test_auc_and_risks_are_those_of_pooled_regression(name: str, split: int) -> None:
    problem, algorithm = METHODS[name]
    data, values, targets, auc, brier = pooled(split)
    net = fs.models.model("logreg", data.shape, outputs=1)
    options = {"batch_size": 32, "sampling": "balanced", "weighting": "samples", "threads": 1, "eval_every": 100}
    run = fs.train(problem(net), data, algorithm, rounds=100, **options)
    score, risk = run.predictor().scores_of(values)
    assert roc_auc_score(targets, score) == pytest.approx(run.summary["auc"], abs=1e-6)
    assert run.summary["auc"] == pytest.approx(auc, abs=0.003)
    assert risk.mean() == pytest.approx(targets.mean(), abs=0.005)
    assert brier_score_loss(targets, risk) == pytest.approx(brier, abs=0.001)
