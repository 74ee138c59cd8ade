"""Every algorithm against its NumPy reference: the rows of all tables, and references that are slightly wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import fedstrata as fs
from algorithms import equations_composition as composition
from algorithms import equations_levels as levels
from algorithms import equations_mixture as mixture
from algorithms import equations_plain as plain
from algorithms import equations_rare as rare
from algorithms import equations_saddle as saddle
from algorithms.equations import RIGHT, TOLERANCE, Case, Ours, Row, distance, in_point, ours_of, run_library
from algorithms.families import FAMILIES, METHODS
from algorithms.paper import Paper, run_reference
from cases import repeats, table
from fedstrata.training.rounds import learn
from support import make_clients, make_setting
from worlds import N

WORLDS = {name: build for method in METHODS.values() for name, build in method.worlds.items()}
RIGHT_ROWS = [row for family in FAMILIES for row in family.right_rows()]
WRONG_ROWS = [row for family in FAMILIES for row in family.wrong_rows()]

pytestmark = pytest.mark.untraced


def agree(row: Row, ours: Ours) -> bool:
    return distance(ours.vectors, run_reference(row, ours), row.method.unseen) < TOLERANCE


@table("row", [(row,) for row in RIGHT_ROWS], key=Row.axes, name=Row.name)
def test_rounds_agree_with_the_reference(row: Row) -> None:
    ours, world = ours_of(row), row.method.worlds[row.world]()
    theirs = run_reference(row, ours)
    assert distance(ours.vectors, theirs, row.method.unseen) < TOLERANCE
    for key, end in in_point(theirs).items():
        start = world.x0 if key == "x" else world.y0
        assert row.method.least[key] < np.abs(end - start).max() < 20, f"{key} hardly moved, or far away"


def what_is_wrong(row: Row) -> list[str]:
    """The row's place in the table: the short run has one for each rate of each method."""
    return [f"{row.method.name} {row.label if row.label in row.method.rates() else ''}"]


@table("row", [(row,) for row in WRONG_ROWS], key=what_is_wrong, name=Row.name)
def test_a_wrong_reference_breaks_the_agreement(row: Row) -> None:
    ours = ours_of(row)
    apart = distance(in_point(ours.vectors), in_point(run_reference(row, ours)))
    assert apart > 1e4 * TOLERANCE, (
        f"{row.method.name}: a reference with another {row.label} gives the same result, so these rows do not test it. "
        f"Choose other options of this Method in tests/algorithms/equations_*.py, or a case in which {row.label} "
        f"matters: wrong_in={{'{row.label}': Case(...)}}."
    )


@pytest.mark.traced
@repeats("name", METHODS)
def test_traced_functions_agree_with_the_reference(name: str) -> None:
    """The rows above run functions as they are; tracing them would cost more than these few rounds."""
    method = METHODS[name]
    row, world = method.row("minibatches"), replace(method.worlds[method.home]())
    ours = run_library(method, world, row.case)
    assert any(world.oracles._runner.graphs.values()) or world.problem.query is not None
    assert agree(row, ours)


# --- the tables are what they claim ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_every_rate_is_scheduled_in_some_row(name: str) -> None:
    scheduled = set()
    for row in RIGHT_ROWS:
        if row.method.name == name:
            scheduled |= {key for key, value in row.case.options.items() if isinstance(value, fs.schedules.Schedule)}
    missing = set(METHODS[name].rates()) - scheduled
    assert not missing, f"{name} has no row in which {', '.join(missing)} is a schedule: use Method.scheduled."


@pytest.mark.parametrize("name", WORLDS)
def test_worlds_are_what_they_claim(name: str) -> None:
    """Functions in NumPy are those of the library, at several points, with either weighting of what clients answer."""
    world, rng = WORLDS[name](), np.random.default_rng(6)
    for weighting in ("uniform",) if world.problem.query is None else ("uniform", "samples"):
        paper = Paper(METHODS["fedavg"], world, Case(weighting=weighting), {}, Ours(), RIGHT)
        problem, known = world.problem, world
        if problem.query is not None:
            setting = make_setting(problem, world.data, batch_size=3, seed=RIGHT.seed)
            clients = make_clients(setting, weighting=weighting)
            clients.begin(-1)
            problem, known = problem.query.inform(problem, learn(problem.query, clients)), world.prepare(paper)
        for k in range(N):
            known.check(problem, paper.draw(k, 5, 1), k, rng)


def test_partial_cohorts_differ_between_rounds_and_epochs_between_clients() -> None:
    method = METHODS["fedavg"]
    cohorts = ours_of(method.row("", plain.USUAL["partial participation"])).cohorts
    assert [len(cohort) for cohort in cohorts] == [3, 3] and cohorts[0] != cohorts[1]
    paper = Paper(method, None, Case(batch_size=4), {"steps": fs.Epochs(2)}, Ours(), RIGHT)
    assert [paper.steps_of(k, 0) for k in range(N)] == [2 * 2, 2 * 3, 2 * 1, 2 * 5, 2 * 2]


def test_intervals_grow_and_rounding_matters() -> None:
    def steps(case: Case) -> list[int]:
        return [Paper(METHODS["fedavg"], None, case, case.options, Ours(), RIGHT).steps_of(0, r) for r in range(2)]

    assert [steps(case) for case in plain.GROWING.values()] == [[2, 3], [2, 3], [3, 4], [2, 3]]
    assert steps(Case(options={"steps": fs.Interval(2, 3.0)})) == [2, 2]


@pytest.mark.parametrize("name", ["fedlalr", "fedlalr, max", "fedams 1", "fedams 2", "local_amsgrad"])
def test_both_sides_of_every_maximum_are_met(name: str) -> None:
    grown = []
    for world in plain.PLAIN:
        ours = ours_of(METHODS[name].row("", plain.USUAL["minibatches"], world))
        start, eps = ours.server["vhat"], METHODS[name].options["eps"]
        grown += (ours.vectors["vhat"] > start).tolist()
        if "lalr" in name:
            assert (start > eps**2).all(), "FedLALR's vhat is never below eps^2"
        if "ams " in name:
            assert (start < eps).any() and (start > eps).any()
    assert any(grown) and not all(grown)


def test_yogi_meets_both_signs() -> None:
    ours = ours_of(METHODS["fedyogi"].row("", plain.USUAL["minibatches"]))
    grown = ours.vectors["v"] > ours.server["v"]
    assert grown.any() and not grown.all()


def test_clients_are_drawn_twice_and_some_weights_become_zero() -> None:
    ours = ours_of(mixture.DRFA.row("", mixture.USUAL["minibatches"]))
    assert any(len(set(cohort)) < len(cohort) for cohort in ours.cohorts[1::3])
    assert any(snapshot < mixture.DRFA.options["steps"] for _, _, snapshot in ours.integers)
    for method in (mixture.AFL, mixture.DRFA):
        y = ours_of(method.row("", mixture.USUAL["out of the simplex"])).vectors["y"]
        assert (y == 0).any() and y.sum() == pytest.approx(1, abs=1e-12)


SETS = [*saddle.PROJECTED, saddle.ACTIVE, "fair, classes", "fair, clients"]
IN_SETS = [(method.name, world) for world in SETS for method in saddle.METHODS.values()]
IN_SETS += [("local_smcgdam", f"{levels.HOME}, {name}") for name in levels.SETS]


@table("name, world", IN_SETS)
def test_duals_stay_in_their_sets(name: str, world: str) -> None:
    row = METHODS[name].row("", world=world)
    y, project = ours_of(row).vectors["y"], row.method.worlds[world]().project
    np.testing.assert_allclose(project(y), y, atol=1e-12)


@pytest.mark.parametrize("world", rare.LABELLED)
def test_the_weights_are_not_those_of_classes_without_positions(world: str) -> None:
    w = ours_of(rare.RARE.row("", Case(rounds=3), world)).vectors["w"]
    assert np.abs(w - (1 + rare.RARE.options["slope"] * 10)).max() > 0.1 and np.ptp(w) > 0.1


# --- what follows from the equations ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedlalr, restart", "fedlalr, restart, max"])
def test_a_forgotten_restart_shows_in_the_second_round_only(name: str) -> None:
    case = replace(plain.USUAL["minibatches"], rounds=1)
    row = METHODS[name].wrong("", case, options={"restart": False})
    assert agree(row, ours_of(row))


def test_weights_are_normalised_only_where_f_takes_a_number() -> None:
    normalised = METHODS["comfedl, normalised"].row("", world="mixed")
    assert agree(METHODS["comfedl"].row(""), ours_of(normalised))


@repeats("name", ["mfcgd", "adamfcgd"])
def test_the_two_forms_agree_on_one_constant_jacobian(name: str) -> None:
    """And only there: not with other weights, and not with a Jacobian that changes."""

    def apart(world: str, varrho: float) -> float:
        case = Case(options={"beta": 0.4, "varrho": varrho})
        exact, product = (composition.in_form(METHODS[name], form, "", case, world) for form in composition.FORMS)
        assert agree(exact, ours_of(exact))
        found = ours_of(exact).vectors, ours_of(product).vectors
        return max(float(np.abs(found[0][key] - found[1][key]).max()) for key in ("x", "x_k", "h_k"))

    assert apart("constant Jacobian", 0.4) < 1e-12
    assert apart("constant Jacobian", 0.5) > 1e-4
    assert apart("mixed", 0.4) > 1e-4


def test_the_solution_is_the_mean_of_the_iterates_or_the_last_one() -> None:
    """The means themselves are in the tables."""
    x, y, x_mean, y_mean = torch.rand(4, 2)
    for average, expected in ((True, x_mean), (False, x)):
        for kind in (fs.MFCGD, fs.AdaMFCGD):
            assert kind(average=average).solution(fs.algorithms.mfcgd.State(x, x[:0], x_mean))[0] is expected
        solution = fs.AFL(average=average).solution(fs.algorithms.afl.State(x, y, x_mean, y_mean))
        assert solution[0] is expected and solution[1] is (y_mean if average else y)
