"""What crosses the network: arrays and JSON, never code or pickles.

A message or an answer is a nested tuple of tensors and plain values. It travels as a list of arrays and a *form*, the
JSON value that says where each array belongs. Everything that arrives is checked before it is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedstrata.core.errors import FedstrataError
from fedstrata.core.version import __version__

PROTOCOL = 2
"""The format of messages. Increase it with every change that the other side would misread."""

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
"""The dtypes that may cross."""

DEEPEST, WIDEST = 8, 4096
"""How deeply a form may be nested, and how many parts each of its levels may have."""

LONGEST = 500
"""How many characters the detail of a refusal may have."""


class Refused(FedstrataError):
    """Something arrived that cannot be used; ``kind`` says in one word why, ``detail`` in a few."""

    def __init__(self, kind: str, detail: str) -> None:
        self.kind = kind
        self.detail = "".join(c if c.isprintable() else " " for c in detail[:LONGEST])  # a node may have written it
        super().__init__(self.detail)


def stamp() -> dict[str, Any]:
    """Return what every message and reply says of its sender."""
    return {"protocol": PROTOCOL, "version": __version__}


def mismatch(header: Mapping[str, Any], sender: str, receiver: str) -> str:
    """Return why a message of another format cannot be read; empty for one of ours."""
    if header.get("protocol") == PROTOCOL:
        return ""
    version, protocol = header.get("version", "of an older version"), header.get("protocol", 1)
    return (
        f"{sender} runs fedstrata {str(version)[:40]} (message format {str(protocol)[:40]}), {receiver} fedstrata "
        f"{__version__} (message format {PROTOCOL}). Install the same version on both."
    )


def pack(tree: Any) -> tuple[Any, list[np.ndarray]]:
    """Return the form and the arrays of a tree."""
    arrays: list[np.ndarray] = []

    def form(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            arrays.append(np.ascontiguousarray(node.detach().cpu().numpy()))
            dtype = str(node.dtype).removeprefix("torch.")
            return {"array": len(arrays) - 1, "shape": list(node.shape), "dtype": dtype}
        if isinstance(node, tuple | list):
            return [form(child) for child in node]
        if node is None or isinstance(node, bool | int | float | str):
            return {"value": node}
        raise TypeError(f"A {type(node).__name__} cannot be sent: only tensors, plain values, and tuples of them.")

    return form(tree), arrays


def unpack(form: Any, arrays: Sequence[np.ndarray], depth: int = 0) -> Any:
    """Return the tree of a form and its arrays; every tensor owns its memory."""
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


def layout(form: Any) -> Any:
    """Return what the answers of all clients to one request have in common: the shapes of their rows, and dtypes."""
    if isinstance(form, list):
        return [layout(child) for child in form]
    if isinstance(form, dict) and "array" in form:
        return {"shape": form["shape"][1:], "dtype": form["dtype"]}
    return "value"


def digest(text: str, arrays: Sequence[np.ndarray]) -> bytes:
    """Return what a signature signs: a hash of the text, and of every array's dtype, shape and bytes."""
    total = hashlib.sha256()
    for part in (text.encode(), *(piece for a in arrays for piece in (_description(a), a.tobytes()))):
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.digest()


def _description(array: np.ndarray) -> bytes:
    return json.dumps([str(array.dtype), list(array.shape)]).encode()
