"""What an algorithm is: a frozen set of hyperparameters, a server's round, and what a client does when asked."""

from __future__ import annotations

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, get_type_hints

import torch

from fedstrata.clients.clients import Clients
from fedstrata.clients.cohort import cohort_size
from fedstrata.core.errors import InputError, invalid
from fedstrata.core.options import Option, Options, build
from fedstrata.core.options import param as param
from fedstrata.core.registry import Registry
from fedstrata.problems.problem import Problem


class State(NamedTuple):
    """The server's state of an algorithm that needs nothing but the point: x, and y, of length 0 without a dual."""

    x: torch.Tensor
    y: torch.Tensor


ALGORITHMS: Registry[type[Algorithm]] = Registry("algorithm")


class Algorithm(Options, ABC):
    """The base of every algorithm.

    A subclass becomes a frozen dataclass of its hyperparameters, its options, and is registered under ``name``.
    Algorithms do not inherit from each other; a subclass of an algorithm is a *preset*, another name for it with other
    defaults::

        class AdaFGDA(FGDA):
            name = "adafgda"
            defaults = {"matrix": "adam", "gamma": 0.01}

    name:                as on the command line; "" for an algorithm with presets only.
    levels, dual:        the problems it solves: the numbers K of inner levels, and whether there is a dual; None when
                         it solves problems with one and without.
    inner_mean:          "local" or "global": which mean is inside, where there are levels.
    mixture:             whether the dual must be one that weighs the clients.
    full_participation:  whether every client must take part in every round.
    auxiliary:           whether the server needs samples of its own, some of every class.
    hidden:              names of hyperparameters that only other presets of the file have, as in "matrix rho".
    defaults:            of a preset: hyperparameters with another default.
    """

    name: ClassVar[str]
    family = ("name", ALGORITHMS)
    levels: ClassVar[range] = range(1)
    dual: ClassVar[bool | None] = False
    inner_mean: ClassVar[str] = "local"
    mixture: ClassVar[bool] = False
    full_participation: ClassVar[bool] = False
    auxiliary: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = {}
    hidden: ClassVar[str] = ""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if Algorithm not in cls.__bases__:
            _make_preset(cls)
        if not isinstance(vars(cls).get("name"), str):
            raise TypeError(f"{cls.__name__} must have a name, the one it has on the command line: name = '...'.")
        for name in cls.hidden.split():
            option: Option = vars(cls)[name]
            metadata = {"option": option}
            setattr(cls, name, dataclasses.field(default=option.default, init=False, repr=False, metadata=metadata))
        cls.declare(cls.name or cls.__name__)
        if not cls.name:
            return
        other = ALGORITHMS.get(cls.name)
        if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(
                f"The name {cls.name!r} of {cls.__name__} is taken by {other.__module__}.{other.__qualname__}."
            )
        ALGORITHMS[cls.name] = cls

    def __post_init__(self) -> None:
        """Refuse hyperparameters that do not fit together; each of them has been checked by itself before."""

    def start(self, x: torch.Tensor, y: torch.Tensor, clients: Clients) -> Any:
        """Return the server's state before the first round, a NamedTuple; every client can be asked.

        ``y`` has length 0 where there is no dual. The annotation of what it returns is how a checkpoint is read.
        """
        return State(x, y)

    @abstractmethod
    def round(self, s: Any, clients: Clients) -> Any:
        """Do one round on the server, with as many exchanges with the clients as it takes."""

    def solution(self, s: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the solution, x and y, that the state stands for: the last iterate unless an algorithm averages."""
        return s.x, getattr(s, "y", None)

    @classmethod
    def solves(cls, problem: Problem) -> bool:
        """Whether the algorithm is made for this class of problems."""
        return (
            len(problem.levels) in cls.levels
            and cls.dual in (None, problem.dual)
            and (not problem.levels or problem.inner_mean == cls.inner_mean)
            and (problem.mixture or not cls.mixture)
        )

    def check(self, problem: Problem, participation: int | float, clients: int) -> None:
        """Refuse a problem or a participation that the algorithm is not made for."""
        if not self.solves(problem):
            fitting = sorted(n for n, a in ALGORITHMS.items() if a.solves(problem))
            raise InputError(
                f"{self.name} does not solve the problem {problem.name!r} ({problem.kind}). "
                f"Algorithms that do: {', '.join(fitting) or 'none'}."
            )
        if self.full_participation and cohort_size(participation, clients) < clients:
            raise invalid(f"participation of {self.name}", participation, "1.0 (every client in every round)")


def _make_preset(cls: type[Algorithm]) -> None:
    """Declare a preset's hyperparameters, with its defaults; refuse a subclass that is more than a preset."""
    inherited: dict[str, dataclasses.Field[Any]] = cls.__dataclass_fields__
    own = {name for name in vars(cls) if not name.startswith("__") and name != "_abc_impl"}
    wrong = (own - set(Algorithm.__annotations__)) | ({*cls.defaults, *cls.hidden.split()} - set(inherited))
    wrong |= set(inspect.get_annotations(cls))
    if wrong:
        raise TypeError(
            f"{cls.__name__} must derive from Algorithm itself, or be a preset that only sets name, defaults and "
            f"hidden: algorithms do not inherit. Got {', '.join(sorted(wrong))}."
        )
    hints = get_type_hints(cls, include_extras=True)
    cls.__annotations__ = {name: hints[name] for name in inherited}
    for name, field in inherited.items():
        option: Option = field.metadata["option"]
        setattr(cls, name, dataclasses.replace(option, default=cls.defaults.get(name, field.default)))


def algorithm(name: str, options: Mapping[str, Any] | None = None, **more: Any) -> Algorithm:
    """Build an algorithm by name, from options as a configuration file has them.

    A rate may be a table such as ``{schedule = "step", value = 0.1}``, steps may be ``{epochs = 5}`` or
    ``{initial = 4, base = 2.0}``.
    """
    built: Algorithm = build(ALGORITHMS.find(name), {**(options or {}), **more})
    return built
