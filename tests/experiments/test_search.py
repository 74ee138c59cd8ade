"""Ranges of hyperparameters, and the points that samplers choose in them."""

from __future__ import annotations

import math
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from fedstrata.core.errors import InputError
from fedstrata.core.options import Shares, options_of
from fedstrata.experiments.config import parse
from fedstrata.experiments.config_methods import ConfigMethod
from fedstrata.experiments.search import (
    GENERATION,
    Optuna,
    Point,
    Range,
    Sampler,
    Space,
    Spread,
    as_options,
    defaults_of,
    sampler_of,
    space_of,
)

LR = Range(0.001, 1.0)
needs_optuna = pytest.mark.skipif(find_spec("optuna") is None, reason="Optuna is not installed")


def unique(points: list[Point]) -> list[Point]:
    return [point for i, point in enumerate(points) if point not in points[:i]]


def method(name: str = "fedavg", **options: Any) -> ConfigMethod:
    return ConfigMethod(name, parse({"algorithm": {"name": name, **options}}, "here"))


# --- ranges ----------------------------------------------------------------------------------------------------------


def test_a_range_is_logarithmic_and_its_values_have_four_digits() -> None:
    assert [LR.at(p) for p in (0.0, 1 / 3, 0.5, 1.0)] == [0.001, 0.01, 0.03162, 1.0]
    assert [LR.position(v) for v in (0.001, 0.01, 1.0, 10.0)] == pytest.approx([0, 1 / 3, 1, 4 / 3])
    assert Range(0.5, 0.5).position(0.5) == 0.5 and Range(0.5, 0.5).at(0.7) == 0.5


def test_rounding_does_not_leave_the_range() -> None:
    narrow = Range(0.100004, 0.99999, most=1 - 1e-6)
    assert (narrow.at(0.0), narrow.at(1.0)) == (0.100004, 0.99999)
    assert narrow.rounded(0.333333) == 0.3333


@pytest.mark.parametrize(
    ("searched", "value", "side"),
    [
        (LR, 0.0019, -1),
        (LR, 0.0021, 0),
        (LR, 0.49, 0),
        (LR, 0.51, 1),
        (LR, 1e-5, 0),
        (LR, 7.0, 0),
        (LR, 0.0, 0),  # off: nothing lies below
        (Range(0.001, 1.0, least=0.001), 0.001, 0),
        (Range(0.001, 1.0, least=0.0005), 0.001, -1),
        (Range(0.001, 1.0, most=1.0), 1.0, 0),
        (Range(0.001, 1.0, most=2.0), 1.0, 1),
        (Range(0.001, 3.0, most=1.0), 2.9, 0),
        (Range(0.001, 3.0, least=0.01), 0.001, 0),
        (Range(1, 8, whole=True), 1, 0),
        (Range(1, 8, whole=True), 8, 1),
        (Range(2, 8, whole=True), 2, -1),
        (Range(0.5, 0.5), 0.5, 0),
    ],
)
def test_a_value_at_an_edge_beyond_which_more_is_allowed(searched: Range, value: float, side: int) -> None:
    assert searched.edge(value) == side


def test_the_range_beyond_an_edge() -> None:
    assert (LR.beyond(1).low, LR.beyond(1).high) == (1.0, 10.0), "at most a factor of 10"
    assert (LR.beyond(-1).low, LR.beyond(-1).high) == pytest.approx((0.0001, 0.001))
    small = Range(0.1, 0.2)
    assert (small.beyond(1).low, small.beyond(1).high) == (0.2, 0.4), "at least a factor of 2"
    medium = Range(0.01, 0.16)
    assert (medium.beyond(-1).low, medium.beyond(-1).high) == pytest.approx((0.0025, 0.01)), "the root of the range"
    limited = Range(0.1, 0.9, least=0.09, most=0.999)
    assert (limited.beyond(1).low, limited.beyond(1).high) == (0.9, 0.999)
    assert (limited.beyond(-1).low, limited.beyond(-1).high) == (0.09, 0.1)
    assert limited.beyond(1).with_(limited) == Range(0.1, 0.999, 0.09, 0.999)


def test_the_quarter_around_a_value() -> None:
    near = LR.around(LR.at(0.5))
    assert near.position(near.low) == 0 and (LR.position(near.low), LR.position(near.high)) == pytest.approx(
        (0.375, 0.625), abs=1e-3
    )
    for value, ends in ((0.001, (0, 0.125)), (50.0, (0.875, 1)), (0.0, (0, 0.125))):
        near = LR.around(value)
        assert (LR.position(near.low), LR.position(near.high)) == pytest.approx(ends, abs=1e-3)


# --- what is searched ------------------------------------------------------------------------------------------------


def test_the_space_of_a_method_is_declared_or_chosen() -> None:
    assert space_of(method("fedprox"), {}) == {"lr": LR, "mu": Range(0.001, 1.0)}
    assert space_of(method("fedprox"), {"fedprox": {"steps": (2, 6)}}) == {"steps": Range(2, 6, None, None, True)}
    assert space_of(method("fedprox"), {"fedavg": {"steps": (2, 6)}}).keys() == {"lr", "mu"}
    assert space_of(method("fedprox"), {"fedprox": {}}) == {}


def test_limits_of_an_option_are_those_of_its_range() -> None:
    momentum = space_of(method("fedadam"), {"fedadam": {"beta1": (0.5, 0.9)}})["beta1"]
    assert momentum.most == pytest.approx(0.999) and momentum.beyond(1).high < 1


@pytest.mark.parametrize("name", ["fgda", "mfcgd", "adafgda"])
def test_shares_are_not_searched_above_1(name: str) -> None:
    space = space_of(method(name), {})
    shares = [option for option in options_of(method(name).algorithm).values() if isinstance(option.search, Shares)]
    assert shares
    for option in shares:
        searched = space[option.name]
        assert searched.most == 1.0 and searched.edge(1.0) == 0 and searched.edge(searched.low) == -1
        assert searched.beyond(1).high == 1.0


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({"lrr": (0.1, 1.0)}, r"Unknown option of fedavg 'lrr'\. Did you mean 'lr'\?.*\(\[tune.search.\"fedavg\"\]\)"),
        (
            {"lr": (0.0, 1.0)},
            r"range of lr must be two positive numbers in ascending order, from .* Got \[0.0, 1.0\]",
        ),
        (
            {"lr": (1.0, 0.1)},
            r"range of lr must be two positive numbers in ascending order, from .* Got \[1.0, 0.1\]",
        ),
        ({"lr": (-1.0, 0.1)}, r"Got \[-1.0, 0.1\]\. \(\[tune.search.\"fedavg\"\]\)"),
    ],
)
def test_a_space_that_cannot_be_searched_is_refused(ranges: dict[str, tuple[float, float]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        space_of(method(), {"fedavg": ranges})


def test_points_become_options() -> None:
    decayed = method("fedprox", lr={"schedule": "step", "value": 0.5, "at": [2]}, mu=0.3)
    point = {"lr": 0.02, "mu": 0.1, "steps": 2.6}
    schedule = {"schedule": "step", "value": 0.02, "at": [2]}
    assert as_options(decayed, point) == {"lr": schedule, "mu": 0.1, "steps": 3}
    root = method(lr={"schedule": "cube_root", "k": 0.1, "n": 2})
    assert as_options(root, {"lr": 0.02}) == {"lr": {"schedule": "cube_root", "k": 0.02, "n": 2}}
    assert as_options(method(), {"steps": 0.2}) == {"steps": 1}
    assert defaults_of(decayed, {"lr": LR, "mu": LR}) == {"lr": 0.1, "mu": 0.01}


# --- samplers --------------------------------------------------------------------------------------------------------

SPACE = {"lr": LR, "mu": Range(0.01, 0.5), "steps": Range(1, 8, whole=True)}


@pytest.mark.parametrize("name", ["sobol", "latin"])
def test_points_are_inside_and_follow_from_seed_and_label(name: str) -> None:
    points = sampler_of(name, SPACE, "a", 0).ask(11)
    assert len(points) == 11 and all(SPACE[n].low <= v <= SPACE[n].high for p in points for n, v in p.items())
    assert all(list(point) == list(SPACE) for point in points)
    assert len(unique(points)) == 11
    assert sampler_of(name, SPACE, "a", 0).ask(11) == points
    for label, seed in (("b", 0), ("a", 1)):
        others = sampler_of(name, SPACE, label, seed).ask(11)
        assert not [point for point in others if point in points]


@pytest.mark.parametrize("count", [1, 2, 8, 16])
@pytest.mark.parametrize("name", ["sobol", "latin"])
def test_points_cover_every_range_evenly(name: str, count: int) -> None:
    """Each of ``count`` equal parts of a range has one point, and each half of it the same number."""
    points = sampler_of(name, SPACE, "a", 3).ask(count)
    for option, searched in SPACE.items():
        parts = [min(count - 1, int(searched.position(point[option]) * count)) for point in points]
        assert sorted(parts) == list(range(count))


def test_sobol_points_cover_quarters_of_pairs_evenly() -> None:
    """A Latin hypercube need not, which is why Sobol points are the default."""

    def quarters(name: str, seed: int) -> list[int]:
        points = sampler_of(name, {"a": LR, "b": LR}, "a", seed).ask(16)
        return list(np.bincount([2 * (LR.position(p["a"]) > 0.5) + (LR.position(p["b"]) > 0.5) for p in points]))

    assert all(quarters("sobol", seed) == [4, 4, 4, 4] for seed in range(10))
    assert not all(quarters("latin", seed) == [4, 4, 4, 4] for seed in range(10))


def test_a_number_of_points_that_is_no_power_of_two() -> None:
    for count in (3, 5, 9, 24):
        assert len(Spread(SPACE, "sobol", 0).ask(count)) == count
    assert Spread(SPACE, "sobol", 0).ask(5) == Spread(SPACE, "sobol", 0).ask(8)[:5]


def learned(sampler: Sampler, count: int, told: bool = True) -> list[Point]:
    """Ask for points and tell their values, best in the middle of the range."""
    points: list[Point] = []
    while len(points) < count:
        asked = sampler.ask(count - len(points))
        assert 0 < len(asked) <= GENERATION
        for point in asked:
            value = -abs(LR.position(point["lr"]) - 0.5)
            sampler.tell(point, None if value < -0.4 or not told else value)
        points += asked
    return points


@needs_optuna
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("name", ["tpe", "gp"])
def test_samplers_of_optuna_are_a_function_of_what_they_are_told(name: str) -> None:
    space: Space = {"lr": LR}
    points = learned(sampler_of(name, space, "a", 0), 20)
    assert all(LR.low <= p["lr"] <= LR.high for p in points) and len(unique(points)) > 10
    assert learned(sampler_of(name, space, "a", 0), 20) == points
    assert learned(sampler_of(name, space, "b", 0), 20) != points
    ignorant = learned(sampler_of(name, space, "a", 0), 20, told=False)
    assert ignorant[:GENERATION] == points[:GENERATION] and ignorant != points
    late = [-abs(LR.position(p["lr"]) - 0.5) for p in points[16:]]
    early = [-abs(LR.position(p["lr"]) - 0.5) for p in points[:8]]
    assert np.mean(late) > np.mean(early) and not any(map(math.isnan, late))


@needs_optuna
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("name", ["tpe", "gp"])
def test_samplers_of_optuna_leave_a_region_that_fails(name: str) -> None:
    """The best values are next to those that fail."""
    sampler, failed = sampler_of(name, {"lr": LR}, "a", 0), []
    for _ in range(7):
        for point in sampler.ask(GENERATION):
            position = LR.position(point["lr"])
            failed.append(position > 0.5)
            sampler.tell(point, None if position > 0.5 else position)
    assert sum(failed[:12]) > 0 and sum(failed[12:]) < 0.5 * len(failed[12:])


@pytest.mark.parametrize("name", ["tpe", "gp"])
def test_optuna_is_named_where_it_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(InputError, match=rf"The sampler '{name}' needs Optuna: pip install 'fedstrata\[optuna\]'"):
        Optuna({"lr": LR}, name, 0)
