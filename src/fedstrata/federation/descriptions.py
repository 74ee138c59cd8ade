"""What nodes tell of their tables for a description, as JSON: written on the node, and checked by the server.

A node may be faulty or hostile, and a person or a page shows what it tells, so every part is checked: names, types,
sizes, sums, and that no count is below the minimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedstrata.core.errors import is_finite
from fedstrata.data.tables.cells import is_plain, shown
from fedstrata.data.tables.columns import Column, Target
from fedstrata.data.tables.describing import LEVELS, ColumnSummary, SiteSummary, described
from fedstrata.data.tables.findings import Finding
from fedstrata.data.tables.schema import Schema
from fedstrata.data.tables.telling import Bins, SiteSpans, Span
from fedstrata.federation.wire import Refused

MOST_ROWS, MOST_FINDINGS, LONGEST_TEXT = 10**9, 1000, 2000

LARGEST = 1e300
"""Numbers with a larger absolute value are refused: sums of their squares are not finite."""

Table = dict[str, Any]


# --- on the node ------------------------------------------------------------------------------------------------------


def spans_table(spans: SiteSpans) -> Table:
    """Return the answer to the first question."""
    return {"rows": spans.rows, "columns": {name: list(span) for name, span in spans.columns.items()}}


def summary_table(site: SiteSummary, schema: Schema, findings: Sequence[Finding]) -> Table:
    """Return the answer to the second question, with what is doubtful."""
    summaries = {schema.target.name: site.target} | dict(site.columns)
    columns: Table = {}
    for column in described(schema):
        own = summaries[column.name]
        columns[column.name] = {"counts": list(own.counts), "missing": own.missing}
        if own.mean is not None:
            numbers = {"mean": own.mean, "spread": own.spread, "quantiles": list(own.quantiles)}
            columns[column.name] |= numbers | ({"extremes": list(own.extremes)} if own.extremes else {})
    said = [{name: getattr(f.public(2), name) for name in _TEXTS} | {"column": f.column} for f in findings]
    return {"rows": site.rows, "columns": columns, "findings": said[:MOST_FINDINGS]}


_TEXTS = ("kind", "what", "remedy")


# --- on the server ----------------------------------------------------------------------------------------------------


def _require(right: object, what: str) -> None:
    if not right:
        raise Refused("type", f"told {what}")


def _rows(table: Any, names: Sequence[str], minimum: int, whole: bool) -> int | None:
    """Check the frame of an answer; return its number of rows."""
    _require(isinstance(table, dict) and {"rows", "columns"} <= set(table), "of no table")
    columns = table["columns"]
    _require(isinstance(columns, dict), "of no columns")
    others = [name for name in columns if name not in names]
    _require(not others, f"of a column {shown(others[0]) if others else ''} that the schema does not have")
    lacking = [name for name in names if name not in columns]
    _require(not whole or not lacking, f"nothing of the column {shown(lacking[0]) if lacking else ''}")
    return _count(table["rows"], minimum, "rows")


def _count(value: Any, minimum: int, what: str) -> int | None:
    if value is None:
        return None
    _require(type(value) is int and 0 <= value <= MOST_ROWS, f"a number of {what} that is none")
    _require(value == 0 or value >= minimum, f"a number of {what} below the minimum, {minimum}")
    return int(value)


def _number(value: Any, what: str) -> float:
    _require(is_finite(value) and abs(value) <= LARGEST, f"{what} that is no finite number")
    return float(value)


def read_spans(table: Any, schema: Schema, minimum: int) -> SiteSpans:
    """Check the answer to the first question."""
    rows = _rows(table, [c.name for c in described(schema) if not c.size], minimum, whole=False)
    spans = {}
    for name, span in table["columns"].items():
        _require(isinstance(span, list) and len(span) == 3 and type(span[2]) is bool, f"no span of {shown(name)}")
        low, high = (_number(value, f"an end of {shown(name)}") for value in span[:2])
        _require(low <= high, f"ends of {shown(name)} in the wrong order")
        _require(rows is not None, f"a span of {shown(name)}, but hides how many rows it has")
        spans[name] = Span(low, high, span[2])
    return SiteSpans(rows, spans)


def read_summary(table: Any, schema: Schema, bins: Bins, minimum: int, name: str) -> tuple[SiteSummary, list[Finding]]:
    """Check the answer to the second question of the node with this name."""
    columns = described(schema)
    rows = _rows(table, [c.name for c in columns], minimum, whole=True)
    cells = {c.name: c.size or len(bins[c.name]) - 1 for c in columns}
    summaries = {c.name: _read_column(table["columns"][c.name], c, cells[c.name], rows, minimum) for c in columns}
    target = summaries.pop(schema.target.name)
    findings = table.get("findings")
    _require(isinstance(findings, list) and len(findings) <= MOST_FINDINGS, "of no findings, or of too many")
    return SiteSummary(name, rows, target, summaries), [_read_finding(f, schema, name) for f in findings]


def _read_column(told: Any, column: Column | Target, cells: int, rows: int | None, minimum: int) -> ColumnSummary:
    where = f"of {shown(column.name)}"
    _require(isinstance(told, dict) and {"counts", "missing"} <= set(told), f"no counts {where}")
    _require(isinstance(told["counts"], list) and len(told["counts"]) == cells, f"no list of {cells} counts {where}")
    counts = [_count(value, minimum, f"cells {where}") for value in (*told["counts"], told["missing"])]
    known = sum(count or 0 for count in counts)
    if rows is None:
        _require(set(counts) == {None}, f"counts {where}, but hides how many rows it has")
    else:
        fits = known == rows if None not in counts else known <= rows
        _require(fits, f"counts {where} that sum to {known:,}, but {rows:,} rows")
    summary = ColumnSummary(tuple(counts[:-1]), counts[-1])
    if "mean" not in told:
        return summary
    _require(not column.size, f"a mean {where}, which are categories")
    present = (rows or 0) - (summary.missing or 0)
    _require(rows is not None and present >= max(1, minimum), f"a mean {where}, which has too few values")
    spread = _number(told.get("spread"), f"a spread {where}")
    _require(spread >= 0, f"a spread {where} below 0")
    return replace(
        summary,
        mean=_number(told["mean"], f"a mean {where}"),
        spread=spread,
        quantiles=_read_quantiles(told.get("quantiles"), where),
        extremes=_read_extremes(told.get("extremes"), minimum, where),
    )


def _read_quantiles(told: Any, where: str) -> tuple[float | None, ...]:
    _require(isinstance(told, list) and len(told) == len(LEVELS), f"no list of {len(LEVELS)} quantiles {where}")
    read = tuple(None if value is None else _number(value, f"a quantile {where}") for value in told)
    known = [value for value in read if value is not None]
    _require(known == sorted(known), f"quantiles {where} in the wrong order")
    return read


def _read_extremes(told: Any, minimum: int, where: str) -> tuple[float, float] | None:
    if told is None:
        return None
    _require(minimum <= 1, f"the lowest and highest value {where}, which are those of single rows")
    _require(isinstance(told, list) and len(told) == 2, f"no pair of extremes {where}")
    low, high = (_number(value, f"an extreme {where}") for value in told)
    _require(low <= high, f"extremes {where} in the wrong order")
    return low, high


def _read_finding(told: Any, schema: Schema, name: str) -> Finding:
    good = isinstance(told, dict) and set(told) == {*_TEXTS, "column"}
    good = good and all(_is_text(told[part]) for part in _TEXTS)
    column = told["column"] if good else None
    good = good and (column is None or _is_text(column))
    _require(good, "a finding that is none")
    return Finding(name, column, told["kind"], "warning", told["what"], told["remedy"])


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_TEXT and is_plain(value)
