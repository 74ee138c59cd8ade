"""Run independent tasks side by side, in processes that are forked from this one."""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

import torch

from fedstrata.core.errors import FedstrataError, InputError, invalid

T = TypeVar("T")

Say = Callable[[str], None]
"""Prints a message to the user."""

Task = Callable[[], T]
Done = Callable[[int, T], None]
"""Called in this process with the number of a task and its result, in the order in which tasks end."""


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    left = iter(range(len(tasks)))
    workers: dict[Connection, _Worker] = {}
    try:
        for number in itertools.islice(left, jobs):
            worker = _Worker(tasks, list(workers))
            workers[worker.connection] = worker
            worker.start(number)
        while workers:
            for ready in wait(list(workers)):
                assert isinstance(ready, Connection)
                worker = workers[ready]
                done(worker.number, worker.result())
                following = next(left, None)
                if following is None:
                    workers.pop(ready).close()
                else:
                    worker.start(following)
    finally:
        for worker in workers.values():
            worker.process.kill()
            worker.close()


def can_fork() -> bool:
    """Whether this system can fork processes."""
    return "fork" in multiprocessing.get_all_start_methods()


def check_jobs(jobs: int) -> None:
    """Raise if this system cannot run so many jobs."""
    if not isinstance(jobs, int) or isinstance(jobs, bool) or jobs < 1:
        raise invalid("number of jobs", jobs, "a whole number of at least 1")
    if jobs > 1 and not can_fork():
        raise InputError(f"Several jobs need a system that can fork processes. Got jobs = {jobs}: use 1 here.")
    if jobs > 1 and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise InputError(f"Several jobs cannot share a GPU that is already in use. Got jobs = {jobs}: use 1.")


class _Worker:
    """A process that runs one task after another.

    connection: where numbers of tasks go and results arrive. It closes when this process dies, and the worker with it.
    number:     the task that is running.
    """

    def __init__(self, tasks: Sequence[Task[Any]], others: Sequence[Connection]) -> None:
        fork = multiprocessing.get_context("fork")
        self.connection, theirs = fork.Pipe()
        inherited = [*others, self.connection]
        self.process: BaseProcess = fork.Process(target=_work, args=(tasks, theirs, inherited), daemon=True)
        self.number = -1
        with _without_fork_warning():
            self.process.start()
        theirs.close()

    def start(self, number: int) -> None:
        """Start a task."""
        self.number = number
        self.connection.send(number)

    def result(self) -> Any:
        """Return the result of the task, which has ended, or raise its error."""
        try:
            kind, value = self.connection.recv()
        except EOFError:
            raise self._died() from None
        if kind == "error":
            raise value
        if kind == "bug":
            raise RuntimeError(f"A job failed:\n{value}")
        return value

    def _died(self) -> BaseException:
        self.process.join()
        code = self.process.exitcode
        if code == 130:
            return KeyboardInterrupt()
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        return FedstrataError(
            f"A job {how} before it had a result. If memory ran out, use fewer jobs. Finished jobs are kept: resume."
        )

    def close(self) -> None:
        """End the process, which waits for a task."""
        self.connection.close()
        self.process.join()


@contextmanager
def _without_fork_warning() -> Iterator[None]:
    """Python warns that a process with threads may deadlock when forked; ours use one thread and share no lock."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
        yield


def _die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies; elsewhere it ends after its task."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _work(tasks: Sequence[Task[Any]], connection: Connection, inherited: Sequence[Connection]) -> None:
    for other in inherited:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent ends its workers
    _die_with_parent()
    torch.set_num_threads(1)
    while True:
        try:
            number = connection.recv()
            answer = ForkingPickler.dumps(("result", tasks[number]()))
        except EOFError:
            return
        except FedstrataError as error:
            answer = ForkingPickler.dumps(("error", error))
        except KeyboardInterrupt:
            os._exit(130)
        except BaseException:
            answer = ForkingPickler.dumps(("bug", traceback.format_exc()))
        try:
            connection.send_bytes(answer)
        except BrokenPipeError:
            return
