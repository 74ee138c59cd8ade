"""Equations of the methods for compositions: one level, or more of them chained on a client, and no dual."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import fedstrata as fs
from algorithms.equations import PARTIAL, PASSES, USUAL, Case, Method, Options, Row, Rows, Vectors
from algorithms.paper import Paper, storm_weight
from reference.comfedl import comfedl
from reference.fednest import fednest
from reference.local_moml import local_moml
from reference.local_scgd import local_scgd, local_scgdm
from reference.mfcgd import adamfcgd, mfcgd
from support import drawn
from worlds import (
    COMPOSITIONS,
    GAMMA,
    INNER_LR,
    SHIFT,
    Composition,
    Draw,
    N,
    Vector,
    World,
    damaml_world,
    logistic,
    robust_world,
    steep,
)

# --- methods whose clients keep nothing ------------------------------------------------------------------------------


def local_rounds(method: Callable[..., Vectors], paper: Paper) -> Vectors:
    state = paper.ours.server or {"x": paper.world.x0}
    for r, cohort in paper.rounds():
        state = paper.by_steps(r, cohort, partial(method, paper, r, state))
    return state


def functions(paper: Paper, r: int) -> list[Callable[..., Vector]]:
    """The inner value, its Jacobian and grad f, by client, round and step, of round r."""
    world = paper.world

    def function(f: Any) -> Callable[..., Vector]:
        return lambda c, _, t, z: f(paper.draw(paper.copies[c], r, t), z)

    return [function(f) for f in (world.inner, world.jacobian, world.outer)]


def rate(paper: Paper, key: str, r: int) -> Callable[[int, int], float]:
    return lambda _, t: paper.rate(key)(r, t)


def weight(paper: Paper, key: str, r: int) -> Callable[[int, int], float]:
    """A weight that, times eta, counts as 1 where it is larger."""
    return lambda _, t: min(paper.rate(key)(r, t), 1 / paper.rate("eta")(r, t) if "eta" in paper.options else 1.0)


def comfedl_round(paper: Paper, r: int, state: Vectors, group: list[int], steps: int) -> Vectors:
    return paper.call(comfedl, state["x"], [group], *functions(paper, r), steps, lr=rate(paper, "lr", r))


def scgd_round(paper: Paper, r: int, state: Vectors, group: list[int], steps: int) -> Vectors:
    rates: dict[str, Any] = {"eta": rate(paper, "eta", r), "beta": rate(paper, "beta", r)}
    rates |= {"gamma": weight(paper, "gamma", r), "u": state.get("u")}
    if paper.method.build is fs.LocalSCGDM:
        rates |= {"alpha": weight(paper, "alpha", r), "m": state.get("m")}
    method = local_scgdm if "alpha" in rates else local_scgd
    return paper.call(method, state["x"], [group], *functions(paper, r), steps, **rates)


def moml_round(paper: Paper, r: int, state: Vectors, group: list[int], steps: int) -> Vectors:
    """The big batch is stream 0; streams 1 and 3 are the inner level's, stream 2 the outer function's."""

    def loss(c: int, t: int, x: Vector, stream: int) -> tuple[float, Vector, Vector]:
        times = paper.options["first_batches"] if t < 0 else 1
        draw = paper.draw(paper.copies[c], r, max(t, 0), stream=stream, times=times)
        return logistic(draw(0 if stream == 2 else 1), x)

    out = paper.call(
        local_moml,
        state["x"],
        [group],
        lambda c, _, t, x, stream: loss(c, t, x, stream)[1],
        lambda c, _, t, x, v, stream: loss(c, t, x, stream)[2] @ v,
        steps,
        lr=rate(paper, "lr", r),
        beta=weight(paper, "beta", r),
        inner_lr=INNER_LR,
        first_order=paper.world is COMPOSITIONS["maml, first order"](),
    )
    return {"x": out["x"]}


def normalised_comfedl(paper: Paper) -> Vectors:
    """ComFedL with weights v / s, at most the number of clients in the cohort, as its file describes them."""
    world, x = paper.world, paper.world.x0

    def own_weight(draw: Draw, x: Vector) -> float:
        return float(world.outer(draw, world.inner(draw, x))[0])

    s = np.mean([own_weight(paper.draw(k, -1, 0, paper.asked), x) for k in paper.copies])
    s = paper.ours.server["weight"][0] if paper.case.given else s
    for r, cohort in paper.rounds():
        models, weights = [], []
        most = paper.tweak("most", len(paper.ours.cohorts[0]))
        for k in (paper.copies[c] for c in cohort):
            x_k, seen = x, []
            for t in range(paper.steps_of(k, r)):
                draw = paper.draw(k, r, t)
                seen.append(own_weight(draw, x_k))
                x_k = x_k - paper.rate("lr")(r, t) * min(seen[-1] / s, most) * world.jacobian(draw, x_k)[0]
            models.append(x_k)
            weights.append(np.mean(seen))
        x, s = np.mean(models, axis=0), np.mean(weights)
    return {"x": x, "weight": np.array([s])}


# --- methods with exchanges or a memory of their own -----------------------------------------------------------------


def fednest_rounds(paper: Paper) -> Vectors:
    """Inner round s is exchanges 2s and 2s + 1; the outer gradient is exchange 2T, the pull 2T + 1."""
    world, options, first = paper.world, paper.options, paper.case.first_round
    starts = [world.inner(paper.draw(k, -1, 0, paper.asked), world.x0) for k in paper.copies]

    def draw(c: int, epoch: int, exchange: int) -> Draw:
        return paper.draw(paper.copies[c], first + epoch, 0, exchange)

    out = paper.call(
        fednest,
        world.x0,
        paper.ours.server["u"] if paper.case.given else np.mean(starts, axis=0),
        len(paper.ours.cohorts),
        paper.clients,
        lambda c, epoch, s, x: world.inner(draw(c, epoch, 2 * s), x),
        lambda c, epoch, s, x, v: world.jacobian(draw(c, epoch, 2 * s + 1), x).T @ v,
        lambda c, epoch, s, y: world.outer(draw(c, epoch, 2 * s), y),
        inner_rounds=options["inner_rounds"],
        tau=options["steps"],
        **{key: lambda epoch, key=key: paper.server_rate(key)(first + epoch) for key in ("alpha", "beta")},
    )
    return {"x": out["x"], "u": out["y"]}


def storm_rounds(paper: Paper) -> Vectors:
    """MFCGD and AdaMFCGD; the reference's estimator update (r, j) is made in the library's next iteration."""
    world, options, given = paper.world, paper.options, paper.case.given
    q, product, matrix = options["steps"], options.get("jacobian") == "product", options.get("matrix", "identity")

    def draw(c: int, r: int, j: int) -> Draw:
        k = paper.copies[c]
        if j < 0:
            return paper.draw(k, -1, 0, paper.asked, times=options.get("first_batches", 0) or q)
        return paper.draw(k, r, j + 1) if j < q - 1 else paper.draw(k, r + 1, 0)

    arguments: dict[str, Any] = {key: storm_weight(paper, key, later=True) for key in ("alpha", "beta", "varrho")}
    arguments |= {"eta": paper.rate("eta"), "gamma": options["gamma"], "clients": paper.clients}
    arguments |= {"jacobian": "product" if product else "exact", "c_g": options.get("c_g"), "c_f": options.get("c_f")}
    functions = [lambda c, r, j, z, f=f: f(draw(c, r, j), z) for f in (world.inner, world.jacobian, world.outer)]
    more: dict[str, Any] = {"matrix": matrix, "first_round": paper.case.first_round, "defer": True}
    if matrix != "identity":
        more |= {"theta": lambda r, j: paper.rate("theta")(r, max(0, j)), "rho": options["rho"]}
        more["first_matrix"] = options["first_matrix"]
    if given:
        rows = {key: np.stack(list(paper.rows(key).values())) for key in paper.ours.rows}
        rows |= {} if product else {"w": np.einsum("krd,kr->kd", rows["u"], rows["v"])}
        more |= {("x_k" if key == "x" else key): value for key, value in rows.items()}
    if given and matrix != "identity":
        a = paper.ours.server["a"]
        more["a"] = a[0, 0] if matrix == "norm" else a[0]
        more |= {"w_bar": a[1]} if matrix == "belief" else {"a_max": a[1]} if matrix == "amsgrad" else {}

    def after(rounds: int) -> dict[str, Any]:
        return paper.call(adamfcgd, world.x0, paper.everyone[:rounds], *functions, q, **arguments, **more)

    out = after(len(paper.everyone))
    if matrix == "identity" and not given:  # the printed loop over t
        printed = paper.call(mfcgd, world.x0, paper.everyone, *functions, q, **arguments)
        np.testing.assert_allclose(printed["x"], out["x"], atol=1e-12)
    result = {"x": out["x"]}
    if matrix != "identity":
        below = {"belief": [out["w_bar"]], "amsgrad": [out["a_max"]]}.get(matrix, [])
        result["a"] = np.array([np.atleast_1d(out["a"]), *below])
    if options.get("average"):
        result["mean"] = np.mean([after(r + 1)["x"] for r in range(len(paper.everyone))], axis=0)
    return result | {f"{key[0]}_k": paper.back(out[key]) for key in ("x_k", "h", *(("w",) if product else ("u", "v")))}


def keep_estimates(world: World, case: Case, server: Vectors, rng: np.random.Generator) -> Rows:
    assert isinstance(world, Composition)
    d = len(world.x0)
    r = len(world.inner(lambda level: drawn(world.data, 0, (0,) * 5, 0, batch_size=1), world.x0))
    rows = {"x": world.x0 + 0.3 * rng.normal(size=(N, d)), "h": rng.normal(size=(N, r))}
    u, v = rng.normal(size=(N, r, d)), rng.normal(size=(N, r))
    rows |= {"w": np.einsum("krd,kr->kd", u, v)} if case.options.get("jacobian") == "product" else {"u": u, "v": v}
    return {key: dict(enumerate(value)) for key, value in rows.items()}


# --- methods ---------------------------------------------------------------------------------------------------------


SCGD: Options = {"beta": 0.1, "eta": 0.9, "gamma": 0.6, "steps": 3}
STORM: Options = {"gamma": 0.1, "eta": 0.8, "steps": 3, "alpha": 0.6, "beta": 0.5, "varrho": 0.7}
ADAPTIVE: Options = {"theta": 0.8, "rho": 0.3, "matrix": "adam", "first_matrix": "average"}
composition = partial(Method, family="composition", worlds=COMPOSITIONS, least={"x": 3e-3})


def local(name: str, build: Any, method: Callable[..., Vectors], options: Options, home: str = "mixed") -> Method:
    return composition(name, build=build, reference=partial(local_rounds, method), options=options, home=home)


LOCAL = [
    local("comfedl", fs.ComFedL, comfedl_round, {"lr": 0.1, "steps": 3, "normalise": False}),
    composition(
        "comfedl, normalised",
        build=fs.ComFedL,
        reference=normalised_comfedl,
        options={"lr": 0.1, "steps": 3},
        home="robust, exp",
    ),
    local("local_scgd", fs.LocalSCGD, scgd_round, SCGD),
    local("local_scgdm", fs.LocalSCGDM, scgd_round, {**SCGD, "alpha": 0.7}),
    local("local_moml", fs.LocalMOML, moml_round, {"lr": 0.2, "beta": 0.6, "steps": 3, "first_batches": 2}, "maml"),
]
FEDNEST = composition(
    "fednest, composition",
    build=fs.FedNest,
    reference=fednest_rounds,
    options={"alpha": 0.2, "beta": 0.7, "inner_rounds": 2, "steps": 3},
    home="mixed, global",
)
storm = partial(composition, reference=storm_rounds, keep=keep_estimates, home="mixed", rounds=3)
ADAMFCGD = storm("adamfcgd", build=fs.AdaMFCGD, options={**STORM, **ADAPTIVE})
STORMS = [storm("mfcgd", build=fs.MFCGD, options=STORM), ADAMFCGD]
METHODS = {method.name: method for method in (*LOCAL, FEDNEST, *STORMS)}


# --- rows ------------------------------------------------------------------------------------------------------------


FULL = {**USUAL, "one step": Case(options={"steps": 1})}
SCHEDULES = {"cube root": fs.CubeRoot(0.9, 2.0), "round decay": fs.RoundDecay(0.5, 0.6)}
ABOVE_1: dict[str, Options] = {
    "local_scgd": {"eta": fs.CubeRoot(2.5, 2.0)},
    "local_scgdm": {"eta": fs.CubeRoot(2.5, 2.0)},
    "local_moml": {"beta": fs.CubeRoot(1.5, 1.0)},
}
THEOREM: Options = {"weights": "theorem", "eta": fs.CubeRoot(1.3, 2.0), "alpha": 1.4, "beta": 0.7, "varrho": 0.5}
BALLS: Options = {"c_g": 0.9, "c_f": 1.1}
FORMS = ("exact", "product")
MATRICES = ("adam", "norm", "belief", "amsgrad")
OF_STORMS = {
    **FULL,
    "four steps": Case(options={"steps": 4}),
    "theorem": Case(options=THEOREM),
    "theorem, round decay": Case(options={**THEOREM, "eta": fs.RoundDecay(0.9, 0.7)}),
    "theorem, given state": Case(options=THEOREM, given=True, first_round=2),
    "first batches": Case(options={"first_batches": 5}),
    "first batches, epochs": Case(options={"first_batches": 2}, sampling="epochs"),
    "weights above 1": Case(options={"alpha": fs.CubeRoot(2.5, 2.0), "beta": 3.0}),
    "average": Case(options={"average": True}),
}


def worlds_of(name: str) -> list[str]:
    """The worlds that a method is for."""
    if name == "local_moml":
        return ["maml", "maml, first order", "maml, support"]
    if name == "fednest, composition":
        return [w for w in COMPOSITIONS if "global" in w]
    if name == "comfedl, normalised":
        return [w for w in COMPOSITIONS if w.startswith(("robust", "damaml")) and "global" not in w]
    unlike = {"comfedl": (), "local_scgd": ("damaml", "maml, support", "robust, prepared")}.get(name, ("damaml",))
    return [w for w in COMPOSITIONS if "global" not in w and not w.startswith(("constant", *unlike))]


def right_rows() -> Iterator[Row]:
    for method in (*LOCAL, FEDNEST):
        for world in worlds_of(method.name):
            yield method.row("minibatches", world=world)
        for label, case in (FULL if method is FEDNEST else {**FULL, **PARTIAL, **PASSES}).items():
            yield method.row(label, case)
        if method.name in ABOVE_1:
            yield method.row("weights above 1", Case(options=ABOVE_1[method.name]))
        yield from method.scheduled(SCHEDULES, Case())
    for method in STORMS:
        for world in worlds_of(method.name):
            one = "exact" if world.startswith("robust") else "product"
            for form in (one,) if method is ADAMFCGD else FORMS:
                yield in_form(method, form, "minibatches", Case(), world)
        for label, case in OF_STORMS.items():
            yield from (in_form(method, form, label, case) for form in FORMS)
        for row in method.scheduled(SCHEDULES, Case(), theta={"first_matrix": "accumulator"}):
            yield from (in_form(method, form, f"{row.label}, {row.form}", row.case) for form in FORMS)
        yield method.row("auto")
        for world in ("mixed", "maml", "robust, exp"):
            yield in_form(method, "exact", "projected", Case(options=BALLS), world)
    for matrix in MATRICES:
        for first in ("average", "accumulator", "identity"):
            case = Case(options={"matrix": matrix, "first_matrix": first})
            yield in_form(ADAMFCGD, "exact", f"{matrix}, {first}", case)
        for form in FORMS:
            given = Case(options={"matrix": matrix}, given=True, first_round=2)
            yield in_form(ADAMFCGD, form, f"{matrix}, given state", given)
            one_step = Case(options={"matrix": matrix, "steps": 1})
            yield in_form(ADAMFCGD, form, f"{matrix}, one step", one_step, "robust, exp")
    yield ADAMFCGD.row("the first theta", Case(rounds=1, options={"theta": SCHEDULES["round decay"]}))


def in_form(method: Method, form: str, label: str, case: Case, world: str = "") -> Row:
    return method.row(label, replace(case, options={**case.options, "jacobian": form}), world, form)


def wrong_rows() -> Iterator[Row]:
    for method in METHODS.values():
        yield from method.usual_mistakes()
    comfedl, normalised, moml = (METHODS[name] for name in ("comfedl", "comfedl, normalised", "local_moml"))

    def built(build: Callable[..., World], *arguments: Any, **options: Any) -> Callable[[World], World]:
        """Another world."""
        return lambda _: build(*arguments, **options)

    yield normalised.wrong("most", Case(participation=2), "robust, prepared", tweaks={"most": 1.98})
    other = built(robust_world, np.exp, shift=None, gamma=0.15, most=N + 1)
    yield normalised.wrong("tangent", Case(batch_size=1), "robust, prepared", world_of=other)
    yield comfedl.wrong("gamma", None, "robust, exp", world_of=built(robust_world, np.exp, gamma=GAMMA * 1.01))
    yield comfedl.wrong("shift", None, "robust, exp", world_of=built(robust_world, np.exp, shift=SHIFT * 1.01))
    other = built(robust_world, lambda t: 2.02 / (1 + np.exp(-2.02 * t)), link=steep)
    yield comfedl.wrong("link", None, "robust, own link", world_of=other)
    yield comfedl.wrong("order", None, "damaml, first order", world_of=built(damaml_world, first_order=False))
    yield moml.wrong("inner lr", arguments={"inner_lr": INNER_LR * 1.01})
    yield moml.wrong("order", arguments={"first_order": True})
    for method in STORMS:
        yield method.wrong("form", Case(options={"jacobian": "exact"}), options={"jacobian": "product"})
        product, theorem = Case(options={"jacobian": "product"}), Case(options=THEOREM)
        for key in ("alpha", "beta"):
            yield method.wrong(f"{key}, product", product, options={key: STORM[key] * 1.01})
        yield method.wrong("first batches", options={"first_batches": 4})
        for key, radius in BALLS.items():
            for value in (radius * 1.01, None):
                yield method.wrong(f"{key} {value}", Case(options=BALLS), options={key: value})
        yield method.wrong("no theorem", theorem, options={"weights": "constant"})
        for key in ("alpha", "beta", "varrho"):
            yield method.wrong(f"{key}, theorem", theorem, options={key: 0.99 * THEOREM[key]})
        yield method.wrong("eta, theorem", theorem, options={"eta": fs.CubeRoot(1.3, 2.1)})
    for matrix in MATRICES:
        case = Case(given=True, first_round=2, options={"matrix": matrix})
        for key in ("rho", "theta"):
            yield ADAMFCGD.wrong(f"{key}, {matrix}", case, options={key: ADAPTIVE[key] * 1.01})
        yield ADAMFCGD.wrong(f"{matrix}, not adam", case, options={"matrix": "norm" if matrix == "adam" else "adam"})
    for first in ("accumulator", "identity"):
        yield ADAMFCGD.wrong(f"first matrix {first}", options={"first_matrix": first})
