"""Errors: every message says what is wrong, what it got, what it wants and where.

A command that ends in an :class:`InputError` exits with code 2, any other
:class:`FedstrataError` with code 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TypeGuard


class FedstrataError(Exception):
    """Anything fedstrata refuses or gives up on; the message is meant for a person."""

    exit_code = 1


class InputError(FedstrataError, ValueError):
    """Something the caller passed is wrong: a name, a value, a file."""

    exit_code = 2


class MissingData(InputError):
    """A file of a data set is not in the data directory."""


class Diverged(FedstrataError):
    """Training produced NaN or infinity; the last good checkpoint is kept."""


def invalid(what: str, got: object, wants: str, where: str = "", choices: Iterable[str] = ()) -> InputError:
    """Build the one error template: ``The {what} must be {wants}. Got {got}.``, and the nearest of ``choices``."""
    return InputError(f"The {what} must be {wants}. Got {got!r}.{_nearest(got, choices)}{_place(where)}")


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether something is a number, and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def unknown(kind: str, name: object, known: Iterable[str], where: str = "") -> InputError:
    """Build the error for a name that does not exist: lists the known ones and suggests the nearest."""
    names = sorted(known)
    listed = ", ".join(names) or "none"
    return InputError(f"Unknown {kind} {name!r}.{_nearest(name, names)} Known: {listed}.{_place(where)}")


@contextmanager
def within(where: str, kind: type[FedstrataError] = InputError) -> Iterator[None]:
    """Add ``where`` to the message of every error of this ``kind`` that the block raises."""
    try:
        yield
    except kind as error:
        raise type(error)(f"{error}{_place(where)}") from None


def _nearest(name: object, known: Iterable[str]) -> str:
    near = get_close_matches(str(name), list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _place(where: str) -> str:
    return f" ({where})" if where else ""
