"""Tables of results in Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import re

import pytest

import fedstrata as fs
from fedstrata.core.errors import InputError
from fedstrata.core.files import Row
from fedstrata.experiments.tables import as_csv, formatted, formatted_cells

COSTS = {"samples": 1200.0, "bytes_up": 4.1e6, "bytes_down": 2.0e6, "seconds": 2.04}


def rows_of(*labels: str) -> list[Row]:
    measures = {"accuracy": 0.91, "accuracy_std": 0.02, "values": {"accuracy": [0.89, 0.93]}}
    return [{"variant": label, "seeds": 2, "diverged": 0, **measures, **COSTS} for label in labels]


ESCAPED = {
    "a & b": r"a \& b",
    "95 %": r"95 \%",
    "gamma_x": r"gamma\_x",
    "# 3": r"\# 3",
    "$5": r"\$5",
    "{lr}": r"\{lr\}",
    "~/x": r"\textasciitilde{}/x",
    "x^2": r"x\textasciicircum{}2",
    r"\alpha": r"\textbackslash{}alpha",
    "1 ± 2": r"1 $\pm$ 2",
    r"\{_}": r"\textbackslash{}\{\_\}",
    "lr = 0.1 (γ)": "lr = 0.1 (γ)",
}


@pytest.mark.parametrize("label", ESCAPED)
def test_latex_escapes_what_has_a_meaning(label: str) -> None:
    lines = formatted(rows_of(label), "latex").splitlines()
    assert lines[4] == rf"{ESCAPED[label]} & 0.910 $\pm$ 0.020 & 1,200 & 4.1 MB & 2.0 & 0 of 2 \\"
    head = formatted_cells([[label, "b"], ["c", label]], "latex").splitlines()
    assert head[2] == rf"{ESCAPED[label]} & b \\" and head[4] == rf"c & {ESCAPED[label]} \\"


def test_latex_is_a_table_of_booktabs() -> None:
    lost: Row = {"variant": "lost", "seeds": 2, "diverged": 1, "values": {}}
    assert formatted([*rows_of("a"), lost], "latex") == (
        r"""\begin{tabular}{lrrrrr}
\toprule
variant & accuracy & samples & bytes up & seconds & diverged \\
\midrule
a & 0.910 $\pm$ 0.020 & 1,200 & 4.1 MB & 2.0 & 0 of 2 \\
lost & -- & -- & -- & -- & 1 of 2 \\
\bottomrule
\end{tabular}
"""
    )


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_csv_quotes_what_it_must() -> None:
    labels = ["a, b", 'say "hi"', "two\nlines", "plain", "x | y & z"]
    text = formatted(rows_of(*labels), "csv")
    assert [line["variant"] for line in read(text)] == labels
    assert '"a, b",' in text and '"say ""hi""",' in text and "\nplain," in text and "\r" not in text


def test_cells_of_csv_are_numbers() -> None:
    lost: Row = {"variant": "lost", "seeds": 2, "diverged": 1, "values": {}}
    first, second = read(formatted([*rows_of("a"), lost], "csv"))
    numbers = {name: float(cell) for name, cell in first.items() if name != "variant"}
    low, high = numbers.pop("accuracy_low"), numbers.pop("accuracy_high")
    assert low == pytest.approx(0.91 - 12.706 * 0.02, rel=1e-3) and low + high == pytest.approx(2 * 0.91)
    assert numbers.pop("accuracy") == pytest.approx(0.91) and numbers.pop("accuracy_std") == 0.02
    assert numbers == {"seeds": 2, "diverged": 0, "accuracy_seeds": 2, **COSTS}
    lost_cells = {"variant": "lost", "seeds": "2", "diverged": "1", "accuracy_seeds": "0"}
    assert {name: cell for name, cell in second.items() if cell} == lost_cells
    one: Row = {**rows_of("a")[0], "seeds": 1, "values": {"accuracy": [0.91]}}
    (line,) = read(formatted([one], "csv"))
    assert line["accuracy"] == "0.91" and [line[f"accuracy_{end}"] for end in ("std", "low", "high")] == [""] * 3


@pytest.mark.parametrize("label", ["=1+1", "+1", "-1", "@SUM(A1)", "-"])
def test_labels_in_csv_are_not_formulas(label: str) -> None:
    (line,) = read(formatted(rows_of(label), "csv"))
    assert line["variant"] == f"'{label}"
    assert as_csv([["x", "y"], [label, -0.5]]) == f"x,y\n'{label},-0.5\n", "numbers may be negative"


def test_the_best_trials_in_csv_are_numbers() -> None:
    made = fs.quadratic(clients=2, dimension=2)
    methods = {"=a": (made.problem, fs.FedAvg(lr=0.01)), "b": (made.problem, fs.FedProx(lr=0.01))}
    tuned = fs.tune(methods, made.data, trials=1, seeds=1, rounds=2, threads=1, extend=False)
    first, second = read(tuned.table("csv"))
    assert first.pop("method") == "'=a" and second.pop("method") == "b"
    best = tuned.trials["b"][0]
    assert {n: float(cell) for n, cell in second.items()} == {
        **best.numbers,
        "validation_distance": best.value("distance"),
        "trials": len(tuned.trials["b"]),
        "failed": 0,
    }
    assert first["mu"] == "" and "hyperparameters" in tuned.table()


def test_markdown_escapes_pipes() -> None:
    lines = formatted(rows_of("a|b", "||"), "markdown").splitlines()
    assert lines[2].startswith(r"| a\|b | 0.910 ± 0.020 |") and lines[3].startswith(r"| \|\| | ")
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {7}, "as many columns in every line"
    assert formatted_cells([["a|b", "c"], ["d", "e"]], "markdown").splitlines()[0] == r"| a\|b | c |"


def test_another_form_is_refused() -> None:
    with pytest.raises(InputError, match=r"form of a table must be 'markdown', 'latex' or 'csv'\. Got 'html'\."):
        formatted(rows_of("a"), "html")


def test_chosen_measures_are_the_columns() -> None:
    (line,) = read(formatted(rows_of("a"), "csv", ["loss", "accuracy"]))
    assert line["loss"] == line["loss_low"] == "" and float(line["accuracy"]) == pytest.approx(0.91)
    assert formatted(rows_of("a"), "markdown", ["loss"]).startswith("| variant | loss | samples |")
