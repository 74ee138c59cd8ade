"""A gradient step in place, x <- keep * x - rate * gradient, without forming the gradient of a dense layer.

The gradient of a dense layer is a matrix product, which can be added to the layer's part of x as it is computed. The
other parts of a gradient are subtracted from theirs. So the flat gradient is never put together.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import fx

from fedstrata.problems.graphs.compiler import Compiler
from fedstrata.problems.graphs.nodes import mutates, returned_with_ancestors
from fedstrata.problems.graphs.simplify import simplify
from fedstrata.problems.graphs.trace import REFUSALS, changed, close, record, speed_up
from fedstrata.problems.graphs.writes import Piece, pieces_of

Step = Callable[..., None]
"""``step(rate, keep, x, *others)``: moves x in place."""

_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mm.default, _ATEN.bmm.default}


class _Part(NamedTuple):
    """A part of x; ``shape`` is that of the product to add to it, None to subtract a tensor of the same form."""

    start: int
    size: int
    shape: torch.Size | None


def trace_descent(
    gradient: Callable[..., Any], *tensors: torch.Tensor, compiler: Compiler | None = None
) -> Step | None:
    """Return the step along ``gradient(x, *others)``, a tuple of one, for tensors of these shapes.

    Returns None if the gradient cannot be traced, or may share memory with x.
    """
    try:
        graph = record(gradient, *tensors)
        simplify(graph)
        parts = _split(graph)
        if compiler is None:
            speed_up(graph, tensors)
    except REFUSALS:
        return None
    step = _step(graph.forward if compiler is None else compiler(graph, tensors), parts)
    return step if _agrees(step, gradient, tensors) else None


def _split(graph: fx.GraphModule) -> list[_Part]:
    """Let a graph return the operands of each part of x instead of the gradient; return the parts."""
    output, x = graph.graph.output_node(), next(iter(graph.graph.nodes))
    if any(map(mutates, graph.graph.nodes)):
        raise ValueError("the function changes tensors in place")
    gradient = output.args[0][0]  # type: ignore[index]
    parts, operands = [], []
    for is_product, run in groupby(_pieces(gradient), key=lambda piece: piece.product is not None):
        pieces = [piece for piece in run if piece.size]
        if is_product:
            parts += [_Part(p.start, p.size, p.product.meta["layout"].shape) for p in pieces]  # type: ignore[union-attr]
            operands += [operand for p in pieces for operand in p.product.args]  # type: ignore[union-attr]
        elif pieces:
            parts.append(_Part(pieces[0].start, sum(p.size for p in pieces), None))
            operands.append(_joined(graph.graph, output, pieces))
    output.args = (tuple(operands),)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    if x in returned_with_ancestors(graph.graph):
        raise ValueError("the gradient may share memory with x")
    return parts


def _pieces(gradient: Any) -> list[Piece]:
    """Return the pieces of a gradient: those of a concatenation, or the whole."""
    pieces = pieces_of(gradient, _PRODUCTS) if gradient.target is _ATEN.cat.default else []
    return pieces or [Piece(gradient, 0, gradient.meta["layout"].shape[-1], None)]


def _joined(graph: fx.Graph, output: fx.Node, pieces: list[Piece]) -> fx.Node:
    """Return one node for pieces that follow each other."""
    if len(pieces) == 1:
        return pieces[0].node
    with graph.inserting_before(output):
        return graph.call_function(_ATEN.cat.default, ([piece.node for piece in pieces], -1))


def _step(run: Callable[..., Any], parts: list[_Part]) -> Step:
    def step(rate: float, keep: float, x: torch.Tensor, *others: torch.Tensor) -> None:
        operands = iter(run(x, *others))
        for start, size, shape in parts:
            part = x.narrow(-1, start, size)
            if shape is None:
                part = part if keep == 1 else part.mul_(keep)
                part.sub_(next(operands), alpha=rate)
            else:
                part = part.view(shape)
                add = part.addmm_ if len(shape) == 2 else part.baddbmm_
                add(next(operands), next(operands), beta=keep, alpha=-rate)

    return step


def _agrees(step: Step, gradient: Callable[..., Any], tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether a step does what the gradient says, on other numbers."""
    x, *others = map(changed, tensors)
    moved = x.clone()
    step(0.5, 0.75, moved, *(t.clone() for t in others))
    return close(moved, 0.75 * x - 0.5 * gradient(x.clone(), *others)[0])
