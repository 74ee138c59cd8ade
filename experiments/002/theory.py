"""What theorem 4.4 of the LocalSMCGDAM paper and its remarks promise, measured on problems with a known solution.

    python experiments/002/theory.py estimation|levels|speedup|all [--seeds 5] [--out DIR]

estimation:  how far h^(K) is from the true G(x): STORM (eq. 9) against a moving average, both on the same samples.
levels:      local steps to a fixed stationarity for K = 1..5.
speedup:     the stationarity after a fixed number of steps for N = 1..16 clients.

Each writes a plot and, next to it, its numbers as JSON, to ``--out``, by default the folder ``figures`` here.
Each seed has its own problem, starting point and batches.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.stats import t as student

import fedstrata as fs
from fedstrata.algorithms.algorithm import ANY_LEVELS
from fedstrata.algorithms.layered import State, estimate_levels

Tensors = tuple[torch.Tensor, ...]
Exact = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Measure = Callable[[State], tuple[float, ...]]
Done = Callable[[list[tuple[float, ...]]], bool]
Json = dict[str, Any]

TAU = 4
"""Local steps per round, everywhere: tau of the paper."""

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"


# --- what is compared, and what is measured -------------------------------------------------------------------------


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
            estimate_levels(client, k, batches=1, weight_decay=0.0)
        weight, fresh = min(1.0, self.alpha * self.eta), min(1.0, self.rho * self.eta)
        for _ in client.loop(self.steps, k):
            k.h[0] = k.h[0] - self.gamma_x * self.eta * k.p
            k.y = client.project_y(k.y + self.gamma_y * self.eta * k.q)
            x, *estimates = k.h
            chain = client.chain(x, client.draw_all(), k.y, [(1 - weight) * old for old in estimates], weight)
            k.h = [x, *(torch.lerp(old, new, weight) for old, new in zip(estimates, chain.values, strict=True))]
            k.p, k.q = torch.lerp(k.p, chain.gradient, fresh), torch.lerp(k.q, chain.outer_grads[1], fresh)
        return k.updates(h=h, y=y, p=p, q=q)


class Reached(Exception):
    """Ends a run that has got where it should."""


class Watch(fs.Callback):
    """Measures the server's state every so many rounds, and ends the run when that is enough."""

    def __init__(self, measure: Measure, every: int, done: Done) -> None:
        self.measure, self.every, self.done = measure, every, done
        self.values: list[tuple[float, ...]] = []

    def on_round(self, round: int, state: State) -> None:
        """Measure."""
        if round % self.every == 0:
            self.values.append(self.measure(state))
            if self.done(self.values):
                raise Reached


def watched(
    problem: fs.Problem,
    data: fs.FederatedData,
    algorithm: fs.Algorithm,
    measure: Measure,
    *,
    rounds: int,
    batch_size: int,
    seed: int,
    every: int = 1,
    done: Done = lambda values: False,
) -> np.ndarray:
    """Train, all clients together, and return what was measured: [times, measures]; shorter if it diverged."""
    watch = Watch(measure, every, done)
    settings: Json = {"rounds": rounds, "batch_size": batch_size, "seed": seed, "chunk": data.clients, "threads": 1}
    with suppress(Reached, fs.Diverged):
        fs.train(problem, data, algorithm, **settings, evaluate=lambda *_: {}, eval_every=rounds, callbacks=[watch])
    return np.array(watch.values)


def exact_tower(tower: fs.Quadratic) -> Exact:
    """Return x -> G(x) and grad Phi(x), Phi = ||G - b||^2 / 2; noise averages to 0 over one client's samples."""
    batch = tower.data.train.of_client(0)
    goal = batch[1].mean(0)

    def composed(x: torch.Tensor) -> torch.Tensor:
        for level in tower.problem.levels:
            x = level(x, batch)
        return x

    def exact(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value, pull = torch.func.vjp(composed, x)
        return value, pull(value - goal)[0]

    return exact


def exact_mean(problem: fs.Problem, data: fs.FederatedData) -> Exact:
    """Return x -> G(x), the mean over clients of their levels on all their data, and G(x) - x."""
    batches = [data.train.of_client(k) for k in range(data.clients)]

    def composed(x: torch.Tensor, batch: Tensors) -> torch.Tensor:
        for level in problem.levels:
            x = level(x, batch)
        return x

    def exact(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value = torch.stack([composed(x, batch) for batch in batches]).mean(0)
        return value, value - x

    return exact


def interval(values: Sequence[float]) -> Json:
    """Return the mean over seeds and its 95 % interval by Student's t."""
    v = np.array(values, dtype=float)
    half = student.ppf(0.975, len(v) - 1) * v.std(ddof=1) / math.sqrt(len(v))
    return {"mean": v.mean(), "low": v.mean() - half, "high": v.mean() + half}


def slope(at: Sequence[float], values: np.ndarray) -> Json | None:
    """Return the slope of log(values) against log(at), fitted for each seed: [seeds, at]; None if some are missing."""
    if not np.isfinite(values).all():
        return None
    return interval([float(np.polyfit(np.log(at), np.log(row), 1)[0]) for row in values])


def shown(fit: Json | None) -> str:
    """Write an interval as text."""
    return "no slope" if fit is None else f"{fit['mean']:.2f} [{fit['low']:.2f}, {fit['high']:.2f}]"


# --- 1: estimation --------------------------------------------------------------------------------------------------

ETA = 0.3
WEIGHTS = (0.01, 0.03, 0.1, 0.27, 0.5, 0.9)
PAPER = {"storm": 0.27, "average": 0.9}
"""Weights of a fresh value at alpha = 3, eta = 0.3: alpha eta^2 and alpha eta."""

METHODS = {"storm": "STORM", "average": "moving average"}


@dataclass(frozen=True)
class Task:
    """A problem on which h is compared with G(x): step sizes are gamma eta, of x and of y."""

    name: str
    levels: int
    step_sizes: tuple[float, ...]
    batch_size: int
    rounds: int
    every: int = 1
    most_seeds: int = 1000


TASKS = (
    Task("tower, K = 1", 1, (0.01, 0.1), batch_size=4, rounds=75),
    Task("tower, K = 3", 3, (0.01, 0.1), batch_size=4, rounds=75),
    Task("AUC on digits, K = 3", 3, (0.1,), batch_size=16, rounds=40, every=4, most_seeds=3),
)


def built(task: Task, seed: int) -> tuple[fs.Problem, fs.FederatedData, Exact]:
    """Return a task's problem, its data, and what it really is."""
    if task.name.startswith("tower"):
        tower = fs.tower(clients=8, levels=task.levels, seed=seed)
        return tower.problem, tower.data, exact_tower(tower)
    data = fs.data.load("digits").imbalance(0.1, seed=seed).split("iid", clients=8, seed=seed)
    torch.manual_seed(seed)
    model = fs.models.mlp(data.train.arrays[0].shape[1:], 1, hidden=[16])
    problem = fs.compositional_auc(model, levels=task.levels)
    return problem, data, exact_mean(problem, data)


def method(kind: str, levels: int, weight: float, step_size: float) -> fs.Algorithm:
    """Return the method with this weight of a fresh inner value; all else is the same for both."""
    same: Json = {"eta": ETA, "gamma_x": step_size / ETA, "gamma_y": step_size / ETA, "steps": TAU}
    if kind == "storm":
        return fs.LocalSMCGDAM(alpha=weight / ETA**2, **same)
    return (fs.LocalSCGDAM if levels == 1 else MovingAverage)(alpha=weight / ETA, **same)


def tracking(task: Task, kind: str, weight: float, step_size: float, seed: int) -> np.ndarray:
    """Return || h^(K) - G(x) || and a second norm (of grad Phi, or of G(x) - x) over time: [times, 2]."""
    problem, data, exact = built(task, seed)

    def measure(state: State) -> tuple[float, ...]:
        value, other = exact(state.x)
        return float((state.h[-1] - value).norm()), float(other.norm())

    how: Json = {"rounds": task.rounds, "batch_size": task.batch_size, "seed": seed, "every": task.every}
    found = watched(problem, data, method(kind, task.levels, weight, step_size), measure, **how)
    missing = task.rounds // task.every - len(found)
    return np.concatenate([found.reshape(-1, 2), np.full((missing, 2), np.inf)])


def late(curves: np.ndarray) -> np.ndarray:
    """Return the root mean square over the second half of the times: [seeds, times] to [seeds]."""
    return np.sqrt((curves[:, curves.shape[1] // 2 :] ** 2).mean(1))


def same_at_one_level() -> float:
    """Return the largest difference between MovingAverage with one level and LocalSCGDAM: that they are the same."""
    tower = fs.tower(clients=4, levels=1)
    how: Json = {"rounds": 5, "batch_size": 4, "seed": 0}
    algorithms = fs.LocalSCGDAM(steps=TAU), MovingAverage(steps=TAU)
    one, other = (
        watched(tower.problem, tower.data, a, lambda s: tuple(torch.cat([*s.h, s.y]).tolist()), **how)
        for a in algorithms
    )
    return float(np.abs(one - other).max())


def estimation(seeds: int) -> Json:
    """Measure how well both methods track G(x), for every weight and step size; the curves are kept that are drawn."""
    rows = []
    for task in TASKS:
        for step_size, kind, weight in product(task.step_sizes, METHODS, WEIGHTS):
            number = min(seeds, task.most_seeds)
            found = np.stack([tracking(task, kind, weight, step_size, seed) for seed in range(number)])
            errors, others = late(found[..., 0]), late(found[..., 1])
            row: Json = {"task": task.name, "step_size": step_size, "method": kind, "weight": weight}
            row |= {"error": errors.mean(), "spread": errors.std(ddof=1), "other": others.mean()}
            rows.append(row | {"errors": errors.tolist(), "curves": found[..., 0].tolist()})
            words = f"{task.name}, step {step_size}, {METHODS[kind]} {weight}"
            print(f"{words}: error {row['error']:.4f} ± {row['spread']:.4f}, other {row['other']:.3f}", flush=True)
    result = {"tasks": [asdict(t) for t in TASKS], "same_at_one_level": same_at_one_level(), "rows": rows}
    drawn = [id(row) for task in TASKS for kind in METHODS for row in chosen(result, task, 0.1, kind)]
    for row in rows:
        if id(row) not in drawn:
            del row["curves"]
    return result


def chosen(result: Json, task: Task, step_size: float, kind: str) -> tuple[Json, Json]:
    """Return a method's rows with the paper's weight and with its best one."""
    fitting = {"task": task.name, "step_size": step_size, "method": kind}
    rows = [r for r in result["rows"] if fitting.items() <= r.items()]
    return next(r for r in rows if r["weight"] == PAPER[kind]), min(rows, key=lambda r: r["error"])


def draw_estimation(result: Json, path: Path) -> None:
    """Draw the error over rounds (above) and against the weight (below)."""
    figure, axes = plt.subplots(2, 3, figsize=(12.5, 7), layout="constrained")
    colours = {"storm": BLUE, "average": ORANGE}
    for (above, below), task in zip(axes.T, TASKS, strict=True):
        rounds = np.arange(task.every, task.rounds + 1, task.every)
        for kind, label in METHODS.items():
            paper, best = chosen(result, task, 0.1, kind)
            for row, style, why in ((paper, "--", "the paper's"), (best, "-", "best")):
                curves = np.array(row["curves"])
                words = f"{label}, weight {row['weight']:g} ({why})"
                above.plot(rounds, curves.mean(0), style, color=colours[kind], label=words, linewidth=1.6)
                above.fill_between(rounds, curves.min(0), curves.max(0), color=colours[kind], alpha=0.13, linewidth=0)
            for step_size, style, marker in ((0.1, "-", "o"), (0.01, ":", "s")):
                rows = [r for r in result["rows"] if (r["task"], r["method"]) == (task.name, kind)]
                rows = [r for r in rows if r["step_size"] == step_size and math.isfinite(r["error"])]
                if rows:
                    at, errors = [r["weight"] for r in rows], np.array([r["errors"] for r in rows])
                    words = f"{label}, step size {step_size}"
                    below.plot(at, errors.mean(1), style, color=colours[kind], marker=marker, label=words)
                    below.fill_between(at, errors.min(1), errors.max(1), color=colours[kind], alpha=0.13, linewidth=0)
        above.set(title=f"{task.name}, step size 0.1", xlabel="rounds", ylabel=r"$\|h^{(K)} - G(x)\|$", yscale="log")
        below.set(xlabel="weight of a fresh value", ylabel="the same, second half of the rounds")
        below.set(xscale="log", yscale="log")
        for panel in (above, below):
            low, high = panel.get_ylim()
            panel.set_ylim(low, high * (high / low) ** 0.35)  # room for the legend
            panel.grid(alpha=0.25)
            panel.legend(frameon=False, fontsize="x-small", loc="upper right")
    save(figure, path)


# --- 2: levels ------------------------------------------------------------------------------------------------------

LEVELS = (1, 2, 3, 4, 5)
ETAS = (0.06, 0.09, 0.13, 0.2, 0.3)
SAME_ETA = 0.06
TARGET = 0.3
"""Of the root of the mean of ||grad Phi||^2 over all rounds so far: what theorem 4.4 bounds."""

WINDOW = 10
MOST_ROUNDS = 250
BEND, MORE_BEND = 0.03, 0.1
BENDS = ((0.03, False), (0.3, False), (0.5, False), (0.5, True))
BUDGET = 80
"""Rounds after which levels that bend differently are compared."""


def at_rate(eta: float, first_batches: int = 16) -> fs.LocalSMCGDAM:
    """Return LocalSMCGDAM with gamma_y = 10 gamma_x, near to what theorem 4.4 asks for; the rest is the default."""
    return fs.LocalSMCGDAM(eta=eta, gamma_x=0.33, gamma_y=3.3, steps=TAU, first_batches=first_batches)


def stationarity(exact: Exact) -> Measure:
    """Return the measure ||grad Phi(x)||^2."""
    return lambda state: (float(exact(state.x)[1].square().sum()),)


def first(reached: np.ndarray) -> float:
    """Return the local steps after which the first True stands, infinite if there is none."""
    return TAU * float(reached.argmax() + 1) if reached.any() else math.inf


@cache
def steps_needed(levels: int, bend: float, dual: bool, eta: float, seed: int) -> tuple[float, float]:
    """Return the local steps to the target: of the mean over all rounds so far, and of that over the last ten."""
    tower = fs.tower(clients=8, levels=levels, bend=bend, dual=dual, seed=seed)
    how: Json = {"rounds": MOST_ROUNDS, "batch_size": 2, "seed": seed}

    def done(values: list[tuple[float, ...]]) -> bool:
        return sum(v[0] for v in values) <= TARGET**2 * len(values)

    found = watched(tower.problem, tower.data, at_rate(eta), stationarity(exact_tower(tower)), **how, done=done)
    total = np.concatenate([[0.0], np.cumsum(found[:, 0])])
    so_far = first(total[1:] <= TARGET**2 * np.arange(1, len(total)))
    last = first(total[WINDOW:] - total[:-WINDOW] <= TARGET**2 * WINDOW) + TAU * (WINDOW - 1)
    return so_far, last


def best_eta(levels: int, bend: float, dual: bool, seeds: int) -> float:
    """Return the eta that takes the fewest steps in the mean: up the grid, until the next one takes more."""
    best, least = ETAS[0], math.inf
    for eta in ETAS:
        total = 0.0
        for seed in range(seeds):
            total += steps_needed(levels, bend, dual, eta, seed)[0]
            if total > least:
                return best
        best, least = eta, total
    return best


def growth(name: str, bend: float, dual: bool, etas: Sequence[float], seeds: int) -> Json:
    """Measure the steps for every K, at the eta that belongs to it, and fit their growth."""
    found = np.array(
        [
            [steps_needed(levels, bend, dual, eta, seed) for levels, eta in zip(LEVELS, etas, strict=True)]
            for seed in range(seeds)
        ]
    )
    so_far, last = found[..., 0], found[..., 1]
    row: Json = {"name": name, "bend": bend, "dual": dual, "etas": list(etas), "steps": so_far.tolist()}
    row |= {"slope": slope(LEVELS, so_far), "slope_from_2": slope(LEVELS[1:], so_far[:, 1:])}
    row |= {"slope_window": slope(LEVELS, last), "steps_window": last.tolist()}
    words = ", ".join(f"{v:g}" for v in np.median(so_far, 0))
    more = f"{shown(row['slope'])}, from K = 2 {shown(row['slope_from_2'])}"
    print(f"{name}: eta {row['etas']}, median steps {words}; slope {more}", flush=True)
    return row


def levels(seeds: int) -> Json:
    """Measure how the steps to a fixed stationarity grow with K."""
    rows = []
    for bend, dual in ((BEND, True), (BEND, False), (MORE_BEND, True)):
        which = f"bend {bend}, {'with' if dual else 'without'} a dual"
        rows.append(growth(f"same eta, {which}", bend, dual, [SAME_ETA] * len(LEVELS), seeds))
        best = [best_eta(k, bend, dual, seeds) for k in LEVELS]
        rows.append(growth(f"eta tuned for each K, {which}", bend, dual, best, seeds))
    settings = {"target": TARGET, "window": WINDOW, "most_steps": TAU * MOST_ROUNDS, "etas": ETAS}
    return {**settings, "rows": rows, "bends": [after_budget(bend, dual, seeds) for bend, dual in BENDS]}


def after_budget(bend: float, dual: bool, seeds: int) -> Json:
    """Measure ||grad Phi||^2 in the second half of a fixed number of rounds, and its growth with every level."""

    def mean(levels: int, seed: int) -> float:
        tower = fs.tower(clients=8, levels=levels, bend=bend, dual=dual, seed=seed)
        how: Json = {"rounds": BUDGET, "batch_size": 2, "seed": seed}
        found = watched(tower.problem, tower.data, at_rate(SAME_ETA), stationarity(exact_tower(tower)), **how)
        return float(found[BUDGET // 2 :].mean())

    values = np.array([[mean(k, seed) for k in LEVELS] for seed in range(seeds)])
    factor = {k: math.exp(v) for k, v in interval([np.polyfit(LEVELS, np.log(row), 1)[0] for row in values]).items()}
    words = ", ".join(f"{v:.4f}" for v in np.median(values, 0))
    name = f"bend {bend}, {'with' if dual else 'without'} a dual"
    print(f"{name}: median squared gradient norm {words}; factor per level {shown(factor)}", flush=True)
    return {"name": name, "values": values.tolist(), "factor": factor, "slope": slope(LEVELS, values)}


def draw_levels(result: Json, path: Path) -> None:
    """Draw the steps against K, with the same hyperparameters and with tuned ones, and what bending more does."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    looks = {"0.03, with": (BLUE, "o", "-"), "0.03, without": (GREEN, "s", "--"), "0.1, with": (ORANGE, "^", "-.")}
    for panel, head, start in zip(axes, ("same eta, bend ", "eta tuned for each K, bend "), (280, 40), strict=False):
        for key, look in looks.items():
            row = next(r for r in result["rows"] if r["name"] == f"{head}{key} a dual")
            words = f"bend {key} a dual: slope {shown(row['slope'])}"
            draw_seeds(panel, LEVELS, np.minimum(row["steps"], result["most_steps"]), look, words)
        panel.plot(LEVELS, [start * k**2 for k in LEVELS], ":", color="grey", label=r"$\propto K^2$", zorder=0)
        panel.set(xscale="log", ylim=(15, 3000))
        panel.set_ylabel(rf"local steps to $\|\nabla\Phi\| \leq {result['target']}$ in the mean")
    bent = ((GREEN, "s", "--"), (ORANGE, "^", "-."), (PINK, "v", "-"), ("black", "x", ":"))
    for row, look in zip(result["bends"], bent, strict=True):
        words = row["name"] + (f": x {shown(row['factor'])} per level" if "without" in row["name"] else "")
        draw_seeds(axes[2], LEVELS, np.array(row["values"]), look, words)
    axes[2].set_ylabel(rf"$\|\nabla\Phi\|^2$, steps {TAU * BUDGET // 2} to {TAU * BUDGET}")
    titles = (f"eta {SAME_ETA} for every K", "eta tuned for each K", f"eta {SAME_ETA}, levels that bend more")
    axes[2].set_ylim(1e-3, 3e3)
    for panel, title in zip(axes, titles, strict=True):
        panel.set(title=title, xlabel="K", yscale="log")
        panel.set_xticks(LEVELS, [str(k) for k in LEVELS])
        panel.minorticks_off()
        panel.grid(alpha=0.25)
        panel.legend(frameon=False, fontsize="x-small", loc="upper left" if panel is axes[2] else "lower right")
    for panel in axes[:2]:
        panel.set_yticks([30, 100, 300, 1000, 3000], ["30", "100", "300", "1,000", "3,000"])
    save(figure, path)


def draw_seeds(panel: Any, at: Sequence[int], values: np.ndarray, look: tuple[str, str, str], label: str) -> None:
    """Draw the median over seeds, and a band from the least to the largest."""
    colour, marker, style = look
    panel.plot(at, np.median(values, 0), style, color=colour, marker=marker, label=label)
    panel.fill_between(at, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)


# --- 3: speed-up ----------------------------------------------------------------------------------------------------

CLIENTS = (1, 2, 4, 8, 16)
MANY_CLIENTS = (1, 4, 16, 64)
FIXED_ETA, LARGE_ETA = 0.1, 0.3
ROUNDS = 200
HORIZONS = (50, 100, 200, 400)
FACTOR = 4 / 3
"""Of sqrt(N / T) in eta."""


def squared_gradients(clients: int, dual: bool, algorithm: fs.Algorithm, rounds: int, seed: int) -> np.ndarray:
    """Return ||grad Phi(x)||^2 after every round, K = 3."""
    tower = fs.tower(clients=clients, levels=3, bend=BEND, dual=dual, seed=seed)
    how: Json = {"rounds": rounds, "batch_size": 1, "seed": seed}
    return watched(tower.problem, tower.data, algorithm, stationarity(exact_tower(tower)), **how)[:, 0]


def at_floor(eta: float, dual: bool, counts: Sequence[int], seeds: int) -> Json:
    """Measure the mean over the second half of the rounds, at a fixed eta."""

    def mean(clients: int, seed: int) -> float:
        found = squared_gradients(clients, dual, at_rate(eta), ROUNDS, seed)
        return float(found[len(found) // 2 :].mean())

    values = np.array([[mean(n, seed) for n in counts] for seed in range(seeds)])
    return reported(f"eta {eta}, {'with' if dual else 'without'} a dual", counts, values)


def as_in_remark(pairs: Sequence[tuple[int, int]], seeds: int, name: str) -> Json:
    """Measure the mean over all T steps, at eta = FACTOR sqrt(N / T) and sqrt(T / N) first batches (remark 4.5)."""

    def mean(clients: int, rounds: int, seed: int) -> float:
        ratio = clients / (TAU * rounds)
        algorithm = at_rate(FACTOR * math.sqrt(ratio), round(math.sqrt(1 / ratio)))
        return float(squared_gradients(clients, True, algorithm, rounds, seed).mean())

    values = np.array([[mean(*pair, seed) for pair in pairs] for seed in range(seeds)])
    return reported(name, [n * TAU * r for n, r in pairs], values)


def reported(name: str, at: Sequence[int], values: np.ndarray) -> Json:
    """Return the numbers of one curve, and say them."""
    between = np.diff(np.log(values.mean(0))) / np.diff(np.log(at))
    row: Json = {"name": name, "at": list(at), "values": values.tolist(), "slope": slope(at, values)}
    row |= {"means": values.mean(0).tolist(), "slopes_between": between.tolist()}
    print(f"{name}: {', '.join(f'{v:.4f}' for v in row['means'])}; slope {shown(row['slope'])}", flush=True)
    return row


def speedup(seeds: int) -> Json:
    """Measure how the stationarity that is reached falls with the number of clients."""
    return {
        "steps": TAU * ROUNDS,
        "floor": [
            at_floor(FIXED_ETA, True, CLIENTS, seeds),
            at_floor(LARGE_ETA, False, MANY_CLIENTS, seeds),
        ],
        "remark": [
            as_in_remark([(n, ROUNDS) for n in CLIENTS], seeds, f"N = 1 to 16, T = {TAU * ROUNDS}"),
            as_in_remark([(4, r) for r in HORIZONS], seeds, f"N = 4, T = {TAU * HORIZONS[0]} to {TAU * HORIZONS[-1]}"),
        ],
    }


def draw_speedup(result: Json, path: Path) -> None:
    """Draw the squared gradient norm against N, and against N T."""
    figure, axes = plt.subplots(1, 2, figsize=(10.5, 4.4), layout="constrained")
    looks = ((BLUE, "o", "-"), (ORANGE, "^", "--"))
    for panel, rows, power in ((axes[0], result["floor"], -1.0), (axes[1], result["remark"], -0.5)):
        for row, look in zip(rows, looks, strict=False):
            draw_seeds(panel, row["at"], np.array(row["values"]), look, f"{row['name']}: slope {shown(row['slope'])}")
        at = np.array(rows[0]["at"])
        line = 0.4 * np.median(rows[0]["values"], 0)[0] * (at / at[0]) ** power
        panel.plot(at, line, ":", color="grey", label=f"slope {power:g}", zorder=0)
        panel.set(xscale="log", yscale="log")
        panel.grid(alpha=0.25, which="both")
        panel.legend(frameon=False, fontsize="x-small", loc="upper right")
    axes[0].set(xlabel="clients N", ylabel=r"$\|\nabla\Phi(x)\|^2$, second half of the rounds", title="a fixed eta")
    axes[0].set_xticks([1, 2, 4, 8, 16, 64], ["1", "2", "4", "8", "16", "64"])
    axes[0].minorticks_off()
    axes[1].set(xlabel="N T", ylabel=r"$\|\nabla\Phi(x)\|^2$, all rounds", title=r"$\eta \propto \sqrt{N/T}$")
    save(figure, path)


# --- the program ----------------------------------------------------------------------------------------------------

STUDIES: dict[str, tuple[Callable[[int], Json], Callable[[Json, Path], None]]] = {
    "estimation": (estimation, draw_estimation),
    "levels": (levels, draw_levels),
    "speedup": (speedup, draw_speedup),
}


def save(figure: Any, path: Path) -> None:
    """Write a picture."""
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plain(value: Any) -> Any:
    """Return the value as JSON has it: numbers of six digits, null for what is not finite."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def study(name: str, seeds: int, out: Path) -> None:
    """Run a study; write its numbers and its picture."""
    run, draw = STUDIES[name]
    wall, processor = time.perf_counter(), time.process_time()
    result = {"seeds": seeds, **run(seeds)}
    used = time.perf_counter() - wall, time.process_time() - processor
    draw(result, out / f"{name}.png")
    (out / f"{name}.json").write_text(json.dumps(plain(result)) + "\n")
    print(f"{name}: {used[0]:.0f} s, {used[1]:.0f} s of the processor", flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", choices=(*STUDIES, "all"))
    parser.add_argument("--seeds", type=int, default=5, help="how many, at least 2")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "figures", help="where the files go")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("--seeds must be at least 2, so that there is an interval.")
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name in STUDIES if options.study == "all" else (options.study,):
        study(name, options.seeds, options.out)


if __name__ == "__main__":
    main()
