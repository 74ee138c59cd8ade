"""``fedstrata reproduce``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedstrata.cli.compare import names_of, run_comparison, seeds_from
from fedstrata.cli.console import say
from fedstrata.cli.options import Jobs, Preset, Quiet, Seeds, Set, a_path, check_out
from fedstrata.cli.printing import print_grid
from fedstrata.core.errors import InputError, unknown
from fedstrata.core.files import read_toml
from fedstrata.experiments.config import presets, read
from fedstrata.experiments.config_methods import config_methods
from fedstrata.experiments.reproduce import ExperimentFile, find, find_all


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
    every: Annotated[bool, typer.Option("--all", help="Run all experiments, one after the other.")] = False,
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
    if every == (name is not None):
        raise InputError("reproduce needs the NAME of an experiment, or --all. See: fedstrata reproduce --list")
    files = find_all() if name is None else find(name)
    files = [file for file in files if name is not None or "variants" in read_toml(file.path)]
    if name is None and preset is not None:
        files = _with_preset(files, preset)
    elif len(files) > 1 and preset is None:
        files = _without_full_size(files)
    configs = [read(f.path, set_, preset) for f in files]
    for config, file in zip(configs, files, strict=True):
        names_of(None, config, file.path)
    for number, (config, file) in enumerate(zip(configs, files, strict=True), 1):
        chosen = preset or _first_preset(file)
        folder = Path("runs") / (file.name if chosen is None else f"{file.name}-{chosen}")
        if out is not None:
            folder = out if len(files) == 1 else out / (file.name if every else file.path.stem)
        check_out(folder, True, "*-seed*/config.toml")
        if not quiet:
            say(f"Experiment {number} of {len(files)}: {file.name}, preset {chosen or '(none)'}, in {folder}")
        kind, methods = config_methods(config, None, config.compare.baselines)
        run_comparison(config, kind, methods, seeds_from(config, seeds), folder, quiet=quiet, jobs=jobs)


def _list_experiments() -> None:
    files = find_all()
    if not files:
        raise InputError("There are no experiments: no TOML files under experiments/ here or in a parent directory.")
    rows = [(f.name, ", ".join(presets(f.path)), f.about) for f in files]
    print_grid(rows, ("experiment", "presets", "description"))


def _with_preset(files: list[ExperimentFile], preset: str) -> list[ExperimentFile]:
    """Return the files that have a preset; raise if none has."""
    chosen = [file for file in files if preset in presets(file.path)]
    for file in files:
        if file not in chosen:
            say(f"Skipping {file.name}: it has no preset {preset}.")
    if not chosen:
        raise unknown("preset", preset, {name for file in files for name in presets(file.path)})
    return chosen


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
