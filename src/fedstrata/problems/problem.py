"""The one problem type: an objective in layers, each an expectation over a client's own data.

    min_x max_y  M_k[ f_k( G_k(x), y ) ],      G_k = g_k^(K) o ... o g_k^(1),   K >= 0

M_k is the mean over clients. ``levels`` holds g^(1)..g^(K), ``outer`` is f.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from fedstrata.core.errors import InputError, invalid
from fedstrata.core.options import param
from fedstrata.problems.queries import Query

if TYPE_CHECKING:
    from torch import nn

    from fedstrata.core.schedules import Clock
    from fedstrata.data.federated import FederatedData
    from fedstrata.models.flat import Flat

Arrays = tuple[torch.Tensor, ...]
Level = Callable[[torch.Tensor, Arrays], torch.Tensor]
Outer = Callable[..., torch.Tensor]
InnerMean = Literal["local", "global"]

INNER_MEAN = param("local", "whether f_k meets the client's own levels, or their mean over all clients")


@dataclass(frozen=True)
class Problem:
    """An objective in layers. Write your own in ten lines: pure functions of vectors and a batch.

    Every function is written for one client: ``u`` and ``y`` are vectors, ``batch`` is a tuple of tensors whose first
    axis runs over the samples, e.g. ``(inputs, targets)``. The library runs it for many clients at once.

    outer:      ``f(u, batch) -> scalar``, or ``f(u, y, batch) -> scalar`` when there is a dual.
    x0:         the starting point, a vector.
    levels:     the inner functions g^(1)..g^(K), each ``g(u, batch) -> vector``; empty for ordinary learning.
    y0:         the starting dual, a vector; None when there is none.
    project_y:  the Euclidean projection of the dual, on tensors [..., p]; None when the dual is free.
    inner_mean: "local" when f_k meets the client's own G_k, "global" when it meets the mean of G over clients.
    name:       how messages and tables call it.
    outer_draws: whether the outer function looks at data; when not, its batch is empty and costs no samples.
    weighs:     whether the outer function takes a single number, a loss, and is increasing: its derivative is the
                client's weight.
    numbered:   whether the outer function's batch ends with the client's number.
    mixture:    whether the dual weighs the clients: y on the simplex, one entry for each. Then the outer function is
                numbered, and at uniform y it is the client's own loss.
    takes_weights: whether every function takes batches that end, before the client's number, with a weight for each
                sample: what a sampling that favours rare classes makes.
    best_y:     ``best_y(x, batch) -> y``, where f(x, .) is quadratic in y with one Hessian for all batches: the y, not
                projected, that maximises it, so that the mean of these over batches maximises the mean of f.
    ranks:      whether the model is only asked to rank, so that no threshold of its outputs means anything: metrics
                then leave out accuracy.
    known:      the solution, x and y (None without a dual), where it is known: for metrics.
    perturbs:   whether the dual is a perturbation that is added to every input: metrics then measure under attack too.
    flat:       the model whose weights are the first entries of the vector, if there is one.
    predict:    ``predict(x, inputs) -> outputs`` of the model, for metrics.
    losses:     ``losses(outputs, targets) -> one loss per sample``, for metrics.
    adapt:      (steps, lr) of the gradient steps that make the model a client's own, for metrics; None when none do.
    options:    what it was built with, for the run directory; a run with other options is never resumed.
    check:      raises an error when a data set does not fit the problem.
    query:      what it must learn from the clients before the first round, if anything.
    at:         ``at(problem, clock) -> problem``, before every round: the problem as it is then, the same one when
                nothing has changed. For rates inside a problem that follow a schedule.
    """

    outer: Outer
    x0: torch.Tensor
    levels: tuple[Level, ...] = ()
    y0: torch.Tensor | None = None
    project_y: Callable[[torch.Tensor], torch.Tensor] | None = None
    inner_mean: InnerMean = "local"
    name: str = "custom"
    outer_draws: bool = True
    weighs: bool = False
    numbered: bool = False
    mixture: bool = False
    takes_weights: bool = False
    best_y: Level | None = None
    ranks: bool = False
    known: tuple[torch.Tensor, torch.Tensor | None] | None = None
    perturbs: bool = False
    flat: Flat | None = None
    predict: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    adapt: tuple[int, float] | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    check: Callable[[FederatedData], None] | None = None
    query: Query | None = None
    at: Callable[[Problem, Clock], Problem] | None = None

    def __post_init__(self) -> None:
        for label, value in (("x0", self.x0), ("y0", self.y0)):
            if value is None:
                continue
            if not isinstance(value, torch.Tensor) or value.dim() != 1 or not value.is_floating_point():
                shape, dtype = tuple(getattr(value, "shape", ())), getattr(value, "dtype", "no dtype")
                got = f"{type(value).__name__} of shape {shape}, {dtype}"
                raise invalid(f"{label} of the problem {self.name}", got, "a vector of floats (a 1-d tensor)")
        if not isinstance(self.levels, tuple) or not all(callable(g) for g in self.levels):
            raise invalid(f"levels of the problem {self.name}", repr(self.levels), "a tuple of functions, e.g. (g,)")
        if self.inner_mean not in ("local", "global"):
            raise invalid("inner_mean", self.inner_mean, "'local' or 'global'")
        if self.project_y is not None and self.y0 is None:
            raise InputError(f"The problem {self.name} has project_y but no dual: pass y0 too.")
        if self.mixture and (self.y0 is None or self.project_y is None):
            raise InputError(f"The problem {self.name} is a mixture: pass y0 and project_y, onto the simplex, too.")
        if self.mixture:
            object.__setattr__(self, "numbered", True)

    @property
    def dual(self) -> bool:
        """Whether there is a maximum inside."""
        return self.y0 is not None

    @property
    def kind(self) -> str:
        """The problem class in words, as error messages and tables use it."""
        levels = {0: "no inner level", 1: "1 inner level"}.get(len(self.levels), f"{len(self.levels)} inner levels")
        mean = f", a {self.inner_mean} inner mean" if self.levels else ""
        dual = "a dual that weighs the clients" if self.mixture else "a dual" if self.dual else "no dual"
        return f"{levels}{mean}, {dual}"

    def projected(self, y: torch.Tensor) -> torch.Tensor:
        """Return the dual, [..., p], projected onto its set."""
        return y if self.project_y is None else self.project_y(y)

    def model(self, x: torch.Tensor) -> nn.Module:
        """Return the trained module for a solution ``x``."""
        if self.flat is None:
            raise InputError(f"The problem {self.name} has no model: use the vector x itself.")
        return self.flat.to_module(x[: self.flat.size])

    def to(self, device: torch.device) -> Problem:
        """Return the same problem on ``device``; this one, its model and others that share it stay where they are."""
        from dataclasses import replace

        moved: dict[str, Any] = {"x0": self.x0.to(device)}
        if self.y0 is not None:
            moved["y0"] = self.y0.to(device)
        if self.known is not None:
            moved["known"] = tuple(None if t is None else t.to(device) for t in self.known)
        if self.flat is not None:
            self.flat.place(device)
        return replace(self, **moved)
