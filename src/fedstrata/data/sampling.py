"""Samplings: how a client draws a batch from its own data.

A batch depends only on the seed, client, round, exchange, step, level and stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from fedstrata.core import rng
from fedstrata.core.errors import invalid
from fedstrata.core.registry import Registry


class Drawn(NamedTuple):
    """What clients draw in several steps.

    positions: [steps, active, B], on a device, where B is at most the batch size; any valid ones beyond a length.
    lengths:   how many of the B positions count, [steps, active], on the host; None if all do.
    """

    positions: torch.Tensor
    lengths: np.ndarray | None = None


class Sampling(ABC):
    """Draw positions in the data of C clients of given sizes; one object per exchange, chunk and stream.

    weighted: whether samples have weights, computed from ``counts`` [C, classes], the rows of each client and class.
    weights:  the weights [C, B] of a batch's samples, the same in every step; None without weights.
    """

    weighted: ClassVar[bool] = False
    weights: np.ndarray | None = None

    def __init__(
        self,
        names: tuple[int | str, ...],
        clients: np.ndarray,
        sizes: np.ndarray,
        batch_size: int,
        counts: np.ndarray | None = None,
    ) -> None:
        self.key = rng.key_of(*names)
        self.clients = clients
        self.sizes = sizes
        self.batch_size = batch_size
        self.prepare(counts)

    def prepare(self, counts: np.ndarray | None) -> None:  # noqa: B027
        """Compute what all steps share, if anything."""

    @abstractmethod
    def draw(self, steps: range, active: int, device: torch.device) -> Drawn:
        """Draw for the first ``active`` clients in these steps; tensors are on a device."""

    def positions(self, step: int, active: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the positions [active, B] of one step, and lengths [active] if not all positions count."""
        drawn = self.draw(range(step, step + 1), active, torch.device("cpu"))
        positions = drawn.positions[0].numpy()
        if drawn.lengths is None:
            return positions, None
        lengths = drawn.lengths[0]
        widest = int(lengths.max())
        return positions[:, :widest], None if int(lengths.min()) == widest else lengths


class Independent(Sampling):
    """A sampling with independent steps: positions are computed on a device from random words that it computes too."""

    def draw(self, steps: range, active: int, device: torch.device) -> Drawn:
        """Draw for the first ``active`` clients in these steps; tensors are on a device."""
        words = rng.words_on(device, self.key, self.clients[:active], steps, self.batch_size)
        return Drawn(self.chosen(words, active))

    @abstractmethod
    def chosen(self, words: torch.Tensor, active: int) -> torch.Tensor:
        """Return the positions [steps, active, B] that 32-bit words [steps, active, B] stand for."""


def _moved(numbers: np.ndarray, words: torch.Tensor) -> torch.Tensor:
    """Return numbers [active, ...] as a tensor on the device of the words."""
    tensor = torch.from_numpy(numbers)
    return tensor if words.is_cpu else tensor.to(words.device)


def _fractions(words: torch.Tensor) -> torch.Tensor:
    """Return words as numbers in [0, 1)."""
    return words.double() * 2.0**-32


class Uniform(Independent):
    """Draw samples from the client's data with replacement."""

    def chosen(self, words: torch.Tensor, active: int) -> torch.Tensor:
        """Return the positions that words stand for; their bias is at most size / 2**32."""
        return (words * _moved(self.sizes[:active, None], words)) >> 32


class Stratified(Independent):
    """Draw batches with the class proportions of the client.

    A client's rows are sorted by class; sample j of B is drawn from the j-th of B equal sections. The number of samples
    of a class differs from its exact proportion by less than one for each neighbouring class. Every row is equally
    likely, so the gradient is unbiased without weights.
    """

    def chosen(self, words: torch.Tensor, active: int) -> torch.Tensor:
        """Return the positions that words stand for: one in each section."""
        sizes = _moved(self.sizes[:active, None], words)
        section = torch.arange(self.batch_size, device=words.device) + _fractions(words)
        return torch.minimum((section * (sizes.double() / self.batch_size)).long(), sizes - 1)


class Balanced(Independent):
    """Draw batches with the same number of samples, up to one, of each class the client has, and weights to compensate.

    With m classes, sample j of B is drawn from class j mod m, with replacement; class c has s_c of the B samples. Their
    weight is (n_c / n) / (s_c / B), where n_c of the client's n rows are of class c, so the weighted mean of a batch is
    an unbiased estimate of the client's mean. Without ``counts`` all rows count as one class: uniform sampling with
    weights 1.
    """

    weighted: ClassVar[bool] = True

    def prepare(self, counts: np.ndarray | None) -> None:
        """Compute the class and the weight of each of the B samples."""
        counts = self.sizes[:, None] if counts is None else counts
        check_balanced(self.batch_size, counts, self.clients)
        classes = (counts > 0).sum(1, keepdims=True)
        turn = np.arange(self.batch_size) % classes
        present = np.argsort(counts == 0, axis=1, kind="stable")  # the classes of a client first, in their order
        class_of = np.take_along_axis(present, turn, axis=1)
        self.starts = np.take_along_axis(counts.cumsum(1) - counts, class_of, axis=1)
        self.counts = np.take_along_axis(counts, class_of, axis=1)
        slots = self.batch_size // classes + (turn < self.batch_size % classes)
        self.weights = self.counts * self.batch_size / (self.sizes[:, None] * slots)

    def chosen(self, words: torch.Tensor, active: int) -> torch.Tensor:
        """Return the positions that words stand for: each in its sample's class."""
        starts, counts = (_moved(numbers[:active], words) for numbers in (self.starts, self.counts))
        return starts + (_fractions(words) * counts).long()


class ShuffledEpochs(Sampling):
    """Pass over the client's data, each time in a new random order; the last batch of a pass may be smaller.

    The order of a client's present pass is kept, on the device that computed it.
    """

    def prepare(self, counts: np.ndarray | None) -> None:
        """Start before the first pass."""
        self.epoch = np.full(len(self.clients), -1)
        self.orders = torch.empty(0, 0, dtype=torch.int64)

    def draw(self, steps: range, active: int, device: torch.device) -> Drawn:
        """Draw for the first ``active`` clients in these steps; tensors are on a device."""
        if not len(self.orders):
            self.orders = torch.zeros(len(self.clients), int(self.sizes.max()), dtype=torch.int64, device=device)
        sizes = self.sizes[:active]
        epoch, batch = np.divmod(np.arange(steps.start, steps.stop)[:, None], steps_per_epoch(sizes, self.batch_size))
        starts = batch * self.batch_size
        lengths = np.minimum(self.batch_size, sizes - starts)
        width = int(lengths.max())  # far below the batch size, if that stands for all data
        columns = np.minimum(starts[..., None] + np.arange(width), sizes[:, None] - 1)
        columns = torch.from_numpy(columns.reshape(-1, width)).to(device)
        positions = torch.empty_like(columns)
        passes = (epoch - epoch[0]).ravel()  # those of a client since its first one here
        by_pass = np.argsort(passes, kind="stable")
        for pairs in np.split(by_pass, np.flatnonzero(np.diff(passes[by_pass])) + 1):  # of a step and a client
            clients = pairs % active
            self._turn(clients, epoch.ravel()[pairs])
            chosen, owners = (torch.from_numpy(numbers).to(device) for numbers in (pairs, clients))
            positions[chosen] = self.orders[owners[:, None], columns[chosen]]
        return Drawn(
            positions.view(len(steps), active, width), None if int(lengths.min()) == self.batch_size else lengths
        )

    def _turn(self, clients: np.ndarray, epochs: np.ndarray) -> None:
        """Let clients, which may occur several times, be in these passes: shuffle anew where one begins."""
        new, first = np.unique(clients, return_index=True)
        begins = self.epoch[new] != epochs[first]
        new, wanted = new[begins], epochs[first][begins]
        if len(new):
            device = self.orders.device
            orders = rng.permutations_on(device, self.key, self.clients[new], wanted, self.sizes[new])
            self.orders[torch.from_numpy(new).to(device), : orders.shape[1]] = orders
            self.epoch[new] = wanted


class Everything(Sampling):
    """Use all data of the client in every step."""

    def draw(self, steps: range, active: int, device: torch.device) -> Drawn:
        """Draw for the first ``active`` clients in these steps; tensors are on a device."""
        sizes = self.sizes[:active]
        shape = len(steps), active, int(sizes.max())
        return Drawn(torch.arange(shape[2], device=device).expand(shape), np.broadcast_to(sizes, shape[:2]))


SAMPLINGS: Registry[type[Sampling]] = Registry(
    "sampling", {"uniform": Uniform, "epochs": ShuffledEpochs, "stratified": Stratified, "balanced": Balanced}
)
"""Every sampling by its name in a configuration file."""


def check_balanced(batch_size: int, counts: np.ndarray, clients: np.ndarray) -> None:
    """Raise if the batch size is below a client's number of classes: the mean of a batch would be biased."""
    classes = (counts > 0).sum(1)
    most = int(classes.argmax())
    if batch_size < classes[most]:
        wants = f"at least {classes[most]}, the number of classes of client {clients[most]}"
        raise invalid("batch_size", batch_size, wants, "sampling 'balanced'")


def steps_per_epoch(sizes: np.ndarray, batch_size: int | None) -> np.ndarray:
    """Return the number of batches in one pass over each client's data."""
    return np.ones_like(sizes) if batch_size is None else -(-sizes // batch_size)
