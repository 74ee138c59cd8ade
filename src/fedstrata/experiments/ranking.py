"""The order of trials: by the measure of a search, and where a setting lies in what was searched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from fedstrata.experiments.search import Space
from fedstrata.experiments.trials import Tried
from fedstrata.training.metrics.catalogue import sign_of

QUARTER = 0.25


class Ranking:
    """Ranks trials by a measure."""

    def __init__(self, measure: str) -> None:
        self.measure, self._sign = measure, sign_of(measure)

    def value(self, trial: Tried, rounds: int | None = None) -> float | None:
        """Return the mean of the measure over seeds; None if a seed diverged, or the trial was not run."""
        return trial.value(self.measure, rounds)

    def gain(self, trial: Tried) -> float | None:
        """Return the value of a trial, larger is better."""
        value = self.value(trial)
        return None if value is None else self._sign * value

    def sorted(self, trials: Sequence[Tried], rounds: int | None = None) -> list[Tried]:
        """Return trials, best first and failures last; the longest first, unless only ``rounds`` count."""
        return sorted(trials, key=partial(self._order, rounds=rounds))

    def best(self, trials: Sequence[Tried], rounds: int | None = None) -> Tried:
        """Return the best trial."""
        return self.sorted(trials, rounds)[0]

    def _order(self, trial: Tried, rounds: int | None) -> tuple[float, float, int]:
        value = self.value(trial, rounds)
        length = 0.0 if rounds is not None else -float(trial.rounds)
        return (math.inf, 0.0, trial.number) if value is None else (length, -self._sign * value, trial.number)


def edges_of(trial: Tried, space: Space, others: Sequence[Tried] = ()) -> dict[str, int]:
    """Return at which edge of its range each hyperparameter of a trial lies, for those at one.

    That is the outer tenth of the range, or the outer quarter if none of the ``others`` was tried further out.
    """
    sides = {}
    for name, value in trial.numbers.items():
        if name in space:
            tried = [other.numbers[name] for other in others if name in other.numbers]
            outermost = {-1: value <= min(tried, default=-math.inf), 1: value >= max(tried, default=math.inf)}
            side = space[name].edge(value) or next(
                (s for s in (-1, 1) if outermost[s] and space[name].edge(value, QUARTER) == s), 0
            )
            if side:
                sides[name] = side
    return sides
