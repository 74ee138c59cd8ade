"""FedAvg, a slow reference in float64 NumPy.

B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Aguera y Arcas,
"Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017, Algorithm 1 (FederatedAveraging).

Round r, cohort S_r, server model x:

    ClientUpdate(k, x):  x_k = x
                         for t = 0 .. K_k - 1:
                             x_k <- x_k - lr(r, t) * (g_k(x_k) + weight_decay * x_k)
    server:              x <- x + server_lr * sum_{k in S_r} p_k (x_k - x),
                         p_k = weights[k] / sum_{j in S_r} weights[j].

With server_lr = 1 the server line is the paper's x <- sum_k p_k x_k with
p_k = n_k / n. The conference print sums over all K clients with n = n_1 + ... + n_K,
which is only defined when all take part; here the sum and n run over the cohort, so
that the x_k enter a convex combination under partial participation too. A server step
size other than 1 is not in the paper: it is FedOpt (Reddi et al., ICLR 2021,
Algorithm 1) with plain SGD as the server optimiser. Weight decay is coupled L2: the
gradient of (weight_decay / 2) ||x||^2, taken at the local model, is added to each local
gradient.
"""

import numpy as np


def fedavg(x, cohorts, gradient, steps, *, lr, weights, weight_decay=0.0, server_lr=1.0):
    """Run one round per entry of ``cohorts`` and return ``{'x': server model}``.

    ``gradient(k, r, t, x)`` is client k's stochastic gradient in round r at local
    step t, ``steps(k)`` its number of local steps, ``lr(r, t)`` the local rate and
    ``weights[k]`` its aggregation weight before normalisation over the cohort.
    """
    x = np.array(x, dtype=np.float64)

    # Algorithm 1, server loop over rounds; the random set S_t is given by the caller.
    for r, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            raise ValueError(f"round {r} has no clients")

        # sum_{k in S_t} n_k
        total = 0.0
        for k in cohort:
            total += float(weights[k])

        mean_change = np.zeros_like(x)
        for k in cohort:
            # ClientUpdate(k, w): start from the received model.
            x_k = x.copy()
            for t in range(steps(k)):
                # w <- w - eta grad l(w; b), on the L2-regularised loss.
                g = np.asarray(gradient(k, r, t, x_k.copy()), dtype=np.float64)
                g = g + weight_decay * x_k
                x_k = x_k - lr(r, t) * g
            # This client's share of sum_k (n_k / n) w_k, as a change from x.
            mean_change += (float(weights[k]) / total) * (x_k - x)

        # server_lr = 1: w_{t+1} <- sum_k (n_k / n) w_k.
        x = x + server_lr * mean_change

    return {"x": x}
