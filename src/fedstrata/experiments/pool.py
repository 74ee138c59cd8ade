"""Run independent tasks side by side, each in a process of its own that is forked from this one."""

from __future__ import annotations

import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from fedstrata.core.errors import FedstrataError, InputError

T = TypeVar("T")

Task = Callable[[], T]
Done = Callable[[int, T], None]
"""Called in this process with the number of a task and its result, in the order in which tasks end."""


def run_all(tasks: Sequence[Task[T]], jobs: int, done: Done[T]) -> None:
    """Run the tasks, at most ``jobs`` at a time, and pass each result to ``done``.

    A single job runs in this process. Several run in processes with one thread each, which share what this process has
    loaded. The first error stops the others and is raised; results before it have been passed on.
    """
    if jobs == 1:
        for number, task in enumerate(tasks):
            done(number, task())
        return
    check_jobs(jobs)
    waiting = list(enumerate(tasks))[::-1]
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, task = waiting.pop()
                connection, process = _forked(task)
                running[connection] = number, process
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                number, process = running.pop(ready)
                done(number, _received(ready, process))
    finally:
        for connection, (_, process) in running.items():
            process.kill()
            process.join()
            connection.close()


def can_fork() -> bool:
    """Whether this system can fork processes."""
    return "fork" in multiprocessing.get_all_start_methods()


def check_jobs(jobs: int) -> None:
    """Raise if this system cannot run several jobs."""
    if jobs > 1 and not can_fork():
        raise InputError(f"Several jobs need a system that can fork processes. Got jobs = {jobs}: use 1 here.")
    if jobs > 1 and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise InputError(f"Several jobs cannot share a GPU that is already in use. Got jobs = {jobs}: use 1.")


def _forked(task: Task[Any]) -> tuple[Connection, BaseProcess]:
    """Start a task in a process of its own; return where its result will arrive."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_work, args=(task, theirs), daemon=True)
    with _without_fork_warning():
        process.start()
    theirs.close()
    return ours, process


@contextmanager
def _without_fork_warning() -> Iterator[None]:
    """Python warns that a process with threads may deadlock when forked; ours use one thread and share no lock."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
        yield


def _work(task: Task[Any], results: Connection) -> None:
    torch.set_num_threads(1)
    try:
        answer: tuple[str, Any] = ("result", task())
    except FedstrataError as error:
        answer = ("error", error)
    except KeyboardInterrupt:
        os._exit(130)
    except BaseException:
        answer = ("bug", traceback.format_exc())
    results.send(answer)
    results.close()


def _received(connection: Connection, process: BaseProcess) -> Any:
    """Return the result of a process that has ended, or raise its error."""
    try:
        kind, value = connection.recv()
    except EOFError:
        process.join()
        code = process.exitcode
        if code == 130:
            raise KeyboardInterrupt from None
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        raise FedstrataError(
            f"A job {how} before it had a result. If memory ran out, use fewer jobs. Finished jobs are kept: resume."
        ) from None
    finally:
        connection.close()
    process.join()
    if kind == "error":
        raise value
    if kind == "bug":
        raise RuntimeError(f"A job failed:\n{value}")
    return value
