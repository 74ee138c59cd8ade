"""Equations of the methods for saddles: min_x max_y without levels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import fedstrata as fs
from algorithms.equations import PARTIAL, PASSES, USUAL, Case, Method, Options, Paper, Row, Rows, Vectors, storm_weight
from reference import fgda as fgda_module
from reference.cdma import cdma, cdma_ada
from reference.coda import coda
from reference.codasca import codasca
from reference.fednest_minimax import fednest_minimax
from reference.fgda import adafgda, fgda
from reference.local_sgda import local_sgda, local_sgda_plus, local_sgdam, local_sgdam_plus
from reference.sagda import sagda
from saddle_worlds import SADDLES, Pair
from worlds import N, Vector, World

Generator = np.random.Generator


def gradients(
    paper: Paper, c: int, r: int, t: int, x: Vector, y: Vector, exchange: int = 0, times: int | None = 1
) -> Pair:
    """The gradients of the reference's client c in x and y, on a batch; an L2 penalty on x is in the first."""
    k = paper.copies[c]
    g_x, g_y = paper.world.gradient(paper.batch(k, r, t, exchange, times=times), k, x, y)
    return g_x + paper.options.get("weight_decay", 0.0) * x, g_y


def first_gradients(paper: Paper, times: int) -> dict[int, Pair]:
    """Those before the first round."""
    at = -1, 0, paper.world.x0, paper.world.y0, paper.asked
    return {c: gradients(paper, c, *at, times=times) for c in range(paper.clients)}


def own(rng: Generator, z: Vector) -> dict[int, Vector]:
    """A random vector for each client, as long as z."""
    return {k: rng.normal(size=len(z)) for k in range(N)}


def shared(z: Vector) -> dict[int, Vector]:
    return dict.fromkeys(range(N), z)


# --- FGDA and AdaFGDA ------------------------------------------------------------------------------------------------


def keep_point(world: World, case: Case, server: Vectors, rng: Generator) -> Rows:
    """Two phases: a client has kept the server's point. With one exchange, its own point and estimates."""
    x, y = server["x"], server["y"]
    if case.options.get("synchronisation") != "single":
        return {"x": shared(x), "y": shared(y)}
    near = {key: {k: z + 0.2 * step for k, step in own(rng, z).items()} for key, z in (("x", x), ("y", y))}
    return {**near, "w": own(rng, x), "v": own(rng, y)}


@contextmanager
def further_matrices() -> Iterator[None]:
    """The reference with two matrices more, as ``matrices.py`` describes them: norm, and amsgrad with max below a."""
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


def storm_rounds(paper: Paper) -> Vectors:
    """The update after a synchronisation is in the second exchange, or the first act of the next round.

    The first estimates are the clients' mean where estimates are averaged.
    """
    options, world, given = paper.options, paper.world, paper.case.given
    q, single = options["steps"], options.get("synchronisation") == "single"
    starts = first_gradients(paper, options.get("first_batches", 0) or q)
    means = tuple(np.mean([pair[i] for pair in starts.values()], axis=0) for i in (0, 1))

    def gradient(c: int, r: int, j: int, x: Vector, y: Vector) -> Pair:
        if j < 0:
            return starts[c] if single else (means[0], means[1])
        if single:
            return gradients(paper, c, r, j + 1, x, y) if j < q - 1 else gradients(paper, c, r + 1, 0, x, y)
        return gradients(paper, c, r, j, x, y) if j < q - 1 else gradients(paper, c, r, 0, x, y, exchange=1)

    arguments: dict[str, Any] = {key: storm_weight(paper, key, later=single) for key in ("alpha", "beta")}
    arguments |= {"gamma": options["gamma"], "lam": options["lam"], "eta": paper.rate("eta")}
    arguments |= {"clients": paper.clients, "project_y": world.project}
    if single:
        arguments["never_averaged"] = True
    if given:
        everyone = range(paper.clients)
        start = {key: paper.rows(key) if single else dict.fromkeys(everyone, paper.ours.server[key]) for key in "xywv"}
        arguments |= {"w": start["w"], "v": start["v"], "x_k": start["x"], "y_k": start["y"]}
        arguments["first_round"] = paper.case.first_round
    point = world.x0, world.y0, paper.everyone, gradient, q
    if "matrix" not in options and not single:
        out = paper.call(fgda, *point, **arguments)
    else:
        with further_matrices():
            out = paper.call(adafgda, *point, defer=single, **arguments, **matrix_arguments(paper))
    result = {"x": out["x"], "y": out["y"], "x_k": paper.back(out["x_k"]), "y_k": paper.back(out["y_k"])}
    if single:
        result |= {"w_k": paper.back(out["w"]), "v_k": paper.back(out["v"]), "w": out["w_bar"], "v": out["v_bar"]}
    else:
        result |= {"w": out["w"][0], "v": out["v"][0]}
    for key, bar in (("a", "w_bar"), ("b", "v_bar")) if "matrix" in options else ():
        below = {"belief": [out[bar]]}.get(options["matrix"], [])
        result[key] = out[key] if options["matrix"] == "amsgrad" else np.stack([out[key], *below])
    return result


def matrix_arguments(paper: Paper) -> dict[str, Any]:
    """What the reference needs to know about A and B, their accumulators a and b among it."""
    options, world, matrix = paper.options, paper.world, paper.options.get("matrix", "identity")
    arguments: dict[str, Any] = {"matrix": matrix}
    if matrix != "identity":
        theta = paper.rate("theta")
        arguments["rho_m"] = lambda r, j: min(1.0, theta(r, max(0, j)))
        arguments |= {"rho": options["rho"], "first_matrix": options["first_matrix"]}
    if not paper.case.given:
        shape = {"norm": lambda z: 1, "amsgrad": lambda z: (2, len(z))}.get(matrix, len)
        return arguments | {"a": np.zeros(shape(world.x0)), "b": np.zeros(shape(world.y0))}
    for key, bar in (("a", "w_bar"), ("b", "v_bar")) if matrix != "identity" else ():
        accumulator = paper.ours.server[key]
        arguments[key] = accumulator if matrix == "amsgrad" else accumulator[0]
        arguments |= {bar: accumulator[1]} if matrix == "belief" else {}
    return arguments


# --- Local-SGDA and its relatives ------------------------------------------------------------------------------------


def usual_arguments(paper: Paper) -> dict[str, Any]:
    """What most references call their rates, the projection and the first round."""
    arguments: dict[str, Any] = {"eta_x": paper.rate("lr"), "eta_y": paper.rate("dual_lr")}
    return arguments | {"project_y": paper.world.project, "first_round": paper.case.first_round}


def sgda_rounds(paper: Paper) -> Vectors:
    state = {"x": paper.world.x0, "y": paper.world.y0}
    for r, cohort in paper.rounds():
        arguments = {**usual_arguments(paper), "first_round": r}

        def call(group: list[int], steps: int, state: Vectors = state, arguments: Any = arguments) -> Vectors:
            return paper.call(local_sgda, *state.values(), [group], partial(gradients, paper), steps, **arguments)

        state = paper.by_steps(r, cohort, call)
    return state


def momentum_weight(paper: Paper) -> Callable[[int, int], float]:
    """The beta that, times alpha, is at most 1."""
    return lambda r, t: min(paper.options["beta"], 1 / paper.rate("alpha")(r, t))


def keep_snapshot(world: World, case: Case, server: Vectors, rng: Generator) -> Rows:
    return {"snapshot": shared(server["x"] + 0.3 * rng.normal(size=len(server["x"])))}


def plus_rounds(method: Callable[..., Any], paper: Paper) -> Vectors:
    """The snapshot that clients keep is the one they used last."""
    options, steps = paper.options, paper.options["steps"]
    arguments = usual_arguments(paper)
    arguments["snapshot_every"] = options.get("snapshot_every", 0) or steps**2
    if method is local_sgdam_plus:
        arguments |= {"alpha": paper.rate("alpha"), "beta": momentum_weight(paper)}
    if paper.case.given and (paper.case.first_round * steps) % arguments["snapshot_every"]:
        arguments["snapshot"] = paper.rows("snapshot")[0]

    def after(cohorts: list[list[int]]) -> dict[str, Any]:
        point = paper.world.x0, paper.world.y0
        return paper.call(method, *point, cohorts, partial(gradients, paper), steps, **arguments)

    out, before = after(paper.cohorts()), after(paper.cohorts()[:-1])
    return {"x": out["x"], "y": out["y"], "snapshot_k": np.tile(before["snapshot"], (N, 1))}


def keep_momenta(world: World, case: Case, server: Vectors, rng: Generator) -> Rows:
    return {} if "d_x" in server else {"d_x": own(rng, server["x"]), "d_y": own(rng, server["y"])}


def momentum_rounds(paper: Paper) -> Vectors:
    """The momenta start as gradients at the first point, of all clients, whoever takes part."""
    average = paper.options.get("average_momentum", True)
    momenta: dict[str, Any] = {}
    for i, key in enumerate(("d_x", "d_y")):
        first = {c: pair[i] for c, pair in first_gradients(paper, 1).items()}
        momenta[key] = np.mean(list(first.values()), axis=0) if average else first
        if paper.case.given:
            momenta[key] = paper.ours.server[key] if average else paper.rows(key)
    arguments = usual_arguments(paper) | {"alpha": paper.rate("alpha"), "beta": momentum_weight(paper)} | momenta
    point = paper.world.x0, paper.world.y0, paper.cohorts(), partial(gradients, paper), paper.options["steps"]
    out = paper.call(local_sgdam, *point, average_momentum=average, **arguments)
    if average:
        return out
    return {"x": out["x"], "y": out["y"], "d_x_k": paper.back(out["d_x"]), "d_y_k": paper.back(out["d_y"])}


# --- methods with corrections ----------------------------------------------------------------------------------------


def keep_variates(world: World, case: Case, server: Vectors, rng: Generator) -> Rows:
    control = case.options.get("control", True)
    return {"c_x": own(rng, server["x"]), "c_y": own(rng, server["y"])} if control else {}


def sagda_rounds(paper: Paper) -> Vectors:
    control = paper.options.get("control", True)
    arguments = usual_arguments(paper) | {"control": control, "clients": paper.clients}
    arguments |= {"eta_xg": paper.server_rate("server_lr"), "eta_yg": paper.server_rate("server_dual_lr")}
    if paper.case.given and control:
        arguments |= {key: paper.ours.server[key] for key in ("c_x", "c_y")}
        arguments |= {"c_kx": paper.rows("c_x"), "c_ky": paper.rows("c_y")}
    point = paper.world.x0, paper.world.y0, paper.cohorts(), partial(gradients, paper), paper.options["steps"]
    out = paper.call(sagda, *point, **arguments)
    if not control:
        return {"x": out["x"], "y": out["y"]}
    kept = {"c_x_k": paper.back(out["c_kx"]), "c_y_k": paper.back(out["c_ky"])}
    return {**{key: out[key] for key in ("x", "y", "c_x", "c_y")}, **kept}


def cdma_rounds(paper: Paper) -> Vectors:
    """The first cohort has all its data, the second draws in the second exchange; they come by turns."""
    options, ada = paper.options, paper.options.get("ada", False)

    def decayed(rate: Callable[[int, int], float]) -> Callable[[int, int], float]:
        return lambda r, t: rate(r, t) / ((r + 1) ** options["exponent"] if ada else 1.0)

    def everything(c: int, x: Vector, y: Vector) -> Pair:
        return gradients(paper, c, 0, 0, x, y, times=None)

    arguments = usual_arguments(paper)
    arguments |= {key: decayed(arguments[key]) for key in ("eta_x", "eta_y")}
    arguments["update_cohorts"] = paper.cohorts(1, of=2)
    gradient = partial(gradients, paper, exchange=1)
    point = paper.world.x0, paper.world.y0, paper.cohorts(0, of=2), gradient, everything, options["steps"]
    if not ada:
        out = paper.call(cdma, *point, **arguments)
        return {"x": out["x"], "y": out["y"]}
    arguments["a"] = lambda r: min(options["weight"] / (r + 1) ** (2 * options["exponent"]), 1.0)
    names = {key: key.replace("old", "prev") for key in ("x_old", "y_old", "g_x", "g_y")}
    if paper.case.given:
        arguments |= {name: paper.ours.server[key] for key, name in names.items()}
    out = paper.call(cdma_ada, *point, **arguments)
    return {"x": out["x"], "y": out["y"], **{key: out[name] for key, name in names.items()}}


def fednest_rounds(paper: Paper) -> Vectors:
    """The gradients of stream s are in exchange 2s, its local steps in exchange 2s + 1; an epoch has one rate."""

    def gradient(c: int, r: int, t: int, x: Vector, y: Vector, stream: int) -> Pair:
        return gradients(paper, c, r, max(t, 0), x, y, exchange=2 * stream + (t >= 0))

    rates: dict[str, Any] = {key: (lambda r, t, key=key: paper.rate(key)(r, 0)) for key in ("alpha", "beta")}
    point = paper.world.x0, paper.world.y0, paper.cohorts(), gradient, paper.options["steps"]
    arguments = {"project_y": paper.world.project, "first_round": paper.case.first_round}
    out = paper.call(fednest_minimax, *point, inner_rounds=paper.options["inner_rounds"], **rates, **arguments)
    return {"x": out["x"], "y": out["y"]}


# --- methods of stages -----------------------------------------------------------------------------------------------


def stage_of(options: Options, round: int) -> tuple[int, int]:
    """The stage of CoDA in which a round is, and the steps done in it before."""
    stage, done = 0, 0
    for _ in range(round):
        length = math.floor(options["stage_steps"] * options["factor"] ** stage + 0.5)
        done = min(length, done + options["steps"])
        stage, done = (stage + 1, 0) if done == length else (stage, done)
    return stage, done


def keep_centre(name: str, world: World, case: Case, server: Vectors, rng: Generator) -> Rows:
    """The centre of the stage, on the server and the clients, and the sum of the clients' distances from it."""
    if name == "x_0" and stage_of(case.options, case.first_round)[1] == 0:
        server["x_0"] = server["x"]
        return {}
    server[name] = server["x"] + 0.3 * rng.normal(size=len(server["x"]))
    return {name: shared(server[name]), "total": own(rng, server["x"])}


def coda_rounds(paper: Paper) -> Vectors:
    """The best y is found in the last exchange of the stage's last round: the projected mean of the clients' own.

    The library keeps sums of distances from the centre, the reference sums of points.
    """
    options, world, first = paper.options, paper.world, paper.case.first_round
    average, stage = options.get("average", True), stage_of(options, first)
    ends = [r for r in range(50) if stage_of(options, r + 1)[1] == 0]

    def estimate(c: int, s: int, v: Vector) -> Vector:
        batches = [
            paper.batch(k, ends[s], 0, 2 if average else 1, times=options["estimate_batches"]) for k in paper.copies
        ]
        mean = np.mean([world.best(batch, v) for batch in batches], axis=0)
        return mean if world.project is None else world.project(mean)

    arguments: dict[str, Any] = {"clients": paper.clients, "eta0": options["lr"], "t0": options["stage_steps"]}
    arguments |= {"gamma": options["gamma"], "factor": options["factor"], "average_iterates": average}
    arguments |= {"project_alpha": world.project, "estimate": None if world.best is None else estimate}
    arguments |= {"first_round": first, "stage": stage[0], "done": stage[1]}
    if stage[1]:
        centre = paper.ours.server["x_0"]
        totals = {c: total + stage[1] * centre for c, total in paper.rows("total").items()}
        arguments |= {"v_0": centre, "total": totals}
    out = paper.call(coda, world.x0, world.y0, paper.everyone, partial(gradients, paper), options["steps"], **arguments)
    result = {"x": out["v"], "y": out["alpha"], "x_0": out["v_0"]}
    if out["done"]:
        totals = paper.back(out["total"]) - out["done"] * out["v_0"]
        result |= {"x_0_k": np.tile(out["v_0"], (N, 1)), "total_k": totals}
    return result


def keep_centre_and_variates(world: World, case: Case, server: Vectors, rng: Generator) -> Rows:
    return keep_centre("x_ref", world, case, server, rng) | keep_variates(world, case, server, rng)


class Into:
    """A bound of an interval that is the projection onto a set instead: what numpy.maximum makes of it."""

    def __init__(self, project: Callable[[Vector], Vector]) -> None:
        self.project = project

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Vector:
        assert ufunc is np.maximum
        return self.project(inputs[0])


def codasca_rounds(paper: Paper) -> Vectors:
    """A call for each round, because the server's rate may change, and the server projects its y."""
    options, world, first = paper.options, paper.world, paper.case.first_round
    control, steps = options.get("control", True), options["steps"]
    arguments: dict[str, Any] = {"clients": paper.clients, "eta": paper.rate("lr"), "gamma": options["gamma"]}
    arguments |= {"weight_decay": options["weight_decay"], "clip": options["clip"] or None, "control": control}
    arguments |= {"decay_every": options["stage_rounds"] * steps, "factor": options["factor"]}
    arguments["alpha_range"] = None if world.project is None else (Into(world.project), np.inf)
    without_decay = replace(paper, options={**options, "weight_decay": 0.0})
    state: dict[str, Any] = {"v": world.x0, "alpha": world.y0}
    if paper.case.given:
        centre, done = paper.ours.server["x_ref"], first % options["stage_rounds"] * steps
        state |= {"v_ref": centre, "total": np.mean(list(paper.rows("total").values()), axis=0) + done * centre}
    if paper.case.given and control:
        state |= {"c_v": paper.ours.server["c_x"], "c_alpha": paper.ours.server["c_y"]}
        state |= {"c_kv": paper.rows("c_x"), "c_kalpha": paper.rows("c_y")}
    for r, cohort in paper.rounds():
        point = state.pop("v"), state.pop("alpha"), [cohort], partial(gradients, without_decay), steps
        rates = {"eta_g": paper.server_rate("server_lr")(r), "first_round": r}
        state = paper.call(codasca, *point, **arguments, **rates, **state)
        state["alpha"] = state["alpha"] if world.project is None else world.project(state["alpha"])
    result = {"x": state["v"], "y": state["alpha"], "x_ref": state["v_ref"]}
    result["x_ref_k"] = np.tile(state["v_ref"], (N, 1))
    if control:
        result |= {"c_x": state["c_v"], "c_y": state["c_alpha"]}
        result |= {"c_x_k": paper.back(state["c_kv"]), "c_y_k": paper.back(state["c_kalpha"])}
    return result


# --- methods ---------------------------------------------------------------------------------------------------------


STORM: Options = {"gamma": 0.15, "lam": 0.25, "eta": 0.8, "steps": 3, "alpha": 0.6, "beta": 0.7}
ADAPTIVE: Options = {"theta": 0.8, "rho": 0.5, "matrix": "adam", "first_matrix": "average"}
SINGLE: Options = {"synchronisation": "single"}
LOCAL: Options = {"lr": 0.15, "dual_lr": 0.25, "steps": 3}
MOMENTUM: Options = {**LOCAL, "alpha": 0.8, "beta": 0.7}
SERVER: Options = {**LOCAL, "server_lr": 0.9, "server_dual_lr": 1.2}
ADA: Options = {**LOCAL, "ada": True, "weight": 0.7, "exponent": 0.3}
STAGES: Options = {"lr": 0.2, "steps": 3, "factor": 2.0, "gamma": 2.0}
CODA: Options = {**STAGES, "stage_steps": 4, "estimate_batches": 2}
CODASCA: Options = {**STAGES, "stage_rounds": 2, "clip": 0.3, "weight_decay": 0.05, "server_lr": 0.9}
SNAPSHOT: dict[str, Any] = {"keep": keep_snapshot, "rounds": 3, "wrong_in": {"steps": None, "snapshot_every": None}}
CENTRE: dict[str, Any] = {"keep": keep_centre_and_variates, "rounds": 3, "unseen": ("total_k",)}


def saddle(name: str, build: Any, reference: Callable[[Paper], Vectors], options: Options, **more: Any) -> Method:
    return Method(name, "saddle", SADDLES, build, reference, options, **{"home": "free", **more})


STORMS = [
    saddle("fgda", fs.FGDA, storm_rounds, STORM, keep=keep_point, unseen=("w_k", "v_k")),
    saddle("fgda, single", fs.FGDA, storm_rounds, {**STORM, **SINGLE}, keep=keep_point, rounds=3),
    saddle("adafgda", fs.AdaFGDA, storm_rounds, {**STORM, **ADAPTIVE}, keep=keep_point, unseen=("w_k", "v_k")),
    saddle("adafgda, single", fs.AdaFGDA, storm_rounds, {**STORM, **ADAPTIVE, **SINGLE}, keep=keep_point, rounds=3),
]
PLUS = partial(plus_rounds, local_sgda_plus), partial(plus_rounds, local_sgdam_plus)
OWN_MOMENTA: Options = {**MOMENTUM, "average_momentum": False}
OTHERS = [
    saddle("local_sgda", fs.LocalSGDA, sgda_rounds, LOCAL),
    saddle("local_sgda_plus", fs.LocalSGDAPlus, PLUS[0], {**LOCAL, "snapshot_every": 6}, **SNAPSHOT),
    saddle("local_sgdam", fs.LocalSGDAM, momentum_rounds, MOMENTUM, keep=keep_momenta),
    saddle("local_sgdam, own momenta", fs.LocalSGDAM, momentum_rounds, OWN_MOMENTA, keep=keep_momenta),
    saddle("local_sgdam_plus", fs.LocalSGDAMPlus, PLUS[1], {**MOMENTUM, "snapshot_every": 6}, **SNAPSHOT),
    saddle("sagda", fs.SAGDA, sagda_rounds, SERVER, keep=keep_variates),
    saddle("fsgda", fs.SAGDA, sagda_rounds, {**SERVER, "control": False}, keep=keep_variates),
    saddle("cdma", fs.CDMA, cdma_rounds, LOCAL),
    # The weight of CDMA-ADA cancels out where everyone takes part.
    saddle("cdma, ada", fs.CDMA, cdma_rounds, ADA, rounds=3, wrong_in={"weight": Case(participation=3)}),
    saddle("fednest", fs.FedNest, fednest_rounds, {"alpha": 0.3, "beta": 0.6, "inner_rounds": 2, "steps": 3}),
    saddle(
        "coda",
        fs.CoDA,
        coda_rounds,
        CODA,
        keep=partial(keep_centre, "x_0"),
        home="auc",
        rounds=4,
        unseen=("x_0_k", "total_k"),
    ),
    saddle("codasca", fs.CODASCA, codasca_rounds, CODASCA, **CENTRE),
    saddle("codasca, no control", fs.CODASCA, codasca_rounds, {**CODASCA, "control": False}, **CENTRE),
]
METHODS = {method.name: method for method in (*STORMS, *OTHERS)}


# --- rows ------------------------------------------------------------------------------------------------------------


def given(first_round: int, **fields: Any) -> Case:
    return Case(given=True, first_round=first_round, **fields)


def with_options(**options: Any) -> Case:
    return Case(options=options)


ONE_STEP = {"one step": with_options(steps=1)}
DECAY = {
    "weight decay": given(3, options={"weight_decay": 0.2}),
    "weight decay from the start": with_options(weight_decay=0.2),
}
SCHEDULES = {"cube root": fs.CubeRoot(0.6, 2.0), "round decay": fs.RoundDecay(0.5, 0.6)}
THEOREM: Options = {"weights": "theorem", "eta": fs.CubeRoot(1.2, 2.0), "alpha": 1.3, "beta": 0.8}
OF_STORMS = {
    **ONE_STEP,
    "four steps": with_options(steps=4),
    "theorem": with_options(**THEOREM),
    "theorem, round decay": with_options(**{**THEOREM, "eta": fs.RoundDecay(0.9, 0.7)}),
    "theorem, given state": given(2, options=THEOREM),
    "theorem, scheduled": with_options(**{**THEOREM, "alpha": fs.RoundDecay(1.5, 0.5), "beta": fs.CubeRoot(2.0, 3.0)}),
    "first batches": with_options(first_batches=5),
    "first batches, epochs": Case(options={"first_batches": 2}, sampling="epochs"),
    "weights 0": with_options(alpha=0.0, beta=0.0),
    "weights 1": with_options(alpha=1.0, beta=1.0),
    "weights above 1": with_options(alpha=fs.CubeRoot(2.0, 2.0), beta=3.0),
}
SNAPSHOTS = {
    "every round": with_options(snapshot_every=3),
    "steps squared": Case(options={"snapshot_every": 0}, rounds=4),
    "every third round, given state": given(5, options={"snapshot_every": 9}),
    "given state at a snapshot": given(3, options={"snapshot_every": 9}),
}
ABOVE_1 = {"beta alpha above 1": with_options(alpha=fs.CubeRoot(2.0, 2.0), beta=0.9)}
CASES: dict[str, dict[str, Case]] = {
    **{method.name: OF_STORMS for method in STORMS},
    "local_sgda": {**PARTIAL, **PASSES, **ONE_STEP, **DECAY},
    "local_sgda_plus": {"one step": with_options(steps=1, snapshot_every=2), **DECAY, **SNAPSHOTS},
    "local_sgdam": {**PARTIAL, **ONE_STEP, **DECAY, **ABOVE_1},
    "local_sgdam, own momenta": {**PARTIAL, **ONE_STEP, **DECAY, **ABOVE_1},
    "local_sgdam_plus": {"two steps": with_options(steps=2), **DECAY, **ABOVE_1, **SNAPSHOTS},
    "sagda": {**PARTIAL, "partial, given state": given(3, participation=3), **ONE_STEP, **DECAY},
    "fsgda": {**PARTIAL, **ONE_STEP, **DECAY},
    "cdma": {**PARTIAL, **ONE_STEP, **DECAY},
    "cdma, ada": {
        **PARTIAL,
        **ONE_STEP,
        **DECAY,
        "partial, given state": given(3, participation=2),
        "no decay": with_options(exponent=0.0),
        "weight above 1": with_options(weight=1.4, exponent=0.4),
        "exponent 1": with_options(exponent=1.0),
    },
    "fednest": {
        **ONE_STEP,
        "one inner round": with_options(inner_rounds=1),
        "three inner rounds": with_options(inner_rounds=3),
    },
    "coda": {
        **ONE_STEP,
        "first stage": Case(rounds=1),
        "end of the first stage": Case(rounds=2),
        "end of the second stage": Case(rounds=5),
        "three stages": Case(rounds=7),
        "whole rounds": Case(options={"stage_steps": 3}, rounds=4),
        "stages shorter than a round": Case(options={"stage_steps": 1}, rounds=4),
        "stages that do not grow": with_options(factor=1.0),
        "another factor": with_options(factor=3.0),
        "last iterates": Case(options={"average": False}, rounds=5),
        "given state, new stage": given(2),
    },
    "codasca": {
        **ONE_STEP,
        "stages of one round": with_options(stage_rounds=1),
        "three stages": Case(rounds=5),
        "in a stage": with_options(stage_rounds=3),
        "end of the first stage": Case(rounds=2),
        "given state, new stage": given(2),
        "not clipped": with_options(clip=0.0),
        "clip inactive": with_options(clip=50.0),
        "server rate above 1": with_options(server_lr=1.5),
    },
    "codasca, no control": {"not clipped": with_options(clip=0.0), "three stages": Case(rounds=5)},
}
PROJECTED = ("ball", "box", "simplex")
ACTIVE = "auc, margin, active, scaled"
MATRICES = ("adam", "norm", "belief", "amsgrad")


def right_rows() -> Iterator[Row]:
    """Every method in each world, and in its home in every case."""
    for method in METHODS.values():
        for world in SADDLES:
            yield method.row("minibatches", world=world)
        for label, case in {**USUAL, **CASES[method.name]}.items():
            yield method.row(label, case)
        yield from method.scheduled(SCHEDULES, Case(rounds=3), "free", theta={"first_matrix": "accumulator"})
        yield method.row("given state", given(3), "ball")
    coda = METHODS["coda"]
    yield coda.row("three stages", Case(rounds=7), "free")
    yield coda.row("three stages", Case(rounds=7), ACTIVE)
    yield coda.row("last iterates", Case(options={"average": False}, rounds=5), ACTIVE)
    yield coda.row("weighted", Case(weighting="samples", rounds=5), "auc, prepared, scaled")
    yield coda.row("full batches", Case(batch_size=None, rounds=5), "auc, margin")
    yield METHODS["codasca"].row("three stages", Case(rounds=5), ACTIVE)
    for world in PROJECTED:
        yield METHODS["codasca"].row("server rates above 1", with_options(server_lr=1.6), world)
        yield METHODS["sagda"].row("server rates above 1", with_options(server_lr=1.6, server_dual_lr=1.6), world)
    for name in ("fgda", "local_sgdam", "sagda"):
        for world in ("auc, prepared, scaled", "fair, classes"):
            yield METHODS[name].row("weighted", Case(weighting="samples"), world)
    for name in ("adafgda", "adafgda, single"):
        for matrix in MATRICES:
            for first in ("average", "accumulator", "identity"):
                yield METHODS[name].row(f"{matrix}, {first}", with_options(matrix=matrix, first_matrix=first), "free")
            yield METHODS[name].row(f"{matrix}, given state", given(2, options={"matrix": matrix}), "free")
            yield METHODS[name].row(f"{matrix}, one step", with_options(matrix=matrix, steps=1), "ball")
    theta = {"theta": SCHEDULES["round decay"]}
    yield METHODS["adafgda"].row("the first theta", Case(rounds=1, options=theta), "free")


def wrong_rows() -> Iterator[Row]:
    def without_projection(world: Any) -> World:
        return replace(world, project=None)

    for method in METHODS.values():
        yield from method.usual_mistakes()
        for world in (*PROJECTED, ACTIVE):
            yield method.wrong("no projection", None, world, world_of=without_projection)
        if "weight decay" in CASES[method.name]:
            yield method.wrong("weight_decay", DECAY["weight decay"], options={"weight_decay": 0.202})
    for name in ("local_sgda_plus", "local_sgdam_plus"):
        yield METHODS[name].wrong("steps", options={"steps": 4, "snapshot_every": 8})
        yield METHODS[name].wrong("snapshot_every", options={"snapshot_every": 3})
    for method in STORMS:
        theorem = with_options(**THEOREM)
        yield method.wrong("first batches", options={"first_batches": 4})
        yield method.wrong("hat", None, "ball", arguments={"projection": "hat"})
        yield method.wrong("estimates from the means", arguments={"two_phase": False, "never_averaged": False})
        yield method.wrong("no theorem", theorem, options={"weights": "constant"})
        for key in ("alpha", "beta"):
            case = with_options(**{**THEOREM, "alpha": 0.9})
            yield method.wrong(f"{key}, theorem", case, options={key: 0.99 * THEOREM[key]})
        yield method.wrong("eta, theorem", theorem, options={"eta": fs.CubeRoot(1.2, 2.1)})
        if "single" not in method.name:
            yield method.wrong("never averaged", arguments={"never_averaged": True})
    for name in ("adafgda", "adafgda, single"):
        for first in ("accumulator", "identity"):
            yield METHODS[name].wrong(f"first matrix {first}", options={"first_matrix": first})
        for matrix in MATRICES:
            case = given(2, options={"matrix": matrix})
            for key in ("rho", "theta"):
                yield METHODS[name].wrong(f"{key}, {matrix}", case, options={key: ADAPTIVE[key] * 1.01})
    for name in ("local_sgdam", "local_sgdam, own momenta", "local_sgdam_plus"):
        yield METHODS[name].wrong("hat", None, "ball", arguments={"projection": "hat"})
    partly = Case(participation=3)
    yield METHODS["sagda"].wrong("variates of the cohort", partly, arguments={"server": "cohort"})
    yield METHODS["sagda"].wrong("no control", arguments={"control": False})
    for name in ("cdma", "cdma, ada"):
        yield METHODS[name].wrong("one cohort", partly, arguments={"update_cohorts": None})
    yield METHODS["fednest"].wrong("light", arguments={"light": True})
    yield METHODS["coda"].wrong("last iterates", arguments={"average_iterates": False})
    yield METHODS["coda"].wrong("no estimate", arguments={"estimate": None})
    yield METHODS["codasca"].wrong("dual at the new point", arguments={"dual": "new"})
    yield METHODS["codasca"].wrong("centre from rounds", arguments={"reference": "rounds"})
    yield METHODS["codasca"].wrong("no control", arguments={"control": False})
    yield METHODS["codasca"].wrong("no clip", arguments={"clip": None})
