"""The rows of a file or a frame in batches of raw values, whatever its length.

Numbers in a text file are read by pyarrow; only columns in which it finds something else are read as text, so that
every cell that is wrong is found, with its line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedstrata.core.errors import InputError
from fedstrata.data.tables.converting import Field, Problem
from fedstrata.data.tables.schema import FileFormat
from fedstrata.data.tables.sources import SiteFile, check_distinct_names
from fedstrata.data.tables.streams import BLOCK, GZIP, first_bytes, is_parquet, unreadable
from fedstrata.data.tables.textfiles import TextFile, counter

if TYPE_CHECKING:
    import pyarrow

ROWS = 100_000
"""At most so many rows of a frame or a Parquet file are read at a time."""

RETRIES = 3
"""So many columns of a text file are found not to be numbers one by one; then all are read as text."""


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
    """

    def __init__(self, site: SiteFile, form: FileFormat, wanted: Sequence[str] = ()) -> None:
        self.site, self.unit = site, "row"
        self._file: TextFile | None = None
        if not isinstance(site.table, Path):
            self.names, self.most = tuple(site.table.column_names), site.table.num_rows
        elif is_parquet(site.table):
            with self._parquet() as file:
                self.names, self.most = tuple(file.schema_arrow.names), file.metadata.num_rows
            check_distinct_names(self.names, str(site.table))
        else:
            self._file = TextFile.open(site.table, form, wanted)
            self.names, self.unit, self.most = self._file.names, "line", self._file.scan.lines
            self._file.check_quotes()

    def lines(self) -> Callable[[int], np.ndarray]:
        """Return a function that returns where the next rows are."""
        return counter(0) if self._file is None else self._file.lines()

    def batches(self, fields: Mapping[str, Field], texts: Sequence[str] = ()) -> Iterator[Batch]:
        """Yield the raw values of these columns, and the cells of others as text."""
        names = [name for name in self.names if name in fields or name in texts]
        if self._file is not None:
            yield from self._of_text(self._file, fields, texts, names)
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
            try:
                yield from file.iter_batches(ROWS, columns=names)
            except (pa.ArrowException, OSError) as error:
                raise unreadable(self.site.table, _first_line(error)) from None

    def _parquet(self) -> Any:
        import pyarrow as pa
        from pyarrow import parquet

        try:
            return parquet.ParquetFile(self.site.table)
        except (pa.ArrowException, OSError) as error:
            raise unreadable(Path(self.site.place), f"it is not a Parquet file: {_first_line(error)}") from None

    def _of_text(
        self, file: TextFile, fields: Mapping[str, Field], texts: Sequence[str], names: Sequence[str]
    ) -> Iterator[Batch]:
        import pyarrow as pa

        quick = {name for name in names if name in fields and fields[name].is_quick and name not in texts}
        done = 0
        for retry in range(RETRIES + 1):
            before = 0
            try:
                for cells in _arrow_batches(file, names, quick):
                    skip = min(cells.num_rows, max(0, done - before))
                    before += cells.num_rows
                    if skip < cells.num_rows:
                        columns = dict(zip(names, cells.slice(skip).columns, strict=True))
                        yield _batch(cells.num_rows - skip, columns, fields, texts, quick)
                        done = before
                return
            except _Words as words:
                quick.discard(words.column)
            except pa.ArrowInvalid as error:
                column = re.match(r"In CSV column #(\d+)", str(error))
                if column is None or not quick:
                    raise _refused(file, error) from None
                quick.discard(file.names[int(column[1])])
            if retry == RETRIES - 1:
                quick.clear()


class _Words(Exception):
    """A column has words that pyarrow takes for numbers, such as infinity."""

    def __init__(self, column: str) -> None:
        self.column = column


def _arrow_batches(file: TextFile, names: Sequence[str], quick: set[str]) -> Iterator[pyarrow.RecordBatch]:
    """Yield batches of these columns: numbers for those in ``quick``, text for the others."""
    import pyarrow as pa
    from pyarrow import csv

    if file.scan.lines <= file.blank + file.header:
        return
    places = {name: str(i) for i, name in enumerate(file.names)}
    plain = file.form.encoding.lower() in ("utf-8", "utf8") and first_bytes(file.path, 2) != GZIP
    with nullcontext() if plain else file.stream() as stream:
        reader = csv.open_csv(
            str(file.path) if plain else stream,
            read_options=csv.ReadOptions(
                block_size=BLOCK,
                column_names=list(places.values()),
                skip_rows=file.blank,
                skip_rows_after_names=int(file.header),
            ),
            parse_options=csv.ParseOptions(delimiter=file.delimiter, newlines_in_values=not file.scan.plain),
            convert_options=csv.ConvertOptions(
                column_types={places[n]: pa.float64() if n in quick else pa.string() for n in names},
                include_columns=[places[n] for n in names],
                null_values=[str(cell) for cell in file.form.missing],
                strings_can_be_null=False,
                decimal_point=file.form.decimal,
            ),
        )
        with reader:
            yield from reader


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
    return unreadable(file.path, _first_line(error))


def _first_line(error: Exception) -> str:
    return ascii(str(error).split("\n")[0][:200])[1:-1].rstrip(".")
