"""What an algorithm is: a frozen set of hyperparameters, a server's round, and what a client does when asked."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from fedstrata.clients.clients import Clients, cohort_size
from fedstrata.core.errors import InputError, invalid
from fedstrata.core.options import Options, build
from fedstrata.core.options import param as param
from fedstrata.core.registry import Registry
from fedstrata.problems.problem import Problem


class State(Mapping[str, torch.Tensor]):
    """The server's vectors by name: ``s.x``, ``s.replace(x=...)``. Saved whole in every checkpoint."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self._tensors = tensors

    def __getattr__(self, name: str) -> torch.Tensor:
        try:
            return self.__dict__["_tensors"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(f"The server's state has no {name!r}. It has: {', '.join(self)}.") from None

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def replace(self, **tensors: torch.Tensor) -> State:
        """Return a state with these vectors exchanged or added."""
        return State(**{**self._tensors, **tensors})


ALGORITHMS: Registry[type[Algorithm]] = Registry("algorithm")


class Algorithm(Options, ABC):
    """The base of every algorithm; subclass it once, never an algorithm itself.

    A subclass becomes a frozen dataclass of its hyperparameters, its options, and is registered under ``name``.

    name:                as on the command line.
    levels, dual:        the problems it solves: the numbers K of inner levels, and whether there is a dual; None when
                         it solves problems with one and without.
    inner_mean:          "local" or "global": which mean is inside, where there are levels.
    mixture:             whether the dual must be one that weighs the clients.
    up, down:            numbers sent per client and round, in terms of d (size of x), p (size of y), r (what the last
                         level gives), R (what all levels give together) and C (classes); a property where it depends
                         on a hyperparameter.
    full_participation:  whether every client must take part in every round.
    auxiliary:           whether the server needs samples of its own, some of every class.
    answers:             what clients answer to each method that they are asked for: for every thing it returns the name
                         of the argument that it is near, "zero" for a change, a gradient or a number, "point" for a
                         point whose start is not among the arguments. Channels look at answers as changes.
    """

    name: ClassVar[str]
    family = ("name", ALGORITHMS)
    levels: ClassVar[range] = range(1)
    dual: ClassVar[bool | None] = False
    inner_mean: ClassVar[str] = "local"
    mixture: ClassVar[bool] = False
    up: ClassVar[Any]
    down: ClassVar[Any]
    full_participation: ClassVar[bool] = False
    auxiliary: ClassVar[bool] = False
    answers: ClassVar[Any] = {}

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if Algorithm not in cls.__bases__:
            raise TypeError(f"{cls.__name__} must derive from Algorithm itself: algorithms do not inherit.")
        if inspect.isabstract(cls):
            return
        if not isinstance(getattr(cls, "name", None), str):
            raise TypeError(f"{cls.__name__} must have a name, the one it has on the command line: name = '...'.")
        cls.declare(cls.name)
        other = ALGORITHMS.get(cls.name)
        if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(
                f"The name {cls.name!r} of {cls.__name__} is taken by {other.__module__}.{other.__qualname__}."
            )
        ALGORITHMS[cls.name] = cls

    def __post_init__(self) -> None:
        """Refuse hyperparameters that do not fit together; called when each of them is known to be right."""

    def init(self, problem: Problem) -> State:
        """Return the server's state before the first round; an algorithm with more than x and y adds to it."""
        start = State(x=problem.x0.clone())
        return start if problem.y0 is None else start.replace(y=problem.y0.clone())

    def start(self, s: State, clients: Clients) -> State:
        """Prepare the server's state with the clients' help, once, before the first round; every client takes part."""
        return s

    @abstractmethod
    def round(self, s: State, clients: Clients) -> State:
        """Do one round on the server, with as many exchanges with the clients as it takes."""

    def solution(self, s: State) -> State:
        """Return the solution, x and y, that the state stands for; the last iterate unless an algorithm averages."""
        return s

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


def algorithm(name: str, options: Mapping[str, Any] | None = None, **more: Any) -> Algorithm:
    """Build an algorithm by name, from options as a configuration file has them.

    A rate may be a table such as ``{schedule = "step", value = 0.1}``, steps may be ``{epochs = 5}`` or
    ``{initial = 4, base = 2.0}``.
    """
    built: Algorithm = build(ALGORITHMS.find(name), {**(options or {}), **more})
    return built
