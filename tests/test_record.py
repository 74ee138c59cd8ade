"""Every algorithm and every example gives the numbers that tests/record.json holds."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

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
    found, expected = outcome.row(), RECORD[label]
    assert {name: found[name] for name in COUNTS} == {name: expected[name] for name in COUNTS}
    for vector in ("x", "y"):
        assert_same_vector(found[vector], expected[vector])


@pytest.mark.parametrize("label", CASES)
def test_an_algorithm_gives_the_recorded_numbers(label: str) -> None:
    assert_recorded(label, CASES[label]())


@pytest.mark.parametrize("label", EXAMPLES)
def test_an_example_gives_the_recorded_numbers(label: str) -> None:
    if needs_data(PATHS[label]) and "FEDSTRATA_DATA" not in os.environ:
        pytest.skip(f"{label} needs the data directory FEDSTRATA_DATA")
    assert_recorded(label, EXAMPLES[label]())


def test_every_case_has_a_record_and_every_record_a_case() -> None:
    assert list(RECORD) == [*CASES, *EXAMPLES]


def test_every_algorithm_is_recorded() -> None:
    assert {case.name for case in CASES.values()} == set(ALGORITHMS)
