"""docs/hospital.md: every command and the Python of the page, on the real files of the four hospitals."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedstrata.data.tables.schema import Schema

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "hospital.md").read_text()

pytestmark = [
    pytest.mark.skipif("FEDSTRATA_DATA" not in os.environ, reason="needs the hospitals' files"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the hospitals' files as they are, the example's schema and experiment, and new patients."""
    (tmp_path / "sites").mkdir()
    for file in (Path(os.environ["FEDSTRATA_DATA"]) / "sites" / "heart-disease").glob("processed.*.data"):
        shutil.copy(file, tmp_path / "sites")
    for file in (ROOT / "examples" / "hospital").iterdir():
        shutil.copy(file, tmp_path)
    schema = Schema.read(tmp_path / "schema.toml")
    rows = (tmp_path / "sites" / "processed.va.data").read_text().splitlines()[:20]
    (tmp_path / "new.csv").write_text("\n".join(rows) + "\n")
    assert len(rows[0].split(",")) == len(schema.file.names)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_shows_the_example() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.S)
    assert tomllib.loads(text) == tomllib.loads((ROOT / "examples" / "hospital" / "hospital.toml").read_text())


def test_every_command_works(folder: Path, fedstrata: Callable[..., tuple[int, str, str]]) -> None:
    import pandas as pd

    commands = [shlex.split(line)[1:] for line in re.findall(r"^    (fedstrata .*)$", PAGE, flags=re.M)]
    assert [words[0] for words in commands] == ["describe", "run", "compare", "threshold", "predict"]
    for words in commands:
        words = ["drafted.toml" if word == "schema.toml" else word for word in words]
        more = ["--seeds", "2", "--set", "train.rounds=20"] if words[0] == "compare" else []
        code, _, err = fedstrata(*words, *more)
        assert code == 0, f"{words}: {err}"
    drafted, edited = (Schema.read(folder / name) for name in ("drafted.toml", "schema.toml"))
    assert drafted.file.names == edited.file.names
    scores = pd.read_csv(folder / "scores.csv")
    assert len(scores) == 20 and scores["risk"].between(0, 1).all() and set(scores["alert"]) <= {0, 1}
    summary = json.loads((folder / "runs" / "heart" / "summary.json").read_text())
    assert summary["auc"] > 0.87 and summary["scores_are"] == "risks"


def test_the_python_of_the_page_works(folder: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(code, names)
    assert len(names["patients"]) == 200 and (folder / "model" / "weights.safetensors").exists()
    assert len([line for line in code.splitlines() if line.strip()]) <= 15


def test_a_run_is_resumed_exactly(folder: Path, fedstrata: Callable[..., tuple[int, str, str]]) -> None:
    short = ("--set", "train.rounds=6", "--set", "train.checkpoint_every=2", "--quiet")
    assert fedstrata("run", "hospital.toml", "--out", "straight", *short)[0] == 0
    stopped = ("--set", "train.rounds=4", *short[2:])
    assert fedstrata("run", "hospital.toml", "--out", "resumed", *stopped)[0] == 0
    assert fedstrata("run", "hospital.toml", "--out", "resumed", "--resume", *short)[0] == 0
    for name in ("solution.safetensors", "scores.safetensors", "model/preparation.safetensors"):
        assert (folder / "straight" / name).read_bytes() == (folder / "resumed" / name).read_bytes()


def test_a_changed_schema_is_not_resumed(folder: Path, fedstrata: Callable[..., tuple[int, str, str]]) -> None:
    short = ("--out", "run", "--set", "train.rounds=2", "--quiet")
    assert fedstrata("run", "hospital.toml", *short)[0] == 0
    text = (folder / "schema.toml").read_text()
    (folder / "schema.toml").write_text(text.replace("range = [18, 110]", "range = [18, 111]"))
    code, _, err = fedstrata("run", "hospital.toml", *short, "--resume")
    assert code == 2 and "digest.tables" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("predict", "nowhere", "new.csv", "--out", "s.csv"), "There is no model in nowhere"),
        (("predict", "run", "nothing.csv", "--out", "s.csv"), "nothing.csv"),
        (("predict", "run", "new.csv", "--out", "s.txt"), "ends in .csv or .parquet"),
        (("predict", "run", "new.csv", "--out", "no/s.csv"), "There is no directory no"),
        (("predict", "run", "new.csv", "--out", "new.csv"), "exists. Nothing was overwritten"),
        (("threshold", "run"), "sensitivity"),
        (("threshold", "run", "--sensitivity", "2"), "at most 1"),
        (("threshold", "run", "--sensitivity", "0.9", "--ppv", "0.5"), "one of sensitivity"),
        (("export", "run", "--out", "sites"), "not empty"),
    ],
)
def test_bad_calls(
    folder: Path, fedstrata: Callable[..., tuple[int, str, str]], words: tuple[str, ...], said: str
) -> None:
    assert fedstrata("run", "hospital.toml", "--out", "run", "--set", "train.rounds=2", "--quiet")[0] == 0
    before = sorted(folder.rglob("*"))
    code, _, err = fedstrata(*words)
    assert code == 2 and said in " ".join(err.split()), err
    assert sorted(folder.rglob("*")) == before
