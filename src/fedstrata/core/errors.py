"""Errors: every message says what is wrong, what was given, what is expected and where.

A command that fails with an :class:`InputError` exits with code 2; any other :class:`FedstrataError` means code 1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, TypeGuard, TypeVar

E = TypeVar("E", bound=Exception)

MANY = 60
"""An error that makes a suggestion also lists the known names if there are at most this many."""


class FedstrataError(Exception):
    """The base of all errors raised by fedstrata; the message is meant for the user."""

    exit_code = 1


class InputError(FedstrataError, ValueError):
    """Invalid input from the caller: a name, a value, a file."""

    exit_code = 2


class DataError(InputError):
    """Data that cannot be used. The message may quote them; ``public`` is what a person without the data may read."""

    def __init__(self, message: str, public: str | None = None) -> None:
        super().__init__(message)
        self.public = message if public is None else public


class MissingData(InputError):
    """A file of a data set is missing from the data directory."""


class Unsolvable(InputError):
    """The data of the clients are not enough: a single class for AUC, for example, or too few rows to hold any out."""


class Diverged(FedstrataError):
    """Training produced NaN or infinity; the last good checkpoint is kept.

    history: the rows of the evaluations before.
    """

    def __init__(self, message: str, history: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(message)
        self.history = list(history)


def invalid(what: str, got: object, wants: str, where: str = "", choices: Iterable[str] = ()) -> InputError:
    """Build an error from the template ``The {what} must be {wants}. Got {got}.``; suggest the nearest choice."""
    return InputError(f"The {what} must be {wants}. Got {got!r}.{nearest_of(got, choices)}{_in_brackets(where)}")


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number that a float can hold, and neither NaN nor infinite."""
    return is_number(value) and abs(value) <= sys.float_info.max


def listed(names: Sequence[str], most: int = 8) -> str:
    """Return names for a message: at most ``most`` of them, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def printable(text: str) -> str:
    """Return text that somebody else wrote for a message: without characters that control a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def unknown(kind: str, name: object, known: Iterable[str], where: str = "", hint: str = "") -> InputError:
    """Build the error for an unknown name, with the nearest known name, all names unless there are many, and a hint."""
    names = sorted(known)
    nearest = nearest_of(name, names)
    known_names = "" if nearest and len(names) > MANY else f" Known: {', '.join(names) or 'none'}."
    hint = f" {hint}" if hint else ""
    return InputError(f"Unknown {kind} {name!r}.{nearest}{known_names}{hint}{_in_brackets(where)}")


@contextmanager
def within(where: str, kind: type[FedstrataError] = InputError) -> Iterator[None]:
    """Add ``where`` to the message of any error of this ``kind`` raised in the block."""
    try:
        yield
    except kind as error:
        raise with_context(error, where) from None


def with_context(error: E, where: str) -> E:
    """Return a copy of an error with ``where`` added to its message; its attributes are the same."""
    copy = type(error).__new__(type(error))  # a class may require arguments other than a message
    copy.args = (f"{error}{_in_brackets(where)}",)
    vars(copy).update(vars(error))
    return copy


def nearest_of(name: object, known: Iterable[str]) -> str:
    """Return a suggestion with the nearest known name; empty if none is close."""
    near = get_close_matches(str(name), list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _in_brackets(where: str) -> str:
    return f" ({where})" if where else ""
