"""The scripts beside the experiments' files still run, on a small piece of their work."""

from __future__ import annotations

import importlib.util
import json
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from fedstrata.algorithms.algorithm import ALGORITHMS

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SCRIPTS = sorted(EXPERIMENTS.glob("*/*.py"))


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


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_script_imports(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(script(path, monkeypatch).main)


@pytest.mark.slow
def test_the_moving_average_with_one_level_is_local_scgdam(monkeypatch: pytest.MonkeyPatch) -> None:
    theory = script(EXPERIMENTS / "002" / "theory.py", monkeypatch)
    assert theory.same_at_one_level() < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "expected"), [("storm", 0.18607093), ("average", 1.30119188)])
def test_estimates_are_tracked_as_in_version_0_1(kind: str, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    theory = script(EXPERIMENTS / "002" / "theory.py", monkeypatch)
    error = theory.tracking(replace(theory.TASKS[1], rounds=6), kind, weight=0.27, step_size=0.1, seed=1)
    assert error[-1, 0] == pytest.approx(expected, rel=1e-6)


def test_speedup_measures_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    speedup = script(EXPERIMENTS / "003" / "speedup.py", monkeypatch)
    squares = speedup.squared_gradients(2, 0.05, 3, 0, {})
    assert np.isfinite(squares).all() and (squares > 0).all()


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
