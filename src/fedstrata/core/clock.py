"""The time of a run: schedules read a clock, never a usage counter. Rounds and steps count from 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Clock(NamedTuple):
    """A time in training: ``round`` of ``rounds``, local ``step`` in the round, ``iteration`` since the start."""

    round: int
    rounds: int
    step: int = 0
    iteration: int = 0

    @staticmethod
    def of_round(round: int, rounds: int) -> Clock:
        """Return the time of a round for a rate that changes only between rounds: iterations count rounds."""
        return Clock(round, rounds, iteration=round)

    def after(self, steps: int) -> Clock:
        """Return the time after ``steps`` local steps."""
        return Clock(self.round, self.rounds, self.step + steps, self.iteration + steps)

    def tick(self) -> Clock:
        """Return the time after one local step."""
        return self.after(1)

    def after_loop(self, steps: int) -> Clock:
        """Return the time after a loop of ``steps`` local steps: the next loop counts its steps from 0 again."""
        return Clock(self.round, self.rounds, 0, self.iteration + steps)

    def ago(self, iterations: int) -> Clock:
        """Return the same time with an iteration count that is lower by ``iterations``."""
        return Clock(self.round, self.rounds, self.step, self.iteration - iterations)


@dataclass
class Progress:
    """How far a run has got: the round, the local iterations before it and up to now, its exchanges and choices.

    Round -1 is the preparation before the first round, with the rates and steps of that round (``core/schedules.py``).
    """

    rounds: int
    round: int = 0
    start: int = 0
    iteration: int = 0
    exchanges: int = 0
    choices: int = 0

    def begin(self, round: int) -> None:
        """Start a round."""
        self.round, self.start, self.exchanges, self.choices = round, self.iteration, 0, 0

    @property
    def round_start(self) -> Clock:
        """The time at the start of this round."""
        return Clock(self.round, self.rounds, iteration=self.start)

    @property
    def now(self) -> Clock:
        """The time at the start of the next exchange."""
        return Clock(self.round, self.rounds, iteration=self.iteration)
