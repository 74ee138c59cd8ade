"""Simplify a traced graph: fewer, larger operations that give the same numbers.

vmap and grad leave behind views that change nothing, constants that are computed in every step, a loss value that the
gradient does not need. The passes below remove them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import fx

from fedstrata.problems.graphs.nodes import Layout, layout_of, mutates, returned_with_ancestors

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
_WITH_NUMBER = {operator: operator for operator in _BROADCAST} | {
    _ATEN.add.Scalar: _ATEN.add.Tensor,
    _ATEN.sub.Scalar: _ATEN.sub.Tensor,
    _ATEN.mul.Scalar: _ATEN.mul.Tensor,
    _ATEN.div.Scalar: _ATEN.div.Tensor,
}
"""Operations that may take a number, and the same with a tensor in its place."""

_EXACT = (torch.float32, torch.float64)
"""Dtypes whose operations round a number to them; those of lower precision take it as it is."""

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
        _keep_numbers_as_tensors(graph)
    graph.graph.lint()
    graph.recompile()


def _drop_what_changes_nothing(graph: fx.Graph, pure: bool) -> None:
    """Remove views to the same shape, transposes that cancel, factors of one, and expansions before broadcasting."""
    returned = returned_with_ancestors(graph)
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        source, value, before = node.args[0], layout_of(node), layout_of(node.args[0])
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
    layouts = [before if arg is node else layout for arg in user.args if (layout := layout_of(arg)) is not None]
    shapes, after = [layout.shape for layout in layouts], layout_of(user)
    if after is None or any(layout.dtype != after.dtype for layout in layouts):
        return False  # the dtype of a result may depend on which arguments are single numbers
    return np.broadcast_shapes(*shapes) == tuple(after.shape)  # torch's imports its compiler


def _transpose_factors(graph: fx.Graph) -> None:
    """Replace (A B)^T, if it is or becomes contiguous, by B^T A^T: no copy, and much faster if A B is one column."""
    for node in list(graph.nodes):
        product = node.args[0] if node.target in _INVOLUTIONS else None
        if not isinstance(product, fx.Node) or product.target not in _PRODUCTS or list(product.users) != [node]:
            continue
        is_contiguous = node.meta["layout"].contiguous
        if node.args[1:] not in ((), (1, 2)) or not (is_contiguous or all(map(_makes_contiguous, node.users))):
            continue
        with graph.inserting_before(node):
            factors = [_transposed(graph, node, factor) for factor in reversed(product.args)]
            swapped = graph.create_node("call_function", product.target, tuple(factors))
        for replaced in [node] if is_contiguous else list(node.users):
            swapped.meta["layout"] = replaced.meta["layout"]
            replaced.replace_all_uses_with(swapped)
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
        if node.op == "call_function" and _is_constant(node, constants) and layout_of(node) is not None:
            arguments, options = _real_arguments(node, constants)
            constants[node] = node.target(*arguments, **options)
    for node in returned_with_ancestors(graph.graph):
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


def _keep_numbers_as_tensors(graph: fx.GraphModule) -> None:
    """Hold the numbers in sums and products as tensors, which PyTorch would otherwise make in every call."""
    names: dict[tuple[str, torch.dtype], str] = {}
    for node in list(graph.graph.nodes):
        before, after = (layout_of(node.args[0]), layout_of(node)) if len(node.args) == 2 else (None, None)
        if node.target not in _WITH_NUMBER or before is None or after is None or before.dtype != after.dtype:
            continue
        number = node.args[1]
        if not isinstance(number, int | float) or after.dtype not in _EXACT or after.device.type != "cpu":
            continue
        key = (repr(float(number)), after.dtype)  # 0.0 and -0.0 differ
        if key not in names:
            names[key] = f"_number_{len(names)}"
            value = torch.tensor(float(number), dtype=after.dtype)
            graph.register_buffer(names[key], value, persistent=False)
        with graph.graph.inserting_before(node):
            constant = graph.graph.get_attr(names[key])
        constant.meta["layout"] = Layout.of(getattr(graph, names[key]))
        node.target = _WITH_NUMBER[node.target]
        node.update_arg(1, constant)


def _is_constant(node: fx.Node, constants: dict[fx.Node, torch.Tensor]) -> bool:
    inputs = node.all_input_nodes
    return node.target in _SHAPE_ONLY or all(source in constants for source in inputs)


def _real_arguments(node: fx.Node, constants: dict[fx.Node, torch.Tensor]) -> tuple[Any, Any]:
    """Return the arguments of a constant as tensors, uninitialised where only the shape matters."""

    def real(source: fx.Node) -> torch.Tensor:
        if source in constants:
            return constants[source]
        layout = layout_of(source)
        assert layout is not None
        return layout.empty()

    return fx.node.map_arg((node.args, node.kwargs), real)
