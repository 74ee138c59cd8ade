"""Simplify a traced graph: fewer, larger operations that give the same numbers.

vmap and grad leave behind views that change nothing, constants that are computed in every step, a loss value that the
gradient does not need, and one copy of all gradients into the flat vector. The passes below remove them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx

_ATEN = torch.ops.aten
_SAME_IF_SAME_SHAPE = {
    _ATEN.view.default,
    _ATEN._unsafe_view.default,
    _ATEN.expand.default,
    _ATEN.detach.default,
    _ATEN.alias.default,
}
_INVOLUTIONS = {_ATEN.transpose.int, _ATEN.t.default}
_PRODUCTS = {_ATEN.mm.default, _ATEN.bmm.default}
_BROADCAST = {_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor, _ATEN.div.Tensor}
_SHAPE_ONLY = {
    _ATEN.ones_like.default,
    _ATEN.zeros_like.default,
    _ATEN.full_like.default,
    _ATEN.new_zeros.default,
    _ATEN.new_ones.default,
    _ATEN.new_full.default,
}
"""Operations whose result depends on the shape of their first argument only."""

_LARGEST_CONSTANT = 1 << 20
"""The largest constant, in bytes, that a graph may hold; larger ones are computed again in every call."""

_SMALLEST_WRITE = 1 << 18
"""Size in bytes from which it pays to write a gradient straight into the flat vector."""


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

    def empty(self) -> torch.Tensor:
        """Return a tensor of this layout, with any values."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def simplify(graph: fx.GraphModule) -> None:
    """Simplify a recorded graph, in place."""
    pure = not any(mutates(node) for node in graph.graph.nodes)
    _drop_what_changes_nothing(graph.graph, pure)
    graph.graph.eliminate_dead_code()
    if pure:
        _transpose_factors(graph.graph)
        _fold_constants(graph)
    graph.graph.eliminate_dead_code()
    if pure:
        _write_gradients_in_place(graph.graph)
    graph.graph.lint()
    graph.recompile()


def mutates(node: fx.Node) -> bool:
    """Whether a node is an operator that changes a tensor in place."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)


def _layout(node: Any) -> Layout | None:
    """Return the layout of the tensor that a node stands for."""
    return node.meta.get("layout") if isinstance(node, fx.Node) else None


def _drop_what_changes_nothing(graph: fx.Graph, pure: bool) -> None:
    """Remove views to the same shape, transposes that cancel, factors of one, and expansions before broadcasting."""
    returned = _returned_with_ancestors(graph)
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        source, value, before = node.args[0], _layout(node), _layout(node.args[0])
        if value is None or before is None:
            continue
        if node.target in _SAME_IF_SAME_SHAPE and value.shape == before.shape and value.dtype == before.dtype:
            node.replace_all_uses_with(source)
        elif node.target in _INVOLUTIONS and source.target == node.target and source.args[1:] == node.args[1:]:
            node.replace_all_uses_with(source.args[0])
        elif node.target is _ATEN.mul.Scalar and node.args[1] == 1 and value.dtype == before.dtype:
            if pure and node not in returned:  # a product may be changed in place, but not its argument
                node.replace_all_uses_with(source)
        elif node.target is _ATEN.expand.default:
            for user in list(node.users):
                if user.target in _BROADCAST and _broadcasts(user, node, before):
                    user.replace_input_with(node, source)


def _broadcasts(user: fx.Node, node: fx.Node, before: Layout) -> bool:
    """Whether an operation gives the same result without one of its arguments being expanded first."""
    layouts = [before if arg is node else layout for arg in user.args if (layout := _layout(arg)) is not None]
    shapes, after = [layout.shape for layout in layouts], _layout(user)
    if after is None or any(layout.dtype != after.dtype for layout in layouts):
        return False  # the dtype of a result may depend on which arguments are single numbers
    return np.broadcast_shapes(*shapes) == tuple(after.shape)  # torch's imports its compiler


def _transpose_factors(graph: fx.Graph) -> None:
    """Replace a contiguous copy of (A B)^T by B^T A^T, which is contiguous without a copy."""
    for node in list(graph.nodes):
        product = node.args[0] if node.target in _INVOLUTIONS else None
        if not isinstance(product, fx.Node) or product.target not in _PRODUCTS or list(product.users) != [node]:
            continue
        if node.args[1:] not in ((), (1, 2)) or not all(map(_makes_contiguous, node.users)):
            continue
        with graph.inserting_before(node):
            factors = [_transposed(graph, node, factor) for factor in reversed(product.args)]
            swapped = graph.create_node("call_function", product.target, tuple(factors))
        for copy in list(node.users):
            swapped.meta["layout"] = copy.meta["layout"]
            copy.replace_all_uses_with(swapped)
    graph.eliminate_dead_code()


def _makes_contiguous(node: fx.Node) -> bool:
    return node.target is _ATEN.clone.default and node.kwargs.get("memory_format") is torch.contiguous_format


def _transposed(graph: fx.Graph, transpose: fx.Node, factor: Any) -> fx.Node:
    """Return the transposed factor, by the operation and dimensions of ``transpose``."""
    if factor.target == transpose.target and factor.args[1:] == transpose.args[1:]:
        return factor.args[0]  # type: ignore[no-any-return]
    out = graph.create_node("call_function", transpose.target, (factor, *transpose.args[1:]))
    layout = factor.meta["layout"]
    swap = [*range(len(layout.shape) - 2), -1, -2]
    shape, stride = torch.Size(layout.shape[i] for i in swap), tuple(layout.stride[i] for i in swap)
    out.meta["layout"] = layout._replace(shape=shape, stride=stride)
    return out


def _fold_constants(graph: fx.GraphModule) -> None:
    """Compute once what does not depend on the arguments."""
    constants: dict[fx.Node, torch.Tensor] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and _is_constant(node, constants) and _layout(node) is not None:
            arguments, options = _real_arguments(node, constants)
            constants[node] = node.target(*arguments, **options)
    for node in _returned_with_ancestors(graph.graph):
        constants.pop(node, None)  # the caller may change what it receives in place
    for number, (node, value) in enumerate(constants.items()):
        if value.untyped_storage().nbytes() > _LARGEST_CONSTANT or all(user in constants for user in node.users):
            continue
        name = f"_constant_{number}"
        graph.register_buffer(name, value, persistent=False)
        with graph.graph.inserting_before(node):
            constant = graph.graph.get_attr(name)
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)


def _is_constant(node: fx.Node, constants: dict[fx.Node, torch.Tensor]) -> bool:
    inputs = node.all_input_nodes
    return node.target in _SHAPE_ONLY or all(source in constants for source in inputs)


def _real_arguments(node: fx.Node, constants: dict[fx.Node, torch.Tensor]) -> tuple[Any, Any]:
    """Return the arguments of a constant as tensors, uninitialised where only the shape matters."""

    def real(source: fx.Node) -> torch.Tensor:
        if source in constants:
            return constants[source]
        layout = _layout(source)
        assert layout is not None
        return layout.empty()

    return fx.node.map_arg((node.args, node.kwargs), real)


def _returned_with_ancestors(graph: fx.Graph) -> set[fx.Node]:
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


def may_alias(node: fx.Node) -> bool:
    """Whether the result of a node may share memory with its arguments."""
    schema = getattr(node.target, "_schema", None)
    declared = schema is None or any(r.alias_info is not None for r in schema.returns)
    return declared or node.meta.get("views", False)


# --- gradients straight into the flat vector --------------------------------------------------------------------------

_WRITERS: dict[Any, Callable[..., torch.Tensor]] = {_ATEN.mm.default: torch.mm}


class _Piece(NamedTuple):
    """One of the tensors that are concatenated into a vector, with its position in the vector."""

    node: fx.Node
    start: int
    size: int
    product: fx.Node | None


def _write_gradients_in_place(graph: fx.Graph) -> None:
    """Let the large matrix products of one client write straight into the vector that they would be copied into."""
    for node in list(graph.nodes):
        value = _layout(node)
        if node.target is _ATEN.cat.default and value is not None and len(value.shape) == 1:
            pieces = _pieces(node)
            if any(piece.product for piece in pieces):
                _write_pieces(graph, node, value, pieces)


def _pieces(cat: fx.Node) -> list[_Piece]:
    """Return the pieces of a concatenation; an empty list if the shape of any is unknown."""
    pieces: list[_Piece] = []
    start = 0
    for node in cat.args[0]:  # type: ignore[union-attr]
        value = _layout(node)
        if value is None or not isinstance(node, fx.Node):
            return []
        pieces.append(_Piece(node, start, value.shape[0], _product(node, cat)))
        start += value.shape[0]
    return pieces


def _product(piece: fx.Node, cat: fx.Node) -> fx.Node | None:
    """Return the matrix product that a piece is a view of, if it is large and nothing else uses it."""
    user, node = cat, piece
    while node.target in (_ATEN.view.default, _ATEN._unsafe_view.default) and list(node.users) == [user]:
        user, node = node, node.args[0]  # type: ignore[assignment]
    value = _layout(node)
    alone = node.target in _WRITERS and list(node.users) == [user]
    return node if alone and value is not None and value.nbytes >= _SMALLEST_WRITE else None


def _write_pieces(graph: fx.Graph, cat: fx.Node, whole: Layout, pieces: list[_Piece]) -> None:
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


def _write_product(graph: fx.Graph, out: fx.Node, piece: _Piece) -> None:
    product, value = piece.product, _layout(piece.product)
    assert product is not None and value is not None
    with graph.inserting_before(product):
        part = graph.call_function(torch.narrow, (out, 0, piece.start, piece.size))
        matrix = graph.call_method("view", (part, tuple(value.shape)))
        graph.call_function(_WRITERS[product.target], product.args, {"out": matrix})


def _copy(graph: fx.Graph, cat: fx.Node, out: fx.Node, run: list[_Piece]) -> None:
    size = sum(piece.size for piece in run)
    if size:
        with graph.inserting_before(cat):
            part = graph.call_function(torch.narrow, (out, 0, run[0].start, size))
            graph.call_function(torch.cat, ([piece.node for piece in run],), {"out": part})


def _erase_unused(graph: fx.Graph, piece: _Piece) -> None:
    """Erase a product that is now written elsewhere, and its views."""
    node = piece.node
    while piece.product is not None:
        above = node.args[0]
        graph.erase_node(node)
        if node is piece.product:
            return
        node = above  # type: ignore[assignment]
