"""The table of a node, and what the node tells of it for a description."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.core.errors import InputError, invalid
from fedstrata.data.tables import describing
from fedstrata.data.tables.checking import check_site, read_checked_alone
from fedstrata.data.tables.describing import described
from fedstrata.data.tables.findings import Finding, raise_if_errors, warnings_of
from fedstrata.data.tables.reading import SiteTable
from fedstrata.data.tables.schema import Schema
from fedstrata.data.tables.sources import SiteFile
from fedstrata.data.tables.telling import spans_of, summary_of
from fedstrata.experiments.build import schema_of
from fedstrata.experiments.config import Config
from fedstrata.federation.descriptions import Table, spans_table, summary_table

MOST_EDGES = 100
"""A description has at most so many edges of bins."""


def minimum_of(node: Mapping[str, Any]) -> int:
    """Return the smallest count that the node tells, by its configuration."""
    return int(str(node.get("minimum", describing.MINIMUM)))  # Flower passes the configuration on as text


def check_minimum(asked: int, node: Mapping[str, Any], option: str) -> None:
    """Raise if the server asks for counts that the node does not tell; ``option`` is where it says so."""
    own = minimum_of(node)
    if asked < own:
        raise InputError(
            f"This node tells no count below {own} (minimum in its node.toml), but is asked for counts from {asked}. "
            f"Set {option} to {own} or more."
        )


def read_table(path: Path, schema: Schema, name: str) -> tuple[SiteTable, list[Finding]]:
    """Read the node's table, checked against the schema; return it and what is doubtful."""
    return read_checked_alone(SiteFile(name, path), schema)


def table_of(parts: list[Any], path: Path, schema: Schema, name: str) -> tuple[SiteTable, list[Finding]]:
    """Return raw values that another program has read as a table, and what is doubtful."""
    values, targets = (np.concatenate([np.asarray(part[i]) for part in parts]) for i in (0, -1))
    table = SiteTable(name, str(path), values, targets, np.arange(len(values)), "row")
    for i, column in enumerate(described(schema)):
        own = describing.values_of(table, i)
        own = own[~np.isnan(own)]
        if column.size and ((own < 0) | (own >= column.size) | (own != np.round(own))).any():
            wants = f"codes from 0 to {column.size - 1}"
            raise invalid(f"raw values of the column {column.name!r} of {name}", "others", wants, str(path))
    findings = check_site(table, schema)
    raise_if_errors(findings)
    return table, warnings_of(findings)


def tell(
    kind: str, table: SiteTable, findings: list[Finding], config: Config, content: Any, node: Mapping[str, Any]
) -> Table:
    """Answer a question on the node's table.

    content: the minimum, and for a summary the bins.
    """
    schema, minimum = schema_of(config), content[0]
    if type(minimum) is not int or minimum < 1:
        raise invalid("minimum of a description", minimum, "a whole number, at least 1")
    check_minimum(minimum, node, "--minimum")
    if kind == "spans":
        return {"table": spans_table(spans_of(table, schema, minimum))}
    bins = _bins(content[1:], schema)
    return {"table": summary_table(summary_of(table, schema, bins, minimum), schema, findings)}


def _bins(content: Any, schema: Schema) -> dict[str, np.ndarray]:
    """Return the edges of the bins of each column of numbers or dates, checked."""
    names = [column.name for column in described(schema) if not column.size]
    edges = [part.numpy() for part in content]
    for own in edges:
        if own.dtype != np.float64 or own.ndim != 1 or not 2 <= len(own) <= MOST_EDGES:
            raise invalid("bins", f"{own.dtype} of shape {own.shape}", f"from 2 to {MOST_EDGES} edges")
        if not np.isfinite(own).all() or (np.diff(own) <= 0).any():
            raise InputError("The edges of bins must be finite and increasing.")
    if len(edges) != len(names):
        raise invalid("number of columns with bins", len(edges), f"{len(names)}, the numbers and dates of the schema")
    return dict(zip(names, edges, strict=True))
