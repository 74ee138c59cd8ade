"""A batch for C clients at once."""

from __future__ import annotations

from dataclasses import dataclass

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
        """C, the number of clients."""
        return sum(len(part[0]) for part in self.parts)
