"""Values and derivatives for C clients at once equal plain autograd, one client at a time, and finite differences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.data.batch import NO_DATA, Batch
from fedstrata.problems.oracles import Chain, Oracles
from fedstrata.problems.projections import simplex as project_simplex

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
        owners=np.array([1, 0, 1]),
        traced=False,
    ),
}


def own(batch: Batch, client: int) -> tuple[torch.Tensor, ...]:
    """Return the batch of one client."""
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
    assert len(oracles._runner.graphs) == 1


@pytest.mark.parametrize("clients", [1, 3])
def test_an_expanded_vector(clients: int) -> None:
    """The server's vector is expanded over the clients, not copied."""
    oracles = Oracles(PROBLEM)
    batch = Batch(((random(clients, 6, D), random(clients, 6)),))
    u, y = random(R2), random(P)
    expanded = oracles.outer_grads(u.expand(clients, R2), y.expand(clients, P), batch)
    copied = oracles.outer_grads(u.repeat(clients, 1), y.repeat(clients, 1), batch)
    assert all(torch.equal(a, b) for a, b in zip(expanded, copied, strict=True))


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("traced", [True, False])
def test_the_gradient_of_an_ignored_argument_is_zero(clients: int, traced: bool) -> None:
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


# --- all layers in one pass -------------------------------------------------------------------------------------------


OUTPUTS = {1: R1, 2: R2}
LAYERS = {1: first, 2: second}


def plain(u: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    inputs, targets = batch
    return torch.exp(-(u**2)).sum() * inputs.mean() + (u[0] - targets.mean()) ** 2


def layered(levels: int, dual: bool) -> fs.Problem:
    """The first ``levels`` of the two levels above, and an outer function with or without a dual."""
    functions = tuple(LAYERS[k] for k in range(1, levels + 1))
    return fs.Problem(outer if dual else plain, random(D), levels=functions, y0=random(P) if dual else None)


def even(clients: int, length: int, traced: bool = True) -> Batch:
    return Batch(((random(clients, length, D), random(clients, length)),), traced=traced)


def uneven(*groups: tuple[int, list[int]]) -> Batch:
    """A batch in which groups of clients have different numbers of samples: (number, clients)."""
    parts = tuple((random(len(who), length, D), random(len(who), length)) for length, who in groups)
    owners = np.array([part for _, part in sorted((client, i) for i, (_, who) in enumerate(groups) for client in who)])
    return Batch(parts, tuple(torch.tensor(who) for _, who in groups), False, owners=owners)


def through(
    problem: fs.Problem,
    x: torch.Tensor,
    y: torch.Tensor | None,
    data: list[tuple[torch.Tensor, ...]],
    offsets: list[torch.Tensor] | None,
    weight: float,
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """One client's pass by plain autograd: the gradient, the values of the levels, the gradients of f."""
    u, values, jacobians = x, [], []
    for k, level in enumerate(problem.levels):
        jacobians.append(torch.autograd.functional.jacobian(lambda z, k=k, level=level: level(z, data[k]), u))
        values.append(level(u, data[k]))
        u = values[-1] if offsets is None else offsets[k] + weight * values[-1]
    leaves = [v.clone().requires_grad_() for v in (u, *(() if y is None else (y,)))]
    grads = torch.autograd.grad(problem.outer(*leaves, data[-1]), leaves)
    gradient = grads[0]
    for jacobian in reversed(jacobians):
        gradient = jacobian.T @ gradient
    return gradient, values, list(grads)


def assert_chain(
    problem: fs.Problem, batches: list[Batch], clients: int, weight: float | None, oracles: Oracles | None = None
) -> None:
    """Compare a pass for all clients at once with each client's own; ``weight`` None is without offsets."""
    oracles = Oracles(problem) if oracles is None else oracles
    levels = len(problem.levels)
    x = random(clients, D)
    y = random(clients, len(problem.y0)) if problem.y0 is not None else None
    offsets = None if weight is None else [random(clients, OUTPUTS[k]) for k in range(1, levels + 1)]
    found = oracles.chain(x, y, batches, offsets, *(() if weight is None else (weight,)))
    assert isinstance(found, Chain)
    assert len(found.values) == levels
    assert len(found.outer_grads) == (2 if problem.dual else 1)
    for c in range(clients):
        gradient, values, grads = through(
            problem,
            x[c],
            None if y is None else y[c],
            [own(b, c) for b in batches],
            None if offsets is None else [o[c] for o in offsets],
            1.0 if weight is None else weight,
        )
        torch.testing.assert_close(found.gradient[c], gradient, atol=1e-12, rtol=1e-12)
        for ours, theirs in zip(found.values, values, strict=True):
            torch.testing.assert_close(ours[c], theirs, atol=1e-12, rtol=1e-12)
        for ours, theirs in zip(found.outer_grads, grads, strict=True):
            torch.testing.assert_close(ours[c], theirs, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize(
    ("traced", "weight"), [(True, None), (True, 0.3), (False, None), (False, 1.0), (False, 0.3), (False, 0.0)]
)
@pytest.mark.parametrize("levels", [0, 1, 2])
@pytest.mark.parametrize("dual", [False, True])
def test_a_pass_through_all_layers(levels: int, dual: bool, weight: float | None, traced: bool, clients: int) -> None:
    """Each layer has a batch of its own length."""
    batches = [even(clients, 4 + k, traced) for k in range(levels + 1)]
    assert_chain(layered(levels, dual), batches, clients, weight)


def test_a_pass_without_offsets_is_the_gradient_of_the_composition(gradients_off: bool) -> None:
    problem = layered(2, True)
    batches = [even(3, 4), even(3, 5), even(3, 6)]
    x, y = random(3, D), random(3, P)
    with torch.set_grad_enabled(not gradients_off):
        found = Oracles(problem).chain(x, y, batches)
    for c in range(3):
        leaf = x[c].clone().requires_grad_()
        data = [own(b, c) for b in batches]
        value = outer(second(first(leaf, data[0]), data[1]), y[c], data[2])
        torch.testing.assert_close(found.gradient[c], torch.autograd.grad(value, leaf)[0], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("weight", [None, 0.3])
@pytest.mark.parametrize("dual", [False, True])
def test_batch_lengths_may_differ_between_clients_and_levels(dual: bool, weight: float | None) -> None:
    """As with support data: a client's inner batch, outer batch, both or neither may be short."""
    inner = uneven((2, [1, 3]), (5, [0, 2, 4]))
    middle = uneven((3, [4]), (6, [0, 2]), (7, [1, 3]))
    outside = uneven((4, [0, 3]), (5, [1, 2, 4]))
    problem = layered(2, dual)
    for batches in (
        [inner, middle, outside],
        [inner, even(5, 4), outside],
        [even(5, 3), even(5, 4, False), outside],
        [inner, even(5, 4), even(5, 2)],
    ):
        assert_chain(problem, batches, 5, weight)


def test_one_graph_for_every_weight_and_offset() -> None:
    oracles = Oracles(layered(1, False))
    for weight in (1.0, 0.25, 0.0):
        assert_chain(oracles.problem, [even(3, 4), even(3, 5)], 3, weight, oracles)
    assert len(oracles._runner.graphs) == 1


def test_a_layer_that_branches_on_values_runs_one_client_at_a_time() -> None:
    def decides(u: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return first(u, batch) if float(u.detach().sum()) > 0 else -2 * first(u, batch)

    problem = fs.Problem(plain, random(D), levels=(decides,), name="deciding")
    oracles = Oracles(problem)
    batches = [even(4, 4), even(4, 5)]
    with pytest.warns(UserWarning, match="deciding runs one client at a time"):
        assert_chain(problem, batches, 4, 0.3, oracles)
    assert_chain(problem, batches, 4, 0.3, oracles)
    ragged = [uneven((2, [0, 3]), (4, [1, 2])), even(4, 5)]
    assert_chain(problem, ragged, 4, 0.3, oracles)


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("inner", ["even", "uneven"])
def test_an_outer_function_without_data(clients: int, inner: str) -> None:
    def blind(u: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        assert batch == ()
        return torch.exp(u).sum()

    problem = fs.Problem(blind, random(D), levels=(first,), outer_draws=False)
    oracles = Oracles(problem)
    batch = even(clients, 4) if inner == "even" else uneven(*[(2 + k % 2, [k]) for k in range(clients)])
    x = random(clients, D)
    found = oracles.chain(x, None, [batch, NO_DATA])
    u = oracles.level(1, x, batch)
    torch.testing.assert_close(found.outer_grads[0], u.exp(), atol=1e-12, rtol=0)
    torch.testing.assert_close(found.gradient, oracles.level_vjp(1, x, u.exp(), batch), atol=1e-12, rtol=0)
    torch.testing.assert_close(oracles.outer(u, None, NO_DATA), u.exp().sum(1), atol=1e-12, rtol=0)
    torch.testing.assert_close(oracles.outer_grads(u, None, NO_DATA)[0], u.exp(), atol=1e-12, rtol=0)


NUMBERS = np.array([7, 2, 5])


@pytest.mark.parametrize("who", [NUMBERS, NUMBERS[1:2]], ids=["three", "one"])
@pytest.mark.parametrize("data", ["even", "uneven", "none"])
def test_a_batch_that_ends_with_the_clients_number(who: np.ndarray, data: str) -> None:
    """The dual of a mixture: every client sees its own entry of y."""

    def own_entry(u: torch.Tensor, y: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        *arrays, number = batch
        scale = arrays[0].mean() if arrays else 1.0
        return y.gather(0, number.reshape(1)).squeeze(0) * scale * (u**2).sum()

    clients = len(who)
    problem = fs.Problem(own_entry, random(R1), levels=(first,), y0=random(9), project_y=project_simplex, mixture=True)
    groups = ((2, [0]), (4, list(range(1, clients))))
    seen = {"even": even(clients, 4), "uneven": uneven(*groups[: min(2, clients)]), "none": NO_DATA}[data]
    batch = seen.numbered(torch.from_numpy(who))
    assert batch.clients == clients
    oracles = Oracles(problem)
    u, y, inner = random(clients, D), random(clients, 9), even(clients, 3)
    chain = oracles.chain(u, y, [inner, batch])
    values = oracles.outer(chain.values[0], y, batch)
    for c, number in enumerate(who.tolist()):
        scale = 1.0 if data == "none" else own(seen, c)[0].mean()
        h = first(u[c], own(inner, c))
        torch.testing.assert_close(values[c], y[c, number] * scale * h @ h, atol=1e-12, rtol=0)
        in_y = torch.zeros(9, dtype=torch.float64)
        in_y[number] = scale * h @ h
        torch.testing.assert_close(chain.outer_grads[1][c], in_y, atol=1e-12, rtol=0)
        torch.testing.assert_close(chain.outer_grads[0][c], 2 * y[c, number] * scale * h, atol=1e-12, rtol=0)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_pass_needs_a_batch_for_each_layer(number: int) -> None:
    oracles = Oracles(layered(1, False))
    with pytest.raises(fs.FedstrataError, match=rf"A chain of 1 levels takes 2 batches\. Got {number}\."):
        oracles.chain(random(2, D), None, [even(2, 3)] * number)


def test_a_dual_is_passed_if_and_only_if_there_is_one() -> None:
    batches = [even(2, 3)]
    with pytest.raises(fs.FedstrataError, match="has a dual: pass y"):
        Oracles(layered(0, True)).chain(random(2, D), None, batches)
    with pytest.raises(fs.FedstrataError, match="has no dual: pass no y"):
        Oracles(layered(0, False)).chain(random(2, D), random(2, P), batches)


# --- Jacobians --------------------------------------------------------------------------------------------------------


def single(u: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """One number, as the loss of the robust problem is."""
    return torch.exp(-(batch[0] @ u)).mean().reshape(1)


@pytest.mark.parametrize(("level", "size"), [(single, D), (first, D), (second, R1)], ids=["r = 1", "r = 3", "r = 5"])
def test_the_value_and_the_jacobian(batch: Batch, gradients_off: bool, level: fs.problem.Level, size: int) -> None:
    oracles = Oracles(fs.Problem(lambda u, batch: u.sum(), random(D), levels=(level,)))
    u = random(batch.clients, size)
    with torch.set_grad_enabled(not gradients_off):
        value, jacobian = oracles.level_jacobian(1, u, batch)
    for c in range(batch.clients):
        data = own(batch, c)
        torch.testing.assert_close(value[c], level(u[c], data), atol=1e-12, rtol=0)
        expected = torch.autograd.functional.jacobian(lambda z, data=data: level(z, data), u[c])
        assert jacobian[c].shape == expected.shape
        torch.testing.assert_close(jacobian[c], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("traced", [True, False])
def test_the_jacobian_of_a_constant_is_zero(clients: int, traced: bool) -> None:
    zero = torch.zeros(2, dtype=torch.float64)
    oracles = Oracles(fs.Problem(lambda u, batch: u.sum(), random(D), levels=(lambda u, b: b[1].mean() + zero,)))
    _, jacobian = oracles.level_jacobian(1, random(clients, D), even(clients, 3, traced))
    assert torch.equal(jacobian, torch.zeros(clients, 2, D, dtype=torch.float64))


# --- the problem itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("levels", "dual", "kind"),
    [
        (0, False, "no inner level, no dual"),
        (1, False, "1 inner level, a local inner mean, no dual"),
        (2, True, "2 inner levels, a local inner mean, a dual"),
    ],
)
def test_the_kind_of_a_problem(levels: int, dual: bool, kind: str) -> None:
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
        ({"x0": torch.zeros(3), "y0": torch.zeros(3), "mixture": True}, "pass y0 and a project_y onto the simplex too"),
        ({"x0": torch.zeros(3), "mixture": True}, "is a mixture: pass y0 and a project_y onto the simplex too"),
    ],
)
def test_a_bad_problem_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(fs.InputError, match=message):
        fs.Problem(outer, **arguments, name="problem")  # type: ignore[arg-type]


def test_the_kind_includes_inner_mean_and_mixture() -> None:
    x0 = torch.zeros(2)
    inside = fs.Problem(outer, x0, levels=(first,), inner_mean="global")
    assert inside.kind == "1 inner level, a global inner mean, no dual"
    assert fs.Problem(outer, x0, inner_mean="global").kind == "no inner level, no dual"
    mixed = fs.Problem(outer, x0, y0=x0, project_y=project_simplex, mixture=True)
    assert mixed.kind == "no inner level, a dual that weights the clients"


def test_a_vector_of_one_client_does_not_fit_a_batch_of_several() -> None:
    problem, data = fs.erm(torch.nn.Linear(3, 2)), (torch.randn(4, 5, 3), torch.zeros(4, 5, dtype=torch.long))
    with pytest.raises(fs.FedstrataError, match=r"one row for each client\. Got 1 and 4"):
        Oracles(problem).outer_grads(problem.x0[None], None, Batch((data,)))
