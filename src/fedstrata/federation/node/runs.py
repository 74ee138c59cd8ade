"""What a node keeps of a run between messages: its configuration, the node's data, and the problem.

It is the same for every message of a run, and takes longer to make than many a message to answer. Nothing in it depends
on the order of messages, so a node that has just started answers as one that has been there from the beginning.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch

from fedstrata.algorithms import Algorithm
from fedstrata.clients.engine import from_lists
from fedstrata.data.federated import FederatedData
from fedstrata.data.tables.fitted import Fitted
from fedstrata.experiments.build import Experiment
from fedstrata.experiments.config import parse
from fedstrata.federation.experiment import check_registered, import_modules
from fedstrata.federation.node.data import NodeData, federated_view, read_data, version_of
from fedstrata.federation.wire import Call
from fedstrata.problems.oracles import Oracles
from fedstrata.problems.precision import AUTOCASTS
from fedstrata.problems.problem import Problem
from fedstrata.training.rounds import problem_of_round

T = TypeVar("T")


class KnownRun:
    """A run as a node knows it.

    text: the experiment, as TOML.
    node: the node's configuration.
    """

    def __init__(self, text: str, node: Mapping[str, Any]) -> None:
        import_modules(node.get("import", ""))
        self.config = parse(tomllib.loads(text), "the experiment of the federation")
        check_registered(self.config)
        self._node = node
        self._kept: dict[str, tuple[Hashable, Any]] = {}

    def _once(self, what: str, key: Hashable, make: Callable[[], T]) -> T:
        """Return what was made for this key the last time, or make it."""
        if what not in self._kept or self._kept[what][0] != key:
            self._kept.pop(what, None)  # the memory of the old one, before there is a new one
            self._kept[what] = key, make()
        made: T = self._kept[what][1]
        return made

    def own(self, call: Call) -> NodeData:
        """Return the node's data; read again if the files have changed."""
        return self._once(
            "own", (call.name, version_of(self._node)), lambda: read_data(self._node, self.config, call.name)
        )

    def data(self, call: Call) -> FederatedData:
        """Return the data of all clients as this node sees them, as the files have them."""
        return self._once("data", self._view(call), lambda: federated_view(self.own(call), call, self.config))

    def experiment(self, call: Call) -> Experiment:
        """Return the experiment on these data."""
        return self._once("experiment", self._view(call), lambda: Experiment(self.config, self.data(call)))

    def ready(self, call: Call) -> FederatedData:
        """Return the data in the form in which the problem takes them, tables prepared if their statistics are known.

        They are not yet, if the call asks for the statistics.
        """

        def make() -> FederatedData:
            data, learned, x0 = self.data(call), from_lists(call.learned), self.problem(call).x0
            if data.plan is not None and learned:
                data = data.prepared(Fitted.of(data.plan, learned))
            return data.to(x0.device, x0.dtype)

        return self._once("ready", (self._view(call), str(call.learned)), make)

    def problem(self, call: Call) -> Problem:
        """Return the problem as it is before the problem's queries are answered."""
        device = torch.device(self.config.settings.device)
        return self._once("problem", self._view(call), lambda: self.experiment(call).problem.to(device))

    def oracles(self, call: Call) -> Oracles:
        """Return the oracles of the problem in the round of the call, with all that was learned."""
        settings, learned = self.config.settings, from_lists(call.learned)
        rest = learned[1:] if self.data(call).plan is not None else learned
        varies = self.problem(call).at is not None

        def make() -> Oracles:
            problem = problem_of_round(self.problem(call), rest, call.round, settings.rounds)
            return Oracles(problem, autocast=AUTOCASTS[settings.autocast])

        key = (self._view(call), str(call.learned), call.round if varies else None)
        return self._once("oracles", key, make)

    def algorithm(self, call: Call) -> Algorithm:
        """Return the algorithm of the experiment."""
        return self.experiment(call).algorithm

    def _view(self, call: Call) -> Hashable:
        return call.name, call.client, call.clients, call.classes, version_of(self._node)


class KnownRuns:
    """The runs that a node knows, at most ``most`` of them.

    node: the node's configuration.
    """

    def __init__(self, node: Mapping[str, Any], most: int = 2) -> None:
        self.node, self._most = node, most
        self._runs: dict[str, KnownRun] = {}

    def of(self, experiment: str) -> KnownRun:
        """Return the run of an experiment, the text that the app has."""
        run = self._runs.pop(experiment, None)
        self._runs = dict(list(self._runs.items())[-self._most + 1 :])
        self._runs[experiment] = KnownRun(experiment, self.node) if run is None else run
        return self._runs[experiment]

    def forget(self) -> None:
        """Forget all runs, and the data that were read for them."""
        self._runs.clear()
