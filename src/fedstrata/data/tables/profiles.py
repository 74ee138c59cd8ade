"""What the cells of a column look like at all sites, before there is a schema."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fedstrata.data.tables.batches import Table
from fedstrata.data.tables.cells import Key, key_of
from fedstrata.data.tables.converting import number_pattern
from fedstrata.data.tables.schema import FileFormat
from fedstrata.data.tables.sources import SiteFile

MOST_DISTINCT, MOST_VALUES = 1000, 20_000
"""So many distinct cells of a column, and numbers of a site, are kept."""

COMMAS = r"^[+-]?[0-9]+,[0-9]+$"


@dataclass
class Profile:
    """What the cells of a column look like.

    rows, present: rows and cells that are not missing, by site; a site without the column is not among them.
    cells:         the first distinct cells, with their text and how often they occur.
    many:          whether there are more distinct cells than are kept.
    words:         the distinct cells among them that are not numbers.
    numbers:       how many cells are numbers.
    whole:         whether all numbers are whole.
    commas:        how many cells are numbers with a decimal comma.
    unique:        the smallest share of distinct cells in a batch.
    values:        some of the numbers.
    """

    name: str
    rows: dict[str, int] = field(default_factory=dict)
    present: dict[str, int] = field(default_factory=dict)
    cells: dict[Key, tuple[str, int]] = field(default_factory=dict)
    many: bool = False
    words: list[str] = field(default_factory=list)
    numbers: int = 0
    whole: bool = True
    commas: int = 0
    unique: float = 1.0
    values: list[np.ndarray] = field(default_factory=list)

    @property
    def count(self) -> int:
        """The number of cells that are not missing."""
        return sum(self.present.values())

    @property
    def total(self) -> int:
        """The number of rows of the sites that have the column."""
        return sum(self.rows.values())

    @property
    def texts(self) -> list[str]:
        """The distinct cells."""
        return [text for text, _ in self.cells.values()]

    @property
    def amounts(self) -> list[str]:
        """The distinct cells that are numbers."""
        words = set(self.words)
        return [text for text in self.texts if text not in words]

    def add(self, site: str, cells: object, form: FileFormat) -> None:
        """Look at some cells of a site, a pyarrow array of text."""
        import pyarrow as pa
        from pyarrow import compute

        trimmed = compute.utf8_trim_whitespace(cells)
        absent = compute.is_in(trimmed, value_set=pa.array([str(cell) for cell in form.missing], pa.string()))
        there = trimmed.filter(compute.and_(compute.invert(absent), trimmed.is_valid()))
        self.rows[site] = self.rows.get(site, 0) + len(trimmed)
        before = self.present.get(site, 0)
        self.present[site] = before + len(there)
        if not len(there):
            return
        distinct = compute.value_counts(there)
        if len(there) >= 50:
            self.unique = min(self.unique, len(distinct) / len(there))
        number = re.compile(number_pattern(form.decimal))
        for text, count in zip(*(distinct.field(i)[:MOST_DISTINCT].to_pylist() for i in (0, 1)), strict=True):
            key = key_of(text)
            if key not in self.cells and len(self.cells) >= MOST_DISTINCT:
                continue
            if key not in self.cells:
                self.cells[key] = (_simplest(key), 0)
                self.words += [] if number.match(text) else [self.cells[key][0]]
            self.cells[key] = (self.cells[key][0], self.cells[key][1] + count)
        self.many = self.many or len(self.cells) >= MOST_DISTINCT or len(distinct) > MOST_DISTINCT
        self._add_numbers(there, before, form)

    def _add_numbers(self, cells: object, before: int, form: FileFormat) -> None:
        import pyarrow as pa
        from pyarrow import compute

        numbers = cells.filter(compute.match_substring_regex(cells, number_pattern(form.decimal)))  # type: ignore[attr-defined]
        self.numbers += len(numbers)
        if form.decimal == "." and len(numbers) < len(cells):  # type: ignore[arg-type]
            self.commas += compute.sum(compute.match_substring_regex(cells, COMMAS)).as_py() or 0
        if self.whole or before < MOST_VALUES:
            values = compute.replace_substring(numbers, form.decimal, ".").cast(pa.float64()).to_numpy(False)
            self.whole = self.whole and bool((values == np.floor(values)).all())
            self.values.append(values[: max(0, MOST_VALUES - before)])


def profiles_of(sites: Sequence[SiteFile], form: FileFormat, wanted: Sequence[str]) -> dict[str, Profile]:
    """Return the profiles of all columns that any site has, in the order of the first that has them."""
    profiles: dict[str, Profile] = {}
    for site in sites:
        table = Table(site, form, wanted)
        for name in table.names:
            profiles.setdefault(name, Profile(name))
        for batch in table.batches({}, table.names):
            for name, cells in batch.texts.items():
                profiles[name].add(site.name, cells, form)
    return profiles


def _simplest(key: Key) -> str:
    """Return the shortest text of equal cells: 1 for 1.0."""
    return key if isinstance(key, str) else f"{key.normalize() + 0:f}"
