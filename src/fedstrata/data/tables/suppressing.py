"""Suppression of small counts, such that those that are shown do not tell those that are not.

A table has a row for every site, a cell for every kind of answer, and margins: the sum of each row, and a last row with
the sums of the sites. A count from 1 to ``minimum - 1`` is hidden, zero is not. If a single cell of a row or
column were hidden, or cells that are fewer than the minimum together, the margin would tell it: so more cells are
hidden, until every hidden cell can be made larger or smaller, and others with it, without a change of what is shown.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Shown(NamedTuple):
    """What of a table of counts may be shown: True where it may.

    cells:    [sites, cells].
    totals:   [cells], the sums over the sites.
    counted:  [sites], the sites that are in these sums.
    """

    cells: np.ndarray
    totals: np.ndarray
    counted: np.ndarray


def large_enough(rows: np.ndarray, minimum: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which sites have enough rows to show their number, and which are counted in sums over sites.

    Sites with few rows are counted if they are several, and have enough together.
    """
    small = (rows > 0) & (rows < minimum)
    safe = np.count_nonzero(small) != 1 and not 0 < rows[small].sum() < minimum
    return ~small, np.ones_like(small) if safe else ~small


def shown(counts: np.ndarray, minimum: int) -> Shown:
    """Return which cells [sites, cells] of a table of counts may be shown together with its margins."""
    enough, counted = large_enough(counts.sum(1), minimum)
    hidden = (counts > 0) & (counts < minimum)
    hidden[~enough] = True
    hidden_totals = np.zeros(counts.shape[1], bool)
    while _hide_in_lines(hidden, hidden_totals, counts, minimum, enough, counted):
        pass
    _hide_totals(hidden, hidden_totals, counts, minimum, counted)
    while (told := _told(hidden, hidden_totals, enough & counted, counted)).any():
        behind = hidden_totals | (hidden & counted[:, None]).any(0)
        if (behind & ~hidden_totals).any():  # fewer totals tell less
            hidden_totals |= behind
            continue
        for site in np.flatnonzero(told):
            _hide_next(hidden[site], counts[site], behind)
        hidden_totals |= (hidden & counted[:, None]).any(0)
    return Shown(~hidden, ~hidden_totals, counted)


def _is_told(hidden: np.ndarray, counts: np.ndarray, minimum: int) -> bool:
    """Return whether the sum of a line tells its hidden cells, because they are one, or few together."""
    left = counts[hidden & (counts > 0)]
    return len(left) == 1 or 0 < left.sum() < minimum


def _hide_next(hidden: np.ndarray, counts: np.ndarray, preferred: np.ndarray) -> bool:
    """Hide the smallest cell of a line that is shown and not zero, if possible a preferred one; else hide all of it."""
    visible = np.flatnonzero(~hidden & (counts > 0))
    if not len(visible):
        hidden[:] = True
        return False
    hidden[min(visible, key=lambda at: (not preferred[at], counts[at]))] = True
    return True


def _hide_in_lines(
    hidden: np.ndarray,
    hidden_totals: np.ndarray,
    counts: np.ndarray,
    minimum: int,
    enough: np.ndarray,
    counted: np.ndarray,
) -> bool:
    """Hide more cells of sites, and of answers, whose sum tells the hidden ones; return whether there were any."""
    again = False
    for site in np.flatnonzero(enough & hidden.any(1)):
        while _is_told(hidden[site], counts[site], minimum):
            again = _hide_next(hidden[site], counts[site], (hidden & counted[:, None]).any(0))
            if not again:
                break
    for cell in np.flatnonzero((hidden & counted[:, None]).any(0) & ~hidden_totals):
        own = hidden[counted, cell]
        while _is_told(own, counts[counted, cell], minimum):
            if not (~own & (counts[counted, cell] > 0)).any():
                hidden_totals[cell] = True
                break
            again = _hide_next(own, counts[counted, cell], hidden[counted].any(1))
        hidden[counted, cell] = own
    return again


def _hide_totals(
    hidden: np.ndarray, hidden_totals: np.ndarray, counts: np.ndarray, minimum: int, counted: np.ndarray
) -> None:
    """Hide more totals, of answers that some sites hide, if their sum tells those that are hidden."""
    totals = counts[counted].sum(0)
    hidden_totals |= (totals > 0) & (totals < minimum)
    candidates = (hidden[counted] & (counts[counted] > 0)).any(0)
    while _is_told(hidden_totals, totals, minimum) and (candidates & ~hidden_totals).any():
        more = np.flatnonzero(candidates & ~hidden_totals)
        hidden_totals[more[np.argmin(totals[more])]] = True


def _told(hidden: np.ndarray, hidden_totals: np.ndarray, single: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Return the sites [sites] with a hidden cell that the margins tell.

    Hidden cells are edges between a row and a column of the table, which has a row for the totals, and one for all
    sites whose sum is hidden too. The margins tell a cell if its edge is in no cycle.
    """
    sites, cells = hidden.shape
    edges = [(int(s), sites + 2 + int(c), int(s)) for s, c in np.argwhere(hidden & single[:, None])]
    rest = (hidden & (counted & ~single)[:, None]).sum(0)  # two edges are as good as more
    edges += [(sites, sites + 2 + int(c), -2) for c in np.flatnonzero(rest) for _ in range(min(2, rest[c]))]
    edges += [(sites + 1, sites + 2 + int(c), -1) for c in np.flatnonzero(hidden_totals)]
    bridges = [edges[i][2] for i in bridges_of([(a, b) for a, b, _ in edges], sites + 2 + cells)]
    told = np.zeros(sites, bool)
    told[[s for s in bridges if s >= 0]] = True
    if -1 in bridges:  # a total, which tells hidden cells of its column together
        columns = hidden_totals & hidden[counted].any(0)
        told |= single & (hidden & columns).any(1)
    return told & ~hidden.all(1)


def bridges_of(edges: list[tuple[int, int]], nodes: int) -> list[int]:
    """Return the edges of a graph, by their numbers, that are in no cycle.

    Every edge outside a spanning forest closes a cycle. It adds a random number to both its ends; the exclusive or of
    those below an edge of the forest is zero, but for a chance of 2^-64, only if no cycle goes through it.
    """
    rng = np.random.default_rng(0)
    near: list[list[tuple[int, int]]] = [[] for _ in range(nodes)]
    for number, (a, b) in enumerate(edges):
        near[a].append((b, number))
        near[b].append((a, number))
    up: dict[int, tuple[int, int]] = {}
    order: list[int] = []
    seen = [False] * nodes
    for root in range(nodes):
        if seen[root] or not near[root]:
            continue
        seen[root], queue = True, [root]
        for node in queue:
            order.append(node)
            for other, number in near[node]:
                if not seen[other]:
                    seen[other], up[other] = True, (node, number)
                    queue.append(other)
    forest = {number for _, number in up.values()}
    sums = [0] * nodes
    for number, (a, b) in enumerate(edges):
        if number not in forest:
            mark = int(rng.integers(1, 1 << 63))
            sums[a] ^= mark
            sums[b] ^= mark
    bridges = []
    for node in reversed(order):
        if node in up:
            parent, number = up[node]
            sums[parent] ^= sums[node]
            if not sums[node]:
                bridges.append(number)
    return bridges
