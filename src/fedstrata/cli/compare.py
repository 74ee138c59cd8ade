"""``fedstrata compare``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedstrata.algorithms.algorithm import ALGORITHMS
from fedstrata.cli.console import echo, say
from fedstrata.cli.options import (
    Algorithms,
    ConfigFile,
    Jobs,
    Json,
    Preset,
    Quiet,
    Resume,
    Seeds,
    Set,
    a_path,
    check_out,
)
from fedstrata.cli.printing import print_comparison, progress
from fedstrata.core.errors import FedstrataError, InputError
from fedstrata.experiments.compare import compare_methods
from fedstrata.experiments.comparison import Comparison
from fedstrata.experiments.config import Config, read
from fedstrata.experiments.config_methods import config_methods
from fedstrata.experiments.methods import Method
from fedstrata.experiments.schema import SITES


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
    names = names_of(algorithms, config, experiment)
    check_out(out, resume, "*-seed*/config.toml")
    kind, methods = config_methods(config, names, config.compare.baselines)
    run_comparison(
        config,
        kind,
        methods,
        seeds_from(config, seeds),
        out,
        quiet=quiet,
        as_json=as_json,
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


def run_comparison(
    config: Config,
    kind: str,
    methods: Mapping[str, Method],
    seeds: Sequence[int],
    out: Path | None,
    *,
    quiet: bool = False,
    as_json: bool = False,
    plot_file: Path | None = None,
    jobs: int = 1,
) -> None:
    """Run methods with these seeds, and judge them as ``[compare]`` says; print, write and plot the result."""
    comparison = compare_methods(
        kind,
        methods,
        seeds,
        baseline=config.compare.baseline,
        measure=config.compare.measure,
        shown=[*(config.plot.measures or ()), *config.plot.log],
        out=out,
        form=config.plot.format or "png",
        jobs=jobs,
        callbacks=progress(quiet, brief=True),
        say=(lambda _: None) if quiet else say,
    )
    if as_json:
        print(json.dumps({"rows": comparison.rows, **comparison.judgement}))
    report(comparison, config, out, plot_file, printed=not as_json)


def report(
    comparison: Comparison, config: Config, out: Path | None, plot_file: Path | None = None, *, printed: bool = True
) -> None:
    """Write a comparison to ``out``, plot it and print it."""
    form = config.plot.format or "png"
    if out is not None:
        comparison.write(out, config.plot.measures, form)
        plot_file = out / f"plot.{form}"
    if printed:
        print_comparison(comparison, config.plot.measures)
    if not comparison.histories:
        raise FedstrataError("Every run diverged. Try smaller learning rates.")
    if plot_file is not None:
        comparison.plot(plot_file, **config.plot.shown)
        if printed:
            files = "table.md, verdicts.json and the ranking" if comparison.is_ranked else "table.md and verdicts.json"
            echo(f"Plot: {plot_file}" + ("" if out is None else f"; {out} also has {files}"))


def seeds_from(config: Config, count: int | None) -> range:
    """Return this many seeds, by default those of the file, or 3; they count from ``train.seed``."""
    return range(config.train.seed, config.train.seed + (count or config.compare.seeds or 3))


def names_of(text: str | None, config: Config, path: Path) -> list[str] | None:
    """Return the algorithms that --algorithms names; None stands for the variants of the file, which must have some."""
    if text is None:
        if not config.variants:
            raise InputError(
                f"{path} has no variants: add [variants.LABEL] tables, or pass --algorithms to compare or tune."
            )
        return None
    names = [n.strip() for n in text.split(",") if n.strip()]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"--algorithms names {twice} twice. To run it with different options, use [variants.LABEL].")
    if not names:
        raise InputError("--algorithms needs at least one name, e.g. --algorithms fedavg,scaffold.")
    for name in names:
        if name not in SITES:
            ALGORITHMS.find(name)
    return names
