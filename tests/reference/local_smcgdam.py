"""LocalSMCGDAM, a slow reference in float64 NumPy.

X. Zhang, A. Payani, M. Lee, R. Souvenir, H. Gao, "A Federated Stochastic Multi-Level
Compositional Minimax Algorithm for Deep AUC Maximization", ICML 2024, Algorithm 1 (line numbers
below are those of its box), eqs. (9)-(12). The paper's n is the client k here, its level k is j.
Some equation numbers occur twice in its appendix, so the lemma is always named.

Problem (2): min_x max_y mean_k f_k(G(x), y), G = mean_k g_k^(K) o ... o g_k^(1), levels of any
dimensions. Client k holds x, y, h^(1..K), p and q. Line 1, eq. (12), on one set of batches:

    h^(j) = g^(j)(h^(j-1); xi^(j)), h^(0) = x;   p = u, q = v of eq. (10) at these h and (x, y)

and iteration t = 0, 1, ... (all right-hand sides of line 3 are old):

    line 3      x_new = x - gamma_x eta p              y_new = Pi[ y + gamma_y eta q ]
    lines 4-7   h_new^(0) = x_new, and for j = 1 .. K, on ONE batch xi^(j) of its own,         (9)
                h_new^(j) = (1 - alpha eta^2) (h^(j) - g^(j)(h^(j-1); xi^(j))) + g^(j)(h_new^(j-1); xi^(j))
    line 8      u = J1' ... JK' grad_1 f(h_new^(K), y_new; zeta), Jj of g^(j)(. ; xi^(j)) at   (10)
                h_new^(j-1);   v = grad_2 f(h_new^(K), y_new; zeta)
    line 9      p <- (1 - rho_x eta) p + rho_x eta u   q <- (1 - rho_y eta) q + rho_y eta v    (11)
    lines 10-15 if (t + 1) mod tau = 0: x, y, p, q and every h^(j) become their means over the clients.

ROUNDS AND BATCHES. Round r is iterations t = r tau .. (r + 1) tau - 1, tau = ``steps``; they are
called (r, t), t = 0 .. tau - 1, so a round ends with exactly one averaging, of quantities made at
the clients' own points. Iteration (r, t) uses eta, gamma, rho, alpha at (r, t) and the batches
(k, r, t), one per level j and one for f (the printed index t + 1). The initialisation uses the
batches (k, r, -1) of the first round of the run. Everything is synchronised, so the state between
two rounds is the server's; only ``base='own'`` keeps something with the clients.

WHAT IT SOLVES. Nobody averages Jacobians, and u is made before h is averaged, so with
heterogeneous clients the zero is not that of problem (2), whose gradient (6) is
(mean_k J_k)' mean_k grad f_k(G(x), y):
* alpha eta^2 = 1: the averaged h^(j) is not used at all (eq. (9) forgets it). Every client
  follows the gradient of its own f_k(G_k(x), y); the problem is the local inner one.
* alpha = 0: h^(j) carries the mean. For affine levels, tau = 1 and a common initial state the
  averaged h^(K) is G(x) and the zero is that of mean_k J_k' grad f_k(G(x), y).
* In between, K = 1, tau = 1: grad f_k is taken at (1 - a) G(x) + a G_k(x), a = alpha eta^2.
* Affine levels with the same matrices and quadratic f_k with the same Hessian on all clients,
  constant and linear terms being arbitrary: the zero of (2), for every alpha and tau.
The convergence proof assumes all clients equal ("homogeneous data distribution setting", Lemmas B.6,
B.9, B.10); its Lemmas B.4, eq. (28), and B.5 are for eq. (9) alone and do not follow the averaging.

What had to be decided:

* h^(0) in the first iteration after an averaging. Line 4 sets it before line 11 averages x, and
  lines 12-14 average the levels 1 .. K only. ``base='averaged'`` (default) takes the averaged x,
  as the proof does: Lemma B.5, eq. (33), puts x_{t+1} - x_t = - gamma_x eta p_t for
  h_{t+1}^(0) - h_t^(0), and Lemma B.8, eq. (47), x - x_mean for h^(0) - h_mean^(0). 'own' takes
  the client's own x before the averaging (a client that was not in the last round has none
  and takes the averaged x).
* Eq. (12) evaluates p_0 and q_0 at the true G_k^(j)(x_0), while h_0 is on batches. True
  expectations are not at hand, so by default p_0 and q_0 are at h_0, which is (10) at t = -1.
  Eqs. (81), (82) are written for the true G; with h_0 they gain a term of order delta^2 / M by
  Lemma B.2, eq. (26), and eq. (80), which the last term of (14) contains (our estimate).
  ``exact_level(k, j, u)``, the expectation of level j, gives the print.
* Line 1 does not average, and neither does the default. Lemmas B.7-B.9 (eqs. (40), (45), (54))
  start from equal p, q, h on all clients at t = 0, which line 1 does not give;
  ``average_initial=True`` does, at the price of one exchange. The rate (14) does not need it: the
  first period adds a term of order tau / (M T), and tau eta^2 is bounded (our estimate).
* Eqs. (9) and (10) print the same batch xi^(j) for value and Jacobian, and so does the default.
  The last step of Lemma B.2, eq. (21), takes the Jacobian's batch as independent of h_new, which
  it then is not; ``stream_jacobian=1`` (any number but 0) names another batch for it, in
  the initialisation too.
* grad_x f_n(h_{n,t+1}, ...) in (10) has no level and "x" is the first argument: it is
  grad_1 f at h^(K), as in Lemma B.2, eq. (21).
* The text asks for tau > 1; nothing breaks at tau = 1. Iterations after the last averaging
  (T not a multiple of tau) do not exist here.
* Partial participation: means over the cohort; the averages stand for all clients, also of those
  that have not taken part. The initialisation is made by the first cohort. (The paper: all clients.)
* Pi is not in the paper: ``project_y`` is applied in line 3, not after the averaging, so its set
  should be convex.
* Without a dual y, q, v do not exist; the rest is the same.
* Weights alpha eta^2, rho_x eta, rho_y eta above 1 are refused by the paper but not here.
"""

import numpy as np


def _at(value, r, t):
    """A rate or weight is a float, or a callable of the round and the local step."""
    return value(r, t) if callable(value) else value


def _array(value):
    return np.array(value, dtype=np.float64)


def _mean(rows):
    total = 0.0
    for row in rows:
        total = total + row
    return total / len(rows)


class _Oracle:
    """The caller's functions for one client: copies in, float64 out, streams."""

    def __init__(self, k, level, level_vjp, outer, levels, stream_jacobian):
        self.k, self.levels = k, levels
        self._level, self._level_vjp, self._outer = level, level_vjp, outer
        self._extra = {} if stream_jacobian == 0 else {"stream": stream_jacobian}

    def value(self, r, t, j, u):
        return _array(self._level(self.k, r, t, j, u.copy()))

    def gradients(self, r, t, points, y):
        """Eq. (10): ``points`` are h^(0) .. h^(K); from level K down to level 1."""
        c, v = self._outer(self.k, r, t, points[self.levels].copy(), None if y is None else y.copy())
        c = _array(c)
        for j in range(self.levels, 0, -1):
            c = _array(self._level_vjp(self.k, r, t, j, points[j - 1].copy(), c.copy(), **self._extra))
        return c, None if y is None else _array(v)


def _initialise(oracle, r, x, y, exact_level):
    """Line 1, eq. (12), on the batches (k, r, -1): h, p, q of one client."""
    h = [x]
    for j in range(1, oracle.levels + 1):
        h.append(oracle.value(r, -1, j, h[j - 1]))
    points = h
    if exact_level is not None:
        points = [x]
        for j in range(1, oracle.levels + 1):
            points.append(_array(exact_level(oracle.k, j, points[j - 1].copy())))
    p, q = oracle.gradients(r, -1, points, y)
    return h[1:], p, q


def _average(states):
    """The means of (x, y, h, p, q) over the clients; y and q may be absent."""
    x = _mean([state[0] for state in states])
    y = None if states[0][1] is None else _mean([state[1] for state in states])
    h = [_mean([state[2][j] for state in states]) for j in range(len(states[0][2]))]
    p = _mean([state[3] for state in states])
    q = None if states[0][4] is None else _mean([state[4] for state in states])
    return x, y, h, p, q


def local_smcgdam(
    x,
    y,
    cohorts,
    level,
    level_vjp,
    outer,
    steps,
    *,
    levels,
    eta,
    gamma_x,
    rho_x,
    alpha,
    gamma_y=None,
    rho_y=None,
    project_y=None,
    base="averaged",
    average_initial=False,
    exact_level=None,
    stream_jacobian=0,
    h=None,
    p=None,
    q=None,
    own=None,
    first_round=0,
):
    """One round per entry of ``cohorts``; returns ``{'x', 'y', 'h', 'p', 'q', 'own'}``.

    ``level(k, r, t, j, u)`` is the value of level j = 1 .. ``levels`` of client k on the batch
    (r, t) of that level, ``level_vjp(k, r, t, j, u, c)`` is J'c there (with ``stream=`` if
    ``stream_jacobian`` is not 0), ``outer(k, r, t, u, y)`` the pair (grad_u f_k, grad_y f_k). With
    ``y=None`` there is no dual: ``outer`` is called with y None, the second of its pair is not
    looked at, ``gamma_y`` and ``rho_y`` are not needed, 'y' and 'q' of the result are None.
    ``eta``, ``gamma_x``, ``gamma_y``, ``rho_x``, ``rho_y``, ``alpha`` are floats or callables of (r, t).

    ``h`` (the list of the ``levels`` averages), ``p``, ``q`` and, for ``base='own'``, ``own`` (dict by
    client: x before the last averaging) are what to start from and what is returned; None for
    the initialisation (12).
    """
    if base not in ("averaged", "own"):
        raise ValueError(f"base must be 'averaged' or 'own', got {base!r}")
    if levels < 1 or steps < 1:
        raise ValueError(f"levels and steps must be at least 1, got {levels} and {steps}")
    fresh = h is None
    if fresh != (p is None) or (fresh or y is None) != (q is None):
        raise ValueError("a given state needs h and p, with a dual also q")
    if y is not None and (gamma_y is None or rho_y is None):
        raise ValueError("a dual needs gamma_y and rho_y")
    if h is not None and len(h) != levels:
        raise ValueError(f"h must have {levels} levels, got {len(h)}")

    x = _array(x)
    y = None if y is None else _array(y)
    h = None if h is None else [_array(row) for row in h]
    p = None if p is None else _array(p)
    q = None if q is None else _array(q)
    own = {} if own is None else {k: _array(row) for k, row in own.items()}

    def oracle(k):
        return _Oracle(k, level, level_vjp, outer, levels, stream_jacobian)

    for index, cohort in enumerate(cohorts):
        r = first_round + index
        if len(cohort) == 0:
            raise ValueError(f"round {r} has no clients")

        # Where the clients of this round start.
        if h is None:
            # Line 1
            start = {k: (x, y, *_initialise(oracle(k), r, x, y, exact_level)) for k in cohort}
            if average_initial:
                average = _average([start[k] for k in cohort])
                start = dict.fromkeys(cohort, average)
        else:
            start = dict.fromkeys(cohort, (x, y, h, p, q))

        sent, before = [], {}
        for k in cohort:
            g = oracle(k)
            x_k, y_k, h_k, p_k, q_k = start[k]
            lower = own.get(k, x_k) if base == "own" else x_k

            for t in range(steps):
                rate = _at(eta, r, t)

                # Line 3
                x_k = x_k - _at(gamma_x, r, t) * rate * p_k
                if y_k is not None:
                    y_k = y_k + _at(gamma_y, r, t) * rate * q_k
                    if project_y is not None:
                        y_k = _array(project_y(y_k.copy()))

                # Lines 4-7, eq. (9)
                old, new = [lower, *h_k], [x_k]
                keep = 1.0 - _at(alpha, r, t) * rate**2
                for j in range(1, levels + 1):
                    at_old = g.value(r, t, j, old[j - 1])
                    at_new = g.value(r, t, j, new[j - 1])
                    new.append(keep * (old[j] - at_old) + at_new)
                lower, h_k = new[0], new[1:]

                # Line 8, eq. (10)
                u, v = g.gradients(r, t, new, y_k)

                # Line 9, eq. (11)
                weight = _at(rho_x, r, t) * rate
                p_k = (1.0 - weight) * p_k + weight * u
                if y_k is not None:
                    weight = _at(rho_y, r, t) * rate
                    q_k = (1.0 - weight) * q_k + weight * v

            before[k] = x_k
            sent.append((x_k, y_k, h_k, p_k, q_k))

        # Lines 10-15
        x, y, h, p, q = _average(sent)
        own = before

    return {"x": x, "y": y, "h": h, "p": p, "q": q, "own": own if base == "own" else None}
