"""Adaptive steps: second moments, and the diagonal matrix A that divides a step, updated at a synchronisation.

    identity:  A = I
    adam:      a <- theta a + (1 - theta) w^2,                   A = diag(sqrt(a) + rho)
    norm:      a <- theta a + (1 - theta) ||w||,                 A = (a + rho) I
    belief:    a <- theta a + (1 - theta) (w - previous w)^2,    A = diag(sqrt(a) + rho)
    amsgrad:   a as for adam, b <- max(b, a),                    A = diag(sqrt(b) + rho)

The accumulator is one tensor: a, and in a second row the previous w (belief) or the running maximum b (amsgrad). It
starts at 0. For the identity it is empty, as is the diagonal, so nothing is sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from fedstrata.clients import Clients
from fedstrata.core.options import param
from fedstrata.core.schedules import Rate


class Matrix(ABC):
    """The rule for A, with its decay rate theta, the added rho, and the choice of the first A."""

    rows = 1
    """The rows of the accumulator."""

    def __init__(self, theta: Rate, rho: float, first: str) -> None:
        self.theta, self.rho, self.first = theta, rho, first

    def start(self, x: torch.Tensor, w: torch.Tensor, clients: Clients) -> torch.Tensor:
        """Return the accumulator before the first round, ``w`` being the mean of the first estimates."""
        a = self.zeros(x)
        return self.update(a, w, clients) if self.first == "average" else a

    def update(self, a: torch.Tensor, w: torch.Tensor, clients: Clients, after: int = 0) -> torch.Tensor:
        """Return the accumulator after a synchronisation, ``after`` local steps, with the mean estimate ``w``."""
        return self.averaged(a, w, min(1.0, clients.rate(self.theta, after=after)))

    def diagonal(self, a: torch.Tensor, first: bool = False) -> torch.Tensor:
        """Return the diagonal of A: [d]; one number for a multiple of the identity, none for the identity.

        ``first``: before the first synchronisation.
        """
        A = self.root(a)
        return torch.ones_like(A) if first and self.first == "identity" else A

    def zeros(self, x: torch.Tensor) -> torch.Tensor:
        """Return the accumulator before any update."""
        return x.new_zeros(self.rows, len(x))

    @abstractmethod
    def averaged(self, a: torch.Tensor, w: torch.Tensor, theta: float) -> torch.Tensor:
        """Return the accumulator updated with ``w``."""

    @abstractmethod
    def root(self, a: torch.Tensor) -> torch.Tensor:
        """Return the diagonal of A."""


class Identity(Matrix):
    """A = I."""

    rows = 0

    def averaged(self, a: torch.Tensor, w: torch.Tensor, theta: float) -> torch.Tensor:
        """Return the accumulator, which is empty."""
        return a

    def root(self, a: torch.Tensor) -> torch.Tensor:
        """Return an empty diagonal."""
        return a.new_zeros(0)


class Adam(Matrix):
    """The square root of an average of squares."""

    def averaged(self, a: torch.Tensor, w: torch.Tensor, theta: float) -> torch.Tensor:
        """Return a."""
        return theta * a + (1 - theta) * w**2

    def root(self, a: torch.Tensor) -> torch.Tensor:
        """Return sqrt(a) + rho."""
        return a[0].sqrt() + self.rho


class Norm(Matrix):
    """An average of norms."""

    def zeros(self, x: torch.Tensor) -> torch.Tensor:
        """Return a single 0."""
        return x.new_zeros(1, 1)

    def averaged(self, a: torch.Tensor, w: torch.Tensor, theta: float) -> torch.Tensor:
        """Return a."""
        return theta * a + (1 - theta) * torch.linalg.vector_norm(w)

    def root(self, a: torch.Tensor) -> torch.Tensor:
        """Return a + rho."""
        return a[0] + self.rho


class Belief(Adam):
    """The square root of an average of squared changes."""

    rows = 2

    def averaged(self, a: torch.Tensor, w: torch.Tensor, theta: float) -> torch.Tensor:
        """Return a, and w for the next update."""
        return torch.stack([theta * a[0] + (1 - theta) * (w - a[1]) ** 2, w])


class AMSGrad(Matrix):
    """The square root of the largest average of squares so far."""

    rows = 2

    def averaged(self, a: torch.Tensor, w: torch.Tensor, theta: float) -> torch.Tensor:
        """Return a and b."""
        new = theta * a[0] + (1 - theta) * w**2
        return torch.stack([new, torch.maximum(a[1], new)])

    def root(self, a: torch.Tensor) -> torch.Tensor:
        """Return sqrt(b) + rho."""
        return a[1].sqrt() + self.rho


MATRICES: dict[str, type[Matrix]] = {
    "identity": Identity,
    "adam": Adam,
    "norm": Norm,
    "belief": Belief,
    "amsgrad": AMSGrad,
}

_ADAPTIVE = {"matrix": tuple(name for name in MATRICES if name != "identity")}

THETA = param(0.9, "decay rate of the matrices", above=0, below=1, only=_ADAPTIVE)
RHO = param(
    0.1,
    "added to the matrices, their smallest entry; small values give long steps where gradients cancel",
    above=0,
    only=_ADAPTIVE,
)
FIRST_MATRIX = param(
    "average",
    "the matrices before the first synchronisation: from the mean of the first estimates ('average'), from a = 0 "
    "('accumulator': rho I), or I",
    choices=("average", "accumulator", "identity"),
    only=_ADAPTIVE,
)
"""Options of the algorithms with a matrix, which their option ``matrix`` names."""


def second_moment(optimizer: str, v: torch.Tensor, square: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the second moment of Adagrad, Yogi or Adam after a gradient with this square."""
    if optimizer == "adagrad":
        return v + square
    if optimizer == "yogi":
        return v - (1 - beta) * square * torch.sign(v - square)
    return torch.lerp(square, v, beta)


def divided(w: torch.Tensor, diagonal: torch.Tensor) -> torch.Tensor:
    """Return A^{-1} w."""
    return w / diagonal if diagonal.shape[-1] else w
