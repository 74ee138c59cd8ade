"""The measure to judge by: of your own, declared; found before the first run; and on which rows it is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata as fs
from fedstrata.core.errors import InputError
from fedstrata.experiments.comparison import Comparison
from fedstrata.experiments.config import parse
from fedstrata.experiments.methods import Outcome
from fedstrata.training.plots import Ranked, plot_ranking

MADE = fs.quadratic(clients=3, dimension=2)
METHODS: dict[str, Any] = {"slow": (MADE.problem, fs.FedAvg(lr=1e-4)), "fast": (MADE.problem, fs.FedAvg(lr=0.05))}
HOW: dict[str, Any] = {"rounds": 5, "batch_size": 2, "threads": 1}


def closeness(problem: fs.Problem, data: Any, x: torch.Tensor, y: Any) -> dict[str, float]:
    """Return a measure whose name says nothing: larger is better."""
    return {"f1": 1 / (1 + float((x - MADE.solution).norm()))}


def never(*_: Any, **__: Any) -> None:
    raise AssertionError("a run has started")


@pytest.mark.parametrize(("higher", "best"), [(True, "fast"), (False, "slow")])
def test_a_measure_of_your_own_is_judged_as_it_is_declared(higher: bool, best: str, tmp_path: Path) -> None:
    fs.declare_measure("f1", higher_is_better=higher)
    how = {"evaluate": closeness, "measure": "f1", **HOW}
    result = fs.compare(METHODS, MADE.data, seeds=3, **how)
    assert result.best == best and f"fast is {'ahead of' if higher else 'behind'} slow" in result.verdicts[0]
    tuned = fs.tune({"a": METHODS["slow"]}, MADE.data, trials=3, seeds=1, extend=False, **how)
    values = [trial.value("f1") for trial in tuned.trials["a"]]
    assert values == sorted(values, key=lambda v: -v if higher else v) and len(set(values)) > 1  # type: ignore[operator]
    rows = [Ranked("low", [0.1]), Ranked("high", [0.9])]
    assert plot_ranking(rows, tmp_path / "x.png", measure="f1").exists()


@pytest.mark.parametrize("call", [fs.compare, fs.tune])
def test_a_measure_that_is_not_declared_is_refused_before_anything_runs(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstrata.experiments.object_methods.train", never)
    message = r"not known whether a larger f1 is better.*fs\.declare_measure\('f1', higher_is_better=True\)"
    with pytest.raises(InputError, match=message):
        call(METHODS, MADE.data, evaluate=closeness, measure="f1", out=tmp_path / "out", **HOW)
    with pytest.raises(InputError, match=r"Name the measure to judge by.* have in common: f1\."):
        call(METHODS, MADE.data, evaluate=closeness, out=tmp_path / "out", **HOW)
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="not known whether"):
        plot_ranking([Ranked("a", [0.1])], tmp_path / "x.png", measure="f1")


def test_a_declared_measure_may_be_named_in_a_file() -> None:
    with pytest.raises(InputError, match="Unknown measure 'f1'"):
        parse({"compare": {"measure": "f1"}}, "here")
    fs.declare_measure("f1", higher_is_better=True, label="F1 score")
    assert parse({"compare": {"measure": "f1"}}, "here").compare.measure == "f1"


@pytest.mark.parametrize("name", ["auc", "validation_f1", "", 3])
def test_what_cannot_be_declared(name: Any) -> None:
    with pytest.raises(InputError, match="name of declare_measure"):
        fs.declare_measure(name, higher_is_better=True)
    with pytest.raises(InputError, match="must be True or False"):
        fs.declare_measure("f1", higher_is_better="yes")  # type: ignore[arg-type]


def test_trials_are_ranked_by_a_measure_that_the_test_data_have_too() -> None:
    """They have one class, so that AUC is defined on the validation data only."""
    generator = torch.Generator().manual_seed(0)
    rows = [(torch.randn(40, 3, generator=generator), torch.arange(40) % 2) for _ in range(3)]
    data = fs.FederatedData.from_arrays(rows, test=(torch.randn(9, 3), torch.zeros(9, dtype=torch.int64)), classes=2)
    problem = fs.erm(fs.models.model("logreg", (3,), 1, seed=0), "binary_cross_entropy")
    methods = {"a": (problem, fs.FedAvg(lr=0.1)), "b": (problem, fs.FedAvg(lr=0.2))}
    tuned = fs.tune(methods, data, trials=1, seeds=1, extend=False, **HOW)
    assert tuned.measure == "accuracy" and tuned.compare(2).measure == "accuracy"


@pytest.mark.parametrize(("problem", "algorithm"), [("auc", "fgda"), ("compositional_auc", "local_smcgdam")])
def test_problems_that_ask_the_clients_are_measured_before_the_runs(
    problem: str, algorithm: str, fedstrata: Any, write: Any
) -> None:
    """Their objective needs the answers."""
    text = f"[data]\nclients = 3\nimbalance = 0.3\n[model]\nname = 'logreg'\n[problem]\nname = '{problem}'\n"
    path = write(text, "[train]\nrounds = 1\nthreads = 1\n[evaluate]\nstationarity = true\n")
    code, _, err = fedstrata("compare", path, "--algorithms", algorithm, "--seeds", 1, "--quiet")
    assert code == 0, err


# --- training rows ---------------------------------------------------------------------------------------------------

TRAINING, TEST = "training data", "test data"


@pytest.mark.parametrize(
    ("measure", "pooled", "clients", "training"),
    [
        ("auc", TRAINING, "held-out test data", True),
        ("auc", TEST, TRAINING, False),
        ("auc_worst", TEST, TRAINING, True),
        ("auc_worst", TRAINING, "held-out test data", False),
        ("accuracy_worst_class", TRAINING, "nothing", True),
        ("adapted_auc", TRAINING, "nothing", True),
        ("personal_accuracy_mean", TEST, TRAINING, True),
        ("validation_auc", TRAINING, TRAINING, False),
        ("distance", TRAINING, TRAINING, False),
        ("bytes_up", TRAINING, TRAINING, False),
    ],
)
def test_training_rows_are_those_of_the_judged_measure(measure: str, pooled: str, clients: str, training: bool) -> None:
    summary = {"data": "d", "measured_on": {"pooled": pooled, "clients": clients}}
    groups = {
        label: [Outcome(label, s, [], {measure: value + 0.1 * s, "auc": 0.5}, summary, loss="bce") for s in range(3)]
        for label, value in (("a", 0.1), ("b", 0.2))
    }
    result = Comparison("method", groups, "a", measure)
    assert result.on_training_data is training and ("on the training data" in result.conditions) is training
    assert ("There are no test data" in result.conditions) is training


@pytest.mark.parametrize(("measure", "verdict"), [("auc_worst", False), ("auc_mean", False), ("auc_within", True)])
def test_means_over_different_sites_are_not_compared(measure: str, verdict: bool) -> None:
    """The AUC of 40 sites and that of 50 are of different sites; the pairs of all sites are the same."""
    groups = {}
    for label, sites in (("a", "40"), ("b", "50")):
        on = {"pooled": TEST, "clients": "held-out test data", "auc": f"{sites} of 186 sites measured"}
        summary, values = {"data": "d", "measured_on": on}, [0.5, 0.6, 0.8]
        groups[label] = [Outcome(label, s, [], {measure: v}, summary, loss="bce") for s, v in enumerate(values)]
    (said,) = Comparison("method", groups, "a", measure).verdicts
    assert ("different numbers of clients: no verdict" not in said) is verdict


def test_the_objective_of_a_problem_without_a_model_is_no_training_measure() -> None:
    result = fs.compare(METHODS, MADE.data, seeds=2, measure="loss", **HOW)
    assert "training" not in result.conditions


# --- tables ----------------------------------------------------------------------------------------------------------


def test_the_judged_measure_is_the_first_of_a_table(tmp_path: Path, no_pictures: None) -> None:
    def sites(seed: int) -> fs.FederatedData:
        return fs.data.digits().imbalance(0.3).split(fs.partition.iid(), clients=3, seed=seed)

    problem = fs.erm(fs.models.model("logreg", (1, 8, 8), 1, seed=0), "binary_cross_entropy")
    methods = {"fedavg": (problem, fs.FedAvg())}
    for measure, head in (("accuracy_worst_class", "accuracy worst class | auc |"), ("samples", "samples | auc |")):
        result = fs.compare(methods, sites, seeds=1, measure=measure, out=tmp_path / measure, **HOW)
        for text in (result.table(), (tmp_path / measure / "table.md").read_text()):
            assert text.startswith(f"| method | {head}") and text.splitlines()[0].count("| samples |") == 1
        assert result.table("csv").startswith(f"method,seeds,diverged,{measure},{measure}_std,")
    assert result.table(measures=["loss"]).startswith("| method | loss | samples |")
