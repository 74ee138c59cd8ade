"""Plots of rankings and of searches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

import fedstrata as fs
from fedstrata.training.plots import Ranked, Trial, plot_ranking, plot_response, plot_search
from fedstrata.training.plots.styles import ALGORITHM_STYLES, styles

ROWS = [
    Ranked("fedavg", [0.90, 0.91, 0.92], (0.885, 0.935)),
    Ranked("fgda", [0.95, 0.96, 0.97], (0.935, 0.985), 0, 0.05, (0.03, 0.07), 0.0004),
    Ranked("coda", [0.96, 0.98], (0.84, 1.10), 1, 0.06, (-0.4, 0.52), 0.3),
    Ranked("scaffold", [0.91, 0.92, 0.93], (0.895, 0.945), 0, 0.01, (-0.005, 0.025), 0.12),
    Ranked("codasca", [], None, 3),
]


def names(panel: Axes) -> list[str]:
    """The labels of the lines, from top to bottom."""
    assert panel.yaxis_inverted()
    return [text.get_text() for text in panel.get_yticklabels()]


def at(panel: Axes, height: float, marker: str) -> list[Line2D]:
    """The lines of a panel with a marker that start at a height."""
    return [line for line in panel.lines if line.get_marker() == marker and list(line.get_ydata())[:1] == [height]]


def points(line: Line2D) -> tuple[list[float], list[float]]:
    return list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))  # type: ignore[arg-type]


# --- rankings --------------------------------------------------------------------------------------------------------


def test_a_ranking_is_sorted_and_has_what_diverged_at_the_bottom(figures: list[Figure]) -> None:
    plot_ranking(ROWS, "x.png", measure="auc", title="Digits")
    (panel,) = figures[0].axes
    lost = ["coda (diverged in 1 of 3)", "codasca (diverged in 3 of 3)"]
    assert names(panel) == ["fgda", "scaffold", "fedavg", *lost]
    assert panel.get_xlabel() == "AUC" and figures[0].get_suptitle() == "Digits"
    assert "95 % interval" in figures[0].get_supxlabel()
    plot_ranking(ROWS, "x.png", measure="loss")
    assert names(figures[1].axes[0]) == ["fedavg", "scaffold", "fgda", *lost], "a smaller loss is better"


def test_methods_without_a_mean_are_not_ordered_by_the_seeds_that_are_left(figures: list[Figure]) -> None:
    rows = [Ranked("a", [0.5, 0.6]), Ranked("b", [0.1], diverged=1), Ranked("c", [0.9], diverged=1)]
    for order in (rows, [rows[0], rows[2], rows[1]]):
        plot_ranking(order, "x.png", measure="auc")
        assert [name[0] for name in names(figures[-1].axes[0])] == [row.label for row in order]


def test_a_line_shows_the_mean_its_interval_and_every_seed(figures: list[Figure]) -> None:
    plot_ranking(ROWS, "x.png", measure="auc")
    (panel,) = figures[0].axes
    look = ALGORITHM_STYLES["fgda"]
    (mean,), (interval,) = at(panel, 0, look.marker), at(panel, 0, "|")
    assert points(mean) == ([pytest.approx(0.96)], [0]) and points(interval)[0] == [0.935, 0.985]
    assert mean.get_color() == interval.get_color() == look.colour, "as in plots of curves"
    (seeds,) = at(panel, 0.24, ".")
    assert points(seeds)[0] == [0.95, 0.96, 0.97]


def test_an_interval_much_wider_than_the_values_ends_in_arrows(figures: list[Figure]) -> None:
    plot_ranking(ROWS, "x.png", measure="auc")
    (panel,) = figures[0].axes
    low, high = panel.get_xlim()
    assert low < 0.9 < 0.98 < high and high - low < 0.3, "it does not squeeze the others"
    rows = [Ranked("a", [0.5, 0.6], (-9.0, 9.0)), Ranked("b", [0.7, 0.8], (0.6, 0.9))]
    plot_ranking(rows, "x.png")
    (panel,) = figures[1].axes
    assert [points(at(panel, 1, arrow)[0])[0][0] for arrow in "<>"] == list(panel.get_xlim())
    assert not at(panel, 0, "<"), "the interval of b is shown as a whole"


def test_differences_to_a_baseline_are_grey_if_the_interval_contains_zero(figures: list[Figure]) -> None:
    plot_ranking(ROWS, "x.png", "fedavg", measure="auc")
    values, panel = figures[0].axes
    colours = {}
    for height, label in enumerate(["fgda", "scaffold", "fedavg", "coda"]):
        drawn = at(panel, height, ALGORITHM_STYLES[label].marker)
        colours[label] = to_hex(drawn[0].get_color()) if drawn else None
    grey = to_hex("0.6")
    assert colours == {"fgda": ALGORITHM_STYLES["fgda"].colour.lower(), "scaffold": grey, "fedavg": None, "coda": grey}
    assert any(list(line.get_xdata()) == [0, 0] for line in panel.lines), "a vertical line at 0"
    assert panel.get_xlabel() == "Difference from fedavg"
    texts = {text.get_position()[1]: text.get_text() for text in panel.texts}
    assert texts == {0: "p < 0.001", 1: "p = 0.120", 2: "baseline", 3: "p = 0.300"}
    assert values.get_ylim() == panel.get_ylim()
    with pytest.raises(fs.InputError, match=r"Unknown baseline 'fedavgg'. Did you mean 'fedavg'"):
        plot_ranking(ROWS, "x.png", "fedavgg")
    with pytest.raises(fs.InputError, match="no methods to rank"):
        plot_ranking([], "x.png")


# --- searches --------------------------------------------------------------------------------------------------------


def trials(*values: float | None) -> list[Trial]:
    return [Trial({"lr": 10.0 ** (n - 3), "steps": n + 1}, value) for n, value in enumerate(values)]


def test_a_search_shows_the_best_value_so_far(figures: list[Figure]) -> None:
    searched = {"fedavg": trials(None, 0.80, 0.79, 0.84), "fgda": trials(0.81, 0.82, None, 0.83)}
    plot_search({**searched, "coda": trials(None, None, None)}, "x.png", measure="auc")
    (panel,) = figures[0].axes
    steps = {line.get_color(): points(line) for line in panel.lines if line.get_drawstyle() == "steps-post"}
    look = styles(searched)
    trial_numbers, best = steps[look["fgda"].colour]
    assert trial_numbers == [1, 2, 3, 4] and best == [0.81, 0.82, 0.82, 0.83]
    np.testing.assert_equal(steps[look["fedavg"].colour][1], [np.nan, 0.80, 0.80, 0.84])
    crosses = {line.get_color(): points(line) for line in panel.lines if line.get_marker() == "x"}
    assert crosses[look["fgda"].colour] == ([3], [0.82]), "on the line"
    assert crosses[look["fedavg"].colour] == ([1], [panel.get_ylim()[0]]), "there is no line yet"
    (legend,) = [*figures[0].legends, *filter(None, [panel.get_legend()])]
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["fedavg (diverged in 1 of 4)", "fgda (diverged in 1 of 4)", "coda (diverged in 3 of 3)"]
    assert panel.get_ylabel() == "Best validation AUC so far"
    plot_search({"fedavg": trials(3.0, 4.0, 1.0)}, "x.png", measure="loss")
    assert (
        points(figures[1].axes[0].lines[0])[1] == [3, 3, 1]
        and figures[1].axes[0].get_ylabel() == "Best validation loss so far"
    )
    with pytest.raises(fs.InputError, match="No trial of the search has a value"):
        plot_search({"a": trials(None)}, "x.png")


def test_a_response_marks_the_best_trial_and_what_diverged(figures: list[Figure]) -> None:
    made = trials(0.7, 0.9, 0.8, None)
    plot_response(made, "x.png", {"lr": (1e-2, 1.0)}, {"lr": (1e-4, 10.0)}, measure="auc", title="fgda")
    lr, steps = figures[0].axes
    assert lr.get_xlabel() == "lr" and steps.get_xlabel() == "steps" and lr.get_ylabel() == "Validation AUC"
    dots, crosses, best = ([line for line in lr.lines if line.get_marker() == m] for m in ("o", "x", "*"))
    assert points(dots[0]) == ([1e-3, 1e-2, 1e-1], [0.7, 0.9, 0.8]) and points(best[0]) == ([1e-2], [0.9])
    assert points(crosses[0]) == ([1.0], [0.0]) and crosses[0].get_transform() == lr.get_xaxis_transform()
    assert lr.get_xscale() == "log" and lr.get_xlim()[0] < 1e-4 < 10 < lr.get_xlim()[1]
    shaded: dict[Any, float] = {}
    for patch in lr.patches:
        assert isinstance(patch, Rectangle)
        shaded[round(patch.get_x(), 6), round(patch.get_x() + patch.get_width(), 6)] = sum(patch.get_facecolor()[:3])
    assert set(shaded) == {(1e-4, 10.0), (1e-2, 1.0)} and shaded[1e-4, 10.0] > shaded[1e-2, 1.0], "lighter outside"
    assert not steps.patches and "Lighter" in figures[0].get_supxlabel()
    plot_response(trials(5.0, 1.0), "x.png", measure="loss")
    assert points(next(line for line in figures[1].axes[0].lines if line.get_marker() == "*")) == ([1e-2], [1.0])
    with pytest.raises(fs.InputError, match="hyperparameters and a value"):
        plot_response(trials(None), "x.png")


def test_a_hyperparameter_that_may_be_zero_has_a_linear_axis(figures: list[Figure]) -> None:
    plot_response([Trial({"mu": 0.0}, 0.7), Trial({"mu": 1.0}, 0.8)], "x.png")
    assert figures[0].axes[0].get_xscale() == "linear"


def test_a_response_without_failures_fills_its_figure(figures: list[Figure]) -> None:
    """Nothing invisible takes part in the layout, so that both panels are wide."""
    plot_response(trials(0.7, 0.9, 0.8), "x.png", {"lr": (1e-2, 1.0)}, measure="auc", title="fgda")
    figures[0].draw_without_rendering()
    first, second = (panel.get_position() for panel in figures[0].axes)
    assert min(first.width, second.width) > 0.35 and second.x0 - first.x1 < 0.15
