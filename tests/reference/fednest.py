"""FedNest in its compositional mode, a slow reference in float64 NumPy.

D. A. Tarzanagh, M. Li, C. Thrampoulidis, S. Oymak, "FedNest: Federated Bilevel, Minimax,
and Compositional Optimization", ICML 2022, Algorithms 1-4.

FedNest solves min_x mean_k f_k(x, y*(x)), y*(x) = argmin_y mean_k g_k(x, y). The
compositional problem, with the mean INSIDE,

    min_x mean_k f_k( mean_j r_j(x) ),

is the case g_k(x, y) = 1/2 ||y - r_k(x)||^2 and f_k(x, y) = f_k(y). Then
grad_y g_k = y - r_k(x), the Hessian in y is I, and the mixed derivative is -Jr_k(x)^T.

One epoch, all N clients:

FedInn, T times, s = 0 .. T - 1:
    q = mean_k (y - r_k(x; zeta_k));   y_k = y
    tau times:  y_k <- y_k - (beta / tau) [ (y_k - r_k(x; zeta')) - (y - r_k(x; zeta')) + q ]
    y <- mean_k y_k
FedOut, with y+ the result:
    p   = mean_k grad f_k(y+)                       (server sends it back)
    h   = mean_k Jr_k(x)^T p;   x_k = x
    tau times:  x_k <- x_k - (alpha / tau) [ grad_x f_k(x_k, y+) - grad_x f_k(x, y+) + h ]
    x <- mean_k x_k.

The SVRG corrections of this mode. In FedInn both gradients of the bracket are on the same
batch zeta' and the same x, so r_k(x; zeta') cancels exactly: the bracket is
(y_k - y) + q. No local batch is ever needed, all y_k are equal, and the tau steps give
y - (1 - (1 - beta/tau)^tau) q. In FedOut f_k does not depend on x directly, so the
correction is 0 - 0: all tau local steps use the same h, all x_k are equal, and the
result is x - alpha h whatever tau is. The Jacobian product is GLOBAL:
h = (mean_j Jr_j)^T (mean_k grad f_k). A client's own Jr_k^T grad f_k is not a term of it,
because y* averages over all clients; this takes one extra exchange (p down, Jr_k^T p up).

Batch names, as (epoch, step): FedInn call s uses r_value(k, epoch, s, x); FedOut uses
f_gradient(k, epoch, T, y+) and r_vjp(k, epoch, T, x, p).

What had to be decided:

* FedIHGP estimates the inverse Hessian by a random number N' of Neumann terms. Here the
  Hessian is I (and the constant l = 1), its inverse needs no estimate, and p is the plain
  mean of grad f_k, as with N = 1.
* y is carried over from epoch to epoch (warm start), as in the paper's Algorithm 1.
* Local rates are alpha / tau and beta / tau with one tau for all clients, uniform means.
* The sign: the paper's h_k = grad_x f_k - (mixed derivative) p is + Jr_k^T p here.
"""

import numpy as np


def _at(value, epoch):
    """A rate is a float, or a callable of the epoch."""
    return value(epoch) if callable(value) else value


def fednest(x, y, epochs, clients, r_value, r_vjp, f_gradient, *, inner_rounds, tau, alpha, beta):
    """Run ``epochs`` epochs of clients 0 .. ``clients`` - 1 and return ``{'x', 'y'}``.

    ``r_value(k, epoch, step, x)`` is r_k(x) [r_dim], ``r_vjp(k, epoch, step, x, v)`` is
    Jr_k(x)^T v [d] and ``f_gradient(k, epoch, step, y)`` is grad f_k(y) [r_dim].
    ``inner_rounds`` is T, ``tau`` the number of local steps; ``alpha`` and ``beta`` are
    floats or callables of the epoch.
    """
    x = np.array(x, dtype=np.float64)
    y = np.array(y, dtype=np.float64)

    for epoch in range(epochs):
        # FedInn, T times.
        for s in range(inner_rounds):
            q = np.zeros_like(y)
            for k in range(clients):
                q += (y - np.asarray(r_value(k, epoch, s, x.copy()), dtype=np.float64)) / clients
            total = np.zeros_like(y)
            for _ in range(clients):
                y_k = y.copy()
                for _ in range(tau):
                    # (y_k - r) - (y - r) + q: the value r of the local batch cancels.
                    y_k = y_k - (_at(beta, epoch) / tau) * ((y_k - y) + q)
                total += y_k
            y = total / clients

        # FedOut: the outer gradient at y+, averaged and sent back ...
        p = np.zeros_like(y)
        for k in range(clients):
            p += np.asarray(f_gradient(k, epoch, inner_rounds, y.copy()), dtype=np.float64) / clients
        # ... and the global Jacobian product.
        h = np.zeros_like(x)
        for k in range(clients):
            h += np.asarray(r_vjp(k, epoch, inner_rounds, x.copy(), p.copy()), dtype=np.float64) / clients
        total = np.zeros_like(x)
        for _ in range(clients):
            x_k = x.copy()
            for _ in range(tau):
                # grad_x f_k(x_k, y+) - grad_x f_k(x, y+) = 0 - 0.
                x_k = x_k - (_at(alpha, epoch) / tau) * h
            total += x_k
        x = total / clients

    return {"x": x, "y": y}
