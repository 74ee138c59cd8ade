"""The files that people start from: every example runs, every experiment can be read with each of its presets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedstrata.algorithms import algorithm
from fedstrata.experiments.config import presets, read
from fedstrata.experiments.runs import run_config
from fedstrata.problems import PROBLEMS

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
EXPERIMENTS = sorted(p for p in (ROOT / "experiments").glob("*/*.toml") if p.name != "claims.toml")
FREE = ("digits", "breast_cancer", "sinusoid")


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.stem, marks=() if p.stem == "digits" else pytest.mark.slow) for p in EXAMPLES]
)
def test_every_example_runs(path: Path) -> None:
    config = read(path, ["train.rounds=2", "train.threads=1"])
    if not config.brings_data and config.data.name not in FREE and "FEDSTRATA_DATA" not in os.environ:
        pytest.skip(f"{config.data.name} needs the data directory FEDSTRATA_DATA")
    run = run_config(config, None, False, [])
    assert run.history[-1]["round"] == 2


def test_every_problem_has_an_example() -> None:
    assert {read(path).problem.name for path in EXAMPLES} >= set(PROBLEMS) - {"quadratic"}


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_experiment_can_be_read(path: Path) -> None:
    assert presets(path)[0] in ("cpu", "paper")  # the paper's alone, where a laptop cannot run it
    assert set(presets(path)) <= {"cpu", "study", "night", "paper"}
    for preset in presets(path):
        config = read(path, preset=preset)
        assert len(config.variants) > 1
        for label in config.variants:
            variant = config.variant(label)
            assert variant.problem.name in PROBLEMS
            algorithm(variant.algorithm.name, variant.options_of(variant.algorithm.name))
        assert set(config.tune.search) <= {*config.variants, *config.compare.baselines}


@pytest.mark.slow
@pytest.mark.skipif("FEDSTRATA_DATA" not in os.environ, reason="MNIST needs the data directory FEDSTRATA_DATA")
@pytest.mark.parametrize("name", ["comfedl", "mfcgd", "adamfcgd", "local_scgdm", "local_moml"])
def test_a_small_gamma_does_not_overflow_on_mnist(name: str) -> None:
    settings = ["train.rounds=20", "train.threads=1", f'algorithm={{name="{name}", steps=5}}', "problem.gamma=0.1"]
    last = run_config(read(ROOT / "examples/robust.toml", settings), None, False, []).history[-1]
    assert last["round"] == 20
    assert last["loss"] < 50
