"""What tests of several algorithms share: examples of every class, what a run ends with, and how far two are apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

import fedstrata as fs
from fedstrata.core.options import options_of
from fedstrata.training.states import tensors_of
from saddle_worlds import SADDLES
from support import play, smooth_example
from towers import TOWERS

Example = tuple[fs.Problem, fs.FederatedData]
Arrays = tuple[torch.Tensor, ...]

RATE, DUAL = 0.15, 0.25

PLAIN, DATA = smooth_example()
SIZE = len(PLAIN.x0)


def bent(u: torch.Tensor, batch: Arrays) -> torch.Tensor:
    """A nonlinear inner function whose Jacobian is not symmetric, and depends on the data."""
    mix = torch.linspace(-1.0, 1.0, SIZE * SIZE, dtype=u.dtype).view(SIZE, SIZE).sin() / 3
    return u + torch.tanh(mix @ u + batch[0].mean())


def squeezed(u: torch.Tensor, batch: Arrays) -> torch.Tensor:
    return torch.sin(u) + 0.5 * u * batch[0].std()


def shifted(u: torch.Tensor, batch: Arrays) -> torch.Tensor:
    """A linear inner function whose noise is in its value only, not the same everywhere: softmax must see it."""
    mix = torch.linspace(-1.0, 1.0, SIZE * SIZE, dtype=u.dtype).view(SIZE, SIZE).cos() / 2
    return mix @ u + torch.linspace(-1.0, 2.0, SIZE, dtype=u.dtype) * batch[0].mean()


def composed(*levels: Callable[..., torch.Tensor], inner_mean: Any = "local") -> fs.Problem:
    return fs.Problem(PLAIN.outer, PLAIN.x0, levels=levels, inner_mean=inner_mean, name="composed")


QUADRATIC = fs.quadratic(clients=4, dimension=4, samples=9)
EXAMPLES: dict[str, Example] = {
    "softmax": (PLAIN, DATA),
    "quadratic": (QUADRATIC.problem, QUADRATIC.data),
    "bent": (composed(bent), DATA),
    "bent twice": (composed(bent, squeezed), DATA),
    "bent, global": (composed(bent, inner_mean="global"), DATA),
    "one Jacobian": (composed(shifted), DATA),
}


@cache
def example(name: str) -> Example:
    if name in EXAMPLES:
        return EXAMPLES[name]
    world = (SADDLES if name in SADDLES else TOWERS)[name]()
    return world.problem, world.data


def quick(kind: Any, **options: Any) -> fs.Algorithm:
    """The algorithm with two local steps, if it has any: enough for these tests, and faster than its defaults."""
    return kind(**({"steps": 2} if "steps" in options_of(kind) else {}), **options)


def alone(data: fs.FederatedData, k: int = 1) -> fs.FederatedData:
    """One of the clients, by itself."""
    return fs.FederatedData.from_arrays([data.train.of_client(k)], classes=data.classes)


def vectors(
    algorithm: fs.Algorithm, problem: fs.Problem, data: fs.FederatedData, rounds: int, **run: Any
) -> dict[str, torch.Tensor]:
    """The server's vectors after ``rounds`` rounds, by name: x, y, and the algorithm's own."""
    state = play(algorithm, problem, data, rounds, chunk=3, seed=7, **run)[0]
    x, y = algorithm.solution(state)
    named = {**tensors_of(algorithm, state), "x": x, "y": x[:0] if y is None else y}
    return {name: value for name, value in named.items() if value.numel()}


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], keys: str = "x y") -> float:
    return max(float((one[key] - other[key]).abs().max()) for key in keys.split() if key in other)


def descent(
    problem: fs.Problem,
    data: fs.FederatedData,
    steps: int,
    lr: float = RATE,
    dual_lr: float = DUAL,
    weighting: str = "uniform",
    weight_decay: float = 0.0,
    alternating: bool = False,
) -> dict[str, torch.Tensor]:
    """Descend in x and ascend in y on the mean over clients of f(G(x), y), by autograd; ``alternating``: y first."""
    weights = torch.from_numpy(data.sizes).double() if weighting == "samples" else torch.ones(data.clients).double()

    def gradients(*at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, *y = (v.clone().requires_grad_() for v in at)
        losses = []
        for k in range(data.clients):
            u, batch = x, data.train.of_client(k)
            for level in problem.levels:
                u = level(u, batch)
            losses.append(problem.outer(u, *y, batch if problem.outer_draws else ()))
        return torch.autograd.grad(weights @ torch.stack(losses) / weights.sum(), (x, *y))

    x, *y = (v for v in (problem.x0, problem.y0) if v is not None)
    for _ in range(steps):
        risen = [problem.projected(v + dual_lr * gradients(x, v)[1]) for v in y]
        x, y = x - lr * (gradients(x, *(risen if alternating else y))[0] + weight_decay * x), risen
    return {"x": x, **({"y": y[0]} if y else {})}
