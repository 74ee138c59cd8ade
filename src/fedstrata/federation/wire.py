"""What crosses the network: arrays and JSON, signed. Never code, never pickle.

A message or an answer is a nested tuple of tensors and plain numbers. On the wire it is a list of arrays and a *form*,
a JSON text that says where they belong. Everything that arrives is checked before it is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fedstrata.core.errors import FedstrataError

DTYPES: dict[str, torch.dtype] = {
    str(kind).removeprefix("torch."): kind
    for kind in (
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
"""The kinds of numbers that may cross."""

LONGEST = 500
"""How many characters of what is wrong with a reply are told."""


class Refused(FedstrataError):
    """Something arrived that cannot be used; ``kind`` says in a word what is wrong with it."""

    def __init__(self, kind: str, detail: str) -> None:
        plain = "".join(c if c.isprintable() else " " for c in detail[:LONGEST])  # a node may have written it
        super().__init__(plain)
        self.kind, self.detail = kind, plain


def taken_apart(tree: Any) -> tuple[Any, list[np.ndarray]]:
    """Return a tree's form and its arrays."""
    arrays: list[np.ndarray] = []

    def form(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            arrays.append(np.ascontiguousarray(node.detach().cpu().numpy()))
            return {
                "array": len(arrays) - 1,
                "shape": list(node.shape),
                "dtype": str(node.dtype).removeprefix("torch."),
            }
        if isinstance(node, tuple | list):
            return [form(child) for child in node]
        if node is None or isinstance(node, bool | int | float | str):
            return {"value": node}
        raise TypeError(f"A {type(node).__name__} cannot be sent: tensors, numbers and tuples of them can.")

    return form(tree), arrays


def put_together(form: Any, arrays: Sequence[np.ndarray], depth: int = 0) -> Any:
    """Return the tree from its form and arrays; a tensor is a copy of its own."""
    if isinstance(form, list):
        if depth > 8 or len(form) > 4096:
            raise Refused("type", "it is nested too deeply, or has too many parts")
        return tuple(put_together(child, arrays, depth + 1) for child in form)
    if isinstance(form, dict) and set(form) == {"value"}:
        value = form["value"]
        if value is None or isinstance(value, bool | int | float | str):
            return value
    if isinstance(form, dict) and set(form) == {"array", "shape", "dtype"}:
        index, shape, dtype = form["array"], form["shape"], form["dtype"]
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(arrays):
            raise Refused("type", f"there is no array number {index!r}")
        array = arrays[index]
        if not isinstance(dtype, str) or dtype not in DTYPES or str(array.dtype) != dtype:
            raise Refused("type", f"an array is of {array.dtype}, and was announced as {dtype!r}")
        if list(array.shape) != shape:
            raise Refused("shape", f"an array has the shape {list(array.shape)}, and was announced with {shape!r}")
        return torch.from_numpy(np.array(array))
    raise Refused("type", "the form of the message is not one")


def used(form: Any) -> list[int]:
    """Return the numbers of the arrays that a form holds, in their order; each as often as it is there."""
    if isinstance(form, list):
        return sorted(index for child in form for index in used(child))
    return [form["array"]] if "array" in form else []


def forms_only(form: Any) -> Any:
    """Return what two answers of the same kind have in common: the form without the first axis of its arrays."""
    if isinstance(form, list):
        return [forms_only(child) for child in form]
    if isinstance(form, dict) and "array" in form:
        return {"shape": form["shape"][1:], "dtype": form["dtype"]}
    return "value"


def digest(text: str, arrays: Sequence[np.ndarray]) -> bytes:
    """Return what a signature signs: a hash of the text and of every array's kind, shape and bytes."""
    total = hashlib.sha256()
    for part in (text.encode(), *(piece for a in arrays for piece in (_head(a), a.tobytes()))):
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.digest()


def _head(array: np.ndarray) -> bytes:
    return json.dumps([str(array.dtype), list(array.shape)]).encode()
