"""A search in two processes that is killed at any moment and resumed ends with the files of one that was not.

pytest tests/test_kill_tune.py --full             # killed at three random moments
pytest tests/test_kill_tune.py --full --kills 10  # at ten
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from fedstrata.cli.app import invoke
from support import without_seconds

FILE = """
[data]
clients = 4
imbalance = 0.3
[model]
name = "logreg"
[problem]
loss = "binary_cross_entropy"
[train]
rounds = 60
batch_size = 16
eval_every = 60
[tune]
trials = 6
seeds = 2
"""


def tune(folder: str) -> None:
    """Tune, in a group of processes of its own."""
    os.setsid()
    out = Path(folder) / "out"
    words = ["tune", f"{folder}/e.toml", "--algorithms", "fedavg,fedprox", "--seeds", "2", "--out", str(out)]
    code = invoke([*words, "--jobs", "2", "--quiet", *["--resume"] * (out / "trials" / "config.json").exists()])
    os._exit(code)


def start(folder: Path) -> ForkServerProcess:
    """Start the command in a process of its own; its imports come from a server that has done them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fedstrata", "fedstrata.experiments.public", "fedstrata.training.plots"])
    process = context.Process(target=tune, args=(str(folder),))
    process.start()
    return process


def finished(folder: Path) -> int:
    return len(list((folder / "out" / "trials").glob("*-seed*.json")))


def searching(folder: Path) -> bool:
    """Whether a search has begun and not ended: its trials are written together when it ends."""
    return (folder / "out" / "trials" / "config.json").exists() and not (folder / "out" / "trials.json").exists()


def kill_in_the_search(folder: Path, more: int, moment: float) -> int:
    """Start or resume the search, and kill it after ``more`` further runs and a moment; return how many runs it has."""
    before = finished(folder)
    process = start(folder)
    deadline = time.monotonic() + 120
    while (finished(folder) < before + more or not searching(folder)) and process.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(moment)
    assert process.is_alive() and searching(folder), "the search ended before it could be killed"
    assert process.pid is not None
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    assert searching(folder)
    return finished(folder)


def results(folder: Path) -> dict[str, Any]:
    """Return the files of a search as bytes, and the final values without times."""
    out = folder / "out"
    rows = json.loads((out / "final" / "compare.json").read_text())
    final = [(row["algorithm"], without_seconds([row["values"]])) for row in rows]
    return {name: (out / name).read_bytes() for name in ("trials.json", "best.toml", "tune.md")} | {"final": final}


def check_kills(tmp_path: Path, kills: int, seed: int = 17) -> list[int]:
    """Kill a search so many times, and compare it with one that was not; return how many runs each kill left."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for folder in (straight, killed):
        folder.mkdir()
        (folder / "e.toml").write_text(FILE)
    process = start(straight)
    process.join(300)
    assert process.exitcode == 0
    total, moments = finished(straight), random.Random(seed)
    left = []
    for number in range(kills):
        more = 0 if number == 0 else moments.randint(1, max(1, (total - 4) // kills))
        left.append(kill_in_the_search(killed, more, moments.uniform(0, 0.15)))
    assert left[-1] < total
    last = start(killed)
    last.join(300)
    assert last.exitcode == 0 and finished(killed) == total
    assert results(killed) == results(straight)
    return [*left, total]


@pytest.mark.slow
def test_a_killed_search_is_resumed_exactly(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    check_kills(tmp_path, pytestconfig.getoption("kills"))
