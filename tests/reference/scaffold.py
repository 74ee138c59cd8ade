"""SCAFFOLD, a slow reference in float64 NumPy.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh,
"SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020,
Algorithm 1.

N clients in all; server state x and c, client state c_k (kept across rounds). In
round r each client k of the cohort S receives (x, c) and does

    y = x;  for t = 0 .. K_k - 1:   y <- y - lr * (g_k(y) - c_k + c)
    option I :  c_k+ = g_k(x)                        (one extra pass at the received x)
    option II:  c_k+ = c_k - c + (x - y) / (K_k * lr)
    sends (y - x, c_k+ - c_k) and stores c_k <- c_k+

and the server does

    x <- x + server_lr * sum_{k in S} p_k (y_k - x)
    c <- c + (1 / N) * sum_{k in S} (c_k+ - c_k).

The paper writes the second line as c <- c + (|S| / N) * mean_{k in S} (c_k+ - c_k).
The divisor is N, never |S|, and this sum is never weighted: it keeps c equal to the
plain mean of all N client variates whenever it starts so. For x the paper has
p_k = 1 / |S|; other weights (normalised over the cohort) are an extension. So is a
number of steps K_k that differs between clients; option II then divides by the
client's own K_k, which makes c_k+ the mean of the K_k gradients client k evaluated.

Weight decay is coupled L2, so g_k(y) means the gradient plus weight_decay * y in every
place it occurs, including g_k(x) of option I. All the y of one round use the c at the
start of that round. Under coupled L2 and a constant rate option II stays exact: it is
the mean of the regularised gradients. A rate that varies within a round, momentum or
clipping would break that, which is why ``lr`` is one number here.
"""

import numpy as np


def scaffold(
    x,
    cohorts,
    gradient,
    steps,
    *,
    lr,
    clients,
    weights,
    weight_decay=0.0,
    server_lr=1.0,
    option="II",
    anchor_gradient=None,
    c=None,
    c_k=None,
):
    """Run one round per entry of ``cohorts``; return ``{'x', 'c', 'c_k'}``.

    ``lr`` is a float and ``clients`` the total number N. ``anchor_gradient(k, r, x)``
    (option I only) is client k's gradient at the received model, without weight decay.
    ``c`` and the entries of the dict ``c_k`` default to zero. The returned ``c_k``
    holds the clients that took part, and those that were passed in.
    """
    if option not in ("I", "II"):
        raise ValueError(f"option must be 'I' or 'II', got {option!r}")
    if option == "I" and anchor_gradient is None:
        raise ValueError("option 'I' needs anchor_gradient")

    x = np.array(x, dtype=np.float64)
    # Algorithm 1: server input x and c, client i's input c_i.
    c = np.zeros_like(x) if c is None else np.array(c, dtype=np.float64)
    variates = {}
    if c_k is not None:
        for k in c_k:
            variates[k] = np.array(c_k[k], dtype=np.float64)

    # Loop over rounds; the sampled set S is given by the caller.
    for r, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            raise ValueError(f"round {r} has no clients")
        if len(set(cohort)) != len(cohort):
            raise ValueError(f"round {r} names a client twice; S is a set")

        total = 0.0
        for k in cohort:
            total += float(weights[k])

        mean_change = np.zeros_like(x)
        sum_of_variate_changes = np.zeros_like(x)
        for k in cohort:
            if k not in variates:
                variates[k] = np.zeros_like(x)
            old = variates[k]

            # Local model: y_i <- x.
            y = x.copy()
            local_steps = steps(k)
            for t in range(local_steps):
                # Mini-batch gradient g_i(y_i), of the L2-regularised loss.
                g = np.asarray(gradient(k, r, t, y.copy()), dtype=np.float64)
                g = g + weight_decay * y
                # y_i <- y_i - eta_l (g_i(y_i) - c_i + c)
                y = y - lr * (g - old + c)

            # c_i+ <- (i) g_i(x), or (ii) c_i - c + (x - y_i) / (K eta_l)
            if option == "I":
                new = np.asarray(anchor_gradient(k, r, x.copy()), dtype=np.float64)
                new = new + weight_decay * x
            else:
                if local_steps < 1:
                    raise ValueError(f"option 'II' needs a local step of client {k}")
                new = old - c + (x - y) / (local_steps * lr)

            # Message to the server: (Delta y_i, Delta c_i) = (y_i - x, c_i+ - c_i).
            mean_change += (float(weights[k]) / total) * (y - x)
            sum_of_variate_changes += new - old
            # c_i <- c_i+
            variates[k] = new

        # x <- x + eta_g Delta x  and  c <- c + (|S| / N) Delta c
        x = x + server_lr * mean_change
        c = c + sum_of_variate_changes / clients

    return {"x": x, "c": c, "c_k": variates}
