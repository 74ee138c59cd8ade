"""Local AdaAlter, a slow reference in float64 NumPy.

C. Xie, O. Koyejo, I. Gupta, H. Lin, "Local AdaAlter: Communication-Efficient Stochastic
Gradient Descent with Adaptive Learning Rates", 2019 (arXiv 1911.09030), the algorithm
with local steps.

The server holds x and B^2, which starts at b0^2. In a round client i starts from x and
A_i^2 = B^2 and takes the steps t' = 1 .. H, elementwise,

    x_i   <- x_i - lr g_i / sqrt(B^2 + t' eps^2)
    A_i^2 <- A_i^2 + g_i^2,

B^2 staying as it is; then x = mean_i x_i and B^2 = mean_i A_i^2.

What had to be decided:

* Not taken word for word from the published listing; the comments state the algorithm
  in its notation but are not quotations.
* AdaAlter: the step is taken before its own squared gradient is added, t' eps^2 standing
  in for the t' squared gradients that are not yet in B^2. t' starts at 1 in each round.
* The authors' code (xcgoner/AISTATS2020-AdaAlter-GluonNLP) confirms the step with the
  old accumulator, the accumulation aside and the two means, but divides by
  sqrt(B^2 + eps) without t' and without squaring eps (its eps is 1), and starts B^2 at 0.
  Not done here. It also begins with a fully synchronous warm-up.
* b0 = eps = 1 by default.
* Means over the cohort with its weights; the number of steps may be a client's own.
"""

import numpy as np


def local_adaalter(
    x,
    cohorts,
    gradient,
    steps,
    *,
    lr,
    weights,
    weight_decay=0.0,
    eps=1.0,
    b0=1.0,
    b2=None,
):
    """Run one round per entry of ``cohorts``; return ``{'x', 'b2'}``, b2 being B^2.

    ``steps(k, r)`` is the number of local steps of client k in round r. ``b2`` is the
    initial B^2, b0^2 unless given. Clients keep nothing between rounds.
    """
    x = np.array(x, dtype=np.float64)
    # B_0^2 = b_0^2
    b2 = np.full_like(x, b0**2) if b2 is None else np.array(b2, dtype=np.float64)

    for r, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            raise ValueError(f"round {r} has no clients")

        total = 0.0
        for k in cohort:
            total += float(weights[k])

        x_mean = np.zeros_like(x)
        a2_mean = np.zeros_like(x)
        for k in cohort:
            # The client starts the round with x and A_i^2 = B^2
            x_k = x.copy()
            a2_k = b2.copy()
            for t in range(steps(k, r)):
                # t' = mod(t - 1, H) + 1 in the paper's count of iterations
                t_prime = t + 1
                # G_{i,t}, on the L2-regularised loss
                g = np.asarray(gradient(k, r, t, x_k.copy()), dtype=np.float64)
                g = g + weight_decay * x_k
                # x_i <- x_i - eta G / sqrt(B^2 + t' eps^2), B^2 of the round's start
                x_k = x_k - lr(r, t) * g / np.sqrt(b2 + t_prime * eps**2)
                # A_i^2 <- A_i^2 + G o G
                a2_k = a2_k + g**2
            p = float(weights[k]) / total
            x_mean += p * x_k
            a2_mean += p * a2_k

        # Synchronisation: x = mean_i x_i, B^2 = mean_i A_i^2
        x = x_mean
        b2 = a2_mean

    return {"x": x, "b2": b2}
