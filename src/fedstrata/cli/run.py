"""``fedstrata run``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedstrata.cli.console import say
from fedstrata.cli.options import ConfigFile, Json, Preset, Quiet, Resume, RunOut, Set, a_path, check_resume
from fedstrata.cli.printing import print_run, progress
from fedstrata.clients.ranks import joined
from fedstrata.core.torchrun import restarted
from fedstrata.experiments.config import read
from fedstrata.experiments.runs import run_config
from fedstrata.experiments.schema import PlotTable
from fedstrata.training import plots
from fedstrata.training.callbacks import Callback, TensorBoard
from fedstrata.training.rundir import RunDirectory


def run(
    experiment: ConfigFile,
    out: RunOut = None,
    preset: Preset = None,
    variant: Annotated[str | None, typer.Option(metavar="LABEL", help="Variant to run.")] = None,
    set_: Set = None,
    resume: Resume = False,
    tensorboard: Annotated[
        Path | None, typer.Option(parser=a_path, metavar="DIR", help="Also write TensorBoard event files here.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run an experiment.

    EXPERIMENT is a TOML file, such as those in examples/. With --out, the run directory holds config.toml,
    metrics.jsonl, summary.json, model.safetensors, plot.png and checkpoints, and --resume resumes an interrupted run.

    Under torchrun, the clients are distributed across its processes:

    torchrun --nproc-per-node 2 -m fedstrata run EXPERIMENT
    """
    config = read(experiment, set_, preset)
    if variant is not None:
        config = config.variant(variant)
    check_resume(out, resume)
    if resume and out is not None and not out.exists():
        say(f"There is no run in {out} yet: starting a new one.")
    if out is None and config.diagnostics:
        say("Ignoring [diagnostics]: without --out there is no directory to write them to.")
    with joined() as ranks:
        callbacks: list[Callback] = progress(quiet) if ranks.first else []
        if tensorboard is not None and ranks.first:
            callbacks.append(TensorBoard(tensorboard))
        result = run_config(config, out, resume or _restarted_in(out), callbacks)
    if not ranks.first:
        return
    if out is not None and config.plot != PlotTable():
        label = config.label or result.summary["algorithm"]
        form = config.plot.format or "png"
        plots.plot({label: [result.history]}, out / f"plot.{form}", **config.plot.shown)
    print_run(result.summary, result.history, out, as_json, config.plot.measures)


def _restarted_in(out: Path | None) -> bool:
    """Return whether torchrun restarted this process, and the run in ``out``, if there is one, is its own."""
    return restarted() and out is not None and (not out.exists() or RunDirectory(out).is_ours())
