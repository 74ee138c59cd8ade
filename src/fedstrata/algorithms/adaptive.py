"""Adaptive steps on the server, as several algorithms share them."""

from __future__ import annotations

import torch

from fedstrata.algorithms.algorithm import State
from fedstrata.problems.problem import Problem


def adaptive_state(problem: Problem, tau: float) -> State:
    """Return the server's state before the first round: m = 0, v = tau^2."""
    x = problem.x0
    return State(x=x.clone(), m=torch.zeros_like(x), v=torch.full_like(x, tau**2))


def adaptive_step(s: State, delta: torch.Tensor, v: torch.Tensor, beta1: float, lr: float, tau: float) -> State:
    """Return the state after m <- beta1 m + (1 - beta1) delta, x <- x + lr * m / (sqrt(v) + tau), for a new v."""
    m = beta1 * s.m + (1 - beta1) * delta
    return s.replace(x=s.x + lr * m / (torch.sqrt(v) + tau), m=m, v=v)
