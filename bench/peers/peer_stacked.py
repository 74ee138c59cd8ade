"""Stacked weights by hand: one tensor per layer with a leading client axis, all clients in every operation.

Dense models use batched matrix products and plain autograd; the others ``torch.func.vmap`` of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from jobs import LEARNING_RATE, Work
from protocol import serve
from torch_models import loss_of, started, tensors

Gradients = Callable[[list[torch.Tensor], torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]


def dense_loss(weights: list[torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum over clients of their mean losses, for one linear layer; inputs [C, B, ...]."""
    if len(weights) == 1:
        return torch.bmm(inputs, weights[0].transpose(1, 2)).mean((1, 2)).sum()
    weight, bias = weights
    logits = torch.baddbmm(bias.unsqueeze(1), inputs.flatten(2), weight.transpose(1, 2))
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / targets.shape[1]


def gradients_of(work: Work) -> Gradients:
    """Return a function from weights [C, ...] and batches [C, B, ...] to gradients [C, ...]."""
    model, loss = started(work), loss_of(work.job.model)
    names = [name for name, _ in model.named_parameters()]

    def dense(weights: list[torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = [weight.detach().requires_grad_() for weight in weights]
        return torch.autograd.grad(dense_loss(weights, inputs, targets), weights)

    def one(weights: list[torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss(functional_call(model, dict(zip(names, weights, strict=True)), (inputs,)), targets)

    return dense if work.job.model in ("trivial", "logreg") else vmap(grad(one))


class Stacked:
    """The weights of all clients of a cohort in one tensor per layer."""

    def __init__(self, work: Work) -> None:
        self.work, self.done = work, 0
        self.gradients = gradients_of(work)
        self.inputs, self.targets = tensors(work)
        self.server = [value.detach() for value in started(work).parameters()]

    def run(self, rounds: int) -> None:
        """Run rounds."""
        job = self.work.job
        for _ in range(rounds):
            cohort = torch.tensor(self.work.cohort(self.done)).unsqueeze(1)
            weights = [value.expand(job.cohort, *value.shape).clone() for value in self.server]
            drawn = torch.randint(0, job.rows, (job.steps, job.cohort, job.batch))
            for batch in drawn:
                found = self.gradients(weights, self.inputs[cohort, batch], self.targets[cohort, batch])
                for weight, gradient in zip(weights, found, strict=True):
                    weight.sub_(gradient, alpha=LEARNING_RATE)
            self.server = [weight.mean(0) for weight in weights]
            self.done += 1

    def weights(self) -> list[np.ndarray]:
        """Return the server's weights."""
        return [value.numpy() for value in self.server]


if __name__ == "__main__":
    serve(Stacked, "torch")
