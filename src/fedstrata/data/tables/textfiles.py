"""Text files of tables, before their cells are read: the delimiter, the header, the encoding, and where lines are.

pyarrow splits the rows. What it does not report, or only without a line number, is found here: a NUL byte, text in
another encoding, a line without an end, a quote that is never closed, rows with too few or too many cells.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import zlib
from codecs import getincrementaldecoder
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from fedstrata.core.errors import InputError, nearest_of
from fedstrata.core.files import refuse_special
from fedstrata.data.tables.cells import shown
from fedstrata.data.tables.columns import check_name
from fedstrata.data.tables.schema import MOST_COLUMNS, FileFormat

BLOCK = 1 << 20
LONGEST_LINE = BLOCK
"""A line with so many bytes is refused: no row is so long, but a file without line ends is, or a quote."""

DELIMITERS = ",;\t|"

GZIP, PARQUET, ZIP, UTF16 = b"\x1f\x8b", b"PAR1", b"PK\x03\x04", (b"\xff\xfe", b"\xfe\xff")


def unreadable(path: Path, why: str, remedy: str = "") -> InputError:
    """Build the error for a file that is not a table; ``remedy`` is a sentence."""
    return InputError(f"The file {path} cannot be read: {why}.{f' {remedy}' if remedy else ''}")


def first_bytes(path: Path, size: int = BLOCK) -> bytes:
    """Return the first bytes of a file as they are; raise if it is not a file, or is empty."""
    refuse_special(path)
    try:
        with path.open("rb") as file:
            start = file.read(size)
    except FileNotFoundError:
        others = [str(p) for p in sorted(path.parent.glob("*"))[:1000]]
        raise InputError(f"There is no file {path}.{nearest_of(path, others)}") from None
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from None
    if not start:
        raise unreadable(path, "it is empty", "Export it again, or leave the site out.")
    return start


def is_parquet(path: Path) -> bool:
    """Whether a file is Parquet, whatever its name."""
    return first_bytes(path, 4) == PARQUET


def counter(first: int) -> Callable[[int], np.ndarray]:
    """Return a function that returns the next numbers, from the first on."""
    at = first

    def numbers(count: int) -> np.ndarray:
        nonlocal at
        at += count
        return np.arange(at - count, at)

    return numbers


@dataclass(frozen=True)
class TextFile:
    """A text file of a table.

    names:   the columns, from its header or the schema.
    scan:    what a pass over all its bytes has found.
    blank:   blank lines before the first record.
    header:  whether the first record is a header.
    """

    path: Path
    form: FileFormat
    delimiter: str
    names: tuple[str, ...]
    scan: Scan
    blank: int = 0
    header: bool = True

    @classmethod
    def open(cls, path: Path, form: FileFormat, wanted: Collection[str] = ()) -> TextFile:
        """Read the header; ``wanted`` are names that it should have, which tell the delimiter."""
        start = first_bytes(path)
        if start.startswith(ZIP):
            raise unreadable(path, "it is a zip archive or an Excel workbook", "Export the table as CSV or Parquet.")
        text = _sample(path, form)
        scan = _scan(path, form.encoding)
        rows = {d: _first_rows(path, text, d) for d in ([form.delimiter] if form.delimiter else DELIMITERS)}
        delimiter = max(rows, key=lambda d: _score(rows[d], form, wanted))
        blank, first = next(((i, row) for i, row in enumerate(rows[delimiter]) if row), (0, []))
        if not first:
            raise unreadable(path, "it has blank lines only", "Export it again, or leave the site out.")
        file = cls(path, form, delimiter, tuple(form.names), scan, blank, not form.names)
        return file._without_header(first) if form.names else file._with_header(first, wanted)

    def _without_header(self, first: Sequence[str]) -> TextFile:
        cells = [cell.strip() for cell in first]
        if cells == list(self.names):
            raise unreadable(self.path, "its first line names the columns", "Leave out names: it has a header.")
        if len(cells) != len(self.names):
            why = f"its first line has {len(cells)} cells, but {len(self.names)} names are given"
            raise unreadable(self.path, why, self._other_delimiter(cells))
        return self

    def _with_header(self, first: Sequence[str], wanted: Collection[str]) -> TextFile:
        names = [name.strip() or f"Unnamed: {i}" for i, name in enumerate(first)]
        if len(names) == 1 and len(wanted) > 1:
            why = f"its first line has a single cell, {shown(names[0])}"
            raise unreadable(self.path, why, self._other_delimiter(names))
        if len(names) > MOST_COLUMNS:
            raise unreadable(self.path, f"its header has {len(names):,} columns, more than {MOST_COLUMNS:,}")
        first_at: dict[str, int] = {}
        for i, name in enumerate(names):
            if first_at.setdefault(name, i) != i:
                where = f"columns {first_at[name] + 1} and {i + 1} of its header are both {shown(name)}"
                raise unreadable(self.path, where, "Rename or remove one of them.")
            try:
                check_name(name, f"name of column {i + 1}")
            except InputError as error:
                raise unreadable(self.path, f"its header is wrong. {str(error).rstrip('.')}") from None
        return replace(self, names=tuple(names))

    def _other_delimiter(self, cells: Sequence[str]) -> str:
        used = f"{self.delimiter!r} does not separate its cells. " if len(cells) == 1 else ""
        return f"{used}Say which character does (delimiter), or correct the names."

    def stream(self) -> BinaryIO:
        """Open the file as UTF-8 bytes."""
        return _stream(self.path, self.form.encoding)

    def records(self, strict: bool = False) -> Iterator[tuple[int, list[str]]]:
        """Yield the line that every record starts in, the first being 1, and its cells; the header is a record too."""
        with _problems_of(self.path), self.stream() as stream:
            text = io.TextIOWrapper(stream, "utf-8-sig", newline="")
            reader, before = csv.reader(text, delimiter=self.delimiter, strict=strict), 0
            while True:
                try:
                    record = next(reader, None)
                except csv.Error as error:
                    raise _no_cells(self.path, f"line {before + 1}", error) from None
                if record is None:
                    return
                if record:
                    yield before + 1, record
                before = reader.line_num

    def lines(self) -> Callable[[int], np.ndarray]:
        """Return a function that returns the lines in which the next rows start."""
        if self.scan.plain:
            return counter(1 + self.header)
        places = (line for line, _ in itertools.islice(self.records(), int(self.header), None))
        return lambda rows: np.fromiter(itertools.islice(places, rows), np.int64)

    def check_quotes(self) -> None:
        """Raise if a quote is never closed: the rest of the file would be one cell."""
        if self.scan.open_quote:
            last = max((line for line, _ in self.records()), default=0)
            if last < self.scan.lines:
                raise unreadable(self.path, f"a quote in line {last} is never closed", "Close it, or remove it.")

    def ragged(self) -> InputError:
        """Return the error for rows that have too few or too many cells; there are some."""
        wrong = (line for line, cells in self.records() if len(cells) != len(self.names))
        lines = [str(line) for line in itertools.islice(wrong, 6)]
        where = f"line {lines[0]} has" if len(lines) == 1 else f"lines {', '.join(lines[:5])}"
        where += f"{' and more' * (len(lines) > 5)} have" if len(lines) > 1 else ""
        why = f"{where if lines else 'some lines have'} more or fewer cells than the {len(self.names)} columns"
        remedy = f"Put text that has {self.delimiter!r} in it in double quotes, or say which character separates cells."
        return unreadable(self.path, why, remedy)


@dataclass(frozen=True)
class Scan:
    """What a pass over the bytes of a file finds.

    plain:      whether every row is one line: no blank lines, and no line breaks in quotes.
    open_quote: whether the number of quotes is odd.
    """

    lines: int
    plain: bool
    open_quote: bool


def _score(rows: Sequence[Sequence[str]], form: FileFormat, wanted: Collection[str]) -> tuple[int, int, int]:
    """Return how well a delimiter splits the first rows: names that are wanted, rows of equal length, their length."""
    cells = [row for row in rows if row]
    first = [cell.strip() for cell in cells[0]] if cells else []
    fits = len(first) == len(form.names) if form.names else len(set(wanted) & set(first))
    equal = sum(len(row) == len(first) for row in cells) if len(first) > 1 else 0
    return int(fits), equal, len(first)


def _sample(path: Path, form: FileFormat) -> str:
    with _problems_of(path), _stream(path, form.encoding) as stream:
        content = stream.read(BLOCK)
    if b"\0" in content:
        encoded = content.startswith(UTF16) or content[:200].count(0) > len(content[:200]) // 3
        remedy = 'It looks like UTF-16: say encoding = "utf-16".' if encoded else "Export it as text."
        raise unreadable(path, f"it has a NUL byte in line {content[: content.index(0)].count(10) + 1}", remedy)
    if content.startswith(UTF16):
        raise unreadable(path, "it is not UTF-8", 'It looks like UTF-16: say encoding = "utf-16".')
    return content.decode("utf-8-sig", errors="replace")  # the scan tells where it is not


def _first_rows(path: Path, text: str, delimiter: str) -> list[list[str]]:
    try:
        return list(itertools.islice(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), 20))
    except csv.Error as error:
        raise _no_cells(path, "a line at its start", error) from None


def _no_cells(path: Path, where: str, error: csv.Error) -> InputError:
    if "field limit" not in str(error):
        return unreadable(path, f"{where} is not cells of a table ({error})")
    why = f"{where} has a cell of more than {csv.field_size_limit():,} characters"
    return unreadable(path, why, "Look for a quote that is not closed.")


def _stream(path: Path, encoding: str) -> BinaryIO:
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
def _problems_of(path: Path) -> Iterator[None]:
    """Raise what reading bytes may raise as errors that name the file."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise unreadable(path, f"it is not {error.encoding} text", "Say which encoding it has.") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise unreadable(path, f"its gzip data are truncated or damaged ({error})") from None
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from None


class _Scanner:
    """Looks at the bytes of a UTF-8 text, block by block."""

    def __init__(self, path: Path) -> None:
        self.path, self.lines, self.plain, self.quotes = path, 0, True, 0
        self._decoder, self._unread = getincrementaldecoder("utf-8")(), b""
        self._ends, self._line = 1, 0  # line ends before this block, and bytes of its unfinished line

    def take(self, block: bytes) -> None:
        """Look at the next block; the last one is empty."""
        self._check_text(block)
        block, self._unread = self._unread + block, b""
        if b"\r" in block:
            self._unread = b"\r" if block.endswith(b"\r") else b""
            block = block.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if not block:
            return
        self._check_length(block)
        body = block.rstrip(b"\n")
        if body and (b"\n\n" in body or self._ends + len(block) - len(block.lstrip(b"\n")) > 1):
            self.plain = False
        self._ends = len(block) - len(body) + (0 if body else self._ends)
        if b'"' in block:
            self._count_quotes(np.frombuffer(block, np.uint8))
        self.lines += block.count(b"\n")

    def _check_text(self, block: bytes) -> None:
        pending = self._decoder.getstate()[0]
        if b"\0" in block:
            self._wrong(f"it has a NUL byte in line {self._line_of(block, block.index(0))}", "Export it as text.")
        if not pending and block.isascii() and block:
            return
        try:
            self._decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            line = self._line_of(block, max(0, error.start - len(pending)))
            remedy = 'Say which encoding it has, such as "latin-1" or "cp1252".'
            self._wrong(f"line {line} is not UTF-8 text (byte 0x{error.object[error.start]:02x})", remedy)

    def _line_of(self, block: bytes, place: int) -> int:
        return self.lines + len(block[:place].splitlines()) + block[:place].endswith((b"\n", b"\r")) + (place == 0)

    def _check_length(self, block: bytes) -> None:
        first = block.find(b"\n")
        self._line += len(block) if first < 0 else first
        if self._line >= LONGEST_LINE:
            why = f"line {self.lines + 1} has more than a million bytes"
            self._wrong(why, "Look for a quote that is not closed, or a file without line ends.")
        if first >= 0:
            self._line = len(block) - 1 - block.rfind(b"\n")

    def _count_quotes(self, block: np.ndarray) -> None:
        quotes = np.flatnonzero(block == ord('"'))
        if self.plain:
            before = np.searchsorted(quotes, np.flatnonzero(block == ord("\n"))) + self.quotes
            self.plain = not bool((before % 2).any())
        self.quotes += len(quotes)

    def _wrong(self, why: str, remedy: str) -> NoReturn:
        raise unreadable(self.path, why, remedy)


def _scan(path: Path, encoding: str) -> Scan:
    scanner = _Scanner(path)
    with _problems_of(path), _stream(path, encoding) as stream:
        while block := stream.read(BLOCK):
            scanner.take(block)
        scanner.take(b"")
    return Scan(scanner.lines + (scanner._ends == 0), scanner.plain, scanner.quotes % 2 == 1)
