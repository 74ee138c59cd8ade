"""FedAMS, a slow reference in float64 NumPy.

Y. Wang, L. Lin, J. Chen, "Communication-Efficient Adaptive Federated Learning", ICML
2022, Algorithm 1 (FedAMS), Option 1 and Option 2.

Clients run SGD as in FedAvg. With Delta the cohort mean of x_k - x, the server does

    m    <- beta1 m + (1 - beta1) Delta
    v    <- beta2 v + (1 - beta2) Delta^2
    Option 1:  vhat <- max(vhat, v, eps),   x <- x + server_lr m / sqrt(vhat)
    Option 2:  vhat <- max(vhat, v),        x <- x + server_lr m / (sqrt(vhat) + eps)

with m_0 = v_0 = vhat_0 = 0.

What had to be decided:

* In Option 1 eps bounds vhat itself, so that the denominator is at least sqrt(eps), not
  eps; in Option 2 eps is added to the root. The two eps are not comparable.
* Not taken word for word from the published listing; the comments state the algorithm
  in its notation but are not quotations.
* No bias correction. The authors' code (jinghuichen/FedCAMS) has one: it divides m by
  1 - beta1^t and the root of vhat by sqrt(1 - beta2^t), with the maximum taken before the
  correction; it starts vhat at a constant ``max_init`` and runs with eps = 0, which is how
  Option 1 appears there. Not done here.
* ``maximum=False`` drops the memory of vhat: v takes its place in Option 2 and max(v, eps)
  in Option 1. Option 2 is then FedAdam. vhat is still recorded, as what was divided by.
* Algorithm 1 takes the uniform mean of the changes; other weights come in through
  ``weights``.
"""

import numpy as np


def fedams(
    x,
    cohorts,
    gradient,
    steps,
    *,
    lr,
    weights,
    weight_decay=0.0,
    server_lr,
    beta1,
    beta2,
    eps,
    option=1,
    maximum=True,
    m=None,
    v=None,
    vhat=None,
):
    """Run one FedAMS round per entry of ``cohorts``; return ``{'x', 'm', 'v', 'vhat'}``.

    ``steps(k, r)`` is the number of local steps of client k in round r; ``option`` is
    the number of the option. ``m``, ``v`` and ``vhat`` are initial values, 0 unless given.
    """
    if option not in (1, 2):
        raise ValueError(f"unknown option {option!r}")

    x = np.array(x, dtype=np.float64)
    # Initialisation: m_0 = 0, v_0 = 0, vhat_0 = 0
    m = np.zeros_like(x) if m is None else np.array(m, dtype=np.float64)
    v = np.zeros_like(x) if v is None else np.array(v, dtype=np.float64)
    vhat = np.zeros_like(x) if vhat is None else np.array(vhat, dtype=np.float64)

    for r, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            raise ValueError(f"round {r} has no clients")

        total = 0.0
        for k in cohort:
            total += float(weights[k])

        delta = np.zeros_like(x)
        for k in cohort:
            # x_{t,0}^i = x_t
            x_k = x.copy()
            for t in range(steps(k, r)):
                # x_{t,k+1}^i = x_{t,k}^i - eta_l g_{t,k}^i, on the L2-regularised loss
                g = np.asarray(gradient(k, r, t, x_k.copy()), dtype=np.float64)
                g = g + weight_decay * x_k
                x_k = x_k - lr(r, t) * g
            # Delta_t^i = x_{t,K}^i - x_t, and its share of Delta_t
            delta += (float(weights[k]) / total) * (x_k - x)

        # m_t = beta_1 m_{t-1} + (1 - beta_1) Delta_t
        m = beta1 * m + (1.0 - beta1) * delta
        # v_t = beta_2 v_{t-1} + (1 - beta_2) Delta_t^2
        v = beta2 * v + (1.0 - beta2) * delta**2
        if not maximum:
            vhat = v.copy()
        if option == 1:
            # Option 1: vhat_t = max(vhat_{t-1}, v_t, eps)
            vhat = np.maximum(np.maximum(vhat, v), eps)
            # x_{t+1} = x_t + eta m_t / sqrt(vhat_t)
            x = x + server_lr * m / np.sqrt(vhat)
        else:
            # Option 2: vhat_t = max(vhat_{t-1}, v_t)
            vhat = np.maximum(vhat, v)
            # x_{t+1} = x_t + eta m_t / (sqrt(vhat_t) + eps)
            x = x + server_lr * m / (np.sqrt(vhat) + eps)

    return {"x": x, "m": m, "v": v, "vhat": vhat}
