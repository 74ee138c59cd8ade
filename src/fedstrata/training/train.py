"""Training: the one loop that every algorithm, problem and engine goes through."""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedstrata.algorithms.algorithm import Algorithm
from fedstrata.clients.channel import Channel
from fedstrata.clients.chunk import choose_chunk
from fedstrata.clients.client import Listener, Setting
from fedstrata.clients.clients import Clients
from fedstrata.clients.distributed import Distributed
from fedstrata.clients.engine import Engine, Usage
from fedstrata.clients.faults import Faults, QuorumError
from fedstrata.clients.privacy import check_privacy, epsilon
from fedstrata.clients.queries import learn
from fedstrata.clients.ranks import ALONE, Ranks, ranks_here
from fedstrata.clients.simulated import Simulated
from fedstrata.clients.state import ClientState
from fedstrata.core.errors import Diverged, FedstrataError, InputError, invalid
from fedstrata.core.files import Row
from fedstrata.core.machine import prepared
from fedstrata.core.schedules import Clock
from fedstrata.data.federated import FederatedData
from fedstrata.data.sampling import SAMPLINGS, check_balanced
from fedstrata.problems.oracles import Oracles
from fedstrata.problems.problem import Problem
from fedstrata.training.callbacks import Callback
from fedstrata.training.checkpoint import Checkpoint
from fedstrata.training.fingerprint import digest_of, settings_of
from fedstrata.training.metrics.evaluation import Evaluation, measured_on
from fedstrata.training.metrics.measures import Measures
from fedstrata.training.rundir import RunDirectory
from fedstrata.training.settings import Settings, takes_settings
from fedstrata.training.states import shapes_of, state_of, tensors_of

Evaluate = Callable[[Problem, FederatedData, torch.Tensor, torch.Tensor | None], Measures]
MakeEngine = Callable[[Setting, Channel, Faults | None], Engine]
"""Makes the engine of a run, where clients are elsewhere."""


@dataclass(frozen=True, repr=False)
class Run:
    """A finished run.

    x, y:     the solution (y is None without a dual).
    history:  one row per evaluation: round, steps, samples, bytes_up, bytes_down, seconds, measures.
    summary:  the last row, what it was measured on, and what was chosen automatically.
    """

    x: torch.Tensor
    y: torch.Tensor | None
    history: list[Row]
    summary: Row
    problem: Problem

    def __repr__(self) -> str:
        measures = [f"{k} {v:.4g}" for k, v in self.history[-1].items() if k in ("loss", "accuracy", "auc")]
        return f"<Run of {self.summary['algorithm']} on {self.summary['data']}: {', '.join(measures)}>"

    def model(self) -> nn.Module:
        """Return the trained model as an ordinary module: the one at ``x``, before any steps inside the problem.

        For the one after them see :func:`fedstrata.training.metrics.evaluation.adapted_point`.
        """
        return self.problem.model(self.x)


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
    _check_settings(problem, data, algorithm, settings)
    _check_evaluation(problem, data, evaluate)
    if pretrain is not None and not isinstance(pretrain, Run):
        raise invalid("pretrain", type(pretrain).__name__, "the Run that came before, or left out")
    if resume and out is None:
        raise InputError("resume=True needs out: the run directory to go on with.")
    listeners = tuple(c.on_local_step for c in callbacks if c.wants_local_steps)
    ranks = ranks_here()
    if ranks.size > 1 and listeners:
        raise InputError("Diagnostics of local steps see one process only: run without torchrun, or without them.")
    check_pretraining(settings.channel, pretrain is not None)
    clients = _clients(problem, data, settings, out, listeners, ranks, engine)
    training = _Training(
        problem=clients.problem,
        data=clients.engine.setting.data,
        algorithm=algorithm,
        settings=settings,
        clients=clients,
        evaluation=Evaluation() if evaluate is None else evaluate,
        directory=None if out is None or not ranks.first else RunDirectory(out),
        callbacks=callbacks if ranks.first else (),
        pretrain=pretrain,
        ranks=ranks,
        kept=out is not None,
    )
    try:
        if out is not None:
            config = settings_of(problem, data, algorithm, settings) if config is None else config
            training.open({**config, "digest": digest_of(problem, data)}, resume)
        with torch.no_grad(), prepared(settings.threads):
            return training.run()
    finally:
        if training.directory is not None:
            training.directory.close()


def check_pretraining(channel: Channel, pretrains: bool) -> None:
    """Refuse noise for a run that starts from another one, which it does not cover."""
    if channel.noise and pretrains:
        raise InputError("The noise of a channel does not cover a pre-training: leave out one of the two.")


def check_run(
    problem: Problem, data: FederatedData, algorithm: Algorithm, evaluate: Evaluate | None, settings: Settings
) -> None:
    """Refuse what :func:`train` would refuse with these ``settings``; nothing is written."""
    _check_settings(problem, data, algorithm, settings)
    _check_evaluation(problem, data, evaluate)
    _clients(problem, data, settings, None)


@dataclass
class _Training:
    """One run under way."""

    problem: Problem
    data: FederatedData
    algorithm: Algorithm
    settings: Settings
    clients: Clients
    evaluation: Evaluate
    directory: RunDirectory | None
    callbacks: Sequence[Callback]
    pretrain: Run | None
    ranks: Ranks
    kept: bool
    state: Any = None
    history: list[Row] = field(default_factory=list)
    left_out: dict[int, int] = field(default_factory=dict)
    done: int = 0
    started: float = field(default_factory=time.perf_counter)

    def open(self, config: dict[str, Any], resume: bool) -> None:
        """Start a run directory, or take up the run that is in it where its last checkpoint left it."""
        saved = None if self.directory is None else self._opened(self.directory, config, resume)
        known: Any = saved and {"round": saved.round, "counts": saved.counts, "seconds": saved.seconds}
        known = self.ranks.told(known and {**known, "rows": self.history})
        if known is None:
            return
        tensors = self.ranks.tensors(saved.state if saved else None)
        self.state = state_of(self.algorithm, {k: v.to(self.problem.x0.device) for k, v in tensors.items()})
        for rows in self.ranks.stream(saved.rows if saved else ()):
            self.clients.engine.setting.state.load(rows, self.clients.engine.mine)
        self.clients.engine.restore(known["counts"].pop("engine"))
        self.clients.progress.iteration = known["counts"].pop("iteration")
        self.clients.usage = Usage(**known["counts"])
        self.clients.engine.saved(known["round"])
        self.done, self.history = known["round"], known["rows"]
        self.started -= known["seconds"]

    def _opened(self, directory: RunDirectory, config: dict[str, Any], resume: bool) -> Checkpoint | None:
        """Open the directory; return the checkpoint to go on from, with the history cut back to it, if there is one."""
        directory.open(config, resume)
        saved, damaged = directory.checkpoints.latest() if resume else (None, [])
        for warning in damaged:
            warnings.warn(warning, stacklevel=5)
        if saved is None:
            if any(row["round"] for row in directory.rows()):
                warnings.warn(f"No checkpoint in {directory.path} to go on from: starting at round 0.", stacklevel=5)
            directory.write_config(config)
            directory.truncate([])
            directory.truncate_faults(-1)
            return None
        rounds = self.settings.rounds
        if saved.round > rounds:
            raise invalid(
                "rounds", rounds, f"at least {saved.round}, which the run in {directory.path} has done already"
            )
        x, y = saved.state.get("x", saved.state.get("h.0")), saved.state.get("y")
        wanted = [self.problem.x0.shape, () if self.problem.y0 is None else self.problem.y0.shape]
        if [getattr(x, "shape", ()), () if y is None or not len(y) else y.shape] != wanted:
            folder = directory.checkpoints.folder
            raise InputError(f"The checkpoint in {folder} is not one of {self.algorithm.name} on this problem.")
        self.history = [r for r in directory.rows() if r["round"] <= saved.round]
        directory.write_config(config)
        directory.truncate(self.history)
        self.count_left_out(directory.truncate_faults(saved.round))
        return saved

    def run(self) -> Run:
        """Do the rounds that are left."""
        rounds, every = self.settings.rounds, self.settings.eval_every or max(1, self.settings.rounds // 20)
        result: Run | None = None
        try:
            self.prepare()
            for callback in self.callbacks:
                callback.on_start(self.algorithm.name, self.done, rounds, self._note())
            if not self.history:
                self.measure()
            while self.done < rounds:
                self.round()
                if self.done % every == 0 or self.done == rounds:
                    self.measure()
                if self.done % self.settings.checkpoint_every == 0 or self.done == rounds:
                    self.save()
            result = Run(*self.solution(), self.history, self.summary(), self.problem)
            if self.directory is not None:
                _finish(self.directory, result, tensors_of(self.algorithm, self.state))
        except QuorumError as error:
            self.tell_faults()
            raise QuorumError(f"{error}{_kept(self.directory)}") from None
        finally:
            for callback in self.callbacks:
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
            self.move_on(self.done - 1)
        else:
            self.move_on(0)
            x, y = self.problem.x0.clone(), self.problem.y0
            self.state = self.algorithm.start(x, x[:0] if y is None else y.clone(), self.clients)
            tensors_of(self.algorithm, self.state)

    def adopt(self, problem: Problem) -> None:
        """Go on with another problem: clients and measures with it."""
        self.problem = problem
        self.clients.engine.adopt(problem)

    def move_on(self, number: int) -> None:
        """Go on with the problem as it is in a round: rates inside it may follow a schedule, its t is the round."""
        if self.problem.at is not None:
            now = self.problem.at(self.problem, Clock(number, self.settings.rounds, 0, number))
            if now is not self.problem:
                self.adopt(now)

    def round(self) -> None:
        """Do one round."""
        self.clients.begin(self.done)
        self.move_on(self.done)
        state = self.algorithm.round(self.state, self.clients)
        self.tell_faults()
        got, wants = (shapes_of(tensors_of(self.algorithm, s)) for s in (state, self.state))
        if got != wants:
            raise FedstrataError(f"round of {self.algorithm.name} must return a State of {wants}. Got {got}.")
        self.done += 1
        _check_finite(state, self.algorithm, self.done, self.directory)
        self.state = state
        for callback in self.callbacks:
            callback.on_round(self.done, state)

    def tell_faults(self) -> None:
        """Write down, and tell, which clients were left out."""
        faults = self.clients.faults[:]
        if not faults:
            return
        self.clients.faults.clear()
        names = self.data.client_names
        rows = [fault.row() | ({"name": names[fault.client]} if names else {}) for fault in faults]
        self.count_left_out(rows)
        if self.directory is not None:
            self.directory.append_faults(rows)
        for callback in self.callbacks:
            callback.on_faults(faults, names)

    def count_left_out(self, rows: list[Row]) -> None:
        """Count in how many exchanges each client was left out."""
        for _, _, client in {(r["round"], r["exchange"], r["client"]) for r in rows if r["left_out"]}:
            self.left_out[client] = self.left_out.get(client, 0) + 1

    def measure(self) -> None:
        """Evaluate, and write the row down."""
        row: Row = {"round": self.done, **self.used()}
        if self.ranks.first:
            measures = self.evaluation(self.problem, self.data, *self.solution())
            row["sound"] = math.isfinite(measures.get("loss", 0.0))
            row |= {k: float(v) for k, v in measures.items() if math.isfinite(v)}
        row = self.ranks.told(row)
        if not row.pop("sound"):
            raise Diverged(_diverged(self.algorithm, self.done, "the loss is NaN or infinite", self.directory))
        self.history.append(row)
        if self.directory is not None:
            self.directory.append(row)
        for callback in self.callbacks:
            callback.on_evaluation(row)

    def solution(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the solution that the state stands for: x, and y where there is a dual."""
        x, y = self.algorithm.solution(self.state)
        return x, y if self.problem.dual else None

    def save(self) -> None:
        """Write a checkpoint; after the round's row, which a resumed run cuts back to the checkpoint."""
        if not self.kept:
            return
        mine = self.clients.engine.setting.state
        total = sum(self.ranks.all(mine.count()))
        anew = self.ranks.told(self.directory and self.directory.checkpoints.wants_all(total))
        rows = self.ranks.collected(mine.take_all() if anew else [mine.take_changes()])
        if self.directory is None:
            for _ in rows:
                pass
        else:
            counts: dict[str, Any] = dataclasses.asdict(self.clients.usage)
            counts |= {"iteration": self.clients.progress.iteration, "engine": self.clients.engine.extra()}
            tensors = {name: tensor.clone() for name, tensor in tensors_of(self.algorithm, self.state).items()}
            self.directory.checkpoints.save(Checkpoint(self.done, tensors, counts, self.seconds(), rows), anew)
        self.clients.engine.saved(self.done)

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
        summary |= {"chunk": min(self.clients.engine.chunk, self.clients.sampled), **self.history[-1]}
        if self.pretrain is not None:
            last = dict(self.pretrain.history[-1])
            summary["pretrain"] = {"algorithm": self.pretrain.summary["algorithm"], "rounds": last.pop("round"), **last}
        if self.data.client_names:
            summary["client_names"] = list(self.data.client_names)
        if self.settings.channel.noise:
            summary["delta"] = self.settings.channel.delta
        if self.settings.faults is not None:
            names = self.data.client_names or [f"client {k}" for k in range(self.data.clients)]
            summary["left_out"] = {names[k]: n for k, n in sorted(self.left_out.items())}
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


def _check_settings(problem: Problem, data: FederatedData, algorithm: Algorithm, settings: Settings) -> None:
    if not isinstance(problem, Problem):
        raise invalid("problem", type(problem).__name__, "a fedstrata Problem, e.g. fs.erm(model)")
    if not isinstance(data, FederatedData):
        raise invalid("data", type(data).__name__, "FederatedData: call .split(...) on a data set first")
    if not isinstance(algorithm, Algorithm):
        raise invalid("algorithm", repr(algorithm), "an Algorithm, e.g. fs.FedAvg(lr=0.1)")
    if problem.check is not None:
        problem.check(data)
    sampling = settings.sampling
    if sampling == "balanced" and not problem.takes_weights:
        fit = ", ".join(name for name, kind in SAMPLINGS.items() if not kind.weighted)
        raise invalid("sampling", sampling, f"one of {fit}: the problem {problem.name} takes no weights of samples")
    if sampling in ("stratified", "balanced") and not data.classes:
        raise InputError(f"The sampling {sampling!r} needs classes, which the data {data.name!r} do not have.")
    if sampling == "balanced" and settings.batch_size is not None:
        for level in range(0 if problem.outer_draws else 1, 1 + len(problem.levels)):
            check_balanced(settings.batch_size, data.part(level).class_counts, np.arange(data.clients))
    if problem.mixture and problem.y0 is not None and len(problem.y0) != data.clients:
        raise invalid(f"length of y0 of the problem {problem.name}", len(problem.y0), f"{data.clients}, one per client")
    per_client = problem.numbered and problem.y0 is not None and len(problem.y0) == data.clients
    if per_client and settings.weighting == "samples" and not algorithm.mixture:
        why = f"the dual of the problem {problem.name} has an entry for each client, and means would weigh them twice"
        raise invalid("weighting", "samples", f"'uniform': {why}")
    algorithm.check(problem, settings.participation, data.clients)
    check_passage(settings, data.clients)
    if algorithm.auxiliary:
        _check_auxiliary(algorithm, data)
    if problem.flat is None and problem.query is None:
        _try_out(problem, data)


def check_passage(settings: Settings, clients: int) -> None:
    """Refuse noise without an accountant, and injected faults of clients that do not exist."""
    check_privacy(settings.channel)
    inject = None if settings.faults is None else settings.faults.inject
    for client in () if inject is None else inject.clients:
        if client >= clients:
            raise invalid("clients of the injected faults", client, f"from 0 to {clients - 1}")


def _check_auxiliary(algorithm: Algorithm, data: FederatedData) -> None:
    if data.classes < 2:
        raise invalid(f"number of classes for {algorithm.name}", data.classes, "at least 2: it weighs classes")
    if data.auxiliary is None:
        raise InputError(
            f"{algorithm.name} needs samples on the server, some of every class (data {data.name!r} have none there): "
            "split with auxiliary=8 (data.auxiliary in a file), which takes so many rows of each class from the "
            "clients, or give it others with with_auxiliary(inputs, targets)."
        )


def _try_out(problem: Problem, data: FederatedData) -> None:
    """Refuse a user's functions that fail on a few samples, or give no number, before a hundred clients do."""
    two, three = (_sizes_on(problem, data, samples) for samples in (2, 3))
    for k, (size, other) in enumerate(zip(two, three, strict=True), 1):
        if size != other:
            got = f"{size} numbers for 2 samples, {other} for 3"
            what = f"value of level {k} of the problem {problem.name}"
            raise invalid(what, got, "a vector of one length: a mean over the samples")


@torch.no_grad()
def _sizes_on(problem: Problem, data: FederatedData, samples: int) -> list[int]:
    """Return how many numbers each level gives for so many samples, and refuse what no function may give."""

    def batch(level: int) -> tuple[torch.Tensor, ...]:
        if level == 0 and not problem.outer_draws:
            return (torch.tensor(0),) if problem.numbered else ()
        rows = np.zeros((1, samples), dtype=np.int64)
        part = data.part(level).gather(np.zeros(1, dtype=np.int64), rows, None, False)
        arrays = tuple(a[0].to(problem.x0.dtype) if a.is_floating_point() else a[0] for a in part.parts[0])
        return (*arrays, torch.tensor(0)) if level == 0 and problem.numbered else arrays

    u, what, level_of, sizes = problem.x0, f"outer function of the problem {problem.name}", 0, []
    try:
        for k, level in enumerate(problem.levels, 1):
            what, level_of = f"level {k} of the problem {problem.name}", k
            u = level(u, batch(k))
            if not isinstance(u, torch.Tensor) or u.dim() != 1:
                got = f"shape {tuple(u.shape)}" if isinstance(u, torch.Tensor) else type(u).__name__
                raise invalid(f"value of {what}", got, "a vector (1-d)")
            sizes.append(len(u))
        what, level_of = f"outer function of the problem {problem.name}", 0
        value = problem.outer(u, *(() if problem.y0 is None else (problem.y0,)), batch(0))
    except InputError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        shapes = ", ".join(str(tuple(a.shape)) for a in batch(level_of))
        dual = "" if problem.y0 is None or level_of else f", y of {len(problem.y0)}"
        drawn = f"a batch of shapes {shapes}" if shapes else "an empty batch (outer_draws is false)"
        given = f"{'u' if sizes else 'x'} of {len(u)} numbers{dual}, and {drawn}"
        raise InputError(f"The {what} fails, given {given}: {str(error).splitlines()[0]}") from error
    if not isinstance(value, torch.Tensor) or value.dim() != 0:
        got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise invalid(f"value of the {what}", got, "a single number, a tensor of shape ()")
    return sizes


def _check_evaluation(problem: Problem, data: FederatedData, evaluate: Evaluate | None) -> None:
    if isinstance(evaluate, Evaluation):
        evaluate.part(data)
        evaluate.adaptation(problem)
        evaluate.attacks(problem, data.train.arrays[0])


def _clients(
    problem: Problem,
    data: FederatedData,
    settings: Settings,
    out: str | Path | None,
    listeners: tuple[Listener, ...] = (),
    ranks: Ranks = ALONE,
    make_engine: MakeEngine | None = None,
) -> Clients:
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


def _check_finite(state: Any, algorithm: Algorithm, round: int, directory: RunDirectory | None) -> None:
    for name, value in tensors_of(algorithm, state).items():
        if not bool(torch.isfinite(value).all()):
            bad = int((~torch.isfinite(value)).sum())
            what = f"{bad} of {value.numel()} entries of {name} are NaN or infinite"
            raise Diverged(_diverged(algorithm, round, what, directory))


def _diverged(algorithm: Algorithm, round: int, what: str, directory: RunDirectory | None) -> str:
    told = f"{algorithm.name} diverged in round {round}: {what}. A smaller learning rate is the usual remedy."
    return told + _kept(directory)


def _kept(directory: RunDirectory | None) -> str:
    """Say where the last good checkpoint is, if there is one."""
    if directory is None or not any(directory.checkpoints.folder.glob("round-*.json")):
        return ""
    return f" The last good checkpoint is kept in {directory.path}."


def _finish(directory: RunDirectory, run: Run, state: dict[str, torch.Tensor]) -> None:
    from fedstrata.training.plots import plot

    tensors = (
        run.problem.flat.state_dict(run.x[: run.problem.flat.size])
        if run.problem.flat
        else {k: v.clone() for k, v in state.items()}
    )
    directory.write_model(tensors)
    directory.write_summary(run.summary)
    plot({run.summary["algorithm"]: [run.history]}, directory.path / "plot.png")
