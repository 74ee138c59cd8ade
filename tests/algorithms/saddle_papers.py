"""How the references of the methods for saddles are called, and the random states they start from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from algorithms.equations import Case, Options, Rows, Vectors
from algorithms.paper import Paper, storm_weight
from reference import fgda as fgda_module
from reference.cdma import cdma, cdma_ada
from reference.coda import coda
from reference.codasca import codasca
from reference.fednest_minimax import fednest_minimax
from reference.fgda import adafgda, fgda
from reference.local_sgda import local_sgda, local_sgdam, local_sgdam_plus
from reference.sagda import sagda
from saddle_worlds import Pair
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


def stamp(number: int) -> dict[int, Vector]:
    """The number that dates what the clients kept."""
    return shared(np.array([number]))


# --- FGDA and AdaFGDA ------------------------------------------------------------------------------------------------


def keep_point(world: World, case: Case, server: Vectors, rng: Generator) -> Rows:
    """Two phases: a client has kept the server's point. With one exchange, its own point and estimates."""
    x, y = server["x"], server["y"]
    if case.options.get("synchronisation") != "single":
        return {"x": shared(x), "y": shared(y), "point.stamp": stamp(case.first_round)}
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
    result = paper.found(out, x="x", y="y", x_k="x_k", y_k="y_k")
    if single:
        result |= paper.found(out, w_k="w", v_k="v", w="w_bar", v="v_bar")
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


def usual_point(paper: Paper) -> tuple[Any, ...]:
    """The arguments that come first: the point, the cohorts, the gradients and the steps."""
    return paper.world.x0, paper.world.y0, paper.cohorts(), partial(gradients, paper), paper.options["steps"]


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
    steps, every = case.options["steps"], case.options["snapshot_every"]
    rows = shared(server["x"] + 0.3 * rng.normal(size=len(server["x"])))
    return {"snapshot": rows, "period.stamp": stamp(case.first_round * steps // (every or steps**2))}


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
    """The momenta start as gradients at the first point, of all clients, including those not in the cohort."""
    average = paper.options.get("average_momentum", True)
    names = {"d_x": "d_x", "d_y": "d_y"} if average else {"d_x_k": "d_x", "d_y_k": "d_y"}
    arguments = usual_arguments(paper) | {"alpha": paper.rate("alpha"), "beta": momentum_weight(paper)}
    for i, key in enumerate(("d_x", "d_y")):
        first = {c: pair[i] for c, pair in first_gradients(paper, 1).items()}
        arguments[key] = np.mean(list(first.values()), axis=0) if average else first
    arguments |= paper.given(**names)
    out = paper.call(local_sgdam, *usual_point(paper), average_momentum=average, **arguments)
    return paper.found(out, x="x", y="y", **names)


# --- methods with corrections ----------------------------------------------------------------------------------------


def keep_variates(world: World, case: Case, server: Vectors, rng: Generator) -> Rows:
    control = case.options.get("control", True)
    return {"c_x": own(rng, server["x"]), "c_y": own(rng, server["y"])} if control else {}


def sagda_rounds(paper: Paper) -> Vectors:
    control = paper.options.get("control", True)
    names = {"c_x": "c_x", "c_y": "c_y", "c_x_k": "c_kx", "c_y_k": "c_ky"} if control else {}
    arguments = usual_arguments(paper) | {"control": control, "clients": paper.clients, **paper.given(**names)}
    arguments |= {"eta_xg": paper.server_rate("server_lr"), "eta_yg": paper.server_rate("server_dual_lr")}
    return paper.found(paper.call(sagda, *usual_point(paper), **arguments), x="x", y="y", **names)


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
        return paper.found(paper.call(cdma, *point, **arguments), x="x", y="y")
    names = {"x_old": "x_prev", "y_old": "y_prev", "g_x": "g_x", "g_y": "g_y"}
    arguments["a"] = lambda r: min(options["weight"] / (r + 1) ** (2 * options["exponent"]), 1.0)
    return paper.found(paper.call(cdma_ada, *point, **arguments, **paper.given(**names)), x="x", y="y", **names)


def fednest_rounds(paper: Paper) -> Vectors:
    """The gradients of stream s are in exchange 2s, its local steps in exchange 2s + 1; an epoch has one rate."""

    def gradient(c: int, r: int, t: int, x: Vector, y: Vector, stream: int) -> Pair:
        return gradients(paper, c, r, max(t, 0), x, y, exchange=2 * stream + (t >= 0))

    rates: dict[str, Any] = {key: (lambda r, t, key=key: paper.rate(key)(r, 0)) for key in ("alpha", "beta")}
    point = paper.world.x0, paper.world.y0, paper.cohorts(), gradient, paper.options["steps"]
    rates |= {"project_y": paper.world.project, "first_round": paper.case.first_round}
    out = paper.call(fednest_minimax, *point, inner_rounds=paper.options["inner_rounds"], **rates)
    return paper.found(out, x="x", y="y")


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
    stage = (
        stage_of(case.options, case.first_round)[0] if name == "x_0" else codasca_stage(case.options, case.first_round)
    )
    return {name: shared(server[name]), "total": own(rng, server["x"]), "stage.stamp": stamp(stage)}


def codasca_stage(options: Options, round: int) -> int:
    return round // options["stage_rounds"]


def coda_rounds(paper: Paper) -> Vectors:
    """The best y is found in the last exchange of the stage's last round: the projected mean of the clients' own.

    The library keeps sums of distances from the centre, the reference sums of points; it also keeps the round's y.
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
    names = {"c_x": "c_v", "c_y": "c_alpha", "c_x_k": "c_kv", "c_y_k": "c_kalpha"} if control else {}
    state |= paper.given(x_ref="v_ref", **names)
    if paper.case.given:
        done = first % options["stage_rounds"] * steps
        state["total"] = np.mean(list(paper.rows("total").values()), axis=0) + done * state["v_ref"]
    for r, cohort in paper.rounds():
        point = state.pop("v"), state.pop("alpha"), [cohort], partial(gradients, without_decay), steps
        rates = {"eta_g": paper.server_rate("server_lr")(r), "first_round": r}
        state = paper.call(codasca, *point, **arguments, **rates, **state)
        state["alpha"] = state["alpha"] if world.project is None else world.project(state["alpha"])
    found = paper.found(state, x="v", y="alpha", x_ref="v_ref", **names)
    return found | {"x_ref_k": np.tile(state["v_ref"], (N, 1))}
