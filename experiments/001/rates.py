"""Rates of ComFedL: theorems 1 and 2, and the bias of its gradients with small batches.

python experiments/rates.py run 001/theorems
"""

from __future__ import annotations

import math

import fedstrata as fs
from rates import Line, Settings, Study, Values, follow
from rates_problems import composition

CLIENTS, TAU = 8, 4


def measure(seed: int, *, T: int, b: int, q: int = TAU, c: float = 1.0, lr: float = 0.0, same: bool = False) -> Values:
    """Return the gradient norm over T local steps with batches of b: at the step size c / sqrt(T), or at ``lr``.

    ``same``: all clients have one outer function, and it is known exactly (theorem 2).
    """
    known = composition(CLIENTS, seed, same_outer=same)
    algorithm = fs.ComFedL(lr=lr or c / math.sqrt(T), steps=q)
    return follow(known, algorithm, rounds=T // q, batch_size=b, seed=seed)


HORIZONS = (128, 256, 512, 1024, 2048, 4096)
GROWING: list[Settings] = [{"T": T, "b": T // 4} for T in HORIZONS]
BATCHES: list[Settings] = [{"b": b} for b in (1, 2, 4, 8, 16, 32, 64)]
LONG: list[Settings] = [{"T": T} for T in (*HORIZONS, 16384)]
TAUS: list[Settings] = [{"q": q} for q in (1, 2, 4, 8, 16, 32)]
BIAS: Settings = {"T": 2048, "lr": 0.02}

IN_T, IN_SAMPLES, IN_B, IN_Q = "iterations", "samples, b = T / 4", "T = 2,048, second half", "T = 2,048, b = 64"

ONE_OUTER: Settings = {**BIAS, "same": True}


def line(
    name: str, shared: Settings, at: list[Settings], x: str, y: str, slope: float, source: str, panel: str, label: str
) -> Line:
    """Return a line whose label differs from its name."""
    return Line(name, shared, at, x, y, slope, source, panel=panel, label=label)


STUDIES = [
    Study(
        "001",
        "theorems",
        "ComFedL: squared gradient norm",
        measure,
        [
            Line("b = T / 4", {}, GROWING, "T", "square", -1 / 2, "remark 1", panel=IN_T),
            Line("b = T / 4, one outer", {"same": True}, GROWING, "T", "square", -1 / 2, "remark 2", panel=IN_T),
            Line("b = T / 4, step size 0.1", {"lr": 0.1}, GROWING, "T", "square", panel=IN_T),
            Line("b = 16", {"b": 16}, LONG, "T", "square", panel=IN_T),
            Line("b = 1", {"b": 1}, LONG, "T", "square", panel=IN_T),
            line("samples", {}, GROWING, "samples", "square", -1 / 4, "epsilon^-8", IN_SAMPLES, "b = T / 4"),
            line("bias", BIAS, BATCHES, "b", "late_square", -1 / 2, "theorem 1", IN_B, "two expectations"),
            line("bias, one outer", ONE_OUTER, BATCHES, "b", "late_square", -1 / 2, "theorem 2", IN_B, "one outer"),
            Line("tau, step size 0.02", {**BIAS, "b": 64}, TAUS, "q", "square", 1, "theorem 1", panel=IN_Q),
            Line("tau, step size 0.1", {**BIAS, "b": 64, "lr": 0.1}, TAUS, "q", "square", 1, "theorem 1", panel=IN_Q),
        ],
        {"square": r"mean of $\|\nabla F\|^2$", "late_square": r"mean of $\|\nabla F\|^2$"},
        lambda seed: composition(CLIENTS, seed).constants,
        "Eight clients that differ; tau = 4, step size 1 / sqrt(T), inner and outer batches of b samples; the bias is "
        "measured at step size 0.02. One outer: all clients have one outer function, without noise (theorem 2).",
    )
]
