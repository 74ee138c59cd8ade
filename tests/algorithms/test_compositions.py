"""The compositional algorithms where they reduce to something simpler, step by step on the batches they draw."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fedstrata as fs
from algorithms.examples import DATA, PLAIN, Arrays, alone, bent, composed, descent
from cases import product
from fedstrata.algorithms.comfedl import State
from fedstrata.algorithms.estimators import into_ball
from fedstrata.algorithms.matrices import MATRICES
from fedstrata.clients import Client
from fedstrata.core.clock import Clock
from fedstrata.data.batch import Batch
from fedstrata.training.metrics.evaluation import gradient_norm
from support import make_client, make_clients, make_setting, play

pytestmark = pytest.mark.untraced

RATE = 0.2
BENT, ONE = composed(bent), alone(DATA)


# --- adaptive matrices -----------------------------------------------------------------------------------------------


def gradient_at(x: torch.Tensor) -> torch.Tensor:
    """The gradient of one client's composition."""
    return x - descent(replace(BENT, x0=x), ONE, 1, lr=1.0)["x"]


class Divided:
    """A step divided by an adaptive matrix that is renewed at every step: Adam's, and its relatives."""

    def __init__(self, matrix: str) -> None:
        self.matrix = matrix
        self.a = self.most = self.before = torch.zeros(1, dtype=torch.float64)

    def __call__(self, w: torch.Tensor) -> torch.Tensor:
        if self.matrix == "identity":
            return RATE * w
        seen = {"norm": w.norm(), "belief": (w - self.before) ** 2}.get(self.matrix, w**2)
        self.a, self.before = 0.8 * self.a + 0.2 * seen, w
        self.most = torch.maximum(self.most, self.a)
        root = {"norm": self.a, "amsgrad": self.most.sqrt()}.get(self.matrix, self.a.sqrt())
        return RATE * w / (root + 0.5)


@product("matrix, first_matrix", MATRICES, ["average", "accumulator", "identity"])
def test_adamfcgd_with_one_client_is_its_centralised_rule(matrix: str, first_matrix: str) -> None:
    """One step a round is the synchronisation itself, so A_1 counts only by what it leaves in the accumulator."""
    step, x = Divided(matrix), BENT.x0
    if first_matrix == "average":
        step(gradient_at(x))
    for _ in range(6):
        x = x - step(gradient_at(x))
    options: dict[str, Any] = {"theta": 0.8, "rho": 0.5, "first_matrix": first_matrix} if matrix != "identity" else {}
    found = play(fs.AdaMFCGD(gamma=RATE, steps=1, matrix=matrix, **options), BENT, ONE, 6)[0].x
    torch.testing.assert_close(found, x, atol=1e-10, rtol=0)


def test_local_steps_of_adamfcgd_have_the_matrix_of_the_synchronisation_before() -> None:
    """One client, three steps a round: two with the old matrix, the third, the server's, with the new one."""
    for first, start in (("identity", 1.0), ("accumulator", 0.5)):
        matrix, a, x = start, 0.0, BENT.x0
        for _ in range(3):
            for t in range(3):
                w = gradient_at(x)
                if t == 2:
                    a = 0.8 * a + 0.2 * w**2
                    matrix = a.sqrt() + 0.5
                x = x - RATE * w / matrix
        algorithm = fs.AdaMFCGD(gamma=RATE, theta=0.8, rho=0.5, steps=3, first_matrix=first)
        torch.testing.assert_close(play(algorithm, BENT, ONE, 3)[0].x, x, atol=1e-10, rtol=0)


def test_a_radius_bounds_rows_where_it_is_reached() -> None:
    rows = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    norms = rows.flatten(1).norm(dim=1)
    bounded = into_ball(rows, float(norms.median()))
    for row, norm, found in zip(rows, norms, bounded, strict=True):
        torch.testing.assert_close(found, row * min(1.0, float(norms.median() / norm)))


# --- the same draws, one client at a time ----------------------------------------------------------------------------


def drawing(setting: Any, client: int, round: int, step: int, iteration: int) -> Client:
    """One client at one step of a round's first exchange: it draws what the algorithm drew there."""
    alone = make_client(setting, [client], round)
    alone.clock = Clock(round, 10, step, iteration)
    return alone


def arrays_of(batch: Batch) -> Arrays:
    return tuple(a[0] for a in batch.parts[0])


def outer_gradient(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(PLAIN.outer(leaf, arrays_of(batch)), leaf)[0]


@product("jacobian, weights", ["exact", "product"], ["constant", "theorem"])
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
    problem = fs.maml(PLAIN.flat.module, inner_lr=0.3, prior=False)
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
    return fs.robust(PLAIN.flat.module, **options, prior=False)


def losses_at(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([PLAIN.outer(x, DATA.train.of_client(k)) for k in range(DATA.clients)])


@product("normalise, shift", [True, False], [None, 0.0])
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
    (gradient,) = torch.autograd.grad(gamma * torch.log(torch.exp(losses_at(leaf) / gamma).mean()), leaf)
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
        state = State(PLAIN.x0, torch.full((1,), stale, dtype=torch.float64))
        found = fs.ComFedL(lr=RATE, steps=1).round(state, clients)
        steps = [descent(PLAIN, alone(DATA, int(k)), 1, lr=RATE)["x"] - PLAIN.x0 for k in clients.cohort]
        torch.testing.assert_close(found.x, PLAIN.x0 + m * torch.stack(steps).mean(0), atol=1e-10, rtol=0)
        clients.begin(0)


def test_the_weight_that_is_sent_is_the_mean_over_clients_and_steps() -> None:
    clients = make_clients(make_setting(robust(gamma=0.5, shift=0.0), DATA))
    state = State(PLAIN.x0, torch.full((1,), 1e9, dtype=torch.float64))
    found = fs.ComFedL(lr=1e-6, steps=3).round(state, clients)
    assert float(found.weight) == pytest.approx(float((losses_at(PLAIN.x0) / 0.5).exp().mean()), rel=1e-6)


def test_maml_with_tiny_steps_is_ordinary_learning() -> None:
    assert PLAIN.flat is not None
    near, far = (fs.maml(PLAIN.flat.module, inner_lr=lr, steps=2, prior=False) for lr in (1e-8, 0.3))
    plain = play(fs.FedAvg(lr=RATE, steps=3), PLAIN, DATA, 2)[0].x
    found = [play(fs.ComFedL(lr=RATE, steps=3), problem, DATA, 2)[0].x for problem in (near, far)]
    assert (found[0] - plain).abs().max() < 1e-6
    assert (found[1] - plain).abs().max() > 1e-2
    x = PLAIN.x0
    assert gradient_norm(near, DATA, x) == pytest.approx(gradient_norm(PLAIN, DATA, x), rel=1e-6)


def test_projections_of_products_are_refused() -> None:
    message = (
        r"projections c_g and c_f of adamfcgd need jacobian = 'exact'.* Got c_g = 2 and c_f = 0 with .* 'product'\.$"
    )
    with pytest.raises(fs.InputError, match=message):
        play(fs.AdaMFCGD(jacobian="product", c_g=2.0), BENT, ONE, 1)
