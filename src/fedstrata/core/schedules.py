"""Learning rates over time, and local work counted in steps or epochs.

A rate is a number or a schedule. An algorithm asks for its value where it needs it, ``client.rate(self.lr)``, so every
rate of every algorithm can be scheduled.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from fedstrata.core.errors import invalid, is_number, unknown


@dataclass(frozen=True)
class Clock:
    """Where training is: ``round`` of ``rounds``, local ``step`` in the round, ``iteration`` since the start."""

    round: int
    rounds: int
    step: int = 0
    iteration: int = 0


@dataclass(frozen=True)
class Schedule(ABC):
    """A rate that changes over time: called with a :class:`Clock`, returns a number."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            several = isinstance(value, tuple)
            for number in value if several else (value,):
                if (
                    several != (field.name == "at")
                    or isinstance(number, bool)
                    or not isinstance(number, int | float)
                    or not 0 < number < float("inf")
                ):
                    wants = "positive numbers in a list" if field.name == "at" else "a positive number"
                    raise invalid(f"{field.name} of the {self.name} schedule", value, wants)

    @abstractmethod
    def __call__(self, clock: Clock) -> float:
        """Return the rate at this time."""


@dataclass(frozen=True)
class StepDecay(Schedule):
    """``value``, multiplied by ``factor`` at each of ``at``: shares of training (0.5) or round numbers (50)."""

    name: ClassVar[str] = "step"
    value: float
    at: tuple[float, ...] = (0.5, 0.75)
    factor: float = 0.1

    def __call__(self, clock: Clock) -> float:
        """Return the rate at this time."""
        passed = sum(clock.round >= (a * clock.rounds if 0 < a < 1 else a) for a in self.at)
        return self.value * self.factor**passed


@dataclass(frozen=True)
class RoundDecay(Schedule):
    """``value * factor**round``."""

    name: ClassVar[str] = "round_decay"
    value: float
    factor: float = 0.998

    def __call__(self, clock: Clock) -> float:
        """Return the rate at this time."""
        return float(self.value * self.factor**clock.round)


@dataclass(frozen=True)
class CubeRoot(Schedule):
    """The theorems' ``k / (n + t)**(1/3)``, t the local iteration since the start, from 0."""

    name: ClassVar[str] = "cube_root"
    k: float
    n: float = 1.0

    def __call__(self, clock: Clock) -> float:
        """Return the rate at this time."""
        return float(self.k / (self.n + clock.iteration) ** (1 / 3))


SCHEDULES: dict[str, type[Schedule]] = {c.name: c for c in (StepDecay, RoundDecay, CubeRoot)}

Rate = float | Schedule


def rate_at(rate: Rate, clock: Clock) -> float:
    """Return the value of a rate, number or schedule, at a time."""
    return rate(clock) if isinstance(rate, Schedule) else rate


@dataclass(frozen=True)
class Epochs:
    """Local work counted in passes over the client's own data instead of steps: ``steps = Epochs(5)``."""

    epochs: float

    def __post_init__(self) -> None:
        number = is_number(self.epochs)
        if not number or not 0 < self.epochs < 1e6:
            raise invalid("number of local epochs", self.epochs, "a positive number below a million")


@dataclass(frozen=True)
class Interval:
    """Local steps that grow slowly with the rounds: ``initial + log(t)`` to ``base``, rounded, in round t = 1, 2, ...

    ``rounding`` is "floor" or "ceil". ``steps = Interval(4, 2.0)`` are 4 steps in the first round, 5 in the second, 10
    in rounds 64 to 127.
    """

    initial: int
    base: float
    rounding: str = "floor"

    def __post_init__(self) -> None:
        if isinstance(self.initial, bool) or not isinstance(self.initial, int) or not 1 <= self.initial < 1 << 31:
            raise invalid("initial of an interval", self.initial, "a whole number of at least 1")
        number = is_number(self.base)
        if not number or not 1.001 <= self.base < float("inf"):
            raise invalid("base of an interval", self.base, "a number of at least 1.001")
        if self.rounding not in ("floor", "ceil"):
            raise invalid("rounding of an interval", self.rounding, "'floor' or 'ceil'")

    def __call__(self, round: int) -> int:
        """Return the local steps of a round, counted from 0 as the clock does."""
        exact = math.log(round + 1) / math.log(self.base)
        nearest = math.floor(exact + 0.5)
        if math.isclose(self.base**nearest, round + 1, rel_tol=1e-12):
            return self.initial + nearest
        return self.initial + (math.floor(exact) if self.rounding == "floor" else math.ceil(exact))


EqualSteps = int | Interval
"""Local steps that are the same for all clients."""

Steps = int | Epochs | Interval
"""Local steps, or epochs, whose steps differ with the size of a client."""


def steps_at(steps: EqualSteps, round: int) -> int:
    """Return the local steps of a round, counted from 0."""
    return steps(round) if isinstance(steps, Interval) else steps


def local_work(options: dict[str, Any], wanted: str, where: str) -> Epochs | Interval:
    """Build epochs or an interval from its table in a configuration: ``{epochs = 5}``, ``{initial = 4, base = 2.0}``.

    ``wanted`` is "EqualSteps" where epochs have no meaning.
    """
    names = set(options)
    if names == {"epochs"} and wanted == "Steps":
        return Epochs(**options)
    if {"initial", "base"} <= names <= {"initial", "base", "rounding"}:
        return Interval(**options)
    epochs = "{epochs = number}, or " if wanted == "Steps" else ""
    raise invalid(where, options, f"a whole number, {epochs}{{initial = number, base = number}}")


def schedule(options: dict[str, Any], where: str) -> Schedule:
    """Build a schedule from its table in a configuration, e.g. ``{schedule = "step", value = 0.1}``."""
    rest = {k: v for k, v in options.items() if k != "schedule"}
    name = options.get("schedule")
    if not isinstance(name, str) or name not in SCHEDULES:
        raise unknown("schedule", name, SCHEDULES, where)
    kind = SCHEDULES[name]
    known = [f.name for f in fields(kind)]
    for option in rest:
        if option not in known:
            raise unknown(f"option of the {name} schedule", option, known, where)
    if isinstance(rest.get("at"), list):
        rest["at"] = tuple(rest["at"])
    try:
        return kind(**rest)
    except TypeError as error:
        raise invalid(f"{name} schedule", options, f"complete ({error})", where) from None
