"""Trace a function into a flat graph of tensor operations, without the dispatch cost of vmap, grad and modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fedstrata.problems.direct import call_directly
from fedstrata.problems.simplify import simplify

_UNTRACEABLE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}


def trace(function: Callable[..., Any], *tensors: torch.Tensor) -> Callable[..., Any] | None:
    """Return the function as a graph for tensors of these shapes, or None if it cannot be traced.

    A function cannot be traced if it branches on values, creates tensors whose shape depends on values, or draws random
    numbers. Tracing uses fake tensors, so no value can end up in the graph.
    """
    try:
        graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
        if any(_UNTRACEABLE & set(getattr(node.target, "tags", ())) for node in graph.graph.nodes):
            return None
        simplify(graph)
        call_directly(graph, tensors)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None
    return graph.forward
