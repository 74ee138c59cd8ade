"""What the passes over a graph need to know of its nodes: the layout of their results, and what shares memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx


class Layout(NamedTuple):
    """The form of a tensor, without its values: ``node.meta["layout"]`` of every node that stands for one."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        """Return the layout of a tensor."""
        return Layout(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    @property
    def nbytes(self) -> int:
        """The bytes of its numbers."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether its numbers are in order and without gaps."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True

    def empty(self) -> torch.Tensor:
        """Return a tensor of this layout, with any values."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def layout_of(node: Any) -> Layout | None:
    """Return the layout of the tensor that a node stands for."""
    return node.meta.get("layout") if isinstance(node, fx.Node) else None


def mutates(node: fx.Node) -> bool:
    """Whether a node is an operator that changes a tensor in place."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)


def may_alias(node: fx.Node) -> bool:
    """Whether the result of a node may share memory with its arguments."""
    schema = getattr(node.target, "_schema", None)
    declared = schema is None or any(r.alias_info is not None for r in schema.returns)
    return declared or node.meta.get("views", False)


def returned_with_ancestors(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that are returned, and those that they may be views of."""
    reached: set[fx.Node] = set()
    waiting = list(graph.output_node().all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            if node.op == "call_function" and may_alias(node):
                waiting.extend(node.all_input_nodes)
    return reached
