"""Callbacks: listeners of a run. Pass them to ``fs.train(..., callbacks=[...])``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedstrata.clients.faults import Fault, in_words
from fedstrata.core.clock import Clock
from fedstrata.core.errors import InputError
from fedstrata.core.files import Row
from fedstrata.training.metrics.catalogue import IN_PROGRESS, measure

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from fedstrata.training.run import Run

Reports = Mapping[str, Callable[[], torch.Tensor]]
"""What a local step reports, by name: functions that return tensors [C, ...]."""


class Callback:
    """Listens to a run; override what you need. An exception raised here stops the run."""

    def on_start(self, title: str, done: int, rounds: int, note: str) -> None:
        """Training starts after ``done`` of ``rounds`` rounds; ``note`` says what was chosen automatically."""

    def on_round(self, round: int, state: Any) -> None:
        """Round ``round``, counted from 1, is done."""

    def on_local_step(self, clock: Clock, ids: np.ndarray, reports: Reports) -> None:
        """The clients ``ids`` took a local step together; ``reports`` holds what the algorithm reports about it.

        Reports are only computed for callbacks that override this method. An algorithm may later change a reported
        tensor in place: clone what you keep.
        """

    @property
    def wants_local_steps(self) -> bool:
        """Whether to call :meth:`on_local_step`."""
        return type(self).on_local_step is not Callback.on_local_step

    def on_faults(self, faults: Sequence[Fault], names: Sequence[str]) -> None:
        """Clients were left out of this round; ``names`` is empty if clients have no names."""

    def on_evaluation(self, row: Row) -> None:
        """The run was evaluated; ``row`` is the row of metrics.jsonl."""

    def on_end(self, run: Run | None) -> None:
        """Training ended; ``run`` is None if it failed."""

    def for_pretraining(self) -> Callback | None:
        """Return the listener for an experiment's pre-training; none by default, as its rounds are not the run's."""
        return None


class Titled(Callback):
    """Forwards every event of a run to ``listener``, under another title."""

    def __init__(self, listener: Callback, title: str) -> None:
        self.listener, self.title = listener, title
        for event in ("on_round", "on_local_step", "on_faults", "on_evaluation", "on_end"):
            setattr(self, event, getattr(listener, event))

    def on_start(self, title: str, done: int, rounds: int, note: str) -> None:
        """Forward the event under the title."""
        self.listener.on_start(self.title, done, rounds, note)

    @property
    def wants_local_steps(self) -> bool:
        """Whether the listener wants local steps."""
        return self.listener.wants_local_steps

    def for_pretraining(self) -> Callback | None:
        """Return a listener whose title says that this is the pre-training, if the listener follows it."""
        follows = self.listener.for_pretraining() is not None
        return Titled(self.listener, f"{self.title}, pre-training") if follows else None


class ShowProgress(Callback):
    """Shows a progress bar on a terminal or in a notebook.

    Elsewhere it prints a line per evaluation, or just the last one if ``brief``.
    """

    def __init__(self, console: Console | None = None, brief: bool = False) -> None:
        from rich.console import Console

        self.console = console or Console(stderr=True)
        self.brief = brief
        self._bar: Progress | None = None

    def on_start(self, title: str, done: int, rounds: int, note: str) -> None:
        """Print the number of rounds, and open the bar."""
        self.title, self.rounds = title, rounds
        if not self.brief:
            self._print(f"{title}: {rounds - done} rounds; {note}")
        if not (self.console.is_terminal or self.console.is_jupyter):
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(
            *columns, TextColumn("{task.fields[last]}", markup=False), console=self.console, transient=True
        )
        self._task = self._bar.add_task(title, total=rounds, completed=done, last="")
        self._bar.start()

    def on_round(self, round: int, state: Any) -> None:
        """Advance the bar."""
        if self._bar is not None:
            self._bar.update(self._task, completed=round)

    def on_faults(self, faults: Sequence[Fault], names: Sequence[str]) -> None:
        """Name the clients that were left out."""
        if not self.brief:
            self._print(f"{self.title}: round {faults[0].round + 1}: left out: {in_words(faults, names)}")

    def on_evaluation(self, row: Row) -> None:
        """Show the measures."""
        names = [name for name in IN_PROGRESS if name in row]
        shown = "  ".join(f"{name} {row[name]:{'.4g' if measure(name).tiny else '.4f'}}" for name in names)
        if self._bar is not None:
            self._bar.update(self._task, last=shown, completed=row["round"])
        elif not self.brief or row["round"] == self.rounds:
            self._print(f"{self.title}: round {row['round']}/{self.rounds}  {shown}  {row['seconds']:.1f} s")

    def on_end(self, run: Run | None) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def for_pretraining(self) -> Callback | None:
        """Show the pre-training under its own title."""
        return Titled(self, "pre-training")

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


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
