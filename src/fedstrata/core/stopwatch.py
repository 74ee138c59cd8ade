"""A stopwatch that measures how long a kind of work took in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Adds up the seconds spent in blocks; a block inside another one counts once.

    seconds: the total so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._running = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure the block."""
        if self._running:
            yield
            return
        self._running, begun = True, time.perf_counter()
        try:
            yield
        finally:
            self._running = False
            self.seconds += time.perf_counter() - begun
