"""The data of a node: what it has on its disk, and its place among the data of all clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.core.errors import InputError
from fedstrata.data import formats, intake
from fedstrata.data.federated import FederatedData, Part
from fedstrata.experiments.config import Config
from fedstrata.federation.messages import Call


@dataclass(frozen=True)
class NodeData:
    """What is on this node: (inputs, targets) to train on, for the inner levels, and to test on."""

    train: intake.Pair
    support: intake.Pair | None
    test: intake.Pair | None


def read_data(node: Mapping[str, Any], config: Config) -> NodeData:
    """Read the data that the node's configuration names: a file, or a folder with train.npz, support.npz, test.npz."""
    if "data" not in node:
        raise InputError("The node configuration must name the node's data: data = '/path/to/file.npz'.")
    path = Path(str(node["data"])).expanduser()
    if not path.exists():
        raise InputError(f"There is no {path}, which the node configuration names as its data.")
    parts = _parts_of_folder(path) if path.is_dir() else _parts_of_file(path)
    train = parts.get("train")
    if train is None:
        raise InputError(f"The folder {path} must contain train.npz, with inputs and targets.")
    if len(train[0]) == 0:
        raise InputError(f"There are no samples in {path}.")
    if config.data.holdout and "test" in parts:
        raise InputError(
            "The node has test data, and the experiment also holds out a share of "
            f"{config.data.holdout:g} of its training data for tests. Remove one of the two: data.holdout from the "
            "experiment, or the test data from the node."
        )
    return NodeData(train, parts.get("support"), parts.get("test"))


def _parts_of_folder(folder: Path) -> dict[str, intake.Pair]:
    files = {part: folder / f"{part}.npz" for part in ("train", "support", "test")}
    return {
        part: intake.pair(intake.named(formats.npz(file), file), str(file))
        for part, file in files.items()
        if file.exists()
    }


def _parts_of_file(file: Path) -> dict[str, intake.Pair]:
    arrays = formats.npz(file)
    parts = {"train": intake.pair(intake.named(arrays, file), str(file))}
    for part in ("support", "test"):
        if any(name.startswith(f"{part}_") for name in arrays):
            parts[part] = intake.pair(intake.named(arrays, file, f"{part}_"), f"{part} of {file}")
    return parts


def describe(own: NodeData, config: Config) -> dict[str, Any]:
    """Return what the server must know of a node's data to build the model: shapes, dtypes, the number of classes.

    The number of samples is included only if the run weights clients by it.
    """
    inputs, targets = own.train
    pairs = [pair for pair in (own.train, own.support, own.test) if pair is not None]
    rows = len(inputs) + (0 if own.support is None else len(own.support[0]))
    return {
        "shapes": [list(inputs.shape[1:]), list(targets.shape[1:])],
        "dtypes": [str(t.dtype).removeprefix("torch.") for t in (inputs, targets)],
        "classes": intake.count_classes(*(targets for _, targets in pairs), partial=True),
        "rows": rows if config.train.weighting == "samples" else 1,
    }


def place(own: NodeData, call: Call, config: Config) -> FederatedData:
    """Return the data of all clients as the node sees them: its own, and nothing of the others."""

    def part(pair: intake.Pair | None) -> Part | None:
        if pair is None:
            return None
        nothing = np.empty(0, dtype=np.int64)
        owned = [np.arange(len(pair[0])) if k == call.client else nothing for k in range(call.clients)]
        return Part.of(pair, owned, may_be_empty=True)

    train = part(own.train)
    assert train is not None
    names = tuple(call.name if k == call.client else str(k) for k in range(call.clients))
    data = FederatedData(train, part(own.support), own.test, part(own.test), call.classes, "federation", names)
    seed = config.train.seed if config.data.seed is None else config.data.seed
    if config.data.holdout:
        data = _with_holdout(data, call, config.data.holdout, seed)
    if config.data.support and own.support is None:
        alone = _alone(data).with_support(config.data.support, seed)
        assert alone.support is not None
        data = replace(data, train=_among_all(alone.train, call), support=_among_all(alone.support, call))
    return data


def _with_holdout(data: FederatedData, call: Call, share: float, seed: int) -> FederatedData:
    alone = _alone(data).with_holdout(share, seed)
    assert alone.client_test is not None
    train, client_test = _among_all(alone.train, call), _among_all(alone.client_test, call)
    return replace(data, train=train, client_test=client_test, test=alone.client_test.of_client(0))


def _alone(data: FederatedData) -> FederatedData:
    """Return the data as those of the only client."""
    part = data.train
    return FederatedData(replace(part, offsets=np.array([0, len(part.rows)])), classes=data.classes, name=data.name)


def _among_all(part: Part, call: Call) -> Part:
    """Return a part of the only client as that of one client among all."""
    return replace(part, offsets=np.where(np.arange(call.clients + 1) > call.client, len(part.rows), 0))
