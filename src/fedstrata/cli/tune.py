"""``fedstrata tune``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedstrata.cli.compare import names_of, report
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
from fedstrata.cli.printing import progress, progress_bars
from fedstrata.core.errors import InputError, invalid
from fedstrata.core.files import refuse_used
from fedstrata.experiments.config import read
from fedstrata.experiments.config_tune import Plan, as_toml, tune_and_compare, tuning_of
from fedstrata.experiments.pool import Say
from fedstrata.experiments.schema import MOST
from fedstrata.experiments.trials import claim
from fedstrata.experiments.tune import Tuned
from fedstrata.experiments.tuner import Tuner


def tune(
    experiment: ConfigFile,
    algorithms: Algorithms = None,
    trials: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST,
            metavar="N",
            help="Trials for each hyperparameter of an algorithm or variant.",
            show_default="tune.trials in the file, or 8",
        ),
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(min=0, max=MOST, metavar="N", help="Seeds for the final runs on the test data; 0 skips them."),
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
    at an edge of its range, the search continues once beyond it. The best options of algorithms are written to
    best.toml, a complete experiment; those of variants to tuned.toml, which the key "tuned" of the file can name.

    With --trial, only one trial is run, and its result stored in --out; run the command without it, and with --resume,
    to do what is left.
    """
    config = read(experiment, set_, preset, tuned=False)
    if trials is not None:
        config = config.replace(tune=config.tune.replace(trials=trials))
    plan = Plan.of(config, names_of(algorithms, config, experiment))
    tell = (lambda _: None) if quiet else say
    if trial is not None:
        if jobs > 1 or resume or as_json:
            raise InputError("--trial runs a single trial and stores it: leave out --jobs, --resume and --json.")
        _one_trial(plan, trial, out, tell)
        return
    check_out(out, resume, "trials/config.json")
    tuned, comparison = tune_and_compare(
        plan,
        seeds,
        out=out,
        jobs=jobs,
        trial_callbacks=progress_bars(quiet),
        callbacks=progress(quiet, brief=True),
        say=tell,
    )
    if as_json:
        test = {} if comparison is None else comparison.judgement
        rows = [] if comparison is None else comparison.rows
        notes = [*plan.notes, *tuned.notes]
        print(json.dumps({"trials": tuned.rows, "best": tuned.options, "notes": notes, "test": rows, **test}))
    if comparison is not None:
        report(comparison, plan.config, None if out is None else out / "final", printed=not as_json)
    if not as_json:
        _print(plan, tuned, out, compared=comparison is not None)


def _print(plan: Plan, tuned: Tuned, out: Path | None, compared: bool) -> None:
    """Print the notes on a search and the best settings, and where they were written."""
    for note in [*plan.notes, *tuned.notes]:
        if note not in tuned.warnings or not compared:  # warnings stand below the table
            echo(note, wrap=True)
    if plan.kind == "variant":
        echo(as_toml(tuning_of(plan.config, tuned), "variants", "baselines"))
    else:
        for name, options in tuned.options.items():
            echo(f"{name}: {', '.join(f'{k} = {v}' for k, v in options.items()) or 'its own settings'}")
    if out is not None:
        best, form = "tuned.toml" if plan.kind == "variant" else "best.toml", plan.config.plot.format or "png"
        final = ", final/" * compared
        echo(f"Written to {out}: {best}, tune.md, search.{form}, response-*.{form}, trials.json{final}")


def _one_trial(plan: Plan, number: int, out: Path | None, tell: Say) -> None:
    """Run one trial of a search, and store its result."""
    if out is None:
        raise InputError("--trial needs --out, the directory where all trials are stored.")
    check_resume(out, resume=False)
    folder = out / "trials"
    if out.is_dir() and not folder.is_dir():
        refuse_used(out, "It has no search. Choose another.")
    tuner = Tuner(plan.methods, plan.config.tune, folder, 1, (), tell, plan.config.train.seed)
    trials = tuner.first()
    if number >= len(trials):
        raise invalid("--trial", number, f"from 0 to {len(trials) - 1}: the search has {len(trials)} trials")
    claim(folder, plan.identity)
    tuner.runs.run([(trials[number], tuner.rungs[trials[number].label][0][0])])
