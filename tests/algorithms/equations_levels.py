"""Equations of the methods for several levels with a global inner mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import fedstrata as fs
from algorithms.equations import PARTIAL, USUAL, Case, Method, Options, Row, Vectors
from algorithms.paper import Paper
from reference.local_scgdam import local_scgdam
from reference.local_smcgdam import local_smcgdam
from towers import HOME, SETS, TOWERS, Slopes
from worlds import Arrays, Vector


class Levels:
    """The functions of a tower by the reference's client, round and step; step -1 makes the first estimates."""

    def __init__(self, paper: Paper) -> None:
        self.paper = paper

    def batch(self, c: int, r: int, t: int, level: int, stream: int = 0) -> Arrays:
        first = t < 0
        stream += self.paper.tweak("first_stream", 1) if first else 0
        times = self.paper.options.get("first_batches", 1) if first else 1
        return self.paper.batch(self.paper.copies[c], r, max(t, 0), level=level, stream=stream, times=times)

    def value(self, c: int, r: int, t: int, j: int, u: Vector) -> Vector:
        return self.paper.world.level(j, self.batch(c, r, t, j), u)

    def pullback(self, c: int, r: int, t: int, j: int, u: Vector, v: Vector, stream: int = 0) -> Vector:
        """The penalty's gradient is added at the end, to that in x."""
        found = self.paper.world.pullback(j, self.batch(c, r, t, j, 10 * stream), u, v)
        return found + self.paper.options.get("weight_decay", 0.0) * u if j == 1 else found

    def outer(self, c: int, r: int, t: int, u: Vector, y: Vector | None) -> Slopes:
        return self.paper.world.outer(self.batch(c, r, t, 0), u, y)


def weight(paper: Paper, key: str, power: int = 1) -> Callable[[int, int], float]:
    """A weight that, times eta^power, is at most 1."""
    plain, eta = paper.rate(key), paper.rate("eta")
    return lambda r, t: min(plain(r, t), 1 / eta(r, t) ** power) if paper.tweak("cuts", True) else plain(r, t)


def usual_arguments(paper: Paper) -> dict[str, Any]:
    rates = {key: paper.rate(key) for key in ("eta", "gamma_x", "gamma_y")}
    return {**rates, "project_y": paper.world.project, "first_round": paper.case.first_round}


def several_levels(paper: Paper) -> Vectors:
    world, server, levels = paper.world, paper.ours.server, Levels(paper)
    arguments = usual_arguments(paper) | {"alpha": weight(paper, "alpha", 2), "levels": world.levels}
    arguments |= {"rho_x": weight(paper, "rho_x"), "rho_y": weight(paper, "rho_y")}
    if paper.case.given:
        h = [server[f"h.{j}"] for j in range(1, world.levels + 1)]
        arguments |= {"h": h, "p": server["p"], "q": server.get("q")}
    functions = levels.value, levels.pullback, levels.outer, paper.options["steps"]
    out = paper.call(local_smcgdam, world.x0, world.y0, paper.cohorts(), *functions, **arguments)
    named = {"y": out["y"], "p": out["p"], "q": out["q"]}
    named |= {f"h.{j}": value for j, value in enumerate([out["x"], *out["h"]])}
    return {key: value for key, value in named.items() if value is not None}


def one_level(paper: Paper) -> Vectors:
    world, server, levels = paper.world, paper.ours.server, Levels(paper)
    arguments = usual_arguments(paper) | {"alpha": weight(paper, "alpha")}
    arguments |= {"beta_x": weight(paper, "rho_x"), "beta_y": weight(paper, "rho_y")}
    if paper.case.given:
        arguments |= {"h": server["h.1"], "m": server["p"], "s": server.get("q")}

    def inner(c: int, r: int, t: int, x: Vector) -> Vector:
        return levels.value(c, r, t, 1, x)

    def inner_vjp(c: int, r: int, t: int, x: Vector, v: Vector, stream: int = 0) -> Vector:
        return levels.pullback(c, r, t, 1, x, v, stream)

    functions = inner, inner_vjp, levels.outer, paper.options["steps"]
    out = paper.call(local_scgdam, world.x0, world.y0, paper.cohorts(), *functions, **arguments)
    named = {"h.0": out["x"], "h.1": out["h"], "y": out["y"], "p": out["m"], "q": out["s"]}
    return {key: value for key, value in named.items() if value is not None}


RATES: Options = {"eta": 0.6, "gamma_x": 0.3, "gamma_y": 0.4, "rho_x": 1.1, "rho_y": 0.9, "steps": 3}
levels = partial(Method, family="levels", worlds=TOWERS)
SMCGDAM = levels(
    "local_smcgdam", build=fs.LocalSMCGDAM, reference=several_levels, options={**RATES, "alpha": 1.3}, home=HOME
)
SCGDAM = levels("local_scgdam", build=fs.LocalSCGDAM, reference=one_level, options={**RATES, "alpha": 0.8}, home="5-3")
METHODS = {method.name: method for method in (SMCGDAM, SCGDAM)}
SCHEDULES: dict[str, Any] = {"cube root": fs.CubeRoot(0.9, 2.0), "step": fs.StepDecay(0.8, (0.3, 2), 0.6)}
CASES = {
    **USUAL,
    "three rounds": Case(rounds=3),
    "given state, partial": Case(given=True, first_round=2, participation=2, rounds=3),
    "one step": Case(options={"steps": 1}, rounds=3),
    "two steps": Case(options={"steps": 2}),
    **{label: replace(case, rounds=3) for label, case in PARTIAL.items()},
    "first batches": Case(options={"first_batches": 4}),
    "first batches, epochs": Case(options={"first_batches": 2}, sampling="epochs"),
    "weight decay": Case(options={"weight_decay": 0.2}),
    "weight decay, given state": Case(options={"weight_decay": 0.2}, given=True, first_round=3),
    "weights above 1": Case(options={"alpha": 4.0, "rho_x": 1.9, "rho_y": 2.5}),
    "weights above 1 at first": Case(options={"eta": fs.CubeRoot(1.6, 1.0)}, rounds=3),
}
ELSEWHERE = {
    "5-3": Case(given=True, first_round=3),
    "5-1-1, no dual": Case(given=True, first_round=3, options={"steps": 2}),
    "4-6-2-5": Case(given=True, first_round=2, participation=3, options={"steps": 1}),
    "4-6-2-5, no dual": Case(chunk=1, options={"weight_decay": 0.1}),
    f"{HOME}, simplex": Case(chunk=2, rounds=3),
    "auc, 2, prepared, scaled": Case(weighting="samples"),
    "auc, 3": Case(sampling="epochs", batch_size=4, options={"steps": 2}),
    "auc, 2, network": Case(chunk=1, participation=3),
    "risk averse": Case(sampling="stratified", chunk=2, options={"weight_decay": 0.1}),
    "tower, 3": Case(given=True, first_round=1, options={"eta": SCHEDULES["cube root"]}),
}
MOVING_AVERAGE = "1.0 if first else _at(alpha, r, t) * _at(eta, r, t)"
LINES: dict[str, dict[str, tuple[str, str]]] = {
    "local_smcgdam": {
        "old values at new points": ("at_old = g.value(r, t, j, old[j - 1])", "at_old = g.value(r, t, j, new[j - 1])"),
        "new values at old points": ("at_new = g.value(r, t, j, new[j - 1])", "at_new = g.value(r, t, j, old[j - 1])"),
        "a fresh batch for new values": ("g.value(r, t, j, new[j - 1])", "g.value(r, t + 7, j, new[j - 1])"),
        "a fresh batch for old values": ("g.value(r, t, j, old[j - 1])", "g.value(r, t + 7, j, old[j - 1])"),
        "moving averages": ("keep * (old[j] - at_old) + at_new", "keep * old[j] + (1 - keep) * at_new"),
        "eta, not squared": ("rate**2", "rate"),
        "f at the old level": ("g.gradients(r, t, new, y_k)", "g.gradients(r, t, [*new[:-1], old[-1]], y_k)"),
        "Jacobians at old points": ("g.gradients(r, t, new, y_k)", "g.gradients(r, t, [*old[:-1], new[-1]], y_k)"),
        "a Jacobian at the old x": ("g.gradients(r, t, new, y_k)", "g.gradients(r, t, [old[0], *new[1:]], y_k)"),
        "gradients at the server's y": ("g.gradients(r, t, new, y_k)", "g.gradients(r, t, new, y)"),
        "one client's x": ("x = _mean([state[0] for state in states])", "x = states[0][0]"),
        "one client's y": ("_mean([state[1] for state in states])", "states[0][1]"),
        "one client's h": ("_mean([state[2][j] for state in states])", "states[0][2][j]"),
        "one client's p": ("p = _mean([state[3] for state in states])", "p = states[0][3]"),
        "one client's q": ("_mean([state[4] for state in states])", "states[0][4]"),
        "old momenta last": ("(1.0 - weight) * p_k + weight * u", "(1.0 - weight) * u + weight * p_k"),
        "old dual momenta last": ("(1.0 - weight) * q_k + weight * v", "(1.0 - weight) * v + weight * q_k"),
        "descent in y": ("y_k + _at(gamma_y, r, t) * rate * q_k", "y_k - _at(gamma_y, r, t) * rate * q_k"),
    },
    "local_scgdam": {
        "f at the fresh value": ("outer(k, r, t, h_k.copy(),", "outer(k, r, t, value.copy(),"),
        "the Jacobian at the server's x": ("inner_vjp(k, r, t, x_k.copy(),", "inner_vjp(k, r, t, x.copy(),"),
        "alpha alone": (MOVING_AVERAGE, "1.0 if first else _at(alpha, r, t)"),
        "eta squared": (MOVING_AVERAGE, f"{MOVING_AVERAGE} ** 2"),
        "descent in y": ("y_k + _at(gamma_y, r, t)", "y_k - _at(gamma_y, r, t)"),
    },
}
OF_THE_DUAL = {
    *("gradients at the server's y", "one client's y", "one client's q", "old dual momenta last", "descent in y"),
    *("gamma_y", "rho_y"),
}
OTHER: dict[str, dict[str, Any]] = {"cube root": {"n": 2.02}, "step": {"at": (0.3, 1)}}


def with_schedules(method: Method) -> Iterator[Row]:
    return method.scheduled(SCHEDULES, Case(rounds=3), "5-3" if method is SCGDAM else "5-3-7")


def right_rows() -> Iterator[Row]:
    """Every method in each of its worlds, and in its home in every case."""
    for method in (SMCGDAM, SCGDAM):
        for name, build in TOWERS.items():
            if method is SMCGDAM or build().levels == 1:
                yield method.row("minibatches", world=name)
        for label, case in CASES.items():
            yield method.row(label, case)
        yield from with_schedules(method)
    for name, case in ELSEWHERE.items():
        yield SMCGDAM.row("another case", case, name)
    yield SCGDAM.row("given state", CASES["given state"], "5-3, no dual")
    partial_decay = Case(participation=2, rounds=3, options={"weight_decay": 0.1})
    yield SCGDAM.row("partial, weight decay", partial_decay, "5-3, no dual")


def wrong_rows() -> Iterator[Row]:
    for method in (SMCGDAM, SCGDAM):
        name, plain = method.name, f"{method.home}, no dual"
        mistakes = [*method.usual_mistakes()]
        mistakes += [method.wrong(label, lines=(line,)) for label, line in LINES[name].items()]
        mistakes.append(method.wrong("first estimates averaged", arguments={"average_initial": True}))
        mistakes.append(method.wrong("Jacobians on other batches", arguments={"stream_jacobian": 1}))
        yield from mistakes
        yield from (replace(row, world=plain) for row in mistakes if row.label not in OF_THE_DUAL)
        for row in with_schedules(method):
            other = replace(SCHEDULES[row.form], **OTHER[row.form])
            yield method.wrong(f"{row.label}, another {row.form}", row.case, row.world, options={row.label: other})
        yield method.wrong("first batches", CASES["first batches"], options={"first_batches": 3})
        for decay in ("weight decay", "weight decay, given state"):
            yield method.wrong(decay, CASES[decay], options={"weight_decay": 0.202})
        yield method.wrong("first batches are those of the first step", tweaks={"first_stream": 0})
        yield method.wrong("weights of their own", CASES["weights above 1"], tweaks={"cuts": False})
        for name in ("ball",) if method is SCGDAM else SETS:
            yield method.wrong("no projection", None, f"{method.home}, {name}", arguments={"project_y": None})
    for name in ("5-3", "5-1-1", HOME, f"{HOME}, no dual"):
        yield SMCGDAM.wrong("own points after an averaging", None, name, arguments={"base": "own"})
    yield SCGDAM.wrong("estimates first", arguments={"order": "estimate_first"})
