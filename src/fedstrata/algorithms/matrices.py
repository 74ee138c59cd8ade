"""Adaptive matrices: the diagonal A that divides a step, updated on the server at a synchronisation.

    identity:  A = I
    adam:      a <- theta a + (1 - theta) w^2,                   A = diag(sqrt(a) + rho)
    norm:      a <- theta a + (1 - theta) ||w||,                 A = (a + rho) I
    belief:    a <- theta a + (1 - theta) (w - previous w)^2,    A = diag(sqrt(a) + rho)
    amsgrad:   a as for adam, b <- max(b, a),                    A = diag(sqrt(b) + rho)

The accumulator is one tensor: a, and in a second row the previous w (belief) or the running maximum b (amsgrad). It
starts at 0. For the identity it is empty, as is the diagonal, so nothing is sent.
"""

from __future__ import annotations

import torch

MATRICES = ("identity", "adam", "norm", "belief", "amsgrad")


def accumulator(kind: str, x: torch.Tensor) -> torch.Tensor:
    """Return the accumulator before the first update: zeros."""
    rows = {"identity": 0, "belief": 2, "amsgrad": 2}.get(kind, 1)
    return x.new_zeros(rows, 1 if kind == "norm" else len(x))


def updated(kind: str, a: torch.Tensor, w: torch.Tensor, theta: float) -> torch.Tensor:
    """Return the accumulator after a synchronisation with the mean estimate ``w``."""
    if kind == "identity":
        return a
    if kind == "norm":
        fresh: torch.Tensor = torch.linalg.vector_norm(w).reshape(1)
    elif kind == "belief":
        fresh = (w - a[1]) ** 2
    else:
        fresh = w**2
    new = theta * a[0] + (1 - theta) * fresh
    if kind == "belief":
        return torch.stack([new, w])
    if kind == "amsgrad":
        return torch.stack([new, torch.maximum(a[1], new)])
    return new.unsqueeze(0)


def diagonal(kind: str, a: torch.Tensor, rho: float) -> torch.Tensor:
    """Return the diagonal of A: [d]; one number for a multiple of the identity, none for the identity."""
    if kind == "identity":
        return a.new_zeros(0)
    if kind == "norm":
        return a[0] + rho
    return a[1 if kind == "amsgrad" else 0].sqrt() + rho


def divided(w: torch.Tensor, diagonal: torch.Tensor) -> torch.Tensor:
    """Return A^{-1} w."""
    return w / diagonal if diagonal.shape[-1] else w
