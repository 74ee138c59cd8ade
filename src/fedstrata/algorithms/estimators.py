"""Estimators that carry the past: STORM, and the estimates of a composition built on it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedstrata.clients import Client, Clients
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


def weight_of(client: Client, rate: Rate, scale: float) -> float:
    """Return the weight of a fresh value at this step, ``rate * scale``, at most 1."""
    return min(1.0, client.rate(rate) * scale)


def stores_jacobian(clients: Clients, jacobian: str, radii: tuple[float, float]) -> bool:
    """Whether clients store the inner Jacobian ("exact"), or only its products ("product"); "auto" goes by its size."""
    d, r = len(clients.problem.x0), clients.inner_sizes[0]
    exact = jacobian == "exact" or (jacobian == "auto" and (r == 1 or d * r <= EXACT_BUDGET))
    if not exact and any(radii):
        raise InputError("The projections c_g and c_f need jacobian = 'exact': products are not projected.")
    return exact


def weights_now(client: Client, rates: Sequence[Rate], eta: Rate, kind: str, ago: int = 1) -> list[float]:
    """Return the weights of fresh values after the step so many iterations ago, at most 1.

    ``kind`` "theorem" multiplies them by eta_t^2.
    """
    scale = client.rate(eta, ago=ago) ** 2 if kind == "theorem" else 1.0
    return [min(1.0, scale * client.rate(rate, ago=ago)) for rate in rates]


def kept_estimates(client: Client, x: torch.Tensor, exact: bool) -> dict[str, torch.Tensor]:
    """Return the estimates that the clients kept: h, u, v, or h, w."""
    return {name: client.recall(name, x) for name in (("h", "u", "v") if exact else ("h", "w"))}


def first_estimates(client: Client, x: torch.Tensor, exact: bool, batches: int) -> dict[str, torch.Tensor]:
    """Return the estimates of f(g(x)) on ``batches`` batches' worth of samples: h, u, v, or h, w."""
    inner, outer = client.draw_all(batch_size=client.worth(batches))
    if exact:
        h, u = client.g_jacobian(1, x, inner)
        return {"h": h, "u": u, "v": client.f_grads(h, outer)[0]}
    chain = client.chain(x, [inner, outer])
    return {"h": chain.values[0], "w": chain.gradient}


def next_estimates(
    client: Client,
    old: torch.Tensor,
    x: torch.Tensor,
    estimates: dict[str, torch.Tensor],
    weights: Sequence[float],
    radii: tuple[float, float] = (0.0, 0.0),
) -> dict[str, torch.Tensor]:
    """Return the STORM estimates after a step from ``old`` to ``x``, on fresh batches.

    ``weights`` are alpha (inner value), beta (inner Jacobian, or the product) and varrho (outer gradient).
    """
    alpha, beta, varrho = weights
    inner, outer = client.draw_all()
    h = estimates["h"]
    if "u" in estimates:
        g_old, jacobian_old = client.g_jacobian(1, old, inner)
        g_new, jacobian_new = client.g_jacobian(1, x, inner)
        h_new = storm(h, g_new, g_old, alpha)
        u = storm(estimates["u"], jacobian_new, jacobian_old, beta)
        v = storm(estimates["v"], client.f_grads(h_new, outer)[0], client.f_grads(h, outer)[0], varrho)
        return {"h": h_new, "u": into_ball(u, radii[0]), "v": into_ball(v, radii[1])}
    at_old = client.chain(old, [inner, outer], offsets=[h], weight=0.0)
    carried = (1 - alpha) * (h - at_old.values[0])
    at_new = client.chain(x, [inner, outer], offsets=[carried], weight=1.0)
    return {"h": carried + at_new.values[0], "w": storm(estimates["w"], at_new.gradient, at_old.gradient, beta)}


def direction(estimates: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return w = u^T v, the estimate of the gradient: [C, d]."""
    if "w" in estimates:
        return estimates["w"]
    u, v = estimates["u"], estimates["v"]
    out: torch.Tensor = u[:, 0] * v if u.shape[1] == 1 else torch.einsum("crd,cr->cd", u, v)
    return out


def into_ball(rows: torch.Tensor, radius: float) -> torch.Tensor:
    """Return each client's row projected onto the ball of this (Frobenius) radius; 0 leaves it as it is."""
    if radius == 0:
        return rows
    norms: torch.Tensor = torch.linalg.vector_norm(rows.flatten(1), dim=1).clamp(min=radius)
    return rows * (radius / norms).view(-1, *[1] * (rows.dim() - 1))
