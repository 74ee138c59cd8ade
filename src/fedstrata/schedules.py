"""Learning rates over time, and local work counted in steps or epochs.

A rate is a number or a schedule. An algorithm asks for its value where it needs it, ``client.rate(self.lr)``, so every
rate of every algorithm can be scheduled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from fedstrata.errors import invalid, unknown


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
        number = isinstance(self.epochs, int | float) and not isinstance(self.epochs, bool)
        if not number or not 0 < self.epochs < 1e6:
            raise invalid("number of local epochs", self.epochs, "a positive number below a million")


Steps = int | Epochs


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
