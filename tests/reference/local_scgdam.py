"""LocalSCGDAM, a slow reference in float64 NumPy.

X. Zhang, Y. Zhang, T. Yang, R. Souvenir, H. Gao, "Federated Compositional Deep AUC Maximization",
NeurIPS 2023 (arXiv 2304.10101). Follows descriptions of the method, not the paper's own text.
Tags: [P] stated in the paper of LocalSMCGDAM (ICML 2024), which uses it as a baseline;
[U] unconfirmed; [R] the rule that both agree when all weights are 1; [G] a guess.

Problem [P, eq. (1)]: min_x max_y mean_k f_k( mean_k g_k(x), y ). One inner level. A client holds
x, y, the inner estimate h, and the momenta m (primal) and s (dual):

    h <- (1 - alpha eta) h + alpha eta g_k(x; xi)                                          [U]
    m <- (1 - beta_x eta) m + beta_x eta Jg_k(x; xi)' grad_1 f_k(h_new, y; zeta)           [U]
    s <- (1 - beta_y eta) s + beta_y eta grad_2 f_k(h_new, y; zeta)                        [U]
    x <- x - gamma_x eta m,   y <- Pi[ y + gamma_y eta s ]                                 [U]
    every tau = ``steps`` iterations x, y, h, m, s become their means over the clients.    [U]

That h is a moving average and that otherwise it is LocalSMCGDAM with K = 1 is [P] (section 5:
"K = 1 and the inner-level function estimator is based on moving average"). Table 2 there gives
one alpha, 3.0 at eta = 0.3, that is the weight alpha eta = 0.9.

What had to be decided:

* The order within an iteration. ``order='step_first'`` (default): x and y move with the OLD m and s,
  then h, m, s are made at the new x and y. This is the order of Algorithm 1 of LocalSMCGDAM, so
  that with both estimator weights at 1 (alpha eta = 1 here, alpha eta^2 = 1 there) and equal other
  arguments the two coincide for K = 1, as [R] requires; the iteration (r, t) uses the batches
  (k, r, t) at the point AFTER the step, the initialisation the batches (k, r, -1) of the first
  round of the run. 'estimate_first', the order of the lines above (and of
  Local-SCGDM): h, m, s at the old x and y, then the step with the NEW m and s; the iteration
  (r, t) uses (k, r, t) at the point BEFORE the step, and the first iteration of the run is the
  initialisation. With one client the two orders make the same x and y, batches renamed;
  with several they differ in what is averaged: 'estimate_first' averages h, m, s belonging to the
  point before the x that is averaged.
* The initialisation: h = g(x; xi), m and s the gradients at this h, on each client's batch, not
  averaged. [G], after eq. (12) of [P]; ``average_initial=True`` averages them before the first
  step ('step_first' only), as for LocalSMCGDAM.
* Value and Jacobian use the same batch xi, f another one, zeta. [G] ``stream_jacobian`` as for
  LocalSMCGDAM.
* Partial participation: means over the cohort; the averages stand for all clients.
* Without a dual (y None) s does not exist. Pi is not in the paper.
* What is solved with heterogeneous clients: as for LocalSMCGDAM, no Jacobian is averaged, and with
  alpha eta = 1 the average of h is not used. A moving average with weight below 1 lags behind
  g(x): it is never exact along a path, which is the difference from eq. (9) there.
"""

import numpy as np


def _at(value, r, t):
    """A rate or weight is a float, or a callable of the round and the local step."""
    return value(r, t) if callable(value) else value


def _array(value):
    return np.array(value, dtype=np.float64)


def _mean(rows):
    if rows[0] is None:
        return None
    total = 0.0
    for row in rows:
        total = total + row
    return total / len(rows)


def local_scgdam(
    x,
    y,
    cohorts,
    inner,
    inner_vjp,
    outer,
    steps,
    *,
    eta,
    gamma_x,
    beta_x,
    alpha,
    gamma_y=None,
    beta_y=None,
    project_y=None,
    order="step_first",
    average_initial=False,
    stream_jacobian=0,
    h=None,
    m=None,
    s=None,
    first_round=0,
):
    """One round per entry of ``cohorts``; returns ``{'x', 'y', 'h', 'm', 's'}``.

    ``inner(k, r, t, x)`` is g_k and ``inner_vjp(k, r, t, x, c)`` is Jg_k' c on the same batch (with
    ``stream=`` if ``stream_jacobian`` is not 0); ``outer(k, r, t, u, y)`` is the pair
    (grad_u f_k, grad_y f_k). ``y=None``: no dual, see ``local_smcgdam``. ``eta``, ``gamma_x``,
    ``gamma_y``, ``beta_x``, ``beta_y``, ``alpha`` are floats or callables of (r, t). ``h``, ``m``, ``s`` are
    the averages to start from, None for the initialisation.
    """
    if order not in ("step_first", "estimate_first"):
        raise ValueError(f"order must be 'step_first' or 'estimate_first', got {order!r}")
    if order == "estimate_first" and average_initial:
        raise ValueError("there is no step before the first estimate, hence nothing to average")
    if (h is None) != (m is None) or (h is None or y is None) != (s is None):
        raise ValueError("a given state needs h and m, with a dual also s")
    if y is not None and (gamma_y is None or beta_y is None):
        raise ValueError("a dual needs gamma_y and beta_y")
    x = _array(x)
    y = None if y is None else _array(y)
    h = None if h is None else _array(h)
    m = None if m is None else _array(m)
    s = None if s is None else _array(s)
    extra = {} if stream_jacobian == 0 else {"stream": stream_jacobian}

    def estimate(k, r, t, x_k, y_k, h_k, m_k, s_k):
        """h, m, s at (x, y) on the batches (k, r, t); from nothing if h is None."""
        value = _array(inner(k, r, t, x_k.copy()))
        first = h_k is None
        weight = 1.0 if first else _at(alpha, r, t) * _at(eta, r, t)
        h_k = value if first else (1.0 - weight) * h_k + weight * value
        grad_u, grad_y = outer(k, r, t, h_k.copy(), None if y_k is None else y_k.copy())
        z = _array(inner_vjp(k, r, t, x_k.copy(), _array(grad_u), **extra))
        if first:
            return h_k, z, None if y_k is None else _array(grad_y)
        weight = _at(beta_x, r, t) * _at(eta, r, t)
        m_k = (1.0 - weight) * m_k + weight * z
        if y_k is not None:
            weight = _at(beta_y, r, t) * _at(eta, r, t)
            s_k = (1.0 - weight) * s_k + weight * _array(grad_y)
        return h_k, m_k, s_k

    def step(r, t, x_k, y_k, m_k, s_k):
        x_k = x_k - _at(gamma_x, r, t) * _at(eta, r, t) * m_k
        if y_k is not None:
            y_k = y_k + _at(gamma_y, r, t) * _at(eta, r, t) * s_k
            if project_y is not None:
                y_k = _array(project_y(y_k.copy()))
        return x_k, y_k

    for index, cohort in enumerate(cohorts):
        r = first_round + index
        if len(cohort) == 0:
            raise ValueError(f"round {r} has no clients")

        start = dict.fromkeys(cohort, (h, m, s))
        if h is None and order == "step_first":
            start = {k: estimate(k, r, -1, x, y, None, None, None) for k in cohort}
            if average_initial:
                common = tuple(_mean([start[k][i] for k in cohort]) for i in range(3))
                start = dict.fromkeys(cohort, common)

        sent = []
        for k in cohort:
            x_k, y_k = x, y
            h_k, m_k, s_k = start[k]
            for t in range(steps):
                if order == "step_first":
                    x_k, y_k = step(r, t, x_k, y_k, m_k, s_k)
                    h_k, m_k, s_k = estimate(k, r, t, x_k, y_k, h_k, m_k, s_k)
                else:
                    h_k, m_k, s_k = estimate(k, r, t, x_k, y_k, h_k, m_k, s_k)
                    x_k, y_k = step(r, t, x_k, y_k, m_k, s_k)
            sent.append((x_k, y_k, h_k, m_k, s_k))

        x, y, h, m, s = (_mean([row[i] for row in sent]) for i in range(5))

    return {"x": x, "y": y, "h": h, "m": m, "s": s}
