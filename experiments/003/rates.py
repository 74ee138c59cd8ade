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
"""Of sqrt(N / sum K_t) in the step size: about the largest that keeps every point below ``LARGEST``."""

ROUNDS = 1600
LONGER: Settings = {"rounds": 4 * ROUNDS, "c": 2 * FACTOR}
"""With restarts the momentum, and so the step, is about a quarter: the initial phase takes longer."""

METHODS: dict[str, dict[str, Any]] = {
    "FedLALR": {},
    "restart": {"restart": True},
    "maximum": {"aggregate": "max"},
    "interval": {"steps": fs.schedules.Interval(3, 4.0)},
}


def measure(
    seed: int,
    *,
    method: str,
    N: int = 4,
    rounds: int = ROUNDS,
    q: int = 5,
    lr: float = 0.0,
    rate_of: int = 0,
    c: float = FACTOR,
) -> Values:
    """Return the gradient norm: at the step size of corollary 1, for N or for ``rate_of`` clients, or at ``lr``."""
    options = {"steps": q, **METHODS[method]}
    counts = [fs.schedules.steps_at(options["steps"], r) for r in range(rounds)]
    rate = lr or min(c * math.sqrt((rate_of or N) / sum(counts)), LARGEST)
    known = wells(N, seed)
    algorithm = fs.FedLALR(lr=rate, eps=EPS, **options)
    values = follow(known, algorithm, rounds=rounds, batch_size=1, seed=seed, steps=counts)
    return {**values, "T": sum(counts)}


CLIENTS: list[Settings] = [{"N": n} for n in (1, 2, 4, 8, 16, 32)]
CONTROL: list[Settings] = [{"N": 1, "rate_of": n} for n in (1, 2, 4, 8, 16, 32)]
HORIZONS: list[Settings] = [{"rounds": rounds} for rounds in (200, 400, 800, 1600, 3200)]
STEPS: list[Settings] = [{"q": q, "rounds": 1000} for q in (1, 2, 4, 8, 16)]
WORDS = {"FedLALR": "corollary 1", "restart": "corollary 2", "maximum": "corollary 3", "interval": "theorem 2"}

AT_RATE, LATE, FIXED = "step size of corollary 1", "the same, second half", "fixed step size, second half"
RATIO, IN_T, IN_Q = "over one client at the same step size", "N = 4, step size of corollary 1", "the same, 1,000 rounds"


def lines(method: str, words: str) -> list[Line]:
    """Return the lines of a method."""
    shared, law = {"method": method}, {"expected": -1 / 2, "theorem": words}
    clients = shared | LONGER if method == "restart" else shared
    fixed = {"lr": LARGEST, "rounds": ROUNDS} if method == "restart" else {"lr": 0.01, "rounds": 800}
    one = f"{method}, one client"

    def line(name: str, settings: Settings, at: list[Settings], x: str, y: str, panel: str, **more: Any) -> Line:
        return Line(f"{method}, {name}", settings, at, x, y, panel=panel, label=method, **more)

    made = [
        line("N", clients, CLIENTS, "N", "square", AT_RATE, **law),
        line("N, second half", clients, CLIENTS, "N", "late_square", LATE, **law),
        line(
            "N, fixed step size", shared | fixed, CLIENTS, "N", "late_square", FIXED, expected=-1, theorem="theorem 1"
        ),
        line("T", shared, HORIZONS, "T", "square", IN_T, **law),
    ]
    if method != "interval":
        made.append(line("q", shared, STEPS, "q", "square", IN_Q, **law))
    if method in ("FedLALR", "restart"):
        made += [
            Line(one, clients, CONTROL, "rate_of", "late_square", panel=LATE),
            line("N over one client", clients, CLIENTS, "N", "late_square", RATIO, over=one),
        ]
    return made


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
        f"(interval). Where N varies: {ROUNDS:,} rounds, with restarts {4 * ROUNDS:,} and twice the factor; every N "
        f"has the same problem. Fixed step size: 0.01, with restarts {LARGEST}.",
    )
]
