"""Pre-training (``[pretrain]``): federated learning with cross-entropy, whose weights a problem starts from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedstrata.algorithms.algorithm import Algorithm
from fedstrata.clients.ranks import ranks_here
from fedstrata.core.errors import FedstrataError, InputError, within
from fedstrata.data.federated import FederatedData
from fedstrata.experiments.build import Experiment
from fedstrata.experiments.config import OF_SEVERAL_RUNS
from fedstrata.models.flat import Flat
from fedstrata.problems import erm
from fedstrata.problems.erm import try_model
from fedstrata.problems.problem import Problem
from fedstrata.training.callbacks import Callback
from fedstrata.training.fingerprint import digest_of
from fedstrata.training.metrics.evaluation import Evaluation
from fedstrata.training.preflight import check_run
from fedstrata.training.run import Run
from fedstrata.training.rundir import RunDirectory
from fedstrata.training.settings import Settings
from fedstrata.training.train import train


@dataclass(frozen=True)
class Pretraining:
    """The run before an experiment: ``erm`` on its data and model, with its settings of ``[train]``.

    config: the tables of a configuration file for this run alone.
    """

    problem: Problem
    data: FederatedData
    algorithm: Algorithm
    settings: Settings
    evaluation: Evaluation
    config: dict[str, Any]

    @staticmethod
    def of(experiment: Experiment) -> Pretraining | None:
        """Return the pre-training of an experiment, if it has one."""
        config, data, flat = experiment.config, experiment.data, experiment.problem.flat
        if not config.pretrain.rounds:
            return None
        if experiment.model is None or flat is None:
            raise InputError(f"The problem {experiment.problem.name} has no model to pre-train: leave out [pretrain].")
        if not data.classes:
            raise InputError(f"[pretrain] uses cross-entropy, which needs classes: the data {data.name} have none.")
        experiment.problem.check(data)
        options = {"loss": _loss(flat, data), "batchnorm": flat.batchnorm, "dropout": flat.dropout}
        options |= {k: v for k, v in config.problem.options.items() if k == "prior"}
        settings = experiment.settings.replace(rounds=config.pretrain.rounds)
        clients = experiment.evaluation.clients  # the other keys of [evaluate] belong to the problem itself
        tables = config.to_toml(*OF_SEVERAL_RUNS, "algorithms", "evaluate", "label", "pretrain") | {
            "problem": {"name": "erm", **options},
            "algorithm": experiment.pretrainer.to_table(),
            "train": settings.to_table(),
            "evaluate": {"clients": clients},
        }
        problem = erm(experiment.model, **options)  # type: ignore[arg-type]
        return Pretraining(problem, data, experiment.pretrainer, settings, Evaluation(clients), tables)

    @property
    def table(self) -> dict[str, Any]:
        """The complete table ``[pretrain]`` of a configuration file."""
        options = {k: v for k, v in self.config["algorithm"].items() if k != "name"}
        return {"rounds": self.settings.rounds, "algorithm": self.algorithm.name, **options}

    @cached_property
    def key(self) -> str:
        """Everything the weights depend on: the same key gives the same weights."""
        return json.dumps({**self.config, "digest": digest_of(self.problem, self.data)}, sort_keys=True)

    def run(self, out: Path | None, callbacks: Sequence[Callback]) -> Run:
        """Train, or resume the run in ``out``."""
        listeners = [listener for c in callbacks if (listener := c.for_pretraining()) is not None]
        with within("[pretrain]", FedstrataError):
            return train(
                self.problem,
                self.data,
                self.algorithm,
                settings=self.settings,
                evaluate=self.evaluation,
                out=out,
                resume=out is not None,
                callbacks=listeners,
                config=self.config,
            )


def check_experiment(experiment: Experiment, pretraining: Pretraining | None) -> None:
    """Raise if an experiment or its pre-training cannot run."""
    check_run(
        experiment.problem,
        experiment.data,
        experiment.algorithm,
        experiment.settings,
        experiment.evaluation,
        pretrains=pretraining is not None,
    )
    if pretraining is not None:
        first = pretraining
        with within("[pretrain]"):
            check_run(first.problem, first.data, first.algorithm, first.settings, first.evaluation)


def pretrain(
    experiment: Experiment,
    pretraining: Pretraining,
    config: dict[str, Any],
    out: Path | None,
    resume: bool,
    callbacks: Sequence[Callback],
) -> None:
    """Pre-train, and let the experiment start from the result.

    The run directory is opened first, with ``config``: pre-training has its directory inside it, and a directory that
    is in use or belongs to another run must be refused before anything is trained. The run itself adds the digest of
    its starting point later.
    """
    check_experiment(experiment, pretraining)
    if out is None:
        experiment.start_from(pretraining.run(None, callbacks))
        return
    with closing(RunDirectory(out)) as directory:
        if ranks_here().first:
            data = digest_of(experiment.problem, experiment.data)["data"]
            directory.open({**config, "digest": {**config.get("digest", {}), "data": data}}, resume)
        experiment.start_from(pretraining.run(out / "pretrain", callbacks))


def _loss(flat: Flat, data: FederatedData) -> str:
    """Return the cross-entropy that fits the model: binary for one output and two classes."""
    outputs, _ = try_model(flat, data)
    return "binary_cross_entropy" if outputs.numel() == 2 and data.classes == 2 else "cross_entropy"
