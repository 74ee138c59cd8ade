"""The process in which a node works: kept warm between messages, and replaced when it dies.

The node's own process talks to the server and never runs an algorithm, so it survives whatever the work does: a crash
of a native library, a lack of memory, a call of exit. The worker reads its node's data and keeps what it needs of a run
between messages. It ends when the node's process ends, however that happens: the pipe between them is then closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fedstrata.core.errors import FedstrataError
from fedstrata.federation.packet import Packet

IDLE = 900.0
"""Seconds after which a worker without work forgets the runs that it knows, and with them the node's data."""

LOOK = 1.0
"""Seconds between two looks at whether a worker that does not answer is alive."""

Settings = Mapping[str, str]


class Died(FedstrataError):
    """The worker ended, or had to be ended, before it had answered."""


class Failed(FedstrataError):
    """The worker could not answer, and goes on."""


class Worker:
    """The worker of a node with these settings: data, key, state, import, pool, minimum."""

    def __init__(self, settings: Settings) -> None:
        self._settings = dict(settings)
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    @property
    def number(self) -> int | None:
        """The number of the process, if there is one."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process, unless it is running; it loads PyTorch meanwhile."""
        if self._process is not None and self._process.poll() is None:
            return
        self.end()
        try:
            ours, theirs = socket.socketpair()
            handle = theirs.fileno()
            words = [sys.executable, "-m", "fedstrata.federation.node.worker", str(handle)]
            with theirs:
                self._pipe = Connection(ours.detach())
                self._process = subprocess.Popen(words, pass_fds=[handle], stdin=subprocess.DEVNULL)
            _send(self._pipe, json.dumps(self._settings).encode())
        except OSError as error:
            raise Died(f"The process that does the work cannot be started: {error.strerror or error}.") from None

    def ask(self, packet: Packet, experiment: str, seconds: float) -> Packet:
        """Return the answer to a message; end the worker if it takes longer than this."""
        try:
            self.start()
            assert self._pipe is not None
            deadline = time.monotonic() + seconds
            _send(self._pipe, packet.text.encode(), packet.body, experiment.encode())
            while not self._pipe.poll(LOOK):
                if time.monotonic() > deadline:
                    self.end()
                    raise Died("The work took longer than the server waits, and was ended.")
            failure, text, signature, body = _receive(self._pipe, 4)
        except (EOFError, OSError):
            raise Died(f"The process that did the work {self._ending()}.") from None
        if failure:
            raise Failed(failure.decode())
        return Packet(text.decode(), signature, body)

    def end(self) -> None:
        """End the process. What it was writing is either whole or not there."""
        process, self._process = self._process, None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if process is not None:
            with contextlib.suppress(OSError):
                process.kill()
            process.wait()

    def _ending(self) -> str:
        """Return how the process ended, and forget it."""
        code = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(LOOK)
        self.end()
        if code is None:
            return "stopped answering"
        if code >= 0:
            return f"ended by itself, with code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"was ended by {name}" + (" (the machine may be out of memory)" if name == "SIGKILL" else "")


def _send(pipe: Connection, *parts: bytes) -> None:
    for part in parts:
        pipe.send_bytes(part)


def _receive(pipe: Connection, number: int) -> list[bytes]:
    return [pipe.recv_bytes() for _ in range(number)]


# --- in the worker ----------------------------------------------------------------------------------------------------


def main(handle: int) -> None:
    """Answer the messages that come through a pipe, until it is closed."""
    for sign in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sign, signal.SIG_IGN)  # the node's process decides when to end
    with contextlib.suppress(OSError):  # if memory runs out, this process is to end, not the node's
        Path("/proc/self/oom_score_adj").write_text("500")
    pipe = Connection(handle)
    try:
        (settings,) = _receive(pipe, 1)
    except (EOFError, OSError):
        return
    messages: queue.Queue[list[bytes]] = queue.Queue()
    threading.Thread(target=_read, args=(pipe, messages), daemon=True).start()
    from fedstrata.federation.node.answer import Answers

    answers = Answers(json.loads(settings))
    while True:
        try:
            text, body, experiment = messages.get(timeout=IDLE)
        except queue.Empty:
            answers.forget()
            continue
        parts = _answered(answers, Packet(text.decode(), b"", body), experiment.decode())
        with contextlib.suppress(OSError):  # the node's process has gone
            _send(pipe, *parts)


def _read(pipe: Connection, messages: queue.Queue[list[bytes]]) -> None:
    """Read messages; end this process at once when the node's has gone, even in the middle of work."""
    try:
        while True:
            messages.put(_receive(pipe, 3))
    except (EOFError, OSError):
        os._exit(0)


def _answered(answers: Any, packet: Packet, experiment: str) -> tuple[bytes, bytes, bytes, bytes]:
    try:
        answer = answers.answer(packet, experiment)
    except Exception as error:
        traceback.print_exc()  # to the node's log
        words = str(error) if isinstance(error, FedstrataError) else type(error).__name__
        return (words or type(error).__name__).encode(), b"", b"", b""
    return b"", answer.text.encode(), answer.signature, answer.body


if __name__ == "__main__":
    main(int(sys.argv[1]))
