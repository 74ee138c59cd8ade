"""The arrays that a function of a problem gets: one client's batch, and how a function with a model splits it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch.utils._pytree import register_pytree_node

from fedstrata.data.batch import PAIR, Arrays, Fields


class Samples(tuple[torch.Tensor, ...]):
    """The arrays of one client's batch, if they are not just inputs, targets and weights.

    inputs: how many arrays are inputs of the model.
    words:  what random layers draw from, [2]; None for models without such layers.
    """

    inputs: int
    words: torch.Tensor | None


def samples_of(arrays: Sequence[torch.Tensor], fields: Fields) -> Arrays:
    """Return the arrays of one client's batch for a function: a tuple, which knows its fields if they are unusual."""
    if fields == PAIR:
        return tuple(arrays)
    samples = Samples(arrays[:-1] if fields.random else arrays)
    samples.inputs, samples.words = fields.inputs, arrays[-1] if fields.random else None
    return samples


def _flatten(samples: Samples) -> tuple[list[torch.Tensor], Fields]:
    words = [] if samples.words is None else [samples.words]
    return [*samples, *words], Fields(samples.inputs, bool(words))


register_pytree_node(Samples, _flatten, lambda arrays, fields: cast(Samples, samples_of(list(arrays), fields)))


def split(batch: Arrays) -> tuple[Arrays, torch.Tensor, Arrays]:
    """Return the inputs of the model, the targets, and the arrays after them: weights, a client's number."""
    count = batch.inputs if isinstance(batch, Samples) else 1
    return batch[:count], batch[count], batch[count + 1 :]
