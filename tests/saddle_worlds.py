"""Small saddle problems, each for the library and in NumPy with gradients written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

import fedstrata as fs
from fedstrata.problems.projections import ball, box, simplex
from reference.drfa import project_simplex
from worlds import SIZES, Arrays, Draw, N, Vector, World, near, start, tensors

D, P = 5, 3
RADIUS = 0.5
LOW, HIGH = -0.15, 0.3
MARGIN = 0.3
REGULARISE = 0.4

Pair = tuple[Vector, Vector]


@dataclass(frozen=True)
class Saddle(World):
    """The gradients in x and y on a batch of a client, and what else the problem has.

    project:  the projection of the dual, if it is not free.
    best:     the dual that maximises f at x on a batch, of problems that know it.
    """

    gradient: Callable[[Arrays, int, Vector, Vector], Pair]
    project: Callable[[Vector], Vector] | None = None
    best: Callable[[Arrays, Vector], Vector] | None = None
    prepare: Callable[[Any], Saddle] | None = None

    def check(self, problem: fs.Problem, draw: Draw, client: int, rng: np.random.Generator) -> None:
        x, y = (z + rng.normal(size=len(z)) for z in (self.x0, self.y0) if z is not None)
        arrays, at = draw(0), (torch.from_numpy(x), torch.from_numpy(y))
        batch = tensors(arrays)
        numbered = (*batch, torch.tensor(client)) if problem.numbered else batch
        slopes = torch.func.grad(problem.outer, argnums=(0, 1))(*at, numbered)
        for found, expected in zip(self.gradient(arrays, client, x, y), slopes, strict=True):
            near(found, expected)
        assert (problem.best_y is None) == (self.best is None)
        if problem.best_y is not None and self.best is not None:
            near(self.best(arrays, x), problem.best_y(at[0], batch))
        assert (problem.project_y is None) == (self.project is None)
        if self.project is not None:
            near(self.project(y), problem.projected(at[1]))


# --- nothing is linear -----------------------------------------------------------------------------------------------


def free_world(pull: float = 0.0) -> Saddle:
    """x in R^5, y in R^3; neither is linear, each gradient sees both, and the curvature in y depends on the batch.

    ``pull`` drives the entries of y apart.
    """
    rng = np.random.default_rng(1)
    pairs = [(0.6 * rng.normal(size=(n, P, D)) + 0.4 * rng.normal(), rng.normal(size=(n, P))) for n in SIZES]
    drive = pull * np.array([1.0, -0.8, 0.4])

    def outer(x: torch.Tensor, y: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        a, b = batch
        z = a @ x
        coupled = y * z.tanh() + 0.2 * y.sin() * z + 0.1 * b * z**2 - 0.5 * (1 + 0.5 * b**2) * y**2
        alone = 0.3 * x.cosh().log().sum() + 0.2 * (b.mean(0) * y).sin().sum() + torch.from_numpy(drive) @ y
        return coupled.sum(1).mean() + alone

    def gradient(batch: Arrays, k: int, x: Vector, y: Vector) -> Pair:
        a, b = batch
        z, mean = a @ x, b.mean(0)
        slope = y * (1 - np.tanh(z) ** 2) + 0.2 * np.sin(y) + 0.2 * b * z
        in_y = np.tanh(z) + 0.2 * np.cos(y) * z - (1 + 0.5 * b**2) * y
        in_x = np.einsum("nj,njd->d", slope, a) / len(a) + 0.3 * np.tanh(x)
        return in_x, in_y.mean(0) + 0.2 * mean * np.cos(mean * y) + drive

    problem = fs.Problem(outer, torch.zeros(D, dtype=torch.float64), y0=torch.zeros(P), name="free")
    return Saddle(start(problem, 0.4, -0.6, 0.3), fs.FederatedData.from_arrays(pairs), gradient)


def within(world: Saddle, project_y: Any, project: Callable[[Vector], Vector], *y0: float) -> Saddle:
    """The same functions, the dual from a point of a set and projected onto it."""
    y = torch.tensor(y0, dtype=torch.float64)
    return replace(world, problem=replace(world.problem, project_y=project_y, y0=y), project=project)


def into_ball(y: Vector) -> Vector:
    return y if np.linalg.norm(y) <= RADIUS else y * (RADIUS / np.linalg.norm(y))


# --- AUC -------------------------------------------------------------------------------------------------------------


@cache
def binary_data() -> fs.FederatedData:
    """Positives are rare, more so on some clients than on others, and one client has none; classes are apart."""
    rng = np.random.default_rng(2)
    pairs = []
    for k, n in enumerate(SIZES):
        targets = (rng.uniform(size=n) < (0.0 if k == 2 else 0.2 + 0.1 * k)).astype(np.int64)
        inputs = rng.normal(size=(n, 3)) + 0.5 * rng.normal(size=3) + 1.5 * targets[:, None]
        pairs.append((inputs, targets))
    return fs.FederatedData.from_arrays(pairs, classes=2)


def class_shares(data: fs.FederatedData, classes: int, weighting: str) -> Vector:
    """The share of each class, as the mean over clients weighs them."""
    counts = [np.bincount(data.train.of_client(k)[1].numpy(), minlength=classes) for k in range(N)]
    if weighting == "samples":
        return np.sum(counts, axis=0) / np.sum(counts)
    return np.mean([count / count.sum() for count in counts], axis=0)


def auc_world(p: float | None = 0.3, scale_dual: bool = False, aligned: bool = False, **options: Any) -> Saddle:
    """A linear score with a bias through a sigmoid: x = (weights, bias, a, b). ``aligned`` separates the classes."""
    margin = options.get("margin", 1.0)
    form = options.get("form", "square")
    problem = fs.auc(nn.Linear(3, 1, dtype=torch.float64), p=p, scale_dual=scale_dual, **options)
    problem = start(problem, 0.3)
    if aligned:
        x0 = torch.tensor([1.5, 1.2, 1.8, -2.0, 0.6, 0.3], dtype=torch.float64)
        problem = replace(problem, x0=x0, y0=torch.tensor([0.02], dtype=torch.float64))

    def score(batch: Arrays, x: Vector) -> tuple[Vector, Vector, Vector]:
        inputs, targets = batch
        s = 1 / (1 + np.exp(-(inputs @ x[:3] + x[3])))
        return s, (targets == 1).astype(float), (targets == 0).astype(float)

    def known(p: float) -> Saddle:
        scale = np.sqrt(p * (1 - p)) if scale_dual else 1.0

        def gradient(batch: Arrays, k: int, x: Vector, y: Vector) -> Pair:
            """The terms of F one after the other, as in its docstring; alpha = y / scale."""
            s, positive, negative = score(batch, x)
            alpha, a, b = y[0] / scale, x[4], x[5]
            lead = 1 + alpha if form == "square" else alpha
            in_s = 2 * (1 - p) * (s - a) * positive + 2 * p * (s - b) * negative
            in_s = in_s + 2 * lead * (p * negative - (1 - p) * positive)
            in_logit = in_s * s * (1 - s) / len(s)
            in_a = np.mean(-2 * (1 - p) * (s - a) * positive)
            in_b = np.mean(-2 * p * (s - b) * negative)
            in_alpha = 2 * np.mean(p * s * negative - (1 - p) * s * positive) - 2 * p * (1 - p) * alpha
            if form == "margin":
                in_alpha = in_alpha + 2 * p * (1 - p) * margin
            return np.concatenate([in_logit @ batch[0], [in_logit.sum(), in_a, in_b]]), np.array([in_alpha / scale])

        def best(batch: Arrays, x: Vector) -> Vector:
            """The zero of the gradient in alpha, which is linear."""
            at_zero, at_one = (gradient(batch, 0, x, np.array([alpha * scale]))[1] for alpha in (0.0, 1.0))
            return scale * at_zero / (at_zero - at_one)

        project = (lambda y: np.maximum(y, 0.0)) if form == "margin" else None
        return Saddle(problem, binary_data(), gradient, project, best)

    if p is not None:
        return known(p)
    return replace(known(0.5), prepare=lambda paper: known(class_shares(binary_data(), 2, paper.weighting)[1]))


# --- fairness --------------------------------------------------------------------------------------------------------

CLASSES, FEATURES = 3, 2


@cache
def class_data() -> fs.FederatedData:
    rng = np.random.default_rng(5)
    pairs = []
    for n in SIZES:
        shares = rng.dirichlet(np.ones(CLASSES))
        targets = rng.choice(CLASSES, size=n, p=shares)
        pairs.append((rng.normal(size=(n, FEATURES)) + np.eye(CLASSES)[targets][:, :FEATURES], targets))
    return fs.FederatedData.from_arrays(pairs, classes=CLASSES)


def softmax(batch: Arrays, x: Vector, weights: Vector) -> tuple[Vector, Vector]:
    """The loss of each sample, and the gradient of their weighted mean, of softmax regression with a bias."""
    inputs, targets = batch
    cut = CLASSES * FEATURES
    z = inputs @ x[:cut].reshape(CLASSES, FEATURES).T + x[cut:]
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    error = weights[:, None] * (p - np.eye(CLASSES)[targets]) / len(targets)
    losses = -np.log(p[np.arange(len(targets)), targets])
    return losses, np.concatenate([(error.T @ inputs).ravel(), error.sum(0)])


def fair_world(over: str) -> Saddle:
    """Softmax regression; the dual weights classes, whose shares the clients are asked for, or numbered clients."""
    number = CLASSES if over == "classes" else N
    linear = nn.Linear(FEATURES, CLASSES, dtype=torch.float64)
    problem = fs.fair(linear, over=over, regularise=REGULARISE, **{over: number}, prior=False)  # type: ignore[arg-type]
    y0 = np.arange(1.0, number + 1) / np.arange(1.0, number + 1).sum()
    problem = start(problem, *y0)

    def of_clients(batch: Arrays, k: int, x: Vector, y: Vector) -> Pair:
        losses, in_x = softmax(batch, x, np.full(len(batch[1]), N * y[k]))
        return in_x, N * losses.mean() * np.eye(N)[k] - REGULARISE * y

    def known(weighting: str) -> Saddle:
        shares = class_shares(class_data(), CLASSES, weighting)

        def of_classes(batch: Arrays, k: int, x: Vector, y: Vector) -> Pair:
            targets = batch[1]
            losses, in_x = softmax(batch, x, (y / shares)[targets])
            in_y = np.array([np.mean(losses * (targets == c)) / shares[c] for c in range(CLASSES)])
            return in_x, in_y - REGULARISE * y

        return Saddle(problem, class_data(), of_classes, project_simplex)

    if over == "clients":
        return Saddle(problem, class_data(), of_clients, project_simplex)
    return replace(known("uniform"), prepare=lambda paper: known(paper.weighting))


SADDLES: dict[str, Callable[[], Saddle]] = {
    "free": cache(free_world),
    "ball": cache(lambda: within(free_world(pull=2.0), ball(RADIUS), into_ball, 0.2, -0.3, 0.1)),
    "box": cache(lambda: within(free_world(pull=2.0), box(LOW, HIGH), lambda y: np.clip(y, LOW, HIGH), 0.2, -0.1, 0.1)),
    "simplex": cache(lambda: within(free_world(pull=2.0), simplex, project_simplex, 0.5, 0.1, 0.4)),
    "auc": cache(auc_world),
    "auc, prepared, scaled": cache(lambda: auc_world(p=None, scale_dual=True)),
    "auc, margin": cache(lambda: auc_world(form="margin")),
    "auc, margin, active, scaled": cache(
        lambda: auc_world(form="margin", margin=MARGIN, scale_dual=True, aligned=True),
    ),
    "fair, classes": cache(lambda: fair_world("classes")),
    "fair, clients": cache(lambda: fair_world("clients")),
}
