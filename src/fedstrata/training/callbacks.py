"""Callbacks: what may listen to a run. Pass them to ``fs.train(..., callbacks=[...])``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedstrata.clients.faults import Fault, in_words
from fedstrata.core.errors import InputError
from fedstrata.core.schedules import Clock

if TYPE_CHECKING:
    from fedstrata.training.train import Run

Row = dict[str, Any]
Reports = Mapping[str, Callable[[], torch.Tensor]]
"""What a local step reports, by name: functions that return tensors [C, ...]."""


_SHOWN = ("loss", "accuracy", "accuracy_worst", "auc", "auc_worst", "attacked_accuracy", "distance", "epsilon")
"""What a line of progress tells."""


class Callback:
    """Listens to a run; override what you need. Exceptions raised here stop the run."""

    def on_start(self, title: str, done: int, rounds: int, note: str) -> None:
        """Training starts, ``done`` of ``rounds`` rounds behind it; ``note`` says what was chosen automatically."""

    def on_round(self, round: int, state: Any) -> None:
        """Round number ``round`` (from 1) is done."""

    def on_local_step(self, clock: Clock, ids: np.ndarray, reports: Reports) -> None:
        """The clients ``ids`` took a local step together; ``reports`` is what the algorithm reports of it.

        Only for callbacks that override this are reports made at all. An algorithm may go on to change a reported
        tensor in place: clone what is to be kept.
        """

    @property
    def wants_local_steps(self) -> bool:
        """Whether :meth:`on_local_step` is to be called."""
        return type(self).on_local_step is not Callback.on_local_step

    def on_faults(self, faults: Sequence[Fault], names: Sequence[str]) -> None:
        """Clients, called ``names`` if anything, were left out in this round."""

    def on_evaluation(self, row: Row) -> None:
        """An evaluation was made: the row that goes to metrics.jsonl."""

    def on_end(self, run: Run | None) -> None:
        """Training is over; ``run`` is None when it failed."""

    def for_pretraining(self) -> Callback | None:
        """Return who listens to the pre-training of an experiment: nobody, because its rounds are not the run's."""
        return None


class Titled(Callback):
    """Passes on what happens in a run under a title of its own."""

    def __init__(self, listener: Callback, title: str) -> None:
        self.listener, self.title = listener, title

    def on_start(self, title: str, done: int, rounds: int, note: str) -> None:
        """Pass it on under the title."""
        self.listener.on_start(self.title, done, rounds, note)

    def on_round(self, round: int, state: Any) -> None:
        """Pass it on."""
        self.listener.on_round(round, state)

    def on_local_step(self, clock: Clock, ids: np.ndarray, reports: Reports) -> None:
        """Pass it on."""
        self.listener.on_local_step(clock, ids, reports)

    def on_faults(self, faults: Sequence[Fault], names: Sequence[str]) -> None:
        """Pass it on."""
        self.listener.on_faults(faults, names)

    @property
    def wants_local_steps(self) -> bool:
        """Whether the listener wants them."""
        return self.listener.wants_local_steps

    def on_evaluation(self, row: Row) -> None:
        """Pass it on."""
        self.listener.on_evaluation(row)

    def on_end(self, run: Run | None) -> None:
        """Pass it on."""
        self.listener.on_end(run)

    def for_pretraining(self) -> Callback | None:
        """Say after the title that this is the pre-training."""
        listens = self.listener.for_pretraining() is not None
        return Titled(self.listener, f"{self.title}, pre-training") if listens else None


class ShowProgress(Callback):
    """A progress bar on a terminal; elsewhere a line for every evaluation, or with ``brief`` only for the last."""

    def __init__(self, console: Console | None = None, brief: bool = False) -> None:
        self.console = console or Console(stderr=True)
        self.brief = brief
        self._bar: Progress | None = None

    def on_start(self, title: str, done: int, rounds: int, note: str) -> None:
        """Open the bar, or print what is going to happen."""
        self.title, self.rounds = title, rounds
        if not self.brief:
            self.console.print(f"{title}: {rounds - done} rounds; {note}", highlight=False, soft_wrap=True)
        if not self.console.is_terminal:
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, TextColumn("{task.fields[last]}"), console=self.console, transient=True)
        self._task = self._bar.add_task(title, total=rounds, completed=done, last="")
        self._bar.start()

    def on_round(self, round: int, state: Any) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(self._task, completed=round)

    def on_faults(self, faults: Sequence[Fault], names: Sequence[str]) -> None:
        """Name the clients that were left out."""
        if not self.brief:
            line = f"{self.title}: round {faults[0].round + 1}: left out: {in_words(faults, names)}"
            self.console.print(line, highlight=False, soft_wrap=True)

    def on_evaluation(self, row: Row) -> None:
        """Show the measures."""
        shown = "  ".join(f"{k} {row[k]:.4g}" if k == "distance" else f"{k} {row[k]:.4f}" for k in _SHOWN if k in row)
        if self._bar is not None:
            self._bar.update(self._task, last=shown, completed=row["round"])
        elif not self.brief or row["round"] == self.rounds:
            head = f"{self.title}: round {row['round']}/{self.rounds}"
            self.console.print(f"{head}  {shown}  {row['seconds']:.1f} s", highlight=False, soft_wrap=True)

    def on_end(self, run: Run | None) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def for_pretraining(self) -> Callback | None:
        """Show it too, under a title that says so."""
        return Titled(self, "pre-training")


class TensorBoard(Callback):
    """Writes every measure to TensorBoard event files; needs ``pip install fedstrata[tensorboard]``."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError("TensorBoard is not installed: pip install 'fedstrata[tensorboard]'.") from None
        self._writer = SummaryWriter(str(folder))

    def on_evaluation(self, row: Row) -> None:
        """Write the measures."""
        for name, value in row.items():
            if name != "round":
                self._writer.add_scalar(name, value, row["round"])

    def on_end(self, run: Run | None) -> None:
        """Close the files."""
        self._writer.close()
