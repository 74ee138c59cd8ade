"""Trace a function into a flat graph of tensor operations, without the dispatch cost of vmap, grad and modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

_ATEN = torch.ops.aten
_POSSIBLE_NO_OPS = {
    _ATEN.view.default,
    _ATEN._unsafe_view.default,
    _ATEN.expand.default,
    _ATEN.detach.default,
    _ATEN.alias.default,
}
_UNTRACEABLE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
_INVOLUTIONS = {_ATEN.transpose.int, _ATEN.t.default}


def trace(function: Callable[..., Any], *tensors: torch.Tensor) -> Callable[..., Any] | None:
    """Return the function as a graph for tensors of these shapes, or None if it cannot be traced.

    A function cannot be traced if it branches on values, creates tensors whose shape depends on values, or draws random
    numbers. Tracing uses fake tensors, so no value can end up in the graph.
    """
    try:
        graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
        if any(_UNTRACEABLE & set(getattr(node.target, "tags", ())) for node in graph.graph.nodes):
            return None
        _simplify(graph, tensors)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None
    return graph.forward


class _Layouts(fx.Interpreter):
    """Run a graph and record the shape and strides of every node."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.layouts: dict[fx.Node, object] = {}

    def run_node(self, node: fx.Node) -> Any:
        out = super().run_node(node)
        if isinstance(out, torch.Tensor):
            self.layouts[node] = (out.shape, out.stride())
        return out


def _simplify(graph: fx.GraphModule, tensors: tuple[torch.Tensor, ...]) -> None:
    """Remove leftovers of vmap and grad: views that change nothing, and transposes that cancel."""
    interpreter = _Layouts(graph)
    interpreter.run(*tensors)
    layouts = interpreter.layouts
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        source = node.args[0]
        if node.target in _POSSIBLE_NO_OPS and layouts[node] == layouts[source]:
            node.replace_all_uses_with(source)
        elif node.target in _INVOLUTIONS and source.target == node.target and source.args[1:] == node.args[1:]:
            node.replace_all_uses_with(source.args[0])
    graph.graph.eliminate_dead_code()
    graph.recompile()
