"""Arrays, torch data sets and .npz files from a user, checked and turned into tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstrata.core.errors import InputError, invalid
from fedstrata.data import formats

Pair = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets, one row per sample."""


def pair(arrays: Any, what: str, like: Pair | None = None, whose: str = "client 0", classes: int = 0) -> Pair:
    """Return inputs and targets as checked tensors.

    arrays:  ``(inputs, targets)``, anything that torch turns into tensors.
    what:    what they are, for error messages.
    like:    a pair with the shapes that they must have; error messages call it ``whose``.
    classes: the number of classes, if the user has declared that targets are classes.
    """
    inputs, targets = two_arrays(arrays, what)
    x, y = _tensor(inputs, f"inputs of {what}"), _tensor(targets, f"targets of {what}")
    if len(x) != len(y):
        raise invalid(f"number of targets of {what}", len(y), f"{len(x)}, as many as inputs")
    for name, array, other in (("an input", x, like and like[0]), ("a target", y, like and like[1])):
        if array.is_floating_point() and not bool(torch.isfinite(array).all()):
            raise InputError(f"The {name.split()[1]}s of {what} contain NaN or infinity.")
        if other is not None and len(array) and array.shape[1:] != other.shape[1:]:
            wants = f"{tuple(other.shape[1:])}, as for {whose}"
            raise invalid(f"shape of {name} of {what}", tuple(array.shape[1:]), wants)
    return x, _class_numbers(y, classes, what)


def together(clients: Sequence[Any], classes: int) -> tuple[Pair, list[np.ndarray]] | None:
    """Return the samples of all clients, and the row numbers of each, if all are tensors of one form without a fault.

    They are checked together, which takes a twentieth of the time; :func:`pair` names a client that is wrong.
    """
    forms = set()
    for arrays in clients:
        if type(arrays) is not tuple or len(arrays) != 2 or not all(type(a) is torch.Tensor for a in arrays):
            return None
        x, y = arrays
        forms.add((x.dim() and y.dim() and len(x) == len(y) > 0, x.shape[1:], y.shape[1:], x.dtype, y.dtype))
    if len(forms) != 1 or not forms.pop()[0]:
        return None
    every, owned = joined(clients)
    try:
        return pair(every, "the clients", classes=classes), owned
    except InputError:
        return None


def two_arrays(arrays: Any, what: str) -> tuple[Any, Any]:
    """Return the inputs and targets in a pair, still unchecked."""
    if not isinstance(arrays, tuple | list) or len(arrays) != 2:
        raise invalid("data", _described(arrays), "a pair (inputs, targets)", what)
    return arrays[0], arrays[1]


def joined(pairs: Sequence[Pair]) -> tuple[Pair, list[np.ndarray]]:
    """Return all rows as one pair, and the row numbers of each pair in it."""
    sizes = [len(x) for x, _ in pairs]
    ends = np.cumsum(sizes)
    owned = [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    filled = [p for p, size in zip(pairs, sizes, strict=True) if size] or pairs[:1]
    return (torch.cat([x for x, _ in filled]), torch.cat([y for _, y in filled])), owned


def stacked(dataset: Any, what: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``(input, target)`` samples of a map-style torch data set as two tensors."""
    if hasattr(dataset, "__len__") and len(dataset) == 0:
        raise InputError(f"The data set of {what} is empty.")
    try:
        samples = [dataset[i] for i in range(len(dataset))]
        for i, sample in enumerate(samples):
            if isinstance(sample, Mapping) or len(sample) != 2:
                wants = "an (input, target) pair: wrap the data set so that it returns only these"
                raise invalid("sample", _described(sample), wants, f"sample {i} of the data set of {what}")
        inputs = torch.stack([torch.as_tensor(s[0]) for s in samples])
        return inputs, torch.stack([torch.as_tensor(s[1]) for s in samples])
    except InputError:
        raise
    except (TypeError, ValueError, IndexError, KeyError, RuntimeError) as error:
        raise InputError(
            f"The data set of {what} must have a length and (input, target) samples of one shape: {error}"
        ) from None


def read_parts(file: Path, *parts: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the inputs and targets in an .npz file by part: "train", and each of ``parts`` that the file has.

    Those of "train" are named ``inputs`` and ``targets`` (or ``x`` and ``y``), those of a part "test"
    ``test_inputs`` and ``test_targets``. They are not checked yet: see :func:`pair`.
    """
    arrays = formats.npz(file)
    present = [part for part in parts if any(name.startswith(f"{part}_") for name in arrays)]
    return {"train": _named(arrays, file), **{part: _named(arrays, file, f"{part}_") for part in present}}


def _named(arrays: Mapping[str, np.ndarray], path: Path, prefix: str = "") -> tuple[np.ndarray, np.ndarray]:
    inputs = arrays.get(f"{prefix}inputs", arrays.get(f"{prefix}x"))
    targets = arrays.get(f"{prefix}targets", arrays.get(f"{prefix}y"))
    if inputs is None or targets is None:
        wants = f"{prefix}inputs and {prefix}targets (or {prefix}x and {prefix}y)"
        raise InputError(f"The file {path} must hold {wants}. It holds: {', '.join(arrays)}.")
    return inputs, targets


def are_labels(targets: torch.Tensor) -> bool:
    """Whether targets are class numbers: one integer per row, or one float that is 0 or 1.

    Binary labels are often floats: in CSV files, and because torch's binary losses take floats. Other floats are
    regression targets, even whole numbers (a count, an age), unless the user passes ``classes=``.
    """
    if targets.dim() != 1:
        return False
    return not targets.is_floating_point() or bool(((targets == 0) | (targets == 1)).all())


def count_classes(*targets: torch.Tensor, partial: bool = False) -> int:
    """Return the number of classes, the highest label plus 1; 0 if the targets are not class numbers.

    Floats that are all 0, or all 1, are not classes, unless the data are only ``partial``, such as those of one node.
    """
    filled = [t for t in targets if len(t)]
    if not filled or not all(map(are_labels, filled)):
        return 0
    low, high = min(int(t.min()) for t in filled), max(int(t.max()) for t in filled)
    constant = low == high and any(t.is_floating_point() for t in filled)
    return 0 if constant and not partial else high + 1


def check_classes(classes: int | None, whose: str) -> int:
    """Return the number of classes that the user has declared for some data; 0 if there is none."""
    if classes is None:
        return 0
    if isinstance(classes, bool) or not isinstance(classes, int | np.integer) or classes < 0:
        raise invalid(f"classes of {whose}", classes, "a whole number of at least 0, where 0 means regression")
    return int(classes)


def _described(value: object) -> str:
    """Describe a value that is not a pair, for an error message."""
    if isinstance(value, tuple | list | Mapping):
        return f"{type(value).__name__} of {len(value)} entries"
    return type(value).__name__


def _class_numbers(targets: torch.Tensor, classes: int, what: str) -> torch.Tensor:
    """Check targets that the user has declared to be class numbers; with more than two classes, make them integers."""
    if not classes or targets.dim() != 1:
        return targets
    if bool((targets != targets.round()).any() | (targets < 0).any() | (targets >= classes).any()):
        got = f"{targets.dtype} from {targets.min().item():g} to {targets.max().item():g}"
        raise invalid(f"targets of {what}", got, f"whole numbers from 0 to {classes - 1}, because classes={classes}")
    return targets.long() if classes > 2 and targets.is_floating_point() else targets


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
