"""q-FedAvg, a slow reference in float64 NumPy.

T. Li, M. Sanjabi, A. Beirami, V. Smith, "Fair Resource Allocation in Federated
Learning", ICLR 2020, Algorithm 2 (q-FedAvg), for the objective

    min_x  sum_k (p_k / (q + 1)) F_k(x)^{q + 1}.

Round r, cohort S (sampled with probabilities p_k, hence no weights below), L = 1 / lr:

    F_k     = full local loss at the RECEIVED model x
    x_k     = K_k local SGD steps of size lr from x, on F_k (not on F_k^{q+1})
    dw_k    = L (x - x_k)
    Delta_k = F_k^q dw_k
    h_k     = q F_k^{q-1} ||dw_k||^2 + L F_k^q
    x      <- x - sum_{k in S} Delta_k / sum_{k in S} h_k.

||dw_k||^2 is the squared norm of the whole, unscaled dw_k. q = 0 is FedAvg with equal
weights over the cohort.

Departure from the paper: F_k is replaced by F_k + 1e-10 wherever it is raised to a
power, as in the authors' code, so that a client with zero loss is defined for q < 1.
Weight decay is coupled L2 in the local steps only. ``loss`` is used as given: whoever
wants F_k to contain the penalty (weight_decay / 2) ||x||^2 puts it into ``loss``.
"""

import numpy as np

LOSS_OFFSET = 1e-10


def qfedavg(x, cohorts, gradient, steps, *, lr, q, loss, weight_decay=0.0):
    """Run one round per entry of ``cohorts`` and return ``{'x': server model}``.

    ``lr`` is a float, ``loss(k, x)`` the full loss of client k at x.
    """
    x = np.array(x, dtype=np.float64)
    lipschitz = 1.0 / lr  # the paper's L

    for r, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            raise ValueError(f"round {r} has no clients")

        sum_delta = np.zeros_like(x)
        sum_h = 0.0
        for k in cohort:
            f_k = float(loss(k, x.copy())) + LOSS_OFFSET

            # wbar_k^{t+1}: local SGD on F_k with step size eta, started at w^t.
            x_k = x.copy()
            for t in range(steps(k)):
                g = np.asarray(gradient(k, r, t, x_k.copy()), dtype=np.float64)
                g = g + weight_decay * x_k
                x_k = x_k - lr * g

            # Delta w_k^t = L (w^t - wbar_k^{t+1})
            dw_k = lipschitz * (x - x_k)
            # Delta_k^t = F_k^q(w^t) Delta w_k^t
            sum_delta += f_k**q * dw_k
            # h_k^t = q F_k^{q-1}(w^t) ||Delta w_k^t||^2 + L F_k^q(w^t)
            squared_norm = 0.0
            for entry in dw_k:
                squared_norm += float(entry) ** 2
            sum_h += q * f_k ** (q - 1.0) * squared_norm + lipschitz * f_k**q

        # w^{t+1} = w^t - sum_k Delta_k^t / sum_k h_k^t
        x = x - sum_delta / sum_h

    return {"x": x}
