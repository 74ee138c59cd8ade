"""What an algorithm sends, read from its module's docstring: one line, or a table with a row for each variant.

    Sent: up d, down d.

    Sent, per client and round:
        sagda                           up 2*(d + p)    down 2*(d + p)
        sagda, control = false          up d + p        down d + p
        sagda, before the first round   up 0            down 0

The formulas use d (size of x), p (size of y), K (levels), r (size of the last level's value), R (of all levels' values
together), C (classes) and T (the algorithm's inner rounds). ``fs.testing`` compares every row with counted bytes.
"""

from __future__ import annotations

import ast
import inspect
import operator
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

    def numbers(self, **sizes: int) -> tuple[int, int]:
        """Return how many numbers go up and down, given what the letters of the formulas stand for."""
        return _evaluate(self.up, sizes), _evaluate(self.down, sizes)


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


def sent_by(algorithm: Algorithm, variant: str = "", first: bool = False) -> Sent:
    """Return the row that applies to an algorithm: the one that matches most options, if possible with a variant.

    Without a row for it, nothing is sent before the first round.
    """
    rows = [
        row
        for row in sent(type(algorithm))
        if row.variant in ("", variant)
        and row.first == first
        and all(getattr(algorithm, key) == value for key, value in row.options.items())
    ]
    if not rows and first:
        return Sent("", {}, True, "0", "0")
    if not rows:
        raise FedstrataError(f"No row in the docstring says what {algorithm} sends.")
    best = max((len(row.options), bool(row.variant)) for row in rows)
    closest = [row for row in rows if (len(row.options), bool(row.variant)) == best]
    if len({(row.up, row.down) for row in closest}) > 1:
        raise FedstrataError(f"Several rows of the docstring match {algorithm} equally well: {closest}.")
    return closest[0]


_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: operator.pow}


def _evaluate(formula: str, sizes: dict[str, int]) -> int:
    """Evaluate a formula such as ``2*d + K``."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name) and node.id in sizes:
            return sizes[node.id]
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise FedstrataError(
            f"The formula {formula!r} must be made of {', '.join(sizes)}, whole numbers, +, -, * and **."
        )

    return value(ast.parse(formula, mode="eval").body)
