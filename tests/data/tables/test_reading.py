"""Reading tables: every form of a source gives the same raw values, and every bad one an error that says where."""

from __future__ import annotations

import gzip
import io
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedstrata.core.errors import InputError
from fedstrata.data.tables import Column, FileFormat, Schema, Target, batches, scanning, textfiles
from fedstrata.data.tables.cells import days_of
from fedstrata.data.tables.converting import filled
from fedstrata.data.tables.findings import raise_if_errors
from fedstrata.data.tables.reading import chunks, read_site, read_sites
from fedstrata.data.tables.sources import sites_of

pandas, polars, pa = (pytest.importorskip(name) for name in ("pandas", "polars", "pyarrow"))
pytest.importorskip("pyarrow.parquet")

SCHEMA = Schema(
    Target("died"),
    [
        Column("age", range=[0, 120]),
        Column("stage", kind="ordinal", categories=["I", "II", "III"]),
        Column("sex", kind="flag", categories=["female", "male"]),
        Column("seen", kind="date"),
        Column("lab", missing_values=[-1]),
    ],
    drop=["id"],
)
TEXT = """id,age,stage,sex,seen,lab,died
a,63,I,male,2020-02-29,1.5,0
b,?,III,female,,-1,1
c,7e1, II ,male,2021-01-01,.5,0
"""
RAW = np.array(
    [
        [63, 0, 1, days_of("2020-02-29"), 1.5],
        [np.nan, 2, 0, np.nan, np.nan],
        [70, 1, 1, days_of("2021-01-01"), 0.5],
    ]
)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def writer(content: bytes | str, name: str = "north.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return writer


def errors(source: object, schema: Schema = SCHEMA) -> str:
    """Return the message about what is wrong; the message has no control characters but line breaks."""
    with pytest.raises(InputError) as caught:
        raise_if_errors([f for table in read_sites(source, schema) for f in table.findings])
    text = str(caught.value)
    assert all(c.isprintable() for c in text.replace("\n", "")) and len(text) < 4000
    return text


def with_form(**changes: object) -> Schema:
    return SCHEMA.replace(file=FileFormat(**changes))


@pytest.mark.parametrize(
    ("content", "schema"),
    [
        (TEXT, SCHEMA),
        (TEXT.replace("\n", "\r\n"), SCHEMA),
        (TEXT.replace("\n", "\r"), SCHEMA),
        ("\n\r\n" + TEXT + "\n\n", SCHEMA),
        (TEXT.rstrip("\n"), SCHEMA),
        (TEXT.replace(",", ";"), SCHEMA),
        (TEXT.replace(",", "\t"), SCHEMA),
        (TEXT.replace(",", "|"), SCHEMA),
        (TEXT.replace(",", "~"), with_form(delimiter="~")),
        (TEXT.replace(",", ";").replace(".", ","), with_form(decimal=",")),
        (b"\xef\xbb\xbf" + TEXT.encode(), SCHEMA),
        (gzip.compress(TEXT.encode()), SCHEMA),
        (TEXT.encode("utf-16"), with_form(encoding="utf-16")),
        (TEXT.replace("a,63", "\xe9,63").encode("latin-1"), with_form(encoding="latin-1")),
        (TEXT.replace("\nb,", '\n"b\n, ""x""",'), SCHEMA),
        ("".join(",".join(f'"{c}"' for c in line.split(",")) + "\n" for line in TEXT.splitlines()), SCHEMA),
        (TEXT.split("\n", 1)[1], with_form(names=["id", "age", "stage", "sex", "seen", "lab", "died"])),
        (TEXT.replace("male,2", "male ,2").replace(",0\n", ",0.0\n").replace(",1\n", ",Yes\n"), SCHEMA),
    ],
    ids=["plain", "crlf", "cr", "blank lines", "no end", "semicolon", "tab", "bar", "given", "comma", "bom", "gzip",
         "utf-16", "latin-1", "quoted lines", "all quoted", "no header", "numbers"],
)  # fmt: skip
def test_text_files_of_all_forms(write: Callable[..., Path], content: bytes | str, schema: Schema) -> None:
    table = read_site(write(content), schema)
    assert not table.findings and table.name == "north"
    np.testing.assert_array_equal(table.values, RAW)
    assert table.targets.tolist() == [0, 1, 0] and table.targets.dtype == np.int64


def test_frames_and_parquet(tmp_path: Path, write: Callable[..., Path]) -> None:
    frame = pandas.read_csv(write(TEXT), na_values=["?"], skipinitialspace=True)
    typed = frame.assign(
        seen=pandas.to_datetime(frame.seen),
        stage=pandas.Categorical(frame.stage.str.strip()),
        died=frame.died.astype(bool),
        lab=frame.lab.astype("float32"),
    )
    typed.to_parquet(tmp_path / "typed.parquet")
    for source in (frame, typed, polars.from_pandas(typed), pa.table(typed), tmp_path / "typed.parquet", {"n": frame}):
        table = read_site(source, SCHEMA)
        assert not table.findings and table.unit == "row" and table.lines.tolist() == [0, 1, 2]
        np.testing.assert_array_equal(table.values, RAW)
        assert table.targets.tolist() == [0, 1, 0]


def test_frames_of_mixed_cells() -> None:
    frame = pandas.DataFrame({"age": [1, "x", None, 2.5], "sex": ["male", True, "female", "?"], "died": [0, 1, 1, 0]})
    schema = Schema(Target("died"), [Column("age"), Column("sex", kind="flag", categories=["female", "male"])])
    text = errors(frame, schema)
    assert "column 'age', row 1: not a number: 'x'" in text and "column 'sex', row 1: unknown category: 'True'" in text
    with pytest.raises(InputError, match="are both 'age'"):
        read_site(pandas.DataFrame([[1, 2]], columns=["age", "age"]), schema)
    nested = pa.table({"age": [[1], [2]], "sex": ["male", "male"], "died": [0, 1]})
    assert "column 'age', rows 0, 1: not a number" in errors(nested, schema)


def test_wrong_types_of_frames() -> None:
    frame = pandas.DataFrame({"age": pandas.to_datetime(["2020-01-01", None]), "seen": [1.0, np.nan], "died": [0, 1]})
    schema = Schema(Target("died"), [Column("age"), Column("seen", kind="date")])
    text = errors(frame, schema)
    assert "column 'age', row 0: not a number" in text and "column 'seen', row 0: not a date" in text


def test_dates_in_other_forms(write: Callable[..., Path]) -> None:
    schema = Schema(Target("y"), [Column("d", kind="date", format="%d.%m.%Y")])
    path = write("d,y\n31.12.2020,1\n2020-12-31,0\n01.02.2021,0\n")
    assert "line 3: not a date: '2020-12-31'" in errors(path, schema)
    assert read_site(path, schema).values[0, 0] == days_of("2020-12-31")
    times = read_site(write("d,y\n2020-12-31T12:00,1\n2020-12-31 18:00:00+06:00,0\n"), SCHEMA.replace(
        target=Target("y"), columns=[Column("d", kind="date")]))  # fmt: skip
    assert times.values[:, 0].tolist() == [days_of("2020-12-31") + 0.5] * 2
    assert "not a date: '2020'" in errors(write("d,y\n2020,1\n"), SCHEMA.replace(
        target=Target("y"), columns=[Column("d", kind="date")]))  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("age,stage", "years,stage", "column 'age': missing from the file. Add it to the file, or set optional = true"),
        ("age,stage", "Age,stage", "Did you mean 'Age'?"),
        ("age,stage", "years,stage", "column 'years': not in the schema"),
        (",died", ",dead", "column 'died': the target is missing from the file"),
        ("7e1", "seventy", "column 'age', line 4: not a number: 'seventy'. Correct"),
        ("7e1", "1e999", "column 'age', line 4: not a finite number: '1e999'"),
        ("7e1", "-inf", "column 'age', line 4: not a number: '-inf'"),
        ("7e1", "0x10", "not a number: '0x10'"),
        ("7e1", "1_000", "not a number: '1_000'"),
        ("7e1", '"1,000"', "not a number: '1,000'"),
        ("7e1", "\u0661", "not a number: '\u0661'"),
        ("7e1", "\x1b[31m", "not a number: '\\x1b[31m'"),
        ("III", "IV", "column 'stage', line 3: unknown category: 'IV'. Correct the cells, or list them"),
        ("female", "Female", "unknown category: 'Female'"),
        ("2021-01-01", "01.01.2021", "column 'seen', line 4: not a date: '01.01.2021'"),
        ("2021-01-01", "2021-02-30", "not a date"),
        (",-1,1", ",-1,0.37", "column 'died', line 3: not a class of the target: '0.37'. A flag has cells"),
        (",-1,1", ",-1,dead", "column 'died', line 3: not a class of the target: 'dead'. Correct"),
        (",-1,1", ",-1,", "column 'died', line 3: the target is missing"),
        ("id,age", "age,age", "columns 1 and 2 of its header are both 'age'"),
        ("id,age", "\x1b[31m,age", "visible characters"),
        ("-1,1", "-1,1,1", "line 3 has more or fewer cells than the 7 columns"),
        ("b,?", 'b,"?', "a quote in line 3 is never closed"),
        ("b,?", "b\0,?", "a NUL byte in line 3"),
        (TEXT.split("\n", 1)[1], "", "no rows"),
        (TEXT[30:], "", "no rows"),
        (TEXT, "", "it is empty"),
        (TEXT, "\n\n", "blank lines only"),
        (TEXT, TEXT.replace(",", "~"), "single cell"),
        (TEXT, TEXT.split("\n", 1)[1], "none of the columns of the schema: it has 'a', '63'"),
        (TEXT, "PK\x03\x04" + TEXT, "an Excel workbook"),
        (TEXT, "PAR1" + TEXT, "not a Parquet file"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place(write: Callable[..., Path], old: str, new: str, words: str) -> None:
    assert old in TEXT
    text = errors(write(TEXT.replace(old, new, 1)))
    assert "north" in text and words in text


def test_bytes_that_are_no_text(write: Callable[..., Path]) -> None:
    latin = TEXT.replace("\nb", "\n\xe9").encode("latin-1")
    assert "line 3 is not UTF-8 text (byte 0xe9). Say which encoding" in errors(write(latin))
    assert 'say encoding = "utf-16"' in errors(write(TEXT.encode("utf-16")))
    assert "not utf-8 text" in errors(write(b"\x80" + TEXT.encode()), with_form(encoding="utf-8")).replace("UTF", "utf")
    assert "not ascii" in errors(write(latin), with_form(encoding="us-ascii"))
    assert "gzip data are truncated" in errors(write(gzip.compress(TEXT.encode())[:-9]))
    assert "gzip data are truncated or damaged" in errors(write(gzip.compress(b"x" * 99)[:10] + b"\xff" * 50))


def test_lines_are_counted_as_an_editor_does(write: Callable[..., Path]) -> None:
    text = '\n"age","note",died\r\n\r\n1,"two\nlines",0\nx,"5\'10""",1\n"y",,1\nz,,0'
    schema = Schema(Target("died"), [Column("age")], drop=["note"])
    assert "lines 6, 7, 8: not a number: 'x', 'y', 'z'" in errors(write(text), schema)
    assert [chunk.lines.tolist() for chunk in chunks(write(text), schema, rows=3)] == [[4, 6, 7], [8]]


def test_stray_quotes_do_not_hide_rows(write: Callable[..., Path]) -> None:
    text = "age,note,died\n1,5'10\",0\nx,6',1\n"
    schema = Schema(Target("died"), [Column("age")], drop=["note"])
    assert "line 3: not a number: 'x'" in errors(write(text), schema)


def test_not_files(tmp_path: Path, write: Callable[..., Path]) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "folder.csv").mkdir()
    assert "a pipe or a device" in errors(tmp_path / "pipe.csv")
    assert "a directory" in errors(tmp_path / "folder.csv")
    assert "Did you mean" in errors(str(write(TEXT))[:-1])
    (tmp_path / "nowhere.csv").symlink_to("missing")
    assert "nowhere.csv'" not in errors(tmp_path / "nowhere.csv")  # a link to nowhere is no suggestion
    for source, words in (
        (str(tmp_path / "*.tsv"), "No file matches"),
        ("", "path of a table"),
        ("a\0b", "path of a table"),
        ([], "source of the tables"),
        (7, "a path, a pattern"),
        ({"x": 7}, "a path, a pattern"),
    ):
        with pytest.raises(InputError, match=words):
            read_sites(source, SCHEMA)


def test_every_file_is_named_that_is_wrong(write: Callable[..., Path], tmp_path: Path) -> None:
    write(TEXT)
    write(TEXT.replace("63", "sixty"), "east.csv")
    write("", "west.csv")
    text = errors(str(tmp_path / "*.csv"))
    assert "in 2 places" in text and "- east, column 'age', line 2" in text and "west.csv cannot be read" in text


def test_many_errors_are_cut(write: Callable[..., Path]) -> None:
    names = [f"x{i}" for i in range(30)]
    rows = "".join(",".join(["bad"] * 30) + ",1\n" for _ in range(50))
    schema = Schema(Target("y"), [Column(name) for name in names])
    text = errors(write(",".join(names) + ",y\n" + rows), schema)
    assert "column 'x19', lines 2, 3, 4, 5, 6 and 45 more" in text and "... and 10 more" in text


def test_lines_without_an_end_are_refused(write: Callable[..., Path]) -> None:
    field = "x" * (3 << 19)
    assert "line 3 has more than a million bytes" in errors(write(TEXT.replace("\nb", "\n" + field)))
    assert "line 1 has more than a million bytes" in errors(write(field))


def test_cells_of_many_lines_are_refused_if_they_are_long(write: Callable[..., Path]) -> None:
    cell = '\n"' + "a line\n" * 200_000 + '",'
    assert "a line at its start has a cell of more than 131,072 characters" in errors(write(TEXT.replace("\nb,", cell)))
    later = TEXT + 30 * (TEXT.split("\n")[1] + "\n") + cell[1:] + "1,I,male,,1,0\n"
    assert "line 35 has a cell of more than 131,072 characters" in errors(write(later))
    names = [f"c{i}" for i in range(40)]
    row = ",".join(['"' + "a line\n" * 10_000 + '"'] * 40)
    schema = Schema(Target("died"), [Column("age")], drop=names)
    text = errors(write(f"age,died,{','.join(names)}\n1,0,{row}\n"), schema)
    assert "a row has more than a million bytes" in text


class Endless(io.RawIOBase):
    """A table whose last field never ends; it counts the bytes that are read."""

    def __init__(self) -> None:
        self.start, self.read_so_far = TEXT.encode() + b"d,", 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        assert 0 < size <= 1 << 20
        self.read_so_far += size
        block, self.start = self.start[:size], self.start[size:]
        return block + b"9" * (size - len(block))

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        buffer[:] = self.read(len(buffer))
        return len(buffer)


def test_a_field_without_an_end_is_refused_at_its_beginning(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = write(TEXT), []

    def stream(path: Path, encoding: str) -> Endless:
        opened.append(Endless())
        return opened[-1]

    for module in (scanning, textfiles):
        monkeypatch.setattr(module, "stream", stream)
    monkeypatch.setattr(scanning, "BLOCK", 1 << 10)
    monkeypatch.setattr(scanning, "LONGEST_LINE", 1 << 12)
    text = errors(path)
    assert "line 5 has more than a million bytes" in text and "Look for a quote that is not closed" in text
    assert opened[-1].read_so_far < 1 << 14


def test_text_of_parquet_files_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = pandas.DataFrame({"age": [1.0, 2.0], "sex": ["male", "x" * 5000], "note": "y" * 9000, "died": [0, 1]})
    frame.to_parquet(tmp_path / "north.parquet", compression=None)
    monkeypatch.setattr(batches, "MOST_TEXT", 4000)
    schema = Schema(
        Target("died"), [Column("age"), Column("sex", kind="flag", categories=["female", "male"])], drop=["note"]
    )
    text = errors(tmp_path / "north.parquet", schema)
    assert "north" in text and "column 'sex' has 5,0" in text and "Look for a cell that is too long" in text
    table = read_site(tmp_path / "north.parquet", schema.replace(columns=schema.columns[:1], drop=["note", "sex"]))
    assert table.values.tolist() == [[1.0], [2.0]]


@pytest.mark.slow
def test_a_field_of_two_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "north.csv"
    with path.open("wb") as file:
        file.write(b"id,age,died\n")
        for _ in range(3):
            file.write(b"1" * 1000)
        file.seek(2 << 30)
        file.write(b"\n")
    assert "north.csv cannot be read" in errors(path)  # sparse: the rest of the field is NUL bytes


def test_extra_columns_may_be_dropped_and_optional_ones_lacking(write: Callable[..., Path]) -> None:
    text = TEXT.replace("lab", "other")
    columns = [*SCHEMA.columns[:-1], Column("lab", optional=True)]
    table = read_site(write(text), SCHEMA.replace(columns=columns, drop=["id", "other"]))
    assert np.isnan(table.values[:, 4]).all()
    assert [str(f) for f in table.findings] == [
        "north, column 'lab': missing from the file. It counts as missing in all rows."
    ]


def test_rows_without_a_target_can_be_dropped(write: Callable[..., Path]) -> None:
    path = write(TEXT.replace("-1,1\n", "-1,\n"))
    table = read_site(path, SCHEMA.replace(target=Target("died", missing="drop")))
    assert table.targets.tolist() == [0, 0] and table.lines.tolist() == [2, 4]
    assert [f.severity for f in table.findings] == ["warning"]


def test_targets_of_several_classes_and_numbers(write: Callable[..., Path]) -> None:
    path = write("x,y\n1,b\n2,a\n3,c\n")
    schema = Schema(Target("y", kind="category", classes=["a", "b"]), [Column("x")])
    assert "line 4: not a class of the target: 'c'" in errors(path, schema)
    assert read_site(path, schema).targets.tolist() == [1, 0, -1]
    numbers = Schema(Target("y", kind="numeric"), [Column("x")])
    assert "lines 2, 3, 4: the target is not a number" in errors(path, numbers)
    assert read_site(write("x,y\n1,0.5\n2,-7\n"), numbers).targets.tolist() == [0.5, -7]


def test_one_table_with_a_column_of_sites(write: Callable[..., Path]) -> None:
    rows = ["2,1,0", "10,2,1", "2.0,3,x", "2,4,1", "10,bad,1"]
    schema = Schema(Target("y"), [Column("x")], site="ward")
    tables = read_sites(write("ward,x,y\n" + "\n".join(rows) + "\n"), schema)
    assert [(t.name, t.lines.tolist()) for t in tables] == [("2", [2, 4, 5]), ("10", [3, 6])]
    assert tables[0].values[:, 0].tolist() == [1, 3, 4]
    assert [str(f)[:40] for t in tables for f in t.findings] == [
        "2, column 'y', line 4: not a class of th",
        "10, column 'x', line 6: not a number: 'b",
    ]
    assert "north, column 'ward', line 3: the name of the site is missing" in errors(
        write("ward,x,y\n1,2,0\n,3,1\n"), schema
    )
    assert "column 'ward': the column of the sites is missing" in errors(write("x,y\n1,0\n"), schema)
    with pytest.raises(InputError, match="wants one table"):
        read_sites([write("ward,x,y\n1,2,0\n"), write("ward,x,y\n", "b.csv")], schema)
    frame = pandas.DataFrame({"ward": ["a", "b", "a"], "x": [1, 2, 3], "y": [0, 1, 1]})
    assert [t.values[:, 0].tolist() for t in read_sites(frame, schema)] == [[1, 3], [2]]


def test_names_of_sites(tmp_path: Path) -> None:
    for name in ("site10.csv", "site2.csv.gz", "b/site2.csv", "b/x.v2.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    at = lambda *names: [site.name for site in sites_of([str(tmp_path / name) for name in names])]  # noqa: E731
    assert at("*.csv*") == ["site2", "site10"] and at("b/x*") == ["x.v2"]
    assert at("site2.csv.gz", "b/site2.csv") == ["b", tmp_path.name]
    assert at("*.csv*", "b/site2.csv") == ["b/site2", f"{tmp_path.name}/site2", f"{tmp_path.name}/site10"]
    assert [s.name for s in sites_of([pandas.DataFrame({"x": [1]})] * 2)] == ["site 0", "site 1"]
    assert [s.name for s in sites_of({"b": tmp_path / "site2.csv.gz", "a": pandas.DataFrame()})] == ["b", "a"]


def test_chunks_are_the_whole(write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedstrata.data.tables import batches

    monkeypatch.setattr(batches, "BLOCK", 2000)
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame({"age": rng.normal(size=900).round(3), "id": np.arange(900), "sex": "male", "died": 1})
    frame["lab"] = frame.age.astype(object)
    frame.loc[700, "lab"] = "low"
    frame.loc[800, "age"] = np.inf
    schema = Schema(Target("died"), [SCHEMA.columns[0], SCHEMA.columns[2], SCHEMA.columns[4]], drop=["id"])
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.drop(columns="lab").assign(lab=frame.age).to_parquet(tmp_path / "a.parquet")
    for name, first in (("a.csv", 2), ("a.parquet", 0)):
        whole = read_site(tmp_path / name, schema)
        parts = list(chunks(tmp_path / name, schema, rows=7, target=True, keep=["id"]))
        assert max(len(part.lines) for part in parts) == 7
        np.testing.assert_array_equal(np.concatenate([p.values for p in parts]), whole.values)
        np.testing.assert_array_equal(np.concatenate([p.lines for p in parts]), np.arange(900) + first)
        assert [x for p in parts for x in p.texts["id"].to_pylist()] == [str(i) for i in range(900)]
        wrong = [(q.column, int(p.lines[q.rows[0]]) - first) for p in parts for q in p.problems]
        assert wrong == ([("lab", 700)] if name == "a.csv" else []) + [("age", 800)] + [("lab", 800)] * (
            name != "a.csv"
        )
        assert next(chunks(tmp_path / name, schema)).targets is None


def test_chunks_without_a_target_and_with_other_columns(write: Callable[..., Path]) -> None:
    path = write(TEXT.replace("died", "comment"))
    (chunk,) = chunks(path, SCHEMA)
    np.testing.assert_array_equal(chunk.values, RAW)
    with pytest.raises(InputError, match="the target is missing from the file"):
        next(chunks(path, SCHEMA, target=True))
    with pytest.raises(InputError, match="column 'lab': missing from the file"):
        next(chunks(write(TEXT.replace("lab", "lap")), SCHEMA))


def test_new_rows_may_have_a_header_or_lack_the_target_where_files_have_no_header(
    write: Callable[..., Path],
) -> None:
    header, rows = TEXT.split("\n", 1)
    schema = SCHEMA.replace(file=FileFormat(names=header.split(",")))
    lacking = "\n".join(line.rpartition(",")[0] for line in TEXT.splitlines())
    for text in (rows, TEXT, "w," + TEXT.replace("\n", "\nw,").rstrip("w,"), lacking, lacking.split("\n", 1)[1]):
        parts = list(chunks(write(text), schema, keep=["id"]))
        np.testing.assert_array_equal(np.concatenate([part.values for part in parts]), RAW)
        assert [cell for part in parts for cell in part.texts["id"].to_pylist()] == ["a", "b", "c"]
    with pytest.raises(InputError, match="column 'lab': missing from the file"):
        next(chunks(write("age,sex\n1,male\n"), schema))
    with pytest.raises(InputError, match="its first line names the columns"):
        read_site(write(TEXT.replace("id,", "number,")), schema)


def test_columns_to_keep_must_be_there(write: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match=r"Unknown column 'idd'\. Did you mean 'id'"):
        next(chunks(write(TEXT), SCHEMA, keep=["idd"]))


def test_nothing_is_imported_before_tables_are_read() -> None:
    code = (
        "import sys, fedstrata, fedstrata.data.tables, fedstrata.data.tables.reading, fedstrata.data.tables.checking;"
    )
    code += "print([m for m in ('pandas', 'pyarrow', 'polars') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"pyarrow is not installed: pip install 'fedstrata\[tables\]'"):
        sites_of("x.csv")


def test_too_many_columns_sites_or_rows(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "its header has 20,001 columns, more than 10,000" in errors(
        write(",".join(f"c{i}" for i in range(20_001)) + "\n")
    )
    schema = Schema(Target("y"), [Column("x")], site="ward")
    rows = "".join(f"{i},1,0\n" for i in range(10_001))
    with pytest.raises(InputError, match="names 10,001 sites, more than 10,000: is it an identifier"):
        read_sites(write("ward,x,y\n" + rows), schema)
    path = tmp_path / "twice.parquet"
    empty = np.empty

    def too_large(shape: int | tuple[int, ...], *how: object) -> np.ndarray:
        return np.zeros(1 << 62) if np.prod(shape) else empty(shape, *how)

    monkeypatch.setattr("fedstrata.data.tables.reading.np.empty", too_large)
    assert "rows, too many for memory" in errors(write("x,y\n1,0\n"), schema.replace(site=None))
    monkeypatch.undo()
    pa.parquet.write_table(pa.table([[1], [2], [0]], names=["x", "x", "y"]), path)
    assert "are both 'x'" in errors(path, schema.replace(site=None))


def test_many_missing_columns_are_said_quickly(write: Callable[..., Path]) -> None:
    names = [f"column {i}" for i in range(3000)]
    schema = Schema(Target("y"), [Column(name) for name in names])
    text = errors(write(",".join([*(name + "x" for name in names), "y"]) + "\n" + "1," * 3000 + "1\n"), schema)
    assert "column 'column 0': missing from the file" in text and "more" in text


@pytest.mark.parametrize("start", [0, 3, 8, 13])
def test_numbers_of_a_slice_are_those_of_its_rows(start: int) -> None:
    values = [None if i % 3 == 0 else float(i) for i in range(30)]
    part = pa.array(values, pa.float64()).slice(start, 11)
    wanted = [math.nan if v is None else v for v in values[start : start + 11]]
    np.testing.assert_array_equal(filled(part, math.nan), wanted)
