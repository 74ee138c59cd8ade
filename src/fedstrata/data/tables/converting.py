"""From cells of a table, as text or as typed values, to raw values: float64, with NaN for missing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.data.tables.cells import LONGEST, Key, is_number, key_of, shown, text_of
from fedstrata.data.tables.columns import Column, Target
from fedstrata.data.tables.schema import FileFormat, Schema

if TYPE_CHECKING:
    import pyarrow

ISO = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}"

EXAMPLES = 3


def number_pattern(point: str) -> str:
    """Return the regular expression of numbers in a text file, with this decimal point."""
    return rf"^[+-]?([0-9]+({re.escape(point)}[0-9]*)?|{re.escape(point)}[0-9]+)([eE][+-]?[0-9]+)?$"


@dataclass(frozen=True)
class Problem:
    """Cells of a column that cannot be turned into raw values, and are NaN there.

    kind:     "text", "infinite", "date", "category", or "missing" where no cell may be missing.
    rows:     their positions.
    examples: a few of them, quoted.
    """

    column: str
    kind: str
    rows: np.ndarray
    examples: tuple[str, ...] = ()

    def shifted(self, rows: int) -> Problem:
        """Return it with positions that count from so many rows before."""
        return Problem(self.column, self.kind, self.rows + rows, self.examples)


@dataclass(frozen=True)
class Field:
    """How the cells of one column become raw values; a column of the schema, or its target.

    kind: "numeric", "date", or "codes", which ``codes`` holds by the key of a cell.
    """

    name: str
    kind: str
    codes: Mapping[Key, int] = field(default_factory=dict)
    format: str = ""
    absent: Sequence[str] = ()
    form: FileFormat = field(default_factory=FileFormat)

    @classmethod
    def of(cls, column: Column | Target, form: FileFormat) -> Field:
        """Return the field of a column or target."""
        kind = "codes" if column.size else column.kind
        if isinstance(column, Target):
            return cls(column.name, kind, column.codes, "", tuple(map(text_of, form.missing)), form)
        absent = (*form.missing, *column.missing_values)
        return cls(column.name, kind, column.codes, column.format, tuple(map(text_of, absent)), form)

    @cached_property
    def absent_texts(self) -> tuple[str, ...]:
        """The cells that mean missing and are not numbers."""
        return tuple(cell for cell in self.absent if not is_number(cell))

    @cached_property
    def absent_numbers(self) -> tuple[float, ...]:
        """The numbers that mean missing."""
        return tuple(float(cell) for cell in self.absent if is_number(cell))

    @property
    def is_quick(self) -> bool:
        """Whether pyarrow can turn the cells of a text file into numbers: the file's missing cells are the column's."""
        return self.kind == "numeric" and set(self.absent_texts) == {c for c in self.form.missing if not is_number(c)}

    def raw(self, cells: pyarrow.Array) -> tuple[np.ndarray, list[Problem]]:
        """Return raw values and the cells that have none."""
        import pyarrow as pa
        from pyarrow import types

        if types.is_dictionary(cells.type):
            cells = cells.dictionary_decode()
        if types.is_null(cells.type):
            return np.full(len(cells), np.nan), []
        if types.is_string(cells.type) or types.is_large_string(cells.type) or types.is_string_view(cells.type):
            cells = cells.cast(pa.string()) if not types.is_string(cells.type) else cells
            read = {"numeric": self._numbers_of_text, "date": self._dates_of_text, "codes": self._codes_of}
            return read[self.kind](cells)
        if self.kind == "codes" and not types.is_nested(cells.type):
            return self._codes_of(cells)
        if self.kind == "date" and types.is_temporal(cells.type) and not types.is_time(cells.type):
            return self._days_of(cells), []
        numbers = types.is_integer(cells.type) or types.is_floating(cells.type) or types.is_decimal(cells.type)
        if self.kind == "numeric" and (numbers or types.is_boolean(cells.type)):
            return self._checked(_floats(cells), cells)
        return self._all_wrong(cells)

    def quick(self, cells: pyarrow.Array) -> tuple[np.ndarray, list[Problem]] | None:
        """Return the raw values of numbers that pyarrow read from text; None if it took a word for a number."""
        values = filled(cells, math.nan)
        absent = len(values) - np.count_nonzero(np.isfinite(values))
        if absent != cells.null_count:
            return None
        return self._checked(values.copy(), cells) if self.absent_numbers else (values, [])

    def _checked(self, values: np.ndarray, cells: pyarrow.Array) -> tuple[np.ndarray, list[Problem]]:
        for number in self.absent_numbers:
            values[values == number] = np.nan
        infinite = np.isinf(values)
        if not infinite.any():
            return values, []
        values[infinite] = np.nan
        return values, self._problem("infinite", infinite, cells)

    def _numbers_of_text(self, cells: pyarrow.Array) -> tuple[np.ndarray, list[Problem]]:
        import pyarrow as pa
        from pyarrow import compute

        trimmed = self._present(cells)
        point = self.form.decimal
        right = compute.fill_null(compute.match_substring_regex(trimmed, number_pattern(point)), False)
        numbers = compute.if_else(right, trimmed, pa.scalar(None, pa.string()))
        numbers = compute.replace_substring(numbers, point, ".") if point != "." else numbers
        values, problems = self._checked(_floats(numbers), cells)
        wrong = compute.and_not(trimmed.is_valid(), right).to_numpy(zero_copy_only=False)
        return values, problems + (self._problem("text", wrong, cells) if wrong.any() else [])

    def _present(self, cells: pyarrow.Array) -> pyarrow.Array:
        """Return cells without spaces around them, null where missing."""
        import pyarrow as pa
        from pyarrow import compute

        trimmed = compute.utf8_trim_whitespace(cells)
        absent = compute.is_in(trimmed, value_set=pa.array(self.absent_texts, pa.string()))
        return compute.if_else(absent, pa.scalar(None, pa.string()), trimmed)

    def _dates_of_text(self, cells: pyarrow.Array) -> tuple[np.ndarray, list[Problem]]:
        import pandas

        def days(texts: list[str]) -> np.ndarray:
            dates = pandas.to_datetime(
                pandas.Series(texts, dtype=object), format=self.format or "ISO8601", errors="coerce", utc=True
            )
            numbers = (dates - pandas.Timestamp(0, tz="UTC")) / pandas.Timedelta(days=1)
            iso = True if self.format else pandas.Series(texts, dtype=object).str.match(ISO)
            return np.where(iso, numbers.to_numpy(np.float64), np.nan)

        return self._by_text(self._present(cells), cells, days, "date")

    def _codes_of(self, cells: pyarrow.Array) -> tuple[np.ndarray, list[Problem]]:
        absent = set(map(key_of, self.absent))

        def codes(values: list[Any]) -> np.ndarray:
            keys = [None if v != v else key_of(v) for v in values]  # NaN is missing
            found = [-math.inf if k is None or k in absent else self.codes.get(k, math.nan) for k in keys]
            return np.array(found, np.float64)

        return self._by_text(cells, cells, codes, "category")

    def _by_text(
        self, present: pyarrow.Array, cells: pyarrow.Array, read: Callable[[list[Any]], np.ndarray], kind: str
    ) -> tuple[np.ndarray, list[Problem]]:
        """Read every distinct cell once; ``read`` returns NaN where it cannot, and -inf for missing."""
        distinct = present.dictionary_encode()
        values = read(distinct.dictionary.to_pylist())
        values = np.append(values, -math.inf)
        places = filled(distinct.indices, len(values) - 1)
        out = values[places]
        wrong = np.isnan(out)
        out[np.isinf(out)] = np.nan
        return out, (self._problem(kind, wrong, cells) if wrong.any() else [])

    def _days_of(self, cells: pyarrow.Array) -> np.ndarray:
        import pyarrow as pa

        moments = cells.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
        return _floats(moments) / (24 * 3600 * 1e6)

    def _all_wrong(self, cells: pyarrow.Array) -> tuple[np.ndarray, list[Problem]]:
        wrong = cells.is_valid().to_numpy(zero_copy_only=False)
        kind = {"numeric": "text", "date": "date", "codes": "category"}[self.kind]
        return np.full(len(cells), np.nan), (self._problem(kind, wrong, cells) if wrong.any() else [])

    def _problem(self, kind: str, wrong: np.ndarray, cells: pyarrow.Array) -> list[Problem]:
        rows = np.flatnonzero(wrong)
        examples: dict[str, None] = {}
        for row in rows[:1000]:
            examples[shown(str(cells[int(row)].as_py())[: 2 * LONGEST])] = None
            if len(examples) == EXAMPLES:
                break
        return [Problem(self.name, kind, rows, tuple(examples))]


def fields_of(schema: Schema) -> dict[str, Field]:
    """Return the fields of a schema's features and of its target, by name."""
    columns: list[Column | Target] = [*schema.features, schema.target]
    return {column.name: Field.of(column, schema.file) for column in columns}


def filled(numbers: pyarrow.Array, null: float) -> np.ndarray:
    """Return an array of pyarrow with fixed width as one of NumPy, with this number in place of nulls.

    Without nulls it shares memory that must not be written to. ``to_numpy`` would import pandas.
    """
    if not len(numbers):
        return np.empty(0, numbers.type.to_pandas_dtype())
    valid, data = numbers.buffers()
    start, end = numbers.offset, numbers.offset + len(numbers)
    values: np.ndarray = np.frombuffer(data, numbers.type.to_pandas_dtype())[start:end]
    if numbers.null_count:  # of a slice of a large column, only its own bytes
        bits = np.unpackbits(np.frombuffer(valid, np.uint8)[start // 8 : (end + 7) // 8], bitorder="little")
        present = bits[start % 8 :][: len(numbers)]
        values = np.where(present, values, values.dtype.type(null))
    return values


def _floats(cells: pyarrow.Array) -> np.ndarray:
    """Return numbers as float64 that may be written to, NaN for nulls."""
    import pyarrow as pa

    values = filled(cells.cast(pa.float64(), safe=False), math.nan)
    return values if values.flags.writeable else values.copy()
