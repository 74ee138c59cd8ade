"""Equations of AFL and DRFA, whose dual weights the clients. The reference of DRFA gets what the server drew."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

import fedstrata as fs
from algorithms.equations import RIGHT, TOLERANCE, Case, Method, Row, Vectors
from algorithms.paper import Paper
from plain_worlds import MIXTURES
from reference.afl import afl
from reference.drfa import drfa
from worlds import N, Vector


def gradient(paper: Paper, k: int, r: int, t: int, x: Vector) -> Vector:
    decay = paper.options.get("weight_decay", 0.0)
    return paper.world.gradient(paper.batch(k, r, t), x) + decay * x


def loss(paper: Paper, k: int, r: int, x: Vector, exchange: int) -> float:
    return float(paper.world.loss(paper.batch(k, r, 0, exchange), x))


def afl_rounds(paper: Paper) -> Vectors:
    out = paper.call(
        afl,
        paper.world.x0,
        paper.world.y0,
        len(paper.ours.cohorts),
        partial(gradient, paper),
        lambda k, r, x: loss(paper, k, r, x, exchange=0),
        lr=paper.server_rate("lr"),
        lr_lambda=paper.server_rate("dual_lr"),
    )
    return {key: out[key.replace("y", "lam")] for key in ("x", "y", "x_mean", "y_mean")}


def drfa_rounds(paper: Paper) -> Vectors:
    """One call per round, to compare the mixture with the probabilities that the server drew by."""
    x, y, steps, ours = paper.world.x0, paper.world.y0, paper.options["steps"], paper.ours
    number = N if paper.case.participation == 1.0 else paper.case.participation
    draws = zip(ours.cohorts[1::3], ours.cohorts[2::3], ours.integers, ours.probabilities, strict=True)
    for r, (drawn, asked, (low, high, snapshot), probabilities) in enumerate(draws):
        if paper.change is RIGHT:
            assert (low, high) == (1, steps)
            assert len(drawn) == len(asked) == len(set(asked)) == number
            np.testing.assert_allclose(probabilities, y, atol=TOLERANCE)
        out = paper.call(
            drfa,
            x,
            y,
            [drawn],
            [paper.tweak("snapshot", min(snapshot, steps))],
            [asked],
            lambda k, _, t, x, r=r: gradient(paper, k, r, t, x),
            lambda k, _, x, r=r: loss(paper, k, r, x, exchange=1),
            steps,
            lr=lambda _, t, r=r: paper.rate("lr")(r, t),
            lr_lambda=paper.server_rate("dual_lr")(r),
        )
        x, y = out["x"], out["lam"]
    return {"x": x, "y": y}


mixture = partial(
    Method,
    family="mixture",
    worlds=MIXTURES,
    home="agnostic softmax",
    rounds=3,
    least={"x": 0.03, "y": 0.01},
    wrong_in={"weighting": None},
)
AFL = mixture("afl", build=fs.AFL, reference=afl_rounds, options={"lr": 0.3, "dual_lr": 0.1})
DRFA = mixture(
    "drfa", build=fs.DRFA, reference=drfa_rounds, options={"lr": 0.2, "dual_lr": 0.05, "steps": 4, "weight_decay": 0.0}
)
METHODS = {method.name: method for method in (AFL, DRFA)}
SCHEDULES = {"cube root": fs.CubeRoot(0.3, 2.0), "round decay": fs.RoundDecay(0.3, 0.6)}
USUAL = {
    "minibatches": Case(chunk=2),
    "full batches": Case(batch_size=None),
    "one at a time": Case(chunk=1),
    "together": Case(chunk=N),
    "epochs": Case(sampling="epochs", batch_size=4),
    "weighted": Case(weighting="samples"),
    "out of the simplex": Case(options={"dual_lr": 3.0}),
    **{f"{rate}, {name}": Case(options={rate: s}) for rate in ("lr", "dual_lr") for name, s in SCHEDULES.items()},
}
OF_DRFA = {
    "partial": Case(participation=3),
    "partial, weighted": Case(participation=2, weighting="samples", chunk=1),
    "partial, epochs": Case(participation=4, sampling="epochs", batch_size=4),
    "one step": Case(options={"steps": 1}, participation=3),
    "seven steps": Case(options={"steps": 7}, participation=3),
    "weight decay": Case(options={"weight_decay": 0.2}, participation=3),
}


def right_rows() -> Iterator[Row]:
    for method in METHODS.values():
        for label, case in (USUAL if method is AFL else {**USUAL, **OF_DRFA}).items():
            yield method.row(label, case)


def wrong_rows() -> Iterator[Row]:
    yield from AFL.usual_mistakes()
    yield from DRFA.usual_mistakes(Case(participation=3))
    yield DRFA.wrong("last iterates as snapshots", Case(participation=3), tweaks={"snapshot": 4})
