"""Axes: what they are called, their units, and which part of the values they show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fedstrata.training.metrics import catalogue
from fedstrata.training.plots.figures import FADED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AXES = {
    "round": "Rounds",
    "steps": "Local steps",
    "samples": "Samples drawn",
    "bytes_up": "Data sent by clients",
    "bytes_down": "Data sent to clients",
    "seconds": "Training time",
    "total_seconds": "Time with evaluations and start-up",
}

_COUNT = ((1e6, 1e6, "millions"), (1e5, 1e3, "thousands"), (0.0, 1.0, ""))
_BYTES = ((1e12, 1e12, "TB"), (1e9, 1e9, "GB"), (1e6, 1e6, "MB"), (1e3, 1e3, "kB"), (0.0, 1.0, "B"))
_SECONDS = ((36_000.0, 3600.0, "hours"), (600.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
_UNITS = {"bytes_up": _BYTES, "bytes_down": _BYTES, "seconds": _SECONDS, "total_seconds": _SECONDS}
"""By axis: from which value on a unit is used, how large it is, and its name."""

START = 0.2
"""The part of a curve, from its beginning, that may be cut off."""

SQUEEZED = 0.6
"""The start is cut off if the rest would fill less than this part of the axis."""

MARGIN = 0.05

HUGE = 1e200
"""Limits with a margin beyond this could overflow."""

Band = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""A curve: the places on the horizontal axis, the mean, and the lower and the upper end of its band."""


def unit_of(axis: str, largest: float) -> tuple[float, str]:
    """Return the unit for values up to ``largest`` on a horizontal axis, and the label of the axis with it."""
    size, name = next((size, name) for least, size, name in _UNITS.get(axis, _COUNT) if largest >= least)
    return size, f"{AXES[axis]} ({name})" if name else AXES[axis]


def is_wide(values: Iterable[float], measure: str) -> bool:
    """Whether a loss varies so much that it needs a logarithmic scale."""
    known = list(values)
    return measure == "loss" and bool(known) and 0 < 20 * min(known) < max(known)


def finish(panel: Axes, axis: str = "", largest: float | None = None) -> None:
    """Draw the grid, and choose and format the ticks of the horizontal axis, up to the ``largest`` value."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    panel.grid(alpha=0.25)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    if axis:
        panel.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10], integer=axis == "round"))
        if panel.get_xlim()[1] >= 1000:
            panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        if largest is not None:
            low = panel.get_xlim()[0]
            panel.set_xticks([tick for tick in panel.get_xticks() if low <= tick <= 1.001 * largest])


def name_of(measure: str) -> str:
    """Return the name of a measure as the label of an axis."""
    return catalogue.measure(measure).title


def limits_of(values: np.ndarray, log: bool) -> tuple[float, float]:
    """Return the limits of an axis that shows all finite values, with a margin; a logarithmic one the positive ones."""
    values = np.clip(values[np.isfinite(values)], -HUGE, HUGE)
    if log:
        values = np.log(values[values > 1 / HUGE])
    if not len(values):
        return (0.1, 1.0) if log else (0.0, 1.0)
    low, high = float(values.min()), float(values.max())
    margin = MARGIN * (high - low) or MARGIN * (abs(high) or 1.0)
    low, high = low - margin, high + margin
    return (float(np.exp(low)), float(np.exp(high))) if log else (low, high)


@dataclass(frozen=True)
class Limits:
    """The part of the values that a vertical axis shows, and a note on what it leaves out."""

    low: float
    high: float
    log: bool
    note: str = ""

    def with_near(self, values: np.ndarray) -> Limits:
        """Return limits that also show those of ``values`` that are no farther away than half of what is shown."""
        values = values[values > 0] if self.log else values
        ends = np.array([self.low, self.high])
        places, (low, high) = (np.log(values), np.log(ends)) if self.log else (values, ends)
        reach = (high - low) / 2
        near = values[(places >= low - reach) & (places <= high + reach)]
        if not len(near) or (near.min() >= self.low and near.max() <= self.high):
            return self
        return replace(self, low=min(self.low, float(near.min())), high=max(self.high, float(near.max())))

    def set(self, panel: Axes) -> None:
        """Scale the panel, and write the note above it."""
        panel.set_yscale("log" if self.log else "linear")
        panel.set_ylim(self.low, self.high)
        panel.set_title(self.note, loc="left", fontsize="small", color=FADED, pad=9)


def focus(curves: Sequence[Band], log: bool, full_range: bool = False) -> Limits:
    """Return limits that cut off the start of the curves if it squeezes the rest.

    The values at the end of every curve are always inside.
    """
    shown, full = _values(curves, START), _values(curves, 0.0)
    everything, part = limits_of(full, log), limits_of(shown, log)
    if full_range or _span(part, log) >= SQUEEZED * _span(everything, log):
        return Limits(*everything, log)
    means = np.concatenate([mean for _, mean, _, _ in curves])
    for values in (means, full):
        low, high = (values[values > 0] if log else values).min(), values.max()
        below, above = low < part[0], high > part[1]
        if below and above:
            return Limits(*part, log, f"↕ starts outside the axis, {low:.3g} to {high:.3g}")
        if below or above:
            note = f"↓ starts lower, at {low:.3g}" if below else f"↑ starts higher, at {high:.3g}"
            return Limits(*part, log, note)
    return Limits(*part, log)


def _values(curves: Sequence[Band], skip: float) -> np.ndarray:
    """Return all means and ends of bands after the first part ``skip`` of each curve."""
    chosen = []
    for places, *lines in curves:
        later = places >= places[0] + skip * (places[-1] - places[0]) if len(places) else places >= 0
        chosen += [line[later] for line in lines]
    return np.concatenate(chosen)


def _span(limits: tuple[float, float], log: bool) -> float:
    low, high = np.log(limits) if log else limits
    return float(high - low)
