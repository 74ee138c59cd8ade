"""The format of messages between the server and its nodes: arrays and JSON, never code or pickles.

The server sends a :class:`Call`, a node answers with a :class:`Reply`. Their content is a nested tuple of tensors and
plain values. It is sent as a list of arrays and a *form*, the JSON value that says where each array belongs. Everything
that arrives is checked before it is used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedstrata.clients.faults import FaultKind
from fedstrata.core.errors import FedstrataError, printable
from fedstrata.core.version import __version__
from fedstrata.federation.packet import Packet, from_bytes, to_bytes

PROTOCOL = 3
"""The number of this format. Increase it with every change that the other side would misread."""

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
"""The dtypes of arrays that may be sent."""

DEEPEST, WIDEST = 8, 4096
"""How deeply a form may be nested, and how many parts each of its levels may have."""

LONGEST = 500
"""The largest number of characters in the detail of a :class:`Refused`."""

QUERY = "query:"
"""The prefix of a call's ``work`` that names a query, not a method."""

Version = tuple[int, int]
"""A version of a client's state: the round, counted from 1 (0 precedes the first), and the exchange that wrote it."""


class Refused(FedstrataError):
    """Something arrived that cannot be used; ``kind`` gives the reason in one word, ``detail`` in a few."""

    def __init__(self, kind: FaultKind, detail: str) -> None:
        self.kind = kind
        self.detail = printable(detail[:LONGEST])  # a node may have written it
        super().__init__(self.detail)


@dataclass(frozen=True)
class Call:
    """A request from the server to a node.

    kind:    "describe" (the shape of the node's data), "work" or "measure"; "spans" or "summary" (of its table); "keep"
             (work whose answer stays on the node); or a phase of a secure sum (see ``federation.secure``).
    run:     the id under which the node stores the state of this run.
    nonce:   a random number that the signed reply must repeat.
    client:  the number of the node's client among ``clients``; ``name`` is the node's name.
    classes: the number of classes in the data of all nodes.
    kept:    the version of the client's state to start from: that of the last exchange in which it kept something and
             the server accepted its answer. None if there is none yet.
    rejoins: whether the client may start without that version if it has lost it.
    oldest:  the oldest version that the run may still go back to.
    work:    the method of the algorithm to run, or a query.
    learned: the answers to the problem's queries so far.
    pool:    how many numbers the client's collections may contain, if the answers are to be pooled.
    weighting: how clients are weighted in a secure sum; ``threshold`` is how many nodes must stay to its end.
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
    rejoins: bool = False
    oldest: Version | None = None
    work: str = ""
    learned: list[list[float] | None] = dataclasses.field(default_factory=list)
    pool: int | None = None
    weighting: str = ""
    threshold: int = 0

    def text(self, form: Any) -> str:
        """Return the header of the message: this call, the form of its content, and the sender's version."""
        return json.dumps({**dataclasses.asdict(self), "form": form, **sender()})

    @staticmethod
    def read(header: Mapping[str, Any]) -> Call:
        """Return the call in a message's header."""
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
    """The reply of a node: a header with its signature, and arrays; or the text of an error, and its kind."""

    text: str = ""
    signature: bytes = b""
    arrays: tuple[np.ndarray, ...] = ()
    error: str = ""
    kind: FaultKind = "error"

    @staticmethod
    def of(packet: Packet) -> Reply:
        """Return the reply in a packet; raise if its bytes are no arrays."""
        return Reply(packet.text, packet.signature, from_bytes(packet.body))

    def packet(self) -> Packet:
        """Return the reply as bytes."""
        return Packet(self.text, self.signature, to_bytes(self.arrays))


def sender() -> dict[str, Any]:
    """Return the fields that identify the sender's version in every header."""
    return {"protocol": PROTOCOL, "version": __version__}


def mismatch(header: Mapping[str, Any], sender: str, receiver: str) -> str:
    """Return why a message in another format cannot be read; empty if it has this format."""
    if header.get("protocol") == PROTOCOL:
        return ""
    version, protocol = header.get("version", "of an older version"), header.get("protocol", 1)
    return (
        f"{sender} runs fedstrata {str(version)[:40]} (message format {str(protocol)[:40]}), but {receiver} runs "
        f"fedstrata {__version__} (message format {PROTOCOL}). Install the same version on both."
    )


def asked(call: Call, message: Any) -> bytes:
    """Return a hash of the work that a call asks for, with its message: the same for all clients of an exchange."""
    form, arrays = pack(message)
    what = [call.work, call.weighting, call.round, call.iteration, call.clients, call.classes, call.learned, form]
    return digest(json.dumps(what), arrays)


def pack(tree: Any) -> tuple[Any, list[np.ndarray]]:
    """Return the form and the arrays of a nested tuple."""
    arrays: list[np.ndarray] = []

    def form(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            arrays.append(np.asarray(node.detach().cpu().numpy(), order="C"))
            dtype = str(node.dtype).removeprefix("torch.")
            return {"array": len(arrays) - 1, "shape": list(node.shape), "dtype": dtype}
        if isinstance(node, tuple | list):
            return [form(child) for child in node]
        if node is None or isinstance(node, bool | int | float | str):
            return {"value": node}
        raise TypeError(f"A {type(node).__name__} cannot be sent: only tensors, plain values, and tuples of them.")

    return form(tree), arrays


def unpack(form: Any, arrays: Sequence[np.ndarray], depth: int = 0) -> Any:
    """Return the nested tuple that :func:`pack` packed; every tensor owns its memory."""
    if isinstance(form, list):
        if depth > DEEPEST or len(form) > WIDEST:
            raise Refused("type", "the form of the message is nested too deeply, or has too many parts")
        return tuple(unpack(child, arrays, depth + 1) for child in form)
    if isinstance(form, dict) and set(form) == {"value"}:
        value = form["value"]
        if value is None or isinstance(value, bool | int | float | str):
            return value
    if isinstance(form, dict) and set(form) == {"array", "shape", "dtype"}:
        return _tensor(form, arrays)
    raise Refused("type", "the form of the message is malformed")


def _tensor(form: dict[str, Any], arrays: Sequence[np.ndarray]) -> torch.Tensor:
    index, shape, dtype = form["array"], form["shape"], form["dtype"]
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(arrays):
        raise Refused("type", f"the message has no array number {index!r}")
    array = arrays[index]
    if not isinstance(dtype, str) or dtype not in DTYPES or str(array.dtype) != dtype:
        raise Refused("type", f"an array of {array.dtype} was announced as {dtype!r}")
    if list(array.shape) != shape:
        raise Refused("shape", f"an array of shape {list(array.shape)} was announced as {shape!r}")
    return torch.from_numpy(np.array(array))


def array_numbers(form: Any) -> list[int]:
    """Return the numbers of the arrays in a form that :func:`unpack` accepts, sorted, repetitions included."""
    if isinstance(form, list):
        return sorted(number for child in form for number in array_numbers(child))
    return [form["array"]] if "array" in form else []


def digest(text: str, arrays: Sequence[np.ndarray]) -> bytes:
    """Return the bytes that are signed: a hash of the text and of every array's dtype, shape and bytes."""
    total = hashlib.sha256()

    def add(part: bytes) -> None:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)

    add(text.encode())
    for array in arrays:
        add(json.dumps([str(array.dtype), list(array.shape)]).encode())
        add(array.tobytes())
    return total.digest()
