"""Flower's messages as the server and the nodes use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedstrata.core.errors import FedstrataError
from fedstrata.federation import keys
from fedstrata.federation.messages import Reply

FLOWER = 1
"""The number under which Flower itself answers for a node that cannot."""


class FlowerPost:
    """Sends messages by Flower; one that is not fetched within ``patience`` seconds expires."""

    def __init__(self, grid: Grid, patience: float) -> None:
        self.grid, self.patience = grid, patience

    def nodes(self) -> Mapping[str, int]:
        """Return the number of each connected node by its public key."""
        online = set(self.grid.get_node_ids())
        numbers: dict[str, int] = {}
        for info in self.grid.get_nodes():
            if info.public_key and info.node_id in online:
                with suppress(FedstrataError):  # a key of another kind is not one of ours
                    numbers[keys.canonical(info.public_key)] = info.node_id
        return numbers

    def send(self, node: int, text: str, arrays: Sequence[np.ndarray]) -> str:
        """Send a message to a node; return a ticket for its reply, empty if the message cannot be sent."""
        message = Message(
            to_records(Reply(text, b"", tuple(arrays))), dst_node_id=node, message_type="query", ttl=self.patience
        )
        return str(next(iter(self.grid.push_messages([message])), "") or "")

    def fetch(self, ticket: str, node: int) -> Reply | None:
        """Return the reply to a message once it has arrived; accept none from another node.

        Replies are pulled one at a time, because a node writes itself what its reply says about its origin.
        """
        for message in self.grid.pull_messages([ticket]):
            if message.has_error():
                return Reply(error=f"failed ({message.error.reason or message.error.code})")
            source, answered = message.metadata.src_node_id, message.metadata.reply_to_message_id
            if (source, answered) != (node, ticket) and source != FLOWER:
                return Reply(error="forged: the reply claims to be from another node, or to another message")
            try:
                return from_records(message.content)
            except Exception as error:  # a node may send anything
                return Reply(error=f"sent something that is not an answer ({type(error).__name__})")
        return None


def to_records(reply: Reply) -> RecordDict:
    """Return a message or a reply as Flower's records."""
    arrays = {f"{number:06d}": Array(array) for number, array in enumerate(reply.arrays)}
    header = ConfigRecord({"text": reply.text, "signature": reply.signature})
    return RecordDict({"header": header, "arrays": ArrayRecord(arrays)})


def from_records(content: RecordDict) -> Reply:
    """Return the message or reply in Flower's records."""
    header: Any = content["header"]
    records: Any = content["arrays"]
    text, signature = header["text"], header["signature"]
    if not isinstance(text, str) or not isinstance(signature, bytes):
        raise TypeError("a header holds a text and a signature")
    arrays = tuple(records[name].numpy() for name in sorted(records))
    if any(type(array) is not np.ndarray for array in arrays):
        raise TypeError("a record holds plain arrays")
    return Reply(text, signature, arrays)
