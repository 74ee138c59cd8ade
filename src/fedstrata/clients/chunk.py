"""How many clients to compute together: the rule behind ``chunk="auto"``.

Measured on a CPU, by ``bench/chunk.py`` for dense and convolutional models. Convolutions, recurrent layers and all but
the smallest attention layers are fastest one client at a time. Dense models gain from larger chunks, since a batched
product is dispatched only once, until the working set of the chunk exceeds the processor's cache. So, on a CPU:

    convolutional or recurrent layers:  C = 1 (always for recurrent layers, whose kernels cannot be batched)
    attention, d > 65,536:              C = 1
    otherwise:                          C = budget / bytes a client touches in a step, between 1 and 4096
                                        bytes = element size * (4 d + batch * numbers per sample)
                                        budget = 16 MiB
    full batches (batch_size=None):     batch = the mean number of samples per client

Ranks divide the clients between them (``divide="auto"``) unless a cohort's local steps in a round touch less than
32 MiB, which takes about as long as a message from one rank to another (``bench/ranks.py``): then the first rank
computes all clients, and the others wait.

On an accelerator, convolutions are treated like dense layers, and the budget is 1 GiB. The rule depends only on the
problem, the data, the batch size and the type of device, so a run gives the same bits everywhere.
"""

from __future__ import annotations

from typing import Literal

import torch

from fedstrata.core.schedules import Epochs, Steps, steps_at
from fedstrata.data.federated import FederatedData
from fedstrata.problems.problem import Problem

CPU_BUDGET = 16 << 20
ACCELERATOR_BUDGET = 1 << 30
LARGEST = 4096
MESSAGE_BUDGET = 32 << 20
SMALL_ATTENTION = 1 << 16
"""The most weights of a model with attention for which larger chunks are faster on a CPU."""


def choose_chunk(
    chunk: int | Literal["auto"], problem: Problem, data: FederatedData, batch_size: int | None, device: torch.device
) -> int:
    """Return C: the user's number, or the rule's for ``"auto"``; always 1 for recurrent layers."""
    layers = "dense" if problem.flat is None else problem.flat.layers()
    if isinstance(chunk, int):
        return 1 if layers == "recurrent" else chunk
    alone = layers == "convolutional" or (layers == "attention" and len(problem.x0) > SMALL_ATTENTION)
    if layers == "recurrent" or (alone and device.type == "cpu"):
        return 1
    budget = CPU_BUDGET if device.type == "cpu" else ACCELERATOR_BUDGET
    return max(1, min(LARGEST, budget // step_bytes(problem, data, batch_size)))


def step_bytes(problem: Problem, data: FederatedData, batch_size: int | None) -> int:
    """Return how many bytes a client touches in a local step, roughly."""
    sample = sum(a[0].numel() for a in data.train.arrays)
    return problem.x0.element_size() * (4 * len(problem.x0) + _batch(data, batch_size) * sample)


def _batch(data: FederatedData, batch_size: int | None) -> int:
    return batch_size if batch_size is not None else max(1, int(data.train.sizes.mean()))


def too_small_to_divide(
    problem: Problem, data: FederatedData, cohort: int, steps: Steps, batch_size: int | None
) -> bool:
    """Whether the local steps of a cohort take about as long as a message between ranks.

    Models with convolutions, recurrent layers or attention take longer than their size suggests.
    """
    if problem.flat is not None and problem.flat.layers() != "dense":
        return False
    if isinstance(steps, Epochs):
        number = steps.epochs * float(data.train.sizes.mean()) / _batch(data, batch_size)
    else:
        number = steps_at(steps, 0)
    return cohort * number * step_bytes(problem, data, batch_size) <= MESSAGE_BUDGET
