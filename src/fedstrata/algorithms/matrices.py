"""Adaptive matrices: the diagonal A that divides a step, remembered on the server between synchronisations.

    adam:    a <- theta a + (1 - theta) w^2,                   A = diag(sqrt(a) + rho)
    norm:    a <- theta a + (1 - theta) ||w||,                 A = (a + rho) I
    belief:  a <- theta a + (1 - theta) (w - previous w)^2,    A = diag(sqrt(a) + rho)
    amsgrad: a as for adam, b <- max(b, a),                    A = diag(sqrt(b) + rho)

The memory is one tensor: a, and below it the previous w (belief) or the running maximum b (amsgrad); it starts at 0.
"""

from __future__ import annotations

import torch

MATRICES = ("adam", "norm", "belief", "amsgrad")


def first_memory(kind: str, x: torch.Tensor) -> torch.Tensor:
    """Return the memory before anything was seen: zeros."""
    if kind == "norm":
        return x.new_zeros(1, 1)
    return x.new_zeros(1 if kind == "adam" else 2, len(x))


def next_memory(kind: str, memory: torch.Tensor, w: torch.Tensor, theta: float) -> torch.Tensor:
    """Return the memory after a synchronisation with the mean estimate ``w``."""
    if kind == "norm":
        seen: torch.Tensor = torch.linalg.vector_norm(w).reshape(1)
    elif kind == "belief":
        seen = (w - memory[1]) ** 2
    else:
        seen = w**2
    a = theta * memory[0] + (1 - theta) * seen
    if kind == "belief":
        return torch.stack([a, w])
    if kind == "amsgrad":
        return torch.stack([a, torch.maximum(memory[1], a)])
    return a.unsqueeze(0)


def diagonal(kind: str, memory: torch.Tensor, rho: float) -> torch.Tensor:
    """Return the diagonal of A: [d], or one number where A is a multiple of the identity."""
    if kind == "norm":
        return memory[0] + rho
    return memory[1 if kind == "amsgrad" else 0].sqrt() + rho
