"""Small matrix products as sums of products, which a compiler turns into faster code than a call of a library.

Measured on a CPU with ten clients: 18 microseconds instead of 35 for [10, 784] x [784, 10], 14 instead of 21 for
[10, 10] x [10, 784]. Larger products are faster as calls.
"""

from __future__ import annotations

import torch
from torch import fx

from fedstrata.problems.graphs.nodes import layout_of

_ATEN = torch.ops.aten
_FEW = 16
_LARGEST = 1 << 13
"""How many numbers a product with few terms in each sum may have; those measured had up to 7,840."""


def unfold_small_products(graph: fx.GraphModule) -> None:
    """Replace batched products with few columns, or with few terms in each sum."""
    for node in list(graph.graph.nodes):
        if node.target is not _ATEN.bmm.default:
            continue
        left, right = map(layout_of, node.args)
        if left is None or right is None or left.device.type != "cpu":
            continue
        if not _is_small(left.shape[1], left.shape[2], right.shape[2]):
            continue
        with graph.graph.inserting_before(node):
            rows = graph.graph.call_function(_ATEN.unsqueeze.default, (node.args[0], 2))  # [C, M, 1, K]
            turned = graph.graph.call_function(_ATEN.transpose.int, (node.args[1], 1, 2))
            columns = graph.graph.call_function(_ATEN.unsqueeze.default, (turned, 1))  # [C, 1, N, K]
            terms = graph.graph.call_function(_ATEN.mul.Tensor, (rows, columns))
            total = graph.graph.call_function(_ATEN.sum.dim_IntList, (terms, [3]))
        total.meta["layout"] = node.meta["layout"]
        node.replace_all_uses_with(total)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _is_small(rows: int, terms: int, columns: int) -> bool:
    """Whether a product [rows, terms] x [terms, columns] is faster as a sum of products."""
    short = terms <= _FEW and rows * columns <= _LARGEST
    return short or (min(rows, columns) <= _FEW and terms >= 4 * _FEW)
