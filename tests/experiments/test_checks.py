"""What is checked before a comparison runs, and what its words say when something is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.core.files import Rows
from fedstrata.experiments.judge import Difference
from fedstrata.experiments.trials import claim
from support import without_seconds

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
    judged = result.differences()["scaffold"]
    assert result.measure == measure and isinstance(judged, Difference) and judged.measure == measure
    values = [[(o.final or {})[measure] for o in group] for group in result.outcomes.values()]
    assert judged.gain == pytest.approx(np.mean(values[0]) - np.mean(values[1])), "less is better"
    assert measure != "bytes_up" or judged.gain < 0, "SCAFFOLD sends twice as much"


def test_the_measure_of_early_stopping_can_be_judged() -> None:
    result = fs.compare(METHODS, sites, seeds=2, measure="validation_auc", patience=2, **HOW)
    assert result.measure == "validation_auc" and len(result.verdicts) == 1
    with pytest.raises(fs.InputError, match="validation_auc"):
        fs.compare(METHODS, sites, seeds=2, measure="validation_auc", **HOW)


def test_a_measure_that_the_test_data_do_not_define_is_refused_before_the_runs(tmp_path: Path) -> None:
    data = fs.FederatedData.from_arrays(
        [(torch.randn(20, 3), torch.arange(20) % 2) for _ in range(3)],
        test=(torch.randn(9, 3), torch.zeros(9, dtype=torch.int64)),
        classes=2,
    )
    problem = fs.erm(fs.models.model("logreg", (3,), 1, seed=0), "binary_cross_entropy")
    with pytest.raises(fs.InputError, match="Unknown measure 'auc'"):
        fs.compare({"fedavg": (problem, fs.FedAvg())}, data, measure="auc", out=tmp_path / "out", **HOW)
    assert not (tmp_path / "out").exists()


def test_initial_weights_must_be_finite() -> None:
    net = torch.nn.Linear(3, 1)
    torch.nn.init.constant_(net.weight, float("nan"))
    data = fs.FederatedData.from_arrays([(torch.randn(20, 3), torch.arange(20) % 2) for _ in range(3)], classes=2)
    with pytest.raises(fs.InputError, match=r"initial weights of the model Linear must be finite numbers. Got '3"):
        fs.train(fs.erm(net, "binary_cross_entropy"), data, fs.FedAvg(), rounds=1)


def test_a_baseline_that_is_named_twice_is_refused(fedstrata: Any, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(FILE)
    words = ("compare", tmp_path / "e.toml", "--algorithms", "fedavg", "--out", tmp_path / "out")
    for more in (("--baselines", "local,local"), ("--set", "compare.baselines=['local', 'local']")):
        code, _, err = fedstrata(*words, *more)
        assert code == 2 and "'local', 'pooled' or both, once each" in " ".join(err.split())
    assert not (tmp_path / "out").exists()


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


# --- searches --------------------------------------------------------------------------------------------------------


def test_the_final_runs_are_judged_by_the_measure_of_the_trials() -> None:
    tuned = fs.tune({"fedavg": METHODS["fedavg"]}, sites, trials=1, seeds=1, measure="accuracy", extend=False, **HOW)
    assert tuned.compare(2).measure == "accuracy" and tuned.compare(2, measure="auc").measure == "auc"


def test_test_rows_that_trials_have_seen_are_a_warning() -> None:
    def resplit(seed: int) -> fs.FederatedData:
        rows = [(torch.arange(60.0).reshape(20, 3) + 100 * k, torch.arange(20) % 2) for k in range(3)]
        return fs.FederatedData.from_arrays(rows, classes=2).reserve(holdout=0.3, support=0.0, seed=seed)

    def once(seed: int) -> fs.FederatedData:
        return resplit(0)

    problem = fs.erm(fs.models.model("logreg", (3,), 1, seed=0), "binary_cross_entropy")
    for data, warned in ((resplit, True), (once, False)):
        tuned = fs.tune({"a": (problem, fs.FedAvg())}, data, trials=1, seeds=1, extend=False, **HOW)
        warnings = tuned.compare(2).warnings
        assert any("were rows of the trials" in warning for warning in warnings) is warned


def test_a_search_of_a_file_with_a_holdout_uses_one_split(fedstrata: Any, tmp_path: Path, no_pictures: None) -> None:
    (tmp_path / "e.toml").write_text(
        FILE.replace("[model]", "holdout = 0.3\n[model]") + "[tune]\ntrials = 1\nseeds = 1\n"
    )
    words = (
        "tune",
        tmp_path / "e.toml",
        "--algorithms",
        "fedavg,scaffold",
        "--seeds",
        2,
        "--quiet",
        "--out",
        tmp_path / "o",
    )
    code, printed, err = fedstrata(*words, "--set", "compare.measure=accuracy", "--set", "compare.baselines=['pooled']")
    assert code == 0, err
    text = " ".join(printed.split())
    assert "All seeds use the split of data.seed = 0" in text and "were rows of the trials" not in text
    assert "Gains in accuracy" in text and "pooled" in text
    assert json.loads((tmp_path / "o" / "trials.json").read_text())[0]["accuracy"] > 0


def test_changed_results_of_trials_are_not_believed(fedstrata: Any, tmp_path: Path, no_pictures: None) -> None:
    (tmp_path / "e.toml").write_text(FILE + "[tune]\ntrials = 2\nseeds = 2\n")
    out = tmp_path / "o"
    words = ("tune", tmp_path / "e.toml", "--algorithms", "fedavg", "--seeds", 0, "--quiet", "--out", out)
    assert fedstrata(*words)[0] == 0
    before = (out / "trials.json").read_bytes()
    first, second = sorted((out / "trials").glob("*-seed*.json"))[:2]
    changed = json.loads(first.read_text())
    changed["final"]["auc"] = 7.0
    first.write_text(json.dumps(changed))
    second.write_bytes(sorted((out / "trials").glob("*-seed*.json"))[2].read_bytes())
    assert fedstrata(*words, "--resume")[0] == 0
    assert (out / "trials.json").read_bytes() == before


def test_a_search_whose_files_are_blocked_does_not_start(fedstrata: Any, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(FILE + "[tune]\ntrials = 1\nseeds = 1\n")
    out = tmp_path / "o"
    words = ("tune", tmp_path / "e.toml", "--algorithms", "fedavg", "--seeds", 0, "--quiet", "--out", out)
    assert fedstrata(*words)[0] == 0
    (out / "tune.md").unlink()
    (out / "tune.md").mkdir()
    code, _, err = fedstrata(*words, "--resume")
    assert code == 2 and "tune.md is a directory" in " ".join(err.split())


def test_a_single_trial_takes_no_options_of_a_search(fedstrata: Any, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(FILE)
    words = ("tune", tmp_path / "e.toml", "--algorithms", "fedavg", "--trial", 0, "--out", tmp_path / "o")
    for more in (("--jobs", 2), ("--resume",), ("--json",)):
        code, _, err = fedstrata(*words, *more)
        assert code == 2 and "leave out --jobs, --resume and --json" in " ".join(err.split())


# --- damaged and odd input -------------------------------------------------------------------------------------------


def with_last(auc: float) -> Callable[[str], str]:
    """Return a change of a file of rows: the AUC of the last one."""

    def change(text: str) -> str:
        *rows, last = map(json.loads, text.splitlines())
        return "".join(json.dumps(row) + "\n" for row in [*rows, {**last, "auc": auc}])

    return change


DAMAGE: dict[str, tuple[str, str | Callable[[str], str]]] = {
    "no tables": ("config.toml", "train = 3\n"),
    "deep": ("config.toml", f"x = {'[' * 100_000}\n"),
    "a huge number": ("config.toml", f"x = {'9' * 5000}\n"),
    "infinity": ("metrics.jsonl", '{"round": 2, "auc": 1e999}\n'),
    "a number that no float can hold": ("metrics.jsonl", '{"round": 2, "auc": ' + "9" * 400 + "}\n"),
    "a text": ("metrics.jsonl", '{"round": 2, "auc": "x"}\n'),
    "a list": ("metrics.jsonl", '{"round": 2, "auc": [1]}\n'),
    "an impossible value": ("metrics.jsonl", '{"round": 2, "auc": 9e9}\n'),
    "an impossible last value": ("metrics.jsonl", with_last(9e9)),
    "another last value": ("metrics.jsonl", with_last(0.75)),
    "a row twice": ("metrics.jsonl", lambda text: text + text.splitlines()[-1] + "\n"),
    "another checkpoint": ("checkpoint", "[" * 100_000),
}


@pytest.mark.parametrize("rounds", [2, 3])
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damaged_runs_are_resumed_or_refused(
    damage: str, rounds: int, fedstrata: Any, tmp_path: Path, no_pictures: None
) -> None:
    """A run that is resumed has the values of one that was not damaged."""
    (tmp_path / "e.toml").write_text(FILE)
    out, whole = tmp_path / "out", tmp_path / "whole"
    words = ("compare", tmp_path / "e.toml", "--algorithms", "fedavg", "--seeds", 1, "--quiet", "--out")
    for folder, length in ((out, 2), (whole, rounds)):
        assert fedstrata(*words, folder, "--set", f"train.rounds={length}")[0] == 0
    file, content = DAMAGE[damage]
    run = out / "fedavg-seed0"
    path = max((run / file).glob("round-*.json")) if file == "checkpoint" else run / file
    path.write_text(content if isinstance(content, str) else content(path.read_text()))
    for _ in range(2):
        code, _, err = fedstrata(*words, out, "--resume", "--set", f"train.rounds={rounds}")
        assert code == (2 if file == "config.toml" else 0) and "Traceback" not in err, err
        if code == 0:
            again, straight = (json.loads((f / "compare.json").read_text())[0]["values"] for f in (out, whole))
            assert without_seconds([again]) == without_seconds([straight])


def test_a_comparison_is_not_resumed_with_other_rates(tmp_path: Path, no_pictures: None) -> None:
    """Those of a schedule in fractions of training depend on its length."""
    how = {**HOW, "seeds": 1, "resume": True}
    rates = {"fixed": 0.1, "at rounds": fs.StepDecay(0.1, at=(1, 2)), "halfway": fs.StepDecay(0.1)}
    for label, rate in rates.items():
        methods = {"fedavg": (logistic, fs.FedAvg(lr=rate, steps=2))}
        fs.compare(methods, sites, out=tmp_path / label, **how)
        if label == "halfway":
            with pytest.raises(fs.InputError, match=r"rounds were 3, and are 4 now, and algorithm\.lr follows"):
                fs.compare(methods, sites, out=tmp_path / label, **(how | {"rounds": 4}))
        else:
            fs.compare(methods, sites, out=tmp_path / label, **(how | {"rounds": 4}))


@pytest.mark.parametrize("command", ["compare", "tune"])
def test_what_was_done_with_other_code_is_not_resumed(
    command: str, fedstrata: Any, tmp_path: Path, no_pictures: None
) -> None:
    (tmp_path / "e.toml").write_text(FILE + "[tune]\ntrials = 1\nseeds = 1\nextend = false\n")
    code_file = tmp_path / "mine.py"
    words = (command, tmp_path / "e.toml", "--algorithms", "fedavg", "--seeds", 1, "--quiet", "--out", tmp_path / "o")
    for content, more, expected in (("a = 1", (), 0), ("a = 1", ("--resume",), 0), ("a = 2", ("--resume",), 2)):
        code_file.write_text(content)
        code, _, err = fedstrata("--import", code_file, *words, *more)
        assert code == expected, err
    assert ("digest.imported was 'mine.py" if command == "compare" else "different settings") in " ".join(err.split())
    assert fedstrata(*words, "--resume")[0] == 2, "without the file"


def test_an_empty_directory_of_a_run_is_no_dead_end(fedstrata: Any, tmp_path: Path, no_pictures: None) -> None:
    """A kill may come between the directory and its first file."""
    (tmp_path / "e.toml").write_text(FILE)
    (tmp_path / "out" / "fedavg-seed0").mkdir(parents=True)
    words = (
        "compare",
        tmp_path / "e.toml",
        "--algorithms",
        "fedavg",
        "--seeds",
        1,
        "--quiet",
        "--out",
        tmp_path / "out",
    )
    assert fedstrata(*words)[0] == 0


@pytest.mark.parametrize("name", ["method", "seeds", "diverged", "score_std", "score_seeds"])
def test_names_of_measures_that_tables_use_are_refused(name: str) -> None:
    with pytest.raises(fs.InputError, match="name of a measure"):
        fs.compare({"m": METHODS["fedavg"]}, sites, seeds=1, evaluate=lambda *_: {"score": 1.0, name: 2.0}, **HOW)


def test_a_measure_of_your_own_is_in_the_table() -> None:
    fs.declare_measure("score", higher_is_better=True)
    result = fs.compare(METHODS, sites, seeds=2, measure="score", evaluate=lambda *_: {"score": 0.25}, **HOW)
    assert "| method | score |" in result.table() and "0.250" in result.table()
    huge = fs.compare(METHODS, sites, seeds=2, evaluate=lambda *_: {"loss": 1.0, "huge": 1e308}, **HOW)
    assert "huge" not in huge.rows[0]["values"]


def test_labels_are_not_formulas(tmp_path: Path) -> None:
    label = "$\\frac{$"
    fs.compare({label: METHODS["fedavg"], "b": METHODS["scaffold"]}, sites, seeds=2, out=tmp_path / "o", **HOW)
    assert (tmp_path / "o" / "ranking.png").stat().st_size > 5000


def test_the_last_row_of_a_run_that_stopped_is_measured_again_if_it_was_lost(tmp_path: Path, no_pictures: None) -> None:
    how = {**HOW, "rounds": 100, "eval_every": 10, "max_samples": 900}
    first = fs.compare(METHODS, sites, seeds=1, out=tmp_path / "o", **how)
    file = tmp_path / "o" / "fedavg-seed0" / "metrics.jsonl"
    file.write_text("\n".join(file.read_text().splitlines()[:-1]) + "\n")
    with pytest.warns(UserWarning, match="lacks 1 of"):
        again = fs.compare(METHODS, sites, seeds=1, out=tmp_path / "o", resume=True, **how)
    assert again.rows[0]["values"]["auc"] == first.rows[0]["values"]["auc"]
    assert again.rows[0]["values"]["round"] == first.rows[0]["values"]["round"]


def test_a_problem_with_a_seed_of_its_own(fedstrata: Any, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text('[problem]\nname = "quadratic"\nseed = 3\n[train]\nrounds = 2\n')
    results = [
        json.loads(fedstrata("run", tmp_path / "e.toml", "--json", "--set", f"train.seed={s}")[1]) for s in (0, 1)
    ]
    assert results[0]["loss"] == pytest.approx(results[1]["loss"])
    code, _, err = fedstrata("compare", tmp_path / "e.toml", "--algorithms", "fedavg,local")
    assert code == 2 and "local and pooled need clients with data of their own" in " ".join(err.split())


def test_early_stopping_shows_the_model_that_is_kept(fedstrata: Any, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(FILE.replace("rounds = 2", "rounds = 60\npatience = 2\neval_every = 1"))
    words = ("run", tmp_path / "e.toml", "--quiet", "--set", "algorithm.lr=20.0")
    _, printed, _ = fedstrata(*words)
    summary = json.loads(fedstrata(*words, "--json")[1])
    assert summary["stopped_by"] == "patience" and f"{summary['auc']:.4f}" in printed
    assert f"The model is that of round {summary['best_round']}." in printed


def test_data_in_one_place_send_nothing_and_are_measured_at_each_site(tmp_path: Path, no_pictures: None) -> None:
    fs.compare(METHODS, sites, seeds=1, baselines="pooled", out=tmp_path / "o", **HOW)
    summary = json.loads((tmp_path / "o" / "pooled-seed0" / "summary.json").read_text())
    assert summary["bytes_up"] == summary["bytes_down"] == 0 and summary["clients"] == 1
    other = json.loads(next((tmp_path / "o").glob("*-seed0/summary.json")).read_text())
    assert summary["measured_on"] == other["measured_on"]
    assert summary["per_client"]["pairs"] == other["per_client"]["pairs"] and "auc_within" in summary
