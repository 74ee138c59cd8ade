"""Messages between the server and its nodes: what the server asks, and what comes back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fedstrata.federation import wire

Version = tuple[int, int]
"""A version of a client's state: the round, counted from 1 (0 precedes the first), and the exchange that left it."""

QUERY = "query:"
"""What precedes the name of a query where a call names the work to do."""


@dataclass(frozen=True)
class Call:
    """What the server asks of a node.

    kind:    "describe" (what do your data look like?), "work" or "measure".
    run:     the name under which the node keeps what belongs to the run.
    nonce:   a random number that the signed reply must repeat.
    client:  the number of the node's client among ``clients``; ``name`` is what it is called.
    classes: how many classes the data of all nodes have.
    kept:    the last exchange that the server took this client's answer of and in which it kept something; its state
             must be the one of that exchange. None if it has kept nothing yet.
    oldest:  the oldest such exchange that the run may still go back to.
    work:    the method of the algorithm to run, or a query.
    learned: the answer to the problem's query.
    """

    kind: str
    run: str
    nonce: str = ""
    client: int = 0
    clients: int = 1
    name: str = ""
    classes: int = 0
    round: int = 0
    exchange: int = 0
    attempt: int = 0
    iteration: int = 0
    kept: Version | None = None
    oldest: Version | None = None
    work: str = ""
    learned: list[float] | None = None

    def text(self, form: Any) -> str:
        """Return the header of the message: this call, the form of what comes with it, and who sends it."""
        return json.dumps({**dataclasses.asdict(self), "form": form, **wire.stamp()})

    @staticmethod
    def read(header: Mapping[str, Any]) -> Call:
        """Return the call of a message's header."""
        names = {field.name for field in dataclasses.fields(Call)}
        versions = {name: _version(header.get(name)) for name in ("kept", "oldest")}
        return Call(**{name: value for name, value in header.items() if name in names} | versions)


def _version(value: Any) -> Version | None:
    if value is None:
        return None
    round, exchange = value
    return int(round), int(exchange)


@dataclass(frozen=True)
class Reply:
    """What came back from a node: a header with its signature, and arrays; or an error in words."""

    text: str = ""
    signature: bytes = b""
    arrays: tuple[np.ndarray, ...] = ()
    error: str = ""


class Post(Protocol):
    """How messages reach nodes: by Flower, or within a test."""

    def nodes(self) -> Mapping[str, int]:
        """Return the number of each connected node by its public key."""

    def send(self, node: int, text: str, arrays: Sequence[np.ndarray]) -> str:
        """Send a message to a node; return a ticket for its reply, empty if the message cannot be sent."""

    def fetch(self, ticket: str, node: int) -> Reply | None:
        """Return the reply to a message once it has arrived; accept none from another node."""
