"""The bytes of files: their beginning, and text as UTF-8, whatever its encoding and packing."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from fedstrata.core.errors import DataError, InputError, nearest_of
from fedstrata.core.files import refuse_special

BLOCK = 1 << 20
GZIP, PARQUET, ZIP, UTF16 = b"\x1f\x8b", b"PAR1", b"PK\x03\x04", (b"\xff\xfe", b"\xfe\xff")


def unreadable(path: Path, why: str, remedy: str = "", public: str | None = None) -> DataError:
    """Build the error for a file that is not a table.

    remedy: a sentence.
    public: why, and what to do, without words from the file, if the others have some.
    """
    about = f"The file {path} cannot be read:"
    return DataError(f"{about} {why}.{f' {remedy}' if remedy else ''}", public and f"{about} {public}")


def first_bytes(path: Path, size: int = BLOCK) -> bytes:
    """Return the first bytes of a file as they are; raise if it is not a file, or is empty."""
    refuse_special(path)
    try:
        with path.open("rb") as file:
            start = file.read(size)
    except FileNotFoundError:
        others = [str(p) for p in sorted(path.parent.glob("*"))[:1000] if p.exists()]  # no link to nowhere
        raise InputError(f"There is no file {path}.{nearest_of(path, others)}") from None
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from None
    if not start:
        raise unreadable(path, "it is empty", "Export it again, or leave the site out.")
    return start


def is_parquet(path: Path) -> bool:
    """Whether a file is Parquet, whatever its name."""
    return first_bytes(path, 4) == PARQUET


def stream(path: Path, encoding: str) -> BinaryIO:
    """Open a file as UTF-8 bytes, unpacked if it is gzip."""
    packed = first_bytes(path, 2) == GZIP
    stream: Any = gzip.open(path) if packed else path.open("rb")  # noqa: SIM115 - the caller closes it
    if encoding.lower().replace("_", "-") in ("utf-8", "utf8", "utf-8-sig", "ascii"):
        return stream  # type: ignore[no-any-return]
    return io.BufferedReader(_Recoded(stream, encoding), BLOCK)


class _Recoded(io.RawIOBase):
    """The bytes of a text in some encoding as those of the text in UTF-8."""

    def __init__(self, stream: BinaryIO, encoding: str) -> None:
        self._text, self._rest = io.TextIOWrapper(stream, encoding, newline=""), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._rest:
            self._rest = self._text.read(1 << 16).encode()
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size

    def close(self) -> None:
        self._text.close()
        super().close()


@contextmanager
def problems_of(path: Path) -> Iterator[None]:
    """Raise what reading bytes may raise as errors that name the file."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise unreadable(path, f"it is not {error.encoding} text", "Say which encoding it has.") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise unreadable(path, f"its gzip data are truncated or damaged ({error})") from None
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from None
