"""Baselines: each client alone, and all data in one place."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.data.part import Part
from fedstrata.data.tables import Schema
from fedstrata.data.tables.preparation import Preparation
from support import without_seconds

REAL = os.environ.get("FEDSTRATA_DATA", "")
SITES = ("cleveland", "hungarian", "switzerland", "va")


def digits(clients: int = 4, holdout: float = 0.25) -> fs.FederatedData:
    return fs.data.digits().imbalance(0.3).split(fs.partition.iid(), clients=clients, seed=0, holdout=holdout)


def heart_disease() -> fs.FederatedData:
    """Return the patients of four hospitals, standardised over all of them, missing values replaced by means."""
    rows = [
        np.genfromtxt(Path(REAL) / "sites" / "heart-disease" / f"processed.{site}.data", delimiter=",")
        for site in SITES
    ]
    features = np.concatenate(rows)[:, :13]
    mean, spread = np.nanmean(features, 0), np.nanstd(features, 0)
    pairs = []
    for site in rows:
        filled = np.where(np.isnan(site[:, :13]), mean, site[:, :13])
        pairs.append((((filled - mean) / spread).astype(np.float64), (site[:, 13] > 0).astype(np.int64)))
    return fs.FederatedData.from_arrays(pairs, classes=2, client_names=SITES).with_holdout(0.3, seed=0)


DATA = {
    "digits": digits,
    "heart-disease": pytest.param(
        heart_disease, marks=pytest.mark.skipif(not REAL, reason="FEDSTRATA_DATA is not set"), id="heart-disease"
    ),
}


def network(data: fs.FederatedData) -> nn.Module:
    shape = tuple(data.train.arrays[0].shape[1:])
    return fs.models.model("logreg", shape, 1, seed=0).to(data.train.arrays[0].dtype)


BUILT: dict[str, tuple[Any, fs.Algorithm]] = {
    "erm": (lambda m: fs.erm(m, "binary_cross_entropy"), fs.FedAvg(lr=0.3, steps=5)),
    "auc": (lambda m: fs.auc(m), fs.LocalSGDA(lr=0.3, steps=5)),
    "robust": (lambda m: fs.robust(m, loss="binary_cross_entropy"), fs.ComFedL(lr=0.3, steps=5)),
    "maml": (lambda m: fs.maml(m, inner_lr=0.1, loss="binary_cross_entropy"), fs.ComFedL(lr=0.3, steps=5)),
}


@pytest.mark.parametrize("kind", BUILT)
@pytest.mark.parametrize("load", DATA.values())
def test_both_baselines_work_for_every_problem(load: Any, kind: str) -> None:
    data = load()
    build, algorithm = BUILT[kind]
    problem = build(network(data))
    methods = {kind: (problem, algorithm)}
    result = fs.compare(methods, data, seeds=2, baselines=("local", "pooled"), rounds=8, batch_size=16, threads=1)
    for label in ("local", "pooled"):
        (first, _) = result.outcomes[label]
        assert first.final is not None and first.final["auc"] > 0.6
        assert len(first.history) == len(result.outcomes[kind][0].history)
    local, pooled = (result.outcomes[label][0].final for label in ("local", "pooled"))
    federated = result.outcomes[kind][0].final
    assert local is not None and pooled is not None and federated is not None
    assert local["bytes_up"] == 0 and pooled["samples"] == federated["samples"]
    assert isinstance(result.verdicts[0], str) and len(result.verdicts) == 2


@pytest.mark.skipif(not REAL, reason="FEDSTRATA_DATA is not set")
def test_pooled_training_is_logistic_regression() -> None:
    """AUC on the held-out patients of four hospitals, to three digits."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    data = heart_disease()
    (inputs, targets), test = (data.pooled().train.of_client(0), data.client_test)
    assert test is not None
    held = test.joined().of_client(0)
    fitted = LogisticRegression(C=np.inf, max_iter=10_000, tol=1e-10).fit(inputs.numpy(), targets.numpy())
    expected = roc_auc_score(held[1].numpy(), fitted.decision_function(held[0].numpy()))
    problem = fs.erm(network(data), "binary_cross_entropy")
    run = fs.train(problem, data.pooled(), fs.FedAvg(lr=1.0, steps=50), rounds=60, threads=1, eval_every=60)
    assert run.summary["auc"] == pytest.approx(expected, abs=5e-4)
    assert run.summary["auc"] > 0.8


def test_local_is_a_run_of_each_client() -> None:
    data = digits()
    problem, algorithm = fs.erm(network(data), "binary_cross_entropy"), fs.FedAvg(lr=0.3, steps=3)
    options = {"rounds": 4, "batch_size": 8, "threads": 1, "eval_every": 2}
    local = fs.train_local(problem, data, algorithm, participation=2, **options)
    runs = [fs.train(problem, data.only(np.array([k])), algorithm, **options) for k in range(4)]
    for one, other in zip(local.runs, runs, strict=True):
        assert torch.equal(one.x, other.x)
    last = [run.history[-1] for run in runs]
    assert local.final["auc"] == pytest.approx(np.mean([row["auc"] for row in last]))
    assert local.final["auc_mean"] == pytest.approx(np.mean([row["auc_mean"] for row in last]))
    assert local.final["auc_worst"] == min(row["auc_mean"] for row in last)
    assert local.final["loss_worst"] == max(row["loss_mean"] for row in last)
    assert local.final["loss_spread"] == pytest.approx(np.std([row["loss_mean"] for row in last]))
    assert local.final["samples"] == sum(row["samples"] for row in last)
    assert [row["round"] for row in local.history] == [0, 2, 4]
    assert local.summary["per_client"]["auc"] == [run.summary["per_client"]["auc"][0] for run in runs]


def test_a_client_that_cannot_train_keeps_the_start() -> None:
    data = digits(3)
    labels = data.train.arrays[1].numpy()
    first = np.array([r for r in data.train.rows.numpy() if labels[r] == 0][:40])
    rest = np.array_split(data.train.rows.numpy(), 2)
    data = fs.FederatedData(Part.of(data.train.arrays, [first, *rest]), test=data.test, classes=2)
    problem = fs.auc(network(data))
    local = fs.train_local(problem, data, fs.LocalSGDA(lr=0.3, steps=3), rounds=3, batch_size=8, threads=1)
    assert list(local.summary["untrained"]) == ["client 0"] and "both 0 and 1" in local.summary["untrained"]["client 0"]
    assert torch.equal(local.runs[0].x, problem.x0) and not torch.equal(local.runs[1].x, problem.x0)
    own = [run.final["auc"] for run in local.runs]
    assert local.final["auc"] == pytest.approx(np.mean(own)), "it counts: a mean of the others would flatter"
    alone = data.only(np.array([0]))
    with pytest.raises(fs.InputError, match="both 0 and 1"):
        fs.train_local(problem, alone, fs.LocalSGDA(lr=0.3), rounds=1)


def test_a_site_alone_prepares_its_own_table() -> None:
    rng = np.random.default_rng(0)
    frames = {}
    for site, n in (("a", 40), ("b", 30)):
        x, lost = rng.normal(size=n), site == "b"
        frames[site] = pandas.DataFrame({"x": x, "z": np.nan if lost else x, "died": (x + rng.normal(size=n) > 0) * 1})
    columns = [{"name": name, "kind": "numeric", "range": [-9, 9], "optional": True} for name in ("x", "z")]
    schema = Schema.from_table({"version": 1, "target": {"name": "died"}, "columns": columns}, "the schema")
    data = fs.FederatedData.from_tables(frames, schema, prepare=Preparation(minimum=25), holdout=0.3)
    net = fs.models.model("logreg", data.shape, 1, seed=0)
    local = fs.train_local(fs.erm(net, "binary_cross_entropy"), data, fs.FedAvg(lr=0.5), rounds=5, threads=1)
    assert not local.summary["untrained"], "neither a small count nor a column that it lacks keeps a site from training"
    assert local.final["auc_worst"] > 0.6


def test_a_local_run_is_written_and_resumed(tmp_path: Path) -> None:
    data, out = digits(3), tmp_path / "local"
    problem, algorithm = fs.erm(network(data), "binary_cross_entropy"), fs.FedAvg(lr=0.3, steps=2)
    options = {"batch_size": 8, "threads": 1, "eval_every": 1}
    straight = fs.train_local(problem, data, algorithm, rounds=4, **options)
    fs.train_local(problem, data, algorithm, rounds=2, out=out, **options)
    with pytest.raises(fs.InputError, match="not empty"):
        fs.train_local(problem, data, algorithm, rounds=4, out=out, **options)
    run = fs.train_local(problem, data, algorithm, rounds=4, out=out, resume=True, **options)
    assert without_seconds(run.history) == without_seconds(straight.history)
    assert json.loads((out / "summary.json").read_text())["sites"] == "local"
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 5 and (out / "plot.png").exists()
    with pytest.raises(fs.InputError, match=r"algorithm\.lr was 0\.3"):
        fs.train_local(problem, data, fs.FedAvg(lr=0.1, steps=2), rounds=4, out=out, resume=True, **options)


def test_pooled_data_are_all_rows_at_one_client() -> None:
    data = digits()
    pooled = data.pooled()
    assert pooled.clients == 1 and pooled.sizes.tolist() == [data.sizes.sum()]
    assert sorted(pooled.train.rows.tolist()) == sorted(data.train.rows.tolist())
    assert pooled.client_test is not None and data.client_test is not None
    assert sorted(pooled.client_test.rows.tolist()) == sorted(data.client_test.rows.tolist())
    assert (np.diff(pooled.train.arrays[1].numpy()[pooled.train.rows.numpy()]) >= 0).all(), "sorted by class"


FILE = """
[data]
clients = 4
imbalance = 0.3
holdout = 0.25
[model]
name = "logreg"
[problem]
loss = "binary_cross_entropy"
[train]
rounds = 3
batch_size = 8
participation = 2
threads = 1
"""


@pytest.mark.parametrize("sites", ["pooled", "local"])
def test_a_file_can_ask_for_a_baseline(sites: str, fedstrata: Any, tmp_path: Path) -> None:
    file, out = tmp_path / "e.toml", tmp_path / "run"
    file.write_text(FILE)
    code, printed, err = fedstrata("run", file, "--set", f"data.sites={sites}", "--out", out, "--json", "--quiet")
    assert code == 0, err
    summary = json.loads(printed)
    assert summary["clients"] == (1 if sites == "pooled" else 4)
    assert summary["samples"] == 3 * 10 * 8 * (2 if sites == "pooled" else 4)
    code, printed, err = fedstrata(
        "compare", file, "--algorithms", f"fedavg,{sites}", "--seeds", 2, "--json", "--quiet"
    )
    assert code == 0, err
    rows = {row["algorithm"]: row for row in json.loads(printed)["rows"]}
    assert rows[sites]["values"]["auc"][0] == pytest.approx(summary["auc"])
    assert list(rows) == ["fedavg", sites]
    for bad in (f"{sites}", f"{sites},fedavgg"):
        assert fedstrata("compare", file, "--algorithms", bad)[0] == 2
    code, _, err = fedstrata("compare", file, "--algorithms", "fedavg", "--baselines", "locall")
    assert code == 2 and "'local' or 'pooled'" in err
