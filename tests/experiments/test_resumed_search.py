"""Searches that are resumed, divided among processes or jobs, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedstrata as fs
from fedstrata.core.errors import InputError
from fedstrata.core.files import Row
from fedstrata.experiments import trials
from fedstrata.experiments.trials import claim
from scripted import Script, config_of, distance, origins, tuned_of

# --- resuming --------------------------------------------------------------------------------------------------------


def test_a_resumed_search_runs_only_what_is_missing(script: Script, tmp_path: Path) -> None:
    config = config_of({"trials": 4, "seeds": 3}, lr=0.7)
    script.loss = lambda options, _, seed: None if options["lr"] < 0.01 and seed == 1 else distance(options, 3.0) + seed
    whole = tuned_of(config, folder=tmp_path)
    first = list(script.runs)
    files = sorted(tmp_path.glob("fedavg-*.json"))
    assert len(files) == len(first) == 3 * len(whole.rows) > 18, "an extension too"
    script.runs.clear()
    assert tuned_of(config, folder=tmp_path).rows == whole.rows and script.runs == []
    deleted = [files[0], files[7], files[8], files[-1]]
    for path in deleted:
        path.unlink()
    again = tuned_of(config, folder=tmp_path)
    assert again.rows == whole.rows and again.notes == whole.notes and len(script.runs) == 4
    assert all(run in first for run in script.runs) and sorted(tmp_path.glob("fedavg-*.json")) == files


DAMAGED: dict[str, Callable[[str], bytes]] = {
    "empty": lambda text: b"",
    "cut": lambda text: text[: len(text) // 2].encode(),
    "not text": lambda text: b"\xff\xfe\x00",
    "a number": lambda text: b"3",
    "nothing": lambda text: b"null",
    "without a result": lambda text: json.dumps({"options": json.loads(text)["options"]}).encode(),
    "of another setting": lambda text: json.dumps({**json.loads(text), "options": {"lr": 0.5}}).encode(),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_result_is_run_again(damage: str, script: Script, tmp_path: Path) -> None:
    config = config_of({"trials": 2, "seeds": 2})
    whole = tuned_of(config, folder=tmp_path)
    path = tmp_path / "fedavg-0001-rounds3-seed1.json"
    before = path.read_text()
    path.write_bytes(DAMAGED[damage](before))
    script.runs.clear()
    assert tuned_of(config, folder=tmp_path).rows == whole.rows
    assert script.runs == [("fedavg", json.loads(before)["options"], 3, 1)] and path.read_text() == before


def test_a_failure_is_not_run_again(script: Script, tmp_path: Path) -> None:
    config = config_of({"trials": 2, "seeds": 1})
    script.loss = lambda options, *_: None if options["lr"] == 0.1 else distance(options)
    whole = tuned_of(config, folder=tmp_path)
    assert json.loads((tmp_path / "fedavg-0000-rounds3-seed0.json").read_text())["error"] == "it diverged"
    script.runs.clear()
    assert tuned_of(config, folder=tmp_path).rows == whole.rows and script.runs == []


def test_an_interrupted_search_keeps_what_has_finished(script: Script, tmp_path: Path) -> None:
    config = config_of({"trials": 4, "seeds": 2})
    whole = tuned_of(config)

    def interrupted(options: dict[str, Any], rounds: int, seed: int) -> float:
        if len(script.runs) > 5:
            raise KeyboardInterrupt
        return distance(options)

    script.loss, script.runs = interrupted, []
    with pytest.raises(KeyboardInterrupt):
        tuned_of(config, folder=tmp_path)
    assert len(list(tmp_path.glob("fedavg-*.json"))) == 5
    script.loss, script.runs = (lambda options, *_: distance(options)), []
    assert tuned_of(config, folder=tmp_path).rows == whole.rows and len(script.runs) == 2 * len(whole.rows) - 5


def test_a_folder_belongs_to_one_search(tmp_path: Path) -> None:
    claim(tmp_path / "new" / "trials", "settings")
    claim(tmp_path / "new" / "trials", "settings")
    with pytest.raises(InputError, match=r"has a search with different settings\. Nothing was overwritten"):
        claim(tmp_path / "new" / "trials", "others")
    claim(tmp_path / "data", '{"digests": {"a": [1]}}')
    with pytest.raises(InputError, match="different settings: the data or the starting points are others"):
        claim(tmp_path / "data", '{"digests": {"a": [2]}}')
    with pytest.raises(InputError, match="It has no search to resume"):
        claim(tmp_path / "new", "settings")
    (tmp_path / "new" / "trials" / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="different settings"):
        claim(tmp_path / "new" / "trials", "settings")


@pytest.mark.parametrize("theirs", ["settings", "others"])
def test_trials_of_a_job_array_may_claim_a_folder_at_the_same_time(
    theirs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job claims it, and stores a result, just after this one has seen that nobody has."""
    folder, real = tmp_path / "trials", trials.refuse_used

    def late(folder: Path, remedy: str) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(theirs)
        (folder / "fedavg-0000-rounds3-seed0.json").touch()
        real(folder, remedy)

    monkeypatch.setattr(trials, "refuse_used", late)
    if theirs == "settings":
        claim(folder, "settings")
    else:
        with pytest.raises(InputError, match=r"has a search with different settings\."):
            claim(folder, "settings")
    assert (folder / "config.json").read_text() == theirs


@pytest.mark.usefixtures("no_pictures")
def test_a_search_of_a_schedule_is_resumed_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tuple is a list in a file."""
    made = fs.quadratic(clients=3, dimension=2)
    methods = {"a": (made.problem, fs.FedAvg(lr=fs.schedules.StepDecay(0.05, at=(1, 2)), steps=2))}

    def search(resume: bool) -> list[Row]:
        options: dict[str, Any] = {"trials": 2, "seeds": 1, "rounds": 3, "threads": 1}
        return fs.tune(methods, made.data, out=tmp_path / "out", resume=resume, **options).rows

    first = search(resume=False)
    monkeypatch.setattr("fedstrata.experiments.object_methods.train", None)
    assert search(resume=True) == first


# --- several jobs, and samplers that learn ---------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["sobol", "latin"])
def test_jobs_do_not_change_the_result(sampler: str, tmp_path: Path) -> None:
    """With real runs."""
    config = config_of({"trials": 3, "seeds": 2, "sampler": sampler}, lr=0.7)
    alone, both = (tuned_of(config, ("fedavg", "fedprox"), jobs=jobs) for jobs in (1, 2))
    assert alone.rows == both.rows and alone.notes == both.notes and alone.measure == both.measure == "distance"


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_learning_samplers_are_deterministic_and_can_be_resumed(sampler: str, script: Script, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    config = config_of({"trials": 8, "seeds": 2, "sampler": sampler})
    script.loss = lambda options, _, seed: None if options["lr"] > 0.5 else distance(options) + seed
    names = ("fedavg", "fedprox")
    whole = tuned_of(config, names, folder=tmp_path / "a")
    assert origins(whole)["search"] == 8 and origins(whole, "fedprox")["search"] == 16
    assert tuned_of(config, names).rows == whole.rows
    assert tuned_of(config, names, jobs=2).rows == whole.rows
    for kept in (0, 5, 11):
        for path in (tmp_path / "a").glob("*-rounds*.json"):
            if int(path.name.split("-")[1]) >= kept:
                path.unlink()
        script.runs.clear()
        again = tuned_of(config, names, folder=tmp_path / "a")
        assert again.rows == whole.rows and again.notes == whole.notes
        assert len(script.runs) == 2 * sum(row["trial"] >= kept for row in whole.rows)


ARRAY = """
[problem]
name = "quadratic"
clients = 3
dimension = 2
[train]
rounds = 4
[tune]
trials = 2
seeds = 2
rounds = 2
[tune.search.scaffold]
"""


@pytest.mark.usefixtures("no_pictures")
def test_a_job_array_finds_what_a_search_finds(fedstrata: Any, write: Any, tmp_path: Path) -> None:
    """Every trial on its own, in any order, and then what is left: the longer runs and those beyond an edge."""
    words = ("tune", write(ARRAY), "--algorithms", "fedavg,scaffold,fedprox", "--seeds", 0, "--out")
    _, plain, _ = fedstrata(*words, tmp_path / "plain", "--json", "--quiet")
    array = tmp_path / "array"
    count = (1 + 2) + 1 + (1 + 4)
    for number in (*range(0, count, 2), *range(1, count, 2)):
        code, printed, err = fedstrata(*words, array, "--trial", number)
        label, own = ("fedavg", 0) if number < 3 else ("scaffold", 3) if number < 4 else ("fedprox", 4)
        assert code == 0 and printed == "" and err.startswith(f"{label} trial {number - own} (2 rounds): "), err
    stored = {path: path.read_text() for path in (array / "trials").glob("*-rounds2-*")}
    assert len(stored) == 2 * count == len(list((array / "trials").iterdir())) - 1
    code, resumed, err = fedstrata(*words, array, "--resume", "--json", "--quiet")
    assert code == 0 and json.loads(resumed) == json.loads(plain), err
    assert all(path.read_text() == text for path, text in stored.items()), "none is run again"
    assert (array / "trials.json").read_text() == (tmp_path / "plain" / "trials.json").read_text()
    files = [sorted(path.name for path in (folder / "trials").iterdir()) for folder in (array, tmp_path / "plain")]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--out", "OUT", "--trial", 9), "The --trial must be from 0 to 8: the search has 9 trials. Got 9."),
        (("--trial", 0), "--trial needs --out, the directory where all trials are stored."),
        (
            ("--out", "OUT", "--trial", 0, "--set", "tune={sampler='tpe'}"),
            "Single trials need points that do not depend on",
        ),
        (("--out", "OUT", "--trial", 0, "--set", "tune={halving=2}"), "sampler = 'sobol' or 'latin', and no halving."),
        (("--out", "OUT", "--trial", -1), "-1"),
    ],
)
def test_a_trial_that_cannot_run_alone(
    words: tuple[Any, ...], message: str, fedstrata: Any, write: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    chosen = [out if word == "OUT" else word for word in words]
    code, _, err = fedstrata("tune", write(ARRAY), "--algorithms", "fedavg,scaffold,fedprox", *chosen)
    assert code == 2 and message in " ".join(err.split()) and not out.exists()


@pytest.mark.usefixtures("no_pictures")
def test_a_trial_is_not_stored_among_other_files(fedstrata: Any, write: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    words = ("tune", write(ARRAY), "--algorithms", "fedavg,scaffold,fedprox", "--out", tmp_path / "out", "--trial", 0)
    code, _, err = fedstrata(*words)
    assert code == 2 and "It has no search." in err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_trials_of_another_search_are_not_mixed(fedstrata: Any, write: Any, tmp_path: Path) -> None:
    words = ("tune", write(ARRAY.removesuffix("[tune.search.scaffold]\n")), "--out", tmp_path / "out")
    assert fedstrata(*words, "--algorithms", "fedavg", "--trial", 1)[0] == 0
    others = {
        ("--algorithms", "fedprox"): "'names' was ['fedavg'] and is now ['fedprox']",
        ("--algorithms", "fedavg", "--trials", 3): "'tune.trials' was 2 and is now 3",
    }
    for changes, difference in others.items():
        for more in (("--trial", 1), ("--resume",)):
            code, _, err = fedstrata(*words, *changes, *more)
            told = f"has a search with different settings: {difference}. Nothing was overwritten."
            assert code == 2 and told in " ".join(err.split())


def test_labels_in_python_need_files_of_their_own(tmp_path: Path) -> None:
    made = fs.quadratic(clients=2, dimension=2)
    methods = {label: (made.problem, fs.FedAvg()) for label in ("lr = 1", "lr: 1")}
    for call in (fs.compare, fs.tune):
        with pytest.raises(InputError, match=r"label of a method must be distinct from 'lr = 1' in its letters"):
            call(methods, made.data, rounds=1, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_left_by_a_search_that_is_refused(tmp_path: Path) -> None:
    made = fs.quadratic(clients=2, dimension=2)
    with pytest.raises(InputError, match=r"mfcgd does not solve the problem 'quadratic'"):
        fs.tune({"mine": (made.problem, fs.MFCGD())}, made.data, rounds=1, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
