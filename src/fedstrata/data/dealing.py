"""Dealing rows to clients by class: the arithmetic that partitions share."""

from __future__ import annotations

import numpy as np

from fedstrata.core.errors import InputError

UNUSED = -1
"""The owner of a row that no client gets."""


def class_of_each(targets: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the class of each row, numbered 0, 1, ... over the classes that occur, and the size of each class."""
    if not np.issubdtype(targets.dtype, np.integer):
        raise InputError(
            f"Partition {name!r} needs class numbers as targets. Got {targets.dtype}. Use partition 'iid' or 'shards', "
            "or pass classes= if the targets are class numbers."
        )
    _, labels, totals = np.unique(targets, return_inverse=True, return_counts=True)
    return labels, totals


def consecutive(classes: int, groups: int) -> np.ndarray:
    """Return the group of each class: consecutive classes, sizes that differ by at most one, larger groups first."""
    size, larger = divmod(classes, groups)
    return np.repeat(np.arange(groups), np.where(np.arange(groups) < larger, size + 1, size))


def deal_groups(member: np.ndarray, groups: int, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Deal the rows of each group at random to its clients; client i belongs to group i mod ``groups``."""
    members = np.bincount(np.arange(clients) % groups, minlength=groups)
    order = rng.permutation(len(member))
    order = order[np.argsort(member[order], kind="stable")]
    starts = np.concatenate([[0], np.cumsum(np.bincount(member, minlength=groups))])
    position = np.arange(len(member)) - starts[member[order]]
    owners = np.empty(len(member), np.int64)
    owners[order] = member[order] + groups * (position % members[member[order]])
    return owners


def deal(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Deal ``counts[i, c]`` random rows of class c to client i, for every i and c."""
    owners = np.full(len(labels), UNUSED)
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    start = 0
    for label, total in enumerate(np.bincount(labels)):
        dealt = np.repeat(np.arange(len(counts)), counts[:, label])
        owners[order[start : start + len(dealt)]] = dealt
        start += total
    return owners
