"""Worlds without levels: quadratics, softmax regression, its agnostic form, and models with samples on the server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
import torch
from torch import nn

import fedstrata as fs
from saddle_worlds import binary_data, class_data
from worlds import SIZES, Arrays, Draw, N, Vector, World, near, start, tensors

FEATURES, CLASSES = 3, 4
MIXTURE = (0.3, 0.15, 0.05, 0.4, 0.1)


@dataclass(frozen=True)
class Plain(World):
    """The loss and its gradient on a batch. With a dual it is the agnostic problem: f_k is N y_k times the loss."""

    loss: Callable[[Arrays, Vector], float]
    gradient: Callable[[Arrays, Vector], Vector]

    def check(self, problem: fs.Problem, draw: Draw, client: int, rng: np.random.Generator) -> None:
        x, arrays = self.x0 + rng.normal(size=len(self.x0)), draw(0)
        at, batch = torch.from_numpy(x), tensors(arrays)
        if problem.y0 is None:
            near(self.loss(arrays, x), problem.outer(at, batch))
            near(self.gradient(arrays, x), torch.func.grad(problem.outer)(at, batch))
            return
        batch = (*batch, torch.tensor(client))
        in_x, in_y = torch.func.grad(problem.outer, argnums=(0, 1))(at, problem.y0, batch)
        weight = N * float(problem.y0[client])
        near(weight * self.loss(arrays, x), problem.outer(at, problem.y0, batch))
        near(weight * self.gradient(arrays, x), in_x)
        near(N * self.loss(arrays, x) * np.eye(N)[client], in_y)


def quadratic_world() -> Plain:
    """f_k(x) = mean of 1/2 sum_j h_j (x_j - b_j)^2 over the client's rows."""
    rng = np.random.default_rng(1)
    pairs = [(rng.uniform(0.3, 3.0, (n, 6)), rng.normal(size=(n, 6)) + 2 * rng.normal()) for n in SIZES]

    def outer(x: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        h, b = batch
        return 0.5 * (h * (x - b) ** 2).sum(1).mean()

    def loss(batch: Arrays, x: Vector) -> float:
        h, b = batch
        return float(0.5 * np.mean(np.sum(h * (x - b) ** 2, axis=1)))

    def gradient(batch: Arrays, x: Vector) -> Vector:
        h, b = batch
        return np.mean(h * (x - b), axis=0)

    problem = start(fs.Problem(outer, torch.zeros(6, dtype=torch.float64), name="quadratic"))
    return Plain(problem, fs.FederatedData.from_arrays(pairs), loss, gradient)


def softmax_world(agnostic: bool = False) -> Plain:
    """Softmax regression with a bias; losses differ widely between clients."""
    rng = np.random.default_rng(2)
    pairs = []
    for k, n in enumerate(SIZES):
        inputs = rng.normal(size=(n, FEATURES)) + rng.normal(size=FEATURES)
        pairs.append((inputs, rng.integers(CLASSES, size=n) if k else np.arange(n) % CLASSES))

    def log_softmax(batch: Arrays, x: Vector) -> Vector:
        cut = CLASSES * FEATURES
        z = batch[0] @ x[:cut].reshape(CLASSES, FEATURES).T + x[cut:]
        return z - np.log(np.exp(z).sum(1, keepdims=True))

    def loss(batch: Arrays, x: Vector) -> float:
        return float(-log_softmax(batch, x)[np.arange(len(batch[1])), batch[1]].mean())

    def gradient(batch: Arrays, x: Vector) -> Vector:
        inputs, targets = batch
        error = (np.exp(log_softmax(batch, x)) - np.eye(CLASSES)[targets]) / len(targets)
        return np.concatenate([(error.T @ inputs).ravel(), error.sum(0)])

    linear = nn.Linear(FEATURES, CLASSES, dtype=torch.float64)
    problem = start(fs.agnostic(linear, N, prior=False), *MIXTURE) if agnostic else start(fs.erm(linear, prior=False))
    return Plain(problem, fs.FederatedData.from_arrays(pairs, classes=CLASSES), loss, gradient)


PLAIN: dict[str, Callable[[], Plain]] = {"quadratic": cache(quadratic_world), "softmax": cache(softmax_world)}
MIXTURES: dict[str, Callable[[], Plain]] = {"agnostic softmax": cache(lambda: softmax_world(agnostic=True))}


# --- samples on the server -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Labelled(World):
    """The gradient of the mean of a batch's losses, each with a weight. ``matrix`` is the last layer's place in x."""

    gradient: Callable[[Arrays, Vector, Vector], Vector]
    matrix: slice

    @cached_property
    def server(self) -> fs.FederatedData:
        """The server's samples, with each class as a client."""
        assert self.data.auxiliary is not None
        return replace(self.data, train=self.data.auxiliary)

    def check(self, problem: fs.Problem, draw: Draw, client: int, rng: np.random.Generator) -> None:
        x, arrays = self.x0 + rng.normal(size=len(self.x0)), draw(0)
        weights = rng.uniform(0.5, 2.0, size=len(arrays[1]))

        def loss(x: torch.Tensor) -> torch.Tensor:
            assert problem.flat is not None
            logits, targets = problem.flat(x, torch.from_numpy(arrays[0])), torch.from_numpy(arrays[1])
            of_samples = (
                nn.functional.cross_entropy(logits, targets, reduction="none")
                if logits.shape[1] > 1
                else nn.functional.binary_cross_entropy_with_logits(logits[:, 0], targets.double(), reduction="none")
            )
            return (torch.from_numpy(weights) * of_samples).mean()

        near(self.gradient(arrays, x, weights), torch.func.grad(loss)(torch.from_numpy(x)))


def with_samples(data: fs.FederatedData, *counts: int) -> fs.FederatedData:
    """The same clients, with this many samples of each class on the server."""
    rng, classes = np.random.default_rng(8), len(counts)
    targets = rng.permutation(np.repeat(np.arange(classes), counts))
    features = data.train.arrays[0].shape[1]
    centres = rng.normal(size=(classes, features))
    return data.with_auxiliary(centres[targets] + 0.7 * rng.normal(size=(len(targets), features)), targets)


def one_logit() -> Labelled:
    def gradient(batch: Arrays, x: Vector, weights: Vector) -> Vector:
        inputs, targets = batch
        error = weights * (1 / (1 + np.exp(-(inputs @ x[:3] + x[3]))) - targets) / len(targets)
        return np.append(error @ inputs, error.sum())

    problem = start(fs.erm(nn.Linear(3, 1, dtype=torch.float64), "binary_cross_entropy", prior=False))
    return Labelled(problem, with_samples(binary_data(), 7, 3), gradient, slice(0, 3))


def softmax_error(z: Vector, targets: Vector, weights: Vector) -> Vector:
    """The gradient in the logits."""
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    return weights[:, None] * (p - np.eye(3)[targets]) / len(targets)


def three_logits() -> Labelled:
    def gradient(batch: Arrays, x: Vector, weights: Vector) -> Vector:
        inputs, targets = batch
        error = softmax_error(inputs @ x[:6].reshape(3, 2).T + x[6:], targets, weights)
        return np.concatenate([(error.T @ inputs).ravel(), error.sum(0)])

    problem = start(fs.erm(nn.Linear(2, 3, dtype=torch.float64), prior=False))
    return Labelled(problem, with_samples(class_data(), 6, 3, 5), gradient, slice(0, 6))


def hidden_layer() -> Labelled:
    """Two features, four hidden units, three logits; the last layer's matrix is in the middle of x."""

    def gradient(batch: Arrays, x: Vector, weights: Vector) -> Vector:
        inputs, targets = batch
        first, second = x[:8].reshape(4, 2), x[12:24].reshape(3, 4)
        hidden = np.tanh(inputs @ first.T + x[8:12])
        error = softmax_error(hidden @ second.T + x[24:], targets, weights)
        below = (error @ second) * (1 - hidden**2)
        parts = (below.T @ inputs).ravel(), below.sum(0), (error.T @ hidden).ravel(), error.sum(0)
        return np.concatenate(parts)

    network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return Labelled(start(fs.erm(network, prior=False)), with_samples(class_data(), 6, 3, 5), gradient, slice(12, 24))


LABELLED: dict[str, Callable[[], Labelled]] = {
    "one logit": cache(one_logit),
    "three logits": cache(three_logits),
    "hidden layer": cache(hidden_layer),
}
