"""A batch for C clients at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Batch:
    """What C clients drew in one step.

    When every client drew the same number of samples there is one part, tensors [C, B, ...], and ``where`` is None.
    Otherwise clients with equally many samples share a part, and ``where[i]`` tells which clients part i belongs to.
    Nothing is padded, so nothing is computed in vain. ``traced`` says that this shape will come again, so that a graph
    traced for it pays.
    """

    parts: tuple[tuple[torch.Tensor, ...], ...]
    where: tuple[torch.Tensor, ...] | None = None
    traced: bool = True

    @property
    def clients(self) -> int:
        """C, the number of clients; 0 for a batch without data."""
        return sum(len(part[0]) for part in self.parts if part)

    def weighted(self, weights: torch.Tensor) -> Batch:
        """Return the batch, in which all clients have B samples, with the samples' weights [C, B] as one more array."""
        (part,) = self.parts
        return Batch(((*part, weights),), traced=self.traced)

    def weighted_by_class(self, weights: torch.Tensor) -> Batch:
        """Return the batch with a weight for each sample: its class's, [C, classes], times the one it had, if any."""
        parts = []
        for i, (inputs, targets, *had) in enumerate(self.parts):
            own = (weights if self.where is None else weights[self.where[i]]).gather(1, targets)
            parts.append((inputs, targets, own * had[0] if had else own))
        return Batch(tuple(parts), self.where, self.traced)

    def numbered(self, clients: np.ndarray) -> Batch:
        """Return the batch with each client's number as one more array."""
        numbers = torch.from_numpy(clients)
        rows = [numbers] if self.where is None else [numbers[w] for w in self.where]
        parts = [(*part, n.to(part[0].device) if part else n) for part, n in zip(self.parts, rows, strict=True)]
        return Batch(tuple(parts), self.where, self.traced)


NO_DATA = Batch(((),))
"""The batch of a function that looks at no data."""
