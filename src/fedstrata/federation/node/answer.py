"""How a node answers a message from the server: check it, do the work, sign the reply."""

from __future__ import annotations

import json
import math
import tomllib
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedstrata.clients.engine import Learned, from_lists
from fedstrata.clients.state import LostState
from fedstrata.clients.work import WorkError
from fedstrata.core.errors import DataError, FedstrataError, InputError, invalid
from fedstrata.core.machine import prepared
from fedstrata.data.federated import FederatedData
from fedstrata.data.intake import are_labels
from fedstrata.data.tables.fitted import Fitted
from fedstrata.experiments.build import Experiment, schema_of
from fedstrata.experiments.config import Config, parse
from fedstrata.federation import keys, wire
from fedstrata.federation.experiment import check_registered, import_modules, plain_evaluation
from fedstrata.federation.node.data import describe, described_table, federated_view, path_of, read_data
from fedstrata.federation.node.faults import NoAnswer
from fedstrata.federation.node.tables import check_minimum, tell
from fedstrata.federation.node.work import Header, work
from fedstrata.federation.wire import Call, Reply


def reply_to(text: str, arrays: list[np.ndarray], experiment: str, node: Mapping[str, Any]) -> Reply:
    """Do what a message asks for; return the signed reply, which names the error if it failed.

    experiment: the experiment of the app, as TOML.
    node:       the node's configuration: data, key, state, import, pool, minimum.
    """
    message: dict[str, Any] = json.loads(text)
    answer: list[np.ndarray] = []
    try:
        header, answer = _answer(message, arrays, experiment, node)
    except NoAnswer:
        header = {"silent": True}
    except Exception as error:
        traceback.print_exc()  # to the node's log
        header = {"lost" if isinstance(error, LostState) else "error": _for_server(error)}
    header |= {"nonce": message.get("nonce"), **wire.sender()}
    signed = json.dumps(header)
    return Reply(signed, keys.sign(path_of(node, "key"), wire.digest(signed, answer)), tuple(answer))


def _for_server(error: Exception) -> str:
    """Return what the server may see of an error: only our own words, since those of other packages may quote data."""
    if isinstance(error, WorkError):
        return str(error).partition(": ")[0]
    if isinstance(error, DataError):
        return error.public
    return str(error) if isinstance(error, FedstrataError) else type(error).__name__


def _answer(
    message: dict[str, Any], arrays: list[np.ndarray], experiment: str, node: Mapping[str, Any]
) -> tuple[Header, list[np.ndarray]]:
    mismatch = wire.mismatch(message, "The server", "this node")
    if mismatch:
        raise InputError(mismatch)
    import_modules(node.get("import", ""))
    call = Call.read(message)
    config = parse(tomllib.loads(experiment), "the experiment of the federation")
    check_registered(config)
    if call.kind in ("spans", "summary"):
        table, findings = described_table(node, schema_of(config), call.name)
        return tell(call.kind, table, findings, config, wire.unpack(message.get("form"), arrays), node), []
    if config.data.schema is not None:
        check_minimum(config.prepare.minimum, node, "prepare.minimum of the experiment")
    own = read_data(node, config, call.name)
    if call.kind == "describe":
        return describe(own, config), []
    data, content = federated_view(own, call, config), wire.unpack(message.get("form"), arrays)
    if call.kind == "measure":
        return _measure(config, data, from_lists(call.learned), content), []
    if call.kind == "work":
        return work(config, data, call, content, node)
    raise invalid("kind of call", call.kind, "describe, work, measure, spans or summary")


def _measure(config: Config, data: FederatedData, learned: Sequence[Learned], point: Any) -> Header:
    """Return the measures of a model on the node's test data, and the number of its samples.

    No count below the minimum of the preparation leaves the node, and no measure that would tell one.
    """
    minimum = 1 if data.plan is None else data.plan.how.minimum
    if data.test is None or len(data.test[0]) < minimum:
        return {"rows": 0, "measures": {}}
    problem = Experiment(config, data).problem
    if data.plan is not None:
        data = data.prepared(Fitted.of(data.plan, learned))
    assert data.test is not None
    x, y = point
    with torch.no_grad(), prepared(config.train.threads):
        measures = plain_evaluation(config)(problem, data.to(problem.x0.device, problem.x0.dtype), x, y)
    finite = {k: float(v) for k, v in measures.items() if math.isfinite(v)}
    return {"rows": len(data.test[0]), **_told(finite, data.test[-1], config.evaluate.own_rows, minimum)}


def _told(measures: dict[str, float], targets: torch.Tensor, own_rows: int, minimum: int) -> Header:
    """Return the measures that a node tells and, if its rows are ranked, how many pairs have the right order."""
    counts = torch.unique(targets, return_counts=True)[1] if are_labels(targets) else torch.tensor([len(targets)])
    fewest, pairs, header = int(counts.min()), int(counts.prod()), {}
    if "auc" in measures and fewest >= minimum:
        header = {"pairs": pairs, "ordered": round(2 * measures["auc"] * pairs) / 2}  # a whole number of halves
    hidden = {"auc", "attacked_auc"} if fewest < max(own_rows, minimum) else set()
    hidden |= {"accuracy_worst_class"} if fewest < minimum else set()
    return header | {"measures": {name: value for name, value in measures.items() if name not in hidden}}
