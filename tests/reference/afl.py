"""Agnostic federated learning (Stochastic-AFL), a slow reference in float64 NumPy.

M. Mohri, G. Sivek, A. T. Suresh, "Agnostic Federated Learning", ICML 2019, Figure 3.

Problem: min_x max_{lam in simplex} sum_k lam_k F_k(x). Every iteration r, all
K = len(lam) clients send a gradient and a loss at the same x:

    x_new   = Pi_W( x - lr sum_k lam_k grad F_k(x) )
    lam_new = Pi_simplex( lam + lr_lambda (F_1(x), ..., F_K(x)) ).

The output is the average of the iterates x and of the iterates lam.

What had to be decided:

* Both updates use the OLD x and the OLD lam (they are simultaneous in the figure).
* The averages run over the iterates after the updates, r = 1 .. rounds; the starting
  point is not counted. With no iteration they are the starting point.
* W is all of R^d unless ``project`` is given. The set of mixtures is the whole simplex.
* All clients are summed with weights lam_k on their own batches. (The paper also has a
  variant that samples one client.) There are no local steps; a round is an iteration.
"""

import numpy as np

from .drfa import project_simplex


def _at(value, r):
    """A rate is a float, or a callable of the iteration."""
    return value(r) if callable(value) else value


def afl(x, lam, rounds, gradient, loss, *, lr, lr_lambda, project=None):
    """Run ``rounds`` iterations; return ``{'x', 'lam', 'x_mean', 'lam_mean'}``.

    ``gradient(k, r, t, x)`` is client k's gradient in iteration r (t is always 0) and
    ``loss(k, r, x)`` its loss, both at the model all clients received. ``lr`` and
    ``lr_lambda`` are floats or callables of r; ``project(x)`` is Pi_W.
    """
    x = np.array(x, dtype=np.float64)
    lam = np.array(lam, dtype=np.float64)
    x_sum = np.zeros_like(x)
    lam_sum = np.zeros_like(lam)

    for r in range(rounds):
        direction = np.zeros_like(x)
        losses = np.zeros_like(lam)
        for k in range(len(lam)):
            direction += lam[k] * np.asarray(gradient(k, r, 0, x.copy()), dtype=np.float64)
            losses[k] = float(loss(k, r, x.copy()))
        x = x - _at(lr, r) * direction
        if project is not None:
            x = np.asarray(project(x), dtype=np.float64)
        lam = project_simplex(lam + _at(lr_lambda, r) * losses)
        x_sum += x
        lam_sum += lam

    x_mean = x_sum / rounds if rounds else x.copy()
    lam_mean = lam_sum / rounds if rounds else lam.copy()
    return {"x": x, "lam": lam, "x_mean": x_mean, "lam_mean": lam_mean}
