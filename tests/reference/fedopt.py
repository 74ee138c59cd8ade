"""FedAdam, FedYogi and FedAdagrad, slow references in float64 NumPy.

S. J. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konecny, S. Kumar,
H. B. McMahan, "Adaptive Federated Optimization", ICLR 2021, Algorithm 2.

Clients run SGD as in FedAvg. With Delta_k = x_k - x and the cohort mean
Delta = sum_{k in S_r} p_k Delta_k, p_k = weights[k] / sum_{j in S_r} weights[j],
the server does, elementwise and in this order,

    m <- beta1 m + (1 - beta1) Delta
    v <- v + Delta^2                                       (FedAdagrad)
    v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)         (FedYogi)
    v <- beta2 v + (1 - beta2) Delta^2                     (FedAdam)
    x <- x + server_lr * m / (sqrt(v) + tau).

v is updated with Delta, not with m, and x uses the new m and the new v. tau is outside
the square root. There is no bias correction of m or v. In the paper v starts at or
above tau^2 and m at 0; here v starts at tau^2 exactly unless given. sign(0) = 0. In
Algorithm 2 the line for m is common to the three methods, so beta1 is accepted for
FedAdagrad as well; it is usually 0 there, which is the default. Algorithm 2 takes the
uniform mean of the Delta_k; other weights, such as numbers of examples, come in through
``weights``. Some other descriptions square m instead of Delta in v: not done here.

The numbering of rounds that ``gradient`` and ``lr`` see starts at 0 in every call,
also when m and v of an earlier call are handed in.
"""

import numpy as np


def _mean_of_client_changes(x, r, cohort, gradient, steps, lr, weights, weight_decay):
    """Delta of round r: Algorithm 2, the client loop and the mean of the Delta_i."""
    if len(cohort) == 0:
        raise ValueError(f"round {r} has no clients")

    total = 0.0
    for k in cohort:
        total += float(weights[k])

    delta = np.zeros_like(x)
    for k in cohort:
        # x_{i,0}^t = x_t
        x_k = x.copy()
        for t in range(steps(k)):
            # x_{i,k+1}^t = x_{i,k}^t - eta_l g_{i,k}^t, on the L2-regularised loss
            g = np.asarray(gradient(k, r, t, x_k.copy()), dtype=np.float64)
            g = g + weight_decay * x_k
            x_k = x_k - lr(r, t) * g
        # Delta_i^t = x_{i,K}^t - x_t, and its share of Delta_t
        delta += (float(weights[k]) / total) * (x_k - x)
    return delta


def fedadam(
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
    tau,
    m=None,
    v=None,
):
    """Run one FedAdam round per entry of ``cohorts``; return ``{'x', 'm', 'v'}``."""
    x = np.array(x, dtype=np.float64)
    m = np.zeros_like(x) if m is None else np.array(m, dtype=np.float64)
    v = np.full_like(x, tau**2) if v is None else np.array(v, dtype=np.float64)

    for r, cohort in enumerate(cohorts):
        delta = _mean_of_client_changes(x, r, cohort, gradient, steps, lr, weights, weight_decay)
        # m_t = beta_1 m_{t-1} + (1 - beta_1) Delta_t
        m = beta1 * m + (1.0 - beta1) * delta
        # v_t = beta_2 v_{t-1} + (1 - beta_2) Delta_t^2  (FedAdam)
        v = beta2 * v + (1.0 - beta2) * delta**2
        # x_{t+1} = x_t + eta m_t / (sqrt(v_t) + tau)
        x = x + server_lr * m / (np.sqrt(v) + tau)

    return {"x": x, "m": m, "v": v}


def fedyogi(
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
    tau,
    m=None,
    v=None,
):
    """Run one FedYogi round per entry of ``cohorts``; return ``{'x', 'm', 'v'}``."""
    x = np.array(x, dtype=np.float64)
    m = np.zeros_like(x) if m is None else np.array(m, dtype=np.float64)
    v = np.full_like(x, tau**2) if v is None else np.array(v, dtype=np.float64)

    for r, cohort in enumerate(cohorts):
        delta = _mean_of_client_changes(x, r, cohort, gradient, steps, lr, weights, weight_decay)
        # m_t = beta_1 m_{t-1} + (1 - beta_1) Delta_t
        m = beta1 * m + (1.0 - beta1) * delta
        # v_t = v_{t-1} - (1 - beta_2) Delta_t^2 sign(v_{t-1} - Delta_t^2)  (FedYogi)
        v = v - (1.0 - beta2) * delta**2 * np.sign(v - delta**2)
        # x_{t+1} = x_t + eta m_t / (sqrt(v_t) + tau)
        x = x + server_lr * m / (np.sqrt(v) + tau)

    return {"x": x, "m": m, "v": v}


def fedadagrad(
    x,
    cohorts,
    gradient,
    steps,
    *,
    lr,
    weights,
    weight_decay=0.0,
    server_lr,
    beta1=0.0,
    tau,
    m=None,
    v=None,
):
    """Run one FedAdagrad round per entry of ``cohorts``; return ``{'x', 'm', 'v'}``."""
    x = np.array(x, dtype=np.float64)
    m = np.zeros_like(x) if m is None else np.array(m, dtype=np.float64)
    v = np.full_like(x, tau**2) if v is None else np.array(v, dtype=np.float64)

    for r, cohort in enumerate(cohorts):
        delta = _mean_of_client_changes(x, r, cohort, gradient, steps, lr, weights, weight_decay)
        # m_t = beta_1 m_{t-1} + (1 - beta_1) Delta_t
        m = beta1 * m + (1.0 - beta1) * delta
        # v_t = v_{t-1} + Delta_t^2  (FedAdagrad)
        v = v + delta**2
        # x_{t+1} = x_t + eta m_t / (sqrt(v_t) + tau)
        x = x + server_lr * m / (np.sqrt(v) + tau)

    return {"x": x, "m": m, "v": v}
