"""Searches: what is tried and for how long, edges of ranges, failures, and resuming."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import fedstrata as fs
from fedstrata.core.errors import FedstrataError, InputError
from fedstrata.core.files import Row
from fedstrata.experiments import trials, tuner
from fedstrata.experiments.config import Config, parse
from fedstrata.experiments.config_methods import ConfigMethod, config_methods
from fedstrata.experiments.methods import Method, Outcome, Trial
from fedstrata.experiments.search import Spread
from fedstrata.experiments.trials import claim, number_of
from fedstrata.experiments.tune import Tuned, tune_methods
from fedstrata.experiments.tuner import Tuner

Loss = Callable[[dict[str, Any], int, int], float | None]
"""A loss by options, rounds and seed; None if the run diverges."""


@dataclass
class Script:
    """Replaces runs by a formula, and counts them."""

    loss: Loss = lambda options, rounds, seed: distance(options)
    runs: list[tuple[str, dict[str, Any], int, int]] = field(default_factory=list)
    measure: str = "loss"

    def run(self, method: Method, seed: int, trial: Trial, *_: Any) -> Outcome:
        """Return the outcome of a run."""
        assert trial.options is not None and trial.rounds is not None and trial.share is not None
        self.runs.append((method.label, dict(trial.options), trial.rounds, seed))
        value = self.loss(dict(trial.options), trial.rounds, seed)
        history = [{"round": 0, "loss": 1e9, "distance": 1.0}]
        if value is None:
            return Outcome(method.label, seed, history, None, {}, "it diverged")
        return Outcome(method.label, seed, history, {"round": trial.rounds, self.measure: value}, {})


def distance(options: dict[str, Any], best: float = 0.03) -> float:
    """The distance of a learning rate from the best one, on a logarithmic scale."""
    return abs(math.log10(number_of(options.get("lr", 0.1))) - math.log10(best))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()
    monkeypatch.setattr(ConfigMethod, "run", lambda self, *rest: script.run(self, *rest))
    return script


def config_of(tune: dict[str, Any] | None = None, rounds: int = 3, **options: Any) -> Config:
    """A quadratic problem; ``options`` are those of FedAvg."""
    problem = {"name": "quadratic", "clients": 3, "dimension": 2, "samples": 10}
    algorithm = {"name": "fedavg", **options}
    tables = {"problem": problem, "algorithm": algorithm, "train": {"rounds": rounds}, "tune": tune or {}}
    return parse(tables, "here")


def tuner_of(config: Config, names: tuple[str, ...] = ("fedavg",), folder: Path | None = None, **options: Any) -> Tuner:
    _, methods = config_methods(config, names)
    options = {"jobs": 1, "callbacks": (), "say": lambda line: None, "seed": config.train.seed} | options
    return Tuner(methods, config.tune, folder, **options)


def tuned_of(config: Config, names: tuple[str, ...] = ("fedavg",), **options: Any) -> Tuned:
    return tune_methods(*config_methods(config, names), config.tune, config.train.seed, **options)


def origins(tuned: Tuned, label: str = "fedavg") -> Counter[str]:
    return Counter(trial.origin for trial in tuned.trials[label])


# --- what is tried ---------------------------------------------------------------------------------------------------

BOTH = {"search": {"fedavg": {"lr": [0.001, 1.0], "steps": [1, 20]}}}
GIVEN: dict[str, tuple[dict[str, Any], dict[str, Any], list[Any]]] = {
    "a setting of its own": ({"lr": 0.02}, {}, [("file", {"lr": 0.02}), ("defaults", {"lr": 0.1})]),
    "none": ({}, {}, [("defaults", {"lr": 0.1})]),
    "one that is not searched": ({"steps": 4}, {}, [("defaults", {"lr": 0.1})]),
    "the default": ({"lr": 0.1}, {}, [("file", {"lr": 0.1})]),
    "one of two": (
        {"lr": 0.02},
        BOTH,
        [("file", {"lr": 0.02, "steps": 10}), ("defaults", {"lr": 0.1, "steps": 10})],
    ),
    "one of two, the default": ({"steps": 10}, BOTH, [("file", {"lr": 0.1, "steps": 10})]),
    "a schedule": (
        {"lr": {"schedule": "step", "value": 0.5, "at": [2]}},
        {},
        [
            ("file", {"lr": {"schedule": "step", "value": 0.5, "at": [2]}}),
            ("defaults", {"lr": {"schedule": "step", "value": 0.1, "at": [2]}}),
        ],
    ),
    "nothing to search": ({"lr": 0.02}, {"search": {"fedavg": {}}}, [("file", {})]),
}


@pytest.mark.parametrize("case", GIVEN)
def test_the_settings_of_the_file_and_the_defaults_are_tried(case: str, script: Script) -> None:
    options, tune, given = GIVEN[case]
    config = config_of({"trials": 2, "seeds": 1, "extend": False, **tune}, **options)
    search = tuner_of(config)
    assert [(trial.origin, trial.options) for trial in search.trials["fedavg"]] == given
    assert [trial.number for trial in search.trials["fedavg"]] == list(range(len(given)))
    tuned = tuned_of(config)
    searched = 2 * len(search.spaces["fedavg"])
    assert len(script.runs) == len(given) + searched == len(tuned.trials["fedavg"])
    assert [options for _, options, _, _ in script.runs[: len(given)]] == [options for _, options in given]


def test_trials_are_for_each_hyperparameter(script: Script) -> None:
    search = {"fedprox": {"lr": [0.001, 1.0], "mu": [0.01, 1.0], "server_lr": [0.1, 1.0]}}
    config = config_of({"trials": 4, "seeds": 2, "extend": False, "search": search})
    tuned = tuned_of(config, ("fedavg", "fedprox", "scaffold"))
    assert {label: origins(tuned, label)["search"] for label in tuned.trials} == {
        "fedavg": 4,
        "fedprox": 12,
        "scaffold": 4,
    }
    assert all(len(t.finals[3]) == 2 for trials in tuned.trials.values() for t in trials)
    assert sorted({seed for *_, seed in script.runs}) == [0, 1] and len(script.runs) == 2 * (4 + 12 + 4 + 3)
    assert tuned.notes[:2] == [
        "fedavg: 4 trials for each of 1 hyperparameter (lr), and the defaults; 2 seeds each.",
        "fedprox: 4 trials for each of 3 hyperparameters (lr, mu, server_lr), and the defaults; 2 seeds each.",
    ]


def test_the_best_trial_wins(script: Script) -> None:
    tuned = tuned_of(config_of({"trials": 8, "seeds": 3}, lr=0.7))
    values = [trial.value("loss") for trial in tuned.trials["fedavg"]]
    assert values == sorted(values, key=float) and tuned.warnings == []  # type: ignore[arg-type]
    assert tuned.options["fedavg"] == tuned.trials["fedavg"][0].options == tuned.rows[0]["options"]
    assert tuned.best["fedavg"].to_table()["lr"] == tuned.options["fedavg"]["lr"]
    assert distance(tuned.options["fedavg"]) < 0.2
    assert tuned.rows[0]["values"] == [tuned.rows[0]["loss"]] * 3 and tuned.rows[0]["rounds"] == 3


@pytest.mark.parametrize(("measure", "sign"), [("loss", -1), ("accuracy", 1)])
def test_the_best_is_the_least_loss_or_the_largest_accuracy(
    measure: str, sign: int, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samplers learn the mean over seeds, with a sign such that larger is better, and which points failed."""
    gains: dict[float, float | None] = {}
    monkeypatch.setattr(Spread, "tell", lambda self, point, gain: gains.update({point["lr"]: gain}))
    script.measure = measure
    script.loss = lambda options, _, seed: None if 0.05 < options["lr"] < 0.2 else options["lr"] + seed
    tuned = tuned_of(config_of({"trials": 8, "seeds": 2, "extend": False}))
    good = sorted((lr for lr, gain in gains.items() if gain is not None), reverse=measure == "accuracy")
    assert set(gains) - set(good) == {lr for lr in gains if 0.05 < lr < 0.2} and 0 < len(good) < len(gains) == 8
    assert tuned.measure == measure
    assert [trial.options["lr"] for trial in tuned.trials["fedavg"]][: len(good)] == good
    assert [gains[lr] for lr in good] == pytest.approx([sign * (lr + 0.5) for lr in good])


def test_settings_that_are_the_same_when_rounded_are_tried_once(script: Script) -> None:
    script.loss = lambda options, *_: options["steps"]
    tuned_of(config_of({"trials": 12, "seeds": 1, "extend": False, "search": {"fedavg": {"steps": [1, 3]}}}, steps=2))
    assert sorted(options["steps"] for _, options, _, _ in script.runs) == [1, 2, 3, 10], "10 is the default"


# --- edges -----------------------------------------------------------------------------------------------------------


def test_a_search_goes_once_beyond_an_edge(script: Script) -> None:
    """The best rate, 3, is beyond the range but inside its extension."""
    script.loss = lambda options, *_: distance(options, 3.0)
    said: list[str] = []
    tuned = tuned_of(config_of({"trials": 8, "seeds": 1}), say=said.append)
    assert origins(tuned) == {"defaults": 1, "search": 8, "extension": 8}
    extension = [trial.options["lr"] for trial in tuned.trials["fedavg"] if trial.origin == "extension"]
    assert all(1.0 <= lr <= 10.0 for lr in extension) and 1.5 < tuned.options["fedavg"]["lr"] < 6
    assert tuned.notes[1:] == ["fedavg: 8 more trials beyond the edge of lr, where the best one was."]
    assert "fedavg: the best lr is at an edge of its range; searching beyond it" in said
    assert (tuned.extended["fedavg"]["lr"].low, tuned.extended["fedavg"]["lr"].high) == (1.0, 10.0)
    assert (tuned.spaces["fedavg"]["lr"].low, tuned.spaces["fedavg"]["lr"].high) == (0.001, 1.0)


def test_methods_have_points_of_their_own(script: Script) -> None:
    """Also beyond an edge."""
    script.loss = lambda options, *_: distance(options, 3.0)
    tuned = tuned_of(config_of({"trials": 8, "seeds": 1}, lr=1.0), ("fedavg", "scaffold"))
    for origin in ("search", "extension"):
        one, other = ({t.options["lr"] for t in group if t.origin == origin} for group in tuned.trials.values())
        assert len(one) == len(other) == 8 and not one & other


@pytest.mark.parametrize(("extend", "high", "count"), [(True, "10", 17), (False, "1", 9)])
def test_a_winner_that_is_still_at_an_edge_is_a_warning(extend: bool, high: str, count: int, script: Script) -> None:
    script.loss = lambda options, *_: 1 / options["lr"]
    tuned = tuned_of(config_of({"trials": 8, "seeds": 1, "extend": extend}))
    assert len(tuned.trials["fedavg"]) == count and len(script.runs) == count
    best = max(options["lr"] for _, options, _, _ in script.runs)
    assert tuned.warnings == [
        f"Warning: fedavg: the best lr, {best:g}, is at the edge of what was searched (0.001 to {high}), so a better "
        'one may lie beyond: widen [tune.search."fedavg"].'
    ]


def test_only_the_methods_and_hyperparameters_at_an_edge_are_extended(script: Script) -> None:
    script.loss = lambda options, *_: (
        distance(options, 3.0 if "mu" in options else 0.03)
        + (abs(math.log10(options["mu"]) + 1) if "mu" in options else 0)
    )
    tuned = tuned_of(config_of({"trials": 16, "seeds": 1}), ("fedavg", "fedprox"))
    assert origins(tuned)["extension"] == 0 and origins(tuned, "fedprox")["extension"] == 16
    assert set(tuned.extended["fedprox"]) == {"lr"} and tuned.extended["fedavg"] == {}
    made = [t for t in tuned.trials["fedprox"] if t.origin == "extension"]
    before = min((t for t in tuned.trials["fedprox"] if t.origin != "extension"), key=lambda t: t.value("loss") or 0)
    quarter = tuned.spaces["fedprox"]["mu"].around(before.options["mu"])
    assert all(quarter.low <= trial.options["mu"] <= quarter.high for trial in made)
    assert all(trial.options["lr"] >= 1.0 for trial in made)


def test_an_edge_that_nothing_lies_beyond(script: Script) -> None:
    """Shares end at 1, and a local step is the least."""
    script.loss = lambda options, *_: options["steps"] - options["server_lr"]
    search = {"fedavg": {"steps": [1, 8], "server_lr": [0.1, 1.0]}}
    tuned = tuned_of(config_of({"trials": 8, "seeds": 1, "search": search}))
    assert "steps" not in tuned.extended["fedavg"] and not [w for w in tuned.warnings if "steps" in w]
    script.loss = lambda options, *_: -options["alpha"]
    tables = {"problem": {"name": "quadratic_saddle", "samples": 10}, "train": {"rounds": 1}}
    shares = {"fgda": {"alpha": [0.05, 1.0]}}
    config = parse({**tables, "tune": {"trials": 8, "seeds": 1, "search": shares}}, "here")
    tuned = tuned_of(config, ("fgda",))
    assert origins(tuned, "fgda")["extension"] == 0 and tuned.warnings == []
    assert all(options["alpha"] <= 1 for label, options, _, _ in script.runs if label == "fgda")


def test_a_winner_of_zero_is_at_no_edge(script: Script) -> None:
    script.loss = lambda options, *_: options["weight_decay"]
    search = {"fedavg": {"weight_decay": [1e-4, 1e-2]}}
    tuned = tuned_of(config_of({"trials": 4, "seeds": 1, "search": search}))
    assert tuned.options["fedavg"] == {"weight_decay": 0.0} and tuned.trials["fedavg"][0].origin == "defaults"
    assert origins(tuned)["extension"] == 0 and tuned.warnings == []


def test_a_winner_that_sets_only_some_of_what_is_searched(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """A default that is not a number is not tried; beyond an edge, its whole range is searched."""
    monkeypatch.setattr(tuner, "defaults_of", lambda *_: None)
    script.loss = lambda options, *_: 1 / options["lr"] + ("steps" in options)
    tuned = tuned_of(config_of({"trials": 4, "seeds": 1, **BOTH}, lr=0.999))
    assert origins(tuned) == {"file": 1, "search": 8, "extension": 4}
    steps = {trial.options["steps"] for trial in tuned.trials["fedavg"] if trial.origin == "extension"}
    assert min(steps) < 5 and max(steps) > 8


# --- how long --------------------------------------------------------------------------------------------------------


def test_successive_halving(script: Script) -> None:
    tuned = tuned_of(config_of({"trials": 8, "seeds": 2, "halving": 2, "extend": False}, rounds=8))
    lengths = Counter(rounds for *_, rounds, _ in script.runs)
    assert lengths == {1: 2 * 9, 2: 2 * 5, 4: 2 * 3, 8: 2 * 2}, "half of them, rounded up, for twice as long"
    ranked = sorted({options["lr"] for _, options, _, _ in script.runs}, key=lambda lr: distance({"lr": lr}))
    for rounds, count in ((2, 5), (4, 3), (8, 2)):
        assert {o["lr"] for _, o, r, _ in script.runs if r == rounds} == set(ranked[:count]), "the best of them"
    assert tuned.options["fedavg"]["lr"] == ranked[0]
    assert [trial.rounds for trial in tuned.trials["fedavg"]] == [8, 8, 4, 2, 2, 1, 1, 1, 1]
    assert set(tuned.trials["fedavg"][0].finals) == {1, 2, 4, 8}


@pytest.mark.parametrize(
    ("rounds", "halving", "lengths"),
    [(27, 3, {1, 3, 9, 27}), (100, 3, {3, 11, 33, 100}), (3, 2, {1, 3}), (1, 2, {1}), (16, 4, {1, 4, 16})],
)
def test_the_lengths_of_halving(rounds: int, halving: int, lengths: set[int], script: Script) -> None:
    search = tuner_of(config_of({"halving": halving}, rounds=rounds))
    assert {length for length, _ in search.rungs["fedavg"]} == lengths


def test_the_winner_of_halving_has_full_length(script: Script) -> None:
    """A loss that grows with rounds does not favour short trials."""
    script.loss = lambda options, rounds, _: distance(options) + rounds
    tuned = tuned_of(config_of({"trials": 8, "seeds": 1, "halving": 2}, rounds=4))
    assert tuned.trials["fedavg"][0].rounds == 4 and tuned.rows[0]["rounds"] == 4
    assert tuned.rows[0]["loss"] > tuned.rows[-1]["loss"]


def test_the_best_three_short_trials_run_at_full_length(script: Script) -> None:
    tuned = tuned_of(config_of({"trials": 8, "seeds": 1, "rounds": 2, "extend": False}, rounds=6))
    assert Counter(rounds for *_, rounds, _ in script.runs) == {2: 9, 6: 3}
    ranked = sorted({options["lr"] for _, options, _, _ in script.runs}, key=lambda lr: distance({"lr": lr}))
    assert [trial.options["lr"] for trial in tuned.trials["fedavg"]][:3] == ranked[:3]
    assert tuned.warnings == []


def test_a_ranking_that_changes_with_the_length_is_a_warning(script: Script) -> None:
    script.loss = lambda options, rounds, _: distance(options) * (1 if rounds == 2 else -1)
    tuned = tuned_of(config_of({"trials": 8, "seeds": 1, "rounds": 2, "extend": False}, rounds=6))
    ranked = sorted({options["lr"] for _, options, _, _ in script.runs}, key=lambda lr: distance({"lr": lr}))
    assert tuned.options["fedavg"]["lr"] == ranked[2], "the best of the three at full length"
    assert tuned.warnings == [
        "Warning: fedavg: the best setting after 2 rounds is not the best of 3 after 6: short trials do not rank its "
        "settings reliably."
    ]


def test_lengths_that_make_no_sense_are_refused(script: Script) -> None:
    assert [r for r, _ in tuner_of(config_of({"rounds": 3}, rounds=3)).rungs["fedavg"]] == [3]
    with pytest.raises(InputError, match=r"The key tune.rounds must be at most train.rounds, 3\. Got 4\."):
        tuner_of(config_of({"rounds": 4}, rounds=3))
    with pytest.raises(InputError, match=r"tune.rounds and tune.halving both shorten trials"):
        config_of({"rounds": 2, "halving": 2})


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_trial_of_which_a_seed_diverged_fails(script: Script) -> None:
    """The best rates fail in one seed, so another one wins."""
    script.loss = lambda o, _, seed: None if seed == 1 and 0.01 < o["lr"] < 0.09 else distance(o)
    said: list[str] = []
    tuned = tuned_of(config_of({"trials": 8, "seeds": 3}, lr=0.03), say=said.append)
    failed = [trial for trial in tuned.trials["fedavg"] if 0.01 < trial.options["lr"] < 0.09]
    assert failed and tuned.trials["fedavg"][-len(failed) :] == sorted(failed, key=lambda trial: trial.number)
    assert all(trial.value("loss") is None and trial.diverged == 1 for trial in failed)
    row = next(row for row in tuned.rows if row["origin"] == "file")
    assert row["values"] == [0.0, None, 0.0] and row["loss"] is None and row["diverged"] == 1
    assert "fedavg trial 0: lr = 0.03 -> diverged in 1 of 3 seeds" in said
    assert tuned.rows[0]["loss"] == pytest.approx(distance(tuned.options["fedavg"]))


def test_a_search_in_which_everything_diverged_is_an_error(script: Script) -> None:
    script.loss = lambda options, _, seed: None if "mu" in options and seed == 0 else distance(options)
    with pytest.raises(FedstrataError, match=r"^Every trial of fedprox diverged in at least one seed\.") as caught:
        tuned_of(config_of({"trials": 2, "seeds": 2}), ("fedavg", "fedprox"))
    assert '[tune.search."fedprox"]' in str(caught.value) and caught.value.exit_code == 1
    script.loss = lambda *_: None
    with pytest.raises(FedstrataError, match=r"^Every trial of fedavg, fedprox diverged"):
        tuned_of(config_of({"trials": 2, "seeds": 1}), ("fedavg", "fedprox"))


@pytest.mark.parametrize("shorter", [{"halving": 2}, {"rounds": 2}])
def test_a_short_trial_does_not_win_if_the_long_ones_diverge(shorter: dict[str, int], script: Script) -> None:
    script.loss = lambda options, rounds, _: None if rounds == 4 else distance(options)
    with pytest.raises(FedstrataError, match=r"^Every full-length trial of fedavg diverged in at least one seed\."):
        tuned_of(config_of({"trials": 8, "seeds": 1, **shorter}, rounds=4))


@pytest.mark.parametrize("shorter", [{"halving": 2}, {"rounds": 2}])
def test_trials_that_diverged_are_not_run_longer(shorter: dict[str, int], script: Script) -> None:
    """Only the two smallest rates do not."""
    script.loss = lambda options, rounds, _: None if options["lr"] > 0.005 else rounds
    tuned_of(config_of({"trials": 8, "seeds": 1, "extend": False, **shorter}, rounds=4))
    least = min(rounds for *_, rounds, _ in script.runs)
    short, longer = ({o["lr"] for _, o, rounds, _ in script.runs if (rounds > least) is long} for long in (False, True))
    assert longer == {lr for lr in short if lr <= 0.005} and len(longer) == 2


def test_a_measure_that_is_not_finite_in_the_end_is_a_failure(script: Script) -> None:
    """Rows leave out what is not finite; all runs had a distance at the start, and none has one at the end."""
    with pytest.raises(FedstrataError, match=r"^Every trial of fedavg diverged"):
        tuned_of(config_of({"trials": 2, "seeds": 1, "measure": "distance"}))
    with pytest.raises(InputError, match=r"Unknown measure 'accuracy'\..*\(tune.measure, fedavg\)"):
        tuned_of(config_of({"trials": 2, "seeds": 1, "measure": "accuracy"}))


def test_labels_to_search_must_be_there(script: Script) -> None:
    with pytest.raises(InputError, match=r"Unknown method 'fedprox'.*Known: fedavg\. \(\[tune.search\]\)"):
        tuner_of(config_of({"search": {"fedprox": {"lr": [0.1, 1.0]}}}))


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
    with pytest.raises(InputError, match="It has no search to resume"):
        claim(tmp_path / "new", "settings")


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
    assert alone.rows == both.rows and alone.notes == both.notes and alone.measure == both.measure == "loss"


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
def test_trials_of_another_search_are_not_mixed(fedstrata: Any, write: Any, tmp_path: Path) -> None:
    words = ("tune", write(ARRAY.removesuffix("[tune.search.scaffold]\n")), "--out", tmp_path / "out")
    assert fedstrata(*words, "--algorithms", "fedavg", "--trial", 1)[0] == 0
    for changes in (("--algorithms", "fedprox"), ("--algorithms", "fedavg", "--trials", 3)):
        for more in (("--trial", 1), ("--resume",)):
            code, _, err = fedstrata(*words, *changes, *more)
            assert code == 2 and "has a search with different settings. Nothing was overwritten." in " ".join(
                err.split()
            )


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
