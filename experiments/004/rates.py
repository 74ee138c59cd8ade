"""Rates of FGDA and AdaFGDA: theorems 1 and 2, and the complexities of Table 1.

python experiments/rates.py run 004/theorems 004/table1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fedstrata as fs
from rates import Line, Settings, Study, Values, follow
from rates_problems import saddle

N = 8
GAMMA, LAM = 0.5, 1.0
"""Step sizes of x and y, times eta_t."""

FACTOR, WEIGHT = 0.5, 4.0
"""eta_t = FACTOR N^(1/3) / (T + t)^(1/3); the weights alpha and beta are WEIGHT eta_t^2."""

RHO = 0.3
"""Of AdaFGDA's matrices: assumption 7 wants A and B above rho."""


def theorem(T: int, N: int, factor: float = FACTOR) -> dict[str, Any]:
    """Return FGDA's options by theorem 2: n = ``factor``, m = T, which is O(q^3) as in remark 2."""
    eta = fs.schedules.Power(factor * N ** (1 / 3), float(T), 1 / 3)
    return {"eta": eta, "gamma": GAMMA, "lam": LAM, "alpha": WEIGHT, "beta": WEIGHT, "weights": "theorem"}


METHODS: dict[str, Callable[[int, int, int], fs.Algorithm]] = {
    "FGDA": lambda T, q, N: fs.FGDA(steps=q, **theorem(T, N)),
    "AdaFGDA": lambda T, q, N: fs.AdaFGDA(steps=q, rho=RHO, **theorem(T, N, ADAPTIVE * FACTOR)),
    "FGDA, single exchange": lambda T, q, N: fs.FGDA(steps=q, synchronisation="single", **theorem(T, N)),
    "FGDA, weights 0.5": lambda T, q, N: fs.FGDA(
        steps=q, **{**theorem(T, N), "weights": "constant", "alpha": 0.5, "beta": 0.5}
    ),
    "FGDA, fixed": lambda T, q, N: fs.FGDA(steps=q, gamma=0.05, lam=0.1, alpha=0.05, beta=0.05),
}
ADAPTIVE = 0.4
"""Of AdaFGDA's step sizes relative to FGDA's: its matrices are below 1."""

RIVALS: dict[str, Callable[[float, int], fs.Algorithm]] = {
    "Local-SGDA": lambda lr, q: fs.LocalSGDA(lr=lr / 2, dual_lr=lr, steps=q),
    "Local-SGDAM": lambda lr, q: fs.LocalSGDAM(lr=lr / 2, dual_lr=lr, steps=q, beta=0.1),
    "SAGDA": lambda lr, q: fs.SAGDA(lr=lr / 2, dual_lr=lr, steps=q),
    "CDMA": lambda lr, q: fs.CDMA(lr=lr / 2, dual_lr=lr, steps=q),
    "FedNest": lambda lr, q: fs.FedNest(alpha=q * lr / 2, beta=q * lr, steps=q),
    "FGDA": lambda lr, q: fs.FGDA(gamma=lr / 2, lam=lr, steps=q, alpha=FRESH * lr**2, beta=FRESH * lr**2),
    "AdaFGDA": lambda lr, q: fs.AdaFGDA(
        gamma=ADAPTIVE * lr / 2, lam=ADAPTIVE * lr, steps=q, rho=RHO, alpha=FRESH * lr**2, beta=FRESH * lr**2
    ),
}
FRESH = 4.0
"""The weight of a fresh gradient over the squared step size."""


def measure(seed: int, *, method: str, T: int, q: int, N: int = N) -> Values:
    """Return the gradient norm of F over T steps."""
    return follow(saddle(N, seed), METHODS[method](T, q, N), rounds=T // q, batch_size=1, seed=seed)


def compared(seed: int, *, method: str, T: int, q: int, lr: float) -> Values:
    """Return the gradient norm of F over T steps at a constant step size."""
    values = follow(saddle(N, seed), RIVALS[method](lr, q), rounds=T // q, batch_size=1, seed=seed)
    return {**values, "T": T}


GRID: list[Settings] = [{"T": q**3, "q": q} for q in (8, 11, 15, 20, 26)]
QS: list[Settings] = [{"q": q} for q in (2, 4, 8, 16, 32, 64)]
NS: list[Settings] = [{"N": n} for n in (1, 2, 4, 8, 16, 32)]
SHORT: list[Settings] = [{"T": q**3, "q": q} for q in (6, 9, 13, 18)]
RATES: list[Settings] = [{"lr": lr} for lr in (0.4, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005)]
IN_T, IN_ROUNDS, IN_Q, IN_N = "q = T^(1/3)", "q = T^(1/3), in rounds", "T = 4,096", "T = 4,096, q = 16"
COMPLEXITY = {
    "Local-SGDA": (6, 4),
    "Local-SGDAM": (4, 3),
    "SAGDA": (4, 2),
    "CDMA": (3, 3),
    "FedNest": (4, 4),
    "FGDA": (3, 2),
    "AdaFGDA": (3, 2),
}
"""Table 1: epsilon to minus these powers are the gradients and the rounds that a method needs."""


def theorem_lines() -> list[Line]:
    """Return the lines of theorems 1 and 2."""
    named = {"FGDA": "theorem 2", "AdaFGDA": "theorem 1"}
    lines = []
    for method in METHODS:
        bound = -1 / 3 if "fixed" not in method and "weights" not in method else None
        words = named.get(method.split(",")[0], "") if bound else ""
        lines.append(Line(method, {"method": method}, GRID, "T", "mean", bound, words, panel=IN_T))
    for method, words in named.items():
        shared = {"method": method}
        lines += [
            Line(
                f"{method}, rounds", shared, GRID, "rounds", "mean", -1 / 2, "epsilon^-2", panel=IN_ROUNDS, label=method
            ),
            Line(f"{method}, q", shared | {"T": 4096}, QS, "q", "mean", 1 / 2, words, panel=IN_Q, label=method),
            Line(
                f"{method}, N", shared | {"T": 4096, "q": 16}, NS, "N", "mean", -1 / 6, words, panel=IN_N, label=method
            ),
        ]
    return lines


def table_lines() -> list[Line]:
    """Return the lines of Table 1: the gradient norm that is reached with so many samples, or rounds."""
    lines = []
    for method, (samples, rounds) in COMPLEXITY.items():
        for x, power in (("samples", samples), ("rounds", rounds)):
            words = f"epsilon^-{power}"
            lines.append(
                Line(
                    f"{method}, {x}",
                    {"method": method},
                    SHORT,
                    x,
                    "mean",
                    -1 / power,
                    words,
                    choices=RATES,
                    panel=x,
                    label=method,
                )
            )
    return lines


NORM = r"mean of $\|\nabla F\|$"
STUDIES = [
    Study(
        "004",
        "theorems",
        "FGDA and AdaFGDA: gradient norm",
        measure,
        theorem_lines(),
        {"mean": NORM},
        lambda seed: saddle(N, seed).constants,
        f"Eight clients that differ; one sample per step; eta_t = {FACTOR} N^(1/3) / (T + t)^(1/3), gamma = {GAMMA}, "
        f"lambda = {LAM:g}, weights {WEIGHT:g} eta_t^2; AdaFGDA with rho = {RHO} and {ADAPTIVE} times the step size.",
    ),
    Study(
        "004",
        "table1",
        "Table 1: gradient norm with so many samples and rounds",
        compared,
        table_lines(),
        {"mean": NORM},
        lambda seed: saddle(N, seed).constants,
        "Every method at constant step sizes, with q = T^(1/3); at each T the step size of x is the best for the other "
        "seeds of half of 0.005, 0.01, 0.02, 0.05, 0.1, 0.2 and 0.4, that of y twice that. CDMA takes a gradient on "
        "all of a client's data in every round, so it meets no noise there, and pays with samples.",
    ),
]
