"""Rankings: the final values of methods over seeds, with intervals, and their differences to a baseline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.core.errors import InputError, unknown
from fedstrata.training.metrics import catalogue
from fedstrata.training.plots.axes import finish, is_wide, limits_of, name_of
from fedstrata.training.plots.figures import FADED, add_caption, as_text, diverged_label, new_figure, write_figure
from fedstrata.training.plots.styles import Style, styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Interval = tuple[float, float]

_NO_EFFECT = "0.6"
"""The grey of a difference that cannot be told from 0."""


@dataclass(frozen=True)
class Ranked:
    """A method in a ranking.

    values:              the value of each seed that did not diverge.
    interval:            the 95 % interval of their mean; None if there is none, as with one seed.
    diverged:            how many seeds diverged.
    missing:             how many of the others do not have the measure.
    difference:          the mean of the differences to the baseline, paired by seed.
    difference_interval: its 95 % interval.
    p:                   the p-value of the test that the difference is 0.
    """

    label: str
    values: Sequence[float]
    interval: Interval | None = None
    diverged: int = 0
    difference: float | None = None
    difference_interval: Interval | None = None
    p: float | None = None
    missing: int = 0

    @property
    def complete(self) -> bool:
        """Whether every seed has a value; otherwise there is no mean, since it would flatter the method."""
        return not self.diverged and not self.missing and bool(self.values)

    @property
    def name(self) -> str:
        """The label, with what is missing."""
        seeds = len(self.values) + self.diverged + self.missing
        label = diverged_label(self.label, self.diverged, seeds)
        return f"{label} (no value in {self.missing} of {seeds})" if self.missing else label

    @property
    def mean(self) -> float:
        """The mean over seeds; NaN without values."""
        return fmean(self.values) if self.values else math.nan


def plot_ranking(
    rows: Iterable[Ranked],
    path: str | Path,
    baseline: str | None = None,
    *,
    measure: str = "",
    title: str | None = None,
) -> Path:
    """Plot one line per method, the best at the top, and those that diverged at the bottom; return the path.

    A method that diverged, or has no value, with some seed has no mean: only the dots of the others are shown. A large
    marker is the mean, a bar its interval, and small dots are single seeds. With the label of a ``baseline``,
    a second panel shows the differences to it, in grey if p is 0.05 or more. ``measure`` names the axis and says
    whether a larger value is better.
    """
    ranked = _sorted(rows, measure)
    if not ranked:
        raise InputError("There are no methods to rank.")
    if baseline is not None and baseline not in (row.label for row in ranked):
        raise unknown("baseline", baseline, [row.label for row in ranked], "plot_ranking")
    looks = styles(sorted(row.label for row in ranked))
    panels = 1 if baseline is None else 2
    figure, axes = new_figure(1, panels, (2.2 + 3.2 * panels, 1.3 + 0.32 * len(ranked)), sharey=True)
    _draw_values(axes[0, 0], ranked, looks, measure)
    axes[0, 0].set_yticks(range(len(ranked)), [as_text(row.name) for row in ranked])
    axes[0, 0].set_ylim(len(ranked) - 0.4, -0.6)
    sentences = ["Large marker: mean over seeds; bar: its 95 % interval; small dots: single seeds."]
    if baseline is not None:
        _draw_differences(axes[0, 1], ranked, looks, baseline)
        sentences.append("Differences are paired by seed; grey: cannot be told from 0.")
    _separate_diverged(axes[0], ranked)
    if title is not None:
        figure.suptitle(as_text(title))
    add_caption(figure, *sentences)
    return write_figure(figure, path)


def _sorted(rows: Iterable[Ranked], measure: str) -> list[Ranked]:
    """Return the methods, best first; those that diverged with some seed, and with all, come last, in their order."""
    sign = -catalogue.sign_of(measure) if measure else -1

    def key(row: Ranked) -> tuple[bool, bool, float]:
        return not row.complete, not row.values, sign * row.mean if row.complete else 0.0

    return sorted(rows, key=key)


def _draw_values(panel: Axes, rows: Sequence[Ranked], looks: Mapping[str, Style], measure: str) -> None:
    shown = [row for row in rows if row.complete] or rows
    seeds = [value for row in shown for value in row.values]
    log = is_wide(seeds, measure)
    panel.set_xscale("log" if log else "linear")
    panel.set_xlim(*_limits(seeds, [row.interval for row in rows if row.complete], log))
    for place, row in enumerate(rows):
        if not row.values:
            panel.text(0.02, place, "no value" if row.missing else "no run finished", **_beside(panel))
            continue
        look = looks[row.label]
        if len(row.values) > 1 or not row.complete:
            panel.plot(row.values, [place + 0.24] * len(row.values), ".", color=look.colour, markersize=4, alpha=0.6)
            for edge, arrow in zip(panel.get_xlim(), "<>", strict=True):
                if any((value < edge) if arrow == "<" else (value > edge) for value in row.values):
                    panel.plot([edge], [place + 0.24], arrow, color=look.colour, markersize=4, clip_on=False)
        if row.complete:
            _draw_interval(panel, place, row.mean, row.interval, look, look.colour)
    panel.set_xlabel(name_of(measure) if measure else "Value")
    finish(panel, "" if log else "value")


def _draw_differences(panel: Axes, rows: Sequence[Ranked], looks: Mapping[str, Style], baseline: str) -> None:
    differences = [row.difference for row in rows if row.difference is not None]
    panel.set_xlim(*_limits([0.0, *differences], [row.difference_interval for row in rows], False))
    panel.axvline(0, color="black", linewidth=0.8)
    for place, row in enumerate(rows):
        if row.label == baseline:
            panel.text(1.04, place, "baseline", **_beside(panel))
        elif row.difference is not None:
            interval = row.difference_interval
            contains_zero = interval is None or interval[0] <= 0 <= interval[1]
            unclear = contains_zero if row.p is None else row.p >= 0.05
            colour = _NO_EFFECT if unclear else looks[row.label].colour
            _draw_interval(panel, place, row.difference, interval, looks[row.label], colour)
            if row.p is not None:
                panel.text(1.04, place, "p < 0.001" if row.p < 0.001 else f"p = {row.p:.3f}", **_beside(panel))
    panel.set_xlabel(as_text(f"Difference from {baseline}"))
    panel.tick_params(left=False)
    finish(panel, "value")


def _beside(panel: Axes) -> dict[str, Any]:
    """Return the options of a note on a line: its horizontal place is a fraction of the panel."""
    return {"transform": panel.get_yaxis_transform(), "va": "center", "color": FADED, "fontsize": "small"}


def _draw_interval(
    panel: Axes, place: float, mean: float, interval: Interval | None, style: Style, colour: str
) -> None:
    """Draw a mean and its interval; an arrow at the edge of the panel says that the interval is longer."""
    if interval is not None:
        panel.plot(interval, [place, place], "|-", color=colour, linewidth=1.6, markersize=7, markeredgewidth=1.2)
        for end, edge, arrow in zip(interval, panel.get_xlim(), "<>", strict=True):
            if (end < edge) if arrow == "<" else (end > edge):
                panel.plot([edge], [place], arrow, color=colour, markersize=5, clip_on=False)
    panel.plot([mean], [place], **(style.markers | {"color": colour, "markeredgewidth": 0.0}))


def _limits(values: Sequence[float], intervals: Iterable[Interval | None], log: bool) -> Interval:
    """Return limits that show all values, and intervals unless they are much wider than the values and the others."""
    ends = np.array([end for interval in intervals if interval is not None for end in interval])
    shown = np.array(values)
    if log:
        shown, ends = np.log(shown), np.log(ends[ends > 0])
    if len(shown) and len(ends):
        typical = float(np.quantile([abs(end - shown).min() for end in ends], 0.25))
        reach = max(shown.max() - shown.min(), 4 * typical) or np.inf
        ends = np.clip(ends, shown.min() - reach, shown.max() + reach)
    low, high = limits_of(np.concatenate([shown, ends]), False)
    return (math.exp(low), math.exp(high)) if log else (low, high)


def _separate_diverged(panels: Sequence[Axes], rows: Sequence[Ranked]) -> None:
    """Draw a line above the methods without a mean."""
    clean = sum(row.complete for row in rows)
    if 0 < clean < len(rows):
        for panel in panels:
            panel.axhline(clean - 0.5, color=FADED, linewidth=0.8, linestyle=":")
