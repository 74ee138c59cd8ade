"""The "Sent" rows in the docstring of an algorithm's file: what it sends.

Either one line, "Sent: up d, down d.", or a table::

    Sent, per client and round:
        name[ (variant)][, option = value ...]      up 2*(d + p)    down d
        [name, ]before the first round              up d            down d

Letters: d, p, r, R, C, K, and T for ``inner_rounds``. The row that applies is the one with the most options that fit;
without a row for it, nothing is sent before the first round.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import operator
import re
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import fedstrata as fs
from fedstrata.algorithms import ALGORITHMS

FIRST = "before the first round"
WANTED = "Write one line, 'Sent: up d, down d.', or a table of rows 'name, option = value    up 2*d    down d'."


@dataclass(frozen=True)
class Row:
    """What is sent per client and round, or before the first one, by a name ("" is all of the file) with options."""

    up: str
    down: str
    name: str = ""
    variant: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    first: bool = False

    def fits(self, algorithm: fs.Algorithm, variant: str, first: bool) -> bool:
        return (
            self.name in ("", algorithm.name)
            and self.variant in ("", variant)
            and self.first == first
            and all(getattr(algorithm, key) == value for key, value in self.options.items())
        )


def read_row(line: str, where: str) -> Row:
    """Read one row of a table."""
    found = re.fullmatch(r" {4}(\S.*?) {2,}up (.+?) {2,}down (.+?) *", line)
    assert found, f"{where}: the row {line.strip()!r} cannot be read. {WANTED}"
    name, variant, options, first = "", "", {}, False
    for i, part in enumerate(found[1].split(", ")):
        own = re.fullmatch(r"(\w+)(?: \((.+)\))?", part)
        if part == FIRST:
            first = True
        elif " = " in part:
            options |= tomllib.loads(part)
        else:
            assert i == 0 and own, f"{where}: {part!r} in the row {line.strip()!r} is neither a name nor an option."
            name, variant = own[1], own[2] or ""
    return Row(found[2], found[3], name, variant, options, first)


@cache
def rows_of(kind: type[fs.Algorithm]) -> list[Row]:
    """Read what the docstring of an algorithm's file says."""
    module = inspect.getmodule(kind)
    assert module is not None and module.__file__ is not None
    where, text = f"src/fedstrata/algorithms/{Path(module.__file__).name}", module.__doc__ or ""
    line = re.search(r"^Sent: up (.+?), down (.+?)\.(?:\s|$)", text, re.M)
    if line is not None:
        return [Row(line[1], line[2])]
    block = re.search(r"^Sent, per client and round[^\n]*:\n((?: {4}.*\n)+)", text, re.M)
    assert block, f"{where}: the docstring does not say what is sent. {WANTED}"
    rows = [read_row(line, where) for line in block[1].splitlines()]
    for row in rows:
        owner = ALGORITHMS.get(row.name)
        assert not row.name or (owner and owner.__module__ == kind.__module__), f"{where}: no algorithm {row.name!r}."
        unknown = set(row.options) - {f.name for f in dataclasses.fields(owner or kind)}
        assert not unknown, f"{where}: no hyperparameter {', '.join(unknown)}."
    assert any(row.name in ("", kind.name) and not row.first for row in rows), (
        f"{where}: no row for {kind.name}. {WANTED}"
    )
    return rows


def row_for(algorithm: fs.Algorithm, variant: str = "", first: bool = False) -> Row:
    """Find the row that applies: the one with the most options, and with a variant rather than without."""
    rows = [row for row in rows_of(type(algorithm)) if row.fits(algorithm, variant, first)]
    if not rows and first:
        return Row("0", "0")
    assert rows, f"No row of {algorithm.name} says what it sends as {algorithm}."
    best = max((len(row.options), bool(row.variant)) for row in rows)
    closest = [row for row in rows if (len(row.options), bool(row.variant)) == best]
    assert len({(row.up, row.down) for row in closest}) == 1, (
        f"{algorithm.name}: {closest} fit {algorithm} equally well."
    )
    return closest[0]


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: operator.pow}


def numbers(formula: str, **sizes: int) -> int:
    """Evaluate a formula such as ``2*d + K`` without running it as code."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return sizes[node.id]
        assert isinstance(node, ast.BinOp), f"{formula!r} is not a sum of products."
        return OPERATORS[type(node.op)](value(node.left), value(node.right))

    return value(ast.parse(formula, mode="eval").body)
