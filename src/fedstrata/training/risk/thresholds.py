"""Thresholds for decisions, and what they mean for patients: from counts of the clients' held-out scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np

from fedstrata.core.errors import InputError, invalid
from fedstrata.core.files import Row
from fedstrata.training.risk.score_counts import ScoreCounts

Goal = Literal["sensitivity", "specificity", "ppv", "alerts"]

Z = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""


@dataclass(frozen=True)
class Share:
    """A share with its 95 % interval (Wilson); of no rows it is unknown."""

    hits: float
    rows: float

    @property
    def value(self) -> float | None:
        """The share."""
        return self.hits / self.rows if self.rows else None

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The interval."""
        if not self.rows:
            return None
        share, n = self.hits / self.rows, self.rows
        centre, half = share + Z**2 / (2 * n), Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
        return max(0.0, (centre - half) / (1 + Z**2 / n)), min(1.0, (centre + half) / (1 + Z**2 / n))

    def row(self, name: str) -> Row:
        """Return the share and its interval as columns of a table."""
        low, high = self.bounds or (None, None)
        return {name: self.value, f"{name}_low": low, f"{name}_high": high}


@dataclass(frozen=True)
class Decisions:
    """What follows for some rows if those with a score above a threshold raise an alert.

    alerts: rows above the threshold, and ``quiet`` the others: of class 0 and 1.
    """

    alerts: tuple[float, float]
    quiet: tuple[float, float]

    @property
    def rows(self) -> float:
        """The number of rows."""
        return sum(self.alerts) + sum(self.quiet)

    @property
    def sensitivity(self) -> Share:
        """The share of positive rows that raise an alert."""
        return Share(self.alerts[1], self.alerts[1] + self.quiet[1])

    @property
    def specificity(self) -> Share:
        """The share of negative rows that raise none."""
        return Share(self.quiet[0], self.alerts[0] + self.quiet[0])

    @property
    def ppv(self) -> Share:
        """The share of alerts that are positive rows."""
        return Share(self.alerts[1], sum(self.alerts))

    @property
    def alert_rate(self) -> Share:
        """The share of rows that raise an alert."""
        return Share(sum(self.alerts), self.rows)

    def row(self) -> Row:
        """Return the decisions as a row of a table; alerts are per 100 rows."""
        row: Row = {"rows": int(self.rows), "positives": int(self.alerts[1] + self.quiet[1])}
        for name, share in (("sensitivity", self.sensitivity), ("specificity", self.specificity), ("ppv", self.ppv)):
            row |= share.row(name)
        rate = self.alert_rate.value
        return row | {"alerts_per_100": None if rate is None else 100 * rate}


@dataclass(frozen=True)
class Threshold:
    """A threshold on scores, chosen by a goal, and what follows for all rows together and at each site."""

    score: float
    goal: Goal
    wanted: float
    together: Decisions
    sites: tuple[Decisions, ...]

    def rows(self, names: Sequence[str]) -> list[Row]:
        """Return a table: all sites together, then each."""
        each = zip(names, self.sites, strict=True)
        return [{"site": "together", **self.together.row()}, *({"site": n, **d.row()} for n, d in each)]


def goal_of(goals: Mapping[str, float | None]) -> tuple[Goal, float]:
    """Return the one goal that is given; raise unless there is exactly one, with a value that it can have."""
    given = {name: value for name, value in goals.items() if value is not None}
    wants = f"one of {', '.join(get_args(Goal))}, e.g. sensitivity=0.9"
    if len(given) != 1 or not given.keys() <= set(get_args(Goal)):
        raise invalid("goal of the threshold", ", ".join(given) or "none", wants)
    ((name, value),) = given.items()
    most = 100 if name == "alerts" else 1
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise invalid(name, value, f"a number above 0 and at most {most}{' per 100 rows' * (name == 'alerts')}")
    return cast(Goal, name), float(value)


def decisions_at(counts: np.ndarray, cell: int) -> Decisions:
    """Return the decisions for counts [2, b] if rows in the cells above ``cell`` raise an alert."""
    above, below = counts[:, cell + 1 :].sum(1), counts[:, : cell + 1].sum(1)
    return Decisions((float(above[0]), float(above[1])), (float(below[0]), float(below[1])))


def choose_threshold(counts: ScoreCounts, goal: Goal, wanted: float) -> Threshold:
    """Return the threshold that reaches a goal.

    sensitivity, ppv: the highest, and for ppv the lowest, threshold that reaches at least ``wanted``.
    specificity:      the lowest threshold that reaches at least ``wanted``.
    alerts:           the lowest threshold with at most ``wanted`` alerts per 100 rows.
    """
    counts.check_classes("A threshold")
    total = counts.together
    above = total[:, ::-1].cumsum(1)[:, ::-1]
    above = np.concatenate([above, np.zeros((2, 1))], axis=1)[:, 1:-1]  # rows above each inner edge: [2, b - 1]
    (all_negatives, all_positives), alerts = total.sum(1), above.sum(0)
    reached = {
        "sensitivity": above[1] / all_positives >= wanted,
        "specificity": 1 - above[0] / all_negatives >= wanted,
        "ppv": above[1] >= wanted * np.maximum(alerts, 1e-300),
        "alerts": 100 * alerts <= wanted * total.sum(),
    }[goal]
    if goal == "ppv":
        reached &= alerts > 0
    cells = np.flatnonzero(reached)
    if not len(cells):
        raise InputError(
            f"No threshold reaches {goal} {wanted:g}{_best(goal, above, alerts)}. Choose a value that can be reached."
        )
    cell = int(cells[-1] if goal == "sensitivity" else cells[0])
    sites = tuple(decisions_at(one, cell) for one in counts.counts)
    return Threshold(float(counts.edges[cell]), goal, wanted, decisions_at(total, cell), sites)


def _best(goal: Goal, above: np.ndarray, alerts: np.ndarray) -> str:
    """Say what can be reached at most."""
    if goal != "ppv":
        return ""
    return f"; the highest ppv here is {np.max(above[1][alerts > 0] / alerts[alerts > 0], initial=0.0):.3f}"
