"""Several algorithms or variants of an experiment, several seeds: run, put in a table, and tuned."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.algorithms.algorithm import ALGORITHMS
from fedstrata.core.errors import Diverged, FedstrataError, InputError, unknown, within
from fedstrata.core.options import options_of
from fedstrata.experiments.build import Experiment, build_algorithm
from fedstrata.experiments.config import Config
from fedstrata.experiments.overlay import merge, slug
from fedstrata.experiments.pretrain import Pretraining, start
from fedstrata.training.callbacks import Callback, Titled
from fedstrata.training.checkpoint import write_atomically
from fedstrata.training.diagnostics import Diagnostics
from fedstrata.training.rundir import Row
from fedstrata.training.train import Run, check_pretraining, train

Say = Callable[[str], None]


def higher_is_better(measure: str) -> bool:
    """Tell whether a larger value of this measure is the better one."""
    plain = measure.removeprefix("personal_").removeprefix("attacked_")
    return plain.startswith(("accuracy", "auc")) and not measure.endswith("_spread")


def run_config(
    config: Config,
    out: Path | None,
    resume: bool,
    callbacks: Sequence[Callback],
    experiment: Experiment | None = None,
    *,
    compared: bool = False,
) -> Run:
    """Train what a configuration says; the run directory gets all of the configuration that a run depends on.

    In a comparison (``compared``) diagnostics leave out what an algorithm does not report.
    """
    with _named(config):
        built = Experiment(config) if experiment is None else experiment
        tables = config.to_toml("compare", "plot", "pretrain", "tune", "variants")
        tables |= {"algorithm": built.algorithm.to_table()}
        before = Pretraining.of(built)
        check_pretraining(config.channel, before is not None)
        if before is not None:
            tables |= {"pretrain": before.table}
        if before is not None and built.pretrained is None:
            start(built, before, tables, out, resume, callbacks)
            resume = resume or out is not None
        if out is not None and config.diagnostics:
            callbacks = [*callbacks, Diagnostics(**config.diagnostics, strict=not compared, folder=out)]
        return train(
            built.problem,
            built.data,
            built.algorithm,
            settings=config.settings,
            evaluate=built.evaluation,
            out=out,
            resume=resume,
            callbacks=callbacks,
            config=tables,
            pretrain=built.pretrained,
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
    return _run_all(_by_algorithm(config, names), seeds, out, callbacks, say)


def compare_variants(
    config: Config, seeds: Sequence[int], out: Path | None, callbacks: Sequence[Callback], say: Say
) -> dict[str, list[Run | None]]:
    """Run every variant of an experiment with every seed, as :func:`compare` does with algorithms."""
    return _run_all(_by_variant(config), seeds, out, callbacks, say)


def _by_algorithm(config: Config, names: Sequence[str]) -> dict[str, Config]:
    plain = config.replace(label=None)
    return {name: plain.with_algorithm(name) for name in names}


def _by_variant(config: Config) -> dict[str, Config]:
    """Return the variants by label; two that do not differ, e.g. because of ``--set``, would compare nothing."""
    variants = {label: config.variant(label) for label in config.variants}
    first: list[tuple[str, Config, object]] = []
    for label, variant in variants.items():
        plain, search = variant.replace(label=None), config.tune.search.get(label)
        same = next((other for other, *rest in first if rest == [plain, search]), None)
        if same is not None:
            raise InputError(
                f"The variants {same!r} and {label!r} are the same experiment. Change one of them, or leave out the "
                "--set of what they differ in."
            )
        first.append((label, plain, search))
    return variants


def _run_all(
    configs: Mapping[str, Config], seeds: Sequence[int], out: Path | None, callbacks: Sequence[Callback], say: Say
) -> dict[str, list[Run | None]]:
    _check(c.with_seed(seeds[0]) for c in configs.values())
    runs: dict[str, list[Run | None]] = {label: [] for label in configs}
    plan = [(label, config, seed) for label, config in configs.items() for seed in seeds]
    for number, (label, config, seed) in enumerate(plan, 1):
        folder = None if out is None else out / f"{slug(label)}-seed{seed}"
        listeners = [Titled(c, f"run {number} of {len(plan)}, {label} seed {seed}") for c in callbacks]
        try:
            there = folder is not None and folder.exists()
            runs[label].append(run_config(config.with_seed(seed), folder, there, listeners, compared=True))
        except Diverged as error:
            say(f"{label}, seed {seed}: {error}")
            runs[label].append(None)
    return runs


def _check(configs: Iterable[Config]) -> None:
    """Refuse what cannot be run before anything is."""
    for config in configs:
        with _named(config):
            built = Experiment(config)
            built.algorithm.check(built.problem, config.train.participation, built.data.clients)
            before = Pretraining.of(built)
            if before is not None:
                before.check()


def _named(config: Config) -> AbstractContextManager[None]:
    """Let refusals in the block name the variant; those of an algorithm name it already."""
    return nullcontext() if config.label is None else within(f"variant {config.label!r}")


def table(runs: dict[str, list[Run | None]], kind: str = "algorithm") -> list[Row]:
    """Return one row for each algorithm or variant (``kind``): mean and standard deviation over seeds at the end.

    ``NAME_seeds`` says how many runs a measure was finite in, where that is not all that finished.
    """
    rows = []
    for name, group in runs.items():
        finished = [r.history[-1] for r in group if r is not None]
        row: Row = {kind: name, "seeds": len(group), "diverged": len(group) - len(finished)}
        for key in dict.fromkeys(k for f in finished for k in f):
            values = [f[key] for f in finished if key in f]
            row[key] = statistics.fmean(values)
            row[f"{key}_std"] = statistics.stdev(values) if len(values) > 1 else 0.0
            if len(values) < len(finished):
                row[f"{key}_seeds"] = len(values)
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


def search_of(config: Config, label: str) -> dict[str, tuple[float, float]]:
    """Return what is searched: ``[tune.search.LABEL]``, or what the configuration's algorithm declares."""
    name = config.algorithm.name
    declared = options_of(ALGORITHMS[name])
    if label not in config.tune.search:
        return {n: option.search for n, option in declared.items() if option.search is not None}
    for option in config.tune.search[label]:
        if option not in declared:
            raise unknown(f"option of {name}", option, declared, f"[tune.search.{json.dumps(label)}]")
    return config.tune.search[label]


def fitting(config: Config, point: dict[str, float]) -> dict[str, Any]:
    """Return a point of the search as options: whole numbers where they are wanted, schedules scaled, not replaced."""
    name = config.algorithm.name
    now = config.options_of(name)
    options: dict[str, Any] = {}
    for option in options_of(ALGORITHMS[name]).values():
        if option.name not in point:
            continue
        value: Any = point[option.name]
        scheduled = now.get(option.name)
        if option.kind.whole:
            value = max(1, round(value))
        elif isinstance(scheduled, dict):
            value = {**scheduled, "k" if scheduled.get("schedule") == "cube_root" else "value": value}
        options[option.name] = value
    return options


def tune(
    config: Config, names: Sequence[str], out: Path | None, callbacks: Sequence[Callback], say: Say
) -> dict[str, list[Row]]:
    """Try ``trials`` settings for each algorithm on a validation split; return the trials, best first.

    Every algorithm gets the same number. With ``out``, trials are kept in trials.jsonl and not run again.
    """
    return _search(config, _by_algorithm(config, names), "algorithm", out, callbacks, say)


def tune_variants(config: Config, out: Path | None, callbacks: Sequence[Callback], say: Say) -> dict[str, list[Row]]:
    """Try ``trials`` settings for each variant's algorithm, as :func:`tune` does for algorithms."""
    return _search(config, _by_variant(config), "variant", out, callbacks, say)


def _search(
    config: Config,
    configs: Mapping[str, Config],
    kind: str,
    out: Path | None,
    callbacks: Sequence[Callback],
    say: Say,
) -> dict[str, list[Row]]:
    for name in config.tune.search:
        if name not in configs:
            raise unknown(kind, name, configs, "[tune.search]")
    points = {n: latin_hypercube(search_of(c, n), config.tune.trials, config.train.seed) for n, c in configs.items()}
    _check(configs.values())
    log = None if out is None else out / "trials.jsonl"
    known = _known_trials(log, config)
    results: dict[str, list[Row]] = {}
    pretrained: dict[str, Run] = {}
    measure = config.tune.measure
    for name, candidate in configs.items():
        results[name] = []
        for number, point in enumerate(points[name]):
            options = fitting(candidate, point)
            trial = {kind: name, "options": options}
            row = next((k for k in known if {kind: k.get(kind), "options": k["options"]} == trial), None)
            if row is None:
                tried = candidate.with_algorithm(candidate.algorithm.name, options)
                row = {**trial, "measures": _try(tried, callbacks, pretrained)}
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
    table = build_algorithm(config.with_algorithm(name, trials[0]["options"])).to_table()
    return {k: v for k, v in table.items() if k != "name"}


def with_options(config: Config, found: Mapping[str, dict[str, Any]]) -> Config:
    """Return the experiment with these options of the algorithm in each variant."""
    variants = {label: merge(over, {"algorithm": found[label]}) for label, over in config.variants.items()}
    return config.replace(variants=variants)


def _try(config: Config, callbacks: Sequence[Callback], pretrained: dict[str, Run]) -> Row | None:
    """Return one setting's measures, the mean over ``tune.seeds`` seeds; None when it diverged with any of them.

    Trials share what was ``pretrained``.
    """
    rows: list[Row] = []
    for seed in range(config.train.seed, config.train.seed + config.tune.seeds):
        row = _try_once(config.with_seed(seed), callbacks, pretrained)
        if row is None:
            return None
        rows.append(row)
    return {k: statistics.fmean(r[k] for r in rows) for k in rows[0] if all(k in r for r in rows)}


def _try_once(config: Config, callbacks: Sequence[Callback], pretrained: dict[str, Run]) -> Row | None:
    with _named(config):
        experiment = Experiment(config)
        experiment.data = experiment.data.validation(config.tune.share, config.train.seed)
        if experiment.evaluation.clients == "train":
            experiment.evaluation = experiment.evaluation.replace(clients="test")
        before = Pretraining.of(experiment)
        if before is not None:
            if before.key not in pretrained:
                pretrained[before.key] = before.run(None, callbacks)
            experiment.start_from(pretrained[before.key])
    try:
        first, *_, last = run_config(config, None, False, callbacks, experiment).history
    except Diverged:
        return None
    measure = config.tune.measure
    if measure is not None and measure not in first:
        raise unknown("measure", measure, first, "tune.measure")
    return None if measure is not None and measure not in last else last


def _main_measure(measures: Row | None) -> str | None:
    return None if measures is None else next(m for m in ("auc", "accuracy", "loss") if m in measures)


def _value(row: Row, measure: str) -> float:
    return float(row["measures"][measure])


def _known_trials(log: Path | None, config: Config) -> list[dict[str, Any]]:
    """Return the trials that an earlier, interrupted search of the same experiment made."""
    if log is None:
        return []
    log.parent.mkdir(parents=True, exist_ok=True)
    settings = log.parent / "config.json"
    wanted = json.dumps(config.to_toml("compare", "plot"), sort_keys=True)
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
