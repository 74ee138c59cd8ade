"""Plots of runs: measures over rounds, steps, samples, bytes or seconds, and diagnostics of local steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.core.errors import InputError, unknown
from fedstrata.core.files import Row
from fedstrata.training.metrics import catalogue
from fedstrata.training.metrics.catalogue import IN_PLOTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Runs = Mapping[str, Sequence[Sequence[Row]]]
"""Histories by label, one per seed."""

AXES = {
    "round": "rounds",
    "steps": "local steps",
    "samples": "samples drawn",
    "bytes_up": "bytes sent by clients",
    "bytes_down": "bytes sent to clients",
    "seconds": "seconds of training",
    "total_seconds": "seconds, with evaluations and start-up",
}

_STYLES = ("-", "--", "-.", ":")

_INSIDE = 6
"""The most labels that fit into a panel; a longer legend goes beside it."""


def new_figure(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Figure, np.ndarray]:
    """Create a figure and its axes [rows, columns] without pyplot: the caller's backend and figures stay untouched."""
    from matplotlib.figure import Figure  # takes longer to import than most commands take to run

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def write_figure(figure: Figure, path: str | Path) -> Path:
    """Write a figure to a file; the suffix chooses the format."""
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise InputError(f"Cannot write the plot {path}: {error}") from None
    return Path(path)


def plot(
    runs: Runs,
    path: str | Path,
    measures: Sequence[str] | None = None,
    axis: str = "round",
    log: Sequence[str] = (),
    title: str | None = None,
) -> Path:
    """Plot ``runs`` to a file, one panel per measure; return its path.

    A line is the mean over seeds and its band the standard deviation (of logarithms on a logarithmic scale). By default
    up to three measures that all runs share are plotted; a measure named in ``measures`` is plotted for the runs that
    have it. Measures in ``log`` get a logarithmic scale.
    """
    shown = _chosen(runs, measures, axis, log)
    figure, axes = new_figure(1, len(shown), (4.6 * len(shown), 3.6))
    for panel, measure in zip(axes[0], shown, strict=True):
        _draw_curves(panel, runs, measure, axis, measure in log)
    if len(runs) > 1:
        _add_legend(figure, axes[0], len(runs) > _INSIDE)
    if title is not None:
        figure.suptitle(title)
    return write_figure(figure, path)


def _chosen(runs: Runs, measures: Sequence[str] | None, axis: str, log: Sequence[str]) -> list[str]:
    """Check the arguments, and return the measures to plot."""
    if axis not in AXES:
        raise unknown("axis", axis, AXES)
    measured = {k for group in runs.values() for run in group for row in run for k in row} - set(AXES)
    for name in (*(measures or ()), *log):
        if name not in measured:
            raise unknown("measure", name, measured)
    if measures:
        return list(measures)
    last = [run[-1] for group in runs.values() for run in group if run]
    shared = [k for k in (last[0] if last else {}) if k not in AXES and all(k in row for row in last)]
    chosen = [m for m in IN_PLOTS if m in shared] or shared
    if not chosen:
        raise InputError("The runs have no measure in common, so there is nothing to plot.")
    return chosen[:3]


def _draw_curves(panel: Axes, runs: Runs, measure: str, axis: str, log: bool) -> None:
    values = [row[measure] for group in runs.values() for run in group for row in run if measure in row]
    log = log or (measure == "loss" and 0 < 20 * min(values) < max(values))
    for number, (label, group) in enumerate(runs.items()):
        curves = [[(row[axis], row[measure]) for row in run if {axis, measure} <= set(row)] for run in group]
        curves = [curve for curve in curves if curve]
        if not curves:
            continue
        grid, mean, low, high = _mean_and_band(curves, log and min(values) > 0)
        panel.plot(grid, mean, _STYLES[number % len(_STYLES)], color=f"C{number}", label=label, linewidth=1.6)
        if len(curves) > 1:
            panel.fill_between(grid, low, high, color=f"C{number}", alpha=0.18, linewidth=0)
    panel.set_xlabel(AXES[axis])
    about = catalogue.measure(measure)
    panel.set_ylabel(about.label or about.heading)
    panel.grid(alpha=0.25)
    if log:
        panel.set_yscale("log")


def _mean_and_band(
    curves: Sequence[Sequence[tuple[float, float]]], log: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the grid, the mean, and the band one standard deviation below and above; ``log`` averages logarithms.

    The grid is that of the curve with the fewest points, cut off where the first of the curves ends.
    """
    points = [np.array(c, dtype=float) for c in curves]
    end = min(p[-1, 0] for p in points)
    grid = min(points, key=len)[:, 0]
    grid = grid[grid <= end]
    values = np.stack([np.interp(grid, p[:, 0], p[:, 1]) for p in points])
    values = np.log(values) if log else values
    mean = values.mean(0)
    spread = values.std(0, ddof=1) if len(values) > 1 else np.zeros_like(grid)
    low, high = mean - spread, mean + spread
    return (grid, np.exp(mean), np.exp(low), np.exp(high)) if log else (grid, mean, low, high)


def _add_legend(figure: Figure, panels: Sequence[Axes], outside: bool) -> None:
    """Add one legend, from the panel with the most lines."""
    fullest = max(panels, key=lambda panel: len(panel.lines))
    options: dict[str, Any] = {"frameon": False, "fontsize": "small"}
    if outside:
        figure.legend(*fullest.get_legend_handles_labels(), loc="outside right center", **options)
    else:
        fullest.legend(**options)


def plot_diagnostics(rows: Sequence[Row], path: str | Path) -> Path:
    """Plot the rows of :class:`fedstrata.Diagnostics`: norms over local steps, local steps and rates over rounds.

    Norms get one panel per quantity and round, at most four rounds, with one line per client.
    """
    from matplotlib.ticker import MaxNLocator

    of_steps = [r for r in rows if "step" in r]
    of_rounds = [r for r in rows if "step" not in r]
    rates = [r for r in of_rounds if "rate" in r]
    names = [k for k in (of_steps[0] if of_steps else {}) if k not in ("round", "client", "step")]
    panels = [(name, number) for name in names for number in _four_of(sorted({r["round"] for r in of_steps}))]
    total = len(panels) + (2 if rates else 1)
    down = math.ceil(total / 4)
    across = math.ceil(total / down)
    figure, grid = new_figure(down, across, (3.6 * across, 3.1 * down))
    for unused in grid.flat[total:]:
        unused.remove()
    axes = grid.flat[:total]
    for panel, (name, number) in zip(axes, panels, strict=False):
        _draw_norms(panel, name, number, [r for r in of_steps if r["round"] == number])
    _draw_local_steps(axes[len(panels)], of_rounds)
    if rates:
        _draw_rates(axes[-1], rates)
    for panel in axes:
        panel.grid(alpha=0.25)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    return write_figure(figure, path)


def _four_of(rounds: list[int]) -> list[int]:
    """Return at most four rounds, spread evenly from the first to the last."""
    return rounds if len(rounds) <= 4 else [rounds[round(i * (len(rounds) - 1) / 3)] for i in range(4)]


def _draw_norms(panel: Axes, name: str, number: int, rows: Sequence[Row]) -> None:
    for client in sorted({r["client"] for r in rows}):
        points = [(r["step"], r[name]) for r in rows if r["client"] == client]
        panel.plot(*zip(*points, strict=True), ".-", linewidth=1.2, markersize=4, label=f"client {client}")
    panel.set_title(f"round {number}", fontsize="medium")
    panel.set_xlabel("local step")
    panel.set_ylabel(rf"$\Vert${name}$\Vert^2$")
    panel.legend(frameon=False, fontsize="small")


def _draw_local_steps(panel: Axes, rows: Sequence[Row]) -> None:
    panel.step([r["round"] for r in rows], [r["local_steps"] for r in rows], where="mid")
    panel.set_xlabel("rounds")
    panel.set_ylabel("local steps of the busiest client")
    panel.set_ylim(bottom=0)


def _draw_rates(panel: Axes, rows: Sequence[Row]) -> None:
    rounds = [r["round"] for r in rows]
    panel.plot(rounds, [r["rate"] for r in rows], ".-", markersize=5, label="mean")
    low, high = ([r[k] for r in rows] for k in ("rate_least", "rate_most"))
    panel.fill_between(rounds, low, high, alpha=0.2, linewidth=0, label="minimum to maximum")
    panel.set_xlabel("rounds")
    panel.set_ylabel("effective learning rate of clients")
    panel.set_yscale("log")
    panel.legend(frameon=False, fontsize="small")
