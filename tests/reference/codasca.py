"""CODASCA, a slow reference in float64 NumPy.

Z. Yuan, Z. Guo, Y. Xu, Y. Ying, T. Yang, "Federated Deep AUC Maximization for Heterogeneous
Data with a Constant Communication Complexity", ICML 2021. Follows
descriptions of the method and the behaviour of the authors' code (LibAUC examples,
script 06), NOT the paper's box, which has a server rate, control variates made from model
differences and a prox centre per stage (unconfirmed).

Problem: min_v max_alpha mean_k F_k(v, alpha), v = (w, a, b), alpha >= 0 in the margin
convention; here arrays with given gradients. Server: v, alpha, the variates c_v, c_alpha,
the prox centre v_ref; client: c_kv, c_kalpha. Round r is I = ``steps`` local steps from the
server's v, alpha; with g the raw gradients on the batch (k, r, t):

    v_k <- v_k - eta ( clip(g_v, +-clip) - c_kv + c_v + (v_k - v_ref) / gamma + weight_decay v_k )
    alpha_k <- clip( alpha_k + eta ( g_alpha - c_kalpha + c_alpha ), 0, 999 )
    c_kv, c_kalpha <- means of the I raw gradients g_v, g_alpha (not clipped, no prox, no decay)
    c_v, c_alpha <- means of c_kv, c_kalpha over all N clients
    v, alpha <- v + eta_g (mean over the cohort of v_k - v), alpha likewise.

Every T0 = ``decay_every`` iterations: eta <- eta / 3 and v_ref <- average of the iterates
since the last time. With LibAUC's margin form g_alpha = 2 (m + b - a) - 2 alpha.

Batches: (k, r, t), stream 0, t = 0 .. I - 1.

What had to be decided (the behaviour of their code is in brackets):

* Rounds are I steps long, and T0 must be a multiple of I. [The first exchange comes after one
  step, whose gradient is divided by I; the later ones every I steps from there.]
* ``clip`` is a number or an array of bounds, numpy.inf where nothing is clipped, or None.
  [w is clipped at 1, a and b are not.]
* ``dual='old'``: both gradients at the point before the step. [``dual='new'``: g_alpha is taken
  at the new v and the old alpha for the step, and at the new v and the new alpha for the sum
  that becomes c_kalpha.] Both are on the same batch.
* ``reference`` is what is averaged into v_ref: 'iterates', the points after every local step,
  over the cohort and the time, one v_ref for all; 'rounds', the server's v after every round,
  which costs no message; 'local', each client's own points after its steps, a v_ref of its
  own, all clients in every round. ['local', with the point at the beginning added to the sum
  but not to the count.]
* v_ref starts as v. [It starts as noise of size 0.01.]
* eta_g = 1 is plain averaging. [There is none; CDMA's port has one, makes the variates from
  model differences, recentres v_ref to v at every stage, and drops the variate of alpha.]
* Partial participation is not in their code: c_k of the absent stay, c is the mean of all
  N, and the means of v and alpha are over the cohort.
* c = c_k = 0 at the start. ``control=False`` leaves them there.
"""

import numpy as np


def _at(value, r, t):
    """A rate is a float, or a callable of the round and the local step."""
    return value(r, t) if callable(value) else value


def _array(value):
    return np.array(value, dtype=np.float64)


def codasca(
    v,
    alpha,
    cohorts,
    gradient,
    steps,
    *,
    clients,
    eta,
    gamma,
    weight_decay,
    decay_every,
    clip=1.0,
    factor=3.0,
    alpha_range=(0.0, 999.0),
    eta_g=1.0,
    control=True,
    dual="old",
    reference="iterates",
    v_ref=None,
    total=None,
    c_v=None,
    c_alpha=None,
    c_kv=None,
    c_kalpha=None,
    first_round=0,
):
    """One round per entry of ``cohorts``; returns the state of the server and the clients.

    ``gradient(k, r, t, v, alpha)`` is the pair (g_v, g_alpha) on the batch (k, r, t). ``eta``
    is a float or a callable of (r, t) and is divided by ``factor`` once per ``decay_every``
    iterations, counted from round 0.

    ``{'v', 'alpha', 'v_ref', 'total', 'c_v', 'c_alpha', 'c_kv', 'c_kalpha'}`` is returned
    and can be passed on with ``first_round``; c_kv and c_kalpha are dicts by client, v_ref
    and total (the sum of what is averaged, since the last recentring) too if ``reference``
    is 'local', otherwise they are arrays.
    """
    if decay_every < 1 or decay_every % steps != 0:
        raise ValueError(f"decay_every must be a multiple of steps, got {decay_every} and {steps}")
    if dual not in ("old", "new"):
        raise ValueError(f"dual must be 'old' or 'new', got {dual!r}")
    if reference not in ("iterates", "rounds", "local"):
        raise ValueError(f"reference must be 'iterates', 'rounds' or 'local', got {reference!r}")

    v, alpha = _array(v), _array(alpha)
    own = reference == "local"
    everyone = range(clients)
    if own:
        v_ref = {k: _array(v if v_ref is None else v_ref[k]) for k in everyone}
        total = {k: np.zeros_like(v) if total is None else _array(total[k]) for k in everyone}
    else:
        v_ref = v.copy() if v_ref is None else _array(v_ref)
        total = np.zeros_like(v) if total is None else _array(total)
    c_v = np.zeros_like(v) if c_v is None else _array(c_v)
    c_alpha = np.zeros_like(alpha) if c_alpha is None else _array(c_alpha)
    c_kv = {k: np.zeros_like(v) if c_kv is None else _array(c_kv[k]) for k in everyone}
    c_kalpha = {k: np.zeros_like(alpha) if c_kalpha is None else _array(c_kalpha[k]) for k in everyone}

    for index, cohort in enumerate(cohorts):
        r = first_round + index
        if len(cohort) == 0 or len(set(cohort)) != len(cohort):
            raise ValueError(f"round {r}: a cohort is a set of at least one client, got {list(cohort)}")
        if own and sorted(cohort) != list(everyone):
            raise ValueError(f"round {r}: reference='local' needs all {clients} clients, got {list(cohort)}")
        stage = (r * steps) // decay_every

        mean_v, mean_alpha = np.zeros_like(v), np.zeros_like(alpha)
        for k in cohort:
            v_k, alpha_k = v, alpha
            sum_v, sum_alpha = np.zeros_like(v), np.zeros_like(alpha)
            centre = v_ref[k] if own else v_ref
            for t in range(steps):
                rate = _at(eta, r, t) / factor**stage
                g_v, g_alpha = gradient(k, r, t, v_k.copy(), alpha_k.copy())
                g_v, g_alpha = _array(g_v), _array(g_alpha)
                clipped = g_v if clip is None else np.minimum(np.maximum(g_v, -_array(clip)), _array(clip))
                direction = clipped - c_kv[k] + c_v + (v_k - centre) / gamma + weight_decay * v_k
                v_k = v_k - rate * direction
                if dual == "new":
                    g_alpha = _array(gradient(k, r, t, v_k.copy(), alpha_k.copy())[1])
                alpha_k = alpha_k + rate * (g_alpha - c_kalpha[k] + c_alpha)
                if alpha_range is not None:
                    alpha_k = np.minimum(np.maximum(alpha_k, alpha_range[0]), alpha_range[1])
                if dual == "new":
                    g_alpha = _array(gradient(k, r, t, v_k.copy(), alpha_k.copy())[1])
                sum_v = sum_v + g_v
                sum_alpha = sum_alpha + g_alpha
                if reference == "iterates":
                    total = total + v_k / len(cohort)
                elif own:
                    total[k] = total[k] + v_k
            mean_v = mean_v + v_k / len(cohort)
            mean_alpha = mean_alpha + alpha_k / len(cohort)
            if control:
                # Read again only in later rounds: c_v and c_alpha are still the old ones.
                c_kv[k], c_kalpha[k] = sum_v / steps, sum_alpha / steps

        v = v + eta_g * (mean_v - v)
        alpha = alpha + eta_g * (mean_alpha - alpha)
        if control:
            c_v = sum(c_kv[k] for k in everyone) / clients
            c_alpha = sum(c_kalpha[k] for k in everyone) / clients
        if reference == "rounds":
            total = total + v

        # The end of a stage: recentre.
        if ((r + 1) * steps) % decay_every == 0:
            if own:
                v_ref = {k: total[k] / decay_every for k in everyone}
                total = {k: np.zeros_like(v) for k in everyone}
            else:
                v_ref = total / (decay_every // steps if reference == "rounds" else decay_every)
                total = np.zeros_like(v)

    return {
        "v": v,
        "alpha": alpha,
        "v_ref": v_ref,
        "total": total,
        "c_v": c_v,
        "c_alpha": c_alpha,
        "c_kv": c_kv,
        "c_kalpha": c_kalpha,
    }
