"""What commands print: tables of results, and the progress of runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from fedstrata.cli.console import ERR, OUT, echo
from fedstrata.core.files import Row
from fedstrata.experiments.comparison import Comparison
from fedstrata.experiments.tables import mean_and_spread, measured, one_run
from fedstrata.training.callbacks import Callback, ShowProgress


def progress(quiet: bool, brief: bool = False) -> list[Callback]:
    """Return the callbacks that show the progress of a run."""
    return [] if quiet else [ShowProgress(ERR, brief)]


def progress_bars(quiet: bool) -> list[Callback]:
    """Return the callbacks that show progress on a terminal, and none elsewhere."""
    return progress(quiet) if ERR.is_terminal else []


def print_grid(rows: Iterable[Sequence[str]], columns: Sequence[str] = (), title: str | None = None) -> None:
    """Print rows in aligned columns without lines, the first column in bold."""
    grid = Table(box=None, pad_edge=False, show_header=bool(columns), title=title, title_justify="left")
    for column in columns:
        grid.add_column(escape(column))
    for first, *rest in rows:
        grid.add_row(f"[bold]{escape(first)}[/bold]", *map(escape, rest))
    OUT.print(grid)


def print_table(rows: Sequence[Row], title: str) -> None:
    """Print rows as a table with lines; square brackets in a label are not markup."""
    table = Table(title=escape(title), title_justify="left")
    columns = list(dict.fromkeys(k for r in rows for k in r))
    for column in columns:
        label = column in ("algorithm", "variant")
        table.add_column(escape(column), justify="left" if label else "right", overflow="fold" if label else "ellipsis")
    for row in rows:
        table.add_row(*(escape(str(row.get(c, ""))) for c in columns))
    OUT.print(table)


def print_run(
    summary: Row, history: list[Row], out: Path | None, as_json: bool, measures: Sequence[str] | None = None
) -> None:
    """Print the result of a run: its summary as JSON, or a table of its last measures with notes on them."""
    if as_json:
        print(json.dumps(summary))
        return
    final = {name: summary.get(name, value) for name, value in history[-1].items()}
    print_table([one_run(final, measures)], f"{summary['algorithm']} on {summary['data']}")
    if summary.get("stopped_by") == "patience":
        best = summary["best_round"]
        echo(f"Stopped at round {summary['round']}, without improvement. The model is that of round {best}.")
    elif "stopped_by" in summary:
        echo(f"Stopped at round {summary['round']}: another one would exceed {summary['stopped_by']}.")
    echo(measured(summary), wrap=True)
    if "pretrain" in summary:
        before = summary["pretrain"]
        cost = "samples, bytes and seconds include it"
        echo(f"Pre-trained by {before['algorithm']} for {before['rounds']} rounds; {cost}.", wrap=True)
    if "epsilon" in summary:
        guarantee = f"({summary['epsilon']:.4g}, {summary['delta']:g})"
        echo(f"Client-level differential privacy: (epsilon, delta) = {guarantee}.", wrap=True)
    if summary.get("left_out"):
        echo(f"Left out of exchanges: {_counted(summary['left_out'])}.")
    if summary.get("not_measured"):
        echo(f"Not measured: {_counted(summary['not_measured'])}.")
    if out is not None:
        echo(f"Written to {out} (plot: {out / 'plot.png'})")


def _counted(times: dict[str, int]) -> str:
    return ", ".join(f"{name} {'once' if n == 1 else f'{n} times'}" for name, n in times.items())


def print_comparison(comparison: Comparison, measures: Sequence[str] | None) -> None:
    """Print the table of a comparison, the data it was measured on, and the verdicts."""
    seeds = comparison.seeds
    title = f"{', '.join(comparison.datasets)}, {seeds} seed{'s' * (seeds > 1)}: mean ± spread"
    print_table([mean_and_spread(row, comparison.columns(measures)) for row in comparison.rows], title)
    echo(comparison.measured, wrap=True)
    if len(comparison.outcomes) > 1:
        for sentence in comparison.verdicts:
            echo(sentence, wrap=True)
        echo(comparison.conditions, wrap=True)
    for warning in comparison.warnings:
        echo(warning, wrap=True)
