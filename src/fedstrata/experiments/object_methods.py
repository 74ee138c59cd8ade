"""The methods of ``fs.compare`` and ``fs.tune``: problems, algorithms and data as objects in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fedstrata.algorithms.algorithm import Algorithm
from fedstrata.core.errors import invalid
from fedstrata.core.options import build, options_of, plain
from fedstrata.data.federated import FederatedData
from fedstrata.experiments.methods import Method, Options, Trained, Trial
from fedstrata.problems.problem import Problem
from fedstrata.training.callbacks import Callback
from fedstrata.training.fingerprint import settings_of
from fedstrata.training.local import LocalRun, train_local
from fedstrata.training.metrics.evaluation import Evaluate
from fedstrata.training.preflight import check_run
from fedstrata.training.run import Run
from fedstrata.training.settings import Settings
from fedstrata.training.train import train

ProblemOf = Problem | Callable[[int], Problem]
"""A problem, or a function that builds one for a seed, so that every seed has its own starting point."""

DataOf = FederatedData | Callable[[int], FederatedData]
"""Data, or a function that splits them for a seed."""


@dataclass(frozen=True)
class ObjectMethod(Method):
    """A method from objects in Python.

    sites: "federated"; "pooled" for all data as one client; "local" for each client alone.
    """

    label: str
    problem: ProblemOf
    own: Algorithm
    data: DataOf
    own_settings: Settings
    evaluate: Evaluate | None = None
    sites: str = "federated"

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm."""
        return self.own

    @property
    def current(self) -> Options:
        """The hyperparameters of the algorithm that differ from their defaults."""
        defaults = {name: plain(option.default) for name, option in options_of(self.own).items()}
        return {n: v for n, v in self.own.to_table().items() if n != "name" and defaults.get(n) != v}

    @property
    def settings(self) -> Settings:
        """The settings of its runs."""
        return self.own_settings

    @property
    def where(self) -> str:
        """Where it trains."""
        return self.sites

    @property
    def evaluation(self) -> Evaluate | None:
        """How its runs are measured; None for the default."""
        return self.evaluate

    def with_threads(self, threads: int) -> ObjectMethod:
        """Return the method with this many threads."""
        return replace(self, own_settings=self.own_settings.replace(threads=threads))

    def with_options(self, options: Options) -> ObjectMethod:
        """Return the method with other hyperparameters."""
        table = {**self.own.to_table(), **options}
        return replace(self, own=build(type(self.own), {k: v for k, v in table.items() if k != "name"}))

    def check(self, seed: int, trial: Trial) -> None:
        """Raise if the run of a seed cannot work; each client alone may fail later, and then is left untrained."""
        problem, data, algorithm, settings = self.parts(seed, trial)
        if self.sites != "local":
            check_run(problem, data, algorithm, settings, self.evaluate)

    def train(self, seed: int, trial: Trial, out: Path | None, callbacks: Sequence[Callback]) -> Trained:
        """Run the method with a seed; a run that is already in ``out`` is resumed."""
        problem, data, algorithm, settings = self.parts(seed, trial)
        start = train_local if self.sites == "local" else train
        run: Run | LocalRun = start(
            problem,
            data,
            algorithm,
            settings=settings,
            evaluate=self.evaluate,
            out=out,
            resume=out is not None and out.exists(),
            callbacks=callbacks,
            config={"label": self.label, **settings_of(problem, data, algorithm, settings, self.evaluate)},
        )
        return run, data

    def start(self, seed: int, trial: Trial) -> tuple[Problem, FederatedData, Evaluate | None]:
        """Return the problem, the data and the evaluation of a seed, before training."""
        problem, data, *_ = self.parts(seed, trial)
        return problem, data, self.evaluate

    def parts(self, seed: int, trial: Trial | None = None) -> tuple[Problem, FederatedData, Algorithm, Settings]:
        """Return what the run of a seed is made of."""
        trial = trial or Trial()
        with torch.random.fork_rng(devices=()):  # models that are not seeded start the same in every process
            torch.manual_seed(seed)
            problem = self.problem if isinstance(self.problem, Problem) else self.problem(seed)
            data = self.data if isinstance(self.data, FederatedData) else self.data(seed)
        for what, got, wants in (("problem", problem, Problem), ("data", data, FederatedData)):
            if not isinstance(got, wants):
                name = f"{what} that the function of {self.label!r} returns"
                raise invalid(name, type(got).__name__, f"{wants.__name__}", f"seed {seed}")
        settings = self.own_settings.replace(seed=seed)
        if trial.rounds is not None:
            settings = settings.replace(rounds=trial.rounds)
        if self.sites == "pooled":
            settings, data = settings.for_pooled(data.clients), data.pooled()
        if trial.share is not None:
            data = data.validation(trial.share, seed)
        algorithm = self.own if trial.options is None else self.with_options(trial.options).own
        return problem, data, algorithm, settings
