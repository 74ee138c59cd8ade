"""A gradient step in place, x <- keep * x - rate * gradient, without forming the gradient of a dense layer.

The gradient of a dense layer is a matrix product, which can be added to the layer's part of x as it is computed. The
other parts of a gradient are subtracted from theirs. So the gradients of dense layers are never copied into a flat
vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import fx

from fedstrata.problems.graphs.compiler import Compiler
from fedstrata.problems.graphs.nodes import mutates, returned_with_ancestors
from fedstrata.problems.graphs.simplify import simplify
from fedstrata.problems.graphs.trace import REFUSALS, changed, close, record, runnable
from fedstrata.problems.graphs.writes import Piece, pieces_of

Scale = Callable[..., torch.Tensor]
"""Returns the factor of a step, [C, 1], from the results of the function after the first; [1] for a single client."""

_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mm.default, _ATEN.bmm.default}


class _Part(NamedTuple):
    """A part of x; ``shape`` is that of the product to add to it, None to subtract a tensor of the same form."""

    start: int
    size: int
    shape: torch.Size | None


class Descent:
    """Moves x in place along the gradient that a function ``gradient(x, *others)`` returns first.

    run:   returns the operands of all parts, and then the other results of the function.
    parts: the parts of x.
    """

    def __init__(self, run: Callable[..., Any], parts: list[_Part]) -> None:
        self._run, self._parts = run, parts
        self._operands = sum(1 if part.shape is None else 2 for part in parts)

    def __call__(
        self, x: torch.Tensor, others: Iterable[torch.Tensor], rate: float, keep: float, scale: Scale | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Move x to ``keep * x - rate * scale * gradient``; return the other results, from which the scale is made."""
        out = self._run(x, *others)
        operands, rest = iter(out[: self._operands]), tuple(out[self._operands :])
        factor = None if scale is None else scale(*rest)
        for start, size, shape in self._parts:
            if shape is None:
                part = x.narrow(-1, start, size)
                part = part if keep == 1 else part.mul_(keep)
                if factor is None:
                    part.sub_(next(operands), alpha=rate)
                else:
                    part.addcmul_(next(operands), factor, value=-rate)
                continue
            left = next(operands)
            left = left if factor is None else left * factor.unsqueeze(-1)
            strides = (*x.stride()[:-1], shape[-1], 1)
            part = x.as_strided(shape, strides, x.storage_offset() + start)
            add = part.addmm_ if len(shape) == 2 else part.baddbmm_
            add(left, next(operands), beta=keep, alpha=-rate)
        return rest


def trace_descent(
    function: Callable[..., Any], *tensors: torch.Tensor, compiler: Compiler | None = None, rough: bool = False
) -> Descent | None:
    """Return the step along the first result of ``function(x, *others)``, for tensors of these shapes.

    Returns None if the function cannot be traced, or if one of its results may share memory with x.
    """
    try:
        graph = record(function, *tensors)
        simplify(graph)
        parts = _split(graph)
        step = Descent(runnable(graph, tensors, compiler), parts)
        return step if _agrees(step, function, tensors, rough) else None
    except REFUSALS:
        return None


def _split(graph: fx.GraphModule) -> list[_Part]:
    """Let a graph return the operands of each part of x instead of the gradient; return the parts."""
    output, x = graph.graph.output_node(), next(iter(graph.graph.nodes))
    clients = x.meta["layout"].shape[:-1]
    if any(map(mutates, graph.graph.nodes)):
        raise ValueError("the function changes tensors in place")
    results: Any = output.args[0]
    parts, operands = [], []
    for is_product, run in groupby(_pieces(results[0], clients), key=lambda piece: piece.product is not None):
        pieces = [piece for piece in run if piece.size]
        if is_product:
            parts += [_Part(p.start, p.size, p.product.meta["layout"].shape) for p in pieces]  # type: ignore[union-attr]
            operands += [operand for p in pieces for operand in p.product.args]  # type: ignore[union-attr]
        elif pieces:
            parts.append(_Part(pieces[0].start, sum(p.size for p in pieces), None))
            operands.append(_joined(graph.graph, output, pieces))
    output.args = ((*operands, *results[1:]),)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    if x in returned_with_ancestors(graph.graph):
        raise ValueError("a result may share memory with x")
    return parts


def _pieces(gradient: Any, clients: torch.Size) -> list[Piece]:
    """Return the pieces of a gradient: those of a concatenation, or the whole.

    Products count only if they have one matrix for each client: weights with an axis of their own have more.
    """
    pieces = pieces_of(gradient, _PRODUCTS) if gradient.target is _ATEN.cat.default else []
    return [
        p if p.product is None or p.product.meta["layout"].shape[:-2] == clients else p._replace(product=None)
        for p in pieces or [Piece(gradient, 0, gradient.meta["layout"].shape[-1], None)]
    ]


def _joined(graph: fx.Graph, output: fx.Node, pieces: list[Piece]) -> fx.Node:
    """Return one node for pieces that follow each other."""
    if len(pieces) == 1:
        return pieces[0].node
    with graph.inserting_before(output):
        return graph.call_function(_ATEN.cat.default, ([piece.node for piece in pieces], -1))


def _agrees(step: Descent, function: Callable[..., Any], tensors: tuple[torch.Tensor, ...], rough: bool) -> bool:
    """Whether a step does what the function says, on other numbers."""
    x, *others = map(changed, tensors)
    gradient, *expected = function(x.clone(), *(t.clone() for t in others))
    factor = torch.full_like(x[..., :1], 1.5)
    moved = [x.clone(), x.clone()]
    rest = step(moved[0], others, 0.5, 0.75)
    step(moved[1], others, 0.5, 0.75, lambda *_: factor)
    taken = [(0.75 * x - m) / rate for m, rate in zip(moved, (0.5, 0.75), strict=True)]
    rounding = 100 * torch.finfo(x.dtype).eps * float(x.norm())
    along = all(close(step, gradient, rough, rounding) for step in taken)
    return along and all(close(a, b, rough) for a, b in zip(rest, expected, strict=True))
