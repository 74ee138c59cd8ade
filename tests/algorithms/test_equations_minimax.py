"""
The minimax algorithms against their NumPy references, written from the papers' lines or from what stands for them.

The references see gradients and projections written in NumPy too, so nothing of the library stands on both sides but
the rule that names a batch. Server vectors and the rows that clients keep agree to 1e-9 in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.algorithms import ALGORITHMS
from fedstrata.core.options import options_of
from fedstrata.core.schedules import Rate
from reference import fgda as fgda_module
from reference.cdma import cdma, cdma_ada
from reference.coda import coda
from reference.codasca import codasca
from reference.fednest_minimax import fednest_minimax
from reference.fgda import adafgda, fgda
from reference.local_sgda import local_sgda, local_sgda_plus, local_sgdam, local_sgdam_plus
from reference.sagda import sagda
from saddle_worlds import SADDLES, SIZES, N, Pair, SaddleWorld, Vector
from support import drawn, make_clients, make_setting, started

SEED = 11
TOLERANCE = 1e-9
COMMON = math.gcd(*SIZES)


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
    rounds: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """An algorithm, its reference, and its hyperparameters here.

    ``unseen`` are rows of clients that the reference does not return.
    """

    build: Callable[..., fs.Algorithm]
    reference: Callable[[Paper], dict[str, Vector]]
    options: dict[str, Any]
    unseen: tuple[str, ...] = ()
    rounds: int = 2


def steps_a_round(options: dict[str, Any]) -> int:
    """Local steps in a round, as the library counts them."""
    return int(options["steps"]) * (options.get("inner_rounds", 0) + 1)


def given(world: SaddleWorld, name: str, options: dict[str, Any]) -> tuple[dict[str, Vector], dict[str, Vector]]:
    """A server and clients in the middle of things: vectors of the server, and rows that clients keep."""
    rng = np.random.default_rng(4)
    x, y = world.x0, world.y0
    pair = {"x": x, "y": y}

    def like(*keys: str, clients: int | None = None) -> dict[str, Vector]:
        """Random vectors as long as x and as y, by turns; a row for each client."""
        shapes = [len((x, y)[i % 2]) for i in range(len(keys))]
        return {k: rng.normal(size=n if clients is None else (clients, n)) for k, n in zip(keys, shapes, strict=True)}

    def memory(size: int) -> Vector:
        rows = rng.uniform(0.01, 0.5, size=(2, size))
        rows[1] += 0.1
        return {"adam": rows[:1], "norm": rows[:1, :1]}.get(options["matrix"], rows)

    at_server = {key: np.tile(value, (N, 1)) for key, value in pair.items()}
    if "fgda" in name:
        server = {**pair, **like("w", "v")}
        server |= {"a": memory(len(x)), "b": memory(len(y))} if "ada" in name else {}
        if "single" not in name:
            return server, at_server
        near = like("x", "y", clients=N)
        return server, {**{k: at_server[k] + 0.2 * near[k] for k in near}, **like("w", "v", clients=N)}
    if name == "local_sgdam":
        return {**pair, **like("d_x", "d_y")}, {}
    if name == "local_sgdam, own momenta":
        return pair, like("d_x", "d_y", clients=N)
    if name in ("local_sgda_plus", "local_sgdam_plus"):
        return pair, {"snapshot": np.tile(x + 0.3 * rng.normal(size=len(x)), (N, 1))}
    if name == "cdma, ada":
        other = like("x_old", "y_old", "g_x", "g_y")
        return {**pair, **other}, {}
    if name in ("sagda", "codasca"):
        server, rows = {**pair, **like("c_x", "c_y")}, like("c_x", "c_y", clients=N)
    else:
        server, rows = pair, {}
    if name.startswith("codasca"):
        rows |= {"x_ref": np.tile(x + 0.3 * rng.normal(size=len(x)), (N, 1)), "total": like("x", clients=N)["x"]}
    if name == "coda":
        rows = {"x_0": np.tile(x + 0.3 * rng.normal(size=len(x)), (N, 1)), "total": like("x", clients=N)["x"]}
    return server, rows


def run_library(world: SaddleWorld, name: str, case: Case) -> tuple[dict[str, Vector], list[list[int]]]:
    """Rounds of the library: the server's vectors, the rows that clients keep (``x_k``...), and the cohorts."""
    method = METHODS[name]
    options = {**method.options, **case.options}
    drawing: dict[str, Any] = {"batch_size": case.batch_size, "sampling": case.sampling, "seed": SEED}
    setting = make_setting(world.problem, world.data, oracles=world.oracles, **drawing)
    last = case.first_round + (case.rounds or method.rounds)
    taking_part: dict[str, Any] = {"participation": case.participation, "weighting": case.weighting}
    clients = make_clients(setting, rounds=last, chunk=case.chunk, **taking_part)
    cohorts: list[list[int]] = []
    choose = clients.choose

    def choosing(*arguments: Any) -> Any:
        """Only CDMA asks for a second cohort; then a round has two entries."""
        out = choose(*arguments)
        cohorts.append(out.cohort.tolist())
        return out

    clients.choose = choosing  # type: ignore[method-assign]
    algorithm = method.build(**options)
    with torch.no_grad():
        state = started(algorithm, clients)
        if case.first_round:
            server, rows = given(world, name, options)
            assert set(server) == set(state)
            state = fs.State(**{key: torch.from_numpy(value) for key, value in server.items()})
            setting.state.keep(np.arange(N), {key: torch.from_numpy(value) for key, value in rows.items()})
            clients.counts.steps = case.first_round * steps_a_round(options)
        for r in range(case.first_round, last):
            clients.begin(r)
            cohorts.append(clients.cohort.tolist())
            state = algorithm.round(state, clients)
    out = {key: value.numpy() for key, value in state.items()}
    changed = setting.state.take_changes()
    for key in [key for key in changed if "." not in key]:
        rows_of = np.zeros((N, *changed[key].shape[1:]))
        rows_of[changed[f"{key}.clients"].numpy()] = changed[key].numpy()
        out[f"{key}_k"] = rows_of
    return out, cohorts


DRAWN: dict[tuple[Any, ...], tuple[Vector, ...]] = {}
"""Batches drawn before: most tests ask for the same ones."""


@dataclass(frozen=True)
class Paper:
    """What a reference is to do: the same rounds, with the same names for batches.

    Its clients are copies of the library's, each as many as it weighs: that makes a plain mean a weighted one.
    ``more`` are arguments that make the reference another one.
    """

    world: SaddleWorld
    name: str
    case: Case
    options: dict[str, Any]
    drawn_cohorts: list[list[int]]
    seed: int
    start_exchange: int = 0
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def copies(self) -> list[int]:
        """The library's number of each of the reference's clients."""
        weigh = self.case.weighting == "samples"
        return [k for k in range(N) for _ in range(SIZES[k] // COMMON if weigh else 1)]

    @property
    def cohorts(self) -> list[list[int]]:
        return [[c for c, k in enumerate(self.copies) if k in cohort] for cohort in self.drawn_cohorts]

    @property
    def clients(self) -> int:
        return len(self.copies)

    @property
    def project(self) -> dict[str, Any]:
        return {"project_y": self.world.project}

    def batch(self, k: int, r: int, exchange: int, t: int, times: int | None = 1) -> tuple[Vector, ...]:
        """A batch of the library's client k; ``times`` as large, or all the client's data."""
        size = None if self.case.batch_size is None or times is None else times * self.case.batch_size
        key = (id(self.world.data), k, self.seed, r, exchange, t, size, self.case.sampling)
        if key not in DRAWN:
            options: dict[str, Any] = {"batch_size": size, "sampling": self.case.sampling}
            DRAWN[key] = drawn(self.world.data, k, (self.seed, r, exchange, 0, 0), t, **options)
        return DRAWN[key]

    def gradient(
        self, c: int, r: int, exchange: int, t: int, x: Vector, y: Vector, times: int | None = 1, decays: bool = True
    ) -> Pair:
        k = self.copies[c]
        g_x, g_y = self.world.gradient(self.batch(k, r, exchange, t, times), k, x, y)
        decay = 0.0 if self.name.startswith("codasca") or not decays else self.options.get("weight_decay", 0.0)
        return g_x + decay * x, g_y

    def local(self, c: int, r: int, t: int, x: Vector, y: Vector) -> Pair:
        """The gradients in a local step of a round that has one exchange."""
        return self.gradient(c, r, 0, t, x, y)

    def first(self, times: int) -> dict[int, Pair]:
        """The clients' gradients before the first round."""
        where = -1, self.start_exchange, 0, self.world.x0, self.world.y0
        return {c: self.gradient(c, *where, times=times) for c in range(self.clients)}

    def at(self, key: str, r: int, iteration: int) -> float:
        """A rate at a time, from its formula."""
        value = self.options[key]
        if isinstance(value, fs.CubeRoot):
            return float(value.k / (value.n + iteration) ** (1 / 3))
        return float(value.value * value.factor**r if isinstance(value, fs.RoundDecay) else value)

    def rate(self, key: str) -> Callable[[int, int], float]:
        """A rate by round and local step."""
        return lambda r, t: self.at(key, r, r * steps_a_round(self.options) + t)

    def given(self) -> tuple[dict[str, Vector], dict[str, Vector]]:
        server, rows = given(self.world, self.name, self.options)
        return server, {key: value[self.copies] for key, value in rows.items()}

    def back(self, rows: dict[int, Vector] | Vector) -> Vector:
        """Rows of the reference's clients as rows of the library's."""
        return np.stack([rows[self.copies.index(k)] for k in range(N)])

    def prepared(self) -> Paper:
        """The paper after the problem asked the clients, in the first exchange of round -1."""
        if self.world.prepare is None:
            return self
        return replace(self, world=self.world.prepare(self.case.weighting), start_exchange=1)


def run_reference(
    world: SaddleWorld, name: str, case: Case, cohorts: list[list[int]], seed: int = SEED, **change: Any
) -> dict[str, Vector]:
    """The same rounds by the paper; ``change`` makes it a slightly different paper."""
    more = change.pop("more", {})
    options = {**METHODS[name].options, **case.options, **change}
    return METHODS[name].reference(Paper(world, name, case, options, cohorts, seed, more=more).prepared())


def dicts(rows: Vector) -> dict[int, Vector]:
    return dict(enumerate(rows))


# --- FGDA and AdaFGDA ------------------------------------------------------------------------------------------------


@contextmanager
def further_matrices() -> Iterator[None]:
    """The reference with two matrices more, from the words of ``matrices.py``: norm, and amsgrad with max below a."""
    refresh, diagonal = fgda_module._refresh, fgda_module._diagonal

    def refreshed(matrix: str, memory: Vector, bar: Vector, before: Vector, theta: float) -> Vector:
        if matrix == "norm":
            return theta * memory + (1 - theta) * np.sqrt(np.sum(bar**2))
        if matrix == "amsgrad":
            a = theta * memory[0] + (1 - theta) * bar**2
            return np.stack([a, np.maximum(memory[1], a)])
        return refresh(matrix, memory, bar, before, theta)

    def divisor(matrix: str, memory: Vector, rho: float) -> Vector:
        if matrix == "norm":
            return memory + rho
        return np.sqrt(memory[1]) + rho if matrix == "amsgrad" else diagonal(matrix, memory, rho)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fgda_module, "MATRICES", (*fgda_module.MATRICES, "norm", "amsgrad"))
        patch.setattr(fgda_module, "_refresh", refreshed)
        patch.setattr(fgda_module, "_diagonal", divisor)
        yield


def storm_reference(paper: Paper) -> dict[str, Vector]:
    """Both methods. The update after a synchronisation is in the second exchange, or the first act of the next round.

    The first estimates are the clients' mean where estimates are averaged.
    """
    options, world, first = paper.options, paper.world, paper.case.first_round
    q, single, adaptive = options["steps"], "single" in paper.name, "ada" in paper.name
    starts = paper.first(options.get("first_batches", 0) or q)
    means = tuple(np.mean([pair[i] for pair in starts.values()], axis=0) for i in (0, 1))

    def gradient(c: int, r: int, j: int, x: Vector, y: Vector) -> Pair:
        if j < 0:
            return starts[c] if single else (means[0], means[1])
        if single:
            return paper.gradient(c, r, 0, j + 1, x, y) if j < q - 1 else paper.gradient(c, r + 1, 0, 0, x, y)
        return paper.gradient(c, r, 0, j, x, y) if j < q - 1 else paper.gradient(c, r, 1, 0, x, y)

    def weight(key: str) -> Callable[[int, int], float]:
        """The weight of the update (r, j): of iteration (r, j), with the round in which the update is made."""
        theorem = options.get("weights") == "theorem"

        def value(r: int, j: int) -> float:
            when = r + (single and j == q - 1), r * q + j
            return min(1.0, paper.at(key, *when) * (paper.at("eta", *when) ** 2 if theorem else 1.0))

        return value

    matrix = options["matrix"] if adaptive else "identity"
    arguments: dict[str, Any] = {"alpha": weight("alpha"), "beta": weight("beta"), "eta": paper.rate("eta")}
    arguments |= {"gamma": options["gamma"], "lam": options["lam"], "clients": paper.clients, **paper.project}
    if single:
        arguments["never_averaged"] = True
    everyone = [list(range(paper.clients))] * len(paper.cohorts)
    if first:
        server, rows = paper.given()
        own = rows if single else {key: np.tile(server[key], (paper.clients, 1)) for key in "xywv"}
        arguments |= {"w": dicts(own["w"]), "v": dicts(own["v"]), "x_k": dicts(own["x"]), "y_k": dicts(own["y"])}
        arguments["first_round"] = first
    if not adaptive and not single:
        out = fgda(world.x0, world.y0, everyone, gradient, q, **arguments, **paper.more)
    else:
        if not first:
            shape = {"norm": lambda z: 1, "amsgrad": lambda z: (2, len(z))}.get(matrix, len)
            arguments |= {"a": np.zeros(shape(world.x0)), "b": np.zeros(shape(world.y0))}
        elif adaptive:
            for key, bar in (("a", "w_bar"), ("b", "v_bar")):
                arguments[key] = server[key] if matrix == "amsgrad" else server[key][0]
                arguments |= {bar: server[key][1]} if matrix == "belief" else {}
        if adaptive:
            theta = paper.rate("theta")
            arguments["rho_m"] = lambda r, j: min(1.0, theta(r, max(0, j)))
            arguments |= {"rho": options["rho"], "first_matrix": options["first_matrix"]}
        with further_matrices():
            out = adafgda(
                world.x0, world.y0, everyone, gradient, q, matrix=matrix, defer=single, **{**arguments, **paper.more}
            )
    result = {"x": out["x"], "y": out["y"], "x_k": paper.back(out["x_k"]), "y_k": paper.back(out["y_k"])}
    if single:
        result |= {"w_k": paper.back(out["w"]), "v_k": paper.back(out["v"]), "w": out["w_bar"], "v": out["v_bar"]}
    else:
        result |= {"w": out["w"][0], "v": out["v"][0]}
    if adaptive:
        for key, bar in (("a", "w_bar"), ("b", "v_bar")):
            rows_of = [out[key], out[bar]] if matrix == "belief" else [out[key]]
            result[key] = np.stack(rows_of) if matrix != "amsgrad" else out[key]
    return result


# --- Local-SGDA and its relatives ------------------------------------------------------------------------------------


def steps_of(paper: Paper, c: int) -> int:
    steps, size = paper.options["steps"], paper.case.batch_size
    if isinstance(steps, int):
        return steps
    return math.ceil(steps.epochs * (1 if size is None else math.ceil(SIZES[paper.copies[c]] / size)))


def sgda_reference(paper: Paper) -> dict[str, Vector]:
    """A call for each client and round, since clients may take different numbers of steps."""
    x, y = paper.world.x0, paper.world.y0
    steps = paper.options["steps"]
    before = paper.case.first_round * steps if isinstance(steps, int) else 0
    for r, cohort in enumerate(paper.cohorts, paper.case.first_round):
        rates = [lambda r, t, key=key, n=before: paper.at(key, r, n + t) for key in ("lr", "dual_lr")]
        rules: dict[str, Any] = {"eta_x": rates[0], "eta_y": rates[1], "first_round": r, **paper.project}
        found = [local_sgda(x, y, [[c]], paper.local, steps_of(paper, c), **rules) for c in cohort]
        if isinstance(steps, int):
            x, y = local_sgda(x, y, [cohort], paper.local, steps, **rules).values()
            np.testing.assert_allclose(np.mean([end["x"] for end in found], axis=0), x, atol=1e-12)
        else:
            x, y = (np.mean([end[key] for end in found], axis=0) for key in ("x", "y"))
        before += max(steps_of(paper, c) for c in cohort)
    return {"x": x, "y": y}


def weight_of_momentum(paper: Paper) -> Callable[[int, int], float]:
    """The beta that, times alpha, is at most 1."""
    return lambda r, t: min(paper.options["beta"], 1 / paper.rate("alpha")(r, t))


def plus_reference(paper: Paper) -> dict[str, Vector]:
    """The snapshot that clients keep is the one they used last."""
    options, first = paper.options, paper.case.first_round
    rules: dict[str, Any] = {"eta_x": paper.rate("lr"), "eta_y": paper.rate("dual_lr"), "first_round": first}
    rules |= {"snapshot_every": options.get("snapshot_every", 0) or options["steps"] ** 2, **paper.project}
    momentum = paper.name == "local_sgdam_plus"
    if momentum:
        rules |= {"alpha": paper.rate("alpha"), "beta": weight_of_momentum(paper)}
    method = local_sgdam_plus if momentum else local_sgda_plus
    if first and (first * options["steps"]) % rules["snapshot_every"]:
        rules["snapshot"] = paper.given()[1]["snapshot"][0]
    world, arguments = paper.world, (paper.local, options["steps"])
    out = method(world.x0, world.y0, paper.cohorts, *arguments, **{**rules, **paper.more})
    before = method(world.x0, world.y0, paper.cohorts[:-1], *arguments, **{**rules, **paper.more})
    return {"x": out["x"], "y": out["y"], "snapshot_k": np.tile(before["snapshot"], (N, 1))}


def momentum_reference(paper: Paper) -> dict[str, Vector]:
    """The momenta start as gradients at the first point, of all clients, whoever takes part."""
    world, average = paper.world, paper.name == "local_sgdam"
    if paper.case.first_round:
        server, rows = paper.given()
        start: Any = (server["d_x"], server["d_y"]) if average else (dicts(rows["d_x"]), dicts(rows["d_y"]))
    else:
        starts = paper.first(1)
        d_x, d_y = ({c: pair[i] for c, pair in starts.items()} for i in (0, 1))
        start = (np.mean(list(d_x.values()), axis=0), np.mean(list(d_y.values()), axis=0)) if average else (d_x, d_y)
    rules: dict[str, Any] = {"eta_x": paper.rate("lr"), "eta_y": paper.rate("dual_lr"), "alpha": paper.rate("alpha")}
    rules |= {"beta": weight_of_momentum(paper), "average_momentum": average, "d_x": start[0], "d_y": start[1]}
    rules |= {"first_round": paper.case.first_round, **paper.project, **paper.more}
    out = local_sgdam(world.x0, world.y0, paper.cohorts, paper.local, paper.options["steps"], **rules)
    if average:
        return out
    return {"x": out["x"], "y": out["y"], "d_x_k": paper.back(out["d_x"]), "d_y_k": paper.back(out["d_y"])}


# --- methods with corrections ----------------------------------------------------------------------------------------


def sagda_reference(paper: Paper) -> dict[str, Vector]:
    options, world, first = paper.options, paper.world, paper.case.first_round
    rules: dict[str, Any] = {"eta_x": paper.rate("lr"), "eta_y": paper.rate("dual_lr"), "first_round": first}
    for key, option in (("eta_xg", "server_lr"), ("eta_yg", "server_dual_lr")):
        rules[key] = lambda r, option=option: paper.rate(option)(r, 0)
    control = options.get("control", True)
    rules |= {"control": control, "clients": paper.clients, **paper.project}
    if first and control:
        server, rows = paper.given()
        rules |= {"c_x": server["c_x"], "c_y": server["c_y"]}
        rules |= {"c_kx": dicts(rows["c_x"]), "c_ky": dicts(rows["c_y"])}
    out = sagda(world.x0, world.y0, paper.cohorts, paper.local, options["steps"], **{**rules, **paper.more})
    if not control:
        return {"x": out["x"], "y": out["y"]}
    kept = {"c_x_k": paper.back(out["c_kx"]), "c_y_k": paper.back(out["c_ky"])}
    return {**{key: out[key] for key in ("x", "y", "c_x", "c_y")}, **kept}


def cdma_reference(paper: Paper) -> dict[str, Vector]:
    """The first cohort has all its data, the second draws in the second exchange; they come by turns."""
    options, world, first = paper.options, paper.world, paper.case.first_round
    collect, update = paper.cohorts[::2], paper.cohorts[1::2]
    ada = paper.name == "cdma, ada"

    def rate(key: str) -> Callable[[int, int], float]:
        return lambda r, t: paper.rate(key)(r, t) / ((r + 1) ** options["exponent"] if ada else 1.0)

    def gradient(c: int, r: int, t: int, x: Vector, y: Vector) -> Pair:
        return paper.gradient(c, r, 1, t, x, y)

    def everything(c: int, x: Vector, y: Vector) -> Pair:
        return paper.gradient(c, 0, 0, 0, x, y, times=None)

    rules: dict[str, Any] = {"eta_x": rate("lr"), "eta_y": rate("dual_lr"), "first_round": first, **paper.project}
    rules |= {"update_cohorts": update, **paper.more}
    point = world.x0, world.y0, collect, gradient, everything, options["steps"]
    if not ada:
        out = cdma(*point, **rules)
        return {"x": out["x"], "y": out["y"]}
    rules["a"] = lambda r: min(options["weight"] / (r + 1) ** (2 * options["exponent"]), 1.0)
    if first:
        server = paper.given()[0]
        rules |= {"x_prev": server["x_old"], "y_prev": server["y_old"], "g_x": server["g_x"], "g_y": server["g_y"]}
    out = cdma_ada(*point, **rules)
    return {key: out[key.replace("old", "prev")] for key in ("x", "y", "x_old", "y_old", "g_x", "g_y")}


def fednest_reference(paper: Paper) -> dict[str, Vector]:
    """The gradients of stream s are in exchange 2s, its local steps in exchange 2s + 1; an epoch has one rate."""
    world, options = paper.world, paper.options

    def gradient(c: int, r: int, t: int, x: Vector, y: Vector, stream: int) -> Pair:
        return paper.gradient(c, r, 2 * stream + (t >= 0), max(t, 0), x, y)

    rules: dict[str, Any] = {key: (lambda r, t, key=key: paper.rate(key)(r, 0)) for key in ("alpha", "beta")}
    rules |= {"inner_rounds": options["inner_rounds"], "first_round": paper.case.first_round, **paper.project}
    out = fednest_minimax(world.x0, world.y0, paper.cohorts, gradient, options["steps"], **rules, **paper.more)
    return {"x": out["x"], "y": out["y"]}


# --- methods of stages -----------------------------------------------------------------------------------------------


def stage_of(options: dict[str, Any], round: int) -> tuple[int, int]:
    """The stage of CoDA in which a round is, and the steps done in it before."""
    stage, done = 0, 0
    for _ in range(round):
        length = round_half_up(options["stage_steps"] * options["factor"] ** stage)
        done = min(length, done + options["steps"])
        stage, done = (stage + 1, 0) if done == length else (stage, done)
    return stage, done


def round_half_up(number: float) -> int:
    return math.floor(number + 0.5)


def coda_reference(paper: Paper) -> dict[str, Vector]:
    """The best y is found in the last exchange of the stage's last round: the projected mean of the clients' own."""
    options, world, first = paper.options, paper.world, paper.case.first_round
    average = options.get("average", True)
    ends = [r for r in range(50) if stage_of(options, r + 1)[1] == 0]

    def estimate(c: int, s: int, v: Vector) -> Vector:
        assert world.best is not None
        where = ends[s], 2 if average else 1, 0
        batches = [paper.batch(k, *where, times=options["estimate_batches"]) for k in paper.copies]
        mean = np.mean([world.best(batch, v) for batch in batches], axis=0)
        return mean if world.project is None else world.project(mean)

    rules: dict[str, Any] = {"clients": paper.clients, "eta0": options["lr"], "t0": options["stage_steps"]}
    rules |= {"gamma": options["gamma"], "factor": options["factor"], "average_iterates": average, "first_round": first}
    rules |= {"project_alpha": world.project, "estimate": None if world.best is None else estimate}
    if first:
        stage, done = stage_of(options, first)
        rules |= {"stage": stage, "done": done}
        if done:
            rows = paper.given()[1]
            rules |= {"v_0": rows["x_0"][0], "total": dicts(rows["total"])}
    everyone = [list(range(paper.clients))] * len(paper.cohorts)
    out = coda(world.x0, world.y0, everyone, paper.local, options["steps"], **{**rules, **paper.more})
    result = {"x": out["v"], "y": out["alpha"]}
    if out["done"]:
        result |= {"x_0_k": np.tile(out["v_0"], (N, 1)), "total_k": paper.back(out["total"])}
    return result


class Into:
    """A bound of an interval that is the projection onto a set instead: what numpy.maximum makes of it."""

    def __init__(self, project: Callable[[Vector], Vector]) -> None:
        self.project = project

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Vector:
        assert ufunc is np.maximum
        return self.project(inputs[0])


def codasca_reference(paper: Paper) -> dict[str, Vector]:
    """A call for each round, because the server's rate may change, and the server projects its y."""
    options, world, first = paper.options, paper.world, paper.case.first_round
    control = options.get("control", True)
    rules: dict[str, Any] = {"clients": paper.clients, "eta": paper.rate("lr"), "gamma": options["gamma"]}
    rules |= {"weight_decay": options["weight_decay"], "clip": options["clip"] or None, "control": control}
    rules |= {"decay_every": options["stage_rounds"] * options["steps"], "factor": options["factor"]}
    rules["alpha_range"] = None if world.project is None else (Into(world.project), np.inf)
    state: dict[str, Any] = {"v": world.x0, "alpha": world.y0}
    if first:
        server, rows = paper.given()
        state |= {"v_ref": rows["x_ref"][0], "total": rows["total"].mean(0)}
        if control:
            state |= {"c_v": server["c_x"], "c_alpha": server["c_y"]}
            state |= {"c_kv": dicts(rows["c_x"]), "c_kalpha": dicts(rows["c_y"])}
    everyone = list(range(paper.clients))
    for r in range(first, first + len(paper.cohorts)):
        rules |= {"eta_g": paper.rate("server_lr")(r, 0), "first_round": r}
        point = state.pop("v"), state.pop("alpha")
        arguments = {**rules, **state, **paper.more}
        state = codasca(*point, [everyone], paper.local, options["steps"], **arguments)
        state["alpha"] = state["alpha"] if world.project is None else world.project(state["alpha"])
    result = {"x": state["v"], "y": state["alpha"], "x_ref_k": np.tile(state["v_ref"], (N, 1))}
    if control:
        result |= {"c_x": state["c_v"], "c_y": state["c_alpha"]}
        result |= {"c_x_k": paper.back(state["c_kv"]), "c_y_k": paper.back(state["c_kalpha"])}
    return result


STORM = {"gamma": 0.15, "lam": 0.25, "eta": 0.8, "steps": 3, "alpha": 0.6, "beta": 0.7}
ADAPTIVE = {"theta": 0.8, "rho": 0.5, "matrix": "adam", "first_matrix": "average"}
SINGLE = {"synchronisation": "single"}
LOCAL = {"lr": 0.15, "dual_lr": 0.25, "steps": 3}
MOMENTUM = {**LOCAL, "alpha": 0.8, "beta": 0.7}
SERVER = {"server_lr": 0.9, "server_dual_lr": 1.2}
STAGES = {"lr": 0.2, "steps": 3, "stage_steps": 4, "factor": 2.0, "gamma": 2.0, "estimate_batches": 2}
SCRIPT = {"lr": 0.2, "steps": 3, "stage_rounds": 2, "factor": 2.0, "gamma": 2.0, "clip": 0.3, "weight_decay": 0.05}
METHODS = {
    "fgda": Method(fs.FGDA, storm_reference, STORM, ("w_k", "v_k")),
    "fgda, single": Method(fs.FGDA, storm_reference, {**STORM, **SINGLE}, rounds=3),
    "adafgda": Method(fs.AdaFGDA, storm_reference, {**STORM, **ADAPTIVE}, ("w_k", "v_k")),
    "adafgda, single": Method(fs.AdaFGDA, storm_reference, {**STORM, **ADAPTIVE, **SINGLE}, rounds=3),
    "local_sgda": Method(fs.LocalSGDA, sgda_reference, LOCAL),
    "local_sgda_plus": Method(fs.LocalSGDAPlus, plus_reference, {**LOCAL, "snapshot_every": 6}, rounds=3),
    "local_sgdam": Method(fs.LocalSGDAM, momentum_reference, MOMENTUM),
    "local_sgdam, own momenta": Method(fs.LocalSGDAM, momentum_reference, {**MOMENTUM, "average_momentum": False}),
    "local_sgdam_plus": Method(fs.LocalSGDAMPlus, plus_reference, {**MOMENTUM, "snapshot_every": 6}, rounds=3),
    "sagda": Method(fs.SAGDA, sagda_reference, {**LOCAL, **SERVER}),
    "fsgda": Method(fs.SAGDA, sagda_reference, {**LOCAL, **SERVER, "control": False}),
    "cdma": Method(fs.CDMA, cdma_reference, LOCAL),
    "cdma, ada": Method(fs.CDMA, cdma_reference, {**LOCAL, "ada": True, "weight": 0.7, "exponent": 0.3}, rounds=3),
    "fednest": Method(fs.FedNest, fednest_reference, {"alpha": 0.3, "beta": 0.6, "inner_rounds": 2, "steps": 3}),
    "coda": Method(fs.CoDA, coda_reference, STAGES, ("x_0_k", "total_k"), rounds=4),
    "codasca": Method(fs.CODASCA, codasca_reference, {**SCRIPT, "server_lr": 0.9}, ("total_k",), rounds=3),
    "codasca, no control": Method(
        fs.CODASCA, codasca_reference, {**SCRIPT, "server_lr": 0.9, "control": False}, ("total_k",), rounds=3
    ),
}


# --- which method meets which world in which case --------------------------------------------------------------------


FULL = {
    "one at a time": Case(chunk=1),
    "two at a time": Case(chunk=2),
    "full batches": Case(batch_size=None),
    "epochs": Case(sampling="epochs", batch_size=4),
    "weighted": Case(weighting="samples", chunk=2),
    "given state": Case(first_round=3),
}
PARTIAL = {
    "partial": Case(participation=3),
    "partial, weighted, epochs": Case(participation=2, weighting="samples", sampling="epochs", chunk=1),
}
PASSES = {
    "passes": Case(options={"steps": fs.Epochs(1.5)}, sampling="epochs", batch_size=4),
    "passes, partial, weighted": Case(options={"steps": fs.Epochs(0.7)}, participation=4, weighting="samples", chunk=2),
}
ONE_STEP = {"one step": Case(options={"steps": 1})}
DECAY = {"weight decay": Case(options={"weight_decay": 0.2}, first_round=3)}
SCHEDULES = {"cube root": fs.CubeRoot(0.6, 2.0), "round decay": fs.RoundDecay(0.5, 0.6)}
THEOREM = {"weights": "theorem", "eta": fs.CubeRoot(1.2, 2.0), "alpha": 1.3, "beta": 0.8}
STORM_CASES = {
    **ONE_STEP,
    "four steps": Case(options={"steps": 4}),
    "theorem": Case(options=THEOREM),
    "theorem, round decay": Case(options={**THEOREM, "eta": fs.RoundDecay(0.9, 0.7)}),
    "theorem, given state": Case(options=THEOREM, first_round=2),
    "theorem, scheduled": Case(options={**THEOREM, "alpha": fs.RoundDecay(1.5, 0.5), "beta": fs.CubeRoot(2.0, 3.0)}),
    "first batches": Case(options={"first_batches": 5}),
    "first batches, epochs": Case(options={"first_batches": 2}, sampling="epochs"),
    "weights 0": Case(options={"alpha": 0.0, "beta": 0.0}),
    "weights 1": Case(options={"alpha": 1.0, "beta": 1.0}),
    "weights above 1": Case(options={"alpha": fs.CubeRoot(2.0, 2.0), "beta": 3.0}),
}
SNAPSHOTS = {
    "every round": Case(options={"snapshot_every": 3}),
    "steps squared": Case(options={"snapshot_every": 0}, rounds=4),
    "every third round, given state": Case(options={"snapshot_every": 9}, first_round=5),
    "given state at a snapshot": Case(options={"snapshot_every": 9}, first_round=3),
}
MOMENTA = {"beta alpha above 1": Case(options={"alpha": fs.CubeRoot(2.0, 2.0), "beta": 0.9})}
CASES: dict[str, dict[str, Case]] = {
    "fgda": STORM_CASES,
    "fgda, single": STORM_CASES,
    "adafgda": STORM_CASES,
    "adafgda, single": STORM_CASES,
    "local_sgda": {**PARTIAL, **PASSES, **ONE_STEP, **DECAY},
    "local_sgda_plus": {"one step": Case(options={"steps": 1, "snapshot_every": 2}), **DECAY, **SNAPSHOTS},
    "local_sgdam": {**PARTIAL, **ONE_STEP, **DECAY, **MOMENTA},
    "local_sgdam, own momenta": {**PARTIAL, **ONE_STEP, **DECAY, **MOMENTA},
    "local_sgdam_plus": {"two steps": Case(options={"steps": 2}), **DECAY, **MOMENTA, **SNAPSHOTS},
    "sagda": {**PARTIAL, "partial, given state": Case(participation=3, first_round=3), **ONE_STEP, **DECAY},
    "fsgda": {**PARTIAL, **ONE_STEP, **DECAY},
    "cdma": {**PARTIAL, **ONE_STEP, **DECAY},
    "cdma, ada": {
        **PARTIAL,
        **ONE_STEP,
        **DECAY,
        "partial, given state": Case(participation=2, first_round=3),
        "no decay": Case(options={"exponent": 0.0}),
        "weight above 1": Case(options={"weight": 1.4, "exponent": 0.4}),
        "exponent 1": Case(options={"exponent": 1.0}),
    },
    "fednest": {
        **ONE_STEP,
        "one inner round": Case(options={"inner_rounds": 1}),
        "three inner rounds": Case(options={"inner_rounds": 3}),
    },
    "coda": {
        **ONE_STEP,
        "first stage": Case(rounds=1),
        "end of the first stage": Case(rounds=2),
        "end of the second stage": Case(rounds=5),
        "three stages": Case(rounds=7),
        "whole rounds": Case(options={"stage_steps": 3}, rounds=4),
        "stages shorter than a round": Case(options={"stage_steps": 1}, rounds=4),
        "stages that do not grow": Case(options={"factor": 1.0}),
        "another factor": Case(options={"factor": 3.0}),
        "last iterates": Case(options={"average": False}, rounds=5),
        "given state, new stage": Case(first_round=2),
    },
    "codasca": {
        **ONE_STEP,
        "stages of one round": Case(options={"stage_rounds": 1}),
        "three stages": Case(rounds=5),
        "in a stage": Case(options={"stage_rounds": 3}),
        "end of the first stage": Case(rounds=2),
        "given state, new stage": Case(first_round=2),
        "not clipped": Case(options={"clip": 0.0}),
        "clip inactive": Case(options={"clip": 50.0}),
        "server rate above 1": Case(options={"server_lr": 1.5}),
    },
    "codasca, no control": {"not clipped": Case(options={"clip": 0.0}), "three stages": Case(rounds=5)},
}
RATES = {
    "fgda": ["eta", "alpha", "beta"],
    "adafgda": ["eta", "alpha", "beta", "theta"],
    "local_sgda": ["lr", "dual_lr"],
    "local_sgda_plus": ["lr", "dual_lr"],
    "local_sgdam": ["lr", "dual_lr", "alpha"],
    "local_sgdam_plus": ["lr", "dual_lr", "alpha"],
    "sagda": ["lr", "dual_lr", "server_lr", "server_dual_lr"],
    "cdma": ["lr", "dual_lr"],
    "fednest": ["alpha", "beta"],
    "coda": [],
    "codasca": ["lr", "server_lr"],
}
PROJECTED = ("ball", "box", "simplex")


def label_of(name: str) -> str:
    return METHODS[name].build.name  # type: ignore[attr-defined, no-any-return]


def combinations() -> list[Any]:
    """Every method in each world, and in one world in every case."""
    out = []

    def add(name: str, world: str, label: str, case: Case) -> None:
        out.append(pytest.param(world, name, case, id="-".join([name, world, label])))

    for name in METHODS:
        for world in SADDLES:
            add(name, world, "minibatches", Case())
        home = "auc" if name == "coda" else "free"
        for label, case in {**FULL, **CASES[name]}.items():
            add(name, home, label, case)
        for rate in RATES[label_of(name)]:
            for kind, schedule in SCHEDULES.items():
                first = {"first_matrix": "accumulator"} if rate == "theta" else {}
                add(name, "free", f"{rate}, {kind}", Case(options={rate: schedule, **first}, rounds=3))
        add(name, "ball", "given state", Case(first_round=3))
    add("coda", "free", "three stages", Case(rounds=7))
    add("coda", "auc, margin, active, scaled", "three stages", Case(rounds=7))
    add("coda", "auc, margin, active, scaled", "last iterates", Case(options={"average": False}, rounds=5))
    add("coda", "auc, prepared, scaled", "weighted", Case(weighting="samples", rounds=5))
    add("coda", "auc, margin", "full batches", Case(batch_size=None, rounds=5))
    add("codasca", "auc, margin, active, scaled", "three stages", Case(rounds=5))
    for name in ("codasca", "sagda"):
        for world in PROJECTED:
            rates = {"server_lr": 1.6} | ({"server_dual_lr": 1.6} if name == "sagda" else {})
            add(name, world, "server rates above 1", Case(options=rates))
    for name in ("fgda", "local_sgdam", "sagda"):
        for world in ("auc, prepared, scaled", "fair, classes"):
            add(name, world, "weighted", Case(weighting="samples"))
    for name in ("adafgda", "adafgda, single"):
        for matrix in ("adam", "norm", "belief", "amsgrad"):
            for first in ("average", "accumulator", "identity"):
                add(name, "free", f"{matrix}, {first}", Case(options={"matrix": matrix, "first_matrix": first}))
            add(name, "free", f"{matrix}, given state", Case(options={"matrix": matrix}, first_round=2))
            add(name, "ball", f"{matrix}, one step", Case(options={"matrix": matrix, "steps": 1}))
    return out


def distance(ours: dict[str, Vector], theirs: dict[str, Vector], unseen: Sequence[str] = ()) -> float:
    assert set(theirs) <= set(ours)
    assert set(ours) - set(theirs) <= set(unseen)
    for key in theirs:
        assert ours[key].shape == theirs[key].shape, key
    return max(float(np.abs(ours[key] - theirs[key]).max()) for key in theirs)


OURS: dict[str, tuple[dict[str, Vector], list[list[int]]]] = {}


def ours_of(world: str, name: str, case: Case) -> tuple[dict[str, Vector], list[list[int]]]:
    """What the library does; the tests below ask for much of it again."""
    key = f"{world} {name} {case}"
    if key not in OURS:
        OURS[key] = run_library(SADDLES[world](), name, case)
    return OURS[key]


@pytest.mark.parametrize(("world", "name", "case"), combinations())
def test_rounds_agree_with_the_reference(world: str, name: str, case: Case) -> None:
    w = SADDLES[world]()
    ours, cohorts = ours_of(world, name, case)
    theirs = run_reference(w, name, case, cohorts)
    assert distance(ours, theirs, METHODS[name].unseen) < TOLERANCE
    for key, at in (("x", w.x0), ("y", w.y0)):
        assert 1e-3 < np.abs(theirs[key] - at).max() < 20, f"the rounds hardly moved {key}, or far away"


def test_the_first_matrices_have_the_first_theta() -> None:
    case = Case(rounds=1, options={"theta": SCHEDULES["round decay"]})
    ours, cohorts = ours_of("free", "adafgda", case)
    theirs = run_reference(SADDLES["free"](), "adafgda", case, cohorts)
    assert distance(ours, theirs, METHODS["adafgda"].unseen) < TOLERANCE


@pytest.mark.parametrize("name", ["local_sgdam", "local_sgdam, own momenta"])
def test_the_first_momentum_has_the_weight_decay_in_it(name: str) -> None:
    case = Case(options={"weight_decay": 0.2})
    ours, cohorts = ours_of("free", name, case)
    assert distance(ours, run_reference(SADDLES["free"](), name, case, cohorts)) < TOLERANCE


def test_every_rate_is_scheduled_here() -> None:
    for name in METHODS:
        options = options_of(ALGORITHMS[label_of(name)]).values()
        assert RATES[label_of(name)] == [o.name for o in options if o.annotation == Rate], name
    assert set(RATES) == {n for n, a in ALGORITHMS.items() if a.dual and not a.mixture}


@pytest.mark.parametrize("name", SADDLES)
def test_worlds_are_what_they_claim(name: str) -> None:
    """Gradients, projections and the best y in NumPy are those of the library, at several points."""
    world, rng = SADDLES[name](), np.random.default_rng(6)
    problem = world.problem
    if problem.asks is not None:
        assert world.prepare is not None
        for weighting in ("samples", "uniform"):
            clients = make_clients(make_setting(problem, world.data, seed=SEED), weighting=weighting)
            clients.begin(-1)
            problem, world = problem.given(problem, problem.asks(problem, clients)), world.prepare(weighting)  # type: ignore[misc]
            compare(problem, world, rng)
            problem, world = SADDLES[name]().problem, SADDLES[name]()
        return
    compare(problem, world, rng)


def compare(problem: fs.Problem, world: SaddleWorld, rng: np.random.Generator) -> None:
    for k in range(N):
        x, y = world.x0 + rng.normal(size=len(world.x0)), world.y0 + rng.normal(size=len(world.y0))
        arrays = drawn(world.data, k, (SEED, 5, 0, 0, 0), 1, batch_size=4)
        batch: tuple[torch.Tensor, ...] = tuple(map(torch.from_numpy, arrays))
        numbered = (*batch, torch.tensor(k)) if problem.numbered else batch
        point = torch.from_numpy(x), torch.from_numpy(y)
        for found, expected in zip(
            torch.func.grad(problem.outer, argnums=(0, 1))(*point, numbered),
            world.gradient(arrays, k, x, y),
            strict=True,
        ):
            np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)
        assert (problem.best_y is None) == (world.best is None)
        if problem.best_y is not None and world.best is not None:
            np.testing.assert_allclose(problem.best_y(point[0], batch).numpy(), world.best(arrays, x), atol=1e-12)
        assert (problem.project_y is None) == (world.project is None)
        if world.project is not None:
            np.testing.assert_allclose(problem.projected(point[1]).numpy(), world.project(y), atol=1e-12)


# --- the comparison has power: a slightly wrong reference is told apart ----------------------------------------------


BOUND = (*PROJECTED, "auc, margin, active, scaled")


def wrong() -> list[Any]:
    """Method, its world, the case, and what the reference has otherwise."""
    out = []

    def add(name: str, label: str, change: dict[str, Any], case: Case | None = None, world: str = "") -> None:
        home = world or ("auc" if name == "coda" else "free")
        out.append(pytest.param(name, home, case or Case(), change, id=f"{name}, {label}"))

    def other(name: str, label: str, case: Case | None = None, world: str = "", **more: Any) -> None:
        add(name, label, {"more": more}, case, world)

    for name, method in METHODS.items():
        for key, value in method.options.items():
            if isinstance(value, float):
                # The weight of CDMA-ADA cancels where everyone takes part.
                add(name, key, {key: value * 1.01}, Case(participation=3) if key == "weight" else None)
        for key in ("inner_rounds", "first_batches", "stage_steps", "stage_rounds", "estimate_batches"):
            if key in method.options:
                add(name, key, {key: method.options[key] + 1})
        if "snapshot_every" in method.options:
            add(name, "steps", {"steps": 4, "snapshot_every": 8})
            add(name, "snapshot_every", {"snapshot_every": 3})
        else:
            add(name, "steps", {"steps": 4})
        add(name, "another seed", {"seed": SEED + 1})
        add(name, "other batches", {"sampling": "stratified"})
        add(name, "weights", {"weighting": "samples"})
        for world in BOUND:
            add(name, f"no projection, {world}", {"project": None}, world=world)
    for name in ("fgda", "fgda, single", "adafgda", "adafgda, single"):
        add(name, "first batches", {"first_batches": 4})
        other(name, "hat", world="ball", projection="hat")
        other(name, "estimates from the means", two_phase=False, never_averaged=False)
        add(name, "no theorem", {"weights": "constant"}, Case(options=THEOREM))
        for key in ("alpha", "beta"):
            add(name, f"{key}, theorem", {key: 0.99 * THEOREM[key]}, Case(options={**THEOREM, "alpha": 0.9}))
        add(name, "eta, theorem", {"eta": fs.CubeRoot(1.2, 2.1)}, Case(options=THEOREM))
        if "single" not in name:
            other(name, "never averaged", never_averaged=True)
    for name in ("adafgda", "adafgda, single"):
        for first in ("accumulator", "identity"):
            add(name, f"first matrix {first}", {"first_matrix": first})
        for matrix in ("adam", "norm", "belief", "amsgrad"):
            case = Case(first_round=2, options={"matrix": matrix})
            for key in ("rho", "theta"):
                add(name, f"{key}, {matrix}", {key: ADAPTIVE[key] * 1.01}, case)
    for name in ("local_sgdam", "local_sgdam, own momenta", "local_sgdam_plus"):
        other(name, "hat", world="ball", projection="hat")
    other("sagda", "variates of the cohort", Case(participation=3), server="cohort")
    other("sagda", "no control", control=False)
    other("cdma", "one cohort", Case(participation=3), update_cohorts=None)
    other("cdma, ada", "one cohort", Case(participation=3), update_cohorts=None)
    other("fednest", "light", light=True)
    other("coda", "last iterates", average_iterates=False)
    other("coda", "no estimate", estimate=None)
    other("codasca", "dual at the new point", dual="new")
    other("codasca", "centre from rounds", reference="rounds")
    other("codasca", "no control", control=False)
    other("codasca", "no clip", clip=None)
    for name in METHODS:
        if "weight_decay" not in METHODS[name].options and "weight decay" in CASES[name]:
            add(name, "weight decay", {"weight_decay": 0.202}, DECAY["weight decay"])
    return out


@pytest.mark.parametrize(("name", "world", "case", "change"), wrong())
def test_a_wrong_reference_breaks_the_agreement(name: str, world: str, case: Case, change: dict[str, Any]) -> None:
    ours, cohorts = ours_of(world, name, case)
    of_case = {key: change[key] for key in ("sampling", "weighting") if key in change}
    of_world = {"project": None} if "project" in change else {}
    of_paper = {key: value for key, value in change.items() if key not in {**of_case, **of_world}}
    theirs = run_reference(replace(SADDLES[world](), **of_world), name, replace(case, **of_case), cohorts, **of_paper)
    assert max(np.abs(ours[key] - theirs[key]).max() for key in ("x", "y")) > 1e4 * TOLERANCE


@pytest.mark.parametrize("world", [*BOUND, "fair, classes", "fair, clients"])
def test_duals_stay_in_their_sets(world: str) -> None:
    project = SADDLES[world]().project
    assert project is not None
    for name in METHODS:
        y = ours_of(world, name, Case())[0]["y"]
        np.testing.assert_allclose(project(y), y, atol=1e-12)
