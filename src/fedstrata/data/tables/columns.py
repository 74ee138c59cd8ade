"""The columns of a schema and its target: what their cells are, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from functools import cached_property
from typing import Any, Literal, Self

from fedstrata.core.errors import InputError, invalid
from fedstrata.core.options import Options, build, options_of, param
from fedstrata.data.tables.cells import Key, days_of, is_plain, key_of, shown, text_of

KINDS = ("numeric", "category", "ordinal", "flag", "date")
"""The kinds of columns. A flag has two categories, no and yes; the categories of an ordinal column are in order."""

RULES: dict[str, tuple[str, ...]] = {
    "numeric": ("median", "mean", "constant", "refuse"),
    "category": ("most_frequent", "constant", "refuse"),
    "ordinal": ("most_frequent", "median", "mean", "constant", "refuse"),
    "flag": ("most_frequent", "mean", "constant", "refuse"),
    "date": ("median", "mean", "constant", "refuse"),
}
"""What may fill missing cells, by kind; the first is the default."""

YES, NO = ("1", "true", "yes"), ("0", "false", "no")

LONGEST_NAME, MOST_CATEGORIES = 200, 10_000

Cell = str | bool | float
"""A cell in a schema: text, or a number or boolean as a person writes it in TOML."""


def cells_of(values: Sequence[Cell]) -> tuple[str, ...]:
    """Return the cells of a list in a schema as text."""
    return tuple(text_of(value) for value in values)


def one_of(words: Sequence[str]) -> str:
    """Return words as a choice: a, b or c."""
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def check_name(name: str, what: str) -> None:
    """Raise unless a name can stand in a message and a file."""
    if not name.strip() or name != name.strip() or len(name) > LONGEST_NAME or not is_plain(name):
        wants = f"text of 1 to {LONGEST_NAME} visible characters, without spaces around it"
        raise InputError(f"The {what} must be {wants}. Got {shown(name)}.")


def check_plain(texts: Mapping[str, str], where: str) -> None:
    """Raise if a text has invisible characters or several lines."""
    for name, text in texts.items():
        if not is_plain(text):
            raise InputError(f"The {name} must be one line of visible characters. Got {shown(text)}. ({where})")


def check_distinct(cells: Sequence[Cell], what: str, where: str = "") -> None:
    """Raise if two cells are equal, or one has invisible characters."""
    seen: dict[Key, str] = {}
    for cell in map(text_of, cells):
        if not is_plain(cell):
            raise InputError(f"The {what} must have visible characters only. Got {shown(cell)}. ({where})")
        if key_of(cell) in seen:
            same = f"{shown(seen[key_of(cell)])} and {shown(cell)} are equal"
            raise InputError(f"The {what} must be distinct: {same}.{f' ({where})' if where else ''}")
        seen[key_of(cell)] = cell


def from_toml(value: Any) -> Any:
    """Return a value of a TOML file with dates as text, and without infinities, which stand for open ends."""
    if isinstance(value, dict):
        return {k: v if k == "columns" else from_toml(v) for k, v in value.items()}
    if isinstance(value, list):
        return [from_toml(v) for v in value]
    if isinstance(value, date | datetime):
        return value.isoformat()
    return None if isinstance(value, float) and math.isinf(value) else value


class Column(Options, owner="a column of the schema"):
    """A column that a model may use."""

    name: str = param(..., "name of the column in the files")
    kind: Literal["numeric", "category", "ordinal", "flag", "date"] = param("numeric", "what its cells are")
    unit: str = param("", "unit of its numbers, for people")
    range: Sequence[float | str | None] = param(
        (None, None), "lowest and highest plausible value, or date; `-inf` and `inf` leave a side open"
    )
    step: float | None = param(
        None, "distance between neighbouring values, 1 for whole numbers: medians and quartiles are then exact", above=0
    )
    categories: Sequence[Cell] = param((), "its categories: an ordinal's in order, a flag's no and yes")
    missing: Literal["median", "mean", "most_frequent", "constant", "refuse"] | None = param(
        None, "what fills missing cells; by default the median, or the most frequent category"
    )
    fill: float | str | None = param(None, 'the cell that fills missing ones if `missing = "constant"`')
    indicator: bool = param(False, "whether the model gets another input that is 1 where the cell was missing")
    missing_values: Sequence[Cell] = param((), "further cells that mean missing in this column, e.g. `[0, -1]`")
    optional: bool = param(False, "whether a site may lack the column, or have no value in it")
    format: str = param("", "how dates are written, e.g. `%d.%m.%Y`; by default ISO, 2026-12-31")
    description: str = param("", "what the column is, for people")

    def __post_init__(self) -> None:
        where = f"column {shown(self.name)}"
        check_name(self.name, "name of a column")
        self._set(missing=self.missing or RULES[self.kind][0])
        self._set(categories=cells_of(self.categories), missing_values=cells_of(self.missing_values))
        if self.missing not in RULES[self.kind]:
            raise invalid(f"missing of a {self.kind} column", self.missing, one_of(RULES[self.kind]), where)
        for name, kinds in (
            ("categories", ("category", "ordinal", "flag")),
            ("range", ("numeric", "date")),
            ("format", ("date",)),
            ("unit", ("numeric",)),
            ("step", ("numeric",)),
        ):
            if getattr(self, name) != options_of(Column)[name].default and self.kind not in kinds:
                raise InputError(
                    f"The {name} of a {self.kind} column does not apply. It applies to {one_of(kinds)} "
                    f"columns. ({where})"
                )
        check_plain({"unit": self.unit, "description": self.description, "format": self.format}, where)
        self._check_categories(where)
        self._check_range(where)
        self._check_fill(where)

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_categories(self, where: str) -> None:
        if self.kind not in ("category", "ordinal", "flag"):
            return
        check_distinct(self.categories, "categories", where)
        wants = {"flag": 2, "ordinal": 2, "category": 1}[self.kind]
        if len(self.categories) < wants or (self.kind == "flag" and len(self.categories) > 2):
            words = "two categories, no and yes" if self.kind == "flag" else f"a list of at least {wants}"
            raise invalid(f"categories of a {self.kind} column", list(self.categories), words, where)
        if len(self.categories) > MOST_CATEGORIES:
            raise invalid("number of categories", len(self.categories), f"at most {MOST_CATEGORIES:,}", where)
        both = [cell for cell in self.missing_values if key_of(cell) in self.codes]
        if both:
            raise InputError(f"The cell {shown(both[0])} is a category and in missing_values. Keep one. ({where})")

    def _check_range(self, where: str) -> None:
        wants = "two dates such as 2020-12-31" if self.kind == "date" else "two numbers, the lower one first"
        low, high = (None, None) if len(self.range) != 2 else self.range
        right = all(v is None or isinstance(v, str) == (self.kind == "date") for v in self.range)
        try:
            right = right and len(self.range) == 2 and (low is None or high is None or self.bounds[0] < self.bounds[1])
        except ValueError:
            right = False
        if not right:
            raise invalid("range", list(self.range), wants, where)

    def _check_fill(self, where: str) -> None:
        if (self.missing == "constant") != (self.fill is not None):
            wants = "set, since" if self.fill is None else "left out unless"
            raise invalid("fill", self.fill, f'{wants} missing = "constant"', where)
        if self.fill is not None and math.isnan(self._raw(self.fill)):
            wants = {"numeric": "a number", "date": "a date such as 2020-12-31"}.get(self.kind, "one of the categories")
            raise invalid("fill", self.fill, wants, where)

    @cached_property
    def codes(self) -> dict[Key, int]:
        """The code of each category, by the key of its cell; see :func:`~fedstrata.data.tables.cells.key_of`."""
        return {key_of(cell): code for code, cell in enumerate(self.categories)}

    @property
    def size(self) -> int:
        """The number of categories; 0 for numbers and dates."""
        return len(self.categories)

    @property
    def bounds(self) -> tuple[float, float]:
        """The range of raw values: infinite where it is open, days for dates, codes for categories."""
        if self.size:
            return 0.0, self.size - 1.0
        low, high = self.range
        return -math.inf if low is None else self._bound(low), math.inf if high is None else self._bound(high)

    def _bound(self, value: float | str) -> float:
        return days_of(value) if isinstance(value, str) else float(value)

    @property
    def fill_value(self) -> float:
        """The raw value that fills missing cells if ``missing`` is "constant"; NaN otherwise."""
        return math.nan if self.fill is None else self._raw(self.fill)

    def _raw(self, cell: float | str) -> float:
        if self.size:
            return float(self.codes.get(key_of(cell), math.nan))
        try:
            return float("nan") if isinstance(cell, str) != (self.kind == "date") else self._bound(cell)
        except ValueError:
            return math.nan

    @classmethod
    def from_table(cls, table: Mapping[str, Any], where: str = "", key: str | None = None) -> Self:
        """Build it from a table; an infinite end of the range is open, and messages name the column."""
        name = table.get("name")
        where = ", ".join(filter(None, [where, f"column {shown(name)}" if isinstance(name, str) else ""]))
        built: Self = build(cls, {k: from_toml(v) for k, v in table.items()}, where, key)
        return built

    def to_table(self) -> dict[str, Any]:
        """Return its table in a schema file, with an infinite end where the range is open."""
        table = super().to_table()
        low, high = self.range
        return table | {"range": [-math.inf if low is None else low, math.inf if high is None else high]}


class Target(Options, owner="the target"):
    """The column to predict."""

    name: str = param(..., "name of the column in the files")
    kind: Literal["flag", "category", "numeric"] = param("flag", "two classes, several classes, or a number")
    positive: Sequence[Cell] = param(YES, "cells of a flag that are class 1")
    negative: Sequence[Cell] = param(NO, "cells of a flag that are class 0")
    classes: Sequence[Cell] = param((), "cells of a category, in the order of their classes")
    missing: Literal["refuse", "drop"] = param("refuse", "what to do with rows whose target is missing")

    def __post_init__(self) -> None:
        where = f"target {shown(self.name)}"
        check_name(self.name, "name of the target")
        for name in ("positive", "negative", "classes"):
            object.__setattr__(self, name, cells_of(getattr(self, name)))
        if self.kind == "flag" and self.negative == NO:  # a class 1 that is written 0 or no needs no other list
            taken = set(map(key_of, self.positive))
            object.__setattr__(self, "negative", tuple(cell for cell in NO if key_of(cell) not in taken))
        if self.kind == "flag" and not (self.positive and self.negative):
            name = "negative" if self.positive else "positive"
            raise invalid(name, (), "a list of at least one cell", where)
        check_distinct((*self.positive, *self.negative), "positive and negative cells", where)
        check_distinct(self.classes, "classes", where)
        if self.kind == "category" and len(self.classes) < 2:
            raise invalid("classes", list(self.classes), "a list of at least two", where)
        if self.kind != "category" and self.classes:
            raise invalid("classes", list(self.classes), 'left out unless kind = "category"', where)

    @cached_property
    def codes(self) -> dict[Key, int]:
        """The class of each cell, by its key; empty for numbers."""
        if self.kind == "flag":
            cells = [*((cell, 1) for cell in self.positive), *((cell, 0) for cell in self.negative)]
        else:
            cells = [(cell, code) for code, cell in enumerate(self.classes)]
        return {key_of(cell): code for cell, code in cells}

    @property
    def size(self) -> int:
        """The number of classes; 0 for numbers."""
        return {"flag": 2, "category": len(self.classes), "numeric": 0}[self.kind]
