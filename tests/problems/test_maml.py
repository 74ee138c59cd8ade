"""Meta-learning: the adapted loss and its gradient, written out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.data.batch import Batch
from fedstrata.problems.maml import GradientStep
from fedstrata.problems.oracles import Oracles
from fedstrata.training.metrics.evaluation import gradient_norm, objective
from support import make_client, make_clients, make_setting, sized_data, softmax_problem, started

DATA = sized_data([9, 4, 12, 6], features=4, classes=3)
SPLIT = DATA.with_support(0.4, seed=1)
LR = 0.3


def model() -> nn.Module:
    flat = softmax_problem(features=4, classes=3).flat
    assert flat is not None
    return flat.module


def rows(data: fs.FederatedData, client: int, level: int) -> tuple[torch.Tensor, ...]:
    """The rows that a client has for a level; 0 is the outer function."""
    return data.part(level).of_client(client)


def adapted_loss(x: torch.Tensor, data: fs.FederatedData, client: int, steps: int) -> torch.Tensor:
    """loss(x after gradient steps on the support rows) on the query rows, differentiable in x."""
    loss = fs.erm(model(), prior=False).outer
    u = x
    for _ in range(steps):
        leaf = u if u.requires_grad else u.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(leaf, rows(data, client, 1)), leaf, create_graph=True)
        u = leaf - LR * gradient
    return loss(u, rows(data, client, 0))


@pytest.mark.parametrize("data", [DATA, SPLIT], ids=["the same rows", "support and query"])
@pytest.mark.parametrize("steps", [1, 2])
def test_the_objective_and_its_gradient_are_those_of_the_adapted_loss(steps: int, data: fs.FederatedData) -> None:
    problem = fs.maml(model(), inner_lr=LR, steps=steps, prior=False)
    assert len(problem.levels) == steps
    assert (problem.name, problem.adapt, problem.outer_draws) == ("maml", (steps, LR), True)
    leaf = problem.x0.clone().requires_grad_()
    value = torch.stack([adapted_loss(leaf, data, k, steps) for k in range(data.clients)]).mean()
    (gradient,) = torch.autograd.grad(value, leaf)
    assert objective(problem, data, problem.x0, None) == pytest.approx(float(value.detach()), rel=1e-12)
    assert gradient_norm(problem, data, problem.x0) == pytest.approx(float(gradient.norm()), rel=1e-12)
    run = fs.train(problem, data, fs.ComFedL(lr=0.2, steps=1), rounds=1)
    torch.testing.assert_close(run.x, problem.x0 - 0.2 * gradient, atol=1e-12, rtol=0)


def test_support_and_query_give_another_problem_than_the_same_rows() -> None:
    problem = fs.maml(model(), inner_lr=LR, prior=False)
    ours, theirs = (fs.train(problem, d, fs.ComFedL(steps=1), rounds=1).x for d in (SPLIT, DATA))
    assert (ours - theirs).abs().max() > 1e-3


def test_inner_levels_draw_from_the_support_rows_and_the_outer_function_from_the_rest() -> None:
    client = make_client(make_setting(fs.maml(model(), steps=2, prior=False), SPLIT, batch_size=3), [2, 0, 3, 1])
    for stream in range(20):
        for level, batch in zip((1, 2, 0), client.draw_all(stream), strict=True):
            for c, k in enumerate(client.ids.tolist()):
                allowed = rows(SPLIT, k, level)[0].tolist()
                assert all(sample in allowed for sample in batch.parts[0][0][c].tolist())


def test_a_clients_step_does_not_depend_on_the_others() -> None:
    """Query and support of unequal lengths, all data at once."""
    problem = fs.maml(model(), inner_lr=LR, steps=2, prior=False)
    found = []
    for chunk in (1, 2, 4):
        clients = make_clients(make_setting(problem, SPLIT), chunk=chunk)
        found.append(clients.gather(lambda c, x: c.chain(x, c.draw_all()).gradient, problem.x0))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-12, rtol=0)


# --- first order -----------------------------------------------------------------------------------------------------


def test_first_order_drops_only_the_hessian() -> None:
    full, first = (fs.maml(model(), inner_lr=LR, first_order=flag, prior=False) for flag in (False, True))
    loss = fs.erm(model(), prior=False).outer
    gradients = []
    for problem in (full, first):
        client = make_client(make_setting(problem, SPLIT), list(range(4)))
        x = problem.x0.expand(4, -1)
        gradients.append(client.chain(x, client.draw_all()))
    torch.testing.assert_close(gradients[0].values, gradients[1].values, atol=1e-13, rtol=0)
    for k in range(4):
        adapted = gradients[0].values[0][k].clone().requires_grad_()
        (v,) = torch.autograd.grad(loss(adapted, rows(SPLIT, k, 0)), adapted)
        torch.testing.assert_close(gradients[1].gradient[k], v, atol=1e-12, rtol=0)
        hessian = torch.autograd.functional.hessian(lambda x, k=k: loss(x, rows(SPLIT, k, 1)), full.x0)
        difference = gradients[0].gradient[k] - gradients[1].gradient[k]
        torch.testing.assert_close(difference, -LR * hessian @ v, atol=1e-12, rtol=0)
        assert difference.norm() > 1e-3


@pytest.mark.parametrize("traced", [True, False])
def test_first_order_treats_the_jacobian_as_the_identity(traced: bool) -> None:
    problem = fs.maml(model(), inner_lr=LR, first_order=True, prior=False)
    setting = make_setting(problem, SPLIT, batch_size=3)
    client = make_client(setting, [2, 0])
    _, jacobian = client.g_jacobian(1, problem.x0.expand(2, -1), client.draw(1) if traced else client.all_data(1))
    torch.testing.assert_close(jacobian, torch.eye(len(problem.x0)).double().expand_as(jacobian), atol=1e-14, rtol=0)


# --- hard clients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [DATA, SPLIT], ids=["the same rows", "support and query"])
def test_damaml_weights_clients_by_their_loss_after_adapting(data: fs.FederatedData) -> None:
    """Both levels draw from the support rows, if there are any; the outer function uses no data."""
    problem = fs.damaml(model(), inner_lr=LR, gamma=0.5, shift=0.9, prior=False)
    assert problem.kind == "2 inner levels, a local inner mean, no dual"
    assert (problem.name, problem.adapt, problem.outer_draws) == ("damaml", (1, LR), False)
    assert problem.weighs and not fs.maml(model(), prior=False).weighs
    loss = fs.erm(model(), prior=False).outer
    leaf = problem.x0.clone().requires_grad_()
    values = []
    for k in range(data.clients):
        (gradient,) = torch.autograd.grad(loss(leaf, rows(data, k, 1)), leaf, create_graph=True)
        values.append(0.5 * torch.exp((loss(leaf - LR * gradient, rows(data, k, 2)) - 0.9) / 0.5))
    value = torch.stack(values).mean()
    (gradient,) = torch.autograd.grad(value, leaf)
    assert objective(problem, data, problem.x0, None) == pytest.approx(float(value.detach()), rel=1e-12)
    run = fs.train(problem, data, fs.ComFedL(lr=0.2, steps=1, normalise=False), rounds=1)
    torch.testing.assert_close(run.x, problem.x0 - 0.2 * gradient, atol=1e-12, rtol=0)
    assert run.history[-1]["samples"] == 2 * int(data.part(1).sizes.sum())


def test_the_shift_of_damaml_is_of_the_losses_after_adapting() -> None:
    clients = make_clients(make_setting(fs.damaml(model(), inner_lr=LR, gamma=0.4, prior=False), DATA), chunk=3)
    with torch.no_grad():
        started(fs.ComFedL(normalise=False), clients)
    problem = clients.problem
    losses = torch.stack([adapted_loss(problem.x0, DATA, k, 1).detach() for k in range(4)])
    u = (0.4 * torch.log(torch.exp(losses / 0.4).mean())).reshape(1).requires_grad_()
    value = problem.outer(u, ())
    assert float(value.detach()) == pytest.approx(0.4, rel=1e-10)
    assert float(torch.autograd.grad(value, u)[0]) == pytest.approx(1.0, rel=1e-10)


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (
            fs.maml,
            {"inner_lr": 0.0},
            r"The inner_lr of the maml problem must be a number above 0, or a schedule\. Got 0\.0\.",
        ),
        (fs.maml, {"inner_lr": float("nan")}, r"The inner_lr of the maml problem must be a number above 0"),
        (fs.maml, {"steps": 0}, r"The steps of the maml problem must be a whole number of at least 1\. Got 0\."),
        (fs.maml, {"steps": 1.5}, r"The steps of the maml problem must be a whole number"),
        (fs.maml, {"steps": True}, r"The steps of the maml problem must be a whole number"),
        (fs.maml, {"inner_mean": "all"}, r"The inner_mean of the maml problem must be 'local' or 'global'"),
        (fs.damaml, {"inner_lr": -1}, r"The inner_lr of the damaml problem must be a number above 0\. Got -1\."),
        (fs.maml, {"first_order": 1}, r"The first_order of the maml problem must be true or false\. Got 1\."),
        (fs.damaml, {"shift": float("inf")}, r"The shift of the damaml problem must be a number, or left out"),
        (fs.damaml, {"gamma": 0}, r"The gamma of the damaml problem must be a number above 0\. Got 0\."),
    ],
)
def test_a_bad_meta_learning_problem_is_refused(build: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.InputError, match=message):
        build(model(), **options)


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("first_order", [False, True])
@pytest.mark.parametrize("forward", [False, True])
def test_both_modes_pull_back_as_autograd_does(forward: bool, first_order: bool, clients: int) -> None:
    """Traced and not, of one client and of several."""
    net = fs.models.model("patchnet", (1, 8, 8), 3, width=4, seed=1).double()
    loss = fs.erm(net, prior=False).outer
    step = GradientStep(loss, 0.3, first_order, forward)
    generator = torch.Generator().manual_seed(0)
    x0 = fs.erm(net, prior=False).x0
    problem = fs.multilevel([step], loss, x0)
    inputs = torch.randn(clients, 5, 1, 8, 8, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 3, (clients, 5), generator=generator)
    u, c = (torch.randn(clients, len(x0), generator=generator, dtype=torch.float64) for _ in range(2))
    for traced in (True, False):
        found = Oracles(problem).level_vjp(1, u, c, Batch(((inputs, targets),), traced=traced))
        for k in range(clients):
            leaf = u[k].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(loss(leaf, (inputs[k], targets[k])), leaf, create_graph=True)
            product = 0 if first_order else torch.autograd.grad(gradient, leaf, c[k])[0]
            torch.testing.assert_close(found[k], c[k] - 0.3 * product, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("name", "forward"), [("lenet5", False), ("mlp", False), ("cnn7", True), ("resnet20", True)])
def test_models_of_many_convolutions_take_forward_mode(name: str, forward: bool) -> None:
    net = fs.models.model(name, (3, 32, 32), 2, **({"width": 8} if forward else {}))
    (level,) = fs.maml(net, prior=False).levels
    assert isinstance(level, GradientStep) and level.forward == forward


@pytest.mark.parametrize("layer", ["layer", "instance", "batch"])
def test_second_derivatives_of_normalised_models_do_not_depend_on_the_chunk(layer: str) -> None:
    norms = {
        "layer": nn.LayerNorm(8),
        "instance": nn.Sequential(nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, affine=True), nn.Flatten()),
        "batch": nn.BatchNorm1d(8, track_running_stats=False),
    }
    net = nn.Sequential(nn.Linear(6, 8), norms[layer], nn.Tanh(), nn.Linear(8, 2)).double()
    sites = [(torch.randn(10, 6, dtype=torch.float64), torch.randint(0, 2, (10,))) for _ in range(3)]
    data = fs.FederatedData.from_arrays(sites, classes=2)
    settings = {"rounds": 2, "batch_size": 5, "seed": 0}
    runs = [
        fs.train(fs.maml(net, inner_lr=0.5, prior=False), data, fs.ComFedL(lr=0.3), chunk=c, **settings) for c in (1, 3)
    ]
    torch.testing.assert_close(runs[0].x, runs[1].x, rtol=1e-9, atol=1e-11)
