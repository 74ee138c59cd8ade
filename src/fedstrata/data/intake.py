"""What a user brings: arrays, torch data sets, .npz files; checked, and joined into one pair of tensors."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstrata.core.errors import InputError, invalid

Pair = tuple[torch.Tensor, torch.Tensor]


def pair(inputs: Any, targets: Any, what: str, like: Pair | None = None) -> Pair:
    """Return inputs and targets as tensors, checked; ``like`` is a pair whose shapes they must have."""
    x, y = _tensor(inputs, f"inputs of {what}"), _tensor(targets, f"targets of {what}")
    if len(x) != len(y):
        raise invalid(f"number of targets of {what}", len(y), f"{len(x)}, as many as inputs")
    for name, array, other in (("input", x, like and like[0]), ("target", y, like and like[1])):
        if array.is_floating_point() and not bool(torch.isfinite(array).all()):
            raise InputError(f"The {name}s of {what} hold NaN or infinity.")
        if other is not None and len(array) and array.shape[1:] != other.shape[1:]:
            wanted = f"{tuple(other.shape[1:])}, as for client 0"
            raise invalid(
                f"shape of an {name} of {what}".replace("an target", "a target"), tuple(array.shape[1:]), wanted
            )
    return x, y


def joined(pairs: Sequence[Pair]) -> tuple[Pair, list[np.ndarray]]:
    """Return all rows in one pair of tensors, and the row numbers of each."""
    sizes = [len(x) for x, _ in pairs]
    ends = np.cumsum(sizes)
    owned = [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    filled = [p for p, size in zip(pairs, sizes, strict=True) if size] or pairs[:1]
    return (torch.cat([x for x, _ in filled]), torch.cat([y for _, y in filled])), owned


def stacked(dataset: Any, what: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples of a map-style torch data set as two tensors."""
    if hasattr(dataset, "__len__") and len(dataset) == 0:
        raise InputError(f"The data set of {what} is empty.")
    try:
        samples = [dataset[i] for i in range(len(dataset))]
        inputs = torch.stack([torch.as_tensor(s[0]) for s in samples])
        return inputs, torch.stack([torch.as_tensor(s[1]) for s in samples])
    except (TypeError, ValueError, IndexError, KeyError, RuntimeError) as error:
        raise InputError(f"The data set of {what} must have a length and (input, target) samples: {error}") from None


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Read an .npz file without unpickling anything."""
    try:
        with path.open("rb") as handle:
            file = np.load(handle, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("it holds a single array")
            return {k: file[k] for k in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"The file {path} is not a readable .npz without pickled objects: {error}") from None


def named(arrays: dict[str, np.ndarray], path: Path, prefix: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs and targets of a file, by their names."""
    inputs = arrays.get(f"{prefix}inputs", arrays.get(f"{prefix}x"))
    targets = arrays.get(f"{prefix}targets", arrays.get(f"{prefix}y"))
    if inputs is None or targets is None:
        wanted = f"{prefix}inputs and {prefix}targets (or {prefix}x and {prefix}y)"
        raise InputError(f"The file {path} must hold {wanted}. It holds: {', '.join(arrays)}.")
    return inputs, targets


def _tensor(array: Any, what: str) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"The {what} must be numbers in an array: {error}") from None
    if tensor.dim() == 0:
        raise invalid(what, tensor.item(), "an array with one row per sample")
    if tensor.is_complex():
        raise InputError(f"The {what} must be real numbers. Got {tensor.dtype}.")
    if tensor.dtype in (torch.bool, torch.int8, torch.uint16, torch.uint32, torch.uint64):
        return tensor.long()
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
