"""The loop of a node: ask the server for a message, let the worker answer it, send the answer."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from flwr.app import Message

from fedstrata.federation.node.connection import Connection, Denied, RunOver, Unreachable, Unreadable
from fedstrata.federation.node.worker import Died, Failed, Settings, Worker
from fedstrata.federation.packet import Packet

R = TypeVar("R")

OFTEN, SELDOM, SHARE = 0.1, 3.0, 0.01
"""Seconds between two requests for a message, at least and at most; between them a share of the time without one.

So while a run is active a message waits for a tenth of a second at most, and an idle node asks as often as a stock one.
"""

LOAD = 5.0
"""A node waits at least so many times as long as a request took: a busy server is asked less often."""

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 5.0
"""Seconds between two attempts to reach a server that does not answer, or refuses the node; each pause doubles."""

RUNS = 4
"""A node remembers the experiments of so many runs."""


class Loop:
    """A node: its connection and its worker.

    say: writes a line to the node's log.
    """

    def __init__(self, connection: Connection, worker: Worker, say: Callable[[str], None]) -> None:
        self._connection, self._worker, self._say = connection, worker, say
        self._experiments: dict[int, str] = {}
        self._busy = time.monotonic()

    def run(self) -> None:
        """Answer messages until an exception ends this, such as a KeyboardInterrupt."""
        try:
            self._worker.start()
            number = self._insist(self._connection.open)
            self._say(f"Connected to the server, as node {number}. Waiting for work.")
            while True:
                began = time.monotonic()
                message = self._insist(self._next)
                took = time.monotonic() - began
                if message is None:
                    time.sleep(self._pause(took))
                else:
                    self._handle(message)
                    self._busy = time.monotonic()
        finally:
            self._worker.end()
            self._connection.close()

    def _next(self) -> Message | None:
        """Return the next message, if there is one; report to a server that does not know this node any more."""
        try:
            return self._connection.receive()
        except Denied:
            self._connection.open()
            return None

    def _pause(self, took: float) -> float:
        """Return how long to wait before the next request, if the last one took so long and brought nothing."""
        idle = time.monotonic() - self._busy
        return max(min(max(OFTEN, SHARE * idle), SELDOM), min(LOAD * took, SELDOM))

    def _handle(self, message: Message) -> None:
        """Answer a message, or tell the server why there is no answer."""
        began = time.monotonic()
        deadline = began + message.metadata.ttl
        try:
            packet, reason = self._answer(message, deadline)
            seconds = time.monotonic() - began
            if packet is not None:
                self._insist(lambda: self._connection.send(message, packet, seconds), deadline)
            else:
                self._say(f"Run {message.metadata.run_id}: {reason}")
                self._insist(lambda: self._connection.fail(message, reason, seconds), deadline)
        except RunOver:
            self._say(f"Run {message.metadata.run_id} has ended; its last message needs no answer.")
        except (Denied, Unreachable) as error:
            self._say(f"Run {message.metadata.run_id}: no answer could be sent: {error}.")

    def _answer(self, message: Message, deadline: float) -> tuple[Packet | None, str]:
        """Return the answer, or None and why there is none."""
        try:
            experiment = self._experiment(message.metadata.run_id, deadline)
            packet = self._insist(lambda: self._connection.content(message), deadline)
            return self._worker.ask(packet, experiment, deadline - time.monotonic()), ""
        except (Unreadable, Failed) as error:
            return None, str(error)
        except Died as error:
            with suppress(Died):
                self._worker.start()  # so that the next message finds it warm
            return None, str(error)

    def _experiment(self, run: int, deadline: float) -> str:
        """Return the experiment of a run, which the server is asked for once."""
        if run not in self._experiments:
            self._experiments[run] = self._insist(lambda: self._connection.experiment(run), deadline)
            self._say(f"Run {run} asks this node for the first time.")
            for old in list(self._experiments)[:-RUNS]:
                del self._experiments[old]
        return self._experiments[run]

    def _insist(self, request: Callable[[], R], deadline: float | None = None) -> R:
        """Repeat a request until the server can be reached; with a deadline, no longer than that.

        Without a deadline, repeat it also until the server accepts the node.
        """
        pause, began, said = FIRST_PAUSE, time.monotonic(), ""
        while True:
            try:
                result = request()
            except (Unreachable, Denied) as error:
                refused = isinstance(error, Denied)
                if deadline is not None and (refused or time.monotonic() + pause > deadline):
                    raise
                text = f"The server {'refuses this node' if refused else 'cannot be reached'}: {error}."
                if text != said:
                    self._say(f"{text} Trying again until it {'accepts it' if refused else 'answers'}.")
                    said = text
                time.sleep(pause * random.uniform(0.8, 1.2))  # not all nodes at once
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                if said:
                    self._say(f"The server answers again, after {time.monotonic() - began:.0f} s.")
                    self._connection.beat()
                return result


def run_node(settings: Settings, server: str, ca: Path, say: Callable[[str], None]) -> None:
    """Connect to the server, and answer its messages until this process is ended."""
    Loop(Connection(server, ca, Path(settings["key"])), Worker(settings), say).run()
