"""Cells of a table as text: which are numbers, which are dates, and which are equal."""

from __future__ import annotations

import re
import unicodedata
from datetime import UTC, datetime, timedelta
from decimal import Decimal

NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
"""A plain decimal number. A category such as 1E3 is text: it is more often a code than a thousand."""

WORDS = {"true", "false", "yes", "no"}
"""Words that are equal in any case: programs write them as they like."""

LONGEST = 80
"""Numbers with more characters are text, and longer texts are shortened in messages."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Key = str | Decimal


def key_of(value: object) -> Key:
    """Return what is equal for equal cells: hospitals write 1 and 1.0, True and true, for the same category."""
    cell = text_of(value)
    if NUMBER.fullmatch(cell) and len(cell) <= LONGEST:
        return Decimal(cell)
    return cell.lower() if cell.lower() in WORDS else cell


def is_number(cell: object) -> bool:
    """Whether a cell is a plain decimal number."""
    return isinstance(key_of(cell), Decimal)


def text_of(value: object) -> str:
    """Return a cell that a schema writes as a number or a boolean as the text it has in a file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip()


def days_of(date: str) -> float:
    """Return an ISO date, or date and time, as days since 1970-01-01 in UTC; raise a ValueError if it is none."""
    moment = datetime.fromisoformat(date)
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    return (moment - EPOCH) / timedelta(days=1)


def date_of(days: float) -> str:
    """Return days since 1970-01-01 as an ISO date, without the time of the day."""
    try:
        return (EPOCH + timedelta(days=days)).date().isoformat()
    except (OverflowError, ValueError):
        return "never"


def is_plain(text: str) -> bool:
    """Whether a text has only characters that can be seen, and spaces: no control codes, line breaks or overrides."""
    return all(c.isprintable() or unicodedata.category(c) == "Zs" for c in text)


def shown(text: object) -> str:
    """Return foreign text for a message: quoted, escaped and cut."""
    cut = str(text)
    cut = cut if len(cut) <= LONGEST else f"{cut[: LONGEST - 3]}..."
    return repr(cut)
