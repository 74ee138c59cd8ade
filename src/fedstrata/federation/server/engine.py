"""The engine of a federation: nodes do the work, with one client on each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from fedstrata.clients.channel import Channel
from fedstrata.clients.client_side import ClientSide
from fedstrata.clients.engine import Answer, Engine, Request, as_lists
from fedstrata.clients.faults import Fault, Faults
from fedstrata.core.trees import tree_leaves, tree_map
from fedstrata.experiments.schema import FederationTable
from fedstrata.federation import wire
from fedstrata.federation.server.claims import check_counts
from fedstrata.federation.server.inbox import CheckedAnswer, Layout, read_answer, usual_layout
from fedstrata.federation.server.nodes import Nodes
from fedstrata.federation.server.secure import SecureSum, check_request
from fedstrata.federation.server.state import SavedLedger, ServerState
from fedstrata.federation.server.steps import check_steps
from fedstrata.federation.wire import QUERY, Call, Refused, Version
from fedstrata.training.checkpoint import DURABLE_SECONDS


class Federated(Engine):
    """Sends requests to nodes. A reply that cannot be used is dropped, and its node is named.

    A client's state is on its node, with a version for every exchange in which it kept something. The server knows
    which version is current: that of the last exchange in which it accepted the client's answer.
    """

    secret_noise = True
    elsewhere = True

    def __init__(
        self,
        side: ClientSide,
        channel: Channel,
        policy: Faults,
        nodes: Nodes,
        state: ServerState,
        federation: FederationTable | None = None,
    ) -> None:
        super().__init__(side, channel, policy)
        self._federation = FederationTable() if federation is None else federation
        self.sums_only = self._federation.secure
        self.ledger = SavedLedger(state)
        self._state = state
        self._nodes = nodes
        self._kept: dict[int, Version] = {}
        self._checkpoints: list[tuple[float, dict[int, Version]]] = []
        self._oldest: dict[int, Version] = {}
        self._layouts: dict[tuple[Any, ...], Layout] = {}

    def answers(self, request: Request) -> Iterator[Answer | Fault]:
        """Yield the answers in the order of the clients, whatever order they arrived in."""
        if self.sums_only and not request.rejoins:
            yield from self._summed(request)
            return
        checked, refused = self._ask(request)
        if not self.sums_only:
            refused |= self._deviating(request, checked)
        checked = {client: answer for client, answer in checked.items() if client not in refused}
        for client, error in refused.items():
            yield request.fault(client, error.kind, error.detail)
        for client in sorted(checked):
            yield self._answer(request, client, checked[client])
        for client, answer in checked.items():
            if answer.kept and request.answered[request.cohort == client].any():
                self._kept[client] = request.clock.round + 1, request.exchange

    def _summed(self, request: Request) -> Iterator[Answer | Fault]:
        """Yield the mean of the answers as the answer of every client in it, and a fault for every other one."""
        check_request(request)
        one = SecureSum(self._nodes, self._federation, request, self._calls(request, "keys"))
        limit = self._nodes.policy.max_bytes or self._largest(request)
        mean = one.mean(request.message, limit, partial(self._deviating, request))
        for client, error in one.refused.items():
            yield request.fault(client, error.kind, error.detail)
        if mean is None:
            return
        places, device = np.flatnonzero(np.isin(request.cohort, mean.survivors)), self.side.oracles.problem.x0.device
        value = tree_map(lambda t: t.to(device).expand(len(places), *t.shape[1:]), mean.value)
        yield Answer(places, value, mean.samples, mean.steps, one.sent, one.received)
        if request.answered[places].all():
            self._kept |= dict.fromkeys(mean.kept, (request.clock.round + 1, request.exchange))

    def _deviating(self, request: Request, checked: dict[int, CheckedAnswer]) -> dict[int, Refused]:
        """Return the clients whose answers differ from the others in layout, in steps, or in what they count."""
        usual = self._usual_layout(request, checked)
        wrong = {
            client: Refused("shape", "sent an answer with a different shape from most nodes")
            for client, answer in checked.items()
            if answer.layout != usual
        }
        alike = {client: answer for client, answer in checked.items() if client not in wrong}
        wrong |= check_steps(request, alike, self.side.data.sizes, self.side.batch_size)
        return wrong | check_counts(request, alike)

    def _largest(self, request: Request) -> int:
        """Return how many bytes an answer to a request has at most, before it is packed."""
        size = sum(leaf.nbytes for leaf in tree_leaves(request.message) if isinstance(leaf, torch.Tensor))
        return 16 * (size + self.side.oracles.problem.x0.nbytes) + (1 << 20)

    def _ask(self, request: Request) -> tuple[dict[int, CheckedAnswer], dict[int, Refused]]:
        """Ask the nodes; return the usable answers, and for every other client why there is none."""
        form, arrays = wire.pack(request.message)
        largest = self._largest(request)
        limit = self._nodes.policy.max_bytes or largest
        kind = "keep" if self.sums_only else "work"
        replies, refused = self._nodes.ask(self._calls(request, kind), form, arrays, limit)
        channel = self.channel if request.packs(self.channel) and kind == "work" else None
        unpacked = max(limit, largest)  # a packed answer may be much smaller
        checked: dict[int, CheckedAnswer] = {}
        for client, reply in replies.items():
            try:
                checked[client] = read_answer(reply, channel, unpacked)
            except Refused as error:
                refused[client] = error
        return checked, refused

    def _calls(self, request: Request, kind: str) -> dict[int, Call]:
        """Return the call of this kind to each requested client; one that was drawn twice is asked once."""
        call = self._nodes.call(
            kind,
            classes=self.side.data.classes,
            round=request.clock.round,
            exchange=request.exchange,
            attempt=request.attempt,
            iteration=request.clock.iteration,
            rejoins=request.rejoins,
            work=f"{QUERY if request.query else ''}{request.name}",
            learned=as_lists(self.learned),
            pool=request.pool,
        )
        clients = np.unique(request.cohort[request.places]).tolist()
        return {k: replace(call, client=k, kept=self._kept.get(k), oldest=self._oldest.get(k)) for k in clients}

    def _usual_layout(self, request: Request, checked: dict[int, CheckedAnswer]) -> Layout | None:
        """Return the layout that answers must have: the one that all had earlier, or else the most frequent one.

        Earlier answers count only if they were to a message of the same form: the same shapes, whole numbers and texts.
        A collection to pool may have another size every time.
        """
        leaves = tree_leaves(request.message)
        shapes = [tuple(t.shape) for t in leaves if isinstance(t, torch.Tensor)]
        form = request.name, *shapes, *(v for v in leaves if not isinstance(v, torch.Tensor | float))
        if form in self._layouts:
            return self._layouts[form]
        layouts = [answer.layout for answer in checked.values()]
        usual = usual_layout(layouts, shapes)
        agreed = set(layouts) == {usual} and 2 * len(layouts) > len(np.unique(request.cohort))
        if usual is not None and agreed and request.pool is None:
            self._layouts[form] = usual
        return usual

    def _answer(self, request: Request, client: int, checked: CheckedAnswer) -> Answer:
        places = np.flatnonzero(request.cohort == client)
        times, device = len(places), self.side.oracles.problem.x0.device
        value = tree_map(lambda t: t.to(device).expand(times, *t.shape[1:]), checked.value)
        return Answer(places, value, checked.samples * times, checked.steps, checked.sent * times)

    def describe(self, chunk: int | str, sampled: int) -> str:
        """Describe how clients are computed, for a line of progress."""
        return "each on its node"

    def saved(self, round: int) -> None:
        """Update which versions nodes must keep: those of the last checkpoint that is certainly on disk.

        That is one written at least ``DURABLE_SECONDS`` ago (see ``training.checkpoint``).
        """
        now = time.monotonic()
        durable = [i for i, (when, _) in enumerate(self._checkpoints) if now - when >= DURABLE_SECONDS]
        if durable:
            self._checkpoints = self._checkpoints[durable[-1] :]
            self._oldest = self._checkpoints[0][1]
        self._checkpoints.append((now, dict(self._kept)))

    def extra(self) -> dict[str, Any]:
        """Return what a checkpoint must hold, including the version of each client's state, and whose state it is."""
        kept = {str(client): list(version) for client, version in self._kept.items()}
        return {**super().extra(), "kept": kept, "server_state": self._state.identity}

    def restore(self, extra: dict[str, Any]) -> None:
        """Resume from what :meth:`extra` returned."""
        self._state.check(extra.get("server_state"), extra["releases"])
        super().restore(extra)
        self._kept = {int(client): (version[0], version[1]) for client, version in extra["kept"].items()}
