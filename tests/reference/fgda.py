"""FGDA and AdaFGDA, slow references in float64 NumPy.

F. Huang, X. Wang, J. Li, S. Chen, "Adaptive Federated Minimax Optimization with Lower
Complexities", AISTATS 2024, Algorithm 1 (line numbers below are those of its box).

Problem: min_x max_y mean_k f_k(x, y), all N clients in every round. Client k holds x_k,
y_k, w_k (estimate of grad_x f_k), v_k (of grad_y f_k); the server holds the accumulators
a, b of the diagonal matrices A, B. With q = ``steps``, iteration t = 1, 2, ...:

    t mod q != 0, lines 11-12   x_k <- x_k - eta gamma A^{-1} w_k         (A, B frozen, line 13)
                                y_k <- y_k + eta lam   B^{-1} v_k
                  lines 14-16   on one fresh batch xi, old and new point of the client:
        v_k <- grad_y f_k(new; xi) + (1 - alpha) (v_k - grad_y f_k(old; xi))
        w_k <- grad_x f_k(new; xi) + (1 - beta)  (w_k - grad_x f_k(old; xi))
    t mod q == 0, line 5        xbar, ybar, wbar, vbar = means over the clients
                  line 6        refresh A from wbar and B from vbar
                  lines 7-8     every x_k <- x = xbar - eta gamma A^{-1} wbar,
                                every y_k <- y = ybar + eta lam   B^{-1} vbar
                  then          the estimators, see below.

THE SYNCHRONISATION. Lines 14-16 stand in the other branch, so the box does not say what
w_{t+1}, v_{t+1} are after a synchronisation. Two places of the proof fix it: Lemma 11
uses w^k_{t+1} = wbar_{t+1} and v^k_{t+1} = vbar_{t+1} for all k if t mod q = 0, and
Lemma 8 uses, at every t, wbar_{t+1} = mean_k [lines 14-16 from client k's OWN x^k_t,
y^k_t, w^k_t]. Three forms:

    two_phase=True (default; satisfies both lemmas)
        phase 1: lines 5-8, x and y are sent out;
        phase 2, in the same round: every client does lines 14-16 from its own old point
        x_k, y_k and its own old w_k, v_k to the new x, y; then w and v are averaged and
        sent out, and every w_k, v_k is that average.
    two_phase=False, the single exchange
        x, y, xbar, ybar, wbar, vbar are sent out, and every client does lines 14-16 from
        the averages: old point xbar, ybar, old estimators wbar, vbar. The new w_k, v_k
        differ between clients and are averaged at the next synchronisation only.
    never_averaged=True
        lines 14-16 from the client's own old point and own old estimators, as in phase 2,
        and no averaging of them: wbar and vbar serve lines 6-8 only.

With one client the three are the same. With q = 1 they have the same means, hence the
same x, y, for any number of clients.

The matrices, refreshed at a synchronisation only:

    'identity'  A = I, B = I                                                          (FGDA)
    'adam'      a <- rho_m a + (1 - rho_m) wbar^2,  A = diag(sqrt(a) + rho), b, B from vbar
    'belief'    the same with (wbar_t - wbar_{t-q})^2 and (vbar_t - vbar_{t-q})^2.

ROUNDS. Round r (0-based) is iterations t = r q + 1 .. (r + 1) q; iteration t = r q + j + 1
is called (r, j), j = 0 .. q - 1. Its first q - 1 iterations are local, its last one,
(r, q - 1), is the synchronisation, so a round ends with exactly one synchronisation. The
step of iteration (r, j) uses eta(r, j). The estimator update that follows it (lines 14-16,
the printed index t + 1) uses alpha(r, j), beta(r, j) and the batch named (k, r, j), stream
0, for both gradients at both points; so the printed alpha_{t+1} = c_1 eta_t^2 is
alpha(r, j) = c_1 eta(r, j)^2. This holds for the synchronisation too: in all three forms
its estimator update is on the batch (k, r, q - 1). The initialisation (line 2) is on the
batch (k, 0, -1).

In the two-phase form that update happens in round r. In the other two it needs the new
x, y, so a federated client can only do it on receipt, as its first act in round r + 1; it
keeps the name (r, q - 1) wherever it is executed. After the last round ``defer=False``
executes it; ``defer=True`` leaves it undone. Then x, y are the new server model, x_bar,
y_bar, w_bar, v_bar the averages of that synchronisation, and x_k, y_k, w, v the clients'
own values before it (the single exchange does not need these four any more).

What had to be decided:

* The synchronisation: above.
* Line 2 writes "generate A_1 and B_1" without saying how, and they serve the first q - 1
  steps. ``first_matrix='accumulator'`` (default) applies the rule to a_0 = b_0 = 0:
  A_1 = B_1 = rho I. 'identity' takes I; 'average' applies line 6 at once to the means of
  the initial w_k, v_k, at the price of one exchange before the first step (a, b, w_bar,
  v_bar are then stored as if a synchronisation had taken place). It matters only for
  q > 1 and only before the first synchronisation.
* Line 2 does not average w_1, v_1, so neither does the reference, although Lemma 11, read
  at t = 0, would have them equal. Pass ``w`` and ``v`` to start from averages.
* a_{t-1} is the accumulator left by the previous synchronisation (0 before the first).
* For 'belief', wbar_{t-q} is the average of line 5 at the previous synchronisation (not
  that of phase 2); it is 0 at the first one, whose A is therefore Adam's.
* The box calls both the mixing weight and the offset by letters read as rho: here rho_m
  is the weight (varrho) and rho the offset. One rho and one rho_m for x and y.
* The text after the box has y - lam B^{-1} v; the box has plus, which is ascent.
* ``project_y`` is not in the paper (y is free there; its robust experiment needs a ball).
  ``projection='step'`` projects y + eta lam B^{-1} v; 'hat' projects the printed yhat =
  y + lam B^{-1} v and then takes y + eta (yhat - y). Both apply to lines 8 and 12.
* How large the batch (0, -1) is (q samples in line 2) is the caller's business.
* The output is a random iterate in the paper; here the last one is returned.
"""

import numpy as np

MATRICES = ("identity", "adam", "belief")


def _at(value, r, t):
    """A rate or weight is a float, or a callable of the round and the local step."""
    return value(r, t) if callable(value) else value


def _array(value):
    return np.array(value, dtype=np.float64)


def _check(cohorts, clients, steps, two_phase, never_averaged, projection, w, v, x_k, y_k):
    for r, cohort in enumerate(cohorts):
        if sorted(cohort) != list(range(clients)):
            raise ValueError(f"round {r}: all {clients} clients must take part, got {list(cohort)}")
    if steps < 1:
        raise ValueError("steps must be at least 1")
    if never_averaged and not two_phase:
        raise ValueError("never_averaged is a form of its own; leave two_phase as it is")
    if projection not in ("step", "hat"):
        raise ValueError(f"projection must be 'step' or 'hat', got {projection!r}")
    if (w is None) != (v is None) or (w is None and (x_k is not None or y_k is not None)):
        raise ValueError("a given client state needs both w and v")


def _ascent(y, rate, direction, project_y, projection):
    """One step of y; ``rate`` is the pair (eta, lam)."""
    eta, lam = rate
    if project_y is None:
        return y + eta * lam * direction
    if projection == "step":
        return _array(project_y(y + eta * lam * direction))
    y_hat = _array(project_y(y + lam * direction))
    return y + eta * (y_hat - y)


def _storm(gradient, name, old, new, w, v, alpha, beta):
    """Lines 14-16 on the batch ``name`` = (k, r, t); old and new are pairs (x, y)."""
    g_x_new, g_y_new = gradient(*name, new[0].copy(), new[1].copy())
    g_x_old, g_y_old = gradient(*name, old[0].copy(), old[1].copy())
    v_new = _array(g_y_new) + (1.0 - alpha) * (v - _array(g_y_old))
    w_new = _array(g_x_new) + (1.0 - beta) * (w - _array(g_x_old))
    return w_new, v_new


def _mean(rows, clients):
    total = 0.0
    for k in range(clients):
        total = total + rows[k]
    return total / clients


def fgda(
    x,
    y,
    cohorts,
    gradient,
    steps,
    *,
    clients,
    eta,
    gamma,
    lam,
    alpha,
    beta,
    two_phase=True,
    never_averaged=False,
    project_y=None,
    projection="step",
    w=None,
    v=None,
    x_k=None,
    y_k=None,
    first_round=0,
):
    """FGDA: the printed loop over t with A = I, B = I; one round per entry of ``cohorts``.

    ``gradient(k, r, t, x, y)`` is the pair (grad_x f_k, grad_y f_k) on the batch (k, r, t).
    ``steps`` is q, ``clients`` is N; ``eta``, ``alpha`` (weight of v), ``beta`` (weight of
    w) are floats or callables of (r, t), ``gamma`` and ``lam`` floats.

    ``w`` and ``v`` (dicts by client) start from a given state, ``x_k`` and ``y_k`` default
    to x and y, and ``first_round`` is the r of the first round run here. Returns
    ``{'x', 'y', 'x_k', 'y_k', 'w', 'v'}``: the server model, then dicts by client, to be
    passed on to the next call.
    """
    _check(cohorts, clients, steps, two_phase, never_averaged, projection, w, v, x_k, y_k)
    x, y = _array(x), _array(y)
    q = steps
    everyone = range(clients)

    # Lines 1-2
    x_k = {k: _array(x if x_k is None else x_k[k]) for k in everyone}
    y_k = {k: _array(y if y_k is None else y_k[k]) for k in everyone}
    if w is None:
        w, v = {}, {}
        for k in everyone:
            g_x, g_y = gradient(k, 0, -1, x_k[k].copy(), y_k[k].copy())
            w[k], v[k] = _array(g_x), _array(g_y)
    else:
        w = {k: _array(w[k]) for k in everyone}
        v = {k: _array(v[k]) for k in everyone}

    # Line 3
    first = q * first_round
    for t in range(first + 1, first + q * len(cohorts) + 1):
        r, j = (t - 1) // q, (t - 1) % q
        rate, a, b = _at(eta, r, j), _at(alpha, r, j), _at(beta, r, j)
        if t % q == 0:
            # Line 5
            v_bar, w_bar = _mean(v, clients), _mean(w, clients)
            y_bar, x_bar = _mean(y_k, clients), _mean(x_k, clients)
            # Lines 7-8
            y = _ascent(y_bar, (rate, lam), v_bar, project_y, projection)
            x = x_bar - rate * gamma * w_bar
            for k in everyone:
                if two_phase:
                    old, w_old, v_old = (x_k[k], y_k[k]), w[k], v[k]
                else:
                    old, w_old, v_old = (x_bar, y_bar), w_bar, v_bar
                w[k], v[k] = _storm(gradient, (k, r, j), old, (x, y), w_old, v_old, a, b)
                x_k[k], y_k[k] = x.copy(), y.copy()
            if two_phase and not never_averaged:
                w_bar, v_bar = _mean(w, clients), _mean(v, clients)
                for k in everyone:
                    w[k], v[k] = w_bar.copy(), v_bar.copy()
        else:
            # Line 10
            for k in everyone:
                # Lines 11-12
                y_new = _ascent(y_k[k], (rate, lam), v[k], project_y, projection)
                x_new = x_k[k] - rate * gamma * w[k]
                # Lines 14-16
                w[k], v[k] = _storm(gradient, (k, r, j), (x_k[k], y_k[k]), (x_new, y_new), w[k], v[k], a, b)
                x_k[k], y_k[k] = x_new, y_new

    return {"x": x, "y": y, "x_k": x_k, "y_k": y_k, "w": w, "v": v}


def _refresh(matrix, accumulator, bar, before, rho_m):
    """Line 6 and its AdaBelief alternative: the new accumulator."""
    if matrix == "adam":
        return rho_m * accumulator + (1.0 - rho_m) * bar**2
    if matrix == "belief":
        return rho_m * accumulator + (1.0 - rho_m) * (bar - before) ** 2
    return accumulator


def _diagonal(matrix, accumulator, rho):
    return np.ones_like(accumulator) if matrix == "identity" else np.sqrt(accumulator) + rho


def adafgda(
    x,
    y,
    cohorts,
    gradient,
    steps,
    *,
    clients,
    eta,
    gamma,
    lam,
    alpha,
    beta,
    rho=1.0,
    rho_m=0.9,
    matrix="adam",
    first_matrix="accumulator",
    two_phase=True,
    never_averaged=False,
    project_y=None,
    projection="step",
    a=None,
    b=None,
    w_bar=None,
    v_bar=None,
    x_bar=None,
    y_bar=None,
    w=None,
    v=None,
    x_k=None,
    y_k=None,
    first_round=0,
    defer=False,
):
    """AdaFGDA, written by rounds; one round per entry of ``cohorts``.

    Arguments as for ``fgda``; ``rho`` is the offset and ``rho_m`` the mixing weight of line
    6, a float or a callable of (r, t) read at t = q - 1, and at (0, -1) for
    ``first_matrix='average'``. A start away from the initialisation needs ``w`` and ``v``;
    then ``a``, ``b`` and ``w_bar``, ``v_bar`` (the averages of the previous
    synchronisation, for 'belief') default to 0. With ``defer=True`` such a start has the
    estimator update after the previous synchronisation still to be done, and needs what
    that update needs: ``x_k``, ``y_k`` or, for the single exchange, ``x_bar``, ``y_bar``,
    ``w_bar``, ``v_bar``. It is carried out first, under the name (first_round - 1, q - 1).

    Returns ``{'x', 'y', 'a', 'b', 'w_bar', 'v_bar', 'x_bar', 'y_bar', 'x_k', 'y_k', 'w',
    'v'}``: the server model, the accumulators, the averages of line 5 at the last
    synchronisation, and four dicts by client; the whole can be passed on to the next call.
    """
    _check(cohorts, clients, steps, two_phase, never_averaged, projection, w, v, x_k, y_k)
    if matrix not in MATRICES:
        raise ValueError(f"matrix must be one of {MATRICES}, got {matrix!r}")
    if first_matrix not in ("accumulator", "identity", "average"):
        raise ValueError(f"first_matrix must be 'accumulator', 'identity' or 'average', got {first_matrix!r}")
    in_one_round = two_phase and not never_averaged
    if defer and in_one_round:
        raise ValueError("the two-phase synchronisation leaves nothing to be deferred")

    x, y = _array(x), _array(y)
    q = steps
    everyone = range(clients)
    fresh = w is None
    pending = defer and not fresh
    needed = (x_k, y_k) if two_phase else (x_bar, y_bar, w_bar, v_bar)
    if pending and any(value is None for value in needed):
        raise ValueError("a deferred update needs x_k, y_k, or the four averages for the single exchange")

    a = np.zeros_like(x) if a is None else _array(a)
    b = np.zeros_like(y) if b is None else _array(b)
    w_bar = np.zeros_like(x) if w_bar is None else _array(w_bar)
    v_bar = np.zeros_like(y) if v_bar is None else _array(v_bar)
    x_bar = x.copy() if x_bar is None else _array(x_bar)
    y_bar = y.copy() if y_bar is None else _array(y_bar)
    x_k = {k: _array(x if x_k is None else x_k[k]) for k in everyone}
    y_k = {k: _array(y if y_k is None else y_k[k]) for k in everyone}

    # Line 2
    if fresh:
        w, v = {}, {}
        for k in everyone:
            g_x, g_y = gradient(k, 0, -1, x_k[k].copy(), y_k[k].copy())
            w[k], v[k] = _array(g_x), _array(g_y)
        if first_matrix == "average" and matrix != "identity":
            w_before, v_before = w_bar, v_bar
            w_bar, v_bar = _mean(w, clients), _mean(v, clients)
            a = _refresh(matrix, a, w_bar, w_before, _at(rho_m, 0, -1))
            b = _refresh(matrix, b, v_bar, v_before, _at(rho_m, 0, -1))
    else:
        w = {k: _array(w[k]) for k in everyone}
        v = {k: _array(v[k]) for k in everyone}

    diagonal_a, diagonal_b = _diagonal(matrix, a, rho), _diagonal(matrix, b, rho)
    if fresh and first_matrix == "identity":
        diagonal_a, diagonal_b = np.ones_like(x), np.ones_like(y)

    def estimators_after_synchronisation(r):
        """Lines 14-16 of iteration (r, q - 1): from its old values to the server's x, y."""
        for k in everyone:
            old = (x_k[k], y_k[k], w[k], v[k]) if two_phase else (x_bar, y_bar, w_bar, v_bar)
            weights = (_at(alpha, r, q - 1), _at(beta, r, q - 1))
            w[k], v[k] = _storm(gradient, (k, r, q - 1), old[:2], (x, y), old[2], old[3], *weights)
            x_k[k], y_k[k] = x.copy(), y.copy()

    for index, _ in enumerate(cohorts):
        r = first_round + index

        if pending:
            estimators_after_synchronisation(r - 1)
            pending = False

        # The q - 1 local iterations.
        for k in everyone:
            for j in range(q - 1):
                rate = _at(eta, r, j)
                x_new = x_k[k] - rate * gamma * w[k] / diagonal_a
                y_new = _ascent(y_k[k], (rate, lam), v[k] / diagonal_b, project_y, projection)
                weights = (_at(alpha, r, j), _at(beta, r, j))
                w[k], v[k] = _storm(gradient, (k, r, j), (x_k[k], y_k[k]), (x_new, y_new), w[k], v[k], *weights)
                x_k[k], y_k[k] = x_new, y_new

        # The synchronisation. Line 5:
        w_before, v_before = w_bar, v_bar
        w_bar, v_bar = _mean(w, clients), _mean(v, clients)
        x_bar, y_bar = _mean(x_k, clients), _mean(y_k, clients)
        # Line 6
        mixing = _at(rho_m, r, q - 1)
        a = _refresh(matrix, a, w_bar, w_before, mixing)
        b = _refresh(matrix, b, v_bar, v_before, mixing)
        diagonal_a, diagonal_b = _diagonal(matrix, a, rho), _diagonal(matrix, b, rho)
        # Lines 7-8
        rate = _at(eta, r, q - 1)
        x = x_bar - rate * gamma * w_bar / diagonal_a
        y = _ascent(y_bar, (rate, lam), v_bar / diagonal_b, project_y, projection)

        pending = True
        if not defer:
            estimators_after_synchronisation(r)
            pending = False
        if in_one_round:
            # Phase 2: the estimators are averaged and sent back.
            w_mean, v_mean = _mean(w, clients), _mean(v, clients)
            for k in everyone:
                w[k], v[k] = w_mean.copy(), v_mean.copy()

    return {
        "x": x,
        "y": y,
        "a": a,
        "b": b,
        "w_bar": w_bar,
        "v_bar": v_bar,
        "x_bar": x_bar,
        "y_bar": y_bar,
        "x_k": x_k,
        "y_k": y_k,
        "w": w,
        "v": v,
    }
