"""Equations of the methods for saddles: min_x max_y without levels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import fedstrata as fs
from algorithms.equations import PARTIAL, PASSES, USUAL, Case, Method, Options, Row, Vectors
from algorithms.paper import Paper
from algorithms.saddle_papers import (
    cdma_rounds,
    coda_rounds,
    codasca_rounds,
    fednest_rounds,
    keep_centre,
    keep_centre_and_variates,
    keep_momenta,
    keep_point,
    keep_snapshot,
    keep_variates,
    momentum_rounds,
    plus_rounds,
    sagda_rounds,
    sgda_rounds,
    storm_rounds,
)
from reference.local_sgda import local_sgda_plus, local_sgdam_plus
from saddle_worlds import SADDLES
from worlds import World

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
SNAPSHOT: dict[str, Any] = {
    "keep": keep_snapshot,
    "rounds": 3,
    "wrong_in": {"steps": None, "snapshot_every": None},
}
CENTRE: dict[str, Any] = {"keep": keep_centre_and_variates, "rounds": 3, "unseen": ("total_k",)}


def saddle(name: str, build: Any, reference: Callable[[Paper], Vectors], options: Options, **more: Any) -> Method:
    return Method(name, "saddle", SADDLES, build, reference, options, **{"home": "free", **more})


STORMS = [
    saddle("fgda", fs.FGDA, storm_rounds, STORM, keep=keep_point, unseen=("w_k", "v_k")),
    saddle("fgda, single", fs.FGDA, storm_rounds, {**STORM, **SINGLE}, keep=keep_point, rounds=3),
    saddle("adafgda", fs.AdaFGDA, storm_rounds, {**STORM, **ADAPTIVE}, keep=keep_point, unseen=("w_k", "v_k")),
    saddle(
        "adafgda, single",
        fs.AdaFGDA,
        storm_rounds,
        {**STORM, **ADAPTIVE, **SINGLE},
        keep=keep_point,
        rounds=3,
    ),
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
        unseen=("x_0_k", "total_k", "y_k"),
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
