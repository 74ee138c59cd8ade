"""FedLALR, a slow reference in float64 NumPy.

"FedLALR: Client-Specific Adaptive Learning Rates Achieve Linear Speedup for Non-IID
Data" (H. Sun, L. Shen, S. Chen, J. Sun, J. Li, G. Sun, D. Tao; arXiv 2309.09719),
Algorithm 1; Corollary 2 with Algorithm 2 (restart momentum); Corollary 3 with Algorithm 3
(maximum of the second moments); the adaptive interval of the experiments.

Every client runs AMSGrad without bias correction. Round t, client i, local steps
k = 1 .. K_t, all products and roots elementwise:

    x_i = x_t;   m_i = m_{t-1};   v_i = vhat_i = vhat_{t-1}
    m_i    <- beta1 m_i + (1 - beta1) g
    v_i    <- beta2 v_i + (1 - beta2) g^2
    vhat_i <- max(vhat_i, v_i)
    x_i    <- x_i - alpha m_i / sqrt(vhat_i)

and the server averages x_i, m_i and vhat_i over the cohort. m_{-1} = 0 and
vhat_{-1} = eps^2, the only place where eps enters: nothing is added to the denominator.

What had to be decided:

* v_i starts every round at vhat_{t-1}; a client's v is neither sent nor kept. Line 7
  prints v_{t,i} for v_{t,k,i}.
* The printed means are 1/N or 1/m sums over the clients; here they carry the weights
  p_k = weights[k] / sum over the cohort. The maximum of Corollary 3 has no weights.
* Corollary 2 says that m_{t,0,i} = 0 is set "in the line 4"; it is line 3 of the
  listing, and Algorithm 2 has it there. Corollaries 2 and 3 may be combined here.
* The text after Algorithm 1 numbers the start x_1, m_0 = 0, vhat_0 = eps^2; the listing
  has x_0, m_{-1}, vhat_{-1}. The same values.
* K_t may depend on the client and on the round.
* Interval: the paper prints K_t = K_initial + ceil(log_{K_alpha} t), and also that
  K_initial = 4, K_alpha = 2 gives 10 steps in rounds 64 to 100. The latter holds for the
  floor; the ceiling gives 10 at round 64 and 11 afterwards. Hence ``rounding``.
"""

from fractions import Fraction

import numpy as np


def interval(t, initial, base, rounding="ceil"):
    """K_t = initial + ceil (or floor) of log_base(t), for t = 1, 2, ...

    In rational arithmetic, so exact at the powers of the base; a float is a rational.
    """
    if t < 1:
        raise ValueError("rounds are counted from 1")
    if not base > 1:
        raise ValueError("the base must be above 1")
    if rounding not in ("floor", "ceil"):
        raise ValueError(f"unknown rounding {rounding!r}")

    t, base = Fraction(t), Fraction(base)
    # The largest integer e with base^e <= t: e = floor(log_base t).
    e, power = 0, Fraction(1)
    while power * base <= t:
        power = power * base
        e = e + 1
    if rounding == "ceil" and power != t:
        e = e + 1
    return int(initial) + e


def fedlalr(
    x,
    cohorts,
    gradient,
    steps,
    *,
    lr,
    weights,
    weight_decay=0.0,
    beta1,
    beta2,
    eps,
    restart=False,
    aggregate="mean",
    m=None,
    vhat=None,
):
    """Run one round per entry of ``cohorts``; return ``{'x', 'm', 'vhat'}``.

    ``gradient(k, r, t, x)`` is client k's stochastic gradient in round r at local step t,
    ``steps(k, r)`` its number of local steps in round r, ``lr(r, t)`` the rate alpha and
    ``weights[k]`` its weight before normalisation over the cohort. ``restart`` is
    Corollary 2; there is no server momentum then, neither taken nor returned.
    ``aggregate`` is "mean" (Algorithm 1) or "max" (Corollary 3). ``m`` and ``vhat`` are
    initial values for m_{-1} (0) and vhat_{-1} (eps^2).
    """
    if aggregate not in ("mean", "max"):
        raise ValueError(f"unknown aggregate {aggregate!r}")
    if restart and m is not None:
        raise ValueError("with restart there is no server momentum")

    x = np.array(x, dtype=np.float64)
    # Input: m_{-1} = 0, vhat_{-1} = eps^2
    m = np.zeros_like(x) if m is None else np.array(m, dtype=np.float64)
    vhat = np.full_like(x, eps**2) if vhat is None else np.array(vhat, dtype=np.float64)

    # 1: for iteration t in {0, ..., T - 1}
    for r, cohort in enumerate(cohorts):
        if len(cohort) == 0:
            raise ValueError(f"round {r} has no clients")

        total = 0.0
        for k in cohort:
            total += float(weights[k])

        x_mean = np.zeros_like(x)
        m_mean = np.zeros_like(x)
        vhat_mean = np.zeros_like(x)
        vhat_max = np.full_like(x, -np.inf)

        # 2: for client i in parallel
        for k in cohort:
            # 3: x_{t,1,i} = x_t, m_{t,0,i} = m_{t-1}, v_{t,0,i} = vhat_{t,0,i} = vhat_{t-1}
            x_k = x.copy()
            # Corollary 2: m_{t,0,i} = 0
            m_k = np.zeros_like(x) if restart else m.copy()
            v_k = vhat.copy()
            vhat_k = vhat.copy()

            # 4: for local iteration k = 1, 2, ..., K_t
            for t in range(steps(k, r)):
                # 5: g_{t,k,i} = grad f(x_{t,k,i}, xi_{t,k,i}), on the L2-regularised loss
                g = np.asarray(gradient(k, r, t, x_k.copy()), dtype=np.float64)
                g = g + weight_decay * x_k
                # 6: m_{t,k,i} = beta_1 m_{t,k-1,i} + (1 - beta_1) g_{t,k,i}
                m_k = beta1 * m_k + (1.0 - beta1) * g
                # 7: v_{t,k,i} = beta_2 v_{t,k-1,i} + (1 - beta_2) [g_{t,k,i}]^2
                v_k = beta2 * v_k + (1.0 - beta2) * g**2
                # 8: vhat_{t,k,i} = max(vhat_{t,k-1,i}, v_{t,k,i})
                vhat_k = np.maximum(vhat_k, v_k)
                # 9: eta_{t,k,i} = 1 / sqrt(vhat_{t,k,i})
                eta = 1.0 / np.sqrt(vhat_k)
                # 10: x_{t,k+1,i} = x_{t,k,i} - alpha m_{t,k,i} * eta_{t,k,i}
                x_k = x_k - lr(r, t) * m_k * eta

            # 14: Receive x_{t,K+1,i}, m_{t,K,i}, vhat_{t,K,i} from clients
            p = float(weights[k]) / total
            x_mean += p * x_k
            m_mean += p * m_k
            vhat_mean += p * vhat_k
            vhat_max = np.maximum(vhat_max, vhat_k)

        # 15: x_{t+1} = 1/m sum_i x_{t,K+1,i}
        x = x_mean
        # 16: m_t = 1/m sum_i m_{t,K,i}; not in Algorithm 2
        if not restart:
            m = m_mean
        # 17: vhat_t = 1/m sum_i vhat_{t,K,i}; Algorithm 3: vhat_t = max_i vhat_{t,K,i}
        vhat = vhat_mean if aggregate == "mean" else vhat_max

    if restart:
        return {"x": x, "vhat": vhat}
    return {"x": x, "m": m, "vhat": vhat}
