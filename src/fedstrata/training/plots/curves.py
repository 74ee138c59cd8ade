"""Curves of runs: measures over rounds, steps, samples, bytes or seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedstrata.core.errors import InputError, invalid, unknown
from fedstrata.core.files import Row
from fedstrata.core.intervals import half_width
from fedstrata.training.metrics import catalogue
from fedstrata.training.metrics.catalogue import IN_PLOTS
from fedstrata.training.plots.axes import AXES, START, Band, Limits, finish, focus, is_wide, limits_of, name_of, unit_of
from fedstrata.training.plots.figures import (
    CROSS,
    add_caption,
    add_legend,
    as_text,
    diverged_label,
    handle,
    panels_of,
    write_figure,
)
from fedstrata.training.plots.styles import Style, styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Runs = Mapping[str, Sequence[Sequence[Row]]]
"""Histories by label, one per seed."""

RANGES = ("auto", "full")

BANDS = 6
"""The most labels with bands; with more, the intervals are bars at the end of the curves."""

COLUMNS = 4
"""The places for bars to the right of the end of a curve."""


def plot(
    runs: Runs,
    path: str | Path,
    measures: Sequence[str] | None = None,
    axis: str = "round",
    log: Sequence[str] = (),
    title: str | None = None,
    *,
    range: str = "auto",
    diverged: Runs | None = None,
) -> Path:
    """Plot ``runs`` to a file, one panel per measure; return its path.

    A line is the mean over seeds and its band the 95 % interval of that mean, Student's t (of logarithms on a
    logarithmic scale). With more than six labels, bars at the end of the lines replace the bands. A label of which a
    run diverged, or does not have the measure, has no mean: its runs are thin lines. By default up to three measures
    that all runs share are plotted; a measure named in ``measures`` is plotted for the runs that have it.

    log:      measures with a logarithmic scale.
    range:    "auto" cuts off the start of the curves if it would squeeze the rest; "full" shows everything.
    diverged: the runs that diverged, by label, each as far as it was recorded: ``[]`` if nothing was. The legend counts
              them, and their curves end in a cross.
    """
    stopped = {label: group for label, group in (diverged or {}).items() if group}
    shown = _chosen(runs, stopped, measures, axis, log)
    if range not in RANGES:
        raise invalid("range of a plot", range, " or ".join(repr(r) for r in RANGES), choices=RANGES)
    looks = styles([*runs, *stopped])
    figure, panels = panels_of(len(shown), (4.6, 3.6))
    lines = [_lines_of(looks, runs, stopped, measure, axis) for measure in shown]
    drawn = [
        _draw_panel(panel, own, measure, axis, measure in log, range)
        for panel, own, measure in zip(panels, lines, shown, strict=True)
    ]
    if title is not None:
        figure.suptitle(as_text(title))
    every = [line for own in lines for line in own]
    add_caption(figure, *_caption(every, len(looks), any(panel.get_yscale() == "log" for panel in panels)))
    labels = [label for label in looks if label in stopped or any(label in last for last in drawn)]
    if len(labels) > 1 or stopped:
        handles = {label: handle(looks[label], crossed=not runs.get(label)) for label in labels}
        order = _best_first(labels, drawn[0], shown[0]) if len(shown) == 1 else labels
        fullest = max(panels, key=lambda panel: len(panel.lines))
        add_legend(figure, fullest, {_name(label, runs, stopped): handles[label] for label in order})
    return write_figure(figure, path)


def _chosen(runs: Runs, stopped: Runs, measures: Sequence[str] | None, axis: str, log: Sequence[str]) -> list[str]:
    """Check the arguments, and return the measures to plot."""
    if axis not in AXES:
        raise unknown("axis", axis, AXES)
    histories = [run for group in (*runs.values(), *stopped.values()) for run in group]
    measured = {k for run in histories for row in run for k in row} - set(AXES)
    for name in (*(measures or ()), *log):
        if name not in measured:
            raise unknown("measure", name, measured)
    if measures:
        return list(measures)
    finished = [run[-1] for group in runs.values() for run in group if run]
    last = finished or [run[-1] for run in histories if run]
    shared = [k for k in (last[0] if last else {}) if k not in AXES and all(k in row for row in last)]
    chosen = [m for m in IN_PLOTS if m in shared] or shared
    if not chosen:
        raise InputError("The runs have no measure in common, so there is nothing to plot.")
    return chosen[:3]


@dataclass(frozen=True)
class _Line:
    """What one panel shows of a label.

    curves:  the points of its finished runs, [points, 2] each.
    stopped: the points of those that diverged.
    whole:   whether all its runs have finished and have the measure: otherwise there is no mean, since that of the
             others would flatter the method.
    """

    label: str
    style: Style
    curves: list[np.ndarray]
    stopped: list[np.ndarray]
    whole: bool


def _lines_of(looks: Mapping[str, Style], runs: Runs, stopped: Runs, measure: str, axis: str) -> list[_Line]:
    lines = []
    for label, style in looks.items():
        finished, lost = (_points(of.get(label, ()), measure, axis) for of in (runs, stopped))
        whole = label not in stopped and len(finished) == len(runs[label])
        lines.append(_Line(label, style, finished, lost, whole))
    return lines


def _points(group: Sequence[Sequence[Row]], measure: str, axis: str) -> list[np.ndarray]:
    curves = [[(row[axis], row[measure]) for row in run if {axis, measure} <= set(row)] for run in group]
    return [np.array(curve, dtype=float) for curve in curves if curve]


def _draw_panel(
    panel: Axes, lines: Sequence[_Line], measure: str, axis: str, log: bool, range: str
) -> dict[str, float]:
    """Draw a panel; return the last value of each line."""
    everything = [c for line in lines for c in (*line.curves, *line.stopped)]
    end = max((c[-1, 0] for c in everything), default=0.0)
    unit, label = unit_of(axis, end)
    end /= unit
    for curve in everything:
        curve[:, 0] /= unit
    finished = [c for line in lines for c in line.curves]
    values = np.concatenate([np.empty(0), *(c[:, 1] for c in finished or everything)])
    log = log or is_wide(values, measure)
    complete = [line for line in lines if line.curves and line.whole] or [line for line in lines if line.curves]
    logs = bool(log and len(values) and values.min() > 0)
    bands = {line.label: _mean_and_band(line.curves, logs) for line in complete}
    limits = Limits(*limits_of(values, log), log)
    if bands:
        limits = focus([_near(band, finished, logs) for band in bands.values()], log, range == "full")
        stopped = np.concatenate([np.empty((0, 2)), *(c for line in lines for c in line.stopped)])
        limits = limits.with_near(stopped[stopped[:, 0] > START * end, 1])
    limits.set(panel)
    for number, line in enumerate(lines):
        if not line.whole:
            for curve in line.curves:
                panel.plot(*curve.T, color=line.style.colour, linestyle=line.style.line, linewidth=1.0, alpha=0.8)
        elif line.label in bands:
            _draw_mean(panel, line, bands[line.label], number, len(lines) <= BANDS)
        for curve in line.stopped:
            _draw_stopped(panel, curve, line.style, limits)
    if len(lines) > BANDS:
        _draw_bars(panel, [line for line in lines if len(line.curves) > 1 and line.whole], bands)
    panel.set_xlabel(label)
    panel.set_ylabel(name_of(measure))
    finish(panel, axis, end)
    last = {label: float(mean[-1]) for label, (_, mean, _, _) in bands.items()}
    return last | {line.label: np.nan for line in lines if line.curves and not line.whole}


def _mean_and_band(curves: Sequence[np.ndarray], log: bool) -> Band:
    """Return the grid, the mean over seeds, and both ends of its 95 % interval; ``log`` averages logarithms.

    The grid is that of the curve with the fewest points, cut off where the first of the curves ends.
    """
    end = min(c[-1, 0] for c in curves)
    grid = min(curves, key=len)[:, 0]
    grid = grid[grid <= end]
    values = np.stack([np.interp(grid, c[:, 0], c[:, 1]) for c in curves])
    values = np.log(values) if log else values
    mean = values.mean(0)
    n = len(values)
    with np.errstate(over="ignore"):  # squares of values that explode
        half = half_width(values.var(0, ddof=1) / n, n - 1) if n > 1 else np.zeros_like(grid)
        low, high = mean - half, mean + half
        return (grid, np.exp(mean), np.exp(low), np.exp(high)) if log else (grid, mean, low, high)


def _near(band: Band, curves: Sequence[np.ndarray], log: bool) -> Band:
    """Return a band that ends close to the single seeds' values, for the limits of an axis: with few seeds it is wide.

    It reaches beyond them by half of what they span, without the start that may be cut off.
    """
    grid, mean, low, high = band
    later = np.concatenate([c[c[:, 0] >= c[0, 0] + START * (c[-1, 0] - c[0, 0]), 1] for c in curves])
    least, most = np.log([later.min(), later.max()]) if log else (later.min(), later.max())
    with np.errstate(over="ignore"):
        ends = np.array([least - (most - least) / 2, most + (most - least) / 2])
        least, most = np.exp(ends) if log else ends
    return grid, mean, np.maximum(low, np.minimum(mean, least)), np.minimum(high, np.maximum(mean, most))


def _draw_mean(panel: Axes, line: _Line, band: Band, number: int, shaded: bool) -> None:
    grid, mean, low, high = band
    style = line.style
    every = max(1, len(grid) // 7)  # markers on a few points, at other places on each line
    panel.plot(grid, mean, **style.both, markevery=(number % every, every), label=line.label)
    if shaded and len(line.curves) > 1:
        panel.fill_between(grid, low, high, color=style.colour, alpha=0.15, linewidth=0)


def _draw_stopped(panel: Axes, curve: np.ndarray, style: Style, limits: Limits) -> None:
    """Draw a run that diverged, and a cross where it ends, or at the edge of the panel if that is outside."""
    panel.plot(*curve.T, color=style.colour, linestyle=style.line, linewidth=1.0, alpha=0.8)
    x, y = curve[-1]
    y = np.clip(y, limits.low, limits.high)
    panel.plot([x], [y], linestyle="none", color=style.colour, clip_on=False, **CROSS)


def _draw_bars(panel: Axes, lines: Sequence[_Line], bands: Mapping[str, Band]) -> None:
    """Draw the band at the end of each line as a bar to its right; bars at similar heights are side by side."""
    low, high = panel.get_xlim()
    for number, line in enumerate(sorted(lines, key=lambda line: bands[line.label][1][-1])):
        end, mean, least, most = (values[-1] for values in bands[line.label])
        place = end + (high - low) * (0.015 + 0.022 * (number % COLUMNS))
        panel.errorbar(place, mean, [[mean - least], [most - mean]], **line.style.markers, elinewidth=1.2, capsize=2)


def _caption(lines: Sequence[_Line], labels: int, log: bool) -> tuple[str, ...]:
    seeds = sorted({len(line.curves) for line in lines if line.curves and line.whole})
    sentences: tuple[str, ...] = ()
    if seeds and seeds[-1] > 1:
        count = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        how = "band" if labels <= BANDS else "bar at its end"
        of = " (of logarithms on a logarithmic axis)" if log else ""
        sentences = (f"Line: mean over {count} seeds; {how}: its 95 % interval{of}.",)
    if any(line.curves and not line.whole for line in lines):
        sentences += ("Thin lines: single seeds of a method that diverged, or has no value, with others.",)
    if any(line.stopped for line in lines):
        sentences += ("Cross: the last value of a run that diverged.",)
    return sentences


def _best_first(labels: Sequence[str], last: Mapping[str, float], measure: str) -> list[str]:
    """Return the labels by their last value, the best first; those without one come last.

    They stay in their order if it is not known whether a larger value is better.
    """
    better = catalogue.measure(measure).higher_is_better
    if better is None:
        return list(labels)
    sign = -1 if better else 1
    worst = float("inf")
    values = {label: sign * last.get(label, sign * worst) for label in labels}
    return sorted(labels, key=lambda label: worst if np.isnan(values[label]) else values[label])


def _name(label: str, runs: Runs, stopped: Runs) -> str:
    lost = len(stopped.get(label, ()))
    return diverged_label(label, lost, lost + len(runs.get(label, ())))
