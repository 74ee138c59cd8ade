"""fedstrata describe: what it prints and writes, its errors, and real tables."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from fedstrata.cli.app import COMMANDS
from fedstrata.data.tables import Schema

pandas = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

SITES = Path(os.environ.get("FEDSTRATA_DATA", "")) / "sites"
REAL = pytest.mark.skipif(
    "FEDSTRATA_DATA" not in os.environ or not SITES.is_dir(), reason="needs FEDSTRATA_DATA with its sites"
)
HEART = "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal,num"


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    for i, name in enumerate(("north", "south", "[red]west")):
        rng = np.random.default_rng(i)
        columns = {"id": np.arange(80) + 1000, "age": rng.normal(60, 10, 80).round(), "sex": rng.choice(["f", "m"], 80)}
        frame = pandas.DataFrame(columns | {"died": rng.integers(0, 2, 80)})
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    return tmp_path


def test_a_draft_is_written_edited_and_checked(fedstrata, sites: Path) -> None:
    words = ("describe", sites / "*.csv", "--target", "died")
    code, printed, err = fedstrata(*words, "--draft", sites / "schema.toml", "--html", sites / "page.html")
    assert code == 0 and not err
    assert "3 sites, 240 rows, target died" in printed and "[red]west" in printed and "f: " in printed
    assert f"Schema drafted in {sites / 'schema.toml'}" in printed and (sites / "page.html").read_text().endswith(
        "</html>\n"
    )
    schema = Schema.read(sites / "schema.toml")
    assert schema.names == ("age", "sex") and schema.drop == ("id",)
    code, again, _ = fedstrata("describe", sites / "*.csv", "--schema", sites / "schema.toml")
    assert code == 0 and again.splitlines()[:9] == printed.splitlines()[:9]
    text = (sites / "schema.toml").read_text()
    (sites / "schema.toml").write_text(text.replace('kind = "numeric"', 'kind = "numeric"\nrange = [0, 50]'))
    code, printed, err = fedstrata(
        "describe", sites / "*.csv", "--schema", sites / "schema.toml", "--html", sites / "b.html"
    )
    assert code == 2 and not printed and not (sites / "b.html").exists()
    assert "Error: The tables do not fit, in 3 places:" in err and "- north, column 'age', lines 2, " in err
    code, _, err = fedstrata(*words, "--draft", sites / "schema.toml")
    assert code == 2 and "Nothing was overwritten" in err


def test_json(fedstrata, sites: Path) -> None:
    code, printed, _ = fedstrata("describe", sites / "*.csv", "--target", "died", "--json", "--minimum", 1)
    table = json.loads(printed)
    assert code == 0 and table["together"]["rows"] == 240 and list(table["sites"]) == ["[red]west", "north", "south"]
    assert sum(table["sites"]["north"]["columns"]["sex"]["counts"]) == 80


def test_one_file_without_a_header_and_with_a_column_of_sites(fedstrata, tmp_path: Path) -> None:
    rows = "".join(
        f"{site};{'-' if i % 7 == 0 else i % 11};{'ill' if i % 3 else 'well'}\n" for site in "ab" for i in range(60)
    )
    (tmp_path / "all.txt").write_bytes(rows.encode("utf-16"))
    words = ("--names", "site,x,state", "--site", "site", "--missing", "-", "--encoding", "utf-16", "--delimiter", ";")
    code, printed, err = fedstrata(
        "describe", tmp_path / "all.txt", *words, "--target", "state", "--positive", "ill", "--json"
    )
    table = json.loads(printed)
    assert code == 0, err
    assert table["sites"]["a"]["columns"]["state"]["counts"] == [20, 40] and table["columns"]["x"]["kind"] == "numeric"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "needs --target"),
        (("--target", "dyed"), "Did you mean 'died'?"),
        (("--target", "died", "--site", "ward"), "Unknown column 'ward'"),
        (("--target", "died", "--html", "none/page.html"), "a file in a directory that exists"),
        (("--target", "died", "--draft", "none/schema.toml"), "a file in a directory that exists"),
        (("--target", "died", "--minimum", "0"), "range x>=1"),
        (("--target", "died", "--encoding", "utf-99"), "name of a text encoding"),
        (("--schema", "none.toml"), "no file none.toml"),
        (("--schema", "none.toml", "--names", "a,b"), "--names does not go with --schema"),
    ],
)
def test_what_is_refused(
    fedstrata, sites: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(sites)
    before = sorted(sites.iterdir())
    code, printed, err = fedstrata("describe", "*.csv", *words)
    assert code == 2 and message in err and not printed and sorted(sites.iterdir()) == before


def test_the_target_of_the_schema(fedstrata, sites: Path) -> None:
    fedstrata("describe", sites / "*.csv", "--target", "died", "--draft", sites / "schema.toml")
    code, _, err = fedstrata("describe", sites / "*.csv", "--target", "sex", "--schema", sites / "schema.toml")
    assert code == 2 and "must be the target of the schema, 'died'" in err


def test_files_that_are_no_tables(fedstrata, sites: Path) -> None:
    os.mkfifo(sites / "pipe.csv")
    (sites / "empty.csv").touch()
    (sites / "folder.csv").mkdir()
    for name, message in (("pipe", "a pipe"), ("empty", "it is empty"), ("folder", "a directory"), ("none", "no file")):
        code, _, err = fedstrata("describe", sites / "north.csv", sites / f"{name}.csv", "--target", "died")
        assert code == 2 and message in err and f"{name}.csv" in err


def test_the_help_needs_no_library_for_tables(fedstrata) -> None:
    assert COMMANDS["describe"][0] == "describe.describe"
    code, printed, _ = fedstrata("describe", "--help")
    assert code == 0 and "--draft" in printed and "--minimum" in printed


@REAL
def test_heart_disease_of_four_hospitals_as_it_is(fedstrata, tmp_path: Path) -> None:
    files = (SITES / "heart-disease" / "*.data",)
    words = ("--names", HEART, "--target", "num", "--positive", "1,2,3,4", "--draft", tmp_path / "schema.toml")
    code, printed, err = fedstrata("describe", *files, *words, "--html", tmp_path / "page.html")
    assert code == 0 and not err and "4 sites, 920 rows" in printed and "column 'chol': all 123 values are 0" in printed
    text = (tmp_path / "schema.toml").read_text()
    assert "If it means missing: missing_values = [0]" in text
    (tmp_path / "schema.toml").write_text(text.replace('name = "chol"\n', 'name = "chol"\nmissing_values = [0]\n'))
    code, printed, err = fedstrata("describe", *files, "--schema", tmp_path / "schema.toml", "--json", "--minimum", 1)
    assert code == 0, err
    table = json.loads(printed)
    expected = {"cleveland": (303, 139), "hungarian": (294, 106), "switzerland": (123, 115), "va": (200, 149)}
    found = {n.split(".")[1]: (s["rows"], s["columns"]["num"]["counts"][1]) for n, s in table["sites"].items()}
    assert found == expected
    assert table["sites"]["processed.switzerland"]["columns"]["chol"]["missing"] == 123
    missing = {n.split(".")[1]: sum(c["missing"] for c in s["columns"].values()) for n, s in table["sites"].items()}
    assert missing == {"cleveland": 6, "hungarian": 782, "switzerland": 273 + 123, "va": 698 + 49}
    assert table["columns"]["cp"]["categories"] == ["1", "2", "3", "4"]


@REAL
@pytest.mark.slow
def test_gusto_with_its_regions(fedstrata) -> None:
    words = ("--site", "regl", "--target", "day30", "--json", "--minimum", 1)
    code, printed, err = fedstrata("describe", SITES / "gusto" / "gusto.csv.gz", *words)
    table = json.loads(printed)
    frame = pandas.read_csv(SITES / "gusto" / "gusto.csv.gz")
    assert code == 0, err
    assert {n: s["rows"] for n, s in table["sites"].items()} == {
        str(k): v for k, v in frame.regl.value_counts().items()
    }
    assert table["together"]["columns"]["day30"]["counts"][1] == frame.day30.sum() == 2851
    assert table["columns"]["Killip"] == {"kind": "ordinal", "categories": ["I", "II", "III", "IV"]}
    assert {f["column"] for f in table["findings"] if f["kind"] == "site"} == {"grpl", "grps"}


@REAL
@pytest.mark.slow
def test_186_hospitals_of_eicu(fedstrata, tmp_path: Path) -> None:
    outcome, patient, values = (
        pandas.read_csv(SITES / "eicu-demo" / f"{name}.csv.gz") for name in ("apachepredvar", "patient", "apacheapsvar")
    )
    frame = outcome.merge(patient[["patientunitstayid", "hospitalid"]], on="patientunitstayid")
    frame = frame.merge(
        values[["patientunitstayid", *values.columns.difference(frame.columns)]], on="patientunitstayid"
    )
    frame.to_csv(tmp_path / "eicu.csv", index=False)
    words = ("--site", "hospitalid", "--target", "diedinhospital", "--json")
    code, printed, err = fedstrata("describe", tmp_path / "eicu.csv", *words)
    table = json.loads(printed)
    assert code == 0, err
    deaths = frame.groupby("hospitalid").diedinhospital.sum()
    assert len(table["sites"]) == frame.hospitalid.nunique() == 186
    assert table["together"]["columns"]["diedinhospital"]["counts"][1] == deaths.sum()
    rows = {n: s["rows"] for n, s in table["sites"].items()}
    assert {n for n, r in rows.items() if r is None} == {
        str(h) for h, n in frame.hospitalid.value_counts().items() if n < 10
    }
    sodium = table["together"]["columns"]["sodium"]
    assert sodium["missing"] == (frame.sodium == -1).sum() > 100 and sodium["quantiles"][0] > 100
