"""The record of a run: rows, faults and checkpoints, and how a run is resumed from them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from fedstrata.algorithms.algorithm import Algorithm
from fedstrata.clients.clients import Clients
from fedstrata.clients.engine import Usage
from fedstrata.clients.ranks import Ranks
from fedstrata.core.errors import InputError, invalid
from fedstrata.core.files import Row
from fedstrata.problems.problem import Problem
from fedstrata.training.callbacks import Callback
from fedstrata.training.checkpoint import Checkpoint
from fedstrata.training.run import Run
from fedstrata.training.rundir import RunDirectory
from fedstrata.training.states import state_of


@dataclasses.dataclass(frozen=True)
class Resumed:
    """Where a run was when its last checkpoint was written."""

    state: Any
    done: int
    seconds: float


class Journal:
    """Records a run: calls its callbacks, and writes its run directory on the first rank.

    history:  one row per evaluation.
    left_out: how often each client was left out of an exchange.
    """

    def __init__(self, directory: RunDirectory | None, callbacks: Sequence[Callback], ranks: Ranks, kept: bool) -> None:
        self.directory, self.callbacks, self.ranks, self.kept = directory, callbacks, ranks, kept
        self.history: list[Row] = []
        self.left_out: dict[int, int] = {}

    @property
    def last_checkpoint(self) -> str:
        """A sentence that names the directory of the last checkpoint; empty without one."""
        if self.directory is None or not any(self.directory.checkpoints.folder.glob("round-*.json")):
            return ""
        return f" The last good checkpoint is kept in {self.directory.path}."

    # --- starting and resuming ----------------------------------------------------------------------------------

    def open(
        self, config: dict[str, Any], resume: bool, rounds: int, algorithm: Algorithm, clients: Clients
    ) -> Resumed | None:
        """Start a run directory, or resume the run in it; return where the run was, if there is a checkpoint."""
        saved = None
        if self.directory is not None:
            saved = self._open(self.directory, config, resume, rounds, algorithm, clients.problem)
        record: Any = saved and {"round": saved.round, "counts": saved.counts, "seconds": saved.seconds}
        record = self.ranks.from_first(record and {**record, "rows": self.history})
        if record is None:
            return None
        self.history = record["rows"]
        tensors = self.ranks.tensors(saved.state if saved else None)
        engine = clients.engine
        for rows in self.ranks.stream(saved.rows if saved else ()):
            engine.side.state.load(rows, engine.mine)
        engine.restore(record["counts"].pop("engine"))
        clients.progress.iteration = record["counts"].pop("iteration")
        clients.usage = Usage(**record["counts"])
        engine.saved(record["round"])
        device = clients.problem.x0.device
        state = state_of(algorithm, {name: tensor.to(device) for name, tensor in tensors.items()})
        return Resumed(state, record["round"], record["seconds"])

    def _open(
        self,
        directory: RunDirectory,
        config: dict[str, Any],
        resume: bool,
        rounds: int,
        algorithm: Algorithm,
        problem: Problem,
    ) -> Checkpoint | None:
        """Open the directory; return its last checkpoint, if any, and drop the history after it."""
        directory.open(config, resume)
        saved, damaged = directory.checkpoints.latest() if resume else (None, [])
        for warning in damaged:
            warnings.warn(warning, stacklevel=5)
        rows = directory.rows()
        if saved is None:
            if any(row["round"] for row in rows):
                warnings.warn(f"No checkpoint in {directory.path} to resume from: starting at round 0.", stacklevel=5)
        elif saved.round > rounds:
            raise invalid(
                "rounds", rounds, f"at least {saved.round}, which the run in {directory.path} has already done"
            )
        elif not _fits(saved, algorithm, problem):
            folder = directory.checkpoints.folder
            raise InputError(f"The checkpoint in {folder} does not belong to {algorithm.name} on this problem.")
        done = -1 if saved is None else saved.round
        self.history = [row for row in rows if row["round"] <= done]
        lost = (saved.evaluations or 0) - len(self.history) if saved is not None else 0
        if lost > 0:
            what = f"{directory.metrics} lacks {lost} of the {lost + len(self.history)} rows up to round {done}"
            warnings.warn(f"{what}: resuming without them.", stacklevel=5)
        directory.write_config(config)
        directory.truncate(self.history)
        self._count_left_out(directory.truncate_faults(done))
        return saved

    # --- during the run -----------------------------------------------------------------------------------------

    def row(self, row: Row) -> None:
        """Record an evaluation."""
        self.history.append(row)
        if self.directory is not None:
            self.directory.append(row)
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
        if self.directory is not None:
            self.directory.append_faults(rows)
        for callback in self.callbacks:
            callback.on_faults(faults, names)

    def _count_left_out(self, rows: list[Row]) -> None:
        for _, _, client in {(r["round"], r["exchange"], r["client"]) for r in rows if r["left_out"]}:
            self.left_out[client] = self.left_out.get(client, 0) + 1

    def checkpoint(self, done: int, seconds: float, tensors: dict[str, torch.Tensor], clients: Clients) -> None:
        """Write a checkpoint, after the round's row: a resumed run drops rows after its checkpoint."""
        if not self.kept:
            return
        engine = clients.engine
        mine = engine.side.state
        total = sum(self.ranks.all(mine.count()))
        complete = self.ranks.from_first(self.directory and self.directory.checkpoints.wants_all(total))
        rows = self.ranks.collected(mine.take_all() if complete else [mine.take_changes()])
        if self.directory is None:
            for _ in rows:  # all ranks must iterate to the end
                pass
        else:
            counts: dict[str, Any] = dataclasses.asdict(clients.usage)
            counts |= {"iteration": clients.progress.iteration, "engine": engine.extra()}
            copies = {
                name: tensor.clone() for name, tensor in tensors.items()
            }  # tensors in a file must not share memory
            saved = Checkpoint(done, copies, counts, seconds, rows, len(self.history))
            self.directory.checkpoints.save(saved, complete)
        engine.saved(done)

    def finish(self, run: Run) -> None:
        """Write the model, or without one the solution, the summary and the plot."""
        from fedstrata.training.plots import plot

        if self.directory is None:
            return
        flat = run.problem.flat
        solution = {"x": run.x} if run.y is None else {"x": run.x, "y": run.y}
        self.directory.write_model(flat.state_dict(run.x[: flat.size]) if flat else solution)
        self.directory.write_summary(run.summary)
        plot({run.summary["algorithm"]: [run.history]}, self.directory.path / "plot.png")


def _fits(saved: Checkpoint, algorithm: Algorithm, problem: Problem) -> bool:
    """Whether a checkpoint is a state of the algorithm whose solution has the sizes of the problem's x and y."""
    try:
        x, y = algorithm.solution(state_of(algorithm, saved.state))
    except (TypeError, AttributeError):  # the tensors of another state
        return False
    dual = 0 if problem.y0 is None else len(problem.y0)
    return x.shape == problem.x0.shape and (y is None or len(y) == dual)
