"""Training: the one loop that every algorithm, problem and engine goes through."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fedstrata.algorithms.algorithm import Algorithm
from fedstrata.clients.channel import Channel
from fedstrata.clients.chunk import choose_chunk
from fedstrata.clients.clients import Clients
from fedstrata.clients.distributed import Distributed
from fedstrata.clients.engine import Engine
from fedstrata.clients.faults import Faults, QuorumError
from fedstrata.clients.privacy import epsilon
from fedstrata.clients.queries import learn
from fedstrata.clients.ranks import ALONE, Ranks, ranks_here
from fedstrata.clients.setting import Listener, Setting
from fedstrata.clients.simulated import Simulated
from fedstrata.clients.state import ClientState
from fedstrata.core.errors import Diverged, FedstrataError, InputError, invalid
from fedstrata.core.files import Row
from fedstrata.core.machine import prepared
from fedstrata.core.schedules import Clock
from fedstrata.data.federated import FederatedData
from fedstrata.data.sampling import SAMPLINGS
from fedstrata.problems.oracles import Oracles
from fedstrata.problems.problem import Problem
from fedstrata.training.callbacks import Callback
from fedstrata.training.fingerprint import digest_of, settings_of
from fedstrata.training.journal import Journal
from fedstrata.training.metrics.evaluation import Evaluate, Evaluation, measured_on
from fedstrata.training.preflight import check_pretraining, check_run
from fedstrata.training.run import Run
from fedstrata.training.rundir import RunDirectory
from fedstrata.training.settings import Settings, takes_settings
from fedstrata.training.states import shapes_of, tensors_of

MakeEngine = Callable[[Setting, Channel, Faults | None], Engine]
"""Makes the engine of a run, where clients are elsewhere."""


@takes_settings
def train(
    problem: Problem,
    data: FederatedData,
    algorithm: Algorithm,
    *,
    settings: Settings,
    evaluate: Evaluate | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    config: dict[str, Any] | None = None,
    pretrain: Run | None = None,
    engine: MakeEngine | None = None,
) -> Run:
    """Train ``problem`` on ``data`` with ``algorithm``: ``fs.train(problem, data, algorithm, rounds=100)``.

    settings:  the options below as one object, instead of as keywords.
    evaluate:  ``(problem, data, x, y) -> {name: number}``; an :class:`Evaluation` by default.
    out:       the run directory; it must be new, unless ``resume`` continues the run in it.
    resume:    continue from the last checkpoint; ``rounds`` may grow (a schedule in shares of training follows).
    callbacks: listeners: progress, loggers, diagnostics.
    config:    what to write to config.toml; by default what this function knows.
    pretrain:  the run that the problem's model comes from, if any: what it used is counted in every row.
    engine:    makes the engine, where clients are elsewhere; None for clients in this process, or its ranks.
    """
    check_run(problem, data, algorithm, settings, evaluate)
    if pretrain is not None and not isinstance(pretrain, Run):
        raise invalid("pretrain", type(pretrain).__name__, "the Run that came before, or left out")
    if resume and out is None:
        raise InputError("resume=True needs out: the run directory to resume.")
    listeners = tuple(c.on_local_step for c in callbacks if c.wants_local_steps)
    ranks = ranks_here()
    if ranks.size > 1 and listeners:
        raise InputError("Diagnostics of local steps see one process only: run without torchrun, or without them.")
    check_pretraining(settings.channel, pretrain is not None)
    clients = make_clients(problem, data, settings, out, listeners, ranks, engine)
    directory = None if out is None or not ranks.first else RunDirectory(out)
    journal = Journal(directory, callbacks if ranks.first else (), ranks, kept=out is not None)
    evaluation = Evaluation() if evaluate is None else evaluate
    training = _Training(algorithm, settings, clients, evaluation, journal, pretrain)
    try:
        if out is not None:
            config = settings_of(problem, data, algorithm, settings) if config is None else config
            training.open({**config, "digest": digest_of(problem, data)}, resume)
        with torch.no_grad(), prepared(settings.threads):
            return training.run()
    finally:
        if directory is not None:
            directory.close()


def make_clients(
    problem: Problem,
    data: FederatedData,
    settings: Settings,
    out: str | Path | None = None,
    listeners: tuple[Listener, ...] = (),
    ranks: Ranks = ALONE,
    make_engine: MakeEngine | None = None,
) -> Clients:
    """Return the clients of a run, on its device, with the engine that fits."""
    try:
        device = torch.device(settings.device)
        if device.type == "meta":
            raise RuntimeError("it holds no numbers")
        problem = problem.to(device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InputError(f"The device {settings.device!r} cannot be used: {error}") from None
    data = data.to(device, problem.x0.dtype)
    setting = Setting(
        oracles=Oracles(problem),
        data=data,
        sampling=SAMPLINGS[settings.sampling],
        batch_size=settings.batch_size,
        seed=settings.seed,
        state=ClientState(data.clients, settings.state_memory, None if out is None else Path(out)),
        listeners=listeners,
    )
    channel, faults = settings.channel, settings.faults
    if make_engine is not None:
        engine = make_engine(setting, channel, faults)
    else:
        chunk = choose_chunk(settings.chunk, problem, data, setting.batch_size, device)
        if ranks.size > 1:
            engine = Distributed(setting, chunk, channel, faults, ranks=ranks)
        else:
            engine = Simulated(setting, chunk, channel, faults)
    return Clients(engine, settings.rounds, settings.participation, settings.weighting)


class _Training:
    """A run under way: ``done`` of its rounds are behind it, ``state`` is the server's."""

    def __init__(
        self,
        algorithm: Algorithm,
        settings: Settings,
        clients: Clients,
        evaluation: Evaluate,
        journal: Journal,
        pretrain: Run | None,
    ) -> None:
        self.algorithm, self.settings, self.clients = algorithm, settings, clients
        self.evaluation, self.journal, self.pretrain = evaluation, journal, pretrain
        self.problem, self.data = clients.problem, clients.engine.setting.data
        self.ranks = journal.ranks
        self.state: Any = None
        self.done = 0
        self.started = time.perf_counter()

    def open(self, config: dict[str, Any], resume: bool) -> None:
        """Start a run directory, or resume the run in it from its last checkpoint."""
        resumed = self.journal.open(config, resume, self.settings.rounds, self.algorithm, self.clients)
        if resumed is not None:
            self.state, self.done = resumed.state, resumed.done
            self.started -= resumed.seconds

    def run(self) -> Run:
        """Do the rounds that are left."""
        rounds, every = self.settings.rounds, self.settings.eval_every or max(1, self.settings.rounds // 20)
        result: Run | None = None
        journal = self.journal
        try:
            self.prepare()
            for callback in journal.callbacks:
                callback.on_start(self.algorithm.name, self.done, rounds, self._note())
            if not journal.history:
                self.measure()
            while self.done < rounds:
                self.round()
                if self.done % every == 0 or self.done == rounds:
                    self.measure()
                if self.done % self.settings.checkpoint_every == 0 or self.done == rounds:
                    tensors = tensors_of(self.algorithm, self.state)
                    journal.checkpoint(self.done, self.seconds(), tensors, self.clients)
            result = Run(*self.solution(), journal.history, self.summary(), self.problem)
            journal.finish(result, self.algorithm, self.state)
        except QuorumError as error:
            journal.faults(self.clients)
            raise QuorumError(f"{error}{journal.last_checkpoint}") from None
        finally:
            for callback in journal.callbacks:
                callback.on_end(result)
        return result

    def prepare(self) -> None:
        """Let the problem, and in a new run the algorithm, ask the clients for what they need before the first round.

        What the problem learned is in every checkpoint; a resumed run does not ask again.
        """
        self.clients.begin(-1)
        query, engine = self.problem.query, self.clients.engine
        if query is not None:
            if engine.learned is None:
                engine.learned = learn(query, self.clients)
            self.adopt(query.inform(self.problem, engine.learned))
        if self.done:
            self.enter(self.done - 1)
        else:
            self.enter(0)
            x, y = self.problem.x0.clone(), self.problem.y0
            self.state = self.algorithm.start(x, x[:0] if y is None else y.clone(), self.clients)
            tensors_of(self.algorithm, self.state)

    def adopt(self, problem: Problem) -> None:
        """Switch clients and measures to another problem."""
        self.problem = problem
        self.clients.engine.adopt(problem)

    def enter(self, number: int) -> None:
        """Switch to the problem of this round: rates inside it may follow a schedule, whose t is the round."""
        if self.problem.at is not None:
            problem = self.problem.at(self.problem, Clock(number, self.settings.rounds, 0, number))
            if problem is not self.problem:
                self.adopt(problem)

    def round(self) -> None:
        """Do one round."""
        self.clients.begin(self.done)
        self.enter(self.done)
        state = self.algorithm.round(self.state, self.clients)
        self.journal.faults(self.clients)
        tensors = tensors_of(self.algorithm, state)
        got, wants = shapes_of(tensors), shapes_of(tensors_of(self.algorithm, self.state))
        if got != wants:
            raise FedstrataError(f"round of {self.algorithm.name} must return a State of {wants}. Got {got}.")
        self.done += 1
        for name, value in tensors.items():
            if not bool(torch.isfinite(value).all()):
                bad = int((~torch.isfinite(value)).sum())
                raise self._diverged(f"{bad} of {value.numel()} entries of {name} are NaN or infinite")
        self.state = state
        for callback in self.journal.callbacks:
            callback.on_round(self.done, state)

    def measure(self) -> None:
        """Evaluate, and write down the row."""
        row: Row = {"round": self.done, **self.used()}
        if self.ranks.first:
            measures = self.evaluation(self.problem, self.data, *self.solution())
            row["finite"] = math.isfinite(measures.get("loss", 0.0))
            row |= {k: float(v) for k, v in measures.items() if math.isfinite(v)}
        row = self.ranks.told(row)
        if not row.pop("finite"):
            raise self._diverged("the loss is NaN or infinite")
        self.journal.row(row)

    def _diverged(self, what: str) -> Diverged:
        return Diverged(
            f"{self.algorithm.name} diverged in round {self.done}: {what}. A smaller learning rate is the usual remedy."
            f"{self.journal.last_checkpoint}"
        )

    def solution(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the solution that the state stands for: x, and y where there is a dual."""
        x, y = self.algorithm.solution(self.state)
        return x, y if self.problem.dual else None

    def used(self) -> Row:
        """Return what was used up to now, by the pre-training too.

        The clients' own counts, which schedules and checkpoints go by, are those of the run alone.
        """
        counts = dataclasses.asdict(self.clients.usage)
        failed = counts.pop("failed")
        used: Row = {**counts, "seconds": self.seconds()}
        if self.pretrain is not None:
            used = {k: v + self.pretrain.history[-1][k] for k, v in used.items()}
        used["seconds"] = round(used["seconds"], 3)
        if self.settings.faults is not None:
            used["failed"] = failed
        if self.settings.channel.noise:
            releases = self.clients.engine.ledger.releases
            used["epsilon"] = epsilon(self.settings.channel, releases, self.data.clients)
        return used

    def seconds(self) -> float:
        """Return how long the run has taken, interruptions not counted."""
        return time.perf_counter() - self.started

    def summary(self) -> Row:
        """Return the last row, and what a reader needs to understand it."""
        summary: Row = {"status": "finished", "algorithm": self.algorithm.name, "problem": self.problem.name}
        summary |= {"data": self.data.name, "clients": self.data.clients, "seed": self.settings.seed}
        summary |= {"chunk": min(self.clients.engine.chunk, self.clients.sampled), **self.journal.history[-1]}
        if self.pretrain is not None:
            last = dict(self.pretrain.history[-1])
            summary["pretrain"] = {"algorithm": self.pretrain.summary["algorithm"], "rounds": last.pop("round"), **last}
        if self.data.client_names:
            summary["client_names"] = list(self.data.client_names)
        if self.settings.channel.noise:
            summary["delta"] = self.settings.channel.delta
        if self.settings.faults is not None:
            names = self.data.client_names or [f"client {k}" for k in range(self.data.clients)]
            summary["left_out"] = {names[k]: n for k, n in sorted(self.journal.left_out.items())}
        if isinstance(self.evaluation, Evaluation):
            summary["measured_on"] = measured_on(self.problem, self.data, self.evaluation)
            x, _ = self.solution()
            found = self.evaluation.per_client(self.problem, self.data, x) if self.ranks.first else {}
            each = {k: [None if v != v else float(v) for v in vs] for k, vs in found.items()}
            summary["per_client"] = self.ranks.told(each)
        elif hasattr(self.evaluation, "about"):
            summary |= self.evaluation.about(*self.solution())
        return summary

    def _note(self) -> str:
        who = f"{self.clients.sampled} of {self.data.clients} clients a round"
        return f"{who}, {self.clients.engine.describe(self.settings.chunk, self.clients.sampled)}"
