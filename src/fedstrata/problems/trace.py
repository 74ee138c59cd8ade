"""A function traced once into a straight line of tensor operations: no dispatch of vmap, grad or modules left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

_ATEN = torch.ops.aten
_MAY_CHANGE_NOTHING = {
    _ATEN.view.default,
    _ATEN._unsafe_view.default,
    _ATEN.expand.default,
    _ATEN.detach.default,
    _ATEN.alias.default,
}
_UNTRACEABLE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
_UNDOES_ITSELF = {_ATEN.transpose.int, _ATEN.t.default}


def trace(function: Callable[..., Any], *tensors: torch.Tensor) -> Callable[..., Any] | None:
    """Return the function as a graph for tensors of these shapes; None when it cannot be traced.

    It cannot when it looks at values to decide what to do, makes tensors whose shape depends on values, or draws random
    numbers. It is traced on tensors without values, so that no value can slip into the graph.
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
    """Runs a graph and writes down the shape and strides of everything in it."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.found: dict[fx.Node, object] = {}

    def run_node(self, node: fx.Node) -> Any:
        out = super().run_node(node)
        if isinstance(out, torch.Tensor):
            self.found[node] = (out.shape, out.stride())
        return out


def _simplify(graph: fx.GraphModule, tensors: tuple[torch.Tensor, ...]) -> None:
    """Take out what vmap and grad leave behind: views that change nothing, and transpositions that cancel."""
    layouts = _Layouts(graph)
    layouts.run(*tensors)
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        source = node.args[0]
        if node.target in _MAY_CHANGE_NOTHING and layouts.found[node] == layouts.found[source]:
            node.replace_all_uses_with(source)
        elif node.target in _UNDOES_ITSELF and source.target == node.target and source.args[1:] == node.args[1:]:
            node.replace_all_uses_with(source.args[0])
    graph.graph.eliminate_dead_code()
    graph.recompile()
