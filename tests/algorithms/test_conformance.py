"""What every algorithm promises, checked over the whole registry: a new algorithm is covered the day it is added."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import operator
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata as fs
from fedstrata.algorithms import ALGORITHMS
from fedstrata.clients import Client, Counts
from fedstrata.clients.simulated import SimulatedClients
from fedstrata.core.options import options_of
from fedstrata.problems.projections import simplex as project_simplex
from saddle_worlds import SADDLES, SaddleWorld
from support import (
    example_for,
    make_clients,
    make_setting,
    play,
    shared_oracles,
    smooth_example,
    started,
    without_seconds,
)

NAMES = sorted(ALGORITHMS)
SECOND = "fednest, composition"
CLASSES = [*NAMES, SECOND]
"""Every algorithm with a problem that it solves; FedNest, a saddle's and a composition's method, with two."""
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: operator.pow}


def numbers_sent(formula: str, **sizes: int) -> int:
    """Evaluate a formula such as ``2*d + K`` without running it as code."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return sizes[node.id]
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise AssertionError(f"{formula!r} is not a sum of products")

    return value(ast.parse(formula, mode="eval").body)


def kind_of(name: str) -> type[fs.Algorithm]:
    return ALGORITHMS[name.split(",")[0]]


def example(name: str, dtype: torch.dtype = torch.float64) -> tuple[fs.Problem, fs.FederatedData]:
    return example_for(kind_of(name), dtype, 1 if name == SECOND else None)


def participation_of(name: str, share: int | float) -> int | float:
    return 1.0 if kind_of(name).full_participation else share


def rounds_of(name: str, dtype: torch.dtype, chunk: int, sampling: str) -> dict[str, torch.Tensor]:
    """Three rounds with chunks of at most ``chunk`` clients: the server's vectors."""
    problem, data = example(name, dtype)
    options = {"participation": participation_of(name, 5), "batch_size": 4, "sampling": sampling}
    state, _ = play(kind_of(name)(), problem, data, 3, chunk=chunk, **options)
    return dict(state)


@pytest.mark.parametrize(
    ("dtype", "sampling", "tolerance"), [(torch.float32, "epochs", 1e-5), (torch.float64, "uniform", 1e-10)]
)
@pytest.mark.parametrize("name", CLASSES)
def test_chunks_of_any_size_agree(name: str, sampling: str, dtype: torch.dtype, tolerance: float) -> None:
    alone, three, together = (rounds_of(name, dtype, chunk, sampling) for chunk in (1, 3, 7))
    start = kind_of(name)().init(example(name, dtype)[0])
    assert (alone["x"] - start["x"]).abs().max() > 1e-2
    for vector, expected in alone.items():
        assert expected.dtype == dtype
        for other in (three, together):
            torch.testing.assert_close(other[vector], expected, atol=tolerance, rtol=tolerance)


# --- what is sent ----------------------------------------------------------------------------------------------------


def sent(
    algorithm: fs.Algorithm, problem: fs.Problem, data: fs.FederatedData, rounds: int = 2, **options: Any
) -> tuple[Counts, Counts, SimulatedClients]:
    """What was counted before the first round, what in the rounds after it, and the clients."""
    setting = make_setting(problem, data, batch_size=4, oracles=shared_oracles(problem))
    clients = make_clients(setting, rounds=rounds, chunk=2, **options)
    with torch.no_grad():
        state = started(algorithm, clients)
        before = dataclasses.replace(clients.counts)
        for r in range(rounds):
            clients.begin(r)
            state = algorithm.round(state, clients)
    numbers = [f.name for f in dataclasses.fields(Counts) if f.name != "releases"]
    found = {name: getattr(clients.counts, name) - getattr(before, name) for name in numbers}
    return before, Counts(**found), clients


def sizes_of(clients: SimulatedClients) -> dict[str, int]:
    """What the letters of a formula stand for."""
    problem = clients.problem
    return {
        "d": len(problem.x0),
        "p": 0 if problem.y0 is None else len(problem.y0),
        "K": len(problem.levels),
        "r": clients.inner_sizes[-1] if problem.levels else 0,
        "R": sum(clients.inner_sizes),
        "C": clients.classes,
    }


@pytest.mark.parametrize("name", CLASSES)
def test_counted_samples_are_those_drawn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch at which two gradients are taken counts once."""
    seen: dict[tuple[Any, ...], int] = {}

    def watched(method: Any) -> Any:
        def draw(client: Client, *args: Any, **options: Any) -> Any:
            before = client.samples
            batch = method(client, *args, **options)
            place = (client.clock.round, client._exchange, client._phase, client.clock.step, len(client))
            seen[(method.__name__, tuple(client.ids), *place, repr(args), repr(options))] = client.samples - before
            return batch

        return draw

    for method in (Client.draw, Client.all_data):
        monkeypatch.setattr(Client, method.__name__, watched(method))
    problem, data = example(name)
    _, counts = play(kind_of(name)(), problem, data, 2, batch_size=4, participation=participation_of(name, 3), chunk=2)
    assert counts.samples == sum(seen.values()) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", [1.0, 3])
@pytest.mark.parametrize("name", CLASSES)
def test_counted_bytes_are_the_formula(name: str, share: int | float, dtype: torch.dtype) -> None:
    algorithm = kind_of(name)()
    problem, data = example(name, dtype)
    participation = participation_of(name, share)
    _, counts, clients = sent(algorithm, problem, data, participation=participation)
    sizes = sizes_of(clients)
    cohort = data.clients if participation == 1.0 else share
    messages = 2 * cohort * problem.x0.element_size()
    assert counts.bytes_up == messages * numbers_sent(algorithm.up, **sizes)
    assert counts.bytes_down == messages * numbers_sent(algorithm.down, **sizes)


def document(name: str) -> str:
    """An algorithm's file in words, on one line."""
    module = inspect.getmodule(kind_of(name))
    assert module is not None
    return " ".join(str(module.__doc__).split())


@pytest.mark.parametrize("name", CLASSES)
def test_what_is_sent_before_the_first_round_is_what_the_file_says(name: str) -> None:
    """ "Before the first round: up ..., down ...", or nothing; every client is asked, whoever takes part.

    "down and up ..." is the same both ways. FedNest says it of its composition.
    """
    algorithm = kind_of(name)()
    problem, data = example(name)
    before, _, clients = sent(algorithm, problem, data, 1, participation=participation_of(name, 3))
    said = re.search(r"[Bb]efore the first round: (?:up (\w+)[^,.]*(?:\([^)]*\))?, )?down (\w+)", document(name))
    both = re.search(r"[Bb]efore the first round: down and up ([^.]*)\.", document(name))
    if both is not None:
        up = down = both[1]
    else:
        up, down = ("0", "0") if said is None or name == "fednest" else (said[1] or "0", said[2])
    unit = data.clients * problem.x0.element_size()
    assert before.bytes_up == unit * numbers_sent(up, **sizes_of(clients))
    assert before.bytes_down == unit * numbers_sent(down, **sizes_of(clients))
    assert before.steps == 0


COSTS: list[tuple[str, dict[str, Any], int | str, int | str]] = [
    ("fedavg", {}, "d", "d"),
    ("fedprox", {}, "d", "d"),
    ("fedadam", {}, "d", "d"),
    ("fedyogi", {}, "d", "d"),
    ("fedadagrad", {}, "d", "d"),
    ("fedams", {}, "d", "d"),
    ("fedlalr", {}, "3*d", "3*d"),
    ("fedlalr", {"aggregate": "max"}, "3*d", "3*d"),
    ("fedlalr", {"restart": True}, "2*d", "2*d"),
    ("fedlalr", {"restart": True, "aggregate": "max"}, "2*d", "2*d"),
    ("lafedopt", {}, "2*d", "d"),
    ("lafedopt", {"correction": "local"}, "d", "d"),
    ("lafedopt", {"correction": "none", "server": "adam"}, "d", "d"),
    ("local_amsgrad", {}, "3*d", "2*d"),
    ("local_adaalter", {}, "2*d", "2*d"),
    ("scaffold", {}, "2*d", "2*d"),
    ("qfedavg", {}, "d + 1", "d"),
    ("afl", {}, "d + 1", "d"),
    ("drfa", {}, "2*d + 1", "d + d"),
    ("comfedl", {}, "d", "d"),
    ("local_moml", {}, "d", "d"),
    ("local_scgd", {}, "d + r", "d + r"),
    ("local_scgdm", {}, "2*d + r", "2*d + r"),
    ("mfcgd", {}, "2*d", "d"),
    ("mfcgd", {"jacobian": "product"}, "2*d", "d"),
    ("adamfcgd", {}, "2*d", "2*d"),
    ("adamfcgd", {"matrix": "belief"}, "2*d", "2*d"),
    ("adamfcgd", {"matrix": "norm"}, "2*d", "d + 1"),
    (SECOND, {"inner_rounds": 1}, "3*r + 2*d", "4*d + 5*r"),
    (SECOND, {"inner_rounds": 4}, "9*r + 2*d", "7*d + 14*r"),
    ("fednest", {"inner_rounds": 1}, "2*p + 2*d", "5*d + 5*p"),
    ("fednest", {"inner_rounds": 4}, "8*p + 2*d", "11*d + 14*p"),
    ("local_sgda", {}, "d + p", "d + p"),
    ("local_sgda_plus", {}, "d + p", "d + p"),
    ("local_sgdam", {}, "2*(d + p)", "2*(d + p)"),
    ("local_sgdam", {"average_momentum": False}, "d + p", "d + p"),
    ("local_sgdam_plus", {}, "d + p", "d + p"),
    ("coda", {}, "d + p", "d + p"),
    ("codasca", {}, "2*(d + p)", "2*(d + p)"),
    ("codasca", {"control": False}, "d + p", "d + p"),
    ("sagda", {}, "2*(d + p)", "2*(d + p)"),
    ("sagda", {"control": False}, "d + p", "d + p"),
    ("fgda", {}, "2*(d + p) + (d + p)", "(d + p) + (d + p)"),
    ("fgda", {"synchronisation": "single"}, "2*(d + p)", "d + p"),
    ("adafgda", {}, "2*(d + p) + (d + p)", "(d + p) + (d + p) + (d + p)"),
    ("adafgda", {"matrix": "belief"}, "3*(d + p)", "3*(d + p)"),
    ("adafgda", {"matrix": "norm"}, "3*(d + p)", "2*(d + p) + 2"),
    ("adafgda", {"synchronisation": "single"}, "2*(d + p)", "d + p + (d + p)"),
    ("adafgda", {"synchronisation": "single", "matrix": "norm"}, "2*(d + p)", "d + p + 2"),
    ("cdma", {}, "2*(d + p)", "3*(d + p)"),
    ("cdma", {"ada": True}, "2*(d + p)", "4*(d + p)"),
    ("local_smcgdam", {}, "2*d + R + 2*p", "2*d + R + 2*p"),
    ("local_scgdam", {}, "2*d + R + 2*p", "2*d + R + 2*p"),
    ("local_sgdm_rl", {}, "d", "d + C"),
]


@cache
def flattened(name: str) -> fs.Problem:
    """A problem of the algorithm's class; where it has a level, its inner dimension r = 2 is not that of x.

    LocalSMCGDAM has three levels, of 3, 5 and 2 numbers.
    """
    problem = example(name)[0]
    if not problem.levels:
        return problem

    def outer(u: torch.Tensor, *rest: Any) -> torch.Tensor:
        *y, batch = rest
        return (u**2).sum() * batch[0].mean() + sum(v @ u - 0.5 * v @ v for v in y)

    def cut(size: int) -> Any:
        return lambda u, batch: torch.tanh(torch.cat([u, u])[:size] + batch[0].mean())

    sizes = (3, 5, 2) if kind_of(name) is fs.LocalSMCGDAM else (2,)
    return dataclasses.replace(problem, outer=outer, levels=tuple(map(cut, sizes)))


@pytest.mark.parametrize(("name", "options", "up", "down"), COSTS, ids=[f"{n} {o}" for n, o, *_ in COSTS])
def test_the_cost_table(name: str, options: dict[str, Any], up: str, down: str) -> None:
    """Numbers per client and round, row by row as the papers have them; d, r, R, p and C differ where it matters."""
    algorithm = kind_of(name)(**options)
    problem, data = flattened(name), example(name)[1]
    _, counts, clients = sent(algorithm, problem, data, 3)
    sizes = sizes_of(clients)
    assert sizes["r"] in (0, 2) and sizes["d"] > 2 and sizes["R"] == (10 if name == "local_smcgdam" else sizes["r"])
    assert sizes["p"] == (0 if not problem.dual else data.clients if problem.mixture else 2)
    unit = 3 * data.clients * problem.x0.element_size()
    for counted, formula, own in ((counts.bytes_up, up, algorithm.up), (counts.bytes_down, down, algorithm.down)):
        assert counted == unit * numbers_sent(formula, **sizes) == unit * numbers_sent(own, **sizes)


def test_every_algorithm_is_in_the_cost_table() -> None:
    assert {name for name, *_ in COSTS} == set(CLASSES)


@pytest.mark.parametrize("inner_rounds", [1, 2, 5])
@pytest.mark.parametrize(("name", "others"), [("fednest", 2), (SECOND, 3)])
def test_fednest_makes_2t_plus_2_exchanges_or_3(name: str, others: int, inner_rounds: int) -> None:
    algorithm = fs.FedNest(inner_rounds=inner_rounds)
    _, counts, clients = sent(algorithm, *example(name), rounds=1)
    assert clients._exchange == [2 * inner_rounds + others]
    assert counts.steps == (inner_rounds + 1) * algorithm.steps


def sent_each_round(algorithm: fs.Algorithm, world: SaddleWorld, rounds: int) -> list[tuple[int, int]]:
    """Numbers that a client sent and got in each round."""
    found = [sent(algorithm, world.problem, world.data, r)[1] for r in range(rounds + 1)]
    unit = 8 * world.data.clients
    return [((b.bytes_up - a.bytes_up) // unit, (b.bytes_down - a.bytes_down) // unit) for a, b in pairwise(found)]


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize(("world", "best"), [("auc", True), ("free", False)])
def test_coda_sends_more_at_the_end_of_a_stage(world: str, best: bool, average: bool) -> None:
    """The stage's mean up, unless it goes on from the last point; x down and the best y up, where that is known.

    The stages are 3 and 6 steps: two rounds, then three.
    """
    w = SADDLES[world]()
    d, p = len(w.x0), len(w.y0)
    assert (w.problem.best_y is not None) == best and d != p
    found = sent_each_round(fs.CoDA(lr=0.01, steps=2, stage_steps=3, factor=2.0, average=average), w, 5)
    usual = (d + p, d + p)
    last = (d + p + average * d + best * p, d + p + best * d)
    assert found == [usual, last, usual, usual, last]


@pytest.mark.parametrize("control", [True, False])
def test_codasca_sends_more_at_the_end_of_a_stage(control: bool) -> None:
    """The stage's mean up, and the new centre down."""
    w = SADDLES["free"]()
    d, p = len(w.x0), len(w.y0)
    found = sent_each_round(fs.CODASCA(lr=0.01, steps=2, stage_rounds=2, control=control), w, 5)
    numbers = (1 + control) * (d + p)
    assert found == [(numbers, numbers), (numbers + d, numbers + d)] * 2 + [(numbers, numbers)]


FIRST: list[tuple[fs.Algorithm, str, str]] = [
    (fs.FGDA(), "d + p", "d + p"),
    (fs.FGDA(synchronisation="single"), "d + p", "d + p"),
    (fs.AdaFGDA(synchronisation="single", first_matrix="identity"), "d + p", "d + p"),
    (fs.LocalSGDAM(), "d + p", "d + p"),
    (fs.LocalSGDAM(average_momentum=False), "0", "d + p"),
    *((ALGORITHMS[name](), "0", "0") for name in ("local_sgda", "local_sgda_plus", "local_sgdam_plus", "sagda")),
    *((ALGORITHMS[name](), "0", "0") for name in ("cdma", "fednest", "coda", "codasca")),
]


@pytest.mark.parametrize(("algorithm", "up", "down"), FIRST, ids=[str(a) for a, *_ in FIRST])
@pytest.mark.parametrize(("world", "asked"), [("free", 0), ("auc, prepared, scaled", 2), ("fair, classes", 3)])
def test_what_is_sent_before_the_first_round(
    world: str, asked: int, algorithm: fs.Algorithm, up: str, down: str
) -> None:
    """Some problems ask for the clients' class counts, one number for each class, besides."""
    w = SADDLES[world]()
    before, _, clients = sent(algorithm, w.problem, w.data, 0)
    unit = 8 * w.data.clients
    assert before.bytes_up == unit * (asked + numbers_sent(up, **sizes_of(clients)))
    assert before.bytes_down == unit * numbers_sent(down, **sizes_of(clients))
    assert before.steps == 0


def test_drfa_makes_two_exchanges_of_their_own_cohorts() -> None:
    """d down and 2d up, then d down and one number up."""
    problem, data = example_for(fs.DRFA)
    seen: list[tuple[int, int, int]] = []
    send = SimulatedClients._send

    def noted(self: SimulatedClients, work: Any, message: Any) -> Any:
        before = dataclasses.replace(self.counts)
        yield from send(self, work, message)
        up, down = self.counts.bytes_up - before.bytes_up, self.counts.bytes_down - before.bytes_down
        seen.append((len(self), up // 8, down // 8))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedClients, "_send", noted)
        sent(fs.DRFA(), problem, data, rounds=1, participation=3)
    d = len(problem.x0)
    assert seen == [(3, 3 * 2 * d, 3 * d), (3, 3, 3 * d)]


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("shift", [None, 0.0])
def test_comfedl_sends_a_weight_along_where_it_normalises(normalise: bool, shift: float | None) -> None:
    """And asks for the first one; the problem asks for the losses that make its shift."""
    plain, data = smooth_example()
    assert plain.flat is not None
    problem = fs.robust(plain.flat.module, shift=shift)
    before, counts, clients = sent(fs.ComFedL(normalise=normalise), problem, data, 2)
    d, unit = len(plain.x0), 8 * data.clients
    assert (counts.bytes_up, counts.bytes_down) == (2 * unit * (d + normalise),) * 2
    asks = (shift is None) + normalise
    assert (before.bytes_up, before.bytes_down) == (asks * unit, asks * unit * d)
    assert clients.inner_sizes == (1,)


# --- resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.untraced
@pytest.mark.parametrize("name", CLASSES)
def test_a_resumed_run_ends_with_the_same_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstrata.training.plots.plot", lambda *_, **__: None)  # drawing costs more than these runs
    kind = kind_of(name)
    problem, data = example(name)
    options = {
        "batch_size": 4,
        "participation": participation_of(name, 3),
        "sampling": "epochs",
        "chunk": 2,
        "eval_every": 1,
    }
    straight = fs.train(problem, data, kind(), rounds=6, **options)
    fs.train(problem, data, kind(), rounds=3, out=tmp_path / "run", **options)
    resumed = fs.train(problem, data, kind(), rounds=6, out=tmp_path / "run", resume=True, **options)
    assert torch.equal(resumed.x, straight.x)
    if straight.y is not None:
        assert torch.equal(resumed.y, straight.y)
    assert [row["round"] for row in straight.history] == list(range(7))
    assert without_seconds(resumed.history) == without_seconds(straight.history)


@pytest.mark.parametrize("name", NAMES)
def test_an_algorithm_is_a_frozen_set_of_explained_hyperparameters(name: str) -> None:
    kind = ALGORITHMS[name]
    algorithm = kind()
    options = options_of(algorithm)
    assert options
    for option in options.values():
        assert option.doc, f"{option.name} of {name} has no explanation"
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(algorithm, option.name, getattr(algorithm, option.name))
    assert kind() == algorithm
    assert fs.algorithm(name) == algorithm


@pytest.mark.parametrize("name", NAMES)
def test_the_file_tells_where_the_algorithm_comes_from(name: str) -> None:
    kind = ALGORITHMS[name]
    assert kind.name == name
    assert kind.__module__ == f"fedstrata.algorithms.{name}"
    module = inspect.getmodule(kind)
    text = module.__doc__ if module is not None else None
    assert text is not None
    for heading in ("Problem:", "Sent, minimax:" if name == "fednest" else "Sent:", "Departures from the paper:"):
        assert heading in text
    assert kind.__bases__ == (fs.Algorithm,)


@pytest.mark.parametrize("name", CLASSES)
def test_what_is_sent_is_what_the_file_says(name: str) -> None:
    """The line may count in terms of a hyperparameter, as FedNest's T; here it has its default."""
    algorithm = kind_of(name)()
    heading = {"fednest": "Sent, minimax", SECOND: "Compositional"}.get(name, "Sent")
    said = re.search(rf"{heading}: up ([^,.]*), down ([^,.]*)[,.]", document(name))
    assert said is not None
    for written, formula in ((said[1], algorithm.up), (said[2], algorithm.down)):
        formal = re.sub(r"(\d)([a-zA-Z])", r"\1*\2", written)  # 2d is 2*d
        for sizes in (
            {"d": 7, "p": 3, "K": 2, "r": 5, "R": 16, "C": 4},
            {"d": 100, "p": 11, "K": 1, "r": 1, "R": 1, "C": 2},
        ):
            default = {"T": algorithm.inner_rounds} if isinstance(algorithm, fs.FedNest) else {}
            known = {"fednest": {"r": 0, "K": 0}, SECOND: {"p": 0, "K": 1}}.get(name, {})
            assert numbers_sent(formal, **{**sizes, **default, **known}) == numbers_sent(formula, **{**sizes, **known})


# --- which problems --------------------------------------------------------------------------------------------------


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
ORDINARY = (
    "fedadagrad, fedadam, fedams, fedavg, fedlalr, fedprox, fedyogi, lafedopt, local_adaalter, local_amsgrad, qfedavg, "
    "scaffold"
)
LAYERED_SADDLE = "local_scgdam, local_smcgdam"
GLOBAL = f"fednest, {LAYERED_SADDLE}"
REFUSALS: list[tuple[str, fs.Problem, str]] = [
    *((name, problem_with(1, inner_mean="global"), GLOBAL) for name in LOCAL),
    ("fednest", problem_with(1), ", ".join(LOCAL)),
    ("drfa", problem_with(dual=True), ", ".join(SADDLE)),
    ("afl", problem_with(dual=True), ", ".join(SADDLE)),
    ("afl", problem_with(), ORDINARY),
    ("fedavg", problem_with(dual=True, mixture=True), ", ".join(sorted(["afl", "drfa", *SADDLE]))),
    ("fedavg", problem_with(dual=True), ", ".join(SADDLE)),
    *((name, problem_with(1, dual=True), "none") for name in SADDLE),
    *((name, problem_with(1, dual=True, inner_mean="global"), LAYERED_SADDLE) for name in SADDLE),
    *((name, problem_with(), ORDINARY) for name in SADDLE),
    ("fgda", problem_with(1, inner_mean="global"), GLOBAL),
    ("mfcgd", problem_with(2), "comfedl"),
    ("fedavg", problem_with(1), ", ".join(LOCAL)),
    ("fedavg", problem_with(1, inner_mean="global"), GLOBAL),
    ("comfedl", problem_with(0), ORDINARY),
    ("local_scgdam", problem_with(2, inner_mean="global"), "local_smcgdam"),
    ("local_scgdam", problem_with(2, dual=True, inner_mean="global"), "local_smcgdam"),
    ("local_scgdam", problem_with(1), ", ".join(LOCAL)),
    ("local_smcgdam", problem_with(1, dual=True), "none"),
    ("local_smcgdam", problem_with(3), "comfedl"),
    ("local_smcgdam", problem_with(), ORDINARY),
    ("local_sgdm_rl", problem_with(), ORDINARY),
]


@pytest.mark.parametrize(("name", "problem", "others"), REFUSALS, ids=[f"{n}: {p.kind}" for n, p, _ in REFUSALS])
def test_a_refusal_names_those_that_do(name: str, problem: fs.Problem, others: str) -> None:
    with pytest.raises(fs.InputError) as refused:
        ALGORITHMS[name]().check(problem, 1.0, 5)
    assert str(refused.value).endswith(f"({problem.kind}). Algorithms that do: {others}.")


def test_a_number_that_is_no_loss_is_not_normalised() -> None:
    """Only where the outer function weighs losses, not wherever the inner one gives a single number."""
    problem, data = example_for(fs.ComFedL)
    single = dataclasses.replace(problem, levels=(lambda u, batch: (u**2).sum().reshape(1) * batch[0].mean(),))
    single = dataclasses.replace(single, outer=lambda u, batch: (u**2).sum())
    before, counts, clients = sent(fs.ComFedL(lr=1e-3), single, data)
    assert clients.inner_sizes == (1,)
    assert before.bytes_down == 0
    assert counts.bytes_up == 2 * 8 * data.clients * len(problem.x0)


@pytest.mark.parametrize("name", ["mfcgd", "adamfcgd"])
@pytest.mark.parametrize("radius", ["c_g", "c_f"])
def test_products_have_nothing_to_project(name: str, radius: str) -> None:
    problem, data = example_for(ALGORITHMS[name])
    algorithm = ALGORITHMS[name](jacobian="product", **{radius: 1.0})
    with pytest.raises(fs.InputError, match=r"c_g and c_f .*need jacobian = 'exact'"):
        fs.train(problem, data, algorithm, rounds=1)


def test_comfedl_takes_any_number_of_levels() -> None:
    assert [fs.ComFedL.solves(problem_with(levels)) for levels in (0, 1, 2, 5)] == [False, True, True, True]
    fs.ComFedL().check(problem_with(2), 0.5, 10)


@pytest.mark.parametrize("dual", [True, False])
def test_local_smcgdam_takes_any_number_of_levels_but_none(dual: bool) -> None:
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
        assert fs.algorithm(name, steps=3, snapshot_every=every).snapshot_every == every  # type: ignore[attr-defined]
    wanted = rf"snapshot_every of {name} must be 1, or a multiple of steps, 3; 0 is steps\^2"
    with pytest.raises(fs.InputError, match=wanted):
        fs.algorithm(name, steps=3, snapshot_every=4)


# --- defaults --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> fs.FederatedData:
    return fs.data.digits().split(fs.partition.dirichlet(0.5), clients=8, seed=0)


@pytest.mark.parametrize("name", [n for n in NAMES if ALGORITHMS[n].solves(fs.quadratic().problem)])
def test_default_hyperparameters_learn_digits(name: str, digits: fs.FederatedData) -> None:
    problem = fs.erm(fs.models.model("logreg", (1, 8, 8), 10))
    run = fs.train(problem, digits, ALGORITHMS[name](), rounds=5, batch_size=16, eval_every=5)
    first, last = run.history[0], run.history[-1]
    assert first["loss"] == pytest.approx(2.302585, abs=1e-4)  # log 10: the model starts at zero
    assert last["loss"] < 0.8 * first["loss"]
    assert last["accuracy"] > 0.6


LAYERED: list[tuple[str, str, dict[str, Any], int]] = [
    *(("robust", name, {}, 20) for name in ("comfedl", "mfcgd", "adamfcgd", "local_scgd", "local_scgdm", "local_moml")),
    *(("maml", name, {}, 20) for name in ("comfedl", "local_scgd", "local_scgdm", "local_moml")),
    *(("maml", name, {"jacobian": "product"}, 20) for name in ("mfcgd", "adamfcgd")),
    ("damaml", "comfedl", {}, 20),
    ("agnostic", "drfa", {}, 20),
    ("agnostic", "afl", {}, 60),
    *(("fair", name, {}, 60 if name == "fednest" else 20) for name in SADDLE),
    ("robust, the mean inside", "fednest", {}, 60),
    ("maml, the mean inside", "fednest", {}, 60),
    *(("robust, the mean inside", name, {}, 20) for name in ("local_smcgdam", "local_scgdam")),
    *(("maml, the mean inside", name, {}, 20) for name in ("local_smcgdam", "local_scgdam")),
    ("risk_averse", "local_smcgdam", {}, 20),
    ("erm", "local_sgdm_rl", {}, 20),
]


@pytest.mark.parametrize(("problem", "name", "options", "rounds"), LAYERED, ids=[f"{n} on {p}" for p, n, *_ in LAYERED])
def test_default_hyperparameters_learn_layered_problems(
    problem: str, name: str, options: dict[str, Any], rounds: int, digits: fs.FederatedData
) -> None:
    kind, _, inside = problem.partition(", ")
    more: dict[str, Any] = {"clients": digits.clients} if kind == "agnostic" else {}
    more |= {"classes": 10, "regularise": 5.0} if kind == "fair" else {}
    more |= {"inner_mean": "global"} if inside else {}
    built = getattr(fs, kind)(fs.models.model("logreg", (1, 8, 8), 10), **more)
    if name == "local_sgdm_rl":
        assert digits.test is not None
        digits = digits.with_auxiliary(*(a[:150] for a in digits.test))
    run = fs.train(built, digits, ALGORITHMS[name](**options), rounds=rounds, batch_size=16, eval_every=rounds)
    first, last = run.history[0], run.history[-1]
    assert last["loss"] < 0.85 * first["loss"]
    assert last["accuracy"] > 0.65
    assert last["accuracy_worst"] > 2 * first["accuracy_worst"] or last["accuracy_worst"] > 0.5


def test_every_algorithm_is_shown_to_learn() -> None:
    shown = {name for _, name, *_ in LAYERED}
    assert shown | {n for n in NAMES if ALGORITHMS[n].solves(fs.quadratic().problem)} == set(NAMES)
