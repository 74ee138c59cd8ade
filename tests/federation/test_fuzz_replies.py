"""Replies with anything in them: what the server cannot use is refused by name, and nothing else is raised."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from federation.stand_in import FEDAVG, HELD_OUT, Site, Tables
from fedstrata.clients.channel import Channel
from fedstrata.federation.server.inbox import read_answer, read_description, read_measures, verify
from fedstrata.federation.wire import Reply
from fuzzing import COUNTS, VALUES, changed, every_case, survives

Case = tuple[str, Reply]

DTYPES = ("f4", "f8", "i8", "i4", "u1", "?", "f2", ">f4", "c8", "U3", "O")


def other(value: Any, rng: random.Random) -> Any:
    """A JSON value with a part of it replaced, left out, repeated or added."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice([*value])
        which = rng.randrange(6)
        if which == 0:
            return {k: v for k, v in value.items() if k != key}
        if which == 1:
            return value | {str(rng.choice(VALUES)): rng.choice(VALUES)}
        return value | {key: other(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return rng.choice([[*value[:at], other(value[at], rng), *value[at + 1 :]], value[:at], value * 2, [value]])
    return rng.choice(VALUES)


def another_array(array: np.ndarray, rng: random.Random) -> np.ndarray:
    """An array of another shape, type or content."""
    which = rng.randrange(4)
    if which == 0:
        return array.astype(rng.choice(DTYPES))
    if which == 1:
        return np.zeros(rng.choice([(), (0,), (1, 0), (2, 3), (1, 1, 1, 1), (1, 5000)]), dtype=array.dtype)
    array = array.copy()
    array.reshape(-1)[:1] = rng.choice([np.nan, np.inf, 3e38, -1, 2**31 - 1]) if array.dtype.kind == "f" else 2**31 - 1
    return array


@COUNTS
def test_replies(count: int, sites: Callable[[Tables], Site]) -> None:
    nodes = {
        compress: sites({**FEDAVG, **HELD_OUT, "train": {"rounds": 1}, "channel": {"compress": compress}})
        for compress in ("none", "top_k", "quantise")
    }
    real = []
    for compress, own in nodes.items():
        own.serve(own.folder / "fuzzed", resume=True, pooled=False)
        real += [(compress, sent.header["kind"], own, reply) for sent, reply in zip(own.sent, own.replies, strict=True)]
    public = {name: own.public[0] for name, own in nodes.items()}

    def case(rng: random.Random) -> tuple[str, str, Site, Reply]:
        compress, kind, own, reply = rng.choice([one for one in real if one[3].text])
        header, arrays = json.loads(reply.text), list(reply.arrays)
        for _ in range(rng.choice([0, 1, 1, 2, 5])):
            header = other(header, rng)
        for _ in range(rng.choice([0, 0, 1, 2])):
            if arrays:
                at = rng.randrange(len(arrays))
                arrays[at] = another_array(arrays[at], rng)
        text = json.dumps(header)
        if rng.random() < 0.2:
            text = changed(text.encode(), rng).decode("utf-8", "replace")
        arrays = rng.choice([arrays, arrays, arrays, [*arrays, *arrays], arrays[1:]])
        signed = any(array.dtype.hasobject for array in arrays) or own.signed(0, text, arrays)
        return compress, kind, own, Reply(text, b"", tuple(arrays)) if signed is True else signed

    def run(made: tuple[str, str, Site, Reply]) -> None:
        compress, kind, _, reply = made
        channel = None if compress == "none" else Channel(compress=compress)  # type: ignore[arg-type]
        nonce = str(header.get("nonce")) if isinstance(header := _parsed(reply.text), dict) else ""
        read: Callable[[Any], Any] = {
            "work": lambda verified: read_answer(verified, channel, 1 << 20),
            "measure": read_measures,
            "describe": lambda verified: read_description(verified, "node0"),
        }[kind]
        survives(lambda: read(verify(reply, public[compress], nonce, 1 << 20)))

    every_case(count, "reply", case, run)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
