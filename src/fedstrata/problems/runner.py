"""How a function of one client runs for C clients at once, on tensors [C, .].

Several clients run as ``torch.func.vmap`` of one client's function. For shapes that recur, the function is traced once
into a graph of tensor operations, which removes most of the dispatch cost of vmap and grad. Otherwise a single client
runs as plain autograd. A function that vmap cannot handle (it branches on values, or uses a recurrent kernel) runs one
client at a time. All forms give the same numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fedstrata.core.errors import FedstrataError
from fedstrata.core.stopwatch import Stopwatch
from fedstrata.data.batch import Batch, Fields
from fedstrata.problems.derivatives import (
    Form,
    Function,
    Linearised,
    Tensors,
    chain_of,
    gradient_inside,
    gradient_of,
    jacobian_of,
    linearise,
    linearise_inside,
    pullback_of,
    value_of,
)
from fedstrata.problems.graphs.compiler import Compiler
from fedstrata.problems.graphs.descent import Descent, Scale, trace_descent
from fedstrata.problems.graphs.trace import close, trace
from fedstrata.problems.precision import with_autocast
from fedstrata.problems.problem import Arrays, Problem
from fedstrata.problems.randomness import with_random_layers
from fedstrata.problems.samples import samples_of

Name = tuple[str, tuple[Fields, ...]]
"""A function, and the fields of its batches."""

TRACING = Stopwatch()
"""How long functions were traced, compiled and checked: a cost of starting, not of training."""


class Runner:
    """Runs the functions of one problem, by name; compiled if there is a compiler, in lower precision with autocast.

    graphs: the traced functions, by name and shapes; None for those that cannot be traced.
    """

    tracing = True
    """Whether functions are traced: tests of many short runs save the time."""

    def __init__(self, problem: Problem, compiler: Compiler | None, autocast: torch.dtype | None) -> None:
        self.problem, self.compiler, self.autocast = problem, compiler, autocast
        self.graphs: dict[tuple[object, ...], Callable[..., Any] | None] = {}
        self._flattened: dict[tuple[object, ...], Form] = {}
        self._alone: set[Name] = set()
        self._checked: set[Name] = set()
        # Neither tracing nor vmap supports the kernels of recurrent layers.
        self._recurrent = problem.flat is not None and problem.flat.layers() == "recurrent"

    @cached_property
    def _functions(self) -> dict[bool, dict[str, Form]]:
        """The functions of a single client (True), and of several (False).

        PyTorch's derivatives of a gradient that was taken inside vmap are wrong for some layers (layer_norm), so levels
        that contain one (:class:`GradientStep`) are differentiated inside vmap too.
        """
        alone = self._derived(_itself, gradient_of, linearise)
        if not self._nested:
            return {True: alone, False: self._derived(torch.func.vmap, gradient_of, linearise)}
        return {True: alone, False: self._derived(_itself, gradient_inside, linearise_inside)}

    @cached_property
    def _nested(self) -> bool:
        return any(hasattr(level, "pullback") for level in self.problem.levels)

    def _derived(
        self,
        lifted: Callable[[Function], Function],
        gradient: Callable[[Function, int], Form],
        linearised: Linearised,
    ) -> dict[str, Form]:
        problem = with_autocast(with_random_layers(self.problem), self.autocast)
        outer, duals = lifted(problem.outer), 1 if problem.dual else 0
        levels, outer_grads = [lifted(level) for level in problem.levels], gradient(outer, 1 + duals)
        functions = {
            "outer": value_of(outer),
            "outer_grads": outer_grads,
            "chain": chain_of(levels, outer_grads, duals, False, linearised),
            "chain_from": chain_of(levels, outer_grads, duals, True, linearised),
        }
        for k, (level, one) in enumerate(zip(levels, problem.levels, strict=True), start=1):
            own = getattr(one, "pullback", None)
            functions[f"level_{k}"] = value_of(level)
            functions[f"level_vjp_{k}"] = pullback_of(level, None if own is None else lifted(own), linearised)
            functions[f"level_jacobian_{k}"] = jacobian_of(level, linearised)
        if problem.best_y is not None:
            functions["best_y"] = value_of(lifted(problem.best_y))
        return functions

    def run(self, function: str, vectors: Tensors, batches: Sequence[Batch]) -> Tensors:
        """Return the results of a function for each client."""
        name = (function, tuple(b.fields for b in batches))
        if all(b.where is None for b in batches):
            return self._on(name, vectors, tuple(b.parts[0] for b in batches), all(b.traced for b in batches))
        out: list[torch.Tensor] = []
        for where, arrays in _groups(batches, len(vectors[0])):
            part = self._on(name, tuple(v[where] for v in vectors), arrays, False)
            if not out:
                out = [p.new_empty(len(vectors[0]), *p.shape[1:]) for p in part]
            for whole, p in zip(out, part, strict=True):
                whole[where] = p
        return tuple(out)

    def descend(
        self,
        function: str,
        x: torch.Tensor,
        batches: Sequence[Batch],
        rate: float,
        keep: float,
        scale: Scale | None = None,
    ) -> Tensors | None:
        """Take a traced step along the first result of a function; return the others. None if it cannot be traced."""
        name = (function, tuple([b.fields for b in batches]))
        usual = not [b for b in batches if not b.traced or b.where is not None] and x.is_contiguous()
        if not usual or not self._can_trace or self.problem.dual or name in self._alone:
            return None
        arrays = tuple([b.parts[0] for b in batches])
        single, lengths, (vector, *others) = _arguments((x,), arrays)
        key = _key("step", name, single, lengths, (vector, *others))
        if key not in self.graphs:
            with TRACING.running():
                if not single and name not in self._checked:
                    self._on(name, (x,), arrays, traced=False)
                run = self._form(name, single, 1, lengths)
                usable = name not in self._alone
                self.graphs[key] = self._descent(run, (vector, *others)) if usable else None
        step = self.graphs[key]
        if step is None:
            return None
        if not single:
            return step(vector, others, rate, keep, scale)  # type: ignore[no-any-return]
        one = None if scale is None else lambda *results: scale(*(r.unsqueeze(0) for r in results))[0]
        return tuple(r.unsqueeze(0) for r in step(vector, others, rate, keep, one))

    @property
    def _can_trace(self) -> bool:
        return self.tracing and not self._recurrent

    def _on(self, name: Name, vectors: Tensors, batches: tuple[Arrays, ...], traced: bool) -> Tensors:
        traced = traced and self._can_trace
        single, lengths, tensors = _arguments(vectors, batches)
        if not single and (self._recurrent or name in self._alone):
            return self._one_by_one(name, vectors, batches, traced)
        run = self._form(name, single, len(vectors), lengths)
        if traced:
            key = _key("value", name, single, lengths, tensors)
            if key not in self.graphs:
                with TRACING.running():
                    self.graphs[key] = trace(run, *tensors, compiler=self.compiler, rough=self.autocast is not None)
            run = self.graphs[key] or run
        try:
            out = run(*tensors)
        except RuntimeError as error:
            if single or isinstance(error, torch.OutOfMemoryError):
                raise
            return self._without_vmap(name, vectors, batches, traced, str(error).split("\n")[0])
        if single:
            return tuple(o.unsqueeze(0) for o in out)
        if name not in self._checked:
            self._checked.add(name)
            with TRACING.running():
                agrees = self._agrees_with_one(name, len(vectors), lengths, tensors, out)
            if not agrees:
                reason = "PyTorch's vmap gives other numbers for several clients than for one"
                return self._without_vmap(name, vectors, batches, traced, reason)
        return tuple(out)

    def _descent(self, run: Form, tensors: Tensors) -> Descent | None:
        return trace_descent(run, *tensors, compiler=self.compiler, rough=self.autocast is not None)

    def _agrees_with_one(
        self, name: Name, vectors: int, lengths: tuple[int, ...], tensors: Tensors, out: Tensors
    ) -> bool:
        """Whether the results of a few clients are what plain autograd gives for each of them alone."""
        clients = len(tensors[0])
        for client in {0, clients // 2, clients - 1}:
            alone = self._form(name, True, vectors, lengths)(*(t[client] for t in tensors))
            if not all(close(o[client], a, self.autocast is not None) for o, a in zip(out, alone, strict=True)):
                return False
        return True

    def _form(self, name: Name, single: bool, vectors: int, lengths: tuple[int, ...]) -> Form:
        """Return a function of one client or of several, with the arrays of its batches as separate arguments."""
        key = (name, single, lengths)
        if key not in self._flattened:
            function, fields = name
            form = _flat(self._functions[single][function], vectors, lengths, fields)
            self._flattened[key] = torch.func.vmap(form) if self._nested and not single else form
        return self._flattened[key]

    def _without_vmap(
        self, name: Name, vectors: Tensors, batches: tuple[Arrays, ...], traced: bool, reason: str
    ) -> Tensors:
        """Run one client at a time from now on; an error in the function itself is raised again."""
        out = self._one_by_one(name, vectors, batches, traced)
        self._alone.add(name)
        warnings.warn(
            f"The problem {self.problem.name} runs one client at a time, so use chunk=1: {reason}", stacklevel=2
        )
        return out

    def _one_by_one(self, name: Name, vectors: Tensors, batches: tuple[Arrays, ...], traced: bool) -> Tensors:
        rows = [slice(c, c + 1) for c in range(len(vectors[0]))]
        parts = [
            self._on(
                name, tuple(v[r] for v in vectors), tuple(tuple(a[r] for a in arrays) for arrays in batches), traced
            )
            for r in rows
        ]
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _flat(function: Form, vectors: int, lengths: tuple[int, ...], fields: tuple[Fields, ...]) -> Form:
    """Return the function with the arrays of its batches as separate arguments, as tracing needs them."""

    def flat(*args: Any) -> Tensors:
        batches, start = [], vectors
        for length, own in zip(lengths, fields, strict=True):
            batches.append(samples_of(args[start : start + length], own))
            start += length
        return function(*args[:vectors], *batches)

    return flat


def _arguments(vectors: Tensors, batches: tuple[Arrays, ...]) -> tuple[bool, tuple[int, ...], Tensors]:
    """Return whether there is a single client, how many arrays each batch has, and all tensors, contiguous.

    Those of a single client have no client axis.
    """
    clients = len(vectors[0])
    for arrays in batches:
        if arrays and len(arrays[0]) != clients:
            raise FedstrataError(
                f"An oracle takes vectors and batches with one row for each client. Got {clients} and {len(arrays[0])}."
            )
    tensors = [*vectors, *[a for arrays in batches for a in arrays]]
    tensors = [t[0] for t in tensors] if clients == 1 else tensors
    return clients == 1, tuple(map(len, batches)), tuple([t.contiguous() for t in tensors])


def _key(kind: str, name: Name, single: bool, lengths: tuple[int, ...], tensors: Tensors) -> tuple[object, ...]:
    """Return what a graph can be used for."""
    return (kind, name, single, lengths, *[(t.shape, t.dtype, t.device) for t in tensors])


def _itself(function: Function) -> Function:
    return function


def _groups(batches: Sequence[Batch], clients: int) -> Iterator[tuple[torch.Tensor, tuple[Arrays, ...]]]:
    """Yield each group of clients that share a part in every batch, with the group's rows of each batch."""
    shared = np.zeros(clients, np.int64)
    owners = np.stack([shared if batch.owners is None else batch.owners for batch in batches])
    where = next(batch.where for batch in batches if batch.where is not None)
    if len(np.unique(owners[[batch.where is not None for batch in batches]], axis=0)) == 1:  # nothing to move
        for i, group in enumerate(where):
            yield group, tuple(b.parts[i] if b.where else tuple(a[group] for a in b.parts[0]) for b in batches)
        return
    combinations, number = np.unique(owners, axis=1, return_inverse=True)
    for i, parts in enumerate(combinations.T):
        chosen = np.flatnonzero(number.reshape(-1) == i)
        rows = [np.searchsorted(np.flatnonzero(own == part), chosen) for own, part in zip(owners, parts, strict=True)]
        group, *places = torch.from_numpy(np.stack([chosen, *rows])).to(where[0].device)
        yield group, tuple(tuple(a[at] for a in b.parts[p]) for b, p, at in zip(batches, parts, places, strict=True))
