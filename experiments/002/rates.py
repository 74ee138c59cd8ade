"""Rates of LocalSMCGDAM: theorem 4.4 and its remarks, on towers of levels with a known solution.

python experiments/rates.py run 002/levels 002/speedup 002/estimation
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

import fedstrata as fs
from fedstrata.algorithms.algorithm import ANY_LEVELS
from fedstrata.algorithms.layered import State, estimate_levels
from rates import Known, Line, Settings, Study, Values, follow, rounds_until

TAU = 4
NOISE = 0.5


class MovingAverage(fs.Algorithm):
    """LocalSMCGDAM with a moving average in place of eq. (9); with one level it is LocalSCGDAM."""

    name = "moving_average"
    levels = ANY_LEVELS
    dual = True
    inner_mean = "global"

    eta: float = fs.param(0.3, "eta, a common factor of steps and weights", above=0)
    gamma_x: float = fs.param(0.33, "step size of x, multiplied by eta", above=0)
    gamma_y: float = fs.param(0.33, "step size of y, multiplied by eta", above=0)
    rho: float = fs.param(3.3, "weight of a fresh gradient in p and q, multiplied by eta", above=0)
    alpha: float = fs.param(3.0, "weight of fresh inner values, multiplied by eta", above=0)
    steps: int = fs.param(4, "local steps per round, tau", least=1)
    first_batches: int = fs.param(1, "batches for the first estimates", least=1)

    def start(self, x: torch.Tensor, y: torch.Tensor, clients: fs.Clients) -> State:
        """Allocate the estimates; the first step of the run sets them."""
        return State.empty(x, y, clients)

    def round(self, s: State, clients: fs.Clients) -> State:
        """Average everything."""
        return s.plus(clients.mean(self.local, s.h, s.y, s.p, s.q), clients)

    @fs.remote
    def local(self, client: fs.Client, h: Any, y: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> tuple[Any, ...]:
        """Take tau local steps: step, then h_j <- (1 - w) h_j + w g_j(h_{j-1}) from level 1 on, then p and q."""
        k = client.variables(h=h, y=y, p=p, q=q)
        if client.first:
            estimate_levels(client, k, batches=self.first_batches, weight_decay=0.0)
        weight, fresh = min(1.0, self.alpha * self.eta), min(1.0, self.rho * self.eta)
        for _ in client.loop(self.steps, k):
            k.h[0] = k.h[0] - self.gamma_x * self.eta * k.p
            k.y = client.project_y(k.y + self.gamma_y * self.eta * k.q)
            x, *estimates = k.h
            chain = client.chain(x, client.draw_all(), k.y, [(1 - weight) * old for old in estimates], weight)
            k.h = [x, *(torch.lerp(old, new, weight) for old, new in zip(estimates, chain.values, strict=True))]
            k.p, k.q = torch.lerp(k.p, chain.gradient, fresh), torch.lerp(k.q, chain.outer_grads[1], fresh)
        return k.updates(h=h, y=y, p=p, q=q)


def composed(tower: fs.Quadratic, x: torch.Tensor) -> torch.Tensor:
    """Return G(x): the noise of a client's samples averages to 0 in every level."""
    batch = tower.data.train.of_client(0)
    for level in tower.problem.levels:
        x = level(x, batch)
    return x


def known_tower(clients: int, levels: int, bend: float, seed: int) -> tuple[Known, fs.Quadratic]:
    """Return a tower with the exact norm of grad Phi, Phi = max_y f(G(x), y) = ||G(x) - b||^2 / 2, and the tower."""
    tower = fs.tower(clients=clients, levels=levels, bend=bend, noise=NOISE, seed=seed)
    goal = tower.data.train.of_client(0)[1].mean(0)

    def norm(x: torch.Tensor) -> float:
        value, pull = torch.func.vjp(lambda z: composed(tower, z), x)
        return float(pull(value - goal)[0].norm())

    rows = [tower.data.train.of_client(k)[0] for k in range(clients)]
    slopes = max(float(r[..., 0].abs().max()) for r in rows)
    constants = {
        "C_g": 1 + bend + slopes,
        "L_g": bend + slopes,
        "L_f": 1.0,
        "mu": 1.0,
        "delta": NOISE * math.sqrt(2 * tower.problem.x0.numel()),
        "C_g^K": (1 + bend) ** levels,
    }
    return Known(tower.problem, tower.data, norm, constants), tower


def at_rate(eta: float, tau: int = TAU, first_batches: int = 16) -> fs.LocalSMCGDAM:
    """Return LocalSMCGDAM with gamma_y = 10 gamma_x, near to what theorem 4.4 asks for; the rest is the default."""
    return fs.LocalSMCGDAM(eta=eta, gamma_x=0.33, gamma_y=3.3, steps=tau, first_batches=first_batches)


FACTOR, PERIODS = 4 / 3, 2.0
"""Remark 4.5: eta is FACTOR sqrt(N / T), tau is PERIODS T^(1/4) / N^(3/4), with sqrt(T / N) first batches."""

TARGET = 0.3
"""Of the root of the mean of ||grad Phi||^2 over all rounds so far, which theorem 4.4 bounds."""


def speedup(seed: int, *, N: int, T: int, eta: float = 0.0, q: int = TAU, K: int = 3, bend: float = 0.03) -> Values:
    """Return the gradient norm over T steps, as in remark 4.5, or at a fixed ``eta`` with q local steps per round."""
    known, _ = known_tower(N, K, bend, seed)
    if eta:
        algorithm = at_rate(eta, q)
    else:
        q = max(1, round(PERIODS * T**0.25 / N**0.75))
        algorithm = at_rate(FACTOR * math.sqrt(N / T), q, round(math.sqrt(T / N)))
    return follow(known, algorithm, rounds=round(T / q), batch_size=1, seed=seed)


def levels(seed: int, *, K: int, bend: float, eta: float) -> Values:
    """Return the steps after which the mean of ||grad Phi||^2 over the rounds so far is at most TARGET^2."""
    known, _ = known_tower(8, K, bend, seed)
    return {"steps": TAU * rounds_until(known, at_rate(eta), TARGET, rounds=500, batch_size=2, seed=seed)}


class Watch(fs.Callback):
    """Measures how far h^(K) is from G(x) after every round."""

    def __init__(self, tower: fs.Quadratic) -> None:
        self.tower, self.errors = tower, list[float]()

    def on_round(self, round: int, state: State) -> None:
        """Measure."""
        self.errors.append(float((state.h[-1] - composed(self.tower, state.x)).norm()))


def estimation(seed: int, *, kind: str, eta: float, K: int = 3, steps: int = 2400) -> Values:
    """Return the root mean square of ||h^(K) - G(x)|| over the second half, with weights alpha eta^2 or alpha eta."""
    tower = known_tower(8, K, 0.03, seed)[1]
    make: Any = fs.LocalSMCGDAM if kind == "storm" else MovingAverage
    watch = Watch(tower)
    how: dict[str, Any] = {"rounds": steps // TAU, "batch_size": 4, "seed": seed, "threads": 1, "eval_every": steps}
    algorithm = make(eta=eta, alpha=3.0, steps=TAU, first_batches=16)
    try:
        fs.train(tower.problem, tower.data, algorithm, evaluate=lambda *_: {}, callbacks=[watch], **how)
    except fs.Diverged:
        return {"error": math.inf, "1/eta": 1 / eta}
    errors = np.array(watch.errors[len(watch.errors) // 2 :])
    return {"error": math.sqrt(float((errors**2).mean())), "1/eta": 1 / eta}


KS: list[Settings] = [{"K": k} for k in (1, 2, 3, 4, 5)]
NS: list[Settings] = [{"N": n} for n in (1, 2, 4, 8, 16)]
HORIZONS: list[Settings] = [{"T": T} for T in (400, 800, 1600, 3200, 6400)]
QS: list[Settings] = [{"q": q} for q in (1, 2, 4, 8, 16, 32)]
ETAS: list[Settings] = [{"eta": eta} for eta in (0.03, 0.06, 0.12, 0.24, 0.48)]
GRID: list[Settings] = [{"eta": eta} for eta in (0.3, 0.2, 0.13, 0.09, 0.06)]


def bends(bend: float) -> list[Line]:
    """Return the lines of towers whose levels bend so much."""
    one, best = f"bend {bend}, eta = 0.06", f"bend {bend}, best eta"
    bound: dict[str, Any] = {"expected": 2, "theorem": "theorem 4.4"}
    shared = {"bend": bend}
    return [
        Line(one, shared | {"eta": 0.06}, KS, "K", "steps", panel="eta = 0.06", label=f"bend {bend}", **bound),
        Line(best, shared, KS, "K", "steps", choices=ETAS, panel="best eta for each K", label=f"bend {bend}", **bound),
    ]


REMARK, FIXED = "remark 4.5", {"eta": 0.1}
IN_N, FLOOR, IN_T = "remark 4.5, T = 6,400", "eta = 0.1, T = 800", "remark 4.5, N = 4"
IN_K, IN_TAU = "remark 4.5, N = 4, T = 1,600", "eta = 0.1, N = 4, T = 800"
SQUARE = r"mean of $\|\nabla\Phi\|^2$"
STUDIES = [
    Study(
        "002",
        "levels",
        "LocalSMCGDAM: local steps to a gradient norm, by the number of levels",
        levels,
        [line for bend in (0.03, 0.1, 0.2) for line in bends(bend)],
        {"steps": rf"local steps to $\|\nabla\Phi\| \leq {TARGET}$"},
        lambda seed: known_tower(8, 5, 0.1, seed)[0].constants,
        f"Towers with a dual, eight clients, tau = {TAU}, two samples per level and step; the best eta, of 0.03, "
        "0.06, 0.12, 0.24 and 0.48, is that of the other seeds. The constants are those of bend 0.1 with five levels.",
    ),
    Study(
        "002",
        "speedup",
        "LocalSMCGDAM: squared gradient norm by clients, iterations and local steps",
        speedup,
        [
            Line("N", {"T": 6400}, NS, "N", "square", -1 / 2, REMARK, panel=IN_N, label="all steps"),
            Line(
                "N, second half", {"T": 6400}, NS, "N", "late_square", -1 / 2, REMARK, panel=IN_N, label="second half"
            ),
            Line(
                "N, fixed eta",
                FIXED | {"T": 800},
                NS,
                "N",
                "late_square",
                -1,
                "eta / N",
                panel=FLOOR,
                label="second half",
            ),
            Line("T", {"N": 4}, HORIZONS, "T", "square", -1 / 2, REMARK, panel=IN_T, label="all steps"),
            Line(
                "T, second half",
                {"N": 4},
                HORIZONS,
                "T",
                "late_square",
                -1 / 2,
                REMARK,
                panel=IN_T,
                label="second half",
            ),
            Line("T, fixed eta", FIXED | {"N": 4}, HORIZONS, "T", "square", panel=IN_T, label="all steps, eta = 0.1"),
            Line("K", {"N": 4, "T": 1600}, KS, "K", "square", 2, REMARK, panel=IN_K, label="all steps"),
            Line(
                "tau, fixed eta",
                FIXED | {"N": 4, "T": 800},
                QS,
                "q",
                "square",
                2,
                "theorem 4.4",
                panel=IN_TAU,
                label="all steps",
            ),
        ],
        {"square": SQUARE, "late_square": SQUARE},
        lambda seed: known_tower(4, 3, 0.03, seed)[0].constants,
        "Towers with a dual, K = 3, bend 0.03, one sample per level and step; eta = 4/3 sqrt(N / T), tau = 2 T^(1/4) / "
        "N^(3/4), sqrt(T / N) first batches.",
    ),
    Study(
        "002",
        "estimation",
        "Error of h^(3): STORM against a moving average",
        estimation,
        [
            Line(
                "STORM",
                {"kind": "storm"},
                GRID,
                "1/eta",
                "error",
                -1 / 2,
                "lemma B.4",
                panel="weights 3 eta^2 and 3 eta",
            ),
            Line("moving average", {"kind": "average"}, GRID, "1/eta", "error", panel="weights 3 eta^2 and 3 eta"),
            Line(
                "STORM / moving average",
                {"kind": "storm"},
                GRID,
                "1/eta",
                "error",
                over="moving average",
                panel="ratio",
            ),
        ],
        {"error": r"root mean square of $\|h^{(3)} - G(x)\|$"},
        lambda seed: known_tower(8, 3, 0.03, seed)[0].constants,
        "Tower with K = 3, bend 0.03, eight clients, four samples per level and step, 2,400 steps, of which the second "
        "half counts; alpha = 3, both methods on the same samples.",
    ),
]
