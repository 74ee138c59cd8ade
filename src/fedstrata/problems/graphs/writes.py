"""Gradients straight into the flat vector: large matrix products write there instead of being copied."""

from __future__ import annotations

from collections.abc import Callable, Container
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import fx

from fedstrata.problems.graphs.nodes import Layout, layout_of, mutates

_ATEN = torch.ops.aten
_SMALLEST = 1 << 18
"""Size in bytes from which it pays to write a gradient straight into the flat vector."""

_WRITERS: dict[Any, Callable[..., torch.Tensor]] = {_ATEN.mm.default: torch.mm}


class Piece(NamedTuple):
    """One of the tensors that are concatenated into a vector, with its position in the vector."""

    node: fx.Node
    start: int
    size: int
    product: fx.Node | None


def write_gradients_in_place(module: fx.GraphModule) -> None:
    """Let the large matrix products of one client write straight into the vector that they would be copied into."""
    graph = module.graph
    if any(map(mutates, graph.nodes)):
        return
    for node in list(graph.nodes):
        value = layout_of(node)
        if node.target is _ATEN.cat.default and value is not None and len(value.shape) == 1:
            pieces = pieces_of(node, _WRITERS, _SMALLEST)
            if any(piece.product for piece in pieces):
                _write_pieces(graph, node, value, pieces)
    graph.lint()
    module.recompile()


def pieces_of(cat: fx.Node, products: Container[Any], smallest: int = 0) -> list[Piece]:
    """Return the pieces of a concatenation along the last axis; an empty list if it is along another one.

    products: the operators that count as products, of at least ``smallest`` bytes.
    """
    whole, axis = layout_of(cat), cat.args[1] if len(cat.args) > 1 else 0
    if whole is None or axis not in (-1, len(whole.shape) - 1):
        return []
    pieces: list[Piece] = []
    start = 0
    nodes: Any = cat.args[0]
    for node in nodes:
        value = layout_of(node)
        if value is None or not isinstance(node, fx.Node):
            return []
        product = _product(node, cat, products)
        large = product is not None and product.meta["layout"].nbytes >= smallest and nodes.count(node) == 1
        pieces.append(Piece(node, start, value.shape[-1], product if large else None))
        start += value.shape[-1]
    return pieces


def _product(piece: fx.Node, cat: fx.Node, products: Container[Any]) -> fx.Node | None:
    """Return the matrix product that a piece is a view of, if nothing else uses it."""
    user, node = cat, piece
    while node.target in (_ATEN.view.default, _ATEN._unsafe_view.default) and list(node.users) == [user]:
        user, node = node, node.args[0]  # type: ignore[assignment]
    alone = node.target in products and list(node.users) == [user]
    return node if alone and layout_of(node) is not None else None


def _write_pieces(graph: fx.Graph, cat: fx.Node, whole: Layout, pieces: list[Piece]) -> None:
    """Replace a concatenation: its products write into an empty vector, the other pieces are copied there."""
    products = [piece.product for piece in pieces if piece.product is not None]
    with graph.inserting_before(next(node for node in graph.nodes if node in products)):
        out = graph.call_function(torch.empty, (tuple(whole.shape),), {"dtype": whole.dtype, "device": whole.device})
    out.meta = dict(cat.meta)
    for is_product, run in groupby(pieces, key=lambda piece: piece.product is not None):
        if is_product:
            for piece in run:
                _write_product(graph, out, piece)
        else:
            _copy(graph, cat, out, list(run))
    cat.replace_all_uses_with(out)
    graph.erase_node(cat)
    for piece in pieces:
        _erase_unused(graph, piece)


def _write_product(graph: fx.Graph, out: fx.Node, piece: Piece) -> None:
    product, value = piece.product, layout_of(piece.product)
    assert product is not None and value is not None
    with graph.inserting_before(product):
        part = graph.call_function(torch.narrow, (out, 0, piece.start, piece.size))
        matrix = graph.call_method("view", (part, tuple(value.shape)))
        graph.call_function(_WRITERS[product.target], product.args, {"out": matrix})


def _copy(graph: fx.Graph, cat: fx.Node, out: fx.Node, run: list[Piece]) -> None:
    size = sum(piece.size for piece in run)
    if size:
        with graph.inserting_before(cat):
            part = graph.call_function(torch.narrow, (out, 0, run[0].start, size))
            graph.call_function(torch.cat, ([piece.node for piece in run],), {"out": part})


def _erase_unused(graph: fx.Graph, piece: Piece) -> None:
    """Erase a product that is now written elsewhere, and its views."""
    node = piece.node
    while piece.product is not None:
        above = node.args[0]
        graph.erase_node(node)
        if node is piece.product:
            return
        node = above  # type: ignore[assignment]
