"""Random cases from a fixed seed: made, run within a time limit, and named if they fail."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest

from fedstrata.core.errors import FedstrataError

FEW, MANY = 20, 1000
SECONDS = 60
"""No case takes longer, even on a busy machine."""

COUNTS = pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.fuzz)])
CODES = (0, 1, 2, 130)

TEXTS = [
    *(
        "",
        " ",
        "x",
        "é",
        "\u202e",
        "\x1b[2J",
        "[/x]",
        "[bold",
        "]",
        "{x}",
        "%s",
        "$\\x$",
        "$a$",
        "\\",
        '"',
        "'",
        "\n",
        "../x",
    ),
    *(
        "/dev/null",
        "/dev/zero",
        "/proc/self/mem",
        "~",
        "-",
        "--",
        "-1",
        "--help",
        "=",
        "a=b",
        ".",
        "..",
        "/",
        "x" * 300,
    ),
    *(
        "nan",
        "inf",
        "1e400",
        "0x",
        "1_0",
        "None",
        "null",
        "true",
        "[]",
        "{}",
        "\ud800",
        "a\0b",
        "fedavg",
        "digits",
        "auc",
    ),
]
NUMBERS = [
    0,
    1,
    2,
    -1,
    2**31,
    2**63,
    10**18,
    10**30,
    0.0,
    -0.0,
    0.5,
    1e-320,
    1e39,
    1e300,
    -1e300,
    float("nan"),
    float("inf"),
]
VALUES = [*TEXTS, *NUMBERS, True, False, [], {}, [1], ["x", 1], [[]], {"name": "x"}, {"name": []}, {"x": {"x": {}}}]


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail if a block takes longer."""

    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"not done within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def every_case(count: int, kind: str, case: Callable[[random.Random], Any], run: Callable[[Any], None]) -> None:
    """Make and run so many cases; name the one that fails."""
    for number in range(count):
        made = case(random.Random(f"{kind} {number}"))
        try:
            with within(SECONDS):
                run(made)
        except BaseException as error:
            error.add_note(f"{kind}, case {number}: {made!r:.1000}")
            raise


def survives(run: Callable[[], Any]) -> None:
    """Run something that may raise errors of ours only."""
    with suppress(FedstrataError):
        run()


def changed(content: bytes, rng: random.Random) -> bytes:
    """Bytes with some of them changed, left out, repeated or inserted."""
    content = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        at, size = rng.randrange(len(content) + 1), rng.choice([1, 1, 2, 4, 8, 40])
        piece = bytes(rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)]) for _ in range(size))
        which = rng.randrange(5)
        if which == 0:
            content[at : at + size] = piece
        elif which == 1:
            del content[at : at + size]
        elif which == 2:
            content[at:at] = content[max(0, at - size) : at] * rng.choice([1, 2, 50])
        elif which == 3:
            content[at:at] = piece
        else:
            del content[at:]
    return bytes(content)
