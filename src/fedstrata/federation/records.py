"""Packets as Flower's records, on the server and on nodes of either kind.

Flower stores and fetches every record of a message by a request of its own. So a packet is one record, or, if its
arrays are large, one for the header and one for each piece of the arrays; nodes that get equal pieces share them.
"""

from __future__ import annotations

from typing import Any

from flwr.app import ConfigRecord, RecordDict

from fedstrata.federation.packet import Packet

SMALL, PIECE = 1 << 16, 4 << 20
"""Arrays of at most ``SMALL`` bytes are in the record of the header; larger ones are in pieces of ``PIECE`` bytes."""

MOST_BYTES = 1 << 31
"""The largest message that a node takes."""

HEADER = "header"


class TooLarge(ValueError):
    """A message has more bytes than are allowed; ``size`` says how many."""

    def __init__(self, size: int) -> None:
        super().__init__(f"{size:,} bytes")
        self.size = size


def to_records(packet: Packet) -> RecordDict:
    """Return a packet as Flower's records."""
    body, small = packet.body, len(packet.body) <= SMALL
    starts = () if small else range(0, len(body), PIECE)
    pieces = {f"arrays-{start // PIECE:06d}": ConfigRecord({"bytes": body[start : start + PIECE]}) for start in starts}
    header = ConfigRecord({"text": packet.text, "signature": packet.signature, "pieces": len(pieces)})
    header["bytes"] = body if small else b""
    return RecordDict({HEADER: header, **pieces})


def from_records(content: RecordDict, most: int) -> Packet:
    """Return the packet in Flower's records; raise if there is none, :class:`TooLarge` above ``most`` bytes."""
    header: Any = content[HEADER]
    text, signature = header["text"], header["signature"]
    if not isinstance(text, str) or not isinstance(signature, bytes):
        raise TypeError("a message must have a text and a signature")
    if "pieces" not in header:  # of an earlier format, as its text says
        return Packet(text[:most], signature)
    number = header["pieces"]
    if type(number) is not int or number + 1 != len(content):
        raise ValueError("a message must have the pieces that it announces, and no other records")
    named: list[Any] = [header, *(content[f"arrays-{k:06d}"] for k in range(number))]
    pieces = [record["bytes"] for record in named]
    if not all(isinstance(piece, bytes) for piece in pieces):
        raise TypeError("the arrays of a message must be bytes")
    size = len(text) + sum(map(len, pieces))
    if size > most:
        raise TooLarge(size)
    return Packet(text, signature, b"".join(pieces))
