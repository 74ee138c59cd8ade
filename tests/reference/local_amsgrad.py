"""Local AMSGrad, a slow reference in float64 NumPy.

X. Chen, X. Li, P. Li, "Toward Communication Efficient Adaptive Gradient Method", FODS
2020 (arXiv 2109.05109), the last algorithm: AMSGrad with local steps and a common second
moment that changes only at synchronisations.

Client i keeps m_i and v_i of its own for the whole training; vhat is common. Every
iteration, elementwise,

    m_i <- beta1 m_i + (1 - beta1) g_i
    v_i <- beta2 v_i + (1 - beta2) g_i^2.

In an iteration that does not synchronise, vhat stays and

    x_i <- x_i - lr m_i / sqrt(vhat).

In the last iteration of a round, the new vhat is used at once:

    vhat <- max(mean_i v_i, vhat)
    x_i  <- mean_j (x_j - lr m_j / sqrt(vhat)).

What had to be decided:

* Not taken word for word from the published listing; the comments state the algorithm
  in its notation but are not quotations.
* vhat starts at eps, not at eps^2. m_i starts at 0, and v_i at ``v0`` = 0: with v_i below
  vhat at the start, vhat = eps until the mean of the v_i exceeds it.
* m_i and v_i are neither sent back to clients nor averaged over them.
* The paper has all clients in every iteration, all with the same period. Here a cohort
  takes part in a round: means run over the cohort, with its weights, and the m_i and v_i
  of the others stay as they were, however old. A client's number of local steps may be
  its own; its last step is the synchronising one.
* lr of the synchronising step is lr(r, steps(k, r) - 1), the client's own.
"""

import numpy as np


def local_amsgrad(
    x,
    cohorts,
    gradient,
    steps,
    *,
    lr,
    weights,
    weight_decay=0.0,
    beta1,
    beta2,
    eps,
    v0=0.0,
    m=None,
    v=None,
    vhat=None,
):
    """Run one round per entry of ``cohorts``; return ``{'x', 'vhat', 'm', 'v'}``.

    ``steps(k, r)`` is the number of local steps of client k in round r, at least 1. ``m``
    and ``v`` are dicts, client -> vector, with the state of some or all clients; the
    others start at 0 and ``v0``. The returned dicts hold the clients given and those met.
    ``vhat`` is eps unless given.
    """
    x = np.array(x, dtype=np.float64)
    vhat = np.full_like(x, eps) if vhat is None else np.array(vhat, dtype=np.float64)
    m = {} if m is None else {k: np.array(value, dtype=np.float64) for k, value in m.items()}
    v = {} if v is None else {k: np.array(value, dtype=np.float64) for k, value in v.items()}

    for r, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            raise ValueError(f"round {r} has no clients")

        total = 0.0
        for k in cohort:
            total += float(weights[k])

        # Until the synchronisation: all local steps but the update of x in the last one
        x_local = {}
        for k in cohort:
            if steps(k, r) < 1:
                raise ValueError(f"client {k} takes no step in round {r}")
            if k not in m:
                m[k] = np.zeros_like(x)
            if k not in v:
                v[k] = np.zeros_like(x) + v0
            x_k = x.copy()
            for t in range(steps(k, r)):
                # g_{t,i}, at x_{t,i}, on the L2-regularised loss
                g = np.asarray(gradient(k, r, t, x_k.copy()), dtype=np.float64)
                g = g + weight_decay * x_k
                # m_{t,i} = beta_1 m_{t-1,i} + (1 - beta_1) g_{t,i}
                m[k] = beta1 * m[k] + (1.0 - beta1) * g
                # v_{t,i} = beta_2 v_{t-1,i} + (1 - beta_2) g_{t,i}^2
                v[k] = beta2 * v[k] + (1.0 - beta2) * g**2
                if t < steps(k, r) - 1:
                    # vhat_t = vhat_{t-1};  x_{t+1,i} = x_{t,i} - alpha m_{t,i} / sqrt(vhat_t)
                    x_k = x_k - lr(r, t) * m[k] / np.sqrt(vhat)
            x_local[k] = x_k

        # vhat_t = max(mean_i v_{t,i}, vhat_{t-1})
        v_mean = np.zeros_like(x)
        for k in cohort:
            v_mean += (float(weights[k]) / total) * v[k]
        vhat = np.maximum(v_mean, vhat)

        # x_{t+1,i} = mean_j (x_{t,j} - alpha m_{t,j} / sqrt(vhat_t)), with the new vhat_t
        x_mean = np.zeros_like(x)
        for k in cohort:
            last = lr(r, steps(k, r) - 1)
            x_mean += (float(weights[k]) / total) * (x_local[k] - last * m[k] / np.sqrt(vhat))
        x = x_mean

    return {"x": x, "vhat": vhat, "m": m, "v": v}
