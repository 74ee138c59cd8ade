"""Colours, markers and lines: an algorithm looks the same in every figure, whatever else the figure shows.

Labels that are not names of algorithms keep their look as long as no other label of the figure has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from zlib import crc32

COLOURS = {
    "black": "#000000",
    "vermillion": "#D55E00",
    "blue": "#0072B2",
    "green": "#009E73",
    "purple": "#CC79A7",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "wine": "#882255",
}
"""The palette of Okabe and Ito, which colour-blind readers can tell apart, with Tol's wine in place of yellow."""

MARKERS = ("o", "s", "^", "D", "v", "P", "<", "*", ">", "p", "h", "d")
"""Neither "x" nor "X": a cross stands for a run that diverged."""

_DASHES = (0, (5, 1.5, 1, 1.5, 1, 1.5))

LINES = ("-", (0, (5, 2)), (0, (6, 2, 1, 2)), (0, (1.2, 1.6)), _DASHES)

_ALGORITHMS = {
    "black": ("fedavg", "fednest"),
    "vermillion": ("fgda", "local_smcgdam", "fedadam", "comfedl"),
    "blue": ("adafgda", "local_scgdam", "fedams", "mfcgd", "afl"),
    "green": ("local_sgda", "coda", "lafedopt", "adamfcgd", "local_adaalter"),
    "purple": ("local_sgdam", "cdma", "fedlalr", "local_scgdm"),
    "orange": ("scaffold", "sagda", "fedadagrad", "local_moml", "drfa"),
    "sky": ("fedprox", "local_sgda_plus", "local_scgd", "local_amsgrad"),
    "wine": ("local_sgdm_rl", "local_sgdam_plus", "codasca", "fedyogi", "qfedavg"),
}
"""The algorithms of each colour. Those that are often compared, and presets of one algorithm, differ in colour."""

Line = str | tuple[float, tuple[float, ...]]

_SIZES = {"P": 6.5, "*": 8.0, "D": 4.5, "s": 4.8}
"""Markers that need another size to look as large as the others."""


@dataclass(frozen=True)
class Style:
    """How a label is drawn: ``line`` is a matplotlib line style."""

    colour: str
    marker: str
    line: Line

    @property
    def markers(self) -> dict[str, Any]:
        """The options of matplotlib for points alone."""
        size = _SIZES.get(self.marker, 5.5)
        edge = {"markeredgecolor": "white", "markeredgewidth": 0.4}
        return {"color": self.colour, "linestyle": "none", "marker": self.marker, "markersize": size, **edge}

    @property
    def both(self) -> dict[str, Any]:
        """The options of matplotlib for a line with markers."""
        return self.markers | {"linestyle": self.line, "linewidth": 1.5}


def _of_algorithms() -> dict[str, Style]:
    """Return the styles of the algorithms; no two have the same colour and marker.

    Five is coprime to the number of markers, so the algorithms of one colour get different ones.
    """
    styles = {}
    for number, (name, algorithms) in enumerate(_ALGORITHMS.items()):
        for place, algorithm in enumerate(algorithms):
            marker = MARKERS[(number + 5 * place) % len(MARKERS)]
            styles[algorithm] = Style(COLOURS[name], marker, LINES[place])
    return styles


ALGORITHM_STYLES = _of_algorithms()


def styles(labels: Iterable[str]) -> dict[str, Style]:
    """Return the style of each label of a figure; no two have the same colour and marker.

    An algorithm of the library always has its own style. A label that begins with its name prefers its colour, and any
    other label a colour that depends only on the label. If another label of the figure has that colour, the next colour
    that is used least is taken.
    """
    labels = list(dict.fromkeys(labels))
    chosen = {label: ALGORITHM_STYLES[label] for label in labels if label in ALGORITHM_STYLES}
    for label in sorted(set(labels) - set(chosen)):
        chosen[label] = _free_style(label, list(chosen.values()))
    return {label: chosen[label] for label in labels}


def _free_style(label: str, used: list[Style]) -> Style:
    number = crc32(label.encode())
    palette = list(COLOURS.values())
    base = max((name for name in ALGORITHM_STYLES if label.startswith(name)), key=len, default=None)
    first = number % len(palette) if base is None else palette.index(ALGORITHM_STYLES[base].colour)
    times = Counter(style.colour for style in used)
    colour = min(_from(palette, first), key=lambda c: times[c])
    markers = Counter(style.marker for style in used)
    taken = {style.marker for style in used if style.colour == colour}
    of_algorithms = {style.marker for style in ALGORITHM_STYLES.values() if style.colour == colour}
    order = _from(MARKERS, number // len(palette))
    marker = min(order, key=lambda m: (m in taken, m in of_algorithms, markers[m]))
    return Style(colour, marker, LINES[times[colour] % len(LINES)])


def _from(values: Iterable[str], first: int) -> list[str]:
    """Return the values in order, beginning with the one at ``first``, and going round."""
    values = list(values)
    first %= len(values)
    return values[first:] + values[:first]
