"""LocalMOML, a slow reference in float64 NumPy.

B. Wang, Z. Yuan, Y. Ying, T. Yang, "Memory-Based Optimization Methods for Model-Agnostic
Meta-Learning and Personalized Federated Learning", JMLR 24(145), 2023
(arXiv 2106.04911): the personalised federated method with client sampling.

Problem: min_x mean_k l_k(x - a grad l_k(x)), a = ``inner_lr``. In round r each client of
the cohort receives x and does

    x_k = x;   u = x - a grad l_k(x; B0)                                  (big batch)
    for t = 0 .. steps - 1, on three independent batches:
        u   <- (1 - beta) u + beta (x_k - a grad l_k(x_k; xi))
        v    = grad l_k(u; zeta)
        x_k <- x_k - lr (v - a hess l_k(x_k; xi') v)

and the server averages the x_k of the cohort. u is rebuilt at the start of every round,
so a client keeps nothing between rounds.

Batch names: B0 is (r, t = -1, stream 0); at step t, xi is stream 1, zeta stream 2 and
xi' stream 3.

What had to be decided:

* u is updated also in the first local step, where x_k still is the received x: there the
  big-batch value is mixed with one on xi.
* The Hessian is taken at x_k before the step, the point u was updated at, on a batch of
  its own.
* ``first_order=True`` drops the Hessian term, x_k <- x_k - lr v. The released code does
  that; the paper is second-order. That code also scales one variant's step by beta; the
  paper does not, and neither does this reference.
* beta = 1 forgets the memory and gives Per-FedAvg with three independent batches.
"""

import numpy as np


def _at(value, r, t):
    """A rate or weight is a float, or a callable of the round and the local step."""
    return value(r, t) if callable(value) else value


def local_moml(x, cohorts, gradient, hvp, steps, *, lr, inner_lr, beta, first_order=False):
    """Run one round per entry of ``cohorts`` and return ``{'x', 'u'}``.

    ``gradient(k, r, t, x, stream)`` is grad l_k at x on the batch of that name and
    ``hvp(k, r, t, x, v, stream)`` the Hessian of l_k at x times v; it is not called when
    ``first_order``. ``lr`` and ``beta`` are floats or callables of (r, t), ``inner_lr``
    is a float. The returned ``u`` is a dict with the last u of each client of the last
    round.
    """
    x = np.array(x, dtype=np.float64)
    memory = {}

    for r, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            raise ValueError(f"round {r} has no clients")

        memory = {}
        total = np.zeros_like(x)
        for k in cohort:
            x_k = x.copy()
            # Initialisation of the personalised model on the big batch.
            u = x_k - inner_lr * np.asarray(gradient(k, r, -1, x_k.copy(), 0), dtype=np.float64)
            for t in range(steps):
                # Memory of the personalised model, batch xi.
                personal = x_k - inner_lr * np.asarray(gradient(k, r, t, x_k.copy(), 1), dtype=np.float64)
                weight = _at(beta, r, t)
                u = (1.0 - weight) * u + weight * personal
                # Outer gradient at the memory, batch zeta.
                v = np.asarray(gradient(k, r, t, u.copy(), 2), dtype=np.float64)
                # (I - a Hessian) v, batch xi'.
                direction = v
                if not first_order:
                    product = np.asarray(hvp(k, r, t, x_k.copy(), v.copy(), 3), dtype=np.float64)
                    direction = v - inner_lr * product
                x_k = x_k - _at(lr, r, t) * direction
            total += x_k
            memory[k] = u

        x = total / len(cohort)

    return {"x": x, "u": memory}
