"""Local-SCGD and Local-SCGDM, slow references in float64 NumPy.

H. Gao, J. Li, H. Huang, "On the Convergence of Local Stochastic Compositional Gradient
Descent with Momentum", ICML 2022, Algorithm 1 (Local-SCGDM); Local-SCGD is the method
without momentum it is compared with.

Problem: min_x mean_k f_k(g_k(x)), every client composing its own functions. One local
step at (r, t), with inner batch xi, outer batch zeta and x the point BEFORE the step:

    u <- (1 - gamma eta) u + gamma eta g_k(x; xi)
    z  = Jg_k(x; xi)^T grad f_k(u; zeta)                    (the new u, the old x)
    m <- (1 - alpha eta) m + alpha eta z                    (Local-SCGDM only)
    x <- x - beta eta m                                     (z for Local-SCGD)

The very first step of the run has no old u and m: u = g_k(x; xi), m = z. After ``steps``
local steps u, m and x are each averaged over the cohort, and these averages are what
every client of the next round starts from.

What had to be decided:

* Value and Jacobian use the same inner batch; the outer batch is another one.
* The weights are the products gamma eta and alpha eta. They must lie in (0, 1]; the
  reference does not clip them.
* u and m are initialised once, in the first local step of the first round, by each
  client of that round on its own batch. The paper has all clients in every round. Under
  partial participation the averages, which the server then keeps, stand for the state of
  all clients, also of those that have not taken part yet.
* beta is kept in the step of Local-SCGD, so that Local-SCGDM with alpha eta = 1 is
  Local-SCGD with the same arguments.
"""

import numpy as np


def _at(value, r, t):
    """A rate or weight is a float, or a callable of the round and the local step."""
    return value(r, t) if callable(value) else value


def _run(x, cohorts, inner, inner_jacobian, outer_gradient, steps, eta, alpha, beta, gamma, u, m, momentum):
    x = np.array(x, dtype=np.float64)
    u = None if u is None else np.array(u, dtype=np.float64)
    m = None if m is None else np.array(m, dtype=np.float64)

    for r, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            raise ValueError(f"round {r} has no clients")

        sent = []
        for k in cohort:
            # Every client starts from the averages of the last synchronisation.
            x_k, u_k, m_k = x, u, m
            for t in range(steps):
                rate = _at(eta, r, t)
                value = np.asarray(inner(k, r, t, x_k.copy()), dtype=np.float64)
                jacobian = np.asarray(inner_jacobian(k, r, t, x_k.copy()), dtype=np.float64)

                # Inner estimate: initialised in the first step of the run.
                if u_k is None:
                    u_k = value.copy()
                else:
                    weight = _at(gamma, r, t) * rate
                    u_k = (1.0 - weight) * u_k + weight * value

                # Compositional gradient at the new u and the old x.
                z = jacobian.T @ np.asarray(outer_gradient(k, r, t, u_k.copy()), dtype=np.float64)

                if momentum:
                    if m_k is None:
                        m_k = z.copy()
                    else:
                        weight = _at(alpha, r, t) * rate
                        m_k = (1.0 - weight) * m_k + weight * z
                    direction = m_k
                else:
                    direction = z

                x_k = x_k - _at(beta, r, t) * rate * direction
            sent.append((x_k, u_k, m_k))

        # Synchronisation: the plain means of x, u and m over the cohort.
        x = sum(item[0] for item in sent) / len(cohort)
        u = sum(item[1] for item in sent) / len(cohort)
        if momentum:
            m = sum(item[2] for item in sent) / len(cohort)

    return x, u, m


def local_scgd(x, cohorts, inner, inner_jacobian, outer_gradient, steps, *, eta, beta, gamma, u=None):
    """Local-SCGD; one round per entry of ``cohorts``; returns ``{'x', 'u'}``.

    ``inner(k, r, t, x)`` [r_dim] and ``inner_jacobian(k, r, t, x)`` [r_dim, d] are on one
    inner batch, ``outer_gradient(k, r, t, u)`` [r_dim] is on the outer batch. ``steps``
    is a positive int; ``eta``, ``beta``, ``gamma`` are floats or callables of (r, t).
    ``u`` is the average to start from, None for the initialisation by the first step.
    """
    x, u, _ = _run(
        x, cohorts, inner, inner_jacobian, outer_gradient, steps, eta, None, beta, gamma, u, None, momentum=False
    )
    return {"x": x, "u": u}


def local_scgdm(x, cohorts, inner, inner_jacobian, outer_gradient, steps, *, eta, alpha, beta, gamma, u=None, m=None):
    """Local-SCGDM; returns ``{'x', 'u', 'm'}``. Arguments as for ``local_scgd``.

    ``alpha`` (momentum weight over eta) is a float or a callable of (r, t) and ``m`` the
    average to start from, None for the initialisation by the first step.
    """
    x, u, m = _run(
        x, cohorts, inner, inner_jacobian, outer_gradient, steps, eta, alpha, beta, gamma, u, m, momentum=True
    )
    return {"x": x, "u": u, "m": m}
