"""FedProx, a slow reference in float64 NumPy.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith,
"Federated Optimization in Heterogeneous Networks", MLSys 2020, Algorithm 2.

Client k approximately minimises the proximal local objective around the received x

    h_k(w; x) = F_k(w) + (mu / 2) ||w - x||^2,
    grad h_k(w; x) = grad F_k(w) + mu (w - x),

and the server averages the results. The paper leaves the local solver open (any
gamma_k-inexact minimiser). Here it is SGD on h_k, as in the paper's experiments:

    x_k = x;  for t = 0 .. K_k - 1:
        x_k <- x_k - lr(r, t) * (g_k(x_k) + weight_decay * x_k + mu * (x_k - x))
    x <- x + server_lr * sum_{k in S_r} p_k (x_k - x),
    p_k = weights[k] / sum_{j in S_r} weights[j].

K_k may differ between clients: a straggler that did less work is kept, not dropped.
The paper samples devices with probability p_k and averages uniformly (weights all
equal); its main experiments sample uniformly and weight by n_k, which is reached
through ``weights``. The point the proximal term pulls to is the server model received
this round, held fixed during the local steps. mu = 0 is FedAvg. server_lr = 1 is the
paper.
"""

import numpy as np


def fedprox(x, cohorts, gradient, steps, *, lr, weights, mu, weight_decay=0.0, server_lr=1.0):
    """Run one round per entry of ``cohorts`` and return ``{'x': server model}``."""
    x = np.array(x, dtype=np.float64)

    # Algorithm 2, loop over rounds; the random set S_t is given by the caller.
    for r, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            raise ValueError(f"round {r} has no clients")

        total = 0.0
        for k in cohort:
            total += float(weights[k])

        mean_change = np.zeros_like(x)
        for k in cohort:
            # The chosen device receives w^t.
            x_k = x.copy()
            # w_k^{t+1}, a gamma_k^t-inexact minimiser of h_k(w; w^t): here K_k SGD
            # steps on h_k.
            for t in range(steps(k)):
                g = np.asarray(gradient(k, r, t, x_k.copy()), dtype=np.float64)
                g = g + weight_decay * x_k
                g = g + mu * (x_k - x)
                x_k = x_k - lr(r, t) * g
            mean_change += (float(weights[k]) / total) * (x_k - x)

        # Aggregation: w^{t+1} = (1 / K) sum_k w_k^{t+1} when the weights are equal.
        x = x + server_lr * mean_change

    return {"x": x}
