"""Commands on tables that do not fit: the site, the column and the remedy, exit code 2, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w

pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

from broken_tables import BROKEN, SCHEMA, frames

SIZES = (60, 60)

EXPERIMENT = {
    "data": {"tables": "sites/*.csv", "schema": "schema.toml"},
    "model": {"name": "logreg"},
    "problem": {"name": "erm", "loss": "binary_cross_entropy"},
    "train": {"rounds": 1, "threads": 1},
}

COMMANDS = {
    "describe": ("describe", "sites/*.csv", "--schema", "schema.toml", "--html", "page.html"),
    "run": ("run", "exp.toml", "--out", "run"),
    "compare": ("compare", "exp.toml", "--algorithms", "fedavg,scaffold", "--seeds", 1, "--out", "run"),
    "local": ("federate", "local", "exp.toml", "--nodes", 2, "--out", "run"),
}


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sites").mkdir()
    for name, frame in frames(SIZES).items():
        frame.to_csv(tmp_path / "sites" / f"{name}.csv", index=False)
    (tmp_path / "schema.toml").write_text(tomli_w.dumps(SCHEMA))
    (tmp_path / "exp.toml").write_text(tomli_w.dumps(EXPERIMENT))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", BROKEN)
def test_tables_that_do_not_fit(fedstrata, sites: Path, case: str) -> None:
    broken, file = BROKEN[case], sites / "sites" / "site1.csv"
    file.write_bytes(broken.bytes_of(file.read_text()))
    before = sorted(sites.rglob("*"))
    for name, words in COMMANDS.items():
        if name in ("compare", "local") and case not in ("missing column", "empty file"):
            continue
        code, printed, err = fedstrata(*words)
        assert code == 2 and not printed, f"{name}: {err}"
        assert broken.is_said_in(err, "site1") and "site0" not in err, f"{name}: {err}"
        assert sorted(sites.rglob("*")) == before, name


NEW = {  # a table to score may lack the target, and a cell that is wrong counts as missing
    "missing column", "empty file", "wrong delimiter", "wrong encoding", "UTF-16", "duplicated header", "ragged rows",
    "no header", "header only", "an open quote", "a workbook", "a field without an end",
}  # fmt: skip


def test_new_rows_that_do_not_fit(fedstrata, sites: Path) -> None:
    code, _, err = fedstrata("run", "exp.toml", "--out", "run", "--quiet", "--set", "prepare.minimum=1")
    assert code == 0, err
    text = (sites / "sites" / "site1.csv").read_text()
    before = sorted(sites.rglob("*"))
    for case, broken in BROKEN.items():
        (sites / "site1.csv").write_bytes(broken.bytes_of(text))
        code, _, err = fedstrata("predict", "run", "site1.csv", "--out", "scores.csv")
        if case in NEW:
            assert code == 2 and broken.is_said_in(err, "site1"), f"{case}: {err}"
            assert not (sites / "scores.csv").exists(), case
        else:
            assert code == 0, f"{case}: {err}"
            (sites / "scores.csv").unlink()
        (sites / "site1.csv").unlink()
        assert sorted(sites.rglob("*")) == before, case
