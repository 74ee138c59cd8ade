"""Sites as they are: 186 hospitals with two to 23 patients each, 70 of them without a death."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

REAL = os.environ.get("FEDSTRATA_DATA", "")
NUMBERS = ("age", "heartrate", "meanbp", "temperature", "bun")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def of_eicu() -> pd.DataFrame:
    """The eICU demo: age, what was measured on the first day, and death."""
    folder = Path(REAL) / "sites" / "eicu-demo"
    outcome, stay, acute = (
        pd.read_csv(folder / f"{name}.csv.gz") for name in ("apachepredvar", "patient", "apacheapsvar")
    )
    frame = outcome[["patientunitstayid", "diedinhospital", "age"]].merge(stay[["patientunitstayid", "hospitalid"]])
    frame = frame.merge(acute[["patientunitstayid", *NUMBERS[1:]]])
    return frame.rename(columns={"diedinhospital": "died", "hospitalid": "hospital"})


def made() -> pd.DataFrame:
    """A table like it."""
    rng = np.random.default_rng(0)
    sizes, deaths = rng.integers(10, 24, 186), np.repeat([0, 1, 2, 3, 4, 5], [70, 64, 32, 14, 4, 2])
    sizes[[0, 1, 71, 72]] = 1, 2, 1, 2  # without a death, and with one
    died = np.concatenate([np.repeat([1, 0], [d, n - d]) for d, n in zip(deaths, sizes, strict=True)])
    frame = pd.DataFrame({name: rng.normal(60, 10, len(died)) + 6 * died for name in NUMBERS})
    return frame.assign(died=died, hospital=np.repeat(np.arange(len(sizes)), sizes))


TABLES = {"made": made, "eICU": pytest.param(of_eicu, marks=pytest.mark.skipif(not REAL, reason="no real data"))}

FILE = """
[data]
tables = "all.csv"
holdout = 0.3
[data.schema]
version = 1
site = "hospital"
drop = ["patientunitstayid"]
target = { name = "died" }
columns = [
  { name = "age", kind = "numeric", missing = "mean", missing_values = [-1] },
  { name = "heartrate", kind = "numeric", missing = "mean", missing_values = [-1] },
  { name = "meanbp", kind = "numeric", missing = "mean", missing_values = [-1] },
  { name = "temperature", kind = "numeric", missing = "mean", missing_values = [-1] },
  { name = "bun", kind = "numeric", missing = "mean", missing_values = [-1] },
]
[prepare]
minimum = MINIMUM
[model]
name = "logreg"
[problem]
PROBLEM
[train]
rounds = 4
batch_size = 8
eval_every = 1
threads = 1
"""
ERM = 'loss = "binary_cross_entropy"\n[algorithm]\nname = "fedavg"\nlr = 0.3\nsteps = 5'
AUC = 'name = "auc"\nscore = "none"\n[algorithm]\nname = "local_sgda"\nlr = 0.05\nsteps = 5'


@pytest.fixture(params=[*TABLES.values()], ids=[*TABLES])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    frame = request.param().assign(patientunitstayid=0)
    frame.to_csv(tmp_path / "all.csv", index=False)
    deaths = frame.groupby("hospital").died.sum()
    assert (len(deaths), (deaths == 0).sum()) == (186, 70)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, problem: str, minimum: int = 1) -> Path:
    (folder / "e.toml").write_text(FILE.replace("PROBLEM", problem).replace("MINIMUM", str(minimum)))
    return folder / "e.toml"


def of_sites(table: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Every number that is measured on single sites, by name."""
    for name, value in table.items():
        if name.endswith(("_mean", "_worst")) or name == "auc_within":
            yield name, value
    for name, values in table.get("per_client", {}).items():
        yield from ((name, value) for value in values if value is not None and name != "pairs")


@pytest.mark.parametrize("problem", [ERM, AUC], ids=["erm", "auc"])
@pytest.mark.parametrize(("own_rows", "holdout"), [(1, 0.3), (5, 0.3), (5, 0.0)])
def test_all_hospitals_take_part_and_nothing_is_zero(
    folder: Path, problem: str, own_rows: int, holdout: float, fedstrata: Callable[..., tuple[int, str, str]]
) -> None:
    words = ("--set", f"evaluate.own_rows={own_rows}", "--set", f"data.holdout={holdout}", "--out", "run")
    code, printed, err = fedstrata("run", write(folder, problem), *words)
    assert code == 0, err
    summary = json.loads((folder / "run" / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert summary["clients"] == 186 and len(rows) == 5 and 0.4 < summary["auc_within"] < 1
    pairs = summary["per_client"]["pairs"]
    measured = sum(value is not None for value in summary["per_client"]["auc"])
    assert len(pairs) == 186 and sum(n > 0 for n in pairs) > 40
    assert summary["measured_on"]["auc"] == f"{measured} of 186 sites measured"
    assert f"A site's own AUC: {measured} of 186 sites measured." in " ".join(printed.split())
    if own_rows == 1:
        assert measured == sum(n > 0 for n in pairs)
    else:
        assert measured == (0 if holdout else 2), "two hospitals have five deaths"
        assert 0.0 not in [value for table in (summary, *rows) for _, value in of_sites(table)]
        assert " 0.000" not in printed


def test_with_the_usual_minimum_all_hospitals_take_part_too(
    folder: Path, fedstrata: Callable[..., tuple[int, str, str]]
) -> None:
    """A count below ten stays at its hospital: few tell of a column, none of its deaths as they are."""
    code, _, err = fedstrata("run", write(folder, ERM, 10), "--out", "run", "--quiet", "--set", "data.holdout=0.1")
    assert code == 0, err
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["clients"] == 186 and 0.4 < summary["auc"] < 1


def test_alone_and_in_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fedstrata: Callable[..., tuple[int, str, str]]
) -> None:
    """The baselines are measured at the same sites, on the same pairs, and can be judged by AUC within sites."""
    frame, folder = made().assign(patientunitstayid=0), tmp_path
    frame = frame[frame["hospital"].isin([1, 71, 160, 180, 185])]  # each is trained alone
    frame.to_csv(tmp_path / "all.csv", index=False)
    monkeypatch.chdir(tmp_path)
    short = ("--set", "train.rounds=2", "--set", "train.eval_every=2", "--set", "compare.measure=auc_within")
    words = ("--algorithms", "fedavg,local,pooled", "--seeds", 2, "--out", "c", "--json", "--quiet")
    code, printed, err = fedstrata("compare", write(folder, ERM), *short, *words)
    assert code == 0, err
    table = json.loads(printed)
    assert table["measure"] == "auc_within" and "test rows" in table["conditions"]
    assert [row["algorithm"] for row in table["rows"]] == ["fedavg", "local", "pooled"]
    summaries = [
        json.loads((folder / "c" / f"{name}-seed0" / "summary.json").read_text())
        for name in ("fedavg", "local", "pooled")
    ]
    pairs = [summary["per_client"]["pairs"] for summary in summaries]
    assert len(pairs[0]) == 5 and pairs[1:] == pairs[:1] * 2
    assert {summary["measured_on"]["auc"] for summary in summaries} == {"0 of 5 sites measured"}
    assert all(0.3 < summary["auc_within"] < 1 and "auc_worst" not in summary for summary in summaries)
    assert "0 of 5 sites measured" in (folder / "c" / "table.md").read_text()
