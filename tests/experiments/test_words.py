"""What the words of a comparison say: about missing values, about test data, and where there is no verdict."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.experiments.comparison import Comparison
from fedstrata.experiments.influence import marks_of
from fedstrata.experiments.judge import difference, p_in_words
from fedstrata.experiments.methods import Outcome
from fedstrata.experiments.tables import mean_and_spread, number
from fedstrata.training.plots.ranking import Ranked

HOW: dict[str, Any] = {"rounds": 3, "batch_size": 8, "eval_every": 1, "threads": 1}


def sites(seed: int = 0) -> fs.FederatedData:
    return fs.data.digits().imbalance(0.3).split(fs.partition.iid(), clients=4, seed=seed)


def logistic(seed: int = 0, **options: Any) -> fs.Problem:
    return fs.erm(fs.models.model("logreg", (1, 8, 8), 1, seed=seed), "binary_cross_entropy", **options)


METHODS: dict[str, Any] = {
    "fedavg": (logistic, fs.FedAvg(lr=0.1, steps=2)),
    "scaffold": (logistic, fs.Scaffold(lr=0.1, steps=2)),
}

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


def test_no_mean_is_over_some_of_the_seeds() -> None:
    lines = list(csv.DictReader(io.StringIO(comparison(a=[0.7, 0.72, 0.71], b=[0.99, None, None]).table("csv"))))
    assert [(line["seeds"], line["auc_seeds"]) for line in lines] == [("3", "3"), ("3", "0")]


def test_a_method_without_a_value_in_every_seed_is_ranked_without_a_mean() -> None:
    whole, missing, failed = Ranked("a", [0.7, 0.8]), Ranked("b", [0.9], missing=1), Ranked("c", [0.9], diverged=1)
    assert [row.complete for row in (whole, missing, failed)] == [True, False, False]
    assert (missing.name, failed.name) == ("b (no value in 1 of 2)", "c (diverged in 1 of 2)")


def test_one_seed_has_no_intervals() -> None:
    assert comparison(a=[0.7], b=[0.8]).conditions == "Gains in AUC of a single seed: no intervals, and no verdicts."
    assert "95 % intervals over 2 seeds" in comparison(a=[0.7, 0.6], b=[0.8, 0.9]).conditions


def test_a_comparison_without_test_data_says_so() -> None:
    data = fs.FederatedData.from_arrays([(torch.randn(20, 3), torch.arange(20) % 2) for _ in range(3)], classes=2)
    problem = fs.erm(fs.models.model("logreg", (3,), 1, seed=0), "binary_cross_entropy")
    methods = {"fedavg": (problem, fs.FedAvg(lr=0.1)), "scaffold": (problem, fs.Scaffold(lr=0.1))}
    words = fs.compare(methods, data, seeds=3, **HOW).conditions
    assert "on the training data" in words and "test rows" not in words and "There are no test data" in words
    assert "training" not in fs.compare(METHODS, sites, seeds=2, **HOW).conditions


def test_without_any_verdict_no_intervals_are_claimed() -> None:
    result = comparison(a=[0.7, 0.72], b=[0.9, None])
    assert result.verdicts == ["b has no AUC in 1 of 2 seeds: no verdict."]
    assert result.conditions == "No verdicts: the measure is AUC."
    one_positive = replace(result, outcomes=comparison(a=[0.7, 0.72], b=[0.8, 0.9]).outcomes)
    for group in one_positive.outcomes.values():
        rows = {"mark": np.arange(4), "auc": np.array([math.nan, 0, 0, 0]), "fewest": np.array([1])}
        group[:] = [replace(o, rows=rows) for o in group]
    assert "with so few test rows" in one_positive.verdicts[0] and one_positive.conditions == result.conditions
    lost = Comparison("method", {k: [Outcome(k, 0, [], None, {}, "it diverged")] for k in "ab"}, "a", "auc")
    assert [mean_and_spread(row, lost.columns()) for row in lost.rows] == [
        {"method": k, "auc": "diverged in 1 of 1"} for k in "ab"
    ]


def test_words_name_measures_as_readers_do() -> None:
    groups = {
        label: [outcome(label, s, **({"auc_worst": 0.5 + v * s} if s < n else {})) for s in range(3)]
        for label, v, n in (("a", 0.1, 3), ("b", 0.2, 3), ("c", 0.1, 2))
    }
    result = Comparison("method", groups, "a", "auc_worst")
    assert result.conditions.startswith("Gains in AUC of the worst client with 95 %")
    assert result.verdicts[1] == "c has no AUC of the worst client in 1 of 3 seeds: no verdict."
    assert "| c | no value in 1 of 3 |" in result.table(measures=["auc_worst"])


def test_a_difference_that_is_the_same_in_every_seed_is_said_exactly() -> None:
    groups = {label: [outcome(label, s, bytes_up=v) for s in range(3)] for label, v in (("a", 4160), ("b", 6240))}
    (sentence,) = Comparison("method", groups, "a", "bytes_up").verdicts
    assert sentence == "b differs from a by exactly 2,080 in every seed: a is better."


def test_numbers_of_any_size_are_legible() -> None:
    """A distance of 1e-6 is not 0.0000, and a gain of 1e29 has no thirty digits."""
    assert [number(v) for v in (0.0, 0.87654321, 1.234e-6, -2e29)] == ["0.0000", "0.8765", "1.234e-06", "-2.000e+29"]
    losses = {"a": [5.0e29, 5.1e29, 5.2e29], "b": [2e28, 1e28, 2e28]}
    groups = {k: [outcome(k, s, loss=v) for s, v in enumerate(each)] for k, each in losses.items()}
    (sentence,) = Comparison("method", groups, "a", "loss").verdicts
    assert sentence.startswith("b is ahead of a by 4.93e+29 [4.65e+29, 5.22e+29], p < 0.001")


@pytest.mark.parametrize(("p", "words"), [(0.0496, "0.0496"), (0.0504, "0.0504"), (0.053, "0.053"), (0.3, "0.3")])
def test_a_p_value_is_on_the_side_of_the_level_that_its_verdict_says(p: float, words: str) -> None:
    assert p_in_words(p) == f"p = {words}"


def test_a_single_method_has_nothing_to_be_compared_with(tmp_path: Path, no_pictures: None) -> None:
    result = fs.compare({"fedavg": METHODS["fedavg"]}, sites, seeds=2, out=tmp_path / "o", **HOW)
    text = (tmp_path / "o" / "table.md").read_text()
    assert result.conditions == "A single method: nothing is compared. The measure is AUC."
    assert text.endswith(f"\n\n{result.measured}\n\n{result.conditions}\n") and "Gains" not in text


def test_results_are_json(tmp_path: Path, no_pictures: None) -> None:
    fs.compare(METHODS, sites, seeds=2, out=tmp_path / "out", **HOW)
    assert json.loads((tmp_path / "out" / "verdicts.json").read_text())["measure"] == "auc"


# --- false verdicts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [3, 5, 7, 10, 20])
def test_seeds_that_all_agree_are_one_observation(seeds: int) -> None:
    """The variance of equal numbers is not always 0 in floating point."""
    for value in np.random.default_rng(seeds).random(50):
        groups = [[outcome(k, s, auc=v) for s in range(seeds)] for k, v in (("a", 0.13), ("b", float(value)))]
        judged = difference(groups[1], groups[0], "auc")
        assert judged.verdict == "undecided" and judged.p is None and judged.low == judged.high == judged.gain
        same = difference([outcome("c", s, auc=0.13) for s in range(seeds)], groups[0], "auc")
        assert same.verdict == "undecided" and same.p == 1.0 and same.gain == 0


def test_rows_are_identified_by_all_their_arrays() -> None:
    inputs, targets = torch.eye(4), torch.tensor([0, 1, 0, 1])
    marks = marks_of((inputs, targets))
    assert len(set(marks.tolist())) == 4, "one-hot rows have the same mean"
    assert not np.isin(marks, marks_of((inputs, 1 - targets))).any()
    assert np.array_equal(marks[[2, 0]], marks_of((inputs[[2, 0]], targets[[2, 0]])))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"data": "other"}, "measured on different test data"),
        ({"measured_on": {"pooled": "test data", "clients": "training data"}}, "different data of the clients"),
    ],
)
def test_methods_on_different_data_get_no_verdict(changes: Any, why: str) -> None:
    first = [outcome("a", s, auc_mean=0.5 + 0.01 * s) for s in range(3)]
    second = [replace(o, label="b", summary={**o.summary, **changes}) for o in first]
    (sentence,) = Comparison("method", {"a": first, "b": second}, "a", "auc_mean").verdicts
    assert why in sentence and "no verdict" in sentence


def test_methods_with_different_losses_get_no_verdict_on_loss() -> None:
    methods = {
        "bce": (logistic, fs.FedAvg(lr=0.1, steps=2)),
        "auc": (lambda seed: fs.auc(fs.models.model("logreg", (1, 8, 8), 1, seed=seed)), fs.LocalSGDA(steps=2)),
    }
    (sentence,) = fs.compare(methods, sites, seeds=2, measure="loss", **HOW).verdicts
    assert sentence == "auc and bce have different losses: no verdict on loss."
    assert "no verdict" not in fs.compare(methods, sites, seeds=2, measure="auc", **HOW).verdicts[0]


def test_two_closures_of_one_function_are_different_losses() -> None:
    def squared(scale: float) -> fs.Problem:
        net = fs.models.model("logreg", (1, 8, 8), 1, seed=0)
        return fs.erm(net, lambda outputs, targets: scale * (outputs.squeeze(-1) - targets) ** 2)

    for scale, different in ((1.0, False), (2.0, True)):
        methods = {"a": (squared(1.0), fs.FedAvg()), "b": (squared(scale), fs.FedAvg())}
        (sentence,) = fs.compare(methods, sites, seeds=2, measure="loss", **HOW).verdicts
        assert ("have different losses" in sentence) is different


def test_a_comparison_is_not_resumed_with_another_loss(tmp_path: Path, no_pictures: None) -> None:
    def problem(scale: float) -> fs.Problem:
        weight = torch.tensor(scale)
        net = fs.models.model("logreg", (1, 8, 8), 1, seed=0)
        return fs.erm(net, lambda outputs, targets: weight * (outputs.squeeze(-1) - targets) ** 2)

    fs.compare({"m": (problem(1.0), fs.FedAvg())}, sites, seeds=1, out=tmp_path / "o", **HOW)
    with pytest.raises(fs.InputError, match="cannot be resumed with other settings"):
        fs.compare({"m": (problem(2.0), fs.FedAvg())}, sites, seeds=1, out=tmp_path / "o", resume=True, **HOW)
    fs.compare({"m": (problem(1.0), fs.FedAvg())}, sites, seeds=1, out=tmp_path / "o", resume=True, **HOW)


def test_functions_that_refer_to_themselves_have_an_identity(tmp_path: Path, no_pictures: None) -> None:
    def evaluate(problem: Any, data: Any, x: Any, y: Any) -> dict[str, float]:
        return {"score": 0.5, "itself": float(callable(evaluate))}

    fs.declare_measure("score", higher_is_better=True)
    how = HOW | {"evaluate": evaluate, "measure": "score", "out": tmp_path / "o"}
    for resume in (False, True):
        fs.compare({"m": METHODS["fedavg"]}, sites, seeds=1, resume=resume, **how)
