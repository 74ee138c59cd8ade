"""``fedstrata compare``, ``tune`` and ``reproduce``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedstrata.algorithms.algorithm import ALGORITHMS
from fedstrata.cli.console import echo, say
from fedstrata.cli.options import (
    Algorithms,
    ConfigFile,
    Json,
    Preset,
    Quiet,
    Resume,
    Seeds,
    Set,
    a_path,
    check_out,
    check_resume,
)
from fedstrata.cli.printing import print_comparison, print_grid, progress, progress_bars
from fedstrata.core.errors import FedstrataError, InputError, invalid
from fedstrata.core.files import Row, refuse_used
from fedstrata.experiments.compare import Say, check_comparison, compare_methods
from fedstrata.experiments.config import Config, presets, read
from fedstrata.experiments.config_methods import config_methods
from fedstrata.experiments.methods import Method
from fedstrata.experiments.reproduce import ExperimentFile, find, find_all
from fedstrata.experiments.schema import SITES
from fedstrata.experiments.trials import claim
from fedstrata.experiments.tune import identity_of, tune_methods, variant_tables, write_config
from fedstrata.experiments.tuner import Tuner

Jobs = Annotated[
    int, typer.Option(min=1, max=1024, metavar="N", help="Runs to do side by side, each in a process with one thread.")
]


def compare(
    experiment: ConfigFile,
    algorithms: Algorithms = None,
    seeds: Seeds = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Algorithm or variant to compare the others with.",
            show_default="compare.baseline in the file, or the first",
        ),
    ] = None,
    baselines: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Also run the first method as local (each client alone), pooled (all data in one place) or both.",
            show_default="compare.baselines in the file",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=a_path,
            metavar="DIR",
            help="Directory for the runs, compare.json, verdicts.json, table.md and plots.",
        ),
    ] = None,
    jobs: Jobs = 1,
    preset: Preset = None,
    set_: Set = None,
    resume: Resume = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare algorithms or variants over several seeds.

    EXPERIMENT is a TOML file. Its variants are compared, or the algorithms that --algorithms names; local and pooled
    may be among them. The options of an algorithm come from the table algorithms.NAME; lr, dual_lr, steps, server_lr
    and weight_decay default to the values in the table algorithm. Differences from the baseline are paired by seed,
    with 95 % intervals over seeds and test rows, and p-values corrected for the number of methods. A method of which a
    run diverged has no mean and no verdict.
    """
    config = read(experiment, set_, preset)
    config = _with_compare(config, baseline, baselines)
    names = _names(algorithms, config, experiment)
    check_out(out, resume, "*-seed*/config.toml")
    kind, methods = config_methods(config, names, config.compare.baselines)
    run_comparison(
        config,
        kind,
        methods,
        seeds_from(config, seeds),
        out,
        quiet=quiet,
        output="json" if as_json else "table",
        jobs=jobs,
    )


def _with_compare(config: Config, baseline: str | None, baselines: str | None) -> Config:
    """Return the configuration with what the command line says about baselines."""
    table = config.compare
    if baseline is not None:
        table = table.replace(baseline=baseline)
    if baselines is not None:
        table = table.replace(baselines=tuple(n.strip() for n in baselines.split(",") if n.strip()))
    return config.replace(compare=table)


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
    config = read(experiment, set_, preset)
    if trials is not None:
        config = config.replace(tune=config.tune.replace(trials=trials))
    names = _names(algorithms, config, experiment)
    kind, methods = config_methods(config, names)
    tell = (lambda _: None) if quiet else say
    if trial is not None:
        _one_trial(config, names, methods, trial, out, tell)
        return
    check_out(out, resume, "trials/config.json")
    folder, final = (None, None) if out is None else (out / "trials", out / "final")
    if seeds:
        first = config.train.seed + config.tune.seeds
        others = range(first, first + seeds)
        check_comparison(kind, methods, others, config.compare.baseline, config.compare.measure)
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
        rows = run_comparison(config, kind, tuned.tuned_methods, others, final, quiet=quiet, output=output, jobs=jobs)
    if as_json:
        print(json.dumps({"trials": tuned.rows, "best": tuned.options, "notes": tuned.notes, "test": rows}))
        return
    for note in tuned.notes:
        echo(note, wrap=True)
    if kind == "variant":
        echo(variant_tables(tuned))
    else:
        for name, options in tuned.options.items():
            echo(f"{name}: {', '.join(f'{k} = {v}' for k, v in options.items())}")


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


def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(help="TOML file, or the name of a file or directory under experiments/.", show_default=False),
    ] = None,
    preset: Preset = None,
    seeds: Seeds = None,
    out: Annotated[
        Path | None,
        typer.Option(parser=a_path, metavar="DIR", help="Directory for the results.", show_default="runs/NAME-PRESET"),
    ] = None,
    jobs: Jobs = 1,
    set_: Set = None,
    listing: Annotated[bool, typer.Option("--list", help="List the experiments and their presets.")] = False,
    quiet: Quiet = False,
) -> None:
    """Run all variants of an experiment by name.

    NAME is a TOML file, or the name of a file or directory under experiments/. The results are table.md, compare.json
    and plot.png. Finished runs in the directory are not repeated, and interrupted ones are resumed. The number of
    seeds defaults to compare.seeds in the file, or 3.
    """
    if listing:
        _list_experiments()
        return
    if name is None:
        raise InputError("reproduce needs the NAME of an experiment. See: fedstrata reproduce --list")
    files = find(name)
    if len(files) > 1 and preset is None:
        files = _without_full_size(files)
    configs = [read(f.path, set_, preset) for f in files]
    for config, file in zip(configs, files, strict=True):
        _names(None, config, file.path)
    for number, (config, file) in enumerate(zip(configs, files, strict=True), 1):
        chosen = preset or _first_preset(file)
        folder = Path("runs") / (file.name if chosen is None else f"{file.name}-{chosen}")
        if out is not None:
            folder = out if len(files) == 1 else out / file.path.stem
        check_out(folder, True, "*-seed*/config.toml")
        if not quiet:
            say(f"Experiment {number} of {len(files)}: {file.name}, preset {chosen or '(none)'}, in {folder}")
        kind, methods = config_methods(config, None, config.compare.baselines)
        run_comparison(config, kind, methods, seeds_from(config, seeds), folder, quiet=quiet, jobs=jobs)


Output = Literal["table", "json", "none"]


def run_comparison(
    config: Config,
    kind: str,
    methods: Mapping[str, Method],
    seeds: Sequence[int],
    out: Path | None,
    *,
    quiet: bool = False,
    output: Output = "table",
    plot_file: Path | None = None,
    jobs: int = 1,
) -> list[Row]:
    """Run methods with these seeds, and judge them as ``[compare]`` says; print, write and plot the result."""
    comparison = compare_methods(
        kind,
        methods,
        seeds,
        baseline=config.compare.baseline,
        measure=config.compare.measure,
        out=out,
        jobs=jobs,
        callbacks=progress(quiet, brief=True),
        say=(lambda _: None) if quiet else say,
    )
    if out is not None:
        comparison.write(out, config.plot.measures)
        plot_file = out / "plot.png"
    if output == "json":
        content = {"rows": comparison.rows, "baseline": comparison.baseline, "verdicts": comparison.verdicts}
        print(json.dumps(content))
    elif output == "table":
        print_comparison(comparison, config.plot.measures)
    if not comparison.histories:
        raise FedstrataError("Every run diverged. Try smaller learning rates.")
    if plot_file is not None:
        comparison.plot(plot_file, **config.plot.to_table())
        if output == "table":
            echo(f"Plot: {plot_file}")
    return comparison.rows


def seeds_from(config: Config, count: int | None) -> range:
    """Return this many seeds, by default those of the file, or 3; they count from ``train.seed``."""
    return range(config.train.seed, config.train.seed + (count or config.compare.seeds or 3))


def _names(text: str | None, config: Config, path: Path) -> list[str] | None:
    """Return the algorithms that --algorithms names; None stands for the variants of the file, which must have some."""
    if text is None:
        if not config.variants:
            raise InputError(
                f"{path} has no variants: add [variants.LABEL] tables, or pass --algorithms to compare or tune."
            )
        return None
    names = list(dict.fromkeys(n.strip() for n in text.split(",") if n.strip()))
    if not names:
        raise InputError("--algorithms needs at least one name, e.g. --algorithms fedavg,scaffold.")
    for name in names:
        if name not in SITES:
            ALGORITHMS.find(name)
    return names


def _list_experiments() -> None:
    files = find_all()
    if not files:
        raise InputError("There are no experiments: no TOML files under experiments/ here or in a parent directory.")
    rows = [(f.name, ", ".join(presets(f.path)), f.about) for f in files]
    print_grid(rows, ("experiment", "presets", "description"))


def _first_preset(file: ExperimentFile) -> str | None:
    return next(iter(presets(file.path)), None)


def _without_full_size(files: list[ExperimentFile]) -> list[ExperimentFile]:
    """Skip the files that would run at the paper's size because they have no smaller preset."""
    small = []
    for file in files:
        if _first_preset(file) == "paper":
            say(f"Skipping {file.name}: its smallest preset is paper. To run it, pass its own name.")
        else:
            small.append(file)
    return small
