"""Models after gradient steps on a client's own data.

Clients are computed together, as many as the rule of ``clients/chunk.py`` says, on tensors with a leading client axis.
Those of similar size share a chunk, in which rows of the smaller ones are repeated with weight 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fedstrata.clients.chunk import choose_chunk
from fedstrata.core.errors import InputError
from fedstrata.core.rng import key_of, permutations
from fedstrata.data.federated import FederatedData, Part
from fedstrata.problems.graphs.trace import close
from fedstrata.problems.problem import Arrays, Problem
from fedstrata.training.metrics.measures import predict

ROWS = 1024
"""Most rows of a client whose gradient is computed at once."""

REPEATED = 0.5
"""How many rows of a chunk may be repeated ones, relative to the others."""

_SHUFFLED = 1 << 20
"""How many positions are shuffled at a time."""


@torch.no_grad()
def adapt(problem: Problem, x: torch.Tensor, parts: Sequence[Arrays], steps: int, lr: float) -> torch.Tensor:
    """Return ``x`` after gradient steps x <- x - lr grad(mean loss of the model over the rows of all parts)."""
    assert problem.predict is not None and problem.losses is not None
    rows = sum(len(part[-1]) for part in parts)
    for _ in range(steps):
        gradient = torch.zeros_like(x)
        for *inputs, targets in parts:
            leaf = x.detach().requires_grad_()
            with torch.enable_grad():
                loss = problem.losses(problem.predict(leaf, *inputs), targets).sum() / rows
            gradient += torch.autograd.grad(loss, leaf)[0]
        x = x - lr * gradient
    return x


def adapted_point(
    problem: Problem,
    data: FederatedData,
    x: torch.Tensor,
    steps: int | None = None,
    lr: float | None = None,
    rows: int | None = None,
) -> torch.Tensor:
    """Return G(x), the uniform mean over clients of ``x`` after each client's own full-batch gradient steps.

    ``run.problem.model(adapted_point(run.problem, data, run.x))`` is the model of a run after its inner steps.
    ``steps`` and ``lr`` default to those of the problem; if ``lr`` is a schedule, ``run.problem`` has the rate of the
    last round. ``rows`` is the largest number of rows that a client uses; by default all.
    """
    own = problem.adapt or (None, None)
    steps, lr = own[0] if steps is None else steps, own[1] if lr is None else lr
    if steps is None or lr is None or problem.predict is None:
        raise InputError(f"The problem {problem.name} has no inner gradient steps of a model: pass steps and lr.")
    total = torch.zeros_like(x)
    for _, ends in Personal(problem, data, x, steps, lr, rows).models(np.arange(data.clients)):
        total += ends.sum(0)
    return total / data.clients


def pieces(part: Part, client: int, limit: int | None) -> list[Arrays]:
    """Return a client's rows, at most ``limit`` of them, in pieces that bound the memory of a gradient."""
    size = int(part.sizes[client])
    count = size if limit is None else min(limit, size)
    positions = _positions(part, np.array([client]), np.array([count]))
    cut = [positions[:, start : start + ROWS] for start in range(0, count, ROWS)]
    return [tuple(a[0] for a in part.gather(np.array([client]), c, None, False).parts[0]) for c in cut]


class Personal:
    """The clients' own models: ``x`` after ``steps`` full-batch gradient steps at rate ``lr`` on their data.

    limit:    the largest number of rows that a client uses; None for all.
    together: whether several clients are computed at once: until vmap fails, or a client gets other numbers than
              alone, as it does if the outputs of a sample depend on other samples.
    """

    def __init__(
        self, problem: Problem, data: FederatedData, x: torch.Tensor, steps: int, lr: float, limit: int | None = None
    ) -> None:
        self.problem, self.data, self.x = problem, data, x
        self.steps, self.lr, self.limit = steps, lr, limit
        self.part = data.part(1)
        self.together = True
        self._checked: set[tuple[str, bool]] = set()

    @torch.no_grad()
    def models(self, clients: np.ndarray) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
        """Yield all of these clients, a chunk at a time, with their models [C, d]."""
        sizes = self.part.sizes if self.limit is None else np.minimum(self.part.sizes, self.limit)
        for chunk in self._chunks(clients, sizes):
            own = self._adapted(chunk, sizes[chunk]) if len(chunk) > 1 else None
            yield chunk, torch.stack([self._alone(c) for c in chunk.tolist()]) if own is None else own

    @torch.no_grad()
    def outputs(self, clients: np.ndarray, own: torch.Tensor, part: Part) -> Iterator[tuple[np.ndarray, Arrays]]:
        """Yield all of these clients, a chunk at a time, with the outputs and targets of their rows of ``part``.

        ``own`` are the clients' models [C, d]. The rows of a chunk are those of one client after another.
        """
        place = np.empty(len(part.sizes), np.int64)
        place[clients] = np.arange(len(clients))
        for chunk in self._chunks(clients, part.sizes):
            same = np.array_equal(chunk, clients)
            models = own if same else own[torch.from_numpy(place[chunk]).to(own.device)]
            found = self._outputs(chunk, models, part) if len(chunk) > 1 else None
            if found is None:
                pairs = zip(models, chunk.tolist(), strict=True)
                outputs, targets = zip(*(predict(self.problem, x, part.of_client(c)) for x, c in pairs), strict=True)
                found = torch.cat(outputs), torch.cat(targets)
            yield chunk, found

    def _chunks(self, clients: np.ndarray, sizes: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the clients in chunks of similar size, the largest first."""
        rest = clients[np.argsort(-sizes[clients], kind="stable")]
        while len(rest):
            largest, most = int(sizes[rest[0]]), 1
            if self.together and largest <= ROWS:
                most = choose_chunk("auto", self.problem, self.data, largest, self.x.device)
            rows = np.cumsum(sizes[rest[:most]])
            repeated = largest * np.arange(1, len(rows) + 1) - rows
            too_small = np.flatnonzero((repeated > REPEATED * rows) | (sizes[rest[:most]] == 0))
            count = max(1, int(too_small[0])) if len(too_small) else len(rows)
            yield rest[:count]
            rest = rest[count:]

    def _alone(self, client: int) -> torch.Tensor:
        return adapt(self.problem, self.x, pieces(self.part, client, self.limit), self.steps, self.lr)

    def _adapted(self, clients: np.ndarray, sizes: np.ndarray) -> torch.Tensor | None:
        """Return the models of several clients that use ``sizes`` rows; None if only one by one works."""
        predicted, losses = self.problem.predict, self.problem.losses
        assert predicted is not None and losses is not None
        arrays, counted = _padded(self.part, clients, sizes)
        weights = torch.from_numpy(counted / sizes[:, None]).to(self.x)

        def loss(x: torch.Tensor, weights: torch.Tensor, *batch: torch.Tensor) -> torch.Tensor:
            return (losses(predicted(x, *batch[:-1]), batch[-1]) * weights).sum()

        gradient, own = torch.func.grad(loss), self.x.expand(len(clients), -1)
        try:
            for step in range(self.steps):
                start, axis = (own, 0) if step else (self.x, None)  # at first, all have the same weights
                each = torch.func.vmap(gradient, in_dims=(axis, 0, *(0 for _ in arrays)))
                own = torch.add(start, each(start, weights, *arrays), alpha=-self.lr)
        except RuntimeError as error:
            self._failed(error)
            return None
        if self._first("models", counted):
            rounding = 100 * torch.finfo(own.dtype).eps * float(torch.linalg.vector_norm(self.x))
            self.together = close(own[-1] - self.x, self._alone(clients[-1]) - self.x, rounding=rounding)
        return own if self.together else None

    def _outputs(self, clients: np.ndarray, own: torch.Tensor, part: Part) -> Arrays | None:
        """Return the outputs and targets of several clients on their rows of ``part``; None as above."""
        assert self.problem.predict is not None
        (*inputs, targets), counted = _padded(part, clients, part.sizes[clients])
        try:
            outputs = torch.func.vmap(self.problem.predict)(own, *inputs)
        except RuntimeError as error:
            self._failed(error)
            return None
        rows = torch.from_numpy(np.flatnonzero(counted)).to(outputs.device)
        outputs, targets = (t.flatten(0, 1).index_select(0, rows) for t in (outputs, targets))
        if self._first("outputs", counted):
            alone = predict(self.problem, own[-1], part.of_client(clients[-1]))[0]
            self.together = close(outputs[-len(alone) :], alone)
        return (outputs, targets) if self.together else None

    def _first(self, what: str, counted: np.ndarray) -> bool:
        """Whether results are the first of their kind, with repeated rows or without, so that they must be checked."""
        kind = what, bool(counted.all())
        first = kind not in self._checked
        self._checked.add(kind)
        return first

    def _failed(self, error: RuntimeError) -> None:
        """Compute one client at a time from now on, which raises an error in the model itself again."""
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        self.together = False


def _padded(part: Part, clients: np.ndarray, sizes: np.ndarray) -> tuple[Arrays, np.ndarray]:
    """Return ``sizes`` samples of each client, [C, B, ...], the last one repeated, and a mask of those that count."""
    samples = part.gather(clients, _positions(part, clients, sizes), None, False).parts[0]
    return samples, np.arange(sizes.max()) < sizes[:, None]


def _positions(part: Part, clients: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the positions of ``sizes`` rows of each client, the last one repeated: shuffled if they are not all."""
    positions: np.ndarray = np.minimum(np.arange(sizes.max()), sizes[:, None] - 1)
    limited = np.flatnonzero(sizes < part.sizes[clients])  # the first rows would all be of one class
    while len(limited):
        most = max(1, _SHUFFLED // int(part.sizes[clients[limited]].max()))
        some, limited = limited[:most], limited[most:]
        own = clients[some]
        order = permutations(key_of("adapt"), own, np.zeros(len(own)), part.sizes[own])
        positions[some] = np.take_along_axis(order, positions[some], axis=1)
    return positions
