"""LocalSMCGDAM on compositional AUC, written by hand in plain PyTorch, for comparison in ``bench/levels.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.func import functional_call
from torch.nn import functional as F

import fedstrata as fs

P, LR = 0.05, 0.1
Tensors = tuple[torch.Tensor, ...]


class Case(NamedTuple):
    """A model, the shape of its inputs, and the number of samples in a batch."""

    name: str
    shape: tuple[int, ...]
    batch: int
    options: dict[str, object] = {}  # noqa: RUF012

    def model(self) -> torch.nn.Module:
        """Build the model, with one logit."""
        return fs.models.model(self.name, self.shape, 1, **self.options)

    def __str__(self) -> str:
        options = "".join(f" {k} {v}" for k, v in self.options.items())
        return f"{self.name}{options}, batch {self.batch}"


class Point(NamedTuple):
    """The variables of a client: x, y, the estimates h of the levels, the momenta p and q, without a client axis."""

    x: torch.Tensor
    y: torch.Tensor
    h: Tensors
    p: torch.Tensor
    q: torch.Tensor

    def copy(self) -> Point:
        """Return a copy in new memory."""
        return Point(self.x.clone(), self.y.clone(), tuple(v.clone() for v in self.h), self.p.clone(), self.q.clone())

    def vectors(self) -> Tensors:
        """Return all vectors in one tuple."""
        return (self.x, self.y, *self.h, self.p, self.q)


class ByHand:
    """Algorithm 1 written for speed: flat vectors, updated in place.

    The model is the module itself, with its parameters as views of the current vector. That is faster than
    ``functional_call`` on a flat vector, 1.1 times for a gradient of LeNet-5 and 1.6 times for one of the MLP: autograd
    need neither split a vector nor assemble a gradient.
    """

    def __init__(self, case: Case, data: fs.FederatedData, rates: fs.LocalSMCGDAM) -> None:
        self.model = case.model()
        self.parameters = list(self.model.parameters())
        self.names = [name for name, _ in self.model.named_parameters()]
        self.sizes = [p.numel() for p in self.parameters]
        self.size = sum(self.sizes)
        self.inputs, targets = data.train.arrays
        self.targets = targets.float()
        self.batch, self.steps = case.batch, rates.steps
        self.carried = 1 - min(1.0, rates.alpha * rates.eta**2)
        self.gamma_x, self.gamma_y = rates.gamma_x * rates.eta, rates.gamma_y * rates.eta
        self.rho_x, self.rho_y = min(1.0, rates.rho_x * rates.eta), min(1.0, rates.rho_y * rates.eta)

    def views(self, u: torch.Tensor) -> list[torch.Tensor]:
        """Return the model's weights as views of a vector."""
        return [v.view(p.shape) for v, p in zip(u[: self.size].split(self.sizes), self.parameters, strict=True)]

    def outputs(self, u: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Run the model with the weights in a vector."""
        for p, v in zip(self.parameters, self.views(u), strict=True):
            p.data = v
        return self.model(inputs).squeeze(1)

    def gradient(self, u: torch.Tensor, batch: Tensors, create_graph: bool = False) -> Tensors:
        """Return the gradient of the cross-entropy."""
        loss = F.binary_cross_entropy_with_logits(self.outputs(u, batch[0]), batch[1])
        return torch.autograd.grad(loss, self.parameters, create_graph=create_graph)

    def product(self, u: torch.Tensor, v: torch.Tensor, batch: Tensors) -> Tensors:
        """Return the Hessian of the cross-entropy times v."""
        return torch.autograd.grad(self.gradient(u, batch, create_graph=True), self.parameters, self.views(v))

    def auc_gradients(self, u: torch.Tensor, alpha: torch.Tensor, batch: Tensors) -> Tensors:
        """Return the gradient of the AUC loss in (weights, a, b), and in alpha."""
        outputs = self.outputs(u, batch[0])
        a, b, alpha = (v.detach().requires_grad_() for v in (u[-2:-1], u[-1:], alpha))
        loss = auc_loss(outputs, a, b, alpha, batch[1])
        *gradients, slope = torch.autograd.grad(loss, [*self.parameters, a, b, alpha])
        return torch.cat([g.reshape(-1) for g in gradients]), slope

    def draw(self, levels: int) -> list[Tensors]:
        """Draw a batch for each level and one for the AUC loss."""
        rows = [torch.randint(0, len(self.inputs), (self.batch,)) for _ in range(levels + 1)]
        return [(self.inputs[r], self.targets[r]) for r in rows]

    def carry_and_move(self, at: Point, batches: Sequence[Tensors]) -> None:
        """Begin a step: decay the estimates, then move x and y; takes K gradients."""
        x, y, h, p, q = at
        for j in reversed(range(len(h))):
            below = h[j - 1] if j else x
            h[j].sub_(below)
            torch._foreach_add_(self.views(h[j]), self.gradient(below, batches[j]), alpha=LR)
            h[j].mul_(self.carried)
        x.sub_(p, alpha=self.gamma_x)
        y.add_(q, alpha=self.gamma_y)

    def step(self, at: Point, batches: Sequence[Tensors]) -> None:
        """Take one local step, in place: 2K + 1 gradients and K Hessian-vector products."""
        self.carry_and_move(at, batches)
        x, y, h, p, q = at
        for j in range(len(h)):
            below = h[j - 1] if j else x
            h[j].add_(below)
            torch._foreach_sub_(self.views(h[j]), self.gradient(below, batches[j]), alpha=LR)
        u, v = self.auc_gradients(h[-1], y, batches[-1])
        for j in reversed(range(len(h))):
            torch._foreach_sub_(self.views(u), self.product(h[j - 1] if j else x, u, batches[j]), alpha=LR)
        p.lerp_(u, self.rho_x)
        q.lerp_(v, self.rho_y)

    def graph_holding_step(self, at: Point, batches: Sequence[Tensors]) -> None:
        """Take the same step, but hold every level's graph after its new gradient: K gradients fewer."""
        self.carry_and_move(at, batches)
        x, y, h, p, q = at
        held = []
        for j in range(len(h)):
            below = h[j - 1] if j else x
            leaves = [v.detach().requires_grad_() for v in self.views(below)]
            held.append((self.differentiable(leaves, batches[j]), leaves))
            h[j].add_(below)
            torch._foreach_sub_(self.views(h[j]), [g.detach() for g in held[-1][0]], alpha=LR)
        u, v = self.auc_gradients(h[-1], y, batches[-1])
        while held:
            torch._foreach_sub_(self.views(u), torch.autograd.grad(*held.pop(), self.views(u)), alpha=LR)
        p.lerp_(u, self.rho_x)
        q.lerp_(v, self.rho_y)

    def differentiable(self, weights: Sequence[torch.Tensor], batch: Tensors) -> Tensors:
        """Return the gradient of the cross-entropy with its graph."""
        outputs = functional_call(self.model, dict(zip(self.names, weights, strict=True)), (batch[0],)).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(outputs, batch[1])
        return torch.autograd.grad(loss, list(weights), create_graph=True)

    def all_at_once(self, at: Point, batches: Sequence[Tensors]) -> Tensors:
        """Return the gradient of the whole composition with one call of autograd, which holds every level's graph."""
        leaves = [v.detach().requires_grad_() for v in self.views(at.x)]
        weights: Sequence[torch.Tensor] = leaves
        for batch in batches[:-1]:
            gradient = self.differentiable(weights, batch)
            weights = [w - LR * g for w, g in zip(weights, gradient, strict=True)]
        inputs, targets = batches[-1]
        outputs = functional_call(self.model, dict(zip(self.names, weights, strict=True)), (inputs,)).squeeze(1)
        ends = [v.detach().requires_grad_() for v in (at.x[-2:-1], at.x[-1:], at.y)]
        return torch.autograd.grad(auc_loss(outputs, *ends, targets), [*leaves, *ends])

    def round(self, server: Point) -> Point:
        """Run a round of one client: copy the server's vectors, take the steps, and average."""
        at = server.copy()
        for _ in range(self.steps):
            self.step(at, self.draw(len(at.h)))
        total = [torch.zeros_like(v) for v in at.vectors()]
        torch._foreach_add_(total, at.vectors(), alpha=1.0)
        x, y, *h, p, q = total
        return Point(x, y, tuple(h), p, q)


def auc_loss(
    outputs: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Return F of ``fs.auc`` on a batch."""
    s = torch.sigmoid(outputs)
    terms = (1 - P) * (s - a) ** 2 * targets + P * (s - b) ** 2 * (1 - targets)
    terms = terms + 2 * (1 + alpha) * s * (P - targets)
    return terms.mean() - P * (1 - P) * alpha.squeeze() ** 2
