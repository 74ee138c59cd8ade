"""What an algorithm is: a frozen set of hyperparameters, a server's round, and what a client does when asked."""

from __future__ import annotations

import dataclasses
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, dataclass_transform

import torch

from fedstrata.clients.clients import Clients
from fedstrata.clients.cohort import cohort_size
from fedstrata.core.errors import InputError, invalid, unknown
from fedstrata.core.schedules import Epochs, EqualSteps, Interval, Rate, Schedule, Steps, local_work, schedule
from fedstrata.problems.problem import Problem


class State(NamedTuple):
    """The server's state of an algorithm that needs nothing but the point: x, and y, of length 0 without a dual."""

    x: torch.Tensor
    y: torch.Tensor


def param(
    default: Any,
    doc: str,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] = (),
    search: tuple[float, float] | None = None,
) -> Any:
    """Declare a hyperparameter: its default, one line of explanation, its range, and what ``tune`` tries.

    ``above`` and ``below`` are exclusive bounds, ``least`` an inclusive one. ``search`` is the range
    that ``fedstrata tune`` searches, on a logarithmic scale.
    """
    metadata = {"doc": doc, "above": above, "least": least, "below": below, "choices": choices, "search": search}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass_transform(frozen_default=True, field_specifiers=(param,))
class Algorithm(ABC):
    """The base of every algorithm.

    A subclass becomes a frozen dataclass of its hyperparameters and is registered under ``name``. Algorithms do not
    inherit from each other; a subclass of an algorithm is a *preset*, another name for it with other defaults::

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
    levels: ClassVar[range] = range(1)
    dual: ClassVar[bool | None] = False
    inner_mean: ClassVar[str] = "local"
    mixture: ClassVar[bool] = False
    full_participation: ClassVar[bool] = False
    auxiliary: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = {}
    hidden: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if Algorithm in cls.__bases__:
            for hidden in cls.hidden.split():
                vars(cls)[hidden].init = vars(cls)[hidden].repr = False
        else:
            _make_preset(cls)
        dataclass(frozen=True)(cls)
        if not isinstance(cls.__dict__.get("name"), str):
            raise TypeError(f"{cls.__name__} must have a name, the one it has on the command line: name = '...'.")
        if not cls.name:
            return
        other = ALGORITHMS.get(cls.name)
        if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(
                f"The name {cls.name!r} of {cls.__name__} is taken by {other.__module__}.{other.__qualname__}."
            )
        ALGORITHMS[cls.name] = cls

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            _check(f"{field.name} of {self.name}", getattr(self, field.name), kind_of(field), field.metadata)

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
    """Give a preset its defaults; refuse a subclass that is more than a preset."""
    inherited: dict[str, dataclasses.Field[Any]] = cls.__dataclass_fields__  # type: ignore[attr-defined]
    allowed = {"name", "defaults", "hidden", *(k for k in Algorithm.__annotations__)}
    own = {k for k in vars(cls) if not k.startswith("__") and k != "_abc_impl"} - allowed
    unknown_names = {*cls.defaults, *cls.hidden.split()} - set(inherited)
    wrong = own | unknown_names | set(inspect.get_annotations(cls))
    if wrong:
        raise TypeError(
            f"{cls.__name__} must derive from Algorithm itself, or be a preset that only sets name, defaults and "
            f"hidden: algorithms do not inherit. Got {', '.join(sorted(wrong))}."
        )
    for name, field in inherited.items():
        default = cls.defaults.get(name, field.default)
        shown = name not in cls.hidden.split()
        setattr(cls, name, dataclasses.field(default=default, init=shown, repr=shown, metadata=field.metadata))
    cls.__annotations__ = {name: field.type for name, field in inherited.items()}


ALGORITHMS: dict[str, type[Algorithm]] = {}


def kind_of(field: dataclasses.Field[Any]) -> str:
    """Return a hyperparameter's type by name: Rate, Steps, EqualSteps, float, int, bool, str, or something else."""
    if isinstance(field.type, str):
        return field.type
    names: dict[Any, str] = {Rate: "Rate", Steps: "Steps", EqualSteps: "EqualSteps"}
    names |= {float: "float", int: "int", bool: "bool", str: "str"}
    return names.get(field.type, str(field.type))


def _check(what: str, value: object, kind: str, limits: Mapping[str, Any]) -> None:
    if kind == "Rate" and isinstance(value, Schedule):
        return
    if kind in ("Steps", "EqualSteps"):
        if isinstance(value, Interval) or (kind == "Steps" and isinstance(value, Epochs)):
            return
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
            others = "epochs, or an interval" if kind == "Steps" else "or an interval"
            raise invalid(what, value, f"a whole number of at least 1, {others}")
        return
    if kind == "str":
        choices = limits.get("choices")
        if not isinstance(value, str) or (choices and value not in choices):
            raise invalid(what, value, " or ".join(map(repr, choices)) if choices else "text")
        return
    if kind == "bool":
        if not isinstance(value, bool):
            raise invalid(what, value, "true or false")
        return
    if kind not in ("Rate", "float", "int"):
        return
    bounds = [
        f"{word} {limits[key]:g}"
        for key, word in (("above", "above"), ("least", "at least"), ("below", "below"))
        if limits.get(key) is not None
    ]
    wants = " ".join(["a whole number" if kind == "int" else "a number", " and ".join(bounds)]).strip()
    good = isinstance(value, int if kind == "int" else int | float) and not isinstance(value, bool)
    if good and isinstance(value, int | float):
        good = (
            math.isfinite(value)
            and (limits.get("above") is None or value > limits["above"])
            and (limits.get("least") is None or value >= limits["least"])
            and (limits.get("below") is None or value < limits["below"])
        )
    if not good:
        raise invalid(what, value, wants)


def algorithm(name: str, options: Mapping[str, Any] | None = None, **more: Any) -> Algorithm:
    """Build an algorithm by name, from options as a configuration file has them.

    A rate may be a table such as ``{schedule = "step", value = 0.1}``, steps may be ``{epochs = 5}`` or
    ``{initial = 4, base = 2.0}``.
    """
    if name not in ALGORITHMS:
        raise unknown("algorithm", name, ALGORITHMS)
    kind = ALGORITHMS[name]
    fields = {f.name: kind_of(f) for f in dataclasses.fields(kind) if f.init}  # type: ignore[arg-type]
    built: dict[str, Any] = {}
    for option, value in {**(options or {}), **more}.items():
        if option not in fields:
            raise unknown(f"hyperparameter of {name}", option, fields)
        if isinstance(value, dict) and fields[option] == "Rate":
            value = schedule(value, f"{option} of {name}")
        elif isinstance(value, dict) and fields[option] in ("Steps", "EqualSteps"):
            value = local_work(value, fields[option], f"{option} of {name}")
        built[option] = value
    return kind(**built)
