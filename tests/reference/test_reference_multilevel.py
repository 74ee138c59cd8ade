"""Closed-form checks of the references of LocalSMCGDAM, LocalSCGDAM and LocalSGDM-RL.

The affine problem: level j of client k is u -> A_j u + b_kj (or A_kj u + b_kj), dimensions DIMS, and
f_k(u, y) = 1/2 u'Q u + c_k'u + y'(B u + d_k) - 1/2 y'M y; without a dual the terms with y are left
out. The curved problem adds 0.3 sin(C_j u) to the levels and sum log cosh u to f_k. A batch multiplies
by and adds noise that depends on its name only.
"""

import numpy as np
import pytest

from .fedavg import fedavg
from .local_scgdam import local_scgdam
from .local_sgdm_rl import (
    class_weights,
    last_layer_changes,
    local_sgdm,
    local_sgdm_rl,
    positions,
    ratios,
    sgdm,
    weighted_cross_entropy,
)
from .local_smcgdam import local_smcgdam

N, P, DIMS = 3, 2, (2, 3, 5, 4)
ALL = list(range(N))
COHORTS = [[0, 1], [2], [1, 2, 0], [2, 0]]
_rng = np.random.default_rng(16)


def _orthonormal(rows, columns):
    q, _ = np.linalg.qr(_rng.normal(size=(max(rows, columns), max(rows, columns))))
    return q[:rows, :columns]


# Level j is index j - 1. COMMON has the same matrices on all clients, OWN has not.
COMMON = [[_orthonormal(DIMS[j + 1], DIMS[j]) for j in range(3)]] * N
OWN = [[COMMON[k][j] + 0.2 * _rng.normal(size=(DIMS[j + 1], DIMS[j])) for j in range(3)] for k in ALL]
CURVE = [_rng.normal(size=(DIMS[j + 1], DIMS[j])) for j in range(3)]
B_LEVEL = [[_rng.normal(size=DIMS[j + 1]) for j in range(3)] for _ in ALL]
Q = [np.diag(_rng.uniform(0.6, 1.2, size=m)) for m in DIMS]
C_OUT = [[_rng.normal(size=m) for m in DIMS] for _ in ALL]
B_OUT = [0.5 * _rng.normal(size=(P, m)) for m in DIMS]
D_OUT = _rng.normal(size=(N, P))
M_OUT = np.diag([0.8, 1.3])
X0, Y0 = _rng.normal(size=DIMS[0]), _rng.normal(size=P)

ETA = 0.5
RATES = {"eta": ETA, "gamma_x": 0.5, "gamma_y": 0.8, "rho_x": 1.5, "rho_y": 1.4}
DUAL = pytest.mark.parametrize("dual", [True, False])
LEVELS = pytest.mark.parametrize("levels", [1, 2, 3])


def close(left, right, tol=1e-12):
    np.testing.assert_allclose(left, right, rtol=tol, atol=tol)


def differ(left, right, by=1e-4):
    assert np.max(np.abs(np.asarray(left) - np.asarray(right))) > by


def same(got, want, tol=1e-12):
    """Compare two states, entry by entry, lists, dicts by client and None included."""
    assert got.keys() == want.keys()
    for key, right in want.items():
        left = got[key]
        if right is None:
            assert left is None
        elif isinstance(right, dict):
            assert left.keys() == right.keys()
            for k in right:
                close(left[k], right[k], tol)
        elif isinstance(right, list):
            assert len(left) == len(right)
            for a, b in zip(left, right, strict=True):
                close(a, b, tol)
        else:
            close(left, right, tol)


def noise(tag, k, r, t, stream, *shape):
    return np.random.default_rng([tag, k, r + 2, t + 2, stream]).normal(size=shape)


class Problem:
    """The callbacks; ``noisy`` ones depend on the name of the batch, the others do not."""

    def __init__(self, levels, dual, matrices=COMMON, curved=False, noisy=False, clients=ALL):
        self.K, self.dual, self.A, self.curved, self.noisy = levels, dual, matrices, curved, noisy
        self.clients = clients
        self.y0 = Y0 if dual else None
        self.calls = []

    def true_level(self, k, j, u):
        value = self.A[k][j - 1] @ u + B_LEVEL[k][j - 1]
        return value + 0.3 * np.sin(CURVE[j - 1] @ u) if self.curved else value

    def true_jacobian(self, k, j, u):
        jacobian = self.A[k][j - 1]
        return jacobian + 0.3 * np.cos(CURVE[j - 1] @ u)[:, None] * CURVE[j - 1] if self.curved else jacobian

    def chain(self, k, x, upto=None):
        for j in range(1, (self.K if upto is None else upto) + 1):
            x = self.true_level(k, j, x)
        return x

    def mean_chain(self, x, upto=None):
        return np.mean([self.chain(k, x, upto) for k in self.clients], axis=0)

    def loss(self, k, u, y):
        value = 0.5 * u @ Q[self.K] @ u + C_OUT[k][self.K] @ u
        if self.curved:
            value += np.sum(np.log(np.cosh(u)))
        if self.dual:
            value += y @ (B_OUT[self.K] @ u + D_OUT[k]) - 0.5 * y @ M_OUT @ y
        return value

    def true_outer(self, k, u, y):
        grad = Q[self.K] @ u + C_OUT[k][self.K]
        if self.curved:
            grad = grad + np.tanh(u)
        if not self.dual:
            return grad, None
        return grad + B_OUT[self.K].T @ y, B_OUT[self.K] @ u + D_OUT[k] - M_OUT @ y

    def factor(self, k, r, t, j, stream=0):
        m = DIMS[j]
        if not self.noisy:
            return np.ones(m), np.zeros(m)
        return 1 + 0.2 * noise(j, k, r, t, stream, m), 0.2 * noise(10 + j, k, r, t, stream, m)

    def level(self, k, r, t, j, u):
        self.calls.append(("level", k, r, t, j, 0))
        assert u.shape == (DIMS[j - 1],)
        scale, shift = self.factor(k, r, t, j)
        return scale * self.true_level(k, j, u) + shift

    def jacobian(self, k, r, t, j, u, stream=0):
        return self.factor(k, r, t, j, stream)[0][:, None] * self.true_jacobian(k, j, u)

    def level_vjp(self, k, r, t, j, u, c, stream=0):
        self.calls.append(("vjp", k, r, t, j, stream))
        assert u.shape == (DIMS[j - 1],) and c.shape == (DIMS[j],)
        return self.jacobian(k, r, t, j, u, stream).T @ c

    def outer(self, k, r, t, u, y):
        self.calls.append(("outer", k, r, t, 0, 0))
        grad_u, grad_y = self.true_outer(k, u, y)
        if self.noisy:
            grad_u = grad_u + 0.2 * noise(20, k, r, t, 0, DIMS[self.K])
            grad_y = None if grad_y is None else grad_y + 0.2 * noise(21, k, r, t, 0, P)
        return grad_u, grad_y

    def inner(self, k, r, t, u):
        return self.level(k, r, t, 1, u)

    def inner_vjp(self, k, r, t, u, c, stream=0):
        return self.level_vjp(k, r, t, 1, u, c, stream)

    def run(self, cohorts, steps, x=X0, y=None, **settings):
        settings = {**RATES, "alpha": 1.0, **settings}
        y = self.y0 if y is None else y
        return local_smcgdam(x, y, cohorts, self.level, self.level_vjp, self.outer, steps, levels=self.K, **settings)

    def run_two_level(self, cohorts, steps, x=X0, y=None, **settings):
        names = {"rho_x": "beta_x", "rho_y": "beta_y"}
        settings = {names.get(key, key): value for key, value in {**RATES, "alpha": 1.0, **settings}.items()}
        y = self.y0 if y is None else y
        return local_scgdam(x, y, cohorts, self.inner, self.inner_vjp, self.outer, steps, **settings)

    def solution(self, inner="global"):
        """The zero of the field of a problem with affine levels and quadratic f, as x and y.

        'global': problem (2), (mean J)' mean grad f_k(mean G_k, y). 'mixed': mean J_k' grad f_k(mean G_k, y).
        'local': mean J_k' grad f_k(G_k, y).
        """

        def field(z):
            x, y = z[: DIMS[0]], z[DIMS[0] :]
            outs, jacobians = [], []
            for k in self.clients:
                outs.append(self.true_outer(k, self.chain(k, x) if inner == "local" else self.mean_chain(x), y))
                jacobian = np.eye(DIMS[0])
                for j in range(1, self.K + 1):
                    jacobian = self.A[k][j - 1] @ jacobian
                jacobians.append(jacobian)
            if inner == "global":
                field_x = np.mean(jacobians, axis=0).T @ np.mean([out[0] for out in outs], axis=0)
            else:
                field_x = np.mean([j.T @ out[0] for j, out in zip(jacobians, outs, strict=True)], axis=0)
            return np.concatenate([field_x, np.mean([out[1] for out in outs], axis=0)]) if self.dual else field_x

        size = DIMS[0] + (P if self.dual else 0)
        constant = field(np.zeros(size))
        matrix = np.array([field(row) - constant for row in np.eye(size)]).T
        z = np.linalg.solve(matrix, -constant)
        return z[: DIMS[0]], z[DIMS[0] :]


def slope(function, x, step=1e-6):
    return np.array([(function(x + step * e) - function(x - step * e)) / (2 * step) for e in np.eye(len(x))])


def ball(y):
    norm = float(np.linalg.norm(y))
    return y if norm <= 0.5 else y * (0.5 / norm)


def test_the_problem_is_what_it_says():
    problem = Problem(3, True, OWN, curved=True)
    u = X0
    for j in (1, 2, 3):
        for row in range(DIMS[j]):
            got = problem.true_jacobian(1, j, u)[row]
            close(got, slope(lambda z, j=j, row=row: problem.true_level(1, j, z)[row], u), 1e-7)
        u = problem.true_level(1, j, u)
    grad_u, grad_y = problem.true_outer(1, u, Y0)
    close(grad_u, slope(lambda z: problem.loss(1, z, Y0), u), 1e-7)
    close(grad_y, slope(lambda z: problem.loss(1, u, z), Y0), 1e-7)


# LocalSMCGDAM: the solution of a linear-quadratic problem.


@LEVELS
@DUAL
@pytest.mark.parametrize(("steps", "alpha"), [(1, 1.0), (3, 1.0), (3, 0.0), (3, 1 / ETA**2)])
def test_the_solution_is_reached(levels, dual, steps, alpha):
    # Same matrices, different constants on the clients: the zero of problem (2).
    problem = Problem(levels, dual)
    out = problem.run([ALL] * (180 // steps), steps, alpha=alpha)
    x, y = problem.solution()
    close(out["x"], x, 1e-8)
    if dual:
        close(out["y"], y, 1e-8)
    else:
        assert out["y"] is None and out["q"] is None
    for j in range(1, levels + 1):
        close(out["h"][j - 1], problem.mean_chain(x, j), 1e-8)
    close(out["p"], np.zeros(DIMS[0]), 1e-8)


@LEVELS
@pytest.mark.parametrize(("alpha", "inner"), [(0.0, "mixed"), (1 / ETA**2, "local")])
def test_what_is_solved_with_heterogeneous_matrices(levels, alpha, inner):
    problem = Problem(levels, True, OWN)
    out = problem.run([ALL] * 180, 1, alpha=alpha, average_initial=True)
    x, y = problem.solution(inner)
    close(out["x"], x, 1e-8)
    close(out["y"], y, 1e-8)
    differ(x, problem.solution("global")[0], 1e-2)
    differ(problem.solution("local")[0], problem.solution("mixed")[0], 1e-2)


def test_in_between_grad_f_is_taken_between_the_global_and_the_local_inner_value():
    problem = Problem(1, True, OWN)
    a = 0.25
    out = problem.run([ALL] * 180, 1, alpha=a / ETA**2, average_initial=True)
    points = [(1 - a) * problem.mean_chain(out["x"]) + a * problem.chain(k, out["x"]) for k in ALL]
    outs = [problem.true_outer(k, points[k], out["y"]) for k in ALL]
    close(np.mean([OWN[k][0].T @ outs[k][0] for k in ALL], axis=0), np.zeros(DIMS[0]), 1e-8)
    # Here the moving average of LocalSCGDAM rests at the same point.
    slow = {"gamma_x": 0.2, "gamma_y": 0.3}
    other = problem.run_two_level([ALL] * 600, 1, alpha=a / ETA, average_initial=True, **slow)
    close(other["x"], out["x"], 1e-8)


# LocalSMCGDAM: exactness of the direction and of h.


@LEVELS
@DUAL
def test_with_weight_one_and_full_batches_the_direction_is_the_exact_gradient(levels, dual):
    one = {"alpha": 1 / ETA**2, "rho_x": 1 / ETA, "rho_y": 1 / ETA}
    problem = Problem(levels, dual, OWN, curved=True)
    for clients, settings in (([1], {}), (ALL, {"average_initial": True})):
        for steps, rounds in ((1, 3),) if len(clients) > 1 else ((1, 3), (3, 2)):
            out = problem.run([clients] * rounds, steps, **one, **settings)

            def objective(x, y, clients=clients):
                return np.mean([problem.loss(k, problem.chain(k, x), y) for k in clients])

            close(out["p"], slope(lambda z, y=out["y"]: objective(z, y), out["x"]), 1e-6)
            if dual:
                close(out["q"], slope(lambda z, x=out["x"]: objective(x, z), out["y"]), 1e-6)
            for j in range(1, levels + 1):
                close(out["h"][j - 1], np.mean([problem.chain(k, out["x"], j) for k in clients], axis=0))


@LEVELS
@DUAL
def test_with_weight_zero_an_exact_h_stays_exact(levels, dual):
    problem = Problem(levels, dual, OWN, curved=True)
    out = problem.run([[1]] * 4, 3, alpha=0.0)
    for j in range(1, levels + 1):
        close(out["h"][j - 1], problem.chain(1, out["x"], j))
    # With any weight too, since the correction is 0: the estimate is exact at the start.
    other = problem.run([[1]] * 4, 3, alpha=0.7)
    same(other, out)

    # Several clients, affine levels with the same matrices: the mean of the compositions.
    problem = Problem(levels, dual)
    out = problem.run([ALL] * 4, 3, alpha=0.0)
    for j in range(1, levels + 1):
        close(out["h"][j - 1], problem.mean_chain(out["x"], j))
    # With different matrices for tau = 1, if all clients start from the same momentum.
    problem = Problem(levels, dual, OWN)
    out = problem.run([ALL] * 4, 1, alpha=0.0, average_initial=True)
    for j in range(1, levels + 1):
        close(out["h"][j - 1], problem.mean_chain(out["x"], j))


def test_with_weight_zero_h_follows_the_global_inner_value_for_one_curved_level():
    problem = Problem(1, True, OWN, curved=True)
    out = problem.run([ALL] * 5, 1, alpha=0.0, average_initial=True)
    close(out["h"][0], problem.mean_chain(out["x"]))
    # Line 1 as printed: the first step is taken apart, and h remembers it.
    out = problem.run([ALL] * 5, 1, alpha=0.0)
    differ(out["h"][0], problem.mean_chain(out["x"]), 1e-5)


# LocalSMCGDAM: a second transcription, over t, with Jacobian matrices.


def plain_loop(problem, clients, rounds, tau, eta, gamma_x, gamma_y, rho_x, rho_y, alpha):
    K = problem.K
    x, y, p, q = (dict.fromkeys(clients, value) for value in (X0, Y0, None, None))
    h = {}

    def u_and_v(n, r, t):
        u = np.eye(DIMS[0])
        for j in range(1, K + 1):
            u = problem.jacobian(n, r, t, j, h[n, j - 1]) @ u
        grad_u, grad_y = problem.outer(n, r, t, h[n, K], y[n])
        return u.T @ grad_u, grad_y

    for n in clients:
        h[n, 0] = x[n]
        for j in range(1, K + 1):
            h[n, j] = problem.level(n, 0, -1, j, h[n, j - 1])
        p[n], q[n] = u_and_v(n, 0, -1)
    for t in range(rounds * tau):
        name = (t // tau, t % tau)
        for n in clients:
            was = {j: h[n, j] for j in range(K + 1)}
            x[n] = x[n] - gamma_x * eta * p[n]
            if problem.dual:
                y[n] = y[n] + gamma_y * eta * q[n]
            h[n, 0] = x[n]
            for j in range(1, K + 1):
                error = was[j] - problem.level(n, *name, j, was[j - 1])
                h[n, j] = (1 - alpha * eta**2) * error + problem.level(n, *name, j, h[n, j - 1])
            u, v = u_and_v(n, *name)
            p[n] = (1 - rho_x * eta) * p[n] + rho_x * eta * u
            if problem.dual:
                q[n] = (1 - rho_y * eta) * q[n] + rho_y * eta * v
        if (t + 1) % tau == 0:
            for table in (x, y, p, q) if problem.dual else (x, p):
                mean = sum(table[n] for n in clients) / len(clients)
                table.update(dict.fromkeys(clients, mean))
            for j in range(1, K + 1):
                mean = sum(h[n, j] for n in clients) / len(clients)
                h.update({(n, j): mean for n in clients})
            h.update({(n, 0): x[n] for n in clients})
    n = clients[0]
    dual = {"y": y[n], "q": q[n]} if problem.dual else {"y": None, "q": None}
    return {"x": x[n], "h": [h[n, j] for j in range(1, K + 1)], "p": p[n], **dual, "own": None}


@LEVELS
@DUAL
@pytest.mark.parametrize("clients", [[1], ALL])
def test_the_box_line_by_line(levels, dual, clients):
    problem = Problem(levels, dual, OWN, curved=True, noisy=True)
    out = problem.run([clients] * 3, 4, alpha=1.3)
    want = plain_loop(problem, clients, 3, 4, alpha=1.3, **RATES)
    same(out, want)


def test_the_first_step_by_hand():
    # x in R, one level g(x) = 2 x + 1, f(u, y) = u^2 / 2 + 3 y u - y^2 / 2, from x = 1, y = 1, exact.
    out = local_smcgdam(
        [1.0],
        [1.0],
        [[0]],
        lambda k, r, t, j, u: 2 * u + 1,
        lambda k, r, t, j, u, c: 2 * c,
        lambda k, r, t, u, y: (u + 3 * y, 3 * u - y),
        1,
        levels=1,
        eta=0.5,
        gamma_x=0.2,
        gamma_y=0.4,
        rho_x=1.0,
        rho_y=0.5,
        alpha=1.0,
    )
    # h = 3, p = 2 (3 + 3) = 12, q = 9 - 1 = 8; x = 1 - 0.1 * 12 = -0.2, y = 1 + 0.2 * 8 = 2.6;
    # h = 0.75 (3 - 3) + 0.6; u = 2 (0.6 + 7.8) = 16.8, v = 1.8 - 2.6 = -0.8.
    close(out["x"], [-0.2])
    close(out["y"], [2.6])
    close(out["h"][0], [0.6])
    close(out["p"], [0.5 * 12 + 0.5 * 16.8])
    close(out["q"], [0.75 * 8 - 0.25 * 0.8])


# LocalSMCGDAM: readings, batches, states.


def test_the_initialisation():
    # rho = 0 keeps p and q at eq. (12).
    problem = Problem(2, True, OWN, curved=True, noisy=True)
    frozen = {"rho_x": 0.0, "rho_y": 0.0, "first_round": 5}
    h1 = problem.level(1, 5, -1, 1, X0)
    h2 = problem.level(1, 5, -1, 2, h1)
    grad_u, grad_y = problem.outer(1, 5, -1, h2, Y0)
    p = problem.jacobian(1, 5, -1, 1, X0).T @ problem.jacobian(1, 5, -1, 2, h1).T @ grad_u
    out = problem.run([[1]], 2, **frozen)
    close(out["p"], p)
    close(out["q"], grad_y)
    # As printed: at the true values of the levels, Jacobians and f on the batch.
    g1 = problem.true_level(1, 1, X0)
    g2 = problem.true_level(1, 2, g1)
    grad_u, grad_y = problem.outer(1, 5, -1, g2, Y0)
    p = problem.jacobian(1, 5, -1, 1, X0).T @ problem.jacobian(1, 5, -1, 2, g1).T @ grad_u
    out = problem.run([[1]], 2, exact_level=problem.true_level, **frozen)
    close(out["p"], p)
    close(out["q"], grad_y)
    # Averaged: the mean over the clients is the same, each client's is not.
    apart, together = (problem.run([ALL], 2, average_initial=flag, **frozen) for flag in (False, True))
    close(apart["p"], together["p"])
    differ(apart["h"][1], together["h"][1])
    # Without noise the expectations are the estimates.
    problem = Problem(2, True, OWN, curved=True)
    same(problem.run([ALL] * 2, 2, exact_level=problem.true_level), problem.run([ALL] * 2, 2))


def test_the_base_of_the_first_level():
    problem = Problem(2, True, OWN, curved=True, noisy=True)
    averaged, own = (problem.run([ALL] * 3, 2, base=base) for base in ("averaged", "own"))
    differ(averaged["x"], own["x"])
    assert averaged["own"] is None and sorted(own["own"]) == ALL
    close(np.mean([own["own"][k] for k in ALL], axis=0), own["x"])
    # The first round knows no difference, one client never does, and tau = 1 from a common start neither.
    for cohorts, steps, settings in (([ALL], 2, {}), ([[1]] * 3, 2, {}), ([ALL] * 3, 1, {"average_initial": True})):
        averaged, own = (problem.run(cohorts, steps, base=base, **settings) for base in ("averaged", "own"))
        close(averaged["x"], own["x"])
    # The first iteration of the second round by hand: the old lower level is the client's own x.
    state = problem.run([ALL], 2, base="own")
    x, y, own = state.pop("x"), state.pop("y"), state["own"]
    after = problem.run([[1]], 1, x, y, **state, base="own", first_round=1)
    x = x - RATES["gamma_x"] * ETA * state["p"]
    close(after["x"], x)
    error = state["h"][0] - problem.level(1, 1, 0, 1, own[1])
    close(after["h"][0], (1 - ETA**2) * error + problem.level(1, 1, 0, 1, x))


def test_another_batch_for_the_jacobians():
    noisy = Problem(3, True, OWN, curved=True, noisy=True)
    differ(noisy.run(COHORTS, 2)["x"], noisy.run(COHORTS, 2, stream_jacobian=1)["x"])
    assert {call[5] for call in noisy.calls if call[0] != "vjp"} == {0}
    exact = Problem(3, True, OWN, curved=True)
    same(exact.run(COHORTS, 2, stream_jacobian=1), exact.run(COHORTS, 2))
    first = exact.calls.index(("vjp", 0, 0, -1, 3, 1))
    assert exact.calls[first : first + 3] == [("vjp", 0, 0, -1, j, 1) for j in (3, 2, 1)]


def test_the_batches_of_a_run():
    problem = Problem(2, True)
    problem.run([[2], [0]], 2, first_round=4)

    def gradient(k, r, t):
        return [("outer", k, r, t, 0, 0), ("vjp", k, r, t, 2, 0), ("vjp", k, r, t, 1, 0)]

    want = [("level", 2, 4, -1, 1, 0), ("level", 2, 4, -1, 2, 0), *gradient(2, 4, -1)]
    for k, r in ((2, 4), (0, 5)):
        for t in (0, 1):
            want += [("level", k, r, t, j, 0) for j in (1, 1, 2, 2)] + gradient(k, r, t)
    assert problem.calls == want


@DUAL
@pytest.mark.parametrize("settings", [{}, {"base": "own"}, {"average_initial": True, "project_y": ball}])
def test_a_run_in_two_parts(dual, settings):
    problem = Problem(3, dual, OWN, curved=True, noisy=True)
    whole = problem.run(COHORTS, 3, **settings)
    part = problem.run(COHORTS[:2], 3, **settings)
    x, y = part.pop("x"), part.pop("y")
    same(problem.run(COHORTS[2:], 3, x, y, **part, first_round=2, **settings), whole)
    assert problem.run([], 3)["h"] is None


@DUAL
def test_the_order_of_the_clients(dual):
    problem = Problem(3, dual, OWN, curved=True, noisy=True)
    for settings in ({}, {"base": "own"}, {"average_initial": True}):
        same(problem.run(COHORTS, 2, **settings), problem.run([c[::-1] for c in COHORTS], 2, **settings))


def test_schedules_and_projection():
    problem = Problem(2, True, OWN, curved=True, noisy=True)
    for name in ("eta", "gamma_x", "gamma_y", "rho_x", "rho_y", "alpha"):
        base = {**RATES, "alpha": 1.0}[name]
        constant = problem.run(COHORTS, 2, **{name: lambda r, t, base=base: base})
        same(constant, problem.run(COHORTS, 2))
        changed = problem.run(COHORTS, 2, **{name: lambda r, t, base=base: base * 0.9 ** (2 * r + t)})
        differ(changed["x"], constant["x"], 1e-6)
    out = problem.run([[1]], 1, project_y=ball)
    start = problem.run([[1]], 1, rho_y=0.0)["q"]
    close(out["y"], ball(Y0 + RATES["gamma_y"] * ETA * start))
    assert np.linalg.norm(problem.run(COHORTS, 3, project_y=ball)["y"]) <= 0.5 + 1e-12


def test_refusals():
    problem = Problem(2, True)
    for settings in ({"base": "none"}, {"h": [X0, X0]}, {"h": [X0], "p": X0, "q": Y0}, {"gamma_y": None}):
        with pytest.raises(ValueError):
            problem.run([ALL], 1, **settings)
    for cohorts, steps in (([[]], 1), ([ALL], 0)):
        with pytest.raises(ValueError):
            problem.run(cohorts, steps)
    problem = Problem(1, True)
    for settings in (
        {"order": "none"},
        {"order": "estimate_first", "average_initial": True},
        {"m": X0},
        {"beta_y": None},
    ):
        with pytest.raises(ValueError):
            problem.run_two_level([ALL], 1, **settings)
    with pytest.raises(ValueError, match="round 0"):
        problem.run_two_level([[]], 1)
    # Without a dual its rates are not needed.
    problem = Problem(1, False)
    same(problem.run([ALL], 2, gamma_y=None, rho_y=None), problem.run([ALL], 2))
    same(problem.run_two_level([ALL], 2, gamma_y=None, rho_y=None), problem.run_two_level([ALL], 2))


# LocalSCGDAM.


def as_multilevel(out):
    return {"x": out["x"], "y": out["y"], "h": [out["h"]], "p": out["m"], "q": out["s"], "own": None}


@DUAL
@pytest.mark.parametrize("settings", [{}, {"average_initial": True}, {"stream_jacobian": 2}, {"project_y": ball}])
def test_one_level_with_both_weights_at_one_is_local_scgdam(dual, settings):
    problem = Problem(1, dual, OWN, curved=True, noisy=True)
    for steps in (1, 3):
        storm = problem.run(COHORTS, steps, alpha=1 / ETA**2, **settings)
        moving = problem.run_two_level(COHORTS, steps, alpha=1 / ETA, **settings)
        same(as_multilevel(moving), storm)
        # They differ as soon as the weight, the same for both, is below 1.
        storm = problem.run(COHORTS, steps, alpha=0.5 / ETA**2, **settings)
        moving = problem.run_two_level(COHORTS, steps, alpha=0.5 / ETA, **settings)
        differ(moving["x"], storm["x"], 1e-6)


@DUAL
@pytest.mark.parametrize("order", ["step_first", "estimate_first"])
@pytest.mark.parametrize("steps", [1, 3])
def test_local_scgdam_reaches_the_solution(dual, order, steps):
    problem = Problem(1, dual)
    # The moving average lags behind, which asks for smaller steps.
    out = problem.run_two_level([ALL] * (360 // steps), steps, order=order, gamma_x=0.25, gamma_y=0.4)
    x, y = problem.solution()
    close(out["x"], x, 1e-8)
    if dual:
        close(out["y"], y, 1e-8)
    close(out["h"], problem.mean_chain(x), 1e-8)


def test_local_scgdam_by_hand():
    # The problem of the first step by hand above, weight of h 0.25.
    arguments = (
        lambda k, r, t, x: 2 * x + 1,
        lambda k, r, t, x, c: 2 * c,
        lambda k, r, t, u, y: (u + 3 * y, 3 * u - y),
    )
    rates = {"eta": 0.5, "gamma_x": 0.2, "gamma_y": 0.4, "beta_x": 1.0, "beta_y": 0.5, "alpha": 0.5}
    out = local_scgdam([1.0], [1.0], [[0]], *arguments, 1, **rates)
    # h = 0.75 * 3 + 0.25 * 0.6 = 2.4; u = 2 (2.4 + 7.8) = 20.4, v = 7.2 - 2.6 = 4.6.
    same(out, {"x": [-0.2], "y": [2.6], "h": [2.4], "m": [6 + 10.2], "s": [6 + 0.25 * 4.6]})
    # The other order: the first iteration initialises and steps, the second is as above and steps.
    out = local_scgdam([1.0], [1.0], [[0]], *arguments, 2, order="estimate_first", **rates)
    x, y = -0.2 - 0.1 * 16.2, 2.6 + 0.2 * (6 + 0.25 * 4.6)
    same(out, {"x": [x], "y": [y], "h": [2.4], "m": [6 + 10.2], "s": [6 + 0.25 * 4.6]})


@DUAL
def test_the_two_orders_of_local_scgdam(dual):
    problem = Problem(1, dual, OWN, curved=True, noisy=True)

    # One client: the same path, the batch (r, t) of one order being the batch before it of the other.
    def earlier(function, steps=3):
        def call(k, r, t, *rest):
            n = r * steps + t - 1
            return function(k, n // steps, n % steps, *rest) if n >= 0 else function(k, 0, -1, *rest)

        return call

    shifted = [earlier(f) for f in (problem.inner, problem.inner_vjp, problem.outer)]
    rates = {"eta": ETA, "gamma_x": 0.5, "gamma_y": 0.8, "beta_x": 1.5, "beta_y": 1.4, "alpha": 1.1}
    out = local_scgdam(X0, problem.y0, [[1]] * 3, *shifted, 3, order="estimate_first", **rates)
    want = problem.run_two_level([[1]] * 3, 3, alpha=1.1)
    close(out["x"], want["x"])
    if dual:
        close(out["y"], want["y"])
    differ(out["m"], want["m"])
    # Several clients: another method.
    out = local_scgdam(X0, problem.y0, [ALL] * 3, *shifted, 3, order="estimate_first", **rates)
    differ(out["x"], problem.run_two_level([ALL] * 3, 3, alpha=1.1)["x"])


@DUAL
@pytest.mark.parametrize("settings", [{}, {"order": "estimate_first"}, {"average_initial": True}])
def test_local_scgdam_in_two_parts_and_in_any_order(dual, settings):
    problem = Problem(1, dual, OWN, curved=True, noisy=True)
    whole = problem.run_two_level(COHORTS, 3, **settings)
    part = problem.run_two_level(COHORTS[:2], 3, **settings)
    x, y = part.pop("x"), part.pop("y")
    same(problem.run_two_level(COHORTS[2:], 3, x, y, **part, first_round=2, **settings), whole)
    same(problem.run_two_level([c[::-1] for c in COHORTS], 3, **settings), whole)


# LocalSGDM-RL: the ratio.

# Five positions of two classes: clear; a tie; too near; a largest of 0; a negative largest.
CHANGES = np.array([[[3.0, 1.0, 0.9, 0.0, -1.0]], [[1.0, 1.0, 1.0, -1.0, -2.0]]])


def test_positions_by_hand():
    assert positions(CHANGES).tolist() == [[0, -1, -1, 0, -1]]
    assert positions(CHANGES, zero="skip").tolist() == [[0, -1, -1, -1, -1]]
    assert positions(CHANGES, share=0.95).tolist() == [[0, -1, 1, 0, -1]]
    # Exactly at the share is not above it; a negative other counts by its magnitude; two zeros are a tie.
    assert positions([[1.0, 1.0, 1.0, 0.0], [0.8, -0.7, -0.9, 0.0]]).tolist() == [0, 0, -1, -1]
    # The sign decides who is largest, so a strong negative change keeps the position free.
    assert positions([[0.5], [-3.0]]).tolist() == [-1]
    assert positions([[0.1], [0.5], [0.3]]).tolist() == [1]
    with pytest.raises(ValueError):
        positions([[1.0]])
    with pytest.raises(ValueError):
        positions(CHANGES, zero="none")


def test_ratios_by_hand():
    # Class 0 has 3 + 0 over 1 - 1 = 0; class 1 has no position.
    close(ratios(CHANGES), [10.0, 10.0])
    close(ratios(CHANGES, empty=4.0), [4.0, 4.0])
    # Class 0 has 3 over 1.
    close(ratios(CHANGES, zero="skip"), [3.0, 10.0])
    close(ratios(CHANGES, zero="skip", cap=2.0), [2.0, 2.0])
    # Class 1 gets the third position: 1 over 0.9.
    close(ratios(CHANGES, share=0.95, zero="skip"), [3.0, 1 / 0.9])
    # Three classes and a matrix: class 0 has 4 and 2 over (1 - 2) / 2 and (-1 - 0) / 2; class 2 has 5 over 0.5.
    changes = [[[4.0, 1.0], [2.0, 0.0]], [[1.0, 1.0], [-1.0, 1.0]], [[-2.0, 0.9], [0.0, 5.0]]]
    assert positions(changes).tolist() == [[0, -1], [0, 2]]
    close(ratios(changes), [6.0, 10.0, 10.0])
    close(ratios(100 * np.array(changes)), [6.0, 10.0, 10.0])
    assert ratios([[1.0], [1e-6]])[0] == 5000.0
    close(ratios([[1.0], [1e-6]], cap=1e7)[0], 1e6)


def test_class_weights_by_hand():
    close(class_weights([10.0, 0.0, 5000.0]), [2.0, 1.0, 501.0])
    close(class_weights([10.0, 0.0], base=0.5, slope=1.0), [10.5, 0.5])


def test_weighted_cross_entropy_by_hand():
    loss, gradient = weighted_cross_entropy(np.zeros((2, 2)), [0, 1], [1.0, 3.0])
    close(loss, 2 * np.log(2))
    close(gradient, [[-0.25, 0.25], [0.75, -0.75]])
    loss, gradient = weighted_cross_entropy(np.zeros((2, 2)), [0, 1], [1.0, 3.0], reduction="weights")
    close(loss, np.log(2))
    close(gradient, [[-0.125, 0.125], [0.375, -0.375]])
    logits, labels, weights = np.random.default_rng(3).normal(size=(4, 3)), [2, 0, 1, 2], [0.5, 2.0, 1.5]
    for reduction in ("batch", "weights"):
        _, gradient = weighted_cross_entropy(logits, labels, weights, reduction=reduction)
        got = slope(
            lambda z, how=reduction: weighted_cross_entropy(z.reshape(4, 3), labels, weights, reduction=how)[0],
            logits.ravel(),
        )
        close(gradient.ravel(), got, 1e-7)
    with pytest.raises(ValueError):
        weighted_cross_entropy(logits, labels, weights, reduction="sum")


# LocalSGDM-RL: the optimiser and the rounds.


def test_sgdm_by_hand():
    x, buffer = sgdm([1.0], lambda t, x: x, 2, lr=0.1, momentum=0.5)
    close((x, buffer), ([0.76], [1.4]))
    # Weight decay 1 doubles the gradient: 2, x = 0.8; 1 + 1.6 = 2.6, x = 0.54.
    x, buffer = sgdm([1.0], lambda t, x: x, 2, lr=0.1, momentum=0.5, weight_decay=1.0)
    close((x, buffer), ([0.54], [2.6]))
    # The first gradient is not damped: 1, x = 0.9; 0.5 + 0.5 * 0.9 = 0.95.
    x, buffer = sgdm([1.0], lambda t, x: x, 2, lr=0.1, momentum=0.5, dampening=0.5)
    close((x, buffer), ([0.805], [0.95]))
    # A given buffer: 0.5 * 2 + 1 = 2; and a rate by step.
    x, buffer = sgdm([1.0], lambda t, x: x, 1, lr=lambda t: 0.2 + t, momentum=0.5, buffer=[2.0])
    close((x, buffer), ([0.6], [2.0]))


def test_local_sgdm_momentum_states():
    # f_k(x) = s_k x^2 / 2 with s = 1, 3, one step a round from x = 1, lr 0.1, momentum 0.5.
    def gradient(k, r, t, x):
        return (1.0, 3.0)[k] * x

    def run(**settings):
        return local_sgdm([1.0], [[0, 1], [1, 0]], gradient, 1, lr=0.1, momentum=0.5, **settings)

    # Round 1: x = 0.9 and 0.7, mean 0.8, buffers 1 and 3. Round 2, buffers 0.8 and 2.4 plus a half of the old.
    same(run(), {"x": [0.8 - 0.1 * 1.6], "buffer": None})
    same(run(momentum_state="keep"), {"x": [0.8 - 0.1 * 2.6], "buffer": {0: [1.3], 1: [3.9]}})
    same(run(momentum_state="average"), {"x": [0.8 - 0.1 * 2.6], "buffer": [2.6]})
    # Weights 1 and 3 of the clients: x = 0.75; then 0.75 and 2.25 as gradients, mean 1.875.
    same(run(weights=[1, 3]), {"x": [0.75 - 0.1 * 1.875], "buffer": None})
    with pytest.raises(ValueError):
        run(momentum_state="none")
    with pytest.raises(ValueError):
        local_sgdm([1.0], [[]], gradient, 1, lr=0.1, momentum=0.5)


CLASSES, FEATURES = 3, 4
SHAPE = (CLASSES, FEATURES)
W0 = 0.1 * np.random.default_rng(8).normal(size=CLASSES * FEATURES)


def last_layer(x):
    return x.reshape(SHAPE)


def softmax_gradient(w, features, labels, weights):
    _, gradient = weighted_cross_entropy(features @ w.reshape(SHAPE).T, labels, weights)
    return (gradient.T @ features).ravel()


def client_gradient(k, r, t, w, weights):
    rng = np.random.default_rng([5, k, r, t])
    return softmax_gradient(w, rng.normal(size=(6, FEATURES)) + k, rng.integers(0, CLASSES, size=6), weights)


def auxiliary(c, r, t, w):
    rng = np.random.default_rng([6, c, r, t])
    features = rng.normal(size=(4, FEATURES)) + 2 * np.eye(CLASSES, FEATURES)[c]
    return softmax_gradient(w, features, [c] * 4, np.ones(CLASSES))


SETTINGS = {"lr": 0.2, "momentum": 0.9, "weight_decay": 5e-4}


def run_rl(cohorts, steps, x=W0, **settings):
    settings = {**SETTINGS, **settings}
    return local_sgdm_rl(x, cohorts, client_gradient, auxiliary, last_layer, steps, classes=CLASSES, **settings)


def test_local_sgdm_without_momentum_is_fedavg():
    def gradient(k, r, t, w):
        return client_gradient(k, r, t, w, np.ones(CLASSES))

    shares = [1.0, 2.0, 5.0]
    want = fedavg(W0, COHORTS, gradient, lambda k: 3, lr=lambda r, t: 0.1 / (1 + r + t), weights=shares)
    got = local_sgdm(W0, COHORTS, gradient, 3, lr=lambda r, t: 0.1 / (1 + r + t), momentum=0.0, weights=shares)
    close(got["x"], want["x"])


def test_local_sgdm_rl_round_by_round():
    def weights_at(w, r):
        changes = last_layer_changes(w, auxiliary, last_layer, 2, r, classes=CLASSES, **SETTINGS)
        assert changes.shape == (CLASSES, CLASSES, FEATURES)
        for c in range(CLASSES):
            trained, _ = sgdm(w, lambda t, z, c=c: auxiliary(c, r, t, z), 2, **SETTINGS)
            close(changes[c].ravel(), trained - w)
        return class_weights(ratios(changes))

    def one_round(w, cohort, r, weights):
        return local_sgdm(
            w, [cohort], lambda k, r, t, z: client_gradient(k, r, t, z, weights), 2, first_round=r, **SETTINGS
        )["x"]

    # delay: round 0 has weights 1, round r + 1 those made at the start of round r.
    for delay in (True, False):
        w, weights = W0, np.ones(CLASSES)
        for r, cohort in enumerate(COHORTS):
            made = weights_at(w, r)
            w, weights = one_round(w, cohort, r, weights if delay else made), made
        differ(weights, np.ones(CLASSES))
        out = run_rl(COHORTS, 2, delay=delay)
        same(out, {"x": w, "loss_weights": weights, "buffer": None})
    differ(run_rl(COHORTS, 2)["x"], run_rl(COHORTS, 2, delay=False)["x"])
    # slope 0 is local_sgdm on the plain cross-entropy.
    plain = local_sgdm(W0, COHORTS, lambda k, r, t, z: client_gradient(k, r, t, z, np.ones(CLASSES)), 2, **SETTINGS)
    close(run_rl(COHORTS, 2, slope=0.0)["x"], plain["x"])
    # The auxiliary runs have their own numbers.
    differ(run_rl(COHORTS, 2, auxiliary_steps=5)["x"], run_rl(COHORTS, 2)["x"], 1e-6)
    close(run_rl(COHORTS, 2, auxiliary_steps=2, auxiliary_lr=0.2)["x"], run_rl(COHORTS, 2)["x"])


@pytest.mark.parametrize("settings", [{}, {"momentum_state": "keep"}, {"momentum_state": "average"}, {"delay": False}])
def test_local_sgdm_rl_in_two_parts_and_in_any_order(settings):
    whole = run_rl(COHORTS, 2, **settings)
    part = run_rl(COHORTS[:2], 2, **settings)
    x = part.pop("x")
    same(run_rl(COHORTS[2:], 2, x, **part, first_round=2, **settings), whole)
    same(run_rl([c[::-1] for c in COHORTS], 2, **settings), whole)
