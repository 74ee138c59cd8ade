"""Evaluation in a federation: on the server's test data, or at the nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fedstrata.data.federated import FederatedData
from fedstrata.experiments.config import Config
from fedstrata.federation import wire
from fedstrata.federation.experiment import plain_evaluation
from fedstrata.federation.server.desk import Desk
from fedstrata.federation.server.inbox import read_measures
from fedstrata.federation.server.notes import Notes
from fedstrata.problems.problem import Problem
from fedstrata.training.metrics.evaluation import PER_CLIENT
from fedstrata.training.metrics.measures import Measures, over_clients


class FederatedEvaluation:
    """Measures on the server's test data if it has any; otherwise, or if the experiment says so, at the nodes.

    Every node measures on its own test data. Loss, accuracy and AUC are reported as mean, worst and spread over the
    nodes, as in a simulation. If the server has no test data, their mean weighted by samples is the pooled measure.
    """

    def __init__(
        self, config: Config, desk: Desk, data: FederatedData, notes: Notes, say: Callable[[str], None]
    ) -> None:
        clients = config.evaluate.clients
        self._pooled = None if data.test is None else plain_evaluation(config)
        self._asks = clients == "test" or (clients == "auto" and self._pooled is None)
        self._desk, self._classes, self._notes, self._say = desk, data.classes, notes, say
        self._each: list[dict[str, float]] | None = None

    def __call__(self, problem: Problem, data: FederatedData, x: torch.Tensor, y: torch.Tensor | None) -> Measures:
        """Return the measures at x (and y)."""
        measures: Measures = {}
        if self._asks:
            rows, self._each = self._ask(x, y)
            for name in sorted({name for each in self._each for name in each}):
                values = np.array([each.get(name, math.nan) for each in self._each])
                known = ~np.isnan(values)
                measures[name] = float(np.average(values[known], weights=rows[known]))
                if name in PER_CLIENT:
                    measures |= over_clients(name, values[known])
            measures["measured_clients"] = float(sum(map(bool, self._each)))
        return measures if self._pooled is None else measures | self._pooled(problem, data, x, y)

    def _ask(self, x: torch.Tensor, y: torch.Tensor | None) -> tuple[np.ndarray, list[dict[str, float]]]:
        """Return on how many samples each node measured, and its measures, empty for a node without."""
        names = self._desk.roster.names
        messages, refused = self._desk.ask_all(self._desk.call("measure", classes=self._classes), *wire.pack((x, y)))
        if refused:
            who = (f"{names[k]} ({error.detail})" for k, error in sorted(refused.items()))
            self._say(f"Not measured: {', '.join(who)}")
            counts = {names[k]: self._notes.unmeasured.get(names[k], 0) + 1 for k in sorted(refused)}
            self._notes.write(unmeasured=self._notes.unmeasured | counts)
        measured = [read_measures(messages[k]) if k in messages else (0, {}) for k in range(len(names))]
        if not any(each for _, each in measured):
            self._say("Nothing was measured: no node that answered has test data. Set data.holdout, or add test data.")
        return np.array([rows for rows, _ in measured]), [each for _, each in measured]

    def about(self, x: torch.Tensor, y: torch.Tensor | None) -> dict[str, Any]:
        """Return what a summary says of the measures at x (and y): what they were taken on, and those of each node."""
        if self._asks and self._each is None:  # a resumed run with nothing left to do
            _, self._each = self._ask(x, y)
        each = self._each or []
        names = sorted({name for measures in each for name in measures} & set(PER_CLIENT))
        return {
            "measured_on": {
                "pooled": "test data of the server" if self._pooled else "nothing",
                "clients": "test data" if self._asks else "nothing",
            },
            "per_client": {name: [measures.get(name) for measures in each] for name in names},
            **({"not_measured": self._notes.unmeasured} if self._notes.unmeasured else {}),
        }
