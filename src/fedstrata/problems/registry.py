"""Problems that a configuration file can name, and how to register one of your own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from torch import nn

from fedstrata.core.errors import InputError, invalid
from fedstrata.core.options import check, options_of
from fedstrata.core.registry import YOUR_OWN, Registry
from fedstrata.data.federated import FederatedData
from fedstrata.problems.problem import Problem, builder

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class ProblemKind:
    """A problem that a configuration file can name.

    build:       a function with options that returns the problem; with ``brings_data`` the pair of the problem and its
                 data, or an object that has both.
    brings_data: whether it comes with its own data, so that ``[data]`` and ``[model]`` do not apply.
    outputs:     the number of outputs the model should have, if not one per class.
    """

    build: Callable[..., Any]
    brings_data: bool = False
    outputs: int | None = None

    @property
    def takes_model(self) -> bool:
        """Whether it is built from the model of ``[model]``."""
        return "model" in inspect.signature(self.build).parameters

    @property
    def options(self) -> list[str]:
        """The options that a configuration file may set."""
        return [name for name, option in options_of(self.build).items() if option.in_file]

    def on(self, model: nn.Module | None, data: FederatedData, **options: Any) -> Problem:
        """Build the problem for data; options that a file cannot set, such as ``clients``, come from the data."""
        shape = data.train.arrays[0].shape[1:]
        facts = {"clients": data.clients, "classes": data.classes or None, "shape": shape}
        inferred = {n: facts[n] for n, option in options_of(self.build).items() if not option.in_file and n in facts}
        given = {"model": model} if self.takes_model else {}
        problem = self.build(**given, **inferred, **check(self.build, options))
        if not isinstance(problem, Problem):
            raise self._wrong(problem, "a Problem; if it comes with its own data, register it with brings_data=True")
        return problem

    def with_data(self, seed: int, **options: Any) -> tuple[Problem, FederatedData]:
        """Build a problem that brings its own data; if it has an option ``seed``, this is the default."""
        usual = {"seed": seed} if "seed" in self.options else {}
        built = self.build(**check(self.build, usual | options))
        pair = built if isinstance(built, tuple) else (getattr(built, "problem", None), getattr(built, "data", None))
        if len(pair) != 2 or not isinstance(pair[0], Problem) or not isinstance(pair[1], FederatedData):
            raise self._wrong(built, "a Problem and its FederatedData")
        return pair

    def _wrong(self, built: object, wants: str) -> InputError:
        return invalid(f"result of the function {self.build.__name__}", type(built).__name__, wants)


PROBLEMS: Registry[ProblemKind] = Registry("problem", hint=YOUR_OWN, definition=lambda kind: kind.build)
"""All problems, by their names in configuration files."""


@overload
def register(function: F) -> F: ...


@overload
def register(*, brings_data: bool = False, outputs: int | None = None) -> Callable[[F], F]: ...


def register(function: Any = None, *, brings_data: bool = False, outputs: int | None = None) -> Any:
    """Register a function that builds a problem of your own, under its own name.

        @fs.problems.register
        def huber(model: torch.nn.Module, delta: float = fs.param(1.0, "where the loss becomes linear", above=0)):
            return fs.erm(model, lambda outputs, targets: ...)

    A file then uses it as ``[problem]`` with ``name = "huber"``, and its options are those declared with ``fs.param``.
    The function gets the model of ``[model]`` as ``model``; a problem that needs none leaves this parameter out.
    Options declared with ``in_file=False`` and named ``shape`` (of one input), ``classes`` or ``clients`` are inferred
    from the data. The problem gets the name of the function, and records its options.

    brings_data: whether the function returns a pair, the problem and its own ``FederatedData``; if it has an option
                 ``seed``, that of the run is its default.
    outputs:     the number of outputs of the model, if not one per class or target.
    """

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        build = builder(function)
        PROBLEMS.add(function.__name__, ProblemKind(build, brings_data, outputs))
        return build

    return declare if function is None else declare(function)
