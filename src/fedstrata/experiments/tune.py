"""Tune algorithms, or variants of an experiment, with the same number of trials each."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fedstrata.algorithms.algorithm import ALGORITHMS
from fedstrata.core.errors import Diverged, FedstrataError, InputError, invalid, unknown
from fedstrata.core.files import Row, Rows, refuse_used, write_atomically
from fedstrata.core.options import options_of
from fedstrata.experiments import runs
from fedstrata.experiments.build import Experiment, build_algorithm
from fedstrata.experiments.config import Config
from fedstrata.experiments.overlay import Tables, merge
from fedstrata.experiments.pretrain import Pretraining
from fedstrata.experiments.runs import Say, candidates, check_all, labelled
from fedstrata.experiments.schema import AlgorithmTable
from fedstrata.training.callbacks import Callback
from fedstrata.training.metrics import catalogue
from fedstrata.training.metrics.catalogue import RANKING
from fedstrata.training.run import Run


@dataclass(frozen=True)
class Tuned:
    """The result of a search.

    config: the experiment that was tuned.
    names:  the algorithms that were tuned; None for the variants of the experiment.
    trials: the trials of each label, best first.
    """

    config: Config
    names: Sequence[str] | None
    trials: dict[str, list[Row]]

    @cached_property
    def best(self) -> dict[str, Tables]:
        """The options of the best trial, by label.

        Those of an algorithm are complete, so that a comparison fills in none from ``[algorithm]``.
        """
        if self.names is None:
            return {label: trials[0]["options"] for label, trials in self.trials.items()}
        return {name: _all_options(self.config, name, trials[0]["options"]) for name, trials in self.trials.items()}

    @property
    def best_config(self) -> Config:
        """The experiment with the best options."""
        if self.names is None:
            old = self.config.variants
            variants = {label: merge(old[label], {"algorithm": options}) for label, options in self.best.items()}
            return self.config.replace(variants=variants)
        main = self.config.algorithm.name if self.config.algorithm.name in self.best else self.names[0]
        tables = {**self.config.algorithms, **self.best}
        return self.config.replace(algorithms=tables, algorithm=AlgorithmTable(name=main, options=self.best[main]))

    @property
    def variant_tables(self) -> str:
        """The best options as ``[variants.LABEL.algorithm]`` tables."""
        return tomli_w.dumps({"variants": {label: {"algorithm": options} for label, options in self.best.items()}})

    def write(self, folder: Path) -> None:
        """Write tuned.toml, the tables of the variants, or best.toml, the experiment with tuned algorithms."""
        if self.names is None:
            (folder / "tuned.toml").write_text(self.variant_tables)
        else:
            (folder / "best.toml").write_text(tomli_w.dumps(self.best_config.to_toml()))


def tune(
    config: Config, names: Sequence[str] | None, out: Path | None, callbacks: Sequence[Callback], say: Say
) -> Tuned:
    """Try ``tune.trials`` settings of each algorithm in ``names``, or each variant if it is None, on validation data.

    With ``out``, trials are logged in trials.jsonl, and a resumed search skips them.
    """
    kind, configs = candidates(config, names)
    for label in config.tune.search:
        if label not in configs:
            raise unknown(kind, label, configs, "[tune.search]")
    points = {n: latin_hypercube(search_of(c, n), config.tune.trials, config.train.seed) for n, c in configs.items()}
    check_all(configs.values(), _on_validation_data)
    log = _Log(out, config)
    trials: dict[str, list[Row]] = {label: [] for label in configs}
    pretrained: dict[str, Run] = {}
    measure = config.tune.measure
    for label, candidate in configs.items():
        for number, point in enumerate(points[label], 1):
            options = as_options(candidate, point)
            row = log.find({kind: label, "options": options})
            if row is None:
                tried = candidate.with_algorithm(candidate.algorithm.name, options)
                row = {kind: label, "options": options, "measures": _try(tried, callbacks, pretrained)}
                log.append(row)
            trials[label].append(row)
            measure = measure or _main_measure(row)
            result = "diverged" if row["measures"] is None else f"{measure} {_value(row, measure, label):.4f}"
            say(f"{label} trial {number}/{config.tune.trials}: {options} -> {result}")
    return Tuned(config, names, {label: _sorted(rows, measure, label) for label, rows in trials.items()})


def search_of(config: Config, label: str) -> dict[str, tuple[float, float]]:
    """Return the ranges to search: ``[tune.search.LABEL]``, or those that the algorithm declares."""
    name = config.algorithm.name
    declared = options_of(ALGORITHMS[name])
    if label not in config.tune.search:
        return {n: option.search for n, option in declared.items() if option.search is not None}
    for option in config.tune.search[label]:
        if option not in declared:
            raise unknown(f"option of {name}", option, declared, f"[tune.search.{json.dumps(label)}]")
    return config.tune.search[label]


def latin_hypercube(ranges: dict[str, tuple[float, float]], trials: int, seed: int) -> list[dict[str, float]]:
    """Draw ``trials`` points: each range is cut into as many equal parts on a log scale, and each part is used once."""
    generator = np.random.default_rng(seed)
    columns = {}
    for name, (low, high) in ranges.items():
        if not 0 < low <= high:
            raise invalid(f"search range of {name}", [low, high], "two positive numbers in ascending order")
        positions = (generator.permutation(trials) + generator.random(trials)) / trials
        columns[name] = np.exp(math.log(low) + positions * (math.log(high) - math.log(low)))
    return [{n: float(f"{c[i]:.4g}") for n, c in columns.items()} for i in range(trials)]


def as_options(config: Config, point: dict[str, float]) -> Tables:
    """Return a point of the search as options: integers rounded, and schedules scaled instead of replaced."""
    name = config.algorithm.name
    current = config.options_of(name)
    options: Tables = {}
    for option in options_of(ALGORITHMS[name]).values():
        if option.name not in point:
            continue
        value: Any = point[option.name]
        schedule = current.get(option.name)
        if option.kind.whole:
            value = max(1, round(value))
        elif isinstance(schedule, dict):
            value = {**schedule, "k" if schedule.get("schedule") in ("cube_root", "power") else "value": value}
        options[option.name] = value
    return options


def _try(config: Config, callbacks: Sequence[Callback], pretrained: dict[str, Run]) -> Row | None:
    """Return the measures of one trial, averaged over ``tune.seeds`` seeds; None if any of them diverged.

    Trials with the same pre-training share its run through ``pretrained``.
    """
    rows: list[Row] = []
    for seed in range(config.train.seed, config.train.seed + config.tune.seeds):
        row = _try_once(config.with_seed(seed), callbacks, pretrained)
        if row is None:
            return None
        rows.append(row)
    return {k: statistics.fmean(r[k] for r in rows) for k in rows[0] if all(k in r for r in rows)}


def _on_validation_data(config: Config) -> Experiment:
    """Return the experiment of a trial: it trains on a part of the training rows, and is measured on the others."""
    experiment = Experiment(config)
    experiment.data = experiment.data.validation(config.tune.share, config.train.seed)
    if experiment.evaluation.clients == "train":
        experiment.evaluation = experiment.evaluation.replace(clients="test")
    return experiment


def _try_once(config: Config, callbacks: Sequence[Callback], pretrained: dict[str, Run]) -> Row | None:
    with labelled(config):
        experiment = _on_validation_data(config)
        pretraining = Pretraining.of(experiment)
        if pretraining is not None:
            if pretraining.key not in pretrained:
                pretrained[pretraining.key] = pretraining.run(None, callbacks)
            experiment.start_from(pretrained[pretraining.key])
    try:
        first, *_, last = runs.run_config(config, None, False, callbacks, experiment).history
    except Diverged:
        return None
    measure = config.tune.measure
    if measure is not None and measure not in first:
        raise unknown("measure", measure, first, "tune.measure")
    return None if measure is not None and measure not in last else last


def _main_measure(row: Row) -> str | None:
    measures: Row | None = row["measures"]
    return None if measures is None else next(m for m in RANKING if m in measures)


def _value(row: Row, measure: str | None, label: str) -> float:
    if measure not in row["measures"]:
        raise InputError(f"{label} has no measure {measure}: set tune.measure to one that all trials have.")
    return float(row["measures"][measure])


def _sorted(rows: list[Row], measure: str | None, label: str) -> list[Row]:
    """Return the trials of a label, best first and those that diverged last."""
    if all(row["measures"] is None for row in rows):
        raise FedstrataError(
            f"Every trial of {label} diverged. Search smaller learning rates: [tune.search.{json.dumps(label)}]."
        )
    sign = -1 if catalogue.measure(measure or "loss").higher_is_better else 1
    return sorted(rows, key=lambda r: math.inf if r["measures"] is None else sign * _value(r, measure, label))


def _all_options(config: Config, name: str, options: Mapping[str, Any]) -> Tables:
    table = build_algorithm(config.with_algorithm(name, dict(options))).to_table()
    return {k: v for k, v in table.items() if k != "name"}


class _Log:
    """The trials in ``folder``, including those of an interrupted search of the same experiment."""

    def __init__(self, folder: Path | None, config: Config) -> None:
        self.file: Rows | None = None
        self.rows: list[Row] = []
        if folder is not None:
            _claim(folder, json.dumps(config.to_toml("compare", "plot"), sort_keys=True))
            self.file = Rows(folder / "trials.jsonl")
            self.rows = self.file.keep()

    def find(self, trial: Row) -> Row | None:
        """Return the logged row of a trial, if there is one."""
        return next((row for row in self.rows if all(row.get(k) == v for k, v in trial.items())), None)

    def append(self, row: Row) -> None:
        """Log a trial."""
        if self.file is not None:
            self.file.append(row)


def _claim(folder: Path, settings: str) -> None:
    """Claim a new folder for a search with these settings; raise if it contains anything else."""
    file = folder / "config.json"
    if file.exists():
        if file.read_text() != settings:
            raise InputError(
                f"The directory {folder} has a search with different settings. Nothing was overwritten. Choose another."
            )
    else:
        refuse_used(folder, "It has no search to resume. Choose another.")
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, settings.encode())
