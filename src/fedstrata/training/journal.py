"""What is written down of a run while it goes: rows, faults, checkpoints; and how a run is resumed from them."""

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
from fedstrata.training.states import state_of, tensors_of


@dataclasses.dataclass(frozen=True)
class Resumed:
    """Where a run was when its last checkpoint was written."""

    state: Any
    done: int
    seconds: float


class Journal:
    """Passes on what happens in a run to its callbacks and to its run directory, which the first rank writes.

    history:  one row per evaluation.
    left_out: how often each client was left out of an exchange.
    """

    def __init__(self, directory: RunDirectory | None, callbacks: Sequence[Callback], ranks: Ranks, kept: bool) -> None:
        self.directory, self.callbacks, self.ranks, self.kept = directory, callbacks, ranks, kept
        self.history: list[Row] = []
        self.left_out: dict[int, int] = {}

    @property
    def last_checkpoint(self) -> str:
        """A sentence that says where the last good checkpoint is, if there is one."""
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
        known: Any = saved and {"round": saved.round, "counts": saved.counts, "seconds": saved.seconds}
        known = self.ranks.told(known and {**known, "rows": self.history})
        if known is None:
            return None
        self.history = known["rows"]
        tensors = self.ranks.tensors(saved.state if saved else None)
        engine = clients.engine
        for rows in self.ranks.stream(saved.rows if saved else ()):
            engine.setting.state.load(rows, engine.mine)
        engine.restore(known["counts"].pop("engine"))
        clients.progress.iteration = known["counts"].pop("iteration")
        clients.usage = Usage(**known["counts"])
        engine.saved(known["round"])
        device = clients.problem.x0.device
        state = state_of(algorithm, {name: tensor.to(device) for name, tensor in tensors.items()})
        return Resumed(state, known["round"], known["seconds"])

    def _open(
        self,
        directory: RunDirectory,
        config: dict[str, Any],
        resume: bool,
        rounds: int,
        algorithm: Algorithm,
        problem: Problem,
    ) -> Checkpoint | None:
        """Open the directory; return its last checkpoint, if there is one, with the history cut back to it."""
        directory.open(config, resume)
        saved, damaged = directory.checkpoints.latest() if resume else (None, [])
        for warning in damaged:
            warnings.warn(warning, stacklevel=5)
        if saved is None:
            if any(row["round"] for row in directory.rows()):
                warnings.warn(f"No checkpoint in {directory.path} to resume from: starting at round 0.", stacklevel=5)
        elif saved.round > rounds:
            raise invalid(
                "rounds", rounds, f"at least {saved.round}, which the run in {directory.path} has done already"
            )
        elif not _fits(saved, problem):
            folder = directory.checkpoints.folder
            raise InputError(f"The checkpoint in {folder} is not one of {algorithm.name} on this problem.")
        done = -1 if saved is None else saved.round
        self.history = [row for row in directory.rows() if row["round"] <= done]
        directory.write_config(config)
        directory.truncate(self.history)
        self._count_left_out(directory.truncate_faults(done))
        return saved

    # --- while the run goes -------------------------------------------------------------------------------------

    def row(self, row: Row) -> None:
        """Write down an evaluation."""
        self.history.append(row)
        if self.directory is not None:
            self.directory.append(row)
        for callback in self.callbacks:
            callback.on_evaluation(row)

    def faults(self, clients: Clients) -> None:
        """Write down which clients were left out, and forget it."""
        faults = clients.faults[:]
        if not faults:
            return
        clients.faults.clear()
        names = clients.engine.setting.data.client_names
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
        """Write a checkpoint; after the round's row, which a resumed run cuts back to the checkpoint."""
        if not self.kept:
            return
        engine = clients.engine
        mine = engine.setting.state
        total = sum(self.ranks.all(mine.count()))
        anew = self.ranks.told(self.directory and self.directory.checkpoints.wants_all(total))
        rows = self.ranks.collected(mine.take_all() if anew else [mine.take_changes()])
        if self.directory is None:
            for _ in rows:  # all ranks must go through to the end
                pass
        else:
            counts: dict[str, Any] = dataclasses.asdict(clients.usage)
            counts |= {"iteration": clients.progress.iteration, "engine": engine.extra()}
            copies = {name: tensor.clone() for name, tensor in tensors.items()}  # a file shares no memory
            self.directory.checkpoints.save(Checkpoint(done, copies, counts, seconds, rows), anew)
        engine.saved(done)

    def finish(self, run: Run, algorithm: Algorithm, state: Any) -> None:
        """Write the model, the summary and the plot."""
        from fedstrata.training.plots import plot

        if self.directory is None:
            return
        flat = run.problem.flat
        named = tensors_of(algorithm, state).items()
        tensors = flat.state_dict(run.x[: flat.size]) if flat else {name: tensor.clone() for name, tensor in named}
        self.directory.write_model(tensors)
        self.directory.write_summary(run.summary)
        plot({run.summary["algorithm"]: [run.history]}, self.directory.path / "plot.png")


def _fits(saved: Checkpoint, problem: Problem) -> bool:
    """Whether a checkpoint's x and y have the sizes of the problem's."""
    x, y = saved.state.get("x", saved.state.get("h.0")), saved.state.get("y")
    dual = 0 if problem.y0 is None else len(problem.y0)
    return x is not None and x.shape == problem.x0.shape and (y is None or len(y) == dual)
