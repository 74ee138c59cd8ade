"""Plots: what they show, and that they leave the caller's matplotlib alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

import fedstrata as fs
from fedstrata.experiments.plots import plot_partition
from fedstrata.training.plots import plot, plot_diagnostics

ROWS = [{"round": r, "samples": 2 * r, "loss": 1.0, "gradient_norm": 10.0**-r} for r in range(3)]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that a test writes."""
    written: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: written.append(figure))
    return written


def test_each_measure_is_plotted_for_the_runs_that_have_it(figures: list[Figure]) -> None:
    bare = [{k: v for k, v in row.items() if k != "gradient_norm"} for row in ROWS]
    runs = {"bare": [bare], "both": [ROWS, ROWS]}
    plot(runs, "x.png", ["loss", "gradient_norm"], "samples", log=["gradient_norm"], title="Two")
    loss, norm = figures[0].axes
    assert [p.get_yscale() for p in (loss, norm)] == ["linear", "log"] and figures[0].get_suptitle() == "Two"
    assert len(loss.lines) == 2 and len(norm.lines) == 1
    assert norm.lines[0].get_color() == loss.lines[1].get_color() and loss.get_legend() and not norm.get_legend()
    with pytest.raises(fs.InputError, match=r"Unknown measure 'los'. Did you mean 'loss'"):
        plot(runs, "x.png", log=["los"])


def test_a_partition_shows_totals_and_classes_and_only_totals_without_classes(figures: list[Figure]) -> None:
    plot_partition(fs.data.load("digits").split("iid", clients=4), "x.png", "Digits")
    top, bottom, _ = figures[0].axes
    assert len(top.patches) == 4 and bottom.images[0].get_array().shape == (10, 4)
    plot_partition(fs.quadratic(clients=3).data, "x.png")
    (totals,) = figures[1].axes
    assert len(totals.patches) == 3 and not totals.images


@pytest.mark.slow
def test_the_callers_backend_and_figures_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.pyplot as plt

    before = plt.get_backend()
    plt.switch_backend("svg")
    try:
        mine = plt.figure()
        draw_all(tmp_path)
        assert plt.get_backend() == "svg" and plt.get_fignums() == [mine.number]
    finally:
        plt.close("all")
        plt.switch_backend(before)
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot")
    draw_all(tmp_path)
    assert "matplotlib.pyplot" not in sys.modules, "pyplot chooses a backend when it is imported"


def draw_all(folder: Path) -> None:
    diagnostics: list[dict[str, Any]] = [{"round": 1, "local_steps": 2}, {"round": 1, "client": 0, "step": 1, "v": 1.0}]
    plot({"a": [ROWS]}, folder / "a.png")
    plot_diagnostics(diagnostics, folder / "b.png")
    plot_partition(fs.quadratic(clients=3).data, folder / "c.png")
    assert all((folder / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in "abc")


def test_a_plot_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fs.InputError, match=r"Cannot write the plot .*x\.txt"):
        plot({"a": [ROWS]}, tmp_path / "x.txt")
