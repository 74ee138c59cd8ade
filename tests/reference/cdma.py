"""CDMA and CDMA-ADA, slow references in float64 NumPy.

J. Xie, C. Zhang, Z. Shen, W. Liu, H. Qian, "CDMA: A Practical Cross-Device Federated
Learning Algorithm for General Minimax Problems", AAAI 2023 (arXiv 2105.14216). Follows
descriptions of the method, not the paper's own text, and was checked against the behaviour
of the authors' code (xjiajiahao/federated-minimax).

Problem: min_x max_y mean_k f_k(x, y). Server: x, y and a gradient estimate G = (g_x, g_y).
Round r has two cohorts and two exchanges:

    collection   each k of the first cohort sends its FULL local gradient at the server's x, y
        CDMA      G = mean of them                                            (code: CDMA_ONE)
        CDMA-ADA  G_r = mean_k( F_k(z_r) - (1 - a_r) F_k(z_{r-1}) ) + (1 - a_r) G_{r-1},
                  F_k the full local gradient, z = (x, y); G_0 = mean_k F_k(z_0)
    update       each k of the second cohort starts at x_k = x, y_k = y and makes ``steps``
                 local steps on minibatches, both variables from the same old point:
        x_k <- x_k - eta_x ( grad_x f_k(x_k, y_k; xi) - grad_x f_k(x, y; xi) + g_x )
        y_k <- Pi[ y_k + eta_y ( grad_y f_k(x_k, y_k; xi) - grad_y f_k(x, y; xi) + g_y ) ]
                 x, y <- means over the second cohort.

ADA's schedules: eta_r = eta / (r + 1)^e and a_r = min(a / (r + 1)^(2e), 1), made by
``schedules``.

Batches: local step t uses (k, r, t), stream 0, at both points. The collection uses the
client's whole data, no batch.

What had to be decided:

* ``update_cohorts=None`` uses the first cohort twice. In the code both cohorts are, by
  default, random parts of one set of candidates, and two independent draws with a flag.
* All means are uniform, whatever the clients' sizes.
* z_{r-1} is the server's x, y of the previous round (not a client's last point), evaluated
  by this round's first cohort. In round 0, and whenever no G is given, G = mean F_k(z).
* The code has separate weights a for x and y and a free exponent for a_r: ``a`` and ``a_y``
  are floats or callables of r, and ``schedules`` has the exponent 2e.
* With K = 1 the minibatch terms cancel: the round is one step of the server with G.
"""

import numpy as np


def _at(value, *name):
    """A rate or weight is a float, or a callable of its name."""
    return value(*name) if callable(value) else value


def _array(value):
    return np.array(value, dtype=np.float64)


def schedules(eta, a, exponent):
    """The pair (eta_r as a callable of (r, t), a_r as a callable of r)."""

    def rate(r, t):
        return eta / (r + 1) ** exponent

    def weight(r):
        return min(a / (r + 1) ** (2 * exponent), 1.0)

    return rate, weight


def _collect(cohort, full_gradient, x, y):
    """The mean of the cohort's full local gradients at x, y."""
    g_x, g_y = np.zeros_like(x), np.zeros_like(y)
    for k in cohort:
        part_x, part_y = full_gradient(k, x.copy(), y.copy())
        g_x += _array(part_x) / len(cohort)
        g_y += _array(part_y) / len(cohort)
    return g_x, g_y


def _update(cohort, r, gradient, steps, x, y, g_x, g_y, eta_x, eta_y, project_y):
    """The second half of a round; returns the new x, y."""
    mean_x, mean_y = np.zeros_like(x), np.zeros_like(y)
    for k in cohort:
        x_k, y_k = x, y
        for t in range(steps):
            here_x, here_y = gradient(k, r, t, x_k.copy(), y_k.copy())
            there_x, there_y = gradient(k, r, t, x.copy(), y.copy())
            x_k = x_k - _at(eta_x, r, t) * (_array(here_x) - _array(there_x) + g_x)
            y_k = y_k + _at(eta_y, r, t) * (_array(here_y) - _array(there_y) + g_y)
            if project_y is not None:
                y_k = _array(project_y(y_k))
        mean_x += x_k / len(cohort)
        mean_y += y_k / len(cohort)
    return mean_x, mean_y


def _pairs(cohorts, update_cohorts, first_round):
    update_cohorts = cohorts if update_cohorts is None else update_cohorts
    if len(cohorts) != len(update_cohorts):
        raise ValueError("cohorts and update_cohorts must have one entry per round")
    for index, (first, second) in enumerate(zip(cohorts, update_cohorts, strict=True)):
        if len(first) == 0 or len(second) == 0:
            raise ValueError(f"round {first_round + index} has no clients")
        yield first_round + index, first, second


def cdma(
    x,
    y,
    cohorts,
    gradient,
    full_gradient,
    steps,
    *,
    eta_x,
    eta_y,
    update_cohorts=None,
    project_y=None,
    first_round=0,
):
    """CDMA; one round per entry of ``cohorts``; returns ``{'x', 'y', 'g_x', 'g_y'}``.

    ``full_gradient(k, x, y)`` is the pair of full local gradients, ``gradient(k, r, t, x,
    y)`` the pair on the batch (k, r, t). ``cohorts`` collect, ``update_cohorts`` update.
    ``eta_x`` and ``eta_y`` are floats or callables of (r, t). g_x, g_y are the last G.
    """
    x, y = _array(x), _array(y)
    g_x, g_y = np.zeros_like(x), np.zeros_like(y)
    for r, first, second in _pairs(cohorts, update_cohorts, first_round):
        g_x, g_y = _collect(first, full_gradient, x, y)
        x, y = _update(second, r, gradient, steps, x, y, g_x, g_y, eta_x, eta_y, project_y)
    return {"x": x, "y": y, "g_x": g_x, "g_y": g_y}


def cdma_ada(
    x,
    y,
    cohorts,
    gradient,
    full_gradient,
    steps,
    *,
    eta_x,
    eta_y,
    a,
    a_y=None,
    update_cohorts=None,
    project_y=None,
    g_x=None,
    g_y=None,
    x_prev=None,
    y_prev=None,
    first_round=0,
):
    """CDMA-ADA; returns ``{'x', 'y', 'g_x', 'g_y', 'x_prev', 'y_prev'}``.

    Arguments as for ``cdma``; ``a`` is a float or a callable of r, ``a_y`` the weight for y
    (``a`` if None). ``g_x``, ``g_y``, ``x_prev``, ``y_prev`` are G and z of the previous
    round, all four or none.
    """
    state = (g_x, g_y, x_prev, y_prev)
    if any(value is None for value in state) and any(value is not None for value in state):
        raise ValueError("g_x, g_y, x_prev and y_prev are given together or not at all")
    x, y = _array(x), _array(y)
    fresh = g_x is None
    if fresh:
        g_x, g_y, x_prev, y_prev = np.zeros_like(x), np.zeros_like(y), x.copy(), y.copy()
    else:
        g_x, g_y, x_prev, y_prev = (_array(value) for value in state)

    for r, first, second in _pairs(cohorts, update_cohorts, first_round):
        new_x, new_y = _collect(first, full_gradient, x, y)
        if not fresh:
            keep_x = 1.0 - _at(a, r)
            keep_y = 1.0 - _at(a if a_y is None else a_y, r)
            old_x, old_y = _collect(first, full_gradient, x_prev, y_prev)
            new_x = new_x - keep_x * old_x + keep_x * g_x
            new_y = new_y - keep_y * old_y + keep_y * g_y
        fresh = False
        g_x, g_y, x_prev, y_prev = new_x, new_y, x, y
        x, y = _update(second, r, gradient, steps, x, y, g_x, g_y, eta_x, eta_y, project_y)
    return {"x": x, "y": y, "g_x": g_x, "g_y": g_y, "x_prev": x_prev, "y_prev": y_prev}
