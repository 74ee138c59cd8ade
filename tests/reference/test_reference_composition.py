"""Closed-form checks of the NumPy references of the compositional and minimax methods.

The composed problem has g_k(x) = tanh(G_k x) (+ a random affine map per batch) and
f_k with gradient tanh(u - C_k) (times and plus noise per batch). The plain one has
N diagonal quadratics F_k(x) = 1/2 sum_j a_kj (x_j - b_kj)^2.
"""

import numpy as np
import pytest

from .afl import afl
from .comfedl import comfedl
from .drfa import drfa, project_simplex
from .fedavg import fedavg
from .fednest import fednest
from .local_moml import local_moml
from .local_scgd import local_scgd, local_scgdm
from .mfcgd import adamfcgd, mfcgd

N, D, R = 3, 4, 2
_rng = np.random.default_rng(1)
G = _rng.normal(size=(N, R, D))
C = _rng.normal(size=(N, R))
A = _rng.uniform(0.5, 2.0, size=(N, D))
B = _rng.normal(size=(N, D))
X0 = _rng.normal(size=D)
ALL = list(range(N))
COHORTS = [[0, 1], [2], [1, 2, 0], [2, 0]]
FULL = [ALL, [2, 0, 1], ALL]
WEIGHTS = {"alpha": 0.3, "beta": 0.6, "varrho": 0.15}


def close(left, right, tol=1e-12):
    np.testing.assert_allclose(left, right, rtol=tol, atol=tol)


def differ(left, right, by=1e-4):
    assert np.max(np.abs(np.asarray(left) - np.asarray(right))) > by


def noise(tag, k, r, t, stream, *shape):
    return np.random.default_rng([tag, k, r + 2, t + 2, stream]).normal(size=shape)


# The composed problem, noisy ...


def inner(k, r, t, x, stream=0):
    return np.tanh(G[k] @ x) + 0.3 * noise(1, k, r, t, stream, R, D) @ x + 0.2 * noise(2, k, r, t, stream, R)


def inner_jacobian(k, r, t, x, stream=0):
    return (1 - np.tanh(G[k] @ x) ** 2)[:, None] * G[k] + 0.3 * noise(1, k, r, t, stream, R, D)


def outer_gradient(k, r, t, u, stream=0):
    return (1 + 0.3 * noise(3, k, r, t, stream, R)) * np.tanh(u - C[k]) + 0.1 * noise(4, k, r, t, stream, R)


NOISY = (inner, inner_jacobian, outer_gradient)

# ... on full batches ...


def exact_inner(k, r, t, x, stream=0):
    return np.tanh(G[k] @ x)


def exact_jacobian(k, r, t, x, stream=0):
    return (1 - np.tanh(G[k] @ x) ** 2)[:, None] * G[k]


def exact_outer(k, r, t, u, stream=0):
    return np.tanh(u - C[k])


EXACT = (exact_inner, exact_jacobian, exact_outer)

# ... and with g the identity, f the noisy quadratic.


def identity(k, r, t, x, stream=0):
    return x


def identity_jacobian(k, r, t, x, stream=0):
    return np.eye(D)


def gradient(k, r, t, x, stream=0):
    return A[k] * (1 + 0.3 * noise(5, k, r, t, stream, D)) * (x - B[k]) + 0.2 * noise(6, k, r, t, stream, D)


def exact_gradient(k, r, t, x, stream=0):
    return A[k] * (x - B[k])


def exact_loss(k, r, x):
    return 0.5 * float(np.sum(A[k] * (x - B[k]) ** 2))


IDENTITY = (identity, identity_jacobian, gradient)


def rate(r, t):
    return 0.2 / (1 + r) * 0.9**t


def previous(q):
    """The name of the estimator update before iteration (r, j) of MFCGD."""

    def name(r, j):
        if j > 0:
            return r, j - 1
        return (r - 1, q - 1) if r > 0 else (0, -1)

    return name


# ComFedL


def test_comfedl_with_identity_inner_is_fedavg():
    got = comfedl(X0, COHORTS, *IDENTITY, 3, lr=rate)["x"]
    want = fedavg(X0, COHORTS, gradient, lambda k: 3, lr=rate, weights=dict.fromkeys(ALL, 1.0))["x"]
    close(got, want)
    differ(got, X0)


def test_comfedl_one_step_is_the_gradient_of_the_composition():
    def objective(x):
        return np.mean([np.sum(np.log(np.cosh(np.tanh(G[k] @ x) - C[k]))) for k in ALL])

    step = X0 - comfedl(X0, [ALL], *EXACT, 1, lr=1.0)["x"]
    numeric = [(objective(X0 + 1e-6 * e) - objective(X0 - 1e-6 * e)) / 2e-6 for e in np.eye(D)]
    close(step, numeric, tol=1e-8)


def test_comfedl_robust_goes_to_fedavg_as_gamma_grows():
    # Inner = loss, outer = exp(u / gamma): direction exp(F / gamma) grad F / gamma.
    def loss(k, r, t, x, stream=0):
        return np.array([exact_loss(k, r, x)])

    def loss_gradient(k, r, t, x, stream=0):
        return exact_gradient(k, r, t, x)[None, :]

    want = fedavg(X0, COHORTS, exact_gradient, lambda k: 3, lr=lambda r, t: 0.05, weights=dict.fromkeys(ALL, 1.0))["x"]
    errors = []
    for gamma in (1e1, 1e3, 1e4):

        def outer(k, r, t, u, stream=0, gamma=gamma):
            return np.exp(u / gamma) / gamma

        got = comfedl(X0, COHORTS, loss, loss_gradient, outer, 3, lr=0.05 * gamma)["x"]
        errors.append(np.max(np.abs(got - want)))
    assert errors[0] > 1e-3
    assert errors[1] == pytest.approx(10 * errors[2], rel=0.05)
    assert errors[2] < 1e-3


# MFCGD


@pytest.mark.parametrize("q", [1, 3])
@pytest.mark.parametrize("jacobian", ["exact", "product"])
def test_identity_matrix_by_rounds_is_the_printed_loop(q, jacobian):
    schedules = {"eta": rate, "alpha": lambda r, t: rate(r, t) ** 2, "beta": 0.5, "varrho": lambda r, t: 0.1 + 0.1 * t}
    common = dict(clients=N, gamma=0.7, jacobian=jacobian, **schedules)
    printed = mfcgd(X0, FULL, *NOISY, q, **common)
    for rule in ({"matrix": "identity"}, {"matrix": "adam", "theta": 1.0, "rho": 1.0}):
        rounds = adamfcgd(X0, FULL, *NOISY, q, **rule, **common)
        for key, value in printed.items():
            if key == "x":
                close(rounds[key], value)
            else:
                assert rounds[key].keys() == value.keys()
                for k in value:
                    close(rounds[key][k], value[k])
    differ(printed["x"], X0)


@pytest.mark.parametrize("q", [1, 4])
def test_mfcgd_with_identity_inner_is_storm_local_sgd(q):
    # q local steps, then x is averaged; d is a STORM gradient with weight varrho.
    x = dict.fromkeys(ALL, X0)
    d = {k: gradient(k, 0, -1, X0) for k in ALL}
    for r in range(3):
        for j in range(q):
            new = {k: x[k] - rate(r, j) * 0.5 * d[k] for k in ALL}
            if j == q - 1:
                new = dict.fromkeys(ALL, np.mean([new[k] for k in ALL], axis=0))
            d = {k: gradient(k, r, j, new[k]) + (1 - 0.15) * (d[k] - gradient(k, r, j, x[k])) for k in ALL}
            x = new
    got = mfcgd(X0, FULL, *IDENTITY, q, clients=N, eta=rate, gamma=0.5, **WEIGHTS)
    close(got["x"], x[0])
    for k in ALL:
        close(got["w"][k], d[k])
        close(got["h"][k], x[k])
    differ(d[0], d[1])


@pytest.mark.parametrize("q", [1, 3])
@pytest.mark.parametrize("jacobian", ["exact", "product"])
def test_mfcgd_with_all_weights_one_is_comfedl_on_the_previous_batch(q, jacobian):
    name = previous(q)
    shifted = [lambda k, r, j, point, call=call: call(k, *name(r, j), point) for call in NOISY]
    want = comfedl(X0, FULL, *shifted, q, lr=lambda r, t: 0.5 * rate(r, t))["x"]
    got = mfcgd(X0, FULL, *NOISY, q, clients=N, eta=rate, gamma=0.5, alpha=1, beta=1, varrho=1, jacobian=jacobian)
    close(got["x"], want)
    differ(want, comfedl(X0, FULL, *NOISY, q, lr=lambda r, t: 0.5 * rate(r, t))["x"])


@pytest.mark.parametrize("jacobian", ["exact", "product"])
def test_mfcgd_on_full_batches_is_comfedl_whatever_the_weights(jacobian):
    # STORM stays exact only if each client's old point is its own, also at a synchronisation.
    want = comfedl(X0, FULL, *EXACT, 3, lr=lambda r, t: 0.5 * rate(r, t))["x"]
    got = mfcgd(X0, FULL, *EXACT, 3, clients=N, eta=rate, gamma=0.5, jacobian=jacobian, **WEIGHTS)
    close(got["x"], want)
    for k in ALL:
        close(got["h"][k], exact_inner(k, 0, 0, want))
        close(got["w"][k], exact_jacobian(k, 0, 0, want).T @ exact_outer(k, 0, 0, got["h"][k]))


def test_exact_and_product_forms_agree_for_a_linear_inner_function_only():
    def linear(k, r, t, x, stream=0):
        return G[k] @ x + 0.3 * noise(1, k, r, t, stream, R)

    def linear_jacobian(k, r, t, x, stream=0):
        return G[k]

    def run(form, functions, varrho):
        weights = {"alpha": 0.3, "beta": 0.4, "varrho": varrho}
        return adamfcgd(X0, FULL, *functions, 3, clients=N, eta=rate, gamma=0.5, jacobian=form, **weights)

    linear_functions = (linear, linear_jacobian, outer_gradient)
    # The product form has the weight beta = 0.4 and no varrho.
    one, other = run("exact", linear_functions, 0.4), run("product", linear_functions, 0.9)
    close(one["x"], other["x"])
    close(one["a"], other["a"])
    for k in ALL:
        close(one["w"][k], other["w"][k])
        close(one["h"][k], other["h"][k])
    assert other["u"] == other["v"] == {}
    differ(one["x"], run("exact", linear_functions, 0.9)["x"])
    differ(run("exact", NOISY, 0.4)["x"], run("product", NOISY, 0.4)["x"])


def test_one_estimator_update_by_hand():
    alpha, beta, varrho = WEIGHTS.values()
    got = mfcgd(X0, [ALL], *NOISY, 2, clients=N, eta=0.3, gamma=0.5, **WEIGHTS)
    x2, h2, w2 = {}, {}, {}
    for k in ALL:
        h1, u1 = inner(k, 0, -1, X0), inner_jacobian(k, 0, -1, X0)
        v1 = outer_gradient(k, 0, -1, h1)
        x2[k] = X0 - 0.15 * u1.T @ v1
        h2[k] = inner(k, 0, 0, x2[k]) + (1 - alpha) * (h1 - inner(k, 0, 0, X0))
        u2 = inner_jacobian(k, 0, 0, x2[k]) + (1 - beta) * (u1 - inner_jacobian(k, 0, 0, X0))
        v2 = outer_gradient(k, 0, 0, h2[k]) + (1 - varrho) * (v1 - outer_gradient(k, 0, 0, h1))
        w2[k] = u2.T @ v2
    x3 = np.mean([x2[k] - 0.15 * w2[k] for k in ALL], axis=0)
    close(got["x"], x3)
    for k in ALL:
        h3 = inner(k, 0, 1, x3) + (1 - alpha) * (h2[k] - inner(k, 0, 1, x2[k]))
        close(got["h"][k], h3)


@pytest.mark.parametrize("matrix", ["identity", "adam", "norm", "belief", "amsgrad"])
@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("jacobian", ["exact", "product"])
def test_a_run_can_be_cut_and_continued(matrix, defer, jacobian):
    common = dict(clients=N, eta=rate, gamma=0.5, theta=0.8, rho=0.5, matrix=matrix, jacobian=jacobian, **WEIGHTS)
    whole = adamfcgd(X0, FULL, *NOISY, 3, **common)
    part = adamfcgd(X0, FULL[:1], *NOISY, 3, defer=defer, **common)
    start = part.pop("x")
    rest = adamfcgd(start, FULL[1:], *NOISY, 3, defer=defer, first_round=1, **part, **common)
    close(rest["x"], whole["x"])
    close(rest["a"], whole["a"])
    if defer:
        # The clients still hold their own points and the estimators there.
        differ(rest["x_k"][0], rest["x_k"][1])
        differ(rest["h"][0], whole["h"][0])
    else:
        close(rest["w"][1], whole["w"][1])


@pytest.mark.parametrize("matrix", ["adam", "norm", "belief", "amsgrad"])
def test_adaptive_matrix_of_one_client_on_full_batches(matrix):
    # Every iteration synchronises (q = 1): preconditioned gradient descent.
    theta, rho = 0.7, 0.2
    x, a, largest, before = X0, 0.0, 0.0, np.zeros(D)
    for r in range(4):
        w = exact_jacobian(0, 0, 0, x).T @ exact_outer(0, 0, 0, exact_inner(0, 0, 0, x))
        if matrix == "norm":
            a = theta * a + (1 - theta) * np.linalg.norm(w)
            diagonal = a + rho
        else:
            a = theta * a + (1 - theta) * (w - (before if matrix == "belief" else 0)) ** 2
            largest = np.maximum(largest, a)
            diagonal = np.sqrt(largest if matrix == "amsgrad" else a) + rho
        x, before = x - rate(r, 0) * 2.0 * w / diagonal, w
    options = dict(clients=1, eta=rate, gamma=2.0, theta=theta, rho=rho, matrix=matrix, **WEIGHTS)
    got = adamfcgd(X0, [[0]] * 4, *EXACT, 1, **options)
    close(got["x"], x)
    close(got["a"], a)
    close(got["w_bar"], before)


def test_amsgrad_keeps_the_maximum_and_belief_starts_like_adam():
    common = dict(clients=N, eta=rate, gamma=0.5, theta=0.5, rho=0.5, **WEIGHTS)
    huge = np.full(D, 1e6)
    adam = adamfcgd(X0, [ALL], *NOISY, 2, matrix="adam", **common)
    amsgrad = adamfcgd(X0, [ALL], *NOISY, 2, matrix="amsgrad", **common, a_max=huge)
    close(amsgrad["a_max"], huge)
    assert np.max(np.abs(amsgrad["x"] - X0)) < 1e-2
    close(amsgrad["x_k"][0], amsgrad["x"])
    close(adamfcgd(X0, [ALL], *NOISY, 2, matrix="belief", **common)["x"], adam["x"])
    two = [ALL, ALL]
    differ(adamfcgd(X0, two, *NOISY, 2, matrix="belief", **common)["x"], adamfcgd(X0, two, *NOISY, 2, **common)["x"])


def test_a_fixed_diagonal_matrix_is_mfcgd_in_scaled_coordinates():
    # theta = 1 freezes a. With x = s z, s = diag(A)^(-1/2), A^{-1} in x is I in z.
    a = np.array([0.0, 0.5, 2.0, 7.0])
    scale = (np.sqrt(a) + 0.5) ** -0.5
    functions = (
        lambda k, r, t, z: inner(k, r, t, scale * z),
        lambda k, r, t, z: inner_jacobian(k, r, t, scale * z) * scale,
        outer_gradient,
    )
    want = mfcgd(X0 / scale, FULL, *functions, 3, clients=N, eta=rate, gamma=0.5, **WEIGHTS)
    got = adamfcgd(X0, FULL, *NOISY, 3, clients=N, eta=rate, gamma=0.5, theta=1.0, rho=0.5, a=a, **WEIGHTS)
    close(got["x"], scale * want["x"])
    close(got["a"], a)


def test_the_first_matrix_before_any_synchronisation():
    common = dict(clients=N, eta=0.3, gamma=0.5, theta=0.5, rho=0.25, **WEIGHTS)
    state = adamfcgd(X0, [], *NOISY, 2, **common)
    w = np.mean([state["w"][k] for k in ALL], axis=0)
    local = {"accumulator": 0.25, "identity": 1.0, "average": np.sqrt(0.5 * w**2) + 0.25}
    for choice, diagonal in local.items():
        got = adamfcgd(X0, [ALL], *NOISY, 2, first_matrix=choice, defer=True, **common)
        for k in ALL:
            close(got["x_k"][k], X0 - 0.15 * state["w"][k] / diagonal)


def test_projections():
    common = dict(clients=N, eta=rate, gamma=0.5, **WEIGHTS)
    free = mfcgd(X0, FULL, *NOISY, 3, **common)
    close(mfcgd(X0, FULL, *NOISY, 3, c_g=1e3, c_f=1e3, **common)["x"], free["x"])
    bound = mfcgd(X0, [ALL], *NOISY, 1, c_g=0.1, c_f=0.05, **common)
    unbound = mfcgd(X0, [ALL], *NOISY, 1, **common)
    # The initial estimators are not projected, so the first step and its point are equal.
    close(bound["x"], unbound["x"])
    for k in ALL:
        close(bound["u"][k], 0.1 * unbound["u"][k] / np.linalg.norm(unbound["u"][k]))
        close(bound["v"][k], 0.05 * unbound["v"][k] / np.linalg.norm(unbound["v"][k]))
        close(bound["w"][k], bound["u"][k].T @ bound["v"][k])
    with pytest.raises(ValueError, match="product"):
        mfcgd(X0, FULL, *NOISY, 3, c_g=1.0, jacobian="product", **common)


@pytest.mark.parametrize("method", [mfcgd, adamfcgd])
def test_partial_participation_is_refused(method):
    with pytest.raises(ValueError, match="all 3 clients"):
        method(X0, [ALL, [0, 1]], *NOISY, 2, clients=N, eta=rate, gamma=0.5, **WEIGHTS)


# Local-SCGD, Local-SCGDM


def test_local_scgdm_with_both_weights_one_is_comfedl():
    want = comfedl(X0, COHORTS, *NOISY, 3, lr=lambda r, t: rate(r, t) * 0.7)["x"]
    ones = {"eta": rate, "gamma": lambda r, t: 1 / rate(r, t)}
    close(local_scgd(X0, COHORTS, *NOISY, 3, beta=0.7, **ones)["x"], want)
    got = local_scgdm(X0, COHORTS, *NOISY, 3, beta=0.7, alpha=lambda r, t: 1 / rate(r, t), **ones)
    close(got["x"], want)


def test_local_scgdm_with_momentum_weight_one_is_local_scgd():
    plain = local_scgd(X0, COHORTS, *NOISY, 3, eta=0.5, beta=0.4, gamma=0.6)
    momentum = local_scgdm(X0, COHORTS, *NOISY, 3, eta=0.5, alpha=2.0, beta=0.4, gamma=0.6)
    close(momentum["x"], plain["x"])
    close(momentum["u"], plain["u"])
    differ(plain["x"], comfedl(X0, COHORTS, *NOISY, 3, lr=0.2)["x"])
    differ(plain["x"], local_scgdm(X0, COHORTS, *NOISY, 3, eta=0.5, alpha=1.0, beta=0.4, gamma=0.6)["x"])


def test_local_scgdm_recursions_and_averages_in_closed_form():
    # Client k always reports the value B_k, Jacobian I and outer gradient A_k (constant).
    functions = (lambda k, r, t, x: B[k], identity_jacobian, lambda k, r, t, u: A[k])
    p, c, s = 3, 0.3, 0.25  # steps, gamma eta, alpha eta
    got = local_scgdm(X0, COHORTS, *functions, p, eta=0.5, alpha=0.5, beta=0.2, gamma=0.6)
    x, u, m = X0, None, None
    for index, cohort in enumerate(COHORTS):
        goal_u, goal_m = np.mean(B[cohort], axis=0), np.mean(A[cohort], axis=0)
        if index == 0:
            u, m = goal_u, goal_m
            x = x - 0.1 * p * m
            continue
        u = goal_u + (1 - c) ** p * (u - goal_u)
        x = x - 0.1 * sum(goal_m + (1 - s) ** n * (m - goal_m) for n in range(1, p + 1))
        m = goal_m + (1 - s) ** p * (m - goal_m)
    close(got["u"], u)
    close(got["m"], m)
    close(got["x"], x)


def test_local_scgd_uses_the_new_u_at_the_old_x():
    got = local_scgd(X0, [[0]], *NOISY, 2, eta=1.0, beta=0.3, gamma=0.4)
    u = inner(0, 0, 0, X0)
    x1 = X0 - 0.3 * inner_jacobian(0, 0, 0, X0).T @ outer_gradient(0, 0, 0, u)
    u = 0.6 * u + 0.4 * inner(0, 0, 1, x1)
    close(got["u"], u)
    close(got["x"], x1 - 0.3 * inner_jacobian(0, 0, 1, x1).T @ outer_gradient(0, 0, 1, u))


# LocalMOML


def moml_gradient(k, r, t, x, stream):
    return gradient(k, r, t, x, stream)


def moml_hvp(k, r, t, x, v, stream):
    return A[k] * (1 + 0.3 * noise(5, k, r, t, stream, D)) * v


def test_local_moml_without_memory_is_comfedl_on_the_maml_problem():
    a = 0.2
    functions = (
        lambda k, r, t, x: x - a * gradient(k, r, t, x, 1),
        lambda k, r, t, x: np.eye(D) - a * np.diag(moml_hvp(k, r, t, x, np.ones(D), 3)),
        lambda k, r, t, u: gradient(k, r, t, u, 2),
    )
    want = comfedl(X0, COHORTS, *functions, 3, lr=rate)["x"]
    got = local_moml(X0, COHORTS, moml_gradient, moml_hvp, 3, lr=rate, inner_lr=a, beta=1.0)["x"]
    close(got, want)
    differ(want, local_moml(X0, COHORTS, moml_gradient, moml_hvp, 3, lr=rate, inner_lr=a, beta=0.5)["x"])


@pytest.mark.parametrize("first_order", [False, True])
def test_local_moml_in_closed_form_on_quadratics(first_order):
    a, lr, p = 0.2, 0.3, 3

    def exact(k, r, t, x, stream):
        return A[k] * (x - B[k])

    def hvp(k, r, t, x, v, stream):
        assert not first_order
        return A[k] * v

    options = {"lr": lr, "inner_lr": a, "first_order": first_order}
    factor = 1 - a * A
    outer = 1.0 if first_order else factor
    # beta = 1: u - b = (1 - a A)(x - b) at every step.
    got = local_moml(X0, [ALL], exact, hvp, p, beta=1.0, **options)["x"]
    close(got, np.mean(B + (1 - lr * outer * A * factor) ** p * (X0 - B), axis=0))
    # beta = 0: u stays at its big-batch value for the round.
    got = local_moml(X0, [ALL], exact, hvp, p, beta=0.0, **options)
    close(got["x"], np.mean(X0 - p * lr * outer * A * factor * (X0 - B), axis=0))
    for k in ALL:
        close(got["u"][k], B[k] + factor[k] * (X0 - B[k]))


def test_local_moml_names_its_batches():
    calls = []

    def record(k, r, t, x, stream):
        calls.append((k, r, t, stream))
        return np.zeros(D)

    def record_hvp(k, r, t, x, v, stream):
        return record(k, r, t, x, stream)

    local_moml(X0, [[1]], record, record_hvp, 2, lr=0.1, inner_lr=0.1, beta=0.5)
    assert calls == [(1, 0, -1, 0)] + [(1, 0, t, stream) for t in (0, 1) for stream in (1, 2, 3)]


# FedNest


def nest_value(k, epoch, step, x):
    return np.tanh(G[k] @ x)


def nest_vjp(k, epoch, step, x, v):
    return exact_jacobian(k, 0, 0, x).T @ v


def nest_outer(k, epoch, step, y):
    return np.tanh(y - C[k])


NEST = (nest_value, nest_vjp, nest_outer)


def test_fednest_with_exact_inner_solution_is_gradient_descent_on_the_global_composition():
    def objective(x):
        y = np.mean([np.tanh(G[k] @ x) for k in ALL], axis=0)
        return np.mean([np.sum(np.log(np.cosh(y - C[k]))) for k in ALL])

    x, y = X0, np.zeros(R)
    for _ in range(2):
        numeric = np.array([(objective(x + 1e-6 * e) - objective(x - 1e-6 * e)) / 2e-6 for e in np.eye(D)])
        got = fednest(x, y, 1, N, *NEST, inner_rounds=1, tau=1, alpha=0.5, beta=1.0)
        close(got["x"], x - 0.5 * numeric, tol=1e-8)
        close(got["y"], np.mean([np.tanh(G[k] @ x) for k in ALL], axis=0))
        x, y = got["x"], got["y"]
    # Not the problem with the mean outside.
    differ(
        fednest(X0, y, 1, N, *NEST, inner_rounds=1, tau=1, alpha=0.5, beta=1.0)["x"],
        comfedl(X0, [ALL], *EXACT, 1, lr=0.5)["x"],
    )


@pytest.mark.parametrize(("inner_rounds", "tau"), [(1, 1), (3, 1), (1, 4), (2, 3)])
def test_fednest_local_steps_in_closed_form(inner_rounds, tau):
    beta, y0 = 0.6, np.array([1.0, -2.0])
    got = fednest(X0, y0, 1, N, *NEST, inner_rounds=inner_rounds, tau=tau, alpha=0.5, beta=beta)
    target = np.mean([np.tanh(G[k] @ X0) for k in ALL], axis=0)
    y = target + (1 - beta / tau) ** (tau * inner_rounds) * (y0 - target)
    close(got["y"], y)
    p = np.mean([np.tanh(y - C[k]) for k in ALL], axis=0)
    close(got["x"], X0 - 0.5 * np.mean([nest_vjp(k, 0, 0, X0, p) for k in ALL], axis=0))


def test_fednest_names_its_batches():
    calls = []
    fednest(
        X0,
        np.zeros(R),
        1,
        1,
        lambda k, e, s, x: calls.append(("r", k, e, s)) or np.zeros(R),
        lambda k, e, s, x, v: calls.append(("vjp", k, e, s)) or np.zeros(D),
        lambda k, e, s, y: calls.append(("f", k, e, s)) or np.zeros(R),
        inner_rounds=2,
        tau=3,
        alpha=0.1,
        beta=0.1,
    )
    assert calls == [("r", 0, 0, 0), ("r", 0, 0, 1), ("f", 0, 0, 2), ("vjp", 0, 0, 2)]


# DRFA and AFL


def test_projection_onto_the_simplex():
    close(project_simplex([0.2, 0.3, 0.5]), [0.2, 0.3, 0.5])
    close(project_simplex([0.5, 0.5, 0.5]), [1 / 3] * 3)
    close(project_simplex([5.0, 0.0, -1.0]), [1, 0, 0])
    close(project_simplex([0.9, 0.5, -3.0]), [0.7, 0.3, 0])
    close(project_simplex([-4.0]), [1.0])
    rng = np.random.default_rng(2)
    for size in (2, 3, 7):
        for _ in range(20):
            v = rng.normal(size=size)
            p = project_simplex(v)
            assert p.min() >= 0 and abs(p.sum() - 1) < 1e-12
            # The threshold by bisection instead.
            low, high = v.min() - 1, v.max()
            for _ in range(200):
                middle = 0.5 * (low + high)
                low, high = (middle, high) if np.maximum(v - middle, 0).sum() > 1 else (low, middle)
            close(p, np.maximum(v - low, 0), tol=1e-10)
            # Variational inequality: (v - p) . (z - p) <= 0 for the vertices z.
            assert np.max((v - p) - (v - p) @ p) < 1e-12


def test_drfa_model_is_fedavg_weighted_by_the_number_of_draws():
    draws = [[0, 0, 2], [1, 1, 1], [2, 1, 0]]
    got = drfa(X0, np.ones(N) / N, draws, [1, 2, 3], [[0]] * 3, gradient, exact_loss, 3, lr=rate, lr_lambda=0.1)["x"]
    x = X0
    for r, draw in enumerate(draws):

        def this_round(k, _, t, point, r=r):
            return gradient(k, r, t, point)

        counts = {k: draw.count(k) for k in set(draw)}
        options = {"lr": lambda _, t, r=r: rate(r, t), "weights": counts}
        x = fedavg(x, [sorted(counts)], this_round, lambda k: 3, **options)["x"]
    close(got, x)


@pytest.mark.parametrize("snapshot", [1, 2, 4])
def test_drfa_mixture_step_in_closed_form(snapshot):
    lam, lr = np.array([0.3, 0.5, 0.2]), 0.1
    draw, chosen = [0, 2, 2, 1], [2, 0]
    got = drfa(X0, lam, [draw], [snapshot], [chosen], exact_gradient, exact_loss, 4, lr=lr, lr_lambda=0.01)
    after = {n: np.mean([B[k] + (1 - lr * A[k]) ** n * (X0 - B[k]) for k in draw], axis=0) for n in (snapshot, 4)}
    close(got["x"], after[4])
    close(got["snapshot"], after[snapshot])
    raised = lam.copy()
    for k in chosen:
        raised[k] += 4 * 0.01 * (N / 2) * exact_loss(k, 0, after[snapshot])
    assert raised.max() - raised.min() < 1  # all entries stay positive: a plain shift
    close(got["lam"], raised - (raised.sum() - 1) / N)


def test_drfa_refuses_what_it_cannot_mean():
    common = {"lr": 0.1, "lr_lambda": 0.1}
    lam = np.ones(N) / N
    with pytest.raises(ValueError, match="snapshot"):
        drfa(X0, lam, [ALL], [0], [ALL], exact_gradient, exact_loss, 3, **common)
    with pytest.raises(ValueError, match="twice"):
        drfa(X0, lam, [ALL], [1], [[0, 0]], exact_gradient, exact_loss, 3, **common)


def test_afl_with_a_fixed_mixture_is_gradient_descent():
    lam, lr, rounds = np.array([0.6, 0.1, 0.3]), 0.2, 5
    got = afl(X0, lam, rounds, exact_gradient, exact_loss, lr=lr, lr_lambda=0.0)
    curvature = lam @ A
    best = (lam @ (A * B)) / curvature
    iterates = [best + (1 - lr * curvature) ** n * (X0 - best) for n in range(1, rounds + 1)]
    close(got["x"], iterates[-1])
    close(got["x_mean"], np.mean(iterates, axis=0))
    close(got["lam"], lam)
    close(got["lam_mean"], lam)


def test_afl_updates_are_simultaneous():
    lam = np.array([0.5, 0.3, 0.2])
    got = afl(X0, lam, 1, exact_gradient, exact_loss, lr=0.3, lr_lambda=0.01)
    losses = np.array([exact_loss(k, 0, X0) for k in ALL])
    close(got["lam"], project_simplex(lam + 0.01 * losses))
    close(got["x"], X0 - 0.3 * lam @ (A * (X0 - B)))
    differ(got["lam"], lam)


def test_afl_finds_the_saddle_of_two_opposite_quadratics():
    centre = np.array([1.0, -1.0])
    got = afl(
        np.array([0.8]),
        np.array([0.9, 0.1]),
        4000,
        lambda k, r, t, x: x - centre[k],
        lambda k, r, x: 0.5 * float((x[0] - centre[k]) ** 2),
        lr=0.05,
        lr_lambda=0.05,
        project=lambda x: np.clip(x, -2, 2),
    )
    close(got["x_mean"], [0.0], tol=1e-2)
    close(got["lam_mean"], [0.5, 0.5], tol=1e-2)
