"""Every algorithm against its NumPy reference: the rows of all tables, and references that are slightly wrong."""

from __future__ import annotations

import numpy as np
import pytest

from algorithms import equations_composition, equations_levels, equations_mixture, equations_plain, equations_saddle
from algorithms.equations import TOLERANCE, Row, distance, in_point, ours_of, run_reference
from cases import table

FAMILIES = [equations_plain, equations_mixture, equations_composition, equations_saddle, equations_levels]
RIGHT = [row for family in FAMILIES for row in family.right_rows()]
WRONG = [row for family in FAMILIES for row in family.wrong_rows()]

pytestmark = pytest.mark.untraced


@table("row", [(row,) for row in RIGHT], key=Row.axes, name=Row.name)
def test_rounds_agree_with_the_reference(row: Row) -> None:
    ours, world = ours_of(row), row.method.worlds[row.world]()
    theirs = run_reference(row, ours)
    assert distance(ours.vectors, theirs, row.method.unseen) < TOLERANCE
    for key, end in in_point(theirs).items():
        start = world.x0 if key == "x" else world.y0
        assert row.method.least[key] < np.abs(end - start).max() < 20, f"{key} hardly moved, or far away"


@table("row", [(row,) for row in WRONG], key=Row.axes, name=Row.name)
def test_a_wrong_reference_breaks_the_agreement(row: Row) -> None:
    ours = ours_of(row)
    assert distance(in_point(ours.vectors), in_point(run_reference(row, ours))) > 1e4 * TOLERANCE
