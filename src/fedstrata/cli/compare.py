"""``fedstrata compare``, ``tune`` and ``reproduce``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedstrata.algorithms.algorithm import ALGORITHMS
from fedstrata.cli.console import echo, say
from fedstrata.cli.options import Algorithms, ConfigFile, Json, Preset, Quiet, Resume, Seeds, Set, check_out
from fedstrata.cli.printing import print_comparison, print_grid, progress, progress_bars
from fedstrata.core.errors import FedstrataError, InputError
from fedstrata.core.files import Row
from fedstrata.experiments.compare import compare as compare_runs
from fedstrata.experiments.config import Config, presets, read
from fedstrata.experiments.plots import diverged_runs
from fedstrata.experiments.reproduce import ExperimentFile, find, find_all
from fedstrata.experiments.tune import tune as tune_runs
from fedstrata.training import plots


def compare(
    experiment: ConfigFile,
    algorithms: Algorithms = None,
    seeds: Seeds = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory for the runs, compare.json, table.md and plot.png."),
    ] = None,
    preset: Preset = None,
    set_: Set = None,
    resume: Resume = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare algorithms or variants over several seeds.

    EXPERIMENT is a TOML file. Its variants are compared, or the algorithms that --algorithms names. The options of an
    algorithm come from the table algorithms.NAME; lr, dual_lr, steps, server_lr and weight_decay default to the
    values in the table algorithm. The number of seeds defaults to compare.seeds in the file, or 1. The spread is the
    standard deviation over seeds.
    """
    config = read(experiment, set_, preset)
    names = _names(algorithms, config, experiment)
    check_out(out, resume)
    run_comparison(
        config, names, seeds or config.compare.seeds or 1, out, quiet=quiet, output="json" if as_json else "table"
    )


def tune(
    experiment: ConfigFile,
    algorithms: Algorithms = None,
    trials: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Trials per algorithm or variant.", show_default="tune.trials in the file, or 8"
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=0, metavar="N", help="Seeds for the final runs on the test data; 0 skips them.")
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Directory for the trials, the final runs, and best.toml (variants: tuned.toml)."
        ),
    ] = None,
    preset: Preset = None,
    set_: Set = None,
    resume: Resume = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Tune algorithms or variants with the same number of trials each.

    EXPERIMENT is a TOML file. Trials are compared on a validation split of the training data; the test data are used
    only for the final runs, with the best options. For variants these options are printed, and written to tuned.toml,
    as tables to paste into the file.
    """
    config = read(experiment, set_, preset)
    if trials is not None:
        config = config.replace(tune=config.tune.replace(trials=trials))
    names = _names(algorithms, config, experiment)
    check_out(out, resume)
    folder, final = (None, None) if out is None else (out / "trials", out / "final")
    tuned = tune_runs(config, names, folder, progress_bars(quiet), (lambda _: None) if quiet else say)
    if out is not None:
        tuned.write(out)
    rows: list[Row] = []
    if seeds:
        output: Output = "none" if as_json else "table"
        rows = run_comparison(tuned.best_config, names, seeds, final, quiet=quiet, output=output)
    if as_json:
        print(json.dumps({"trials": tuned.trials, "best": tuned.best, "test": rows}))
    elif names is None:
        echo(tuned.variant_tables)
    else:
        for name, options in tuned.best.items():
            echo(f"{name}: {', '.join(f'{k} = {v}' for k, v in options.items())}")


def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(help="TOML file, or the name of a file or directory under experiments/.", show_default=False),
    ] = None,
    preset: Preset = None,
    seeds: Seeds = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory for the results.", show_default="runs/NAME-PRESET"),
    ] = None,
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
        check_out(folder, resume=True)
        if not quiet:
            say(f"Experiment {number} of {len(files)}: {file.name}, preset {chosen or '(none)'}, in {folder}")
        run_comparison(config, None, seeds or config.compare.seeds or 3, folder, quiet=quiet)


Output = Literal["table", "json", "none"]


def run_comparison(
    config: Config,
    names: list[str] | None,
    seeds: int,
    out: Path | None,
    *,
    quiet: bool = False,
    output: Output = "table",
    plot_file: Path | None = None,
) -> list[Row]:
    """Compare the algorithms in ``names``, or the variants of the file; print, write and plot the result."""
    first = config.train.seed
    comparison = compare_runs(config, names, range(first, first + seeds), out, progress(quiet, brief=True), say)
    if out is not None:
        comparison.write(out, config.plot.measures)
        plot_file = out / "plot.png"
    if output == "json":
        print(json.dumps(comparison.rows))
    elif output == "table":
        print_comparison(comparison, seeds, config.plot.measures)
    if not comparison.histories:
        raise FedstrataError("Every run diverged. Try smaller learning rates.")
    if plot_file is not None:
        lost = {row[comparison.kind]: row["diverged"] for row in comparison.rows}
        plots.plot(comparison.histories, plot_file, **config.plot.to_table(), diverged=diverged_runs(lost, out))
        if output == "table":
            echo(f"Plot: {plot_file}")
    return comparison.rows


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
