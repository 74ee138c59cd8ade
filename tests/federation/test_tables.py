"""Tables in a federation: nodes prepare, train and calibrate as a simulation does, and tell of no small group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from federation.stand_in import Sent, Tables, made, simulated, site
from fedstrata.data.tables import statistics

COLUMNS = [
    {"name": "age", "kind": "numeric", "range": [0.0, 120.0], "step": 1.0, "indicator": True},
    {"name": "pressure", "kind": "numeric", "missing": "mean"},
    {"name": "sex", "kind": "flag", "categories": ["f", "m"]},
    {"name": "region", "kind": "category", "categories": ["a", "b", "c"]},
]
SCHEMA = {"version": 1, "target": {"name": "died"}, "columns": COLUMNS}


def write_sites(folder: Path, sizes: tuple[int, ...] = (90, 60, 45)) -> None:
    """Write a CSV file for each site, with missing cells."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for k, n in enumerate(sizes):
        age, pressure = rng.integers(30, 90, n), rng.normal(120 + 5 * k, 10, n)
        died = rng.random(n) < 1 / (1 + np.exp(-(age - 70) / 8))
        lost = rng.random((n, 4)) < 0.12
        rows = [
            ",".join("" if lost[i, j] else str(cell) for j, cell in enumerate(cells)) + f",{int(died[i])}"
            for i, cells in enumerate(
                zip(age, pressure.round(3), rng.choice(["f", "m"], n), rng.choice(["a", "b", "c"], n), strict=True)
            )
        ]
        (folder / f"site{k}.csv").write_text("age,pressure,sex,region,died\n" + "\n".join(rows) + "\n")


def config_of(folder: Path, *over: Tables) -> Any:
    base: Tables = {
        "data": {"tables": str(folder / "*.csv"), "schema": SCHEMA, "holdout": 0.3},
        "model": {"name": "logreg"},
        "problem": {"name": "erm", "loss": "binary_cross_entropy"},
        "algorithm": {"name": "fedavg", "lr": 0.1, "steps": 3},
        "train": {"rounds": 3, "batch_size": 16, "threads": 1},
    }
    return made(base, *over)


CASES: list[Tables] = [
    {},
    {"problem": {"name": "auc", "score": "none"}, "algorithm": {"name": "fgda", "steps": 2, "gamma": 0.1, "lam": 0.1}},
    {"prepare": {"scale": "robust", "encode": "frequency"}, "train": {"calibrate": "isotonic"},
     "data": {"drop": ["pressure"]}},
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("over", CASES, ids=["erm", "auc", "robust"])
def test_nodes_do_what_a_simulation_does(tmp_path: Path, over: Tables) -> None:
    write_sites(tmp_path / "sites", (180, 140, 120))  # every test part has more of each class than the minimum
    config = config_of(tmp_path / "sites", over)
    alone = simulated(config)
    nodes = site(tmp_path / "federation", config)
    run = nodes.serve(tmp_path / "run")
    torch.testing.assert_close(run.x, alone.x, atol=1e-6, rtol=1e-5)
    assert run.fitted is not None and alone.fitted is not None
    np.testing.assert_allclose(run.fitted.vector, alone.fitted.vector, rtol=1e-12)
    for name in ("auc_mean", "auc_worst", "auc_within"):
        assert run.final[name] == pytest.approx(alone.final[name], abs=1e-6)
    assert run.risks is not None and alone.risks is not None and run.risks.held_out is not None
    assert run.risks.calibration is not None and alone.risks.calibration is not None
    scores = np.linspace(-2, 2, 9)
    np.testing.assert_allclose(run.risks.calibration(scores), alone.risks.calibration(scores), atol=1e-4)
    assert {name: run.final[name] for name in ("samples", "bytes_up")} == {
        name: alone.final[name] for name in ("samples", "bytes_up")
    }
    frame = fs.training.risk.predictor.Predictor.load(tmp_path / "run").predict(tmp_path / "sites" / "site0.csv")
    assert len(frame) == 180


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_no_message_tells_of_a_row_or_a_small_group(tmp_path: Path) -> None:
    write_sites(tmp_path / "sites")
    config = config_of(tmp_path / "sites")
    nodes = site(tmp_path / "federation", config)
    nodes.serve(tmp_path / "run")
    cells = {
        float(cell)
        for file in (tmp_path / "sites").glob("*.csv")
        for line in file.read_text().splitlines()[1:]
        for cell in [line.split(",")[1]]
        if cell
    }
    told = measured = 0
    for sent, reply in zip(nodes.sent, nodes.replies, strict=True):
        numbers = np.concatenate([np.zeros(0), *(np.ravel(a).astype(np.float64) for a in reply.arrays)])
        assert not cells & set(np.round(numbers, 3).tolist())  # no pressure of a patient
        if sent.header.get("work") in ("query:column_statistics", "query:score_counts"):
            told += 1
            check_counts(config, sent, numbers)
        if sent.header["kind"] == "measure":
            measured += 1
            header = json.loads(reply.text)
            assert header["rows"] >= 10 and set(header["measures"]) == {"loss", "accuracy"}
            assert "pairs" not in header and "ordered" not in header, "few positives: they would tell how many"
    assert told == 6 and measured


def check_counts(config: Any, sent: Sent, numbers: np.ndarray) -> None:
    """Raise if a count in an answer, or the difference of two, is from 1 to 9."""
    from fedstrata.experiments.build import plan_of

    plan = plan_of(config)
    assert plan is not None
    if sent.header["work"] == "query:score_counts":
        assert ((numbers == 0) | (numbers >= 10)).all()
        return
    parts = np.split(numbers, np.cumsum(plan.sizes)[:-1])
    q, c = len(plan.averaged), len(plan.counted)
    for part in parts[:q]:
        assert part[0] == 0 or part[0] >= 10
    for part in parts[q : q + c]:
        assert ((part == 0) | (part >= 10)).all()
    for part in parts[q + c :]:
        steps = np.diff(part, prepend=0.0)
        assert ((steps == 0) | (steps >= 10)).all()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_node_may_have_its_table_as_a_file(tmp_path: Path) -> None:
    write_sites(tmp_path / "sites")
    config = config_of(tmp_path / "sites", {"data": {"holdout": 0.0}})
    nodes = site(tmp_path / "federation", config)
    for k, name in enumerate(nodes.names):
        own = tmp_path / "federation" / "nodes" / name / "data"
        for file in own.iterdir():
            file.unlink()
        own.rmdir()
        own.symlink_to(tmp_path / "sites" / f"site{k}.csv")
    nodes.here = lambda node: {**type(nodes).here(nodes, node), "data": str(tmp_path / "sites" / f"site{node}.csv")}  # type: ignore[method-assign]
    run = nodes.serve(tmp_path / "run")
    torch.testing.assert_close(run.x, simulated(config).x, atol=1e-6, rtol=1e-5)


def test_moments_of_nodes_are_exact() -> None:
    values = np.random.default_rng(0).normal(1e6, 1, (1000, 1))
    parts = np.array_split(values, 7)
    merged = statistics.merged(np.stack([statistics.moments(part, 1) for part in parts]))
    assert merged[0, 2] / 1000 == pytest.approx(values.var(), rel=1e-9)
