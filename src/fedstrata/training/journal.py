"""The record of a run: rows, faults and checkpoints, and how a run is resumed from them."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from fedstrata.clients.clients import Clients
from fedstrata.clients.engine import Engine
from fedstrata.clients.ranks import Ranks
from fedstrata.core.errors import Diverged, invalid
from fedstrata.core.files import Row, digest_of_row
from fedstrata.training.callbacks import Callback
from fedstrata.training.checkpoint import Checkpoint
from fedstrata.training.risk.risks import SCORES, counts_as_bytes
from fedstrata.training.run import SOLUTION, Run
from fedstrata.training.rundir import RunDirectory

CALLER = 6
"""How many frames the caller of ``fs.train`` is above a method that :meth:`Journal.open` calls, for its warnings."""


class Journal:
    """Records a run: calls its callbacks, and writes its run directory on the first rank.

    history:  one row per evaluation, and ``digests`` the digest of each.
    left_out: how often each client was left out of an exchange.
    cut:      how many rows after the last checkpoint a resumed run has dropped.

    A checkpoint has a digest of each row before it, and one of all faults: a row that was changed since is dropped when
    the run is resumed, and changed faults are reported.
    """

    def __init__(self, directory: RunDirectory | None, callbacks: Sequence[Callback], ranks: Ranks, kept: bool) -> None:
        self.directory, self.callbacks, self.ranks, self.kept = directory, callbacks, ranks, kept
        self.history: list[Row] = []
        self.digests: list[str] = []
        self.left_out: dict[int, int] = {}
        self.cut = 0
        self._faults = (0, "")

    @property
    def last_checkpoint(self) -> str:
        """A sentence that names the directory of the last checkpoint; empty without one."""
        if self.directory is None or not any(self.directory.checkpoints.folder.glob("round-*.json")):
            return ""
        return f" The last good checkpoint is kept in {self.directory.path}."

    @property
    def place(self) -> str:
        """The run directory, for a message; empty without one."""
        return "" if self.directory is None else str(self.directory.path)

    # --- starting and resuming ----------------------------------------------------------------------------------

    def open(self, config: dict[str, Any], resume: bool, rounds: int, clients: int) -> Checkpoint | None:
        """Start a run directory, or prepare to resume the run in it; return its last checkpoint, if any, on every rank.

        The history after the checkpoint is dropped.
        """
        saved = None
        if self.directory is not None:
            self.directory.open(config, resume)
            saved = self._last_checkpoint(self.directory, rounds)
            self._drop_after(saved, self.directory)
            self._read_faults(saved, self.directory, clients)
            self.directory.write_config(config)
        fields: Any = saved and {"round": saved.round, "counts": saved.counts, "seconds": saved.seconds}
        fields = self.ranks.from_first(fields and {**fields, "history": self.history})
        if fields is None:
            return None
        self.history = fields.pop("history")
        state = self.ranks.tensors(saved.state if saved else None)
        return Checkpoint(**fields, state=state, rows=self.ranks.stream(saved.rows if saved else ()))

    def _last_checkpoint(self, directory: RunDirectory, rounds: int) -> Checkpoint | None:
        saved, damaged = directory.checkpoints.latest()
        for warning in damaged:
            warnings.warn(warning, stacklevel=CALLER)
        if saved is not None and saved.round > rounds:
            wants = f"at least {saved.round}, which the run in {directory.path} has already done"
            raise invalid("rounds", rounds, wants)
        return saved

    def _drop_after(self, saved: Checkpoint | None, directory: RunDirectory) -> None:
        """Drop the history after a checkpoint, or all of it without one; warn if rows are lost."""
        metrics = directory.metrics
        every = metrics.keep()
        if saved is None and any(row["round"] for row in every):
            warnings.warn(f"No checkpoint in {directory.path} to resume from: starting at round 0.", stacklevel=CALLER)
        done = -1 if saved is None else saved.round
        written = None if saved is None else saved.evaluations
        self.cut = sum(row["round"] > done for row in every)
        self.history = metrics.keep(done, written)
        self.digests = [digest_of_row(row) for row in self.history]
        lost = len(written or ()) - len(self.history)
        if lost > 0:
            what = f"{metrics.path} lacks {lost} of the {lost + len(self.history)} rows that were written"
            warnings.warn(f"{what} up to round {done}: resuming without them.", stacklevel=CALLER)

    def _read_faults(self, saved: Checkpoint | None, directory: RunDirectory, clients: int) -> None:
        """Count who was left out up to a checkpoint; warn if the rows are not those that were written."""
        done = -1 if saved is None else saved.round
        rows = directory.faults.keep(done)
        self._faults = _chained((0, ""), rows)
        if saved is not None and saved.faults is not None and saved.faults != self._faults:
            was = f"{directory.faults.path} was changed: it has {len(rows)} rows up to round {done}"
            what = f"{was}, but other ones, {saved.faults[0]}, were written. The summary counts those that it has."
            warnings.warn(what, stacklevel=CALLER)
        self._count_left_out([row for row in rows if 0 <= row["client"] < clients])

    # --- during the run -----------------------------------------------------------------------------------------

    def row(self, row: Row) -> None:
        """Record an evaluation."""
        self.history.append(row)
        self.digests.append(digest_of_row(row))
        if self.directory is not None:
            self.directory.metrics.append(row)
        for callback in self.callbacks:
            callback.on_evaluation(row)

    def faults(self, clients: Clients) -> None:
        """Record which clients were left out, and clear the list."""
        faults = clients.faults[:]
        if not faults:
            return
        clients.faults.clear()
        names = clients.engine.side.data.client_names
        rows = [fault.row() | ({"name": names[fault.client]} if names else {}) for fault in faults]
        self._count_left_out(rows)
        self._faults = _chained(self._faults, rows)
        if self.directory is not None:
            self.directory.faults.append(*rows)
        for callback in self.callbacks:
            callback.on_faults(faults, names)

    def _count_left_out(self, rows: list[Row]) -> None:
        for _, _, client in {(r["round"], r["exchange"], r["client"]) for r in rows if r["left_out"]}:
            self.left_out[client] = self.left_out.get(client, 0) + 1

    def checkpoint(self, checkpoint: Checkpoint, engine: Engine) -> None:
        """Write a checkpoint with the clients' rows, after the round's row: a resumed run drops what comes after it."""
        mine = engine.side.state
        total = sum(self.ranks.all(mine.count()))
        complete = self.ranks.from_first(self.directory and self.directory.checkpoints.wants_all(total))
        rows = self.ranks.collected(mine.take_all() if complete else mine.take_changes())
        if self.directory is None:
            for _ in rows:  # all ranks must iterate to the end
                pass
        else:
            checkpoint = dataclasses.replace(checkpoint, rows=rows, evaluations=self.digests, faults=self._faults)
            self.directory.checkpoints.save(checkpoint, complete)
        engine.saved(checkpoint.round)

    def diverged(self, round: int, error: Diverged) -> None:
        """Record that the run diverged."""
        if self.directory is not None:
            self.directory.write_diverged(round, str(error))

    def finish(self, run: Run) -> None:
        """Write the model (the solution if there is no model), the summary and the plot."""
        from fedstrata.training.plots import plot

        if self.directory is None:
            return
        flat = run.problem.flat
        self.directory.write_tensors(SOLUTION, run.solution)
        self.directory.write_tensors("model.safetensors", flat.state_dict(run.x[: flat.size]) if flat else run.solution)
        if run.fitted is not None:
            run.predictor().write(self.directory.path / "model")
        if run.risks is not None and run.risks.held_out is not None:
            self.directory.write_bytes(SCORES, counts_as_bytes(run.risks.held_out))
        self.directory.write_summary(run.summary)
        plot({run.summary["algorithm"]: [run.history]}, self.directory.path / "plot.png")


def _chained(before: tuple[int, str], rows: Sequence[Row]) -> tuple[int, str]:
    """Return the number of all rows and a digest of them, given those of the rows ``before``."""
    count, digest = before
    for row in rows:
        digest = blake2b(f"{digest}{json.dumps(row)}".encode(), digest_size=8).hexdigest()
    return count + len(rows), digest
