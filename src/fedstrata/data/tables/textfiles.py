"""Text files of tables, before their cells are read: the delimiter, the header, the encoding, and where lines are.

pyarrow splits the rows. What it does not report, or only without a line number, is found here: a NUL byte, text in
another encoding, a line without an end, a quote that is never closed, rows with too few or too many cells.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from fedstrata.core.errors import InputError
from fedstrata.data.tables.cells import shown
from fedstrata.data.tables.columns import check_name
from fedstrata.data.tables.scanning import Scan, scan_of
from fedstrata.data.tables.schema import MOST_COLUMNS, FileFormat
from fedstrata.data.tables.streams import BLOCK, UTF16, ZIP, first_bytes, problems_of, stream, unreadable

DELIMITERS = ",;\t|"

_SAY_DELIMITER = "Say which character separates cells (delimiter), or correct the names."


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
    def open(cls, path: Path, form: FileFormat, wanted: Collection[str] = (), target: str | None = None) -> TextFile:
        """Read the header; ``wanted`` are names that it should have, which tell the delimiter.

        target: the target, if these are new rows: where files have no header, those of new rows may have one, or lack
                the target.
        """
        start = first_bytes(path)
        if start.startswith(ZIP):
            raise unreadable(path, "it is a zip archive or an Excel workbook", "Export the table as CSV or Parquet.")
        text = _sample(path, form)
        scan = scan_of(path, form.encoding)
        rows = {d: _first_rows(path, text, d) for d in ([form.delimiter] if form.delimiter else DELIMITERS)}
        delimiter = max(rows, key=lambda d: _score(rows[d], form, wanted))
        blank, first = next(((i, row) for i, row in enumerate(rows[delimiter]) if row), (0, []))
        if not first:
            raise unreadable(path, "it has blank lines only", "Export it again, or leave the site out.")
        names = tuple(form.names) if target is None else _names_of_new_rows(first, form.names, target)
        file = cls(path, form, delimiter, names, scan, blank, not names)
        return file._without_header(first) if names else file._with_header(first, wanted)

    def _without_header(self, first: Sequence[str]) -> TextFile:
        cells = [cell.strip() for cell in first]
        if _is_header(first, self.names):
            raise unreadable(self.path, "its first line names the columns", "Leave out names: it has a header.")
        if len(cells) != len(self.names):
            why = f"its first line has {len(cells)} cells, but {len(self.names)} names are given"
            raise unreadable(self.path, why, self._other_delimiter(cells))
        return self

    def _with_header(self, first: Sequence[str], wanted: Collection[str]) -> TextFile:
        names = [name.strip() or f"Unnamed: {i}" for i, name in enumerate(first)]
        if len(names) == 1 and len(wanted) > 1:
            why = f"its first line has a single cell, {shown(names[0])}"
            public = f"its first line has a single cell. {_SAY_DELIMITER}"
            raise unreadable(self.path, why, self._other_delimiter(names), public)
        if len(names) > MOST_COLUMNS:
            raise unreadable(self.path, f"its header has {len(names):,} columns, more than {MOST_COLUMNS:,}")
        first_at: dict[str, int] = {}
        for i, name in enumerate(names):
            if first_at.setdefault(name, i) != i:
                pair = f"columns {first_at[name] + 1} and {i + 1} of its header"
                remedy = "Rename or remove one of them."
                public = f"{pair} have the same name. {remedy}"
                raise unreadable(self.path, f"{pair} are both {shown(name)}", remedy, public)
            try:
                check_name(name, f"name of column {i + 1}")
            except InputError as error:
                why = f"its header is wrong. {str(error).rstrip('.')}"
                raise unreadable(self.path, why, public=f"the name of column {i + 1} in its header is wrong.") from None
        return replace(self, names=tuple(names))

    def _other_delimiter(self, cells: Sequence[str]) -> str:
        used = f"{self.delimiter!r} does not separate its cells. " if len(cells) == 1 else ""
        return f"{used}{_SAY_DELIMITER}"

    def stream(self) -> BinaryIO:
        """Open the file as UTF-8 bytes."""
        return stream(self.path, self.form.encoding)

    def records(self, strict: bool = False) -> Iterator[tuple[int, list[str]]]:
        """Yield the line that every record starts in, the first being 1, and its cells; the header is a record too."""
        with problems_of(self.path), self.stream() as file:
            text = io.TextIOWrapper(file, "utf-8-sig", newline="")
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


def _is_header(first: Sequence[str], names: Sequence[str]) -> bool:
    """Return whether most cells of the first line are names of columns."""
    return 2 * sum(cell.strip() in names for cell in first) > len(first)


def _names_of_new_rows(first: Sequence[str], names: Sequence[str], target: str) -> tuple[str, ...]:
    """Return the columns of a file of new rows, given those of a file without a header; none if it has a header."""
    if _is_header(first, names):
        return ()
    return tuple(name for name in names if name != target or len(first) == len(names))


def _score(rows: Sequence[Sequence[str]], form: FileFormat, wanted: Collection[str]) -> tuple[int, int, int]:
    """Return how well a delimiter splits the first rows: names that are wanted, rows of equal length, their length."""
    cells = [row for row in rows if row]
    first = [cell.strip() for cell in cells[0]] if cells else []
    fits = len(first) == len(form.names) if form.names else len(set(wanted) & set(first))
    equal = sum(len(row) == len(first) for row in cells) if len(first) > 1 else 0
    return int(fits), equal, len(first)


def _sample(path: Path, form: FileFormat) -> str:
    with problems_of(path), stream(path, form.encoding) as file:
        content = file.read(BLOCK)
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
