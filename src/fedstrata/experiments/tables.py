"""Tables of results, for a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from fedstrata.core.files import Row

_PERSONAL = ("personal_accuracy_mean", "personal_accuracy_worst", "personal_loss_mean")
_SMALL = ("distance", "distance_dual", "gradient_norm")

MAIN = (
    "auc",
    "adapted_auc",
    "auc_mean",
    "auc_worst",
    "accuracy",
    "adapted_accuracy",
    "accuracy_mean",
    "accuracy_worst",
    "attacked_accuracy",
    *_PERSONAL,
    "loss",
    *_SMALL,
)
"""The measures in a table that names none, in order."""


def measured(summary: Row) -> str:
    """Say in a sentence which data a run was measured on."""
    where = summary.get("measured_on")
    if not where:
        return "Measured by your own evaluation function."
    parts = {"on the pooled": where["pooled"], "per client on its": where["clients"]}
    places = "; ".join(f"{how} {data}" for how, data in parts.items() if data != "nothing")
    adapted = f" The model is {where['model']}." if "model" in where else ""
    return f"Measured {places or 'on nothing'}.{adapted}"


def measured_in_all(summaries: Mapping[str, Sequence[Row]]) -> str:
    """Say which data the runs of a comparison were measured on; a sentence that is not for all names its labels."""
    labels: dict[str, dict[str, None]] = {}
    for label, group in summaries.items():
        for summary in group:
            data, _, model = measured(summary).partition(" The model is ")
            labels.setdefault(data, {})[label] = None
            if model:
                labels.setdefault(f"The model is {model}", {})[label] = None
    return " ".join(
        sentence if len(of) == len(summaries) else f"{', '.join(of)}: {sentence[0].lower()}{sentence[1:]}"
        for sentence, of in labels.items()
    )


def one_run(row: Row, measures: Sequence[str] | None = None) -> Row:
    """Format the last row of a run: these measures, or the main ones, and the costs of the run."""
    cells: Row = {"round": row["round"]}
    for key in measures or sorted(MAIN, key=lambda m: m != "loss"):
        if key in row:
            cells[_heading(key)] = f"{row[key]:.3g}" if key in _SMALL else f"{row[key]:.4f}"
    return cells | {
        "samples": f"{row['samples']:,}",
        "sent up": size(row["bytes_up"]),
        "sent down": size(row["bytes_down"]),
        "seconds": f"{row['seconds']:.1f}",
    }


def mean_and_spread(row: Row, measures: Sequence[str] | None = None) -> Row:
    """Format a row of a comparison for the terminal."""
    kind = next(iter(row))
    cells: Row = {kind: row[kind]}
    if row["diverged"]:
        cells[kind] += f" ({row['diverged']} of {row['seeds']} diverged)"
    for key in measures or MAIN:
        if key in row:
            cells[_heading(key)] = _mean_and_spread(row, key)
    if "bytes_up" in row:
        cells |= {"sent up": size(row["bytes_up"]), "seconds": f"{row['seconds']:.1f}"}
    return cells


def as_markdown(rows: Sequence[Row], measures: Sequence[str] | None = None) -> str:
    """Format the rows of a comparison as a Markdown table: mean ± standard deviation over seeds."""
    columns = measures or [m for m in MAIN if any(m in r for r in rows)]
    kind = next(iter(rows[0]))
    head = [kind, *map(_heading, columns), "samples", "bytes up", "seconds", "diverged"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for row in rows:
        cells = [_mean_and_spread(row, c) if c in row else "–" for c in columns]
        costs = ["–"] * 3
        if "samples" in row:
            costs = [f"{row['samples']:,.0f}", size(row["bytes_up"]), f"{row['seconds']:.1f}"]
        lines.append([row[kind].replace("|", r"\|"), *cells, *costs, f"{row['diverged']} of {row['seeds']}"])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _heading(measure: str) -> str:
    return measure.replace("_", " ")


def _mean_and_spread(row: Row, measure: str) -> str:
    mean, spread = row[measure], row[f"{measure}_std"]
    form = ".3f" if mean == 0 or 0.01 <= abs(mean) < 10_000 else ".2e"
    fewer = f" ({row[f'{measure}_seeds']} of {row['seeds']})" if f"{measure}_seeds" in row else ""
    alone = row["seeds"] - row["diverged"] == 1
    return f"{mean:{form}}{fewer}" if alone else f"{mean:{form}} ± {spread:{form}}{fewer}"


def size(count: float) -> str:
    """Format a number of bytes, e.g. ``4.1 MB``."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def as_table(rows: list[Row], title: str) -> Table:
    """Build a table for the terminal; square brackets in a label are not markup."""
    table = Table(title=escape(title), title_justify="left")
    columns = list(dict.fromkeys(k for r in rows for k in r))
    for column in columns:
        table.add_column(column, justify="left" if column in ("algorithm", "variant") else "right")
    for row in rows:
        table.add_row(*(escape(str(row.get(c, ""))) for c in columns))
    return table
