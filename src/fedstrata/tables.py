"""Results as tables for a terminal."""

from __future__ import annotations

from rich.table import Table

from fedstrata.rundir import Row


def one_run(row: Row) -> Row:
    """Return the last row of a run as a person wants to see it."""
    shown: Row = {"round": row["round"]}
    for key in ("loss", "accuracy", "accuracy_mean", "accuracy_worst", "auc", "auc_mean", "auc_worst"):
        if key in row:
            shown[key.replace("_", " ")] = f"{row[key]:.4f}"
    return shown | {
        "samples": f"{row['samples']:,}",
        "sent up": size(row["bytes_up"]),
        "sent down": size(row["bytes_down"]),
        "seconds": f"{row['seconds']:.1f}",
    }


def mean_and_spread(row: Row) -> Row:
    """Return one algorithm's row of a comparison as a person wants to see it."""
    shown: Row = {"algorithm": row["algorithm"]}
    if row["diverged"]:
        shown["algorithm"] += f" ({row['diverged']} of {row['seeds']} diverged)"
    for key in ("auc", "auc_mean", "auc_worst", "accuracy", "accuracy_mean", "accuracy_worst", "loss"):
        if key in row:
            shown[key.replace("_", " ")] = f"{row[key]:.3f} ± {row[f'{key}_std']:.3f}"
    if "bytes_up" in row:
        shown |= {"sent up": size(row["bytes_up"]), "seconds": f"{row['seconds']:.1f}"}
    return shown


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
        grid.add_column(column, justify="left" if column == "algorithm" else "right")
    for row in rows:
        grid.add_row(*(str(row.get(c, "")) for c in columns))
    return grid
