"""The nodes of a federation, as the server sees them: who may take part, and how to ask them."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedstrata.clients.faults import Faults
from fedstrata.core.errors import InputError, invalid
from fedstrata.federation import keys
from fedstrata.federation.server.inbox import Verified, verify
from fedstrata.federation.transport import Transport
from fedstrata.federation.wire import Call, Refused

POLL = 0.05
"""Seconds between two looks for a reply that is not there yet."""

SHORT = 1 << 20
"""The largest reply in bytes to a call other than "work"."""

Content = tuple[Any, Sequence[np.ndarray]]
"""The form and the arrays of a message."""

Replies = tuple[dict[int, Verified], dict[int, Refused]]
"""The verified replies by client, and for every other client why there is none."""


@dataclass(frozen=True)
class Roster:
    """Names and public keys of the nodes that may take part; their order is that of the clients."""

    names: tuple[str, ...]
    public: tuple[str, ...]

    @staticmethod
    def read(text: str) -> Roster:
        """Build from JSON, ``{"name": "public key", ...}``."""
        try:
            table = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"The nodes of the federation must be JSON, public keys by name: {error}") from None
        if not isinstance(table, dict) or not table:
            raise invalid("nodes of the federation", table, "public keys by name, at least one")
        public = {name: keys.canonical(str(key)) for name, key in table.items()}
        keys.check_distinct(public)
        return Roster(tuple(public), tuple(public.values()))

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class Nodes:
    """Sends calls to the nodes of a roster, and waits for their replies until the policy's timeout."""

    transport: Transport
    roster: Roster
    run: str
    policy: Faults

    def call(self, kind: str, **fields: Any) -> Call:
        """Return a call of this run, not yet addressed to a client."""
        return Call(kind, self.run, clients=len(self.roster), **fields)

    def ask_all(self, call: Call, form: Any = (), arrays: Sequence[np.ndarray] = (), limit: int = SHORT) -> Replies:
        """Send the same call to every client; the replies must be short."""
        return self.ask({k: replace(call, client=k) for k in range(len(self.roster))}, form, arrays, limit)

    def ask(self, calls: Mapping[int, Call], form: Any, arrays: Sequence[np.ndarray], limit: int) -> Replies:
        """Send each client its call with the same content, and wait for the replies, of at most ``limit`` bytes."""
        return self.ask_each(calls, dict.fromkeys(calls, (form, arrays)), limit)

    def ask_each(self, calls: Mapping[int, Call], contents: Mapping[int, Content], limit: int) -> Replies:
        """Send each client its call and content, and wait for the replies; ``limit`` is the largest one in bytes."""
        waiting, refused = self._send(calls, contents)
        verified: dict[int, Verified] = {}
        deadline = time.monotonic() + self.policy.timeout
        while waiting:
            late = time.monotonic() >= deadline
            for client, (message_id, node, nonce) in list(waiting.items()):
                reply = self.transport.fetch(message_id, node, limit)
                if reply is None and late:
                    continue
                if reply is None:  # look for one at a time: every look costs the server a request
                    waiting[client] = waiting.pop(client)
                    break
                del waiting[client]
                try:
                    verified[client] = verify(reply, self.roster.public[client], nonce, limit)
                except Refused as error:
                    refused[client] = error
            if late:
                break
            if waiting:
                time.sleep(POLL)
        for client in waiting:
            refused[client] = Refused("silent", f"did not answer within {self.policy.timeout:g} s")
        return verified, refused

    def _send(
        self, calls: Mapping[int, Call], contents: Mapping[int, Content]
    ) -> tuple[dict[int, tuple[str, int, str]], dict[int, Refused]]:
        """Send the calls; return the message id, node and nonce of each, and the clients that are not connected."""
        connected = self.transport.nodes()
        sent: dict[int, tuple[str, int, str]] = {}
        refused: dict[int, Refused] = {}
        for client, call in calls.items():
            node, nonce = connected.get(self.roster.public[client]), secrets.token_hex(32)
            named = replace(call, name=self.roster.names[client], nonce=nonce)
            form, arrays = contents[client]
            message_id = "" if node is None else self.transport.send(node, named.text(form), arrays)
            if node is None or not message_id:
                refused[client] = Refused("silent", "is not connected")
            else:
                sent[client] = message_id, node, nonce
        return sent, refused
