"""Rates of MFCGD and AdaMFCGD: theorems 1 and 2, and the complexities of Table 1.

python experiments/rates.py run 000/theorems 000/table1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import fedstrata as fs
from fedstrata.algorithms.estimators import storm, weight_of
from fedstrata.core.schedules import Rate
from rates import Line, Settings, Study, Values, follow
from rates_problems import composition


class State(NamedTuple):
    """The point, and the mean estimate of the gradient."""

    x: torch.Tensor
    w: torch.Tensor


class MFCGDTwoPhase(fs.Algorithm):
    """MFCGD mended in two places: w is averaged at a synchronisation, and the Jacobian has its own inner batch.

    w estimates the product J^T grad f by STORM, as ``jacobian = "product"`` does. After the server's step every client
    follows to the new point from its own old one, and the new w is averaged, as the proof of theorem 1 needs it.
    """

    name = "mfcgd_two_phase"
    levels = range(1, 2)
    full_participation = True

    gamma: float = fs.param(0.1, "step size, multiplied by eta", above=0)
    eta: Rate = fs.param(1.0, "eta_t")
    steps: int = fs.param(5, "q, local steps per round", least=1)
    alpha: float = fs.param(0.5, "weight of a fresh inner value, times eta_t^2", above=0)
    beta: float = fs.param(0.5, "weight of a fresh gradient, times eta_t^2", above=0)

    def start(self, x: torch.Tensor, y: torch.Tensor, clients: fs.Clients) -> State:
        """Average the first estimates."""
        return State(x, clients.mean(self.first, x))

    def round(self, s: State, clients: fs.Clients) -> State:
        """Average x and w, step, and average the estimates at the new point."""
        dx, w = clients.mean(self.local, s.w)
        x = s.x + dx - clients.rate(self.eta, after=self.steps - 1) * self.gamma * w
        return State(x, clients.mean(self.refresh, x))

    def move(self, client: fs.Client, k: Any, x: torch.Tensor) -> None:
        """Go to x; the estimates follow, the gradient's with a batch of the Jacobian that h has not seen."""
        eta, inner, other, outer = client.rate(self.eta), client.draw(1), client.draw(1, stream=1), client.draw(0)
        h = storm(k.h, client.g(1, x, inner), client.g(1, k.x, inner), weight_of(client, self.alpha, eta**2))
        new = client.g_vjp(1, x, client.f_grads(h, outer)[0], other)
        old = client.g_vjp(1, k.x, client.f_grads(k.h, outer)[0], other)
        k.w, k.x, k.h = storm(k.w, new, old, weight_of(client, self.beta, eta**2)), x, h

    @fs.remote
    def first(self, client: fs.Client, x: torch.Tensor) -> torch.Tensor:
        """Return the first estimate."""
        size = client.worth(self.steps)
        h = client.g(1, x, client.draw(1, 0, size))
        w = client.g_vjp(1, x, client.f_grads(h, client.draw(0, 0, size))[0], client.draw(1, 1, size))
        client.keep(x=x, h=h)
        return w

    @fs.remote
    def local(self, client: fs.Client, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take q - 1 steps."""
        k = client.recall("x", "h", w=w)
        x = k.x
        for _ in client.loop(self.steps - 1, k):
            self.move(client, k, k.x - client.rate(self.eta) * self.gamma * k.w)
        client.keep(k)
        return k.x - x, k.w

    @fs.remote
    def refresh(self, client: fs.Client, x: torch.Tensor) -> torch.Tensor:
        """Return the estimate at the server's new point."""
        k = client.recall("x", "h", "w")
        for _ in client.loop(1, k):
            self.move(client, k, x)
        client.keep(x=x, h=k.h)
        return k.w


N, SPREAD = 8, 0.5
FACTOR, WEIGHT = 0.5, 16.0
"""eta_t = FACTOR / (T + t)^(1/3), with gamma = 1; the weights alpha, beta and varrho are WEIGHT eta_t^2."""

RHO, ADAPTIVE = 0.3, 0.3
"""Of AdaMFCGD's matrix; and its step sizes relative to MFCGD's, since its matrix is below 1."""


def weights(weight: float, kind: str) -> dict[str, Any]:
    """Return the options of the three weights."""
    return {"alpha": weight, "beta": weight, "varrho": weight, "weights": kind}


def by_theorem(T: int, q: int, factor: float = FACTOR) -> dict[str, Any]:
    """Return MFCGD's options by theorem 2: k = ``factor``, n = T, which is O(q^3) as in remark 3."""
    eta = fs.schedules.Power(factor, float(T), 1 / 3)
    return {"eta": eta, "gamma": 1.0, "steps": q, "jacobian": "exact", **weights(WEIGHT, "theorem")}


def two_phases(T: int, q: int) -> MFCGDTwoPhase:
    """Return the mended algorithm at the same schedule."""
    eta = fs.schedules.Power(FACTOR, float(T), 1 / 3)
    return MFCGDTwoPhase(gamma=1.0, eta=eta, steps=q, alpha=WEIGHT, beta=WEIGHT)


METHODS: dict[str, Callable[[int, int], fs.Algorithm]] = {
    "MFCGD": lambda T, q: fs.MFCGD(**by_theorem(T, q)),
    "AdaMFCGD": lambda T, q: fs.AdaMFCGD(**by_theorem(T, q, ADAPTIVE * FACTOR), rho=RHO),
    "AdaMFCGD, norm": lambda T, q: fs.AdaMFCGD(**by_theorem(T, q, ADAPTIVE * FACTOR), rho=RHO, matrix="norm"),
    "MFCGD, product": lambda T, q: fs.MFCGD(**{**by_theorem(T, q), "jacobian": "product"}),
    "MFCGD, two phases": two_phases,
    "MFCGD, fixed": lambda T, q: fs.MFCGD(gamma=0.1, steps=q, jacobian="exact", **weights(0.05, "constant")),
    "ComFedL, b = 1": lambda T, q: fs.ComFedL(lr=2 / T**0.5, steps=q),
}

RIVALS: dict[str, Callable[[float, int], fs.Algorithm]] = {
    "ComFedL": lambda lr, q: fs.ComFedL(lr=lr, steps=q),
    "LocalMOML": lambda lr, q: fs.LocalMOML(lr=lr, steps=q),
    "Local-SCGDM": lambda lr, q: fs.LocalSCGDM(beta=lr, alpha=0.2, gamma=0.5, steps=q),
    "MFCGD": lambda lr, q: fs.MFCGD(gamma=lr, steps=q, jacobian="exact", **weights(WEIGHT * lr**2, "constant")),
    "MFCGD, two phases": lambda lr, q: MFCGDTwoPhase(gamma=lr, steps=q, alpha=WEIGHT * lr**2, beta=WEIGHT * lr**2),
    "AdaMFCGD": lambda lr, q: fs.AdaMFCGD(
        gamma=ADAPTIVE * lr, steps=q, jacobian="exact", rho=RHO, **weights(WEIGHT * lr**2, "constant")
    ),
}


def measure(seed: int, *, method: str, T: int, q: int, N: int = N, equal: bool = False) -> Values:
    """Return the gradient norm over T steps; with ``equal`` clients they also have the same objective for every N."""
    known = composition(N, seed, SPREAD, equal=equal)
    return follow(known, METHODS[method](T, q), rounds=T // q, batch_size=1, seed=seed)


def compared(seed: int, *, method: str, T: int, q: int, lr: float, b: int = 1) -> Values:
    """Return the gradient norm over T / b steps with batches of b, at a constant step size."""
    return follow(composition(N, seed, SPREAD), RIVALS[method](lr, q), rounds=T // (q * b), batch_size=b, seed=seed)


GRID: list[Settings] = [{"T": q**3, "q": q} for q in (8, 11, 15, 20, 26)]
QS: list[Settings] = [{"q": q} for q in (2, 4, 8, 16, 32, 64)]
NS: list[Settings] = [{"N": n} for n in (1, 2, 4, 8, 16, 32)]
BUDGETS: list[Settings] = [{"T": T, "q": q} for T, q in ((512, 8), (1024, 10), (2048, 13), (4096, 16))]
RATES: list[Settings] = [{"lr": lr} for lr in (0.4, 0.2, 0.1, 0.05, 0.02, 0.01)]
WITH_BATCHES: list[Settings] = [{"lr": lr, "b": b} for b in (1, 4, 16) for lr in (0.4, 0.2, 0.1, 0.05, 0.02)]
IN_T, IN_ROUNDS, IN_Q, IN_N = "q = T^(1/3)", "q = T^(1/3), in rounds", "T = 4,096", "T = 4,096, q = 16, equal clients"
COMPLEXITY = {"ComFedL": 8, "LocalMOML": 5, "Local-SCGDM": 4, "MFCGD": 3, "AdaMFCGD": 3, "MFCGD, two phases": 3}
"""Table 1: epsilon to minus this power samples."""


def theorem_lines() -> list[Line]:
    """Return the lines of theorems 1 and 2."""
    lines = []
    for method in METHODS:
        bound = None if method in ("MFCGD, fixed", "ComFedL, b = 1") else -1 / 3
        words = "" if bound is None else "theorem 1" if method.startswith("Ada") else "theorem 2"
        lines.append(Line(method, {"method": method}, GRID, "T", "mean", bound, words, panel=IN_T))
    equal = {"method": "MFCGD", "equal": True}
    lines.insert(1, Line("MFCGD, equal clients", equal, GRID, "T", "mean", -1 / 3, "theorem 2", panel=IN_T))
    for method in ("MFCGD", "MFCGD, two phases"):
        own, many = {"method": method}, {"method": method, "T": 4096, "q": 16, "equal": True}
        lines += [
            Line(f"{method}, rounds", own, GRID, "rounds", "mean", -1 / 2, "epsilon^-2", panel=IN_ROUNDS, label=method),
            Line(f"{method}, q", own | {"T": 4096}, QS, "q", "mean", 1 / 2, "theorem 2", panel=IN_Q, label=method),
            Line(f"{method}, N", many, NS, "N", "mean", panel=IN_N, label=method),
        ]
    return lines


def table_line(method: str, power: int) -> Line:
    """Return a line of Table 1: the gradient norm that is reached with so many samples."""
    choices = WITH_BATCHES if method == "ComFedL" else RATES
    shared, words = {"method": method}, f"epsilon^-{power}"
    return Line(method, shared, BUDGETS, "samples", "mean", -1 / power, words, choices=choices, panel="best step size")


NORM = r"mean of $\|\nabla F\|$"
STUDIES = [
    Study(
        "000",
        "theorems",
        "MFCGD and AdaMFCGD: gradient norm",
        measure,
        theorem_lines(),
        {"mean": NORM},
        lambda seed: composition(N, seed, SPREAD).constants,
        f"Eight clients that differ, or that have the same samples (equal); one sample per step; gamma = 1, "
        f"eta_t = {FACTOR:g} / (T + t)^(1/3), weights {WEIGHT:g} eta_t^2; AdaMFCGD with rho = {RHO} and {ADAPTIVE} "
        "times the step size.",
    ),
    Study(
        "000",
        "table1",
        "Table 1: gradient norm with so many samples",
        compared,
        [table_line(method, power) for method, power in COMPLEXITY.items()],
        {"mean": NORM},
        lambda seed: composition(N, seed, SPREAD).constants,
        "Every method at constant step sizes, q about T^(1/3); at each number of samples the step size (for ComFedL "
        "also the batch size, 1, 4 or 16) is the best for the other seeds.",
    ),
]
