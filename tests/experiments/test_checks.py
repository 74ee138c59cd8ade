"""What is checked before a comparison runs, and what its words say when something is missing."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata as fs
from fedstrata.core.files import Rows
from fedstrata.experiments.compare import Comparison
from fedstrata.experiments.methods import Outcome
from fedstrata.experiments.trials import claim
from fedstrata.training.plots.ranking import Ranked

HOW: dict[str, Any] = {"rounds": 3, "batch_size": 8, "eval_every": 1, "threads": 1}
FILE = """
[data]
clients = 4
imbalance = 0.3
[model]
name = "logreg"
[problem]
loss = "binary_cross_entropy"
[train]
rounds = 2
batch_size = 8
threads = 1
"""


def sites(seed: int = 0) -> fs.FederatedData:
    return fs.data.digits().imbalance(0.3).split(fs.partition.iid(), clients=4, seed=seed)


def logistic(seed: int = 0, **options: Any) -> fs.Problem:
    return fs.erm(fs.models.model("logreg", (1, 8, 8), 1, seed=seed), "binary_cross_entropy", **options)


METHODS: dict[str, Any] = {
    "fedavg": (logistic, fs.FedAvg(lr=0.1, steps=2)),
    "scaffold": (logistic, fs.Scaffold(lr=0.1, steps=2)),
}


# --- measures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", ["bytes_up", "samples", "seconds", "total_seconds"])
def test_costs_can_be_judged(measure: str) -> None:
    result = fs.compare(METHODS, sites, seeds=2, measure=measure, **HOW)
    assert result.measure == measure
    if measure == "bytes_up":  # SCAFFOLD sends twice as much
        assert result.differences()["scaffold"].gain < 0  # type: ignore[union-attr]


def test_the_measure_of_early_stopping_can_be_judged() -> None:
    result = fs.compare(METHODS, sites, seeds=2, measure="validation_auc", patience=2, **HOW)
    assert result.measure == "validation_auc" and len(result.verdicts) == 1
    with pytest.raises(fs.InputError, match="validation_auc"):
        fs.compare(METHODS, sites, seeds=2, measure="validation_auc", **HOW)


def test_a_measure_that_the_test_data_do_not_define_is_refused_before_the_runs(tmp_path: Path) -> None:
    data = sites()
    data = fs.FederatedData.from_arrays(
        [(torch.randn(20, 3), torch.arange(20) % 2) for _ in range(3)],
        test=(torch.randn(9, 3), torch.zeros(9, dtype=torch.int64)),
        classes=2,
    )
    problem = fs.erm(fs.models.model("logreg", (3,), 1, seed=0), "binary_cross_entropy")
    with pytest.raises(fs.InputError, match="measure"):
        fs.compare({"fedavg": (problem, fs.FedAvg())}, data, measure="auc", out=tmp_path / "out", **HOW)
    assert not (tmp_path / "out").exists()


def test_initial_weights_must_be_finite() -> None:
    net = torch.nn.Linear(3, 1)
    torch.nn.init.constant_(net.weight, float("nan"))
    data = fs.FederatedData.from_arrays([(torch.randn(20, 3), torch.arange(20) % 2) for _ in range(3)], classes=2)
    with pytest.raises(fs.InputError, match=r"initial weights of the model Linear must be finite numbers. Got '3"):
        fs.train(fs.erm(net, "binary_cross_entropy"), data, fs.FedAvg(), rounds=1)


# --- resumed comparisons ---------------------------------------------------------------------------------------------


def test_a_comparison_is_not_resumed_with_smaller_budgets(tmp_path: Path, no_pictures: None) -> None:
    """A finished run may have used more than the others may now."""
    out = tmp_path / "out"
    fs.compare({"fedavg": METHODS["fedavg"]}, sites, seeds=1, max_samples=100, out=out, **HOW)
    for limits in ({"max_samples": 64}, {"max_samples": 100, "max_bytes": 10_000}):
        with pytest.raises(fs.InputError, match="cannot be part of this comparison"):
            fs.compare(METHODS, sites, seeds=1, out=out, resume=True, **limits, **HOW)
    result = fs.compare(METHODS, sites, seeds=1, max_samples=150, out=out, resume=True, **HOW)
    used = {label: group[0].final["samples"] for label, group in result.outcomes.items()}  # type: ignore[index]
    assert used == {"fedavg": 128, "scaffold": 128}, "both have gone on to the new budget"


def test_a_row_with_nan_is_dropped_when_a_run_is_resumed(tmp_path: Path, no_pictures: None) -> None:
    out = tmp_path / "out"
    first = fs.compare(METHODS, sites, seeds=1, out=out, **HOW)
    file = out / "fedavg-seed0" / "metrics.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], '{"round": 1, "loss": NaN}', *lines[2:]]) + "\n")
    with pytest.warns(UserWarning, match="damaged|lacks"):
        again = fs.compare(METHODS, sites, seeds=1, out=out, resume=True, **HOW)
    assert again.rows[0]["auc"] == first.rows[0]["auc"]
    assert [row["round"] for row in Rows(file, "round").read()] == [0, 2, 3]


@pytest.mark.parametrize("name", ["compare.json", "verdicts.json", "table.md", "ranking.png", "plot.png"])
def test_results_that_cannot_be_written_are_noticed_before_the_runs(
    name: str, fedstrata: Any, tmp_path: Path, no_pictures: None
) -> None:
    (tmp_path / "e.toml").write_text(FILE)
    out = tmp_path / "out"
    words = ("compare", tmp_path / "e.toml", "--algorithms", "fedavg", "--seeds", 1, "--quiet", "--out", out)
    assert fedstrata(*words)[0] == 0
    (out / name).unlink(missing_ok=True)
    (out / name).mkdir()
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    code, _, err = fedstrata(*words, "--resume")
    assert code == 2 and f"{name} is a directory" in " ".join(err.split())
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*")}


def test_a_search_whose_settings_cannot_be_read_is_not_resumed(tmp_path: Path) -> None:
    for number, make in enumerate((lambda f: f.mkdir(), lambda f: f.write_bytes(b"\xff\x00"))):
        folder = tmp_path / f"trials{number}"
        folder.mkdir()
        make(folder / "config.json")
        with pytest.raises(fs.InputError, match=r"cannot be read|different settings"):
            claim(folder, "{}")


def test_names_of_algorithms_that_are_given_twice_are_refused(fedstrata: Any, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(FILE)
    code, _, err = fedstrata("compare", tmp_path / "e.toml", "--algorithms", "fedavg,scaffold,fedavg")
    assert code == 2 and "names fedavg twice" in err


# --- words -----------------------------------------------------------------------------------------------------------


def outcome(label: str, seed: int, **final: float) -> Outcome:
    on = {"pooled": "test data", "clients": "nothing"}
    return Outcome(label, seed, [{"round": 1, **final}], {"round": 1, **final}, {"data": "d", "measured_on": on})


def comparison(**values: list[float | None]) -> Comparison:
    """Return finished runs; None for a seed without AUC."""
    groups = {
        label: [outcome(label, s, loss=1.0, **({} if v is None else {"auc": v})) for s, v in enumerate(each)]
        for label, each in values.items()
    }
    return Comparison("method", groups, next(iter(values)), "auc")


def test_the_best_method_has_the_measure_in_every_seed() -> None:
    result = comparison(a=[0.7, 0.72, 0.71], b=[0.99, None, None])
    assert result.best == "a"
    with pytest.raises(fs.FedstrataError, match="every seed"):
        _ = comparison(a=[None, 0.5], b=[0.6, None]).best


def test_csv_says_over_how_many_seeds_a_mean_is() -> None:
    lines = list(csv.DictReader(io.StringIO(comparison(a=[0.7, 0.72, 0.71], b=[0.99, None, None]).table("csv"))))
    assert [(line["seeds"], line["auc_seeds"]) for line in lines] == [("3", "3"), ("3", "1")]


def test_a_method_without_a_value_in_every_seed_is_ranked_without_a_mean() -> None:
    whole, missing, failed = Ranked("a", [0.7, 0.8]), Ranked("b", [0.9], missing=1), Ranked("c", [0.9], diverged=1)
    assert [row.complete for row in (whole, missing, failed)] == [True, False, False]
    assert (missing.name, failed.name) == ("b (no value in 1 of 2)", "c (diverged in 1 of 2)")


def test_one_seed_has_no_intervals() -> None:
    assert comparison(a=[0.7], b=[0.8]).conditions == "Gains in auc of a single seed: no intervals, and no verdicts."
    assert "95 % intervals over 2 seeds" in comparison(a=[0.7, 0.6], b=[0.8, 0.9]).conditions


def test_a_comparison_without_test_data_says_so() -> None:
    data = fs.FederatedData.from_arrays([(torch.randn(20, 3), torch.arange(20) % 2) for _ in range(3)], classes=2)
    problem = fs.erm(fs.models.model("logreg", (3,), 1, seed=0), "binary_cross_entropy")
    methods = {"fedavg": (problem, fs.FedAvg(lr=0.1)), "scaffold": (problem, fs.Scaffold(lr=0.1))}
    words = fs.compare(methods, data, seeds=3, **HOW).conditions
    assert "on the training data" in words and "test rows" not in words and "There are no test data" in words
    assert "training" not in fs.compare(METHODS, sites, seeds=2, **HOW).conditions


def test_results_are_json(tmp_path: Path, no_pictures: None) -> None:
    fs.compare(METHODS, sites, seeds=2, out=tmp_path / "out", **HOW)
    assert json.loads((tmp_path / "out" / "verdicts.json").read_text())["measure"] == "auc"
