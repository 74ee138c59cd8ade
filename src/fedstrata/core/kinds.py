"""The values that an option accepts, derived from its annotation: a description in words, and a check.

bool, int, float, str           numbers must be finite and within the option's limits
Literal["a", "b"]               one of these; likewise a str or an int with ``choices``
int | float                     a fraction or a count, such as the clients that take part in a round
X | None, X | Y                 the first that accepts the value
Sequence[X], tuple[X, ...]      any collection, stored as a tuple; tuple[X, X] fixes the length
dict[str, X], dict[str, Any]    a table
Callable[...]                   a function
a class of options              an instance of it, or a table to build one from

Any other annotation raises an error when the option is declared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from fedstrata.core.errors import invalid


@dataclass(frozen=True)
class Limits:
    """Restrictions on an annotation: bounds on its numbers, or the values to choose from."""

    above: float | None = None
    least: float | None = None
    below: float | None = None
    most: float | None = None
    choices: tuple[Any, ...] = ()

    def allow(self, number: float) -> bool:
        """Whether a number is finite and within the bounds."""
        return (
            -math.inf < number < math.inf
            and (self.above is None or number > self.above)
            and (self.least is None or number >= self.least)
            and (self.below is None or number < self.below)
            and (self.most is None or number <= self.most)
        )

    @property
    def words(self) -> str:
        """The bounds in words, after a space: `` above 0 and below 1``; empty without bounds."""
        if self.least is not None and self.most is not None:
            return f" from {self.least:g} to {self.most:g}"
        bounds = (("above", self.above), ("of at least", self.least), ("below", self.below), ("at most", self.most))
        words = " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None).replace("e+0", "e")
        return f" {words}" if words else ""


class Place(NamedTuple):
    """Where a value comes from.

    what:     its name in messages.
    in_table: whether it comes from a table, where nested tables describe options.
    key:      its key in the file, if messages should name it.
    where:    the file.
    """

    what: str
    in_table: bool = False
    key: str | None = None
    where: str = ""

    def below(self, name: str) -> Place:
        """Return the place of an entry of the table that is at this place."""
        table, of, owner = self.what.partition(" of ")
        return self._replace(what=f"{table}.{name}{of}{owner}", key=None if self.key is None else f"{self.key}.{name}")


class Refused(Exception):
    """A kind does not accept a value; another kind in a union may."""


@dataclass(frozen=True)
class Kind:
    """The values that an option accepts.

    words:   their description, e.g. "a number above 0".
    plural:  the same for the elements of a list, "numbers above 0".
    read:    returns the value in its stored form, or raises :class:`Refused`.
    choices: the strings among the values, to suggest the nearest.
    whole:   whether its numbers are integers.
    limited: whether the limits of its option apply to some of them.
    """

    words: str
    plural: str
    read: Callable[[Any, Place], Any]
    choices: tuple[str, ...] = ()
    whole: bool = False
    limited: bool = False

    def take(self, value: Any, place: Place) -> Any:
        """Return a value in its stored form, or raise the error that says what is expected."""
        try:
            return self.read(value, place)
        except Refused:
            raise invalid(place.what, value, self.words, place.where, self.choices) from None


def kind_of(annotation: Any, limits: Limits) -> Kind:
    """Return the kind for an annotation within these limits; raise a TypeError if it cannot be checked."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind_of(arguments[0], arguments[1])
    if origin is Literal or (limits.choices and annotation in (str, int)):
        return _choice(arguments) if origin is Literal else replace(_choice(limits.choices), limited=not limits.words)
    if annotation in _PLAIN:
        return _PLAIN[annotation](limits)
    if origin in (Union, UnionType):
        return _union(arguments, limits)
    if origin in (list, tuple, Sequence):
        return _list(arguments, limits)
    if origin is dict and arguments[0] is str:
        return _table(None if arguments[1] is Any else kind_of(arguments[1], limits))
    if origin is Callable:
        return _only_if("a function", "functions", callable)
    if hasattr(annotation, "from_table"):
        return _nested(annotation)
    raise TypeError(f"An option cannot have the annotation {annotation}: it cannot be checked.")


def _only_if(words: str, plural: str, accepts: Callable[[Any], bool], choices: tuple[str, ...] = ()) -> Kind:
    def read(value: Any, place: Place) -> Any:
        if not accepts(value):
            raise Refused
        return value

    return Kind(words, plural, read, choices)


def _choice(values: tuple[Any, ...]) -> Kind:
    words = _either([repr(value) for value in values], " or ")
    texts = tuple(value for value in values if isinstance(value, str))
    return _only_if(words, words, lambda value: any(type(value) is type(v) and value == v for v in values), texts)


def _either(parts: Sequence[str], conjunction: str) -> str:
    return conjunction.join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]


def _number(limits: Limits, whole: bool = False) -> Kind:
    def read(value: Any, place: Place) -> int | float:
        if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
            raise Refused
        number = int(value) if isinstance(value, Integral) else float(value)
        if not limits.allow(number):
            raise Refused
        if abs(number) >= 1 << 63 and isinstance(number, int):
            raise invalid(place.what, value, "a number that fits in 64 bits", place.where)
        return number

    noun = "whole number" if whole else "number"
    return Kind(f"a {noun}{limits.words}", f"{noun}s{limits.words}", read, (), whole, limited=not limits.choices)


def _fraction() -> Kind:
    fraction, count = _number(Limits(above=0, most=1)), _number(Limits(least=1), whole=True)

    def read(value: Any, place: Place) -> int | float:
        number: int | float = (count if isinstance(value, Integral) else fraction).read(value, place)
        return number

    return Kind("a fraction in (0, 1] or a whole number of at least 1", "fractions or whole numbers", read)


_PLAIN: dict[Any, Callable[[Limits], Kind]] = {
    bool: lambda _: _only_if("true or false", "booleans", lambda value: isinstance(value, bool)),
    str: lambda _: _only_if("text", "names", lambda value: isinstance(value, str)),
    NoneType: lambda _: _only_if("left out", "nothing", lambda value: value is None),
    int: lambda limits: _number(limits, whole=True),
    float: _number,
}


def _union(annotations: tuple[Any, ...], limits: Limits) -> Kind:
    fraction = {int, float} <= set(annotations)
    kinds = [_fraction()] if fraction else []
    kinds += [kind_of(a, limits) for a in annotations if not fraction or a not in (int, float)]

    def read(value: Any, place: Place) -> Any:
        for kind in kinds:
            try:
                return kind.read(value, place)
            except Refused:
                continue
        raise Refused

    words, plural = _either([kind.words for kind in kinds], ", or "), _either([kind.plural for kind in kinds], ", or ")
    choices = tuple(choice for kind in kinds for choice in kind.choices)
    whole, limited = any(kind.whole for kind in kinds), any(kind.limited for kind in kinds)
    return Kind(words, plural, read, choices, whole, limited)


def _list(arguments: tuple[Any, ...], limits: Limits) -> Kind:
    one = kind_of(arguments[0], limits)
    length = len(arguments) if len(arguments) > 1 and arguments[1] is not ... else None

    def read(value: Any, place: Place) -> tuple[Any, ...]:
        is_list = isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)
        if not is_list or (length is not None and len(value) != length):
            raise Refused
        return tuple(one.read(element, place) for element in value)

    count = "" if length is None else f"{length} "
    return Kind(f"a list of {count}{one.plural}", f"lists of {count}{one.plural}", read, limited=one.limited)


def _table(entry: Kind | None) -> Kind:
    def read(value: Any, place: Place) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise Refused
        return {k: v if entry is None else entry.take(v, place.below(k)) for k, v in value.items()}

    return Kind("a table", "tables", read, limited=entry is not None and entry.limited)


def _nested(options: Any) -> Kind:
    words = getattr(options, "words", f"{'an' if options.__name__[0] in 'AEIOU' else 'a'} {options.__name__}")

    def read(value: Any, place: Place) -> Any:
        if isinstance(value, options):
            return value
        if place.key is not None and not isinstance(value, Mapping):
            raise invalid(place.what, value, "a table", place.where)
        if not place.in_table or not isinstance(value, Mapping) or (place.key is None and not options.fits(value)):
            raise Refused
        return options.from_table(value, place.what if place.key is None else place.where, place.key)

    return Kind(words, words, read)
