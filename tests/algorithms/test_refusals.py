"""Which problems, participations and options an algorithm refuses, and what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fedstrata as fs
from cases import product
from fedstrata.algorithms import ALGORITHMS
from fedstrata.problems.projections import simplex as project_simplex
from support import example_for, smooth_example

NAMES = sorted(ALGORITHMS)
X0 = torch.zeros(2)


def inner(u: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return u


def plain(u: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return u @ u


def saddle(u: torch.Tensor, y: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return u @ y


def problem_with(
    levels: int = 0,
    dual: bool | None = False,
    inner_mean: str = "local",
    mixture: bool = False,
    model: bool = False,
    takes_weights: bool = False,
) -> fs.Problem:
    return fs.Problem(
        saddle if dual else plain,
        X0,
        levels=(inner,) * levels,
        y0=X0 if dual else None,
        inner_mean="global" if inner_mean == "global" else "local",
        project_y=project_simplex if mixture else None,
        mixture=mixture,
        flat=smooth_example()[0].flat if model else None,
        takes_weights=takes_weights,
        name="other",
    )


def other_problems(kind: type[fs.Algorithm]) -> list[fs.Problem]:
    """Problems just outside the algorithm's class: one property is another, the rest as it wants it."""
    own: dict[str, Any] = {"levels": kind.levels.start, "dual": kind.dual, "inner_mean": kind.inner_mean}
    own["mixture"] = kind.mixture
    own |= {"model": True, "takes_weights": True} if kind is fs.LocalSGDMRL else {}
    assert kind.solves(problem_with(**own))
    others = [problem_with(**{**own, key: False}) for key in ("model", "takes_weights") if key in own]
    if kind.dual is not None:
        others.append(problem_with(**{**own, "dual": not kind.dual, "mixture": False}))
    others += [problem_with(**{**own, "levels": n}) for n in (0, 1, 2, 3) if n not in kind.levels]
    if own["levels"]:
        others.append(problem_with(**{**own, "inner_mean": "global" if kind.inner_mean == "local" else "local"}))
    if kind.mixture:
        others.append(problem_with(**{**own, "mixture": False}))
    return others


@pytest.mark.parametrize("name", NAMES)
def test_a_problem_of_another_class_is_refused(name: str) -> None:
    kind = ALGORITHMS[name]
    for problem in other_problems(kind):
        assert not kind.solves(problem)
        with pytest.raises(fs.InputError) as refused:
            kind().check(problem, 1.0, 5)
        message = str(refused.value)
        assert message.startswith(f"{name} does not solve the problem 'other' ({problem.kind}).")
        named = message.split("Algorithms that do: ")[1].rstrip(".").split(", ")
        assert named == (sorted(n for n, a in ALGORITHMS.items() if a.solves(problem)) or ["none"])
        assert name not in named


LOCAL = ["adamfcgd", "comfedl", "local_moml", "local_scgd", "local_scgdm", "mfcgd"]
SADDLE = ["adafgda", "cdma", "coda", "codasca", "fednest", "fgda", "local_sgda", "local_sgda_plus"]
SADDLE += ["local_sgdam", "local_sgdam_plus", "sagda"]
ORDINARY = ["fedadagrad", "fedadam", "fedams", "fedavg", "fedlalr", "fedprox", "fedyogi", "lafedopt"]
ORDINARY += ["local_adaalter", "local_amsgrad", "qfedavg", "scaffold"]
LAYERED_SADDLE = ["local_scgdam", "local_smcgdam"]
GLOBAL = ["fednest", *LAYERED_SADDLE]
KNOWN = {"afl", "drfa", "local_sgdm_rl", *LOCAL, *SADDLE, *ORDINARY, *GLOBAL}
"""A new algorithm need not be added here: messages are checked for the algorithms of this list only."""
REFUSALS: list[tuple[str, fs.Problem, list[str]]] = [
    *((name, problem_with(1, inner_mean="global"), GLOBAL) for name in LOCAL),
    ("fednest", problem_with(1), LOCAL),
    ("drfa", problem_with(dual=True), SADDLE),
    ("afl", problem_with(dual=True), SADDLE),
    ("afl", problem_with(), ORDINARY),
    ("fedavg", problem_with(dual=True, mixture=True), sorted(["afl", "drfa", *SADDLE])),
    ("fedavg", problem_with(dual=True), SADDLE),
    *((name, problem_with(1, dual=True), ["none"]) for name in SADDLE),
    *((name, problem_with(1, dual=True, inner_mean="global"), LAYERED_SADDLE) for name in SADDLE),
    *((name, problem_with(), ORDINARY) for name in SADDLE),
    ("fgda", problem_with(1, inner_mean="global"), GLOBAL),
    ("mfcgd", problem_with(2), ["comfedl"]),
    ("fedavg", problem_with(1), LOCAL),
    ("fedavg", problem_with(1, inner_mean="global"), GLOBAL),
    ("comfedl", problem_with(0), ORDINARY),
    ("local_scgdam", problem_with(2, inner_mean="global"), ["local_smcgdam"]),
    ("local_scgdam", problem_with(2, dual=True, inner_mean="global"), ["local_smcgdam"]),
    ("local_scgdam", problem_with(1), LOCAL),
    ("local_smcgdam", problem_with(1, dual=True), ["none"]),
    ("local_smcgdam", problem_with(3), ["comfedl"]),
    ("local_smcgdam", problem_with(), ORDINARY),
    ("local_sgdm_rl", problem_with(), ORDINARY),
]


@pytest.mark.parametrize(("name", "problem", "others"), REFUSALS, ids=[f"{n}: {p.kind}" for n, p, _ in REFUSALS])
def test_a_refusal_names_those_that_do(name: str, problem: fs.Problem, others: list[str]) -> None:
    with pytest.raises(fs.InputError) as refused:
        ALGORITHMS[name]().check(problem, 1.0, 5)
    before, named = str(refused.value).split(" Algorithms that do: ")
    assert before.endswith(f"({problem.kind}).")
    assert [other for other in named.rstrip(".").split(", ") if other in {"none", *KNOWN}] == others


@product("name, radius", ["mfcgd", "adamfcgd"], ["c_g", "c_f"])
def test_products_have_nothing_to_project(name: str, radius: str) -> None:
    problem, data = example_for(ALGORITHMS[name])
    algorithm = ALGORITHMS[name](jacobian="product", **{radius: 1.0})
    with pytest.raises(fs.InputError, match=r"c_g and c_f .*need jacobian = 'exact'"):
        fs.train(problem, data, algorithm, rounds=1)


def test_comfedl_takes_any_number_of_levels() -> None:
    assert [fs.ComFedL.solves(problem_with(levels)) for levels in (0, 1, 2, 5)] == [False, True, True, True]
    fs.ComFedL().check(problem_with(2), 0.5, 10)


@pytest.mark.parametrize("dual", [True, False])
def test_local_smcgdam_takes_any_number_of_levels_above_zero(dual: bool) -> None:
    found = [fs.LocalSMCGDAM.solves(problem_with(levels, dual, "global")) for levels in (0, 1, 2, 3, 9)]
    assert found == [False, True, True, True, True]
    assert [fs.LocalSCGDAM.solves(problem_with(levels, dual, "global")) for levels in (0, 1, 2)] == [False, True, False]


def test_local_sgdm_rl_wants_classes_and_samples_on_the_server() -> None:
    problem, data = smooth_example()
    with pytest.raises(fs.InputError, match="local_sgdm_rl needs samples on the server"):
        fs.train(problem, data, fs.LocalSGDMRL(), rounds=1)
    continuous = fs.FederatedData.from_arrays([(a, a[:, :3]) for a in (torch.zeros(4, 4), torch.ones(3, 4))])
    regression = fs.erm(torch.nn.Linear(4, 3), "squared")
    with pytest.raises(fs.InputError, match="number of classes for local_sgdm_rl must be at least 2"):
        fs.train(regression, continuous, fs.LocalSGDMRL(), rounds=1)


EVERYONE = ["mfcgd", "adamfcgd", "fednest", "afl", "fgda", "adafgda", "coda", "codasca"]


@pytest.mark.parametrize("name", [*EVERYONE, "local_sgda_plus", "local_sgdam_plus"])
def test_partial_participation_is_refused_where_the_paper_has_none(name: str) -> None:
    problem, data = example_for(ALGORITHMS[name])
    with pytest.raises(
        fs.InputError, match=rf"The participation of {name} must be 1\.0 \(every client in every round\)"
    ):
        fs.train(problem, data, ALGORITHMS[name](), rounds=1, participation=3)


@pytest.mark.parametrize("name", ["local_sgda_plus", "local_sgdam_plus"])
def test_a_snapshot_is_renewed_between_rounds_or_at_every_step(name: str) -> None:
    for every in (0, 1, 3, 9):
        assert fs.algorithm(name, steps=3, snapshot_every=every).snapshot_every == every
    wanted = rf"snapshot_every of {name} must be 1, or a multiple of steps, 3; 0 means steps\^2"
    with pytest.raises(fs.InputError, match=wanted):
        fs.algorithm(name, steps=3, snapshot_every=4)


@pytest.mark.parametrize(
    ("build", "options", "applies"),
    [
        (fs.LaFedOPT, {"server_beta1": 0.5}, {"server": "adam"}),
        (fs.LaFedOPT, {"server_beta2": 0.5}, {"server": "adam"}),
        (fs.LaFedOPT, {"tau": 0.5}, {"server": "adam"}),
        (lambda **more: fs.LaFedOPT(**{"optimizer": "adagrad", **more}), {"beta1": 0.5}, {"optimizer": "yogi"}),
        (lambda **more: fs.LaFedOPT(**{"optimizer": "adagrad", **more}), {"beta2": 0.5}, {"optimizer": "adam"}),
        *(
            (lambda kind=kind, **more: kind(**{"matrix": "identity", **more}), options, {"matrix": "belief"})
            for kind in (fs.AdaFGDA, fs.AdaMFCGD)
            for options in ({"theta": 0.5}, {"rho": 0.5}, {"first_matrix": "accumulator"})
        ),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    build: Any, options: dict[str, Any], applies: dict[str, Any]
) -> None:
    with pytest.raises(fs.InputError, match=rf"^The {next(iter(options))} of \w+ applies only with "):
        build(**options)
    build(**options, **applies)
