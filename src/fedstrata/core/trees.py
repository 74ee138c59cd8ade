"""Nested tuples of tensors: the messages and answers of exchanges.

The same as the functions of ``torch.utils._pytree``, but many times as fast for a single tensor and for a plain tuple
of tensors and numbers, which most messages and answers are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import NoneType
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._pytree import TreeSpec

__all__ = ["TreeSpec", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]


@lru_cache(maxsize=64)
def _spec(length: int | None) -> TreeSpec:
    """Return the form of a tuple of this many tensors; with None, of a tensor."""
    return _pytree.tree_structure(0 if length is None else (0,) * length)


_LEAVES = (torch.Tensor, int, float, str, NoneType)


def _is_plain(tree: Any) -> bool:
    """Whether this is a tuple, but no NamedTuple, of tensors and numbers."""
    return type(tree) is tuple and all(isinstance(part, _LEAVES) for part in tree)


def tree_flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Return the leaves, and the form they were nested in."""
    if isinstance(tree, torch.Tensor):
        return [tree], _spec(None)
    return (list(tree), _spec(len(tree))) if _is_plain(tree) else _pytree.tree_flatten(tree)


def tree_unflatten(leaves: list[Any], spec: TreeSpec) -> Any:
    """Return the leaves, nested as they were."""
    if spec is _spec(None) and len(leaves) == 1:
        return leaves[0]
    return tuple(leaves) if spec is _spec(len(leaves)) else _pytree.tree_unflatten(leaves, spec)


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return list(tree) if _is_plain(tree) else _pytree.tree_leaves(tree)


def tree_map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Return the results of a function of each leaf, and of those at the same place in other trees."""
    if isinstance(tree, torch.Tensor) and not others:
        return function(tree)
    return tuple(map(function, tree)) if _is_plain(tree) and not others else _pytree.tree_map(function, tree, *others)
