"""Closed-form checks of the NumPy references of the federated minimax methods.

The problem has N quadratics f_k(x, y) = 1/2 x'P_k x + x'C_k y - 1/2 y'Q_k y + p_k'x + q_k'y with
diagonal P_k, Q_k > 0, so mean_k f_k has one saddle. With z = (x, y) the descent-ascent
direction is affine: (grad_x, -grad_y) = M_k z + m_k. A batch multiplies the gradients
by and adds noise that depends on its name only.
"""

import numpy as np
import pytest

from .cdma import cdma, cdma_ada, schedules
from .coda import coda
from .codasca import codasca
from .drfa import project_simplex
from .fednest_minimax import fednest_minimax
from .fgda import adafgda, fgda
from .local_sgda import local_sgda, local_sgda_plus, local_sgdam, local_sgdam_plus
from .sagda import sagda

N, D, P = 3, 3, 2
_rng = np.random.default_rng(7)
PX = _rng.uniform(0.5, 2.0, size=(N, D))
QY = _rng.uniform(0.5, 2.0, size=(N, P))
C = _rng.normal(size=(N, D, P))
LX = _rng.normal(size=(N, D))
LY = _rng.normal(size=(N, P))
X0 = _rng.normal(size=D)
Y0 = _rng.normal(size=P)
ALL = list(range(N))
COHORTS = [[0, 1], [2], [1, 2, 0], [2, 0]]
FULL = [ALL, [2, 0, 1], ALL]
FORMS = ({}, {"two_phase": False}, {"never_averaged": True})
WEIGHTS = {"alpha": 0.3, "beta": 0.6}

# The field of client k and of the mean, and its zero.
M = np.array([np.block([[np.diag(PX[k]), C[k]], [-C[k].T, np.diag(QY[k])]]) for k in ALL])
m = np.concatenate([LX, -LY], axis=1)
SADDLE = np.linalg.solve(M.mean(axis=0), -m.mean(axis=0))
XS, YS = SADDLE[:D], SADDLE[D:]


def close(left, right, tol=1e-12):
    np.testing.assert_allclose(left, right, rtol=tol, atol=tol)


def differ(left, right, by=1e-4):
    assert np.max(np.abs(np.asarray(left) - np.asarray(right))) > by


def same(got, want, keys=None, tol=1e-12):
    """Compare two states, entry by entry, dicts by client included."""
    for key in want if keys is None else keys:
        if isinstance(want[key], dict):
            assert got[key].keys() == want[key].keys()
            for k in want[key]:
                close(got[key][k], want[key][k], tol)
        else:
            close(got[key], want[key], tol)


def noise(tag, k, r, t, stream, *shape):
    return np.random.default_rng([tag, k, r + 2, t + 2, stream]).normal(size=shape)


def full_gradient(k, x, y):
    return PX[k] * x + C[k] @ y + LX[k], C[k].T @ x - QY[k] * y + LY[k]


def exact(k, r, t, x, y, stream=0):
    return full_gradient(k, x, y)


def noisy(k, r, t, x, y, stream=0):
    g_x, g_y = full_gradient(k, x, y)
    g_x = (1 + 0.3 * noise(1, k, r, t, stream, D)) * g_x + 0.2 * noise(2, k, r, t, stream, D)
    g_y = (1 + 0.3 * noise(3, k, r, t, stream, P)) * g_y + 0.2 * noise(4, k, r, t, stream, P)
    return g_x, g_y


def mean_gradient(x, y, clients=ALL):
    parts = [full_gradient(k, x, y) for k in clients]
    return np.mean([p[0] for p in parts], axis=0), np.mean([p[1] for p in parts], axis=0)


def rate(r, t):
    return 0.2 / (1 + r) * 0.9**t


def rate_y(r, t):
    return 0.3 / (1 + r) * 0.95**t


def ball(y):
    norm = float(np.linalg.norm(y))
    return y if norm <= 0.5 else y * (0.5 / norm)


def recorder(calls):
    def record(k, r, t, x, y, stream=0):
        calls.append((k, r, t, stream))
        return full_gradient(k, x, y)

    return record


def rounds_of(z, cohorts, steps, rates):
    """Local descent-ascent without noise, by matrix powers; ``rates`` is a vector."""
    for cohort in cohorts:
        ends = []
        for k in cohort:
            fixed = np.linalg.solve(M[k], -m[k])
            map_k = np.eye(D + P) - rates[:, None] * M[k]
            ends.append(fixed + np.linalg.matrix_power(map_k, steps) @ (z - fixed))
        z = np.mean(ends, axis=0)
    return z


RATES = np.array([0.1] * D + [0.15] * P)


# One client, one step, full batch: all are gradient descent ascent.


def gda(steps, eta_x, eta_y):
    x, y = X0, Y0
    for _ in range(steps):
        g_x, g_y = full_gradient(0, x, y)
        x, y = x - eta_x * g_x, y + eta_y * g_y
    return x, y


ONE = [[0]] * 5


@pytest.mark.parametrize(
    "run",
    [
        lambda: fgda(X0, Y0, ONE, exact, 1, clients=1, eta=0.5, gamma=0.2, lam=0.3, **WEIGHTS),
        lambda: fgda(X0, Y0, ONE, exact, 1, clients=1, eta=0.5, gamma=0.2, lam=0.3, two_phase=False, **WEIGHTS),
        lambda: fgda(X0, Y0, ONE, exact, 1, clients=1, eta=0.5, gamma=0.2, lam=0.3, never_averaged=True, **WEIGHTS),
        lambda: local_sgda(X0, Y0, ONE, exact, 1, eta_x=0.1, eta_y=0.15),
        lambda: local_sgda_plus(X0, Y0, ONE, exact, 1, eta_x=0.1, eta_y=0.15, snapshot_every=1),
        lambda: local_sgdam(X0, Y0, ONE, exact, 1, eta_x=0.5, eta_y=0.75, alpha=0.2, beta=5.0),
        lambda: sagda(X0, Y0, ONE, exact, 1, clients=1, eta_x=0.1, eta_y=0.15),
        lambda: sagda(X0, Y0, ONE, exact, 1, clients=1, eta_x=0.1, eta_y=0.15, control=False),
        lambda: sagda(X0, Y0, ONE, exact, 1, clients=1, eta_x=0.1, eta_y=0.15, variates="fresh"),
        lambda: cdma(X0, Y0, ONE, noisy, full_gradient, 1, eta_x=0.1, eta_y=0.15),
        lambda: cdma_ada(X0, Y0, ONE, noisy, full_gradient, 1, eta_x=0.1, eta_y=0.15, a=0.4),
    ],
)
def test_one_client_one_step_full_batch_is_gradient_descent_ascent(run):
    # SAGDA: with one client c_k = c, the correction vanishes.
    got = run()
    x, y = gda(5, 0.1, 0.15)
    close(got["x"], x)
    close(got["y"], y)


def test_the_dual_methods_with_one_client_are_gradient_descent_ascent():
    x, y = gda(5, 0.1, 0.1)
    got = coda(X0, Y0, ONE, exact, 1, clients=1, eta0=0.1, t0=100, gamma=np.inf)
    close(got["v"], x)
    close(got["alpha"], y)
    options = {"eta": 0.1, "gamma": np.inf, "weight_decay": 0.0, "decay_every": 100, "clip": None, "alpha_range": None}
    got = codasca(X0, Y0, ONE, exact, 1, clients=1, **options)
    close(got["v"], x)
    close(got["alpha"], y)


def test_fednest_with_one_client_alternates():
    x, y = X0, Y0
    for _ in range(3):
        for _ in range(2):
            y = y + 0.15 * full_gradient(0, x, y)[1]
        x = x - 0.1 * full_gradient(0, x, y)[0]
    for light in (False, True):
        got = fednest_minimax(X0, Y0, [[0]] * 3, exact, 1, inner_rounds=2, alpha=0.1, beta=0.15, light=light)
        close(got["x"], x)
        close(got["y"], y)


# FGDA and AdaFGDA


def fgda_options(**more):
    return {
        "clients": N,
        "eta": rate,
        "gamma": 0.7,
        "lam": 0.9,
        "alpha": lambda r, t: 0.1 + 0.1 * t,
        "beta": 0.4,
    } | more


@pytest.mark.parametrize("q", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_identity_matrices_by_rounds_are_the_printed_loop(q, form):
    printed = fgda(X0, Y0, FULL, noisy, q, **fgda_options(**form))
    for rule in ({"matrix": "identity"}, {"matrix": "adam", "rho_m": 1.0, "rho": 1.0}):
        same(adafgda(X0, Y0, FULL, noisy, q, **fgda_options(**form, **rule)), printed)
    differ(printed["x"], X0)
    differ(printed["y"], Y0)


def test_the_three_forms_agree_for_one_client_and_differ_for_several():
    single = [fgda(X0, Y0, ONE, noisy, 3, **fgda_options(clients=1, **form)) for form in FORMS]
    same(single[1], single[0])
    same(single[2], single[0])
    several = [fgda(X0, Y0, FULL, noisy, 3, **fgda_options(**form)) for form in FORMS]
    differ(several[0]["x"], several[1]["x"])
    differ(several[0]["x"], several[2]["x"])
    differ(several[1]["x"], several[2]["x"])


def test_the_three_forms_have_the_same_means_if_every_step_synchronises():
    runs = [fgda(X0, Y0, [ALL] * 4, noisy, 1, **fgda_options(**form)) for form in FORMS]
    for run in runs[1:]:
        same(run, runs[0], ["x", "y", "x_k", "y_k"])
        for key in ("w", "v"):
            close(np.mean([run[key][k] for k in ALL], axis=0), runs[0][key][0])
    differ(runs[2]["w"][0], runs[2]["w"][1])
    close(runs[0]["w"][0], runs[0]["w"][1])


def test_never_averaged_on_full_batches_is_local_sgda_whatever_the_weights():
    # STORM from the client's own old point stays the client's own gradient.
    got = fgda(X0, Y0, FULL, exact, 3, **fgda_options(never_averaged=True))
    want = local_sgda(X0, Y0, FULL, exact, 3, eta_x=lambda r, t: 0.7 * rate(r, t), eta_y=lambda r, t: 0.9 * rate(r, t))
    same(got, want)
    for k in ALL:
        close(got["w"][k], full_gradient(k, want["x"], want["y"])[0])
        close(got["v"][k], full_gradient(k, want["x"], want["y"])[1])


@pytest.mark.parametrize("form", FORMS)
def test_with_weights_one_the_estimators_are_plain_gradients_on_the_previous_batch(form):
    q = 3
    got = fgda(X0, Y0, FULL, noisy, q, **fgda_options(alpha=1.0, beta=1.0, **form))
    x, y = dict.fromkeys(ALL, X0), dict.fromkeys(ALL, Y0)
    g = {k: noisy(k, 0, -1, X0, Y0) for k in ALL}
    for r in range(3):
        for j in range(q):
            x = {k: x[k] - 0.7 * rate(r, j) * g[k][0] for k in ALL}
            y = {k: y[k] + 0.9 * rate(r, j) * g[k][1] for k in ALL}
            if j == q - 1:
                x = dict.fromkeys(ALL, np.mean([x[k] for k in ALL], axis=0))
                y = dict.fromkeys(ALL, np.mean([y[k] for k in ALL], axis=0))
            g = {k: noisy(k, r, j, x[k], y[k]) for k in ALL}
            if j == q - 1 and not form:
                mean = tuple(np.mean([g[k][i] for k in ALL], axis=0) for i in (0, 1))
                g = dict.fromkeys(ALL, mean)
    close(got["x"], x[0])
    close(got["y"], y[0])
    for k in ALL:
        close(got["w"][k], g[k][0])
        close(got["v"][k], g[k][1])


@pytest.mark.parametrize("form", range(3))
def test_one_round_of_fgda_by_hand(form):
    alpha, beta = WEIGHTS.values()
    got = fgda(X0, Y0, [ALL], noisy, 2, clients=N, eta=0.3, gamma=0.5, lam=0.7, **WEIGHTS, **FORMS[form])
    first = {k: noisy(k, 0, -1, X0, Y0) for k in ALL}
    x2 = {k: X0 - 0.15 * first[k][0] for k in ALL}
    y2 = {k: Y0 + 0.21 * first[k][1] for k in ALL}
    w2, v2 = {}, {}
    for k in ALL:
        new, old = noisy(k, 0, 0, x2[k], y2[k]), noisy(k, 0, 0, X0, Y0)
        w2[k] = new[0] + (1 - beta) * (first[k][0] - old[0])
        v2[k] = new[1] + (1 - alpha) * (first[k][1] - old[1])
    x_bar, y_bar, w_bar, v_bar = (np.mean([row[k] for k in ALL], axis=0) for row in (x2, y2, w2, v2))
    x3, y3 = x_bar - 0.15 * w_bar, y_bar + 0.21 * v_bar
    close(got["x"], x3)
    close(got["y"], y3)
    w3, v3 = {}, {}
    for k in ALL:
        old_x, old_y, old_w, old_v = (x_bar, y_bar, w_bar, v_bar) if form == 1 else (x2[k], y2[k], w2[k], v2[k])
        new, old = noisy(k, 0, 1, x3, y3), noisy(k, 0, 1, old_x, old_y)
        w3[k] = new[0] + (1 - beta) * (old_w - old[0])
        v3[k] = new[1] + (1 - alpha) * (old_v - old[1])
    for k in ALL:
        close(got["w"][k], np.mean([w3[i] for i in ALL], axis=0) if form == 0 else w3[k])
        close(got["v"][k], np.mean([v3[i] for i in ALL], axis=0) if form == 0 else v3[k])
        close(got["x_k"][k], x3)


@pytest.mark.parametrize("form", FORMS)
def test_fgda_names_its_batches(form):
    calls = []
    fgda(X0, Y0, [[0]] * 2, recorder(calls), 2, clients=1, eta=0.1, gamma=1.0, lam=1.0, **WEIGHTS, **form)
    names = [(0, 0, -1)] + [(0, r, j) for r in (0, 1) for j in (0, 1) for _ in range(2)]
    assert calls == [(*name, 0) for name in names]


def test_the_saddle_is_a_fixed_point_of_the_two_phase_form_without_momentum_weight():
    options = fgda_options(alpha=0.0, beta=0.0)
    start = {"w": dict.fromkeys(ALL, np.zeros(D)), "v": dict.fromkeys(ALL, np.zeros(P))}
    for form in ({}, {"two_phase": False}):
        got = fgda(XS, YS, [ALL] * 3, exact, 3, **options, **form, **start)
        close(got["x"], XS)
        close(got["y"], YS)
    # The clients' own gradients at the saddle are not 0, and local steps with them leave it.
    own = {"w": {k: full_gradient(k, XS, YS)[0] for k in ALL}, "v": {k: full_gradient(k, XS, YS)[1] for k in ALL}}
    differ(fgda(XS, YS, [ALL] * 3, exact, 3, **options, never_averaged=True, **own)["x"], XS)


@pytest.mark.slow
def test_two_phase_reaches_the_saddle_of_the_heterogeneous_quadratic_and_the_others_do_not():
    # f_k = 5 |x|^2 - (|y|^2 / 2 - b_k.y + t_k y.x), t_k ~ U(0, 1), b_k ~ N(0, 100) centred.
    rng = np.random.default_rng(0)
    count, size = 50, 10
    t_k = rng.uniform(0, 1, count)
    b_k = 10 * rng.normal(size=(count, size))
    b_k -= b_k.mean(axis=0)
    start = rng.normal(size=(2, size))

    def gradient(k, r, t, x, y):
        return 10 * x - t_k[k] * y, b_k[k] - y - t_k[k] * x

    def distance(rounds, **form):
        options = {"clients": count, "eta": 0.5, "gamma": 0.1, "lam": 0.1, "alpha": 0.0, "beta": 0.0}
        got = fgda(*start, [list(range(count))] * rounds, gradient, 10, **options, **form)
        return np.sqrt(np.sum(got["x"] ** 2) + np.sum(got["y"] ** 2))

    # 3,000 steps; the others have settled after 600 (a step shrinks y by 0.95).
    assert distance(300) < 1e-12
    assert distance(60, two_phase=False) == pytest.approx(4.4e-2, rel=0.05)
    assert distance(60, never_averaged=True) == pytest.approx(3.4e-2, rel=0.05)


@pytest.mark.parametrize("matrix", ["identity", "adam", "belief"])
@pytest.mark.parametrize(("form", "defer"), [(0, False), (1, False), (1, True), (2, False), (2, True)])
def test_an_fgda_run_can_be_cut_and_continued(matrix, form, defer):
    options = fgda_options(matrix=matrix, rho=0.5, rho_m=0.8, **FORMS[form])
    whole = adafgda(X0, Y0, FULL, noisy, 3, **options)
    part = adafgda(X0, Y0, FULL[:1], noisy, 3, defer=defer, **options)
    start = part.pop("x"), part.pop("y")
    rest = adafgda(*start, FULL[1:], noisy, 3, defer=defer, first_round=1, **part, **options)
    if defer:
        same(rest, whole, ["x", "y", "a", "b", "w_bar", "v_bar", "x_bar", "y_bar"])
        # The clients still hold their own points and the estimators there.
        differ(rest["x_k"][0], rest["x_k"][1])
        differ(rest["w"][0], whole["w"][0])
    else:
        same(rest, whole)


@pytest.mark.parametrize("form", FORMS)
def test_the_printed_loop_can_be_cut_and_continued(form):
    whole = fgda(X0, Y0, FULL, noisy, 2, **fgda_options(**form))
    part = fgda(X0, Y0, FULL[:2], noisy, 2, **fgda_options(**form))
    rest = fgda(part.pop("x"), part.pop("y"), FULL[2:], noisy, 2, first_round=2, **part, **fgda_options(**form))
    same(rest, whole)


@pytest.mark.parametrize("matrix", ["adam", "belief"])
def test_adaptive_matrices_of_one_client_on_full_batches(matrix):
    rho_m, rho = 0.7, 0.2
    x, y, a, b = X0, Y0, 0.0, 0.0
    before = (np.zeros(D), np.zeros(P))
    for r in range(4):
        w, v = full_gradient(0, x, y)
        last = before if matrix == "belief" else (0.0, 0.0)
        a = rho_m * a + (1 - rho_m) * (w - last[0]) ** 2
        b = rho_m * b + (1 - rho_m) * (v - last[1]) ** 2
        x, y = x - rate(r, 0) * 0.5 * w / (np.sqrt(a) + rho), y + rate(r, 0) * 0.8 * v / (np.sqrt(b) + rho)
        before = (w, v)
    options = dict(clients=1, eta=rate, gamma=0.5, lam=0.8, rho=rho, rho_m=rho_m, matrix=matrix, **WEIGHTS)
    got = adafgda(X0, Y0, [[0]] * 4, exact, 1, **options)
    same(got, {"x": x, "y": y, "a": a, "b": b, "w_bar": before[0], "v_bar": before[1]})


def test_the_matrices_are_frozen_between_synchronisations_and_belief_starts_like_adam():
    # x = s z turns fixed diagonal matrices into the identity.
    a, b = np.array([0.0, 0.5, 2.0]), np.array([7.0, 1.0])
    s, u = (np.sqrt(a) + 0.5) ** -0.5, (np.sqrt(b) + 0.5) ** -0.5

    def scaled(k, r, t, x, y):
        g_x, g_y = noisy(k, r, t, s * x, u * y)
        return s * g_x, u * g_y

    want = fgda(X0 / s, Y0 / u, FULL, scaled, 3, **fgda_options())
    got = adafgda(X0, Y0, FULL, noisy, 3, a=a, b=b, rho=0.5, rho_m=1.0, **fgda_options())
    same(got, {"x": s * want["x"], "y": u * want["y"], "a": a, "b": b})
    adam = adafgda(X0, Y0, FULL[:1], noisy, 3, rho=0.5, **fgda_options())
    belief = adafgda(X0, Y0, FULL[:1], noisy, 3, rho=0.5, matrix="belief", **fgda_options())
    same(belief, adam)
    adam = adafgda(X0, Y0, FULL[:2], noisy, 3, rho=0.5, **fgda_options())
    differ(adafgda(X0, Y0, FULL[:2], noisy, 3, rho=0.5, matrix="belief", **fgda_options())["x"], adam["x"])


def test_the_first_matrices_before_any_synchronisation():
    options = fgda_options(eta=0.3, gamma=0.5, lam=0.5, rho=0.25, rho_m=0.5, never_averaged=True)
    state = adafgda(X0, Y0, [], noisy, 2, **options)
    w, v = (np.mean([state[key][k] for k in ALL], axis=0) for key in ("w", "v"))
    choices = {
        "accumulator": (0.25, 0.25),
        "identity": (1.0, 1.0),
        "average": (np.sqrt(0.5 * w**2) + 0.25, np.sqrt(0.5 * v**2) + 0.25),
    }
    for choice, (left, right) in choices.items():
        got = adafgda(X0, Y0, [ALL], noisy, 2, first_matrix=choice, defer=True, **options)
        for k in ALL:
            close(got["x_k"][k], X0 - 0.15 * state["w"][k] / left)
            close(got["y_k"][k], Y0 + 0.15 * state["v"][k] / right)


@pytest.mark.parametrize("method", [fgda, adafgda])
def test_fgda_projections(method):
    far = fgda_options(eta=0.5)
    free = method(X0, ball(Y0), FULL, noisy, 3, **far)
    same(method(X0, ball(Y0), FULL, noisy, 3, project_y=lambda y: y, **far), free)
    same(method(X0, ball(Y0), FULL, noisy, 3, project_y=lambda y: y, projection="hat", **far), free)
    for projection in ("step", "hat"):
        got = method(X0, ball(Y0), FULL, noisy, 3, project_y=ball, projection=projection, **far)
        for y in (got["y"], *got["y_k"].values()):
            assert np.linalg.norm(y) <= 0.5 + 1e-12
        differ(got["y"], free["y"])
    # One step: the two places of the projection.
    one = dict(clients=1, eta=0.5, gamma=0.1, lam=40.0, matrix="identity", **WEIGHTS)
    y0, g = ball(Y0), full_gradient(0, X0, ball(Y0))[1]
    close(adafgda(X0, y0, [[0]], exact, 1, project_y=ball, **one)["y"], ball(y0 + 20 * g))
    hat = adafgda(X0, y0, [[0]], exact, 1, project_y=ball, projection="hat", **one)["y"]
    close(hat, 0.5 * y0 + 0.5 * ball(y0 + 40 * g))


@pytest.mark.parametrize("method", [fgda, adafgda])
def test_fgda_refuses_what_it_cannot_mean(method):
    with pytest.raises(ValueError, match="all 3 clients"):
        method(X0, Y0, [ALL, [0, 1]], noisy, 2, **fgda_options())
    with pytest.raises(ValueError, match="both w and v"):
        method(X0, Y0, FULL, noisy, 2, w=dict.fromkeys(ALL, X0), **fgda_options())
    with pytest.raises(ValueError, match="form of its own"):
        method(X0, Y0, FULL, noisy, 2, two_phase=False, never_averaged=True, **fgda_options())
    with pytest.raises(ValueError, match="deferred"):
        adafgda(X0, Y0, FULL, noisy, 2, defer=True, **fgda_options())


# Local-SGDA and its relatives


def test_local_sgda_in_closed_form_on_quadratics():
    got = local_sgda(X0, Y0, COHORTS, exact, 4, eta_x=0.1, eta_y=0.15)
    close(np.concatenate([got["x"], got["y"]]), rounds_of(np.concatenate([X0, Y0]), COHORTS, 4, RATES))


def test_local_sgda_steps_are_simultaneous_and_projected_each_time():
    got = local_sgda(X0, Y0, [[1]], noisy, 2, eta_x=0.2, eta_y=0.9, project_y=project_simplex)
    g = noisy(1, 0, 0, X0, Y0)
    x, y = X0 - 0.2 * g[0], project_simplex(Y0 + 0.9 * g[1])
    g = noisy(1, 0, 1, x, y)
    close(got["x"], x - 0.2 * g[0])
    close(got["y"], project_simplex(y + 0.9 * g[1]))


def test_local_sgda_plus_ascends_at_the_stale_snapshot():
    # S = 2 tau: the snapshot of rounds 0 and 1 is X0, that of rounds 2 and 3 is the x after round 1.
    tau, z = 2, (X0, Y0)
    snapshot = X0
    for r, cohort in enumerate(COHORTS):
        ends = []
        for k in cohort:
            x, y = z
            for t in range(tau):
                g_x, g_y = noisy(k, r, t, x, y)[0], noisy(k, r, t, snapshot, y)[1]
                x, y = x - rate(r, t) * g_x, y + rate_y(r, t) * g_y
            ends.append((x, y))
        z = tuple(np.mean([end[i] for end in ends], axis=0) for i in (0, 1))
        snapshot = z[0] if r in (1, 3) else snapshot
    options = {"eta_x": rate, "eta_y": rate_y, "snapshot_every": 4}
    got = local_sgda_plus(X0, Y0, COHORTS, noisy, tau, **options)
    same(got, {"x": z[0], "y": z[1], "snapshot": snapshot})
    # Cut after round 0, inside the snapshot's period.
    part = local_sgda_plus(X0, Y0, COHORTS[:1], noisy, tau, **options)
    close(part["snapshot"], X0)
    start = part.pop("x"), part.pop("y")
    same(local_sgda_plus(*start, COHORTS[1:], noisy, tau, first_round=1, **part, **options), got)
    differ(got["y"], local_sgda(X0, Y0, COHORTS, noisy, tau, eta_x=rate, eta_y=rate_y)["y"])
    with pytest.raises(ValueError, match="multiple"):
        local_sgda_plus(X0, Y0, COHORTS, noisy, tau, eta_x=rate, eta_y=rate_y, snapshot_every=3)


def test_local_sgda_plus_with_a_snapshot_every_step_is_local_sgda():
    want = local_sgda(X0, Y0, COHORTS, noisy, 1, eta_x=rate, eta_y=rate_y)
    got = local_sgda_plus(X0, Y0, COHORTS, noisy, 1, eta_x=rate, eta_y=rate_y, snapshot_every=1)
    same(got, want)


@pytest.mark.parametrize("average", [True, False])
def test_local_sgdam_without_memory_is_local_sgda_on_the_previous_batch_within_a_round(average):
    # beta alpha = 1. One round only: after an averaging d belongs to the point before it.
    def shifted(k, r, t, x, y):
        return noisy(k, r, t - 1, x, y)

    want = local_sgda(X0, Y0, [ALL], shifted, 4, eta_x=lambda r, t: 0.4 * rate(r, t), eta_y=0.4 * 0.3)
    options = {"eta_x": rate, "eta_y": 0.3, "alpha": 0.4, "beta": 2.5, "average_momentum": average}
    same(local_sgdam(X0, Y0, [ALL], noisy, 4, **options), want)


def test_local_sgdam_by_hand_with_averaged_and_own_momenta():
    a, beta = 0.5, 0.6
    state = {k: (X0, Y0, *noisy(k, 0, -1, X0, Y0)) for k in (0, 1)}
    own = {}
    for average in (True, False):
        rows = dict(state)
        for r in range(2):
            for t in range(2):
                for k in (0, 1):
                    x, y, d_x, d_y = rows[k]
                    x, y = x - a * 0.2 * d_x, y + a * 0.3 * d_y
                    g = noisy(k, r, t, x, y)
                    rows[k] = (x, y, 0.7 * d_x + 0.3 * g[0], 0.7 * d_y + 0.3 * g[1])
            mean = tuple(np.mean([rows[k][i] for k in (0, 1)], axis=0) for i in range(4))
            rows = {k: mean if average else (*mean[:2], *rows[k][2:]) for k in (0, 1)}
        options = {"eta_x": 0.2, "eta_y": 0.3, "alpha": a, "beta": beta, "average_momentum": average}
        got = local_sgdam(X0, Y0, [[0, 1]] * 2, noisy, 2, **options)
        close(got["x"], mean[0])
        close(got["y"], mean[1])
        if average:
            same(got, {"d_x": mean[2], "d_y": mean[3]})
        else:
            same(got, {"d_x": {k: rows[k][2] for k in (0, 1)}, "d_y": {k: rows[k][3] for k in (0, 1)}})
        # Cut and continued.
        part = local_sgdam(X0, Y0, [[0, 1]], noisy, 2, **options)
        start = part.pop("x"), part.pop("y")
        same(local_sgdam(*start, [[0, 1]], noisy, 2, first_round=1, **part, **options), got)
        own[average] = got["x"]
    differ(own[True], own[False])


def test_own_momenta_start_when_a_client_first_takes_part():
    calls = []
    options = {"eta_x": 0.1, "eta_y": 0.1, "alpha": 0.5, "beta": 0.5, "average_momentum": False}
    got = local_sgdam(X0, Y0, [[0], [1], [0]], recorder(calls), 1, **options)
    assert calls == [(0, 0, -1, 0), (0, 0, 0, 0), (1, 1, -1, 0), (1, 1, 0, 0), (0, 2, 0, 0)]
    assert set(got["d_x"]) == {0, 1}
    still = local_sgdam(X0, Y0, [[0]], exact, 1, initial="zero", **options)
    close(still["x"], X0)
    close(still["d_x"][0], 0.25 * full_gradient(0, X0, Y0)[0])


def test_local_sgdam_plus_resets_the_momenta_and_uses_the_snapshot():
    a, weight = 0.5, 0.3
    x, y, d_x, d_y = X0, Y0, np.zeros(D), np.zeros(P)
    snapshot = X0 + 1.0
    for t in range(3):
        x, y = x - a * 0.2 * d_x, y + a * 0.3 * d_y
        d_x = (1 - weight) * d_x + weight * noisy(2, 0, t, x, y)[0]
        d_y = (1 - weight) * d_y + weight * noisy(2, 0, t, snapshot, y)[1]
    options = {"eta_x": 0.2, "eta_y": 0.3, "alpha": a, "beta": 0.6, "snapshot_every": 6}
    got = local_sgdam_plus(X0, Y0, [[2]], noisy, 3, snapshot=snapshot, **options)
    same(got, {"x": x, "y": y, "snapshot": snapshot})
    # The next round starts as if d had never been: a fresh call gives the same.
    whole = local_sgdam_plus(X0, Y0, [[2], [0]], noisy, 3, snapshot=snapshot, **options)
    rest = local_sgdam_plus(x, y, [[0]], noisy, 3, snapshot=snapshot, first_round=1, **options)
    same(rest, whole)
    close(whole["snapshot"], whole["x"])
    # With one step per round nothing moves.
    options["snapshot_every"] = 1
    same(local_sgdam_plus(X0, Y0, FULL, noisy, 1, **options), {"x": X0, "y": Y0})


def test_momentum_projections():
    options = {"eta_x": 0.1, "eta_y": 8.0, "alpha": 0.5, "beta": 0.5, "project_y": ball}
    y0, d_y = ball(Y0), full_gradient(0, X0, ball(Y0))[1]
    close(local_sgdam(X0, y0, [[0]], exact, 1, **options)["y"], ball(y0 + 4 * d_y))
    hat = local_sgdam(X0, y0, [[0]], exact, 1, projection="hat", **options)["y"]
    close(hat, y0 + 0.5 * (ball(y0 + 8 * d_y) - y0))


# SAGDA


def test_fsgda_with_server_rates_one_is_local_sgda():
    want = local_sgda(X0, Y0, COHORTS, noisy, 3, eta_x=rate, eta_y=rate_y, project_y=ball)
    options = {"clients": N, "eta_x": rate, "eta_y": rate_y, "project_y": ball}
    same(sagda(X0, Y0, COHORTS, noisy, 3, control=False, **options), want)
    # The first round of SAGDA has zero variates, the second has not.
    first = local_sgda(X0, Y0, COHORTS[:1], noisy, 3, eta_x=rate, eta_y=rate_y, project_y=ball)
    same(sagda(X0, Y0, COHORTS[:1], noisy, 3, **options), first)
    differ(sagda(X0, Y0, COHORTS, noisy, 3, **options)["x"], want["x"])


def test_sagda_by_hand_with_server_rates():
    c_kx, c_ky = {k: LX[k] for k in ALL}, {k: LY[k] for k in ALL}
    c_x, c_y = LX.mean(axis=0), LY.mean(axis=0)
    cohort, tau = [2, 0], 2
    ends, sums = {}, {}
    for k in cohort:
        x, y, total = X0, Y0, [0.0, 0.0]
        for t in range(tau):
            g = noisy(k, 5, t, x, y)
            total = [total[0] + g[0], total[1] + g[1]]
            x, y = x - 0.1 * (g[0] - c_kx[k] + c_x), ball(y + 0.2 * (g[1] - c_ky[k] + c_y))
        ends[k], sums[k] = (x, y), [part / tau for part in total]
    x = X0 + 0.8 * (np.mean([ends[k][0] for k in cohort], axis=0) - X0)
    y = ball(Y0 + 1.5 * (np.mean([ends[k][1] for k in cohort], axis=0) - Y0))
    options = {
        "clients": N,
        "eta_x": 0.1,
        "eta_y": 0.2,
        "eta_xg": 0.8,
        "eta_yg": 1.5,
        "project_y": ball,
        "first_round": 5,
    }
    variates = {"c_x": c_x, "c_y": c_y, "c_kx": c_kx, "c_ky": c_ky}
    got = sagda(X0, Y0, [cohort], noisy, tau, **options, **variates)
    new_x = {k: sums[k][0] if k in cohort else c_kx[k] for k in ALL}
    new_y = {k: sums[k][1] if k in cohort else c_ky[k] for k in ALL}
    same(got, {"x": x, "y": y, "c_kx": new_x, "c_ky": new_y})
    close(got["c_x"], np.mean([new_x[k] for k in ALL], axis=0))
    close(got["c_y"], np.mean([new_y[k] for k in ALL], axis=0))
    other = sagda(X0, Y0, [cohort], noisy, tau, server="cohort", **options, **variates)
    same(other, got, ["x", "y", "c_kx", "c_ky"])
    close(other["c_x"], np.mean([new_x[k] for k in cohort], axis=0))
    fresh = sagda(X0, Y0, [cohort], noisy, tau, variates="fresh", **options, **variates)
    for k in cohort:
        close(fresh["c_kx"][k], noisy(k, 5, -1, X0, Y0)[0])
    close(fresh["c_y"], np.mean([fresh["c_ky"][k] for k in cohort], axis=0))


def test_sagda_all_clients_the_two_rules_for_c_agree():
    options = {"clients": N, "eta_x": rate, "eta_y": rate_y}
    same(sagda(X0, Y0, FULL, noisy, 3, server="cohort", **options), sagda(X0, Y0, FULL, noisy, 3, **options))


@pytest.mark.parametrize("variates", ["mean", "fresh"])
def test_the_saddle_is_a_fixed_point_of_sagda_and_attracts_it(variates):
    own = {k: full_gradient(k, XS, YS) for k in ALL}
    options = {"clients": N, "eta_x": 0.1, "eta_y": 0.1, "variates": variates}
    state = {"c_kx": {k: own[k][0] for k in ALL}, "c_ky": {k: own[k][1] for k in ALL}}
    got = sagda(XS, YS, FULL, exact, 4, **options, **state)
    same(got, {"x": XS, "y": YS, **state})
    far = sagda(X0, Y0, [ALL] * 200, exact, 4, **options)
    same(far, {"x": XS, "y": YS, **state}, tol=1e-9)
    # Local-SGDA settles elsewhere.
    differ(local_sgda(X0, Y0, [ALL] * 200, exact, 4, eta_x=0.1, eta_y=0.1)["x"], XS, by=1e-3)


# CDMA


def test_cdma_with_one_local_step_is_a_server_step_with_the_collected_gradient():
    # Whatever the batch and whoever updates.
    x, y = X0, Y0
    for r, cohort in enumerate(COHORTS):
        g_x, g_y = mean_gradient(x, y, cohort)
        x, y = x - rate(r, 0) * g_x, ball(y + rate_y(r, 0) * g_y)
    others = [[1], [0, 2], [2], [0, 1, 2]]
    for update in (None, others):
        options = {"eta_x": rate, "eta_y": rate_y, "project_y": ball, "update_cohorts": update}
        got = cdma(X0, Y0, COHORTS, noisy, full_gradient, 1, **options)
        same(got, {"x": x, "y": y, "g_x": g_x, "g_y": g_y})


def test_cdma_round_by_hand():
    g = mean_gradient(X0, Y0, [0, 1])
    ends = []
    for k in (2, 1):
        x, y = X0, Y0
        for t in range(3):
            here, there = noisy(k, 4, t, x, y), noisy(k, 4, t, X0, Y0)
            x, y = x - rate(4, t) * (here[0] - there[0] + g[0]), y + rate_y(4, t) * (here[1] - there[1] + g[1])
        ends.append((x, y))
    options = {"eta_x": rate, "eta_y": rate_y, "update_cohorts": [[2, 1]], "first_round": 4}
    got = cdma(X0, Y0, [[0, 1]], noisy, full_gradient, 3, **options)
    close(got["x"], np.mean([end[0] for end in ends], axis=0))
    close(got["y"], np.mean([end[1] for end in ends], axis=0))


def test_cdma_ada_with_weight_one_is_cdma_and_its_first_round_always_is():
    options = {"eta_x": rate, "eta_y": rate_y, "update_cohorts": [[1], [0, 2], [2], [0, 1]]}
    plain = cdma(X0, Y0, COHORTS, noisy, full_gradient, 3, **options)
    same(cdma_ada(X0, Y0, COHORTS, noisy, full_gradient, 3, a=1.0, **options), plain)
    differ(cdma_ada(X0, Y0, COHORTS, noisy, full_gradient, 3, a=0.3, **options)["x"], plain["x"])
    once = {"eta_x": rate, "eta_y": rate_y}
    want = cdma(X0, Y0, COHORTS[:1], noisy, full_gradient, 3, **once)
    same(cdma_ada(X0, Y0, COHORTS[:1], noisy, full_gradient, 3, a=0.3, **once), want)


def test_cdma_ada_with_all_clients_collecting_is_cdma_whatever_the_weight():
    # G stays the full gradient of the mean.
    options = {"eta_x": rate, "eta_y": rate_y}
    want = cdma(X0, Y0, FULL, noisy, full_gradient, 3, **options)
    same(cdma_ada(X0, Y0, FULL, noisy, full_gradient, 3, a=0.2, a_y=0.7, **options), want)


def test_cdma_ada_estimate_by_hand_and_cut():
    options = {"eta_x": rate, "eta_y": rate_y, "a": lambda r: 0.2 + 0.1 * r, "a_y": 0.6}
    one = cdma_ada(X0, Y0, COHORTS[:1], noisy, full_gradient, 2, **options)
    two = cdma_ada(X0, Y0, COHORTS[:2], noisy, full_gradient, 2, **options)
    new, old = full_gradient(2, one["x"], one["y"]), full_gradient(2, X0, Y0)
    close(two["g_x"], new[0] - 0.7 * old[0] + 0.7 * one["g_x"])
    close(two["g_y"], new[1] - 0.4 * old[1] + 0.4 * one["g_y"])
    same(two, {"x_prev": one["x"], "y_prev": one["y"]})
    start = one.pop("x"), one.pop("y")
    same(cdma_ada(*start, COHORTS[1:2], noisy, full_gradient, 2, first_round=1, **one, **options), two)
    with pytest.raises(ValueError, match="together"):
        cdma_ada(X0, Y0, COHORTS, noisy, full_gradient, 2, g_x=X0, **options)


def test_cdma_schedules():
    eta, weight = schedules(0.5, 0.9, 0.5)
    assert eta(3, 7) == pytest.approx(0.25)
    assert [weight(r) for r in (0, 1, 2)] == pytest.approx([0.9, 0.45, 0.3])
    assert schedules(0.5, 3.0, 0.5)[1](0) == 1.0
    assert schedules(0.5, 0.95, 0.0)[1](9) == 0.95


def test_the_saddle_is_a_fixed_point_of_cdma_and_attracts_it():
    options = {"eta_x": 0.1, "eta_y": 0.1, "update_cohorts": [[0], [1], [2]]}
    same(cdma(XS, YS, [ALL] * 3, noisy, full_gradient, 4, **options), {"x": XS, "y": YS})
    # The update cohort may be anyone, if all collect.
    options["update_cohorts"] = [[r % N] for r in range(200)]
    far = cdma(X0, Y0, [ALL] * 200, exact, full_gradient, 3, **options)
    same(far, {"x": XS, "y": YS}, tol=1e-9)


# FedNest


def test_fednest_minimax_with_one_local_step_is_global_gradient_ascent_then_descent():
    x, y = X0, Y0
    for cohort in COHORTS:
        for _ in range(3):
            y = ball(y + 0.3 * mean_gradient(x, y, cohort)[1])
        x = x - 0.2 * mean_gradient(x, y, cohort)[0]
    got = fednest_minimax(X0, Y0, COHORTS, exact, 1, inner_rounds=3, alpha=0.2, beta=0.3, project_y=ball)
    same(got, {"x": x, "y": y})


def test_fednest_minimax_by_hand_on_batches():
    x, y, tau = X0, Y0, 2
    for s in range(2):
        q = np.mean([noisy(k, 0, -1, x, y, s)[1] for k in ALL], axis=0)
        ends = []
        for k in ALL:
            y_k = y
            for t in range(tau):
                y_k = y_k + 0.15 * (noisy(k, 0, t, x, y_k, s)[1] - noisy(k, 0, t, x, y, s)[1] + q)
            ends.append(y_k)
        y = np.mean(ends, axis=0)
    h = np.mean([noisy(k, 0, -1, x, y, 2)[0] for k in ALL], axis=0)
    ends = []
    for k in ALL:
        x_k = x
        for t in range(tau):
            x_k = x_k - 0.1 * (noisy(k, 0, t, x_k, y, 2)[0] - noisy(k, 0, t, x, y, 2)[0] + h)
        ends.append(x_k)
    got = fednest_minimax(X0, Y0, [ALL], noisy, tau, inner_rounds=2, alpha=0.2, beta=0.3)
    same(got, {"x": np.mean(ends, axis=0), "y": y})
    # The light form: local gradients only.
    y_k = [Y0 + 0.3 * noisy(k, 0, 0, X0, Y0, 0)[1] for k in ALL]
    light = fednest_minimax(X0, Y0, [ALL], noisy, 1, inner_rounds=1, alpha=0.0, beta=0.3, light=True)
    same(light, {"x": X0, "y": np.mean(y_k, axis=0)})


def test_the_saddle_is_a_fixed_point_of_fednest_and_attracts_it():
    options = {"inner_rounds": 2, "alpha": 0.3, "beta": 0.3}
    same(fednest_minimax(XS, YS, [ALL] * 2, exact, 3, **options), {"x": XS, "y": YS})
    same(fednest_minimax(X0, Y0, [ALL] * 200, exact, 3, **options), {"x": XS, "y": YS}, tol=1e-9)
    light = fednest_minimax(X0, Y0, [ALL] * 200, exact, 3, light=True, **options)
    differ(light["x"], XS, by=1e-3)


def test_fednest_names_its_batches():
    calls = []
    fednest_minimax(X0, Y0, [[1]], recorder(calls), 2, inner_rounds=1, alpha=0.1, beta=0.1)
    inner = [(1, 0, -1, 0), (1, 0, 0, 0), (1, 0, 0, 0), (1, 0, 1, 0), (1, 0, 1, 0)]
    assert calls == inner + [(*name[:3], 1) for name in inner]


# CoDA


def test_coda_without_prox_is_local_sgda_inside_a_stage():
    want = local_sgda(X0, Y0, FULL, noisy, 3, eta_x=0.1, eta_y=0.1)
    got = coda(X0, Y0, FULL, noisy, 3, clients=N, eta0=0.1, t0=10, gamma=np.inf)
    same(got, {"v": want["x"], "alpha": want["y"], "v_0": X0})
    assert (got["done"], got["stage"]) == (9, 0)


def test_coda_step_solves_its_prox_problem():
    g = noisy(0, 0, 0, X0, Y0)
    centre = X0 + 1.0
    got = coda(X0, Y0, [[0]], noisy, 1, clients=1, eta0=0.2, t0=5, gamma=0.7, v_0=centre)
    # Stationarity of <g, v> + |v - v_t|^2 / (2 eta) + |v - v_0|^2 / (2 gamma).
    close(g[0] + (got["v"] - X0) / 0.2 + (got["v"] - centre) / 0.7, np.zeros(D))
    close(got["v"], (0.7 * X0 + 0.2 * centre - 0.14 * g[0]) / 0.9)
    close(got["alpha"], Y0 + 0.2 * g[1])


def coda_stages(estimate):
    """Two stages by hand, T = 5 and 15, I = 2: three rounds (2, 2, 1) and eight (2 x 7, 1)."""
    v, alpha, r = X0, Y0, 0
    for s, (length, eta) in enumerate([(5, 0.2), (15, 0.2 / 3)]):
        centre, total, done = v, np.zeros(D), 0
        while done < length:
            here = min(2, length - done)
            rows = dict.fromkeys(ALL, (v, alpha))
            for t in range(here):
                for k in ALL:
                    g = noisy(k, r, t, *rows[k])
                    new_v = (0.7 * rows[k][0] + eta * centre - eta * 0.7 * g[0]) / (0.7 + eta)
                    rows[k] = (new_v, rows[k][1] + eta * g[1])
                    total = total + new_v / N
            v, alpha = (np.mean([rows[k][i] for k in ALL], axis=0) for i in (0, 1))
            done, r = done + here, r + 1
        v = total / length
        if estimate is not None:
            alpha = np.mean([estimate(k, s, v) for k in ALL], axis=0)
    return v, alpha, r


@pytest.mark.parametrize("estimate", [None, lambda k, s, v: (k + 1) * (s + 2) * v[:P]])
def test_coda_stages(estimate):
    v, alpha, rounds = coda_stages(estimate)
    assert rounds == 11
    options = {"clients": N, "eta0": 0.2, "t0": 5, "gamma": 0.7, "estimate": estimate}
    got = coda(X0, Y0, [ALL] * 11, noisy, 2, **options)
    same(got, {"v": v, "alpha": alpha, "v_0": v, "total": dict.fromkeys(ALL, np.zeros(D))}, tol=1e-11)
    assert (got["done"], got["stage"]) == (0, 2)
    # Cut in the middle of the second stage.
    part = coda(X0, Y0, [ALL] * 6, noisy, 2, **options)
    assert (part["done"], part["stage"]) == (6, 1)
    start = part.pop("v"), part.pop("alpha")
    rest = coda(*start, [ALL] * 5, noisy, 2, first_round=6, **part, **options)
    same(rest, got)


def test_coda_keeps_the_last_point_if_told_and_needs_all_clients():
    options = {"clients": N, "eta0": 0.1, "t0": 6, "gamma": np.inf}
    want = local_sgda(X0, Y0, [ALL] * 2, noisy, 3, eta_x=0.1, eta_y=0.1)
    got = coda(X0, Y0, [ALL] * 2, noisy, 3, average_iterates=False, **options)
    same(got, {"v": want["x"], "alpha": want["y"], "v_0": want["x"]})
    assert (got["done"], got["stage"]) == (0, 1)
    differ(coda(X0, Y0, [ALL] * 2, noisy, 3, **options)["v"], want["x"])
    with pytest.raises(ValueError, match="all 3 clients"):
        coda(X0, Y0, [[0, 1]], noisy, 3, **options)


# CODASCA


PLAIN = {"clients": N, "gamma": np.inf, "weight_decay": 0.0, "decay_every": 99, "clip": None, "alpha_range": None}


def test_codasca_without_its_additions_is_local_sgda_and_without_clipping_sagda():
    want = local_sgda(X0, Y0, COHORTS, noisy, 3, eta_x=rate, eta_y=rate)
    got = codasca(X0, Y0, COHORTS, noisy, 3, eta=rate, control=False, **PLAIN)
    same(got, {"v": want["x"], "alpha": want["y"]})
    want = sagda(X0, Y0, COHORTS, noisy, 3, clients=N, eta_x=rate, eta_y=rate, eta_xg=0.9, eta_yg=0.9)
    got = codasca(X0, Y0, COHORTS, noisy, 3, eta=rate, eta_g=0.9, **PLAIN)
    names = {"v": "x", "alpha": "y", "c_v": "c_x", "c_alpha": "c_y", "c_kv": "c_kx", "c_kalpha": "c_ky"}
    same(got, {mine: want[theirs] for mine, theirs in names.items()})


@pytest.mark.parametrize("dual", ["old", "new"])
@pytest.mark.parametrize("reference", ["iterates", "local"])
def test_codasca_round_by_hand(dual, reference):
    bound = np.array([0.3, np.inf, 0.1])
    c_kv, c_ka = {k: 0.1 * LX[k] for k in ALL}, {k: 0.1 * LY[k] for k in ALL}
    c_v, c_a = 0.1 * LX.mean(axis=0), 0.1 * LY.mean(axis=0)
    refs = {k: X0 + (k if reference == "local" else 1) for k in ALL}
    alpha0 = np.abs(Y0)
    new_v, new_a, totals, ends = {}, {}, {}, {}
    for k in ALL:
        v, alpha = X0, alpha0
        new_v[k], new_a[k], totals[k] = 0.0, 0.0, np.zeros(D)
        for t in range(2):
            g_v, g_a = noisy(k, 1, t, v, alpha)
            step = np.clip(g_v, -bound, bound) - c_kv[k] + c_v + (v - refs[k]) / 5 + 0.01 * v
            v = v - 0.2 * step
            if dual == "new":
                g_a = noisy(k, 1, t, v, alpha)[1]
            alpha = np.clip(alpha + 0.2 * (g_a - c_ka[k] + c_a), 0, 0.6)
            if dual == "new":
                g_a = noisy(k, 1, t, v, alpha)[1]
            new_v[k], new_a[k] = new_v[k] + g_v / 2, new_a[k] + g_a / 2
            totals[k] = totals[k] + v
        ends[k] = (v, alpha)
    got = codasca(
        X0,
        alpha0,
        [ALL],
        noisy,
        2,
        clients=N,
        eta=0.2,
        gamma=5.0,
        weight_decay=0.01,
        decay_every=100,
        clip=bound,
        alpha_range=(0.0, 0.6),
        dual=dual,
        reference=reference,
        v_ref=refs if reference == "local" else refs[0],
        c_v=c_v,
        c_alpha=c_a,
        c_kv=c_kv,
        c_kalpha=c_ka,
        first_round=1,
    )
    mean = {"v": np.mean([ends[k][0] for k in ALL], axis=0), "alpha": np.mean([ends[k][1] for k in ALL], axis=0)}
    mean |= {"c_v": np.mean([new_v[k] for k in ALL], axis=0), "c_alpha": np.mean([new_a[k] for k in ALL], axis=0)}
    total = totals if reference == "local" else np.mean([totals[k] for k in ALL], axis=0)
    same(got, {"c_kv": new_v, "c_kalpha": new_a, "total": total, **mean})


@pytest.mark.parametrize("reference", ["iterates", "rounds", "local"])
def test_codasca_recentres_and_divides_the_rate_at_the_end_of_a_stage(reference):
    options = {
        "clients": N,
        "gamma": 2.0,
        "weight_decay": 0.0,
        "clip": None,
        "alpha_range": None,
        "reference": reference,
    }
    # Two rounds of two steps make a stage. In the next one eta is a third, and v_ref has moved.
    first = codasca(X0, Y0, [ALL], noisy, 2, eta=0.3, decay_every=4, **options)
    start = first.pop("v"), first.pop("alpha")
    second = codasca(*start, [ALL], noisy, 2, eta=0.3, decay_every=4, first_round=1, **first, **options)
    # The same round without the stage's end leaves the sum behind.
    open_ended = codasca(*start, [ALL], noisy, 2, eta=0.3, decay_every=100, first_round=1, **first, **options)
    same(second, open_ended, ["v", "alpha", "c_v", "c_kv"])
    if reference == "local":
        same(second, {"v_ref": {k: open_ended["total"][k] / 4 for k in ALL}})
        differ(second["v_ref"][0], second["v_ref"][1])
    else:
        close(second["v_ref"], open_ended["total"] / (2 if reference == "rounds" else 4))
    if reference == "rounds":
        close(second["v_ref"], (start[0] + second["v"]) / 2)
    assert not np.any(second["total"][0])
    start = second.pop("v"), second.pop("alpha")
    third = codasca(*start, [ALL], noisy, 2, eta=0.3, decay_every=4, first_round=2, **second, **options)
    slow = codasca(*start, [ALL], noisy, 2, eta=0.1, decay_every=100, first_round=2, **second, **options)
    same(third, slow)
    whole = codasca(X0, Y0, [ALL] * 3, noisy, 2, eta=0.3, decay_every=4, **options)
    same(whole, third)


def test_the_saddle_is_a_fixed_point_of_codasca_and_attracts_it():
    own = {k: full_gradient(k, XS, YS) for k in ALL}
    state = {"c_kv": {k: own[k][0] for k in ALL}, "c_kalpha": {k: own[k][1] for k in ALL}}
    options = PLAIN | {"eta": 0.1, "decay_every": 4000}
    got = codasca(XS, YS, FULL, exact, 4, **(options | {"gamma": 5.0}), **state)
    same(got, {"v": XS, "alpha": YS, **state})
    far = codasca(X0, Y0, [ALL] * 200, exact, 4, **options)
    same(far, {"v": XS, "alpha": YS, **state}, tol=1e-9)


def test_codasca_clips_alpha_to_its_range():
    def upwards(k, r, t, v, alpha):
        return np.zeros(D), np.array([1e4, -1e4])

    options = {key: value for key, value in PLAIN.items() if key != "alpha_range"}
    got = codasca(X0, np.array([1.0, 2.0]), [ALL], upwards, 3, eta=1.0, control=False, **options)
    close(got["alpha"], [999.0, 0.0])
    with pytest.raises(ValueError, match="multiple"):
        codasca(X0, Y0, [ALL], noisy, 2, eta=0.1, **PLAIN)
    with pytest.raises(ValueError, match="needs all 3"):
        codasca(X0, Y0, [[0]], noisy, 3, eta=0.1, reference="local", **PLAIN)
