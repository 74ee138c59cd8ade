"""What a reference of the equation harness gets: the cohort, the batches that are drawn, and the clock."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np

import fedstrata as fs
from algorithms.equations import Case, Change, Method, Options, Ours, Row, Vectors, steps_a_round
from reference.fedlalr import interval
from support import drawn
from worlds import SIZES, Arrays, Draw, N, Vector

COMMON = math.gcd(*SIZES)

DRAWN: dict[tuple[Any, ...], Arrays] = {}
"""Batches drawn before; most rows use the same ones."""


@cache
def edited(function: Callable[..., Any], lines: tuple[tuple[str, str], ...]) -> Callable[..., Any]:
    """A reference with some of its lines changed."""
    module = inspect.getmodule(function)
    assert module is not None
    source = inspect.getsource(module)
    for line, other in lines:
        assert source.count(line) == 1, line
        source = source.replace(line, other)
    space: dict[str, Any] = {"__name__": module.__name__, "__package__": module.__package__}
    exec(source, space)
    return space[function.__name__]


@dataclass(frozen=True)
class Paper:
    """What a reference is to do: the same rounds, with the same names for batches.

    ``asked`` is the number of exchanges that the problem's query took before the first round.
    """

    method: Method
    world: Any
    case: Case
    options: Options
    ours: Ours
    change: Change
    asked: int = 0

    @property
    def weighting(self) -> str:
        return self.case.weighting

    def call(self, function: Callable[..., Any], *positional: Any, **arguments: Any) -> Any:
        """Call a reference, or what the change makes of it."""
        function = edited(function, self.change.lines) if self.change.lines else function
        return function(*positional, **{**arguments, **self.change.arguments})

    def tweak(self, name: str, default: Any) -> Any:
        return self.change.tweaks.get(name, default)

    # --- clients --------------------------------------------------------------------------------------------------

    @cached_property
    def copies(self) -> list[int]:
        """The library's number of each of the reference's clients."""
        weigh = self.weighting == "samples" and not self.method.weighted
        return [k for k in range(N) for _ in range(SIZES[k] // COMMON if weigh else 1)]

    @property
    def clients(self) -> int:
        return len(self.copies)

    @property
    def weights(self) -> dict[int, int]:
        return dict(enumerate(SIZES if self.weighting == "samples" else [1] * N))

    def cohorts(self, which: int = 0, of: int = 1) -> list[list[int]]:
        """The reference's clients in each round; where a round draws several cohorts, one of them."""
        drawn = self.ours.cohorts[which::of]
        return [[c for c, k in enumerate(self.copies) if k in cohort] for cohort in drawn]

    def rounds(self) -> Iterator[tuple[int, list[int]]]:
        return enumerate(self.cohorts(), self.case.first_round)

    @property
    def everyone(self) -> list[list[int]]:
        return [list(range(self.clients))] * len(self.ours.cohorts)

    def rows(self, name: str) -> dict[int, Vector]:
        """The random rows that the reference's clients keep."""
        kept = self.ours.rows[name]
        return {c: kept[k] for c, k in enumerate(self.copies) if k in kept}

    def given(self, **names: str) -> dict[str, Any]:
        """The random state, if there is one, as arguments of the reference: vectors of the server, and rows ("c_k").

        ``names`` says what the reference calls them; ``found`` is the way back.
        """
        server = self.ours.server
        if not self.case.given:
            return {}
        return {name: self.rows(key[:-2]) if key.endswith("_k") else server[key] for key, name in names.items()}

    def found(self, out: Mapping[str, Any], **names: str) -> Vectors:
        """What a reference returned, under the library's names."""
        return {key: self.back(out[name]) if key.endswith("_k") else out[name] for key, name in names.items()}

    def back(self, rows: Mapping[int, Vector] | Vector) -> Vector:
        """Rows of the reference's clients as rows of the library's; zeros where there is none."""
        rows = rows if isinstance(rows, Mapping) else dict(enumerate(rows))
        none = np.zeros_like(next(iter(rows.values())))
        return np.stack([rows.get(self.copies.index(k), none) for k in range(N)])

    def by_steps(self, r: int, cohort: list[int], call: Callable[[list[int], int], Vectors]) -> Vectors:
        """The mean over clients of what a reference for equal steps returns: one call for each number of steps."""
        groups: dict[int, list[int]] = {}
        for c in cohort:
            groups.setdefault(self.steps_of(self.copies[c], r), []).append(c)
        ends = [(len(group) / len(cohort), call(group, steps)) for steps, group in groups.items()]
        return {key: sum(share * end[key] for share, end in ends) for key in ends[0][1]}

    # --- batches --------------------------------------------------------------------------------------------------

    def draw(
        self,
        k: int,
        r: int,
        t: int,
        exchange: int = 0,
        stream: int = 0,
        times: int | None = 1,
        data: fs.FederatedData | None = None,
    ) -> Draw:
        """The batches of the library's client k, by level; ``times`` as large, or all its data."""
        size = None if self.case.batch_size is None or times is None else times * self.case.batch_size
        data, sampling = data or self.world.data, self.case.sampling

        def draw(level: int) -> Arrays:
            names = (self.change.seed, r, exchange, level, stream)
            key = (id(data), k, names, t, size, sampling)
            if key not in DRAWN:
                DRAWN[key] = drawn(data, k, names, t, batch_size=size, sampling=sampling)
            return DRAWN[key]

        return draw

    def batch(self, k: int, r: int, t: int, *names: int, level: int = 0, **options: Any) -> Arrays:
        """A batch of the library's client k."""
        return self.draw(k, r, t, *names, **options)(level)

    # --- time -----------------------------------------------------------------------------------------------------

    def steps_of(self, k: int, r: int, sizes: Any = SIZES) -> int:
        """Local steps of the library's client k in round r."""
        steps, size = self.options["steps"], self.case.batch_size
        if isinstance(steps, fs.Interval):
            return interval(r + 1, steps.initial, steps.base, steps.rounding)
        if isinstance(steps, fs.Epochs):
            return math.ceil(round(steps.epochs * (1 if size is None else math.ceil(sizes[k] / size)), 9))
        return int(steps)

    def before(self, r: int) -> int:
        """Local iterations before round r: those of the busiest client in each round."""
        if isinstance(self.options.get("steps", 1), int):
            return r * (steps_a_round(self.options) or 1)
        cohorts = self.ours.cohorts[: r - self.case.first_round]
        return sum(max(self.steps_of(k, s) for k in cohort) for s, cohort in enumerate(cohorts))

    def at(self, key: str, r: int, iteration: int) -> float:
        """A rate at a time, from its formula."""
        value = self.options[key]
        if isinstance(value, fs.CubeRoot):
            return float(value.k / (value.n + iteration) ** (1 / 3))
        if isinstance(value, fs.RoundDecay):
            return float(value.value * value.factor**r)
        if isinstance(value, fs.StepDecay):
            rounds = self.case.first_round + (self.case.rounds or self.method.rounds)
            passed = [r >= (at if at >= 1 else at * rounds) for at in value.at]
            return float(value.value * value.factor ** sum(passed))
        return float(value)

    def rate(self, key: str) -> Callable[[int, int], float]:
        """A rate by round and local step."""
        return lambda r, t: self.at(key, r, self.before(r) + t)

    def server_rate(self, key: str) -> Callable[[int], float]:
        """A rate by round, at its start."""
        return lambda r: self.rate(key)(r, 0)


def storm_weight(paper: Paper, key: str, later: bool) -> Callable[[int, int], float]:
    """The weight of a STORM estimate's update (r, j): of iteration (r, j), at most 1, by the theorem times eta^2.

    A schedule by rounds is read in the round in which the update is made: ``later`` if the last one is the next's.
    """
    q, theorem = paper.options["steps"], paper.options.get("weights") == "theorem"

    def value(r: int, j: int) -> float:
        when = r + (later and j == q - 1), r * q + j
        return min(1.0, paper.at(key, *when) * (paper.at("eta", *when) ** 2 if theorem else 1.0))

    return value


def run_reference(row: Row, ours: Ours) -> Vectors:
    """The same rounds by the paper."""
    change, method = row.change, row.method
    case = replace(row.case, **change.run)
    world: Any = change.world_of(method.worlds[row.world]())
    options = {**method.options, **case.options, **change.options}
    paper = Paper(method, world, case, options, ours, change)
    if getattr(world, "prepare", None) is not None:
        paper = replace(paper, world=world.prepare(paper), asked=1)
    return method.reference(paper)
