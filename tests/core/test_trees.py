"""Trees: the fast paths give what PyTorch's functions give."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch.utils import _pytree

from fedstrata.core import trees


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


a, b = torch.ones(2), torch.zeros(3)


@pytest.mark.parametrize(
    "tree", [a, (a,), (a, b), (a, 0.5, None, "text"), (), [a, b], Pair(a, b), (a, (b, a)), {"x": a}]
)
def test_trees_are_those_of_pytorch(tree: object) -> None:
    leaves, spec = trees.tree_flatten(tree)
    theirs, their_spec = _pytree.tree_flatten(tree)
    assert all(map(lambda x, y: x is y, leaves, theirs)) and len(leaves) == len(theirs) and spec == their_spec
    assert all(map(lambda x, y: x is y, trees.tree_leaves(tree), theirs))
    again = trees.tree_unflatten(leaves, spec)
    assert type(again) is type(tree) and trees.tree_flatten(again)[1] == spec
    types = trees.tree_leaves(trees.tree_map(lambda leaf: str(type(leaf)), tree))
    assert types == [str(type(leaf)) for leaf in theirs]
    assert type(trees.tree_map(str, tree)) is type(_pytree.tree_map(str, tree))


def test_several_trees_are_mapped_together() -> None:
    total, pair = trees.tree_map(torch.add, (a, (b, b)), (a, (b, b)))
    assert torch.equal(total, 2 * a) and len(pair) == 2
