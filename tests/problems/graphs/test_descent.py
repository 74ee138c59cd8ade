"""A step in place gives what the gradient says, and is refused where it could give something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.data.batch import Batch
from fedstrata.problems.graphs.compiler import Compiler
from fedstrata.problems.graphs.descent import trace_descent
from fedstrata.problems.oracles import Oracles

RATE, KEEP = 0.3, 0.9


class Tied(nn.Module):
    """A model that uses the same weights in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.layer(inputs)))


class Heads(nn.Module):
    """A model whose weights have an axis of their own, so that their gradient is a batch of products."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 4, 3)), nn.Parameter(torch.randn(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.bmm(inputs.view(-1, 3, 4).transpose(0, 1), self.weight).sum(0) + self.bias


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "logreg": lambda: (nn.Linear(6, 3), (6,)),
    "one output": lambda: (nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1), nn.Linear(1, 3)), (6,)),
    "mlp": lambda: (nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 3, bias=False)), (6,)),
    "heads": lambda: (Heads(), (12,)),
    "tied": lambda: (Tied(), (6,)),
    "convolutional": lambda: (nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3)), (1, 8, 8)),
    "normalised": lambda: (nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)), (6,)),
}


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_that_of_the_gradient(name: str, clients: int) -> None:
    torch.manual_seed(0)
    model, shape = MODELS[name]()
    problem = fs.erm(model.double())
    oracles = Oracles(problem)
    x = problem.x0 + 0.1 * torch.randn(clients, len(problem.x0), dtype=torch.float64)
    inputs, targets = torch.randn(clients, 5, *shape, dtype=torch.float64), torch.randint(0, 3, (clients, 5))
    batch = Batch(((inputs, targets),), traced=True)
    with torch.no_grad():
        expected = KEEP * x - RATE * oracles.outer_grads(x, None, Batch(batch.parts, traced=False))[0]
        for _ in range(2):
            moved = x.clone()
            assert oracles.descend(moved, batch, RATE, KEEP) is moved
            torch.testing.assert_close(moved, expected, rtol=1e-12, atol=1e-12)
    assert any(step for form, step in oracles._runner.graphs.items() if form[0] == "step")


def squares(x: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor]:
    """The gradient of |x|^2 / 2: x itself."""
    return (x,)


def pieces_of_x(x: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor]:
    """A gradient whose parts are other parts of x."""
    return (torch.cat([x[2:], x[:2]]),)


def product_with_x(x: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor]:
    """A gradient whose first part is a product with the second part of x."""
    return (torch.cat([(a @ x[4:].view(2, 2)).view(-1), x[:4] * 2]),)


def in_place(x: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor]:
    """A function that changes its argument."""
    return (a.add_(1).sum() * x.cos(),)


def branches(x: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor]:
    """A function that depends on a value."""
    return (x * 2 if a.sum() > 0 else x * 3,)


class Flips:
    """A function that records another sign than it has afterwards, next to a large x."""

    calls = 0

    def __call__(self, x: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor]:
        self.calls += 1
        return (1e-4 * torch.cos(x) * (1 if self.calls % 2 else -1),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_small_gradient_is_compared_too(dtype: torch.dtype) -> None:
    x, a = 1 + torch.rand(50, dtype=dtype), torch.ones(2, 2, dtype=dtype)
    assert trace_descent(Flips(), x, a) is None
    assert trace_descent(lambda x, a: (1e-4 * torch.cos(x),), x, a) is not None


def test_rows_of_other_clients_are_refused_and_strides_do_not_matter() -> None:
    problem = fs.erm(nn.Linear(4, 2))
    oracles = Oracles(problem)
    x, targets = torch.randn(3, len(problem.x0)), torch.randint(0, 2, (3, 5))
    plain, turned = torch.randn(3, 5, 4), torch.randn(3, 4, 5).transpose(1, 2)
    with torch.no_grad():
        for inputs in (plain, turned):
            batch = Batch(((inputs, targets),))
            expected = x - RATE * oracles.outer_grads(x, None, batch)[0]
            torch.testing.assert_close(oracles.descend(x.clone(), batch, RATE), expected)
        with pytest.raises(fs.FedstrataError, match=r"one row for each client\. Got 1 and 3"):
            oracles.descend(x[:1].clone(), Batch(((plain, targets),)), RATE)


def test_inner_gradients_of_a_step_are_written_straight_into_their_vector(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("compile"):
        pytest.skip("compiled code has a memory plan of its own")
    problem = fs.maml(nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3)), inner_lr=0.1)
    oracles = Oracles(problem)
    batches = [Batch(((torch.randn(1, 5, 300), torch.randint(0, 3, (1, 5))),)) for _ in range(2)]
    x = problem.x0[None].clone()
    with torch.no_grad():
        oracles.descend_chain(x, batches, RATE, None)
    (step,) = (graph for key, graph in oracles._runner.graphs.items() if key[0] == "step")
    assert "out =" in step._run.__self__.code


@pytest.mark.slow
def test_a_step_with_large_inner_gradients_can_be_compiled() -> None:
    problem = fs.maml(nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3)), inner_lr=0.1)
    batches = [Batch(((torch.randn(1, 5, 300), torch.randint(0, 3, (1, 5))),)) for _ in range(2)]
    moved = []
    for compiler in (Compiler(), None):
        oracles, x = Oracles(problem, compiler), problem.x0[None].clone()
        with torch.no_grad():
            oracles.descend_chain(x, batches, RATE, None)
        assert None not in oracles._runner.graphs.values()
        moved.append(x)
    torch.testing.assert_close(*moved)


@pytest.mark.parametrize("gradient", [squares, product_with_x, in_place, branches])
def test_a_step_that_could_be_wrong_is_refused(gradient: Callable[..., Any]) -> None:
    assert trace_descent(gradient, torch.arange(8.0), torch.ones(2, 2)) is None


def test_parts_that_are_copies_of_x_are_taken_as_they_were() -> None:
    x, a = torch.arange(8.0), torch.ones(2, 2)
    step = trace_descent(pieces_of_x, x, a)
    assert step is not None
    expected = KEEP * x - RATE * pieces_of_x(x, a)[0]
    step(x, (a,), RATE, KEEP)
    torch.testing.assert_close(x, expected)


def test_a_step_along_a_chain_is_scaled_by_its_outer_gradient() -> None:
    problem = fs.robust(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double(), gamma=0.5, shift=0.7)
    oracles = Oracles(problem)
    for clients in (1, 3):
        inputs, targets = torch.randn(clients, 6, 4).double(), torch.randint(0, 2, (clients, 6))
        batches = [Batch(((inputs, targets),), traced=True), Batch(((),), traced=True)]
        x = torch.randn(clients, len(problem.x0)).double()
        with torch.no_grad():
            chain = oracles.chain(x, None, batches)
            scales = {"none": (None, 1.0), "some": (lambda v: 2 / v, 2 / chain.outer_grads[0])}
            for scale, factor in scales.values():
                moved = x.clone()
                outer = oracles.descend_chain(moved, batches, RATE, scale)
                torch.testing.assert_close(outer, chain.outer_grads[0])
                torch.testing.assert_close(moved, x - RATE * factor * chain.gradient)
    assert sum(step is not None for form, step in oracles._runner.graphs.items() if form[0] == "step") == 2


class Lookup(nn.Module):
    """Two columns of numbers of words, with dictionaries of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Embedding(3, 4), nn.Embedding(50, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.small(inputs[:, 0].long()) + self.large(inputs[:, 1].long())


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize("chunk", [1, 3])
def test_a_graph_is_not_checked_with_numbers_that_a_model_cannot_take(chunk: int, dtype: torch.dtype) -> None:
    rows = torch.stack([torch.randint(0, 3, (3, 8)), torch.randint(40, 50, (3, 8))], -1).to(dtype)
    data = fs.FederatedData.from_arrays([(r, torch.randint(0, 4, (8,))) for r in rows], classes=4)
    run = fs.train(fs.erm(Lookup()), data, fs.FedAvg(lr=0.1), rounds=2, batch_size=4, chunk=chunk)
    assert torch.isfinite(run.x).all()


def test_several_groups_of_clients_take_the_step_of_the_gradient() -> None:
    problem = fs.erm(nn.Linear(4, 2))
    oracles = Oracles(problem)
    parts = tuple((torch.randn(1, n, 4), torch.randint(0, 2, (1, n))) for n in (3, 5))
    batch = Batch(parts, (torch.tensor([1]), torch.tensor([0])), traced=False)
    x = torch.randn(2, len(problem.x0))
    with torch.no_grad():
        expected = x - RATE * oracles.outer_grads(x, None, batch)[0]
        torch.testing.assert_close(oracles.descend(x.clone(), batch, RATE), expected)
