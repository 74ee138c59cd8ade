"""What is sent in a secure sum: for each of some clients, one row of bytes. Everything that arrives is checked."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

from fedstrata.core.errors import FedstrataError
from fedstrata.federation.secure.fields import SHARE
from fedstrata.federation.secure.masks import KEY, TAG
from fedstrata.federation.wire import Refused

_HALF = 66
SIGNATURE = 2 * _HALF
"""The bytes of a signature as it is sent: two numbers, large enough for every curve of a node's key."""

ADVERT = 2 * KEY + SIGNATURE
"""The bytes of a node's two public keys and its signature of them."""

SEALED = 2 * SHARE + TAG
"""The bytes of the two shares that a node sends to another, encrypted."""

MOST_CLIENTS = 1 << 16
"""The largest number of clients in a sum."""

Rows = dict[int, bytes]
"""A row of bytes for each of some clients."""


class SecureError(FedstrataError):
    """A node refuses to go on with a secure sum."""


@dataclass(frozen=True)
class Session:
    """Which sum a message belongs to: the run, the exchange, and the attempt. Keys and masks are for one session.

    threshold: how many nodes must take part to the end, and how many shares recover a secret.
    """

    run: str
    round: int
    exchange: int
    attempt: int
    threshold: int

    @property
    def label(self) -> bytes:
        """The session in bytes, for signatures and keys."""
        return json.dumps({"secure sum": 1, **asdict(self)}, sort_keys=True).encode()


@dataclass(frozen=True)
class Advert:
    """The public keys of a node for one session, and its signature of them.

    mask_key:  for the masks that it shares with each peer.
    share_key: for the encryption of shares.
    """

    mask_key: bytes
    share_key: bytes
    signature: bytes

    @property
    def row(self) -> bytes:
        """The advert as it is sent."""
        return self.mask_key + self.share_key + self.signature

    @staticmethod
    def of(row: bytes) -> Advert:
        """Return the advert in a row."""
        return Advert(row[:KEY], row[KEY : 2 * KEY], row[2 * KEY :])

    def signed(self, session: Session, client: int) -> bytes:
        """The bytes that a client signs."""
        return _content(b"keys", session.label, client.to_bytes(8, "big"), self.mask_key, self.share_key)


def transcript(session: Session, adverts: Mapping[int, Advert]) -> bytes:
    """Return a hash of the session and of everybody's keys, to which all later messages are bound."""
    parts = (
        client.to_bytes(8, "big") + adverts[client].mask_key + adverts[client].share_key for client in sorted(adverts)
    )
    return hashlib.sha256(_content(b"transcript", session.label, *parts)).digest()


def survivors_signed(bound: bytes, survivors: Iterable[int]) -> bytes:
    """Return the bytes that a client signs to agree with the set of survivors; ``bound`` is the transcript."""
    return _content(b"survivors", bound, *(client.to_bytes(8, "big") for client in sorted(survivors)))


def purpose(kind: bytes, *clients: int) -> bytes:
    """Return the purpose of a key between clients, in this order."""
    return _content(kind, *(client.to_bytes(8, "big") for client in clients))


def _content(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


# --- signatures -------------------------------------------------------------------------------------------------------


def fixed_signature(signature: bytes) -> bytes:
    """Return an ECDSA signature in a fixed number of bytes."""
    r, s = decode_dss_signature(signature)
    return r.to_bytes(_HALF, "big") + s.to_bytes(_HALF, "big")


def usual_signature(fixed: bytes) -> bytes:
    """Return a signature of :func:`fixed_signature` in its usual form."""
    return encode_dss_signature(int.from_bytes(fixed[:_HALF], "big"), int.from_bytes(fixed[_HALF:], "big"))


# --- rows on the wire -------------------------------------------------------------------------------------------------


def pack_rows(rows: Mapping[int, bytes], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the clients and their rows of ``size`` bytes as tensors, ordered by client."""
    clients = sorted(rows)
    content = np.frombuffer(b"".join(rows[client] for client in clients), np.uint8).reshape(len(clients), size)
    return torch.tensor(clients, dtype=torch.int64), torch.from_numpy(content.copy())


def read_rows(content: Any, size: int, what: str) -> Rows:
    """Check what :func:`pack_rows` returned, and return it; raise if it is anything else. ``what`` names the rows."""
    good = isinstance(content, tuple) and len(content) == 2 and all(isinstance(t, torch.Tensor) for t in content)
    if not good:
        raise Refused("type", f"sent {what} that are not two tensors")
    clients, rows = content
    if clients.dtype != torch.int64 or rows.dtype != torch.uint8:
        raise Refused("type", f"sent {what} of {clients.dtype} and {rows.dtype}")
    if clients.dim() != 1 or len(clients) > MOST_CLIENTS or tuple(rows.shape) != (len(clients), size):
        raise Refused("shape", f"sent {what} of shapes {tuple(clients.shape)} and {tuple(rows.shape)}")
    numbers = clients.tolist()
    if any(number < 0 for number in numbers) or any(a >= b for a, b in itertools.pairwise(numbers)):
        raise Refused("type", f"sent {what} of clients that are not different, and in order")
    array = rows.contiguous().numpy()
    return {number: array[k].tobytes() for k, number in enumerate(numbers)}
