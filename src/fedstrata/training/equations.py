"""Compare an algorithm with a NumPy version of its equations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fedstrata.algorithms.algorithm import Algorithm
from fedstrata.core.errors import invalid
from fedstrata.data.batch import Batch
from fedstrata.data.federated import FederatedData
from fedstrata.problems.problem import Problem
from fedstrata.training.examples import example_for, play
from fedstrata.training.metrics.objective import Layers


class NumpyClient:
    """The functions of one client on all of its data, as NumPy functions of vectors.

    size: the number of its training samples.
    """

    def __init__(self, problem: Problem, data: FederatedData, number: int) -> None:
        self.size = int(data.sizes[number])
        self._layers = Layers(problem, data, problem.x0, None)
        self._client = np.array([number])

    def loss(self, u: np.ndarray, y: np.ndarray | None = None) -> float:
        """Return the outer function f at u (and y)."""
        return float(self._layers.oracles.outer(_row(u), _row(y), self._batch(0)))

    def grads(self, u: np.ndarray, y: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
        """Return the gradients of f in u and, if y is passed, in y."""
        return tuple(g[0].numpy() for g in self._layers.oracles.outer_grads(_row(u), _row(y), self._batch(0)))

    def g(self, k: int, u: np.ndarray) -> np.ndarray:
        """Return the value of level k (from 1) at u."""
        return np.asarray(self._layers.oracles.level(k, _row(u), self._batch(k))[0])

    def g_vjp(self, k: int, u: np.ndarray, cotangent: np.ndarray) -> np.ndarray:
        """Return the transposed Jacobian of level k (from 1) at u times ``cotangent``."""
        return np.asarray(self._layers.oracles.level_vjp(k, _row(u), _row(cotangent), self._batch(k))[0])

    def _batch(self, level: int) -> Batch:
        return self._layers.batch(self._client, level)


def built(algorithm: Algorithm | type[Algorithm], **options: Any) -> Algorithm:
    """Return an algorithm, given as an instance or a class, with these options."""
    if isinstance(algorithm, Algorithm):
        return algorithm.replace(**options)
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        return algorithm(**options)
    raise invalid("algorithm", algorithm, "an algorithm or its class, e.g. fs.FedAvg")


Reference = Callable[[np.ndarray, np.ndarray, list[NumpyClient], int], Any]


@torch.no_grad()
def check_equations(
    algorithm: Algorithm | type[Algorithm], reference: Reference, rounds: int = 3, tolerance: float = 1e-9
) -> None:
    """Compare an algorithm with a NumPy version of its equations, on all data of every client in every step.

    algorithm: the algorithm, or its class.
    reference: ``(x, y, clients, rounds) -> x``, or ``-> (x, y)`` with a dual: the solution after ``rounds`` rounds from
               x and y, where ``clients`` has a :class:`NumpyClient` for each client.
    """
    algorithm = built(algorithm)
    problem, data = example_for(type(algorithm))
    y0 = problem.x0[:0] if problem.y0 is None else problem.y0
    for number in range(1, rounds + 1):
        state, _ = play(algorithm, problem, data, number)
        x, y = algorithm.solution(state)
        clients = [NumpyClient(problem, data, k) for k in range(data.clients)]
        expected = reference(problem.x0.numpy().copy(), y0.numpy().copy(), clients, number)
        pair = expected if isinstance(expected, tuple) else (expected,)
        for name, ours, theirs in zip("xy", (x, y), pair, strict=False):
            apart = np.inf if ours is None else float(np.abs(ours.numpy() - theirs).max())
            what = f"{algorithm.name}: {name} differs from the reference by {apart:.1g} after {number} rounds"
            if not apart <= tolerance:  # it may be NaN
                raise AssertionError(f"{what}, more than {tolerance:g}.")


def _row(vector: np.ndarray | None) -> Any:
    return None if vector is None else torch.from_numpy(np.array(vector)).unsqueeze(0)
