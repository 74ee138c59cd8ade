"""Operations that the data sets share: registering a set, building the ``Dataset``, splitting and scaling."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

from fedstrata.core.named import registered
from fedstrata.core.registry import YOUR_OWN, Registry
from fedstrata.data import cells
from fedstrata.data.dataset import Dataset

SETS: Registry[Callable[..., Dataset]] = Registry("data set", hint=YOUR_OWN)
"""Every data set by its name in a configuration file."""

Load = TypeVar("Load", bound=Callable[..., Dataset])

TEST_SHARE = 0.2
SPLIT_SEED = 0


def data_set(load: Load) -> Load:
    """Check the options of a function that loads a data set, and register it.

    Its docstring ends with a paragraph on the source. If it reads files, their directory is explained before that.
    """
    if "data_dir" in inspect.signature(load).parameters:
        text, _, source = inspect.cleandoc(load.__doc__ or "").rpartition("\n\n")
        files = "For ``data_dir`` and ``progress`` see :func:`fedstrata.data.load`."
        load.__doc__ = f"{text}\n\n{files}\n\n{source}"
    return registered(SETS)(load)


def build(
    name: str,
    inputs: np.ndarray,
    targets: np.ndarray,
    test_inputs: np.ndarray,
    test_targets: np.ndarray,
    classes: int,
    keys: np.ndarray | None = None,
) -> Dataset:
    """Build a data set with classes from NumPy arrays."""

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array))

    labels, test_labels = (tensor(array.astype(np.int64)) for array in (targets, test_targets))
    return Dataset(name, tensor(inputs), labels, tensor(test_inputs), test_labels, classes, keys)


def split(targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the training and test rows of a fixed stratified 80/20 split, both in increasing order."""
    # RandomState, unlike default_rng, promises the same stream in every version of NumPy.
    order = np.random.RandomState(SPLIT_SEED).permutation(len(targets))
    test = np.zeros(len(targets), bool)
    for target in np.unique(targets):
        rows = order[targets[order] == target]
        test[rows[: round(TEST_SHARE * len(rows))]] = True
    return np.flatnonzero(~test), np.flatnonzero(test)


def split_and_standardise(name: str, inputs: np.ndarray, targets: np.ndarray) -> Dataset:
    """Build a binary data set from one table of numbers: fixed stratified 80/20 split, standardised columns."""
    train, test = split(targets)
    scaled, test_scaled = cells.standardise(inputs[train], inputs[test])
    return build(name, scaled, targets[train], test_scaled, targets[test], 2)


def scale(images: np.ndarray, mean: float | Sequence[float], std: float | Sequence[float]) -> np.ndarray:
    """Turn bytes [n, channels, height, width] into float32 (v / 255 - mean) / std, with mean and std per channel."""
    centre, spread = (np.asarray(value, np.float32).reshape(-1, 1, 1) for value in (mean, std))
    floats = images.astype(np.float32, order="C")
    floats *= 1 / (255 * spread)
    floats -= centre / spread
    return floats
