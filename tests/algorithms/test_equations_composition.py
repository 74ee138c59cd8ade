"""
The compositional algorithms against their NumPy references, written from the papers' lines.

The references see values, Jacobians and gradients written in NumPy too, so nothing of the library stands on both sides
but the rule that names a batch. Server vectors and every client's kept rows agree to 1e-9 in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from reference.comfedl import comfedl
from reference.fednest import fednest
from reference.local_moml import local_moml
from reference.local_scgd import local_scgd, local_scgdm
from reference.mfcgd import adamfcgd, mfcgd
from support import drawn, make_clients, make_setting, started
from worlds import (
    GAMMA,
    INNER_LR,
    SHIFT,
    SIZES,
    WORLDS,
    Draw,
    N,
    Vector,
    World,
    damaml_world,
    logistic,
    robust_world,
    steep,
)

SEED = 11
TOLERANCE = 1e-9


# --- cases, and how each side is run ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """How a run draws, samples clients and weighs; with ``first_round`` it begins there, from a random state."""

    batch_size: int | None = 3
    sampling: str = "uniform"
    participation: int | float = 1.0
    weighting: str = "uniform"
    chunk: int = N
    first_round: int = 0
    rounds: int = 2
    options: dict[str, Any] = field(default_factory=dict)

    def copies(self, clients: Sequence[int]) -> list[int]:
        """The clients, each as often as it weighs: what makes a plain mean a weighted one."""
        return [k for k in clients for _ in range(SIZES[k] if self.weighting == "samples" else 1)]


@dataclass(frozen=True)
class Method:
    """An algorithm, its reference, and its hyperparameters here."""

    build: Callable[..., fs.Algorithm]
    reference: Callable[[Paper], dict[str, Vector]]
    options: dict[str, Any]


def given(world: World, name: str, options: dict[str, Any]) -> tuple[dict[str, Vector], dict[str, Vector]]:
    """A server and clients in the middle of things: vectors of the server, and rows that clients keep."""
    rng = np.random.default_rng(4)
    d, r = len(world.x0), len(world.inner(lambda level: drawn(world.data, 0, (0,) * 5, 0, batch_size=1), world.x0))
    memory = rng.uniform(0.01, 0.5, size=(2, d))
    memory[1] += 0.1
    matrix = options.get("matrix")
    server: dict[str, dict[str, Vector]] = {
        "comfedl, normalised": {"weight": np.array([0.8])},
        "local_scgd": {"u": rng.normal(size=r)},
        "local_scgdm": {"u": rng.normal(size=r), "m": rng.normal(size=d)},
        "fednest": {"u": rng.normal(size=r)},
        "adamfcgd": {"a": {"adam": memory[:1], "norm": memory[:1, :1]}.get(str(matrix), memory)},
    }
    rows: dict[str, Vector] = {}
    if name in ("mfcgd", "adamfcgd"):
        rows = {"x": world.x0 + 0.3 * rng.normal(size=(N, d)), "h": rng.normal(size=(N, r))}
        u, v = rng.normal(size=(N, r, d)), rng.normal(size=(N, r))
        product = options.get("jacobian") == "product"
        rows |= {"w": np.einsum("krd,kr->kd", u, v)} if product else {"u": u, "v": v}
    return {"x": world.x0, **server.get(name, {})}, rows


def run_library(world: World, name: str, case: Case) -> tuple[dict[str, Vector], list[list[int]]]:
    """Rounds of the library: the server's vectors, the rows that clients keep (``x_k``...), and the cohorts."""
    options = {**METHODS[name].options, **case.options}
    drawing: dict[str, Any] = {"batch_size": case.batch_size, "sampling": case.sampling, "seed": SEED}
    setting = make_setting(world.problem, world.data, oracles=world.oracles, **drawing)
    last = case.first_round + case.rounds
    taking_part: dict[str, Any] = {"participation": case.participation, "weighting": case.weighting}
    clients = make_clients(setting, rounds=last, chunk=case.chunk, **taking_part)
    algorithm = METHODS[name].build(**options)
    cohorts = []
    with torch.no_grad():
        state = started(algorithm, clients)
        if case.first_round:
            server, rows = given(world, name, options)
            assert set(server) == set(state)
            state = fs.State(**{key: torch.from_numpy(value) for key, value in server.items()})
            setting.state.keep(np.arange(N), {key: torch.from_numpy(value) for key, value in rows.items()})
            clients.counts.steps = case.first_round * options["steps"]
        for r in range(case.first_round, last):
            clients.begin(r)
            cohorts.append(clients.cohort.tolist())
            state = algorithm.round(state, clients)
    kept = {f"{key}_k": rows.numpy() for key, rows in setting.state.take_changes().items() if "." not in key}
    return {**{key: value.numpy() for key, value in state.items()}, **kept}, cohorts


DRAWN: dict[tuple[Any, ...], tuple[Vector, ...]] = {}
"""Batches drawn before: most tests ask for the same ones."""


@dataclass(frozen=True)
class Paper:
    """What a reference is to do: the same rounds, with the same names for batches."""

    world: World
    name: str
    case: Case
    options: dict[str, Any]
    cohorts: list[list[int]]
    seed: int
    start_exchange: int = 0

    def batch(self, k: int, r: int, t: int, exchange: int = 0, stream: int = 0, times: int = 1) -> Draw:
        size = None if self.case.batch_size is None else times * self.case.batch_size
        options: dict[str, Any] = {"batch_size": size, "sampling": self.case.sampling}

        def draw(level: int) -> tuple[Vector, ...]:
            key = (id(self.world.data), k, self.seed, r, exchange, level, stream, t, size, self.case.sampling)
            if key not in DRAWN:
                DRAWN[key] = drawn(self.world.data, k, (self.seed, r, exchange, level, stream), t, **options)
            return DRAWN[key]

        return draw

    def rate(self, key: str, r: int, iteration: int) -> float:
        """A rate at a time, from its formula."""
        value = self.options[key]
        if isinstance(value, fs.CubeRoot):
            return float(value.k / (value.n + iteration) ** (1 / 3))
        return float(value.value * value.factor**r if isinstance(value, fs.RoundDecay) else value)

    def given(self) -> tuple[dict[str, Vector], dict[str, Vector]]:
        return given(self.world, self.name, self.options)

    def prepared(self) -> Paper:
        """The paper after the problem asked the clients for its shift, in the first exchange of round -1."""
        if self.world.prepare is None:
            return self
        return replace(self, world=self.world.prepare([self.batch(k, -1, 0) for k in range(N)]), start_exchange=1)


def run_reference(
    world: World, name: str, case: Case, cohorts: list[list[int]], seed: int = SEED, **change: Any
) -> dict[str, Vector]:
    """The same rounds by the paper; ``change`` makes it a slightly different paper."""
    options = {**METHODS[name].options, **case.options, **change}
    return METHODS[name].reference(Paper(world, name, case, options, cohorts, seed).prepared())


# --- methods whose clients keep nothing ------------------------------------------------------------------------------


def steps_of(paper: Paper, k: int) -> int:
    steps, size = paper.options["steps"], paper.case.batch_size
    if isinstance(steps, int):
        return steps
    return math.ceil(steps.epochs * (1 if size is None else math.ceil(paper.world.data.train.sizes[k] / size)))


def local_reference(paper: Paper) -> dict[str, Vector]:
    """One call per round and number of steps; clients with equally many steps share a call."""
    case, options = paper.case, paper.options
    state = paper.given()[0] if case.first_round else {"x": paper.world.x0}
    before = case.first_round * options["steps"] if case.first_round else 0
    for r, cohort in enumerate(paper.cohorts, case.first_round):
        groups: dict[int, list[int]] = {}
        for k in case.copies(cohort):
            groups.setdefault(steps_of(paper, k), []).append(k)
        total = sum(map(len, groups.values()))
        new: dict[str, Vector] = {}
        for steps, group in groups.items():
            for key, value in local_round(paper, r, before, state, group, steps).items():
                new[key] = new.get(key, 0) + len(group) / total * value
        state = new
        before += max(groups)
    return state


def local_round(
    paper: Paper, r: int, before: int, state: dict[str, Vector], group: list[int], steps: int
) -> dict[str, Vector]:
    """One round of some clients that take equally many steps."""
    world, options = paper.world, paper.options
    functions = [lambda k, _, t, z, f=f: f(paper.batch(k, r, t), z) for f in (world.inner, world.jacobian, world.outer)]

    def rate(key: str) -> Callable[[int, int], float]:
        return lambda _, t: paper.rate(key, r, before + t)

    def weight(key: str) -> Callable[[int, int], float]:
        """A weight that, times eta, counts as 1 where it is larger."""
        return lambda _, t: min(rate(key)(r, t), 1 / rate("eta")(r, t) if "eta" in options else 1.0)

    if paper.name == "comfedl":
        return comfedl(state["x"], [group], *functions, steps, lr=rate("lr"))
    if paper.name == "local_moml":
        return moml_round(paper, r, state["x"], group, steps, rate("lr"), weight("beta"))
    rates = {"eta": rate("eta"), "beta": rate("beta"), "gamma": weight("gamma"), "u": state.get("u")}
    if paper.name == "local_scgd":
        return local_scgd(state["x"], [group], *functions, steps, **rates)
    return local_scgdm(state["x"], [group], *functions, steps, **rates, alpha=weight("alpha"), m=state.get("m"))


def moml_round(paper: Paper, r: int, x: Vector, group: list[int], steps: int, lr: Any, beta: Any) -> dict[str, Vector]:
    """LocalMOML: the big batch is stream 0; streams 1 and 3 are the inner level's, stream 2 the outer function's."""

    def loss(k: int, t: int, x: Vector, stream: int) -> tuple[float, Vector, Vector]:
        draw = paper.batch(k, r, max(t, 0), stream=stream, times=paper.options["first_batches"] if t < 0 else 1)
        return logistic(draw(0 if stream == 2 else 1), x)

    out = local_moml(
        x,
        [group],
        lambda k, _, t, x, stream: loss(k, t, x, stream)[1],
        lambda k, _, t, x, v, stream: loss(k, t, x, stream)[2] @ v,
        steps,
        lr=lr,
        beta=beta,
        inner_lr=paper.options.get("inner_lr", INNER_LR),
        first_order=paper.options.get("first_order", paper.world is WORLDS["maml, first order"]()),
    )
    return {"x": out["x"]}


def normalised_comfedl(paper: Paper) -> dict[str, Vector]:
    """ComFedL with weights v / s, at most the number of clients in the cohort, from the words of its file."""
    world, case, x = paper.world, paper.case, paper.world.x0

    def weight(draw: Draw, x: Vector) -> float:
        return float(world.outer(draw, world.inner(draw, x))[0])

    s = np.mean([weight(paper.batch(k, -1, 0, paper.start_exchange), x) for k in case.copies(range(N))])
    s = paper.given()[0]["weight"][0] if case.first_round else s
    before = case.first_round * paper.options["steps"] if case.first_round else 0
    for r, cohort in enumerate(paper.cohorts, case.first_round):
        models, weights = [], []
        for k in case.copies(cohort):
            x_k, seen = x, []
            for t in range(steps_of(paper, k)):
                draw = paper.batch(k, r, t)
                seen.append(weight(draw, x_k))
                bounded = min(seen[-1] / s, paper.options.get("most", len(cohort)))
                x_k = x_k - paper.rate("lr", r, before + t) * bounded * world.jacobian(draw, x_k)[0]
            models.append(x_k)
            weights.append(np.mean(seen))
        x, s = np.mean(models, axis=0), np.mean(weights)
        before += max(steps_of(paper, k) for k in cohort)
    return {"x": x, "weight": np.array([s])}


# --- methods with exchanges or a memory of their own -----------------------------------------------------------------


def fednest_reference(paper: Paper) -> dict[str, Vector]:
    """Inner round s is exchanges 2s and 2s + 1; the outer gradient is exchange 2T, the pull 2T + 1."""
    world, options, first = paper.world, paper.options, paper.case.first_round
    copies, steps = paper.case.copies(range(N)), options["steps"]
    starts = [world.inner(paper.batch(k, -1, 0, paper.start_exchange), world.x0) for k in copies]
    iterations = (options["inner_rounds"] + 1) * steps  # local steps in an epoch, as the library counts them

    def batch(k: int, epoch: int, exchange: int) -> Draw:
        return paper.batch(copies[k], first + epoch, 0, exchange)

    def rate(key: str) -> Callable[[int], float]:
        return lambda epoch: paper.rate(key, first + epoch, first * steps + epoch * iterations)

    out = fednest(
        world.x0,
        paper.given()[0]["u"] if first else np.mean(starts, axis=0),
        len(paper.cohorts),
        len(copies),
        lambda k, epoch, s, x: world.inner(batch(k, epoch, 2 * s), x),
        lambda k, epoch, s, x, v: world.jacobian(batch(k, epoch, 2 * s + 1), x).T @ v,
        lambda k, epoch, s, y: world.outer(batch(k, epoch, 2 * s), y),
        inner_rounds=options["inner_rounds"],
        tau=steps,
        alpha=rate("alpha"),
        beta=rate("beta"),
    )
    return {"x": out["x"], "u": out["y"]}


def storm_reference(paper: Paper) -> dict[str, Vector]:
    """MFCGD and AdaMFCGD; the reference's estimator update (r, j) is made in the library's next iteration."""
    world, options, first = paper.world, paper.options, paper.case.first_round
    q, copies = options["steps"], paper.case.copies(range(N))
    adaptive, product = paper.name == "adamfcgd", options.get("jacobian") == "product"
    matrix = options["matrix"] if adaptive else "identity"

    def batch(k: int, r: int, j: int) -> Draw:
        if j < 0:
            return paper.batch(copies[k], -1, 0, paper.start_exchange, times=options.get("first_batches", 0) or q)
        return paper.batch(copies[k], r, j + 1) if j < q - 1 else paper.batch(copies[k], r + 1, 0)

    def rate(key: str) -> Callable[[int, int], float]:
        return lambda r, j: paper.rate(key, r, max(0, r * q + j))

    def weight(key: str) -> Callable[[int, int], float]:
        """The weight of the update (r, j): of iteration (r, j), with the round in which the update is made."""

        def value(r: int, j: int) -> float:
            when = r + (j == q - 1), r * q + j
            return min(1.0, paper.rate(key, *when) * (paper.rate("eta", *when) ** 2 if theorem else 1.0))

        theorem = options.get("weights") == "theorem"
        return value

    arguments: dict[str, Any] = {key: weight(key) for key in ("alpha", "beta", "varrho")}
    arguments |= {"eta": rate("eta"), "gamma": options["gamma"], "clients": len(copies)}
    arguments |= {"jacobian": "product" if product else "exact", "c_g": options.get("c_g"), "c_f": options.get("c_f")}
    functions = [lambda k, r, j, z, f=f: f(batch(k, r, j), z) for f in (world.inner, world.jacobian, world.outer)]
    everyone = [list(range(len(copies)))] * len(paper.cohorts)
    more: dict[str, Any] = {"matrix": matrix, "first_round": first, "defer": True}
    if adaptive:
        more |= {"theta": rate("theta"), "rho": options["rho"], "first_matrix": options["first_matrix"]}
    if first:
        server, rows = paper.given()
        if not product:
            rows["w"] = np.einsum("krd,kr->kd", rows["u"], rows["v"])
        more |= {("x_k" if key == "x" else key): value[copies] for key, value in rows.items()}
        a = server.get("a", np.zeros((1, 1)))
        more |= {"a": a[0, 0] if matrix == "norm" else a[0]} if adaptive else {}
        more |= {"w_bar": a[1]} if matrix == "belief" else {"a_max": a[1]} if matrix == "amsgrad" else {}
    out = adamfcgd(world.x0, everyone, *functions, q, **arguments, **more)
    if not adaptive and not first:  # the printed loop over t
        printed = mfcgd(world.x0, everyone, *functions, q, **arguments)
        np.testing.assert_allclose(printed["x"], out["x"], atol=1e-12)
    result = {"x": out["x"]}
    if adaptive:
        below = {"belief": [out["w_bar"]], "amsgrad": [out["a_max"]]}.get(matrix, [])
        result["a"] = np.array([np.atleast_1d(out["a"]), *below])
    for key in ("x_k", "h", "w") if product else ("x_k", "h", "u", "v"):
        result[f"{key[0]}_k"] = np.stack([out[key][copies.index(k)] for k in range(N)])
    return result


SCGD = {"beta": 0.1, "eta": 0.9, "gamma": 0.6, "steps": 3}
STORM = {"gamma": 0.1, "eta": 0.8, "steps": 3, "alpha": 0.6, "beta": 0.5, "varrho": 0.7}
ADAPTIVE = {"theta": 0.8, "rho": 0.3, "matrix": "adam", "first_matrix": "average"}
NEST = {"alpha": 0.2, "beta": 0.7, "inner_rounds": 2, "steps": 3}
METHODS = {
    "comfedl": Method(fs.ComFedL, local_reference, {"lr": 0.1, "steps": 3, "normalise": False}),
    "comfedl, normalised": Method(fs.ComFedL, normalised_comfedl, {"lr": 0.1, "steps": 3}),
    "local_scgd": Method(fs.LocalSCGD, local_reference, SCGD),
    "local_scgdm": Method(fs.LocalSCGDM, local_reference, {**SCGD, "alpha": 0.7}),
    "local_moml": Method(fs.LocalMOML, local_reference, {"lr": 0.2, "beta": 0.6, "steps": 3, "first_batches": 2}),
    "fednest": Method(fs.FedNest, fednest_reference, NEST),
    "mfcgd": Method(fs.MFCGD, storm_reference, STORM),
    "adamfcgd": Method(fs.AdaMFCGD, storm_reference, {**STORM, **ADAPTIVE}),
}


# --- which method meets which world in which case --------------------------------------------------------------------


FULL = {
    "one at a time": Case(chunk=1),
    "two at a time": Case(chunk=2),
    "full batches": Case(batch_size=None),
    "epochs": Case(sampling="epochs", batch_size=4),
    "weighted": Case(weighting="samples", chunk=2),
    "given state": Case(first_round=3),
    "one step": Case(options={"steps": 1}),
}
PARTIAL = {
    **FULL,
    "partial": Case(participation=3),
    "partial, weighted, epochs": Case(participation=2, weighting="samples", sampling="epochs", chunk=1),
    "passes": Case(options={"steps": fs.Epochs(1.5)}, sampling="epochs", batch_size=4),
    "passes, partial, weighted": Case(options={"steps": fs.Epochs(0.7)}, participation=4, weighting="samples", chunk=2),
}
SCHEDULES = {"cube root": fs.CubeRoot(0.9, 2.0), "round decay": fs.RoundDecay(0.5, 0.6)}
RATES = {
    "comfedl": ["lr"],
    "comfedl, normalised": ["lr"],
    "local_scgd": ["beta", "eta", "gamma"],
    "local_scgdm": ["beta", "eta", "gamma", "alpha"],
    "local_moml": ["lr", "beta"],
    "fednest": ["alpha", "beta"],
    "mfcgd": ["eta", "alpha", "beta", "varrho"],
    "adamfcgd": ["eta", "alpha", "beta", "varrho", "theta"],
}
CLIPPED = {
    "local_scgd": {"eta": fs.CubeRoot(2.5, 2.0)},
    "local_scgdm": {"eta": fs.CubeRoot(2.5, 2.0)},
    "local_moml": {"beta": fs.CubeRoot(1.5, 1.0)},
    "mfcgd": {"alpha": fs.CubeRoot(2.5, 2.0), "beta": 3.0},
    "adamfcgd": {"alpha": fs.CubeRoot(2.5, 2.0), "beta": 3.0},
}
HOME = {"comfedl, normalised": "robust, exp", "local_moml": "maml", "fednest": "mixed, global"}
THEOREM = {"weights": "theorem", "eta": fs.CubeRoot(1.3, 2.0), "alpha": 1.4, "beta": 0.7, "varrho": 0.5}
FORMS = ("exact", "product")
BALLS = {"c_g": 0.9, "c_f": 1.1}
STORM_CASES = {
    **FULL,
    "four steps": Case(options={"steps": 4}),
    "theorem": Case(options=THEOREM),
    "theorem, round decay": Case(options={**THEOREM, "eta": fs.RoundDecay(0.9, 0.7)}),
    "theorem, given state": Case(options=THEOREM, first_round=2),
    "first batches": Case(options={"first_batches": 5}),
    "first batches, epochs": Case(options={"first_batches": 2}, sampling="epochs"),
    "auto": Case(),
}


def worlds_of(name: str) -> list[str]:
    """The worlds that a method is for."""
    if name == "local_moml":
        return ["maml", "maml, first order", "maml, support"]
    if name == "fednest":
        return [w for w in WORLDS if "global" in w]
    if name == "comfedl, normalised":
        return [w for w in WORLDS if w.startswith(("robust", "damaml")) and "global" not in w]
    unlike = {"comfedl": (), "local_scgd": ("damaml", "maml, support", "robust, prepared")}.get(name, ("damaml",))
    return [w for w in WORLDS if "global" not in w and not w.startswith(("constant", *unlike))]


def combinations() -> list[Any]:
    """Every method in each of its worlds, and in one world in every case."""
    out = []

    def add(name: str, world: str, label: str, case: Case, *forms: str) -> None:
        rounds = 3 if name in ("mfcgd", "adamfcgd") else 2
        for form in forms or (None,):
            options = case.options if form is None else {**case.options, "jacobian": form}
            full = replace(case, options=options, rounds=rounds)
            out.append(pytest.param(world, name, full, id="-".join([name, world, label, *([form] if form else [])])))

    for name in METHODS:
        storm = name in ("mfcgd", "adamfcgd")
        home, both = HOME.get(name, "mixed"), FORMS if storm else ()
        for world in worlds_of(name):
            one = ("exact",) if world.startswith("robust") else ("product",)
            add(name, world, "minibatches", Case(), *(one if name == "adamfcgd" else both))
        for label, case in (STORM_CASES if storm else FULL if name == "fednest" else PARTIAL).items():
            add(name, home, label, case, *(both if label != "auto" else ()))
        for rate in RATES[name]:
            for kind, schedule in SCHEDULES.items():
                first = {"first_matrix": "accumulator"} if rate == "theta" else {}
                add(name, home, f"{rate}, {kind}", Case(options={rate: schedule, **first}), *both)
        if name in CLIPPED:
            add(name, home, "weights above 1", Case(options=CLIPPED[name]), *both)
        for world in ("mixed", "maml", "robust, exp") if storm else ():
            add(name, world, "projected", Case(options=BALLS), "exact")
    for matrix in ("adam", "norm", "belief", "amsgrad"):
        for first in ("average", "accumulator", "identity"):
            case = Case(options={"matrix": matrix, "first_matrix": first})
            add("adamfcgd", "mixed", f"{matrix}, {first}", case, "exact")
        add("adamfcgd", "mixed", f"{matrix}, given state", Case(options={"matrix": matrix}, first_round=2), *FORMS)
        add("adamfcgd", "robust, exp", f"{matrix}, one step", Case(options={"matrix": matrix, "steps": 1}), *FORMS)
    return out


def distance(ours: dict[str, Vector], theirs: dict[str, Vector]) -> float:
    assert ours.keys() == theirs.keys()
    for key in ours:
        assert ours[key].shape == theirs[key].shape, key
    return max(float(np.abs(ours[key] - theirs[key]).max()) for key in ours)


@pytest.mark.parametrize(("world", "name", "case"), combinations())
def test_rounds_agree_with_the_reference(world: str, name: str, case: Case) -> None:
    w = WORLDS[world]()
    ours, cohorts = run_library(w, name, case)
    theirs = run_reference(w, name, case, cohorts)
    assert distance(ours, theirs) < TOLERANCE
    assert 3e-3 < np.abs(theirs["x"] - w.x0).max() < 20, "the rounds hardly moved, or far away"


def test_the_first_matrix_has_the_first_theta() -> None:
    case = Case(rounds=1, options={"theta": SCHEDULES["round decay"]})
    world = WORLDS["mixed"]()
    ours, cohorts = run_library(world, "adamfcgd", case)
    assert distance(ours, run_reference(world, "adamfcgd", case, cohorts)) < TOLERANCE


@pytest.mark.parametrize("name", WORLDS)
def test_worlds_are_what_they_claim(name: str) -> None:
    """Values and derivatives in NumPy are those of autograd, also where exp has become its tangent."""
    world = WORLDS[name]()

    def draw(level: int, client: int = 1) -> tuple[Vector, ...]:
        return drawn(world.data, client, (SEED, 5, 0, level, 0), 1, batch_size=3)

    problem, x = world.problem, world.problem.x0
    if problem.asks is not None:
        clients = make_clients(make_setting(problem, world.data, seed=SEED, batch_size=3))
        clients.begin(-1)
        problem = problem.given(problem, problem.asks(problem, clients))
        first = [lambda level, k=k: drawn(world.data, k, (SEED, -1, 0, level, 0), 0, batch_size=3) for k in range(N)]
        assert world.prepare is not None
        world = world.prepare(first)
    batches = [tuple(map(torch.from_numpy, draw(level))) for level in range(len(problem.levels) + 1)]

    def inner(x: torch.Tensor) -> torch.Tensor:
        for k, level in enumerate(problem.levels, 1):
            x = level(x, batches[k])
        return x

    u = inner(x)
    np.testing.assert_allclose(world.inner(draw, x.numpy()), u.numpy(), atol=1e-12)
    np.testing.assert_allclose(world.jacobian(draw, x.numpy()), torch.func.jacrev(inner)(x).numpy(), atol=1e-12)
    for offset in (0.0, 0.7, 3.0):
        slope = torch.func.grad(problem.outer)(u + offset, batches[0] if problem.outer_draws else ())
        np.testing.assert_allclose(world.outer(draw, u.numpy() + offset), slope.numpy(), rtol=1e-11, atol=1e-12)


# --- the comparison has power: a slightly wrong reference is told apart ----------------------------------------------


STRANGERS: dict[str, Callable[[], World]] = {
    "gamma": cache(lambda: robust_world(np.exp, gamma=GAMMA * 1.01)),
    "shift": cache(lambda: robust_world(np.exp, shift=SHIFT * 1.01)),
    "slope of own link": cache(lambda: robust_world(lambda t: 2.02 / (1 + np.exp(-2.02 * t)), link=steep)),
    "tangent": cache(lambda: robust_world(np.exp, shift=None, gamma=0.15, most=N + 1)),
    "second order": cache(lambda: damaml_world(first_order=False)),
}


def wrong() -> list[Any]:
    """Method, its world, the case, what the reference has otherwise, and the reference's world if another."""
    out = []

    def add(name: str, label: str, change: dict[str, Any], case: Case | None = None, **worlds: str) -> None:
        world = worlds.get("world", HOME.get(name, "mixed"))
        out.append(pytest.param(name, world, case or Case(), change, worlds.get("stranger"), id=f"{name}, {label}"))

    for name, method in METHODS.items():
        for key, value in method.options.items():
            if isinstance(value, float):
                add(name, key, {key: value * 1.01})
        for key in ("steps", "inner_rounds", "first_batches"):
            if key in method.options:
                add(name, key, {key: method.options[key] + 1})
        add(name, "another seed", {"seed": SEED + 1})
        add(name, "other batches", {"sampling": "stratified"})
        add(name, "weights", {"weighting": "samples"})
    add("comfedl, normalised", "most", {"most": 1.98}, Case(participation=2), world="robust, prepared")
    add("comfedl, normalised", "tangent", {}, Case(batch_size=1), world="robust, prepared", stranger="tangent")
    add("comfedl", "gamma", {}, world="robust, exp", stranger="gamma")
    add("comfedl", "shift", {}, world="robust, exp", stranger="shift")
    add("comfedl", "link", {}, world="robust, own link", stranger="slope of own link")
    add("comfedl", "order", {}, world="damaml, first order", stranger="second order")
    add("local_moml", "inner lr", {"inner_lr": INNER_LR * 1.01})
    add("local_moml", "order", {"first_order": True})
    for name in ("mfcgd", "adamfcgd"):
        add(name, "form", {"jacobian": "product"}, Case(options={"jacobian": "exact"}))
        for key in ("alpha", "beta"):
            add(name, f"{key}, product", {key: STORM[key] * 1.01}, Case(options={"jacobian": "product"}))
        add(name, "first batches", {"first_batches": 4})
        for key, radius in BALLS.items():
            for value in (radius * 1.01, None):
                add(name, f"{key} {value}", {key: value}, Case(options=BALLS))
        add(name, "no theorem", {"weights": "constant"}, Case(options=THEOREM))
        for key in ("alpha", "beta", "varrho"):
            add(name, f"{key}, theorem", {key: 0.99 * THEOREM[key]}, Case(options=THEOREM))
        add(name, "eta, theorem", {"eta": fs.CubeRoot(1.3, 2.1)}, Case(options=THEOREM))
    for matrix in ("adam", "norm", "belief", "amsgrad"):
        case = Case(first_round=2, options={"matrix": matrix})
        for key in ("rho", "theta"):
            add("adamfcgd", f"{key}, {matrix}", {key: ADAPTIVE[key] * 1.01}, case)
        add("adamfcgd", f"{matrix}, not adam", {"matrix": "norm" if matrix == "adam" else "adam"}, case)
    for first in ("accumulator", "identity"):
        add("adamfcgd", f"first matrix {first}", {"first_matrix": first})
    return out


OURS: dict[str, tuple[dict[str, Vector], list[list[int]]]] = {}


@pytest.mark.parametrize(("name", "world", "case", "change", "stranger"), wrong())
def test_a_wrong_reference_breaks_the_agreement(
    name: str, world: str, case: Case, change: dict[str, Any], stranger: str | None
) -> None:
    right = f"{world} {name} {case}"
    if right not in OURS:
        OURS[right] = run_library(WORLDS[world](), name, case)
    ours, cohorts = OURS[right]
    of_case = {key: change[key] for key in ("sampling", "weighting") if key in change}
    of_paper = {key: value for key, value in change.items() if key not in of_case}
    other = WORLDS[world]() if stranger is None else STRANGERS[stranger]()
    theirs = run_reference(other, name, replace(case, **of_case), cohorts, **of_paper)
    assert np.abs(ours["x"] - theirs["x"]).max() > 1e4 * TOLERANCE


# --- what follows from the equations ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mfcgd", "adamfcgd"])
def test_the_two_forms_agree_on_one_constant_jacobian(name: str) -> None:
    """And only there: not with other weights, and not with a Jacobian that changes."""

    def apart(world: str, **options: Any) -> float:
        cases = [Case(rounds=3, options={**options, "jacobian": form}) for form in ("exact", "product")]
        (exact, cohorts), (product, _) = (run_library(WORLDS[world](), name, case) for case in cases)
        assert distance(exact, run_reference(WORLDS[world](), name, cases[0], cohorts)) < TOLERANCE
        return max(float(np.abs(exact[key] - product[key]).max()) for key in ("x", "x_k", "h_k"))

    assert apart("constant Jacobian", beta=0.4, varrho=0.4) < 1e-12
    assert apart("constant Jacobian", beta=0.4, varrho=0.5) > 1e-4
    assert apart("mixed", beta=0.4, varrho=0.4) > 1e-4


@pytest.mark.parametrize("name", ["mfcgd", "adamfcgd"])
def test_the_average_is_that_of_the_servers_iterates(name: str) -> None:
    world = WORLDS["mixed"]()
    case = Case(rounds=3, options={"average": True})
    ours, cohorts = run_library(world, name, case)
    iterates = [run_reference(world, name, case, cohorts[: r + 1])["x"] for r in range(3)]
    np.testing.assert_allclose(ours["x_mean"], np.mean(iterates, axis=0), atol=TOLERANCE)
    state = fs.State(x=torch.from_numpy(ours["x"]), x_mean=torch.from_numpy(ours["x_mean"]))
    for average, expected in ((True, "x_mean"), (False, "x")):
        solution = METHODS[name].build(average=average).solution(state)
        assert torch.equal(solution.x, state[expected])


def test_weights_are_normalised_only_where_f_takes_a_number() -> None:
    world = WORLDS["mixed"]()
    ours, cohorts = run_library(world, "comfedl, normalised", Case())
    assert distance(ours, run_reference(world, "comfedl", Case(), cohorts)) < TOLERANCE
