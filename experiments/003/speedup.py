"""Linear speed-up of FedLALR on a noisy non-convex problem: squared gradient against clients and steps.

    python experiments/003/speedup.py [--seeds 8] [--out experiments/003/figures]

Client k has f_k(x) = mean over its samples b of sum_j w(x_j - b_j), w(z) = z^2 / (1 + z^2): bounded gradients, as the
theorems require, several stationary points, different clients. After every round we measure the exact ||grad f(x)||^2
at the server's model, where f is the mean over the clients.

floor:     one learning rate for all N. After the start, what is left is noise, which the mean over N clients divides by
           N: the mean over the second half of the rounds should fall like N^-1.
corollary: the learning rate of Corollary 1, proportional to sqrt(N / sum of K_t). The mean over all rounds should fall
           like (N sum K_t)^-1/2, in N and in T. A larger rate also shortens the start, so there is a control: one
           client at the rates that N clients have.

Writes speedup.json and speedup.png. Slopes are fitted to logarithms seed by seed; the interval is that of Student's t.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from scipy import stats

import fedstrata as fs

DIMENSION, SAMPLES, BATCH, STEPS, ROUNDS = 20, 400, 4, 5, 200
SHIFT, NOISE = 0.3, 1.0
CLIENTS = (1, 2, 4, 8, 16, 32)
HORIZONS = (25, 50, 100, 200, 400)
FIXED, SCALED = 0.02, 0.5
CONTROL = "the rates of N"
METHODS: dict[str, dict[str, Any]] = {
    "FedLALR": {},
    "restart momentum": {"restart": True},
    "maximum of vhat": {"aggregate": "max"},
    "K_t = 3 + log_4 t": {"steps": fs.Interval(3, 4.0)},
}


def loss(x: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the mean over the batch of sum_j w(x_j - b_j)."""
    square = (x - batch[0]) ** 2
    return (square / (1 + square)).sum(-1).mean()


def noisy(clients: int, seed: int) -> tuple[fs.Problem, fs.FederatedData, torch.Tensor]:
    """Return the problem, the clients' data, and all samples [N, n, d]."""
    generator = torch.Generator().manual_seed(seed)
    centre = SHIFT * torch.randn(32, 1, DIMENSION, generator=generator, dtype=torch.float64)[:clients]
    b = centre + NOISE * torch.randn(32, SAMPLES, DIMENSION, generator=generator, dtype=torch.float64)[:clients]
    start = 1.0 + 0.3 * torch.randn(DIMENSION, generator=generator, dtype=torch.float64)
    data = fs.FederatedData.from_arrays([(rows, torch.zeros(SAMPLES)) for rows in b], name="noisy")
    return fs.Problem(loss, start, name="noisy"), data, b


def local_steps(rounds: int, options: dict[str, Any]) -> int:
    """Return the local steps of so many rounds."""
    return sum(fs.schedules.steps_at(options.get("steps", STEPS), r) for r in range(rounds))


def squared_gradients(clients: int, lr: float, rounds: int, seed: int, options: dict[str, Any]) -> np.ndarray:
    """Return ||grad f(x)||^2 after each round."""
    problem, data, b = noisy(clients, seed)

    def measure(_: object, __: object, x: torch.Tensor, ___: object) -> dict[str, float]:
        z = x - b
        gradient = (2 * z / (1 + z**2) ** 2).mean((0, 1))
        return {"square": float(gradient @ gradient)}

    algorithm = fs.FedLALR(lr=lr, **{"steps": STEPS, **options})
    run = fs.train(
        problem, data, algorithm, rounds=rounds, batch_size=BATCH, seed=seed, evaluate=measure, eval_every=1, threads=1
    )
    return np.array([row["square"] for row in run.history[1:]])


def slope(at: Sequence[int], values: np.ndarray) -> dict[str, float]:
    """Return the slope of log values [seed, point] against log ``at``, and its 95 % interval over seeds."""
    slopes = np.polyfit(np.log(at), np.log(values).T, 1)[0]
    width = stats.t.ppf(0.975, len(slopes) - 1) * slopes.std(ddof=1) / math.sqrt(len(slopes))
    return {"slope": float(slopes.mean()), "low": float(slopes.mean() - width), "high": float(slopes.mean() + width)}


def study(seeds: int) -> list[dict[str, Any]]:
    """Run everything; return a table for each line of the picture."""
    plans: list[tuple[str, str, dict[str, Any], Sequence[int]]] = [
        *(("floor", name, options, CLIENTS) for name, options in METHODS.items()),
        *(("corollary, N", name, options, CLIENTS) for name, options in METHODS.items()),
        *((f"one client, {CONTROL}", name, METHODS[name], CLIENTS) for name in ("FedLALR", "restart momentum")),
        ("corollary, T", "FedLALR", {}, HORIZONS),
    ]
    out = []
    for kind, name, options, points in track(plans, "speed-up"):
        values = np.empty((seeds, len(points)))
        for (seed, i), _ in np.ndenumerate(values):
            n, rounds = (points[i], ROUNDS) if kind != "corollary, T" else (4, points[i])
            lr = FIXED if kind == "floor" else SCALED * math.sqrt(n / local_steps(rounds, options))
            squares = squared_gradients(1 if CONTROL in kind else n, lr, rounds, seed, options)
            values[seed, i] = squares[rounds // 2 :].mean() if kind == "floor" else squares.mean()
        fit = slope(points, values)
        print(f"{kind:26} {name:18} slope {fit['slope']:.2f} [{fit['low']:.2f}, {fit['high']:.2f}]")
        out.append({"kind": kind, "method": name, "at": list(points), "values": values.tolist(), **fit})
    return out


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    """Draw the three panels."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    titles = {"floor": "one learning rate", "corollary, N": "rate of Corollary 1", "corollary, T": "the same, N = 4"}
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.9), layout="constrained")
    for panel, (kind, title) in zip(axes, titles.items(), strict=True):
        for line in (entry for entry in lines if entry["kind"] == kind):
            logs = np.log(np.array(line["values"]))
            mean, spread = logs.mean(0), logs.std(0, ddof=1)
            fit = f"{line['slope']:.2f} [{line['low']:.2f}, {line['high']:.2f}]"
            (drawn,) = panel.plot(line["at"], np.exp(mean), "o-", label=f"{line['method']}: slope {fit}")
            panel.fill_between(
                line["at"], np.exp(mean - spread), np.exp(mean + spread), color=drawn.get_color(), alpha=0.12
            )
        for control in (entry for entry in lines if CONTROL in entry["kind"] and kind == "corollary, N"):
            logs = np.log(np.array(control["values"])).mean(0)
            label = f"one client at these rates, {control['method']}: slope {control['slope']:.2f}"
            panel.plot(control["at"], np.exp(logs), "x--", color="0.4", linewidth=1, label=label)
        expected = -1.0 if kind == "floor" else -0.5
        at = np.array(line["at"], dtype=float)
        panel.plot(at, 1.4 * np.exp(mean[0]) * (at / at[0]) ** expected, "k:", label=f"slope {expected:g}")
        panel.set(xscale="log", yscale="log", title=title)
        panel.set_xticks(line["at"], [str(a) for a in line["at"]])
        panel.minorticks_off()
        panel.set_xlabel("rounds T" if kind == "corollary, T" else "clients N")
        panel.grid(alpha=0.25)
        panel.legend(frameon=False, fontsize="x-small")
    axes[0].set_ylabel(r"$\Vert\nabla f\Vert^2$, mean over rounds")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    """Run the study, write what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "figures")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    lines = study(arguments.seeds)
    (arguments.out / "speedup.json").write_text(json.dumps(lines, indent=1))
    draw(lines, arguments.out / "speedup.png")


if __name__ == "__main__":
    main()
