"""Atomic writes, and reads whose errors name the file."""

from __future__ import annotations

import json
import os
import tomllib
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from fedstrata.core.errors import FedstrataError, InputError, listed

Row = dict[str, Any]


def write_atomically(path: Path, content: bytes, durable: bool = True) -> None:
    """Write a file atomically; ``durable`` syncs it to disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
        if durable:
            _sync(path.parent)
    except OSError as error:
        _cannot_write(path, error, temporary)


def _cannot_write(path: Path, error: OSError, temporary: Path | None = None) -> NoReturn:
    """Raise an error that names the file; an earlier version of it is unharmed."""
    if temporary is not None:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    raise FedstrataError(f"The file {path} cannot be written: {error.strerror or error}.") from error


def sync(path: Path) -> None:
    """Sync an existing file and its directory entry to disk; do nothing if the file does not exist."""
    if path.exists():
        _sync(path)
        _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of interrupted :func:`write_atomically` calls; no other process may use the folder."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def read_rows(path: Path, *whole: str) -> list[Row]:
    """Return the rows of a .jsonl file, each a table that has whole numbers under the keys ``whole``.

    A last line that was cut off when the process was killed is left out; any other line that is not such a row is left
    out with a warning.
    """
    rows: list[Row] = []
    bad: list[str] = []
    content = path.read_bytes() if path.exists() else b""
    *lines, rest = content.split(b"\n")
    for number, line in enumerate([*lines, rest] if rest else lines, 1):
        row = _row(line)
        if row is not None and all(isinstance(row.get(key), int) for key in whole):
            rows.append(row)
        elif number <= len(lines):
            bad.append(str(number))
    if bad:
        what = f"Line {bad[0]} of {path} is" if len(bad) == 1 else f"Lines {listed(bad)} of {path} are"
        warnings.warn(f"{what} damaged and left out.", stacklevel=2)
    return rows


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # a UnicodeDecodeError is a ValueError too
        return None
    return row if isinstance(row, dict) else None


def write_rows(path: Path, rows: Iterable[Row], allow_nan: bool = False) -> None:
    """Write a .jsonl file with these rows; NaN and infinity are errors unless allowed."""
    write_atomically(path, _lines(rows, allow_nan).encode())


def append_rows(path: Path, rows: Iterable[Row], allow_nan: bool = False) -> None:
    """Append rows to a .jsonl file; NaN and infinity are errors unless allowed."""
    lines = _lines(rows, allow_nan)
    try:
        with path.open("a") as file:
            file.write(lines)
    except OSError as error:
        _cannot_write(path, error)


def _lines(rows: Iterable[Row], allow_nan: bool) -> str:
    return "".join(json.dumps(row, allow_nan=allow_nan) + "\n" for row in rows)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; raise an :class:`InputError` that says where it is invalid."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin a file with a byte order mark
    except FileNotFoundError:
        raise InputError(f"There is no file {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The file {path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"The file {path} is not valid TOML: {error}") from None


def flatten(tables: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as dotted keys."""
    out: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, dict):
            out.update(flatten(value, f"{prefix}{key}."))
        else:
            out[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return out
