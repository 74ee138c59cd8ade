"""The rows of a file or a frame in batches of raw values, whatever its length.

Numbers in a text file are read by pyarrow; only columns in which it finds something else are read as text, so that
every cell that is wrong is found, with its line.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedstrata.core.errors import InputError
from fedstrata.data.tables.cells import shown
from fedstrata.data.tables.converting import Field, Problem
from fedstrata.data.tables.schema import FileFormat
from fedstrata.data.tables.sources import SiteFile, check_distinct_names
from fedstrata.data.tables.streams import BLOCK, is_parquet, unreadable
from fedstrata.data.tables.textfiles import TextFile, counter

if TYPE_CHECKING:
    import pyarrow

ROWS = 100_000
"""At most so many rows of a frame or a Parquet file are read at a time."""

RETRIES = 3
"""So many columns of a piece of a file are found not to be numbers one by one; then all are read as text."""

MOST_WORKERS = 8

MOST_TEXT = 1 << 28
"""A column of a Parquet file with more bytes of text in one group of rows is refused: they are read at once."""

BOM = b"\xef\xbb\xbf"


class Batch(NamedTuple):
    """Raw values of some rows by column, the cells that have none, and columns that stay text."""

    rows: int
    values: dict[str, np.ndarray]
    problems: list[Problem]
    texts: dict[str, pyarrow.Array]


class Table:
    """A file or a frame that is read in batches.

    names: its columns.
    unit:  what its rows are called.
    most:  an upper bound of the number of its rows.

    target: as in :meth:`TextFile.open`.
    """

    def __init__(self, site: SiteFile, form: FileFormat, wanted: Sequence[str] = (), target: str | None = None) -> None:
        self.site, self.unit = site, "row"
        self._file: TextFile | None = None
        if not isinstance(site.table, Path):
            self.names, self.most = tuple(site.table.column_names), site.table.num_rows
        elif is_parquet(site.table):
            with self._parquet() as file:
                self.names, self.most = tuple(file.schema_arrow.names), file.metadata.num_rows
            check_distinct_names(self.names, str(site.table))
        else:
            self._file = TextFile.open(site.table, form, wanted, target)
            self.names, self.unit, self.most = self._file.names, "line", self._file.scan.lines
            self._file.check_quotes()

    def lines(self) -> Callable[[int], np.ndarray]:
        """Return a function that returns where the next rows are."""
        return counter(0) if self._file is None else self._file.lines()

    def batches(self, fields: Mapping[str, Field], texts: Sequence[str] = ()) -> Iterator[Batch]:
        """Yield the raw values of these columns, and the cells of others as text."""
        names = [name for name in self.names if name in fields or name in texts]
        if self._file is not None:
            yield from _Parser(self._file, names, fields, texts).batches()
            return
        for cells in self._typed(names):
            columns = dict(zip(names, cells.columns, strict=True))
            yield _batch(cells.num_rows, columns, fields, texts)

    def _typed(self, names: Sequence[str]) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow as pa

        if not isinstance(self.site.table, Path):
            yield from self.site.table.select(names).to_batches(max_chunksize=ROWS)
            return
        with self._parquet() as file:
            self._check_sizes(file, names)
            try:
                yield from file.iter_batches(ROWS, columns=names)
            except (pa.ArrowException, OSError) as error:
                raise unreadable(self.site.table, _first_line(error), public="it is damaged.") from None

    def _check_sizes(self, file: Any, names: Sequence[str]) -> None:
        """Raise if a column has so much text in one group of rows that it would have to be in memory at once."""
        for i in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(i)
            for j in range(group.num_columns):
                part = group.column(j)
                text = part.physical_type == "BYTE_ARRAY" and part.path_in_schema in names
                if text and part.total_uncompressed_size > MOST_TEXT:
                    where = f"column {shown(part.path_in_schema)} has {part.total_uncompressed_size:,} bytes of text"
                    why = f"{where} in {group.num_rows:,} rows, more than {MOST_TEXT:,}"
                    remedy = "Look for a cell that is too long, or write the file in smaller groups of rows."
                    raise unreadable(Path(self.site.place), why, remedy)

    def _parquet(self) -> Any:
        import pyarrow as pa
        from pyarrow import parquet

        try:
            return parquet.ParquetFile(self.site.table)
        except (pa.ArrowException, OSError) as error:
            raise unreadable(Path(self.site.place), f"it is not a Parquet file: {_first_line(error)}") from None


class _Words(Exception):
    """A column has words that pyarrow takes for numbers, such as infinity."""

    def __init__(self, column: str) -> None:
        self.column = column


class _Parser:
    """Turns the rows of a text file into batches.

    A column in which pyarrow finds something else than numbers is read as text from there on.
    """

    def __init__(self, file: TextFile, names: Sequence[str], fields: Mapping[str, Field], texts: Sequence[str]) -> None:
        self.file, self.names, self.fields, self.texts = file, names, fields, texts
        self._quick = {name for name in names if name in fields and fields[name].is_quick and name not in texts}

    def batches(self) -> Iterator[Batch]:
        """Yield the rows; those of a file without blank lines and line breaks in quotes are read in several threads."""
        import pyarrow as pa

        if not self.file.scan.plain:
            try:
                yield from map(self._as_text, self._streamed())
            except pa.ArrowInvalid as error:
                raise _refused(self.file, error) from None
            return
        workers = min(MOST_WORKERS, os.cpu_count() or 1)
        with ThreadPoolExecutor(workers) as pool:
            waiting: deque[Future[list[Batch]]] = deque()
            for lines in self._pieces():
                waiting.append(pool.submit(self._parse, lines))
                if len(waiting) > workers:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()

    def _pieces(self) -> Iterator[bytes]:
        """Yield whole lines of about a block, without the header."""
        rest, header = b"", self.file.header
        with self.file.stream() as stream:
            while block := stream.read(BLOCK):
                lines = (rest + block).removeprefix(BOM if header else b"")
                end = max(lines.rfind(b"\n"), lines.rfind(b"\r")) + 1
                lines, rest = lines[:end], lines[end:]
                if header and end:
                    first = min(place for place in (lines.find(b"\n"), lines.find(b"\r")) if place >= 0)
                    lines, header = lines[first + 1 :], False
                if lines.strip(b"\r\n"):
                    yield lines
        if rest and not header:
            yield rest

    def _parse(self, lines: bytes) -> list[Batch]:
        import pyarrow as pa
        from pyarrow import csv

        quick = set(self._quick)
        for retry in range(RETRIES + 2):
            options = self._options(quick, len(lines) + 1, use_threads=False)
            try:
                table = csv.read_csv(pa.BufferReader(lines), **options)
                return [self._batch(cells, quick) for cells in table.to_batches()]
            except _Words as words:
                quick.discard(words.column)
            except pa.ArrowInvalid as error:
                column = re.match(r"In CSV column #(\d+)", str(error))
                if column is None or not quick:
                    raise _refused(self.file, error) from None
                quick.discard(self.file.names[int(column[1])])
            if retry >= RETRIES:
                quick.clear()
            self._quick &= quick
        raise AssertionError("text can be read as text")

    def _streamed(self) -> Iterator[pyarrow.RecordBatch]:
        from pyarrow import csv

        if self.file.scan.lines <= self.file.blank + self.file.header:
            return
        options = self._options(set(), BLOCK, skip_rows=self.file.blank, skip_rows_after_names=int(self.file.header))
        with self.file.stream() as stream, csv.open_csv(stream, **options) as reader:
            yield from reader

    def _options(self, quick: set[str], block: int, **reading: Any) -> dict[str, Any]:
        import pyarrow as pa
        from pyarrow import csv

        places = {name: str(i) for i, name in enumerate(self.file.names)}
        names, form = list(places.values()), self.file.form
        types = {places[n]: pa.float64() if n in quick else pa.string() for n in self.names}
        return {
            "read_options": csv.ReadOptions(block_size=block, column_names=names, **reading),
            "parse_options": csv.ParseOptions(
                delimiter=self.file.delimiter, newlines_in_values=not self.file.scan.plain
            ),
            "convert_options": csv.ConvertOptions(
                column_types=types,
                include_columns=list(types),
                null_values=[str(cell) for cell in form.missing],
                strings_can_be_null=False,
                decimal_point=form.decimal,
            ),
        }

    def _as_text(self, cells: pyarrow.RecordBatch) -> Batch:
        return self._batch(cells, set())

    def _batch(self, cells: pyarrow.RecordBatch, quick: set[str]) -> Batch:
        columns = dict(zip(self.names, cells.columns, strict=True))
        return _batch(cells.num_rows, columns, self.fields, self.texts, quick)


def _batch(
    rows: int,
    columns: Mapping[str, Any],
    fields: Mapping[str, Field],
    texts: Sequence[str],
    quick: set[str] | frozenset[str] = frozenset(),
) -> Batch:
    import pyarrow as pa

    out = Batch(rows, {}, [], {})
    for name, cells in columns.items():
        if name in texts:
            out.texts[name] = cells.cast(pa.string())
        if name in fields:
            read = fields[name].quick(cells) if name in quick else fields[name].raw(cells)
            if read is None:
                raise _Words(name)
            out.values[name] = read[0]
            out.problems.extend(read[1])
    return out


def _refused(file: TextFile, error: Exception) -> InputError:
    if "Expected" in str(error) and "columns" in str(error):
        return file.ragged()
    if "straddling" in str(error):
        why = "a row has more than a million bytes"
        return unreadable(file.path, why, "Look for a quote that is not closed, or a file without line ends.")
    return unreadable(file.path, _first_line(error), public="its rows cannot be split into cells.")


def _first_line(error: Exception) -> str:
    return ascii(str(error).split("\n")[0][:200])[1:-1].rstrip(".")
