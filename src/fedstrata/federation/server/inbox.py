"""Checks of what arrives. A node may be faulty or hostile, so nothing is used before it was checked here."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from fedstrata.clients.channel import Channel
from fedstrata.clients.channel.channel import FlatAnswer
from fedstrata.clients.channel.parcels import PARCELS
from fedstrata.core.errors import InputError, is_number
from fedstrata.federation import keys, wire
from fedstrata.federation.messages import Reply
from fedstrata.federation.wire import Refused
from fedstrata.training.metrics.evaluation import POOLED

ANSWER_DTYPES = ("float32", "float64", "int64")
"""The dtypes that an answer may have before it is packed for a channel."""

MOST_CLASSES, MOST_ROWS = 1 << 16, 10**8
"""Larger numbers of classes and samples are not believed."""

LARGEST_MEASURE = 1e30
"""Measures beyond this are dropped."""


@dataclass(frozen=True)
class Message:
    """A reply that is the node's own, and to the right call. What it says is still unchecked."""

    header: dict[str, Any]
    arrays: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Delivery:
    """A client's answer, checked.

    value:  tensors [1, ...].
    layout: what must be the same for all clients, as text.
    sent:   the bytes that were sent.
    kept:   whether the client kept something.
    """

    value: Any
    layout: str
    samples: int
    steps: int
    sent: int
    kept: bool


def verify(reply: Reply, public: str, nonce: str, limit: int) -> Message:
    """Return a reply of the owner of this public key, to the call with this nonce; refuse any other."""
    if reply.error:
        raise Refused("forged" if reply.error.startswith("forged") else "error", reply.error)
    size = sum(a.nbytes for a in reply.arrays) + len(reply.text)
    if size > limit:
        raise Refused("size", f"answered with {size:,} bytes, more than {limit:,}")
    if not keys.is_signed(public, reply.signature, wire.digest(reply.text, reply.arrays)):
        raise Refused("forged", "answered without its signature")
    try:
        header = json.loads(reply.text)
    except (ValueError, RecursionError):
        raise Refused("type", "answered with a header that is not JSON") from None
    if not isinstance(header, dict):
        raise Refused("type", "answered with a header that is not a table")
    if header.get("nonce") != nonce:
        raise Refused("stale", "answered an earlier call")
    other = wire.mismatch(header, "the node", "the server")
    if other:
        raise Refused("error", other)
    if header.get("silent") is True:  # a fault made on purpose
        raise Refused("silent", "did not answer")
    if "error" in header:
        raise Refused("error", f"failed: {header['error']} (details are in the node's log)")
    return Message(header, reply.arrays)


# --- answers ----------------------------------------------------------------------------------------------------------


def read_answer(message: Message, channel: Channel | None, largest: int) -> Delivery:
    """Check a client's answer, and unpack it if it was packed for ``channel``.

    largest: how many bytes the unpacked answer may have.
    """
    header, form = message.header, message.header.get("form")
    value = wire.unpack(form, message.arrays)
    if wire.array_numbers(form) != list(range(len(message.arrays))):
        raise Refused("type", "sent arrays that belong nowhere, or in two places")
    if channel is not None:
        form = header.get("like")
        value = _unpacked(channel, header.get("names"), value, _announced(form, largest))
    leaves = tree_leaves(value)
    if not leaves:
        raise Refused("shape", "sent an empty answer")
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or len(leaf) != 1:
            raise Refused("shape", "sent an answer that is not that of one client")
    samples, steps, kept = header.get("samples"), header.get("steps"), header.get("kept")
    if not _is_count(samples) or not _is_count(steps) or not isinstance(kept, bool):
        raise Refused("type", "did not say how many samples and steps it took, and whether it kept something")
    sent = sum(a.nbytes for a in message.arrays)
    return Delivery(value, json.dumps(wire.layout(form), sort_keys=True), samples, steps, sent, kept)


def _announced(form: Any, largest: int) -> FlatAnswer:
    """Return an answer of the form that a client announced, of zeros."""
    like = _zeros(form, largest)
    leaves = tree_leaves(like)
    if not leaves:
        raise Refused("shape", "sent an empty answer")
    if sum(leaf.nbytes for leaf in leaves) > largest:
        raise Refused("size", "announced an answer that is too large")
    return FlatAnswer(like)


def _zeros(form: Any, largest: int, depth: int = 0) -> Any:
    """Return zeros of a form, each tensor with at most ``largest`` entries; they take no memory."""
    if isinstance(form, list) and depth <= wire.DEEPEST and len(form) <= wire.WIDEST:
        return tuple(_zeros(child, largest, depth + 1) for child in form)
    good = isinstance(form, dict) and set(form) == {"array", "shape", "dtype"} and form["dtype"] in ANSWER_DTYPES
    shape = form["shape"] if good else None
    if not isinstance(shape, list) or not all(map(_is_count, shape)) or shape[:1] != [1]:
        raise Refused("type", "announced an answer that is malformed")
    if math.prod(shape) > largest:
        raise Refused("size", "announced an answer that is too large")
    return torch.zeros((), dtype=wire.DTYPES[form["dtype"]]).expand(shape)


def _unpacked(channel: Channel, names: Any, value: Any, like: FlatAnswer) -> Any:
    """Return the answer in a parcel, after a check of every part of it."""
    kind, n, dtype = PARCELS[channel.compress], like.updates.shape[1], like.updates.dtype
    layout = kind.layout(n, dtype, channel)
    if names != list(layout) or not isinstance(value, tuple) or len(value) != len(layout):
        raise Refused("type", "answered through another channel than the run's")
    tensors = dict(zip(layout, value, strict=True))
    for name, (shape, wanted) in layout.items():
        tensor = tensors[name]
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != wanted:
            raise Refused("type", f"sent {name} that are not of {wanted}")
        if tensor.shape != (1, *shape):
            raise Refused("shape", f"sent {name} of shape {tuple(tensor.shape)} instead of {(1, *shape)}")
    try:
        return like.restore(kind(tensors, n).unpack())
    except (RuntimeError, IndexError):  # entries at places that do not exist
        raise Refused("shape", "sent a parcel that cannot be unpacked") from None


def usual_layout(layouts: Sequence[str], shapes: Sequence[list[int]]) -> str:
    """Return the layout of most answers; of two that are equally frequent, one with only the message's ``shapes``."""

    def fits(layout: str) -> bool:
        return all(leaf["shape"] in shapes for leaf in _leaves(json.loads(layout)))

    return max(sorted(set(layouts)), key=lambda layout: (layouts.count(layout), fits(layout)), default="")


def _leaves(layout: Any) -> list[dict[str, Any]]:
    if isinstance(layout, list):
        return [leaf for child in layout for leaf in _leaves(child)]
    return [layout] if isinstance(layout, dict) else []


# --- what nodes say of their data -------------------------------------------------------------------------------------


def read_description(message: Message, name: str) -> dict[str, Any]:
    """Return what a node, called ``name``, says of its data."""
    header = message.header
    shapes: Any = header.get("shapes")
    dtypes: Any = header.get("dtypes")
    good = isinstance(shapes, list) and isinstance(dtypes, list) and len(shapes) == len(dtypes) == 2
    good = good and all(isinstance(shape, list) and all(map(_is_count, shape)) for shape in shapes)
    good = good and all(isinstance(dtype, str) and dtype in wire.DTYPES for dtype in dtypes)
    for field, most in (("classes", MOST_CLASSES), ("rows", MOST_ROWS)):
        count = header.get(field)
        good = good and _is_count(count) and count <= most
    if not good:
        raise InputError(f"{name} did not say what its data look like. Got {str(header)[:300]!r}.")
    return {field: header[field] for field in ("shapes", "dtypes", "classes", "rows")}


def read_measures(message: Message) -> tuple[int, dict[str, float]]:
    """Return on how many samples a node measured, and its measures; anything else it sent is dropped."""
    rows, measures = message.header.get("rows"), message.header.get("measures")
    if not _is_count(rows) or not rows or not isinstance(measures, dict):
        return 0, {}
    numbers = {name: value for name, value in measures.items() if name in POOLED and is_number(value)}
    return rows, {name: float(value) for name, value in numbers.items() if abs(value) <= LARGEST_MEASURE}


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31
