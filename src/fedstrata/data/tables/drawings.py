"""Small plots as inline SVG: bars, and strips of sites. All text in them is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

BAR, MARK, INK, FAINT = "#0072b2", "#d55e00", "#333", "#d8d8d8"
"""Colours that the colour-blind tell apart, on paper too."""

Count = int | None


def svg(width: float, height: float, body: str, label: str) -> str:
    """Return a drawing; ``label`` says what it shows to those who cannot see it."""
    view = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    return f'<svg {view} role="img" aria-label="{escape(label)}">{body}</svg>'


def text(x: float, y: float, words: str, anchor: str = "start", size: float = 10, colour: str = INK) -> str:
    """Return words at a place."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size:g}" fill="{colour}"'
    return f"<text {place}>{escape(words)}</text>"


def rectangle(x: float, y: float, width: float, height: float, fill: str, hint: str = "") -> str:
    """Return a rectangle, with a hint that a pointer shows."""
    size = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{max(0.0, height):.1f}"'
    return f'<rect {size} fill="{fill}">{f"<title>{escape(hint)}</title>" * bool(hint)}</rect>'


def columns(
    counts: Sequence[Count], hints: Sequence[str], ends: tuple[str, str], width: float, height: float, label: str
) -> str:
    """Return upright bars for the bins of a histogram; a hidden count is a hatched stub."""
    foot = 12 if ends[0] or ends[1] else 2
    top, step = max([c for c in counts if c is not None] or [1]) or 1, width / max(1, len(counts))
    parts = []
    for i, (count, hint) in enumerate(zip(counts, hints, strict=True)):
        size = 5.0 if count is None else (height - foot - 2) * count / top
        size = max(size, 1.0) if count else size
        fill = "url(#hidden)" if count is None else BAR
        parts.append(rectangle(i * step + 0.5, height - foot - size, step - 1, size, fill, hint))
    parts.append(f'<path d="M0 {height - foot:g}H{width:g}" stroke="{INK}" stroke-width="0.6"/>')
    parts.append(text(0, height - 2, ends[0], size=9) + text(width, height - 2, ends[1], "end", size=9))
    return svg(width, height, "".join(parts), label)


def rows(names: Sequence[str], counts: Sequence[Count], total: int, less: str, width: float, label: str) -> str:
    """Return a bar for every category, with its name and count; ``less`` stands for hidden counts."""
    top, left, height = max([c for c in counts if c is not None] or [1]) or 1, 0.36 * width, 15
    parts = []
    for i, (name, count) in enumerate(zip(names, counts, strict=True)):
        y = i * height
        cut = name if len(name) <= 22 else f"{name[:21]}…"
        share = "" if count is None or not total else f" ({100 * count / total:.1f} %)"
        said = less if count is None else f"{count:,}{share}"
        size = 5.0 if count is None else (width - left - 92) * count / top
        parts.append(text(left - 5, y + 11, cut, "end"))
        parts.append(
            rectangle(left, y + 2, size, height - 4, "url(#hidden)" if count is None else BAR, f"{name}: {said}")
        )
        parts.append(text(left + size + 4, y + 11, said, size=9))
    return svg(width, height * max(1, len(names)), "".join(parts), label)


def strip(
    spans: Sequence[tuple[str, float, float, float]],
    low: float,
    high: float,
    ends: tuple[str, str],
    width: float,
    label: str,
) -> str:
    """Return a mark for every site, sorted: from a low over a middle to a high value."""
    height, left = 84.0, 46.0
    step = min(14.0, (width - left - 4) / max(1, len(spans)))

    def y(value: float) -> float:
        return 76 - 70 * (min(max(value, low), high) - low) / ((high - low) or 1)

    parts = [f'<path d="M{left - 4:g} 76H{width:g}M{left - 4:g} 6H{width:g}" stroke="{FAINT}" stroke-width="0.6"/>']
    parts.append(text(left - 7, 79, ends[0], "end", size=9) + text(left - 7, 10, ends[1], "end", size=9))
    for i, (name, bottom, middle, top) in enumerate(sorted(spans, key=lambda span: span[2])):
        x = left + (i + 0.5) * step
        line = (
            f'<path d="M{x:.1f} {y(bottom):.1f}V{y(top):.1f}" stroke="{BAR}" stroke-width="{min(3.0, step / 2):.1f}"/>'
        )
        dot = f'<circle cx="{x:.1f}" cy="{y(middle):.1f}" r="{min(3.0, step / 2):.1f}" fill="{MARK}"/>'
        parts.append(f"<g><title>{escape(name)}</title>{line}{dot}</g>")
    return svg(width, height, "".join(parts), label)


def share(part: float | None, width: float = 60, height: float = 9) -> str:
    """Return a bar that is filled in part."""
    if part is None:
        return ""
    body = rectangle(0, 0, width, height, FAINT) + rectangle(0, 0, width * part, height, BAR)
    return svg(width, height, body, f"{100 * part:.1f} %")


PATTERN = (
    '<svg width="0" height="0" aria-hidden="true"><defs><pattern id="hidden" width="4" height="4" '
    'patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="4" height="4" fill="#fff"/>'
    f'<rect width="1.6" height="4" fill="{INK}"/></pattern></defs></svg>'
)
"""The hatching of hidden counts, which a page has once."""
