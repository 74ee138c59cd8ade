"""Rates that follow a schedule, and local steps that grow with the rounds."""

from __future__ import annotations

import tomllib
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from cases import product
from fedstrata.algorithms import ALGORITHMS
from fedstrata.core.clock import Clock
from fedstrata.core.schedules import steps_at
from fedstrata.experiments.config import parse
from fedstrata.experiments.config_methods import ConfigMethod
from fedstrata.experiments.search import as_options
from reference.fedlalr import interval
from support import example_for, make_clients, make_setting, play, shared_oracles, started

pytestmark = pytest.mark.untraced


@pytest.mark.parametrize(
    ("schedule", "clock", "expected"),
    [
        (fs.StepDecay(0.1), Clock(0, 8), 0.1),
        (fs.StepDecay(0.1), Clock(3, 8), 0.1),
        (fs.StepDecay(0.1), Clock(4, 8), 0.1 * 0.1),
        (fs.StepDecay(0.1), Clock(6, 8), 0.1 * 0.1 * 0.1),
        (fs.StepDecay(1.0, at=(2, 5), factor=0.5), Clock(1, 100), 1.0),
        (fs.StepDecay(1.0, at=(2, 5), factor=0.5), Clock(2, 100), 0.5),
        (fs.StepDecay(1.0, at=(2, 5), factor=0.5), Clock(99, 100), 0.25),
        (fs.RoundDecay(2.0, 0.9), Clock(3, 100, step=7, iteration=50), 2.0 * 0.729),
        (fs.CubeRoot(3.0, 8.0), Clock(3, 100, step=7, iteration=0), 1.5),
        (fs.CubeRoot(3.0, 8.0), Clock(0, 100, step=0, iteration=19), 1.0),
        (fs.Power(3.0, 8.0), Clock(0, 100, step=0, iteration=19), 1.0),
        (fs.Power(3.0, 5.0, 0.5), Clock(1, 100, step=7, iteration=4), 1.0),
    ],
)
def test_schedules_follow_their_formulas(schedule: fs.schedules.Schedule, clock: Clock, expected: float) -> None:
    assert schedule(clock) == pytest.approx(expected, rel=1e-12)


def test_a_cube_root_is_a_power_without_an_exponent_of_its_own() -> None:
    clock = Clock(0, 100, iteration=19)
    assert fs.CubeRoot(0.3, 2.0)(clock) == fs.Power(0.3, 2.0)(clock) == 0.3 / 21.0 ** (1 / 3)
    assert fs.CubeRoot(0.3).to_table() == {"schedule": "cube_root", "k": 0.3, "n": 1.0}
    assert fs.Power(0.3, 2.0, 0.5).to_table() == {"schedule": "power", "k": 0.3, "n": 2.0, "exponent": 0.5}
    with pytest.raises(fs.InputError, match="Unknown option of the cube_root schedule 'exponent'"):
        fs.CubeRoot(0.3, exponent=0.5)


@pytest.mark.parametrize(("schedule", "key"), [("step", "value"), ("cube_root", "k"), ("power", "k")])
def test_a_search_scales_a_schedule(schedule: str, key: str) -> None:
    config = parse({"algorithm": {"name": "fedavg", "lr": {"schedule": schedule, key: 1.0}}}, "here")
    assert as_options(ConfigMethod("here", config), {"lr": 0.5}) == {"lr": {"schedule": schedule, key: 0.5}}


# --- intervals -------------------------------------------------------------------------------------------------------


def test_four_steps_to_base_two_are_ten_from_round_64_to_127() -> None:
    """As the paper says of rounds 64 to 100; its printed ceiling would give 11 from round 65 on."""
    down, up = fs.Interval(4, 2.0), fs.Interval(4, 2.0, rounding="ceil")
    assert [down(t - 1) for t in (1, 2, 3, 4, 7, 8, 63)] == [4, 5, 5, 6, 6, 7, 9]
    assert {down(t - 1) for t in range(64, 128)} == {10}
    assert max(down(t - 1) for t in range(1, 128)) == 10 and down(128 - 1) == 11
    assert up(64 - 1) == 10
    assert {up(t - 1) for t in range(65, 129)} == {11} and up(129 - 1) == 12


def test_three_steps_to_base_four() -> None:
    down, up = fs.Interval(3, 4.0), fs.Interval(3, 4.0, rounding="ceil")
    assert [down(t - 1) for t in (1, 3, 4, 15, 16, 63, 64, 255, 256)] == [3, 3, 4, 4, 5, 5, 6, 6, 7]
    assert [up(t - 1) for t in (1, 2, 4, 5, 16, 17, 64, 65)] == [3, 4, 4, 5, 5, 6, 6, 7]


@product("base, rounding", [2, 3, 4, 10], ["floor", "ceil"])
def test_an_interval_is_exact_at_powers_and_beside_them(base: int, rounding: str) -> None:
    steps = fs.Interval(1, float(base), rounding)
    power, exponent = base, 1
    while power <= 10**6:
        below, above = (exponent - 1, exponent) if rounding == "floor" else (exponent, exponent + 1)
        if power - 1 == base ** (exponent - 1):
            below = exponent - 1
        assert [steps(t - 1) for t in (power - 1, power, power + 1)] == [1 + below, 1 + exponent, 1 + above]
        power, exponent = power * base, exponent + 1
    assert exponent > 6


@pytest.mark.slow
@product("base, rounding", [1.1, 1.5, 2, 2.718281828, 3.0, 4.0, 7.5, 10, 4999.0], ["floor", "ceil"])
def test_an_interval_is_the_references(base: float, rounding: str) -> None:
    steps = fs.Interval(6, base, rounding)
    rounds = range(1, 5001) if base >= 2 else range(1, 5001, 13)  # exact powers of such a base are long fractions
    assert [steps(t - 1) for t in rounds] == [interval(t, 6, base, rounding) for t in rounds]


BAD_INTERVALS: list[tuple[dict[str, Any], str]] = [
    ({"initial": 0, "base": 2.0}, "initial of an interval must be a whole number of at least 1. Got 0"),
    ({"initial": 2.5, "base": 2.0}, "initial of an interval must be a whole number of at least 1. Got 2.5"),
    ({"initial": True, "base": 2.0}, "initial of an interval"),
    ({"initial": 4, "base": 1.0}, "base of an interval must be a number of at least 1.001. Got 1.0"),
    ({"initial": 4, "base": float("inf")}, "base of an interval"),
    ({"initial": 4, "base": float("nan")}, "base of an interval"),
    ({"initial": 4, "base": "2"}, "base of an interval"),
    ({"initial": 4, "base": 2.0, "rounding": "round"}, "rounding of an interval must be 'floor' or 'ceil'"),
]


@pytest.mark.parametrize(("options", "message"), BAD_INTERVALS, ids=[str(o) for o, _ in BAD_INTERVALS])
def test_a_wrong_interval_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.InputError) as refused:
        fs.Interval(**options)
    assert message in str(refused.value)
    with pytest.raises(fs.InputError):
        fs.algorithm("fedlalr", steps=options)


INTERVALS = {
    "{initial = 4, base = 2.0}": fs.Interval(4, 2.0),
    '{initial = 3, base = 4, rounding = "ceil"}': fs.Interval(3, 4, "ceil"),
}


@product("name, text", ["fedlalr", "fedavg", "fgda"], INTERVALS)
def test_an_interval_is_a_table_of_a_configuration(name: str, text: str) -> None:
    table = tomllib.loads(f"steps = {text}")
    built = fs.algorithm(name, table)
    assert built.steps == INTERVALS[text]
    described = built.to_table()
    assert described["steps"] == {"rounding": "floor", **table["steps"]}
    assert fs.algorithm(described.pop("name"), described) == built


@pytest.mark.parametrize(
    ("name", "table", "wanted"),
    [
        ("fedlalr", {"initial": 4}, "An interval needs base. (steps of fedlalr)"),
        ("fedlalr", {"initial": 4, "base": 2.0, "epochs": 1}, "Unknown option of the local work 'initial'."),
        ("fedlalr", {"epoch": 1}, "of at least 1, epochs such as {epochs = 2}, or an interval such as {initial = 4, "),
        ("fgda", {"epochs": 2}, "The steps of fgda must be a whole number of at least 1, or an interval such as"),
    ],
)
def test_a_table_that_is_no_interval_is_refused(name: str, table: dict[str, Any], wanted: str) -> None:
    with pytest.raises(fs.InputError) as refused:
        fs.algorithm(name, steps=table)
    assert wanted in str(refused.value) and f"steps of {name}" in str(refused.value)


# --- algorithms with intervals ---------------------------------------------------------------------------------------


def takes_intervals(name: str) -> bool:
    try:
        ALGORITHMS[name](steps=fs.Interval(2, 2.0))
    except (fs.InputError, TypeError):
        return False
    return True


TAKING = [name for name in sorted(ALGORITHMS) if takes_intervals(name)]
RUNS: dict[str, tuple[str, int | None, dict[str, Any]]] = {
    **{name: (name, None, {}) for name in TAKING},
    "fednest, composition": ("fednest", 1, {}),
    **{f"{name}, single": (name, None, {"synchronisation": "single"}) for name in ("fgda", "adafgda")},
}
"""Which algorithm, with how many levels of a problem where it solves several, and other options."""


def test_nearly_every_algorithm_takes_an_interval() -> None:
    """AFL has no local steps; those with a snapshot every S steps have a period that steps must divide."""
    refusing = set(ALGORITHMS) - set(TAKING) - {"afl", "local_sgda_plus", "local_sgdam_plus"}
    assert not refusing, f"Declare 'steps: Steps' or 'steps: EqualSteps', which may be an interval: {sorted(refusing)}."
    for name in ("local_sgda_plus", "local_sgdam_plus"):
        with pytest.raises(fs.InputError, match=f"steps of {name} must be a whole number"):
            ALGORITHMS[name](steps=fs.Interval(2, 2.0))


def rounds_with(name: str, *steps: int | fs.Interval) -> tuple[Any, int]:
    """Rounds with these local steps, one algorithm for each: the server's state, and the steps counted."""
    known, levels, options = RUNS[name]
    kind = ALGORITHMS[known]
    problem, data = example_for(kind, torch.float64, levels)
    setting = make_setting(problem, data, batch_size=4, oracles=shared_oracles(problem))
    share = 1.0 if kind.full_participation else 4
    clients = make_clients(setting, rounds=len(steps), participation=share, chunk=4)
    with torch.no_grad():
        state = started(kind(steps=steps[0], **options), clients)
        for r, here in enumerate(steps):
            clients.begin(r)
            state = kind(steps=here, **options).round(state, clients)
    return state, clients.usage.steps


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("name", RUNS)
def test_a_round_with_an_interval_is_one_with_as_many_steps(name: str) -> None:
    """Whatever an algorithm does with the number of steps, it does with this round's."""
    growing = fs.Interval(2, 2.0)
    assert [steps_at(growing, r) for r in range(3)] == [2, 3, 3]
    ours, counted = rounds_with(name, growing, growing, growing)
    theirs, expected = rounds_with(name, 2, 3, 3)
    two, counted_two = rounds_with(name, 2, 2, 2)
    three, counted_three = rounds_with(name, 3, 3, 3)
    assert counted == expected
    assert 3 * counted == counted_two + 2 * counted_three
    for value, other in zip(
        torch.utils._pytree.tree_leaves(ours), torch.utils._pytree.tree_leaves(theirs), strict=True
    ):
        assert torch.equal(value, other)
    assert far(ours.x, two.x) > 1e-6 and far(ours.x, three.x) > 1e-6


def test_a_search_of_steps_tries_whole_numbers_of_every_algorithm() -> None:
    wrong = {}
    for name in ALGORITHMS:
        if name != "afl":
            options = as_options(ConfigMethod(name, parse({"algorithm": {"name": name}}, "here")), {"steps": 3.7})
            wrong |= {} if options == {"steps": 4} and type(options["steps"]) is int else {name: options}
    assert not wrong


# --- stages of growing rounds ----------------------------------------------------------------------------------------


def sliding() -> tuple[fs.Problem, fs.FederatedData, torch.Tensor]:
    """A saddle that falls evenly in x, so that local steps go straight on; its slope."""
    slope = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)

    def outer(x: torch.Tensor, y: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return x @ slope - 0.5 * y @ y + 0 * batch[0].sum()

    zeros = {"x0": torch.zeros(3, dtype=torch.float64), "y0": torch.zeros(1, dtype=torch.float64)}
    data = fs.FederatedData.from_arrays([(np.zeros((2, 1)), np.zeros((2, 1)))] * 2)
    return fs.Problem(outer, **zeros, name="sliding"), data, slope


def test_codasca_averages_over_the_steps_that_a_stage_had() -> None:
    """A stage of 2 and 3 steps ends in the middle of 1, 2, ..., 5."""
    problem, data, slope = sliding()
    algorithm = fs.CODASCA(
        lr=0.25, steps=fs.Interval(2, 2.0), stage_rounds=2, control=False, gamma=1e30, weight_decay=0.0, clip=0.0
    )
    setting = make_setting(problem, data)
    clients = make_clients(setting, rounds=2)
    with torch.no_grad():
        state = started(algorithm, clients)
        for r in range(2):
            clients.begin(r)
            state = algorithm.round(state, clients)
    centre = setting.state.recall(np.arange(2), "x_ref", torch.full((2, 3), torch.nan, dtype=torch.float64))
    assert far(state.x, -0.25 * 5 * slope) < 1e-14
    assert far(centre, (-0.25 * 3 * slope).expand(2, 3)) < 1e-14
    assert far(state.x_ref, -0.25 * 3 * slope) < 1e-14


def test_coda_cuts_a_growing_round_short_at_the_end_of_a_stage() -> None:
    """Stages of 4, 12 and 36 steps; the interval alone would be 2, 3, 3, 4, 4, 4, 4, 5 steps."""
    problem, data, _ = sliding()
    algorithm = fs.CoDA(lr=0.1, steps=fs.Interval(2, 2.0), stage_steps=4, factor=3.0)
    counted = [0, *(play(algorithm, problem, data, rounds)[1].steps for rounds in range(1, 9))]
    assert np.diff(counted).tolist() == [2, 2, 3, 4, 4, 1, 4, 5]
