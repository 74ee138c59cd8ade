"""Plots of finished runs, read from their directories, and of how data are partitioned."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fedstrata.core.errors import InputError
from fedstrata.core.files import Row, read_toml
from fedstrata.data.federated import FederatedData
from fedstrata.training.plots import new_figure, write_figure
from fedstrata.training.plots.figures import as_text
from fedstrata.training.run import check_rows
from fedstrata.training.rundir import RunDirectory

Histories = dict[str, list[list[Row]]]
"""The rows of runs by label, one list per seed."""


def read_runs(paths: Iterable[Path]) -> tuple[Histories, Histories]:
    """Read the histories in run directories, and apart from them those of runs that diverged.

    Runs of one algorithm or variant share a label.
    """
    finished: Histories = {}
    diverged: Histories = {}
    for path in paths:
        directory = RunDirectory(path)
        history = directory.metrics.read()
        if not history:
            hint = f" Did you mean {path}/*?" if any(path.glob("*/metrics.jsonl")) else ""
            raise InputError(f"There is no run with metrics in {path}.{hint}")
        check_rows(history, directory.metrics.path)
        (diverged if directory.diverged else finished).setdefault(_label(path), []).append(history)
    return finished, diverged


def _label(path: Path) -> str:
    """Return the label of a run's variant, or its algorithm, or the name of its directory."""
    file = path / "config.toml"
    config = read_toml(file) if file.exists() else {}
    data, problem, algorithm = (
        table if isinstance(table := config.get(name), dict) else {} for name in ("data", "problem", "algorithm")
    )
    if "label" in config:
        return str(config["label"])
    if data.get("sites", "federated") != "federated":
        return str(data["sites"])
    return str(algorithm.get("name", path.name)) if "size" not in problem else path.name  # fs.train writes a size


def plot_partition(data: FederatedData, path: str | Path, title: str | None = None) -> Path:
    """Plot how many training samples each client has, in total and of each class; regression has totals only."""
    counts = data.train.class_counts if data.classes else None
    width = max(4.0, min(11.0, 1.5 + 0.08 * data.clients))
    if counts is None:
        figure, axes = new_figure(1, 1, (width, 2.4))
    else:
        figure, axes = new_figure(2, 1, (width, 4.6), sharex=True, height_ratios=(1, 3))
        image = axes[1, 0].imshow(counts.T, aspect="auto", cmap="Blues", interpolation="nearest", origin="lower")
        axes[1, 0].set_ylabel("Class")
        figure.colorbar(image, ax=axes[1, 0], label="Samples")
    axes[0, 0].bar(np.arange(data.clients), data.sizes, width=1.0, color="0.55")
    axes[0, 0].set_ylabel("Samples")
    axes[-1, 0].set_xlabel("Client")
    if title is not None:
        figure.suptitle(as_text(title))
    return write_figure(figure, path)
