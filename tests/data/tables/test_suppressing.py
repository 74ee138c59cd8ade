"""Suppressed counts: small ones are hidden, and what is shown does not determine any of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedstrata.data.tables.suppressing import Shown, bridges_of, large_enough, shown

MINIMUM = 10


def determined(counts: np.ndarray, result: Shown) -> list[tuple[int, int]]:
    """Return the hidden cells of the table that follow from what is shown: by linear algebra, without the graph."""
    sites, cells = counts.shape
    enough, counted = large_enough(counts.sum(1), MINIMUM)
    unknown = {(s, c): i for i, (s, c) in enumerate(map(tuple, np.argwhere(~result.cells)))}
    sums = {s: len(unknown) + i for i, s in enumerate(np.flatnonzero(~enough))}  # rows of which the sum is hidden
    size = len(unknown) + len(sums)
    equations = []
    for s in range(sites):
        equation = np.zeros(size)
        for c in range(cells):
            if (s, c) in unknown:
                equation[unknown[s, c]] = 1
        if s in sums:
            equation[sums[s]] = -1
        equations.append(equation)
    for c in np.flatnonzero(result.totals):
        equation = np.zeros(size)
        for s in np.flatnonzero(counted):
            if (s, c) in unknown:
                equation[unknown[s, c]] = 1
        equations.append(equation)
    equation = np.zeros(size)  # the number of rows of all counted sites
    for s in np.flatnonzero(counted):
        if s in sums:
            equation[sums[s]] = 1
    equations.append(equation)
    if not unknown:
        return []
    _, values, vectors = np.linalg.svd(np.array(equations))
    free = vectors[(values > 1e-9).sum() :]
    return [cell for cell, i in unknown.items() if not (np.abs(free[:, i]) > 1e-9).any()]


def check(counts: np.ndarray) -> Shown:
    result = shown(counts, MINIMUM)
    small = (counts > 0) & (counts < MINIMUM)
    assert not (small & result.cells).any()
    totals = counts[result.counted].sum(0)
    assert not ((totals > 0) & (totals < MINIMUM) & result.totals).any()
    for s, row in enumerate(counts):
        hidden = row[~result.cells[s]]
        assert not len(hidden) or not 0 < hidden.sum() < MINIMUM or row.sum() < MINIMUM
    for c in np.flatnonzero(result.totals):
        hidden = counts[result.counted & ~result.cells[:, c], c]
        assert not 0 < hidden.sum() < MINIMUM
    assert [cell for cell in determined(counts, result) if counts[cell]] == []  # zero may be known
    return result


@settings(max_examples=150, deadline=None)
@given(
    arrays(
        np.int64,
        st.tuples(st.integers(1, 6), st.integers(2, 5)),
        elements=st.one_of(st.just(0), st.integers(0, 12), st.integers(0, 60)),
    )
)
def test_nothing_hidden_follows_from_what_is_shown(counts: np.ndarray) -> None:
    check(counts)


def test_two_cycles_and_a_bridge() -> None:
    counts = np.array([[5, 5, 90, 90, 90], [5, 5, 5, 90, 90], [90, 90, 5, 5, 5], [90, 90, 90, 5, 5]])
    check(counts)


def test_large_counts_are_shown() -> None:
    result = check(np.array([[50, 60], [70, 0], [10, 30]]))
    assert result.cells.all() and result.totals.all() and result.counted.all()


def test_the_complement_of_a_small_count_is_hidden_too() -> None:
    result = check(np.array([[3, 97, 200], [40, 60, 200], [50, 50, 200]]))
    assert result.cells.tolist() == [[False, False, True], [False, False, True], [True] * 3]  # 93 would tell 3
    assert result.totals.all()


def test_small_sites_are_counted_together() -> None:
    result = check(np.array([[3, 4], [2, 5], [4, 4], [60, 40]]))
    assert (result.counted.all() and result.totals.all()) or not result.totals.any()
    alone = check(np.array([[3, 4], [60, 40]]))
    assert alone.counted.tolist() == [False, True] and alone.totals.all()


def test_a_minimum_of_one_hides_nothing() -> None:
    result = shown(np.array([[1, 2], [0, 1]]), 1)
    assert result.cells.all() and result.totals.all() and result.counted.all()


@pytest.mark.parametrize(
    ("edges", "bridges"),
    [([(0, 1)], [0]), ([(0, 1), (0, 1)], []), ([(0, 1), (1, 2), (2, 0), (2, 3)], [3]), ([], [])],
)
def test_bridges(edges: list[tuple[int, int]], bridges: list[int]) -> None:
    assert bridges_of(edges, 4) == bridges
