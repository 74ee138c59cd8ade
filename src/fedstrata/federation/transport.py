"""How messages reach nodes: a transport, and the one that uses Flower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from fedstrata.core.errors import FedstrataError
from fedstrata.federation import keys
from fedstrata.federation.records import TooLarge, from_records, to_records
from fedstrata.federation.wire import Reply

FLOWER = 1
"""The node number that Flower itself uses when it replies for a node that cannot."""

FORMAT = 1 << 20
"""How many bytes a reply may have besides its arrays, for their names, shapes and dtypes."""


class Transport(Protocol):
    """Sends messages to nodes and fetches their replies: over Flower, or within a test."""

    def nodes(self) -> Mapping[str, int]:
        """Return the number of each connected node by its public key."""

    def send(self, node: int, text: str, arrays: Sequence[np.ndarray]) -> str:
        """Send a message to a node; return the message's id, empty if it cannot be sent."""

    def fetch(self, message_id: str, node: int, limit: int) -> Reply | None:
        """Return the reply to a message once it has arrived; accept none from another node, or of more bytes."""


class FlowerTransport:
    """Sends messages over Flower; one that is not fetched within ``lifetime`` seconds expires."""

    def __init__(self, grid: Grid, lifetime: float) -> None:
        self.grid, self.lifetime = grid, lifetime

    def nodes(self) -> Mapping[str, int]:
        """Return the number of each connected node by its public key."""
        numbers: dict[str, int] = {}
        for info in self.grid.get_nodes():  # only those online
            if info.public_key:
                with suppress(FedstrataError):  # a key of another type is not one of ours
                    numbers[keys.canonical(info.public_key)] = info.node_id
        return numbers

    def send(self, node: int, text: str, arrays: Sequence[np.ndarray]) -> str:
        """Send a message to a node; return the message's id, empty if it cannot be sent."""
        content = to_records(Reply(text, b"", tuple(arrays)).packet())
        message = Message(content, dst_node_id=node, message_type="query", ttl=self.lifetime)
        return str(next(iter(self.grid.push_messages([message])), "") or "")

    def fetch(self, message_id: str, node: int, limit: int) -> Reply | None:
        """Return the reply to a message once it has arrived; accept none from another node, or of more bytes.

        Pulls replies one at a time, because the sender of a reply writes its metadata, including its origin.
        """
        for message in self.grid.pull_messages([message_id]):
            if message.has_error():
                return Reply(error=f"failed ({message.error.reason or message.error.code})")
            source, answered = message.metadata.src_node_id, message.metadata.reply_to_message_id
            if (source, answered) != (node, message_id) and source != FLOWER:
                return Reply(error="answered as another node, or to another message", kind="forged")
            try:
                return Reply.of(from_records(message.content, limit + FORMAT))
            except TooLarge as error:
                return Reply(error=f"answered with {error.size:,} bytes, more than {limit:,}", kind="size")
            except Exception as error:  # a node may send anything
                return Reply(error=f"sent something that is not an answer ({type(error).__name__})")
        return None
