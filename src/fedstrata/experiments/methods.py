"""The methods that are compared or tuned, and the outcomes of their runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstrata.algorithms.algorithm import Algorithm
from fedstrata.core.errors import Diverged, FedstrataError, InputError
from fedstrata.core.files import Row
from fedstrata.core.options import build, options_of, plain
from fedstrata.data.federated import FederatedData
from fedstrata.experiments.build import Experiment, build_algorithm
from fedstrata.experiments.config import Config
from fedstrata.experiments.influence import rows_of
from fedstrata.experiments.pretrain import Pretraining, check_experiment
from fedstrata.experiments.runs import candidates, labelled, run_config
from fedstrata.experiments.schema import SITES
from fedstrata.problems.problem import Problem
from fedstrata.training.callbacks import Callback
from fedstrata.training.fingerprint import digest_of
from fedstrata.training.local import LocalRun, train_local
from fedstrata.training.metrics.evaluation import Evaluate, Evaluation, pooled_is_training
from fedstrata.training.preflight import check_run
from fedstrata.training.run import Run
from fedstrata.training.settings import Settings
from fedstrata.training.train import train

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
    """

    label: str
    seed: int
    history: list[Row]
    final: Row | None
    summary: Row
    error: str | None = None
    rows: dict[str, np.ndarray] | None = None
    run: Run | LocalRun | None = None

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
    def digest(self, seed: int) -> dict[str, str]:
        """Return digests of the data and the starting point of a seed."""

    def run(
        self, seed: int, trial: Trial | None = None, out: Path | None = None, callbacks: Sequence[Callback] = ()
    ) -> Outcome:
        """Run the method with a seed; return how it ended."""
        try:
            run, data = self.train(seed, trial or Trial(), out, callbacks)
        except Diverged as error:
            return Outcome(self.label, seed, error.history, None, {}, str(error))
        rows = rows_of(run, data) if trial is None and self._measured_by_rows(data) else None
        history, final = run.history, run.final
        if self.where == "pooled":
            history, final = [_of_one_place(row) for row in history], _of_one_place(final)
        return Outcome(self.label, seed, history, final, run.summary, None, rows, run)

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


def _of_one_place(row: Row) -> Row:
    """Return a row of training in one place: nothing is sent, and there are no clients to take means over."""
    kept = {k: v for k, v in row.items() if not k.endswith(("_mean", "_worst", "_spread"))}
    return kept | {"bytes_up": 0, "bytes_down": 0}


@dataclass(frozen=True)
class ConfigMethod(Method):
    """A method from a configuration file."""

    label: str
    config: Config

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of the file."""
        return build_algorithm(self.config)

    @property
    def current(self) -> Options:
        """The hyperparameters in the file."""
        return self.config.options_of(self.config.algorithm.name)

    @property
    def settings(self) -> Settings:
        """The settings in the file."""
        return self.config.settings

    @property
    def where(self) -> str:
        """Where it trains, as the file says."""
        return self.config.data.sites

    @property
    def evaluation(self) -> Evaluate | None:
        """The evaluation in the file."""
        return self.config.evaluate

    def with_threads(self, threads: int) -> ConfigMethod:
        """Return the method with this many threads."""
        return replace(self, config=self.config.replace(train=self.config.train.replace(threads=threads)))

    def with_options(self, options: Options) -> ConfigMethod:
        """Return the method with other hyperparameters."""
        return replace(self, config=self.config.with_algorithm(self.config.algorithm.name, dict(options)))

    def prepare(self, seed: int, trial: Trial) -> None:
        """Pre-train, if the file says so."""
        config = self._config(seed, trial)
        with labelled(config):
            self._experiment(config, trial, ())

    def check(self, seed: int, trial: Trial) -> None:
        """Raise if the run of a seed cannot work."""
        with labelled(self.config):
            experiment = self._experiment(self._config(seed, trial), trial, None)
            check_experiment(experiment, Pretraining.of(experiment))

    def train(self, seed: int, trial: Trial, out: Path | None, callbacks: Sequence[Callback]) -> Trained:
        """Run the experiment with a seed; a run that is already in ``out`` is resumed."""
        config = self._config(seed, trial)
        resume = out is not None and out.exists()
        with labelled(config):
            experiment = self._experiment(config, trial, callbacks)
        return run_config(config, out, resume, callbacks, experiment, compared=True), experiment.data

    def digest(self, seed: int) -> dict[str, str]:
        """Return digests of the data and the starting point of a seed."""
        with labelled(self.config):
            experiment = Experiment(self.config.with_seed(seed))
        return digest_of(experiment.problem, experiment.data)

    def _config(self, seed: int, trial: Trial) -> Config:
        config = self.config.with_seed(seed)
        if trial.options is not None:
            config = config.with_algorithm(config.algorithm.name, dict(trial.options))
        if trial.rounds is not None:
            config = config.replace(train=config.train.replace(rounds=trial.rounds))
        return config

    def _experiment(self, config: Config, trial: Trial, callbacks: Sequence[Callback] | None) -> Experiment:
        """Build the experiment of a trial; pre-trained unless ``callbacks`` is None."""
        experiment = Experiment(config)
        if trial.share is not None:
            experiment.data = experiment.data.validation(trial.share, config.train.seed)
            if experiment.evaluation.clients == "train":
                experiment.evaluation = experiment.evaluation.replace(clients="test")
            pretraining = None if callbacks is None else Pretraining.of(experiment)
            if pretraining is not None and callbacks is not None:
                experiment.start_from(_pretrained(pretraining, callbacks))
        return experiment


_PRETRAINED: dict[str, Run] = {}
"""The last pre-training runs: the trials of a seed share one."""


def _pretrained(pretraining: Pretraining, callbacks: Sequence[Callback]) -> Run:
    if pretraining.key not in _PRETRAINED:
        while len(_PRETRAINED) >= 16:
            _PRETRAINED.pop(next(iter(_PRETRAINED)))
        try:
            _PRETRAINED[pretraining.key] = pretraining.run(None, callbacks)
        except Diverged as error:  # no trial is to blame, and none could run
            raise FedstrataError(str(error)) from None
    return _PRETRAINED[pretraining.key]


def config_methods(
    config: Config, names: Sequence[str] | None, baselines: Sequence[str] = ()
) -> tuple[str, dict[str, Method]]:
    """Return what to compare or tune: ``"algorithm"`` or ``"variant"``, and the methods by label.

    These are the algorithms in ``names``, or every variant of the experiment if it is None. ``local`` and ``pooled``,
    among the names or the ``baselines``, are the first of them with each client alone, or all data in one place.
    """
    kind, configs = candidates(config, None if names is None else [name for name in names if name not in SITES])
    if not configs:
        raise InputError("local and pooled run an algorithm: name at least one more, e.g. fedavg.")
    first = next(iter(configs.values()))
    for sites in dict.fromkeys([*(n for n in names or () if n in SITES), *baselines]):
        if sites in configs:
            raise InputError(f"There is already a {kind} called {sites}: rename it, or leave out the baseline {sites}.")
        configs[sites] = first.replace(data=first.data.replace(sites=sites), label=None)
    return kind, {label: ConfigMethod(label, one) for label, one in configs.items()}


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
        )
        return run, data

    def digest(self, seed: int) -> dict[str, str]:
        """Return digests of the data and the starting point of a seed."""
        problem, data, *_ = self.parts(seed)
        return digest_of(problem, data)

    def parts(self, seed: int, trial: Trial | None = None) -> tuple[Problem, FederatedData, Algorithm, Settings]:
        """Return what the run of a seed is made of."""
        trial = trial or Trial()
        with torch.random.fork_rng(devices=()):  # models that are not seeded start the same in every process
            torch.manual_seed(seed)
            problem = self.problem if isinstance(self.problem, Problem) else self.problem(seed)
            data = self.data if isinstance(self.data, FederatedData) else self.data(seed)
        settings = self.own_settings.replace(seed=seed)
        if trial.rounds is not None:
            settings = settings.replace(rounds=trial.rounds)
        if self.sites == "pooled":
            settings, data = settings.for_pooled(data.clients), data.pooled()
        if trial.share is not None:
            data = data.validation(trial.share, seed)
        algorithm = self.own if trial.options is None else self.with_options(trial.options).own
        return problem, data, algorithm, settings
