"""Whether this process was started by ``torchrun``; read from the environment, without importing PyTorch."""

from __future__ import annotations

import os


def launched() -> bool:
    """Whether ``torchrun`` started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE") or 1) > 1 and "RANK" in os.environ


def restarted() -> bool:
    """Whether ``torchrun`` restarted this process after a rank died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def local_rank() -> int:
    """Return the number of this process among those on the same machine; 0 without ``torchrun``."""
    return int(os.environ.get("LOCAL_RANK") or 0) if launched() else 0
