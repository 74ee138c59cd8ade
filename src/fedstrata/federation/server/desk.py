"""The desk: sends calls to nodes and collects their replies."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedstrata.clients.faults import Faults
from fedstrata.federation.messages import Call, Post
from fedstrata.federation.server.inbox import Message, verify
from fedstrata.federation.server.roster import Roster
from fedstrata.federation.wire import Refused

POLL = 0.2
"""Seconds between two looks for replies."""


@dataclass(frozen=True)
class Desk:
    """Asks the nodes of a roster, by post, and waits for them as long as the policy says."""

    post: Post
    roster: Roster
    run: str
    policy: Faults

    def call(self, kind: str, **fields: Any) -> Call:
        """Return a call of this run, to be addressed to a client."""
        return Call(kind, self.run, clients=len(self.roster), **fields)

    def ask_all(
        self, call: Call, form: Any = (), arrays: Sequence[np.ndarray] = ()
    ) -> tuple[dict[int, Message], dict[int, Refused]]:
        """Ask every client the same, something with a short answer."""
        return self.ask({k: replace(call, client=k) for k in range(len(self.roster))}, form, arrays, 1 << 20)

    def ask(
        self, calls: Mapping[int, Call], form: Any, arrays: Sequence[np.ndarray], limit: int
    ) -> tuple[dict[int, Message], dict[int, Refused]]:
        """Send each client its call; return the verified replies, and why the others cannot be used.

        limit: the largest reply in bytes.
        """
        waiting, refused = self._send(calls, form, arrays)
        messages: dict[int, Message] = {}
        deadline = time.monotonic() + self.policy.timeout
        while waiting:
            for client, (ticket, number, nonce) in list(waiting.items()):
                reply = self.post.fetch(ticket, number)
                if reply is None:
                    continue
                del waiting[client]
                try:
                    messages[client] = verify(reply, self.roster.public[client], nonce, limit)
                except Refused as error:
                    refused[client] = error
            if waiting and time.monotonic() >= deadline:
                break
            if waiting:
                time.sleep(POLL)
        for client in waiting:
            refused[client] = Refused("silent", f"did not answer within {self.policy.timeout:g} s")
        return messages, refused

    def _send(
        self, calls: Mapping[int, Call], form: Any, arrays: Sequence[np.ndarray]
    ) -> tuple[dict[int, tuple[str, int, str]], dict[int, Refused]]:
        """Send the calls; return the ticket, the node and the nonce of each, and who cannot be reached."""
        connected = self.post.nodes()
        sent: dict[int, tuple[str, int, str]] = {}
        refused: dict[int, Refused] = {}
        for client, call in calls.items():
            number, nonce = connected.get(self.roster.public[client]), secrets.token_hex(32)
            named = replace(call, name=self.roster.names[client], nonce=nonce)
            ticket = "" if number is None else self.post.send(number, named.text(form), arrays)
            if number is None or not ticket:
                refused[client] = Refused("silent", "is not connected")
            else:
                sent[client] = ticket, number, nonce
        return sent, refused
