"""DRFA, a slow reference in float64 NumPy, and the projection onto the simplex.

Y. Deng, M. M. Kamani, M. Mahdavi, "Distributionally Robust Federated Averaging",
NeurIPS 2020 (arXiv 2102.12660), Algorithm 1.

Problem: min_x max_{lam in simplex} sum_k lam_k F_k(x), K = len(lam) clients. Round r:

    D       = m clients drawn with probabilities lam, with replacement
    t'      drawn uniformly from 1 .. tau, ONE number for all clients
    each k in D:  x_k = x; tau steps x_k <- x_k - lr grad F_k(x_k); it sends the model
                  after all tau steps and the snapshot after t' steps
    x   <- (1/m) sum over D of x_k^(tau),     x~ = (1/m) sum over D of x_k^(t')
    U       = clients drawn uniformly, without replacement
    v_k     = (K / |U|) F_k(x~) for k in U, else 0
    lam <- Pi_simplex( lam + tau lr_lambda v ).

All draws are made by the caller: D, t' and U are arguments.

What had to be decided:

* The means over D are uniform and count a client as often as it was drawn (lam enters
  through the draw only, never as a weight). Equal names mean equal batches, so a client
  drawn twice contributes the same two models twice; it need not train twice.
* t' counts completed steps: t' = tau makes the snapshot the new model, and the received
  model (t' = 0) is not among the choices.
* K / |U| makes v an unbiased estimate of the vector of losses, whatever the size of D.
  The paper has |U| = |D| = m. U is a set, a repeated client is refused.
* The factor tau in the step of lam stands for the tau steps that one snapshot represents.
* The old lam is that of the draw of D; the losses are minibatch losses at x~, after the
  local steps.
"""

import numpy as np


def _at(value, *name):
    """A rate is a float, or a callable of its name."""
    return value(*name) if callable(value) else value


def project_simplex(v):
    """The exact Euclidean projection of v onto {p : p >= 0, sum p = 1}, by sorting.

    The projection is max(v - theta, 0). With v_(1) >= v_(2) >= ..., the support has the
    largest size j for which v_(j) > (v_(1) + ... + v_(j) - 1) / j, and that right-hand
    side is theta.
    """
    v = np.array(v, dtype=np.float64)
    descending = sorted((float(entry) for entry in v), reverse=True)
    total = 0.0
    theta = 0.0
    for j, entry in enumerate(descending, start=1):
        total += entry
        candidate = (total - 1.0) / j
        if entry > candidate:
            theta = candidate
    return np.array([max(float(entry) - theta, 0.0) for entry in v])


def drfa(x, lam, selections, snapshot_steps, loss_selections, gradient, loss, steps, *, lr, lr_lambda):
    """Run one round per entry of ``selections`` and return ``{'x', 'lam', 'snapshot'}``.

    ``selections[r]`` is D (repetitions allowed), ``snapshot_steps[r]`` is t' in
    1 .. ``steps`` and ``loss_selections[r]`` is U. ``gradient(k, r, t, x)`` is client k's
    gradient at local step t, ``loss(k, r, x)`` its loss. ``steps`` is the int tau, ``lr``
    a float or a callable of (r, t), ``lr_lambda`` a float or a callable of r.
    """
    x = np.array(x, dtype=np.float64)
    lam = np.array(lam, dtype=np.float64)
    if not len(selections) == len(snapshot_steps) == len(loss_selections):
        raise ValueError("selections, snapshot_steps and loss_selections must have one entry per round")
    snapshot = x.copy()

    for r, selection in enumerate(selections):
        if len(selection) == 0 or len(loss_selections[r]) == 0:
            raise ValueError(f"round {r} has no clients")
        if not 1 <= snapshot_steps[r] <= steps:
            raise ValueError(f"round {r}: snapshot step {snapshot_steps[r]} is not in 1..{steps}")
        if len(set(loss_selections[r])) != len(loss_selections[r]):
            raise ValueError(f"round {r} names a client twice among the losses; U is a set")

        last = np.zeros_like(x)
        snapshot = np.zeros_like(x)
        for k in selection:
            x_k = x.copy()
            for t in range(steps):
                x_k = x_k - _at(lr, r, t) * np.asarray(gradient(k, r, t, x_k.copy()), dtype=np.float64)
                # After t + 1 steps.
                if t + 1 == snapshot_steps[r]:
                    snapshot += x_k / len(selection)
            last += x_k / len(selection)
        x = last

        # Losses at the averaged snapshot.
        v = np.zeros_like(lam)
        for k in loss_selections[r]:
            v[k] = (len(lam) / len(loss_selections[r])) * float(loss(k, r, snapshot.copy()))
        lam = project_simplex(lam + steps * _at(lr_lambda, r) * v)

    return {"x": x, "lam": lam, "snapshot": snapshot}
