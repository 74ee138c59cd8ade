"""The scripts beside the experiments' files still run, on a small piece of their work."""

from __future__ import annotations

import importlib.util
import json
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from fedstrata.algorithms.algorithm import ALGORITHMS

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
