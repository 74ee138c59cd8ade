"""Where one algorithm is another: special values of hyperparameters, and known solutions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.algorithms.estimators import into_ball
from fedstrata.algorithms.matrices import MATRICES
from fedstrata.clients.simulated import SimulatedClients
from fedstrata.core.schedules import Clock
from fedstrata.data.batch import Batch
from fedstrata.problems.projections import simplex as project_simplex
from fedstrata.training.metrics.evaluation import gradient_norm
from support import make_client, make_clients, make_setting, mixture_of, play, sized_data, smooth_example

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


# --- compositions ----------------------------------------------------------------------------------------------------


Arrays = tuple[torch.Tensor, ...]
PLAIN, DATA = smooth_example()
SIZE = len(PLAIN.x0)


def bent(u: torch.Tensor, batch: Arrays) -> torch.Tensor:
    """A nonlinear inner function whose Jacobian is not symmetric, and depends on the data."""
    mix = torch.linspace(-1.0, 1.0, SIZE * SIZE, dtype=u.dtype).view(SIZE, SIZE).sin() / 3
    return u + torch.tanh(mix @ u + batch[0].mean())


def squeezed(u: torch.Tensor, batch: Arrays) -> torch.Tensor:
    return torch.sin(u) + 0.5 * u * batch[0].std()


def composed(*levels: Callable[..., torch.Tensor], inner_mean: Any = "local") -> fs.Problem:
    return fs.Problem(PLAIN.outer, PLAIN.x0, levels=levels, inner_mean=inner_mean, name="composed")


BENT = composed(bent)
ONE = sized_data([11], features=4, classes=3)
RATE = 0.2


def descent(problem: fs.Problem, data: fs.FederatedData, rounds: int, step: Any = None) -> list[torch.Tensor]:
    """Gradient descent on one client's composition, the gradient by autograd; ``step`` changes it to another method."""
    arrays = data.train.of_client(0)
    path = [problem.x0.clone()]
    for _ in range(rounds):
        leaf = path[-1].clone().requires_grad_()
        u = leaf
        for level in problem.levels:
            u = level(u, arrays)
        (gradient,) = torch.autograd.grad(problem.outer(u, arrays), leaf)
        path.append(path[-1] - (RATE * gradient if step is None else step(gradient)))
    return path


def one_client(k: int) -> fs.FederatedData:
    """One of the clients, alone."""
    return fs.FederatedData.from_arrays([DATA.train.of_client(int(k))])


PARENTS: dict[str, tuple[fs.Algorithm, fs.Problem]] = {
    "comfedl": (fs.ComFedL(lr=RATE, steps=1), BENT),
    "comfedl, two levels": (fs.ComFedL(lr=RATE, steps=1), composed(bent, squeezed)),
    "local_scgd": (fs.LocalSCGD(beta=RATE, gamma=1.0, steps=1), BENT),
    "local_scgdm": (fs.LocalSCGDM(beta=RATE, gamma=1.0, alpha=1.0, steps=1), BENT),
    "local_moml": (fs.LocalMOML(lr=RATE, beta=1.0, steps=1), BENT),
    "mfcgd": (fs.MFCGD(gamma=RATE, steps=1, alpha=0.3, beta=0.6, varrho=0.2), BENT),
    "mfcgd, product": (fs.MFCGD(gamma=RATE, steps=1, alpha=0.3, beta=0.6, jacobian="product"), BENT),
    "fednest": (fs.FedNest(alpha=RATE, beta=1.0, steps=1), composed(bent, inner_mean="global")),
}


@pytest.mark.parametrize("name", PARENTS)
def test_one_step_of_one_client_is_compositional_gradient_descent(name: str) -> None:
    algorithm, problem = PARENTS[name]
    run = fs.train(problem, ONE, algorithm, rounds=4)
    torch.testing.assert_close(run.x, descent(problem, ONE, 4)[-1], atol=1e-10, rtol=0)


@pytest.mark.parametrize("average", [False, True])
def test_afl_with_one_client_is_gradient_descent_and_its_average(average: bool) -> None:
    path = descent(PLAIN, ONE, 5)
    run = fs.train(mixture_of(PLAIN, 1), ONE, fs.AFL(lr=RATE, average=average), rounds=5)
    expected = torch.stack(path[1:]).mean(0) if average else path[-1]
    torch.testing.assert_close(run.x, expected, atol=1e-10, rtol=0)
    assert run.y.tolist() == [1.0]


def test_drfa_with_one_client_is_gradient_descent() -> None:
    run = fs.train(mixture_of(PLAIN, 1), ONE, fs.DRFA(lr=RATE, steps=2), rounds=3)
    torch.testing.assert_close(run.x, descent(PLAIN, ONE, 6)[-1], atol=1e-10, rtol=0)
    assert run.y.tolist() == [1.0]


class Divided:
    """A step divided by an adaptive matrix that is renewed at every step: Adam's, and its relatives."""

    def __init__(self, matrix: str) -> None:
        self.matrix = matrix
        self.a = self.most = self.before = torch.zeros(1, dtype=torch.float64)

    def __call__(self, w: torch.Tensor) -> torch.Tensor:
        seen = {"norm": w.norm(), "belief": (w - self.before) ** 2}.get(self.matrix, w**2)
        self.a, self.before = 0.8 * self.a + 0.2 * seen, w
        self.most = torch.maximum(self.most, self.a)
        root = {"norm": self.a, "amsgrad": self.most.sqrt()}.get(self.matrix, self.a.sqrt())
        return RATE * w / (root + 0.5)


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("first_matrix", ["average", "accumulator", "identity"])
def test_adamfcgd_with_one_client_is_its_centralised_rule(first_matrix: str, matrix: str) -> None:
    """One step a round is the synchronisation itself, so A_1 counts only by what it leaves in the memory."""
    step = Divided(matrix)
    if first_matrix == "average":
        step((BENT.x0 - descent(BENT, ONE, 1)[-1]) / RATE)
    options: dict[str, Any] = {"theta": 0.8, "rho": 0.5, "steps": 1, "first_matrix": first_matrix, "matrix": matrix}
    found = play(fs.AdaMFCGD(gamma=RATE, **options), BENT, ONE, 6)[0].x
    torch.testing.assert_close(found, descent(BENT, ONE, 6, step)[-1], atol=1e-10, rtol=0)


def test_local_steps_of_adamfcgd_have_the_matrix_of_the_synchronisation_before() -> None:
    """One client, three steps a round: two with the old matrix, the third, the server's, with the new one."""
    for first, start in (("identity", 1.0), ("accumulator", 0.5)):
        matrix, a, x = start, 0.0, BENT.x0
        for _ in range(3):
            for t in range(3):
                w = (x - descent(replace(BENT, x0=x), ONE, 1)[-1]) / RATE
                if t == 2:
                    a = 0.8 * a + 0.2 * w**2
                    matrix = a.sqrt() + 0.5
                x = x - RATE * w / matrix
        algorithm = fs.AdaMFCGD(gamma=RATE, theta=0.8, rho=0.5, steps=3, first_matrix=first)
        torch.testing.assert_close(play(algorithm, BENT, ONE, 3)[0].x, x, atol=1e-10, rtol=0)


def test_a_radius_bounds_the_estimates_where_it_is_reached() -> None:
    rows = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    norms = rows.flatten(1).norm(dim=1)
    bounded = into_ball(rows, float(norms.median()))
    for row, norm, found in zip(rows, norms, bounded, strict=True):
        torch.testing.assert_close(found, row * min(1.0, float(norms.median() / norm)))
    wide = fs.MFCGD(steps=2, c_g=1e9, c_f=1e9)
    free, same, tight = (
        play(a, BENT, DATA, 2, batch_size=4)[0].x for a in (fs.MFCGD(steps=2), wide, replace(wide, c_f=1e-3))
    )
    torch.testing.assert_close(same, free, atol=1e-13, rtol=0)
    assert (tight - free).abs().max() > 1e-3


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("first_matrix", ["accumulator", "identity"])
def test_adamfcgd_that_learns_nothing_is_mfcgd(matrix: str, first_matrix: str) -> None:
    """theta next to 1 leaves A = rho I; with rho = 1 that is the identity from the start."""
    rho = 1.0 if first_matrix == "identity" else 0.25
    theta = math.nextafter(1.0, 0.0)
    ada = fs.AdaMFCGD(gamma=0.1, theta=theta, rho=rho, matrix=matrix, first_matrix=first_matrix, steps=3)
    plain = fs.MFCGD(gamma=0.1 / rho, steps=3)
    found = [play(a, BENT, DATA, 3, batch_size=4)[0].x for a in (ada, plain)]
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=0)
    assert (found[0] - BENT.x0).abs().max() > 0.05


def test_comfedl_with_a_full_batch_is_mfcgd() -> None:
    """Without noise every estimate is exact, and q steps with the last one on the server are q local steps."""
    rate = fs.CubeRoot(0.3, 2.0)
    pairs = [
        (fs.ComFedL(lr=RATE, steps=4), fs.MFCGD(gamma=RATE, steps=4, alpha=0.3, beta=0.7, varrho=0.1)),
        (fs.ComFedL(lr=RATE, steps=4), fs.MFCGD(gamma=RATE, steps=4, alpha=0.3, beta=0.7, jacobian="product")),
        (fs.ComFedL(lr=rate, steps=4), fs.MFCGD(gamma=1.0, eta=rate, steps=4, weights="theorem")),
    ]
    for plain, storm in pairs:
        found = [play(a, BENT, DATA, 3)[0].x for a in (plain, storm)]
        torch.testing.assert_close(found[0], found[1], atol=1e-11, rtol=0)


@pytest.mark.parametrize("kind", [fs.MFCGD, fs.AdaMFCGD])
def test_products_are_exact_where_all_batches_have_one_jacobian(kind: Any) -> None:
    """A linear g whose noise is in its value only: u is one matrix, so w = u^T v in both forms, if beta = varrho."""
    mix = torch.linspace(-1.0, 1.0, SIZE * SIZE, dtype=torch.float64).view(SIZE, SIZE).cos()
    some = torch.linspace(-1.0, 2.0, SIZE, dtype=torch.float64)  # softmax would not see the same noise everywhere
    problem = composed(lambda u, batch: mix @ u / 2 + some * batch[0].mean())
    options: dict[str, Any] = {"gamma": 0.05, "steps": 3, "alpha": 0.3, "beta": 0.6, "varrho": 0.6}
    exact, product, other = (
        play(kind(**{**options, **more}), problem, DATA, 3, batch_size=4)[0].x
        for more in ({"jacobian": "exact"}, {"jacobian": "product"}, {"jacobian": "exact", "varrho": 0.2})
    )
    torch.testing.assert_close(product, exact, atol=1e-11, rtol=0)
    assert (other - exact).abs().max() > 1e-4


@pytest.mark.parametrize("setting", SETTINGS)
def test_local_scgd_without_memory_is_comfedl(setting: str) -> None:
    found = [
        play(a, BENT, DATA, 3, chunk=4, **SETTINGS[setting])[0].x
        for a in (fs.LocalSCGD(beta=RATE, gamma=1.0, steps=3), fs.ComFedL(lr=RATE, steps=3))
    ]
    torch.testing.assert_close(found[0], found[1], atol=1e-11, rtol=0)


@pytest.mark.parametrize("setting", SETTINGS)
def test_local_scgdm_without_momentum_is_local_scgd(setting: str) -> None:
    common: dict[str, Any] = {"beta": RATE, "eta": 0.5, "gamma": 0.9, "steps": 3}
    found = [
        play(a, BENT, DATA, 3, chunk=4, **SETTINGS[setting])[0]
        for a in (fs.LocalSCGDM(alpha=2.0, **common), fs.LocalSCGD(**common), fs.LocalSCGDM(alpha=1.0, **common))
    ]
    for name in ("x", "u"):
        torch.testing.assert_close(found[0][name], found[1][name], atol=1e-11, rtol=0)
    assert (found[2].x - found[1].x).abs().max() > 1e-4


# --- the same draws, one client at a time ----------------------------------------------------------------------------


def drawing(setting: Any, client: int, round: int, step: int, iteration: int) -> Any:
    """One client at one step of a round's first exchange: it draws what the algorithm drew there."""
    alone = make_client(setting, [client], round)
    alone.clock = Clock(round, 10, step, iteration)
    return alone


def arrays_of(batch: Batch) -> Arrays:
    return tuple(a[0] for a in batch.parts[0])


def outer_gradient(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(PLAIN.outer(leaf, arrays_of(batch)), leaf)[0]


@pytest.mark.parametrize("weights", ["constant", "theorem"])
@pytest.mark.parametrize("jacobian", ["exact", "product"])
def test_mfcgd_with_nothing_inside_is_local_sgd_with_storm_momentum(jacobian: str, weights: str) -> None:
    """g(x) = x: h = x and u = I without noise, and w = v is w <- grad f(x) + (1 - varrho) (w - grad f(x_old)).

    The theorem's weights are c eta_t^2, eta_t the rate of the step that led to x.
    """
    problem, steps, rate, c = composed(lambda u, batch: 1.0 * u), 3, 0.15, 0.4
    setting = make_setting(problem, DATA, batch_size=4, seed=3)
    clients = range(DATA.clients)
    eta = [(2 + t) ** (-1 / 3) if weights == "theorem" else 1.0 for t in range(3 * steps)]
    x = [problem.x0] * DATA.clients
    old = list(x)
    w = [outer_gradient(x[k], drawing(setting, k, -1, 0, 0).draw(batch_size=2 * 4)) for k in clients]
    for r in range(3):
        for t in range(steps):
            now = steps * r + t
            for k in clients:
                if now:
                    batch, weight = drawing(setting, k, r, t, now).draw(), c * eta[now - 1] ** 2
                    w[k] = outer_gradient(x[k], batch) + (1 - weight) * (w[k] - outer_gradient(old[k], batch))
                old[k], x[k] = x[k], x[k] - rate * eta[now] * w[k]
        x = [torch.stack(x).mean(0)] * DATA.clients
    storm = {"alpha": 0.9, "beta": 0.7, "varrho": c} if jacobian == "exact" else {"alpha": 0.9, "beta": c}
    schedule = fs.CubeRoot(1.0, 2.0) if weights == "theorem" else 1.0
    algorithm = fs.MFCGD(
        gamma=rate, eta=schedule, steps=steps, first_batches=2, jacobian=jacobian, weights=weights, **storm
    )
    found = play(algorithm, problem, DATA, 3, batch_size=4, seed=3)[0].x
    torch.testing.assert_close(found, x[0], atol=1e-11, rtol=0)


def test_local_moml_without_memory_is_per_fedavg() -> None:
    """x <- x - lr (I - a H(x; third batch)) grad loss(x - a grad loss(x; first batch); second batch)."""
    assert PLAIN.flat is not None
    problem = fs.maml(PLAIN.flat.module, inner_lr=0.3)
    setting = make_setting(problem, DATA, batch_size=4, seed=3)
    x = problem.x0
    for r in range(2):
        models = []
        for k in range(DATA.clients):
            own = x
            for t in range(3):
                alone = drawing(setting, k, r, t, 3 * r + t)
                first, second, third = alone.draw(1, stream=1), alone.draw(0, stream=2), alone.draw(1, stream=3)
                v = outer_gradient(own - 0.3 * outer_gradient(own, first), second)
                hessian = torch.autograd.functional.hessian(lambda z, b=third: PLAIN.outer(z, arrays_of(b)), own)
                own = own - RATE * (v - 0.3 * hessian @ v)
            models.append(own)
        x = torch.stack(models).mean(0)
    found = play(fs.LocalMOML(lr=RATE, beta=1.0, steps=3), problem, DATA, 2, batch_size=4, seed=3)[0].x
    torch.testing.assert_close(found, x, atol=1e-11, rtol=0)


def test_local_moml_that_never_renews_its_memory_keeps_the_big_batch() -> None:
    """beta next to 0 in one step: u is g on ``first_batches`` batches' worth of samples at the start of the round."""
    setting = make_setting(BENT, DATA, batch_size=3, seed=3)
    models = []
    for k in range(DATA.clients):
        alone = drawing(setting, k, 0, 0, 0)
        u = bent(BENT.x0, arrays_of(alone.draw(1, batch_size=4 * 3)))
        v = outer_gradient(u, alone.draw(0, stream=2))
        third = arrays_of(alone.draw(1, stream=3))
        jacobian = torch.autograd.functional.jacobian(lambda z, b=third: bent(z, b), BENT.x0)
        models.append(BENT.x0 - RATE * jacobian.T @ v)
    algorithm = fs.LocalMOML(lr=RATE, beta=1e-13, first_batches=4, steps=1)
    found = play(algorithm, BENT, DATA, 1, batch_size=3, seed=3)[0].x
    torch.testing.assert_close(found, torch.stack(models).mean(0), atol=1e-10, rtol=0)


# --- robust and meta-learning ----------------------------------------------------------------------------------------


def robust(**options: Any) -> fs.Problem:
    assert PLAIN.flat is not None
    return fs.robust(PLAIN.flat.module, **options)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("shift", [None, 0.0])
def test_robust_without_robustness_is_fedavg(normalise: bool, shift: float | None) -> None:
    start = PLAIN.x0
    plain = play(fs.FedAvg(lr=RATE, steps=3), PLAIN, DATA, 2)[0].x - start
    found = {
        gamma: play(fs.ComFedL(lr=RATE, steps=3, normalise=normalise), robust(gamma=gamma, shift=shift), DATA, 2)[0].x
        for gamma in (1e8, 0.5)
    }
    assert (found[1e8] - start - plain).norm() < 1e-6 * plain.norm()
    assert (found[0.5] - start - plain).norm() > 1e-2 * plain.norm()


@pytest.mark.parametrize("shift", [None, 0.0, 3.0])
def test_normalised_weights_are_the_gradient_of_the_log_mean_exp(shift: float | None) -> None:
    """Eq. (5) of the paper instead of eq. (6), whatever constant was subtracted."""
    gamma, leaf = 0.5, PLAIN.x0.clone().requires_grad_()
    losses = torch.stack([PLAIN.outer(leaf, DATA.train.of_client(k)) for k in range(DATA.clients)])
    (gradient,) = torch.autograd.grad(gamma * torch.log(torch.exp(losses / gamma).mean()), leaf)
    found = play(fs.ComFedL(lr=RATE, steps=1), robust(gamma=gamma, shift=shift), DATA, 1)[0].x
    torch.testing.assert_close(found, PLAIN.x0 - RATE * gradient, atol=1e-12, rtol=0)


def test_the_constant_that_was_subtracted_does_not_matter_to_normalised_steps() -> None:
    found = [play(fs.ComFedL(), robust(gamma=0.3, shift=s), DATA, 4, batch_size=4)[0].x for s in (0.0, 1.0, 4.0)]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-10, rtol=0)
    printed = [play(fs.ComFedL(normalise=False), robust(gamma=0.3, shift=s), DATA, 2)[0].x for s in (0.5, 1.0)]
    assert (printed[0] - printed[1]).abs().max() > 1e-2


@pytest.mark.parametrize("m", [7, 3])
def test_no_normalised_weight_passes_the_size_of_the_cohort(m: int) -> None:
    """Where the mean weight of the round before is out of date, a weight is cut at the number of clients."""
    setting = make_setting(robust(gamma=0.5, shift=0.0), DATA)
    clients = make_clients(setting, participation=m)
    for stale in (1e-9, 0.0):
        state = fs.State(x=PLAIN.x0, weight=torch.full((1,), stale, dtype=torch.float64))
        found = fs.ComFedL(lr=RATE, steps=1).round(state, clients)
        gradients = [descent(PLAIN, one_client(k), 1)[-1] - PLAIN.x0 for k in clients.cohort]
        torch.testing.assert_close(found.x, PLAIN.x0 + m * torch.stack(gradients).mean(0), atol=1e-10, rtol=0)
        clients.begin(0)


def test_the_weight_that_is_sent_is_the_mean_over_clients_and_steps() -> None:
    setting = make_setting(robust(gamma=0.5, shift=0.0), DATA)
    clients = make_clients(setting)
    state = fs.State(x=PLAIN.x0, weight=torch.full((1,), 1e9, dtype=torch.float64))
    found = fs.ComFedL(lr=1e-6, steps=3).round(state, clients)
    losses = torch.stack([PLAIN.outer(PLAIN.x0, DATA.train.of_client(k)) for k in range(7)])
    assert float(found.weight) == pytest.approx(float((losses / 0.5).exp().mean()), rel=1e-6)


def test_maml_with_tiny_steps_is_ordinary_learning() -> None:
    assert PLAIN.flat is not None
    near, far = (fs.maml(PLAIN.flat.module, inner_lr=lr, steps=2) for lr in (1e-8, 0.3))
    plain = play(fs.FedAvg(lr=RATE, steps=3), PLAIN, DATA, 2)[0].x
    found = [play(fs.ComFedL(lr=RATE, steps=3), problem, DATA, 2)[0].x for problem in (near, far)]
    assert (found[0] - plain).abs().max() < 1e-6
    assert (found[1] - plain).abs().max() > 1e-2
    x = PLAIN.x0
    assert gradient_norm(near, DATA, x) == pytest.approx(gradient_norm(PLAIN, DATA, x), rel=1e-6)


# --- mixtures --------------------------------------------------------------------------------------------------------


def test_afl_with_a_frozen_dual_is_gradient_descent_on_the_mean() -> None:
    frozen = fs.AFL(lr=RATE, dual_lr=1e-12, average=False)
    found = play(frozen, mixture_of(PLAIN, DATA.clients), DATA, 4, batch_size=4, seed=2)[0]
    plain = play(fs.FedAvg(lr=RATE, steps=1), PLAIN, DATA, 4, batch_size=4, seed=2)[0]
    torch.testing.assert_close(found.x, plain.x, atol=1e-10, rtol=0)


def test_afl_follows_the_worst_mixture() -> None:
    """Both steps at the old x and y; y leaves the middle, and weighs the gradients."""
    x, y = PLAIN.x0, torch.full((7,), 1 / 7, dtype=torch.float64)
    for _ in range(3):
        leaf = x.clone().requires_grad_()
        losses = torch.stack([PLAIN.outer(leaf, DATA.train.of_client(k)) for k in range(7)])
        (gradient,) = torch.autograd.grad(y @ losses, leaf)
        x, y = x - RATE * gradient, project_simplex(y + 0.5 * losses.detach())
    assert y.max() > 2 / 7
    found = play(fs.AFL(lr=RATE, dual_lr=0.5, average=False), mixture_of(PLAIN, 7), DATA, 3)[0]
    torch.testing.assert_close(found.x, x, atol=1e-11, rtol=0)
    torch.testing.assert_close(found.y, y, atol=1e-11, rtol=0)


def test_drfa_with_a_frozen_dual_draws_clients_uniformly(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[np.ndarray] = []
    choose = SimulatedClients.choose

    def noted(self: Any, number: Any = None, probabilities: Any = None) -> Any:
        other = choose(self, number, probabilities)
        if probabilities is not None:
            assert np.asarray(probabilities) == pytest.approx(1 / 7, rel=1e-6)
            drawn.append(other.cohort)
        return other

    monkeypatch.setattr(SimulatedClients, "choose", noted)
    rounds, m = 150, 4
    algorithm = fs.DRFA(lr=1e-3, dual_lr=1e-12, steps=1)
    state = play(algorithm, mixture_of(PLAIN, 7), DATA, rounds, batch_size=2, participation=m)[0]
    assert state.y.tolist() == pytest.approx([1 / 7] * 7, abs=1e-6)
    counts = np.bincount(np.concatenate(drawn), minlength=7)
    expected = rounds * m / 7
    assert ((counts - expected) ** 2 / expected).sum() < 22.5  # chi-square with 6 degrees, 0.1 %
    assert any(len(set(cohort)) < m for cohort in drawn), "with replacement"


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_round_of_drfa_is_fedavg_on_the_clients_that_were_drawn(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client drawn twice counts twice; local steps are the clients' own."""
    cohorts: list[np.ndarray] = []
    choose = SimulatedClients.choose

    def noted(self: Any, number: Any = None, probabilities: Any = None) -> Any:
        cohorts.append(choose(self, number, probabilities).cohort)
        other = choose(self, number, probabilities)
        other.cohort = cohorts[-1]
        return other

    monkeypatch.setattr(SimulatedClients, "choose", noted)
    y0 = torch.tensor([0.5, 0.3, 0.2, 0, 0, 0, 0], dtype=torch.float64)
    problem = replace(mixture_of(PLAIN, 7), y0=y0)
    said: list[int] = []
    integer = SimulatedClients.integer

    def said_aloud(self: Any, low: int, high: int) -> int:
        said.append(integer(self, low, high))
        return said[-1]

    monkeypatch.setattr(SimulatedClients, "integer", said_aloud)
    algorithm = fs.DRFA(lr=RATE, dual_lr=0.05, steps=3)
    found = play(algorithm, problem, DATA, 1, participation=5, weighting="samples", seed=seed)[0]
    assert set(cohorts[0].tolist()) <= {0, 1, 2}, "clients of weight 0 are never drawn"
    assert len(cohorts[0]) == 5
    paths = [descent(PLAIN, one_client(k), 3) for k in cohorts[0]]
    torch.testing.assert_close(found.x, torch.stack([path[-1] for path in paths]).mean(0), atol=1e-10, rtol=0)
    # The dual follows the losses at the mean of the models after t' steps, t' from 1 to 3.
    asked = cohorts[1]
    assert len(set(asked.tolist())) == 5
    for snapshot in (1, 2, 3):
        z = torch.stack([path[snapshot] for path in paths]).mean(0)
        v = torch.zeros(7, dtype=torch.float64)
        for k in asked:
            v[k] = 7 / 5 * PLAIN.outer(z, DATA.train.of_client(int(k)))
        y = project_simplex(y0 + 3 * 0.05 * v)
        assert torch.allclose(found.y, y, atol=1e-10, rtol=0) == (snapshot == said[0])
