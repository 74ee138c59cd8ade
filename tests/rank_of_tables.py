"""What a rank of test_preparation_real.py does: prepare tables together with the other rank."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedstrata.training.plots
from clients.distributed_worker import group
from fedstrata.experiments.config import parse
from fedstrata.experiments.runs import run_config


def work(rank: int, size: int, folder: Path, experiments: Mapping[str, dict[str, Any]]) -> None:
    """Run experiments as one rank of a process group; write the statistics of each to a file."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    fedstrata.training.plots.plot = lambda *_, **__: None  # type: ignore[assignment]
    with group(folder / "group", rank, size):
        for name, tables in experiments.items():
            np.save(folder / f"{name}-{rank}.npy", statistics(tables))


def statistics(tables: dict[str, Any]) -> np.ndarray:
    """Run an experiment; return the statistics of its preparation."""
    run = run_config(parse(tables, "a test"), None, False, [])
    assert run.fitted is not None
    return run.fitted.vector
