"""The engine of a federation: has work done by nodes, one client on each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from fedstrata.clients.channel import Channel
from fedstrata.clients.engine import Answer, Engine, Request
from fedstrata.clients.faults import Fault, Faults
from fedstrata.clients.queries import is_query
from fedstrata.clients.setting import Setting
from fedstrata.federation import wire
from fedstrata.federation.messages import QUERY, Call, Version
from fedstrata.federation.server.desk import Desk
from fedstrata.federation.server.inbox import Delivery, read_answer, usual_layout
from fedstrata.federation.server.notes import NotedLedger, Notes
from fedstrata.federation.wire import Refused
from fedstrata.training.checkpoint import DURABLE_SECONDS


class Federated(Engine):
    """Asks nodes to do the work. A reply that cannot be used is dropped, and its node is named.

    The state of a client is on its node, in a version for every exchange in which it kept something. The server
    remembers which version is the client's: that of the last exchange in which it took the client's answer.
    """

    secret_noise = True

    def __init__(self, setting: Setting, channel: Channel, policy: Faults, desk: Desk, notes: Notes) -> None:
        super().__init__(setting, channel, policy)
        self.ledger = NotedLedger(notes)
        self._desk = desk
        self._kept: dict[int, Version] = {}
        self._checkpoints: list[tuple[float, dict[int, Version]]] = []
        self._oldest: dict[int, Version] = {}
        self._layouts: dict[str, str] = {}

    def answers(self, request: Request) -> Iterator[Answer | Fault]:
        """Yield the answers of the nodes in the order of the clients, whatever the order in which they arrived."""
        deliveries, refused = self._deliveries(request)
        usual = self._usual_layout(request, deliveries)
        for client in [client for client, delivery in deliveries.items() if delivery.layout != usual]:
            del deliveries[client]
            refused[client] = Refused("shape", "sent an answer of another shape than most nodes")
        for client, error in refused.items():
            yield request.fault(client, error.kind, error.detail)
        for client in sorted(deliveries):
            yield self._answer(request, client, deliveries[client])
        for client, delivery in deliveries.items():
            if delivery.kept and request.answered[request.cohort == client].any():
                self._kept[client] = request.clock.round + 1, request.exchange

    def _deliveries(self, request: Request) -> tuple[dict[int, Delivery], dict[int, Refused]]:
        """Ask the nodes; return the answers that can be used, and why the others cannot."""
        form, arrays = wire.pack(request.message)
        largest = 16 * (sum(a.nbytes for a in arrays) + self.setting.oracles.problem.x0.nbytes) + (1 << 20)
        limit = self._desk.policy.max_bytes or largest
        messages, refused = self._desk.ask(self._calls(request), form, arrays, limit)
        channel = self.channel if self.packs(request) else None
        deliveries: dict[int, Delivery] = {}
        for client, message in messages.items():
            try:
                deliveries[client] = read_answer(message, channel, largest)
            except Refused as error:
                refused[client] = error
        return deliveries, refused

    def _calls(self, request: Request) -> dict[int, Call]:
        """Return the call to each requested client; one that was drawn twice is asked once."""
        call = self._desk.call(
            "work",
            classes=self.setting.data.classes,
            round=request.clock.round,
            exchange=request.exchange,
            attempt=request.attempt,
            iteration=request.clock.iteration,
            work=f"{QUERY if is_query(request.work) else ''}{request.name}",
            learned=None if self.learned is None else self.learned.tolist(),
        )
        clients = np.unique(request.cohort[request.places]).tolist()
        return {k: replace(call, client=k, kept=self._kept.get(k), oldest=self._oldest.get(k)) for k in clients}

    def _usual_layout(self, request: Request, deliveries: dict[int, Delivery]) -> str:
        """Return the layout that answers must have: the one that all agreed on before, or else that of most."""
        if request.name in self._layouts:
            return self._layouts[request.name]
        layouts = [delivery.layout for delivery in deliveries.values()]
        shapes = [list(t.shape) for t in tree_leaves(request.message) if isinstance(t, torch.Tensor)]
        usual = usual_layout(layouts, shapes)
        if set(layouts) == {usual} and 2 * len(layouts) > len(np.unique(request.cohort)):
            self._layouts[request.name] = usual
        return usual

    def _answer(self, request: Request, client: int, delivery: Delivery) -> Answer:
        places = np.flatnonzero(request.cohort == client)
        times, device = len(places), self.setting.oracles.problem.x0.device
        value = tree_map(lambda t: t.to(device).expand(times, *t.shape[1:]), delivery.value)
        return Answer(places, value, delivery.samples * times, delivery.steps, delivery.sent * times)

    def describe(self, chunk: int | str, sampled: int) -> str:
        """Say how the clients of a cohort advance."""
        return "each on its node"

    def saved(self, round: int) -> None:
        """Note which versions the nodes must keep: those of the last checkpoint that is surely on the disk.

        See ``training.checkpoint``: that is one of ``DURABLE_SECONDS`` ago, or the one before this one.
        """
        now = time.monotonic()
        durable = [i for i, (when, _) in enumerate(self._checkpoints) if now - when >= DURABLE_SECONDS]
        if durable:
            self._checkpoints = self._checkpoints[durable[-1] :]
            self._oldest = self._checkpoints[0][1]
        self._checkpoints.append((now, dict(self._kept)))

    def extra(self) -> dict[str, Any]:
        """Return what a checkpoint must hold: also the version of each client's state."""
        return {**super().extra(), "kept": {str(client): list(version) for client, version in self._kept.items()}}

    def restore(self, extra: dict[str, Any]) -> None:
        """Continue from what :meth:`extra` returned."""
        super().restore(extra)
        self._kept = {int(client): (version[0], version[1]) for client, version in extra["kept"].items()}
