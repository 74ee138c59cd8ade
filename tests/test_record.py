"""Every algorithm and every example gives the numbers that tests/record.json holds."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from cases import one_per, repeats
from fedstrata.algorithms import ALGORITHMS
from record import CASES, COUNTS, EXAMPLES, PATHS, Outcome, needs_data, read_record

pytestmark = pytest.mark.untraced

TOLERANCE = 1e-12
RECORD = read_record()


def assert_near(found: Any, expected: Any, scale: float = 1.0) -> None:
    """Numbers that agree to rounding, relative to themselves, or ``scale`` where that is larger."""
    found, expected = np.array(found), np.array(expected)
    assert found.shape == expected.shape
    np.testing.assert_array_less(np.abs(found - expected) / np.maximum(scale, np.abs(expected)), TOLERANCE)


def assert_same_vector(found: Any, expected: Any) -> None:
    """Summaries of vectors that agree: those of long ones are sums, whose rounding goes with the norm."""
    if isinstance(expected, dict):
        assert found["size"] == expected["size"]
        assert_near(found["entries"], expected["entries"])
        for part in ("projections", "norm"):
            assert_near(found[part], expected[part], max(1.0, expected["norm"]))
    elif expected is None:
        assert found is None
    else:
        assert_near(found, expected)


def assert_recorded(label: str, outcome: Outcome) -> None:
    assert label in RECORD, f"Record this case once: python tests/record.py {label!r}"
    found, expected = outcome.row(), RECORD[label]
    assert {name: found[name] for name in COUNTS} == {name: expected[name] for name in COUNTS}
    for vector in ("x", "y"):
        assert_same_vector(found[vector], expected[vector])


@one_per(lambda label: CASES[label].name, "label", CASES)
def test_an_algorithm_gives_the_recorded_numbers(label: str) -> None:
    assert_recorded(label, CASES[label]())


@repeats("label", EXAMPLES)
def test_an_example_gives_the_recorded_numbers(label: str) -> None:
    if needs_data(PATHS[label]) and "FEDSTRATA_DATA" not in os.environ:
        pytest.skip(f"{label} needs the data directory FEDSTRATA_DATA")
    assert_recorded(label, EXAMPLES[label]())


def test_every_case_has_a_record_and_every_record_a_case() -> None:
    assert list(RECORD) == [*CASES, *EXAMPLES]


def test_every_algorithm_of_the_record_is_still_there() -> None:
    """New algorithms need no record: it holds the numbers of 0.1.0, and their equations are tested elsewhere."""
    missing = {case.name for case in CASES.values()} - set(ALGORITHMS)
    assert not missing, f"Algorithms of 0.1.0 that are gone, though users name them: {sorted(missing)}."
