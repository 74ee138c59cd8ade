"""Atomic writes, and reads whose errors name the file."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tomllib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from glob import escape
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from fedstrata.core.errors import FedstrataError, InputError, invalid, is_finite, listed, nearest_of

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

Row = dict[str, Any]


def write_atomically(path: Path, content: bytes, durable: bool = True) -> None:
    """Write a file atomically; ``durable`` syncs it to disk."""
    with writing(path, durable) as file:
        file.write(content)


@contextmanager
def writing(path: Path, durable: bool = True) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of ``path`` at the end of the block; ``durable`` syncs it to disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
        if durable:
            _sync(path.parent)
    except OSError as error:
        _cannot_write(path, error)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def whole_or_nothing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` for a file or folder, which is renamed to ``path`` once it is whole.

    After an exception, nothing is left. A folder that exists may be a mount, which cannot be replaced: it is yielded as
    it is.
    """
    if path.is_dir():
        yield path
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        try:
            temporary.replace(path)
        except OSError as error:
            _cannot_write(path, error)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name a file that the block cannot write: the system's error for a full disk does not."""
    try:
        yield
    except OSError as error:
        _cannot_write(path, error)


def _cannot_write(path: Path, error: OSError) -> NoReturn:
    """Raise an error that names the file; an earlier version of the file stays intact."""
    raise FedstrataError(f"The file {path} cannot be written: {error.strerror or error}.") from error


def sync(path: Path) -> None:
    """Sync an existing file and its directory entry to disk; do nothing if the file does not exist."""
    if path.exists():
        with naming(path):
            _sync(path)
            _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def folder_at(path: str | Path, what: str = "out") -> Path:
    """Return the path of a directory; raise if none can be written there, before anything else is done."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise invalid(what, path, "the path of a directory")
    folder = Path(path)
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            folder.lstat()
        above = next(p for p in (folder, *folder.absolute().parents) if os.path.lexists(p))
        longest = os.pathconf(above, "PC_NAME_MAX") if hasattr(os, "pathconf") else 255
    except (OSError, ValueError) as error:
        raise _no_folder(folder, error) from None
    if not above.is_dir():
        raise InputError(f"{above} is a file, not a directory. Nothing was overwritten. Choose another.")
    if any(len(os.fsencode(part)) > longest for part in folder.parts):
        raise _no_folder(folder, f"A name in it is longer than {longest} bytes")
    if not os.access(above, os.W_OK | os.X_OK):
        raise _no_folder(folder, f"No permission to write in {above}")
    return folder


def make_folder(folder: Path, private: bool = False) -> None:
    """Create a directory unless it exists; raise an :class:`InputError` if that is impossible.

    private: only this user may look into it, also if it exists.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if private:
            folder.chmod(0o700)
    except (OSError, ValueError, RecursionError) as error:
        raise _no_folder(folder, error) from None


def _no_folder(folder: Path, why: Exception | str) -> InputError:
    shown = ascii(str(folder))[1:-1]
    shown = shown if len(shown) <= 200 else f"{shown[:100]}..."
    reason = why if isinstance(why, str) else getattr(why, "strerror", None) or why
    return InputError(f"The directory {shown} cannot be written: {reason}. Choose another.")


def lock(folder: Path, what: str) -> int | None:
    """Lock a directory against other processes until the handle is closed, or this process ends.

    Return the handle, or None if the file system has no locks; raise if another process has locked it.
    """
    if fcntl is None:
        return None
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise InputError(f"Another process is using the {what} {folder}. Wait for it, or stop it.") from None
    except OSError:  # a file system without locks
        os.close(handle)
        return None
    return handle


def refuse_used(folder: Path, remedy: str = "Choose another.") -> None:
    """Raise if ``folder`` cannot be written or has files; those that :func:`write_atomically` left do not count."""
    folder_at(folder)
    if folder.exists() and any(path.suffix != ".tmp" and not path.is_dir() for path in folder.rglob("*")):
        raise InputError(f"The directory {folder} exists and is not empty. Nothing was overwritten. {remedy}")


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove what killed processes left of a file, or of all in a folder; no other process may be writing them."""
    for path in folder.glob(f".{'*' if name is None else escape(name)}.*.tmp"):
        path.unlink(missing_ok=True)


class Rows:
    """A .jsonl file of rows, each a JSON object with whole numbers under the keys ``whole``.

    NaN and infinity in a new row are errors unless ``allow_nan`` is set.

    numbers: whether all values are finite numbers; a row with anything else is damaged when the file is kept.
    """

    def __init__(self, path: Path, *whole: str, allow_nan: bool = False, numbers: bool = False) -> None:
        self.path, self._whole, self._allow_nan, self._numbers = path, whole, allow_nan, numbers

    def read(self, finite: bool = False) -> list[Row]:
        """Return the rows; none if there is no file. With ``finite``, one with NaN or infinity is damaged.

        A last line that was cut off when the process was killed is left out; any other line that is not such a row is
        left out with a warning.
        """
        rows: list[Row] = []
        bad: list[str] = []
        content = self.path.read_bytes() if self.path.exists() else b""
        *lines, rest = content.split(b"\n")
        for number, line in enumerate([*lines, rest] if rest else lines, 1):
            row = _row(line)
            if finite and row is not None and not all(map(is_finite if self._numbers else _is_not_nan, row.values())):
                row = None
            if row is not None and all(isinstance(row.get(key), int) for key in self._whole):
                rows.append(row)
            elif number <= len(lines):
                bad.append(str(number))
        if bad:
            what = f"Line {bad[0]} of {self.path} is" if len(bad) == 1 else f"Lines {listed(bad)} of {self.path} are"
            warnings.warn(f"{what} damaged and left out.", stacklevel=2)
        return rows

    def append(self, *rows: Row) -> None:
        """Append rows."""
        lines = self._lines(rows)
        with naming(self.path), self.path.open("a") as file:
            file.write(lines)

    def keep(self, up_to: int | None = None, digests: Sequence[str] | None = None) -> list[Row]:
        """Drop the rows of rounds after ``up_to``, those without one of these digests, and damaged lines.

        Return the others, in the order of the digests. If ``up_to`` or ``digests`` is None, no row is dropped for it.
        """
        rows = [row for row in self.read(finite=not self._allow_nan) if up_to is None or row["round"] <= up_to]
        if digests is not None:
            by_digest = {digest_of_row(row): row for row in rows}
            rows = [by_digest[digest] for digest in digests if digest in by_digest]
        if self.path.exists():
            write_atomically(self.path, self._lines(rows).encode())
        return rows

    def _lines(self, rows: Iterable[Row]) -> str:
        return "".join(json.dumps(row, allow_nan=self._allow_nan) + "\n" for row in rows)


def digest_of_row(row: Row) -> str:
    """Return a short digest of a row; a row that was written to a file and read again has the same."""
    return blake2b(json.dumps(row).encode(), digest_size=4).hexdigest()


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # a UnicodeDecodeError is a ValueError too
        return None
    return row if isinstance(row, dict) else None


def _is_not_nan(value: object) -> bool:
    return not isinstance(value, float) or is_finite(value)


def refuse_blocked(folder: Path, *names: str) -> None:
    """Raise if a file to be written in ``folder`` at the end of long work is a directory, or cannot be written."""
    for path in (folder / name for name in names):
        if path.is_dir():
            raise InputError(f"{path} is a directory, where a file is to be written. Move it, or choose another place.")
        if path.exists() and not os.access(path, os.W_OK):
            raise InputError(f"The file {path} cannot be written: no permission. Move it, or choose another place.")


def refuse_special(path: Path) -> None:
    """Raise if a path that exists is a directory, or anything else whose reading might never end, such as a pipe."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise InputError(f"The file {ascii(str(path))[1:-1]} cannot be read: {error}.") from None
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise InputError(f"The file {path} cannot be read: it is {kind}, not a file.")


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; raise an :class:`InputError` that says where it is invalid."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin a file with a byte order mark
    except FileNotFoundError:
        siblings = [str(other) for other in sorted(path.parent.glob(f"*{path.suffix}"))]
        raise InputError(f"There is no file {path}.{nearest_of(path, siblings)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The file {path} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:  # a number with thousands of digits, or tables in tables in ...
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
