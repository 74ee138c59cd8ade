"""Results as tables, for a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from fedstrata.training.rundir import Row

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
"""The measures of a comparison that are shown when nobody says which."""


def measured(summary: Row) -> str:
    """Say in a sentence what a run was measured on."""
    where = summary.get("measured_on")
    if not where:
        return "Measured by a function of the user's."
    said = {"on the pooled": where["pooled"], "per client on its": where["clients"]}
    places = "; ".join(f"{how} {data}" for how, data in said.items() if data != "nothing")
    adapted = f" The model is {where['model']}." if "model" in where else ""
    return f"Measured {places or 'on nothing'}.{adapted}"


def measured_in_all(summaries: Mapping[str, Sequence[Row]]) -> str:
    """Say what the runs of a comparison, by label, were measured on; where they differ, by whom."""
    said: dict[str, dict[str, None]] = {}
    for label, group in summaries.items():
        for summary in group:
            first, _, model = measured(summary).partition(" The model is ")
            said.setdefault(first, {})[label] = None
            if model:
                said.setdefault(f"The model is {model}", {})[label] = None
    parts = [text if len(who) == len(summaries) else f"{', '.join(who)}: {_lower(text)}" for text, who in said.items()]
    return " ".join(parts)


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]


def one_run(row: Row, measures: Sequence[str] | None = None) -> Row:
    """Return the last row of a run as a person wants to see it: these measures, or the main ones."""
    shown: Row = {"round": row["round"]}
    for key in measures or sorted(MAIN, key=lambda m: m != "loss"):
        if key in row:
            shown[key.replace("_", " ")] = f"{row[key]:.3g}" if key in _SMALL else f"{row[key]:.4f}"
    return shown | {
        "samples": f"{row['samples']:,}",
        "sent up": size(row["bytes_up"]),
        "sent down": size(row["bytes_down"]),
        "seconds": f"{row['seconds']:.1f}",
    }


def mean_and_spread(row: Row, measures: Sequence[str] | None = None) -> Row:
    """Return one row of a comparison as a person wants to see it."""
    kind = next(iter(row))
    shown: Row = {kind: row[kind]}
    if row["diverged"]:
        shown[kind] += f" ({row['diverged']} of {row['seeds']} diverged)"
    for key in measures or MAIN:
        if key in row:
            shown[key.replace("_", " ")] = _mean_and_spread(row, key)
    if "bytes_up" in row:
        shown |= {"sent up": size(row["bytes_up"]), "seconds": f"{row['seconds']:.1f}"}
    return shown


def as_markdown(rows: Sequence[Row], measures: Sequence[str] | None = None) -> str:
    """Return the rows of a comparison as a Markdown table, mean ± standard deviation over seeds."""
    columns = measures or [m for m in MAIN if any(m in r for r in rows)]
    kind = next(iter(rows[0]))
    head = [kind, *(c.replace("_", " ") for c in columns), "samples", "bytes up", "seconds", "diverged"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for row in rows:
        cells = [_mean_and_spread(row, c) if c in row else "–" for c in columns]
        costs = ["–"] * 3
        if "samples" in row:
            costs = [f"{row['samples']:,.0f}", size(row["bytes_up"]), f"{row['seconds']:.1f}"]
        lines.append([row[kind].replace("|", r"\|"), *cells, *costs, f"{row['diverged']} of {row['seeds']}"])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _mean_and_spread(row: Row, measure: str) -> str:
    mean, spread = row[measure], row[f"{measure}_std"]
    form = ".3f" if mean == 0 or 0.01 <= abs(mean) < 10_000 else ".2e"
    fewer = f" ({row[f'{measure}_seeds']} of {row['seeds']})" if f"{measure}_seeds" in row else ""
    alone = row["seeds"] - row["diverged"] == 1
    return f"{mean:{form}}{fewer}" if alone else f"{mean:{form}} ± {spread:{form}}{fewer}"


def size(count: float) -> str:
    """Return a number of bytes in words."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def as_table(rows: list[Row], title: str) -> Table:
    """Return rows as a table for the terminal."""
    grid = Table(title=title, title_justify="left")
    columns = list(dict.fromkeys(k for r in rows for k in r))
    for column in columns:
        grid.add_column(column, justify="left" if column in ("algorithm", "variant") else "right")
    for row in rows:
        grid.add_row(*(str(row.get(c, "")) for c in columns))
    return grid
