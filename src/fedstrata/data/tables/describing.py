"""What the sites' tables hold, as counts, means and quantiles per site and together, none of them of a few rows.

Counts below a minimum are hidden, and others with them as far as needed (see suppressing.py). Means, spreads and
quantiles are rounded, and shown only if enough values stand behind them, beyond a quantile too; extremes only if the
minimum is 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedstrata.core.errors import InputError
from fedstrata.core.version import __version__
from fedstrata.data.tables.cells import date_of
from fedstrata.data.tables.checking import quantiles_of
from fedstrata.data.tables.columns import Column, Target
from fedstrata.data.tables.findings import Finding, together
from fedstrata.data.tables.reading import SiteTable
from fedstrata.data.tables.schema import Schema
from fedstrata.data.tables.suppressing import large_enough, shown

MINIMUM = 10
"""A count below this is hidden, unless it is zero."""

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
"""The quantiles."""

BINS = 12

FEW_SITES = 12
"""The distributions of at most so many sites are shown side by side; those of more as a strip."""

SAMPLE = 100_000
"""At most so many values decide where the bins of a plot lie."""


@dataclass(frozen=True)
class ColumnSummary:
    """What a column holds, at a site or together; None for what is hidden.

    counts:    of the categories, classes or bins, in order.
    missing:   cells that are missing.
    hidden:    how many sites hide each of the counts, and then that of missing cells, where these are sums of what the
               others tell; empty if they are the counts of all.
    mean:      of numbers and dates, with their standard deviation, ``spread``.
    quantiles: at :data:`LEVELS`.
    extremes:  the lowest and highest value, if the minimum is 1.
    """

    counts: tuple[int | None, ...]
    missing: int | None = 0
    mean: float | None = None
    spread: float | None = None
    quantiles: tuple[float | None, ...] = (None,) * len(LEVELS)
    extremes: tuple[float, float] | None = None
    hidden: tuple[int, ...] = ()

    def told(self, cell: int) -> str:
        """Return a count in words, -1 being that of missing cells: it may be known to be at least so many."""
        count = self.missing if cell == -1 else self.counts[cell]
        more = "≥ " if self.hidden and self.hidden[cell] else ""
        return "–" if count is None else f"{more}{count:,}"

    def exact(self, cell: int) -> int | None:
        """Return a count, -1 being that of missing cells; None if it is hidden, wholly or at some sites."""
        count = self.missing if cell == -1 else self.counts[cell]
        return None if self.hidden and self.hidden[cell] else count


@dataclass(frozen=True)
class SiteSummary:
    """What the table of a site holds, or those of all; ``rows`` is None if they are few."""

    name: str
    rows: int | None
    target: ColumnSummary
    columns: Mapping[str, ColumnSummary]

    @property
    def positives(self) -> int | None:
        """The rows of class 1; None if they are hidden, wholly or at some sites."""
        return self.target.exact(1) if len(self.target.counts) > 1 else None


@dataclass(frozen=True)
class Description:
    """What the tables of the sites hold.

    bins:     the edges of the bins of numbers and dates, by column; those at both ends are open.
    left_out: how many sites are not in ``together``, because its sums would tell what a few rows hold.
    """

    schema: Schema
    minimum: int
    bins: Mapping[str, np.ndarray]
    sites: tuple[SiteSummary, ...]
    together: SiteSummary
    left_out: int = 0
    findings: tuple[Finding, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the description for a JSON file; what is hidden is null."""
        target = self.schema.target
        columns = described(self.schema)
        return {
            "fedstrata": __version__,
            "schema": self.schema.digest,
            "minimum": self.minimum,
            "target": target.name,
            "columns": {c.name: {"kind": c.kind} | self._answers(c) for c in columns},
            "quantiles": list(LEVELS),
            "sites": {site.name: self._site(site) for site in self.sites},
            "together": self._site(self.together) | {"sites_left_out": self.left_out},
            "findings": [f.public(self.minimum).as_json() for f in self.findings],
        }

    def _answers(self, column: Column | Target) -> dict[str, Any]:
        if column.name in self.bins:
            edges = self.bins[column.name]
            return {"bins": [date_of(e) if column.kind == "date" else float(f"{e:.6g}") for e in edges]}
        return {"categories": answers_of(column)}

    def _site(self, site: SiteSummary) -> dict[str, Any]:
        summaries = {self.schema.target.name: site.target} | dict(site.columns)
        dates = {c.name for c in self.schema.features if c.kind == "date"}
        columns: dict[str, dict[str, Any]] = {}
        for name, summary in summaries.items():
            columns[name] = {"counts": list(summary.counts), "missing": summary.missing}
            columns[name] |= {"hidden_at": list(summary.hidden)} if summary.hidden else {}
            if name in self.bins:
                said = {"mean": summary.mean, "spread": summary.spread, "quantiles": list(summary.quantiles)}
                columns[name] |= said | ({"extremes": list(summary.extremes)} if summary.extremes else {})
            if name in dates:
                in_words = [None if v is None else date_of(v) for v in (summary.mean, *summary.quantiles)]
                columns[name] |= {"mean": in_words[0], "quantiles": in_words[1:]}
        return {"rows": site.rows, "columns": columns}


def answers_of(column: Column | Target) -> list[str]:
    """Return the names of the categories of a column, or of the classes of a target."""
    if isinstance(column, Column):
        return [str(cell) for cell in column.categories]
    if column.kind == "flag":
        return ["no", "yes"]
    return [str(cell) for cell in column.classes]


def describe(
    tables: Sequence[SiteTable], schema: Schema, minimum: int = MINIMUM, findings: Sequence[Finding] = ()
) -> Description:
    """Describe the tables of the sites; counts below the minimum are hidden."""
    if not tables:
        raise InputError("There are no tables to describe.")
    rows = np.array([len(table) for table in tables])
    enough, counted = large_enough(rows, minimum)
    bins = {}
    summaries: list[list[ColumnSummary]] = []
    for i, column in enumerate(described(schema)):
        values = [values_of(table, i) for table in tables]
        if not column.size:
            bins[column.name] = _bins(column, [v for v, c in zip(values, counted, strict=True) if c], minimum)
        summaries.append(_summaries(column, values, bins.get(column.name), minimum))
    sites = [
        SiteSummary(table.name, int(n) if large else None, summaries[0][s], _by_name(schema, summaries, s))
        for s, (table, n, large) in enumerate(zip(tables, rows, enough, strict=True))
    ]
    every = SiteSummary("together", int(rows[counted].sum()), summaries[0][-1], _by_name(schema, summaries, -1))
    left_out = int((~counted).sum())
    return Description(schema, minimum, bins, tuple(sites), every, left_out, tuple(together(findings)))


def described(schema: Schema) -> list[Column | Target]:
    """Return what is described: the target, and then the columns."""
    return [schema.target, *schema.features]


def values_of(table: SiteTable, i: int) -> np.ndarray:
    """Return the raw values of the i-th of what is described."""
    return table.targets.astype(float) if i == 0 else table.values[:, i - 1]


def _by_name(schema: Schema, summaries: Sequence[Sequence[ColumnSummary]], at: int) -> dict[str, ColumnSummary]:
    return {name: own[at] for name, own in zip(schema.names, summaries[1:], strict=True)}


def _summaries(
    column: Column | Target, values: Sequence[np.ndarray], bins: np.ndarray | None, minimum: int
) -> list[ColumnSummary]:
    """Return the summaries of one column: of every site, and of those together that may be counted."""
    counts = np.array([counts_of(v, column, bins) for v in values])
    show = shown(counts, minimum)
    totals = counts[show.counted].sum(0)
    cells = [visible(*pair) for pair in zip([*counts, totals], [*show.cells, show.totals], strict=True)]
    numbers: list[dict[str, Any]] = [{} for _ in cells]
    if bins is not None:
        present = [v[~np.isnan(v)] for v in values]
        few = np.array([0 < len(v) < minimum for v in present])
        rest = sum(len(v) for v, f, c in zip(present, few, show.counted, strict=True) if f and c)
        joined = show.counted if rest >= minimum and few.sum() > 1 else show.counted & ~few
        pooled = [v for v, c in zip(present, joined, strict=True) if c] or [np.empty(0)]
        numbers = [numbers_of(v, minimum) for v in (*present, np.concatenate(pooled))]
    return [rounded(ColumnSummary(c[:-1], c[-1], **more), minimum) for c, more in zip(cells, numbers, strict=True)]


def visible(counts: np.ndarray, show: np.ndarray) -> tuple[int | None, ...]:
    """Return the counts that are shown, and None for the others."""
    return tuple(int(count) if visible else None for count, visible in zip(counts, show, strict=True))


def counts_of(values: np.ndarray, column: Column | Target, bins: np.ndarray | None) -> np.ndarray:
    """Return the counts of the categories or bins, and of missing cells."""
    present = values[~np.isnan(values)]
    missing = len(values) - len(present)
    if bins is None:
        return np.append(np.bincount(present.astype(np.int64), minlength=column.size), missing)
    places = np.searchsorted(bins[1:-1], present, side="right")
    return np.append(np.bincount(places, minlength=len(bins) - 1), missing)


def numbers_of(values: np.ndarray, minimum: int) -> dict[str, Any]:
    """Return the mean, spread and quantiles of values, as far as enough values stand behind them."""
    if len(values) < max(1, minimum):
        return {}
    quantiles = quantiles_of(values, LEVELS).tolist()
    return {
        "mean": float(values.mean()),
        "spread": float(values.std()),
        "quantiles": tuple(
            round_to(q, minimum) if b else None
            for q, b in zip(quantiles, enough_beyond(len(values), minimum), strict=True)
        ),
        "extremes": (float(values.min()), float(values.max())) if minimum <= 1 else None,
    }


def enough_beyond(count: int, minimum: int) -> list[bool]:
    """Return which quantiles of so many values have enough of them on both sides."""
    return [min(level, 1 - level) * count >= minimum or minimum <= 1 for level in LEVELS]


def rounded(summary: ColumnSummary, minimum: int) -> ColumnSummary:
    """Return a summary with its mean and spread as they are shown."""
    mean, spread = (None if v is None else round_to(v, minimum) for v in (summary.mean, summary.spread))
    return replace(summary, mean=mean, spread=spread)


def round_to(value: float, minimum: int) -> float:
    """Return a statistic with as many digits as are shown."""
    return float(f"{value:.{3 if minimum > 1 else 6}g}")


def _bins(column: Column | Target, values: Sequence[np.ndarray], minimum: int) -> np.ndarray:
    """Return the edges of about a dozen bins of round width, for nearly all values."""
    few = max(1, sum(map(len, values)) // SAMPLE)
    sample = np.concatenate([v[::few][~np.isnan(v[::few])] for v in values] or [np.empty(0)])
    span = span_of(sample, minimum)
    whole = bool(len(sample) and (sample == np.round(sample)).all())
    return edges_of(column, span, whole, [len(v) for v in values], minimum)


def span_of(values: np.ndarray, minimum: int) -> tuple[float, float] | None:
    """Return the values between which nearly all lie; None if they are too few to say."""
    if len(values) < max(2, 2 * minimum if minimum > 1 else 2):
        return None
    tail = max(0.01, min(0.25, minimum / len(values))) if minimum > 1 else 0.0
    low, high = np.quantile(values, (tail, 1 - tail))
    return float(low), float(high)


def edges_of(
    column: Column | Target, span: tuple[float, float] | None, whole: bool, rows: Sequence[int], minimum: int
) -> np.ndarray:
    """Return the edges of bins of round width.

    span:  between which values they lie; None for the range in the schema.
    whole: whether all values are whole.
    rows:  how many rows the sites have.
    """
    if span is None:
        span = (0.0, 1.0) if isinstance(column, Target) or math.inf in np.abs(column.bounds) else column.bounds
    low, high = span
    if high <= low:
        low, high = low - 0.5, high + 0.5
    most = BINS
    if minimum > 1 and len(rows) <= FEW_SITES:  # so few that the rows of each are enough for most bins
        most = int(np.clip(np.median(rows or [0]) / (2 * minimum), 4, BINS))
    width = 10.0 ** math.floor(math.log10((high - low) / most))
    width = next(step * width for step in (1, 2, 2.5, 5, 10) if (high - low) / (step * width) <= most)
    if whole:
        width = max(1.0, round(width))
    first = math.floor(low / width)
    return np.arange(first, math.floor(high / width) + 2) * float(width)
