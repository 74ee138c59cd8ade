"""Closed-form checks of the NumPy references themselves.

The problem is N heterogeneous diagonal quadratics,
F_k(x) = 1/2 sum_j a_kj (x_j - b_kj)^2 (+ 1 for q-FedAvg, so that no loss is zero).
On these, t gradient steps of size e have the closed form
x_k = b_k + (1 - e a_k)^t (x - b_k).
"""

import numpy as np
import pytest

from .fedavg import fedavg
from .fedopt import fedadagrad, fedadam, fedyogi
from .fedprox import fedprox
from .qfedavg import qfedavg
from .scaffold import scaffold

N, D = 4, 3
_rng = np.random.default_rng(0)
A = _rng.uniform(0.5, 2.0, size=(N, D))
B = _rng.normal(size=(N, D))
X0 = _rng.normal(size=D)
ONES = dict.fromkeys(range(N), 1.0)
WEIGHTS = {0: 1.0, 1: 2.0, 2: 5.0, 3: 0.5}
STEPS = {0: 1, 1: 4, 2: 2, 3: 3}
COHORTS = [[0, 1, 2], [3, 1], [2], [0, 1, 2, 3]]
EVERYONE = list(range(N))


def exact_gradient(k, r, t, x):
    return A[k] * (x - B[k])


def noisy_gradient(k, r, t, x):
    noise = np.random.default_rng([k, r, t]).normal(size=D)
    return A[k] * (x - B[k]) + 0.3 * noise


def exact_loss(k, x):
    return 1.0 + 0.5 * float(np.sum(A[k] * (x - B[k]) ** 2))


def steps(k):
    return STEPS[k]


def one_step(k):
    return 1


def constant(rate):
    return lambda r, t: rate


def schedule(r, t):
    return 0.1 / (1 + r) * 0.9**t


def close(left, right, tol=1e-12):
    np.testing.assert_allclose(left, right, rtol=tol, atol=tol)


# FedAvg


def test_fedavg_with_one_step_is_centralised_sgd():
    p = np.array([WEIGHTS[k] for k in EVERYONE]) / sum(WEIGHTS.values())
    x = X0.copy()
    for r in range(5):
        x = x - schedule(r, 0) * sum(p[k] * noisy_gradient(k, r, 0, x) for k in EVERYONE)
    out = fedavg(X0, [EVERYONE] * 5, noisy_gradient, one_step, lr=schedule, weights=WEIGHTS)
    close(out["x"], x)


def test_fedavg_matches_the_closed_form_of_local_steps():
    rate, decay, server_lr = 0.1, 0.2, 0.7
    x = X0.copy()
    for cohort in COHORTS:
        local = {}
        for k in cohort:
            curvature = A[k] + decay  # of the regularised quadratic
            centre = A[k] * B[k] / curvature
            local[k] = centre + (1 - rate * curvature) ** STEPS[k] * (x - centre)
        total = sum(WEIGHTS[k] for k in cohort)
        mean = sum(WEIGHTS[k] * local[k] for k in cohort) / total
        x = (1 - server_lr) * x + server_lr * mean
    out = fedavg(
        X0,
        COHORTS,
        exact_gradient,
        steps,
        lr=constant(rate),
        weights=WEIGHTS,
        weight_decay=decay,
        server_lr=server_lr,
    )
    close(out["x"], x)


def test_fedavg_schedule_is_read_by_round_and_step():
    # One client, gradient x: every step multiplies x by (1 - lr(r, t)).
    out = fedavg(X0, [[1], [1]], lambda k, r, t, x: x, steps, lr=schedule, weights=ONES)
    factor = np.prod([1 - schedule(r, t) for r in range(2) for t in range(STEPS[1])])
    close(out["x"], factor * X0)


def test_scaling_all_weights_changes_nothing():
    scaled = {k: 17.0 * w for k, w in WEIGHTS.items()}
    runs = [fedavg(X0, COHORTS, noisy_gradient, steps, lr=schedule, weights=w)["x"] for w in (WEIGHTS, scaled)]
    close(runs[0], runs[1])


# FedProx


def test_fedprox_with_mu_zero_is_fedavg():
    common = {"lr": schedule, "weights": WEIGHTS, "weight_decay": 0.1, "server_lr": 0.9}
    prox = fedprox(X0, COHORTS, noisy_gradient, steps, mu=0.0, **common)
    plain = fedavg(X0, COHORTS, noisy_gradient, steps, **common)
    close(prox["x"], plain["x"])


def test_fedprox_with_many_steps_averages_the_proximal_points():
    mu = 0.8
    x = X0.copy()
    for cohort in COHORTS:
        x = sum((A[k] * B[k] + mu * x) / (A[k] + mu) for k in cohort) / len(cohort)
    out = fedprox(
        X0,
        COHORTS,
        exact_gradient,
        lambda k: 400,
        lr=constant(0.3),
        weights=ONES,
        mu=mu,
    )
    close(out["x"], x)


def test_fedprox_first_step_ignores_mu():
    runs = [
        fedprox(X0, [EVERYONE], noisy_gradient, one_step, lr=schedule, weights=ONES, mu=mu)["x"] for mu in (0.0, 5.0)
    ]
    close(runs[0], runs[1])


# SCAFFOLD


def exact_anchor(k, r, x):
    return A[k] * (x - B[k])


def noisy_anchor(k, r, x):
    return noisy_gradient(k, r, 0, x)


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_stays_at_its_fixed_point(option):
    decay = 0.3
    optimum = (A * B).sum(0) / (A.sum(0) + N * decay)
    variates = {k: exact_anchor(k, 0, optimum) + decay * optimum for k in EVERYONE}
    close(sum(variates.values()), 0.0)
    out = scaffold(
        optimum,
        COHORTS,
        exact_gradient,
        steps,
        lr=0.1,
        clients=N,
        weights=WEIGHTS,
        weight_decay=decay,
        option=option,
        anchor_gradient=exact_anchor,
        c_k=variates,
    )
    close(out["x"], optimum)
    close(out["c"], 0.0)
    for k in EVERYONE:
        close(out["c_k"][k], variates[k])


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_reaches_the_optimum_where_fedavg_does_not(option):
    optimum = (A * B).sum(0) / A.sum(0)
    cohorts = [[0, 1], [2, 3], [0, 2], [1, 3]] * 250
    out = scaffold(
        X0,
        cohorts,
        exact_gradient,
        steps,
        lr=0.05,
        clients=N,
        weights=ONES,
        option=option,
        anchor_gradient=exact_anchor,
    )
    plain = fedavg(X0, cohorts, exact_gradient, steps, lr=constant(0.05), weights=ONES)
    close(out["x"], optimum, tol=1e-9)
    assert np.linalg.norm(plain["x"] - optimum) > 1e-2


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_server_variate_is_the_mean_over_all_clients(option):
    # Partial participation, weights, and a client (3) that never takes part.
    out = scaffold(
        X0,
        [[0, 1], [2], [0, 2], [1]],
        noisy_gradient,
        steps,
        lr=0.1,
        clients=N,
        weights=WEIGHTS,
        weight_decay=0.1,
        option=option,
        anchor_gradient=noisy_anchor,
    )
    assert set(out["c_k"]) == {0, 1, 2}
    close(out["c"], sum(out["c_k"].values()) / N)


def test_scaffold_first_round_is_fedavg_and_variates_are_mean_gradients():
    rate, decay = 0.1, 0.2
    seen = {k: [] for k in EVERYONE}

    def recording(k, r, t, x):
        g = noisy_gradient(k, r, t, x)
        seen[k].append(g + decay * x)
        return g

    common = {"weights": WEIGHTS, "weight_decay": decay, "server_lr": 1.3}
    out = scaffold(X0, [[0, 1, 3]], recording, steps, lr=rate, clients=N, **common)
    plain = fedavg(X0, [[0, 1, 3]], noisy_gradient, steps, lr=constant(rate), **common)
    close(out["x"], plain["x"])
    for k in (0, 1, 3):
        assert len(seen[k]) == STEPS[k]
        close(out["c_k"][k], np.mean(seen[k], axis=0))


def test_scaffold_option_two_stays_the_mean_gradient_once_variates_are_nonzero():
    seen = {}

    def recording(k, r, t, x):
        g = noisy_gradient(k, r, t, x)
        seen.setdefault((k, r), []).append(g)
        return g

    out = scaffold(
        X0,
        [EVERYONE, [1, 2], [2, 3]],
        recording,
        steps,
        lr=0.1,
        clients=N,
        weights=ONES,
    )
    last = {0: 0, 1: 1, 2: 2, 3: 2}  # the last round each client took part in
    for k, r in last.items():
        close(out["c_k"][k], np.mean(seen[k, r], axis=0))


def test_scaffold_options_agree_for_one_step_on_the_same_batch():
    runs = [
        scaffold(
            X0,
            COHORTS,
            noisy_gradient,
            one_step,
            lr=0.1,
            clients=N,
            weights=WEIGHTS,
            weight_decay=0.1,
            option=option,
            anchor_gradient=noisy_anchor,
        )
        for option in ("I", "II")
    ]
    for name in ("x", "c"):
        close(runs[0][name], runs[1][name])
    for k in EVERYONE:
        close(runs[0]["c_k"][k], runs[1]["c_k"][k])


def test_scaffold_with_zero_variates_given_equals_the_default():
    common = {"lr": 0.1, "clients": N, "weights": WEIGHTS}
    given = {k: np.zeros(D) for k in EVERYONE}
    default = scaffold(X0, COHORTS, noisy_gradient, steps, **common)
    explicit = scaffold(X0, COHORTS, noisy_gradient, steps, c=np.zeros(D), c_k=given, **common)
    close(default["x"], explicit["x"])
    assert all(not value.any() for value in given.values())  # inputs are not changed


def test_scaffold_refuses_bad_arguments():
    common = {"lr": 0.1, "clients": N, "weights": ONES}
    with pytest.raises(ValueError, match="option"):
        scaffold(X0, [[0]], exact_gradient, steps, option="III", **common)
    with pytest.raises(ValueError, match="anchor_gradient"):
        scaffold(X0, [[0]], exact_gradient, steps, option="I", **common)
    with pytest.raises(ValueError, match="twice"):
        scaffold(X0, [[0, 0]], exact_gradient, steps, **common)
    with pytest.raises(ValueError, match="local step"):
        scaffold(X0, [[0]], exact_gradient, lambda k: 0, **common)


# FedAdam, FedYogi, FedAdagrad


def deltas(values):
    """Make the mean client change of round r exactly values[r] (one step, lr 1)."""
    return lambda k, r, t, x: -np.asarray(values[r], dtype=float)


ADAPTIVE = {"lr": constant(1.0), "weights": ONES, "server_lr": 0.5, "tau": 0.1}


def test_fedadam_by_hand():
    out = fedadam(
        np.zeros(1),
        [[0, 1], [2]],
        deltas([[1.0], [-2.0]]),
        one_step,
        beta1=0.9,
        beta2=0.8,
        **ADAPTIVE,
    )
    m1, v1 = 0.1, 0.8 * 0.01 + 0.2
    m2, v2 = 0.09 - 0.2, 0.8 * v1 + 0.8
    x = 0.5 * m1 / (v1**0.5 + 0.1) + 0.5 * m2 / (v2**0.5 + 0.1)
    close([out["x"][0], out["m"][0], out["v"][0]], [x, m2, v2])


def test_fedadagrad_by_hand():
    out = fedadagrad(
        np.zeros(1),
        [[0, 1], [2]],
        deltas([[1.0], [-2.0]]),
        one_step,
        beta1=0.5,
        **ADAPTIVE,
    )
    x = 0.5 * 0.5 / (1.01**0.5 + 0.1) + 0.5 * (-0.75) / (5.01**0.5 + 0.1)
    close([out["x"][0], out["m"][0], out["v"][0]], [x, -0.75, 5.01])


def test_fedyogi_by_hand_on_both_sides_of_the_sign_and_at_zero():
    # v = 1 everywhere; Delta^2 is 4 (v grows), 0.25 (v shrinks), 1 (sign 0: v stays).
    out = fedyogi(
        np.zeros(3),
        [[0]],
        deltas([[2.0, -0.5, 1.0]]),
        one_step,
        beta1=0.0,
        beta2=0.9,
        v=np.ones(3),
        **ADAPTIVE,
    )
    v = np.array([1.4, 0.975, 1.0])
    close(out["v"], v)
    close(out["m"], [2.0, -0.5, 1.0])
    close(out["x"], 0.5 * np.array([2.0, -0.5, 1.0]) / (np.sqrt(v) + 0.1))


@pytest.mark.parametrize("method", [fedadam, fedyogi, fedadagrad])
def test_adaptive_methods_start_at_tau_squared_and_can_be_resumed(method):
    options = {"lr": constant(0.1), "weights": WEIGHTS, "weight_decay": 0.1}
    options |= {"server_lr": 0.3, "beta1": 0.7, "tau": 0.05}
    if method is not fedadagrad:
        options["beta2"] = 0.9
    start = {"m": np.zeros(D), "v": np.full(D, 0.05**2)}
    whole = method(X0, COHORTS, exact_gradient, steps, **options)
    first = method(X0, COHORTS[:2], exact_gradient, steps, **start, **options)
    second = method(
        first["x"],
        COHORTS[2:],
        exact_gradient,
        steps,
        m=first["m"],
        v=first["v"],
        **options,
    )
    for name in ("x", "m", "v"):
        close(whole[name], second[name])
    close(start["v"], 0.05**2)  # inputs are not changed


@pytest.mark.parametrize("method", [fedadam, fedyogi, fedadagrad])
def test_adaptive_methods_with_huge_tau_are_fedavg(method):
    # v = tau^2 dominates, so sqrt(v) + tau is 2 tau and server_lr = 2 tau undoes it.
    tau = 1e6
    options = {"lr": schedule, "weights": WEIGHTS, "weight_decay": 0.1}
    plain = fedavg(X0, COHORTS, noisy_gradient, steps, **options)
    options |= {"beta1": 0.0, "tau": tau, "server_lr": 2 * tau}
    if method is not fedadagrad:
        options["beta2"] = 1.0
    out = method(X0, COHORTS, noisy_gradient, steps, **options)
    close(out["x"], plain["x"], tol=1e-9)


def test_fedadagrad_momentum_is_off_by_default():
    runs = [fedadagrad(X0, COHORTS, noisy_gradient, steps, **ADAPTIVE, **extra) for extra in ({}, {"beta1": 0.0})]
    close(runs[0]["x"], runs[1]["x"])


# q-FedAvg


def test_qfedavg_with_q_zero_is_fedavg_with_equal_weights():
    fair = qfedavg(
        X0,
        COHORTS,
        noisy_gradient,
        steps,
        lr=0.1,
        q=0.0,
        loss=exact_loss,
        weight_decay=0.1,
    )
    plain = fedavg(
        X0,
        COHORTS,
        noisy_gradient,
        steps,
        lr=constant(0.1),
        weights=ONES,
        weight_decay=0.1,
    )
    close(fair["x"], plain["x"])


def test_qfedavg_with_one_step_by_hand():
    # One local step makes dw_k the gradient at x.
    rate, q = 0.1, 2.0
    numerator, denominator = np.zeros(D), 0.0
    for k in EVERYONE:
        f, g = exact_loss(k, X0) + 1e-10, exact_gradient(k, 0, 0, X0)
        numerator += f**2 * g
        denominator += 2 * f * (g @ g) + f**2 / rate
    out = qfedavg(X0, [EVERYONE], exact_gradient, one_step, lr=rate, q=q, loss=exact_loss)
    close(out["x"], X0 - numerator / denominator)


def test_qfedavg_loss_is_taken_at_the_received_model():
    seen = []

    def recording(k, x):
        seen.append((k, x))
        return exact_loss(k, x)

    cohorts = [[1, 2], [3]]
    qfedavg(X0, cohorts, exact_gradient, steps, lr=0.1, q=1.0, loss=recording)
    first = qfedavg(X0, cohorts[:1], exact_gradient, steps, lr=0.1, q=1.0, loss=exact_loss)
    assert [k for k, _ in seen] == [1, 2, 3]
    close(seen[0][1], X0)
    close(seen[1][1], X0)
    close(seen[2][1], first["x"])


def test_qfedavg_with_a_zero_loss_is_finite():
    out = qfedavg(X0, [[0, 1]], exact_gradient, steps, lr=0.1, q=0.5, loss=lambda k, x: 0.0)
    assert np.isfinite(out["x"]).all()


# All


def test_inputs_are_left_alone_and_empty_rounds_are_refused():
    x = X0.copy()
    runs = {
        fedavg: {"lr": schedule, "weights": ONES},
        fedprox: {"lr": schedule, "weights": ONES, "mu": 0.1},
        scaffold: {"lr": 0.1, "clients": N, "weights": ONES},
        fedadam: {**ADAPTIVE, "beta1": 0.9, "beta2": 0.99},
        fedyogi: {**ADAPTIVE, "beta1": 0.9, "beta2": 0.99},
        fedadagrad: {**ADAPTIVE, "beta1": 0.9},
        qfedavg: {"lr": 0.1, "q": 1.0, "loss": exact_loss},
    }
    for method, options in runs.items():
        out = method(x, COHORTS, exact_gradient, steps, **options)
        assert out["x"].dtype == np.float64
        assert (x == X0).all()
        assert not (out["x"] == X0).any()
        with pytest.raises(ValueError, match="no clients"):
            method(x, [[0], []], exact_gradient, steps, **options)
