"""A run that is killed at any moment, as often as it may be, and resumed, ends with the bits of a run that was not."""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from support import run_scaffold, without_seconds

ROUNDS = 60
KILLS = 10


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight") / "run"
    run_scaffold(str(folder), ROUNDS)
    return folder


def start(folder: Path) -> ForkServerProcess:
    """Start training in a process of its own; its imports come from a server that has done them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fedstrata", "fedstrata.training.plots", "torch._dynamo"])
    process = context.Process(target=run_scaffold, args=(str(folder), ROUNDS))
    process.start()
    return process


def rounds_done(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) - 1 if metrics.exists() else -1


@pytest.mark.slow
def test_ten_kills_change_nothing(straight: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    moments = random.Random(8)
    reached = [0]
    for number in range(KILLS):
        process = start(folder)
        # Wait for some new rounds, then for a random part of one; the first kills hit the start of the run.
        wanted = reached[-1] + (0 if number < 2 else moments.randint(1, ROUNDS // KILLS))
        deadline = time.monotonic() + 60
        while rounds_done(folder) < wanted and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.02))
        assert process.is_alive(), "the run ended before it could be killed"
        process.kill()
        process.join()
        reached.append(max(0, rounds_done(folder)))
    assert reached[-1] < ROUNDS
    assert not (folder / "summary.json").exists()

    last = start(folder)
    last.join(120)
    assert last.exitcode == 0
    assert (folder / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()
    ours, theirs = (
        without_seconds([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()])
        for run in (folder, straight)
    )
    assert ours == theirs
    assert not list(folder.rglob("*.tmp"))
