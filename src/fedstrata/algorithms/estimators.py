"""Recursive estimators: STORM, and estimates of a composition built on it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedstrata.clients import Client, Clients, Variables
from fedstrata.core.errors import InputError
from fedstrata.core.schedules import Rate

EXACT_BUDGET = 1 << 16
"""The largest d * r, with r > 1, for which ``jacobian = "auto"`` stores the inner Jacobian on each client."""


def storm(estimate: torch.Tensor, new: torch.Tensor, old: torch.Tensor, weight: float) -> torch.Tensor:
    """Return ``new + (1 - weight) * (estimate - old)``, new and old on one batch at the new and the old point."""
    return new + (1 - weight) * (estimate - old)


def moving_average(estimate: torch.Tensor, new: torch.Tensor, weight: float) -> torch.Tensor:
    """Return ``(1 - weight) * estimate + weight * new``."""
    return torch.lerp(estimate, new, weight)


def weight_of(client: Client, rate: Rate, scale: float, ago: int = 0) -> float:
    """Return the weight of a fresh value at this step, or ``ago`` iterations earlier: ``rate * scale``, at most 1."""
    return min(1.0, client.rate(rate, ago=ago) * scale)


def weights_now(client: Client, rates: Sequence[Rate], eta: Rate, kind: str, ago: int = 1) -> list[float]:
    """Return the weights of fresh values, at most 1, for the step ``ago`` iterations earlier.

    ``kind`` "theorem" multiplies them by eta_t^2.
    """
    scale = client.rate(eta, ago=ago) ** 2 if kind == "theorem" else 1.0
    return [weight_of(client, rate, scale, ago) for rate in rates]


# --- a composition f(g(x)): h estimates g, u its Jacobian, v the gradient of f, or w the product u^T v ---------------


def stores_jacobian(clients: Clients, name: str, jacobian: str, radii: tuple[float, float]) -> bool:
    """Whether clients store the inner Jacobian ("exact") or only its products ("product"); "auto" depends on size.

    ``name`` is that of the algorithm, for messages.
    """
    d, r = len(clients.problem.x0), clients.inner_sizes[0]
    exact = jacobian == "exact" or (jacobian == "auto" and (r == 1 or d * r <= EXACT_BUDGET))
    if not exact and any(radii):
        got = f"c_g = {radii[0]:g} and c_f = {radii[1]:g} with jacobian = {jacobian!r}"
        raise InputError(
            f"The projections c_g and c_f of {name} need jacobian = 'exact': products cannot be projected. Got {got}."
        )
    return exact


def estimate_first(client: Client, k: Variables, exact: bool, batches: int) -> None:
    """Set k.h, k.u and k.v if ``exact``, else k.h and k.w, for f(g(k.x)), on the samples of ``batches`` batches."""
    inner, outer = client.draw_all(batch_size=client.worth(batches))
    if exact:
        k.h, k.u = client.g_jacobian(1, k.x, inner)
        k.v = client.f_grads(k.h, outer)[0]
    else:
        chain = client.chain(k.x, [inner, outer])
        k.h, k.w = chain.values[0], chain.gradient


def estimate_next(
    client: Client,
    k: Variables,
    x: torch.Tensor,
    exact: bool,
    weights: Sequence[float],
    radii: tuple[float, float],
) -> None:
    """Update the estimates by STORM for the step from k.x to ``x``, on fresh batches.

    ``weights`` are alpha (inner value), beta (inner Jacobian, or the product) and varrho (outer gradient).
    """
    alpha, beta, varrho = weights
    inner, outer = client.draw_all()
    if exact:
        g_old, jacobian_old = client.g_jacobian(1, k.x, inner)
        g_new, jacobian_new = client.g_jacobian(1, x, inner)
        h = storm(k.h, g_new, g_old, alpha)
        u = storm(k.u, jacobian_new, jacobian_old, beta)
        v = storm(k.v, client.f_grads(h, outer)[0], client.f_grads(k.h, outer)[0], varrho)
        k.h, k.u, k.v = h, into_ball(u, radii[0]), into_ball(v, radii[1])
        return
    at_old = client.chain(k.x, [inner, outer], offsets=[k.h], weight=0.0)
    carried = (1 - alpha) * (k.h - at_old.values[0])
    at_new = client.chain(x, [inner, outer], offsets=[carried], weight=1.0)
    k.h, k.w = carried + at_new.values[0], storm(k.w, at_new.gradient, at_old.gradient, beta)


def direction(k: Variables, exact: bool) -> torch.Tensor:
    """Return w = u^T v, the estimate of the gradient: [C, d]."""
    if not exact:
        return k.w
    return k.u[:, 0] * k.v if k.u.shape[1] == 1 else torch.einsum("crd,cr->cd", k.u, k.v)


def into_ball(rows: torch.Tensor, radius: float) -> torch.Tensor:
    """Project each client's row onto the ball of this (Frobenius) radius; 0 leaves it unchanged."""
    if radius == 0:
        return rows
    norms = torch.linalg.vector_norm(rows.flatten(1), dim=1).clamp(min=radius)
    return rows * (radius / norms).view(-1, *[1] * (rows.dim() - 1))
