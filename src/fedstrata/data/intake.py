"""Arrays, torch data sets and .npz files from a user, checked and turned into tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstrata.core.errors import InputError, invalid
from fedstrata.core.files import writing
from fedstrata.data import formats
from fedstrata.data.batch import Arrays

WANTED = "a pair (inputs, targets), or several inputs and the targets: (inputs, mask, targets)"


def checked(arrays: Any, what: str, like: Arrays | None = None, whose: str = "client 0", classes: int = 0) -> Arrays:
    """Return inputs and targets as checked tensors.

    arrays:  ``(inputs, targets)``, or several inputs and the targets: anything that torch turns into tensors.
    what:    what they are, for error messages.
    like:    arrays with the shapes that they must have; error messages call it ``whose``.
    classes: the number of classes, if the user has declared that targets are classes.
    """
    names = array_names(len(several(arrays, what)))
    if like is not None and len(like) != len(names):
        raise invalid(f"number of arrays of {what}", len(names), f"{len(like)}, as for {whose}")
    tensors = [_tensor(a, f"{name} of {what}", name != "targets") for name, a in zip(names, arrays, strict=True)]
    for name, array in zip(names[1:], tensors[1:], strict=True):
        if len(array) != len(tensors[0]):
            raise invalid(f"number of {name} of {what}", len(array), f"{len(tensors[0])}, as many as inputs")
    for name, array, other in zip(names, tensors, like or [None] * len(names), strict=True):
        if array.is_floating_point() and not bool(torch.isfinite(array).all()):
            raise InputError(f"The {name} of {what} contain NaN or infinity.")
        if other is not None and len(array) and array.shape[1:] != other.shape[1:]:
            one = {"inputs": "an input", "targets": "a target"}.get(name, f"a row of {name}")
            wants = f"{tuple(other.shape[1:])}, as for {whose}"
            raise invalid(f"shape of {one} of {what}", tuple(array.shape[1:]), wants)
    return (*tensors[:-1], _class_numbers(tensors[-1], classes, what))


def array_names(count: int, inputs: str = "inputs", targets: str = "targets") -> list[str]:
    """Return the names of the arrays of a sample, in messages and files: inputs, inputs_1, inputs_2, ..., targets."""
    return [inputs, *(f"{inputs}_{i}" for i in range(1, count - 1)), targets]


def together(clients: Sequence[Any], classes: int) -> tuple[Arrays, list[np.ndarray]] | None:
    """Return the samples of all clients, and the row numbers of each, if all are tensors of one form without a fault.

    They are checked together, which takes a twentieth of the time; :func:`checked` names a client that is wrong.
    """
    forms = set()
    for arrays in clients:
        if type(arrays) is not tuple or len(arrays) < 2 or not all(type(a) is torch.Tensor for a in arrays):
            return None
        rows = {len(a) if a.dim() else 0 for a in arrays}
        forms.add((len(rows) == 1 and 0 not in rows, *[(a.shape[1:], a.dtype) for a in arrays]))
    if len(forms) != 1 or not forms.pop()[0]:
        return None
    every, owned = joined(clients)
    try:
        return checked(every, "the clients", classes=classes), owned
    except InputError:
        return None


def several(arrays: Any, what: str) -> Sequence[Any]:
    """Return the arrays of some samples, still unchecked; raise unless they are at least inputs and targets."""
    if not isinstance(arrays, tuple | list) or len(arrays) < 2:
        raise invalid("data", _described(arrays), WANTED, what)
    return arrays


def joined(clients: Sequence[Arrays]) -> tuple[Arrays, list[np.ndarray]]:
    """Return the rows of all clients together, and the row numbers of each."""
    sizes = [len(arrays[0]) for arrays in clients]
    ends = np.cumsum(sizes)
    owned = [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    filled = [arrays for arrays, size in zip(clients, sizes, strict=True) if size] or clients[:1]
    return tuple(torch.cat(column) for column in zip(*filled, strict=True)), owned


def stacked(dataset: Any, what: str) -> Arrays:
    """Return the samples of a map-style torch data set, ``(input, target)`` or ``(input, ..., target)``, as tensors."""
    if hasattr(dataset, "__len__") and len(dataset) == 0:
        raise InputError(f"The data set of {what} is empty.")
    try:
        samples = [dataset[i] for i in range(len(dataset))]
        for i, sample in enumerate(samples):
            if not isinstance(sample, tuple | list) or len(sample) < 2 or len(sample) != len(samples[0]):
                wants = "an (input, target) pair, or several inputs and the target, as many in every sample"
                raise invalid("sample", _described(sample), wants, f"sample {i} of the data set of {what}")
        return tuple(torch.stack([torch.as_tensor(value) for value in column]) for column in zip(*samples, strict=True))
    except InputError:
        raise
    except (TypeError, ValueError, IndexError, KeyError, RuntimeError) as error:
        raise InputError(
            f"The data set of {what} must have a length and (input, target) samples of one shape: {error}"
        ) from None


def read_parts(file: Path, *parts: str) -> dict[str, tuple[np.ndarray, ...]]:
    """Return the inputs and targets in an .npz file by part: "train", and each of ``parts`` that the file has.

    Those of "train" are named ``inputs`` and ``targets`` (or ``x`` and ``y``), those of a part "test"
    ``test_inputs`` and ``test_targets``; further inputs are ``inputs_1``, ``inputs_2`` and so on, in this order. They
    are not checked yet: see :func:`checked`.
    """
    arrays = formats.npz(file)
    present = [part for part in parts if any(name.startswith(f"{part}_") for name in arrays)]
    return {"train": _named(arrays, file), **{part: _named(arrays, file, f"{part}_") for part in present}}


def _named(arrays: Mapping[str, np.ndarray], path: Path, prefix: str = "") -> tuple[np.ndarray, ...]:
    inputs, targets = (
        next((n for n in (prefix + long, prefix + short) if n in arrays), "")
        for long, short in (("inputs", "x"), ("targets", "y"))
    )
    if not inputs or not targets:
        wants = f"{prefix}inputs and {prefix}targets (or {prefix}x and {prefix}y)"
        raise InputError(f"The file {path} must hold {wants}. It holds: {', '.join(arrays)}.")
    further = [name for name in arrays if name.startswith(f"{inputs}_")]
    names = array_names(2 + len(further), inputs, targets)
    for name in further:
        if name not in names:
            wants = " and ".join(names[1:-1])
            raise InputError(f"Further inputs in the file {path} must be named {wants}. It holds: {', '.join(arrays)}.")
    return tuple(arrays[name] for name in names)


def write(file: Path, arrays: Arrays) -> None:
    """Write inputs and targets to an .npz file, as :func:`read_parts` reads them."""
    named: dict[str, Any] = {n: a.cpu().numpy() for n, a in zip(array_names(len(arrays)), arrays, strict=True)}
    with writing(file) as stream:
        np.savez(stream, **named)


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


def _tensor(array: Any, what: str, keep_bool: bool) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"The {what} must be numbers in an array: {error}") from None
    if tensor.dim() == 0:
        raise invalid(what, tensor.item(), "an array with one row per sample")
    if tensor.is_complex():
        raise InputError(f"The {what} must be real numbers. Got {tensor.dtype}.")
    if tensor.dtype == torch.bool and keep_bool:
        return tensor
    if tensor.dtype in (torch.bool, torch.int8, torch.uint16, torch.uint32, torch.uint64):
        return tensor.long()
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
