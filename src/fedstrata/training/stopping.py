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
from fedstrata.training.metrics.catalogue import COSTS, MORE_COSTS, RANKING, VALIDATION, measure
from fedstrata.training.metrics.evaluation import Evaluation
from fedstrata.training.settings import Settings

BUDGETS = {"max_seconds": ("seconds",), "max_samples": ("samples",), "max_bytes": ("bytes_up", "bytes_down")}
"""The options that limit what a run uses, and the counts that each limits, added up."""

POOLED = Evaluation(clients="none")
OF_CLIENTS = Evaluation(clients="test", adapt_steps=0)


def costs_of(settings: Settings) -> list[str]:
    """Return the names of what a row counts besides measures."""
    used = (settings.faults is not None, settings.channel.noise > 0)
    return [*COSTS, *(name for name, counted in zip(MORE_COSTS, used, strict=True) if counted)]


def exceeded_next(settings: Settings, used: Row, own: Row, done: int) -> str | None:
    """Return the budget that the next round would exceed, if it costs as much as the mean of those before.

    used: what was used so far; ``own`` without the pre-training.
    """
    for name, counts in BUDGETS.items():
        limit = getattr(settings, name)
        total, of_rounds = (sum(row[count] for count in counts) for row in (used, own))
        if limit is not None and done and total * done + of_rounds > limit * done:
            return name
    return None


class Validation(NamedTuple):
    """Early stopping: the clients' validation rows, as test data, and how long to wait for an improvement.

    watch:    the measure to judge by; None for the first of ``RANKING`` that the first evaluation has.
    patience: the number of evaluations without improvement after which the run stops.
    """

    data: FederatedData
    watch: str | None
    patience: int

    def measured(self, problem: Problem, x: torch.Tensor, y: torch.Tensor | None, history: Sequence[Row]) -> Row:
        """Return the watched measure on the validation rows, under its name with a prefix; empty if it is undefined."""
        of_clients = self.watch is not None and measure(self.watch).rows == "clients"
        evaluation = OF_CLIENTS if of_clients else POOLED
        measures = {k: v for k, v in evaluation(problem, self.data, x, y).items() if math.isfinite(v)}
        if not history and self.watch is not None and self.watch not in measures:
            raise unknown("measure", self.watch, measures, "watch: what is defined on the validation rows")
        name = self.watch or (watched(history) if history else next((m for m in RANKING if m in measures), "loss"))
        return {f"{VALIDATION}{name}": measures[name]} if name in measures else {}

    def waited(self, history: Sequence[Row]) -> bool:
        """Whether the last evaluations brought no improvement."""
        return len(history) - 1 - best_row(history) >= self.patience


def watched(history: Sequence[Row]) -> str:
    """Return the measure that the first row has on validation data."""
    name = next((key for key in history[0] if key.startswith(VALIDATION)), None)
    if name is None:
        raise FedstrataError("The history has no measures on validation data.")
    return name.removeprefix(VALIDATION)


def best_row(history: Sequence[Row]) -> int:
    """Return the index of the first row with the best value on validation data; a row without one is the worst."""
    name = watched(history)
    sign = -1 if measure(name).higher_is_better else 1
    return min(range(len(history)), key=lambda i: sign * history[i].get(f"{VALIDATION}{name}", sign * math.inf))


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
    own = replace(data, train=held.train)
    if data.separate is not None and held.separate is not None:
        own = replace(own, separate=replace(data.separate, train=held.separate.train))
    return own, Validation(held, settings.watch, settings.patience)
