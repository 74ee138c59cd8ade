"""The command line: run, compare, tune, reproduce, list, show, plot, demo."""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import click
import tomli_w
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedstrata import __version__
from fedstrata.algorithms.algorithm import ALGORITHMS
from fedstrata.cli import federate
from fedstrata.clients.ranks import joined, launched, restarted
from fedstrata.core.errors import FedstrataError, InputError, invalid, unknown
from fedstrata.data.partitions import PARTITIONS
from fedstrata.data.sets import SETS
from fedstrata.experiments.build import Experiment, build_data
from fedstrata.experiments.compare import best_options, compare_variants, run_config, table, tune_variants, with_options
from fedstrata.experiments.compare import compare as compare_runs
from fedstrata.experiments.compare import tune as tune_runs
from fedstrata.experiments.config import Config, import_file, parse, presets, read
from fedstrata.experiments.describe import describe
from fedstrata.experiments.reproduce import everything, find
from fedstrata.experiments.schema import PlotTable
from fedstrata.experiments.tables import as_markdown, as_table, mean_and_spread, measured, measured_in_all, one_run
from fedstrata.models.zoo import MODELS
from fedstrata.problems import PROBLEMS
from fedstrata.training.callbacks import Callback, ShowProgress, TensorBoard
from fedstrata.training.plots import plot as draw
from fedstrata.training.plots import plot_partition
from fedstrata.training.rundir import Row, RunDirectory, read_toml

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Federated learning for layered objectives. Start with: fedstrata demo",
)
app.add_typer(federate.app, name="federate")
out_console = Console(width=None if sys.stdout.isatty() else 140)
err_console = Console(stderr=True)

ConfigFile = Annotated[Path, typer.Argument(help="The experiment, a TOML file.", show_default=False)]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="Change a setting, e.g. --set algorithm.lr=0.1. May be repeated.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a script instead of a table for a person.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with what is in the directory already.")]
Names = Annotated[
    str | None,
    typer.Option("--algorithms", help="Names separated by commas; without it the variants of the file are taken."),
]
Seeds = Annotated[
    int | None,
    typer.Option(
        min=1, help="How many seeds, counted from the experiment's own; by default compare.seeds of the file."
    ),
]
Preset = Annotated[str | None, typer.Option("--preset", help="A preset of the file; by default its first one.")]


def _version(show: bool) -> None:
    if show:
        print(f"fedstrata {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    context: typer.Context,
    modules: Annotated[
        list[Path] | None,
        typer.Option("--import", help="A Python file with an algorithm of your own. May be repeated."),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Federated learning for layered objectives."""
    if context.invoked_subcommand != "run" and launched():
        raise invalid("command under torchrun", context.invoked_subcommand, "run: it shares one run out over processes")
    context.obj = tuple(modules or ())
    for path in modules or ():
        import_file(path)


@app.command()
def run(
    experiment: ConfigFile,
    out: Annotated[
        Path | None, typer.Option(help="The run directory; must be new. Without it nothing is kept.")
    ] = None,
    preset: Preset = None,
    variant: Annotated[str | None, typer.Option(help="A variant of the file, by its label.")] = None,
    set_: Set = None,
    resume: Resume = False,
    tensorboard: Annotated[Path | None, typer.Option(help="Also write TensorBoard event files to this folder.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train one experiment: EXPERIMENT is a TOML file, such as those in examples/.

    With --out the run directory holds config.toml, metrics.jsonl, summary.json, model.safetensors, plot.png and
    checkpoints; an interrupted run goes on with --resume. Under torchrun the clients are shared out over its processes:
    torchrun --nproc-per-node 2 -m fedstrata run EXPERIMENT.
    """
    config = read(experiment, set_, preset)
    if variant is not None:
        config = config.variant(variant)
    if resume and out is None:
        raise InputError("--resume needs --out: the run directory to go on with.")
    if resume and out is not None and not out.exists():
        say(f"There is no run in {out} yet: starting a new one.")
    if out is None and config.diagnostics:
        say("Without --out there is nowhere to write what [diagnostics] asks for: it is left out.")
    with joined() as ranks:
        loggers: list[Callback] = [] if tensorboard is None or not ranks.first else [TensorBoard(tensorboard)]
        bars = progress(quiet) if ranks.first else []
        again = restarted() and out is not None and (not out.exists() or RunDirectory(out).is_ours())
        result = run_config(config, out, resume or again, [*bars, *loggers])
    if not ranks.first:
        return
    if out is not None and config.plot != PlotTable():
        label = config.label or result.summary["algorithm"]
        draw({label: [result.history]}, out / "plot.png", **vars(config.plot))
    print_run(result.summary, result.history, out, as_json, config.plot.measures)


def print_run(
    summary: Row, history: list[Row], out: Path | None, as_json: bool, measures: Sequence[str] | None = None
) -> None:
    """Print what a run came to: a table of its last measures, and what a reader needs to understand them."""
    if as_json:
        print(json.dumps(summary))
        return
    out_console.print(as_table([one_run(history[-1], measures)], f"{summary['algorithm']} on {summary['data']}"))
    out_console.print(measured(summary), highlight=False)
    if "pretrain" in summary:
        before = summary["pretrain"]
        told = (
            f"Pre-trained by {before['algorithm']} for {before['rounds']} rounds: samples, bytes and seconds count it."
        )
        out_console.print(told, highlight=False)
    if "epsilon" in summary:
        worth = f"({summary['epsilon']:.4g}, {summary['delta']:g})"
        out_console.print(f"Differential privacy of clients: (epsilon, delta) = {worth}.", highlight=False)
    if summary.get("left_out"):
        out_console.print(f"Left out of exchanges: {_counted(summary['left_out'])}.", highlight=False, soft_wrap=True)
    if summary.get("not_measured"):
        out_console.print(f"Not measured: {_counted(summary['not_measured'])}.", highlight=False, soft_wrap=True)
    if out is not None:
        out_console.print(f"Written to {out} (picture: {out / 'plot.png'})", highlight=False, soft_wrap=True)


def _counted(times: dict[str, int]) -> str:
    return ", ".join(f"{name} {'once' if n == 1 else f'{n} times'}" for name, n in times.items())


@app.command()
def compare(
    experiment: ConfigFile,
    algorithms: Names = None,
    seeds: Seeds = None,
    out: Annotated[Path | None, typer.Option(help="Where to keep the runs, compare.json, table.md, plot.png.")] = None,
    preset: Preset = None,
    set_: Set = None,
    resume: Resume = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run several algorithms, or variants, of the same experiment with several seeds: mean and spread, and a picture.

    EXPERIMENT is a TOML file. Each algorithm takes its options from its table algorithms.NAME, and lr, dual_lr, steps,
    server_lr and weight_decay from the table algorithm. The spread is the standard deviation over seeds.
    """
    config = read(experiment, set_, preset)
    names = _names(algorithms, config, experiment)
    _new_directory(out, resume)
    _compare(config, names, seeds or config.compare.seeds or 1, out, as_json, quiet)


@app.command()
def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(help="A TOML file, or a name under experiments/: of a file or a directory.", show_default=False),
    ] = None,
    preset: Preset = None,
    seeds: Seeds = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to keep the results; by default runs/NAME-PRESET.", show_default=False)
    ] = None,
    set_: Set = None,
    listing: Annotated[bool, typer.Option("--list", help="List the experiments there are, and their presets.")] = False,
    quiet: Quiet = False,
) -> None:
    """Run all variants of the experiment NAME with several seeds; write table.md, compare.json and plot.png.

    What is in the directory already is not run again; an interrupted run goes on. A directory of experiments is run one
    after another. The number of seeds is that of --seeds, else of compare.seeds in the file, else 3.
    """
    if listing:
        _list_experiments()
        return
    if name is None:
        raise InputError("reproduce wants the NAME of an experiment, e.g. one of: fedstrata reproduce --list")
    found = find(name)
    if len(found) > 1 and preset is None:
        large = [f for f in found if next(iter(presets(f.path)), None) == "paper"]
        for experiment in large:
            say(f"{experiment.name} has no smaller preset than paper: left out. Name it to run it.")
        found = [f for f in found if f not in large]
    configs = [read(f.path, set_, preset) for f in found]
    for config, experiment in zip(configs, found, strict=True):
        _names(None, config, experiment.path)
    for number, (config, experiment) in enumerate(zip(configs, found, strict=True), 1):
        chosen = preset or next(iter(presets(experiment.path)), None)
        folder = Path("runs") / (experiment.name if chosen is None else f"{experiment.name}-{chosen}")
        if out is not None:
            folder = out if len(found) == 1 else out / experiment.path.stem
        _new_directory(folder, resume=True)
        if not quiet:
            say(f"Experiment {number} of {len(found)}: {experiment.name}, preset {chosen or '(none)'}, in {folder}")
        _compare(config, None, seeds or config.compare.seeds or 3, folder, False, quiet)


@app.command()
def tune(
    experiment: ConfigFile,
    algorithms: Names = None,
    trials: Annotated[
        int | None,
        typer.Option(min=1, help="Trials for each algorithm; by default tune.trials of the file, which is 8."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=0, help="Seeds for the final runs on the test data; 0 for none.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="Where to keep the trials, best.toml (tuned.toml for variants) and the final runs."),
    ] = None,
    preset: Preset = None,
    set_: Set = None,
    resume: Resume = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Tune every algorithm, or variant, with the same number of trials, then report the best on the test data.

    EXPERIMENT is a TOML file. Trials are judged on a validation split of the training data; the test data play no part
    in the choice. For variants the result is printed, and kept in tuned.toml, as tables to put into the file.
    """
    config = read(experiment, set_, preset)
    if trials is not None:
        config = config.replace(tune=config.tune.replace(trials=trials))
    names = _names(algorithms, config, experiment)
    _new_directory(out, resume)
    tell = (lambda _: None) if quiet else say
    bars = progress(quiet) if err_console.is_terminal else []
    folder = None if out is None else out / "trials"
    results = (
        tune_variants(config, folder, bars, tell) if names is None else tune_runs(config, names, folder, bars, tell)
    )
    best, chosen = _tuned(config, names, results)
    tables = tomli_w.dumps({"variants": {label: {"algorithm": options} for label, options in best.items()}})
    if out is not None and names is None:
        (out / "tuned.toml").write_text(tables)
    elif out is not None:
        (out / "best.toml").write_text(tomli_w.dumps(chosen.to_toml()))
    final = None if out is None else out / "final"
    rows = _compare(chosen, names, seeds, final, False, quiet, show=not as_json) if seeds else []
    if as_json:
        print(json.dumps({"trials": results, "best": best, "test": rows}))
        return
    lines = (f"{name}: {', '.join(f'{k} = {v}' for k, v in options.items())}" for name, options in best.items())
    text = tables if names is None else "\n".join(lines)
    out_console.print(text, highlight=False, markup=False, soft_wrap=True)


@app.command("list")
def list_(
    kind: Annotated[str, typer.Argument(help="algorithms, problems, datasets, models or partitions.")],
    as_json: Json = False,
) -> None:
    """List what there is, with one line on each: KIND is algorithms, problems, datasets, models or partitions."""
    kinds: dict[str, dict[str, Any]] = {
        "algorithms": ALGORITHMS,
        "problems": {n: p.build for n, p in PROBLEMS.items()},
        "datasets": SETS,
        "models": MODELS,
        "partitions": PARTITIONS,
    }
    if kind not in kinds:
        raise unknown("list", kind, kinds)
    lines = {name: (inspect.getdoc(thing) or "").split("\n")[0] for name, thing in sorted(kinds[kind].items())}
    if as_json:
        print(json.dumps(lines))
        return
    grid = Table(box=None, show_header=False, pad_edge=False)
    for name, line in lines.items():
        grid.add_row(f"[bold]{name}[/bold]", line)
    out_console.print(grid)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A name of 'fedstrata list', or a table of a file such as train.")],
    as_json: Json = False,
) -> None:
    """Show what NAME is, and its options: of an algorithm also its equations and what it sends.

    NAME is an algorithm, problem, data set, model, partition or schedule, see 'fedstrata list', or a table of a
    configuration file: data, pretrain, train, evaluate, channel, faults, diagnostics, tune, compare or plot.
    """
    about = describe(name)
    if as_json:
        print(json.dumps(about.as_json()))
    else:
        about.show(out_console)


@app.command()
def plot(
    runs: Annotated[
        list[Path], typer.Argument(help="Run directories; seeds of one algorithm or variant become one line.")
    ],
    out: Annotated[Path, typer.Option(help="The picture to write (.png, .pdf, .svg).")] = Path("plot.png"),
    measure: Annotated[list[str] | None, typer.Option(help="What to draw, e.g. accuracy. May be repeated.")] = None,
    axis: Annotated[str, typer.Option(help="round, steps, samples, bytes_up, bytes_down or seconds.")] = "round",
) -> None:
    """Draw RUNS, run directories, against rounds, steps, samples, bytes or seconds.

    Runs of one algorithm or variant with several seeds become one line with a band: mean and standard deviation.
    """
    groups: dict[str, list[list[Row]]] = {}
    for path in runs:
        rows = RunDirectory(path).rows()
        if not rows:
            hint = f" Did you mean {path}/*?" if any(path.glob("*/metrics.jsonl")) else ""
            raise InputError(f"There is no run with metrics in {path}.{hint}")
        groups.setdefault(_label(path), []).append(rows)
    draw(groups, out, measure, axis)
    out_console.print(f"Picture written to {out}", highlight=False, soft_wrap=True)


@app.command()
def partition(
    experiment: ConfigFile,
    out: Annotated[Path, typer.Option(help="The picture to write (.png, .pdf, .svg).")] = Path("partition.png"),
    preset: Preset = None,
    set_: Set = None,
) -> None:
    """Draw who has what in EXPERIMENT, a TOML file: the training samples of every class that each client has."""
    config = read(experiment, set_, preset)
    data = Experiment(config).data if config.brings_data else build_data(config)
    plot_partition(data, out, config.plot.title)
    counts = data.train.class_counts if data.classes else None
    held = "" if counts is None else f", {(counts > 0).sum(1).mean():.1f} of {data.classes} classes on average"
    sizes = f"{data.sizes.min()} to {data.sizes.max()} training samples, {data.sizes.mean():.1f} on average"
    out_console.print(f"{data.clients} clients with {sizes}{held}.", highlight=False, soft_wrap=True)
    out_console.print(f"Picture written to {out}", highlight=False, soft_wrap=True)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("fedstrata-demo.png"),
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 3,
) -> None:
    """See it work: four algorithms on rare positives among eight clients, on real data, in under a minute."""
    config = parse(_DEMO, "demo")
    out_console.print(
        "Handwritten digits, 5 % positives (digits 0-4), eight clients with different mixes of digits.\n"
        "A small neural network learns to rank positives above negatives; AUC 1.0 is perfect, 0.5 is chance.\n"
        "fedavg and scaffold minimise cross-entropy, local_sgda and fgda maximise AUC; all tuned by the same budget.\n",
        highlight=False,
        soft_wrap=True,
    )
    _compare(config, None, seeds, None, False, False, picture=out)


_DEMO: dict[str, Any] = {
    "data": {
        "name": "digits",
        "clients": 8,
        "imbalance": 0.05,
        "partition": {"name": "dirichlet", "alpha": 0.3, "min_samples": 10},
    },
    "model": {"name": "mlp", "hidden": [64]},
    "problem": {"name": "auc", "score": "none"},
    "train": {"rounds": 100, "batch_size": 16, "threads": 1},
    "evaluate": {"clients": "none"},
    "plot": {"measures": ["auc"]},
    "variants": {
        "fedavg": {
            "problem": {"name": "erm", "loss": "binary_cross_entropy"},
            "algorithm": {"name": "fedavg", "lr": 0.73},
        },
        "scaffold": {
            "problem": {"name": "erm", "loss": "binary_cross_entropy"},
            "algorithm": {"name": "scaffold", "lr": 0.51},
        },
        "local_sgda": {"algorithm": {"name": "local_sgda", "lr": 0.46, "dual_lr": 1.3}},
        "fgda": {"algorithm": {"name": "fgda", "gamma": 0.46, "lam": 1.3}},
    },
}


def _tuned(
    config: Config, names: list[str] | None, results: dict[str, list[Row]]
) -> tuple[dict[str, dict[str, Any]], Config]:
    """Return the best options of each algorithm or variant, and the experiment with them."""
    if names is None:
        best = {label: rows[0]["options"] for label, rows in results.items()}
        return best, with_options(config, best)
    best = {name: best_options(config, name, rows) for name, rows in results.items()}
    first = config.algorithm.name if config.algorithm.name in best else names[0]
    return best, config.replace(algorithms={**config.algorithms, **best}).with_algorithm(first, best[first])


def _compare(
    config: Config,
    names: list[str] | None,
    seeds: int,
    out: Path | None,
    as_json: bool,
    quiet: bool,
    show: bool = True,
    picture: Path | None = None,
) -> list[Row]:
    """Run the algorithms of these names, or the variants of the file, and show how they compare."""
    numbers, bars = range(config.train.seed, config.train.seed + seeds), progress(quiet, brief=True)
    if names is None:
        runs = compare_variants(config, numbers, out, bars, say)
    else:
        runs = compare_runs(config, names, numbers, out, bars, say)
    rows = table(runs, "variant" if names is None else "algorithm")
    histories = {n: [r.history for r in group if r is not None] for n, group in runs.items()}
    histories = {n: h for n, h in histories.items() if h}
    where = measured_in_all({label: [r.summary for r in group if r is not None] for label, group in runs.items()})
    if out is not None:
        (out / "compare.json").write_text(json.dumps(rows, indent=2))
        (out / "table.md").write_text(as_markdown(rows, config.plot.measures) + f"\n{where}\n")
        picture = out / "plot.png"
    if as_json:
        print(json.dumps(rows))
    elif show:
        data = dict.fromkeys(r.summary["data"] for group in runs.values() for r in group if r is not None)
        title = f"{', '.join(data)}, {seeds} seed{'s' * (seeds > 1)}: mean ± spread"
        out_console.print(as_table([mean_and_spread(r, config.plot.measures) for r in rows], title))
        out_console.print(where, highlight=False)
    if picture is not None and histories:
        draw(histories, picture, **vars(config.plot))
        if show and not as_json:
            out_console.print(f"Picture: {picture}", highlight=False, soft_wrap=True)
    if not histories:
        raise FedstrataError("Every run diverged. Try smaller learning rates.")
    return rows


def _list_experiments() -> None:
    found = everything()
    if not found:
        raise InputError("There are no experiments: no TOML files under experiments/ here or above.")
    grid = Table(box=None, pad_edge=False)
    for column in ("experiment", "presets", "what it is"):
        grid.add_column(column)
    for experiment in found:
        grid.add_row(f"[bold]{experiment.name}[/bold]", ", ".join(presets(experiment.path)), Text(experiment.about))
    out_console.print(grid)


def _names(text: str | None, config: Config, path: Path) -> list[str] | None:
    """Return the algorithms asked for; None stands for the variants of the file, which must be there."""
    if text is None:
        if not config.variants:
            raise InputError(
                f"{path} has no variants: add [variants.LABEL] tables. (compare and tune take --algorithms instead.)"
            )
        return None
    names = list(dict.fromkeys(n.strip() for n in text.split(",") if n.strip()))
    if not names:
        raise InputError("--algorithms needs at least one name, e.g. --algorithms fedavg,scaffold.")
    for name in names:
        if name not in ALGORITHMS:
            raise unknown("algorithm", name, ALGORITHMS)
    return names


def _new_directory(out: Path | None, resume: bool) -> None:
    if resume and out is None:
        raise InputError("--resume needs --out: the directory to go on with.")
    if out is not None and out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file. Nothing was overwritten.")
    if out is not None and not resume and out.exists() and any(out.iterdir()):
        raise InputError(
            f"The directory {out} exists and is not empty. Nothing was overwritten: choose another or --resume."
        )


def _label(path: Path) -> str:
    """Return what a picture calls a run: the label of its variant, else its algorithm, else its directory."""
    settings = path / "config.toml"
    raw = read_toml(settings) if settings.exists() else {}
    by_name = "algorithm" in raw and "size" not in raw.get("problem", {})  # the size is what a run from Python writes
    return str(raw.get("label") or (raw["algorithm"]["name"] if by_name else path.name))


def progress(quiet: bool, brief: bool = False) -> list[Callback]:
    """Return who shows the progress of a run: nobody, when it is to be quiet."""
    return [] if quiet else [ShowProgress(err_console, brief)]


def say(text: str) -> None:
    """Tell a person something, beside the output."""
    err_console.print(text, highlight=False, markup=False, soft_wrap=True)


def main() -> None:
    """Run the command line; exit 0 when all went well, 2 for bad input, 1 for failure, 130 when interrupted."""
    warnings.showwarning = lambda message, *_, **__: say(f"Warning: {message}")
    sys.exit(_exit_code(lambda: app(standalone_mode=False)))


def _exit_code(command: Callable[[], Any]) -> int:
    try:
        returned = command()
    except FedstrataError as error:
        say(f"Error: {error}")
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return 2
    except (click.Abort, KeyboardInterrupt):
        returned = 130
    except OSError as error:
        say(f"Error: {error}")
        return 1
    if returned == 130:
        say("Interrupted. A run with --out goes on from its last checkpoint with --resume.")
    return returned if isinstance(returned, int) else 0
