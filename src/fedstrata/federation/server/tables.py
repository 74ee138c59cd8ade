"""The description of the nodes' tables: the server asks every node twice, and checks what it tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fedstrata.core.errors import InputError
from fedstrata.data.tables.describing import Description, described
from fedstrata.data.tables.schema import Schema
from fedstrata.data.tables.telling import bins_of, merged
from fedstrata.federation import wire
from fedstrata.federation.descriptions import read_spans, read_summary
from fedstrata.federation.server.data import Say, wait_for
from fedstrata.federation.server.nodes import Nodes
from fedstrata.federation.wire import Refused

MOST_BYTES = 1 << 24
"""The largest description of a node."""


def ask_tables(nodes: Nodes, schema: Schema, minimum: int, say: Say = lambda _: None) -> dict[str, Any]:
    """Return what all nodes tell of their tables, checked, as JSON; raise if a node does not, and name it."""
    wait_for(nodes, len(nodes.roster), say)
    spans = _ask(nodes, "spans", (minimum,), lambda table, _: read_spans(table, schema, minimum))
    bins = bins_of(schema, [span for _, span in spans.values()], minimum)
    edges = [torch.from_numpy(np.asarray(bins[c.name], np.float64)) for c in described(schema) if not c.size]
    told = _ask(
        nodes, "summary", (minimum, *edges), lambda table, name: read_summary(table, schema, bins, minimum, name)
    )
    return {
        "minimum": minimum,
        "bins": {name: own.tolist() for name, own in bins.items()},
        "nodes": {name: table for name, (table, _) in told.items()},
    }


def _ask(nodes: Nodes, kind: str, content: Any, read: Callable[[Any, str], Any]) -> dict[str, tuple[Any, Any]]:
    """Ask every node the same; return its answer, and what that means, by its name."""
    replies, refused = nodes.ask_all(nodes.call(kind), *wire.pack(content), limit=MOST_BYTES)
    told = {}
    for k, reply in replies.items():
        name = nodes.roster.names[k]
        try:
            table = reply.header.get("table")
            told[name] = table, read(table, name)
        except Refused as error:
            refused[k] = error
    if refused:
        reasons = "".join(f"\n- {nodes.roster.names[k]} {error.detail}" for k, error in sorted(refused.items()))
        raise InputError(f"Not every node described its table.{reasons}")
    return {name: told[name] for name in nodes.roster.names}


def described_by(told: dict[str, Any], schema: Schema) -> Description:
    """Return the description of all nodes' tables from what :func:`ask_tables` returned."""
    minimum, bins = told["minimum"], {name: np.array(edges) for name, edges in told["bins"].items()}
    read = [read_summary(table, schema, bins, minimum, name) for name, table in told["nodes"].items()]
    return merged(schema, minimum, bins, [site for site, _ in read], [f for _, own in read for f in own])
