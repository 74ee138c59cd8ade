"""Where one algorithm is another: special values of hyperparameters, and known solutions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fedstrata as fs
from support import play, smooth_example

SETTINGS: dict[str, dict[str, Any]] = {
    "minibatches": {"batch_size": 4},
    "full batches": {"batch_size": None},
    "partial, weighted": {"batch_size": 4, "participation": 3, "weighting": "samples"},
    "epochs": {"batch_size": 4, "sampling": "epochs"},
}


def solve(algorithm: fs.Algorithm, rounds: int = 3, **options: Any) -> torch.Tensor:
    return play(algorithm, *smooth_example(), rounds, chunk=4, **options)[0].x


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    ("special", "plain"),
    [
        (fs.QFedAvg(q=0.0, lr=0.2, steps=4), fs.FedAvg(lr=0.2, steps=4)),
        (fs.FedProx(mu=0.0, lr=0.2, steps=4, server_lr=0.5), fs.FedAvg(lr=0.2, steps=4, server_lr=0.5)),
        (
            fs.FedAdam(beta1=0.0, beta2=0.0, tau=1e9, server_lr=1e9, lr=0.2, steps=4),
            fs.FedAvg(lr=0.2, steps=4, server_lr=1.0),
        ),
    ],
    ids=["q-FedAvg with q = 0", "FedProx with mu = 0", "FedAdam without adaptivity"],
)
def test_a_special_value_gives_fedavg(special: fs.Algorithm, plain: fs.Algorithm, setting: str) -> None:
    ours, theirs = solve(special, **SETTINGS[setting]), solve(plain, **SETTINGS[setting])
    assert (ours - theirs).abs().max() < 1e-8


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_first_round_of_scaffold_is_fedavg(setting: str, option: str) -> None:
    first, plain = fs.Scaffold(lr=0.2, steps=4, option=option), fs.FedAvg(lr=0.2, steps=4)
    assert (solve(first, 1, **SETTINGS[setting]) - solve(plain, 1, **SETTINGS[setting])).abs().max() < 1e-12
    assert (solve(first, 2, **SETTINGS[setting]) - solve(plain, 2, **SETTINGS[setting])).abs().max() > 1e-5


@pytest.mark.parametrize(
    "algorithm",
    [fs.FedAvg(lr=0.05, steps=1), fs.FedProx(lr=0.05, steps=1, mu=3.0), fs.Scaffold(lr=0.05, steps=1)],
    ids=lambda a: a.name,
)
def test_one_step_of_one_client_is_gradient_descent(algorithm: fs.Algorithm) -> None:
    q = fs.quadratic(clients=1, dimension=4, samples=9)
    h, b = q.data.train.arrays
    x = q.problem.x0.clone()
    for _ in range(5):
        x = x - 0.05 * (h * (x - b)).mean(0)
    run = fs.train(q.problem, q.data, algorithm, rounds=5)
    assert (run.x - x).abs().max() < 1e-13


def test_one_step_of_all_clients_is_gradient_descent_on_the_pooled_data() -> None:
    problem, data = smooth_example()
    data = data.to(torch.device("cpu"), torch.float64)
    x = problem.x0.clone()
    for _ in range(4):
        leaf = x.clone().requires_grad_()
        x = x - 0.3 * torch.autograd.grad(problem.outer(leaf, data.train.arrays), leaf)[0]
    run = fs.train(problem, data, fs.FedAvg(lr=0.3, steps=1), rounds=4, weighting="samples")
    assert (run.x - x).abs().max() < 1e-13


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("participation", [1.0, 5])
def test_scaffold_finds_the_minimiser_that_fedavg_misses(option: str, participation: int | float) -> None:
    q = fs.quadratic(clients=10, dimension=5, condition=4, heterogeneity=3.0)
    options: dict[str, Any] = {"rounds": 200, "participation": participation, "eval_every": 200}
    ours = fs.train(q.problem, q.data, fs.Scaffold(lr=0.05, steps=5, option=option), **options)
    plain = fs.train(q.problem, q.data, fs.FedAvg(lr=0.05, steps=5), **options)
    assert (ours.x - q.solution).abs().max() < 1e-10
    assert (plain.x - q.solution).abs().max() > 1e-3


def test_the_solution_of_the_quadratic_is_its_minimiser() -> None:
    q = fs.quadratic(clients=4, dimension=3, samples=5, seed=3)
    gradient = torch.zeros(3, dtype=torch.float64)
    for k in range(4):
        leaf = q.solution.clone().requires_grad_()
        gradient += torch.autograd.grad(q.problem.outer(leaf, q.data.train.of_client(k)), leaf)[0]
    assert gradient.abs().max() < 1e-12
