"""A message as bytes: the text of its header, a signature, and all arrays as one safetensors file.

A node's connection passes packets on without looking into them, so nothing here needs PyTorch or Flower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from safetensors.numpy import load, save


@dataclass(frozen=True)
class Packet:
    """The text of a header, the signature of the sender (empty from the server), and the bytes of the arrays."""

    text: str
    signature: bytes = b""
    body: bytes = b""


def to_bytes(arrays: Sequence[np.ndarray]) -> bytes:
    """Return arrays as one safetensors file; no bytes if there are none."""
    if not arrays:
        return b""
    return save({f"{number:06d}": np.asarray(array, order="C") for number, array in enumerate(arrays)})


def from_bytes(body: bytes) -> tuple[np.ndarray, ...]:
    """Return the arrays of a safetensors file; raise if it is anything else.

    Together they have fewer bytes than the file, which is read without running anything in it.
    """
    arrays: dict[str, np.ndarray] = load(body) if body else {}
    if sorted(arrays) != [f"{number:06d}" for number in range(len(arrays))]:
        raise ValueError("the arrays of a message must be numbered")
    return tuple(arrays[name] for name in sorted(arrays))
