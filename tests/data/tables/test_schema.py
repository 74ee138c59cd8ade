"""Schemas: reading, writing, and what is refused."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import pytest

from fedstrata.core.errors import InputError
from fedstrata.core.options import options_of
from fedstrata.data.tables import Column, FileFormat, Schema, Target
from fedstrata.data.tables.cells import date_of, days_of, key_of, shown

HEART = """
version = 1
drop = ["id"]

[target]
name = "num"
positive = [1, 2, 3, 4]

[file]
names = ["id", "age", "sex", "cp", "slope", "seen", "num"]
missing = ["?"]

[[columns]]
name = "age"
unit = "years"
range = [18, inf]
optional = true

[[columns]]
name = "sex"
kind = "flag"
categories = [0, 1]

[[columns]]
name = "cp"
kind = "category"
categories = ["1", "2.0", 3, "asymptomatic"]
missing = "constant"
fill = "3"
indicator = true

[[columns]]
name = "slope"
kind = "ordinal"
categories = ["up", "flat", "down"]
missing_values = [-9]

[[columns]]
name = "seen"
kind = "date"
range = [2010-01-01, "2020-12-31"]
"""


@pytest.fixture
def heart(tmp_path: Path) -> Schema:
    path = tmp_path / "schema.toml"
    path.write_text(HEART)
    return Schema.read(path)


def test_a_schema_is_read(heart: Schema) -> None:
    age, sex, cp, slope, seen = heart.features
    assert heart.names == ("age", "sex", "cp", "slope", "seen") and heart.site is None and heart.drop == ("id",)
    assert (age.kind, age.missing, age.range, age.bounds) == ("numeric", "median", (18, None), (18.0, math.inf))
    assert age.optional and not sex.optional and heart.target.missing == "refuse"
    assert sex.categories == ("0", "1") and sex.missing == "most_frequent" and sex.size == 2
    assert cp.codes[key_of("2")] == cp.codes[key_of(" 2.00 ")] == 1 and cp.fill_value == 2 and cp.indicator
    assert slope.missing_values == ("-9",) and slope.bounds == (0, 2)
    assert seen.bounds == (days_of("2010-01-01"), days_of("2020-12-31"))
    assert heart.target.codes == {key_of("0"): 0, key_of("no"): 0, key_of("false"): 0} | {
        key_of(str(i)): 1 for i in range(1, 5)
    }


def test_writing_and_reading_changes_nothing(heart: Schema, tmp_path: Path) -> None:
    path = tmp_path / "again.toml"
    heart.write(path, {"cp": ["chest pain: see the codebook"]})
    again = Schema.read(path)
    assert again == heart and again.digest == heart.digest and again.text() == heart.text()
    assert "\n# chest pain: see the codebook\n" in path.read_text().split('[[columns]]\nname = "cp"')[1].split("[[")[0]
    assert "range = [18, inf]" in path.read_text() and "delimiter" not in path.read_text()
    with pytest.raises(InputError, match=r"exists\. Nothing was overwritten"):
        heart.write(path)
    with pytest.raises(InputError, match="no directory"):
        heart.write(tmp_path / "none" / "schema.toml")


def test_the_digest_is_that_of_the_meaning(heart: Schema, tmp_path: Path) -> None:
    path = tmp_path / "again.toml"
    path.write_text(
        "# a comment\n" + HEART.replace("categories = [0, 1]", 'categories = ["0", "1"]\nindicator = false')
    )
    assert Schema.read(path).digest == heart.digest
    path.write_text(HEART.replace("[18, inf]", "[19, inf]"))
    assert Schema.read(path).digest != heart.digest


def test_the_page_on_tables_names_every_option(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "tables.md").read_text()
    (tmp_path / "schema.toml").write_text(page.split("```toml\n")[1].split("```")[0])
    schema = Schema.read(tmp_path / "schema.toml")
    assert [column.kind for column in schema.features] == ["numeric", "ordinal", "date"]
    for kind in (Schema, Target, FileFormat, Column):
        lacking = [
            n
            for n in options_of(kind)
            if not re.search(rf"`{n}`|^\[?{n}( =|\])|^\[\[{n}\]\]|\[{n}\]|{n} = ", page, re.M)
        ]
        assert not lacking, f"docs/tables.md lacks {lacking}"


def test_features_are_selected(heart: Schema) -> None:
    assert heart.select(["cp", "age"]).names == ("age", "cp")
    assert heart.select(["cp", "age"]).drop == ("id", "sex", "slope", "seen")
    assert heart.select(drop=["age", "id"]).names == ("sex", "cp", "slope", "seen")
    with pytest.raises(InputError, match="Did you mean 'slope'"):
        heart.select(["slop"])
    with pytest.raises(InputError, match="No column is left"):
        heart.select(drop=heart.names)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('kind = "flag"', 'kind = "boolean"', "column 'sex'"),
        ('unit = "years"', 'units = "years"', "columns.units"),
        ("version = 1", "version = 2", "newer fedstrata"),
        ("version = 1", "version = 1\nsite = 'age'", "'age' is in the schema twice"),
        ('name = "sex"', 'name = "age"', "'age' is in the schema twice"),
        ('name = "sex"', 'name = "gender"', "Unknown column 'gender'"),
        ("categories = [0, 1]", "categories = [0, 1, 2]", "two categories, no and yes"),
        ("categories = [0, 1]", "categories = [1, 1.0]", "'1' and '1' are equal"),
        ("categories = [0, 1]", 'categories = [1, "01.0"]', "'1' and '01.0' are equal"),
        ("categories = [0, 1]", "", "categories of a flag column"),
        ('fill = "3"', 'fill = "4"', "one of the categories"),
        ('fill = "3"', "", "fill must be set"),
        ('missing = "constant"', "", "left out unless"),
        ('missing = "constant"', 'missing = "mean"', "most_frequent, constant or refuse"),
        ("missing_values = [-9]", 'missing_values = ["flat"]', "is a category and in missing_values"),
        ("[18, inf]", "[18, 18]", "lower one first"),
        ("[18, inf]", "[18]", "two numbers"),
        ("[18, inf]", "[inf, 18]\ncategories = [1]", "categories of a numeric column does not apply"),
        ("[18, inf]", '["a", "b"]', "two numbers"),
        ("[2010-01-01,", "[2021-01-01,", "two dates"),
        ("[2010-01-01,", '["soon",', "two dates"),
        ('unit = "years"', 'format = "%d"', "format of a numeric column does not apply"),
        ('unit = "years"', 'unit = "a\\nb"', "one line"),
        ('missing = ["?"]', 'delimiter = ";;"', "single character"),
        ('missing = ["?"]', 'delimiter = ","\ndecimal = ","', "are both ','"),
        ('missing = ["?"]', 'encoding = "rot13"', "text encoding"),
        ('missing = ["?"]', 'encoding = "utf-99"', "text encoding"),
        ('"seen", "num"]', '"seen", "num", "num"]', "must be distinct"),
        ('"seen", "num"]', '"seen", "nu\\u202em"]', "visible characters"),
        ("positive = [1, 2, 3, 4]", "positive = []", "at least one cell"),
        ("positive = [1, 2, 3, 4]", 'positive = [1]\nnegative = ["1.0"]', "are equal"),
        ("positive = [1, 2, 3, 4]", 'kind = "category"', "classes must be a list of at least two"),
        ("positive = [1, 2, 3, 4]", 'classes = ["a", "b"]', "left out unless"),
        ("[target]", "[targets]", "Unknown key 'targets'"),
    ],
)
def test_what_is_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in HEART
    path = tmp_path / "schema.toml"
    path.write_text(HEART.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        Schema.read(path)
    assert words in str(caught.value) and str(path) in str(caught.value)


def test_a_schema_needs_columns_and_a_target() -> None:
    with pytest.raises(InputError, match="needs columns"):
        Schema(target=Target("y"))
    with pytest.raises(InputError, match="number of columns"):
        Schema(target=Target("y"), columns=[])
    assert Schema(target=Target("y"), columns=[Column("x")]).file == FileFormat()


@pytest.mark.parametrize("name", ["", " x", "x\n", "\x1b[31m", "x" * 201])
def test_names_are_plain_text(name: str) -> None:
    with pytest.raises(InputError, match="visible characters") as caught:
        Column(name)
    assert "\x1b" not in str(caught.value) and len(str(caught.value)) < 250


def test_files_that_are_no_schema(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"\xff\x00\x01")
    for path, words in (
        (tmp_path, "a directory"),
        (tmp_path / "pipe", "a pipe"),
        (tmp_path / "none.toml", "no file"),
        (tmp_path / "bytes", "cannot be read"),
    ):
        with pytest.raises(InputError, match=words):
            Schema.read(path)


def test_a_flag_whose_positive_cell_is_zero() -> None:
    assert Target("alive", positive=["0"], negative=["1"]).codes == {key_of("0"): 1, key_of("1"): 0}
    assert Target("alive", positive=["0"]).negative == ("false", "no")


def test_equal_cells() -> None:
    assert key_of("1") == key_of("1.0") == key_of(" +1.") and hash(key_of("1")) == hash(key_of("1.0"))
    assert key_of("True") == key_of("TRUE") != key_of("T")
    assert key_of("Yes") == key_of("yes") and key_of("Male") != key_of("male")
    assert key_of("1E3") != key_of("1000") and key_of("١") != key_of("1")
    assert key_of("9007199254740993") != key_of("9007199254740992")
    assert key_of("1" * 81) == "1" * 81


def test_dates() -> None:
    assert days_of("1970-01-02") == 1 and days_of("1970-01-01T12:00:00+12:00") == 0
    assert date_of(days_of("2026-02-28") + 0.5) == "2026-02-28" and date_of(1e12) == "never"


def test_foreign_text_is_escaped_and_cut() -> None:
    assert shown("\x1b[31m") == "'\\x1b[31m'" and len(shown("x" * 10**6)) < 100
