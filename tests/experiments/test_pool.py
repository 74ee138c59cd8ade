"""Independent tasks side by side: results, errors, and jobs that end without a result."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstrata.core.errors import Diverged, FedstrataError, InputError, MissingData
from fedstrata.experiments import pool


def results_of(tasks: list[Callable[[], Any]], jobs: int) -> list[tuple[int, Any]]:
    """Run the tasks; return what was passed on, in its order."""
    passed: list[tuple[int, Any]] = []
    pool.run_all(tasks, jobs, lambda number, result: passed.append((number, result)))
    return passed


def fails(error: BaseException) -> Any:
    raise error


def ends(how: Callable[[int, int], None]) -> None:
    how(os.getpid(), signal.SIGKILL)


def about_me() -> tuple[int, int]:
    return os.getpid(), torch.get_num_threads()


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_each_result_comes_with_the_number_of_its_task(jobs: int) -> None:
    passed = results_of([partial(pow, 2, n) for n in range(7)], jobs)
    assert sorted(passed) == [(n, 2**n) for n in range(7)]
    if jobs == 1:
        assert passed == sorted(passed)
    assert results_of([], jobs) == []


def test_results_are_passed_on_as_soon_as_they_are_there(tmp_path: Path) -> None:
    """The first task waits for the second, and a third starts in the place of that one."""

    def waits() -> str:
        while not (tmp_path / "third").exists():
            time.sleep(0.01)
        return "first"

    def third() -> str:
        (tmp_path / "third").touch()
        time.sleep(0.5)
        return "third"

    assert results_of([waits, lambda: "second", third], 2) == [(1, "second"), (0, "first"), (2, "third")]


def test_several_jobs_are_other_processes_with_one_thread() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert results_of([about_me], 1) == [(0, (os.getpid(), 3))]
        others = [result for _, result in results_of([about_me] * 3, 2)]
    finally:
        torch.set_num_threads(threads)
    assert 2 <= len({pid for pid, _ in others} | {os.getpid()}) <= 3
    assert [count for _, count in others] == [1, 1, 1]


def test_at_most_so_many_run_at_a_time(tmp_path: Path) -> None:
    def counts() -> int:
        mine = tmp_path / str(os.getpid())
        mine.touch()
        time.sleep(0.1)
        count = len(list(tmp_path.iterdir()))
        mine.unlink()
        return count

    assert max(count for _, count in results_of([counts] * 6, 3)) <= 3


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("kind", [InputError, FedstrataError, MissingData])
def test_an_error_of_a_task_is_raised_as_itself(kind: type[FedstrataError], jobs: int) -> None:
    with pytest.raises(FedstrataError, match=r"^what is wrong$") as caught:
        results_of([partial(fails, kind("what is wrong"))], jobs)
    assert type(caught.value) is kind and caught.value.exit_code == kind.exit_code


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_divergence_keeps_its_history(jobs: int) -> None:
    with pytest.raises(Diverged, match=r"^in round 3$") as caught:
        results_of([partial(fails, Diverged("in round 3", [{"round": 0, "loss": 2.0}]))], jobs)
    assert caught.value.history == [{"round": 0, "loss": 2.0}]


def test_the_first_error_stops_the_rest(tmp_path: Path) -> None:
    def hangs() -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(60)

    def fails_later() -> None:
        while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
            time.sleep(0.01)
        raise InputError("stop")

    passed: list[int] = []
    tasks: list[Callable[[], Any]] = [lambda: 5, hangs, fails_later, (tmp_path / "never").touch]
    began = time.monotonic()
    with pytest.raises(InputError, match=r"^stop$"):
        pool.run_all(tasks, 2, lambda _, result: passed.append(result))
    assert passed == [5], "results before it have been passed on"
    assert time.monotonic() - began < 30 and not (tmp_path / "never").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_bug_in_a_task_shows_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        results_of([lambda: 1 // 0], 1)
    with pytest.raises(RuntimeError, match=r"(?s)^A job failed:\nTraceback.*in fails.*ZeroDivisionError: by zero") as e:
        results_of([partial(fails, ZeroDivisionError("by zero"))], 2)
    assert not isinstance(e.value, FedstrataError)
    with pytest.raises(RuntimeError, match="SystemExit"):
        results_of([partial(fails, SystemExit(3))], 2)


def test_a_job_that_is_killed_says_so() -> None:
    with pytest.raises(FedstrataError, match=r"^A job was killed by signal 9 before it had a result\.") as caught:
        results_of([partial(ends, os.kill)], 2)
    assert "use fewer jobs" in str(caught.value) and "resume" in str(caught.value) and caught.value.exit_code == 1
    with pytest.raises(FedstrataError, match=r"^A job ended with exit code 7 before it had a result\."):
        results_of([partial(os._exit, 7)], 2)


def test_an_interrupt_of_a_job_is_an_interrupt_here() -> None:
    with pytest.raises(KeyboardInterrupt):
        results_of([partial(fails, KeyboardInterrupt())], 2)


def test_an_interrupt_here_ends_the_jobs(tmp_path: Path) -> None:
    def writes() -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(60)

    def interrupted(*_: Any) -> None:
        while len(list(tmp_path.iterdir())) < 1:
            time.sleep(0.01)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.run_all([lambda: None, writes], 2, interrupted)
    (left,) = tmp_path.iterdir()
    with pytest.raises(ProcessLookupError):
        os.kill(int(left.name), 0)


def test_jobs_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """Also if it is killed, and whether or not they are at work then."""
    code = f"""
import os, time
from pathlib import Path
from fedstrata.experiments import pool
def works(): Path({str(tmp_path)!r}, str(os.getpid())).touch(); time.sleep(2)
pool.run_all([works] * 3, 3, lambda number, result: time.sleep(60))
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    while len(list(tmp_path.iterdir())) < 3:
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    left = {int(path.name) for path in tmp_path.iterdir()}
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = {pid for pid in left if Path(f"/proc/{pid}").exists()}
    assert not left


def test_a_system_that_cannot_run_several_jobs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn"])
        with pytest.raises(InputError, match=r"can fork processes\. Got jobs = 2: use 1 here\."):
            results_of([about_me], 2)
        assert results_of([about_me], 1)[0][1][0] == os.getpid()
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    with pytest.raises(InputError, match=r"a GPU that is already in use\. Got jobs = 3: use 1\."):
        results_of([about_me], 3)


COMPILED = """
import torch, fedstrata as fs
data = fs.FederatedData.from_arrays([(torch.randn(20, 3), torch.arange(20) % 2) for _ in range(3)], classes=2)
methods = {"a": (fs.erm(torch.nn.Linear(3, 2)), fs.FedAvg(steps=3)), "b": (fs.erm(torch.nn.Linear(3, 2)), fs.FedProx())}
how = {"rounds": 4, "batch_size": 4, "threads": 1, "compile": True}
fs.train(*methods["a"][:1], data, methods["a"][1], **how)
print(fs.compare(methods, data, seeds=2, jobs=2, **how).seeds)
"""


@pytest.mark.slow
def test_jobs_compile_after_this_process_has(tmp_path: Path) -> None:
    """The threads that compile are not there in a forked process."""
    where = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", COMPILED], env=where, capture_output=True, text=True, timeout=400)
    assert done.stdout.split() == ["2"], done.stderr
