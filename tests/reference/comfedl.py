"""ComFedL, a slow reference in float64 NumPy.

F. Huang, J. Li, H. Huang, "Compositional Federated Learning: Applications in
Distributionally Robust Averaging and Meta Learning", arXiv 2106.11264, Algorithm 1.

The problem has the mean outside (each client composes its own functions),
min_x mean_k f_k(g_k(x)). The paper calls the inner function f, the outer one g and the
variable w; here, as in the other references, g is inner, f is outer, x the variable.

Round r (the paper's s), cohort S_r, server model x, local steps t = 0 .. steps - 1:

    lines 6-9      x_k = x;  u = g_k(x_k; B),  J = Jacobian of g_k(.; B) at x_k
    lines 13-15    z = J^T grad f_k(u; B~)                              (eq. 11)
    line 16        x_k <- x_k - lr z
    line 20        x <- mean over S_r of x_k.

What had to be decided:

* Value and Jacobian use the same inner batch B (line 9 names one batch for both); the
  outer batch B~ is another one.
* Lines 10-11 (deterministic outer function) and lines 12-15 (stochastic outer function)
  are alternatives, not consecutive steps. Both are covered: a deterministic outer
  function is an ``outer_gradient`` that ignores its batch name.
* The product is printed (grad g)^T (grad f), which has the shape of a row. It is the
  chain rule; the direction taken here is the column J^T v.
* The text points to "step 14" for the descent step; it is line 16.
* The mean of line 20 is uniform over the cohort, and no client keeps any state.
"""

import numpy as np


def _at(value, r, t):
    """A rate is a float, or a callable of the round and the local step."""
    return value(r, t) if callable(value) else value


def comfedl(x, cohorts, inner, inner_jacobian, outer_gradient, steps, *, lr):
    """Run one round per entry of ``cohorts`` and return ``{'x': server model}``.

    ``inner(k, r, t, x)`` is g_k at x, shape [r_dim], and ``inner_jacobian(k, r, t, x)``
    its Jacobian [r_dim, d] on the same batch; ``outer_gradient(k, r, t, u)`` is
    grad f_k at u, shape [r_dim], on the outer batch of that step. ``steps`` is an int
    and ``lr`` a float or a callable ``lr(r, t)``.
    """
    x = np.array(x, dtype=np.float64)

    # Lines 2-4: the sampled set C_s is given by the caller.
    for r, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            raise ValueError(f"round {r} has no clients")

        total = np.zeros_like(x)
        for k in cohort:
            # Line 6: w_{s,0} = wbar_s
            x_k = x.copy()
            for t in range(steps):
                # Lines 8-9: value and Jacobian on one batch.
                value = np.asarray(inner(k, r, t, x_k.copy()), dtype=np.float64)
                jacobian = np.asarray(inner_jacobian(k, r, t, x_k.copy()), dtype=np.float64)
                # Lines 13-14 (line 11 when the outer function is deterministic).
                outer = np.asarray(outer_gradient(k, r, t, value), dtype=np.float64)
                # Lines 15-16.
                direction = jacobian.T @ outer
                x_k = x_k - _at(lr, r, t) * direction
            total += x_k

        # Line 20: wbar_{s+1} = (1 / m) sum_i w_{s,tau}^i
        x = total / len(cohort)

    return {"x": x}
