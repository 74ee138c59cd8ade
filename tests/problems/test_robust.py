"""Robust learning: the weights of clients, their common shift, and huge losses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.problems.robust import CAP, exponential
from fedstrata.training.metrics.evaluation import gradient_norm, objective
from support import make_clients, make_setting, sized_data, softmax_problem, started

SIZES = [9, 4, 7, 2, 4]
DATA = sized_data(SIZES)


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Softmax regression from a random starting point, scaled so that the clients' losses differ."""
    flat = softmax_problem(dtype=dtype).flat
    assert flat is not None
    with torch.no_grad():
        for weights in flat.module.parameters():
            weights.mul_(4)
    return flat.module


def losses_of(problem: fs.Problem, x: torch.Tensor) -> torch.Tensor:
    """Each client's loss on its whole data."""
    return torch.stack([problem.levels[0](x, DATA.train.of_client(k))[0] for k in range(DATA.clients)])


def weight_of(problem: fs.Problem, loss: float, dtype: torch.dtype = torch.float64) -> tuple[float, float]:
    """Value and derivative of the outer function where the inner one gives ``loss``."""
    u = torch.tensor([loss], dtype=dtype, requires_grad=True)
    value = problem.outer(u, ())
    assert value.dim() == 0
    return float(value.detach()), float(torch.autograd.grad(value, u)[0])


def prepared(problem: fs.Problem, **options: Any) -> fs.Problem:
    clients = make_clients(make_setting(problem, DATA, **options), participation=2, chunk=2)
    with torch.no_grad():
        started(fs.ComFedL(normalise=False), clients)
    return clients.problem


@pytest.mark.parametrize("gamma", [0.1, 0.5, 8.0, 1e6])
@pytest.mark.parametrize("shift", [0.0, 0.7, -2.0])
def test_the_weight_is_one_where_the_loss_is_the_shift(gamma: float, shift: float) -> None:
    problem = fs.robust(model(), gamma=gamma, shift=shift, prior=False)
    assert weight_of(problem, shift) == pytest.approx((gamma, 1.0), rel=1e-12)
    assert weight_of(problem, shift + 0.3)[1] == pytest.approx(math.exp(0.3 / gamma), rel=1e-9)


def test_the_objective_is_the_mean_of_the_links() -> None:
    problem = fs.robust(model(), gamma=0.5, shift=1.0, prior=False)
    losses = losses_of(problem, problem.x0)
    assert losses.max() > 2 * losses.min()
    expected = (0.5 * torch.exp((losses - 1.0) / 0.5)).mean()
    assert objective(problem, DATA, problem.x0, None) == pytest.approx(float(expected), rel=1e-12)
    assert (problem.name, problem.outer_draws, problem.kind) == (
        "robust",
        False,
        "1 inner level, a local inner mean, no dual",
    )
    assert problem.weighs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shift", [0.0, None])
@pytest.mark.parametrize("loss", [50.0, 1e4, 1e20])
def test_no_loss_is_so_high_that_it_overflows(loss: float, shift: float | None, dtype: torch.dtype) -> None:
    problem = fs.robust(model(dtype), gamma=0.1, shift=shift, prior=False)
    problem = problem if shift is not None else prepared(problem)
    value, weight = weight_of(problem, loss, dtype)
    higher, _ = weight_of(problem, 1.5 * loss, dtype)
    assert math.isfinite(value) and math.isfinite(weight)
    assert weight > 0
    assert higher > value


def test_a_run_survives_huge_losses_at_the_start() -> None:
    """gamma = 0.1 and losses of 80: exp(800) is infinite in every precision."""
    pairs = [(60 * inputs, targets) for inputs, targets in (DATA.train.of_client(k) for k in range(5))]
    data = fs.FederatedData.from_arrays(pairs, classes=2)
    problem = fs.robust(model(torch.float32), gamma=0.1, prior=False)
    with pytest.warns(UserWarning, match="weights will soon vanish and training will stall"):
        run = fs.train(problem, data, fs.ComFedL(lr=0.005), rounds=5, eval_every=5)
    assert run.history[0]["loss_worst"] > 70
    assert run.history[-1]["loss_worst"] < 0.8 * run.history[0]["loss_worst"]


def test_the_exponential_continues_as_its_tangent() -> None:
    u = torch.tensor([-3.0, 0.0, 1.9, 2.1, 7.0], dtype=torch.float64, requires_grad=True)
    value = exponential(u, cap=2.0)
    (slope,) = torch.autograd.grad(value.sum(), u, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), u)
    edge = math.exp(2.0)
    expected = [math.exp(-3.0), 1.0, math.exp(1.9), edge * 1.1, edge * 6.0]
    assert value.tolist() == pytest.approx(expected, rel=1e-12)
    assert slope.tolist() == pytest.approx([math.exp(-3.0), 1.0, math.exp(1.9), edge, edge], rel=1e-12)
    assert curvature.tolist() == pytest.approx([math.exp(-3.0), 1.0, math.exp(1.9), 0.0, 0.0], rel=1e-12)
    assert float(exponential(torch.tensor(CAP - 1e-3))) == pytest.approx(math.exp(CAP - 1e-3), rel=1e-4)


# --- the shift -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0.1, 0.5, 3.0])
@pytest.mark.parametrize("chunked", [{}, {"batch_size": None}])
def test_the_shift_is_gamma_log_mean_exp_of_the_first_losses(gamma: float, chunked: dict[str, Any]) -> None:
    problem = fs.robust(model(), gamma=gamma, prior=False)
    losses = losses_of(problem, problem.x0)
    shift = gamma * float(torch.log(torch.exp(losses / gamma).mean()))
    ready = prepared(problem, **chunked)
    assert weight_of(ready, shift) == pytest.approx((gamma, 1.0), rel=1e-9)
    weights = [weight_of(ready, float(loss))[1] for loss in losses]
    assert sum(weights) / len(weights) == pytest.approx(1.0, rel=1e-9)


def test_no_weight_exceeds_the_number_of_clients() -> None:
    ready = prepared(fs.robust(model(), gamma=0.1, prior=False))
    assert weight_of(ready, 1e3)[1] == pytest.approx(5.0, rel=1e-9)
    assert weight_of(fs.robust(model(), gamma=0.1, shift=0.0, prior=False), 1e3)[1] == pytest.approx(
        math.exp(CAP), rel=1e-9
    )


def test_training_uses_the_shift_that_was_learned() -> None:
    """The first step has weights that average to one."""
    problem = fs.robust(model(), gamma=0.5, prior=False)
    leaf = problem.x0.clone().requires_grad_()
    losses = losses_of(problem, leaf)
    weights = torch.exp(losses.detach() / 0.5) / torch.exp(losses.detach() / 0.5).mean()
    (gradient,) = torch.autograd.grad((weights * losses).mean(), leaf)
    run = fs.train(problem, DATA, fs.ComFedL(lr=0.1, steps=1, normalise=False), rounds=1)
    torch.testing.assert_close(run.x, problem.x0 - 0.1 * gradient, atol=1e-12, rtol=0)
    assert weight_of(run.problem, float(losses.max().detach()))[1] == pytest.approx(float(weights.max()), rel=1e-9)


def test_one_shift_is_shared_so_the_objective_is_only_rescaled() -> None:
    """A different shift for each client would change the direction."""
    problem = fs.robust(model(), gamma=0.5, shift=0.0, prior=False)
    ready = prepared(fs.robust(model(), gamma=0.5, prior=False))
    generator = torch.Generator().manual_seed(1)
    scales = []
    for _ in range(3):
        x = 0.1 * torch.randn(len(problem.x0), generator=generator, dtype=torch.float64)
        scales.append(objective(ready, DATA, x, None) / objective(problem, DATA, x, None))
        scales.append(gradient_norm(ready, DATA, x) / gradient_norm(problem, DATA, x))
    assert scales == pytest.approx([scales[0]] * 6, rel=1e-9)
    assert scales[0] != pytest.approx(1.0, abs=0.1)


def test_the_shift_is_asked_for_on_a_minibatch() -> None:
    asked = make_clients(make_setting(fs.robust(model(), prior=False), DATA, batch_size=3), participation=2, chunk=2)
    with torch.no_grad():
        started(fs.LocalMOML(), asked)
    d = len(asked.problem.x0)
    assert (asked.usage.bytes_down, asked.usage.bytes_up) == (5 * 8 * d, 5 * 8), "every client, whatever takes part"
    assert asked.usage.samples == 5 * 3


def test_after_a_run_the_query_is_answered() -> None:
    run = fs.train(fs.robust(model(), prior=False), DATA, fs.LocalMOML(lr=0.01), rounds=1)
    assert run.problem is not None and run.problem.query is None


@pytest.mark.parametrize("options", [{"shift": 0.0}, {"shift": 1.5}, {"link": "square"}, {"link": torch.exp}])
def test_a_shift_that_is_known_is_not_asked_for(options: dict[str, Any]) -> None:
    problem = fs.robust(model(), **options, prior=False)
    assert problem.query is None
    run = fs.train(problem, DATA, fs.LocalMOML(lr=0.01), rounds=1)
    first = run.history[0]
    assert (first["bytes_up"], first["bytes_down"], first["samples"]) == (0, 0, 0)


# --- links -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("link", "value", "weight"),
    [("square", 2.0 * 0.5 * 0.75**2, 0.75), (lambda u: u**3, 2.0 * 0.75**3, 3 * 0.75**2)],
    ids=["square", "a user's own"],
)
def test_other_links(link: Any, value: float, weight: float) -> None:
    problem = fs.robust(model(), gamma=2.0, link=link, prior=False)
    assert weight_of(problem, 1.5) == pytest.approx((value, weight), rel=1e-12)
    moved = fs.robust(model(), gamma=2.0, link=link, shift=0.5, prior=False)
    assert weight_of(moved, 2.0) == pytest.approx((value, weight), rel=1e-12)


def test_the_square_is_q_ffl_with_q_one() -> None:
    problem = fs.robust(model(), gamma=3.0, link="square", prior=False)
    leaf = problem.x0.clone().requires_grad_()
    direction = torch.autograd.grad((losses_of(problem, leaf) ** 2).mean() / 2, leaf)[0] / 3.0
    assert gradient_norm(problem, DATA, problem.x0) == pytest.approx(float(direction.norm()), rel=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 0}, r"The gamma of the robust problem must be a number above 0\. Got 0\."),
        ({"gamma": -0.5}, r"must be a number above 0\. Got -0\.5\."),
        ({"gamma": float("inf")}, r"must be a number above 0\. Got inf\."),
        ({"gamma": float("nan")}, r"must be a number above 0\. Got nan\."),
        ({"gamma": True}, r"must be a number above 0\. Got True\."),
        ({"gamma": "0.5"}, r"must be a number above 0\. Got '0\.5'\."),
        ({"shift": "low"}, r"The shift of the robust problem must be a number, or left out\. Got 'low'\."),
        ({"shift": float("nan")}, r"The shift of the robust problem must be a number, or left out"),
        (
            {"link": "expp"},
            r"must be 'exp' or 'square', or a function\. Got 'expp'\. Did you mean 'exp'\?",
        ),
        ({"link": 2}, r"The link of the robust problem must be 'exp' or 'square', or a function\. Got 2\."),
        ({"loss": "hinge"}, r"The loss of the robust problem must be 'cross_entropy', "),
        ({"inner_mean": "all"}, r"The inner_mean of the robust problem must be 'local' or 'global'"),
    ],
    ids=str,
)
def test_a_bad_robust_problem_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.InputError, match=message):
        fs.robust(model(), **options, prior=False)
