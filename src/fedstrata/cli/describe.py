"""``fedstrata describe``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fedstrata.cli.console import OUT, echo
from fedstrata.cli.options import HtmlPage, Json, a_path
from fedstrata.core.errors import InputError, invalid
from fedstrata.core.files import write_atomically
from fedstrata.data.tables import describing
from fedstrata.data.tables.checking import read_checked
from fedstrata.data.tables.columns import Column
from fedstrata.data.tables.describing import MINIMUM, ColumnSummary, Description, answers_of
from fedstrata.data.tables.drafting import Draft, draft_and_read
from fedstrata.data.tables.page import empty_columns, page, percent, share_of, value_of
from fedstrata.data.tables.schema import MISSING, FileFormat, Schema

MOST_SITES, MOST_CATEGORIES = 30, 6
"""At most so many sites, and categories of a column, are printed."""


def describe(
    tables: Annotated[
        list[str], typer.Argument(help="CSV or Parquet files, one per site, or a pattern.", show_default=False)
    ],
    target: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column to predict; needed without --schema.")
    ] = None,
    site: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column that names the site, if one file has all rows.")
    ] = None,
    names: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="Names of the columns, if the files have no header.")
    ] = None,
    missing: Annotated[
        list[str] | None, typer.Option(metavar="CELL", help="Cell that means missing. Can be repeated.")
    ] = None,
    positive: Annotated[
        str | None, typer.Option(metavar="A,B", help="Cells of the target that are class 1.", show_default="as guessed")
    ] = None,
    delimiter: Annotated[
        str | None, typer.Option(metavar="CHARACTER", help="Between cells.", show_default="as found")
    ] = None,
    encoding: Annotated[
        str | None, typer.Option(metavar="NAME", help="Encoding of the files.", show_default="utf-8")
    ] = None,
    schema: Annotated[
        Path | None, typer.Option(parser=a_path, metavar="FILE", help="Schema to check the tables against.")
    ] = None,
    draft_: Annotated[
        Path | None, typer.Option("--draft", parser=a_path, metavar="FILE", help="Draft a schema; must be a new file.")
    ] = None,
    html: HtmlPage = None,
    minimum: Annotated[
        int, typer.Option(min=1, metavar="N", help="Hide counts below this, and others that would tell them.")
    ] = MINIMUM,
    as_json: Json = False,
) -> None:
    """Describe the tables of sites, and draft a schema for them.

    TABLES are CSV or Parquet files, one per site, or a pattern such as 'sites/*.csv'. Without --schema, the kinds of
    the columns are guessed; --draft writes the guess to a file, for you to edit. With it, every table is checked
    against it, and what is wrong is listed with its site, column and line.
    """
    check_output(html, "--html")
    if draft_ is not None:
        check_output(draft_, "--draft")
        if draft_.exists():
            raise InputError(f"The file {draft_} exists. Nothing was overwritten. Choose another for --draft.")
    given = {"--site": site, "--names": names, "--missing": missing, "--positive": positive, "--delimiter": delimiter}
    own = [option for option, value in {**given, "--encoding": encoding, "--draft": draft_}.items() if value]
    drafted: Draft | None = None
    if schema is not None:
        if own:
            raise InputError(f"{own[0]} does not go with --schema, which says it.")
        form = Schema.read(schema)
        if target not in (None, form.target.name):
            raise invalid(
                "--target", target, f"the target of the schema, {form.target.name!r}, or left out", str(schema)
            )
        found, findings = read_checked(tables, form)
    else:
        if target is None:
            raise InputError("describe needs --target, the column to predict, or --schema.")
        file = FileFormat(
            delimiter=None if delimiter is None else delimiter.replace("\\t", "\t"),
            encoding=encoding or "utf-8",
            names=_listed(names),
            missing=(*MISSING, *(cell for cell in missing or () if cell not in MISSING)),
        )
        hints = {"site": site, "form": file, "positive": _listed(positive)}
        drafted, found, findings = draft_and_read(tables, target, **hints)
        form = drafted.schema
    description = describing.describe(found, form, minimum, findings)
    if drafted is not None and draft_ is not None:
        form.write(draft_, drafted.notes, drafted.head)
    give(description, html, as_json, "Show all: --minimum 1")
    if draft_ is not None and not as_json:
        echo(f"Schema drafted in {draft_}")


def _listed(names: str | None) -> tuple[str, ...]:
    return () if names is None else tuple(name.strip() for name in names.split(","))


def check_output(path: Path | None, option: str) -> None:
    """Raise unless a file can be written there."""
    if path is not None and (not path.parent.is_dir() or path.is_dir()):
        raise invalid(option, str(path), "a file in a directory that exists")


def give(description: Description, html: Path | None, as_json: bool, remedy: str) -> None:
    """Write a description as a page, if there is a file for it, and print it as JSON, or as tables.

    remedy: how to show what is hidden.
    """
    if html is not None:
        write_atomically(html, page(description).encode())
    if as_json:
        print(json.dumps(description.as_json()))
        return
    _print(description, remedy)
    if html is not None:
        echo(f"Page written to {html}")


def _print(d: Description, remedy: str) -> None:
    echo(f"{len(d.sites):,} site{'s' * (len(d.sites) != 1)}, {d.together.rows:,} rows, target {d.schema.target.name}")
    OUT.print(_sites(d))
    if len(d.sites) > MOST_SITES:
        echo(f"... and {len(d.sites) - MOST_SITES} more sites: see --html or --json.")
    OUT.print(_columns(d))
    if d.minimum > 1:
        echo(f"Counts from 1 to {d.minimum - 1}, and others that would tell them, are hidden (–). {remedy}")
    if d.left_out:
        echo(f"{d.left_out} of the sites have so few rows that they are not in the sums.")
    for finding in d.findings:
        echo(f"{finding.severity.capitalize()}: {finding}")


def _table(*columns: str, left: Sequence[int] = (0,)) -> Table:
    table = Table()
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i in left else "right", overflow="fold")
    return table


def _sites(d: Description) -> Table:
    flag = d.schema.target.kind == "flag"
    table = _table(
        "site", "rows", *(["positive", "%"] if flag else []), "columns without a value", left=(0, 2 + 2 * flag)
    )
    shown = [*d.sites[:MOST_SITES], d.together]
    for i, site in enumerate(shown):
        cells = [site.name, "–" if site.rows is None else f"{site.rows:,}"]
        if flag:
            cells += [site.target.told(1), percent(share_of(site.positives, site.rows))]
        table.add_row(*map(escape, [*cells, ", ".join(empty_columns(site))]), end_section=i == len(shown) - 2)
    return table


def _columns(d: Description) -> Table:
    table = _table("column", "kind", "missing", "at a site", "values of all sites", left=(0, 1, 4))
    for column in d.schema.features:
        summary = d.together.columns[column.name]
        own = [share_of(s.columns[column.name].missing, s.rows) for s in d.sites]
        known = [part for part in own if part is not None]
        missing = percent(share_of(summary.exact(-1), d.together.rows))
        between = f"{percent(min(known))} to {percent(max(known))}" if known and len(d.sites) > 1 else ""
        between += f", {len(own) - len(known)} hidden" if 0 < len(known) < len(own) else ""
        kind = f"{column.kind}, {column.unit}" if column.unit else column.kind
        table.add_row(*map(escape, (column.name, kind, missing, between, _values(column, summary))))
    return table


def _values(column: Column, summary: ColumnSummary) -> str:
    if column.size:
        names, order = answers_of(column), list(range(column.size))
        if column.kind == "category":
            order.sort(key=lambda i: -(summary.counts[i] or 0))
        words = [f"{names[i]}: {summary.told(i)}" for i in order[:MOST_CATEGORIES]]
        return ", ".join(words) + (f", {len(order) - MOST_CATEGORIES} more" if len(order) > MOST_CATEGORIES else "")
    low, _, middle, _, high = summary.quantiles
    words = [] if middle is None else [f"median {value_of(column, middle)}"]
    words += [] if summary.mean is None or summary.spread is None else [
        f"mean {value_of(column, summary.mean)} ± {summary.spread:.3g}"
    ]  # fmt: skip
    words += [] if low is None else [f"90 % from {value_of(column, low)} to {value_of(column, high)}"]
    words += [f"all from {' to '.join(value_of(column, v) for v in summary.extremes)}"] if summary.extremes else []
    return ", ".join(words) or "–"
