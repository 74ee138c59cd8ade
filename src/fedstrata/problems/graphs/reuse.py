"""Let operations on large tensors write into the memory of an argument that nothing needs any more."""

from __future__ import annotations

import operator

import torch
from torch import fx

from fedstrata.problems.graphs.nodes import Layout, may_alias, mutates

_ATEN = torch.ops.aten
_IN_PLACE = {
    _ATEN.add.Tensor: _ATEN.add_.Tensor,
    _ATEN.sub.Tensor: _ATEN.sub_.Tensor,
    _ATEN.mul.Tensor: _ATEN.mul_.Tensor,
    _ATEN.div.Tensor: _ATEN.div_.Tensor,
    _ATEN.relu.default: _ATEN.relu_.default,
    _ATEN.exp.default: _ATEN.exp_.default,
    _ATEN.tanh.default: _ATEN.tanh_.default,
    _ATEN.sigmoid.default: _ATEN.sigmoid_.default,
}
_INTO = {_ATEN.threshold_backward.default: _ATEN.threshold_backward.grad_input}
"""Operations without a form in place, that can write into an argument."""

_SMALLEST = 1 << 16
"""Bytes of a tensor for which this pays off."""


def reuse_memory(module: fx.GraphModule) -> None:
    """Replace pointwise operations on a fresh tensor that nothing uses later by their forms in place."""
    graph = module.graph
    nodes = list(graph.nodes)
    if any(mutates(node) for node in nodes):
        return
    place = {node: number for number, node in enumerate(nodes)}
    storage = _storages(nodes)
    last_use: dict[fx.Node, int] = {}
    kept = {storage[node] for node in nodes if node.op in ("placeholder", "get_attr")}
    kept |= {storage[node] for node in graph.output_node().all_input_nodes}
    for node in nodes:
        for user in node.users:
            last_use[storage[node]] = max(last_use.get(storage[node], 0), place[user])
    for node in nodes:
        if node.target not in _IN_PLACE and node.target not in _INTO:
            continue
        own, *others = node.all_input_nodes
        if node.args[0] is not own or storage[own] in kept or last_use[storage[own]] > place[node]:
            continue
        if any(storage[other] == storage[own] for other in others) or not _fits(own, node):
            continue
        if node.target in _INTO:
            node.kwargs = {**node.kwargs, "grad_input": own}
            node.target = _INTO[node.target]
        else:
            node.target = _IN_PLACE[node.target]
        root, merged = storage[own], storage[node]
        last_use[root] = max(last_use[root], last_use.get(merged, 0))
        if merged in kept:
            kept.add(root)
        storage.update({other: root for other, base in storage.items() if base is merged})
    module.recompile()


def _storages(nodes: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return the node that owns the memory of each node; those that may share memory have the same owner."""
    owner: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        owner[node] = node
        source = node.args[0] if node.args else None
        if node.target is operator.getitem and isinstance(source, fx.Node) and not may_alias(source):
            continue  # one of several fresh tensors
        if node.op in ("call_function", "call_method") and may_alias(node):
            roots = {owner[argument] for argument in node.all_input_nodes}
            owner.update({other: node for other, root in owner.items() if root in roots})
    return owner


def _fits(own: fx.Node, node: fx.Node) -> bool:
    before: Layout | None = own.meta.get("layout")
    return before is not None and before == node.meta.get("layout") and before.nbytes >= _SMALLEST
