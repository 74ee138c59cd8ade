"""Where to search for hyperparameters, and which points to try."""

from __future__ import annotations

import json
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedstrata.core.errors import InputError, invalid, is_number, unknown
from fedstrata.core.kinds import Place, Refused
from fedstrata.core.options import Option, Shares, options_of
from fedstrata.experiments.methods import Method

Point = dict[str, float]
"""The value of each hyperparameter that is searched."""

EDGE = 0.1
"""A winner within this fraction of a range, on its logarithmic scale, lies at an edge."""

INSIDE = 1e-3
"""How close to an exclusive limit a search may come, relative to it."""

GENERATION = 4
"""How many points a sampler of Optuna chooses before it learns how they did; the same for any number of jobs."""


@dataclass(frozen=True)
class Range:
    """The values of a hyperparameter to search, on a logarithmic scale.

    least, most: what the hyperparameter allows at all; None if there is no limit.
    whole:       whether it is a whole number.
    """

    low: float
    high: float
    least: float | None = None
    most: float | None = None
    whole: bool = False

    def at(self, position: float) -> float:
        """Return the value at a position between 0 and 1, with four digits."""
        return self.rounded(math.exp(math.log(self.low) + position * (math.log(self.high) - math.log(self.low))))

    def rounded(self, value: float) -> float:
        """Return a value with four digits, inside the range."""
        return min(max(float(f"{value:.4g}"), self.low), self.high)

    def position(self, value: float) -> float:
        """Return where a value lies: 0 at the lower end, 1 at the upper one; 0 itself is infinitely far below."""
        if value <= 0:
            return -math.inf
        if self.high == self.low:
            return 0.5
        return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))

    def contains(self, value: float) -> bool:
        """Whether a value lies in the range; a method's own setting or a default may not."""
        return value > 0 and -1e-9 <= self.position(value) <= 1 + 1e-9

    def edge(self, value: float, share: float = EDGE) -> int:
        """Return -1 or 1 if a value lies at the lower or upper edge and the hyperparameter allows more, else 0.

        share: the outer part of the range that is its edge.
        """
        if not self.contains(value):
            return 0
        position = self.position(value)
        if position < share:
            ends = (self.least is not None and self.low <= self.least) or (self.whole and self.low <= 1)
            return 0 if ends else -1
        return 1 if position > 1 - share and (self.most is None or self.high < self.most) else 0

    def beyond(self, side: int) -> Range:
        """Return the range next to an edge: a factor of 2 to 10, depending on the range, within what is allowed."""
        factor = min(max(math.sqrt(self.high / self.low), 2.0), 10.0)
        if side < 0:
            low = self.low / factor
            return replace(self, low=low if self.least is None else max(low, self.least), high=self.low)
        high = self.high * factor
        return replace(self, low=self.high, high=high if self.most is None else min(high, self.most))

    def around(self, value: float) -> Range:
        """Return the quarter of the range around a value."""
        centre = min(1.0, max(0.0, self.position(value)))
        return replace(self, low=self.at(max(0.0, centre - 0.125)), high=self.at(min(1.0, centre + 0.125)))

    def with_(self, other: Range) -> Range:
        """Return the range that contains both."""
        return replace(self, low=min(self.low, other.low), high=max(self.high, other.high))


Space = dict[str, Range]


def joined(space: Space, beyond: Space) -> Space:
    """Return ranges with what was added beyond their edges."""
    return {name: r.with_(beyond[name]) if name in beyond else r for name, r in space.items()}


def space_of(method: Method, searched: Mapping[str, Mapping[str, tuple[float, float]]]) -> Space:
    """Return the ranges to search for a method: its own entry in ``searched``, or those that its algorithm declares."""
    algorithm = method.algorithm
    declared = options_of(algorithm)
    chosen = searched.get(method.label)
    where = f"[tune.search.{json.dumps(method.label)}]"
    if chosen is None:
        chosen = {name: option.search for name, option in declared.items() if option.search is not None}
    space = {}
    for name, (low, high) in chosen.items():
        if name not in declared:
            raise unknown(f"option of {algorithm.name}", name, declared, where)
        if not 1e-30 <= low <= high <= 1e30:
            raise invalid(
                f"search range of {name}",
                [low, high],
                "two positive numbers in ascending order, from 1e-30 to 1e30",
                where,
            )
        for end in (low, high):
            if not _accepts(declared[name], end):
                raise invalid(
                    f"search range of {name}", [low, high], f"within its limits: {declared[name].wants}", where
                )
        space[name] = _range(declared[name], low, high)
    return space


def _accepts(option: Option, value: float) -> bool:
    """Whether an option takes a number that a search may choose."""
    try:
        option.kind.read(max(1, round(value)) if option.kind.whole else value, Place(f"search range of {option.name}"))
    except Refused:
        return False
    return True


def _range(option: Option, low: float, high: float) -> Range:
    limits = option.limits
    least = [limits.least] if limits.least else [limits.above * (1 + INSIDE)] if limits.above else []
    most = [limits.most] if limits.most is not None else [limits.below * (1 - INSIDE)] if limits.below else []
    if isinstance(option.search, Shares):
        most.append(1.0)
    return Range(low, high, max(least, default=None), min(most, default=None), option.kind.whole)


def defaults_of(method: Method, space: Space) -> Point | None:
    """Return the algorithm's defaults of what is searched; None if one of them is not a number."""
    declared = options_of(method.algorithm)
    defaults = {name: declared[name].default for name in space}
    return {n: float(v) for n, v in defaults.items()} if all(map(is_number, defaults.values())) else None


def as_options(method: Method, point: Point) -> dict[str, Any]:
    """Return a point of the search as options: integers rounded, and schedules scaled instead of replaced."""
    options: dict[str, Any] = {}
    for name, option in options_of(method.algorithm).items():
        if name not in point:
            continue
        value: Any = point[name]
        schedule = method.current.get(name)
        if option.kind.whole:
            value = max(1, round(value))
        elif isinstance(schedule, dict):
            value = {**schedule, "k" if schedule.get("schedule") in ("cube_root", "power") else "value": value}
        options[name] = value
    return options


# --- samplers --------------------------------------------------------------------------------------------------------


class Sampler(ABC):
    """Chooses the points of a search, a generation at a time."""

    @abstractmethod
    def ask(self, count: int) -> list[Point]:
        """Return the next points, at most ``count``."""

    def tell(self, point: Point, value: float | None) -> None:  # noqa: B027
        """Learn the value of a point, larger is better; None if it failed."""


class Spread(Sampler):
    """Points that cover the space evenly: scrambled Sobol points, or a Latin hypercube."""

    def __init__(self, space: Space, name: str, seed: int) -> None:
        self.space, self.name, self.seed = space, name, seed

    def ask(self, count: int) -> list[Point]:
        """Return all points at once."""
        from scipy.stats import qmc

        if self.name == "latin":
            unit = qmc.LatinHypercube(len(self.space), rng=self.seed).random(count)
        else:
            power = max(0, math.ceil(math.log2(count)))
            unit = qmc.Sobol(len(self.space), rng=self.seed).random_base2(power)[:count]
        return [{n: r.at(float(u)) for (n, r), u in zip(self.space.items(), row, strict=True)} for row in unit]


class Optuna(Sampler):
    """A sampler of Optuna, which learns from the points before."""

    def __init__(self, space: Space, name: str, seed: int) -> None:
        try:
            import optuna
        except ImportError:
            raise InputError(f"The sampler {name!r} needs Optuna: pip install 'fedstrata[optuna]'.") from None
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        samplers = {"tpe": optuna.samplers.TPESampler, "gp": optuna.samplers.GPSampler}
        ranges = {n: optuna.distributions.FloatDistribution(r.low, r.high, log=True) for n, r in space.items()}
        self.space = space
        self.ranges: dict[str, Any] = dict(ranges)
        self.optuna = optuna
        self.study = optuna.create_study(direction="maximize", sampler=samplers[name](seed=seed))
        self.asked: list[tuple[Point, Any]] = []
        self.worst: float | None = None

    def ask(self, count: int) -> list[Point]:
        """Return a generation of points."""
        points = []
        for _ in range(min(count, GENERATION)):
            trial = self.study.ask(self.ranges)
            point = {name: self.space[name].rounded(value) for name, value in trial.params.items()}
            self.asked.append((point, trial))
            points.append(point)
        return points

    def tell(self, point: Point, value: float | None) -> None:
        """Learn the value of a point that was asked for; None if it failed."""
        index = next(i for i, (asked, _) in enumerate(self.asked) if asked == point)
        _, trial = self.asked.pop(index)
        if value is not None:
            self.worst = value if self.worst is None else min(value, self.worst)
        if self.worst is None:
            self.study.tell(trial, state=self.optuna.trial.TrialState.PRUNED)
        else:  # a failed trial without a value would be ignored, and its neighbourhood tried again
            self.study.tell(trial, self.worst if value is None else value)


def sampler_of(name: str, space: Space, label: str, seed: int) -> Sampler:
    """Return a sampler; its points are a function of the seed and the label, so methods get different ones."""
    own = np.random.SeedSequence([seed, zlib.crc32(label.encode())]).generate_state(1)[0]
    return (Spread if name in ("sobol", "latin") else Optuna)(space, name, int(own))
