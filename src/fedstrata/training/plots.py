"""Pictures of runs: a measure against rounds, steps, samples, bytes or seconds, mean and spread over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.core.errors import InputError, unknown
from fedstrata.data.federated import FederatedData

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
AXES = {
    "round": "rounds",
    "steps": "local steps",
    "samples": "samples drawn",
    "bytes_up": "bytes sent by clients",
    "bytes_down": "bytes sent to clients",
    "seconds": "seconds",
}
LABELS = {
    "loss": "loss",
    "accuracy": "accuracy",
    "accuracy_worst": "accuracy of the worst client",
    "accuracy_mean": "accuracy, mean over clients",
    "auc": "AUC, pooled",
    "auc_mean": "AUC, mean over clients",
    "distance": "distance to the solution",
    "distance_dual": "distance of y to the solution",
    "attacked_accuracy": "accuracy under attack",
}


_FIRST = (
    *("auc", "auc_worst", "personal_accuracy_mean", "accuracy", "attacked_accuracy", "accuracy_worst"),
    *("personal_loss_mean", "distance", "gradient_norm", "loss"),
)


_INSIDE = 6
"""The most labels that are written into a panel; more stand beside it."""


def measures_of(runs: Mapping[str, Sequence[Sequence[Row]]]) -> list[str]:
    """Return the measures that every run has, in the order of their rows."""
    rows = [run[-1] for group in runs.values() for run in group if run]
    return [k for k in (rows[0] if rows else {}) if k not in AXES and all(k in r for r in rows)]


def plot(
    runs: Mapping[str, Sequence[Sequence[Row]]],
    path: str | Path,
    measures: Sequence[str] | None = None,
    axis: str = "round",
    log: Sequence[str] = (),
    title: str | None = None,
) -> Path:
    """Draw ``runs`` (a label, then one history per seed) to a picture file; return its path.

    The line is the mean over seeds, the band the standard deviation, both of logarithms on a logarithmic scale. By
    default up to three measures are drawn that all runs have; of ``measures``, each is drawn for the runs that have it.
    Those in ``log`` get a logarithmic scale.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    known = measures_of(runs)
    some = {k for group in runs.values() for run in group for row in run for k in row} - set(AXES)
    if axis not in AXES:
        raise unknown("axis", axis, AXES)
    for name in (*(measures or ()), *log):
        if name not in some:
            raise unknown("measure", name, some)
    shown = list(measures or [m for m in _FIRST if m in known][:3] or known[:3])
    if not shown:
        raise InputError("The runs have no measure in common, so there is nothing to draw.")
    figure, axes = plt.subplots(1, len(shown), figsize=(4.6 * len(shown), 3.6), squeeze=False, layout="constrained")
    for panel, name in zip(axes[0], shown, strict=True):
        values = [r[name] for g in runs.values() for run in g for r in run if name in r]
        logarithmic = name in log or (name == "loss" and 0 < 20 * min(values) < max(values))
        for number, (style, (label, group)) in enumerate(
            zip(cycle(("-", "--", "-.", ":")), runs.items(), strict=False)
        ):
            curves = [c for c in ([(r[axis], r[name]) for r in run if name in r] for run in group) if c]
            if not curves:
                continue
            grid, mean, low, high = _mean_and_band(curves, logarithmic and min(values) > 0)
            panel.plot(grid, mean, style, color=f"C{number}", label=label, linewidth=1.6)
            if len(curves) > 1:
                panel.fill_between(grid, low, high, color=f"C{number}", alpha=0.18, linewidth=0)
        panel.set_xlabel(AXES[axis])
        panel.set_ylabel(LABELS.get(name, name.replace("_", " ")))
        panel.grid(alpha=0.25)
        if logarithmic:
            panel.set_yscale("log")
    if len(runs) > 1:
        fullest = max(axes[0], key=lambda panel: len(panel.lines))
        if len(runs) > _INSIDE:
            figure.legend(
                *fullest.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize="small"
            )
        else:
            fullest.legend(frameon=False, fontsize="small")
    if title is not None:
        figure.suptitle(title)
    return _written(figure, path)


def plot_partition(data: FederatedData, path: str | Path, title: str | None = None) -> Path:
    """Draw who has what: how many training samples of each class (down) each client (across) has, and how many at all.

    Without classes (regression) there are only the totals.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    counts = data.train.class_counts if data.classes else None
    figure, axes = plt.subplots(
        2 if counts is not None else 1,
        1,
        figsize=(max(4.0, min(11.0, 1.5 + 0.08 * data.clients)), 4.6 if counts is not None else 2.4),
        squeeze=False,
        sharex=True,
        layout="constrained",
        height_ratios=(1, 3) if counts is not None else None,
    )
    top, bottom = axes[0][0], axes[-1][0]
    top.bar(np.arange(data.clients), data.sizes, width=1.0, color="0.55")
    top.set_ylabel("samples")
    if counts is not None:
        image = bottom.imshow(counts.T, aspect="auto", cmap="Blues", interpolation="nearest", origin="lower")
        bottom.set_ylabel("class")
        figure.colorbar(image, ax=bottom, label="samples")
    bottom.set_xlabel("client")
    if title is not None:
        figure.suptitle(title)
    return _written(figure, path)


def plot_inside(rows: Sequence[Row], path: str | Path) -> Path:
    """Draw the rows of :class:`fedstrata.Diagnostics`: squared norms within rounds, local steps and rates over rounds.

    A panel for every quantity and, of up to four rounds, every round in which it was followed; a line for every client.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    within = [r for r in rows if "step" in r]
    over = [r for r in rows if "step" not in r]
    names = [k for k in (within[0] if within else {}) if k not in ("round", "client", "step")]
    followed = sorted({r["round"] for r in within})
    followed = followed if len(followed) <= 4 else [followed[round(i * (len(followed) - 1) / 3)] for i in range(4)]
    panels: list[tuple[str, int]] = [(name, number) for name in names for number in followed]
    total = len(panels) + 1 + any("rate" in r for r in over)
    across = total if total <= 4 else math.ceil(total / math.ceil(total / 4))
    down = math.ceil(total / across)
    figure, grid = plt.subplots(down, across, figsize=(3.6 * across, 3.1 * down), squeeze=False, layout="constrained")
    for unused in grid.flat[total:]:
        unused.remove()
    axes = grid.flat[:total]
    for panel, (name, number) in zip(axes, panels, strict=False):
        here = [r for r in within if r["round"] == number]
        for client in sorted({r["client"] for r in here}):
            own = [(r["step"], r[name]) for r in here if r["client"] == client]
            panel.plot(*zip(*own, strict=True), ".-", linewidth=1.2, markersize=4, label=f"client {client}")
        panel.set_title(f"round {number}", fontsize="medium")
        panel.set_xlabel("local step")
        panel.set_ylabel(rf"$\Vert${name}$\Vert^2$")
        panel.legend(frameon=False, fontsize="small")
    rest = axes[len(panels) :]
    numbers = [r["round"] for r in over]
    rest[0].step(numbers, [r["local_steps"] for r in over], where="mid")
    rest[0].set_ylabel("local steps of the busiest client")
    rest[0].set_ylim(bottom=0)
    if len(rest) > 1:
        measured = [r for r in over if "rate" in r]
        numbers = [r["round"] for r in measured]
        rest[1].plot(numbers, [r["rate"] for r in measured], ".-", markersize=5, label="mean")
        low, high = ([r[k] for r in measured] for k in ("rate_least", "rate_most"))
        rest[1].fill_between(numbers, low, high, alpha=0.2, linewidth=0, label="least to most")
        rest[1].set_ylabel("effective learning rate of clients")
        rest[1].set_yscale("log")
        rest[1].legend(frameon=False, fontsize="small")
    for panel in rest:
        panel.set_xlabel("rounds")
    for panel in axes:
        panel.grid(alpha=0.25)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _written(figure, path)


def _written(figure: Figure, path: str | Path) -> Path:
    import matplotlib.pyplot as plt

    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise InputError(f"The picture {path} cannot be written: {error}") from None
    finally:
        plt.close(figure)
    return Path(path)


def _mean_and_band(
    curves: Sequence[Sequence[tuple[float, float]]], logarithmic: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the runs of one label on a common grid: that of the run with the fewest rows, ends trimmed.

    Then the mean, and the band one standard deviation below and above; of logarithms where the scale is logarithmic.
    """
    points = [np.array(c, dtype=float) for c in curves]
    end = min(p[-1, 0] for p in points)
    grid = min(points, key=len)[:, 0]
    grid = grid[grid <= end]
    values = np.stack([np.interp(grid, p[:, 0], p[:, 1]) for p in points])
    values = np.log(values) if logarithmic else values
    mean = values.mean(0)
    spread = values.std(0, ddof=1) if len(values) > 1 else np.zeros_like(grid)
    low, high = mean - spread, mean + spread
    return (grid, np.exp(mean), np.exp(low), np.exp(high)) if logarithmic else (grid, mean, low, high)
