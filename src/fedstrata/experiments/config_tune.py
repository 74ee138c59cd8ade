"""Tune a configuration file, compare the winners on the test data, and write what a later comparison needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedstrata.algorithms.algorithm import ALGORITHMS
from fedstrata.core.files import folder_at, refuse_blocked, write_atomically
from fedstrata.core.registry import IMPORTED
from fedstrata.experiments.build import build_algorithm
from fedstrata.experiments.compare import check_comparison, compare_methods
from fedstrata.experiments.comparison import Comparison
from fedstrata.experiments.comparison import files_of as files_of_comparison
from fedstrata.experiments.config import Config
from fedstrata.experiments.config_methods import config_methods
from fedstrata.experiments.methods import Method
from fedstrata.experiments.overlay import Tables
from fedstrata.experiments.pool import Say
from fedstrata.experiments.schema import AlgorithmTable, Tuning
from fedstrata.experiments.tune import Tuned, files_of, tune_methods
from fedstrata.training.callbacks import Callback
from fedstrata.training.metrics.catalogue import DECLARED, MEASURES


@dataclass(frozen=True)
class Plan:
    """What is tuned of a configuration file, and compared afterwards.

    config:  the experiment, with one measure and one split for trials and final runs.
    names:   the algorithms to tune; None for the variants of the file.
    kind:    what a label stands for: "algorithm" or "variant".
    methods: what is tuned.
    others:  the baselines that are only compared, with their own settings or the best ones of the first method.
    notes:   what a reader must know of the configuration.
    """

    config: Config
    names: Sequence[str] | None
    kind: str
    methods: dict[str, Method]
    others: dict[str, Method]
    notes: list[str]

    @staticmethod
    def of(config: Config, names: Sequence[str] | None) -> Plan:
        """Return the plan for a configuration."""
        config, notes = with_one_split(with_one_measure(config))
        kind, methods = config_methods(config, names, config.compare.baselines)
        untuned = () if config.tune.baselines else {*config.compare.baselines} - {*(names or ())}
        others = {label: methods.pop(label) for label in list(methods) if label in untuned}
        return Plan(config, names, kind, methods, others, notes)

    @property
    def identity(self) -> str:
        """What the results of the search depend on, its data included."""
        config = self.config
        seeds = range(config.train.seed, config.train.seed + config.tune.seeds)
        digests = {label: [method.digest(seed) for seed in seeds] for label, method in self.methods.items()}
        settings = {"names": None if self.names is None else list(self.names), "digests": digests}
        settings |= config.to_toml("compare", "plot") | ({"imported": IMPORTED} if IMPORTED else {})
        return json.dumps(settings, sort_keys=True)


def tune_and_compare(
    plan: Plan,
    seeds: int,
    *,
    out: Path | None = None,
    jobs: int = 1,
    trial_callbacks: Sequence[Callback] = (),
    callbacks: Sequence[Callback] = (),
    say: Say = lambda line: None,
) -> tuple[Tuned, Comparison | None]:
    """Tune, then run the winners on the test data with so many other seeds; everything is checked before it starts.

    With ``out``, the search is written there and resumed from there, and the comparison is in ``final``.
    """
    config, form = plan.config, plan.config.plot.format or "png"
    shown, table = [*(config.plot.measures or ()), *config.plot.log], config.compare
    first = config.train.seed + config.tune.seeds
    final = range(first, first + seeds)
    if seeds:
        every = plan.methods | plan.others
        check_comparison(plan.kind, every, final, table.baseline, table.measure, shown)
    if out is not None:
        folder_at(out / "final")
        refuse_blocked(out, *files_of(plan.methods, form), "best.toml" if plan.kind == "algorithm" else "tuned.toml")
        refuse_blocked(out / "final", *files_of_comparison(form))
    folder, identity = (None, "") if out is None else (out / "trials", plan.identity)
    how: dict[str, Any] = {"jobs": jobs, "say": say}
    tuned = tune_methods(
        plan.kind,
        plan.methods,
        config.tune,
        config.train.seed,
        folder=folder,
        identity=identity,
        callbacks=trial_callbacks,
        **how,
    )
    if out is not None:
        tuned.write(out, form)
        write_config(config, tuned, out)
    if not seeds:
        return tuned, None
    warnings = [*tuned.warnings, *tuned.seen(final)]
    winners, best = tuned.tuned_methods, tuned.options.get(next(iter(plan.methods)))
    for label, method in plan.others.items():
        if label in config.baselines:
            winners[label] = method
        elif best is None:
            warnings.append(f"Warning: {label} is left out of the comparison: its method has no best settings.")
        else:
            winners[label] = method.with_options(best)
    comparison = compare_methods(
        plan.kind,
        winners,
        final,
        baseline=table.baseline if table.baseline in winners else None,
        measure=table.measure or tuned.measure,
        shown=shown,
        warnings=warnings,
        out=None if out is None else out / "final",
        form=form,
        callbacks=callbacks,
        **how,
    )
    return tuned, comparison


def with_one_measure(config: Config) -> Config:
    """Return the configuration with one measure for trials and for the comparison, if it names only one of them."""
    trials, final = config.tune.measure, config.compare.measure
    if trials is None and final in MEASURES | DECLARED:  # and not a cost, or a measure of early stopping
        return config.replace(tune=config.tune.replace(measure=final))
    return config.replace(compare=config.compare.replace(measure=final or trials))


def with_one_split(config: Config) -> tuple[Config, list[str]]:
    """Return the configuration with one split for all seeds if test rows are held out, and a note that says so.

    Otherwise the test rows of one seed would be rows of the trials of another.
    """
    every = [config, *(config.variant(label) for label in config.variants)]
    if not any(one.data.holdout and one.data.seed is None and not one.brings_data for one in every):
        return config, []
    seed = config.train.seed
    note = f"All seeds use the split of data.seed = {seed}, so that no trial has used a test row."
    return config.with_data_seed(seed), [note]


# --- what a later comparison needs -----------------------------------------------------------------------------------


def tuning_of(config: Config, tuned: Tuned) -> Tuning:
    """Return the best settings of variants and baselines, and what the trials have used."""
    return Tuning(
        variants={label: {"algorithm": best} for label, best in tuned.options.items() if label in config.variants},
        baselines=_of_baselines(config, tuned),
        trial_seeds=tuple(tuned.trial_seeds),
        data_seed=config.data.seed,
    )


def _of_baselines(config: Config, tuned: Tuned) -> dict[str, Tables]:
    """Return the algorithms of the baselines with all of their options."""
    labels = config.variants if tuned.kind == "variant" else ALGORITHMS
    return {label: best.to_table() for label, best in tuned.best.items() if label not in labels}


def as_toml(tuning: Tuning, *keys: str) -> str:
    """Return these tables, or all, as the text of a file that the key ``tuned`` of an experiment can name."""
    tables = tuning.to_table()
    return tomli_w.dumps({name: tables[name] for name in keys or tables if tables.get(name, {}) != {}})


def best_config(config: Config, tuned: Tuned) -> Config:
    """Return the experiment with the best options of the algorithms that were tuned, and a seed that no trial used."""
    best = {name: _complete(config, name, options) for name, options in tuned.options.items() if name in ALGORITHMS}
    main = config.algorithm.name if config.algorithm.name in best or not best else next(iter(best))
    algorithm = AlgorithmTable(name=main, options=best[main]) if best else config.algorithm
    baselines = {**config.baselines, **_of_baselines(config, tuned)}
    config = config.replace(algorithms={**config.algorithms, **best}, algorithm=algorithm, baselines=baselines)
    return config.with_seed(tuned.trial_seeds.stop)


def _complete(config: Config, name: str, options: Mapping[str, Any]) -> Tables:
    """Return all options of an algorithm, so that a comparison fills in none from ``[algorithm]``."""
    table = build_algorithm(config.with_algorithm(name, dict(options))).to_table()
    return {k: v for k, v in table.items() if k != "name"}


def write_config(config: Config, tuned: Tuned, folder: Path) -> None:
    """Write tuned.toml, for the variants of the experiment, or best.toml, the experiment with tuned algorithms."""
    if tuned.kind == "variant":
        write_atomically(folder / "tuned.toml", as_toml(tuning_of(config, tuned)).encode())
    else:
        write_atomically(folder / "best.toml", tomli_w.dumps(best_config(config, tuned).to_toml()).encode())
