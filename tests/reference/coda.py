"""CoDA, a slow reference in float64 NumPy.

Z. Guo, M. Liu, Z. Yuan, L. Shen, W. Liu, T. Yang, "Communication-Efficient Distributed
Stochastic AUC Maximization with Deep Neural Networks", ICML 2020, Algorithms 1-2, section 5.
Follows descriptions of the method, not the paper's own text.

Problem: min_v max_alpha mean_k F_k(v, alpha), v = (w, a, b) the weights and the two centres,
alpha the dual in the (1 + alpha) convention. The reference knows nothing of that: v and
alpha are arrays and the gradients are given. All N clients in every round.

Stage s = 0, 1, ...: eta_s = eta0 / 3^s, T_s = t0 3^s, v_0 = the result of the stage before.
From v_k = v_0, alpha_k = alpha, T_s local steps (both from the same old point):

    v_k <- argmin_v <g_v, v> + ||v - v_k||^2 / (2 eta_s) + ||v - v_0||^2 / (2 gamma)
         = (gamma v_k + eta_s v_0 - eta_s gamma g_v) / (gamma + eta_s)
    alpha_k <- alpha_k + eta_s g_alpha
    every I = ``steps`` steps v and alpha are averaged over the clients.

End of the stage: v = (1 / T_s) sum_{t=1}^{T_s} mean_k v_k after step t; alpha = mean_k
estimate_k(v), where the estimate is "mean score of negatives - mean score of positives" on a
batch of size m_s.

ROUNDS AND BATCHES. A round is I local steps and one averaging; it is numbered through the
stages by r, and local step t = 0 .. I - 1 uses the batch (k, r, t), stream 0. If T_s is not a
multiple of I the last round of the stage is shorter. ``estimate(k, s, v)`` names its batch by
the stage.

What had to be decided:

* s counts from 0, so the first stage has eta0 and t0. ``factor`` is the 3.
* The time average is over the points after the steps, t = 1 .. T_s; v_0 is not among them.
  The averaging every I steps does not change the mean over the clients, so it does not
  matter on which side of it the point is taken.
* A stage starts every client from the averaged v and from the new alpha; alpha's last value
  is lost. ``estimate=None`` keeps the averaged alpha instead (with ``average_iterates=False``
  the last v instead of the average: what CDMA's "CoDA+" does, there with an explicit prox).
* The alpha step is at the old v (the paper's line updates both from one gradient).
* T_s is rounded to the nearest integer if 3 is replaced by something else.
"""

import numpy as np


def _array(value):
    return np.array(value, dtype=np.float64)


def _mean(rows, clients):
    total = 0.0
    for k in range(clients):
        total = total + rows[k]
    return total / clients


def coda(
    v,
    alpha,
    cohorts,
    gradient,
    steps,
    *,
    clients,
    eta0,
    t0,
    gamma,
    estimate=None,
    factor=3.0,
    average_iterates=True,
    project_alpha=None,
    v_0=None,
    total=None,
    done=0,
    stage=0,
    first_round=0,
):
    """One round per entry of ``cohorts``; returns the server's state.

    ``gradient(k, r, t, v, alpha)`` is the pair (g_v, g_alpha) on the batch (k, r, t);
    ``estimate(k, s, v)`` is client k's alpha for the end of stage s. ``steps`` is I.

    ``{'v', 'alpha', 'v_0', 'total', 'done', 'stage'}`` is returned and can be passed on:
    the averaged v and alpha, the prox centre of the stage, each client's sum of the points
    of this stage so far (dict by client, None at a start), the number of steps done in the
    stage, and the stage's number. After the last round of a stage v is the stage's result,
    v_0 = v, the sums and ``done`` are 0 and the stage is the next one.
    """
    v, alpha = _array(v), _array(alpha)
    v_0 = v.copy() if v_0 is None else _array(v_0)
    total = {k: np.zeros_like(v) if total is None else _array(total[k]) for k in range(clients)}

    for index, cohort in enumerate(cohorts):
        r = first_round + index
        if sorted(cohort) != list(range(clients)):
            raise ValueError(f"round {r}: all {clients} clients must take part, got {list(cohort)}")
        eta = eta0 / factor**stage
        length = round(t0 * factor**stage)

        here = min(steps, length - done)
        v_k, alpha_k = {}, {}
        for k in range(clients):
            v_k[k], alpha_k[k] = v, alpha
            for t in range(here):
                g_v, g_alpha = gradient(k, r, t, v_k[k].copy(), alpha_k[k].copy())
                # The closed form divided by gamma, so that gamma may be infinite.
                v_k[k] = (v_k[k] + (eta / gamma) * v_0 - eta * _array(g_v)) / (1.0 + eta / gamma)
                alpha_k[k] = alpha_k[k] + eta * _array(g_alpha)
                if project_alpha is not None:
                    alpha_k[k] = _array(project_alpha(alpha_k[k]))
                total[k] = total[k] + v_k[k]
        v, alpha = _mean(v_k, clients), _mean(alpha_k, clients)
        done += here

        if done == length:
            if average_iterates:
                v = _mean(total, clients) / length
            if estimate is not None:
                alpha = _mean({k: _array(estimate(k, stage, v.copy())) for k in range(clients)}, clients)
            v_0, done, stage = v.copy(), 0, stage + 1
            total = {k: np.zeros_like(v) for k in range(clients)}

    return {"v": v, "alpha": alpha, "v_0": v_0, "total": total, "done": done, "stage": stage}
