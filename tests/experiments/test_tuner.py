"""Searches: what is tried and for how long, edges of ranges, and failures."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from fedstrata.core.errors import FedstrataError, InputError
from fedstrata.experiments import tuner
from fedstrata.experiments.config import parse
from fedstrata.experiments.ranking import edges_of
from fedstrata.experiments.search import Range, Spread
from fedstrata.experiments.trials import Tried
from scripted import Script, config_of, distance, origins, tuned_of, tuner_of

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
    assert all(0.3 <= lr <= 10.0 for lr in extension) and 1.5 < tuned.options["fedavg"]["lr"] < 6
    assert sum(lr > 1 for lr in extension) >= 5, "most of them are beyond the edge, some near the best one inside"
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
    near = tuned.spaces["fedprox"]["lr"].around(before.options["lr"])
    assert all(trial.options["lr"] >= near.low for trial in made)


def test_beyond_two_edges_the_optimum_may_lie_beyond_one_of_them(script: Script) -> None:
    """The corner beyond both is not all that is searched."""
    script.loss = lambda o, *_: 1 / o["lr"] + (1 / o["mu"] if o["mu"] <= 1 else 50.0)
    search = {"fedprox": {"lr": [0.001, 1.0], "mu": [0.001, 1.0]}}
    tuned = tuned_of(config_of({"trials": 128, "seeds": 1, "search": search}), ("fedprox",))
    made = [t for t in tuned.trials["fedprox"] if t.origin == "extension"]
    assert set(tuned.extended["fedprox"]) == {"lr", "mu"}
    assert any(t.options["lr"] > 1 and t.options["mu"] < 1 for t in made)
    assert tuned.trials["fedprox"][0].origin == "extension"


def test_the_outermost_of_all_trials_is_at_an_edge_too(script: Script) -> None:
    """A point in the outer quarter that no other lies beyond; failures beyond it show that the edge is further in."""
    space = {"lr": Range(0.001, 1.0)}
    trials = [Tried("a", n, "search", {"lr": lr}) for n, lr in enumerate((0.01, 0.1, 0.3, 0.44))]
    assert edges_of(trials[3], space) == {} and edges_of(trials[3], space, trials) == {"lr": 1}
    assert edges_of(trials[3], space, [*trials, Tried("a", 4, "search", {"lr": 0.6})]) == {}
    assert edges_of(trials[1], space, trials[:2]) == {}


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


def test_a_method_without_anything_to_search_is_a_warning(script: Script) -> None:
    tuned = tuned_of(config_of({"trials": 2, "seeds": 1, "search": {"scaffold": {}}}), ("fedavg", "scaffold"))
    (warning,) = (note for note in tuned.warnings if "nothing was searched" in note)
    assert warning.startswith("Warning: scaffold:") and '[tune.search."scaffold"]' in warning


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


def test_a_method_of_which_every_trial_diverged_is_left_out_with_a_warning(script: Script) -> None:
    script.loss = lambda options, _, seed: None if "mu" in options and seed == 0 else distance(options)
    tuned = tuned_of(config_of({"trials": 2, "seeds": 2, "extend": False}), ("fedavg", "fedprox"))
    assert tuned.failed == ("fedprox",) and list(tuned.options) == list(tuned.tuned_methods) == ["fedavg"]
    assert (
        'Every trial of fedprox diverged in at least one seed. Search smaller learning rates: [tune.search."fedprox"'
        in (" ".join(tuned.warnings))
    )
    assert "| fedprox | – | – |" in tuned.table() and tuned.table("csv").count("\n") == 2


def test_a_search_in_which_everything_diverged_is_an_error(script: Script) -> None:
    script.loss = lambda *_: None
    with pytest.raises(FedstrataError, match=r"^Every trial of fedavg diverged.*Every trial of fedprox div") as caught:
        tuned_of(config_of({"trials": 2, "seeds": 1}), ("fedavg", "fedprox"))
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("shorter", [{"halving": 2}, {"rounds": 2}])
def test_the_next_best_short_trial_is_run_longer_if_the_best_diverge(shorter: dict[str, int], script: Script) -> None:
    script.loss = lambda o, rounds, _: None if rounds == 4 and o["lr"] > 0.005 else distance(o)
    tuned = tuned_of(config_of({"trials": 8, "seeds": 1, "extend": False, **shorter}, rounds=4))
    assert tuned.trials["fedavg"][0].rounds == 4 and tuned.options["fedavg"]["lr"] <= 0.005 and not tuned.failed


@pytest.mark.parametrize("shorter", [{"halving": 2}, {"rounds": 2}])
def test_a_short_trial_does_not_win_if_the_long_ones_diverge(shorter: dict[str, int], script: Script) -> None:
    script.loss = lambda options, rounds, _: None if rounds == 4 else distance(options)
    with pytest.raises(FedstrataError, match=r"^Every trial of fedavg diverged in at least one seed\."):
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
    script.measured = ("loss", "distance")
    with pytest.raises(FedstrataError, match=r"^No trial of fedavg has distance in every seed"):
        tuned_of(config_of({"trials": 2, "seeds": 1, "measure": "distance"}))
    with pytest.raises(InputError, match=r"Unknown measure 'accuracy'\..*\(tune.measure, fedavg\)"):
        tuned_of(config_of({"trials": 2, "seeds": 1, "measure": "accuracy"}))


def test_labels_to_search_must_be_there(script: Script) -> None:
    with pytest.raises(InputError, match=r"Unknown method 'fedprox'.*Known: fedavg\. \(\[tune.search\]\)"):
        tuner_of(config_of({"search": {"fedprox": {"lr": [0.1, 1.0]}}}))
