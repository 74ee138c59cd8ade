"""Reading the sites' tables: text files, Parquet files and frames, as raw values, in chunks or whole."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fedstrata.core.errors import DataError, InputError, listed, nearest_of, printable, unknown
from fedstrata.data.tables.batches import ROWS, Batch, Table
from fedstrata.data.tables.cells import Key, key_of, shown
from fedstrata.data.tables.columns import check_name
from fedstrata.data.tables.converting import Problem, fields_of
from fedstrata.data.tables.findings import MOST, Finding, finding_of, raise_if_errors
from fedstrata.data.tables.schema import Schema
from fedstrata.data.tables.sources import SiteFile, in_order, sites_of

MOST_SITES = 10_000


class Chunk(NamedTuple):
    """Some rows of a table.

    lines:    where they are: lines of a text file from 1, rows of a frame or a Parquet file from 0.
    values:   raw values [rows, features].
    targets:  raw targets [rows], or None if they were not asked for.
    problems: cells without a raw value, with their positions in the chunk.
    texts:    columns that were asked for as they are, as pyarrow arrays of text.
    """

    lines: np.ndarray
    values: np.ndarray
    targets: np.ndarray | None
    problems: list[Problem]
    texts: dict[str, Any]


@dataclass(frozen=True)
class SiteTable:
    """The table of one site as raw values.

    values:   float64 [rows, features], NaN where missing.
    targets:  int64 classes or float64 numbers [rows].
    lines:    where the rows are.
    unit:     "line" or "row".
    findings: what reading it has found.
    """

    name: str
    place: str
    values: np.ndarray
    targets: np.ndarray
    lines: np.ndarray
    unit: str = "line"
    findings: tuple[Finding, ...] = ()

    def __len__(self) -> int:
        return len(self.values)


def check_names(table: Table, schema: Schema, target: bool = True, extra: str = "error") -> list[Finding]:
    """Return findings on the columns of a table: those it lacks, and those that the schema does not have."""
    names, site = set(table.names), table.site.name
    wanted = [c.name for c in schema.features] + [schema.target.name] * target
    absent = [name for name in wanted if name not in names]
    findings = []
    if len(absent) == len(wanted):
        has = listed([shown(name) for name in table.names])
        remedy = "If the first line is a row, say the names of the columns; else check the delimiter and the file."
        what = "none of the columns of the schema"
        return [Finding(site, None, "no columns", "error", f"{what}: it has {has}", remedy, told=what)]
    known = {*wanted, schema.target.name, schema.site, *schema.drop}
    columns = {column.name: column for column in schema.features}
    others = [name for name in table.names if name not in known][:100]
    for i, name in enumerate(absent):
        column = columns.get(name)
        near = "" if i >= MOST else nearest_of(name, others) or next(
            (f" Did you mean {n!r}?" for n in others if n.lower() == name.lower()), ""
        )  # fmt: skip
        if column is None:
            remedy = "Add the column to predict to the file, or name another target."
        else:
            remedy = "Add it to the file, or set optional = true if the site does not measure it."
        optional = column is not None and column.optional
        what = "the target is missing from the file" if column is None else "missing from the file"
        severity = "warning" if optional else "error"
        text = "It counts as missing in all rows." if optional else remedy + near
        findings.append(Finding(site, name, "no column", severity, what, text))  # type: ignore[arg-type]
    for name in table.names:
        if name not in known:
            remedy = "Add it to the schema: as a column, or under drop to ignore it."
            what = "not in the schema" if extra == "error" else "not in the schema, and ignored"
            severity = "error" if extra == "error" else "warning"
            findings.append(Finding(site, name, "extra column", severity, what, remedy if extra == "error" else ""))  # type: ignore[arg-type]
    return findings


def chunks(
    source: Any, schema: Schema, rows: int = ROWS, *, target: bool = False, keep: Sequence[str] = ()
) -> Iterator[Chunk]:
    """Yield the rows of one table in chunks of at most ``rows``, in memory that does not depend on its length.

    target: whether the target is read.
    keep:   further columns to return as text, such as an identifier.
    """
    (site,) = sites_of(source)
    table = Table(site, schema.file, [*schema.names, schema.target.name], None if target else schema.target.name)
    for name in keep:
        if name not in table.names:
            raise unknown("column", name, map(printable, table.names), "the columns to keep")
    raise_if_errors(check_names(table, schema, target, extra="warning"))
    fields = fields_of(schema)
    if not target:
        del fields[schema.target.name]
    lines = table.lines()
    for batch in table.batches(fields, keep):
        values = _matrix(batch, schema)
        targets = batch.values.get(schema.target.name)
        for start in range(0, batch.rows, rows):
            part = slice(start, start + rows)
            yield Chunk(
                lines(len(values[part])),
                values[part],
                None if targets is None else targets[part],
                [p for p in (_within(problem, start, start + rows) for problem in batch.problems) if len(p.rows)],
                {name: cells.slice(start, rows) for name, cells in batch.texts.items()},
            )


def _within(problem: Problem, start: int, end: int) -> Problem:
    kept = problem.rows[(problem.rows >= start) & (problem.rows < end)]
    return replace(problem, rows=kept - start)


def _matrix(batch: Batch, schema: Schema, out: np.ndarray | None = None) -> np.ndarray:
    lacking = np.full(batch.rows, np.nan)
    columns = [batch.values.get(name, lacking) for name in schema.names]
    return np.stack(columns).T if out is None else np.stack(columns, axis=1, out=out)


def read_sites(source: Any, schema: Schema) -> list[SiteTable]:
    """Read the tables of all sites; what is wrong is in their findings.

    source: what :func:`~fedstrata.data.tables.sources.sites_of` takes. If the schema names a site column, it is one
            table with the rows of all sites.
    """
    sites = sites_of(source)
    if schema.site is None:
        return [_read_or_say_why(site, schema) for site in sites]
    if len(sites) > 1:
        why = f"The schema names a site column, {shown(schema.site)}, so it wants one table with all sites."
        raise InputError(f"{why} Got {len(sites)} tables. Leave out the site column, or pass one table.")
    return _by_site(sites[0], schema)


def _read_or_say_why(site: SiteFile, schema: Schema) -> SiteTable:
    try:
        return read_site(site, schema)
    except InputError as error:
        empty = np.empty((0, len(schema.features)))
        told = error.public if isinstance(error, DataError) else ""
        finding = Finding(site.name, None, "unreadable", "error", str(error).rstrip("."), told=told.rstrip("."))
        return SiteTable(site.name, site.place, empty, np.empty(0), np.empty(0, np.int64), findings=(finding,))


def read_site(source: Any, schema: Schema) -> SiteTable:
    """Read the table of one site."""
    (site,) = sites_of(source)
    whole = _Whole(site, schema)
    return whole.table(site.name, None)


class _Whole:
    """A table that has been read whole."""

    def __init__(self, site: SiteFile, schema: Schema, by: str | None = None) -> None:
        table = Table(site, schema.file, [*schema.names, schema.target.name])
        self.schema, self.site, self.unit = schema, site, table.unit
        self.findings = check_names(table, schema)
        try:
            self.values, self.targets = np.empty((table.most, len(schema.features))), np.empty(table.most)
        except (MemoryError, ValueError):
            raise InputError(f"The table {site.place} has up to {table.most:,} rows, too many for memory.") from None
        self.problems: list[Problem] = []
        self.texts: list[Any] = []
        n = 0
        names = () if by is None else (by,)
        if not any(f.kind == "no columns" for f in self.findings):
            for batch in table.batches(fields_of(schema), names):
                part = slice(n, n + batch.rows)
                _matrix(batch, schema, self.values[part])
                self.targets[part] = batch.values.get(schema.target.name, np.nan)
                self.problems += [problem.shifted(n) for problem in batch.problems]
                self.texts += [batch.texts[name] for name in names if name in batch.texts]
                n += batch.rows
            if not n:
                what = "no rows"
                remedy = "Export it again, or leave the site out."
                self.findings.append(Finding(site.name, None, "no rows", "error", what, remedy))
        self.values, self.targets, self.lines = self.values[:n], self.targets[:n], table.lines()(n)
        self._check_target(any(f.kind == "no column" and f.column == schema.target.name for f in self.findings))

    def _check_target(self, absent: bool) -> None:
        target = self.schema.target
        wrong = np.zeros(len(self.targets), bool)
        for i, problem in enumerate(self.problems):
            if problem.column == target.name:
                wrong[problem.rows] = True
                self.problems[i] = replace(problem, kind=_kind_of_target(problem, target.kind))
        missing = np.flatnonzero(np.isnan(self.targets) & ~wrong)
        if len(missing) and not absent:
            self.problems.append(Problem(target.name, "no target", missing))

    def table(self, name: str, rows: np.ndarray | None) -> SiteTable:
        """Return the table of a site: these rows, or all."""
        target = self.schema.target
        lines = self.lines if rows is None else self.lines[rows]
        findings = list(self.findings) if rows is None else []
        for problem in _merged(self.problems if rows is None else [_taken(p, rows) for p in self.problems]):
            dropped = problem.kind == "no target" and target.missing == "drop"
            finding = finding_of(problem, name, lines, self.unit, "warning" if dropped else "error")
            findings.append(replace(finding, remedy="These rows are left out.") if dropped else finding)
        values, targets = (a if rows is None else a[rows] for a in (self.values, self.targets))
        if np.isnan(targets).any():
            kept = ~np.isnan(targets)
            if target.missing == "drop":
                values, targets, lines = values[kept], targets[kept], lines[kept]
            elif target.size:
                targets = np.where(kept, targets, -1)
        return SiteTable(
            name, self.site.place, values, targets.astype(np.int64) if target.size else targets, lines, self.unit,
            tuple(findings),
        )  # fmt: skip


def _kind_of_target(problem: Problem, kind: str) -> str:
    if kind == "numeric":
        return "number"
    numbers = [re.fullmatch(r"'[+-]?[0-9]*\.[0-9]+'", example) for example in problem.examples]
    return "fraction" if kind == "flag" and all(numbers) else "target" if kind == "flag" else "class"


def _taken(problem: Problem, rows: np.ndarray) -> Problem:
    """Return a problem with positions among these rows, which are sorted."""
    inside = np.isin(problem.rows, rows, assume_unique=True)
    return replace(problem, rows=np.searchsorted(rows, problem.rows[inside]))


def _merged(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems of all batches, one for every column and kind."""
    groups: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        if len(problem.rows):
            groups.setdefault((problem.column, problem.kind), []).append(problem)
    return [
        replace(
            group[0],
            rows=np.concatenate([p.rows for p in group]),
            examples=tuple(dict.fromkeys(e for p in group for e in p.examples))[:3],
        )
        for group in groups.values()
    ]


def _by_site(site: SiteFile, schema: Schema) -> list[SiteTable]:
    """Read one table with the rows of all sites."""
    name = schema.site or ""
    whole = _Whole(site, schema, name)
    fatal = [f for f in whole.findings if f.severity == "error"]
    if not whole.texts and not fatal:
        what, remedy = "the column of the sites is missing from the file", "Name another column, or none."
        fatal = [Finding(site.name, name, "no column", "error", what, remedy)]
    if fatal:
        return [replace(whole.table(site.name, None), findings=tuple(fatal))]
    rows_of: dict[Key | None, list[np.ndarray]] = {}
    names: dict[Key | None, str] = {}
    start = 0
    absent = {key_of(cell) for cell in schema.file.missing}
    for cells in whole.texts:
        distinct = cells.dictionary_encode()
        places = distinct.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        order = np.argsort(places, kind="stable")
        texts = distinct.dictionary.to_pylist()
        for part in np.split(order, np.flatnonzero(np.diff(places[order])) + 1):
            text = texts[places[part[0]]].strip() if len(part) and places[part[0]] >= 0 else ""
            key = None if key_of(text) in absent else key_of(text)
            names.setdefault(key, text)
            rows_of.setdefault(key, []).append(part + start)
        start += len(cells)
    if len(rows_of) > MOST_SITES:
        why = f"The column {shown(name)} of {site.place} names {len(rows_of):,} sites, more than {MOST_SITES:,}"
        raise InputError(f"{why}: is it an identifier of rows? Name another column.")
    tables = []
    for key, parts in rows_of.items():
        rows = np.sort(np.concatenate(parts))
        if key is None:
            problem = Problem(name, "no site", np.arange(len(rows)))
            finding = finding_of(problem, site.name, whole.lines[rows], whole.unit)
            tables.append(replace(whole.table(site.name, rows), findings=(finding,)))
            continue
        check_name(names[key], f"name of a site in column {shown(name)}")
        tables.append(whole.table(names[key], rows))
    if tables:
        first = tables[0]
        tables[0] = replace(first, findings=(*whole.findings, *first.findings))
    return sorted(tables, key=lambda table: in_order(table.name))
