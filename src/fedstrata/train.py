"""Training: the one loop that every algorithm, problem and engine goes through."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedstrata.algorithms.base import Algorithm, State
from fedstrata.callbacks import Callback
from fedstrata.checkpoint import Checkpoint
from fedstrata.clients.base import Weighting
from fedstrata.clients.chunk import choose_chunk
from fedstrata.clients.client import Counts, Setting
from fedstrata.clients.simulated import SimulatedClients
from fedstrata.clients.state import ClientState
from fedstrata.data.federated import FederatedData
from fedstrata.data.sampling import sampling as sampling_named
from fedstrata.errors import Diverged, InputError, invalid
from fedstrata.metrics import Evaluation, Measures, measured_on
from fedstrata.oracles import Oracles
from fedstrata.problem import Problem
from fedstrata.rundir import Row, RunDirectory

Evaluate = Callable[[Problem, FederatedData, torch.Tensor, torch.Tensor | None], Measures]


@dataclass(frozen=True)
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

    def model(self) -> nn.Module:
        """Return the trained model as an ordinary module."""
        return self.problem.model(self.x)


def train(
    problem: Problem,
    data: FederatedData,
    algorithm: Algorithm,
    *,
    rounds: int,
    batch_size: int | None = None,
    participation: int | float = 1.0,
    weighting: Weighting = "uniform",
    sampling: str = "uniform",
    seed: int = 0,
    chunk: int | str = "auto",
    threads: int | None = None,
    device: str = "cpu",
    evaluate: Evaluate | None = None,
    eval_every: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    checkpoint_every: int = 1,
    state_memory: int = 4 << 30,
    callbacks: Sequence[Callback] = (),
    config: dict[str, Any] | None = None,
) -> Run:
    """Train ``problem`` on ``data`` with ``algorithm`` for ``rounds`` rounds.

    batch_size:        samples per client and step; None is the client's whole data in each step.
    participation:     the share (float) or number (int) of clients that take part in a round.
    weighting:         "uniform" or "samples": how the mean over clients weighs them.
    sampling:          how batches are drawn: "uniform", "epochs" (shuffled passes) or "stratified" (by class).
    chunk:             how many clients advance together; "auto" follows the rule in ``fedstrata.clients.chunk``.
    threads:           torch threads during the run; None leaves them alone.
    evaluate:          ``(problem, data, x, y) -> {name: number}``; an :class:`Evaluation` by default.
    eval_every:        rounds between evaluations, twenty over the run by default; the first and the last always count.
    out:               the run directory; it must be new, unless ``resume`` goes on with the run that is there.
    checkpoint_every:  rounds between checkpoints.
    state_memory:      bytes of client state (per kept name) above which it lives in a memory-mapped file.
    callbacks:         listeners: progress, loggers.
    config:            what to write to config.toml; by default what this function knows.
    """
    settings = {k: v for k, v in locals().items() if k in _SETTINGS}
    _check_settings(problem, data, algorithm, settings)
    setting, clients = _clients(problem, data, settings, out)
    problem, data = setting.oracles.problem, setting.data
    evaluation: Evaluate = Evaluation() if evaluate is None else evaluate
    directory = None if out is None else RunDirectory(out)
    if resume and directory is None:
        raise InputError("resume=True needs out: the run directory to go on with.")
    state = algorithm.init(problem)
    history: list[Row] = []
    done, seconds = 0, 0.0
    if directory is not None:
        config = _config(problem, data, algorithm, settings) if config is None else config
        directory.open(config, resume)
        saved = _resume(directory, setting, algorithm, state, torch.device(device)) if resume else None
        if saved is not None:
            done, seconds, state = saved.round, saved.seconds, State(**saved.state)
            if done > rounds:
                raise invalid("rounds", rounds, f"at least {done}, which the run in {out} has done already")
            directory.write_config(config)
            history = [r for r in directory.rows() if r["round"] <= done]
            directory.truncate(history)
    every = max(1, rounds // 20) if eval_every is None else eval_every
    together = min(clients.chunk, clients.sampled)
    note = f"{clients.sampled} of {data.clients} clients a round, {together} at a time (chunk = {chunk})"
    run: Run | None = None
    started = time.perf_counter() - seconds

    def measure(round: int) -> None:
        measures = evaluation(problem, data, state.x, state.get("y"))
        row: Row = {"round": round, **dataclasses.asdict(setting.counts)}
        row["seconds"] = round_seconds(time.perf_counter() - started)
        row |= {k: float(v) for k, v in measures.items() if v == v and abs(v) != float("inf")}
        history.append(row)
        if directory is not None:
            directory.append(row)
        for callback in callbacks:
            callback.on_evaluation(row)

    try:
        with torch.no_grad(), _threads(threads):
            for callback in callbacks:
                callback.on_start(algorithm.name, done, rounds, note)
            if not history:
                measure(done)
            for number in range(done, rounds):
                clients.begin(number)
                state = algorithm.round(state, clients)
                _check_finite(state, algorithm, number + 1, directory)
                for callback in callbacks:
                    callback.on_round(number + 1, state)
                if (number + 1) % every == 0 or number + 1 == rounds:
                    measure(number + 1)
                if directory is not None and ((number + 1) % checkpoint_every == 0 or number + 1 == rounds):
                    spent = time.perf_counter() - started
                    checkpoint = Checkpoint(number + 1, dict(state), dataclasses.asdict(setting.counts), spent)
                    directory.checkpoints.save(checkpoint, setting.state)
            summary = _summary(problem, data, algorithm, evaluation, state, history, settings, together)
        run = Run(state.x, state.get("y"), history, summary, problem)
        if directory is not None:
            _finish(directory, run, state)
    finally:
        for callback in callbacks:
            callback.on_end(run)
    return run


_SETTINGS = (
    *("rounds", "batch_size", "participation", "weighting", "sampling", "seed", "chunk", "threads", "device"),
    *("eval_every", "checkpoint_every", "state_memory"),
)


def round_seconds(seconds: float) -> float:
    """Return seconds to the millisecond."""
    return round(seconds, 3)


def _check_settings(problem: Problem, data: FederatedData, algorithm: Algorithm, settings: dict[str, Any]) -> None:
    if not isinstance(problem, Problem):
        raise invalid("problem", type(problem).__name__, "a fedstrata Problem, e.g. fs.erm(model)")
    if not isinstance(data, FederatedData):
        raise invalid("data", type(data).__name__, "FederatedData: call .split(...) on a data set first")
    if not isinstance(algorithm, Algorithm):
        raise invalid("algorithm", repr(algorithm), "an Algorithm, e.g. fs.FedAvg(lr=0.1)")
    for name in ("rounds", "batch_size", "threads", "eval_every", "checkpoint_every", "state_memory"):
        value = settings[name]
        if value is None and name in ("batch_size", "threads", "eval_every"):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise invalid(name, value, "a whole number of at least 1")
    seed = settings["seed"]
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise invalid("seed", seed, "a whole number of at least 0")
    if problem.check is not None:
        problem.check(data)
    algorithm.check(problem, settings["participation"], data.clients)


def _clients(
    problem: Problem, data: FederatedData, settings: dict[str, Any], out: str | Path | None
) -> tuple[Setting, SimulatedClients]:
    try:
        device = torch.device(settings["device"])
        problem = problem.to(device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InputError(f"The device {settings['device']!r} cannot be used: {error}") from None
    data = data.to(device, problem.x0.dtype)
    setting = Setting(
        oracles=Oracles(problem),
        data=data,
        sampling=sampling_named(settings["sampling"]),
        batch_size=settings["batch_size"],
        seed=settings["seed"],
        rounds=settings["rounds"],
        state=ClientState(data.clients, settings["state_memory"], None if out is None else Path(out)),
        counts=Counts(),
    )
    chunk = choose_chunk(settings["chunk"], problem, data, setting.batch_size, device)
    return setting, SimulatedClients(setting, settings["participation"], settings["weighting"], chunk)


@contextmanager
def _threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_finite(state: State, algorithm: Algorithm, round: int, directory: RunDirectory | None) -> None:
    for name, value in state.items():
        if not bool(torch.isfinite(value).all()):
            bad = int((~torch.isfinite(value)).sum())
            kept = "" if directory is None else f" The last good checkpoint is kept in {directory.checkpoints.folder}."
            raise Diverged(
                f"{algorithm.name} diverged in round {round}: {bad} of {value.numel()} entries of {name} are NaN or "
                f"infinite. A smaller learning rate is the usual remedy.{kept}"
            )


def _config(problem: Problem, data: FederatedData, algorithm: Algorithm, settings: dict[str, Any]) -> dict[str, Any]:
    digest = blake2b(data.sizes.tobytes(), digest_size=8).hexdigest()
    return {
        "train": {k: v for k, v in settings.items() if v is not None},
        "algorithm": describe(algorithm),
        "problem": {"name": problem.name, "size": len(problem.x0)},
        "data": {"name": data.name, "clients": data.clients, "sizes_digest": digest},
    }


def describe(algorithm: Algorithm) -> dict[str, Any]:
    """Return an algorithm as the table of a configuration file that builds it again."""
    table: dict[str, Any] = {"name": algorithm.name}
    for field in dataclasses.fields(algorithm):  # type: ignore[arg-type]
        value = getattr(algorithm, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            named = {"schedule": value.name} if hasattr(value, "name") else {}
            value = {**named, **dataclasses.asdict(value)}
        table[field.name] = value
    return table


def _resume(
    directory: RunDirectory, setting: Setting, algorithm: Algorithm, state: State, device: torch.device
) -> Checkpoint | None:
    saved, damaged = directory.checkpoints.latest()
    for warning in damaged:
        warnings.warn(warning, stacklevel=3)
    if saved is None:
        if directory.rows():
            directory.truncate([])
        return None
    if {k: v.shape for k, v in saved.state.items()} != {k: v.shape for k, v in state.items()}:
        raise InputError(
            f"The checkpoint in {directory.checkpoints.folder} is not one of {algorithm.name} on this problem."
        )
    saved.state = {k: v.to(device) for k, v in saved.state.items()}
    for rows in saved.rows:
        setting.state.load(rows)
    for name, value in saved.counts.items():
        setattr(setting.counts, name, value)
    return saved


def _summary(
    problem: Problem,
    data: FederatedData,
    algorithm: Algorithm,
    evaluation: Evaluate,
    state: State,
    history: list[Row],
    settings: dict[str, Any],
    chunk: int,
) -> Row:
    summary: Row = {"status": "finished", "algorithm": algorithm.name, "problem": problem.name, "data": data.name}
    summary |= {"clients": data.clients, "seed": settings["seed"], "chunk": chunk, **history[-1]}
    if isinstance(evaluation, Evaluation):
        summary["measured_on"] = measured_on(data, evaluation)
        per_client = evaluation.per_client(problem, data, state.x)
        summary["per_client"] = {k: [None if v != v else float(v) for v in vs] for k, vs in per_client.items()}
    return summary


def _finish(directory: RunDirectory, run: Run, state: State) -> None:
    from fedstrata.plots import plot

    tensors = run.problem.flat.state_dict(run.x[: run.problem.flat.size]) if run.problem.flat else dict(state)
    directory.write_model(tensors)
    directory.write_summary(run.summary)
    plot({run.summary["algorithm"]: [run.history]}, directory.path / "plot.png")
