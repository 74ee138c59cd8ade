"""What the ranks of test_distributed.py do, and what a process alone does for comparison.

``work`` is the whole life of a rank: it goes through all tasks. Tasks of one block share a process group, so what goes
wrong in one block leaves the others alone.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import fedstrata as fs
from augmented import augmented_example
from cases import changed_settings
from clients.failing import Failing
from fedstrata.algorithms import ALGORITHMS
from fedstrata.clients import Client, Clients, Simulated
from fedstrata.clients.channel import PLAIN
from fedstrata.clients.distributed import Distributed
from fedstrata.clients.ranks import ALONE, Ranks, ranks_here
from fedstrata.core.clock import Clock
from fedstrata.core.schedules import CubeRoot, Epochs, Interval, RoundDecay
from fedstrata.experiments.config import read
from fedstrata.experiments.runs import run_config
from fedstrata.problems.oracles import Oracles
from fedstrata.problems.runner import Runner
from fedstrata.training.states import tensors_of
from masked import Masked, sites
from saddle_worlds import SADDLES
from support import example_for, make_setting, mixture_of, sized_data, smooth_example, started

LARGEST = 3
Tensors = dict[str, torch.Tensor]


# --- rounds without a training loop ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Some rounds of an algorithm on a small problem."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    problem: str = "example"
    dtype: torch.dtype = torch.float64
    participation: int | float = 1.0
    weighting: str = "uniform"
    clients: int = 7
    rounds: int = 3
    ranks: int = 2
    chunk: int = 7
    channel: fs.Channel = PLAIN
    faults: fs.Faults | None = None

    @property
    def algorithm(self) -> fs.Algorithm:
        kind = ALGORITHMS[self.name]
        short: dict[str, Any] = {} if "steps" in self.options or self.name == "afl" else {"steps": 2}
        return kind(**short, **self.options)

    @property
    def id(self) -> str:
        options = "".join(f" {k}={v}" for k, v in self.options.items())
        where = "" if self.problem == "example" else f" on {self.problem}"
        dtype = "" if self.dtype == torch.float64 else " float32"
        share = f"{self.clients if self.participation == 1.0 else self.participation} of {self.clients}"
        through = "" if self.channel == PLAIN else f", {changed_settings(self.channel)}"
        through += "" if self.faults is None else f", {changed_settings(self.faults.inject)}"
        return f"{self.name}{options}{where}{dtype}: {share}, {self.weighting}, {self.ranks} ranks{through}"

    def build(self) -> tuple[fs.Problem, fs.FederatedData]:
        if self.problem in SADDLES:
            world = SADDLES[self.problem]()
            return world.problem, world.data
        if self.problem in OTHERS:
            return OTHERS[self.problem]()
        problem, data = example_for(ALGORITHMS[self.name], self.dtype, 1 if self.problem == "composition" else None)
        return (problem, data) if self.clients == data.clients else alone(self.dtype, self.name)


@functools.cache
def alone(dtype: torch.dtype, name: str) -> tuple[fs.Problem, fs.FederatedData]:
    """The example of an algorithm with a single client, so that one rank never has any."""
    problem, _ = example_for(ALGORITHMS[name], dtype)
    data = sized_data([9], features=4, classes=3)
    return (mixture_of(smooth_example(dtype)[0], 1) if ALGORITHMS[name].mixture else problem), data


@functools.cache
def robust() -> tuple[fs.Problem, fs.FederatedData]:
    """A problem that asks all clients for their losses before the first round."""
    problem, data = smooth_example()
    assert problem.flat is not None
    return fs.robust(problem.flat.module), data


@functools.cache
def adapting() -> tuple[fs.Problem, fs.FederatedData]:
    """A problem that changes in every round: its inner rate follows a schedule."""
    problem, data = smooth_example()
    assert problem.flat is not None
    return fs.maml(problem.flat.module, inner_lr=RoundDecay(0.2, 0.5)), data


@functools.cache
def masked() -> tuple[fs.Problem, fs.FederatedData]:
    """A problem whose model takes two inputs."""
    return fs.maml(Masked(3), inner_lr=0.2), sites()[0]


OTHERS: dict[str, Callable[[], tuple[fs.Problem, fs.FederatedData]]] = {
    "robust": robust,
    "maml": adapting,
    "masked": masked,
    "random layers": functools.cache(augmented_example),
}

CHANNELS = [
    fs.Channel(clip=0.01),
    fs.Channel(bound=0.01),
    fs.Channel(compress="top_k", top=0.3),
    fs.Channel(compress="quantise"),
    fs.Channel(reduce="median"),
    fs.Channel(clip=0.1, noise=0.5),
]

FAULTS = fs.Faults(quorum=1, retries=1, inject=fs.Inject(drop=0.3, nan=0.1, garbage=0.1, scale=0.1, factor=2.0, seed=3))


RETRIES = fs.Faults(quorum=6, retries=9, inject=fs.Inject(drop=0.3, crash=0.2, scale=0.1, factor=2.0, seed=1))
"""Faults after which most clients are asked again, some of them several times."""


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in sorted(ALGORITHMS)),
    ("fedavg", {"steps": Epochs(1.5)}),
    ("fedavg", {"steps": Interval(1, 1.5)}),
    ("fedlalr", {"aggregate": "max"}),
    ("fedlalr", {"restart": True}),
    ("fedlalr", {"restart": True, "aggregate": "max"}),
    ("lafedopt", {"correction": "local"}),
    ("lafedopt", {"correction": "none", "server": "adam"}),
    ("mfcgd", {"jacobian": "product"}),
    ("adamfcgd", {"matrix": "belief"}),
    ("adamfcgd", {"matrix": "norm"}),
    ("fednest", {"inner_rounds": 3}),
    ("local_sgdam", {"average_momentum": False}),
    ("sagda", {"control": False}),
    ("codasca", {"control": False}),
    ("codasca", {"stage_rounds": 2}),
    ("coda", {"stage_steps": 4, "factor": 1.5}),
    ("coda", {"stage_steps": 4, "factor": 1.5, "average": False}),
    ("fgda", {"synchronisation": "single"}),
    ("adafgda", {"synchronisation": "single"}),
    ("adafgda", {"matrix": "belief"}),
    ("adafgda", {"matrix": "norm"}),
    ("cdma", {"ada": True}),
]

SPECIAL: list[Case] = [
    *(Case("fednest", {"inner_rounds": t}, "composition", weighting="samples") for t in (1, 3)),
    *(Case("comfedl", {"normalise": n}, "robust", participation=3) for n in (True, False)),
    Case("mfcgd", {}, "robust", weighting="samples"),
    Case("comfedl", {}, "maml", participation=3, rounds=2),
    Case("comfedl", {}, "masked", clients=5, weighting="samples"),
    *(Case("scaffold", {}, "random layers", participation=p, ranks=n) for p, n in ((1.0, 2), (4, 3))),
    Case("fedlalr", {"aggregate": "max"}, participation=1),
    Case("coda", {"stage_steps": 4, "factor": 1.5}, "auc, prepared, scaled", clients=5, weighting="samples"),
    Case("codasca", {"stage_rounds": 2}, "auc, prepared, scaled", clients=5),
    Case("local_sgda", {}, "auc, prepared, scaled", clients=5, participation=2, weighting="samples"),
    Case("local_sgda", {}, "fair, classes", clients=5, participation=2),
    Case("local_sgdam", {}, "fair, clients", clients=5),
    Case("fedlalr", {"aggregate": "max"}, participation=2, ranks=3),
    Case("scaffold", {}, participation=4, rounds=8, weighting="samples", ranks=3),
    Case("drfa", {}, participation=2, ranks=3),
    Case("local_sgdm_rl", {}, participation=2, ranks=3),
    *(Case(name, {}, ranks=3) for name in ("afl", "fgda", "qfedavg")),
    *(Case("scaffold", {}, weighting="uniform" if c.noise else "samples", channel=c) for c in CHANNELS),
    Case("fedlalr", {"aggregate": "max"}, channel=fs.Channel(compress="top_k", top=0.3)),
    *(Case("fedavg", {}, participation=3, channel=fs.Channel(clip=0.1, noise=1.0), ranks=n) for n in (2, 3)),
    *(Case(name, {}, faults=FAULTS) for name in ("scaffold", "fgda", "afl", "fednest")),
    Case("scaffold", {}, participation=3, weighting="samples", ranks=3, faults=FAULTS),
    Case("fedavg", {}, channel=fs.Channel(reduce="trimmed_mean", trim=0.3), faults=FAULTS, ranks=3),
    *(Case(name, {}, faults=RETRIES, ranks=n) for name in ("scaffold", "afl", "drfa") for n in (2, 3)),
    Case("scaffold", {}, channel=fs.Channel(compress="top_k", top=0.3), faults=RETRIES, weighting="samples"),
]


def cases() -> dict[str, Case]:
    """All cases by their names."""
    found = []
    for name, options in VARIANTS:
        full = ALGORITHMS[name].full_participation
        found.append(Case(name, options, chunk=7 if options else 2))
        found.append(Case(name, options, dtype=torch.float32, weighting="samples", participation=1.0 if full else 3))
        if not options:
            found.append(Case(name, options, clients=1) if full else Case(name, options, participation=1))
    return {case.id: case for case in [*found, *SPECIAL]}


CASES = cases()


@dataclass
class Outcome:
    """What a rank knows at the end: the server's vectors, the rows of its clients, counts, and a digest per round."""

    server: Tensors
    rows: Tensors
    counts: dict[str, int]
    digests: list[str]


def digest(tensors: Any) -> str:
    """Return a hash of names and bits."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + str(tensors[name].dtype).encode() + tensors[name].contiguous().numpy().tobytes())
    return found.hexdigest()


_ORACLES: dict[int, Oracles] = {}


@contextmanager
def untraced() -> Iterator[None]:
    """Trace no graphs: for so few rounds that takes longer than it saves."""
    Runner.tracing = False
    try:
        yield
    finally:
        Runner.tracing = True


def clients_of(
    problem: fs.Problem,
    data: fs.FederatedData,
    ranks: Ranks,
    rounds: int = 3,
    participation: int | float = 1.0,
    weighting: Any = "uniform",
    chunk: int = 7,
    channel: fs.Channel = PLAIN,
    faults: fs.Faults | None = None,
) -> Clients:
    """Build the clients that these ranks work for."""
    setting = make_setting(problem, data, batch_size=4, oracles=_ORACLES.setdefault(id(problem), Oracles(problem)))
    alone = ranks.size == 1
    engine = (
        Simulated(setting, chunk, channel, faults)
        if alone
        else Distributed(setting, chunk, channel, faults, ranks=ranks)
    )
    return Clients(engine, rounds, participation, weighting)


def play_case(case: Case, ranks: Ranks) -> Outcome:
    """Go through a case's rounds, as one rank of several or alone."""
    problem, data = case.build()
    assert data.clients == case.clients, case.id
    how = case.rounds, case.participation, case.weighting, case.chunk, case.channel, case.faults
    clients = clients_of(problem, data, ranks, *how)
    with torch.no_grad(), untraced():
        state = started(case.algorithm, clients)
        digests = [digest(tensors_of(case.algorithm, state))]
        for r in range(case.rounds):
            clients.begin(r)
            if clients.problem.at is not None:
                clients.engine.adopt(clients.problem.at(clients.problem, Clock(r, case.rounds, 0, r)))
            state = case.algorithm.round(state, clients)
            digests.append(digest(tensors_of(case.algorithm, state)))
    rows = {k: v for piece in clients.engine.side.state.take_all() for k, v in piece.items()}
    faults = [f"{f.round} {f.exchange} {f.attempt} {f.client} {f.kind}" for f in clients.faults]
    return Outcome(tensors_of(case.algorithm, state), rows, {**used_by(clients), "faults": sorted(faults)}, digests)


def used_by(clients: Clients) -> dict[str, Any]:
    """What was used, how far the clock is, and what noise was added to."""
    counts = dataclasses.asdict(clients.usage)
    return {**counts, "iteration": clients.progress.iteration, "releases": clients.engine.ledger.releases}


# --- the verbs -------------------------------------------------------------------------------------------------------

BIG = (1 << 24) + 1
WIDE = 5_600_001
"""Three answers of so many float32 numbers are more than 2^26 bytes, and not a multiple of 8."""

Probe = Callable[[Clients], Tensors]


def ids(client: Client) -> torch.Tensor:
    return torch.from_numpy(client.ids[: len(client)])


def mixed(client: Client, scale: float = 1.0) -> Any:
    """Return numbers of several dtypes and shapes that identify their client."""
    who = ids(client)
    real = scale * (who.double() + 0.25)
    grid = (who * 10)[:, None, None] + torch.arange(6).reshape(1, 2, 3)
    return real.float(), (grid, (who % 2 == 0, real), who[:, None][:, :0]), who.to(torch.int16)


def flattened(tree: Any, prefix: str) -> Tensors:
    """Return the tensors of nested tuples by their path."""
    if isinstance(tree, torch.Tensor):
        return {prefix: tree}
    assert type(tree) is tuple
    return {k: v for i, part in enumerate(tree) for k, v in flattened(part, f"{prefix}.{i}").items()}


def probe_gather(clients: Clients) -> Tensors:
    return flattened(clients.gather(mixed), "gathered")


def probe_mean(clients: Clients) -> Tensors:
    def halves(client: Client, low: torch.Tensor) -> Any:
        return low + ids(client)[:, None], (ids(client), ids(client).float())

    down = torch.tensor([0.5, -2.0])
    by_samples = clients.mean(halves, down, weighting="samples")
    return flattened(clients.mean(halves, down), "uniform") | flattened(by_samples, "samples")


def probe_max(clients: Clients) -> Tensors:
    def below_zero(client: Client) -> Any:
        who = ids(client).double()
        return -1 - who, (torch.stack([-who, who], 1).float(),)

    return flattened(clients.max(below_zero), "largest")


def probe_max_of_integers(clients: Clients) -> Tensors:
    def whole(client: Client) -> Any:
        return -1 - ids(client), ids(client).int()[:, None].expand(-1, 3)

    return flattened(clients.max(whole), "largest")


def probe_max_of_nan(clients: Clients) -> Tensors:
    """Client 2 answers with NaN, so the maximum is NaN."""

    def broken(client: Client) -> torch.Tensor:
        who = ids(client)[:, None].expand(-1, 5).float()
        return torch.where(who == 2, torch.nan, who)

    return {"largest": clients.max(broken)}


def probe_combine(clients: Clients) -> Tensors:
    def three(client: Client) -> Any:
        who = ids(client)
        return who.float(), who.double()[:, None] * torch.tensor([1.0, -1.0]).double(), who.float() ** 2

    return flattened(clients.combine(("max", "mean", "max"), three), "a") | flattened(
        clients.combine(("mean", "max", "mean"), three), "b"
    )


def probe_choose(clients: Clients) -> Tensors:
    """Cohorts of an algorithm's choice: one client three times, two different ones, and the first cohort again."""
    odds = np.zeros(clients.total)
    odds[1] = 2.0
    thrice = clients.choose(3, probabilities=odds)
    out = {"thrice": thrice.gather(ids), "mean of thrice": thrice.mean(ids)}
    two = clients.choose(2)
    out |= {"two": two.gather(ids), "two.cohort": torch.from_numpy(two.cohort), "two.weights": two.weights}
    drawn = clients.choose(4, probabilities=np.arange(1.0, clients.total + 1))
    return out | {"drawn": drawn.gather(ids), "all": clients.gather(ids)}


def probe_keep(clients: Clients) -> Tensors:
    """Clients, some of them drawn twice, recall in the next exchange what they kept, and not in this one."""

    def count(client: Client) -> torch.Tensor:
        before = client.kept("n", 0 * ids(client))
        client.keep(n=before + 1)
        return before

    odds = np.arange(1.0, clients.total + 1)
    drawn = clients.choose(9, probabilities=odds)
    return {f"{i}": drawn.gather(count) for i in range(3)} | {"all": clients.gather(count)}


def probe_pool(clients: Clients) -> Tensors:
    @fs.remote(pool=True)
    def scores(client: Client, n: int) -> Any:
        who = (10 * ids(client))[:, None] + torch.arange(n)
        return who.float(), (torch.stack([who, -who], 2), who % 2 == 0)

    return flattened(clients.pool(scores, 3), "pooled") | flattened(clients.choose(2).pool(scores, 1), "two")


def probe_server(clients: Clients) -> Tensors:
    """Draw samples of the server: on every rank, counted once, in an exchange of its own."""

    def draw(client: Client, x: torch.Tensor) -> Any:
        return client.grads(x, client.draw()), ids(client)

    x = clients.problem.x0
    on_server, who = clients.on_server(draw, x)
    on_clients, _ = clients.gather(draw, x)
    return {"on server": on_server, "who": who, "on clients": on_clients}


def probe_big_counts(clients: Clients) -> Tensors:
    """Counts that float32 cannot hold, and that travel in a buffer of float32."""

    def busy(client: Client) -> torch.Tensor:
        client._batches.samples += sum(BIG + 2 * int(k) for k in client.ids)
        client.steps += BIG + 2 * int(client.ids.max())
        return torch.ones(len(client), 1)

    def wide(client: Client) -> torch.Tensor:
        return ids(client)[:, None].float().expand(-1, WIDE)

    return {"busy": clients.mean(busy), "wide": clients.mean(wide)[-2:]}


def probe_changing_answers(clients: Clients) -> Tensors:
    """A method may return other shapes in another round."""
    out: Tensors = {}

    def answer(client: Client, number: int) -> Any:
        who = ids(client).double()
        return (who, who, who)[:number] if number else who[:, None].expand(-1, 4)

    for r, number in enumerate((2, 3, 1, 0)):
        clients.begin(r)
        out |= flattened(clients.mean(answer, number), f"round {r}")
    clients.begin(4)
    return out | flattened(clients.gather(answer, 2), "round 4")


PROBES: dict[str, Probe] = {k.removeprefix("probe_"): v for k, v in list(globals().items()) if k.startswith("probe_")}
COHORTS: dict[str, int] = {"all": 7, "one": 1}


def play_probe(name: str, cohort: str, ranks: Ranks) -> Outcome:
    """Ask all clients, or one, in ways that algorithms may; float32 data."""
    problem, data = example_for(fs.LocalSGDMRL, torch.float32)
    data = sized_data([5, 8, 4], features=4, classes=3) if name == "big_counts" else data
    participation = 1.0 if cohort == "all" else COHORTS[cohort]
    clients = clients_of(problem, data, ranks, 10, participation)
    clients.begin(0)
    with torch.no_grad(), untraced():
        out = PROBES[name](clients)
    return Outcome(out, {}, used_by(clients), [digest(out)])


# --- errors ----------------------------------------------------------------------------------------------------------

ERRORS: dict[str, tuple[Callable[[str], Exception], tuple[int, ...]]] = {
    "plain": (ZeroDivisionError, tuple(range(7))),
    "input": (fs.InputError, tuple(range(7))),
    "one": (ValueError, (2,)),
}
"""Errors in the work of some clients."""


def fail(name: str, ranks: Ranks) -> None:
    """Let the work of clients raise an error in round 3."""
    kind, failing = ERRORS[name]
    problem, data = smooth_example()
    clients = clients_of(problem, data, ranks)
    clients.begin(2)
    clients.mean(Failing(lambda: kind("no\nmore"), *failing).local, problem.x0)


def no_quorum(ranks: Ranks) -> None:
    """Ask clients of which two never answer."""
    problem, data = smooth_example()
    faults = fs.Faults(quorum=6, retries=2, inject=fs.Inject(drop=1.0, clients=(1, 4)))
    clients = clients_of(problem, data, ranks, faults=faults)
    clients.begin(0)
    clients.mean(ids)


# --- training --------------------------------------------------------------------------------------------------------

ROUNDS, STOP = 12, 5
CHAINS = [(2, 1), (2, 3), (1, 2), (3, 2)]
"""Numbers of ranks: of the first rounds of a run, and after it is resumed."""

UNDIVIDED = [("never", "always"), ("always", "never")]
"""Whether two ranks divide the clients: in the first rounds of a run, and after it is resumed."""

FILE = """
[data]
clients = 4
holdout = 0.2
partition = { name = "dirichlet", alpha = 1.0, min_samples = 10 }
[model]
name = "logreg"
[algorithm]
lr = 0.1
steps = 2
[train]
rounds = 3
batch_size = 8
divide = "always"
"""
PRETRAIN = "[pretrain]\nrounds = 2\n"


def train_scaffold(out: Path | None, rounds: int, **options: Any) -> fs.Run:
    """Train a run with client state and a rate that falls, long enough for all rows to be written again."""
    problem, data = smooth_example()
    algorithm = fs.Scaffold(lr=CubeRoot(0.3, 2.0), steps=3)
    how = {"batch_size": 4, "participation": 3, "chunk": 2, "eval_every": 1, "weighting": "samples", "divide": "always"}
    return fs.train(problem, data, algorithm, rounds=rounds, out=out, **{**how, **options})


def train_auc(out: Path, divide: str = "always") -> fs.Run:
    """Train a run whose problem asks the clients first, by an algorithm with stages."""
    world = SADDLES["auc, prepared, scaled"]()
    algorithm = fs.CODASCA(lr=0.05, steps=2, stage_rounds=2)
    return fs.train(world.problem, world.data, algorithm, rounds=5, batch_size=4, eval_every=2, out=out, divide=divide)


def train_rejoining(name: str, out: Path | None) -> fs.Run:
    """Train a run in which two clients miss what they must keep, and one of them its first chance to rejoin.

    "fgda, early": a client misses what it must keep, and rejoins before a round that the others but one miss.
    """
    algorithm = fs.CODASCA(steps=2, stage_rounds=3) if name == "codasca" else fs.FGDA(steps=2)
    world = SADDLES["auc, prepared, scaled"]()
    missed: dict[tuple[int, int], Iterable[int]] = {
        "fgda": {(-1, 1): (0, 1), (0, 2): (1,)},
        "codasca": {(0, 0): (0, 1), (1, 1): (1,)},
        "fgda, early": {(1, 1): (1,), (2, 0): range(2, world.data.clients)},
    }[name]
    real = fs.Inject.kinds

    def kinds(self: fs.Inject, clients: np.ndarray, round: int, exchange: int, attempt: int) -> list[str | None]:
        return ["drop" if k in missed.get((round, exchange), ()) else None for k in clients.tolist()]

    fs.Inject.kinds = kinds  # type: ignore[method-assign]
    try:
        faults = fs.Faults(quorum=2 if name == "fgda, early" else 1, retries=0, inject=fs.Inject())
        how = {"rounds": 4, "batch_size": 4, "eval_every": 1, "divide": "always"}
        return fs.train(world.problem, world.data, algorithm, faults=faults, out=out, **how)
    finally:
        fs.Inject.kinds = real  # type: ignore[method-assign]


def diverge(out: Path, divide: str = "always") -> fs.Run:
    """Diverge in round 1: the steps are far too long."""
    problem, data = smooth_example()
    algorithm = fs.FedProx(lr=1e200, mu=1e200, steps=5)
    return fs.train(problem, data, algorithm, rounds=3, batch_size=4, out=out, divide=divide)


def measure_nan(out: Path) -> fs.Run:
    """Diverge in round 2, which only the rank that evaluates can see."""
    calls = []

    def evaluate(*_: Any) -> dict[str, float]:
        calls.append(0)
        return {"loss": float("nan") if len(calls) > 2 else 1.0}

    return train_scaffold(out, 4, evaluate=evaluate)


def listen(out: Path) -> fs.Run:
    """Ask for diagnostics of local steps."""
    return train_scaffold(None, 2, callbacks=[fs.Diagnostics(rates=True, folder=out)])


class Noting(fs.Callback):
    """Records the rounds it is called in."""

    def __init__(self) -> None:
        self.rounds: list[int] = []

    def on_round(self, round: int, state: fs.State) -> None:
        self.rounds.append(round)


def train_noting(out: Path) -> dict[str, Any]:
    noting = Noting()
    run = train_scaffold(out, ROUNDS, callbacks=[noting])
    return {**as_json(run), "called": noting.rounds}


def as_json(run: fs.Run) -> dict[str, Any]:
    """A run as JSON."""
    return {"x": run.x.tolist(), "history": run.history, "summary": run.summary}


def pretrained(out: Path) -> fs.Run:
    file = out.with_suffix(".toml")
    return run_config(read(file), out, False, [])


# --- a rank's life ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What some ranks do together: tasks of one ``block`` come one after another and share a process group."""

    block: str
    name: str
    ranks: int
    do: Callable[[Ranks], Any]


def tasks(folder: Path, cases: Iterable[str], others: bool) -> list[Task]:
    """Return these cases and, if wanted, all other tasks, in the order in which every rank goes through them."""
    wanted = {i: c for i, c in CASES.items() if i in cases}
    found = [Task(f"{c.name} {c.ranks}", i, c.ranks, functools.partial(play_case, c)) for i, c in wanted.items()]
    found.sort(key=lambda t: t.block)
    if not others:
        return found
    for name in PROBES:
        for cohort in ("all",) if name == "big_counts" else COHORTS:
            do = functools.partial(play_probe, name, cohort)
            found += [Task(f"{name} {cohort} {n}", f"{name} {cohort} {n}", n, do) for n in (2, 3)]

    for name in ERRORS:
        found.append(Task(f"failing {name}", f"failing {name}", 2, functools.partial(fail, name)))
    found += [Task(f"no quorum {n}", f"no quorum {n}", n, no_quorum) for n in (2, 3)]

    def training(name: str, ranks: int, work: Callable[[Path], Any], place: str | None = None) -> None:
        def do(_: Ranks) -> Any:
            result = work(folder / (place or name))
            return as_json(result) if isinstance(result, fs.Run) else result

        found.append(Task(name, name, ranks, do))

    training("straight", 2, train_noting)
    training("auc", 2, train_auc)
    for name in ("fgda", "codasca", "fgda, early"):
        training(f"rejoining {name}", 2, functools.partial(train_rejoining, name))
    training("diverged", 2, diverge)
    training("measured nan", 2, measure_nan)
    training("listening", 2, listen)
    for first, then in CHAINS:
        place = f"from {first} to {then}"
        training(f"start {place}", first, lambda out: train_scaffold(out, STOP), place)
        training(place, then, lambda out: train_scaffold(out, ROUNDS, resume=True), place)
    training("pretrained", 2, pretrained)
    training("auc, undivided", 2, functools.partial(train_auc, divide="auto"))
    training("diverged, undivided", 2, functools.partial(diverge, divide="never"))
    for first, then in UNDIVIDED:
        place = f"from {first} to {then}"
        training(f"start {place}", 2, lambda out, how=first: train_scaffold(out, STOP, divide=how), place)
        training(place, 2, lambda out, how=then: train_scaffold(out, ROUNDS, resume=True, divide=how), place)
    return found


@contextmanager
def group(file: Path, rank: int, size: int) -> Iterator[Ranks]:
    """Join a process group, as torchrun's would be.

    The third rank has nothing to do in groups of two, and waits in the next group of three until the others are there:
    for minutes, on a busy machine.
    """
    if size == 1:
        yield ALONE
        return
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=size, timeout=timedelta(seconds=600)
    )
    try:
        dist.barrier()  # a rank whose work fails at once would close connections that another is still opening
        yield ranks_here()
    finally:
        dist.destroy_process_group()


WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink"}


class Watch:
    """Records which files below a folder the process writes, renames or removes."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.seen: set[str] = set()
        sys.addaudithook(self.hear)

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        changes = event in WRITES or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if changes and str(args[0]).startswith(self.folder):
            self.seen.add(str(args[0]))


def work(rank: int, folder: Path, cases: Iterable[str], others: bool) -> None:
    """Run the tasks as this rank; write to ``folder/rank-R.json`` and ``.safetensors``."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    import fedstrata.training.plots

    fedstrata.training.plots.plot = lambda *_, **__: None  # type: ignore[assignment]  # drawing costs more than these runs
    watch = Watch(folder / "runs")
    tensors: Tensors = {}
    found: dict[str, Any] = {}
    groups = [list(block) for _, block in groupby(tasks(folder / "runs", cases, others), key=lambda t: t.block)]
    with untraced():
        for number, block in enumerate(groups):
            size = block[0].ranks
            if rank >= size:
                continue
            try:
                with group(folder / f"group-{number}", rank, size) as ranks:
                    for task in block:
                        watch.seen.clear()
                        found[task.name] = {**_done(task, ranks, tensors), "written": sorted(watch.seen)}
            except Exception as error:
                lost = {"error": type(error).__name__, "message": str(error), "trace": traceback.format_exc()}
                lost["cause"] = type(error.__cause__).__name__
                found |= {t.name: lost for t in block if t.name not in found}
    save_file(tensors, folder / f"rank-{rank}.safetensors")
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


def _done(task: Task, ranks: Ranks, tensors: Tensors) -> dict[str, Any]:
    try:
        result = task.do(ranks)
    except fs.Diverged as error:  # the ranks are still together, if all of them say so
        return {"error": type(error).__name__, "message": str(error)}
    if not isinstance(result, Outcome):
        return {"run": result}
    held = {"server": result.server} if ranks.first else {}
    for kind, values in {**held, "rows": result.rows}.items():
        tensors |= {
            f"{task.name}/{kind}/{k}": v.clone(memory_format=torch.contiguous_format) for k, v in values.items()
        }
    return {"counts": result.counts, "digests": result.digests}
