"""Searches whose runs are replaced by a formula."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstrata.experiments.config import Config, parse
from fedstrata.experiments.config_methods import config_methods
from fedstrata.experiments.methods import Method, Outcome, Trial
from fedstrata.experiments.trials import number_of
from fedstrata.experiments.tune import Tuned, tune_methods
from fedstrata.experiments.tuner import Tuner

Loss = Callable[[dict[str, Any], int, int], float | None]
"""A loss by options, rounds and seed; None if the run diverges."""


@dataclass
class Script:
    """Replaces runs by a formula, and counts them.

    measured: the measures that runs have at their start; by default ``measure``, which they have at their end.
    """

    loss: Loss = lambda options, rounds, seed: distance(options)
    runs: list[tuple[str, dict[str, Any], int, int]] = field(default_factory=list)
    measure: str = "loss"
    measured: tuple[str, ...] = ()

    def run(self, method: Method, seed: int, trial: Trial, *_: Any) -> Outcome:
        """Return the outcome of a run."""
        assert trial.options is not None and trial.rounds is not None and trial.share is not None
        self.runs.append((method.label, dict(trial.options), trial.rounds, seed))
        value = self.loss(dict(trial.options), trial.rounds, seed)
        history = [{"round": 0, "loss": 1e9, "distance": 1.0}]
        if value is None:
            return Outcome(method.label, seed, history, None, {}, "it diverged")
        return Outcome(method.label, seed, history, {"round": trial.rounds, self.measure: value}, {})


def distance(options: dict[str, Any], best: float = 0.03) -> float:
    """The distance of a learning rate from the best one, on a logarithmic scale."""
    return abs(math.log10(number_of(options.get("lr", 0.1))) - math.log10(best))


def config_of(tune: dict[str, Any] | None = None, rounds: int = 3, **options: Any) -> Config:
    """A quadratic problem; ``options`` are those of FedAvg."""
    problem = {"name": "quadratic", "clients": 3, "dimension": 2, "samples": 10}
    algorithm = {"name": "fedavg", **options}
    tables = {"problem": problem, "algorithm": algorithm, "train": {"rounds": rounds}, "tune": tune or {}}
    return parse(tables, "here")


def tuner_of(config: Config, names: tuple[str, ...] = ("fedavg",), folder: Path | None = None, **options: Any) -> Tuner:
    _, methods = config_methods(config, names)
    options = {"jobs": 1, "callbacks": (), "say": lambda line: None, "seed": config.train.seed} | options
    return Tuner(methods, config.tune, folder, **options)


def tuned_of(config: Config, names: tuple[str, ...] = ("fedavg",), **options: Any) -> Tuned:
    return tune_methods(*config_methods(config, names), config.tune, config.train.seed, **options)


def origins(tuned: Tuned, label: str = "fedavg") -> Counter[str]:
    return Counter(trial.origin for trial in tuned.trials[label])
