"""``fedstrata tune``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedstrata.cli.compare import Output, names_of, run_comparison
from fedstrata.cli.console import echo, say
from fedstrata.cli.options import (
    Algorithms,
    ConfigFile,
    Jobs,
    Json,
    Preset,
    Quiet,
    Resume,
    Set,
    a_path,
    check_out,
    check_resume,
)
from fedstrata.cli.printing import progress_bars
from fedstrata.core.errors import InputError, invalid
from fedstrata.core.files import Row, refuse_blocked, refuse_used
from fedstrata.experiments.compare import check_comparison
from fedstrata.experiments.config import Config, read
from fedstrata.experiments.config_methods import config_methods
from fedstrata.experiments.methods import Method
from fedstrata.experiments.pool import Say
from fedstrata.experiments.trials import claim
from fedstrata.experiments.tune import identity_of, tune_methods, variant_tables, write_config
from fedstrata.experiments.tuner import Tuner
from fedstrata.training.metrics.catalogue import MEASURES


def tune(
    experiment: ConfigFile,
    algorithms: Algorithms = None,
    trials: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Trials for each hyperparameter of an algorithm or variant.",
            show_default="tune.trials in the file, or 8",
        ),
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(min=0, max=10_000, metavar="N", help="Seeds for the final runs on the test data; 0 skips them."),
    ] = 3,
    trial: Annotated[
        int | None,
        typer.Option(min=0, metavar="I", help="Run only trial I, counted from 0, e.g. in a job array; needs --out."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=a_path,
            metavar="DIR",
            help="Directory for the trials, the final runs, and best.toml (variants: tuned.toml).",
        ),
    ] = None,
    jobs: Jobs = 1,
    preset: Preset = None,
    set_: Set = None,
    resume: Resume = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Tune algorithms or variants, all by the same rule.

    EXPERIMENT is a TOML file. Every hyperparameter that is searched gets the same number of trials; the file's own
    settings and the algorithm's defaults are tried as well. Trials are compared on a validation split of the training
    data; the test data are used only for the final runs, with the best options and other seeds. If the best value lies
    at an edge of its range, the search continues once beyond it. For variants the best options are printed, and written
    to tuned.toml, as tables to paste into the file.

    With --trial, only one trial is run, and its result stored in --out; run the command without it, and with --resume,
    to do what is left.
    """
    config = read(experiment, set_, preset, tuned=False)
    if trials is not None:
        config = config.replace(tune=config.tune.replace(trials=trials))
    config, fixed = with_one_split(with_one_measure(config))
    names = names_of(algorithms, config, experiment)
    kind, methods = config_methods(config, names, config.compare.baselines)
    tell = (lambda _: None) if quiet else say
    if trial is not None:
        if jobs > 1 or resume or as_json:
            raise InputError("--trial runs a single trial and stores it: leave out --jobs, --resume and --json.")
        _one_trial(config, names, methods, trial, out, tell)
        return
    check_out(out, resume, "trials/config.json")
    if out is not None:
        refuse_blocked(out, "trials.json", "tune.md", "search.png", "best.toml", "tuned.toml")
    folder, final = (None, None) if out is None else (out / "trials", out / "final")
    if seeds:
        first = config.train.seed + config.tune.seeds
        others = range(first, first + seeds)
        shown = [*(config.plot.measures or ()), *config.plot.log]
        check_comparison(kind, methods, others, config.compare.baseline, config.compare.measure, shown)
    tuned = tune_methods(
        kind,
        methods,
        config.tune,
        config.train.seed,
        folder=folder,
        identity=identity_of(config, names, methods),
        jobs=jobs,
        callbacks=progress_bars(quiet),
        say=tell,
    )
    if out is not None:
        tuned.write(out)
        write_config(config, tuned, out)
    rows: list[Row] = []
    if seeds:
        output: Output = "none" if as_json else "table"
        if config.compare.baseline in tuned.failed:
            config = config.replace(compare=config.compare.replace(baseline=None))
        rows = run_comparison(
            config,
            kind,
            tuned.tuned_methods,
            others,
            final,
            quiet=quiet,
            output=output,
            jobs=jobs,
            measure=tuned.measure,
            warnings=[*tuned.warnings, *tuned.seen(others[0])],
        )
    if as_json:
        print(json.dumps({"trials": tuned.rows, "best": tuned.options, "notes": [*fixed, *tuned.notes], "test": rows}))
        return
    for note in [*fixed, *tuned.notes]:
        if note not in tuned.warnings or not seeds:  # warnings stand below the table
            echo(note, wrap=True)
    if kind == "variant":
        echo(variant_tables(tuned))
    else:
        for name, options in tuned.options.items():
            echo(f"{name}: {', '.join(f'{k} = {v}' for k, v in options.items())}")
    if out is not None:
        best = "tuned.toml" if kind == "variant" else "best.toml"
        echo(f"Written to {out}: {best}, tune.md, search.png, response-*.png, trials.json{', final/' * bool(seeds)}")


def with_one_measure(config: Config) -> Config:
    """Return the configuration with one measure for trials and for the comparison, if it names only one of them."""
    measure = config.compare.measure
    if config.tune.measure is not None or measure not in MEASURES:
        return config
    return config.replace(tune=config.tune.replace(measure=measure))


def with_one_split(config: Config) -> tuple[Config, list[str]]:
    """Return the configuration with one split for all seeds if test rows are held out, and a note that says so.

    Otherwise the test rows of one seed would be rows of the trials of another.
    """
    held = [config.data.holdout, *(config.variant(label).data.holdout for label in config.variants)]
    if config.data.seed is not None or not any(held) or config.brings_data:
        return config, []
    seed = config.train.seed
    note = f"All seeds use the split of data.seed = {seed}, so that no trial has used a test row."
    return config.replace(data=config.data.replace(seed=seed)), [note]


def _one_trial(
    config: Config, names: list[str] | None, methods: dict[str, Method], number: int, out: Path | None, tell: Say
) -> None:
    """Run one trial of a search, and store its result."""
    if out is None:
        raise InputError("--trial needs --out, the directory where all trials are stored.")
    check_resume(out, resume=False)
    folder = out / "trials"
    if out.is_dir() and not folder.is_dir():
        refuse_used(out, "It has no search. Choose another.")
    tuner = Tuner(methods, config.tune, folder, 1, (), tell, config.train.seed)
    trials = tuner.first()
    if number >= len(trials):
        raise invalid("--trial", number, f"from 0 to {len(trials) - 1}: the search has {len(trials)} trials")
    claim(folder, identity_of(config, names, methods))
    tuner.runs.run([(trials[number], tuner.rungs[trials[number].label][0][0])])
