"""The problem type: an objective in layers, each an expectation over a client's own data.

    min_x max_y  M_k[ f_k( G_k(x), y ) ],      G_k = g_k^(K) o ... o g_k^(1),   K >= 0

M_k is the mean over clients. ``levels`` holds g^(1)..g^(K), ``outer`` is f.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from fedstrata.core.errors import InputError, invalid
from fedstrata.core.options import options, options_of, param
from fedstrata.data.batch import Arrays as Arrays
from fedstrata.data.batch import Batch
from fedstrata.problems.derivatives import Function
from fedstrata.problems.queries import Query

if TYPE_CHECKING:
    from torch import nn

    from fedstrata.core.clock import Clock
    from fedstrata.data.federated import FederatedData
    from fedstrata.models.flat import Flat

F = TypeVar("F", bound=Callable[..., Any])

Level = Callable[[torch.Tensor, Arrays], torch.Tensor]
Outer = Callable[..., torch.Tensor]
InnerMean = Literal["local", "global"]

INNER_MEAN = param("local", "whether f_k takes the value of the client's own levels or its mean over all clients")


@dataclass(frozen=True)
class Problem:
    """An objective in layers, made of pure functions of vectors and a batch.

    Each function is written for one client: ``u`` and ``y`` are vectors, ``batch`` is a tuple of tensors whose first
    axis runs over the samples: the arrays of the data, e.g. ``(inputs, targets)``, or ``(inputs, mask, targets)`` if a
    sample has two inputs. The library runs it for many clients at once.

    outer:      ``f(u, batch) -> scalar``, or ``f(u, y, batch) -> scalar`` with a dual.
    x0:         the starting point, a vector.
    levels:     the inner functions g^(1)..g^(K), each ``g(u, batch) -> vector``; empty for standard learning.
    y0:         the starting dual, a vector; None without a dual.
    project_y:  the Euclidean projection of the dual, on tensors [..., p]; None if the dual is unconstrained.
    inner_mean: "local" if f_k takes the client's own G_k, "global" if it takes the mean of G over clients.
    name:       its name in messages and tables.
    outer_draws: whether the outer function uses data; if not, its batch is empty and costs no samples.
    weighs:     whether the outer function is an increasing function of a single number, a loss, so that its derivative
                is the client's weight.
    numbered:   whether the outer function's batch ends with the client's number.
    mixture:    whether the dual weights the clients: y is on the simplex, one entry per client. The outer function is
                then numbered, and at uniform y it is the client's own loss.
    takes_weights: whether every function accepts batches with sample weights, as balanced sampling adds them; the
                weights are the last array, or the last before the client's number.
    best_y:     ``best_y(x, batch) -> y``: the unprojected maximiser of f(x, .), if f is quadratic in y with the same
                Hessian on all batches, so that the mean of the maximisers over batches maximises the mean of f.
    ranks_only: whether the model only ranks, so that no threshold on its outputs is meaningful: metrics then omit
                accuracy.
    known:      the solution (x, y) if it is known, for metrics; y is None without a dual.
    perturbs:   whether the dual is a perturbation added to every input: metrics then also measure under attack.
    flat:       the model whose weights are the first entries of the vector, if there is one.
    predict:    ``predict(x, *inputs) -> outputs`` of the model, for metrics.
    losses:     ``losses(outputs, targets) -> one loss per sample``, for metrics.
    adapt:      (steps, lr) of the gradient steps that adapt the model to a client, for metrics; None if there are none.
    options:    the options it was built with, recorded in the run directory; a run resumes only with the same options.
    check:      ``check(data)`` raises an error if the data do not fit the problem.
    query:      what the problem must learn from the clients before the first round, if anything.
    at:         ``at(problem, clock) -> problem``, called before every round, for rates inside the problem that follow a
                schedule: returns the problem at that time, the same object if nothing has changed.
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
    ranks_only: bool = False
    known: tuple[torch.Tensor, torch.Tensor | None] | None = None
    perturbs: bool = False
    flat: Flat | None = None
    predict: Callable[..., torch.Tensor] | None = None
    losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    adapt: tuple[int, float] | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    check: Callable[[FederatedData], None] = lambda data: None
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
            raise InputError(f"The problem {self.name} is a mixture: pass y0 and a project_y onto the simplex too.")
        if self.mixture:
            object.__setattr__(self, "numbered", True)

    @property
    def dual(self) -> bool:
        """Whether the problem has a dual, i.e. an inner maximum."""
        return self.y0 is not None

    @property
    def kind(self) -> str:
        """The problem class in words, for error messages and tables."""
        levels = {0: "no inner level", 1: "1 inner level"}.get(len(self.levels), f"{len(self.levels)} inner levels")
        mean = f", a {self.inner_mean} inner mean" if self.levels else ""
        dual = "a dual that weights the clients" if self.mixture else "a dual" if self.dual else "no dual"
        return f"{levels}{mean}, {dual}"

    def draws(self, level: int) -> bool:
        """Whether a level uses data; 0 is the outer function."""
        return level > 0 or self.outer_draws

    def completed(self, level: int, batch: Batch, clients: torch.Tensor) -> Batch:
        """Return the batch of a level with the numbers of its clients, if the level takes them."""
        return batch.numbered(clients) if level == 0 and self.numbered else batch

    def projected(self, y: torch.Tensor) -> torch.Tensor:
        """Project the dual, [..., p], onto its set."""
        return y if self.project_y is None else self.project_y(y)

    def model(self, x: torch.Tensor) -> nn.Module:
        """Return the trained module for a solution ``x``."""
        if self.flat is None:
            raise InputError(f"The problem {self.name} has no model: use the vector x itself.")
        return self.flat.to_module(x[: self.flat.size])

    def mapped(self, wrap: Callable[[Function], Function]) -> Problem:
        """Return the problem with each of its functions wrapped, and the ``pullback`` of a level with it."""

        def wrapped(function: Function) -> Function:
            out = wrap(function)
            if hasattr(function, "pullback"):
                out.pullback = wrap(function.pullback)  # type: ignore[attr-defined]
            return out

        levels, best_y = tuple(map(wrapped, self.levels)), None if self.best_y is None else wrap(self.best_y)
        return replace(self, outer=wrap(self.outer), levels=levels, best_y=best_y)

    def to(self, device: torch.device) -> Problem:
        """Return a copy of the problem on ``device``; the original and its module are not moved."""
        moved: dict[str, Any] = {"x0": self.x0.to(device)}
        if self.y0 is not None:
            moved["y0"] = self.y0.to(device)
        if self.known is not None:
            moved["known"] = tuple(None if t is None else t.to(device) for t in self.known)
        if self.flat is not None:
            self.flat.place(device)
        return replace(self, **moved)


def builder(function: F) -> F:
    """Decorate a function that builds a problem: check its options, record them, and name the problem after it.

    The function may return a pair, the problem and its data.
    """
    name = function.__name__

    @functools.wraps(function)
    def named(**values: Any) -> Any:
        recorded = {key: values[key] for key, option in options_of(build).items() if option.in_file}
        built = function(**values)
        problem, *data = built if isinstance(built, tuple) else (built,)
        if not isinstance(problem, Problem):
            raise invalid(f"result of the function {name}", type(problem).__name__, "a Problem")
        problem = replace(problem, name=name, options=recorded)
        return (problem, *data) if data else problem

    build: Any = options(f"the {name} problem")(named)
    return build  # type: ignore[no-any-return]
