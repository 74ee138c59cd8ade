"""Checks of tables whose cells could be read: what is implausible in one site's table, and between sites."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np

from fedstrata.data.tables.cells import date_of, shown
from fedstrata.data.tables.columns import Column
from fedstrata.data.tables.findings import FEW, Finding, raise_if_errors, warnings_of
from fedstrata.data.tables.reading import SiteTable, read_sites
from fedstrata.data.tables.schema import Schema
from fedstrata.data.tables.sources import SiteFile
from fedstrata.data.tables.units import conversion

ENOUGH = 10
"""A site with fewer rows is not told that a column is empty, or in another unit: that may be chance."""

MANY = 50
"""A column that is constant over so many rows of a site is reported."""

CLASS, SAMPLE = 20, 5000
"""Rows of each class that a suspicion of leakage takes at least, and at most."""

LEAK = 0.98
"""An AUC of a single column above this is too good."""

MOST = 100_000
"""About so many rows of a site decide on what is usual there."""

OTHERS = 200
"""A site is compared with about so many others at most."""

PAIRS = 10
"""At most so many pairs of sites with equal rows are reported."""


def read_checked(source: Any, schema: Schema) -> tuple[list[SiteTable], list[Finding]]:
    """Read and check the tables of all sites; return them and what is doubtful, or raise what is wrong."""
    tables = read_sites(source, schema)
    findings = check(tables, schema)
    raise_if_errors(findings)
    return tables, warnings_of(findings)


def read_checked_alone(site: SiteFile, schema: Schema) -> tuple[SiteTable, list[Finding]]:
    """Read and check the table of one site, where no other can be seen; return it and what is doubtful."""
    if schema.site is not None:  # the file is that of one site, whether or not a column says so
        schema = schema.replace(site=None, drop=(*schema.drop, schema.site))
    (table,) = read_sites(site, schema)
    findings = [*table.findings, *check_site(table, schema)]
    raise_if_errors(findings)
    return table, warnings_of(findings)


def check(tables: Sequence[SiteTable], schema: Schema) -> list[Finding]:
    """Return all findings on the tables of these sites."""
    findings = [f for table in tables for f in (*table.findings, *check_site(table, schema))]
    return findings + check_together(tables, schema)


def outside(values: np.ndarray, schema: Schema) -> np.ndarray:
    """Return which raw values [rows, features] lie outside the ranges of the schema; none that are missing."""
    lows, highs = np.array([column.bounds for column in schema.features]).T
    result: np.ndarray = (values < lows) | (values > highs)
    return result


def check_site(table: SiteTable, schema: Schema) -> list[Finding]:
    """Return what is wrong or doubtful in the values of one site's table."""
    if not len(table):
        return []
    lacking = {f.column for f in table.findings if f.kind == "no column"}
    present = len(table) - np.isnan(table.values).sum(0)
    lows, highs = np.fmin.reduce(table.values, axis=0), np.fmax.reduce(table.values, axis=0)
    findings: list[Finding] = []
    for i, column in enumerate(schema.features):
        low, high = column.bounds
        if column.name in lacking:
            continue
        if present[i] < len(table):
            findings += _missing(table, column, i, int(present[i]))
        if present[i] >= MANY and lows[i] == highs[i]:
            words = _words(column, lows[i])
            what, told = f"all {present[i]:,} values are {words}", f"all its values are {words}"
            findings.append(Finding(table.name, column.name, "constant", "warning", what, told=told))
        if lows[i] < low or highs[i] > high:
            findings.append(_out_of_range(table, column, i))
    return findings + _repeated(table) + _leaks([table], schema, table.name)


def check_together(tables: Sequence[SiteTable], schema: Schema) -> list[Finding]:
    """Return what is wrong or doubtful between the tables of the sites."""
    filled = [table for table in tables if len(table)]
    findings = names_like_target(schema)
    lows = np.fmin.reduce([np.fmin.reduce(table.values, axis=0) for table in filled]) if filled else ()
    highs = np.fmax.reduce([np.fmax.reduce(table.values, axis=0) for table in filled]) if filled else ()
    for i, (column, low, high) in enumerate(zip(schema.features, lows, highs, strict=False)):
        if np.isnan(low):
            remedy = "Move the column to drop in the schema."
            findings.append(Finding("", column.name, "empty", "error", "no site has a value", remedy))
        elif low == high:
            what = f"every value of every site is {_words(column, low)}, so a model learns nothing from it"
            findings.append(Finding("", column.name, "constant", "warning", what, "Move the column to drop."))
        elif column.kind == "numeric" and column.bounds == (-math.inf, math.inf):
            findings += _other_units(filled, column, i)
    classes = {int(c) for table in filled for c in np.unique(table.targets)} if schema.target.size else set()
    if filled and len(classes) == 1:
        what = f"all rows of all sites have class {classes.pop()}"
        findings.append(Finding("", schema.target.name, "one class", "warning", what, "No model can learn from it."))
    pooled = _leaks(filled, schema, "") if len(filled) > 1 else []
    known_leaks = {f.column for table in filled for f in _leaks([table], schema, "")} if pooled else set()
    return findings + _shared(filled) + [f for f in pooled if f.column not in known_leaks]


def _missing(table: SiteTable, column: Column, i: int, present: int) -> list[Finding]:
    if not present and any(f.column == column.name for f in table.findings):
        return []
    if not present and (column.optional or len(table) < ENOUGH):
        return []
    if not present:
        severity = "warning" if column.missing_values else "error"
        remedy = "Set optional = true if the site does not measure it, or move it to drop." * (severity == "error")
        what = "all its cells are missing"
        return [Finding(table.name, column.name, "empty", severity, what, remedy, len(table), (), table.unit)]  # type: ignore[arg-type]
    if column.missing != "refuse":
        return []
    rows = np.flatnonzero(np.isnan(table.values[:, i]))
    remedy = "Fill them in, leave these rows out, or choose what fills them (missing in the schema)."
    return [_of_rows(table, column, "refused", "error", "missing cells, which the schema refuses", remedy, rows)]


def _out_of_range(table: SiteTable, column: Column, i: int) -> Finding:
    values, (low, high) = table.values[:, i], column.bounds
    rows = np.flatnonzero((values < low) | (values > high))
    present = values[~np.isnan(values)]
    wanted = f"outside {_words(column, low)} to {_words(column, high)}{f' {column.unit}' * bool(column.unit)}"
    found = tuple(dict.fromkeys(_words(column, v) for v in values[rows[: FEW * 10]]))[:3]
    if len(rows) * 2 <= len(present) or len(rows) < ENOUGH:
        remedy = "They count as the nearest value in the range. Correct them, widen the range, or list missing_values."
        return _of_rows(table, column, "range", "warning", wanted, remedy, rows, found)
    share = f"{100 * len(rows) / len(present):.0f} % of the values are {wanted}: is it another unit?"
    guess = conversion(present, low, high) if column.kind == "numeric" else ""
    remedy = f"Convert the column, or correct the range.{f' {guess}' if guess else ''}"
    told = f"most of the values are {wanted}: is it another unit?"
    return replace(_of_rows(table, column, "unit", "error", share, remedy, rows, found), told=told)


def _of_rows(
    table: SiteTable,
    column: Column | None,
    kind: str,
    severity: Any,
    what: str,
    remedy: str,
    rows: np.ndarray,
    examples: tuple[str, ...] = (),
) -> Finding:
    name = None if column is None else column.name
    few = tuple(int(line) for line in table.lines[rows[:FEW]])
    return Finding(table.name, name, kind, severity, what, remedy, len(rows), few, table.unit, examples)


def _words(column: Column, value: float) -> str:
    if math.isinf(value):
        return "any"
    if column.size:
        return shown(column.categories[int(value)])
    return date_of(value) if column.kind == "date" else f"{value:.6g}"


def _other_units(tables: Sequence[SiteTable], column: Column, i: int) -> list[Finding]:
    """Compare a site's values with those of the others, if there are at least two others."""
    if len(tables) < 3:
        return []
    steps = [max(1, len(table) // MOST) for table in tables]
    present = [(t, v[~np.isnan(v)]) for t, step in zip(tables, steps, strict=True) for v in [t.values[::step, i]]]
    enough = [(table, quantiles_of(v, (0.01, 0.25, 0.5, 0.75, 0.99))) for table, v in present if len(v) >= ENOUGH]
    return other_units([table.name for table, _ in enough], np.array([own for _, own in enough]), column)


def other_units(sites: Sequence[str], every: np.ndarray, column: Column) -> list[Finding]:
    """Return findings on sites whose values are unlike those of the others.

    every: a low quantile, the quartiles and a high quantile of the column at each site [sites, 5].
    """
    if len(sites) < 3:
        return []
    findings = []
    usual_sites = np.unique(np.linspace(0, len(sites) - 1, OTHERS).astype(int))
    for at, (site, own) in enumerate(zip(sites, every, strict=True)):
        others = every[usual_sites[usual_sites != at]]
        alike = np.mean((others[:, 0] <= own[3]) & (own[1] <= others[:, 4]))
        median, usual = float(own[2]), float(np.median(others[:, 2]))
        ratio = usual / median if own[0] > 0 and (others[:, 0] > 0).all() else 1.0
        if alike >= 0.2 and 0.1 <= ratio <= 10:
            continue
        what = "its values differ from those of the other sites: another unit, or a code for missing?"
        medians = (f"a median of {median:.4g}, not {usual:.4g}",)
        remedy = "Convert it, list missing_values, or set the column's range if all is well."
        guess = conversion(np.array([own[2]]), float(np.min(others[:, 1])), float(np.max(others[:, 3])))
        remedy += f" {guess}" if guess else ""
        findings.append(Finding(site, column.name, "unit", "warning", what, remedy, examples=medians))
    if 2 * len(findings) <= len(sites):
        return findings
    what = "its values differ so much between sites that they tell them apart: does it name a site, or a part of one?"
    return [Finding("", column.name, "site", "warning", what, "Move it to drop if it does.")]


def _hashes(table: SiteTable, columns: Sequence[int] | None = None) -> np.ndarray:
    """Return a number for every row, equal for rows with equal values in these columns, by default in all."""
    values = table.values.T if columns is None else [table.values[:, i] for i in columns]
    hashes = np.zeros(len(table), np.uint64)
    for column in (*values, table.targets.astype(np.float64)):
        bits = np.where(np.isnan(column), np.nan, column + 0.0).view(np.uint64)  # one NaN, and no negative zero
        hashes = (hashes ^ bits) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(29)
    return hashes


def _chance_of_equal_rows(values: np.ndarray) -> float:
    """Return how likely two rows are equal if the columns were independent."""
    few = values[:: max(1, len(values) // SAMPLE)]
    pairs = max(1, len(few) * (len(few) - 1))
    counts = (np.unique(column, return_counts=True)[1] for column in few.T)
    return math.prod(float((count * (count - 1.0)).sum()) / pairs for count in counts)


def _repeated(table: SiteTable) -> list[Finding]:
    few = table.values[:: max(1, len(table) // 1000)]
    telling = sorted(range(few.shape[1]), key=lambda i: -len(np.unique(few[:, i])))[:4]
    hashes = np.sort(_hashes(table, telling))
    if (hashes[1:] != hashes[:-1]).all():
        return []
    _, first, counts = np.unique(_hashes(table), return_index=True, return_counts=True)
    pairs = float((counts * (counts - 1.0) / 2).sum())
    if len(first) == len(table) or pairs < 10 * _chance_of_equal_rows(table.values) * len(table) ** 2 / 2:
        return []
    rows = np.setdiff1d(np.arange(len(table)), first)
    remedy = "Leave them out if they are the same cases; a copy in the test data makes scores too good."
    return [_of_rows(table, None, "repeated", "warning", "rows equal to earlier ones", remedy, rows)]


def _shared(tables: Sequence[SiteTable]) -> list[Finding]:
    """Return findings on rows that several sites have."""
    if len(tables) < 2:
        return []
    hashes = [np.unique(_hashes(table), return_index=True) for table in tables]
    owner = np.repeat(np.arange(len(tables)), [len(own) for own, _ in hashes])
    every, row = (np.concatenate(part) for part in zip(*hashes, strict=True))
    order = np.argsort(every, kind="stable")
    every, row, owner = every[order], row[order], owner[order]
    starts = np.flatnonzero(np.diff(every, prepend=every[:1] + np.uint64(1)))
    counts = np.diff(starts, append=len(every))
    pairs: dict[tuple[int, int], list[int]] = {}
    for start, count in zip(starts[counts > 1], counts[counts > 1], strict=True):
        members = range(start, start + min(int(count), 10))
        for a, b in combinations(members, 2):
            pairs.setdefault((int(owner[a]), int(owner[b])), []).append(int(row[a]))
    findings = []
    for (a, b), rows in sorted(pairs.items(), key=lambda item: -len(item[1]))[:PAIRS]:
        chance = _chance_of_equal_rows(np.concatenate([tables[a].values[:SAMPLE], tables[b].values[:SAMPLE]]))
        if len(rows) >= 10 * chance * len(tables[a]) * len(tables[b]):
            what = f"rows that are also at {tables[b].name}"
            remedy = "Leave them out at one site if they are the same cases."
            findings.append(_of_rows(tables[a], None, "shared", "warning", what, remedy, np.sort(rows)))
    return findings


def names_like_target(schema: Schema) -> list[Finding]:
    """Return findings on columns that are named like the target."""
    target = _letters(schema.target.name)
    findings = []
    for column in schema.features:
        name = _letters(column.name)
        if name == target or (len(target) >= 4 and target in name) or (len(name) >= 4 and name in target):
            what = f"its name is like that of the target, {shown(schema.target.name)}: does it tell the outcome?"
            findings.append(Finding("", column.name, "leak", "warning", what, "Move it to drop if it does."))
    return findings


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name.casefold())


def _leaks(tables: Sequence[SiteTable], schema: Schema, site: str) -> list[Finding]:
    """Return the columns that alone tell the class of a flag nearly perfectly."""
    if schema.target.kind != "flag" or not tables:
        return []
    targets = np.concatenate([table.targets for table in tables])
    classes = [np.flatnonzero(targets == c) for c in (0, 1)]
    if min(map(len, classes)) < CLASS:
        return []
    rng = np.random.default_rng(0)
    chosen = np.sort(
        np.concatenate([rows if len(rows) <= SAMPLE else rng.choice(rows, SAMPLE, False) for rows in classes])
    )
    starts = np.cumsum([0, *(len(table) for table in tables)])
    parts = np.split(chosen, np.searchsorted(chosen, starts[1:-1]))
    values = np.concatenate([t.values[rows - s] for t, rows, s in zip(tables, parts, starts[:-1], strict=True)])
    positive = targets[chosen] == 1
    findings = []
    for column, own in zip(schema.features, values.T, strict=True):
        missing = np.isnan(own)
        scores = {"it alone tells": np.where(missing, -np.inf, _ranked(own, positive, column))}
        if missing.any():
            scores["whether it is missing tells"] = missing.astype(float)
        areas = {what: area(score, positive) for what, score in scores.items()}
        what = max(areas, key=lambda key: abs(areas[key] - 0.5))
        auc = max(areas[what], 1 - areas[what])
        if auc > LEAK:
            said = f"{what} the target (AUC {auc:.3f}): is it known only after the outcome?"
            remedy = "Move it to drop unless it is known when the model is used."
            findings.append(Finding(site, column.name, "leak", "warning", said, remedy))
    return findings


def _ranked(values: np.ndarray, positive: np.ndarray, column: Column) -> np.ndarray:
    """Return values in an order that means something: categories by their share of positives."""
    if column.kind != "category" or column.size * CLASS > len(values):
        return values
    codes = np.nan_to_num(values, nan=column.size).astype(int)
    rows = np.bincount(codes, minlength=column.size + 1)
    shares: np.ndarray = (np.bincount(codes, positive, column.size + 1) / np.maximum(rows, 1))[codes]
    return shares


def quantiles_of(values: np.ndarray, levels: Sequence[float]) -> np.ndarray:
    """Return the same as np.quantile, which takes ten times as long for few values."""
    places = np.multiply(levels, len(values) - 1)
    low = places.astype(int)
    ordered = np.sort(values)
    bottom, top = ordered[low], ordered[np.minimum(low + 1, len(values) - 1)]
    result: np.ndarray = bottom + (top - bottom) * (places - low)
    return result


def area(scores: np.ndarray, positive: np.ndarray) -> float:
    """Return the area under the ROC curve, ties counting one half."""
    _, places = np.unique(scores, return_inverse=True)
    positives = np.bincount(places, positive)
    negatives = np.bincount(places, ~positive)
    below = np.cumsum(negatives) - negatives
    return float((positives * (below + negatives / 2)).sum() / (positives.sum() * negatives.sum()))
