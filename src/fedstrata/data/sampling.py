"""How a client draws a batch from its own data: uniform, shuffled epochs, stratified, balanced, or everything.

A batch is a function of names: seed, client, round, exchange, step, level and stream, and of nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from fedstrata.core import rng
from fedstrata.core.errors import invalid
from fedstrata.core.registry import Registry

_AHEAD = 16
_AHEAD_POSITIONS = 1 << 18


class Sampling(ABC):
    """Draws positions for C clients of given sizes; one object per exchange, chunk and stream.

    ``weights`` [C, B] are those of a batch's samples, in every step the same; None where all samples count the same.
    A ``weighted`` sampling finds them from ``counts`` [C, classes], the rows that each client has of each class.
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

    @abstractmethod
    def positions(self, step: int, active: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return positions [active, B] of the first ``active`` clients, and how many count if not all of them do."""


class _Independent(Sampling):
    """Steps that do not depend on each other are drawn several at a time, because one call costs as much as sixteen."""

    first = last = 0
    ahead: np.ndarray

    def positions(self, step: int, active: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return positions [active, B], and how many count if not all of them do."""
        if not self.first <= step < self.last or active > self.ahead.shape[0]:
            count = max(1, min(_AHEAD, _AHEAD_POSITIONS // max(1, active * self.batch_size)))
            self.first, self.last = step, step + count
            self.ahead = self.draw(np.arange(step, step + count), active)
        return self.ahead[:active, step - self.first], None

    @abstractmethod
    def draw(self, steps: np.ndarray, active: int) -> np.ndarray:
        """Return positions [active, steps, B]."""


class Uniform(_Independent):
    """Each sample of a batch is drawn from the client's data with replacement."""

    def draw(self, steps: np.ndarray, active: int) -> np.ndarray:
        """Return positions [active, steps, B]."""
        clients, sizes = self.clients[:active, None], self.sizes[:active, None]
        return rng.positions(self.key, clients, steps[None], self.batch_size, sizes)


class Stratified(_Independent):
    """Each batch holds the client's classes in their own proportions, two classes to within one sample.

    The client's rows stand in class order; sample j of B is drawn from the j-th of B equal stretches of them. A class
    is off by less than one sample at each end that it shares with another. Every row is equally likely to be drawn, so
    the gradient stays unbiased without weights.
    """

    def draw(self, steps: np.ndarray, active: int) -> np.ndarray:
        """Return positions [active, steps, B]."""
        clients, sizes = self.clients[:active, None], self.sizes[:active, None, None]
        jitter = rng.uniforms(self.key, clients, steps[None], self.batch_size)
        places = (np.arange(self.batch_size) + jitter) * (sizes / self.batch_size)
        out: np.ndarray = np.minimum(places.astype(np.int64), sizes - 1)
        return out


class Balanced(_Independent):
    """Each batch holds the client's classes in equal numbers, to within one sample, and weights that make up for it.

    The client's rows stand in class order. With m classes, sample j of B is drawn from class j mod m, with replacement,
    so that class c has s_c of the B samples. Their weight is (n_c / n) / (s_c / B), n_c of the client's n rows being of
    class c: the weighted mean of a batch is an unbiased estimate of the client's mean. Without ``counts`` a client's
    rows are all of one class, which is uniform sampling with weights 1.
    """

    weighted: ClassVar[bool] = True

    def __init__(
        self,
        names: tuple[int | str, ...],
        clients: np.ndarray,
        sizes: np.ndarray,
        batch_size: int,
        counts: np.ndarray | None = None,
    ) -> None:
        super().__init__(names, clients, sizes, batch_size)
        held = sizes[:, None] if counts is None else counts
        check_balanced(batch_size, held, clients)
        classes = (held > 0).sum(1, keepdims=True)
        turn = np.arange(batch_size) % classes
        own = np.argsort(held == 0, axis=1, kind="stable")  # the classes that a client has come first, in their order
        of = np.take_along_axis(own, turn, axis=1)
        self.starts = np.take_along_axis(held.cumsum(1) - held, of, axis=1)
        self.counts = np.take_along_axis(held, of, axis=1)
        slots = batch_size // classes + (turn < batch_size % classes)
        self.weights = self.counts * batch_size / (sizes[:, None] * slots)

    def draw(self, steps: np.ndarray, active: int) -> np.ndarray:
        """Return positions [active, steps, B]."""
        jitter = rng.uniforms(self.key, self.clients[:active, None], steps[None], self.batch_size)
        out: np.ndarray = self.starts[:active, None] + (jitter * self.counts[:active, None]).astype(np.int64)
        return out


class ShuffledEpochs(Sampling):
    """Passes over the client's data in a new random order each; the last batch of a pass may be smaller."""

    def __init__(
        self,
        names: tuple[int | str, ...],
        clients: np.ndarray,
        sizes: np.ndarray,
        batch_size: int,
        counts: np.ndarray | None = None,
    ) -> None:
        super().__init__(names, clients, sizes, batch_size)
        self.epoch = np.full(len(clients), -1)
        self.order = np.zeros((len(clients), int(sizes.max()) + batch_size), dtype=np.int64)

    def positions(self, step: int, active: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return positions [active, B], and how many count if not all of them do."""
        sizes = self.sizes[:active]
        per_epoch = steps_per_epoch(sizes, self.batch_size)
        epoch, batch = step // per_epoch, step % per_epoch
        new = np.flatnonzero(epoch != self.epoch[:active])
        if len(new):
            fresh = rng.permutations(self.key, self.clients[new], epoch[new], sizes[new])
            self.order[new, : fresh.shape[1]] = fresh
            self.epoch[new] = epoch[new]
        start = batch * self.batch_size
        lengths = np.minimum(self.batch_size, sizes - start)
        widest = int(lengths.max())
        places = np.take_along_axis(self.order[:active], start[:, None] + np.arange(widest), axis=1)
        return places, None if int(lengths.min()) == widest else lengths


class Everything(Sampling):
    """The client's whole data in every step."""

    def positions(self, step: int, active: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return positions [active, B], and how many count if not all of them do."""
        sizes = self.sizes[:active]
        largest = int(sizes.max())
        places = np.broadcast_to(np.arange(largest), (active, largest))
        return places, None if int(sizes.min()) == largest else sizes


SAMPLINGS: Registry[type[Sampling]] = Registry(
    "sampling", {"uniform": Uniform, "epochs": ShuffledEpochs, "stratified": Stratified, "balanced": Balanced}
)
"""Every sampling by its name in a configuration file."""


def check_balanced(batch_size: int, counts: np.ndarray, clients: np.ndarray) -> None:
    """Refuse batches without room for every class that a client has: the mean of what is left would be biased."""
    classes = (counts > 0).sum(1)
    most = int(classes.argmax())
    if batch_size < classes[most]:
        wants = f"at least {classes[most]}, the number of classes that client {clients[most]} has"
        raise invalid("batch_size", batch_size, wants, "sampling 'balanced'")


def steps_per_epoch(sizes: np.ndarray, batch_size: int | None) -> np.ndarray:
    """Return how many batches one pass over each client's data takes."""
    return np.ones_like(sizes) if batch_size is None else -(-sizes // batch_size)
