"""Simplified graphs: fewer operations, the same bits, and nothing shared between calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.func import grad, vmap

import fedstrata as fs
from fedstrata.problems.graphs.direct import call_directly
from fedstrata.problems.graphs.nodes import mutates
from fedstrata.problems.graphs.simplify import simplify
from fedstrata.problems.graphs.trace import record
from fedstrata.problems.graphs.writes import write_gradients_in_place

Function = Callable[..., Any]


def simplified(function: Function, *tensors: torch.Tensor) -> fx.GraphModule:
    graph = record(function, *tensors)
    simplify(graph)
    write_gradients_in_place(graph)
    return graph


def operations(graph: fx.GraphModule) -> list[str]:
    """Return the names of the operations of a graph."""
    nodes = [n for n in graph.graph.nodes if n.op in ("call_function", "call_method")]
    return [getattr(n.target, "__name__", str(n.target)).split(".")[0] for n in nodes]


def gradient_of(model: nn.Module, inputs: torch.Tensor, clients: int) -> tuple[Function, tuple[torch.Tensor, ...]]:
    """Return the gradient of a model's loss, and arguments for it; with several clients, vectorised over them."""
    problem = fs.erm(model)
    x = problem.x0 + 0.1 * torch.randn(clients, len(problem.x0))
    arguments = (x, inputs.expand(clients, *inputs.shape).contiguous(), torch.randint(0, 3, (clients, len(inputs))))
    function = grad(lambda x, a, b: problem.outer(x, (a, b)))
    return (vmap(function), arguments) if clients > 1 else (function, tuple(a[0] for a in arguments))


MODELS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "logreg": (nn.Linear(6, 3), (6,)),
    "mlp": (nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 3)), (6,)),
    "convolutional": (
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)),
        (1, 8, 8),
    ),
    "normalised": (nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)), (6,)),
}


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_simplified_gradient_has_the_same_bits(name: str, clients: int) -> None:
    model, shape = MODELS[name]
    function, tensors = gradient_of(model, torch.randn(5, *shape), clients)
    plain = record(function, *tensors)
    graph = simplified(function, *tensors)
    assert len(operations(graph)) < len(operations(plain))
    call_directly(graph, tensors)
    for _ in range(2):
        others = (*(torch.randn_like(t) for t in tensors[:2]), tensors[2])
        assert torch.equal(graph(*others), plain(*others))


def test_the_loss_that_a_gradient_does_not_need_is_not_computed() -> None:
    graph = simplified(*(lambda f, t: (f, *t))(*gradient_of(nn.Linear(6, 3), torch.randn(5, 6), 2)))
    assert not {"mean", "log", "ones_like", "neg"} & set(operations(graph))


def test_a_constant_is_computed_once() -> None:
    graph = simplified(lambda x: x * torch.arange(3.0).exp(), torch.zeros(3))
    assert operations(graph) == ["mul"]
    assert torch.equal(graph(torch.ones(3)), torch.arange(3.0).exp())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.zeros_like(x),
        lambda x: torch.zeros(2, 3).view(3, 2).t(),
        lambda x: (torch.ones_like(x), x + 1)[0],
        lambda x: torch.ops.aten.mul.Scalar(x, 1).view(3, 2),
    ],
    ids=["constant", "view of a constant", "one of two", "product with one"],
)
def test_what_is_returned_belongs_to_the_caller(function: Function) -> None:
    x = torch.randn(2, 3)
    graph = simplified(function, x)
    expected, before = function(x).clone(), x.clone()
    graph(x).add_(7)
    assert torch.equal(x, before) and torch.equal(graph(x), expected)


def test_a_large_constant_is_not_kept() -> None:
    graph = simplified(lambda x: x + torch.zeros(1000, 1000).sum(), torch.zeros(2))
    assert not any(b.numel() > 1 for b in graph.buffers())


def test_a_function_that_changes_tensors_in_place_is_left_alone() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(3)
        total.add_(x)
        return total * 1

    graph = simplified(function, torch.zeros(3))
    assert all(torch.equal(graph(x), x) for x in (torch.ones(3), torch.arange(3.0)))


def test_large_products_are_written_straight_into_the_vector() -> None:
    function, tensors = gradient_of(MODELS["mlp"][0], torch.randn(5, 6), 1)
    graph = simplified(function, *tensors)
    writes = [n for n in graph.graph.nodes if "out" in n.kwargs]
    assert [n.target for n in writes if n.target is torch.mm] == [torch.mm], "only the large matrix"
    assert torch.equal(graph(*tensors), function(*tensors))


def test_products_of_hessians_write_into_several_vectors() -> None:
    function, (x, *batch) = gradient_of(MODELS["mlp"][0], torch.randn(5, 6), 1)

    def product(x: torch.Tensor, v: torch.Tensor, *batch: torch.Tensor) -> torch.Tensor:
        return torch.func.vjp(lambda z: z - 0.1 * function(z, *batch), x)[1](v)[0]

    tensors = (x, torch.randn_like(x), *batch)
    plain = record(product, *tensors)
    graph = simplified(product, *tensors)
    assert len(operations(graph)) < len(operations(plain))
    assert torch.equal(graph(*tensors), plain(*tensors))


def test_a_vector_of_vectors_is_put_together_as_before() -> None:
    def function(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        inner = torch.cat([(a @ b).view(-1), c])
        return torch.cat([inner * 2, (b @ a).view(-1), inner, c])

    tensors = (torch.randn(300, 300), torch.randn(300, 300), torch.randn(7))
    graph = simplified(function, *tensors)
    assert any("out" in n.kwargs for n in graph.graph.nodes)
    assert torch.equal(graph(*tensors), function(*tensors))


def test_factors_of_one_and_expansions_go() -> None:
    graph = simplified(lambda x, y: torch.ops.aten.mul.Scalar(x, 1).expand(4, 3) * y, torch.ones(3), torch.ones(4, 3))
    assert operations(graph) == ["mul"]
    graph = simplified(lambda x: torch.ops.aten.mul.Scalar(x, 1.0) + 1, torch.ones(3, dtype=torch.int64))
    assert len(operations(graph)) == 2, "the factor changes the dtype"


def test_operators_become_functions_only_where_they_are_the_same() -> None:
    x = torch.randn(2, 3)
    graph = simplified(lambda x: x.view(3, 2).exp().sum([1], True), x)
    call_directly(graph, (x,))
    assert not any(isinstance(n.target, torch._ops.OpOverload) for n in graph.graph.nodes)
    assert torch.equal(graph(x), x.view(3, 2).exp().sum(1, keepdim=True))


def test_a_factor_of_one_stays_where_the_product_is_changed() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        return torch.ops.aten.mul.Scalar(doubled, 1).add_(1) + doubled

    x = torch.tensor([0.5, 1.0])
    assert torch.equal(simplified(function, x)(x), function(x))


def test_an_expansion_stays_where_it_decides_the_dtype() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.expand(3) * y

    tensors = (torch.tensor(2.0, dtype=torch.float64), torch.ones(3))
    assert simplified(function, *tensors)(*tensors).dtype is torch.float64


def test_numbers_become_tensors_with_the_same_results() -> None:
    x, whole = torch.randn(3, 4), torch.arange(4)

    def function(x: torch.Tensor, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x - 2.3) / 0.1 * 3, x.add(0.1, alpha=7), whole + 2, whole * 0.5, x[0, 0] + 0.1, x.double() + 0.1

    graph = simplified(function, x, whole)
    call_directly(graph, (x, whole))
    for ours, theirs in zip(graph(x, whole), function(x, whole), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    zeros = simplified(lambda x: (x / 0.0, x / -0.0), x)
    assert torch.equal(torch.stack(zeros(x.abs())), torch.stack((x.abs() / 0.0, x.abs() / -0.0)))
    low = x.bfloat16()
    assert torch.equal(simplified(lambda x: x * 0.1, low)(low), low * 0.1)
    assert sum("_number" in str(n.target) for n in graph.graph.nodes if n.op == "get_attr") >= 4


def test_a_product_that_is_used_twice_is_not_written_twice() -> None:
    a, b = torch.randn(300, 300), torch.randn(300, 300)
    twice = simplified(lambda a, b: torch.cat([(a @ b).view(-1)] * 2), a, b)
    torch.testing.assert_close(twice(a, b), torch.cat([(a @ b).view(-1)] * 2))


def test_the_product_of_a_column_is_computed_as_a_row() -> None:
    a, b = torch.randn(2, 5, 1), torch.randn(2, 7, 5)
    graph = simplified(lambda a, b: torch.bmm(b, a).transpose(1, 2), a, b)
    (product,) = (n for n in graph.graph.nodes if n.target is torch.ops.aten.bmm.default)
    assert product.meta["layout"].shape == (2, 1, 7)
    torch.testing.assert_close(graph(a, b), torch.bmm(b, a).transpose(1, 2))


def test_changes_of_a_tensor_of_its_own_are_recorded_as_new_tensors() -> None:
    def own(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.add_(1).exp_()
        y.mul_(x)
        return y.sum(0) + y[0]

    def shared(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        part = y[0]
        y.add_(1)
        return part + y.sum(0)

    def argument(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1) * 2

    x = torch.randn(3, 4)
    for function, mutations in ((own, False), (shared, True), (argument, True)):
        graph = simplified(function, x)
        assert any(mutates(node) for node in graph.graph.nodes) == mutations
        torch.testing.assert_close(graph(x.clone()), function(x.clone()))


def test_the_gradient_of_binary_cross_entropy_is_simplified() -> None:
    problem = fs.erm(nn.Linear(4, 1), "binary_cross_entropy")
    function = vmap(grad(lambda x, a, b: problem.outer(x, (a, b))))
    tensors = torch.randn(3, 5), torch.randn(3, 6, 4), torch.randint(0, 2, (3, 6))
    graph = simplified(function, *tensors)
    assert not any(mutates(node) for node in graph.graph.nodes)
    torch.testing.assert_close(graph(*tensors), function(*tensors))


def test_a_shape_changed_in_place_is_a_view() -> None:
    vector, matrix = torch.randn(4), torch.randn(4, 3)
    graph = simplified(lambda v, m: v @ m * 1.0, vector, matrix)
    assert not any(mutates(node) for node in graph.graph.nodes)
    torch.testing.assert_close(graph(vector, matrix), vector @ matrix)
