"""Drafts of schemas: what is guessed from cells, and that a draft fits the tables it is made from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fedstrata.core.errors import InputError
from fedstrata.data.tables import FileFormat, Schema
from fedstrata.data.tables.drafting import Draft, draft, draft_and_read

pandas = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

ROWS = 300


def frame(seed: int = 0, **columns: object) -> pandas.DataFrame:
    rng = np.random.default_rng(seed)
    return pandas.DataFrame({"x": rng.normal(50, 9, ROWS).round(1), "died": rng.integers(0, 2, ROWS), **columns})


def cells(*values: object, rows: int = ROWS) -> list[object]:
    return [values[i % len(values)] for i in range(rows)]


def of(values: object, **hints: object) -> tuple[str, tuple[str, ...], Draft]:
    """Return the kind and the categories that are guessed for a column."""
    drafted = draft(frame(c=values), "died", **hints)
    column = next((c for c in drafted.schema.features if c.name == "c"), None)
    return ("dropped", (), drafted) if column is None else (column.kind, tuple(column.categories), drafted)


@pytest.mark.parametrize(
    ("values", "kind", "categories"),
    [
        (cells(1.5, 2.5, 3.5, 7, 9, 11, 13), "numeric", ()),
        (cells(*range(10)), "numeric", ()),
        (cells(3, 1, 2), "category", ("1", "2", "3")),
        (cells("3.0", "1", "10"), "category", ("1", "3", "10")),
        (cells(1, 0), "flag", ("0", "1")),
        (cells(2, 1), "flag", ("1", "2")),
        (cells(True, False), "flag", ("false", "true")),
        (cells("yes", "No"), "flag", ("no", "yes")),
        (cells("survived", "dead"), "flag", ("survived", "dead")),
        (cells("m", "f"), "flag", ("f", "m")),
        (cells("ward 10", "ward 2", "ward 1"), "category", ("ward 1", "ward 2", "ward 10")),
        (cells("III", "I", "II"), "ordinal", ("I", "II", "III")),
        (cells("High", "low", "medium"), "ordinal", ("low", "medium", "High")),
        (cells("2020-01-31", "2021-05-06 12:00"), "date", ()),
        (cells("31.01.2020", "1.2.2021"), "date", ()),
        (cells("1/31/2020", "2/1/2021"), "date", ()),
        (cells("7"), "dropped", ()),
        (cells(None), "dropped", ()),
        (list(range(1000, 1000 + ROWS)), "dropped", ()),
        ([f"case {i}" for i in range(ROWS)], "dropped", ()),
        (cells("a\x1b[31m", "b", "c"), "dropped", ()),
        (cells("x" * 201, "b", "c"), "dropped", ()),
    ],
)
def test_kinds_are_guessed(values: list[object], kind: str, categories: tuple[str, ...]) -> None:
    assert of(values)[:2] == (kind, categories)


def test_formats_of_dates_are_guessed() -> None:
    for values, form in ((cells("2020-01-31", "2020-02-01"), ""), (cells("31.01.2020", "1.2.2021"), "%d.%m.%Y")):
        assert of(values)[2].schema.features[1].format == form
    assert of(cells("31/01/2020", "01/02/2021"))[2].schema.features[1].format == "%d/%m/%Y"


@pytest.mark.parametrize(
    ("values", "missing", "note"),
    [
        (cells(-1, 10.5, 20, 30.5, 40, 60, 70, 80), ("-1",), "the only number below 0"),
        (cells(-1, *range(20, 40)), ("-1",), "the only number below 0"),
        (cells(-1, 0, 1), ("-1",), "the only number below 0"),
        (cells("unknown", *range(20)), ("unknown",), "'unknown' are taken as missing"),
        (cells(0, *range(150, 250)), (), "If it means missing: missing_values = [0]"),
        (cells(-1, -2, 3.5, 4, 5, 6, 7), (), ""),
    ],
)
def test_codes_for_missing(values: list[object], missing: tuple[str, ...], note: str) -> None:
    drafted = of(values)[2]
    column = drafted.schema.features[1]
    assert column.missing_values == missing and note in " ".join(drafted.notes["c"])


def test_notes_tell_what_the_values_are() -> None:
    drafted = draft({"a": frame(), "b": frame(1).assign(x=lambda f: f.x.where(f.index < 30))}, "died")
    assert drafted.notes["x"][0] == "Missing: 45 %; 90 % at b."
    assert drafted.notes["x"][1].startswith("The median is ") and drafted.notes["x"][2].startswith("range = [2")
    assert drafted.text.startswith("# A draft")


def test_notes_hold_for_their_column_when_they_are_uncommented(tmp_path: Path) -> None:
    drafted = draft(frame(y=np.linspace(200, 300, ROWS)), "died")
    (tmp_path / "schema.toml").write_text(drafted.text.replace("# range", "range"))
    ranges = [list(column.range) for column in Schema.read(tmp_path / "schema.toml").features]
    assert ranges == [json.loads(drafted.notes[name][1].removeprefix("range = ")) for name in ("x", "y")]


def test_columns_that_a_site_lacks_are_optional() -> None:
    other = {"a": frame(c=cells(1.5, 2, 3, 4, 5, 6, 7)), "b": frame(1)}
    drafted, tables, findings = draft_and_read(other, "died")
    assert [c.optional for c in drafted.schema.features] == [False, True] and np.isnan(tables[1].values[:, 1]).all()
    assert "b has no such column." in drafted.notes["c"] and [f.kind for f in findings] == ["no column"]
    empty = {"a": other["a"], "b": frame(1, c=None)}
    assert [c.optional for c in draft(empty, "died").schema.features] == [False, True]
    ward = pandas.concat([f.assign(ward=name) for name, f in empty.items()])
    assert [c.optional for c in draft_and_read(ward, "died", site="ward")[0].schema.features] == [False, True]


@pytest.mark.parametrize(
    ("values", "kind", "codes"),
    [
        (cells(0, 1), "flag", {"0": 0, "1": 1}),
        (cells("no", "YES"), "flag", {"no": 0, "yes": 1}),
        (cells(-1, 1), "flag", {"-1": 0, "1": 1}),
        (cells(1, 2), "flag", {"1": 0, "2": 1}),
        (cells("Alive", "Expired"), "flag", {"Alive": 0, "Expired": 1}),
        (cells(0), "flag", {"0": 0, "1": 1}),
        (cells("b", "c", "a"), "category", {"a": 0, "b": 1, "c": 2}),
        (cells(0, 1, 2, 3), "category", {"0": 0, "1": 1, "2": 2, "3": 3}),
        (cells(*np.linspace(0, 1, 40)), "numeric", {}),
    ],
)
def test_targets_are_guessed(values: list[object], kind: str, codes: dict[str, int]) -> None:
    target = draft(frame(y=values), "y").schema.target
    known = {str(key).lower(): code for key, code in target.codes.items()}
    assert target.kind == kind and {k.lower(): v for k, v in codes.items()}.items() <= known.items()


def test_positive_cells_are_given() -> None:
    target = draft(frame(y=cells(0, 1, 2)), "y", positive=["1", "2.0"]).schema.target
    assert target.positive == ("1", "2.0") and target.negative == ("0",)
    with pytest.raises(InputError, match="Unknown cell '7'"):
        draft(frame(y=cells(0, 1, 2)), "y", positive=["7"])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (cells("a", "b"), "Say which is class 1: positive"),
        (cells(None), "has no values"),
        ([f"case {i}" for i in range(ROWS)], "300 different cells"),
    ],
)
def test_targets_that_cannot_be_guessed(values: list[object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        draft(frame(y=values), "y")


def test_rows_without_a_target_are_left_out() -> None:
    drafted, tables, findings = draft_and_read(frame(y=cells(0, 1, None)), "y")
    assert drafted.schema.target.missing == "drop" and len(tables[0]) == 200 and findings[0].kind == "no target"
    assert "33 %, are left out" in drafted.text


def test_names_must_exist() -> None:
    for hints in ({"target": "dyed"}, {"site": "ward"}, {"drop": ["y"]}, {"features": ["y"]}):
        with pytest.raises(InputError, match="Unknown column"):
            draft(frame(), **{"target": "died", **hints})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="No column is left"):
        draft(frame(), "died", drop=["x"])


def test_features_and_dropped_columns() -> None:
    table = frame(c=cells("a", "b", "c"), d=cells(1.5, 2, 3, 4, 5, 6, 7))
    assert draft(table, "died", features=["d", "x"]).schema.names == ("x", "d")
    assert draft(table, "died", drop=["d"]).schema.drop == ("d",)
    with pytest.raises(InputError, match="'e' is no feature: all its values are '7'"):
        draft(table.assign(e=7), "died", features=["e"])


def test_a_draft_fits_the_tables_it_is_made_from(tmp_path: Path) -> None:
    table = frame(
        sex=cells("f", "m"), seen=cells("31.01.2020", "1.2.2021", None), lab=cells(-1, 1.5, 2, 3, 4, 5, 6, 7),
        ward=cells("[red]", "<b>", "ü"), number=list(range(ROWS)),
    )  # fmt: skip
    table.to_csv(tmp_path / "a.csv", index=False)
    drafted, tables, findings = draft_and_read(str(tmp_path / "a.csv"), "died")
    assert not findings and tables[0].values.shape == (ROWS, 5)
    drafted.schema.write(tmp_path / "schema.toml", drafted.notes, drafted.head)
    assert Schema.read(tmp_path / "schema.toml") == drafted.schema


def test_decimal_commas_are_found(tmp_path: Path) -> None:
    frame(lab=cells(1.5, 2, 3, -1, 5, 6, 7)).to_csv(tmp_path / "a.csv", index=False, sep=";", decimal=",")
    drafted, tables, _ = draft_and_read(tmp_path / "a.csv", "died")
    assert drafted.schema.file.decimal == "," and tables[0].values[0, 1] == 1.5
    assert drafted.schema.features[1].missing_values == ("-1",)


def test_files_without_a_header(tmp_path: Path) -> None:
    frame().to_csv(tmp_path / "a.csv", index=False, header=False)
    drafted = draft(tmp_path / "a.csv", "died", form=FileFormat(names=["x", "died"]))
    assert drafted.schema.names == ("x",) and drafted.schema.file.names == ("x", "died")
    with pytest.raises(InputError, match="2 cells, but 3 names"):
        draft(tmp_path / "a.csv", "died", form=FileFormat(names=["x", "died", "z"]))
