"""Child processes: each has a log, and all of them are ended at exit."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from fedstrata.core.errors import FedstrataError, InputError

LOOPBACK = "127.0.0.1"

FLOWER_SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
}
"""The environment of every Flower process: no telemetry, no update checks, and short waits for tasks."""


def commands() -> Path:
    """Return the folder of this Python's Flower commands."""
    folder = Path(sys.executable).parent
    if not (folder / "flower-superlink").exists():
        raise InputError("Flower is not installed: pip install 'fedstrata[flower]'.")
    return folder


def environment(home: Path) -> dict[str, str]:
    """Return an environment in which Flower neither connects to the internet nor writes to the user's home."""
    return {
        **os.environ,
        "PATH": f"{commands()}{os.pathsep}{os.environ.get('PATH', '')}",
        "FLWR_HOME": str(home),
        **FLOWER_SETTINGS,
        "NO_PROXY": LOOPBACK,
        "no_proxy": LOOPBACK,
        "PYTHONUNBUFFERED": "1",
    }


class Processes:
    """Child processes by name. The output of NAME goes to ``folder/NAME.log``.

    Use it in a ``with`` statement: every process that it started is ended, however the block ends.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()  # so that its path in their environment is not that of another folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start a process in a new session."""
        if name in self.running and self.running[name].poll() is None:
            raise FedstrataError(f"The process {name} of the federation is running already.")
        home = self.folder / "homes" / name
        home.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment(home),
                start_new_session=True,
            )

    def wait_until(self, ready: Callable[[], bool], name: str, seconds: float) -> None:
        """Wait until a process that was started is ready."""
        deadline = time.monotonic() + seconds
        while not ready():
            if self.running[name].poll() is not None or time.monotonic() > deadline:
                raise FedstrataError(
                    f"The process {name} of the federation did not start: see {self.folder / name}.log"
                )
            time.sleep(0.1)

    def end(self) -> None:
        """End every process that was started, the last one first, and all of their descendants."""
        with _signals(
            signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP
        ):  # a second Ctrl-C must not stop this
            groups = [process.pid for process in reversed(self.running.values())]
            others = _descendants(groups)  # Flower starts some in new sessions
            for sign, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
                for group in groups:
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(group, sign)
                for process in others if sign is signal.SIGKILL else ():
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(process, sign)
                deadline = time.monotonic() + patience
                while any(map(_group_exists, self.running.values())) or any(map(_exists, others)):
                    if time.monotonic() > deadline:
                        break
                    time.sleep(0.05)
            self.running.clear()


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP too, so that child processes are ended."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with _signals(stop, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def _signals(handler: Any, *signs: signal.Signals) -> Iterator[None]:
    try:
        before = {sign: signal.signal(sign, handler) for sign in signs}
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        for sign, previous in before.items():
            signal.signal(sign, previous)


def free_ports(number: int) -> list[int]:
    """Return loopback ports that are not in use."""
    sockets = [socket.socket() for _ in range(number)]
    try:
        for s in sockets:
            s.bind((LOOPBACK, 0))
        return [int(s.getsockname()[1]) for s in sockets]
    finally:
        for s in sockets:
            s.close()


def is_listening(port: int) -> bool:
    """Return whether a process listens on a loopback port."""
    with socket.socket() as s:
        s.settimeout(0.5)
        return s.connect_ex((LOOPBACK, port)) == 0


def _descendants(roots: Sequence[int]) -> list[int]:
    """Return the children of these processes, their children, and so on, where /proc lists them."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            children.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    descendants: list[int] = []
    pending = list(roots)
    while pending:
        direct = children.get(pending.pop(), [])
        descendants += direct
        pending += direct
    return descendants


def started_in(folder: Path) -> list[int]:
    """Return all processes that a federation in this folder has started, and theirs, where /proc lists them.

    They are known by their environment, which they inherit (see :func:`environment`).
    """
    mark = f"FLWR_HOME={folder.resolve()}{os.sep}".encode()
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if any(word.startswith(mark) for word in path.read_bytes().split(b"\0")):
                found.append(int(path.parent.name))
    return [process for process in found if process != os.getpid() and _exists(process)]


def end_leftovers(folder: Path) -> int:
    """End what a federation in this folder started and, because it was killed, did not end; return how many they were.

    Nobody else may be using the folder.
    """
    left = started_in(folder)
    for sign, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
        for process in filter(_exists, left):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, sign)
        deadline = time.monotonic() + patience
        while any(map(_exists, left)) and time.monotonic() < deadline:
            time.sleep(0.05)
    return len(left)


def _exists(process: int) -> bool:
    """Return whether a process is alive; a zombie is not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def _group_exists(process: subprocess.Popen[bytes]) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
