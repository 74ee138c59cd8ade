"""What a client computes: values and derivatives of the problem, and gradient steps, on vectors [C, d]."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedstrata.clients.client_side import ClientSide
from fedstrata.core.errors import FedstrataError
from fedstrata.data.batch import Batch
from fedstrata.problems.derivatives import Tensors
from fedstrata.problems.oracles import Chain, Scale
from fedstrata.problems.problem import Problem


class OracleCalls:
    """The part of a :class:`Client` that evaluates the problem."""

    _side: ClientSide
    _received: frozenset[int]
    """Where in memory the tensors of the server's message are."""

    @property
    def problem(self) -> Problem:
        """The problem to solve."""
        return self._side.oracles.problem

    def loss(self, x: torch.Tensor, batch: Batch, y: torch.Tensor | None = None) -> torch.Tensor:
        """Return the outer function for each client, [C]: the loss itself if there are no levels."""
        return self._side.oracles.outer(x, y, batch)

    def grads(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the gradient of the loss, [C, d], of a problem without levels or dual."""
        return self._side.oracles.outer_grads(x, None, batch)[0]

    def descend(self, x: torch.Tensor, batch: Batch, rate: float, weight_decay: float = 0.0) -> torch.Tensor:
        """Move x in place to ``x - rate * (grads(x, batch) + weight_decay * x)``, faster than by ``grads``; return it.

        x must not be the server's: begin a loop with ``client.variables(x=x.clone())``.
        """
        self._check_own(x)
        return self._side.oracles.descend(x, batch, rate, 1 - rate * weight_decay)

    def descend_chain(
        self, x: torch.Tensor, batches: Sequence[Batch], rate: float, scale: Scale | None = None
    ) -> torch.Tensor:
        """Move x in place along the gradient through all levels (:meth:`chain`); return the gradient of f, [C, r].

        The problem must have no dual, and x must not be the server's.

        scale: returns a factor of each client's step, [C, 1], from the gradient of f.
        """
        self._check_own(x)
        return self._side.oracles.descend_chain(x, batches, rate, scale)

    def _check_own(self, x: torch.Tensor) -> None:
        if x.untyped_storage().data_ptr() in self._received:
            raise FedstrataError("A step changes x in place, so x must not be the server's. Begin with x.clone().")

    def f_grads(self, u: torch.Tensor, batch: Batch, y: torch.Tensor | None = None) -> Tensors:
        """Return the gradients of the outer function in u and, if y is passed, in y.

        Without a dual, y and its gradient have length 0.
        """
        grads = self._side.oracles.outer_grads(u, y, batch)
        return grads if y is None or self.problem.dual else (*grads, y)

    def best_y(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the dual that maximises the outer function at x, before projection, [C, p], if it is known."""
        return self._side.oracles.best_y(x, batch)

    def g(self, k: int, u: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the value of level k (from 1) at u, [C, r]."""
        return self._side.oracles.level(k, u, batch)

    def g_vjp(self, k: int, u: torch.Tensor, cotangent: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the transposed Jacobian of level k (from 1) at u times ``cotangent``, [C, d]."""
        return self._side.oracles.level_vjp(k, u, cotangent, batch)

    def g_jacobian(self, k: int, u: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the value of level k (from 1) at u, [C, r], and its Jacobian, [C, r, d]."""
        return self._side.oracles.level_jacobian(k, u, batch)

    def chain(
        self,
        x: torch.Tensor,
        batches: Sequence[Batch],
        y: torch.Tensor | None = None,
        offsets: Sequence[torch.Tensor] | None = None,
        weight: float = 1.0,
    ) -> Chain:
        """Evaluate all layers in one pass, u_k = offset_k + weight * g_k(u_{k-1}) and then f, and differentiate.

        ``batches`` has one batch for each level and, last, one for the outer function. Returns the gradient
        J_1^T ... J_K^T grad f (the J without the weight), the levels' values g_k, and the gradients of f.
        """
        chain = self._side.oracles.chain(x, y, batches, offsets, weight)
        return chain if y is None or self.problem.dual else chain._replace(outer_grads=(*chain.outer_grads, y))

    def project_y(self, y: torch.Tensor) -> torch.Tensor:
        """Return the dual projected onto its set."""
        return self.problem.projected(y)
