"""The methods that are compared or tuned, and the outcomes of their runs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstrata.algorithms.algorithm import Algorithm
from fedstrata.core.errors import Diverged, InputError, listed, within
from fedstrata.core.files import Row
from fedstrata.data.federated import FederatedData
from fedstrata.experiments.influence import rows_of
from fedstrata.problems.problem import Problem
from fedstrata.training.callbacks import Callback
from fedstrata.training.fingerprint import digest_of, identity_of
from fedstrata.training.local import LocalRun
from fedstrata.training.metrics.catalogue import COSTS, MORE_COSTS, RANKING
from fedstrata.training.metrics.evaluation import Evaluate, Evaluation, pooled_is_training
from fedstrata.training.metrics.measures import as_numbers
from fedstrata.training.rounds import prepare
from fedstrata.training.run import Run
from fedstrata.training.settings import Settings
from fedstrata.training.stopping import costs_of, with_validation
from fedstrata.training.train import make_clients

Options = Mapping[str, Any]
Trained = tuple[Run | LocalRun, FederatedData]
"""A run, and the data that it was trained and measured on."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    run:     the run; None if it diverged, or ran in another process.
    history: one row per evaluation, also of a run that diverged.
    final:   the measures of its solution and what it used; None if it diverged.
    summary: the summary of the run; empty if it diverged.
    error:   why it diverged.
    rows:    the influence of each row of the test data on each measure; see :func:`rows_of`.
    loss:    which loss of a sample its measures are of; empty if the problem has no model.
    """

    label: str
    seed: int
    history: list[Row]
    final: Row | None
    summary: Row
    error: str | None = None
    rows: dict[str, np.ndarray] | None = None
    run: Run | LocalRun | None = None
    loss: str = ""

    @property
    def diverged(self) -> bool:
        """Whether the run diverged."""
        return self.final is None

    def without_run(self) -> Outcome:
        """Return what can be sent to another process."""
        return replace(self, run=None)


@dataclass(frozen=True)
class Trial:
    """What a run of a method changes: hyperparameters, its length, and whether it is judged on validation data.

    share: the fraction of each client's training rows to judge on; None for the test data.
    """

    options: Options | None = None
    rounds: int | None = None
    share: float | None = None


class Method(ABC):
    """One of the methods of a comparison: a problem, an algorithm and settings, under a label."""

    label: str

    @property
    @abstractmethod
    def algorithm(self) -> Algorithm:
        """The algorithm with the method's own hyperparameters."""

    @property
    @abstractmethod
    def current(self) -> Options:
        """The hyperparameters that the method sets itself, as a configuration file would; others have defaults."""

    @property
    @abstractmethod
    def settings(self) -> Settings:
        """The settings of its runs."""

    @abstractmethod
    def with_threads(self, threads: int) -> Method:
        """Return the method with this many threads."""

    @abstractmethod
    def with_options(self, options: Options) -> Method:
        """Return the method with other hyperparameters."""

    def prepare(self, seed: int, trial: Trial) -> None:  # noqa: B027
        """Do once, before processes are forked, what the runs of a seed share."""

    @abstractmethod
    def check(self, seed: int, trial: Trial) -> None:
        """Raise if the run of a seed cannot work."""

    @abstractmethod
    def train(self, seed: int, trial: Trial, out: Path | None, callbacks: Sequence[Callback]) -> Trained:
        """Run the method with a seed; a run that is already in ``out`` is resumed."""

    @abstractmethod
    def start(self, seed: int, trial: Trial) -> tuple[Problem, FederatedData, Evaluate | None]:
        """Return the problem, the data and the evaluation of a seed, before training."""

    def digest(self, seed: int) -> dict[str, str]:
        """Return digests of the data and the starting point of a seed."""
        problem, data, _ = self.start(seed, Trial())
        return digest_of(problem, data)

    @torch.no_grad()
    def measures(self, seed: int, trial: Trial) -> list[str]:
        """Return the names of the measures that the run of a seed has at its start, and of what it uses."""
        problem, data, evaluate = self.start(seed, trial)
        data, validation = with_validation(data, self.settings, elsewhere=False)
        settings = self.settings.replace(seed=seed, participation=1.0, faults=None, device="cpu", compile=False)
        clients = make_clients(problem, data, settings)
        prepare(clients)
        problem, data = clients.problem, clients.engine.side.data
        standard = evaluate is None or isinstance(evaluate, Evaluation)
        fast = _with_one_output(problem) if standard else problem
        measured = as_numbers((evaluate or Evaluation())(fast, data, problem.x0, problem.y0), {})
        if standard:  # some are not defined on these data, such as AUC on one class
            measured = {name: value for name, value in measured.items() if not math.isnan(value)}
        if validation is not None:
            measured |= validation.measured(problem, problem.x0, problem.y0, [])
        return [*measured, *(name for name in costs_of(self.settings) if name not in measured)]

    def run(
        self, seed: int, trial: Trial | None = None, out: Path | None = None, callbacks: Sequence[Callback] = ()
    ) -> Outcome:
        """Run the method with a seed; return how it ended."""
        try:
            run, data = self.train(seed, trial or Trial(), out, callbacks)
        except Diverged as error:
            return Outcome(self.label, seed, error.history, None, {}, str(error))
        rows = None
        if trial is None and self._measured_by_rows(data):
            rows = rows_of(run, data, self.evaluation if isinstance(self.evaluation, Evaluation) else None)
        return Outcome(self.label, seed, run.history, run.final, run.summary, None, rows, run, _loss_of(run))

    @property
    @abstractmethod
    def where(self) -> str:
        """Where it trains: "federated", "pooled" in one place, or "local" at each client."""

    @property
    @abstractmethod
    def evaluation(self) -> Evaluate | None:
        """How its runs are measured; None for the default."""

    def _measured_by_rows(self, data: FederatedData) -> bool:
        """Whether the measures are those of all pooled rows, so that the influence of each row is known."""
        evaluation = Evaluation() if self.evaluation is None else self.evaluation
        kept = self.settings.patience is not None and pooled_is_training(data)  # some of the rows are for validation
        return isinstance(evaluation, Evaluation) and not evaluation.samples(data) and not kept


def _with_one_output(problem: Problem) -> Problem:
    """Return the problem with a model that gives every row the first output: measures then have the same names."""
    if problem.predict is None:
        return problem
    predict = problem.predict

    def of_first(x: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        first = predict(x, *(a[:1] for a in inputs))
        return first.expand(len(inputs[0]), *first.shape[1:])

    return replace(problem, predict=of_first)


def _loss_of(run: Run | LocalRun) -> str:
    """Return what the loss of each sample computes: two methods with different ones cannot be judged by it."""
    losses = (run.runs[0] if isinstance(run, LocalRun) else run).problem.losses
    return "" if losses is None else " ".join(identity_of(losses).values())


def in_all(measured: Collection[Collection[str]]) -> list[str]:
    """Return the names that are in all of these rows or lists, in the order of the first."""
    first = next(iter(measured), ())
    return [name for name in first if all(name in names for names in measured)]


def default_measure(measured: Collection[Collection[str]]) -> str:
    """Return what to judge by if nobody says so: the first measure of ``RANKING`` that is in all of these lists."""
    shared = in_all(measured)
    chosen = next((name for name in RANKING if name in shared), None)
    if chosen is None:
        own = [name for name in shared if name not in (*COSTS, *MORE_COSTS)]
        raise InputError(
            f"Name the measure to judge by: of {', '.join(RANKING)}, the first of which is the default, the runs have "
            f"none in common. What they have in common: {listed(own) or 'nothing'}."
        )
    return chosen


def check_methods(
    methods: Mapping[str, Method], seeds: Sequence[int], trials: Mapping[str, Trial] | None = None
) -> None:
    """Raise if the run of any seed cannot work; it is built and checked as it would be at its start, and not run."""
    for label, method in methods.items():
        for seed in seeds:
            with within(f"seed {seed}") if seed != seeds[0] else nullcontext():
                method.check(seed, Trial() if trials is None else trials[label])
