"""Options, declared once: a default, a one-line description and a range. Everything else is derived from these.

A class of options derives from :class:`Options`, a function with options is decorated with :func:`options`, and both
declare them with :func:`param`:

    class Channel(Options, owner="the channel"):
        clip: float | None = param(None, "largest norm of a client's update", above=0)

    @options("the auc problem")
    def auc(model: nn.Module, margin: float = param(1.0, "margin of a pair", above=0)) -> Problem: ...

A call checks every value; :func:`build` makes that call with a table from a configuration file. ``fedstrata show`` and
docs/configuration.md describe the options from :func:`options_of`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, dataclass_transform, get_type_hints

from fedstrata.core.errors import InputError, unknown, within
from fedstrata.core.kinds import Kind, Limits, Place, kind_of
from fedstrata.core.registry import Registry

F = TypeVar("F", bound=Callable[..., Any])

_EMPTY: Any = inspect.Parameter.empty


class Shares(NamedTuple):
    """A range to search for a weight or a share, which never exceeds 1."""

    low: float
    high: float = 1.0


@dataclass(frozen=True)
class Option:
    """A declaration by :func:`param`, with the name and annotation of its field or parameter."""

    default: Any = ...
    doc: str = ""
    limits: Limits = field(default_factory=Limits)
    search: tuple[float, float] | None = None
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    in_file: bool = True
    name: str = ""
    annotation: Any = None

    @property
    def required(self) -> bool:
        """Whether the option has no default."""
        return self.default is ...

    @functools.cached_property
    def kind(self) -> Kind:
        """The values that it accepts; raises a TypeError if the annotation cannot be checked, or has no such limits."""
        kind = kind_of(self.annotation, self.limits)
        if self.limits != Limits() and not kind.limited:
            raise TypeError(f"Its limits do not apply to the annotation {self.annotation}.")
        return kind

    @property
    def wants(self) -> str:
        """The values that it accepts, in words: ``a number above 0, or left out``."""
        return self.kind.words

    def fresh_default(self) -> Any:
        """Return the default; a table is copied, so that no two instances share it."""
        return copy.deepcopy(self.default) if isinstance(self.default, dict) else self.default

    def field(self) -> Any:
        """Return the option as a field of a dataclass."""
        if self.required:
            return field(metadata={"option": self})
        if isinstance(self.default, dict):  # dataclasses refuse mutable defaults
            return field(default_factory=self.fresh_default, metadata={"option": self})
        return field(default=self.default, metadata={"option": self})


def param(
    default: Any,
    doc: str,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    choices: Iterable[Any] = (),
    search: tuple[float, float] | None = None,
    only: Mapping[str, tuple[Any, ...]] | None = None,
    in_file: bool = True,
) -> Any:
    """Declare an option: its default (``...`` for none), a one-line description, and its range.

    ``above`` and ``below`` are exclusive bounds, ``least`` and ``most`` inclusive; ``choices`` are the allowed strings
    or integers. ``search`` is the range that ``fedstrata tune`` searches, on a logarithmic scale; if the best value
    lies at its edge, it also searches beyond, but not above 1 for :class:`Shares`.
    ``only={"form": ("margin",)}`` means that the option applies only if another one has one of these values.
    ``in_file=False`` declares an option that is set in Python only and is not a key of a configuration file.
    """
    return Option(default, doc, Limits(above, least, below, most, tuple(choices)), search, only or {}, in_file)


def options(owner: str) -> Callable[[F], F]:
    """Check the options that a function declares with :func:`param`; ``owner`` is its name in messages."""

    def declare(function: F) -> F:
        defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
        declared = {name: default for name, default in defaults.items() if isinstance(default, Option)}
        return _checked(function, owner, declared, get_type_hints(function, include_extras=True))

    return declare


@dataclass_transform(frozen_default=True)
class Options:
    """The base of a frozen dataclass of options: ``class Channel(Options, owner="the channel")``.

    Every field is an option, with or without :func:`param`. A class without ``owner`` is only a base of others.

    words:  the name of an instance in messages; by default "a Channel".
    family: for a base class, the key by which a table names one of its subclasses, and their registry.
    """

    words: ClassVar[str]
    family: ClassVar[tuple[str, Registry[Any]]]

    def __init_subclass__(cls, owner: str | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        if owner is not None:
            cls.declare(owner)

    @classmethod
    def declare(cls, owner: str) -> None:
        """Make the class a frozen dataclass with checked arguments; ``owner`` is its name in messages."""
        for name, value in list(vars(cls).items()):
            if isinstance(value, Option):
                setattr(cls, name, value.field())
        dataclass(frozen=True)(cls)
        declared = {}
        for f in [f for f in dataclasses.fields(cls) if f.init]:  # type: ignore[arg-type]
            option: Option = f.metadata.get("option", Option())
            default = option.default if f.default is dataclasses.MISSING else f.default
            declared[f.name] = dataclasses.replace(option, default=default)
        hints = get_type_hints(cls, include_extras=True)
        cls.__init__ = _checked(cls.__init__, owner, declared, hints)  # type: ignore[method-assign]
        cls.__doc__ = explained(cls.__doc__, cls)

    @classmethod
    def fits(cls, table: Mapping[str, Any]) -> bool:
        """Whether a table may describe this class: it names a subclass or one of the options."""
        return "family" in vars(cls) or any(name in table for name in options_of(cls))

    @classmethod
    def from_table(cls, table: Mapping[str, Any], where: str = "", key: str | None = None) -> Self:
        """Build an instance from a table in a configuration file; see :func:`check`."""
        chosen: Any = cls
        if "family" in vars(cls):
            name, members = cls.family
            chosen = members.find(table.get(name), where)
            table = {k: v for k, v in table.items() if k != name}
        built: Self = build(chosen, table, where, key)
        return built

    def to_table(self) -> dict[str, Any]:
        """Return the table of a configuration file that builds this instance, without options that are None."""
        named = {self.family[0]: self.name} if hasattr(self, "family") else {}  # type: ignore[attr-defined]
        values = {name: getattr(self, name) for name, option in options_of(self).items() if option.in_file}
        return named | {name: plain(value) for name, value in values.items() if value is not None}

    def replace(self, **changes: Any) -> Self:
        """Return a copy with these changes."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


def _checked(function: F, owner: str, specs: Mapping[str, Option], hints: Mapping[str, Any]) -> F:
    """Return the function with its options checked and their defaults in its signature."""
    for name in specs:
        if name not in hints:
            raise TypeError(f"The {name} of {owner} needs a type: {name}: float = param(...).")
    declared = {name: _declared(spec, owner, name, hints[name]) for name, spec in specs.items()}
    for option in declared.values():
        if not option.only.keys() <= declared.keys():
            raise TypeError(
                f"The {option.name} of {owner} depends on {', '.join(option.only)}, which is not an option."
            )
    defaults = {name: _EMPTY if option.required else option.default for name, option in declared.items()}
    signature = inspect.signature(function)
    parameters = [p.replace(default=defaults.get(n, p.default)) for n, p in signature.parameters.items()]
    signature = signature.replace(parameters=parameters)
    accepted = {p.name: p.default for p in parameters if p.name != "self"}

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        for name in keywords:
            if name not in accepted:
                raise unknown(f"option of {owner}", name, accepted)
        try:
            values = signature.bind_partial(*args, **keywords).arguments
        except TypeError as error:
            raise TypeError(f"{function.__qualname__}: {error}") from None
        missing = [name for name, default in accepted.items() if default is _EMPTY and name not in values]
        if missing:
            raise InputError(f"{owner[0].upper()}{owner[1:]} needs {' and '.join(missing)}.")
        for name, option in declared.items():
            place = Place(f"{name} of {owner}")
            values[name] = option.kind.take(values[name], place) if name in values else option.fresh_default()
        for option in declared.values():
            _check_applies(option, owner, values)
        return function(**values)

    call.__dict__ |= {"__signature__": signature, "__options__": declared, "__owner__": owner}
    call.__doc__ = explained(function.__doc__, call)
    return call  # type: ignore[return-value]


def _declared(option: Option, owner: str, name: str, annotation: Any) -> Option:
    """Return an option with its name and annotation; raise if the annotation or the default is wrong."""
    option = dataclasses.replace(option, name=name, annotation=annotation)
    try:
        kind = option.kind
    except TypeError as error:
        raise TypeError(f"The {name} of {owner} cannot be declared. {error}") from None
    if option.required:
        return option
    return dataclasses.replace(option, default=kind.take(option.default, Place(f"default {name} of {owner}")))


def _check_applies(option: Option, owner: str, values: Mapping[str, Any]) -> None:
    """Raise if the option is set but does not apply, given the values of other options."""
    value = values[option.name]
    for other, fitting in option.only.items():
        if value != option.default and values[other] not in fitting:
            needs = " or ".join(map(repr, fitting))
            raise InputError(
                f"The {option.name} of {owner} applies only with {other} = {needs}. "
                f"Got {value!r} with {other} = {values[other]!r}."
            )


def options_of(target: Any) -> dict[str, Option]:
    """Return the options, by name, that ``target`` declares: a class, an instance or a function."""
    return dict(getattr(_called(target), "__options__", {}))


def _called(target: Any) -> Any:
    """Return the function that has the options: for a class, its ``__init__``."""
    if hasattr(target, "__options__"):
        return target
    kind: Any = target if isinstance(target, type) else type(target)
    return kind.__init__


def explained(doc: str | None, target: Any) -> str:
    """Return a docstring with the options of ``target`` appended, for ``help``."""
    lines = [f"    {name}: {option.doc} ({option.wants})" for name, option in options_of(target).items()]
    return "\n".join([inspect.cleandoc(doc or ""), *(["", "Options:", *lines] if lines else [])])


def check(target: Any, table: Mapping[str, Any], where: str = "", key: str | None = None) -> dict[str, Any]:
    """Check a table against the options of ``target``, a class or a function; return the values to call it with.

    ``where`` is the file that the table comes from. With ``key``, the table's key in that file, messages name keys such
    as ``train.rounds``; without it they name the options of ``target``.
    """
    declared = {name: option for name, option in options_of(target).items() if option.in_file}
    owner, prefix = _called(target).__owner__, f"{key}." if key else ""
    values = {}
    for name, value in table.items():
        if name not in declared and key is None:
            raise unknown(f"option of {owner}", name, declared, where)
        if name not in declared:
            raise unknown("key", prefix + name, (prefix + option for option in declared), where)
        what, place = (f"{name} of {owner}", None) if key is None else (f"key {prefix}{name}", prefix + name)
        values[name] = declared[name].kind.take(value, Place(what, in_table=True, key=place, where=where))
    return values


def build(target: Callable[..., Any], table: Mapping[str, Any], where: str = "", key: str | None = None) -> Any:
    """Call ``target`` with the options of a table, checked by :func:`check`; nested tables become options."""
    values = check(target, table, where, key)
    with within(where):
        return target(**values)


def plain(value: Any) -> Any:
    """Return a value as a configuration file stores it: options as tables, tuples as lists."""
    if isinstance(value, Options):
        return value.to_table()
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, tuple | list) else value
