"""Rates of FedLALR: theorems 1 and 2, corollaries 1, 2 and 3, on a problem with bounded gradients.

python experiments/rates.py run 003/speedup
"""

from __future__ import annotations

import math
from typing import Any

import fedstrata as fs
from rates import Line, Settings, Study, Values, follow
from rates_problems import wells

EPS, LIPSCHITZ = 0.3, 2.0
LARGEST = 3 * EPS / (20 * LIPSCHITZ)
"""Theorem 1 wants alpha <= 3 eps / (20 L)."""

FACTOR = 0.355
"""Of sqrt(N / sum K_t) in the step size: the largest that keeps every point of the studies below ``LARGEST``."""

ROUNDS = 1600
METHODS: dict[str, dict[str, Any]] = {
    "FedLALR": {},
    "restart": {"restart": True},
    "maximum": {"aggregate": "max"},
    "interval": {"steps": fs.schedules.Interval(3, 4.0)},
}


def measure(
    seed: int, *, method: str, N: int = 4, rounds: int = ROUNDS, q: int = 5, lr: float = 0.0, rate_of: int = 0
) -> Values:
    """Return the gradient norm: at the step size of corollary 1, for N or for ``rate_of`` clients, or at ``lr``."""
    options = {"steps": q, **METHODS[method]}
    counts = [fs.schedules.steps_at(options["steps"], r) for r in range(rounds)]
    rate = lr or min(FACTOR * math.sqrt((rate_of or N) / sum(counts)), LARGEST)
    known = wells(N, seed)
    algorithm = fs.FedLALR(lr=rate, eps=EPS, **options)
    values = follow(known, algorithm, rounds=rounds, batch_size=1, seed=seed, steps=counts)
    return {**values, "T": sum(counts)}


CLIENTS: list[Settings] = [{"N": n} for n in (1, 2, 4, 8, 16, 32)]
CONTROL: list[Settings] = [{"N": 1, "rate_of": n} for n in (1, 2, 4, 8, 16, 32)]
HORIZONS: list[Settings] = [{"rounds": rounds} for rounds in (200, 400, 800, 1600, 3200)]
STEPS: list[Settings] = [{"q": q, "rounds": 1000} for q in (1, 2, 4, 8, 16)]
CLIENTS_FIXED: list[Settings] = [{"N": n, "lr": 0.01, "rounds": 800} for n in (1, 2, 4, 8, 16, 32)]
WORDS = {"FedLALR": "corollary 1", "restart": "corollary 2", "maximum": "corollary 3", "interval": "theorem 2"}

AT_RATE, LATE, FIXED = "step size of corollary 1", "the same, second half", "step size 0.01, second half"
RATIO, IN_T, IN_Q = "over one client at the same step size", "N = 4, step size of corollary 1", "the same, 1,000 rounds"


def lines(method: str, words: str) -> list[Line]:
    """Return the lines of a method."""

    def line(name: str, at: list[Settings], x: str, y: str, panel: str, **more: Any) -> Line:
        return Line(f"{method}, {name}", shared, at, x, y, panel=panel, label=method, **more)

    shared, law = {"method": method}, {"expected": -1 / 2, "theorem": words}
    one = Line(
        f"{method}, one client", shared, CONTROL, "rate_of", "late_square", panel=LATE, label=f"{method}, one client"
    )
    made = [
        line("N", CLIENTS, "N", "square", AT_RATE, **law),
        line("N, second half", CLIENTS, "N", "late_square", LATE, **law),
        one,
        line("N over one client", CLIENTS, "N", "late_square", RATIO, over=one.name),
        line("N, fixed step", CLIENTS_FIXED, "N", "late_square", FIXED, expected=-1, theorem="theorem 1"),
        line("T", HORIZONS, "T", "square", IN_T, **law),
    ]
    return made if method == "interval" else [*made, line("q", STEPS, "q", "square", IN_Q, **law)]


STUDIES = [
    Study(
        "003",
        "speedup",
        "FedLALR: squared gradient norm",
        measure,
        [line for method, words in WORDS.items() for line in lines(method, words)],
        {"square": r"mean of $\|\nabla f\|^2$", "late_square": r"mean of $\|\nabla f\|^2$"},
        lambda seed: wells(4, seed).constants | {"eps": EPS, "largest alpha": LARGEST},
        f"Step size {FACTOR} sqrt(N / sum K_t), at most 3 eps / (20 L); five local steps of one sample, or 3 + log_4 t "
        f"(interval); {ROUNDS:,} rounds where N varies. Every N has the same problem.",
    )
]
