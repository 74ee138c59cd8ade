"""How a node answers a message from the server: check it, do the work, sign the reply."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from fedstrata.clients.state import LostState
from fedstrata.clients.work import WorkError
from fedstrata.core.errors import DataError, FedstrataError, InputError, invalid
from fedstrata.core.machine import prepared
from fedstrata.core.trees import tree_map
from fedstrata.data.intake import are_labels
from fedstrata.experiments.build import schema_of
from fedstrata.federation import keys, wire
from fedstrata.federation.experiment import plain_evaluation
from fedstrata.federation.node import secure
from fedstrata.federation.node.data import describe, described_table, path_of, rows_of
from fedstrata.federation.node.faults import NoAnswer
from fedstrata.federation.node.runs import KnownRun, KnownRuns
from fedstrata.federation.node.tables import check_minimum, tell
from fedstrata.federation.node.work import Header, work
from fedstrata.federation.packet import Packet, from_bytes
from fedstrata.federation.secure.participant import PHASES
from fedstrata.federation.wire import Call, Reply

OWN = "describe", "measure", "work", "keep", *PHASES
KINDS = *OWN, "spans", "summary"
"""The kinds of call that a node answers; those in ``OWN`` are about its data as the experiment takes them."""


class Answers:
    """The answers of a node, which keeps what it needs of a run in memory from one message to the next.

    Both kinds of node use this: one that is long-lived, and Flower's, which starts a process for every message.

    node: the node's configuration: data, key, state, import, pool, minimum, secure, peers.
    """

    def __init__(self, node: Mapping[str, Any]) -> None:
        self._node, self._runs = node, KnownRuns(node)

    def answer(self, packet: Packet, experiment: str) -> Packet:
        """Do what a message asks for; return the signed answer, which names the error if it failed.

        experiment: the experiment of the app, as TOML.
        """
        message: dict[str, Any] = json.loads(packet.text)
        answer: list[np.ndarray] = []
        try:
            call, run = self._admitted(message, experiment)
            header, answer = _answer(call, run, message.get("form"), from_bytes(packet.body), self._node)
        except NoAnswer:
            header = {"silent": True}
        except Exception as error:
            traceback.print_exc()  # to the node's log
            header = {"lost" if isinstance(error, LostState) else "error": _for_server(error)}
        return self._leaving(message, header, answer)

    def forget(self) -> None:
        """Forget all runs, and the data that were read for them."""
        self._runs.forget()

    def _admitted(self, message: dict[str, Any], experiment: str) -> tuple[Call, KnownRun]:
        """Return what a message asks for, and its run; raise if this node does not do that.

        Everything that arrives passes here before anything is computed for it.
        """
        mismatch = wire.mismatch(message, "The server", "this node")
        if mismatch:
            raise InputError(mismatch)
        call, run = Call.read(message), self._runs.of(experiment)
        if call.kind not in KINDS:
            raise invalid("kind of call", call.kind, ", ".join(KINDS))
        secure.check_allowed(call, self._node)
        if call.kind in OWN and run.config.data.schema is not None:
            check_minimum(run.config.prepare.minimum, self._node, "prepare.minimum of the experiment")
        return call, run

    def _leaving(self, message: dict[str, Any], header: Header, arrays: Sequence[np.ndarray]) -> Packet:
        """Return an answer, signed. Everything that leaves this node passes here, errors too."""
        text = json.dumps(header | {"nonce": message.get("nonce"), **wire.sender()})
        signature = keys.sign(path_of(self._node, "key"), wire.digest(text, arrays))
        return Reply(text, signature, tuple(arrays)).packet()


def _for_server(error: Exception) -> str:
    """Return what the server may see of an error: only our own words, since those of other packages may quote data."""
    if isinstance(error, WorkError):
        return str(error).partition(": ")[0]
    if isinstance(error, DataError):
        return error.public
    return str(error) if isinstance(error, FedstrataError) else type(error).__name__


def _answer(
    call: Call, run: KnownRun, form: Any, arrays: Sequence[np.ndarray], node: Mapping[str, Any]
) -> tuple[Header, list[np.ndarray]]:
    """Return the header and the arrays of the answer to a call with content of this form."""
    if call.kind in ("spans", "summary"):
        table, findings = described_table(node, schema_of(run.config), call.name)
        return tell(call.kind, table, findings, run.config, wire.unpack(form, arrays), node), []
    if call.kind == "describe":
        return describe(run.own(call), run.config), []
    content = wire.unpack(form, arrays)
    if call.kind == "measure":
        return _measure(run, call, content), []
    do = partial(work, run, call, node=node)
    if call.kind in PHASES:
        return secure.answer(call, content, node, run.config.federation.bits, rows_of(run.own(call)), do)
    return secure.without_answer(*do(content)) if call.kind == "keep" else do(content)


def _measure(run: KnownRun, call: Call, point: Any) -> Header:
    """Return the measures of a model on the node's test data, and the number of its samples.

    No count below the minimum of the preparation leaves the node, and no measure that would tell one.
    """
    config, data = run.config, run.data(call)
    minimum = 1 if data.plan is None else data.plan.how.minimum
    if data.test is None or len(data.test[0]) < minimum:
        return {"rows": 0, "measures": {}}
    ready = run.ready(call)
    assert ready.test is not None
    problem = run.problem(call)
    x, y = tree_map(lambda t: t.to(problem.x0.device) if isinstance(t, torch.Tensor) else t, point)
    with torch.no_grad(), prepared(config.train.threads):
        measures = plain_evaluation(config)(problem, ready, x, y)
    finite = {k: float(v) for k, v in measures.items() if math.isfinite(v)}
    return {"rows": len(ready.test[0]), **_told(finite, ready.test[-1], config.evaluate.own_rows, minimum)}


def _told(measures: dict[str, float], targets: torch.Tensor, own_rows: int, minimum: int) -> Header:
    """Return the measures that a node tells and, if its rows are ranked, how many pairs have the right order."""
    counts = torch.unique(targets, return_counts=True)[1] if are_labels(targets) else torch.tensor([len(targets)])
    fewest, pairs, header = int(counts.min()), int(counts.prod()), {}
    if "auc" in measures and fewest >= minimum:
        header = {"pairs": pairs, "ordered": round(2 * measures["auc"] * pairs) / 2}  # a whole number of halves
    hidden = {"auc", "attacked_auc"} if fewest < max(own_rows, minimum) else set()
    hidden |= {"accuracy_worst_class"} if fewest < minimum else set()
    return header | {"measures": {name: value for name, value in measures.items() if name not in hidden}}
