"""The data of a node: read from its disk, described for the server, and seen as those of one client among all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstrata.core.errors import InputError, invalid
from fedstrata.data import intake
from fedstrata.data.federated import Arrays, FederatedData, Part
from fedstrata.data.tables.findings import Finding
from fedstrata.data.tables.preparation import Plan
from fedstrata.data.tables.reading import SiteTable
from fedstrata.data.tables.schema import Schema
from fedstrata.experiments.build import plan_of
from fedstrata.experiments.config import Config
from fedstrata.federation.node.tables import read_table, table_of
from fedstrata.federation.wire import Call

_PARTS = "train", "support", "test"


def path_of(node: Mapping[str, Any], name: str) -> Path:
    """Return a path of the node's configuration: of its data, key or state."""
    if name not in node:
        raise InputError(f"The node configuration must name the node's {name}: {name} = '/path'.")
    return Path(str(node[name])).expanduser()


def pools(node: Mapping[str, Any]) -> bool:
    """Whether the node's configuration lets its client answer with collections to be pooled."""
    return str(node.get("pool", True)).lower() != "false"  # Flower passes the configuration on as text


@dataclass(frozen=True)
class NodeData:
    """The data on this node: inputs and targets to train on, for the inner levels, and to test on."""

    train: Arrays
    support: Arrays | None
    test: Arrays | None


def read_data(node: Mapping[str, Any], config: Config, name: str = "the node") -> NodeData:
    """Read the data that the node's configuration names: a file, or a folder with train.npz, support.npz, test.npz.

    name: what messages call the node.
    """
    path, plan = _data_path(node), plan_of(config)
    if _is_table(path):
        return _of_table(path, plan, name)
    parts = (_parts_of_folder if path.is_dir() else _parts_of_file)(path, None if plan is None else plan.schema)
    train = parts.get("train")
    if train is None:
        raise InputError(f"The folder {path} must contain train.npz, with inputs and targets.")
    if len(train[0]) == 0:
        raise InputError(f"There are no samples in {path}.")
    if config.data.holdout and "test" in parts:
        raise InputError(
            "The node has test data, and the experiment holds out a share of its training data as well "
            f"(data.holdout = {config.data.holdout:g}). Remove data.holdout from the experiment, or the test data from "
            "the node."
        )
    return NodeData(train, parts.get("support"), parts.get("test"))


def described_table(node: Mapping[str, Any], schema: Schema, name: str) -> tuple[SiteTable, list[Finding]]:
    """Read all rows of the node as a table; return it and what is doubtful."""
    path = _data_path(node)
    if _is_table(path):
        return read_table(path, schema, name)
    parts = (_parts_of_folder if path.is_dir() else _parts_of_file)(path, schema)
    return table_of(list(parts.values()), path, schema, name)


def version_of(node: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what changes if a file of the node's data is written again."""
    path = _data_path(node)
    files = [path / f"{part}.npz" for part in _PARTS] if path.is_dir() else [path]
    found = [(file.name, file.stat()) for file in files if file.exists()]
    return str(path), *((name, about.st_ino, about.st_size, about.st_mtime_ns) for name, about in found)


def _data_path(node: Mapping[str, Any]) -> Path:
    path = path_of(node, "data")
    if not path.exists():
        raise InputError(f"There is no {path}, the data in the node's configuration.")
    return path


def _is_table(path: Path) -> bool:
    return path.is_file() and path.suffix != ".npz"


def _of_table(path: Path, plan: Plan | None, name: str) -> NodeData:
    """Read a table, checked against the experiment's schema."""
    if plan is None:
        raise InputError(
            f"The node's data are a table, {path.name}, but the experiment has no schema: set data.schema."
        )
    table, _ = read_table(path, plan.schema, name)
    return NodeData((torch.from_numpy(table.values), torch.from_numpy(table.targets)), None, None)


def _parts_of_folder(folder: Path, schema: Schema | None) -> dict[str, Arrays]:
    files = {part: folder / f"{part}.npz" for part in _PARTS}
    parts = {part: intake.read_parts(file)["train"] for part, file in files.items() if file.exists()}
    return _checked(parts, {part: str(file) for part, file in files.items()}, schema)


def _parts_of_file(file: Path, schema: Schema | None) -> dict[str, Arrays]:
    parts = intake.read_parts(file, "support", "test")
    return _checked(parts, {part: f"{part} of {file}" for part in parts}, schema)


def _checked(parts: Mapping[str, Any], titles: Mapping[str, str], schema: Schema | None) -> dict[str, Arrays]:
    """Return the arrays of each part, checked; those for the inner levels and for tests must be like the others."""
    checked: dict[str, Arrays] = {}
    for part, arrays in parts.items():
        if schema is not None:
            checked[part] = _raw(arrays, titles[part], len(schema.features))
        else:
            checked[part] = intake.checked(arrays, titles[part], checked.get("train"), "the training data")
    return checked


def _raw(arrays: Any, title: str, columns: int) -> Arrays:
    """Return the raw values and the targets of a table that another program has read; cells may be missing."""
    values, targets = (np.asarray(array) for array in arrays)
    if values.ndim != 2 or values.shape[1] != columns or values.dtype != np.float64 or np.isinf(values).any():
        wants = f"raw values of {columns} columns: float64, finite or NaN"
        raise invalid(f"inputs of {title}", f"{values.dtype} of shape {values.shape}", wants)
    return torch.from_numpy(np.ascontiguousarray(values)), intake.checked((np.nan_to_num(values), targets), title)[1]


def describe(own: NodeData, config: Config) -> dict[str, Any]:
    """Return what the server must know about a node's data to build the model: shapes, dtypes, number of classes.

    The number of samples is included only if the run weights clients by it, and sums are not secure.
    """
    parts = [arrays for arrays in (own.train, own.support, own.test) if arrays is not None]
    plan = plan_of(config)
    return {
        "shapes": [list(a.shape[1:]) for a in own.train],
        "dtypes": [str(a.dtype).removeprefix("torch.") for a in own.train],
        "classes": intake.count_classes(*(a[-1] for a in parts), partial=True)
        if plan is None
        else plan.schema.target.size,
        "rows": rows_of(own) if config.train.weighting == "samples" and not config.federation.secure else 1,
    }


def rows_of(own: NodeData) -> int:
    """Return the client's number of samples: its weight, if the run weights clients by it."""
    return len(own.train[0]) + (0 if own.support is None else len(own.support[0]))


def federated_view(own: NodeData, call: Call, config: Config) -> FederatedData:
    """Return the data of all clients as this node sees them: its own rows, and none of the other clients."""

    def part(arrays: Arrays) -> Part:
        return Part.of(arrays, [np.arange(len(arrays[0]))])

    support, test = (None if arrays is None else part(arrays) for arrays in (own.support, own.test))
    data = FederatedData(part(own.train), support, own.test, test, call.classes, "federation", plan=plan_of(config))
    if config.data.holdout:
        train, held = data.train.hold_out(
            config.data.holdout, config.data_seed, site=call.name, by_chance=data.classes == 2
        )
        if len(held.rows):  # a small site may have none; its rows are then all for training
            data = replace(data, train=train, client_test=held, test=held.of_client(0))
    data = data.reserve(0.0, 0.0 if own.support else config.data.support, config.data_seed)
    return replace(
        data,
        train=_among_all(data.train, call),
        support=None if data.support is None else _among_all(data.support, call),
        client_test=None if data.client_test is None else _among_all(data.client_test, call),
        client_names=tuple(call.name if k == call.client else str(k) for k in range(call.clients)),
    )


def _among_all(part: Part, call: Call) -> Part:
    """Return the rows of a single client as those of one client among all."""
    return replace(part, offsets=np.where(np.arange(call.clients + 1) > call.client, len(part.rows), 0))
