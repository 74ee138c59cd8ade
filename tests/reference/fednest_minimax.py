"""FedNest in its minimax mode, a slow reference in float64 NumPy.

D. A. Tarzanagh, M. Li, C. Thrampoulidis, S. Oymak, "FedNest: Federated Bilevel, Minimax,
and Compositional Optimization", ICML 2022, Algorithms 1-4. Follows descriptions of
the method, not the paper's own text.

FedNest solves min_x mean_k f_k(x, y*(x)), y*(x) = argmin_y mean_k g_k(x, y). The problem
min_x max_y mean_k f_k(x, y) is the case g_k = - f_k. At y*(x) the mean of grad_y f_k is 0,
so the indirect part of the gradient in x vanishes and FedIHGP (the inverse Hessian) is not
called. One epoch r:

FedInn, T times, s = 0 .. T - 1:
    q = mean_k grad_y f_k(x, y; zeta_k);   y_k = y
    tau times:  y_k <- Pi[ y_k + (beta / tau) ( grad_y f_k(x, y_k; zeta') - grad_y f_k(x, y; zeta') + q ) ]
    y <- mean_k y_k
FedOut, with y+ the result:
    h = mean_k grad_x f_k(x, y+; xi_k);   x_k = x
    tau times:  x_k <- x_k - (alpha / tau) ( grad_x f_k(x_k, y+; xi') - grad_x f_k(x, y+; xi') + h )
    x <- mean_k x_k.

``light=True`` is LFedNest (unconfirmed): no exchange of q and h and no correction, so the
brackets are grad_y f_k(x, y_k; zeta') and grad_x f_k(x_k, y+; xi'); T + 1 exchanges.

Batches, (client, epoch, step, stream): FedInn call s has stream s, FedOut has stream T;
step -1 is the exchanged gradient (zeta_k, xi_k), step t = 0 .. tau - 1 the local one.

What had to be decided:

* Local rates are alpha / tau and beta / tau with one tau for all clients and both parts.
* One cohort per epoch serves all its exchanges; means are uniform over it.
* y is carried over from epoch to epoch (warm start).
* Pi is not in the paper; it follows every local step of y.
* The y of the whole epoch's FedOut is the averaged y+, the same for all clients.
"""

import numpy as np


def _at(value, r, t):
    """A rate is a float, or a callable of the epoch and the local step."""
    return value(r, t) if callable(value) else value


def _array(value):
    return np.array(value, dtype=np.float64)


def fednest_minimax(
    x,
    y,
    cohorts,
    gradient,
    steps,
    *,
    inner_rounds,
    alpha,
    beta,
    light=False,
    project_y=None,
    first_round=0,
):
    """One epoch per entry of ``cohorts``; returns ``{'x', 'y'}``.

    ``gradient(k, r, t, x, y, stream)`` is the pair (grad_x f_k, grad_y f_k) on the batch
    (k, r, t, stream). ``steps`` is tau, ``inner_rounds`` is T; ``alpha`` (for x) and ``beta``
    (for y) are floats or callables of (r, t), divided by tau here.
    """
    x, y = _array(x), _array(y)

    def g_x(k, r, t, x, y, stream):
        return _array(gradient(k, r, t, x.copy(), y.copy(), stream)[0])

    def g_y(k, r, t, x, y, stream):
        return _array(gradient(k, r, t, x.copy(), y.copy(), stream)[1])

    for index, cohort in enumerate(cohorts):
        r = first_round + index
        if len(cohort) == 0:
            raise ValueError(f"epoch {r} has no clients")

        # FedInn, T times.
        for s in range(inner_rounds):
            q = np.zeros_like(y)
            if not light:
                for k in cohort:
                    q += g_y(k, r, -1, x, y, s) / len(cohort)
            total = np.zeros_like(y)
            for k in cohort:
                y_k = y
                for t in range(steps):
                    direction = g_y(k, r, t, x, y_k, s)
                    if not light:
                        direction = direction - g_y(k, r, t, x, y, s) + q
                    y_k = y_k + (_at(beta, r, t) / steps) * direction
                    if project_y is not None:
                        y_k = _array(project_y(y_k))
                total += y_k / len(cohort)
            y = total

        # FedOut at y+.
        out = inner_rounds
        h = np.zeros_like(x)
        if not light:
            for k in cohort:
                h += g_x(k, r, -1, x, y, out) / len(cohort)
        total = np.zeros_like(x)
        for k in cohort:
            x_k = x
            for t in range(steps):
                direction = g_x(k, r, t, x_k, y, out)
                if not light:
                    direction = direction - g_x(k, r, t, x, y, out) + h
                x_k = x_k - (_at(alpha, r, t) / steps) * direction
            total += x_k / len(cohort)
        x = total

    return {"x": x, "y": y}
