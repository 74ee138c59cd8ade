"""The description of tables as a page: one file that loads nothing, for a screen and for paper."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise

import numpy as np

from fedstrata.core.version import __version__
from fedstrata.data.tables.cells import date_of
from fedstrata.data.tables.columns import Column, Target
from fedstrata.data.tables.describing import FEW_SITES, ColumnSummary, Description, SiteSummary, answers_of
from fedstrata.data.tables.drawings import PATTERN, columns, rows, share, strip

MOST_MARKS = 300
"""At most so many sites are marks in a strip."""

MOST = 20
"""At most so many categories are shown."""

STYLE = """
body{font:14px/1.45 system-ui,sans-serif;color:#222;max-width:1060px;margin:24px auto;padding:0 16px}
h1{font-size:24px;margin:0 0 4px}h2{font-size:17px;margin:28px 0 8px;border-bottom:1px solid #ccc}
h3{font-size:15px;margin:0}h3 small{font-weight:normal;color:#555}
p{margin:4px 0}.quiet{color:#555;font-size:12.5px}
table{border-collapse:collapse;font-size:13px}th,td{text-align:right;padding:2px 10px 2px 0;white-space:nowrap}
th{border-bottom:1px solid #999}td:first-child,th:first-child,td.words{text-align:left}td.words{white-space:normal}
tr.sum td{border-top:1px solid #999;font-weight:600}
li{margin:3px 0}li b{font-weight:600}
.card{break-inside:avoid;border:1px solid #ddd;border-radius:4px;padding:10px 12px;margin:10px 0}
.parts{display:flex;flex-wrap:wrap;gap:8px 28px;align-items:flex-start;margin-top:6px}
.sites{display:flex;flex-wrap:wrap;gap:6px 14px;flex:1;min-width:300px}.sites figure{margin:0;width:132px}
figcaption{font-size:11px;line-height:1.25;color:#444;overflow-wrap:anywhere}svg{display:block;font-family:inherit}
@media print{body{margin:0;max-width:none;font-size:11px}h2{break-after:avoid}tr{break-inside:avoid}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""

POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(description: Description) -> str:
    """Return a description as an HTML page."""
    d = description
    title = f"{_count(len(d.sites), 'site')}, {_number(d.together.rows)} rows"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{_target_line(d)}</p>",
        f'<p class="quiet">{escape(_how_hidden(d))}</p>',
        "<h2>Findings</h2>",
        _findings(d),
        "<h2>Sites</h2>",
        _sites(d),
        "<h2>Columns</h2>",
        f'<p class="quiet">{escape(_legend(d))}</p>',
        _card(d, d.schema.target, d.together.target, [s.target for s in d.sites]),
        *(_card(d, c, d.together.columns[c.name], [s.columns[c.name] for s in d.sites]) for c in d.schema.features),
        f'<p class="quiet">fedstrata {__version__}, schema {d.schema.digest[:12]}</p>',
    ]
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n{PATTERN}\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _number(value: int | None, minimum: int = 0) -> str:
    return ("few" if not minimum else "–") if value is None else f"{value:,}"


def _told(summary: ColumnSummary, cell: int, few: str = "–") -> str:
    return few if summary.counts[cell] is None else summary.told(cell)


def share_of(part: int | None, whole: int | None) -> float | None:
    """Return a share; None if it is hidden, or of nothing."""
    return None if part is None or not whole else part / whole


def percent(part: float | None) -> str:
    """Return a share in words."""
    if part is None:
        return "–"
    return f"{100 * part:.1f} %" if 0 < part < 0.1 or 0.9 < part < 1 else f"{100 * part:.0f} %"


def empty_columns(site: SiteSummary) -> list[str]:
    """Return the columns in which no row has a value."""
    return [name for name, column in site.columns.items() if site.rows and column.exact(-1) == site.rows]


def _target_line(d: Description) -> str:
    target = d.schema.target
    name = f"<b>{escape(target.name)}</b>"
    if target.kind != "flag":
        return f"The target is {name}."
    rate = percent(share_of(d.together.positives, d.together.rows))
    return f"The target is {name}: {_told(d.together.target, 1, 'few')} rows are positive ({rate})."


def _how_hidden(d: Description) -> str:
    if d.minimum <= 1:
        return "All counts are shown."
    said = f"Counts from 1 to {d.minimum - 1}, and others that would tell them, are hidden (– and hatched)."
    if any(summary.hidden for summary in (d.together.target, *d.together.columns.values())):
        said += " A sum in which some sites hide theirs has at least (≥) the others."
    if d.left_out:
        said += f" {_count(d.left_out, 'site')} of fewer rows {'is' if d.left_out == 1 else 'are'} not in the sums."
    return said


def _legend(d: Description) -> str:
    words = "Left: all sites together. Bins at both ends are open."
    if len(d.sites) <= FEW_SITES:
        return f"{words} Right: each site, the highest bar being equally high."
    return f"{words} Right: each site that may be shown, sorted: its median, and the line from 25 % to 75 %."


def _findings(d: Description) -> str:
    if not d.findings:
        return "<p>Nothing looks wrong.</p>"
    items = []
    for finding in sorted(d.findings, key=lambda f: f.severity):
        word = "To correct" if finding.severity == "error" else "To look at"
        items.append(f"<li><b>{word}:</b> {escape(str(finding.public(d.minimum)))}</li>")
    return f"<ul>{''.join(items)}</ul>"


def _table(head: Sequence[str], lines: Iterable[str]) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _sites(d: Description) -> str:
    flag = d.schema.target.kind == "flag"
    head = ["site", "rows", *(["positive", "%", ""] if flag else []), "columns without a value"]
    return _table(head, [_site(d, site, "") for site in d.sites] + [_site(d, d.together, "sum")])


def _site(d: Description, site: SiteSummary, kind: str) -> str:
    cells = [
        f"<td>{escape(site.name)}</td>",
        f"<td>{f'fewer than {d.minimum}' if site.rows is None else f'{site.rows:,}'}</td>",
    ]
    if d.schema.target.kind == "flag":
        rate = share_of(site.positives, site.rows)
        cells += [
            f"<td>{_told(site.target, 1)}</td>",
            f"<td>{percent(rate)}</td>",
            f"<td>{share(rate)}</td>",
        ]
    empty = empty_columns(site)
    more = f" and {len(empty) - 5} more" if len(empty) > 5 else ""
    cells.append(f'<td class="words">{escape(", ".join(empty[:5]) + more)}</td>')
    return f'<tr class="{kind}">{"".join(cells)}</tr>'


def _card(d: Description, column: Column | Target, together: ColumnSummary, own: Sequence[ColumnSummary]) -> str:
    unit = f", {column.unit}" if isinstance(column, Column) and column.unit else ""
    kind = f"target, {column.kind}" if isinstance(column, Target) else column.kind
    about = f"<p>{escape(column.description)}</p>" if isinstance(column, Column) and column.description else ""
    facts = "; ".join(_facts(d, column, together))
    return (
        f'<section class="card"><h3>{escape(column.name)} <small>{escape(kind + unit)}</small></h3>{about}'
        f'<p class="quiet">{escape(facts)}</p><div class="parts"><div>{_large(d, column, together)}</div>'
        f"{_per_site(d, column, own)}</div></section>"
    )


def _facts(d: Description, column: Column | Target, summary: ColumnSummary) -> list[str]:
    words = []
    if isinstance(column, Column):
        words.append(f"missing {percent(share_of(summary.exact(-1), d.together.rows))}")
    if summary.mean is not None:
        spread = f"{summary.spread:.3g} days" if column.kind == "date" else f"{summary.spread:.3g}"
        words.append(f"mean {value_of(column, summary.mean)} ± {spread}")
    low, first, middle, third, high = summary.quantiles
    if middle is not None:
        between = (
            f" ({value_of(column, first)} to {value_of(column, third)})"
            if first is not None and third is not None
            else ""
        )
        words.append(f"median {value_of(column, middle)}{between}")
    if low is not None and high is not None:
        words.append(f"90 % from {value_of(column, low)} to {value_of(column, high)}")
    if summary.extremes:
        words.append(f"all from {value_of(column, summary.extremes[0])} to {value_of(column, summary.extremes[1])}")
    return words


def value_of(column: Column | Target, value: float | None) -> str:
    """Return a number or a date in words."""
    if value is None:
        return "–"
    return date_of(value) if column.kind == "date" else f"{value:.4g}"


def _hints(d: Description, column: Column | Target, summary: ColumnSummary) -> list[str]:
    """Return what a pointer shows on every bar."""
    said = [_told(summary, i, f"fewer than {d.minimum}, or hidden for others") for i in range(len(summary.counts))]
    if column.name not in d.bins:
        return [f"{name}: {count}" for name, count in zip(answers_of(column), said, strict=True)]
    edges = [value_of(column, float(edge)) for edge in d.bins[column.name]]
    names = [f"{low} to {high}" for low, high in pairwise(edges)]
    names[0], names[-1] = f"below {edges[1]}", f"from {edges[-2]}"
    return [f"{name}: {count}" for name, count in zip(names, said, strict=True)]


def _large(d: Description, column: Column | Target, summary: ColumnSummary) -> str:
    label = f"{column.name}, all sites together"
    if column.name in d.bins:
        edges = d.bins[column.name]
        ends = (value_of(column, float(edges[0])), value_of(column, float(edges[-1])))
        return columns(summary.counts, _hints(d, column, summary), ends, 340, 110, label)
    names, counts = answers_of(column), list(summary.counts)
    known = sum(count for count in counts if count is not None)
    order = sorted(range(len(names)), key=lambda i: -(counts[i] or 0)) if len(names) > MOST else range(len(names))
    kept = list(order)[:MOST]
    total = known if None not in counts and not summary.hidden else 0
    drawn = rows([names[i] for i in kept], [counts[i] for i in kept], total, "–", 340, label)
    return drawn + (f'<p class="quiet">and {len(names) - MOST} more categories</p>' if len(names) > MOST else "")


def _per_site(d: Description, column: Column | Target, own: Sequence[ColumnSummary]) -> str:
    if len(d.sites) == 1:
        return ""
    if len(d.sites) <= FEW_SITES:
        return (
            f'<div class="sites">{"".join(_figure(d, column, *pair) for pair in zip(d.sites, own, strict=True))}</div>'
        )
    spans, low, high, what = _spans(d, column, own)
    shown = f"{len(spans)} of {len(own)} sites{', the others are hidden' * (len(spans) < len(own))}"
    if len(spans) < 3:
        return f'<p class="quiet">{shown}</p>' if column.name in d.bins or column.size == 2 else ""
    if len(spans) > MOST_MARKS:
        spans.sort(key=lambda span: span[2])
        spans = [spans[i] for i in np.linspace(0, len(spans) - 1, MOST_MARKS).astype(int)]
    ends = (percent(low), percent(high)) if what else (value_of(column, low), value_of(column, high))
    drawn = strip(spans, low, high, ends, 560, f"{column.name}, {len(spans)} sites")
    return f'<div><p class="quiet">{escape(what)}{shown}</p>{drawn}</div>'


def _spans(
    d: Description, column: Column | Target, own: Sequence[ColumnSummary]
) -> tuple[list[tuple[str, float, float, float]], float, float, str]:
    """Return a low, a middle and a high value of every site that may be shown, and their scale."""
    spans = []
    if column.name in d.bins:
        for site, summary in zip(d.sites, own, strict=True):
            _, first, middle, third, _ = summary.quantiles
            if middle is not None:
                spans.append(
                    (site.name, middle if first is None else first, middle, middle if third is None else third)
                )
        edges = d.bins[column.name]
        return spans, float(edges[0]), float(edges[-1]), ""
    if column.size != 2:
        return [], 0, 1, ""
    for site, summary in zip(d.sites, own, strict=True):
        no, yes = summary.counts
        if no is not None and yes is not None and no + yes:
            spans.append((site.name, 0.0, yes / (no + yes), yes / (no + yes)))
    top = float(np.ceil(10 * max((s[2] for s in spans), default=1)) / 10) or 0.1
    return spans, 0.0, top, f"share of {answers_of(column)[1]!r}, "


def _figure(d: Description, column: Column | Target, site: SiteSummary, summary: ColumnSummary) -> str:
    """Return the small plot of one site."""
    counts = summary.counts[:MOST]
    drawn = columns(counts, _hints(d, column, summary)[:MOST], ("", ""), 126, 38, f"{column.name}, {site.name}")
    words = escape(site.name)
    missing = share_of(summary.missing, site.rows)
    if isinstance(column, Column) and (missing or missing is None):
        words += f"<br>missing {'hidden' if missing is None else percent(missing)}"
    return f"<figure>{drawn}<figcaption>{words}</figcaption></figure>"
