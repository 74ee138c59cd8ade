"""What a run asks of the machine: threads, and memory that stays."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


@contextmanager
def prepared(threads: int | None) -> Iterator[None]:
    """Run with so many torch threads (None leaves them alone), and with memory that is kept between steps."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    keep_memory()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_memory() -> None:
    """Ask the C library not to give freed memory back to the system after every step.

    Fetching it again costs page faults, up to a tenth of a small model's step. Does nothing where the C library is not
    glibc. The process then keeps its peak memory until it ends.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_TRIM_THRESHOLD, 1 << 30)
    mallopt(_MMAP_THRESHOLD, 32 << 20)
