"""Oracles: values and derivatives of a problem for C clients at once, on tensors [C, .]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fedstrata.core.errors import FedstrataError
from fedstrata.data.batch import Batch
from fedstrata.problems.derivatives import Tensors
from fedstrata.problems.graphs.compiler import Compiler
from fedstrata.problems.problem import Problem
from fedstrata.problems.runner import Runner

Scale = Callable[[torch.Tensor], torch.Tensor]
"""Returns a factor of each client's step, [C, 1], from the gradient of f, [C, r]."""


class Chain(NamedTuple):
    """The results of one pass through all levels.

    gradient:    J_1^T ... J_K^T grad f, by the chain rule: [C, d].
    values:      the values of the levels, g_1(x), g_2(u_1)..g_K(u_{K-1}).
    outer_grads: the gradient of f at u_K, and in y if there is a dual.
    """

    gradient: torch.Tensor
    values: Tensors
    outer_grads: Tensors


class Oracles:
    """Values and derivatives of one problem, vectorised over a leading client axis.

    compiler: compiles them, if there is one.
    autocast: the lower precision in which they are computed where that is safe; None for that of x.
    """

    def __init__(self, problem: Problem, compiler: Compiler | None = None, autocast: torch.dtype | None = None) -> None:
        self.problem, self.compiler, self.autocast = problem, compiler, autocast
        self._runner = Runner(problem, compiler, autocast)
        # Identical levels share one traced graph.
        self._first = [problem.levels.index(level) + 1 for level in problem.levels]

    def of(self, problem: Problem) -> Oracles:
        """Return the oracles of another problem, computed in the same way."""
        return Oracles(problem, self.compiler, self.autocast)

    def outer(self, u: torch.Tensor, y: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """Return f for each client: [C]."""
        return self._runner.run("outer", (u, *self._dual(y)), [batch])[0]

    def outer_grads(self, u: torch.Tensor, y: torch.Tensor | None, batch: Batch) -> Tensors:
        """Return the gradient of f in u, and in y if there is a dual, for each client."""
        return self._runner.run("outer_grads", (u, *self._dual(y)), [batch])

    def descend(self, x: torch.Tensor, batch: Batch, rate: float, keep: float = 1.0) -> torch.Tensor:
        """Move x in place to ``keep * x - rate * gradient``, for a problem without levels or dual; return x."""
        if self._runner.descend("outer_grads", x, [batch], rate, keep) is None:
            (gradient,) = self.outer_grads(x, None, batch)
            x.copy_(keep * x - rate * gradient)
        return x

    def descend_chain(
        self,
        x: torch.Tensor,
        batches: Sequence[Batch],
        rate: float,
        scale: Scale | None,
    ) -> torch.Tensor:
        """Move x in place along the gradient through all levels; return the gradient of f, [C, r].

        scale: returns a factor of each client's step, [C, 1], from the gradient of f.
        """
        by_last = None if scale is None else lambda *results: scale(results[-1])
        results = self._runner.descend("chain", x, batches, rate, 1.0, by_last)
        if results is not None:
            return results[-1]
        chain = self.chain(x, None, batches)
        outer = chain.outer_grads[0]
        if scale is None:
            x.sub_(chain.gradient, alpha=rate)
        else:
            x.addcmul_(chain.gradient, scale(outer), value=-rate)
        return outer

    def best_y(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the dual that maximises f at x for each client: [C, p]."""
        return self._runner.run("best_y", (x,), [batch])[0]

    def level(self, k: int, u: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return g^(k)(u) for each client."""
        return self._runner.run(f"level_{self._first[k - 1]}", (u,), [batch])[0]

    def level_vjp(self, k: int, u: torch.Tensor, cotangent: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return J^T cotangent for each client, J the Jacobian of g^(k) at u."""
        return self._runner.run(f"level_vjp_{self._first[k - 1]}", (u, cotangent), [batch])[0]

    def level_jacobian(self, k: int, u: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return g^(k)(u), [C, r], and its Jacobian, [C, r, d]."""
        value, jacobian = self._runner.run(f"level_jacobian_{self._first[k - 1]}", (u,), [batch])
        return value, jacobian

    def chain(
        self,
        x: torch.Tensor,
        y: torch.Tensor | None,
        batches: Sequence[Batch],
        offsets: Sequence[torch.Tensor] | None = None,
        weight: float = 1.0,
    ) -> Chain:
        """Run all levels and f forward and backward: u_k = offset_k + weight * g_k(u_{k-1}).

        ``batches`` has one batch for each level and one for f. Without ``offsets``, u_k = g_k(u_{k-1}).
        """
        count = len(self.problem.levels)
        if len(batches) != count + 1:
            raise FedstrataError(f"A chain of {count} levels takes {count + 1} batches. Got {len(batches)}.")
        vectors = (x, *self._dual(y))
        if offsets is not None:
            vectors = (*vectors, *offsets, x.new_full((len(x),), weight))
        out = self._runner.run("chain" if offsets is None else "chain_from", vectors, batches)
        return Chain(out[0], out[1 : 1 + count], out[1 + count :])

    def _dual(self, y: torch.Tensor | None) -> Tensors:
        if self.problem.dual != (y is not None and y.shape[-1] > 0):
            has = "has a dual: pass y" if self.problem.dual else "has no dual: pass no y, or one of length 0"
            raise FedstrataError(f"The problem {self.problem.name!r} {has}.")
        return (y,) if self.problem.dual and y is not None else ()
