"""The scripts beside the experiments' files still run, on a small piece of their work."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from fedstrata.algorithms.algorithm import ALGORITHMS
from fedstrata.experiments.build import build_data
from fedstrata.experiments.comparison import Comparison
from fedstrata.experiments.config import read
from fedstrata.experiments.config_tune import Plan
from fedstrata.experiments.tune import Tuned

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def script(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a script; matplotlib's backend and the list of algorithms stay as they are."""
    monkeypatch.setattr("matplotlib.use", lambda *_, **__: None)
    name = f"experiment_{path.parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    known = set(ALGORITHMS)
    spec.loader.exec_module(module)
    for name in set(ALGORITHMS) - known:
        del ALGORITHMS[name]
    return module


EXPERIMENT = """
tuned = "tuned/experiment.toml"
[data]
clients = 3
imbalance = 0.3
holdout = 0.3
[model]
name = "logreg"
[train]
rounds = 1
batch_size = 8
threads = 1
[tune]
trials = 1
seeds = 2
extend = false
[compare]
measure = "accuracy"
baselines = ["pooled"]
[variants.a.algorithm]
lr = 0.02
[variants.b.algorithm]
name = "scaffold"
"""


@pytest.mark.usefixtures("no_pictures")
def test_evidence_is_tuned_and_compared_as_by_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = script(EXPERIMENTS / "evidence.py", monkeypatch)
    path = tmp_path / "experiment.toml"
    path.write_text(EXPERIMENT)
    evidence.run(str(path), None, 1, 2, tmp_path / "out")
    result = json.loads((tmp_path / "results" / "experiment.json").read_text())
    assert result["seeds"] == [2, 3] and result["measure"] == result["tuning"]["measure"] == "accuracy"
    assert [row["variant"] for row in result["rows"]] == ["a", "b", "pooled"]
    assert "All seeds use the split of data.seed = 0" in result["tuning"]["notes"][0]
    assert not [note for note in result["tuning"]["notes"] if "rows of the trials" in note]
    tuned = tomllib.loads((tmp_path / "tuned" / "experiment.toml").read_text())
    assert tuned["data_seed"] == 0 and tuned["trial_seeds"] == [0, 1] and "pooled" in tuned["baselines"]
    assert result["settings"]["data"]["seed"] == 0 and result["settings"]["train"]["seed"] == 2


@pytest.mark.usefixtures("no_pictures")
def test_every_split_is_tuned_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = script(EXPERIMENTS / "evidence.py", monkeypatch)
    path = tmp_path / "experiment.toml"
    path.write_text(EXPERIMENT.replace('baselines = ["pooled"]', ""))
    seen: list[tuple[int, range]] = []
    search = evidence.tune_and_compare

    def watched(plan: Plan, *words: object, **how: object) -> tuple[Tuned, Comparison | None]:
        tuned, comparison = search(plan, *words, **how)
        assert comparison is not None and not tuned.seen([o.seed for o in comparison.outcomes["a"]])
        seen.append((plan.config.data_seed, tuned.trial_seeds))
        return tuned, comparison

    monkeypatch.setattr(evidence, "tune_and_compare", watched)
    evidence.run(str(path), None, 1, 5, tmp_path / "out", splits=2)
    assert seen == [(0, range(2)), (3, range(3, 5))]
    result = json.loads((tmp_path / "results" / "experiment.json").read_text())
    assert result["seeds"] == [2, 5] and "over 2 seeds and test rows" in result["conditions"]
    assert {trial["split"] for trial in result["tuning"]["trials"]} == {0, 1}
    assert "seeds 2, 5, commit" in evidence.block_of(tmp_path, "experiment")
    assert evidence.on_which([["x", "y"], ["x", "z"]]) == ["x", "y (Split 0.)", "z (Split 1.)"]
    assert tomllib.loads((tmp_path / "tuned" / "experiment.toml").read_text())["trial_seeds"] == [0, 1]
    path.write_text(EXPERIMENT[: EXPERIMENT.index("[tune]")])
    with pytest.raises(SystemExit, match=r"has no \[tune\] table"):
        evidence.run(str(path), None, 1, 5, tmp_path / "out", splits=2)


@pytest.mark.skipif("FEDSTRATA_DATA" not in os.environ, reason="needs the tables of the sites")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_tables_of_real_sites_fit_their_schemas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = script(EXPERIMENTS / "sites" / "tables.py", monkeypatch)
    monkeypatch.chdir(tmp_path)
    tables.main()
    built = {name: build_data(read(EXPERIMENTS / "sites" / f"{name}.toml")) for name in ("heart", "gusto", "eicu")}
    assert {name: data.clients for name, data in built.items()} == {"heart": 4, "gusto": 16, "eicu": 186}
    rows = {name: len(data.train.arrays[1]) for name, data in built.items()}
    assert rows == {"heart": 920, "gusto": 40_830, "eicu": 1786}, "of eICU, one row for each patient"
    eicu = tables.eicu(Path(os.environ["FEDSTRATA_DATA"]) / "sites" / "eicu-demo")
    assert eicu["diedinhospital"].sum() == 167 and not [c for c in eicu if "predicted" in c or "status" in c]
