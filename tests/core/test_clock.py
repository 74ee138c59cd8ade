"""The clock of a run."""

from __future__ import annotations

from fedstrata.core.clock import Clock, Progress


def test_a_clock_moves_by_local_steps() -> None:
    start = Clock(2, 10, iteration=6)
    assert start.tick() == start.after(1) == Clock(2, 10, 1, 7)
    assert start.after(3).ago(2) == Clock(2, 10, 3, 7)
    assert start.after(3).after_loop(0) == Clock(2, 10, 0, 9) and start.after_loop(3) == Clock(2, 10, 0, 9)
    assert Clock.of_round(4, 10) == Clock(4, 10, 0, 4)


def test_a_round_starts_where_the_last_one_ended() -> None:
    progress = Progress(5)
    progress.begin(-1)
    assert progress.now == Clock(-1, 5)
    progress.iteration += 4
    assert (progress.round_start, progress.now) == (Clock(-1, 5), Clock(-1, 5, iteration=4))
    progress.begin(0)
    assert progress.round_start == progress.now == Clock(0, 5, iteration=4)
