"""Problems whose solution is known: which methods find it, which miss it, and by how much."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import fedstrata as fs
from cases import product, repeats
from fedstrata.algorithms.matrices import MATRICES
from fedstrata.problems import Quadratic
from fedstrata.training.metrics.evaluation import gradient_norm


def test_the_solution_of_the_quadratic_is_its_minimiser() -> None:
    q = fs.quadratic(clients=4, dimension=3, samples=5, seed=3)
    gradient = torch.zeros(3, dtype=torch.float64)
    for k in range(4):
        leaf = q.solution.clone().requires_grad_()
        gradient += torch.autograd.grad(q.problem.outer(leaf, q.data.train.of_client(k)), leaf)[0]
    assert gradient.abs().max() < 1e-12


@pytest.mark.slow
@repeats("option, participation", [("II", 5), ("II", 1.0), ("I", 5), ("I", 1.0)])
def test_scaffold_finds_the_minimiser_that_fedavg_misses(option: str, participation: int | float) -> None:
    q = fs.quadratic(clients=10, dimension=5, condition=4, heterogeneity=3.0)
    options: dict[str, Any] = {"rounds": 200, "participation": participation, "eval_every": 200}
    ours = fs.train(q.problem, q.data, fs.Scaffold(lr=0.05, steps=5, option=option), **options)
    plain = fs.train(q.problem, q.data, fs.FedAvg(lr=0.05, steps=5), **options)
    assert (ours.x - q.solution).abs().max() < 1e-10
    assert (plain.x - q.solution).abs().max() > 1e-3


# --- compositions ----------------------------------------------------------------------------------------------------


@cache
def example(inner_mean: Any = "local") -> Quadratic:
    """Heterogeneous clients: their Jacobians and their targets differ."""
    return fs.composition(clients=6, dimension=5, inner=6, samples=8, inner_mean=inner_mean)


def reached(q: Quadratic, algorithm: fs.Algorithm, rounds: int) -> tuple[float, float]:
    """The exact gradient's norm after full-batch rounds, and the distance to the solution."""
    run = fs.train(q.problem, q.data, algorithm, rounds=rounds, eval_every=rounds)
    return gradient_norm(q.problem, q.data, run.x), float((run.x - q.solution).norm())


# --- full batches ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@repeats("jacobian", ["exact", "product"])
def test_mfcgd_finds_the_solution(jacobian: str) -> None:
    gradient, distance = reached(example(), fs.MFCGD(gamma=0.3, steps=1, jacobian=jacobian), 150)
    assert gradient < 1e-10
    assert distance < 1e-10


@pytest.mark.slow
@repeats("matrix", reversed(MATRICES))
def test_adamfcgd_finds_the_solution_with_every_matrix(matrix: str) -> None:
    gradient, distance = reached(example(), fs.AdaMFCGD(gamma=0.1, steps=1, rho=0.1, matrix=matrix), 200)
    assert gradient < 1e-6
    assert distance < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (fs.ComFedL(lr=0.3, steps=1), True),
        (fs.LocalMOML(lr=0.3, steps=1), True),
        (fs.LocalSCGD(beta=0.3, steps=1, gamma=1.0), True),
        (fs.LocalSCGDM(beta=0.3, steps=1, gamma=1.0), True),
        (fs.LocalSCGD(beta=0.3, steps=1, gamma=0.5), False),
    ],
    ids=["comfedl", "local_moml", "local_scgd", "local_scgdm", "local_scgd, u averaged over clients"],
)
def test_the_others_find_it_unless_they_average_inner_values(algorithm: fs.Algorithm, expected: bool) -> None:
    """The mean of the clients' u is no client's g: with a memory of it, heterogeneous clients are biased."""
    gradient, _ = reached(example(), algorithm, 150)
    assert gradient < 1e-10 if expected else gradient > 0.01


@pytest.mark.slow
@repeats("algorithm", [fs.MFCGD(gamma=0.2, steps=5), fs.AdaMFCGD(gamma=0.02, steps=5, rho=0.1)])
def test_local_steps_drift_in_proportion_to_the_step_size(algorithm: Any) -> None:
    """Clients with different curvatures pull apart between synchronisations: a constant rate leaves a bias."""
    found = [reached(example(), replace(algorithm, gamma=algorithm.gamma / n), 60 * n)[0] for n in (1, 2)]
    assert found[1] > 0.02
    assert found[0] / found[1] == pytest.approx(2.0, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [fs.MFCGD(gamma=0.3, steps=5), fs.AdaMFCGD(gamma=0.1, steps=5, rho=0.1)])
def test_a_falling_rate_takes_the_drift_away(algorithm: fs.Algorithm) -> None:
    constant, _ = reached(example(), algorithm, 100)
    falling, _ = reached(example(), replace(algorithm, eta=fs.StepDecay(1.0, at=(0.1, 0.2, 0.4), factor=0.3)), 400)
    assert constant > 0.05
    assert falling < constant / 10


@pytest.mark.slow
@repeats(
    "algorithm", [fs.MFCGD(gamma=0.1, steps=5), *(fs.AdaMFCGD(gamma=0.1, steps=5, matrix=m, rho=0.1) for m in MATRICES)]
)
def test_without_differing_curvatures_there_is_no_drift(algorithm: fs.Algorithm) -> None:
    """One A for all clients, targets that differ: five local steps, a constant rate, and the exact solution."""
    generator = torch.Generator().manual_seed(0)
    a = torch.eye(6, 4, dtype=torch.float64) + 0.2 * torch.randn(6, 4, generator=generator, dtype=torch.float64)
    b = 2 * torch.randn(5, 6, generator=generator, dtype=torch.float64)
    data = fs.FederatedData.from_arrays([(a[None], b[k : k + 1]) for k in range(5)])
    problem = fs.Problem(
        lambda u, batch: 0.5 * ((u - batch[1]) ** 2).sum(1).mean(),
        torch.ones(4, dtype=torch.float64),
        levels=(lambda x, batch: batch[0].mean(0) @ x,),
    )
    q = Quadratic(problem, data, torch.linalg.lstsq(a, b.mean(0)[:, None]).solution[:, 0])
    gradient, distance = reached(q, algorithm, 150)
    assert gradient < 1e-6
    assert distance < 1e-6


# --- the mean inside -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@product("steps, inner_rounds", [1, 5], [1, 3])
def test_fednest_finds_the_solution_with_the_mean_inside(steps: int, inner_rounds: int) -> None:
    q = example("global")
    algorithm = fs.FedNest(alpha=0.3, beta=0.5, steps=steps, inner_rounds=inner_rounds)
    gradient, distance = reached(q, algorithm, 100)
    assert gradient < 1e-8
    assert distance < 1e-8
    assert (q.solution - example().solution).norm() > 0.05


# --- minibatches -----------------------------------------------------------------------------------------------------


NOISY = fs.composition(clients=10, dimension=5, inner=40, samples=20, heterogeneity=1.0, noise=0.5)
ROUNDS = 300


class Average(fs.Callback):
    """The mean of the iterates after the first quarter."""

    def __init__(self) -> None:
        self.count = 0
        self.x = torch.zeros_like(NOISY.solution)

    def on_round(self, round: int, state: fs.State) -> None:
        if round > ROUNDS // 4:
            self.count += 1
            self.x = self.x + (state.x - self.x) / self.count


def noisy(algorithm: fs.Algorithm, seed: int) -> tuple[torch.Tensor, int]:
    """The time-averaged iterate of single-sample steps, and the samples they took."""
    average = Average()
    options: dict[str, Any] = {"rounds": ROUNDS, "batch_size": 1, "eval_every": ROUNDS, "seed": seed}
    run = fs.train(NOISY.problem, NOISY.data, algorithm, callbacks=[average], **options)
    return average.x, run.history[-1]["samples"]


def biased_solution() -> torch.Tensor:
    """Where single samples lead: E[A^T A] in place of E[A]^T E[A], since value and Jacobian share their noise."""
    a, b = (array.view(10, 20, *array.shape[1:]) for array in NOISY.data.train.arrays)
    products = torch.einsum("knrd,knre->de", a, a) / a.shape[:2].numel()
    return torch.linalg.solve(products, torch.einsum("krd,kr->d", a.mean(1), b.mean(1)) / 10)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_small_batches_bias_comfedl_and_hardly_mfcgd(seed: int) -> None:
    """The same number of samples and of steps, the same step size; averaged over time, which leaves the bias."""
    weights = {"alpha": 0.03, "beta": 0.03, "varrho": 0.03}
    plain, samples = noisy(fs.ComFedL(lr=0.02, steps=5), seed)
    storm, more = noisy(fs.MFCGD(gamma=0.02, steps=5, first_batches=20, **weights), seed)
    assert samples <= more <= 1.02 * samples
    away, near = ((x - NOISY.solution).norm() for x in (plain, storm))
    assert away > 0.35
    assert near < 0.1 * away
    assert (plain - biased_solution()).norm() < 0.1 * away
    gradients = [gradient_norm(NOISY.problem, NOISY.data, x) for x in (plain, storm)]
    assert gradients[0] > 0.7
    assert gradients[1] < 0.1 * gradients[0]


@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [("identity", 0, 7), ("adam", 1, 7), ("belief", 2, 7), ("norm", 1, 1), ("amsgrad", 2, 7)],
)
def test_matrices_keep_no_more_than_they_need(name: str, rows: int, columns: int) -> None:
    assert MATRICES[name](0.5, 0.1, "zero").zeros(torch.ones(7)).shape == (rows, columns)
