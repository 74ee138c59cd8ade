"""Plots of diagnostics: what happens inside local steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedstrata.core.files import Row
from fedstrata.training.plots.axes import AXES, finish
from fedstrata.training.plots.figures import panels_of, write_figure
from fedstrata.training.plots.styles import styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_diagnostics(rows: Sequence[Row], path: str | Path) -> Path:
    """Plot the rows of :class:`fedstrata.Diagnostics`: norms over local steps, local steps and rates over rounds.

    Norms get one panel per quantity and round, at most four rounds, with one line per client.
    """
    of_steps = [r for r in rows if "step" in r]
    of_rounds = [r for r in rows if "step" not in r]
    rates = [r for r in of_rounds if "rate" in r]
    names = [k for k in (of_steps[0] if of_steps else {}) if k not in ("round", "client", "step")]
    panels = [(name, number) for name in names for number in _four_of(sorted({r["round"] for r in of_steps}))]
    total = len(panels) + (2 if rates else 1)
    figure, axes = panels_of(total, (3.6, 3.1), most=4)
    for panel, (name, number) in zip(axes, panels, strict=False):
        _draw_norms(panel, name, number, [r for r in of_steps if r["round"] == number])
    _draw_local_steps(axes[len(panels)], of_rounds)
    if rates:
        _draw_rates(axes[-1], rates)
    for panel in axes:
        finish(panel, "round")
    return write_figure(figure, path)


def _four_of(rounds: list[int]) -> list[int]:
    """Return at most four rounds, spread evenly from the first to the last."""
    return rounds if len(rounds) <= 4 else [rounds[round(i * (len(rounds) - 1) / 3)] for i in range(4)]


def _draw_norms(panel: Axes, name: str, number: int, rows: Sequence[Row]) -> None:
    clients = {client: f"client {client}" for client in sorted({r["client"] for r in rows})}
    looks = styles(clients.values())
    for client, label in clients.items():
        points = [(r["step"], r[name]) for r in rows if r["client"] == client]
        panel.plot(*zip(*points, strict=True), label=label, **looks[label].both)
    panel.set_title(f"Round {number}", fontsize="medium")
    panel.set_xlabel("Local step")
    panel.set_ylabel(rf"$\Vert${name}$\Vert^2$")
    panel.legend(frameon=False, fontsize="small")


def _draw_local_steps(panel: Axes, rows: Sequence[Row]) -> None:
    panel.step([r["round"] for r in rows], [r["local_steps"] for r in rows], where="mid")
    panel.set_xlabel(AXES["round"])
    panel.set_ylabel("Local steps of the busiest client")
    panel.set_ylim(bottom=0)


def _draw_rates(panel: Axes, rows: Sequence[Row]) -> None:
    rounds = [r["round"] for r in rows]
    panel.plot(rounds, [r["rate"] for r in rows], ".-", markersize=5, label="mean")
    low, high = ([r[k] for r in rows] for k in ("rate_least", "rate_most"))
    panel.fill_between(rounds, low, high, alpha=0.2, linewidth=0, label="minimum to maximum")
    panel.set_xlabel(AXES["round"])
    panel.set_ylabel("Effective learning rate of clients")
    panel.set_yscale("log")
    panel.legend(frameon=False, fontsize="small")
