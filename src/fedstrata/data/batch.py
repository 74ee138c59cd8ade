"""A batch for C clients at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Arrays = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Batch:
    """The samples that C clients drew in one step.

    parts:  tuples of arrays. If all clients drew equally many samples there is one part, of tensors [C, B, ...];
            otherwise clients with equally many samples share a part, and nothing is padded.
    where:  the clients of each part; None if there is one part for all.
    traced: whether this shape will occur again, so that tracing a graph for it pays off.
    random: whether the last array of each part, [C, 2], holds the random words that random layers draw from.
    """

    parts: tuple[Arrays, ...]
    where: tuple[torch.Tensor, ...] | None = None
    traced: bool = True
    random: bool = False

    @property
    def clients(self) -> int:
        """C, the number of clients; 0 for a batch without data."""
        return sum(len(part[0]) for part in self.parts if part)

    def weighted(self, weights: torch.Tensor) -> Batch:
        """Return the batch, which has one part, with sample weights [C, B] appended to its arrays."""
        (part,) = self.parts
        return Batch(((*part, weights),), traced=self.traced)

    def weighted_by_class(self, weights: torch.Tensor) -> Batch:
        """Return the batch with each sample's weight multiplied by that of its class, [C, classes]."""
        parts = []
        for i, (inputs, targets, *rest) in enumerate(self.parts):
            own = (weights if self.where is None else weights[self.where[i]]).gather(1, targets.long())
            words = [rest.pop()] if self.random else []
            parts.append((inputs, targets, own * rest[0] if rest else own, *words))
        return Batch(tuple(parts), self.where, self.traced, self.random)

    def numbered(self, numbers: torch.Tensor) -> Batch:
        """Return the batch with the number of each client, [C], appended to its arrays."""
        rows = [numbers] if self.where is None else [numbers[w] for w in self.where]
        parts = [(*part, n) for part, n in zip(self.parts, rows, strict=True)]
        return Batch(tuple(parts), self.where, self.traced)

    def randomised(self, words: torch.Tensor) -> Batch:
        """Return the batch with two words of each client, [C, 2], for random layers to draw from."""
        rows = [words] if self.where is None else [words[w] for w in self.where]
        parts = [(*part, r) for part, r in zip(self.parts, rows, strict=True)]
        return Batch(tuple(parts), self.where, self.traced, random=True)


NO_DATA = Batch(((),))
"""The batch of a function that uses no data."""
