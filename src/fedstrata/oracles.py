"""Oracles: values and derivatives of a problem for C clients at once, on tensors [C, .].

Several clients are ``torch.func.vmap`` of one client's function. For shapes that come again and again the function is
traced once into a graph of tensor operations, which takes away most of the dispatch cost of vmap and grad; for the
others, and for functions that cannot be traced, one client is plain autograd. A function that vmap cannot take (it
decides by values, or uses a recurrent kernel) runs one client at a time. All forms give the same numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from fedstrata.data.batch import Batch
from fedstrata.errors import FedstrataError
from fedstrata.problem import Arrays, Problem
from fedstrata.trace import trace

Tensors = tuple[torch.Tensor, ...]
Function = Callable[..., torch.Tensor]
Form = Callable[..., Tensors]


def _flat(function: Form, vectors: int) -> Form:
    """Return the function with its batch spread out into arguments, which spares a traced graph from unpacking it."""
    return lambda *args: function(*args[:vectors], args[vectors:])


def _value(fn: Function) -> tuple[Form, Form]:
    def one(*args: Any) -> Tensors:
        return (fn(*args),)

    return one, one


def _gradient(fn: Function, derivatives: int) -> tuple[Form, Form]:
    def one(*args: Any) -> Tensors:
        leaves = [a.detach().requires_grad_() for a in args[:derivatives]]
        with torch.enable_grad():
            value = fn(*leaves, *args[derivatives:])
        return _backward(value, leaves, None)

    many: Form = torch.func.grad(fn, argnums=tuple(range(derivatives)))
    return one, many


def _pullback(fn: Function) -> tuple[Form, Form]:
    def one(u: torch.Tensor, cotangent: torch.Tensor, batch: Arrays) -> Tensors:
        leaf = u.detach().requires_grad_()
        with torch.enable_grad():
            value = fn(leaf, batch)
        return _backward(value, [leaf], cotangent)

    def many(u: torch.Tensor, cotangent: torch.Tensor, batch: Arrays) -> Tensors:
        out: Tensors = torch.func.vjp(lambda z: fn(z, batch), u)[1](cotangent)
        return out

    return one, many


def _backward(value: torch.Tensor, leaves: list[torch.Tensor], cotangent: torch.Tensor | None) -> Tensors:
    if not value.requires_grad:
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    return torch.autograd.grad(value, leaves, cotangent, materialize_grads=True)


class Oracles:
    """Values and derivatives of one problem, vectorised over a leading client axis."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        duals = 2 if problem.dual else 1
        forms = {"outer": _value(problem.outer), "outer_grads": _gradient(problem.outer, duals)}
        for k, level in enumerate(problem.levels, start=1):
            forms[f"level_{k}"] = _value(level)
            forms[f"level_vjp_{k}"] = _pullback(level)
        vectors = {"outer": duals, "outer_grads": duals} | {f"level_{k}": 1 for k in range(1, len(problem.levels) + 1)}
        self._forms: dict[str, tuple[Form, Form, Form]] = {}
        for name, (one, many) in forms.items():
            plain, traceable = (_flat(f, vectors.get(name, 2)) for f in (one, many))
            self._forms[name] = (plain, torch.func.vmap(traceable), traceable)
        self._graphs: dict[tuple[object, ...], Form | None] = {}
        self._alone: set[str] = set()

    def outer(self, u: torch.Tensor, y: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """Return f for each client: [C]."""
        return self._run("outer", (u,) if y is None else (u, y), batch)[0]

    def outer_grads(self, u: torch.Tensor, y: torch.Tensor | None, batch: Batch) -> Tensors:
        """Return the gradient of f in u, and in y when there is a dual, for each client."""
        return self._run("outer_grads", (u,) if y is None else (u, y), batch)

    def level(self, k: int, u: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return g^(k)(u) for each client."""
        return self._run(f"level_{k}", (u,), batch)[0]

    def level_vjp(self, k: int, u: torch.Tensor, cotangent: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return J^T cotangent for each client, J the Jacobian of g^(k) at u."""
        return self._run(f"level_vjp_{k}", (u, cotangent), batch)[0]

    def _run(self, name: str, vectors: Tensors, batch: Batch) -> Tensors:
        if name.startswith("outer") and len(vectors) != 1 + self.problem.dual:
            has = "has a dual: pass y" if self.problem.dual else "has no dual: pass no y"
            raise FedstrataError(f"The problem {self.problem.name!r} {has}.")
        if batch.where is None:
            return self._on(name, vectors, batch.parts[0], batch.traced)
        out: list[torch.Tensor] = []
        for where, arrays in zip(batch.where, batch.parts, strict=True):
            part = self._on(name, tuple(v[where] for v in vectors), arrays, False)
            if not out:
                out = [p.new_empty(len(vectors[0]), *p.shape[1:]) for p in part]
            for whole, p in zip(out, part, strict=True):
                whole[where] = p
        return tuple(out)

    def _on(self, name: str, vectors: Tensors, arrays: Arrays, traced: bool) -> Tensors:
        single = len(vectors[0]) == 1
        if not single and name in self._alone:
            return self._one_by_one(name, vectors, arrays, traced)
        if single:
            vectors, arrays = tuple(v[0] for v in vectors), tuple(a[0] for a in arrays)
        run = self._forms[name][0 if single else 1]
        if traced:
            vectors = tuple(v.contiguous() for v in vectors)
            shape = (name, single, *((t.shape, t.dtype, t.device) for t in (*vectors, *arrays)))
            if shape not in self._graphs:
                self._graphs[shape] = trace(self._forms[name][2 if single else 1], *vectors, *arrays)
            run = self._graphs[shape] or run
        try:
            out = run(*vectors, *arrays)
        except RuntimeError as error:
            if single or isinstance(error, torch.OutOfMemoryError):
                raise
            return self._give_up_company(name, vectors, arrays, traced, error)
        return tuple(o.unsqueeze(0) for o in out) if single else out

    def _give_up_company(
        self, name: str, vectors: Tensors, arrays: Arrays, traced: bool, error: RuntimeError
    ) -> Tensors:
        """Go on one client at a time; an error in the function itself comes up again there, and then counts."""
        out = self._one_by_one(name, vectors, arrays, traced)
        self._alone.add(name)
        reason = str(error).split("\n")[0]
        warnings.warn(f"{self.problem.name} runs one client at a time, use chunk=1: {reason}", stacklevel=2)
        return out

    def _one_by_one(self, name: str, vectors: Tensors, arrays: Arrays, traced: bool) -> Tensors:
        rows = [slice(c, c + 1) for c in range(len(vectors[0]))]
        parts = [self._on(name, tuple(v[r] for v in vectors), tuple(a[r] for a in arrays), traced) for r in rows]
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))
