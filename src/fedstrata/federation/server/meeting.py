"""The start of a run: wait for the nodes, ask what their data look like, and build the server's view of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstrata.clients.faults import QuorumError
from fedstrata.core.errors import FedstrataError, invalid
from fedstrata.core.version import __version__
from fedstrata.data import formats, intake
from fedstrata.data.federated import FederatedData, Part
from fedstrata.federation import wire
from fedstrata.federation.server.desk import Desk
from fedstrata.federation.server.inbox import read_description
from fedstrata.federation.server.notes import Notes

Say = Callable[[str], None]
Description = dict[str, Any]


def meet(desk: Desk, notes: Notes, server_data: Path | None, say: Say) -> FederatedData:
    """Return data for the server to build the problem from: every client has rows of zeros, as many as it has samples.

    server_data: a folder with the server's own ``test.npz`` and ``auxiliary.npz``; both may be missing.
    """
    names = desk.roster.names
    descriptions = _descriptions(desk, notes, say)
    shapes, dtypes = _common_look(descriptions, names)
    row: Any = tuple(
        torch.zeros(1, *shape, dtype=wire.DTYPES[dtype]) for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    sizes = [max(1, description["rows"]) for description in descriptions]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    rows = torch.zeros(1, dtype=torch.int64).expand(int(offsets[-1]))  # all rows are the same one
    test = None if server_data is None else _read_pair(server_data / "test.npz", row)
    counts = [description["classes"] for description in descriptions]
    classes = max(counts) if all(counts) else 0  # floats 0 and 1 are classes only if no node has others
    if test is not None and classes:
        classes = max(classes, int(test[1].max()) + 1)
    data = FederatedData(Part(row, rows, offsets), None, test, None, classes, "federation", names)
    auxiliary = None if server_data is None else _read_pair(server_data / "auxiliary.npz", row)
    return data if auxiliary is None else data.with_auxiliary(*auxiliary)


def _descriptions(desk: Desk, notes: Notes, say: Say) -> list[Description]:
    """Return what the data of every node look like; a resumed run has noted it."""
    names = desk.roster.names
    if notes.descriptions is not None and len(notes.descriptions) == len(names):
        _wait(desk, desk.policy.needed(len(names)), say)
        return notes.descriptions
    _wait(desk, len(names), say)
    messages, refused = desk.ask_all(desk.call("describe"))
    if refused:
        reasons = "; ".join(f"{names[k]}: {error.detail}" for k, error in sorted(refused.items()))
        raise FedstrataError(f"Not every node could say what its data look like. {reasons}")
    for k, message in sorted(messages.items()):
        version = str(message.header.get("version"))[:40]
        if version != __version__:
            say(f"{names[k]} runs fedstrata {version}, the server fedstrata {__version__}")
    descriptions = [read_description(messages[k], name) for k, name in enumerate(names)]
    notes.write(descriptions=descriptions)
    return descriptions


def _wait(desk: Desk, needed: int, say: Say) -> None:
    """Wait until so many nodes are connected."""
    names, timeout = desk.roster.names, desk.policy.timeout
    deadline = time.monotonic() + timeout
    announced: list[str] = []
    while True:
        connected = desk.post.nodes()
        missing = [name for name, key in zip(names, desk.roster.public, strict=True) if key not in connected]
        if len(names) - len(missing) >= needed:
            return
        if missing != announced:
            say(f"Waiting for {', '.join(missing)}")
            announced = missing
        if time.monotonic() > deadline:
            wanted = "Every node" if needed == len(names) else f"At least {needed} of {len(names)} nodes"
            raise QuorumError(
                f"Not connected within {timeout:g} s: {', '.join(missing)}. {wanted} must be connected to start. Check "
                "that it is running, with the key that was registered."
            )
        time.sleep(1.0)


def _common_look(descriptions: list[Description], names: tuple[str, ...]) -> tuple[list[list[int]], list[str]]:
    """Return the shapes and dtypes of a sample; refuse nodes that differ."""
    looks = [(description["shapes"], description["dtypes"]) for description in descriptions]
    for name, (shapes, dtypes) in zip(names, looks, strict=True):
        if (shapes, dtypes) != looks[0]:
            wanted = f"like those of {names[0]}, {looks[0][0]} of {looks[0][1]}"
            raise invalid(f"data of {name}", f"{shapes} of {dtypes}", wanted)
    return looks[0]


def _read_pair(file: Path, like: intake.Pair) -> intake.Pair | None:
    return intake.pair(intake.named(formats.npz(file), file), str(file), like) if file.exists() else None
