"""The reply of a node to a message of the server: checked, answered, and signed."""

from __future__ import annotations

import json
import math
import tomllib
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstrata.clients.work import WorkError
from fedstrata.core.errors import FedstrataError, InputError, invalid
from fedstrata.core.machine import prepared
from fedstrata.data.federated import FederatedData
from fedstrata.experiments.build import Experiment
from fedstrata.experiments.config import Config, import_file, parse
from fedstrata.federation import keys, wire
from fedstrata.federation.experiment import plain_evaluation
from fedstrata.federation.messages import Call, Reply
from fedstrata.federation.node.data import describe, place, read_data
from fedstrata.federation.node.faults import NoAnswer
from fedstrata.federation.node.work import Header, work


def reply_to(text: str, arrays: list[np.ndarray], experiment: str, node: Mapping[str, Any]) -> Reply:
    """Do what a message asks; return the signed reply, which names the error if it failed.

    experiment: the app's, as TOML.
    node:       the node's configuration: data, key, state, import.
    """
    message: dict[str, Any] = json.loads(text)
    out: list[np.ndarray] = []
    try:
        header, out = _answer(message, arrays, experiment, node)
    except NoAnswer:
        header = {"silent": True}
    except Exception as error:
        traceback.print_exc()  # all of it goes to the node's log
        header = {"error": _for_server(error)}
    header |= {"nonce": message.get("nonce"), **wire.stamp()}
    return sign(json.dumps(header), out, node)


def sign(text: str, arrays: list[np.ndarray], node: Mapping[str, Any]) -> Reply:
    """Return a reply with the node's signature."""
    if "key" not in node:
        raise InputError("The node configuration must name the node's private key: key = '/path/to/key'.")
    signature = keys.sign(Path(str(node["key"])), wire.digest(text, arrays))
    return Reply(text, signature, tuple(arrays))


def _for_server(error: Exception) -> str:
    """Return what the server may know of an error: our own words. Those of others may quote the data."""
    if isinstance(error, WorkError):
        return str(error).partition(": ")[0]
    return str(error) if isinstance(error, FedstrataError) else type(error).__name__


def _answer(
    message: dict[str, Any], arrays: list[np.ndarray], experiment: str, node: Mapping[str, Any]
) -> tuple[Header, list[np.ndarray]]:
    other = wire.mismatch(message, "The server", "this node")
    if other:
        raise InputError(other)
    for module in filter(None, str(node.get("import", "")).split(":")):
        import_file(Path(module))
    call = Call.read(message)
    config = parse(tomllib.loads(experiment), "the experiment of the federation")
    own = read_data(node, config)
    if call.kind == "describe":
        return describe(own, config), []
    data, content = place(own, call, config), wire.unpack(message.get("form"), arrays)
    if call.kind == "measure":
        return _measure(config, data, content), []
    if call.kind == "work":
        return work(config, data, call, content, node)
    raise invalid("kind of call", call.kind, "describe, work or measure")


def _measure(config: Config, data: FederatedData, point: Any) -> Header:
    """Return the measures of a model on the node's test data, and how many samples these are."""
    if data.test is None or len(data.test[0]) == 0:
        return {"rows": 0, "measures": {}}
    problem = Experiment(config, data).problem
    x, y = point
    with torch.no_grad(), prepared(config.train.threads):
        measures = plain_evaluation(config)(problem, data.to(problem.x0.device, problem.x0.dtype), x, y)
    return {"rows": len(data.test[0]), "measures": {k: float(v) for k, v in measures.items() if math.isfinite(v)}}
