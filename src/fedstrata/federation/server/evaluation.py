"""Evaluation in a federation: on the server's test data, or on the nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from fedstrata.data.federated import FederatedData
from fedstrata.experiments.config import Config
from fedstrata.federation import wire
from fedstrata.federation.experiment import plain_evaluation
from fedstrata.federation.server.claims import FEW_ROWS, far_above
from fedstrata.federation.server.inbox import NodeMeasures, Verified, read_measures
from fedstrata.federation.server.nodes import Nodes
from fedstrata.federation.server.state import ServerState
from fedstrata.federation.wire import Refused
from fedstrata.problems.problem import Problem
from fedstrata.training.metrics.catalogue import PER_CLIENT, WITHIN
from fedstrata.training.metrics.measures import Measures, over_clients
from fedstrata.training.metrics.of_clients import large, measured_alone


class FederatedEvaluation:
    """Measures on the server's test data if it has any; otherwise, or if the experiment asks for it, on the nodes.

    A node measures on its own test data. Loss, accuracy and AUC are reported as mean, worst and spread over the nodes,
    as in a simulation. If the server has no test data, the mean weighted by samples replaces the pooled measure. AUC
    within clients is that of all nodes that tell how many of their pairs are in the right order.
    """

    def __init__(
        self, config: Config, nodes: Nodes, data: FederatedData, state: ServerState, say: Callable[[str], None]
    ) -> None:
        clients = config.evaluate.clients
        self._pooled = None if data.test is None else plain_evaluation(config)
        self._on_nodes = clients == "test" or (clients == "auto" and self._pooled is None)
        self._nodes, self._classes, self._state, self._say = nodes, data.classes, state, say
        self._own_rows = config.evaluate.own_rows
        self._each: list[NodeMeasures] | None = None

    def __call__(self, problem: Problem, data: FederatedData, x: torch.Tensor, y: torch.Tensor | None) -> Measures:
        """Return the measures at x (and y)."""
        measures: Measures = {}
        if self._on_nodes:
            self._each = self._ask(data, x, y)
            rows = np.array([each.rows for each in self._each])
            for name in sorted({name for each in self._each for name in each.measures}):
                values = np.array([each.measures.get(name, math.nan) for each in self._each])
                measured = ~np.isnan(values)
                measures[name] = float(np.average(values[measured], weights=rows[measured]))
                if name in PER_CLIENT:
                    measures |= over_clients(name, values[measured], large(name, rows[measured], self._own_rows))
            pairs = sum(each.pairs for each in self._each)
            if pairs:
                measures[WITHIN] = sum(each.ordered for each in self._each) / pairs
            measures["measured_clients"] = float(sum(bool(each.measures) for each in self._each))
        return measures if self._pooled is None else measures | self._pooled(problem, data, x, y)

    def _ask(self, data: FederatedData, x: torch.Tensor, y: torch.Tensor | None) -> list[NodeMeasures]:
        """Return what each node measured, nothing if it has no test data."""
        names = self._nodes.roster.names
        learned = [] if data.fitted is None else [data.fitted.vector.tolist()]
        call = self._nodes.call("measure", classes=self._classes, learned=learned)
        replies, refused = self._nodes.ask_all(call, *wire.pack((x, y)))
        told, wrong = self._read(replies)
        refused |= wrong
        if refused:
            reasons = (f"{names[k]} ({error.detail})" for k, error in sorted(refused.items()))
            self._say(f"Not measured: {', '.join(reasons)}")
            counts = {names[k]: self._state.unmeasured.get(names[k], 0) + 1 for k in sorted(refused)}
            self._state.update(unmeasured=self._state.unmeasured | counts)
        measured = [told.get(k, NodeMeasures()) for k in range(len(names))]
        if not any(each.measures for each in measured):
            self._say(
                "Nothing was measured: no node that replied has test data, or enough to tell of them. "
                "Set data.holdout, or add test data."
            )
        return measured

    def _read(self, replies: Mapping[int, Verified]) -> tuple[dict[int, NodeMeasures], dict[int, Refused]]:
        """Return what each node measured, and why the answers of others cannot be used."""
        told: dict[int, NodeMeasures] = {}
        refused: dict[int, Refused] = {}
        for k, reply in replies.items():
            try:
                told[k] = read_measures(reply)
            except Refused as error:
                refused[k] = error
        for k, most in far_above({k: each.rows for k, each in told.items()}, FEW_ROWS).items():
            refused[k] = Refused("type", f"reported {told.pop(k).rows} test rows, but no other node more than {most}")
        return told, refused

    def about(self, problem: Problem, data: FederatedData, x: torch.Tensor, y: torch.Tensor | None) -> dict[str, Any]:
        """Return which data the measures use, and the measures of each node at x (and y)."""
        if self._on_nodes and self._each is None:  # a resumed run with nothing left to do
            self._each = self._ask(data, x, y)
        each = self._each or []
        names = sorted({name for one in each for name in one.measures} & set(PER_CLIENT))
        rows = np.array([one.rows for one in each])
        shown = {name: zip(each, large(name, rows, self._own_rows), strict=True) for name in names}
        per_client = {n: [one.measures.get(n) if enough else None for one, enough in own] for n, own in shown.items()}
        return {
            "measured_on": {
                "pooled": "test data of the server" if self._pooled else "nothing",
                "clients": "test data" if self._on_nodes else "nothing",
                **measured_alone(per_client),
            },
            "per_client": per_client,
            **({"not_measured": self._state.unmeasured} if self._state.unmeasured else {}),
        }
