"""FedAvg and FedOpt with local adaptivity (LaFedOPT), a slow float64 NumPy reference.

J. Wang, Z. Xu, Z. Garrett, Z. Charles, L. Liu, G. Joshi, "Local Adaptivity in Federated
Learning: Convergence and Consistency", 2021 (arXiv 2106.02305), and the authors' code
(google-research/federated, folder local_adaptivity), which the corrections follow.

A client starts each round with a fresh optimiser, m = 0 and v = v0, and does

    m <- beta1 m + (1 - beta1) g
    v <- v + g^2                                  (adagrad; beta1 = 0)
    v <- beta2 v + (1 - beta2) g^2                (adam)
    v <- v - (1 - beta2) sign(v - g^2) g^2        (yogi)
    P  = 1 / (sqrt(v) + eps),   x_k <- x_k - lr m P.

Meanwhile it follows the weight that the preconditioners gave to the gradients:

    S <- beta1 S + (1 - beta1) P,   C <- C + S    (both start at 0).

Under a constant g and rate, x_k - x = -lr g C exactly if beta1 = 0 or if P is constant,
else only about. The client returns (x_k - x) / C and 1 / C. With means over the cohort
the server's change is

    joint:  Delta = mean((x_k - x) / C_k) / mean(1 / C_k)
    local:  Delta = mean((x_k - x) / C_k)
    none:   Delta = mean(x_k - x),

applied by SGD, x <- x + server_lr Delta, or by Adam as in FedAdam.

What had to be decided:

* C carries no learning rate, also when the rate varies within the round.
* "none" (no correction) is not in the authors' code, whose correction is joint or
  local.
* No bias correction. Their code takes its optimisers from Keras, and Keras's Adam
  corrects the bias of m and v in the step, while P, S and C are made of the uncorrected
  v. Not taken word for word from the paper.
* adagrad ignores ``beta1``, as their code does. Its v0 is 0 here, 0.1 by default in
  Keras. sign(0) = 0.
* Their code guards divisions by zero by answering 0; here eps > 0 and at least one
  local step are required, so that nothing vanishes.
* Server Adam: m_s starts at 0, v_s at tau^2, no bias correction, tau outside the root.
"""

import numpy as np


def lafedopt(
    x,
    cohorts,
    gradient,
    steps,
    *,
    lr,
    weights,
    weight_decay=0.0,
    client_optimizer="adam",
    beta1=0.9,
    beta2=0.999,
    eps=1e-4,
    v0=0.0,
    correction="joint",
    server="sgd",
    server_lr=1.0,
    server_beta1=0.9,
    server_beta2=0.99,
    tau=1e-3,
    m=None,
    v=None,
):
    """Run one round per entry of ``cohorts``; return ``{'x', 'm', 'v'}``.

    ``steps(k, r)`` is the number of local steps of client k in round r. ``m`` and ``v``
    are the state of the server's Adam, 0 and tau^2 unless given; with server SGD they
    come back as they were. Clients keep nothing between rounds.
    """
    if client_optimizer not in ("adagrad", "adam", "yogi"):
        raise ValueError(f"unknown client optimiser {client_optimizer!r}")
    if correction not in ("joint", "local", "none"):
        raise ValueError(f"unknown correction {correction!r}")
    if server not in ("sgd", "adam"):
        raise ValueError(f"unknown server optimiser {server!r}")
    if not eps > 0:
        raise ValueError("eps must be positive")

    # _get_optimizer_momentum_beta: Adagrad has 0.
    b1 = 0.0 if client_optimizer == "adagrad" else beta1

    x = np.array(x, dtype=np.float64)
    m = np.zeros_like(x) if m is None else np.array(m, dtype=np.float64)
    v = np.full_like(x, tau**2) if v is None else np.array(v, dtype=np.float64)

    for r, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            raise ValueError(f"round {r} has no clients")

        total = 0.0
        for k in cohort:
            total += float(weights[k])

        mean_corrected = np.zeros_like(x)
        mean_inverse = np.zeros_like(x)
        mean_change = np.zeros_like(x)
        for k in cohort:
            if steps(k, r) < 1:
                raise ValueError(f"client {k} takes no step in round {r}")
            # Local model and a fresh local optimiser
            x_k = x.copy()
            m_k = np.zeros_like(x)
            v_k = np.zeros_like(x) + v0
            # Local states for the corrections start at 0
            s_k = np.zeros_like(x)
            c_k = np.zeros_like(x)

            for t in range(steps(k, r)):
                # Stochastic gradient, on the L2-regularised loss
                g = np.asarray(gradient(k, r, t, x_k.copy()), dtype=np.float64)
                g = g + weight_decay * x_k
                m_k = b1 * m_k + (1.0 - b1) * g
                if client_optimizer == "adagrad":
                    v_k = v_k + g**2
                elif client_optimizer == "adam":
                    v_k = beta2 * v_k + (1.0 - beta2) * g**2
                else:
                    v_k = v_k - (1.0 - beta2) * np.sign(v_k - g**2) * g**2
                # Preconditioner with the v just updated: 1 / (sqrt(v) + eps)
                p_k = 1.0 / (np.sqrt(v_k) + eps)
                x_k = x_k - lr(r, t) * m_k * p_k
                # Running mean of the preconditioners with the momentum's weights ...
                s_k = b1 * s_k + (1.0 - b1) * p_k
                # ... and its sum over the local steps
                c_k = c_k + s_k

            # The client's answer: weights_delta = (x_k - x) / C, local_cor = 1 / C
            share = float(weights[k]) / total
            mean_corrected += share * (x_k - x) / c_k
            mean_inverse += share / c_k
            mean_change += share * (x_k - x)

        if correction == "joint":
            delta = mean_corrected / mean_inverse
        elif correction == "local":
            delta = mean_corrected
        else:
            delta = mean_change

        if server == "sgd":
            x = x + server_lr * delta
        else:
            m = server_beta1 * m + (1.0 - server_beta1) * delta
            v = server_beta2 * v + (1.0 - server_beta2) * delta**2
            x = x + server_lr * m / (np.sqrt(v) + tau)

    return {"x": x, "m": m, "v": v}
