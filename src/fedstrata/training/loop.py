"""The loop that every run goes through: rounds, evaluations, checkpoints."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fedstrata.algorithms.algorithm import Algorithm
from fedstrata.clients.clients import Clients
from fedstrata.clients.engine import Usage
from fedstrata.clients.faults import QuorumError
from fedstrata.clients.privacy import epsilon
from fedstrata.clients.ranks import ranks_here
from fedstrata.core.errors import Diverged, FedstrataError, within
from fedstrata.core.files import Row
from fedstrata.problems.problem import Problem
from fedstrata.problems.runner import TRACING
from fedstrata.training.checkpoint import Checkpoint
from fedstrata.training.journal import Journal
from fedstrata.training.metrics.evaluation import Evaluate
from fedstrata.training.metrics.measures import as_numbers
from fedstrata.training.risk.risks import Risks, learn_risks
from fedstrata.training.rounds import one_round, prepare, start
from fedstrata.training.run import Run
from fedstrata.training.settings import Settings
from fedstrata.training.states import check_restorable, check_same, restored, shapes_of, tensors_of
from fedstrata.training.stopping import Validation, best_row, exceeded_next
from fedstrata.training.summary import rounded, summary_of

_BEST = "best:"
"""Begins the names of the best solution's tensors in a checkpoint."""


class Loop:
    """A run in progress.

    done:    how many rounds are finished.
    state:   the server's state; ``tensors`` are its named tensors.
    risks:   for tables with two classes, what the run knows of its scores in the end.
    trained: the seconds spent in rounds, without tracing.
    best:    with early stopping, the best solution so far.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        settings: Settings,
        clients: Clients,
        evaluation: Evaluate,
        journal: Journal,
        pretrain: Run | None,
        validation: Validation | None = None,
    ) -> None:
        self.algorithm, self.settings, self.clients = algorithm, settings, clients
        self.evaluation, self.journal, self.pretrain = evaluation, journal, pretrain
        self.validation = validation
        self.data = clients.engine.side.data
        self.ranks = journal.ranks
        self.risks: Risks | None = None
        self.state: Any = None
        self.tensors: dict[str, torch.Tensor] = {}
        self.done = 0
        self.trained = 0.0
        self.best: dict[str, torch.Tensor] = {}
        self.started = time.perf_counter()

    @property
    def problem(self) -> Problem:
        """The problem of the current round."""
        return self.clients.problem

    def restore(self, saved: Checkpoint) -> None:
        """Continue from a checkpoint."""
        device, engine = self.problem.x0.device, self.clients.engine
        tensors = {name: tensor.to(device) for name, tensor in saved.state.items()}
        self.best = {n.removeprefix(_BEST): t for n, t in tensors.items() if n.startswith(_BEST)}
        self.tensors = {n: t for n, t in tensors.items() if not n.startswith(_BEST)}
        with within(self.journal.place):
            self.state = restored(self.algorithm, self.problem, self.tensors)
        for rows in saved.rows:
            engine.side.state.load(rows, engine.mine)
        counts = dict(saved.counts)
        engine.restore(counts.pop("engine"))
        self.clients.progress.iteration = counts.pop("iteration")
        self.trained = counts.pop("trained")
        self.clients.usage = Usage(**counts)
        self.done = saved.round
        self.started -= saved.seconds
        engine.saved(self.done)

    def checkpoint(self) -> None:
        """Write a checkpoint of the last finished round, if the run has a directory."""
        if not self.journal.kept:
            return
        engine, iteration = self.clients.engine, self.clients.progress.iteration
        counts = {**dataclasses.asdict(self.clients.usage), "iteration": iteration, "engine": engine.extra()}
        counts["trained"] = self.trained
        tensors = self.tensors | {f"{_BEST}{name}": tensor for name, tensor in self.best.items()}
        self.journal.checkpoint(Checkpoint(self.done, tensors, counts, self._seconds()), engine)

    def run(self) -> Run:
        """Run the remaining rounds."""
        rounds = self.settings.rounds
        result: Run | None = None
        journal = self.journal
        try:
            self.prepare()
            for callback in journal.callbacks:
                callback.on_start(self.algorithm.name, self.done, rounds, self._note())
            recorded = len(journal.history)
            if not journal.history or (journal.history[-1]["round"] < self.done and self._due()):
                self.measure()  # before the first round, or because the row was lost
            reason = self._stops()
            if reason is not None and journal.history[-1]["round"] < self.done:
                self.measure()  # the last row of a run that had ended was lost
            if self.done and len(journal.history) > recorded:
                self.checkpoint()  # it knows the new row
            while self.done < rounds and reason is None:
                self.round()
                reason = self._budget()
                last = self.done == rounds or reason is not None
                if self._due() or last:
                    self.measure()
                reason = reason or self._stops()
                if self.done % self.settings.checkpoint_every == 0 or last or reason is not None:
                    self.checkpoint()
            self.learn_risks()
            solution, summary = self.chosen(), summary_of(self, reason)
            result = Run(*solution, journal.history, summary, self.problem, self.data.fitted, self.risks)
            journal.finish(result)
        except QuorumError as error:
            journal.faults(self.clients)
            raise QuorumError(f"{error}{journal.last_checkpoint}") from None
        except Diverged as error:
            journal.diverged(self.done, error)
            raise
        finally:
            for callback in journal.callbacks:
                callback.on_end(result)
        return result

    def _due(self) -> bool:
        """Whether the run is evaluated after the last finished round."""
        rounds = self.settings.rounds
        every = self.settings.eval_every or max(1, rounds // 20)
        return self.done % every == 0 or self.done == rounds

    def _budget(self) -> str | None:
        """Return the budget that ends the run now, on every rank."""
        own: Row = {**dataclasses.asdict(self.clients.usage), "seconds": self.trained}
        reason = exceeded_next(self.settings, self.used(), own, self.done)
        return reason if self.settings.max_seconds is None else self.ranks.from_first(reason)

    def _stops(self) -> str | None:
        """Return why the run ends now, judging by its history: a budget, or no improvement."""
        waited = self.validation is not None and self.validation.waited(self.journal.history)
        return "patience" if waited else self._budget()

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Count the time of the block as training, without tracing."""
        begun, traced = time.perf_counter(), TRACING.seconds
        yield
        self.trained += time.perf_counter() - begun - (TRACING.seconds - traced)

    @contextmanager
    def _on_server(self, when: str) -> Iterator[None]:
        """Say where a number does not fit into its type, or an array into memory."""
        try:
            yield
        except (ArithmeticError, MemoryError, RuntimeError) as error:
            if self.ranks.size > 1 and isinstance(error, RuntimeError):  # perhaps a rank that cannot be reached
                raise
            raise FedstrataError(f"{type(error).__name__} in {when} of {self.algorithm.name}: {error}") from error

    def prepare(self) -> None:
        """Prepare the clients, and start the algorithm unless the run is resumed."""
        prepare(self.clients, max(0, self.done - 1))
        self._take_prepared()
        if not self.done:
            with self._training(), self._on_server("the start"):
                self.state = start(self.algorithm, self.clients)
            self.tensors = tensors_of(self.algorithm, self.state)
            if self.journal.kept:
                check_restorable(self.algorithm, self.state)
            check_same(self.algorithm, "start", {"x": self.algorithm.solution(self.state)[0]}, {"x": self.problem.x0})

    def _take_prepared(self) -> None:
        """Measure on prepared data, if the data are tables."""
        self.data = self.clients.engine.side.data
        if self.validation is not None and self.validation.data.plan is not None and self.data.fitted is not None:
            held = self.validation.data.prepared(self.data.fitted)
            self.validation = self.validation._replace(data=held.to(self.problem.x0.device, self.problem.x0.dtype))

    def round(self) -> None:
        """Run one round."""
        with self._training(), self._on_server(f"round {self.done + 1}"):
            self.state = one_round(self.algorithm, self.state, self.clients, self.done, self._accept)
        self.journal.faults(self.clients)
        for callback in self.journal.callbacks:
            callback.on_round(self.done, self.state)

    def _accept(self, state: Any) -> None:
        """Count the round; raise if its state differs in shape or dtype from the last one, or is not finite."""
        self.journal.faults(self.clients)
        with within(f"round {self.done + 1}", FedstrataError):
            tensors = tensors_of(self.algorithm, state)
            got, wants = shapes_of(tensors), shapes_of(self.tensors)
            if got != wants:
                raise FedstrataError(f"round of {self.algorithm.name} must return a State of {wants}. Got {got}.")
            check_same(self.algorithm, "round", tensors, self.tensors)
        self.tensors = tensors
        self.done += 1
        for name, value in tensors.items():
            if not bool(torch.isfinite(value).all()):
                bad = int((~torch.isfinite(value)).sum())
                raise self._diverged(f"{bad} of {value.numel()} entries of {name} are NaN or infinite")

    def measure(self) -> None:
        """Evaluate, and record the row."""
        row: Row = {"round": self.done, **rounded(self.used())}
        finite = True
        if self.ranks.first:
            with self._on_server(f"the evaluation after round {self.done}"):
                measures = as_numbers(self.evaluation(self.problem, self.data, *self.solution()), row)
            row |= {name: value for name, value in measures.items() if math.isfinite(value)}
            finite = math.isfinite(measures.get("loss", 0.0))
            if self.validation is not None:
                row |= self.validation.measured(self.problem, *self.solution(), self.journal.history)
        row, finite = self.ranks.from_first((row, finite))
        if not finite:
            raise self._diverged("the loss is NaN or infinite")
        self.journal.row(row)
        if self.validation is not None and best_row(self.journal.history) == len(self.journal.history) - 1:
            x, y = self.solution()
            self.best = {"x": x.clone()} | ({} if y is None else {"y": y.clone()})

    def _diverged(self, what: str) -> Diverged:
        return Diverged(
            f"{self.algorithm.name} diverged in round {self.done}: {what}. Try a smaller learning rate."
            f"{self.clients.engine.outlier}{self.journal.last_checkpoint}",
            self.journal.history,
        )

    def learn_risks(self) -> None:
        """Calibrate the scores of a model for tables with two classes."""
        if self.data.fitted is None or self.data.classes != 2 or self.problem.predict is None:
            return
        self.clients.begin(-1)
        self.risks = learn_risks(self.clients, self.chosen()[0], self.settings.calibrate)

    def chosen(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the solution of the run: the last one or, with early stopping, the best."""
        return (self.best["x"], self.best.get("y")) if self.validation is not None else self.solution()

    def solution(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the solution of the state: x, and y if there is a dual."""
        x, y = self.algorithm.solution(self.state)
        return x, y if self.problem.dual else None

    def used(self) -> Row:
        """Return what was used so far, including the pre-training.

        The clients' own counts, which schedules and checkpoints use, are those of the run alone.
        """
        counts = dataclasses.asdict(self.clients.usage)
        failed = counts.pop("failed")
        if self.data.one_place:
            counts |= {"bytes_up": 0, "bytes_down": 0}
        used: Row = {**counts, "seconds": self.trained, "total_seconds": self._seconds()}
        if self.pretrain is not None:
            used = {k: v + self.pretrain.history[-1][k] for k, v in used.items()}
        if self.settings.faults is not None:
            used["failed"] = failed
        if self.settings.channel.noise:
            releases = self.clients.engine.ledger.releases
            used["epsilon"] = epsilon(self.settings.channel, releases, self.data.clients)
        return used

    def _seconds(self) -> float:
        """Return how long the run has taken, with evaluations and checkpoints but without interruptions."""
        return time.perf_counter() - self.started

    def _note(self) -> str:
        who = f"{self.clients.sampled} of {self.data.clients} clients per round"
        how = self.clients.engine.describe(self.settings.chunk, self.clients.sampled)
        if self.ranks.size < (of := ranks_here().size):
            how += f" on the first of {of} ranks (divide = {self.settings.divide})"
        compiled = ", compiled (the first round takes longer)" if self.settings.compile else ""
        rows = f" ({self.journal.cut} later row{'s' * (self.journal.cut > 1)} dropped)" if self.journal.cut else ""
        resumed = f", resumed after round {self.done}{rows}" if self.done or rows else ""
        return f"{who}, {how}{compiled}{resumed}"
