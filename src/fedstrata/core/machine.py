"""The machine's memory, the number of threads, and whether the C library keeps freed memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def physical_memory() -> int | None:
    """Return the bytes of this machine's memory; None if the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


@contextmanager
def prepared(threads: int | None) -> Iterator[None]:
    """Run the block with this many torch threads (None: unchanged), and keep freed memory between steps."""
    previous = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    keep_memory()
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def keep_memory() -> None:
    """Make the C library keep freed memory instead of returning it to the system after every step.

    Requesting it again costs page faults, up to a tenth of a small model's step; in return, the process holds its peak
    memory until it ends. No effect unless the C library is glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_TRIM_THRESHOLD, 1 << 30)
    mallopt(_MMAP_THRESHOLD, 32 << 20)
