"""Whether this process was started by ``torchrun``; read from the environment, without importing PyTorch."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

_PARENT_DEATH_SIGNAL = 1
"""The option of Linux's ``prctl`` for the signal that a process gets when its parent ends."""


def launched() -> bool:
    """Whether ``torchrun`` started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE") or 1) > 1 and "RANK" in os.environ


def restarted() -> bool:
    """Whether ``torchrun`` restarted this process after a rank died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def local_rank() -> int:
    """Return the number of this process among those on the same machine; 0 without ``torchrun``."""
    return int(os.environ.get("LOCAL_RANK") or 0) if launched() else 0


def end_with_launcher() -> None:
    """Let the system end this process when ``torchrun`` is gone, even if it was killed: no rank trains on alone.

    Only Linux can do that.
    """
    if launched() and sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)
