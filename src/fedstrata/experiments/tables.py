"""Results as rows of text: of a run, of a comparison, and in Markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence

from fedstrata.core.errors import invalid, listed
from fedstrata.core.files import Row
from fedstrata.experiments.judge import interval
from fedstrata.training.metrics.catalogue import (
    COSTS,
    IN_PROGRESS,
    IN_TABLES,
    MEASURES,
    MORE_COSTS,
    VALIDATION,
    measure,
)

Cell = str | float | None
"""A cell of a table of numbers; None is empty."""


def measured(summary: Row) -> str:
    """Say which data a run was measured on."""
    return " ".join(_measured([summary]))


def _measured(summaries: Sequence[Row]) -> list[str]:
    """Say which data the runs of a method were measured on, one sentence for each fact; some depend on the seed."""
    facts = [_facts(summary) for summary in summaries]
    sentences = []
    for start in dict.fromkeys(start for each in facts for start in each):
        different = list(dict.fromkeys(each.get(start, "all sites measured") for each in facts))
        sentences.append(f"{start} {' or '.join(different)}{', depending on the seed' * (len(different) > 1)}.")
    return sentences


def _facts(summary: Row) -> dict[str, str]:
    """Return what is said of the data that a run was measured on, by the beginning of the sentence."""
    data_of = summary.get("measured_on")
    if not data_of:
        return {"Measured": "by your own evaluation function"}
    parts = {"on the pooled": data_of["pooled"], "per client on its": data_of["clients"]}
    phrases = "; ".join(f"{how} {data}" for how, data in parts.items() if data != "nothing")
    return {"Measured": phrases or "on nothing"} | {_MORE[name]: data_of[name] for name in _MORE if name in data_of}


_MORE = {"auc": "A site's own AUC:", "accuracy": "A site's own accuracy:", "model": "The model is"}
"""How the sentences begin on which clients are measured, and with which model; they are left out if it is usual."""


def measured_in_all(summaries: Mapping[str, Sequence[Row]]) -> str:
    """Say which data the runs of a comparison were measured on; a sentence about some of them names their labels."""
    labels: dict[str, list[str]] = {}
    for label, group in summaries.items():
        for sentence in _measured(group):
            labels.setdefault(sentence, []).append(label)
    return " ".join(
        sentence if len(own) == len(summaries) else f"{', '.join(own)}: {sentence[0].lower()}{sentence[1:]}"
        for sentence, own in labels.items()
    )


def untrained_in_all(summaries: Mapping[str, Sequence[Row]]) -> list[str]:
    """Say for each method which clients could not train alone: its means include their untrained models."""
    sentences = []
    for label, group in summaries.items():
        names = list(dict.fromkeys(name for summary in group for name in summary.get("untrained", ())))
        if names:
            seed = " with some seed" if any(len(s["untrained"]) < len(names) for s in group) else ""
            whose = "its untrained model" if len(names) == 1 else "their untrained models"
            sentences.append(
                f"{label}: {listed(names)} ({len(names)} of {group[0]['clients']} clients) could not train "
                f"alone{seed}; means include {whose}."
            )
    return sentences


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
        first = next((m for m in measures or IN_TABLES if m in row["values"]), next(iter(measures or ("loss",))))
        return cells | {measure(first).heading: diverged_in(row)}
    for key in measures or IN_TABLES:
        if key in row["values"]:
            cells[measure(key).heading] = _mean_and_spread(row, key)
    return cells | {"sent up": size(row["bytes_up"]), "seconds": f"{row['seconds']:.1f}"}


def diverged_in(row: Row) -> str:
    """Say in how many of its seeds a method diverged."""
    return f"diverged in {row['diverged']} of {row['seeds']}"


def in_short(row: Row | None) -> str:
    """Return the main measures of a run in one line."""
    names = [name for name in IN_PROGRESS if row is not None and name in row]
    return "  ".join(f"{name} {row[name]:.4g}" for name in names) if row is not None else "diverged"


def as_markdown(rows: Sequence[Row], measures: Sequence[str] | None = None) -> str:
    """Format the rows of a comparison as a Markdown table: mean ± standard deviation over seeds."""
    return formatted(rows, "markdown", measures)


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Return the measures that a table shows if none are named: the main ones, and a user's own."""
    names = dict.fromkeys(name for row in rows for name in row["values"])
    ours = (*MEASURES, "round", *COSTS, *MORE_COSTS)
    own = [name for name in names if name.removeprefix(VALIDATION) not in ours]
    return [*(name for name in IN_TABLES if name in names), *own]


def cells_of(rows: Sequence[Row], measures: Sequence[str] | None = None) -> list[list[str]]:
    """Return the cells of a table of a comparison, with a head: measures and costs of each method."""
    columns = measures or columns_of(rows)
    kind, costs = next(iter(rows[0])), [cost for cost in _COSTS_IN_WORDS if cost not in columns]
    lines = [[kind, *(measure(name).heading for name in (*columns, *costs)), "diverged"]]
    for row in rows:
        cells = [_mean_and_spread(row, c) if c in row["values"] and not row["diverged"] else "–" for c in columns]
        cells += [_COSTS_IN_WORDS[cost](row[cost]) if cost in row else "–" for cost in costs]
        lines.append([row[kind], *cells, f"{row['diverged']} of {row['seeds']}"])
    return lines


def formatted(rows: Sequence[Row], form: str, measures: Sequence[str] | None = None) -> str:
    """Format the rows of a comparison in Markdown, LaTeX (with booktabs) or CSV."""
    return as_csv(numbers_of(rows, measures)) if form == "csv" else formatted_cells(cells_of(rows, measures), form)


def numbers_of(rows: Sequence[Row], measures: Sequence[str] | None = None) -> list[list[Cell]]:
    """Return the numbers of a comparison, with a head: each measure with its deviation and the ends of its interval.

    ``_seeds`` is the number of seeds that a mean is over: 0 without one, as for a method that diverged.
    """
    columns = measures or columns_of(rows)
    kind = next(iter(rows[0]))
    costs = [cost for cost in ("samples", "bytes_up", "bytes_down", "seconds") if cost not in columns]
    parts = [f"{column}{part}" for column in columns for part in ("", "_std", "_low", "_high", "_seeds")]
    lines: list[list[Cell]] = [[kind, "seeds", "diverged", *parts, *costs]]
    for row in rows:
        cells: list[Cell] = [row[kind], row["seeds"], row["diverged"]]
        for column in columns:
            values = [v for v in row["values"].get(column, ()) if v is not None] if column in row else []
            mean = interval(values) if values else None
            spread = row[f"{column}_std"] if len(values) > 1 else None
            cells += [*([None] * 4 if mean is None else [mean.mean, spread, mean.low, mean.high]), len(values)]
        lines.append(cells + [row.get(cost) for cost in costs])
    return lines


def as_csv(cells: Sequence[Sequence[Cell]]) -> str:
    """Format a table as CSV: numbers in full, nothing where there is none, and texts that no spreadsheet runs."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_harmless(cell) for cell in line] for line in cells)
    return text.getvalue()


def _harmless(cell: Cell) -> Cell:
    """Return a cell; a text that a spreadsheet would take for a formula begins with an apostrophe."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell


def formatted_cells(cells: Sequence[Sequence[str]], form: str) -> str:
    """Format a table of texts, whose first line is its head, in Markdown or LaTeX (with booktabs)."""
    head, *body = cells
    if form == "markdown":
        first, *rest = ([" ".join(c.replace("|", r"\|").split()) for c in line] for line in cells)
        return "".join(f"| {' | '.join(line)} |\n" for line in [first, ["---", *["---:"] * (len(head) - 1)], *rest])
    if form != "latex":
        raise invalid("form of a table", form, "'markdown', 'latex' or 'csv'")
    lines = [" & ".join(map(_latex, line)) + r" \\" for line in (head, *body)]
    columns = "l" + "r" * (len(head) - 1)
    rules = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", lines[0], r"\midrule", *lines[1:]]
    return "\n".join([*rules, r"\bottomrule", r"\end{tabular}", ""])


_LATEX = {"\\": r"\textbackslash{}", "±": r"$\pm$", "–": "--", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text)


def _mean_and_spread(row: Row, name: str) -> str:
    """Format the mean over seeds; there is none if some have no value, since it would flatter the method."""
    if name not in row:
        return f"no value in {row['values'][name].count(None)} of {row['seeds']}"
    mean, spread = row[name], row[f"{name}_std"]
    form = _form_of(mean, 3)
    return f"{mean:{form}}" if row["seeds"] == 1 else f"{mean:{form}} ± {spread:{form}}"


def number(value: float) -> str:
    """Format a measure of a trial: four decimals, or a power of ten if it is tiny or huge."""
    return f"{value:{_form_of(value, 4)}}"


def _form_of(value: float, decimals: int) -> str:
    plain = value == 0 or 0.01 <= abs(value) < 10_000
    return f".{decimals}f" if plain else f".{decimals - 1}e"


def size(count: float) -> str:
    """Format a number of bytes, e.g. ``4.1 MB``."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


_COSTS_IN_WORDS: dict[str, Callable[[float], str]] = {
    "samples": "{:,.0f}".format,
    "bytes_up": size,
    "seconds": "{:.1f}".format,
}
"""The costs that every table shows, and how."""
