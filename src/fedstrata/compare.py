"""Several algorithms, several seeds: the same experiment for each, a table and a picture."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.algorithms.base import ALGORITHMS, kind_of
from fedstrata.callbacks import Callback
from fedstrata.checkpoint import write_atomically
from fedstrata.config import Config, Experiment, build_algorithm
from fedstrata.errors import Diverged, FedstrataError, InputError, unknown
from fedstrata.identity import describe
from fedstrata.rundir import Row
from fedstrata.train import Run, train

Say = Callable[[str], None]


def higher_is_better(measure: str) -> bool:
    """Tell whether a larger value of this measure is the better one."""
    return measure.startswith(("accuracy", "auc")) and not measure.endswith("_spread")


def run_config(
    config: Config, out: Path | None, resume: bool, callbacks: Sequence[Callback], experiment: Experiment | None = None
) -> Run:
    """Train what a configuration says; the run directory gets the whole configuration."""
    built = Experiment(config) if experiment is None else experiment
    return train(
        built.problem,
        built.data,
        built.algorithm,
        **config.train.model_dump(),
        evaluate=built.evaluation,
        out=out,
        resume=resume,
        callbacks=callbacks,
        config=config.to_toml() | {"algorithm": describe(built.algorithm)},
    )


def compare(
    config: Config,
    names: Sequence[str],
    seeds: Sequence[int],
    out: Path | None,
    callbacks: Sequence[Callback],
    say: Say,
) -> dict[str, list[Run | None]]:
    """Run every algorithm with every seed; a run that is there already is not run again.

    An algorithm that diverges with a seed has None there, and the others go on.
    """
    runs: dict[str, list[Run | None]] = {}
    variants = {n: [config.with_algorithm(n).with_seed(s) for s in seeds] for n in names}
    for name in names:
        Experiment(variants[name][0])
    for name in names:
        runs[name] = []
        for seed, variant in zip(seeds, variants[name], strict=True):
            folder = None if out is None else out / f"{name}-seed{seed}"
            try:
                runs[name].append(run_config(variant, folder, folder is not None and folder.exists(), callbacks))
            except Diverged as error:
                say(f"{name}, seed {seed}: {error}")
                runs[name].append(None)
    return runs


def table(runs: dict[str, list[Run | None]]) -> list[Row]:
    """Return one row per algorithm: mean and standard deviation over seeds of each measure of the last evaluation."""
    rows = []
    for name, group in runs.items():
        finished = [r.history[-1] for r in group if r is not None]
        row: Row = {"algorithm": name, "seeds": len(group), "diverged": len(group) - len(finished)}
        for key in finished[0] if finished else ():
            values = [f[key] for f in finished if key in f]
            row[key] = statistics.fmean(values)
            row[f"{key}_std"] = statistics.stdev(values) if len(values) > 1 else 0.0
        rows.append(row)
    return rows


def latin_hypercube(ranges: dict[str, tuple[float, float]], trials: int, seed: int) -> list[dict[str, float]]:
    """Return ``trials`` points, each range cut into as many equal stretches of its logarithm, each used once."""
    generator = np.random.default_rng(seed)
    columns = {}
    for name, (low, high) in ranges.items():
        if not 0 < low <= high:
            raise InputError(f"The search range of {name} must be two positive numbers in order. Got {low}, {high}.")
        places = (generator.permutation(trials) + generator.random(trials)) / trials
        columns[name] = np.exp(math.log(low) + places * (math.log(high) - math.log(low)))
    return [{n: float(f"{c[i]:.4g}") for n, c in columns.items()} for i in range(trials)]


def search_of(config: Config, name: str) -> dict[str, tuple[float, float]]:
    """Return what is searched for an algorithm: ``[tune.search.NAME]``, or what the algorithm declares."""
    fields = {f.name: f for f in dataclasses.fields(ALGORITHMS[name])}  # type: ignore[arg-type]
    if name not in config.tune.search:
        return {n: tuple(f.metadata["search"]) for n, f in fields.items() if f.metadata.get("search")}
    for option in config.tune.search[name]:
        if option not in fields:
            raise unknown(f"hyperparameter of {name}", option, fields, "[tune.search]")
    return {n: (low, high) for n, (low, high) in config.tune.search[name].items()}


def fitting(config: Config, name: str, point: dict[str, float]) -> dict[str, Any]:
    """Return a point of the search as options: whole numbers where they are wanted, schedules scaled, not replaced."""
    now = config.options_of(name)
    options: dict[str, Any] = {}
    for field in dataclasses.fields(ALGORITHMS[name]):  # type: ignore[arg-type]
        if field.name not in point:
            continue
        value: Any = point[field.name]
        scheduled = now.get(field.name)
        if kind_of(field) in ("int", "Steps"):
            value = max(1, round(value))
        elif isinstance(scheduled, dict):
            value = {**scheduled, "k" if scheduled.get("schedule") == "cube_root" else "value": value}
        options[field.name] = value
    return options


def tune(
    config: Config, names: Sequence[str], out: Path | None, callbacks: Sequence[Callback], say: Say
) -> dict[str, list[Row]]:
    """Try ``trials`` settings for each algorithm on a validation split; return the trials, best first.

    Every algorithm gets the same number. With ``out``, trials are kept in trials.jsonl and not run again.
    """
    for name in config.tune.search:
        if name not in names:
            raise unknown("algorithm", name, names, "[tune.search]")
    log = None if out is None else out / "trials.jsonl"
    known = _known_trials(log, config)
    results: dict[str, list[Row]] = {}
    measure = config.tune.measure
    for name in names:
        results[name] = []
        points = latin_hypercube(search_of(config, name), config.tune.trials, config.train.seed)
        for number, point in enumerate(points):
            options = fitting(config, name, point)
            trial = {"algorithm": name, "options": options}
            row = next((k for k in known if {"algorithm": k["algorithm"], "options": k["options"]} == trial), None)
            if row is None:
                row = {**trial, "measures": _try(config.with_algorithm(name, options), callbacks)}
                if log is not None:
                    with log.open("a") as file:
                        file.write(json.dumps(row) + "\n")
            results[name].append(row)
            measure = measure or _main_measure(row["measures"])
            shown = (
                "diverged" if row["measures"] is None or measure is None else f"{measure} {_value(row, measure):.4f}"
            )
            say(f"{name} trial {number + 1}/{config.tune.trials}: {options} -> {shown}")
    sign = -1 if higher_is_better(measure or "loss") else 1
    for name, rows in results.items():
        good = [r for r in rows if r["measures"] is not None]
        if not good:
            raise FedstrataError(
                f"Every trial of {name} diverged. Search smaller learning rates ([tune.search.{name}])."
            )
        rows.sort(key=lambda r: math.inf if r["measures"] is None else sign * _value(r, measure or "loss"))
    return results


def best_options(config: Config, name: str, trials: list[Row]) -> dict[str, Any]:
    """Return every option of the best trial's algorithm, the defaults too, so that none is left to be shared."""
    table = describe(build_algorithm(config.with_algorithm(name, trials[0]["options"])))
    return {k: v for k, v in table.items() if k != "name"}


def _try(config: Config, callbacks: Sequence[Callback]) -> Row | None:
    experiment = Experiment(config)
    experiment.data = experiment.data.validation(config.tune.share, config.train.seed)
    try:
        return run_config(config, None, False, callbacks, experiment).history[-1]
    except Diverged:
        return None


def _main_measure(measures: Row | None) -> str | None:
    return None if measures is None else next(m for m in ("auc", "accuracy", "loss") if m in measures)


def _value(row: Row, measure: str) -> float:
    if measure not in row["measures"]:
        raise unknown("measure", measure, row["measures"], "tune.measure")
    return float(row["measures"][measure])


def _known_trials(log: Path | None, config: Config) -> list[dict[str, Any]]:
    """Return the trials that an earlier, interrupted search of the same experiment made."""
    if log is None:
        return []
    log.parent.mkdir(parents=True, exist_ok=True)
    settings = log.parent / "config.json"
    wanted = json.dumps(config.to_toml(), sort_keys=True)
    if settings.exists():
        if settings.read_text() != wanted:
            raise InputError(
                f"{log.parent} holds a search with other settings. Nothing was overwritten: choose another."
            )
    elif any(log.parent.iterdir()):
        raise InputError(f"The directory {log.parent} is not empty and holds no search. Nothing was overwritten.")
    else:
        write_atomically(settings, wanted.encode())
    if not log.exists():
        return []
    trials = []
    for line in log.read_text().splitlines():
        try:
            trials.append(json.loads(line))
        except json.JSONDecodeError:
            break
    write_atomically(log, "".join(json.dumps(t) + "\n" for t in trials).encode())
    return trials
