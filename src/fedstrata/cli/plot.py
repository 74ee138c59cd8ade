"""``fedstrata plot`` and ``fedstrata partition``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedstrata.cli.console import echo
from fedstrata.cli.options import ConfigFile, Picture, Preset, Set
from fedstrata.experiments.build import Experiment, build_data
from fedstrata.experiments.config import read
from fedstrata.experiments.plots import plot_partition, read_runs
from fedstrata.training import plots


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    out: Picture = Path("plot.png"),
    measure: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Measure to plot, e.g. accuracy. Can be repeated.")
    ] = None,
    axis: Annotated[
        str, typer.Option(metavar="NAME", help="round, steps, samples, bytes_up, bytes_down or seconds.")
    ] = "round",
    range_: Annotated[
        str,
        typer.Option(
            "--range", metavar="NAME", help="auto, or full: do not cut off the start of curves that squeezes the rest."
        ),
    ] = "auto",
) -> None:
    """Plot finished runs.

    RUNS are run directories. Runs of the same algorithm or variant with different seeds are plotted as one line, their
    mean, with a band that is its 95 % interval. Runs that diverged are counted in the legend, and end in a cross.
    """
    plots.picture_at(out)
    finished, diverged = read_runs(runs)
    plots.plot(finished, out, measure, axis, range=range_, diverged=diverged)
    echo(f"Plot written to {out}")


def partition(
    experiment: ConfigFile,
    out: Picture = Path("partition.png"),
    preset: Preset = None,
    set_: Set = None,
) -> None:
    """Plot how the training data are split across clients.

    EXPERIMENT is a TOML file. The plot shows how many samples of each class each client has.
    """
    plots.picture_at(out)
    config = read(experiment, set_, preset)
    data = Experiment(config).data if config.brings_data else build_data(config)
    plot_partition(data, out, config.plot.title)
    counts = data.train.class_counts if data.classes else None
    classes = "" if counts is None else f", {(counts > 0).sum(1).mean():.1f} of {data.classes} classes on average"
    sizes = f"{data.sizes.min()} to {data.sizes.max()} training samples, {data.sizes.mean():.1f} on average"
    echo(f"{data.clients} clients with {sizes}{classes}.")
    echo(f"Plot written to {out}")
