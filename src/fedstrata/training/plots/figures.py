"""Figures: made without pyplot, with one legend and a caption, and written for print."""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.core.errors import InputError, invalid
from fedstrata.core.files import folder_at, write_atomically
from fedstrata.training.plots.styles import Style

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

DPI = 200

FADED = "0.35"
"""The grey of notes and captions."""

CROSS: dict[str, Any] = {"marker": "x", "markersize": 7, "markeredgewidth": 1.8, "zorder": 4}
"""The marker of what diverged."""

INSIDE = 4
"""The most labels of a legend inside a panel; a longer one goes beside it."""

PLACES: tuple[Any, ...] = ("lower right", "upper right", "upper left", "lower left")
"""Where a legend may be in a panel; matplotlib's "best" ignores bands."""

_FOR_PRINT: dict[Any, Any] = {
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "fedstrata",
}
"""Fonts are embedded and text stays text; identifiers in an SVG are the same every time."""

_UNDATED = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}


def new_figure(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Figure, np.ndarray]:
    """Create a figure and its axes [rows, columns] without pyplot: the caller's backend and figures stay untouched."""
    from matplotlib.figure import Figure  # takes longer to import than most commands take to run

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


FORMATS = (".png", ".pdf", ".svg")
"""The formats of plots."""


def picture_at(path: str | Path) -> Path:
    """Return the path of a plot, whose suffix chooses its format; raise if no file can be written there."""
    wants = f"a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file in a directory that exists"
    file = Path(path)
    if file.suffix.lower() not in FORMATS:
        raise invalid("path of a plot", str(path), wants)
    folder_at(file.parent)
    try:
        fits = file.parent.is_dir() and not file.is_dir() and (not file.exists() or os.access(file, os.W_OK))
    except (OSError, ValueError):  # a name that is too long
        fits = False
    if not fits:
        raise invalid("path of a plot", str(path), wants)
    return file


def write_figure(figure: Figure, path: str | Path) -> Path:
    """Write a figure to a file; the suffix chooses the format."""
    import matplotlib

    path, picture = picture_at(path), io.BytesIO()
    suffix = path.suffix.lower()
    metadata: dict[str, Any] | None = _UNDATED.get(suffix)
    try:
        with matplotlib.rc_context(_FOR_PRINT):  # read when a figure is drawn; the caller's settings come back
            figure.savefig(picture, format=suffix[1:], dpi=DPI, metadata=metadata)
    except ValueError as error:
        raise InputError(f"Cannot draw the plot {path}: {error}") from None
    write_atomically(path, picture.getvalue(), durable=False)
    return path


def panels_of(count: int, size: tuple[float, float], most: int = 3, **options: Any) -> tuple[Figure, list[Axes]]:
    """Create a figure with ``count`` panels of one ``size``, at most ``most`` in a row."""
    down = -(-count // most)
    across = -(-count // down)
    figure, grid = new_figure(down, across, (size[0] * across, size[1] * down), **options)
    for unused in grid.flat[count:]:
        unused.remove()
    return figure, list(grid.flat[:count])


def diverged_label(label: str, diverged: int, seeds: int) -> str:
    """Return a label that says in how many of its runs a method diverged."""
    return f"{label} (diverged in {diverged} of {seeds})" if diverged else label


def add_caption(figure: Figure, *sentences: str) -> None:
    """Write sentences below the panels, wrapped to the width of the figure."""
    text = " ".join(s for s in sentences if s)
    if text:
        width = int(15 * figure.get_size_inches()[0])
        figure.supxlabel(textwrap.fill(text, width), fontsize="small", color=FADED)


def handle(style: Style, crossed: bool = False) -> Artist:
    """Return the line of a label for a legend, with its marker or a cross."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **(style.both | (CROSS | {"markeredgecolor": style.colour} if crossed else {})))


def as_text(label: str) -> str:
    """Return a label for a figure; dollar signs in it do not begin a formula."""
    return label.replace("$", r"\$")


def add_legend(figure: Figure, panel: Axes, handles: Mapping[str, Artist]) -> Legend:
    """Add the one legend of a figure: in the panel if it is short and covers no curve, else beside the panels."""
    options: dict[str, Any] = {"frameon": False, "fontsize": "small", "handlelength": 3.4}
    drawn, labels = list(handles.values()), [as_text(label) for label in handles]
    if len(handles) <= INSIDE:
        legend: Legend = panel.legend(drawn, labels, **options, loc=PLACES[0])
        figure.draw_without_rendering()  # fixes the places of the curves
        for place in PLACES:
            legend.set_loc(place)
            if not _covers(legend, panel):
                return legend
        legend.remove()
    legend = figure.legend(drawn, labels, loc="outside right center", **options)
    figure.draw_without_rendering()
    extent = legend.get_window_extent()
    width, height = figure.get_size_inches()
    figure.set_size_inches(width + extent.width / figure.dpi, max(height, extent.height / figure.dpi + 0.3))
    return legend


def _covers(legend: Legend, panel: Axes) -> bool:
    """Whether the legend lies on a line, a marker or a band of the panel."""
    box = legend.get_window_extent().padded(4)
    lines = [line.get_transform().transform_path(line.get_path()) for line in panel.lines]
    bands = [c.get_transform().transform_path(p) for c in panel.collections for p in c.get_paths()]
    if any(path.intersects_bbox(box, filled=False) for path in lines):
        return True
    return any(path.intersects_bbox(box, filled=True) for path in bands)
