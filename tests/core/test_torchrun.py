"""Ranks end with the launcher that started them, even if it is killed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

RANK = """
import os, time
from fedstrata.core.torchrun import end_with_launcher
end_with_launcher()
print(os.getpid(), flush=True)
time.sleep(60)
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
@pytest.mark.parametrize("ranks", [2, 1])
def test_a_rank_ends_when_its_launcher_is_killed(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("RANK", "0")
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, RANK], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        rank = int(launcher.stdout.readline())
        assert is_running(rank)
        launcher.kill()
    end = time.monotonic() + (10 if ranks > 1 else 0.5)
    while is_running(rank) and time.monotonic() < end:
        time.sleep(0.02)
    alone = is_running(rank)
    if alone:
        subprocess.run(["kill", "-9", str(rank)], check=False)
    assert alone == (ranks == 1)  # a process that torchrun did not start may outlive its parent
