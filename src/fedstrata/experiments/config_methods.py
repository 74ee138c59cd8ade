"""The methods of a configuration file: its variants, or algorithms by name, and the baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedstrata.algorithms.algorithm import Algorithm
from fedstrata.core.errors import Diverged, FedstrataError, InputError
from fedstrata.data.federated import FederatedData
from fedstrata.experiments.build import Experiment, build_algorithm
from fedstrata.experiments.config import Config
from fedstrata.experiments.methods import Method, Options, Trained, Trial
from fedstrata.experiments.pretrain import Pretraining, check_experiment
from fedstrata.experiments.runs import candidates, labelled, run_config
from fedstrata.experiments.schema import SITES
from fedstrata.problems.problem import Problem
from fedstrata.training.callbacks import Callback
from fedstrata.training.metrics.evaluation import Evaluate
from fedstrata.training.run import Run
from fedstrata.training.settings import Settings


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

    def start(self, seed: int, trial: Trial) -> tuple[Problem, FederatedData, Evaluate | None]:
        """Return the problem, the data and the evaluation of a seed, before training."""
        with labelled(self.config):
            experiment = self._experiment(self._config(seed, trial), trial, None)
        return experiment.problem, experiment.data, experiment.evaluation

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
    among the names or the ``baselines``, are the first of them with each client alone, or all data in one place, and
    the algorithm in ``[baselines.NAME]``, if there is one.
    """
    kind, configs = candidates(config, None if names is None else [name for name in names if name not in SITES])
    if not configs:
        raise InputError("local and pooled run an algorithm: name at least one more, e.g. fedavg.")
    first = next(iter(configs.values()))
    if first.brings_data and {*(names or ()), *baselines} & {*SITES}:
        raise InputError(f"local and pooled need clients with data of their own; {first.problem.name} brings its data.")
    for sites in dict.fromkeys([*(n for n in names or () if n in SITES), *baselines]):
        if sites in configs:
            raise InputError(f"There is already a {kind} called {sites}: rename it, or leave out the baseline {sites}.")
        configs[sites] = first.as_baseline(sites)
    return kind, {label: ConfigMethod(label, one) for label, one in configs.items()}
