"""Schedules of learning rates, and local work in steps or epochs.

A rate is a number or a schedule. Algorithms read rates with ``client.rate(self.lr)``, so any rate can be scheduled.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

from fedstrata.core.clock import Clock
from fedstrata.core.kinds import Limits
from fedstrata.core.options import Options, param
from fedstrata.core.registry import Registry

SCHEDULES: Registry[type[Schedule]] = Registry("schedule")


class Schedule(Options, ABC):
    """A rate that changes over time: called with a :class:`Clock`, returns a number.

    A subclass is registered under its ``name``; in a configuration file it is ``{schedule = "step", value = 0.1}``.
    """

    name: ClassVar[str]
    words: ClassVar[str] = "a schedule"
    family = ("schedule", SCHEDULES)

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(owner=f"the {cls.name} schedule", **more)
        SCHEDULES.add(cls.name, cls)

    @abstractmethod
    def __call__(self, clock: Clock) -> float:
        """Return the rate at this time."""

    @property
    def stretches(self) -> bool:
        """Whether its rates depend on the length of the run."""
        return True


class StepDecay(Schedule):
    """``value``, multiplied by ``factor`` at each of ``at``: fractions of training (0.5) or round numbers (50)."""

    name: ClassVar[str] = "step"
    value: float = param(..., "initial rate", above=0)
    at: tuple[float, ...] = param((0.5, 0.75), "when to decay: fractions of training, or round numbers", above=0)
    factor: float = param(0.1, "factor applied at each decay", above=0)

    def __call__(self, clock: Clock) -> float:
        """Return the rate at this time."""
        passed = sum(clock.round >= (a * clock.rounds if 0 < a < 1 else a) for a in self.at)
        return self.value * self.factor**passed

    @property
    def stretches(self) -> bool:
        """Whether it decays at fractions of training."""
        return any(0 < a < 1 for a in self.at)


class RoundDecay(Schedule):
    """``value * factor**round``."""

    name: ClassVar[str] = "round_decay"
    value: float = param(..., "initial rate", above=0)
    factor: float = param(0.998, "factor applied after every round", above=0)

    def __call__(self, clock: Clock) -> float:
        """Return the rate at this time."""
        return float(self.value * self.factor**clock.round)

    @property
    def stretches(self) -> bool:
        """Whether its rates depend on the length of the run."""
        return False


class Power(Schedule):
    """``k / (n + t)**exponent``, where t counts local iterations since the start, from 0."""

    name: ClassVar[str] = "power"
    k: float = param(..., "numerator", above=0)
    n: float = param(1.0, "offset added to t", above=0)
    exponent: float = param(1 / 3, "exponent of the decay", above=0)

    def __call__(self, clock: Clock) -> float:
        """Return the rate at this time."""
        return float(self.k / (self.n + clock.iteration) ** self.exponent)

    @property
    def stretches(self) -> bool:
        """Whether its rates depend on the length of the run."""
        return False


class CubeRoot(Power):
    """``k / (n + t)**(1/3)`` as in the theorems, where t counts local iterations since the start, from 0."""

    name: ClassVar[str] = "cube_root"
    exponent: float = field(default=1 / 3, init=False, repr=False)


Rate = float | Schedule


def rate_at(rate: Rate, clock: Clock) -> float:
    """Return the value of a rate (a number or a schedule); before the first round, its value in the first round."""
    return rate(clock._replace(round=max(0, clock.round))) if isinstance(rate, Schedule) else rate


class Epochs(Options, owner="the local work"):
    """Local work in passes over the client's own data instead of steps: ``steps = Epochs(5)``."""

    words: ClassVar[str] = "epochs such as {epochs = 2}"
    epochs: float = param(..., "passes over the client's own data", above=0, below=1_000_000)


class Interval(Options, owner="an interval"):
    """A slowly growing number of local steps: ``initial`` plus the rounded log of t to ``base`` in round t = 1, 2, ...

    ``steps = Interval(4, 2.0)`` takes 4 steps in the first round, 5 in the second, 10 in rounds 64 to 127.
    """

    words: ClassVar[str] = "an interval such as {initial = 4, base = 2.0}"
    initial: int = param(..., "steps in the first round", least=1)
    base: float = param(..., "base of the added logarithm of the round number", least=1.001)
    rounding: Literal["floor", "ceil"] = param("floor", "how the logarithm is rounded")

    def __call__(self, round: int) -> int:
        """Return the number of local steps in a round; rounds count from 0."""
        exact = math.log(round + 1) / math.log(self.base)
        nearest = math.floor(exact + 0.5)
        if math.isclose(self.base**nearest, round + 1, rel_tol=1e-12):
            return self.initial + nearest
        return self.initial + (math.floor(exact) if self.rounding == "floor" else math.ceil(exact))


EqualSteps = Annotated[int, Limits(least=1)] | Interval
"""Local steps, the same for all clients."""

Steps = Annotated[int, Limits(least=1)] | Epochs | Interval
"""Local steps, or epochs, whose number of steps depends on the client's data."""


def steps_at(steps: EqualSteps, round: int) -> int:
    """Return the number of local steps in a round; rounds count from 0, and round -1 is like round 0."""
    return steps(max(0, round)) if isinstance(steps, Interval) else steps
