"""When a run ends before its last round: budgets, and early stopping on validation data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from fedstrata.core.errors import FedstrataError, InputError, unknown
from fedstrata.core.files import Row
from fedstrata.data.federated import FederatedData
from fedstrata.problems.problem import Problem
from fedstrata.training.metrics.catalogue import RANKING, VALIDATION, measure
from fedstrata.training.metrics.evaluation import Evaluation
from fedstrata.training.settings import Settings

BUDGETS = {"max_seconds": ("seconds",), "max_samples": ("samples",), "max_bytes": ("bytes_up", "bytes_down")}
"""The options that limit what a run uses, and the counts that each limits, added up."""

POOLED = Evaluation(clients="none")


def exceeded_next(settings: Settings, used: Row, done: int) -> str | None:
    """Return the budget that the next round would exceed, if it costs as much as the mean of those before."""
    for name, counts in BUDGETS.items():
        limit = getattr(settings, name)
        if limit is not None and done and sum(used[count] for count in counts) * (done + 1) > limit * done:
            return name
    return None


class Validation(NamedTuple):
    """Early stopping: the clients' validation rows, as test data, and how long to wait for an improvement.

    watch:    the measure to judge by; None until the first evaluation has shown which there are.
    patience: the number of evaluations without improvement after which the run stops.
    """

    data: FederatedData
    watch: str | None
    patience: int

    def measured(self, problem: Problem, x: torch.Tensor, y: torch.Tensor | None) -> Row:
        """Return the watched measure on the validation rows, under its own name with a prefix."""
        measures = POOLED(problem, self.data, x, y)
        if self.watch is not None and self.watch not in measures:
            raise unknown("measure", self.watch, measures, "watch")
        name = self.watch or next(m for m in RANKING if m in measures)
        return {f"{VALIDATION}{name}": measures[name] if math.isfinite(measures[name]) else _worst(name)}

    def waited(self, history: Sequence[Row]) -> bool:
        """Whether the last evaluations brought no improvement."""
        return len(history) - 1 - best_row(history) >= self.patience


def _worst(name: str) -> float:
    """Return a finite number that is worse than any value of a measure."""
    return -1e308 if measure(name).higher_is_better else 1e308


def best_row(history: Sequence[Row]) -> int:
    """Return the index of the first row with the best value on validation data."""
    name = next((key for key in history[0] if key.startswith(VALIDATION)), None)
    if name is None:
        raise FedstrataError("The history has no measures on validation data.")
    sign = -1 if measure(name).higher_is_better else 1
    return min(range(len(history)), key=lambda i: sign * history[i][name])


def with_validation(
    data: FederatedData, settings: Settings, elsewhere: bool
) -> tuple[FederatedData, Validation | None]:
    """Return the data to train on, and what decides when to stop early, if ``patience`` is set.

    elsewhere: whether the clients' data are not in this process.
    """
    if settings.patience is None:
        return data, None
    if elsewhere:
        raise InputError("Early stopping needs the clients' data in this process: leave out patience in a federation.")
    held = data.validation(settings.validation, settings.seed)
    return replace(data, train=held.train), Validation(held, settings.watch, settings.patience)
