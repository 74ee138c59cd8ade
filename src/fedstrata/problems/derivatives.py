"""Derivatives of a problem's functions: gradients, products with Jacobians, and the chain rule through all levels.

Each comes in two forms: by plain autograd, of one client's function or of one that vmap has mapped over clients; and by
torch.func ("inside"), which vmap can map over clients afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fedstrata.data.batch import Arrays

Tensors = tuple[torch.Tensor, ...]
Function = Callable[..., torch.Tensor]
Form = Callable[..., Tensors]
Linearised = Callable[..., tuple[torch.Tensor, Function]]
"""Returns the value of a function, and the function that multiplies a vector by its transposed Jacobian."""


def value_of(fn: Function) -> Form:
    """Return the value of a function, as a tuple of one."""
    return lambda *args: (fn(*args),)


def gradient_of(fn: Function, derivatives: int) -> Form:
    """Return the gradients in the first ``derivatives`` arguments.

    With several clients it is that of the sum of their values, which holds the gradient of each: clients do not depend
    on each other.
    """

    def run(*args: Any) -> Tensors:
        leaves = [a.detach().requires_grad_() for a in args[:derivatives]]
        with torch.enable_grad():
            total = fn(*leaves, *args[derivatives:]).sum()
        return _backward(total, leaves)

    return run


def gradient_inside(fn: Function, derivatives: int) -> Form:
    """Return the same in a form that vmap can map over clients."""
    gradient: Form = torch.func.grad(fn, argnums=tuple(range(derivatives)))
    return gradient


def pullback_of(fn: Function, own: Function | None, linearised: Linearised) -> Form:
    """Return J^T cotangent; a level may compute it itself, by its ``own`` function."""

    def run(u: torch.Tensor, cotangent: torch.Tensor, batch: Arrays) -> Tensors:
        _, pull = linearised(fn, u, batch)
        return (pull(cotangent),)

    return run if own is None else value_of(own)


def jacobian_of(fn: Function, linearised: Linearised) -> Form:
    """Return the value of a level and its Jacobian, row by row."""

    def run(u: torch.Tensor, batch: Arrays) -> Tensors:
        value, pull = linearised(fn, u, batch)
        rows = torch.eye(value.shape[-1], dtype=value.dtype, device=value.device)
        return value, torch.stack([pull(row.expand_as(value)) for row in rows], dim=-2)

    return run


def chain_of(levels: Sequence[Function], outer_grads: Form, duals: int, carried: bool, linearised: Linearised) -> Form:
    """Return the pass through all levels; with ``carried``, level k returns ``offset_k + weight * g_k``."""
    count = len(levels)

    def run(x: torch.Tensor, *rest: Any) -> Tensors:
        y, rest = rest[:duals], rest[duals:]
        offsets, weight, batches = rest[:count], rest[count], rest[count + 1 :]
        batches = batches if carried else rest
        u, values, pulls = x, [], []
        for k, level in enumerate(levels):
            value, pull = linearised(level, u, batches[k])
            u = offsets[k] + weight.unsqueeze(-1) * value if carried else value
            values.append(value)
            pulls.append(pull)
        grads = outer_grads(u, *y, batches[-1])
        gradient = grads[0]
        for pull in reversed(pulls):
            gradient = pull(gradient)
        return (gradient, *values, *grads)

    return run


def linearise(fn: Function, u: torch.Tensor, batch: Arrays) -> tuple[torch.Tensor, Function]:
    """Return g(u) and its pullback."""
    leaf = u.detach().requires_grad_()
    with torch.enable_grad():
        value = fn(leaf, batch)
    return value.detach(), lambda v: _backward(value, [leaf], v, retain_graph=True)[0]


def linearise_inside(fn: Function, u: torch.Tensor, batch: Arrays) -> tuple[torch.Tensor, Function]:
    """Return the same in a form that vmap can map over clients."""
    value, pull = torch.func.vjp(lambda z: fn(z, batch), u)[:2]
    return value, lambda v: pull(v)[0]


def _backward(
    value: torch.Tensor, leaves: list[torch.Tensor], cotangent: torch.Tensor | None = None, retain_graph: bool = False
) -> Tensors:
    if not value.requires_grad:
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    return torch.autograd.grad(value, leaves, cotangent, retain_graph=retain_graph, materialize_grads=True)
