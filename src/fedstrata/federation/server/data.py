"""The data as the server sees them: nodes describe theirs, and rows of zeros replace their samples."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstrata.clients.faults import QuorumError
from fedstrata.core.errors import FedstrataError, InputError, invalid, printable
from fedstrata.core.version import __version__
from fedstrata.data import intake
from fedstrata.data.federated import Arrays, FederatedData, Part
from fedstrata.experiments.build import plan_of
from fedstrata.experiments.config import Config
from fedstrata.federation import wire
from fedstrata.federation.server.claims import FEW_ROWS, far_above
from fedstrata.federation.server.inbox import read_description
from fedstrata.federation.server.nodes import Nodes
from fedstrata.federation.server.state import ServerState

Say = Callable[[str], None]
Description = dict[str, Any]

FEW_CLASSES, MORE_CLASSES = 1000, 10
"""A node may report this many classes, or this many times as many as any other node; more is an error."""


def data_of_nodes(
    nodes: Nodes, state: ServerState, server_data: Path | None, say: Say, config: Config
) -> FederatedData:
    """Wait for the nodes, and return data of the same shape as theirs, for the server to build the problem from.

    server_data: a folder with the server's own ``test.npz`` and ``auxiliary.npz``; both may be missing.
    """
    names, plan = nodes.roster.names, plan_of(config)
    descriptions = _descriptions(nodes, state, say)
    shapes, dtypes = _common_form(descriptions, names)
    row: Arrays = tuple(
        torch.zeros(1, *shape, dtype=wire.DTYPES[dtype]) for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    if config.train.weighting == "samples":
        _check_rows([description["rows"] for description in descriptions], names, say)
        sizes = [max(1, description["rows"]) for description in descriptions]
    else:
        sizes = [1] * len(names)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    rows = torch.zeros(1, dtype=torch.int64).expand(int(offsets[-1]))  # all rows are the same one
    test = None if server_data is None else _read(server_data / "test.npz", row)
    counts = [description["classes"] for description in descriptions]
    for name, count in zip(names, counts, strict=True):
        if plan is not None and count != plan.schema.target.size:
            raise invalid(f"number of classes of {name}", count, f"{plan.schema.target.size}, as in the schema")
    classes = max(counts) if all(counts) else 0  # floats 0 and 1 are classes only if no node has other values
    if test is not None and classes:
        pooled = int(test[-1].max()) + 1
        _check_classes(counts, names, pooled)
        classes = max(classes, pooled)
    elif classes:
        _check_classes(counts, names)
    data = FederatedData(Part(row, rows, offsets), None, test, None, classes, "federation", names)
    auxiliary = None if server_data is None else _read(server_data / "auxiliary.npz", row)
    return data if auxiliary is None else data.with_auxiliary(*auxiliary)


def _descriptions(nodes: Nodes, state: ServerState, say: Say) -> list[Description]:
    """Return the description of every node's data; a resumed run has saved them."""
    names = nodes.roster.names
    if state.descriptions is not None and len(state.descriptions) == len(names):
        wait_for(nodes, nodes.policy.needed(len(names)), say)
        return state.descriptions
    wait_for(nodes, len(names), say)
    replies, refused = nodes.ask_all(nodes.call("describe"))
    if refused:
        reasons = "; ".join(f"{names[k]}: {error.detail}" for k, error in sorted(refused.items()))
        raise FedstrataError(f"Not every node could describe its data. {reasons}")
    for k, reply in sorted(replies.items()):
        version = printable(str(reply.header.get("version"))[:40])
        if version != __version__:
            say(f"{names[k]} runs fedstrata {version}, but the server runs fedstrata {__version__}")
    descriptions = [read_description(replies[k], name) for k, name in enumerate(names)]
    state.update(descriptions=descriptions)
    return descriptions


def wait_for(nodes: Nodes, needed: int, say: Say) -> None:
    """Wait until at least ``needed`` nodes are connected; ``say`` tells which are not yet."""
    names, timeout = nodes.roster.names, nodes.policy.timeout
    deadline = time.monotonic() + timeout
    announced: list[str] = []
    while True:
        connected = nodes.transport.nodes()
        missing = [name for name, key in zip(names, nodes.roster.public, strict=True) if key not in connected]
        if len(names) - len(missing) >= needed:
            return
        if missing != announced:
            say(f"Waiting for {', '.join(missing)}")
            announced = missing
        if time.monotonic() > deadline:
            wanted = "Every node" if needed == len(names) else f"At least {needed} of {len(names)} nodes"
            raise QuorumError(
                f"Not connected within {timeout:g} s: {', '.join(missing)}. {wanted} must be connected to start. Check "
                "that they are running, with the keys that were registered."
            )
        time.sleep(1.0)


def _common_form(descriptions: list[Description], names: tuple[str, ...]) -> tuple[list[list[int]], list[str]]:
    """Return the shapes and dtypes of a sample; raise if nodes differ, and name those that differ from most."""
    forms = [(description["shapes"], description["dtypes"]) for description in descriptions]
    usual = max(forms, key=forms.count)
    agreed = 2 * forms.count(usual) > len(forms)
    others = {name: f"{s} of {d}" for name, (s, d) in zip(names, forms, strict=True) if not agreed or (s, d) != usual}
    if others:
        wants = f"like those of most nodes, {usual[0]} of {usual[1]}" if agreed else "of one form"
        raise invalid(f"data of {' and '.join(others)}", "; ".join(others.values()), wants)
    return usual


def _check_rows(rows: list[int], names: tuple[str, ...], say: Say) -> None:
    """Raise if a node declares far more rows than the others; say which one has most of the weight in a mean."""
    for k, most in far_above(dict(enumerate(rows)), FEW_ROWS).items():
        raise InputError(
            f"{names[k]} declares {rows[k]} rows, but no other node more than {most}: the mean would be its own. If "
            "that is right, set weighting = 'uniform' in [train]."
        )
    for name, own in zip(names, rows, strict=True):
        if len(rows) > 2 and 2 * own > sum(rows):
            say(f"{name} declares {own} of {sum(rows)} rows, and has {100 * own / sum(rows):.0f} % of the weight")


def _check_classes(counts: list[int], names: tuple[str, ...], pooled: int = 0) -> None:
    """Raise if a node has many more classes than all others and the server's test data, ``pooled``.

    The numbers may differ, because a node may miss some classes; the model has as many outputs as the largest.
    """
    for k, name in enumerate(names):
        others = max([pooled, *counts[:k], *counts[k + 1 :]])
        if others and counts[k] > max(FEW_CLASSES, MORE_CLASSES * others):
            raise InputError(
                f"{name} has labels of {counts[k]} classes, but the other nodes and the server's test data have at "
                f"most {others}. Check the labels of {name}; if they are right, give the server test data with such "
                "labels."
            )


def _read(file: Path, like: Arrays) -> Arrays | None:
    return intake.checked(intake.read_parts(file)["train"], str(file), like) if file.exists() else None
