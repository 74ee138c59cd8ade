"""What an algorithm sends, read from its module's docstring: one line, or a table with a row for each variant.

    Sent: up d, down d.

    Sent, per client and round:
        sagda                           up 2*(d + p)    down 2*(d + p)
        sagda, control = false          up d + p        down d + p
        sagda, before the first round   up 0            down 0

The formulas use d (size of x), p (size of y), K (levels), r (size of the last level's value), R (of all levels' values
together), C (classes) and T (the algorithm's inner rounds). A test compares every row with counted bytes.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from typing import Any, NamedTuple

from fedstrata.algorithms.algorithm import Algorithm
from fedstrata.core.errors import FedstrataError

_LINE = re.compile(r"^Sent: up ([^,]+), down ([^.]+)\.", re.M)
_TABLE = re.compile(r"^Sent, per client and round[^:]*:\n((?: {4}.+\n)+)", re.M)
_ROW = re.compile(r"^ {4}(.+?) {2,}up (.+?) {2,}down (.+)$", re.M)
_FIRST = "before the first round"


class Sent(NamedTuple):
    """How many numbers a client sends and receives, as formulas.

    variant: the problem class, if the algorithm has several, e.g. "minimax".
    options: the hyperparameters that differ from the defaults.
    first:   whether it is sent before the first round instead of in every round.
    """

    variant: str
    options: dict[str, Any]
    first: bool
    up: str
    down: str


def sent(kind: type[Algorithm]) -> list[Sent]:
    """Return what an algorithm sends according to its docstring, with default options first."""
    text = inspect.getdoc(inspect.getmodule(kind)) or ""
    line, table = _LINE.search(text), _TABLE.search(text)
    rows = [Sent("", {}, False, line[1].strip(), line[2].strip())] if line else []
    for label, up, down in _ROW.findall(table[1]) if table else ():
        name, *conditions = (part.strip() for part in label.split(","))
        name, _, variant = name.partition(" (")
        if name == _FIRST:
            name, conditions = kind.name, [_FIRST]
        if name == kind.name:
            options = tomllib.loads("\n".join(c for c in conditions if c != _FIRST))
            rows.append(Sent(variant.rstrip(")"), options, _FIRST in conditions, up.strip(), down.strip()))
    if not any(not row.first for row in rows):
        raise FedstrataError(
            f"The docstring of {kind.__module__} must say what {kind.name} sends: 'Sent: up d, down d.', or a table "
            "'Sent, per client and round:' with a row for it."
        )
    return rows
