"""A batch for C clients at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

Arrays = tuple[torch.Tensor, ...]


class Fields(NamedTuple):
    """What the arrays of a batch are: inputs, targets, then sample weights and client numbers, if any, and words.

    inputs: how many arrays are inputs of the model; the next one holds the targets.
    random: whether the last array, [C, 2], holds the random words that random layers draw from.
    """

    inputs: int = 1
    random: bool = False


PAIR = Fields()
"""The usual arrays: one of inputs, and the targets."""


@dataclass(frozen=True)
class Batch:
    """The samples that C clients drew in one step.

    parts:  tuples of arrays. If all clients drew equally many samples there is one part, of tensors [C, B, ...];
            otherwise clients with equally many samples share a part, and nothing is padded.
    where:  the clients of each part, in increasing order; None if there is one part for all.
    owners: the part of each client, [C], on the host; None if there is one part for all.
    traced: whether this shape will occur again, so that tracing a graph for it pays off.
    fields: what the arrays of each part are.
    """

    parts: tuple[Arrays, ...]
    where: tuple[torch.Tensor, ...] | None = None
    traced: bool = True
    fields: Fields = PAIR
    owners: np.ndarray | None = None

    @property
    def clients(self) -> int:
        """C, the number of clients; 0 for a batch without data."""
        return sum(len(part[0]) for part in self.parts if part)

    def weighted(self, weights: torch.Tensor) -> Batch:
        """Return the batch, which has one part, with sample weights [C, B] appended to its arrays."""
        (part,) = self.parts
        return Batch(((*part, weights),), traced=self.traced, fields=self.fields)

    def weighted_by_class(self, weights: torch.Tensor) -> Batch:
        """Return the batch with each sample's weight multiplied by that of its class, [C, classes]."""
        parts, count = [], self.fields.inputs + 1
        for i, part in enumerate(self.parts):
            samples, rest = part[:count], list(part[count:])
            own = (weights if self.where is None else weights[self.where[i]]).gather(1, samples[-1].long())
            words = [rest.pop()] if self.fields.random else []
            parts.append((*samples, own * rest[0] if rest else own, *words))
        return replace(self, parts=tuple(parts))

    def numbered(self, numbers: torch.Tensor) -> Batch:
        """Return the batch with the number of each client, [C], appended to its arrays."""
        return self._with(numbers, self.fields)

    def randomised(self, words: torch.Tensor) -> Batch:
        """Return the batch with two words of each client, [C, 2], for random layers to draw from."""
        return self._with(words, Fields(self.fields.inputs, random=True))

    def _with(self, rows: torch.Tensor, fields: Fields) -> Batch:
        """Return the batch with one more array, which has a row for each client."""
        own = [rows] if self.where is None else [rows[w] for w in self.where]
        parts = [(*part, r) for part, r in zip(self.parts, own, strict=True)]
        return replace(self, parts=tuple(parts), fields=fields)


NO_DATA = Batch(((),))
"""The batch of a function that uses no data."""


def stored(array: torch.Tensor) -> torch.Tensor:
    """Return an array as a batch holds it: floats and booleans as they are, integers as int64."""
    return array if array.is_floating_point() or array.dtype == torch.bool else array.long()
