"""Searches of hyperparameters: the best value found so far, and the value against each hyperparameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedstrata.core.errors import InputError
from fedstrata.training.metrics import catalogue
from fedstrata.training.plots.axes import finish, focus, is_wide, limits_of
from fedstrata.training.plots.figures import (
    CROSS,
    FADED,
    add_caption,
    add_legend,
    as_text,
    diverged_label,
    handle,
    new_figure,
    panels_of,
    write_figure,
)
from fedstrata.training.plots.styles import COLOURS, Style, styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Ranges = Mapping[str, tuple[float, float]]
"""The lowest and the highest value of hyperparameters, by name."""

SHADE, LIGHTER = "#CFE8F8", "#EDF6FC"
"""The background of a searched range and of its extension."""

LOST = COLOURS["vermillion"]


@dataclass(frozen=True)
class Trial:
    """A trial of a search: its hyperparameters, and the value of the measure; None if it diverged.

    full: whether it was run at full length; values of shorter trials cannot be compared with the others.
    """

    options: Mapping[str, float]
    value: float | None
    full: bool = True


def plot_search(
    trials: Mapping[str, Sequence[Trial]], path: str | Path, *, measure: str = "", title: str | None = None
) -> Path:
    """Plot the best value so far against the number of trials, one step curve per label; return the path.

    Trials are in the order in which they were made; a cross marks those that diverged. ``measure`` names the axis and
    says whether a larger value is better.
    """
    best = {label: _best_so_far(group, measure) for label, group in trials.items()}
    finite = [values[np.isfinite(values)] for values in best.values()]
    curves = [(np.arange(len(values)), values, values, values) for values in finite if len(values)]
    if not curves:
        raise InputError("No trial of the search has a value, so there is nothing to plot.")
    looks = styles(trials)
    figure, axes = new_figure(1, 1, (4.6, 3.6))
    panel: Axes = axes[0, 0]
    focus(curves, is_wide(np.concatenate(finite), measure)).set(panel)
    for label, group in trials.items():
        _draw_search(panel, group, best[label], looks[label])
    panel.set_xlabel("Trials")
    panel.set_ylabel(f"Best validation {catalogue.measure(measure).phrase} so far" if measure else "Best value so far")
    finish(panel, "round")
    if title is not None:
        figure.suptitle(as_text(title))
    lost = {label: sum(trial.value is None for trial in group) for label, group in trials.items()}
    add_caption(figure, "Cross: the trial diverged." if any(lost.values()) else "")
    if len(trials) > 1 or any(lost.values()):
        order = sorted(trials, key=lambda label: (np.isnan(best[label][-1]), _sign(measure) * best[label][-1]))
        add_legend(
            figure,
            panel,
            {diverged_label(label, lost[label], len(trials[label])): handle(looks[label]) for label in order},
        )
    return write_figure(figure, path)


def plot_response(
    trials: Sequence[Trial],
    path: str | Path,
    searched: Ranges | None = None,
    extended: Ranges | None = None,
    *,
    measure: str = "",
    title: str | None = None,
) -> Path:
    """Plot the value of each trial of one method against each of its hyperparameters; return the path.

    The best trial is marked, and trials that diverged are crosses at the lower edge. ``searched`` has the ranges that
    were searched, which are shaded, and ``extended`` those that they grew to, shaded lighter.
    """
    names = list(dict.fromkeys(name for trial in trials for name in trial.options))
    finished = [trial for trial in trials if trial.value is not None]
    if not names or not finished:
        raise InputError("No trial of the search has hyperparameters and a value, so there is nothing to plot.")
    full = [trial for trial in finished if trial.full] or finished
    best = min(full, key=lambda trial: _sign(measure) * (trial.value or 0.0))
    figure, panels = panels_of(len(names), (3.4, 3.0), sharey=True)
    for panel, name in zip(panels, names, strict=True):
        ranges = [(of[name], shade) for of, shade in ((extended or {}, LIGHTER), (searched or {}, SHADE)) if name in of]
        _draw_response(panel, [trial for trial in trials if name in trial.options], name, best, ranges, measure)
    if title is not None:
        figure.suptitle(as_text(title))
    add_caption(
        figure,
        "Star: the best trial.",
        "Hollow: a shorter trial." if len(full) < len(finished) else "",
        "Cross: the trial diverged." if len(finished) < len(trials) else "",
        "Shaded: the searched range." if searched else "",
        "Lighter: its extension." if extended else "",
    )
    return write_figure(figure, path)


def _sign(measure: str) -> int:
    """Return the factor that makes a smaller value better; without a measure, a larger value is better."""
    return -catalogue.sign_of(measure) if measure else -1


def _best_so_far(trials: Sequence[Trial], measure: str) -> np.ndarray:
    """Return the best value after each trial; NaN as long as none has finished at full length."""
    sign = _sign(measure)
    each = [np.nan if trial.value is None or not trial.full else sign * trial.value for trial in trials]
    values = np.array(each or [np.nan])
    return sign * np.fmin.accumulate(values)


def _draw_search(panel: Axes, trials: Sequence[Trial], best: np.ndarray, style: Style) -> None:
    numbers = np.arange(1, len(best) + 1)
    panel.plot(numbers, best, color=style.colour, linestyle=style.line, linewidth=1.5, drawstyle="steps-post")
    better = np.concatenate([[True], best[1:] != best[:-1]]) & np.isfinite(best)
    panel.plot(numbers[better], best[better], **style.markers)
    lost = np.array([trial.value is None for trial in trials], dtype=bool)
    if lost.any():
        low, high = panel.get_ylim()
        heights = np.clip(np.where(np.isfinite(best), best, low), low, high)[lost]
        panel.plot(numbers[lost], heights, linestyle="none", color=style.colour, clip_on=False, **CROSS)


def _draw_response(
    panel: Axes,
    trials: Sequence[Trial],
    name: str,
    best: Trial,
    ranges: Sequence[tuple[tuple[float, float], str]],
    measure: str,
) -> None:
    finished = [(trial.options[name], trial.value) for trial in trials if trial.value is not None]
    short = [(trial.options[name], trial.value) for trial in trials if trial.value is not None and not trial.full]
    lost = [trial.options[name] for trial in trials if trial.value is None]
    places = [trial.options[name] for trial in trials]
    values = [value for _, value in finished]
    log = is_wide(values, measure)
    for (low, high), shade in ranges:
        panel.axvspan(low, high, color=shade, linewidth=0, zorder=0)
    positive = min(places) > 0
    panel.set_xscale("log" if positive else "linear")
    panel.set_xlim(*limits_of(np.array([*places, *(end for ends, _ in ranges for end in ends)]), positive))
    panel.set_yscale("log" if log else "linear")
    panel.set_ylim(*limits_of(np.array(values), log))
    panel.plot(*zip(*finished, strict=True), "o", color=COLOURS["blue"], markersize=5, markeredgecolor="white")
    if short:
        panel.plot(*zip(*short, strict=True), "o", color="white", markersize=5, markeredgecolor=COLOURS["blue"])
    if lost:  # an empty line that is not clipped would spoil the layout
        edge = panel.get_xaxis_transform()
        panel.plot(lost, [0.0] * len(lost), transform=edge, linestyle="none", clip_on=False, **CROSS, color=LOST)
    if name in best.options and best.value is not None:
        panel.plot(best.options[name], best.value, "*", color=COLOURS["orange"], markersize=13, markeredgecolor="black")
        panel.axvline(best.options[name], color=FADED, linewidth=0.8, linestyle=":", zorder=1)
    panel.set_xlabel(name)
    if panel.get_subplotspec().is_first_col():  # type: ignore[union-attr]
        panel.set_ylabel(f"Validation {catalogue.measure(measure).phrase}" if measure else "Value")
    finish(panel)
