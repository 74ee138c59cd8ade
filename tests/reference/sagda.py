"""SAGDA (and FSGDA), a slow reference in float64 NumPy.

H. Yang, Z. Liu, X. Zhang, J. Liu, "SAGDA: Achieving O(eps^-2) Communication Complexity in
Federated Min-Max Learning", NeurIPS 2022 (arXiv 2210.00611).

EVIDENCE. The paper's algorithm box was not consulted. Its abstract says: (i) stochastic
gradient estimators from randomly sampled clients serve as control variates, (ii) there are
two learning rates, at the server and at the clients, (iii) FSGDA is the version without
control variates. Everything marked [U] below is unconfirmed: do not take agreement with
this file as agreement with the paper.

Problem: min_x max_y mean_k f_k(x, y). Server: x, y, c_x, c_y; client: c_kx, c_ky. Round r:

    K = ``steps`` local steps from x_k = x, y_k = y, both from the same old point        [U]
        x_k <- x_k - eta_x (g_x - c_kx + c_x),   y_k <- Pi[ y_k + eta_y (g_y - c_ky + c_y) ]
    x <- x + eta_xg mean over the cohort of (x_k - x),     y <- Pi[ the same with eta_yg ]   [U]
    c_kx, c_ky <- means of the K raw gradients g_x, g_y of this round                    [U]
    c_x <- c_x + (1/N) sum over the cohort of (new c_kx - old c_kx),   c_y likewise      [U]

``variates='fresh'`` is another reading, closer to the words of the abstract [U]: before its
local steps every client of the cohort computes a gradient at the received x, y; that is its
c_kx, c_ky, their mean over the cohort is c_x, c_y, and these are used in this same round
(one more exchange; no client memory).
``control=False`` is FSGDA: no variates, nothing stored.

Batches: (k, r, t), stream 0, for local step t; (k, r, -1), stream 0, for 'fresh'.

What had to be decided:

* eta_xg multiplies the mean model difference, so eta_xg = 1 is plain averaging; the sum of
  directions is not divided by K.
* ``server='all'`` (default) keeps c equal to the mean of c_k over all N clients if it was so
  at the start (SCAFFOLD's rule, from which a sampled cohort changes c by |S|/N of its mean
  change). 'cohort' sets c to the mean of the new c_k of the cohort ("c from sampled
  clients" read literally). With all clients in every round the two agree.
* c = c_k = 0 at the start, so the first round is FSGDA's.
* y is projected after every local step and again after the server step (eta_yg > 1 can
  leave the set).
* The variates are means of raw gradients, not of corrected or projected steps.
"""

import numpy as np


def _at(value, *name):
    """A rate is a float, or a callable of its name."""
    return value(*name) if callable(value) else value


def _array(value):
    return np.array(value, dtype=np.float64)


def _gradient(gradient, k, r, t, x, y):
    g_x, g_y = gradient(k, r, t, x.copy(), y.copy())
    return _array(g_x), _array(g_y)


def sagda(
    x,
    y,
    cohorts,
    gradient,
    steps,
    *,
    clients,
    eta_x,
    eta_y,
    eta_xg=1.0,
    eta_yg=1.0,
    control=True,
    variates="mean",
    server="all",
    project_y=None,
    c_x=None,
    c_y=None,
    c_kx=None,
    c_ky=None,
    first_round=0,
):
    """One round per entry of ``cohorts``; returns ``{'x', 'y', 'c_x', 'c_y', 'c_kx', 'c_ky'}``.

    ``gradient(k, r, t, x, y)`` is the pair (grad_x f_k, grad_y f_k) on the batch (k, r, t).
    ``eta_x`` and ``eta_y`` (client rates) are floats or callables of (r, t), ``eta_xg`` and
    ``eta_yg`` (server rates) floats or callables of r. ``c_kx`` and ``c_ky`` are dicts by
    client; all four variates default to 0 and are returned for the next call.
    """
    if variates not in ("mean", "fresh"):
        raise ValueError(f"variates must be 'mean' or 'fresh', got {variates!r}")
    if server not in ("all", "cohort"):
        raise ValueError(f"server must be 'all' or 'cohort', got {server!r}")
    x, y = _array(x), _array(y)
    c_x = np.zeros_like(x) if c_x is None else _array(c_x)
    c_y = np.zeros_like(y) if c_y is None else _array(c_y)
    c_kx = {k: np.zeros_like(x) if c_kx is None else _array(c_kx[k]) for k in range(clients)}
    c_ky = {k: np.zeros_like(y) if c_ky is None else _array(c_ky[k]) for k in range(clients)}

    for index, cohort in enumerate(cohorts):
        r = first_round + index
        if len(cohort) == 0 or len(set(cohort)) != len(cohort):
            raise ValueError(f"round {r}: a cohort is a set of at least one client, got {list(cohort)}")

        if control and variates == "fresh":
            c_x, c_y = np.zeros_like(x), np.zeros_like(y)
            for k in cohort:
                c_kx[k], c_ky[k] = _gradient(gradient, k, r, -1, x, y)
                c_x += c_kx[k] / len(cohort)
                c_y += c_ky[k] / len(cohort)

        move_x, move_y = np.zeros_like(x), np.zeros_like(y)
        new_kx, new_ky = {}, {}
        for k in cohort:
            x_k, y_k = x, y
            sum_x, sum_y = np.zeros_like(x), np.zeros_like(y)
            for t in range(steps):
                g_x, g_y = _gradient(gradient, k, r, t, x_k, y_k)
                sum_x += g_x
                sum_y += g_y
                if control:
                    g_x = g_x - c_kx[k] + c_x
                    g_y = g_y - c_ky[k] + c_y
                x_k = x_k - _at(eta_x, r, t) * g_x
                y_k = y_k + _at(eta_y, r, t) * g_y
                if project_y is not None:
                    y_k = _array(project_y(y_k))
            move_x += (x_k - x) / len(cohort)
            move_y += (y_k - y) / len(cohort)
            new_kx[k], new_ky[k] = sum_x / steps, sum_y / steps

        x = x + _at(eta_xg, r) * move_x
        y = y + _at(eta_yg, r) * move_y
        if project_y is not None:
            y = _array(project_y(y))

        if control and variates == "mean":
            change_x, change_y = np.zeros_like(x), np.zeros_like(y)
            mean_x, mean_y = np.zeros_like(x), np.zeros_like(y)
            for k in cohort:
                change_x += (new_kx[k] - c_kx[k]) / clients
                change_y += (new_ky[k] - c_ky[k]) / clients
                mean_x += new_kx[k] / len(cohort)
                mean_y += new_ky[k] / len(cohort)
                c_kx[k], c_ky[k] = new_kx[k], new_ky[k]
            if server == "all":
                c_x, c_y = c_x + change_x, c_y + change_y
            else:
                c_x, c_y = mean_x, mean_y

    return {"x": x, "y": y, "c_x": c_x, "c_y": c_y, "c_kx": c_kx, "c_ky": c_ky}
