"""Values and derivatives for C clients at once equal plain autograd, one client at a time, and finite differences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.data.batch import Batch
from fedstrata.oracles import Oracles

D, R1, R2, P = 4, 3, 5, 2
GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


MIX = random(R2, R1)


def first(u: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    inputs, targets = batch
    return torch.tanh(inputs @ u).mean() * u[:R1] ** 2 + targets.mean()


def second(u: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    inputs, _ = batch
    return torch.sin(MIX @ u) + (inputs**2).mean() * u.sum()


def outer(u: torch.Tensor, y: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    inputs, targets = batch
    return (torch.exp(-(u**2)).sum() + inputs.mean()) * y[0] + (y[1] * u[0] - targets.mean()) ** 2 - 0.5 * y @ y


PROBLEM = fs.Problem(
    outer, random(D), levels=(first, second), y0=random(P), project_y=lambda y: y.clamp(-1, 1), name="user"
)

BATCHES = {
    "one client": Batch(((random(1, 6, D), random(1, 6)),)),
    "traced": Batch(((random(3, 6, D), random(3, 6)),), traced=True),
    "untraced": Batch(((random(3, 6, D), random(3, 6)),), traced=False),
    "ragged": Batch(
        ((random(1, 2, D), random(1, 2)), (random(2, 6, D), random(2, 6))),
        where=(torch.tensor([1]), torch.tensor([0, 2])),
        traced=False,
    ),
}


def own(batch: Batch, client: int) -> tuple[torch.Tensor, ...]:
    """Return what one client drew."""
    if batch.where is None:
        return tuple(a[client] for a in batch.parts[0])
    for where, part in zip(batch.where, batch.parts, strict=True):
        if client in where.tolist():
            return tuple(a[where.tolist().index(client)] for a in part)
    raise AssertionError(client)


def differences(f: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor, width: float = 1e-6) -> torch.Tensor:
    """Central differences of a scalar function."""
    steps = torch.eye(len(at), dtype=at.dtype) * width
    return torch.stack([(f(at + s) - f(at - s)) / (2 * width) for s in steps])


@pytest.fixture(params=BATCHES)
def batch(request: pytest.FixtureRequest) -> Batch:
    return BATCHES[request.param]


@pytest.fixture(params=["outside", "inside no_grad"])
def gradients_off(request: pytest.FixtureRequest) -> bool:
    return request.param == "inside no_grad"


def test_levels_are_the_functions(batch: Batch) -> None:
    oracles = Oracles(PROBLEM)
    for k, level, size in ((1, first, D), (2, second, R1)):
        u = random(batch.clients, size)
        values = oracles.level(k, u, batch)
        expected = torch.stack([level(u[c], own(batch, c)) for c in range(batch.clients)])
        torch.testing.assert_close(values, expected, atol=1e-12, rtol=0)


def test_pullbacks_are_transposed_jacobians(batch: Batch, gradients_off: bool) -> None:
    oracles = Oracles(PROBLEM)
    for k, level, size, result in ((1, first, D, R1), (2, second, R1, R2)):
        u, cotangent = random(batch.clients, size), random(batch.clients, result)
        with torch.set_grad_enabled(not gradients_off):
            pulled = oracles.level_vjp(k, u, cotangent, batch)
        assert pulled.shape == (batch.clients, size)
        for c in range(batch.clients):
            data = own(batch, c)
            jacobian = torch.autograd.functional.jacobian(lambda z, level=level, data=data: level(z, data), u[c])
            torch.testing.assert_close(pulled[c], jacobian.T @ cotangent[c], atol=1e-12, rtol=0)
            finite = differences(lambda z, level=level, data=data, w=cotangent[c]: level(z, data) @ w, u[c])
            torch.testing.assert_close(pulled[c], finite, atol=1e-7, rtol=1e-7)


def test_the_outer_function_and_both_gradients(batch: Batch, gradients_off: bool) -> None:
    oracles = Oracles(PROBLEM)
    u, y = random(batch.clients, R2), random(batch.clients, P)
    with torch.set_grad_enabled(not gradients_off):
        values = oracles.outer(u, y, batch)
        in_u, in_y = oracles.outer_grads(u, y, batch)
    assert values.shape == (batch.clients,)
    for c in range(batch.clients):
        data = own(batch, c)
        leaf_u, leaf_y = u[c].clone().requires_grad_(), y[c].clone().requires_grad_()
        value = outer(leaf_u, leaf_y, data)
        expected = torch.autograd.grad(value, (leaf_u, leaf_y))
        torch.testing.assert_close(values[c], value.detach(), atol=1e-12, rtol=0)
        torch.testing.assert_close(in_u[c], expected[0], atol=1e-12, rtol=0)
        torch.testing.assert_close(in_y[c], expected[1], atol=1e-12, rtol=0)
        torch.testing.assert_close(
            in_u[c], differences(lambda z, y=y[c], data=data: outer(z, y, data), u[c]), atol=1e-7, rtol=1e-7
        )
        torch.testing.assert_close(
            in_y[c], differences(lambda z, u=u[c], data=data: outer(u, z, data), y[c]), atol=1e-7, rtol=1e-7
        )


def test_a_graph_is_used_again_with_new_numbers() -> None:
    oracles = Oracles(PROBLEM)
    for _ in range(3):
        batch = Batch(((random(3, 6, D), random(3, 6)),), traced=True)
        plain = Batch(batch.parts, traced=False)
        u, y = random(3, R2), random(3, P)
        for ours, theirs in zip(oracles.outer_grads(u, y, batch), oracles.outer_grads(u, y, plain), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-13, rtol=0)
    assert len(oracles._graphs) == 1


@pytest.mark.parametrize("clients", [1, 3])
def test_messages_that_are_one_vector_seen_many_times(clients: int) -> None:
    """The server's vector is expanded over the clients, not copied."""
    oracles = Oracles(PROBLEM)
    batch = Batch(((random(clients, 6, D), random(clients, 6)),))
    u, y = random(R2), random(P)
    expanded = oracles.outer_grads(u.expand(clients, R2), y.expand(clients, P), batch)
    copied = oracles.outer_grads(u.repeat(clients, 1), y.repeat(clients, 1), batch)
    assert all(torch.equal(a, b) for a, b in zip(expanded, copied, strict=True))


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("traced", [True, False])
def test_what_a_function_ignores_has_a_zero_gradient(clients: int, traced: bool) -> None:
    x0 = torch.zeros(3, dtype=torch.float64)
    batch = Batch(((random(clients, 2, 1),),), traced=traced)
    u, y = random(clients, 3), random(clients, 3)

    only_u = Oracles(fs.Problem(lambda u, y, batch: (u**2).sum(), x0, y0=x0)).outer_grads(u, y, batch)
    assert torch.equal(only_u[1], torch.zeros_like(y))
    torch.testing.assert_close(only_u[0], 2 * u)

    constant = Oracles(fs.Problem(lambda u, batch: u.sum(), x0, levels=(lambda u, batch: batch[0].sum() * x0,)))
    assert torch.equal(constant.level_vjp(1, u, y, batch), torch.zeros_like(u))


def test_a_problem_without_dual_has_one_gradient() -> None:
    oracles = Oracles(fs.Problem(lambda u, batch: (u * batch[0].mean()).sum(), torch.zeros(2, dtype=torch.float64)))
    for clients in (1, 2):
        batch = Batch(((random(clients, 4, 1),),))
        (gradient,) = oracles.outer_grads(random(clients, 2), None, batch)
        torch.testing.assert_close(gradient, batch.parts[0][0].mean((1, 2))[:, None].expand(clients, 2))


# --- the problem itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("levels", "dual", "kind"),
    [
        (0, False, "no inner level, no dual"),
        (1, False, "1 inner level, no dual"),
        (2, True, "2 inner levels, a dual"),
    ],
)
def test_a_problem_tells_its_class(levels: int, dual: bool, kind: str) -> None:
    problem = fs.Problem(outer, torch.zeros(2), levels=(first,) * levels, y0=torch.zeros(1) if dual else None)
    assert problem.kind == kind
    assert problem.dual is dual


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x0": np.zeros(3)}, "x0 of the problem problem must be a vector of floats"),
        ({"x0": torch.zeros(3, 1)}, r"must be a vector of floats .* Got 'Tensor of shape \(3, 1\), torch.float32'"),
        ({"x0": torch.zeros(3, dtype=torch.int64)}, "must be a vector of floats"),
        ({"x0": torch.zeros(3), "y0": torch.zeros(())}, "y0 of the problem problem must be a vector of floats"),
        ({"x0": torch.zeros(3), "inner_mean": "all"}, "inner_mean must be 'local' or 'global'"),
        ({"x0": torch.zeros(3), "project_y": lambda y: y}, "has project_y but no dual: pass y0 too"),
    ],
)
def test_a_bad_problem_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(fs.InputError, match=message):
        fs.Problem(outer, **arguments, name="problem")  # type: ignore[arg-type]
