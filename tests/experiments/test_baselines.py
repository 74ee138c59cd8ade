"""``local`` and ``pooled`` in comparisons: with budgets, with early stopping, resumed and plotted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata as fs
from fedstrata.experiments import plots as run_plots
from fedstrata.training import plots
from support import without_seconds

FILE = """
[data]
clients = 4
imbalance = 0.3
partition = { name = "dirichlet", alpha = 0.5 }
[model]
name = "logreg"
[problem]
loss = "binary_cross_entropy"
[algorithm]
steps = 2
[train]
rounds = 8
batch_size = 8
eval_every = 2
threads = 1
"""
LIMITS = {"max_samples": 200, "max_bytes": 1000, "max_seconds": 1e-6, "patience": 1}


def sites(seed: int = 0) -> fs.FederatedData:
    return fs.data.digits().imbalance(0.3).split(fs.partition.dirichlet(0.5), clients=4, seed=seed)


def logistic(seed: int) -> fs.Problem:
    return fs.erm(fs.models.model("logreg", (1, 8, 8), 1, seed=seed), "binary_cross_entropy")


METHODS: dict[str, Any] = {"fedavg": (logistic, fs.FedAvg(lr=3.0, steps=2))}
HOW: dict[str, Any] = {"rounds": 8, "batch_size": 8, "eval_every": 2, "threads": 1, "baselines": ["local", "pooled"]}


@pytest.mark.parametrize("option", LIMITS)
def test_budgets_and_patience_hold_for_the_baselines(option: str) -> None:
    result = fs.compare(METHODS, sites, seeds=2, **{option: LIMITS[option]}, **HOW)
    for label, outcomes in result.outcomes.items():
        for outcome in outcomes:
            final, summary = outcome.final, outcome.summary
            assert final is not None and summary["status"] == "finished" and outcome.run is not None
            sends = label == "fedavg"
            assert (final["bytes_up"] > 0) is sends
            ends = [run.history[-1]["round"] for run in getattr(outcome.run, "runs", [outcome.run])]
            stopped = min(ends) < 8 if option == "patience" else option != "max_bytes" or sends
            assert summary.get("stopped_by") == (option if stopped else None)
            if option == "max_samples":
                assert 0 < final["samples"] <= 200 and final["round"] < 8
            elif option == "max_bytes":
                assert final["round"] == (1 if sends else 8), "a round sends 2,080 bytes"
            elif option == "max_seconds":
                assert final["round"] == 1, "the first round tells what a round costs"
            else:
                assert {"validation_auc", "auc"} <= final.keys()
    assert len(result.verdicts) == 2 and len(result.rows) == 3 and result.table("csv").count("\n") == 4


def test_a_client_with_too_few_rows_to_stop_early_keeps_the_start() -> None:
    """In a federation it only has no rows for validation; alone, it could not tell when to stop."""
    rows = [(torch.randn(n, 3), torch.arange(n) % 2) for n in (40, 30, 1)]
    data = fs.FederatedData.from_arrays(rows, classes=2)
    problem = fs.erm(fs.models.model("logreg", (3,), 2, seed=0))
    how: dict[str, Any] = {"rounds": 3, "patience": 1, "threads": 1, "baselines": ["local"]}
    result = fs.compare({"fedavg": (problem, fs.FedAvg())}, data, seeds=2, **how)
    for outcome in result.outcomes["local"]:
        assert "too few samples per client" in outcome.summary["untrained"]["client 2"]
    assert len(result.verdicts) == 1
    assert (
        "local: client 2 (1 of 3 clients) could not train alone; means include its untrained model." in result.measured
    )


def test_budgets_of_the_baselines_in_a_file(fedstrata: Any, tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text(FILE)
    for option, limit in LIMITS.items():
        words = ("compare", file, "--algorithms", "fedavg,local,pooled", "--seeds", 1, "--json", "--quiet")
        code, printed, err = fedstrata(*words, "--set", f"train.{option}={limit}")
        assert code == 0, err
        rows = {row["algorithm"]: row for row in json.loads(printed)["rows"]}
        assert list(rows) == ["fedavg", "local", "pooled"] and all(row["diverged"] == 0 for row in rows.values())
        if option == "max_samples":
            assert all(0 < row["samples"] <= limit for row in rows.values())


@pytest.mark.parametrize("option", ["max_samples", "patience"])
def test_a_comparison_with_baselines_resumes_exactly(option: str, tmp_path: Path, no_pictures: None) -> None:
    how: dict[str, Any] = {"seeds": 1, option: LIMITS[option], "out": tmp_path / "out", **HOW}
    first = fs.compare(METHODS, sites, **how)
    (tmp_path / "out" / "local-seed0" / "summary.json").unlink()
    again = fs.compare(METHODS, sites, resume=True, **how)
    for label, (outcome,) in first.outcomes.items():
        (other,) = again.outcomes[label]
        assert without_seconds(outcome.history) == without_seconds(other.history)
        assert other.final is not None and outcome.final is not None
        assert other.final["auc"] == outcome.final["auc"]


Drawn = list[tuple[dict[str, list[Any]], dict[str, list[Any]]]]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """What ``fedstrata plot`` draws: the finished runs by label, and those that diverged."""
    drawn: Drawn = []
    real = run_plots.read_runs

    def spy(paths: Any) -> Any:
        drawn.append(real(paths))
        return drawn[-1]

    monkeypatch.setattr("fedstrata.cli.plot.read_runs", spy)
    return drawn


@pytest.mark.parametrize("axis", plots.AXES)
def test_baselines_are_plotted_by_their_names(axis: str, fedstrata: Any, tmp_path: Path, drawn: Drawn) -> None:
    file, out = tmp_path / "e.toml", tmp_path / "out"
    file.write_text(FILE)
    words = ("compare", file, "--algorithms", "fedavg,local,pooled", "--seeds", 2, "--quiet", "--out", out)
    assert fedstrata(*words)[0] == 0
    code, _, err = fedstrata("plot", *sorted(out.glob("*-seed*")), "--axis", axis, "--out", tmp_path / "x.png")
    assert code == 0, err
    finished, diverged = drawn[0]
    assert {label: len(runs) for label, runs in finished.items()} == {"fedavg": 2, "local": 2, "pooled": 2}
    assert not diverged and (tmp_path / "x.png").stat().st_size > 10_000


def test_runs_from_python_are_plotted_by_their_labels(fedstrata: Any, tmp_path: Path, drawn: Drawn) -> None:
    fs.compare({"my method": METHODS["fedavg"]}, sites, seeds=2, out=tmp_path / "out", **HOW)
    code, _, err = fedstrata("plot", *sorted((tmp_path / "out").glob("*-seed*")), "--out", tmp_path / "x.png")
    assert code == 0, err
    assert {label: len(runs) for label, runs in drawn[0][0].items()} == {"local": 2, "my method": 2, "pooled": 2}


def test_one_client_of_a_local_run_is_a_run(fedstrata: Any, tmp_path: Path) -> None:
    fs.train_local(logistic(0), sites(), fs.FedAvg(steps=2), out=tmp_path / "out", rounds=2, threads=1)
    clients = sorted((tmp_path / "out" / "clients").iterdir())
    code, _, err = fedstrata("plot", *clients, "--out", tmp_path / "x.png")
    assert code == 0 and len(clients) == 4, err
    assert fs.Run.load(clients[0], logistic(0)).summary["clients"] == 1


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("metrics.jsonl", '{"round": 0, "loss": "x"}\n', "loss in"),
        ("metrics.jsonl", '{"round": 0, "loss": [1]}\n', "loss in"),
        ("metrics.jsonl", '{"round": 0, "loss": NaN}\n', "loss in"),
        ("config.toml", "algorithm = ", "not valid TOML"),
        ("config.toml", "algorithm = 3\ndata = 4\nproblem = 5\n", ""),
        ("config.toml", "[algorithm]\nlr = 1\n", ""),
    ],
)
def test_damaged_runs_are_not_plotted(file: str, content: str, message: str, fedstrata: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"round": 0, "loss": 1.0}\n{"round": 1, "loss": 0.5}\n')
    (tmp_path / "run" / file).write_text(content)
    code, _, err = fedstrata("plot", tmp_path / "run", "--out", tmp_path / "x.png")
    assert code == (2 if message else 0) and message in err
    assert (tmp_path / "x.png").exists() is not bool(message)
