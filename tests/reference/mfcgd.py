"""MFCGD and AdaMFCGD, slow references in float64 NumPy.

F. Huang, "Faster Adaptive Momentum-Based Federated Methods for Distributed Composition
Optimization", Algorithm 1 (line numbers below are those of its box), eqs. (6)-(10).

Problem: min_x mean_k f_k(g_k(x)), every client composing its own functions, all N
clients in every round. Client k holds x_k, h_k (value of g_k), u_k (Jacobian of g_k,
stored [r_dim, d]), v_k (gradient of f_k) and w_k = u_k^T v_k; the server holds the
accumulator a of the diagonal matrix A. With q = ``steps``, iteration t = 1, 2, ...:

    t mod q != 0, lines 10-11   x_k <- x_k - eta gamma A^{-1} w_k           (A frozen)
    t mod q == 0, lines 5-7     wbar, xbar = means over the clients; refresh A;
                                every x_k <- xbar - eta gamma A^{-1} wbar
    always, lines 15-20, on fresh batches zeta (inner) and xi (outer), with x_old the
    client's OWN point before the step (not xbar) and x_new the point after it:
        h_new = g(x_new; zeta) + (1 - alpha) (h - g(x_old; zeta))                  (7)
        u <- Pi_Cg[ Jg(x_new; zeta) + (1 - beta) (u - Jg(x_old; zeta)) ]           (8)
        v <- Pi_Cf[ grad f(h_new; xi) + (1 - varrho) (v - grad f(h; xi)) ]         (9)
        h <- h_new,  w <- u^T v.

The estimators are never averaged.

The adaptive matrix, refreshed at a synchronisation only:

    'identity'  A = I (MFCGD)
    'adam'      a <- theta a + (1 - theta) wbar^2,                A = diag(sqrt(a) + rho)   (line 6)
    'norm'      a <- theta a + (1 - theta) ||wbar||  (a number),  A = (a + rho) I           (6)
    'belief'    a <- theta a + (1 - theta) (wbar - wbar at the previous synchronisation)^2
    'amsgrad'   a as for 'adam', a_max <- max(a_max, a),          A = diag(sqrt(a_max) + rho).

The last two are not in this paper ("many other adaptive matrices"). For 'belief' the
previous wbar of the very first synchronisation is 0, so that its first A is Adam's.
For 'amsgrad' the recursion continues from a, not from the maximum.

ROUNDS. Round r (0-based) is iterations t = r q + 1 .. (r + 1) q; iteration
t = r q + j + 1 is called (r, j), j = 0 .. q - 1. Its first q - 1 iterations are local
steps, its last one, (r, q - 1), is the synchronisation, so a round ends with exactly
one synchronisation. The step of iteration (r, j) uses eta(r, j); the estimator update
that follows it (lines 15-20, the printed index t + 1) uses the weights alpha(r, j),
beta(r, j), varrho(r, j) and the batches named (k, r, j), inner and outer. So the
printed alpha_{t+1} = c_1 eta_t^2 is alpha(r, j) = c_1 eta(r, j)^2. The initialisation
(line 2) uses the batches named r = 0, t = -1. The estimator update that follows the
synchronisation of round r needs the new server model, so a federated client can only do
it on receipt of that model, as its first act in round r + 1; it keeps the name
(r, q - 1) wherever it is executed, and the numbers do not depend on where. After the
last round ``defer=False`` executes it, as printed; ``defer=True`` leaves it undone,
which is the state of clients that have sent their last message and wait: x_k is then
the client's own point before the synchronisation and h, u, v, w belong to that point.

Since the matrix is the same for all clients, lines 5-7 equal "every client takes the
step of line 11 with the refreshed A, then x is averaged". For MFCGD a round therefore
is q local steps and one averaging of x; wbar is needed for A only.

``jacobian='product'`` is a departure from the paper for inner dimensions at which u
cannot be stored. u and v are replaced by one STORM estimator of the composed gradient
z(x, h) = Jg(x; zeta)^T grad f(h; xi), on the same two batches at both points:

    w <- z(x_new, h_new) + (1 - beta) (w - z(x_old, h_old)),    initially w = z(x, h).

varrho is then unused and the projections of u and v do not exist. With an inner
function that has one constant Jacobian on all batches the two forms agree if
beta = varrho, otherwise they differ.

What had to be decided:

* Line 2 does not define w_1. With q = 1 the first iteration synchronises and needs it
  (line 10 is in the other branch), so w_1 = u_1^T v_1 at the initialisation. Line 10
  otherwise repeats line 20.
* Line 2 writes "generate A_1" without saying how, and A_1 serves the first q - 1 steps.
  ``first_matrix='accumulator'`` (default) applies the rule to a_0 = 0: A_1 = rho I (the
  smallest matrix Assumption 5 allows, hence large steps if rho is small).
  'identity' takes A_1 = I; 'average' applies line 6 at once, to the mean of the initial
  w_k, at the price of one exchange before the first step (a and wbar are then stored as
  if a synchronisation had taken place). It matters only for q > 1 and only before the
  first synchronisation.
* a_t is computed from a_{t-1}, but a changes at synchronisations only: a_{t-1} is the
  accumulator left by the previous synchronisation (a_0 = 0 before the first).
* Line 2 does not project u_1 and v_1, so neither does the reference. Lines 18-19 do.
* Line 2 has q samples per estimator; how large the batch (0, -1) is, is the caller's
  business. Line 2 prints grad f without the client index; f_k is meant, as in line 19.
* The appendix lets the step of line 7 happen at s_t = q floor(t/q) + 1. The box has
  t mod q = 0, which makes s_t the first iterate AFTER a synchronisation. The box is
  followed.
* The output is a random iterate in the paper; here the last one is returned.
"""

import numpy as np

MATRICES = ("identity", "adam", "norm", "belief", "amsgrad")


def _at(value, r, t):
    """A rate or weight is a float, or a callable of the round and the local step."""
    return value(r, t) if callable(value) else value


def _array(value):
    return np.array(value, dtype=np.float64)


def _project(value, radius):
    """Pi_C: onto the ball of that radius, in the Euclidean or Frobenius norm."""
    if radius is None:
        return value
    norm = float(np.sqrt(np.sum(value**2)))
    return value if norm <= radius else value * (radius / norm)


def _check(cohorts, clients, steps, jacobian, c_g, c_f):
    for r, cohort in enumerate(cohorts):
        if sorted(cohort) != list(range(clients)):
            raise ValueError(f"round {r}: all {clients} clients must take part, got {list(cohort)}")
    if steps < 1:
        raise ValueError("steps must be at least 1")
    if jacobian not in ("exact", "product"):
        raise ValueError(f"jacobian must be 'exact' or 'product', got {jacobian!r}")
    if jacobian == "product" and (c_g is not None or c_f is not None):
        raise ValueError("the product form has no u and v to project")


class _Estimators:
    """h, u, v, w of one client: line 2 and lines 15-20."""

    def __init__(self, k, inner, inner_jacobian, outer_gradient, jacobian, c_g, c_f):
        self.k, self.form, self.c_g, self.c_f = k, jacobian, c_g, c_f
        self.inner, self.inner_jacobian, self.outer_gradient = inner, inner_jacobian, outer_gradient
        self.h = self.u = self.v = self.w = None

    def _g(self, r, t, x):
        return _array(self.inner(self.k, r, t, x.copy()))

    def _jacobian(self, r, t, x):
        return _array(self.inner_jacobian(self.k, r, t, x.copy()))

    def _grad_f(self, r, t, h):
        return _array(self.outer_gradient(self.k, r, t, h.copy()))

    def initialise(self, x):
        """Line 2, on the batches named (0, -1)."""
        self.h = self._g(0, -1, x)
        u = self._jacobian(0, -1, x)
        v = self._grad_f(0, -1, self.h)
        self.w = u.T @ v
        if self.form == "exact":
            self.u, self.v = u, v

    def update(self, r, t, x_old, x_new, alpha, beta, varrho):
        """Lines 15-20, on the batches named (r, t)."""
        # Line 17
        h_old = self.h
        h_new = self._g(r, t, x_new) + (1.0 - alpha) * (h_old - self._g(r, t, x_old))
        if self.form == "exact":
            # Line 18
            u = self._jacobian(r, t, x_new) + (1.0 - beta) * (self.u - self._jacobian(r, t, x_old))
            self.u = _project(u, self.c_g)
            # Line 19
            v = self._grad_f(r, t, h_new) + (1.0 - varrho) * (self.v - self._grad_f(r, t, h_old))
            self.v = _project(v, self.c_f)
            # Line 20
            self.w = self.u.T @ self.v
        else:
            z_new = self._jacobian(r, t, x_new).T @ self._grad_f(r, t, h_new)
            z_old = self._jacobian(r, t, x_old).T @ self._grad_f(r, t, h_old)
            self.w = z_new + (1.0 - beta) * (self.w - z_old)
        self.h = h_new


def mfcgd(
    x,
    cohorts,
    inner,
    inner_jacobian,
    outer_gradient,
    steps,
    *,
    clients,
    eta,
    gamma,
    alpha,
    beta,
    varrho,
    jacobian="exact",
    c_g=None,
    c_f=None,
):
    """MFCGD from its initialisation: the printed loop over t with A_t = I.

    Returns ``{'x': server model, 'x_k', 'h', 'u', 'v', 'w'}``, the last five dicts by
    client (u and v are empty in the product form). The arguments are those of
    ``adamfcgd``; use that function with ``matrix='identity'`` to start from a given
    state or to leave the last estimator update undone.
    """
    _check(cohorts, clients, steps, jacobian, c_g, c_f)
    x = _array(x)
    q = steps

    # Lines 1-2
    x_k = {}
    estimators = {}
    for k in range(clients):
        x_k[k] = x.copy()
        estimators[k] = _Estimators(k, inner, inner_jacobian, outer_gradient, jacobian, c_g, c_f)
        estimators[k].initialise(x_k[k])

    # Line 3
    for t in range(1, q * len(cohorts) + 1):
        r, j = (t - 1) // q, (t - 1) % q
        x_old = dict(x_k)
        if t % q == 0:
            # Lines 5 and 7
            w_bar = np.zeros_like(x)
            x_bar = np.zeros_like(x)
            for k in range(clients):
                w_bar += estimators[k].w / clients
                x_bar += x_k[k] / clients
            x = x_bar - _at(eta, r, j) * gamma * w_bar
            for k in range(clients):
                x_k[k] = x.copy()
        else:
            # Lines 9-13
            for k in range(clients):
                x_k[k] = x_k[k] - _at(eta, r, j) * gamma * estimators[k].w
        # Lines 15-21
        for k in range(clients):
            estimators[k].update(r, j, x_old[k], x_k[k], _at(alpha, r, j), _at(beta, r, j), _at(varrho, r, j))

    return {"x": x, "x_k": x_k, **_collect(estimators)}


def _collect(estimators):
    exact = {k: e for k, e in estimators.items() if e.form == "exact"}
    return {
        "h": {k: e.h for k, e in estimators.items()},
        "u": {k: e.u for k, e in exact.items()},
        "v": {k: e.v for k, e in exact.items()},
        "w": {k: e.w for k, e in estimators.items()},
    }


def _refresh(matrix, a, a_max, w_bar, w_bar_before, theta):
    """Line 6 and eq. (6): the new accumulator and its running maximum."""
    if matrix in ("adam", "amsgrad"):
        a = theta * a + (1.0 - theta) * w_bar**2
    elif matrix == "norm":
        a = theta * a + (1.0 - theta) * float(np.sqrt(np.sum(w_bar**2)))
    elif matrix == "belief":
        a = theta * a + (1.0 - theta) * (w_bar - w_bar_before) ** 2
    return a, np.maximum(a_max, a)


def _diagonal(matrix, a, a_max, rho, x):
    """The diagonal of A."""
    if matrix == "identity":
        return np.ones_like(x)
    if matrix == "norm":
        return np.full_like(x, a + rho)
    if matrix == "amsgrad":
        return np.sqrt(a_max) + rho
    return np.sqrt(a) + rho


def adamfcgd(
    x,
    cohorts,
    inner,
    inner_jacobian,
    outer_gradient,
    steps,
    *,
    clients,
    eta,
    gamma,
    alpha,
    beta,
    varrho,
    theta=0.9,
    rho=1.0,
    matrix="adam",
    first_matrix="accumulator",
    jacobian="exact",
    c_g=None,
    c_f=None,
    a=None,
    a_max=None,
    w_bar=None,
    x_k=None,
    h=None,
    u=None,
    v=None,
    w=None,
    first_round=0,
    defer=False,
):
    """AdaMFCGD, written by rounds; one round per entry of ``cohorts``.

    ``inner(k, r, t, x)`` [r_dim] and ``inner_jacobian(k, r, t, x)`` [r_dim, d] are g_k
    and its Jacobian on the inner batch (k, r, t), ``outer_gradient(k, r, t, h)`` is
    grad f_k [r_dim] on the outer batch (k, r, t); equal names mean equal batches.
    ``steps`` is q and ``clients`` is N. ``eta``, ``alpha``, ``beta``, ``varrho`` and
    ``theta`` are floats or callables of (r, t) (theta is read at t = q - 1, and at (0, -1)
    for ``first_matrix='average'``); ``gamma`` and ``rho`` are floats. ``c_g`` and ``c_f`` are radii or None.

    A start away from the initialisation is given by the dicts ``h``, ``w`` and, in the
    exact form, ``u``, ``v``, all keyed by client, together with ``first_round``, the r of
    the first round run here. ``x_k`` (dict) defaults to the server model. With
    ``defer=True`` such a start is one in which the estimator update after the previous
    synchronisation has not been done yet: ``x_k``, then required, are the clients' points
    before it, ``x`` is the server model after it, and the update is carried out first,
    under the name (first_round - 1, q - 1). The server's ``a``, ``a_max`` and ``w_bar``
    (wbar of the previous synchronisation, for 'belief') default to 0, ``a_max`` to ``a``.

    Returns ``{'x', 'a', 'a_max', 'w_bar', 'x_k', 'h', 'u', 'v', 'w'}``; the first is the
    server model, the last five are dicts by client, and the whole can be passed on to
    the next call with the same ``defer``.
    """
    _check(cohorts, clients, steps, jacobian, c_g, c_f)
    if matrix not in MATRICES:
        raise ValueError(f"matrix must be one of {MATRICES}, got {matrix!r}")
    if first_matrix not in ("accumulator", "identity", "average"):
        raise ValueError(f"first_matrix must be 'accumulator', 'identity' or 'average', got {first_matrix!r}")

    x = _array(x)
    q = steps
    scalar = matrix == "norm"
    a = (0.0 if scalar else np.zeros_like(x)) if a is None else (float(a) if scalar else _array(a))
    a_max = a if a_max is None else (float(a_max) if scalar else _array(a_max))
    w_bar = np.zeros_like(x) if w_bar is None else _array(w_bar)

    def update(k, r, j, x_old, x_new):
        estimators[k].update(r, j, x_old, x_new, _at(alpha, r, j), _at(beta, r, j), _at(varrho, r, j))

    def mean(vectors):
        total = np.zeros_like(x)
        for k in range(clients):
            total += vectors[k]
        return total / clients

    estimators = {}
    for k in range(clients):
        estimators[k] = _Estimators(k, inner, inner_jacobian, outer_gradient, jacobian, c_g, c_f)

    fresh = h is None
    if fresh:
        if any(given is not None for given in (x_k, u, v, w)):
            raise ValueError("a given client state needs h")
        # Lines 1-2
        x_k = {k: x.copy() for k in range(clients)}
        for k in range(clients):
            estimators[k].initialise(x)
        if first_matrix == "average" and matrix != "identity":
            w_before, w_bar = w_bar, mean({k: estimators[k].w for k in range(clients)})
            a, a_max = _refresh(matrix, a, a_max, w_bar, w_before, _at(theta, 0, -1))
    else:
        if w is None or (jacobian == "exact" and (u is None or v is None)):
            raise ValueError("a given client state needs h and w, in the exact form also u and v")
        if defer and x_k is None:
            raise ValueError("a deferred update needs x_k, the points before the synchronisation")
        x_k = {k: _array(x if x_k is None else x_k[k]) for k in range(clients)}
        for k in range(clients):
            estimators[k].h, estimators[k].w = _array(h[k]), _array(w[k])
            if jacobian == "exact":
                estimators[k].u, estimators[k].v = _array(u[k]), _array(v[k])

    diagonal = _diagonal(matrix, a, a_max, rho, x)
    if fresh and first_matrix == "identity":
        diagonal = np.ones_like(x)

    # Is the estimator update after the previous synchronisation still to be done?
    pending = defer and not fresh

    for index, _ in enumerate(cohorts):
        r = first_round + index

        if pending:
            # Lines 15-21 of iteration t = r q, on receipt of the server model.
            for k in range(clients):
                update(k, r - 1, q - 1, x_k[k], x)
                x_k[k] = x.copy()
            pending = False

        # The q - 1 local iterations t = r q + 1 .. r q + q - 1.
        for j in range(q - 1):
            for k in range(clients):
                # Lines 10-12
                x_new = x_k[k] - _at(eta, r, j) * gamma * estimators[k].w / diagonal
                # Lines 15-21
                update(k, r, j, x_k[k], x_new)
                x_k[k] = x_new

        # The synchronisation t = (r + 1) q. Line 5:
        w_before = w_bar
        w_bar = mean({k: estimators[k].w for k in range(clients)})
        x_bar = mean(x_k)
        # Line 6
        a, a_max = _refresh(matrix, a, a_max, w_bar, w_before, _at(theta, r, q - 1))
        diagonal = _diagonal(matrix, a, a_max, rho, x)
        # Line 7
        x = x_bar - _at(eta, r, q - 1) * gamma * w_bar / diagonal

        pending = True
        if not defer:
            # Lines 15-21 at once.
            for k in range(clients):
                update(k, r, q - 1, x_k[k], x)
                x_k[k] = x.copy()
            pending = False

    return {"x": x, "a": a, "a_max": a_max, "w_bar": w_bar, "x_k": x_k, **_collect(estimators)}
