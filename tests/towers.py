"""Small problems of several levels, each for the library and in NumPy with derivatives by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

import fedstrata as fs
from fedstrata.problems.projections import ball, box, simplex
from reference.drfa import project_simplex
from saddle_worlds import HIGH, LOW, auc_world, binary_data, into_ball
from worlds import SIZES, Arrays, Draw, N, Vector, World, logistic, near, start, tensors

DUAL = 3
INNER_LR, SHARE = 0.8, 0.3
BEND = 0.3
WEIGHT, SMOOTHING = 0.7, 0.2

Slopes = tuple[Vector, Vector | None]


@dataclass(frozen=True)
class Tower(World):
    """The levels, numbered from 1, and the gradients of f.

    level:    g_j(u) on a batch.
    pullback: J_j(u)^T c on a batch.
    outer:    the gradients of f in u and in y on a batch; None for y and its gradient where there is no dual.
    project:  the projection of the dual, if it is not free.
    """

    level: Callable[[int, Arrays, Vector], Vector]
    pullback: Callable[[int, Arrays, Vector, Vector], Vector]
    outer: Callable[[Arrays, Vector, Vector | None], Slopes]
    project: Callable[[Vector], Vector] | None = None
    prepare: Callable[[Any], Tower] | None = None

    @property
    def levels(self) -> int:
        return len(self.problem.levels)

    def check(self, problem: fs.Problem, draw: Draw, client: int, rng: np.random.Generator) -> None:
        u = self.x0 + 0.3 * rng.normal(size=len(self.x0))
        for j, level in enumerate(problem.levels, 1):
            batch = tensors(draw(j))
            value, pull = torch.func.vjp(lambda u, g=level, batch=batch: g(u, batch), torch.from_numpy(u))
            c = rng.normal(size=len(value))
            near(self.level(j, draw(j), u), value)
            near(self.pullback(j, draw(j), u, c), pull(torch.from_numpy(c))[0])
            u = value.numpy() + 0.3 * rng.normal(size=len(value))
        y = None if self.y0 is None else self.y0 + rng.normal(size=len(self.y0))
        at = [torch.from_numpy(v) for v in (u, y) if v is not None]
        slopes = torch.func.grad(problem.outer, argnums=tuple(range(len(at))))(*at, tensors(draw(0)))
        expected = [slope for slope in self.outer(draw(0), u, y) if slope is not None]
        for found, slope in zip(expected, slopes, strict=True):
            near(found, slope)
        assert (problem.project_y is None) == (self.project is None)
        if self.project is not None and y is not None:
            near(self.project(y), problem.projected(torch.from_numpy(y)))


# --- nothing is linear, and every level has its own length -----------------------------------------------------------


def curved(*dims: int, dual: bool = True, pull: float = 0.0) -> Tower:
    """x in R^dims[0], level j in R^dims[j]; clients differ in every level and in f. ``pull`` drives y apart."""
    rng = np.random.default_rng([1, *dims])
    count, most = len(dims) - 1, max(*dims, DUAL)
    pairs = []
    for n in SIZES:
        slopes = 0.5 * rng.normal(size=(n, count + 1)) + 0.4 * rng.normal(size=count + 1)
        pairs.append((slopes, rng.normal(size=(n, most)) + 0.5 * rng.normal(size=most)))
    turns = [rng.normal(size=(m, before)) / np.sqrt(before) for before, m in pairwise(dims)]
    last, turn = dims[-1], rng.normal(size=(DUAL, dims[-1]))
    drive = pull * np.array([1.0, -0.8, 0.4])

    def function(j: int) -> Any:
        def value(u: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
            a, b = batch
            z, s, m = torch.from_numpy(turns[j - 1]) @ u, a[:, j - 1 : j], dims[j]
            return (0.4 * z + ((1 + s) * z).tanh() + 0.1 * b[:, :m] * z**2 + 0.3 * b[:, -m:]).mean(0)

        return value

    def plain(u: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        a, b = batch
        return (0.5 * (1 + 0.3 * a[:, -1:]) * (u - b[:, :last]) ** 2).sum(1).mean() + 0.3 * u.cosh().log().sum()

    def saddle(u: torch.Tensor, y: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        b = batch[1][:, -DUAL:]
        coupled = y * ((torch.from_numpy(turn) @ u).tanh() + 0.5 * b) - 0.5 * (1 + 0.5 * b**2) * y**2
        return plain(u, batch) + coupled.sum(1).mean() + torch.from_numpy(drive) @ y

    def level(j: int, batch: Arrays, u: Vector) -> Vector:
        a, b = batch
        z, s, m = turns[j - 1] @ u, a[:, j - 1 : j], dims[j]
        return np.mean(0.4 * z + np.tanh((1 + s) * z) + 0.1 * b[:, :m] * z**2 + 0.3 * b[:, -m:], axis=0)

    def pullback(j: int, batch: Arrays, u: Vector, c: Vector) -> Vector:
        a, b = batch
        z, s = turns[j - 1] @ u, a[:, j - 1 : j]
        slope = 0.4 + (1 + s) * (1 - np.tanh((1 + s) * z) ** 2) + 0.2 * b[:, : dims[j]] * z
        return turns[j - 1].T @ (slope.mean(0) * c)

    def outer(batch: Arrays, u: Vector, y: Vector | None) -> Slopes:
        a, b = batch
        in_u = np.mean((1 + 0.3 * a[:, -1:]) * (u - b[:, :last]), axis=0) + 0.3 * np.tanh(u)
        if y is None:
            return in_u, None
        z, b = turn @ u, b[:, -DUAL:]
        in_y = np.tanh(z) + np.mean(0.5 * b - (1 + 0.5 * b**2) * y, axis=0) + drive
        return in_u + turn.T @ (y * (1 - np.tanh(z) ** 2)), in_y

    problem = fs.multilevel(
        [function(j) for j in range(1, count + 1)],
        saddle if dual else plain,
        torch.zeros(dims[0], dtype=torch.float64),
        torch.zeros(DUAL, dtype=torch.float64) if dual else None,
        name="curved",
    )
    problem = start(problem, *((0.4, -0.6, 0.3) if dual else ()))
    return Tower(problem, fs.FederatedData.from_arrays(pairs), level, pullback, outer)


def within(tower: Tower, project_y: Any, project: Callable[[Vector], Vector], *y0: float) -> Tower:
    """The same functions, the dual from a point of a set and projected onto it."""
    y = torch.tensor(y0, dtype=torch.float64)
    return replace(tower, problem=replace(tower.problem, project_y=project_y, y0=y), project=project)


# --- gradient steps, and the AUC after them --------------------------------------------------------------------------


def auc_tower(levels: int, p: float | None = SHARE, first_order: bool = False, **options: Any) -> Tower:
    """A linear score with a bias: x = (weights, bias, a, b)."""
    linear = nn.Linear(3, 1, dtype=torch.float64)
    more: dict[str, Any] = {"levels": levels, "inner_lr": INNER_LR, "first_order": first_order, "p": p, **options}
    problem = start(fs.compositional_auc(linear, **more), 0.3)

    def level(j: int, batch: Arrays, u: Vector) -> Vector:
        return np.concatenate([u[:4] - INNER_LR * logistic(batch, u[:4])[1], u[4:]])

    def pullback(j: int, batch: Arrays, u: Vector, c: Vector) -> Vector:
        turned = 0.0 if first_order else logistic(batch, u[:4])[2] @ c[:4]
        return np.concatenate([c[:4] - INNER_LR * turned, c[4:]])

    outside = auc_world(p=p, **options)

    def known(paper: Any = None) -> Tower:
        world = outside if outside.prepare is None or paper is None else outside.prepare(paper)

        def outer(batch: Arrays, u: Vector, y: Vector | None) -> Slopes:
            assert y is not None
            return world.gradient(batch, 0, u, y)

        return Tower(problem, binary_data(), level, pullback, outer, world.project)

    return replace(known(), prepare=known if p is None else None)


def forward_tower(levels: int) -> Tower:
    """The same with Hessian-vector products by forward mode, as for models of many convolutions."""
    tower = auc_tower(levels)
    steps: Any = tower.problem.levels
    assert not any(step.forward for step in steps)
    return replace(tower, problem=replace(tower.problem, levels=tuple(replace(step, forward=True) for step in steps)))


def network_tower(levels: int) -> Tower:
    """A hidden layer and two logits; derivatives are autograd's, of functions written here."""
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    size = 3 * 4 + 4 + 4 * 2 + 2

    def logits(w: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        hidden = (inputs @ w[:12].reshape(4, 3).T + w[12:16]).tanh()
        return hidden @ w[16:24].reshape(2, 4).T + w[24:26]

    def step(u: torch.Tensor, batch: Arrays) -> torch.Tensor:
        inputs, targets = map(torch.from_numpy, batch)
        loss = nn.functional.cross_entropy(logits(u[:size], inputs), targets)
        (slope,) = torch.autograd.grad(loss, u, create_graph=True)
        return u - INNER_LR * slope

    def value(u: torch.Tensor, alpha: torch.Tensor, batch: Arrays) -> torch.Tensor:
        inputs, targets = map(torch.from_numpy, batch)
        found = logits(u[:size], inputs)
        s, p, a, b = torch.sigmoid(found[:, 1] - found[:, 0]), SHARE, u[size], u[size + 1]
        of_positives = (1 - p) * (s - a) ** 2 - 2 * (1 + alpha) * (1 - p) * s
        of_negatives = p * (s - b) ** 2 + 2 * (1 + alpha) * p * s
        return torch.where(targets == 1, of_positives, of_negatives).mean() - p * (1 - p) * (alpha**2).sum()

    def leaf(v: Vector) -> torch.Tensor:
        return torch.tensor(v, requires_grad=True)

    def level(j: int, batch: Arrays, u: Vector) -> Vector:
        with torch.enable_grad():
            return step(leaf(u), batch).detach().numpy()

    def pullback(j: int, batch: Arrays, u: Vector, c: Vector) -> Vector:
        with torch.enable_grad():
            at = leaf(u)
            return torch.autograd.grad(step(at, batch), at, torch.from_numpy(c))[0].numpy()

    def outer(batch: Arrays, u: Vector, y: Vector | None) -> Slopes:
        assert y is not None
        with torch.enable_grad():
            at = leaf(u), leaf(y)
            in_u, in_y = torch.autograd.grad(value(*at, batch), at)
        return in_u.numpy(), in_y.numpy()

    problem = fs.compositional_auc(network, levels=levels, inner_lr=INNER_LR, p=SHARE)
    return Tower(start(problem, 0.3), binary_data(), level, pullback, outer)


# --- the library's other problems of several levels ------------------------------------------------------------------


def turned_tower(levels: int, dual: bool = True) -> Tower:
    """``fs.tower``. Its rotations are read off its levels: at pi e_i the sine is 0."""
    built = fs.tower(clients=N, dimension=4, levels=levels, samples=8, bend=BEND, noise=0.5, dual=dual)
    rows = torch.zeros(1, levels, 5, dtype=torch.float64)
    axes = torch.eye(4, dtype=torch.float64)
    turns = [torch.stack([g(torch.pi * e, (rows,)) / torch.pi for e in axes], 1).numpy() for g in built.problem.levels]

    def level(j: int, batch: Arrays, u: Vector) -> Vector:
        noise = batch[0][:, j - 1].mean(0)
        return turns[j - 1] @ (u + (BEND + noise[0]) * np.sin(u)) + noise[1:]

    def pullback(j: int, batch: Arrays, u: Vector, c: Vector) -> Vector:
        noise = batch[0][:, j - 1].mean(0)
        return (1 + (BEND + noise[0]) * np.cos(u)) * (turns[j - 1].T @ c)

    def outer(batch: Arrays, u: Vector, y: Vector | None) -> Slopes:
        away = u - batch[1].mean(0)
        return (away, None) if y is None else (y, away - y)

    problem = start(built.problem, 0.4, -0.6, 0.3, 0.2) if dual else built.problem
    return Tower(problem, built.data, level, pullback, outer)


def risk_tower() -> Tower:
    """Risk-averse logistic regression: 4 numbers, then 5, then 2; f uses no data."""
    linear = nn.Linear(3, 1, dtype=torch.float64)
    more: dict[str, Any] = {"weight": WEIGHT, "smoothing": SMOOTHING, "loss": "binary_cross_entropy"}
    problem = start(fs.risk_averse(linear, **more, prior=False))

    def samples(batch: Arrays, x: Vector) -> tuple[Vector, Vector]:
        """The loss of each sample, and its gradient."""
        inputs, targets = batch
        rows = np.concatenate([inputs, np.ones((len(inputs), 1))], axis=1)
        z = rows @ x
        return np.log1p(np.exp(-z)) + (1 - targets) * z, (1 / (1 + np.exp(-z)) - targets)[:, None] * rows

    def level(j: int, batch: Arrays, u: Vector) -> Vector:
        if j == 1:
            return np.append(u, samples(batch, u)[0].mean())
        above = np.maximum(samples(batch, u[:-1])[0] - u[-1], 0.0)
        return np.array([u[-1], np.mean(above**2)])

    def pullback(j: int, batch: Arrays, u: Vector, c: Vector) -> Vector:
        if j == 1:
            return c[:-1] + c[-1] * samples(batch, u)[1].mean(0)
        losses, slopes = samples(batch, u[:-1])
        above = np.maximum(losses - u[-1], 0.0)
        in_x = 2 * c[1] * np.mean(above[:, None] * slopes, axis=0)
        return np.append(in_x, c[0] - 2 * c[1] * above.mean())

    def outer(batch: Arrays, u: Vector, y: Vector | None) -> Slopes:
        root = np.sqrt(max(u[1], 0.0) + SMOOTHING**2)
        return np.array([1.0, WEIGHT * 0.5 / root if u[1] > 0 else 0.0]), None

    return Tower(problem, binary_data(), level, pullback, outer)


def named(dims: tuple[int, ...]) -> str:
    return "-".join(map(str, dims))


DIMS = [(5, 1), (5, 3), (5, 1, 1), (5, 3, 7), (5, 1, 1, 1), (5, 3, 7, 1), (4, 6, 2, 5)]
TALL = (5, 3, 7, 1)
HOME = named(TALL)
SETS: dict[str, tuple[Any, ...]] = {
    "ball": (ball(0.5), into_ball, 0.2, -0.3, 0.1),
    "box": (box(LOW, HIGH), lambda y: np.clip(y, LOW, HIGH), 0.2, -0.1, 0.1),
    "simplex": (simplex, project_simplex, 0.5, 0.1, 0.4),
}
TOWERS: dict[str, Callable[[], Tower]] = {
    **{named(dims): cache(lambda dims=dims: curved(*dims)) for dims in DIMS},
    **{f"{named(dims)}, no dual": cache(lambda dims=dims: curved(*dims, dual=False)) for dims in DIMS},
    **{f"{HOME}, {name}": cache(lambda set=set: within(curved(*TALL, pull=2.0), *set)) for name, set in SETS.items()},
    "5-3, ball": cache(lambda: within(curved(5, 3, pull=2.0), *SETS["ball"])),
    **{f"auc, {k}": cache(lambda k=k: auc_tower(k)) for k in (1, 2, 3)},
    "auc, 2, first order": cache(lambda: auc_tower(2, first_order=True)),
    "auc, 2, margin": cache(lambda: auc_tower(2, form="margin", margin=0.7)),
    "auc, 2, prepared, scaled": cache(lambda: auc_tower(2, p=None, scale_dual=True)),
    "auc, 2, forward mode": cache(lambda: forward_tower(2)),
    "auc, 2, network": cache(lambda: network_tower(2)),
    **{f"tower, {k}": cache(lambda k=k: turned_tower(k)) for k in (1, 2, 3)},
    "tower, no dual": cache(lambda: turned_tower(2, dual=False)),
    "risk averse": cache(risk_tower),
}
