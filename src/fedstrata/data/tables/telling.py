"""The description of tables that no program sees together: what each site tells of its own, and how that is merged.

Two questions are asked. A site first tells between which values nearly all of a column lie, so that the bins of plots
are the same everywhere, and then its summary: counts, of which it hides the small ones itself and others with them as
far as their sum would tell them, means, spreads and quantiles. Whoever merges the answers knows nothing else: a count
of all sites is the sum of what they tell, and where some hide theirs, it is at least so many.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fedstrata.data.tables.checking import names_like_target, other_units
from fedstrata.data.tables.describing import (
    LEVELS,
    ColumnSummary,
    Description,
    SiteSummary,
    counts_of,
    described,
    edges_of,
    enough_beyond,
    numbers_of,
    round_to,
    rounded,
    span_of,
    values_of,
    visible,
)
from fedstrata.data.tables.findings import Finding, together
from fedstrata.data.tables.reading import SiteTable
from fedstrata.data.tables.schema import Schema
from fedstrata.data.tables.statistics import coarse
from fedstrata.data.tables.suppressing import shown

Bins = Mapping[str, np.ndarray]


class Span(NamedTuple):
    """Between which values nearly all of a column lie, and whether all are whole."""

    low: float
    high: float
    whole: bool


class SiteSpans(NamedTuple):
    """The rows of a site, None if they are few, and the spans of its numbers and dates that have enough values."""

    rows: int | None
    columns: Mapping[str, Span]


def spans_of(table: SiteTable, schema: Schema, minimum: int) -> SiteSpans:
    """Return the answer of a site to the first question."""
    spans = {}
    for i, column in enumerate(described(schema)):
        values = values_of(table, i)
        present = values[~np.isnan(values)]
        span = None if column.size else span_of(present, minimum)
        if span is not None:
            low, high = (round_to(value, minimum) for value in span)
            spans[column.name] = Span(low, high, bool((present == np.round(present)).all()))
    return SiteSpans(_rows(table, minimum), spans)


def bins_of(schema: Schema, sites: Sequence[SiteSpans], minimum: int) -> dict[str, np.ndarray]:
    """Return the edges of the bins of every column of numbers or dates."""
    rows = [site.rows for site in sites if site.rows is not None]
    bins = {}
    for column in described(schema):
        if not column.size:
            spans = [site.columns[column.name] for site in sites if column.name in site.columns]
            ends = (min(s.low for s in spans), max(s.high for s in spans)) if spans else None
            bins[column.name] = edges_of(column, ends, bool(spans) and all(s.whole for s in spans), rows, minimum)
    return bins


def summary_of(table: SiteTable, schema: Schema, bins: Bins, minimum: int) -> SiteSummary:
    """Return the answer of a site to the second question.

    Means and spreads are as they are, unless they would tell how many cells are missing where that is hidden.
    """
    summaries = []
    for i, column in enumerate(described(schema)):
        values, edges = values_of(table, i), bins.get(column.name)
        counts = counts_of(values, column, edges)
        show = shown(counts[None], minimum)
        *cells, missing = visible(counts, show.cells[0])
        present = values[~np.isnan(values)]
        numbers = {} if edges is None else numbers_of(present, minimum)
        if numbers and missing is None:
            mean, variance = coarse(numbers["mean"], numbers["spread"] ** 2, len(present))
            numbers |= {"mean": mean, "spread": math.sqrt(variance)}
        summaries.append(ColumnSummary(tuple(cells), missing, **numbers))
    return SiteSummary(table.name, _rows(table, minimum), summaries[0], _by_name(schema, summaries[1:]))


def _rows(table: SiteTable, minimum: int) -> int | None:
    return None if 0 < len(table) < minimum else len(table)


def _by_name(schema: Schema, summaries: Sequence[ColumnSummary]) -> dict[str, ColumnSummary]:
    return dict(zip(schema.names, summaries, strict=True))


def merged(
    schema: Schema, minimum: int, bins: Bins, sites: Sequence[SiteSummary], findings: Sequence[Finding]
) -> Description:
    """Return the description of all sites from what each of them tells."""
    counted = [site for site in sites if site.rows is not None]
    rows = sum(site.rows or 0 for site in counted)
    target = _together([s.target for s in counted], counted, bins.get(schema.target.name), minimum, schema.target.size)
    columns = {
        c.name: _together([s.columns[c.name] for s in counted], counted, bins.get(c.name), minimum, c.size)
        for c in schema.features
    }
    every = SiteSummary("together", rows, target, columns)
    own = [
        replace(s, target=rounded(s.target, minimum), columns={n: rounded(c, minimum) for n, c in s.columns.items()})
        for s in sites
    ]
    more = [*names_like_target(schema), *_empty(schema, every), *_units(schema, counted)]
    return Description(
        schema, minimum, bins, tuple(own), every, len(sites) - len(counted), tuple(together([*findings, *more]))
    )


def _together(
    own: Sequence[ColumnSummary], sites: Sequence[SiteSummary], edges: np.ndarray | None, minimum: int, size: int
) -> ColumnSummary:
    cells = size if edges is None else len(edges) - 1
    told = [[*summary.counts, summary.missing] for summary in own]
    hidden = [sum(counts[i] is None for counts in told) for i in range(cells + 1)]
    sums = [sum(counts[i] or 0 for counts in told) for i in range(cells + 1)]
    *counts, missing = (None if few and not total else total for total, few in zip(sums, hidden, strict=True))
    summary = ColumnSummary(tuple(counts), missing, hidden=tuple(hidden) if any(hidden) else ())
    known = [(s, _present(s, site)) for s, site in zip(own, sites, strict=True) if s.mean is not None]
    total = sum(present for _, present in known)
    if edges is None or not total:
        return summary
    means, spreads = np.array([(s.mean, s.spread) for s, _ in known], float).T
    weights = np.array([present for _, present in known]) / total
    mean = float(weights @ means)
    summary = replace(
        summary,
        mean=mean,
        spread=float(np.sqrt(weights @ (spreads**2 + (means - mean) ** 2))),
        quantiles=_quantiles(known, edges, minimum),
        extremes=_extremes([s for s, _ in known]),
    )
    return rounded(summary, minimum)


def _present(summary: ColumnSummary, site: SiteSummary) -> int:
    """Return how many values a column has at a site, or, if that is hidden, how many rows the site has."""
    return (site.rows or 0) - (summary.missing or 0)


def _extremes(known: Sequence[ColumnSummary]) -> tuple[float, float] | None:
    ends = [summary.extremes for summary in known if summary.extremes is not None]
    return (min(low for low, _ in ends), max(high for _, high in ends)) if len(ends) == len(known) else None


def _quantiles(known: Sequence[tuple[ColumnSummary, int]], edges: np.ndarray, minimum: int) -> tuple[float | None, ...]:
    """Return quantiles of all sites from those of each and from its bins, linear between what these tell."""
    curves = [(_curve(summary, edges), present) for summary, present in known]
    curves = [(curve, present) for curve, present in curves if len(curve[0]) > 2]
    total = sum(present for _, present in curves)
    if not total:
        return (None,) * len(LEVELS)
    places = np.unique(np.concatenate([curve[0] for curve, _ in curves]))
    shares = sum(present * np.interp(places, *curve, left=0.0, right=1.0) for curve, present in curves) / total
    found = np.interp(LEVELS, np.maximum.accumulate(shares), places)
    return tuple(
        round_to(float(q), minimum) if b else None for q, b in zip(found, enough_beyond(total, minimum), strict=True)
    )


def _curve(summary: ColumnSummary, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return points of the distribution of a site's values: the values, and the share of values below each."""
    points = [(q, level) for q, level in zip(summary.quantiles, LEVELS, strict=True) if q is not None]
    counts = summary.counts
    if None not in counts and any(counts):
        below = np.cumsum([count or 0 for count in counts])
        points += [(float(e), float(b / below[-1])) for e, b in zip(edges[1:-1], below, strict=False)]
    low, high = summary.extremes or (float(edges[0]), float(edges[-1]))
    inner = sorted(point for point in points if low < point[0] < high)
    places, shares = np.array([(low, 0.0), *inner, (high, 1.0)]).T
    return places, np.maximum.accumulate(shares)


def _empty(schema: Schema, every: SiteSummary) -> list[Finding]:
    empty = [c.name for c in schema.features if every.rows and every.columns[c.name].exact(-1) == every.rows]
    remedy = "Move the column to drop in the schema."
    return [Finding("", name, "empty", "warning", "no site has a value", remedy) for name in empty]


def _units(schema: Schema, sites: Sequence[SiteSummary]) -> list[Finding]:
    """Compare a site's quantiles with those of the others where the schema has no range."""
    findings = []
    for column in schema.features:
        known = [(site.name, site.columns[column.name].quantiles) for site in sites]
        whole = [(name, np.array(own, float)) for name, own in known if None not in own]
        if column.kind == "numeric" and np.isinf(column.bounds).all() and len(whole) > 2:
            findings += other_units([name for name, _ in whole], np.array([own for _, own in whole]), column)
    return findings
