"""Memory of tensors that nothing needs any more is written again; everything else is left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from fedstrata.problems.graphs.nodes import mutates
from fedstrata.problems.graphs.reuse import reuse_memory
from fedstrata.problems.graphs.simplify import simplify
from fedstrata.problems.graphs.trace import record

LARGE = 200
"""Tensors of this many rows and columns are large enough."""


def reusing(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> tuple[fx.GraphModule, int]:
    """Return the graph of a function, and how many of its operations write into an argument."""
    graph = record(function, *tensors)
    simplify(graph)
    reuse_memory(graph)
    return graph, sum(map(mutates, graph.graph.nodes))


CASES: dict[str, tuple[Callable[..., torch.Tensor], int]] = {
    "chain": (lambda x, y: (x @ y).relu() + y, 2),
    "an argument": (lambda x, y: x + y, 0),
    "used later": (lambda x, y: (x @ y).exp() * (x @ y).sum() + (z := x @ y).relu() - z, 4),
    "a view is used later": (lambda x, y: (z := x @ y).relu() + z.t(), 1),
    "twice the same": (lambda x, y: (z := x @ y) * z, 1),
    "broadcast": (lambda x, y: (x @ y).sum(0) + y, 0),
    "another dtype": (lambda x, y: (x @ y).double() + y, 1),
    "a view": (lambda x, y: (x @ y).view(-1).relu().view_as(x) + y, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_results_are_the_same_and_arguments_unharmed(case: str) -> None:
    function, writes = CASES[case]
    tensors = [torch.randn(LARGE, LARGE) for _ in range(2)]
    before = [t.clone() for t in tensors]
    graph, written = reusing(function, *tensors)
    assert written == writes
    for _ in range(2):
        assert torch.equal(graph(*tensors), function(*before))
        assert all(map(torch.equal, tensors, before))


def test_what_is_returned_is_not_written_again() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = x @ x
        return product, product.relu()

    x = torch.randn(LARGE, LARGE)
    graph, written = reusing(function, x)
    assert written == 0
    assert all(map(torch.equal, graph(x), function(x)))


def test_small_tensors_and_graphs_that_mutate_are_left_alone() -> None:
    assert reusing(lambda x: (x @ x).relu() + 1, torch.randn(3, 3))[1] == 0
    x = torch.randn(LARGE, LARGE)
    graph, written = reusing(lambda x: x.add_(1).relu() * 2, x)  # it changes its argument
    assert written == 1 and torch.equal(graph(x.clone()), (x + 1).relu() * 2)
    graph, written = reusing(lambda x: (x @ x).add_(1).relu() * 2, x)  # a tensor of its own
    assert written == 3 and torch.equal(graph(x), (x @ x + 1).relu() * 2)


def test_memory_that_was_reused_is_not_reused_while_its_new_content_is_needed() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        c = (x @ x + 1) * 2
        e = c.tanh()
        return e * e.exp() * c

    x = torch.randn(LARGE, LARGE)
    graph, _ = reusing(function, x)
    assert torch.equal(graph(x), function(x))


def test_views_that_are_not_declared_as_views_keep_their_memory() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        product = x @ x
        a, b = torch.unsafe_chunk(product, 2, 0)
        return torch.cat([a.exp(), b.tanh()]) + product**2

    x = torch.randn(LARGE, LARGE)
    graph, _ = reusing(function, x)
    assert torch.equal(graph(x), function(x))
