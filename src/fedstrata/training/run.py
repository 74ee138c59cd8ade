"""A finished run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn

from fedstrata.core.errors import InputError, invalid, is_finite
from fedstrata.core.files import Row, Rows, folder_at, make_folder, refuse_used, write_atomically
from fedstrata.core.frames import frame
from fedstrata.data.tables.fitted import Fitted
from fedstrata.problems.problem import Problem
from fedstrata.training.checkpoint import to_safetensors
from fedstrata.training.metrics.catalogue import PER_CLIENT
from fedstrata.training.risk.predictor import Predictor
from fedstrata.training.risk.risks import Risks
from fedstrata.training.risk.thresholds import Threshold, choose_threshold, goal_of

if TYPE_CHECKING:
    import pandas

SOLUTION = "solution.safetensors"
"""The file with x and y in the directory of a finished run."""


@dataclass(frozen=True, repr=False)
class Run:
    """A finished run.

    x, y:     the solution (y is None without a dual).
    history:  one row per evaluation: round, steps, samples, bytes_up, bytes_down, seconds, measures.
    fitted:   for tables, how their raw values become inputs of the model.
    risks:    for tables with two classes, the calibration of its scores and the counts behind thresholds.
    summary:  the last row, what it was measured on, and what was chosen automatically.
    """

    x: torch.Tensor
    y: torch.Tensor | None
    history: list[Row]
    summary: Row
    problem: Problem
    fitted: Fitted | None = None
    risks: Risks | None = None

    def __repr__(self) -> str:
        measures = [f"{k} {v:.4g}" for k, v in self.final.items() if k in PER_CLIENT]
        return f"<Run of {self.summary['algorithm']} on {self.summary['data']}: {', '.join(measures)}>"

    @property
    def final(self) -> Row:
        """The measures of the solution and what the run used, as a row: the last of the history, or with early stopping
        the measures of the best one.
        """
        return {name: self.summary[name] for name in self.history[-1] if name in self.summary}

    def frame(self) -> pandas.DataFrame:
        """Return the history as a pandas DataFrame, one row per evaluation; needs ``fedstrata[frames]``."""
        return frame(self.history)

    def plot(self, path: str | Path = "run.png", **options: Any) -> Path:
        """Plot the measures over rounds, or another ``axis``; see :func:`fedstrata.training.plots.plot`."""
        from fedstrata.training.plots import plot

        return plot({self.summary["algorithm"]: [self.history]}, path, **options)

    def save(self, folder: str | Path) -> Path:
        """Write the solution, the history and the summary to a new folder, for :meth:`load`; return its path."""
        path = folder_at(folder, "folder of a run")
        refuse_used(path)
        make_folder(path)
        write_atomically(path / SOLUTION, to_safetensors(self.solution))
        Rows(path / "metrics.jsonl", "round").append(*self.history)
        write_atomically(path / "summary.json", json.dumps(self.summary, indent=2).encode())
        return path

    @property
    def solution(self) -> dict[str, torch.Tensor]:
        """The solution by name: x, and y if there is a dual."""
        return {"x": self.x} if self.y is None else {"x": self.x, "y": self.y}

    @staticmethod
    def load(folder: str | Path, problem: Problem) -> Run:
        """Read a finished run from the folder of :meth:`save`, or from a run directory of ``fs.train(..., out=...)``.

        problem: the problem that was solved, built in the same way; its size is checked.
        """
        path = Path(folder)
        try:
            solution = load((path / SOLUTION).read_bytes())
            summary = json.loads((path / "summary.json").read_text())
            history = Rows(path / "metrics.jsonl", "round").read()
        except FileNotFoundError as error:
            raise InputError(f"There is no finished run in {path}: {Path(error.filename).name} is missing.") from None
        except (OSError, ValueError, RecursionError, SafetensorError) as error:
            raise InputError(f"The run in {path} cannot be read: {error}") from None
        x, y = solution.get("x"), solution.get("y")
        for name, value, start in (("x", x, problem.x0), ("y", y, problem.y0)):
            got, wants = (None if t is None else tuple(t.shape) for t in (value, start))
            if got != wants:
                raise invalid(f"shape of {name} in {path}", got, f"{wants}, that of the problem {problem.name}")
            if value is None or start is None:
                continue
            if value.dtype != start.dtype:
                raise invalid(f"{name} in {path}", str(value.dtype), f"numbers of type {start.dtype}")
            bad = int((~torch.isfinite(value)).sum())
            if bad:
                raise InputError(
                    f"The run in {path} is damaged: {bad} of {value.numel()} entries of {name} are NaN or infinite."
                )
        assert x is not None
        _check_record(summary, history, path)
        return Run(x, y, history, summary, problem)

    def predictor(self) -> Predictor:
        """Return the trained model with the preparation of its tables and its calibration, for new rows."""
        if self.fitted is None:
            raise InputError("Only a run on tables can score new rows: FederatedData.from_tables(...).")
        calibration = None if self.risks is None else self.risks.calibration
        names = ("algorithm", "problem", "data", "clients", "client_names", "measured_on")
        about = {name: self.summary[name] for name in (*names, *PER_CLIENT) if name in self.summary}
        return Predictor(self.fitted, self.model(), calibration, None, about)

    def predict(self, source: Any, keep: Sequence[str] = ()) -> pandas.DataFrame:
        """Score the rows of a file or a frame; see :meth:`fedstrata.training.risk.predictor.Predictor.predict`."""
        return self.predictor().predict(source, keep)

    def threshold(self, **goal: float) -> Threshold:
        """Choose a threshold on held-out rows: ``run.threshold(sensitivity=0.9)``, or specificity, ppv or alerts."""
        if self.risks is None or self.risks.held_out is None:
            why = "" if self.risks is None else f" {self.risks.why}"
            raise InputError(f"A threshold needs held-out rows of tables with two classes: holdout=0.2.{why}")
        return choose_threshold(self.risks.held_out, *goal_of(goal))

    def model(self) -> nn.Module:
        """Return the trained model as an ordinary module, in evaluation mode: the one at ``x``.

        That is the model before any steps inside the problem.
        For the model after those steps, see :func:`fedstrata.training.metrics.adaptation.adapted_point`.
        """
        return self.problem.model(self.x).eval()


def _check_record(summary: Any, history: list[Row], path: Path) -> None:
    """Raise if a summary and a history that were read are not those of a finished run."""
    if not isinstance(summary, dict) or summary.get("status") != "finished":
        got = summary.get("status") if isinstance(summary, dict) else type(summary).__name__
        raise invalid(f"summary.json in {path}", got, "the summary of a finished run, whose status is 'finished'")
    for name in ("algorithm", "problem", "data"):
        if not isinstance(summary.get(name), str):
            raise invalid(f"{name} in {path / 'summary.json'}", summary.get(name), "a name")
    if not history:
        raise InputError(f"There is no finished run in {path}: metrics.jsonl is missing or has no rows.")
    check_rows(history, path / "metrics.jsonl")
    check_rows([{name: summary[name] for name in history[-1] if name in summary}], path / "summary.json")


def check_rows(rows: Sequence[Row], path: Path) -> None:
    """Raise if rows that were read from a file have anything but finite numbers."""
    for row in rows:
        for name, value in row.items():
            if not is_finite(value):
                raise invalid(f"{name} in {path}", value, "a finite number")
