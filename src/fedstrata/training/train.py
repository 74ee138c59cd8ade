"""Training a problem on data with an algorithm: ``fs.train``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedstrata.algorithms.algorithm import Algorithm
from fedstrata.clients.channel import Channel
from fedstrata.clients.chunk import choose_chunk
from fedstrata.clients.client_side import ClientSide, Listener
from fedstrata.clients.clients import Clients
from fedstrata.clients.distributed import Distributed
from fedstrata.clients.engine import Engine, Learned
from fedstrata.clients.faults import Faults
from fedstrata.clients.ranks import ALONE, Ranks, ranks_here
from fedstrata.clients.simulated import Simulated
from fedstrata.clients.state import ClientState
from fedstrata.core.errors import InputError, invalid
from fedstrata.core.files import folder_at
from fedstrata.core.machine import prepared
from fedstrata.data.federated import FederatedData
from fedstrata.data.sampling import SAMPLINGS
from fedstrata.problems.graphs.compiler import Compiler
from fedstrata.problems.oracles import Oracles
from fedstrata.problems.precision import AUTOCASTS
from fedstrata.problems.problem import Problem
from fedstrata.training.callbacks import Callback
from fedstrata.training.fingerprint import digest_of, settings_of
from fedstrata.training.journal import Journal
from fedstrata.training.loop import Loop
from fedstrata.training.metrics.evaluation import Evaluate, Evaluation
from fedstrata.training.preflight import check_run, device_of
from fedstrata.training.run import Run
from fedstrata.training.rundir import RunDirectory
from fedstrata.training.settings import Settings, takes_settings
from fedstrata.training.stopping import with_validation
from fedstrata.training.waiting import divides, follow, lead

MakeEngine = Callable[[ClientSide, Channel, Faults | None], Engine]
"""Makes the engine of a run whose clients are not in this process."""


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
    out:       the run directory; it must be new, or with ``resume`` hold the run to resume.
    resume:    resume from the last checkpoint; ``rounds`` may grow, which stretches schedules in fractions of training.
    callbacks: listeners: progress, loggers, diagnostics.
    config:    what to write to config.toml; by default the settings of this call.
    pretrain:  the run that trained the problem's model, if any: what it used is added to every row.
    engine:    makes the engine if clients are elsewhere; by default they are in this process or its ranks.
    """
    if pretrain is not None and not isinstance(pretrain, Run):
        raise invalid("pretrain", type(pretrain).__name__, "the Run that came before, or left out")
    check_run(problem, data, algorithm, settings, evaluate, pretrains=pretrain is not None)
    if resume and out is None:
        raise InputError("resume=True needs out: the run directory to resume.")
    out = None if out is None else folder_at(out)
    config = settings_of(problem, data, algorithm, settings, evaluate) if config is None else config
    evaluation = Evaluation() if evaluate is None else evaluate

    def run(ranks: Ranks, more: Sequence[Callback] = ()) -> tuple[Run, Sequence[Learned]]:
        listeners = tuple(c.on_local_step for c in callbacks if c.wants_local_steps)
        if ranks.size > 1 and listeners:
            raise InputError(
                "Diagnostics of local steps work in one process only: run without torchrun, or without them."
            )
        own, validation = with_validation(data, settings, elsewhere=engine is not None)
        clients = make_clients(problem, own, settings, out, listeners, ranks, engine)
        directory = None if out is None or not ranks.first else RunDirectory(out)
        journal = Journal(directory, [*callbacks, *more] if ranks.first else (), ranks, kept=out is not None)
        clients.unmarked = set()
        loop = Loop(algorithm, settings, clients, evaluation, journal, pretrain, validation)
        try:
            if out is not None:
                saved = journal.open(
                    {**config, "digest": {**config.get("digest", {}), **digest_of(problem, own)}},
                    resume,
                    settings.rounds,
                    own.clients,
                )
                if saved is not None:
                    loop.restore(saved)
            with torch.no_grad(), prepared(settings.threads):
                return loop.run(), clients.engine.learned
        finally:
            if directory is not None:
                directory.close()

    ranks = ranks_here()
    if ranks.size == 1 or divides(problem, data, algorithm, settings):
        return run(ranks)[0]
    return lead(ranks, partial(run, ALONE)) if ranks.first else follow(ranks, problem, data, settings)


def make_clients(
    problem: Problem,
    data: FederatedData,
    settings: Settings,
    out: str | Path | None = None,
    listeners: tuple[Listener, ...] = (),
    ranks: Ranks = ALONE,
    make_engine: MakeEngine | None = None,
) -> Clients:
    """Return the clients of a run, on its device, with the engine that fits the ranks."""
    device = device_of(settings, problem)
    problem = problem.to(device)
    data = data.to(device, problem.x0.dtype)
    side = ClientSide(
        oracles=Oracles(problem, Compiler() if settings.compile else None, AUTOCASTS[settings.autocast]),
        data=data,
        sampling=SAMPLINGS[settings.sampling],
        batch_size=settings.batch_size,
        seed=settings.seed,
        state=ClientState(data.clients, settings.state_memory, None if out is None else Path(out)),
        listeners=listeners,
    )
    channel, faults = settings.channel, settings.faults
    if make_engine is not None:
        engine = make_engine(side, channel, faults)
    else:
        chunk = choose_chunk(settings.chunk, problem, data, side.batch_size, device)
        if ranks.size > 1:
            engine = Distributed(side, chunk, channel, faults, ranks=ranks)
        else:
            engine = Simulated(side, chunk, channel, faults)
    return Clients(engine, settings.rounds, settings.participation, settings.weighting)
