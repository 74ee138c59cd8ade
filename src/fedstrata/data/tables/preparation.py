"""From raw values to the inputs of a model, by statistics that the sites compute and none of their rows.

A column of numbers, dates or ordinals is clipped to its range, centred and scaled, and its missing cells are filled; a
flag is 0 or 1; a category becomes one 0/1 input per category, or its frequency. What this needs to know, the sites tell
in one exchange as sums (:mod:`fedstrata.data.tables.statistics`); statistics are those of the cells that are present.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from fedstrata.core.errors import InputError, Unsolvable, listed
from fedstrata.core.options import Options, param
from fedstrata.data.tables import statistics
from fedstrata.data.tables.columns import Column
from fedstrata.data.tables.fitted import Fitted
from fedstrata.data.tables.schema import Schema

MOST_CELLS = 65_536
"""The longest grid of a column for its median and quartiles."""


class Preparation(Options, owner="the preparation"):
    """How raw values become inputs of a model."""

    scale: Literal["standard", "robust", "none"] = param(
        "standard", "numbers: mean 0 and deviation 1, or median 0 and distance of the quartiles 1, or as they are"
    )
    encode: Literal["one_hot", "frequency"] = param(
        "one_hot", "categories: one 0/1 input for each, or how frequent the row's category is"
    )
    rare: int = param(1, "categories with fewer rows than this, over all sites, share one input called other", least=1)
    clip: bool = param(True, "limit numbers to the range in the schema")
    minimum: int = param(10, "smallest count that may leave a site; smaller ones are hidden or rounded", least=1)
    grid: int = param(
        1024, "points of the grid for medians and quartiles of columns without a step", least=16, most=MOST_CELLS
    )


@dataclass(frozen=True)
class Plan:
    """What a preparation asks the sites, and which inputs it makes: known before any statistics are.

    alone: whether it is for the table of one site that tells nobody: a column without any value, which is an error
           where sites together know nothing of it, is then 0 in every row.
    """

    schema: Schema
    how: Preparation
    alone: bool = False

    def __post_init__(self) -> None:
        bounds = np.array([column.bounds for column in self.columns])
        open_ = [self.columns[j] for j in self.graded if not math.isfinite(bounds[j, 1] - bounds[j, 0])]
        if open_:
            raise InputError(_open_range(open_))

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the raw values."""
        return self.schema.features

    def of_one_site(self) -> Plan:
        """Return the plan for a site that prepares its own table: all counts are exact."""
        return replace(self, how=self.how.replace(minimum=1), alone=True)

    # --- which columns ------------------------------------------------------------------------------------------

    @cached_property
    def scaled(self) -> list[int]:
        """Numbers, dates and ordinals, which are scaled."""
        return [j for j, c in enumerate(self.columns) if c.kind in ("numeric", "date", "ordinal")]

    @cached_property
    def encoded(self) -> list[int]:
        """Categories."""
        return [j for j, c in enumerate(self.columns) if c.kind == "category"]

    @cached_property
    def averaged(self) -> list[int]:
        """Columns whose moments are asked for."""
        standard = self.how.scale == "standard"
        return [j for j, c in enumerate(self.columns) if c.missing == "mean" or (standard and j in self.scaled)]

    @cached_property
    def graded(self) -> list[int]:
        """Columns whose distribution on a grid is asked for."""
        robust = self.how.scale == "robust"
        return [j for j, c in enumerate(self.columns) if c.missing == "median" or (robust and j in self.scaled)]

    @cached_property
    def counted(self) -> list[int]:
        """Columns whose categories are counted."""
        shares = self.how.encode == "frequency" or self.how.rare > 1
        return [j for j, c in enumerate(self.columns) if c.missing == "most_frequent" or (shares and j in self.encoded)]

    def grid(self, j: int) -> np.ndarray:
        """Return the points at which the distribution of a column is asked for."""
        column = self.columns[j]
        low, high = column.bounds
        step = 1.0 if column.size or (column.kind == "date" and high - low < MOST_CELLS) else column.step
        if step is None:
            return np.linspace(low, high, self.how.grid)
        cells = round((high - low) / step) + 1
        if cells > MOST_CELLS:
            raise InputError(
                f"The column {column.name!r} has {cells:,} steps of {step:g} in its range; at most {MOST_CELLS:,} are "
                "possible. Leave out its step: medians are then those of a grid."
            )
        points: np.ndarray = low + step * np.arange(cells)
        return points

    # --- the exchange -------------------------------------------------------------------------------------------

    @cached_property
    def sizes(self) -> list[int]:
        """The lengths of the parts of an answer."""
        return [
            *(3 for _ in self.averaged),
            *(self.columns[j].size for j in self.counted),
            *(len(self.grid(j)) for j in self.graded),
        ]

    def answer(self, values: np.ndarray) -> np.ndarray:
        """Return what a site tells of its raw values [n, p]: a vector."""
        minimum, values = self.how.minimum, self.clipped(values)
        moments = statistics.moments(values[:, self.averaged], minimum)
        for at, j in enumerate(self.averaged):
            if self.columns[j].size:
                counts = statistics.category_counts(values[:, j], self.columns[j].size, minimum)
                moments[at] = statistics.moments_of_codes(counts)
        parts = [moments.ravel()]
        parts += [statistics.category_counts(values[:, j], self.columns[j].size, minimum) for j in self.counted]
        for j in self.graded:
            grid = self.grid(j)
            tolerance = 0.5 * (grid[1] - grid[0]) if self._stepped(j) else 0.0
            parts.append(statistics.below(values[:, j], grid + tolerance, minimum))
        return np.concatenate(parts)

    def _stepped(self, j: int) -> bool:
        return self.columns[j].step is not None or self.columns[j].size > 0 or self.columns[j].kind == "date"

    def clipped(self, values: np.ndarray) -> np.ndarray:
        """Return raw values within the ranges of the schema."""
        if not self.how.clip:
            return values
        low, high = np.array([c.bounds if c.kind in ("numeric", "date") else (-1.0, math.inf) for c in self.columns]).T
        within: np.ndarray = np.clip(values, low, high)
        return within

    def fit(self, answers: np.ndarray) -> Fitted:
        """Return the preparation that fits the answers of all sites [N, s]."""
        parts = np.split(answers, np.cumsum(self.sizes)[:-1], axis=1)
        q, c = len(self.averaged), len(self.counted)
        moments = statistics.merged(np.stack(parts[:q], axis=1)) if q else np.zeros((0, 3))
        counts = {j: part.sum(0) for j, part in zip(self.counted, parts[q : q + c], strict=True)}
        below = {j: part.sum(0) for j, part in zip(self.graded, parts[q + c :], strict=True)}
        means = dict(zip(self.averaged, moments, strict=True))
        numbers = [*((j, m[0]) for j, m in means.items()), *((j, part[-1]) for j, part in below.items())]
        empty = [j for j, n in [*numbers, *((j, part.sum()) for j, part in counts.items())] if n == 0]
        for j in empty:
            if not self.alone:
                raise Unsolvable(
                    f"No site can tell anything of the column {self.columns[j].name!r}: everywhere it has fewer than "
                    f"{self.how.minimum} values, the minimum of the preparation. Drop it, or lower the minimum."
                )
        fill, centre, scale = np.zeros(len(self.columns)), np.zeros(len(self.columns)), np.ones(len(self.columns))
        for j, column in enumerate(self.columns):
            if j in empty:
                scale[j] = math.inf if j in self.scaled else 1.0  # so the input is 0, whatever other tables have there
                continue
            quantiles = (
                {s: statistics.quantile(self.grid(j), below[j], s) for s in (0.25, 0.5, 0.75)} if j in below else {}
            )
            fill[j] = {
                "mean": means[j][1] if j in means else math.nan,
                "median": quantiles.get(0.5, math.nan),
                "most_frequent": float(np.argmax(counts[j])) if j in counts else math.nan,
                "constant": column.fill_value,
                "refuse": math.nan,
            }[str(column.missing)]
            if j in self.scaled and self.how.scale == "standard":
                count, centre[j], squares = means[j]
                scale[j] = _or_one(math.sqrt(squares / count), abs(centre[j]))
            elif j in self.scaled and self.how.scale == "robust":
                centre[j], scale[j] = quantiles[0.5], _or_one(quantiles[0.75] - quantiles[0.25], abs(quantiles[0.5]))
        shares = [
            counts[j] / max(counts[j].sum(), 1) if j in counts else np.zeros(self.columns[j].size) for j in self.encoded
        ]
        rare = [counts[j] < self.how.rare if j in counts else np.zeros(self.columns[j].size) for j in self.encoded]
        return Fitted(self, np.concatenate([fill, centre, scale, *shares, *rare]).astype(np.float64))

    # --- the inputs ---------------------------------------------------------------------------------------------

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the inputs of the model."""
        made: list[str] = []
        for column in self.columns:
            if column.kind != "category" or self.how.encode == "frequency":
                made.append(column.name)
            else:
                made += [f"{column.name}={category}" for category in column.categories]
                made += [f"{column.name}=other"] if self.how.rare > 1 else []
            made += [f"{column.name} missing"] if column.indicator else []
        return tuple(made)


def _open_range(columns: Sequence[Column]) -> str:
    """Say that columns need a range."""
    if all(column.missing == "median" for column in columns):
        why, instead = "missing cells are filled by the median", ', or missing = "mean"'
    else:
        why, instead = "medians and quartiles are taken in it", ""
    names = [repr(column.name) for column in columns]
    one = len(names) == 1
    what = f"The column {names[0]} needs" if one else f"The columns {listed(names)} need"
    return f"{what} both ends of {'its' if one else 'their'} range, because {why}. Set range = [low, high]{instead}."


def _or_one(scale: float, size: float) -> float:
    """Return a scale, or 1 for a column that is constant up to rounding."""
    return scale if scale > 10 * np.finfo(np.float64).eps * size else 1.0
