"""Results as rows of text: of a run, of a comparison, and in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedstrata.core.files import Row
from fedstrata.training.metrics.catalogue import IN_TABLES, measure


def measured(summary: Row) -> str:
    """Say in a sentence which data a run was measured on."""
    data_of = summary.get("measured_on")
    if not data_of:
        return "Measured by your own evaluation function."
    parts = {"on the pooled": data_of["pooled"], "per client on its": data_of["clients"]}
    phrases = "; ".join(f"{how} {data}" for how, data in parts.items() if data != "nothing")
    adapted = f" The model is {data_of['model']}." if "model" in data_of else ""
    return f"Measured {phrases or 'on nothing'}.{adapted}"


def measured_in_all(summaries: Mapping[str, Sequence[Row]]) -> str:
    """Say which data the runs of a comparison were measured on; a sentence about some of them names their labels."""
    labels: dict[str, dict[str, None]] = {}
    for label, group in summaries.items():
        for summary in group:
            data, _, model = measured(summary).partition(" The model is ")
            labels.setdefault(data, {})[label] = None
            if model:
                labels.setdefault(f"The model is {model}", {})[label] = None
    return " ".join(
        sentence if len(own) == len(summaries) else f"{', '.join(own)}: {sentence[0].lower()}{sentence[1:]}"
        for sentence, own in labels.items()
    )


def one_run(row: Row, measures: Sequence[str] | None = None) -> Row:
    """Format the last row of a run: these measures, or the main ones, and the costs of the run."""
    cells: Row = {"round": row["round"]}
    for key in measures or sorted(IN_TABLES, key=lambda m: m != "loss"):
        if key in row:
            cells[measure(key).heading] = f"{row[key]:.3g}" if measure(key).tiny else f"{row[key]:.4f}"
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
    for key in measures or IN_TABLES:
        if key in row:
            cells[measure(key).heading] = _mean_and_spread(row, key)
    if "bytes_up" in row:
        cells |= {"sent up": size(row["bytes_up"]), "seconds": f"{row['seconds']:.1f}"}
    return cells


def as_markdown(rows: Sequence[Row], measures: Sequence[str] | None = None) -> str:
    """Format the rows of a comparison as a Markdown table: mean ± standard deviation over seeds."""
    columns = measures or [m for m in IN_TABLES if any(m in r for r in rows)]
    kind = next(iter(rows[0]))
    head = [kind, *(measure(column).heading for column in columns), "samples", "bytes up", "seconds", "diverged"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for row in rows:
        cells = [_mean_and_spread(row, c) if c in row else "–" for c in columns]
        costs = ["–"] * 3
        if "samples" in row:
            costs = [f"{row['samples']:,.0f}", size(row["bytes_up"]), f"{row['seconds']:.1f}"]
        lines.append([row[kind].replace("|", r"\|"), *cells, *costs, f"{row['diverged']} of {row['seeds']}"])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _mean_and_spread(row: Row, name: str) -> str:
    mean, spread = row[name], row[f"{name}_std"]
    form = ".3f" if mean == 0 or 0.01 <= abs(mean) < 10_000 else ".2e"
    fewer = f" ({row[f'{name}_seeds']} of {row['seeds']})" if f"{name}_seeds" in row else ""
    alone = row["seeds"] - row["diverged"] == 1
    return f"{mean:{form}}{fewer}" if alone else f"{mean:{form}} ± {spread:{form}}{fewer}"


def size(count: float) -> str:
    """Format a number of bytes, e.g. ``4.1 MB``."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
