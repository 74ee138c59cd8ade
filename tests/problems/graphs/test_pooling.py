"""Max pooling by maxima: the bits of PyTorch's, ties included, and only where windows are 2 by 2 and disjoint."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedstrata.problems.graphs.pooling import pool_by_maxima
from fedstrata.problems.graphs.simplify import simplify
from fedstrata.problems.graphs.trace import record

POOL = torch.ops.aten.max_pool2d_with_indices.default


def pools(function: object, *tensors: torch.Tensor) -> tuple[object, int]:
    """Return the graph of a function with pooling by maxima, and how many of PyTorch's pools are left in it."""
    graph = record(function, *tensors)
    simplify(graph)
    pool_by_maxima(graph)
    return graph, sum(node.target is POOL for node in graph.graph.nodes)


@pytest.mark.parametrize("size", [(16, 16), (17, 17), (16, 19)], ids=str)
@pytest.mark.parametrize("values", ["normal", "ties", "constant"])
def test_values_and_gradients_have_the_same_bits(size: tuple[int, int], values: str) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(16, 8, *size, generator=generator)
    images = {"normal": images, "ties": images.round(), "constant": torch.ones_like(images)}[values]

    def gradient(images: torch.Tensor) -> torch.Tensor:
        leaf = images.detach().requires_grad_()
        with torch.enable_grad():
            loss = (nn.functional.max_pool2d(leaf, 2) ** 2).sum()
        return torch.autograd.grad(loss, leaf)[0]

    graph, left = pools(gradient, images)
    assert left == 0
    assert torch.equal(graph(images), gradient(images))
    graph, left = pools(lambda images: nn.functional.max_pool2d(images, 2), images)
    assert left == 0 and torch.equal(graph(images), nn.functional.max_pool2d(images, 2))


@pytest.mark.parametrize(
    "other", [{"kernel_size": 3}, {"stride": 1}, {"padding": 1}, {"ceil_mode": True}, {"dilation": 2}], ids=str
)
def test_other_windows_are_left_to_pytorch(other: dict) -> None:
    images, options = torch.randn(16, 8, 17, 17), {"kernel_size": 2, **other}
    graph, left = pools(lambda images: nn.functional.max_pool2d(images, **options), images)
    assert left == 1
    assert torch.equal(graph(images), nn.functional.max_pool2d(images, **options))


def test_nan_stays_nan() -> None:
    images = torch.zeros(16, 8, 16, 16)
    images[0, 0, 1, 1] = torch.nan
    graph, left = pools(lambda images: nn.functional.max_pool2d(images, 2), images)
    assert left == 0 and torch.isnan(graph(images)[0, 0, 0, 0]) and int(torch.isnan(graph(images)).sum()) == 1
