"""Products of cases: every combination with ``--full``, otherwise a few that still cover every value of every axis.

    @product("method, world, sampling", METHODS, WORLDS, ["uniform", "epochs"])
    def test_rounds_agree(method: str, world: str, sampling: str) -> None: ...

The first axis is the method (whatever the test is about: an algorithm, a problem, a command). The short run has one
combination per method, chosen so that over all methods every value of every other axis occurs; where an axis has more
values than there are methods, it has as many combinations as it takes. The choice depends on the values alone, so it is
the same every time. ``where`` leaves out combinations that do not exist. ``table`` does the same for rows that are not
a product, ``one_per`` for rows where several belong to one method. ``repeats`` takes cases that stand for each other,
such as seeds: the short run has the first one. Any combination runs without ``--full`` if you pass its whole id::

    pytest "tests/algorithms/test_conformance.py::test_chunks_agree[fedavg-float32]"

Stacked ``parametrize`` decorators are a product too, and cut short in the same way (conftest.py). A single
``parametrize``, or a ``product`` over one axis, always runs whole.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def product(names: str, *axes: Iterable[Any], where: Callable[..., bool] = lambda *_: True) -> pytest.MarkDecorator:
    """Parametrise a test over the product of the axes, the methods first."""
    return table(names, [row for row in itertools.product(*map(tuple, axes)) if where(*row)])


def table(
    names: str,
    rows: Iterable[Sequence[Any]],
    key: Callable[..., Sequence[Any]] = lambda *row: row,
    name: Callable[..., Sequence[Any]] | None = None,
) -> pytest.MarkDecorator:
    """Parametrise a test over these rows.

    ``key(*row)`` is a row's place on the axes, the row itself by default; ``name(*row)`` what its id is made of, by
    default the same.
    """
    rows = list(rows)
    short = short_run([tuple(map(label, key(*row))) for row in rows])
    parameters = [
        pytest.param(*row, id="-".join(map(label, (name or key)(*row))), marks=() if i in short else pytest.mark.full)
        for i, row in enumerate(rows)
    ]
    return pytest.mark.parametrize(names, parameters)


def repeats(names: str, rows: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrise a test over rows that stand for each other: the first one, and all of them with ``--full``."""
    return table(
        names, [row if "," in names else (row,) for row in rows], key=lambda *_: ["any"], name=lambda *row: row
    )


def one_per(
    method: Callable[[Any], Any], names: str, rows: Iterable[Any], *axes: Iterable[Any]
) -> pytest.MarkDecorator:
    """Parametrise a test over rows, times further axes; the short run has one for each ``method(row)``."""
    products = list(itertools.product(tuple(rows), *map(tuple, axes)))
    return table(names, products, key=lambda row, *rest: (method(row), *rest), name=lambda *values: values)


def label(value: Any) -> str:
    """Return what a value is called in a test's id; for settings, those that are not the default ones."""
    name = getattr(value, "__name__", None) or getattr(value, "id", None)
    return name or (changed_settings(value) if dataclasses.is_dataclass(value) else str(value))


def changed_settings(settings: Any) -> str:
    """Return the fields of a dataclass that are not the default ones, as text."""
    usual = type(settings)()
    fields = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    return " ".join(f"{k}={v}" for k, v in fields.items() if v != getattr(usual, k)) or "default"


def short_run(places: Sequence[Sequence[str]]) -> set[int]:
    """Return the numbers of the rows that make up the short run."""
    used: Counter[tuple[int, str]] = Counter()
    chosen: set[int] = set()
    values = [tuple(enumerate(place)) for place in places]

    def take_best_of(candidates: Iterable[int]) -> None:
        """Take the row with the most values that are not covered yet; of equal ones, that with the rarest."""
        best = min(candidates, key=lambda i: (-sum(not used[v] for v in values[i]), sum(used[v] for v in values[i])))
        chosen.add(best)
        used.update(values[best])

    for method in dict.fromkeys(place[0] for place in places):
        take_best_of(i for i, place in enumerate(places) if place[0] == method)
    while unmet := [i for i, row in enumerate(values) if not all(used[v] for v in row)]:
        take_best_of(unmet)
    return chosen
