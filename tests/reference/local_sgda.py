"""Local-SGDA(+) and Momentum-Local-SGDA(+), slow references in float64 NumPy.

Y. Deng, M. Mahdavi, "Local Stochastic Gradient Descent Ascent: Convergence Analysis and
Communication Efficiency", AISTATS 2021 (Local-SGDA, Local-SGDA+); P. Sharma, R. Panda,
G. Joshi, P. K. Varshney, "Federated Minimax Optimization: Improved Convergence Analyses
and Algorithms", ICML 2022, Algorithms 1 (Local-SGDA), 2 (with momentum), 4 (Local-SGDA+)
and 5 (Local-SGDA+ with momentum, headed "Local SGDA+" in the PDF), Appendix F.
Follows descriptions of the methods, not the papers' own text.

Problem: min_x max_y mean_k f_k(x, y). Every round starts from the server's x, y; after
tau = ``steps`` local steps x and y are averaged over the cohort. Local step (r, t), both
updates from the same old point (simultaneous), g = gradient on the batch (k, r, t):

    SGDA     x <- x - eta_x g_x(x, y)                  y <- Pi[ y + eta_y g_y(x, y) ]
    SGDA+    x <- x - eta_x g_x(x, y)                  y <- Pi[ y + eta_y g_y(x~, y) ]
             x~ is one vector for all clients, refreshed to the averaged x every S
             iterations (S a multiple of tau; the papers use S = tau^2)
    SGDAM    x+ = x - alpha eta_x d_x,                 y+ = y + alpha eta_y d_y, then
             d_x <- (1 - beta alpha) d_x + beta alpha g_x(x+, y+)   d_y likewise
    SGDAM+   the same with g_y(x~, y+) in d_y; d_x = d_y = 0 after every synchronisation.

ROUNDS AND BATCHES. Iteration n = r tau + t is (r, t), t = 0 .. tau - 1; the synchronisation
follows (r, tau - 1). SGDA and SGDA+ use the batch (k, r, t) at the point before step t,
SGDAM and SGDAM+ the batch (k, r, t) at the point after step t (the printed index t + 1).
The initial d of SGDAM is a gradient on the batch (k, 0, -1), or (k, r, -1) for a client that
takes part in round r for the first time. All on stream 0, but for ``stream_y`` below.

What had to be decided:

* Partial participation: means over the cohort. (Both papers have all clients.)
* SGDA+ evaluates g_x and g_y at different points, so it needs two gradients per step; one
  batch serves both (unconfirmed). ``stream_y`` names another stream for g_y.
* x~ starts as the x of the run. The refresh at iteration count n = (r + 1) tau, n mod S = 0,
  takes the x just averaged; so with S = tau it is the x received at the round's start.
* d is updated at the client's own x+, y+, also in the last step of the round, before the
  averaging. With beta alpha = 1 the first step of a round is therefore
  taken with a gradient at the point before the averaging.
* ``average_momentum=True``, as printed: d is averaged with x, y, and the averages, which the
  server keeps, stand for all clients (also those that have not taken part). False, as in
  the experiments by a footnote: d stays with its client, x and y only are averaged.
* The initial d of SGDAM: ``initial='gradient'`` (unconfirmed), or 'zero', for which the
  first step does not move. In the averaged form it is made by each client of the first
  cohort, on its own batch.
* SGDAM+ starts every round with d = 0, so its first step does not move, the d made in the
  last step of a round is lost, and with tau = 1 nothing moves at all. That is what "reset
  to 0 at each synchronisation" says together with the order above.
* Pi under momentum: ``projection='step'`` projects y + alpha eta_y d_y, 'hat' projects
  y + eta_y d_y and then takes y + alpha (that - y).
* beta is one number for x and y; beta alpha must be in [0, 1], which is not checked.
"""

import numpy as np


def _at(value, r, t):
    """A rate or weight is a float, or a callable of the round and the local step."""
    return value(r, t) if callable(value) else value


def _array(value):
    return np.array(value, dtype=np.float64)


def _gradient(gradient, k, r, t, x, y, stream=0):
    """The pair of gradients; the default stream is not passed on."""
    extra = {} if stream == 0 else {"stream": stream}
    g_x, g_y = gradient(k, r, t, x.copy(), y.copy(), **extra)
    return _array(g_x), _array(g_y)


def _nonempty(cohort, r):
    if len(cohort) == 0:
        raise ValueError(f"round {r} has no clients")


def _check_period(snapshot_every, steps):
    if snapshot_every < 1 or snapshot_every % steps != 0:
        raise ValueError(f"snapshot_every must be a multiple of steps, got {snapshot_every} and {steps}")


def _mean(rows):
    total = 0.0
    for row in rows:
        total = total + row
    return total / len(rows)


def local_sgda(x, y, cohorts, gradient, steps, *, eta_x, eta_y, project_y=None, first_round=0):
    """Local-SGDA; one round per entry of ``cohorts``; returns ``{'x', 'y'}``.

    ``gradient(k, r, t, x, y, stream=0)`` is the pair (grad_x f_k, grad_y f_k) on the batch
    (k, r, t, stream). ``eta_x`` and ``eta_y`` are floats or callables of (r, t).
    """
    x, y = _array(x), _array(y)
    for index, cohort in enumerate(cohorts):
        r = first_round + index
        _nonempty(cohort, r)
        sent_x, sent_y = [], []
        for k in cohort:
            x_k, y_k = x, y
            for t in range(steps):
                g_x, g_y = _gradient(gradient, k, r, t, x_k, y_k)
                x_k = x_k - _at(eta_x, r, t) * g_x
                y_k = y_k + _at(eta_y, r, t) * g_y
                if project_y is not None:
                    y_k = _array(project_y(y_k))
            sent_x.append(x_k)
            sent_y.append(y_k)
        x, y = _mean(sent_x), _mean(sent_y)
    return {"x": x, "y": y}


def local_sgda_plus(
    x,
    y,
    cohorts,
    gradient,
    steps,
    *,
    eta_x,
    eta_y,
    snapshot_every,
    project_y=None,
    snapshot=None,
    stream_y=0,
    first_round=0,
):
    """Local-SGDA+; returns ``{'x', 'y', 'snapshot'}``. Arguments as for ``local_sgda``.

    ``snapshot_every`` is S, in iterations; ``snapshot`` is the x~ to start from (x if None).
    """
    _check_period(snapshot_every, steps)
    x, y = _array(x), _array(y)
    snapshot = x.copy() if snapshot is None else _array(snapshot)
    for index, cohort in enumerate(cohorts):
        r = first_round + index
        _nonempty(cohort, r)
        sent_x, sent_y = [], []
        for k in cohort:
            x_k, y_k = x, y
            for t in range(steps):
                g_x, _ = _gradient(gradient, k, r, t, x_k, y_k)
                _, g_y = _gradient(gradient, k, r, t, snapshot, y_k, stream_y)
                x_k = x_k - _at(eta_x, r, t) * g_x
                y_k = y_k + _at(eta_y, r, t) * g_y
                if project_y is not None:
                    y_k = _array(project_y(y_k))
            sent_x.append(x_k)
            sent_y.append(y_k)
        x, y = _mean(sent_x), _mean(sent_y)
        if ((r + 1) * steps) % snapshot_every == 0:
            snapshot = x.copy()
    return {"x": x, "y": y, "snapshot": snapshot}


def _ascent(y, alpha, eta_y, d_y, project_y, projection):
    if project_y is None:
        return y + alpha * eta_y * d_y
    if projection == "step":
        return _array(project_y(y + alpha * eta_y * d_y))
    if projection == "hat":
        return y + alpha * (_array(project_y(y + eta_y * d_y)) - y)
    raise ValueError(f"projection must be 'step' or 'hat', got {projection!r}")


def local_sgdam(
    x,
    y,
    cohorts,
    gradient,
    steps,
    *,
    eta_x,
    eta_y,
    alpha,
    beta,
    average_momentum=True,
    initial="gradient",
    project_y=None,
    projection="step",
    d_x=None,
    d_y=None,
    first_round=0,
):
    """Momentum-Local-SGDA; returns ``{'x', 'y', 'd_x', 'd_y'}``.

    Arguments as for ``local_sgda``; ``alpha`` and ``beta`` are floats or callables of
    (r, t). ``d_x`` and ``d_y`` are what to start from, and what is returned: with
    ``average_momentum`` the server's averages (None: not initialised yet), otherwise dicts
    by client, in which a client that has not taken part yet is missing.
    """
    if initial not in ("gradient", "zero"):
        raise ValueError(f"initial must be 'gradient' or 'zero', got {initial!r}")
    if (d_x is None) != (d_y is None):
        raise ValueError("give both d_x and d_y or neither")
    x, y = _array(x), _array(y)
    if average_momentum:
        d_x = None if d_x is None else _array(d_x)
        d_y = None if d_y is None else _array(d_y)
    else:
        d_x = {} if d_x is None else {k: _array(row) for k, row in d_x.items()}
        d_y = {} if d_y is None else {k: _array(row) for k, row in d_y.items()}

    for index, cohort in enumerate(cohorts):
        r = first_round + index
        _nonempty(cohort, r)
        sent = []
        for k in cohort:
            x_k, y_k = x, y
            known = d_x is not None if average_momentum else k in d_x
            if known:
                dx_k, dy_k = (d_x, d_y) if average_momentum else (d_x[k], d_y[k])
            elif initial == "gradient":
                dx_k, dy_k = _gradient(gradient, k, r, -1, x_k, y_k)
            else:
                dx_k, dy_k = np.zeros_like(x), np.zeros_like(y)
            for t in range(steps):
                a = _at(alpha, r, t)
                x_k = x_k - a * _at(eta_x, r, t) * dx_k
                y_k = _ascent(y_k, a, _at(eta_y, r, t), dy_k, project_y, projection)
                g_x, g_y = _gradient(gradient, k, r, t, x_k, y_k)
                weight = _at(beta, r, t) * a
                dx_k = (1.0 - weight) * dx_k + weight * g_x
                dy_k = (1.0 - weight) * dy_k + weight * g_y
            sent.append((x_k, y_k, dx_k, dy_k))

        x, y = _mean([row[0] for row in sent]), _mean([row[1] for row in sent])
        if average_momentum:
            d_x, d_y = _mean([row[2] for row in sent]), _mean([row[3] for row in sent])
        else:
            for k, row in zip(cohort, sent, strict=True):
                d_x[k], d_y[k] = row[2], row[3]
    return {"x": x, "y": y, "d_x": d_x, "d_y": d_y}


def local_sgdam_plus(
    x,
    y,
    cohorts,
    gradient,
    steps,
    *,
    eta_x,
    eta_y,
    alpha,
    beta,
    snapshot_every,
    project_y=None,
    projection="step",
    snapshot=None,
    stream_y=0,
    first_round=0,
):
    """Momentum-Local-SGDA+; returns ``{'x', 'y', 'snapshot'}``; d is 0 between rounds.

    Arguments as for ``local_sgdam`` and ``local_sgda_plus``.
    """
    _check_period(snapshot_every, steps)
    x, y = _array(x), _array(y)
    snapshot = x.copy() if snapshot is None else _array(snapshot)
    for index, cohort in enumerate(cohorts):
        r = first_round + index
        _nonempty(cohort, r)
        sent_x, sent_y = [], []
        for k in cohort:
            x_k, y_k = x, y
            dx_k, dy_k = np.zeros_like(x), np.zeros_like(y)
            for t in range(steps):
                a = _at(alpha, r, t)
                x_k = x_k - a * _at(eta_x, r, t) * dx_k
                y_k = _ascent(y_k, a, _at(eta_y, r, t), dy_k, project_y, projection)
                g_x, _ = _gradient(gradient, k, r, t, x_k, y_k)
                _, g_y = _gradient(gradient, k, r, t, snapshot, y_k, stream_y)
                weight = _at(beta, r, t) * a
                dx_k = (1.0 - weight) * dx_k + weight * g_x
                dy_k = (1.0 - weight) * dy_k + weight * g_y
            sent_x.append(x_k)
            sent_y.append(y_k)
        x, y = _mean(sent_x), _mean(sent_y)
        if ((r + 1) * steps) % snapshot_every == 0:
            snapshot = x.copy()
    return {"x": x, "y": y, "snapshot": snapshot}
