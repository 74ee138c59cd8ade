"""Atomic writes, and reads whose errors name the file."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedstrata.core.errors import InputError

Row = dict[str, Any]


def write_atomically(path: Path, content: bytes, durable: bool = True) -> None:
    """Write a file atomically; ``durable`` syncs it to disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)
    if durable:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of interrupted :func:`write_atomically` calls; nobody else may write to the folder."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a .jsonl file, without a line that a kill cut off."""
    rows: list[Row] = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write a .jsonl file with these rows."""
    write_atomically(path, "".join(map(_line, rows)).encode())


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Append rows to a .jsonl file."""
    with path.open("a") as file:
        file.write("".join(map(_line, rows)))


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; raise an :class:`InputError` that says where it is invalid."""
    try:
        return tomllib.loads(path.read_text())
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
