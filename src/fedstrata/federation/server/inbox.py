"""Checks of replies. A node may be faulty or hostile, so nothing it sends is used before it is checked here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch

from fedstrata.clients.channel import Channel
from fedstrata.clients.channel.channel import FlatAnswer
from fedstrata.clients.channel.parcels import PARCELS
from fedstrata.clients.faults import FaultKind
from fedstrata.core.errors import InputError, is_finite, is_number
from fedstrata.core.trees import tree_flatten, tree_leaves
from fedstrata.federation import keys, wire
from fedstrata.federation.wire import Refused, Reply
from fedstrata.training.metrics.catalogue import POOLED

ANSWER_DTYPES = ("float32", "float64", "int64")
"""The dtypes that an answer may have before it is packed for the channel."""

MOST_CLASSES, MOST_ROWS, MOST_NUMBERS, MOST_ARRAYS = 1 << 16, 10**8, 1 << 28, 16
"""The largest numbers of classes, of samples, and of numbers and arrays in a sample that a node may report."""

LARGEST_MEASURE = 1e30
"""A node may report no loss with a larger absolute value."""


@dataclass(frozen=True)
class Verified:
    """A reply that was signed by the right node, for the right call. Its content is still unchecked."""

    header: dict[str, Any]
    arrays: tuple[np.ndarray, ...]


Layout = tuple[str, tuple[tuple[tuple[int, ...], str], ...]]
"""The nesting of an answer, and the shape and dtype of one client's row of each tensor: the same for all clients."""


@dataclass(frozen=True)
class CheckedAnswer:
    """A client's answer after all checks.

    value: tensors [1, ...].
    sent:  the number of bytes sent.
    kept:  whether the client kept something.
    """

    value: Any
    layout: Layout
    samples: int
    steps: int
    sent: int
    kept: bool


def verify(reply: Reply, public: str, nonce: str, limit: int) -> Verified:
    """Accept a reply signed by the owner of this public key, for the call with this nonce; raise for any other.

    limit: the largest reply in bytes.
    """
    if reply.error:
        raise Refused(reply.kind, reply.error)
    size = sum(a.nbytes for a in reply.arrays) + len(reply.text)
    if size > limit:
        raise Refused("size", f"answered with {size:,} bytes, more than {limit:,}")
    if not keys.is_signed(public, reply.signature, wire.digest(reply.text, reply.arrays)):
        raise Refused("forged", "answered without a valid signature")
    try:
        header = json.loads(reply.text)
    except (ValueError, RecursionError):
        raise Refused("type", "answered with a header that is not JSON") from None
    if not isinstance(header, dict):
        raise Refused("type", "answered with a header that is not a table")
    if header.get("nonce") != nonce:
        raise Refused("stale", "answered an earlier call")
    mismatch = wire.mismatch(header, "the node", "the server")
    if mismatch:
        raise Refused("error", mismatch)
    if header.get("silent") is True:  # an injected fault
        raise Refused("silent", "did not answer")
    failures: tuple[FaultKind, ...] = ("error", "lost")
    for kind in failures:
        if kind in header:
            raise Refused(kind, f"failed: {header[kind]} (details are in the node's log)")
    return Verified(header, reply.arrays)


# --- answers ----------------------------------------------------------------------------------------------------------


def read_answer(reply: Verified, channel: Channel | None, largest: int) -> CheckedAnswer:
    """Check a client's answer, and unpack it if it was packed for ``channel``.

    largest: the largest size of the unpacked answer in bytes.
    """
    header, form = reply.header, reply.header.get("form")
    value = wire.unpack(form, reply.arrays)
    if wire.array_numbers(form) != list(range(len(reply.arrays))):
        raise Refused("type", "sent an array that its form does not use exactly once")
    if channel is not None:
        value = _unpacked(channel, header.get("names"), value, FlatAnswer(announced(header.get("like"), largest)))
    leaves = tree_leaves(value)
    if not leaves:
        raise Refused("shape", "sent an empty answer")
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or len(leaf) != 1:
            raise Refused("shape", "sent an answer without exactly one row per tensor")
    samples, steps, kept = header.get("samples"), header.get("steps"), header.get("kept")
    if not is_count(samples) or not is_count(steps) or not isinstance(kept, bool):
        raise Refused("type", "did not report its numbers of samples and steps, or whether it kept something")
    sent = sum(a.nbytes for a in reply.arrays)
    return CheckedAnswer(value, layout_of(value), samples, steps, sent, kept)


def layout_of(value: Any) -> Layout:
    """Return the layout of an answer."""
    leaves, nesting = tree_flatten(value)
    return str(nesting), tuple((tuple(leaf.shape[1:]), str(leaf.dtype)) for leaf in leaves)


def announced(form: Any, largest: int) -> Any:
    """Return zeros in the form that a client announced for its answer; they take no memory."""
    like = _zeros(form, largest)
    leaves = tree_leaves(like)
    if not leaves:
        raise Refused("shape", "sent an empty answer")
    if sum(leaf.nbytes for leaf in leaves) > largest:
        raise Refused("size", "announced an answer that is too large")
    return like


def _zeros(form: Any, largest: int, depth: int = 0) -> Any:
    """Return zeros in a form, each tensor with at most ``largest`` entries; they take no memory."""
    if isinstance(form, list) and depth <= wire.DEEPEST and len(form) <= wire.WIDEST:
        return tuple(_zeros(child, largest, depth + 1) for child in form)
    good = isinstance(form, dict) and set(form) == {"array", "shape", "dtype"} and form["dtype"] in ANSWER_DTYPES
    shape = form["shape"] if good else None
    if not isinstance(shape, list) or not all(map(is_count, shape)) or shape[:1] != [1]:
        raise Refused("type", "announced a malformed answer")
    if math.prod(shape) > largest:
        raise Refused("size", "announced an answer that is too large")
    return torch.zeros((), dtype=wire.DTYPES[form["dtype"]]).expand(shape)


def _unpacked(channel: Channel, names: Any, value: Any, like: FlatAnswer) -> Any:
    """Check every tensor of a packed answer, and unpack it."""
    packing, n, dtype = PARCELS[channel.compress], like.updates.shape[1], like.updates.dtype
    layout = packing.layout(n, dtype, channel)
    if names != list(layout) or not isinstance(value, tuple) or len(value) != len(layout):
        raise Refused("type", "did not pack its answer for the channel of the run")
    tensors = dict(zip(layout, value, strict=True))
    for name, (shape, wanted) in layout.items():
        tensor = tensors[name]
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != wanted:
            raise Refused("type", f"sent {name} that are not {wanted}")
        if tensor.shape != (1, *shape):
            raise Refused("shape", f"sent {name} of shape {tuple(tensor.shape)} instead of {(1, *shape)}")
    try:
        return like.restore(packing(tensors, n).unpack())
    except (RuntimeError, IndexError):  # entries at positions that do not exist
        raise Refused("shape", "sent a packed answer that cannot be unpacked") from None


def usual_layout(layouts: Sequence[Layout], shapes: Sequence[tuple[int, ...]]) -> Layout | None:
    """Return the most frequent layout; a tie goes to one that has only shapes of the message, ``shapes``."""

    def fits(layout: Layout) -> bool:
        return all(shape in shapes for shape, _ in layout[1])

    return max(sorted(set(layouts)), key=lambda layout: (layouts.count(layout), fits(layout)), default=None)


# --- descriptions and measures ----------------------------------------------------------------------------------------


def read_description(reply: Verified, name: str) -> dict[str, Any]:
    """Check a node's description of its data; ``name`` is the node's name."""
    header = reply.header
    if not is_description(header):
        raise InputError(f"{name} did not describe its data properly. Got {str(header)[:300]!r}.")
    return {field: header[field] for field in ("shapes", "dtypes", "classes", "rows")}


def is_description(table: Any) -> bool:
    """Whether a value is a table that describes a node's data."""
    if not isinstance(table, dict):
        return False
    shapes, dtypes = table.get("shapes"), table.get("dtypes")
    if not isinstance(shapes, list) or not isinstance(dtypes, list):
        return False
    if not 2 <= len(shapes) == len(dtypes) <= MOST_ARRAYS:
        return False
    good = all(isinstance(shape, list) and all(map(is_count, shape)) for shape in shapes)
    good = good and sum(math.prod(max(1, size) for size in shape) for shape in shapes) <= MOST_NUMBERS
    good = good and all(isinstance(dtype, str) and dtype in wire.DTYPES for dtype in dtypes)
    for field, most in (("classes", MOST_CLASSES), ("rows", MOST_ROWS)):
        count = table.get(field)
        good = good and is_count(count) and count <= most
    return good


class NodeMeasures(NamedTuple):
    """What a node measured: the number of its samples, and its measures.

    pairs:   how many pairs of a positive and a negative it has; 0 if it does not tell.
    ordered: how many of them are in the right order, with ties counted half.
    """

    rows: int = 0
    measures: Mapping[str, float] = {}
    pairs: int = 0
    ordered: float = 0.0


def read_measures(reply: Verified) -> NodeMeasures:
    """Return what a node measured; raise if it cannot be, and drop measures of other names."""
    rows, measures = reply.header.get("rows"), reply.header.get("measures")
    if not is_count(rows) or not isinstance(measures, dict):
        raise Refused("type", "did not report its measures, and on how many rows")
    told = {name: value for name, value in measures.items() if name in POOLED}
    for name, value in told.items():
        if not _is_possible(name, value):
            shown = f"{value:g}" if is_finite(value) else "no finite number"
            raise Refused("type", f"reported an impossible {name}: {shown}")
    if not rows:
        return NodeMeasures()
    numbers = {name: float(value) for name, value in told.items()}
    pairs, ordered = reply.header.get("pairs"), reply.header.get("ordered")
    if pairs is None:
        return NodeMeasures(rows, numbers)
    if not is_count(pairs) or pairs > rows * rows // 4 or not is_number(ordered) or not 0 <= ordered <= pairs:
        raise Refused("type", "reported an impossible number of pairs")
    if abs(numbers.get("auc", ordered / max(1, pairs)) * pairs - ordered) > 1:
        raise Refused("type", "reported an AUC and pairs that contradict each other")
    return NodeMeasures(rows, numbers, pairs, float(ordered))


def _is_possible(name: str, value: Any) -> TypeGuard[float]:
    """Whether a measure can have this value: accuracies and AUCs lie between 0 and 1."""
    share = "loss" not in name
    return is_number(value) and (0 <= value <= 1 if share else abs(value) <= LARGEST_MEASURE)


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a value is a whole number that a node may report."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31
