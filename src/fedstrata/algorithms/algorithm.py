"""The base of all algorithms: a frozen set of hyperparameters, the server's round, and the clients' work."""

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
from fedstrata.core.options import Option, Options, Shares, build
from fedstrata.core.options import param as param
from fedstrata.core.registry import YOUR_OWN, Registry
from fedstrata.problems.problem import Problem


class State(NamedTuple):
    """The default state of the server: the point x, and y, of length 0 without a dual."""

    x: torch.Tensor
    y: torch.Tensor


ANY_LEVELS = range(1, 100)
"""For ``levels``: one inner level or more."""

ALGORITHMS: Registry[type[Algorithm]] = Registry("algorithm", hint=YOUR_OWN)

SHARES = Shares(0.05)
"""The range to search for the weight of a fresh value in an average."""


class Algorithm(Options, ABC):
    """The base of every algorithm.

    A subclass becomes a frozen dataclass of its hyperparameters and is registered under ``name``. Algorithms do not
    inherit from each other; a subclass of an algorithm is a *preset*, the same algorithm under another name with other
    defaults, which sets ``name``, ``defaults``, ``hidden`` and ``full_participation`` only::

        class AdaFGDA(FGDA):
            name = "adafgda"
            defaults = {"matrix": "adam", "gamma": 0.01}

    name:                its name on the command line; "" for an algorithm with presets only.
    levels, dual:        the problems it solves: the numbers K of inner levels, e.g. ``range(1, 2)`` or ``ANY_LEVELS``,
                         and whether there is a dual; None if it solves problems with and without one.
    inner_mean:          the inner mean of problems with levels, "local" or "global".
    mixture:             whether the dual must weight the clients.
    full_participation:  whether every client must take part in every round.
    auxiliary:           whether the server needs its own samples, some of every class.
    hidden:              names of hyperparameters that only other presets of the file have, as in ("matrix", "rho").
    defaults:            for a preset, hyperparameters with another default.
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
    hidden: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if Algorithm not in cls.__bases__:
            _make_preset(cls)
        if not isinstance(vars(cls).get("name"), str):
            raise TypeError(f"{cls.__name__} must have a name for the command line: name = '...'.")
        for name in cls.hidden:
            option: Option = vars(cls)[name]
            metadata = {"option": option}
            setattr(cls, name, dataclasses.field(default=option.default, init=False, repr=False, metadata=metadata))
        cls.declare(cls.name or cls.__name__)
        if cls.name:
            ALGORITHMS.add(cls.name, cls)

    def __post_init__(self) -> None:
        """Raise if hyperparameters do not fit together; each has already been checked on its own."""

    def start(self, x: torch.Tensor, y: torch.Tensor, clients: Clients) -> Any:
        """Return the server's state before the first round, a NamedTuple; all clients are available.

        ``y`` has length 0 without a dual. Checkpoints are read into the class of the return annotation.
        """
        return State(x, y)

    @abstractmethod
    def round(self, s: Any, clients: Clients) -> Any:
        """Run one round on the server, with any number of exchanges; return the new state."""

    def rejoin(self, s: Any, clients: Clients) -> None:
        """Let clients that have lost what they kept take part again: ``clients.restore(self.first, s.x)``.

        Called at the end of a round, with the new state, if the run handles faults and such clients were left out.
        """

    def solution(self, s: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the solution (x, y) of a state: the last iterate, unless the algorithm averages."""
        return s.x, getattr(s, "y", None)

    @classmethod
    def solves(cls, problem: Problem) -> bool:
        """Whether the algorithm solves this class of problems."""
        return (
            len(problem.levels) in cls.levels
            and cls.dual in (None, problem.dual)
            and (not problem.levels or problem.inner_mean == cls.inner_mean)
            and (problem.mixture or not cls.mixture)
        )

    def check(self, problem: Problem, participation: int | float, clients: int) -> None:
        """Raise if the algorithm does not support the problem or the participation."""
        if not self.solves(problem):
            fitting = sorted(n for n, a in ALGORITHMS.items() if a.solves(problem))
            raise InputError(
                f"{self.name} does not solve the problem {problem.name!r} ({problem.kind}). "
                f"Algorithms that do: {', '.join(fitting) or 'none'}."
            )
        if self.full_participation and cohort_size(participation, clients) < clients:
            raise invalid(f"participation of {self.name}", participation, "1.0 (every client in every round)")


PRESET = ("name", "defaults", "hidden", "full_participation")
"""What a preset may set."""


def _make_preset(cls: type[Algorithm]) -> None:
    """Declare a preset's hyperparameters with its defaults; raise if the subclass is more than a preset."""
    if isinstance(cls.hidden, str):
        raise TypeError(f"hidden of {cls.__name__} must be a tuple of names. Got {cls.hidden!r}.")
    inherited = {field.name: field for field in dataclasses.fields(cls)}
    own = {name for name in vars(cls) if not name.startswith("__") and name != "_abc_impl"}
    wrong = (own - set(PRESET)) | ({*cls.defaults, *cls.hidden} - set(inherited))
    wrong |= set(inspect.get_annotations(cls))
    if wrong:
        raise TypeError(
            f"{cls.__name__} must derive from Algorithm itself, or be a preset that only sets {', '.join(PRESET)}: "
            f"algorithms do not inherit from each other. Got {', '.join(sorted(wrong))}."
        )
    hints = get_type_hints(cls, include_extras=True)
    cls.__annotations__ = {name: hints[name] for name in inherited}
    for name, field in inherited.items():
        option: Option = field.metadata["option"]
        setattr(cls, name, dataclasses.replace(option, default=cls.defaults.get(name, field.default)))


def algorithm(name: str, options: Mapping[str, Any] | None = None, **more: Any) -> Algorithm:
    """Build an algorithm by name, with options as a configuration file gives them.

    A rate may be a table such as ``{schedule = "step", value = 0.1}``, steps may be ``{epochs = 5}`` or
    ``{initial = 4, base = 2.0}``.
    """
    return build(ALGORITHMS.find(name), {**(options or {}), **more})
