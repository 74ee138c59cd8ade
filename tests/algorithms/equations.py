"""The equation harness: the library and a NumPy reference, written from the paper's lines, run the same rounds.

    world    a problem twice, for the library and in NumPy (tests/worlds.py)
    method   an algorithm with hyperparameters, and how its reference is called
    case     how a run draws, who takes part, where it starts, and hyperparameters of its own
    row      a method in a world in a case; a wrong row has a change that makes the reference another one

Nothing of the library is on both sides but the rule that names a batch. The tables of rows are in equations_*.py, one
for each family of methods; what a reference gets is in paper.py; test_equations.py runs both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import fedstrata as fs
from fedstrata.clients import Clients
from fedstrata.core.options import options_of
from fedstrata.core.schedules import Rate
from fedstrata.training.states import state_of, tensors_of
from support import make_clients, make_setting, started
from worlds import N, Vector, World

if TYPE_CHECKING:
    from algorithms.paper import Paper

SEED = 11
TOLERANCE = 1e-9

Options = Mapping[str, Any]
Vectors = dict[str, Vector]
Rows = dict[str, dict[int, Vector]]
"""What clients keep: by name, and by client."""


@dataclass(frozen=True)
class Case:
    """How a run draws, who takes part and how clients are weighted. ``given``: it starts from a random state of the
    server and the clients, in ``first_round``. ``options`` are hyperparameters that are not the method's usual ones."""

    batch_size: int | None = 3
    sampling: str = "uniform"
    participation: int | float = 1.0
    weighting: str = "uniform"
    chunk: int = N
    given: bool = False
    first_round: int = 0
    rounds: int | None = None
    options: Options = field(default_factory=dict)


USUAL = {
    "one at a time": Case(chunk=1),
    "two at a time": Case(chunk=2),
    "full batches": Case(batch_size=None),
    "epochs": Case(sampling="epochs", batch_size=4),
    "weighted": Case(weighting="samples", chunk=2),
    "given state": Case(given=True, first_round=3),
}
PARTIAL = {
    "partial": Case(participation=3),
    "partial, weighted, epochs": Case(participation=2, weighting="samples", sampling="epochs", chunk=1),
}
PASSES = {
    "passes": Case(options={"steps": fs.Epochs(1.5)}, sampling="epochs", batch_size=4),
    "passes, partial, weighted": Case(options={"steps": fs.Epochs(0.7)}, participation=4, weighting="samples", chunk=2),
}


@dataclass(frozen=True)
class Method:
    """An algorithm, its reference, and its usual hyperparameters.

    reference: runs the paper's rounds; returns the server's vectors, and what clients keep as rows ("c_k").
    keep:      changes a random state of the server where it must be special; returns random rows of the clients. The
               options of the case that it gets are all there are.
    home:      the world in which it meets every case.
    unseen:    rows of the clients that the reference does not return.
    weighted:  whether the reference knows weights; where it does not, a client that weighs 3 becomes 3 clients.
    least:     how far x and y must move for a comparison to say something.
    wrong_in:  the case in which a change of a hyperparameter, or of the weighting, shows; None where it never does.
    """

    name: str
    family: str
    worlds: Mapping[str, Callable[[], World]]
    build: Callable[..., fs.Algorithm]
    reference: Callable[[Paper], Vectors]
    options: Options
    keep: Callable[[World, Case, Vectors, np.random.Generator], Rows] = lambda *_: {}
    home: str = ""
    rounds: int = 2
    unseen: tuple[str, ...] = ()
    weighted: bool = False
    least: Mapping[str, float] = field(default_factory=lambda: {"x": 1e-3, "y": 1e-3})
    wrong_in: Mapping[str, Case | None] = field(default_factory=dict)

    def row(self, label: str, case: Case | None = None, world: str = "", form: str = "") -> Row:
        """A row of the table, by default in the method's home. ``form`` is an axis of its own."""
        return Row(self, world or self.home, label, case or Case(), form)

    def scheduled(self, schedules: Options, case: Case, world: str = "", **needed: Options) -> Iterator[Row]:
        """Every rate by every schedule; some rates need other options to matter, ``needed``."""
        for rate in self.rates():
            for name, schedule in schedules.items():
                options = {**case.options, rate: schedule, **needed.get(rate, {})}
                yield self.row(rate, replace(case, options=options), world, name)

    def rates(self) -> list[str]:
        """The hyperparameters that may be schedules."""
        return [option.name for option in options_of(self.build).values() if option.annotation == Rate]

    def wrong(self, label: str, case: Case | None = None, world: str = "", **change: Any) -> Row:
        """A row with a wrong reference."""
        return replace(self.row(label, case, world), change=Change(**change))

    def usual_mistakes(self, case: Case | None = None) -> Iterator[Row]:
        """Wrong references: each hyperparameter slightly off, other batches, other weights."""
        case = case or Case()
        for key, value in {**self.options, **case.options}.items():
            here = self.wrong_in.get(key, case)
            if here is None or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            value = here.options.get(key, value)
            other = value + 1 if isinstance(value, int) else value * 1.01 if value else 1e-3
            yield self.wrong(key, here, options={key: other})
        yield self.wrong("another seed", case, seed=SEED + 1)
        yield self.wrong("other batches", case, run={"sampling": "stratified"})
        if "weighting" not in self.wrong_in:
            yield self.wrong("other weights", case, run={"weighting": "samples"})


@dataclass(frozen=True)
class Change:
    """What is different in a wrong reference.

    options:   hyperparameters.
    arguments: of the reference itself.
    lines:     of the reference's source, and what is there instead.
    run:       how it draws and how clients are weighted.
    world_of:  from the world, another one.
    tweaks:    what the caller of the reference does otherwise.
    """

    options: Options = field(default_factory=dict)
    arguments: Options = field(default_factory=dict)
    lines: tuple[tuple[str, str], ...] = ()
    run: Options = field(default_factory=dict)
    world_of: Callable[[World], World] = lambda world: world
    tweaks: Options = field(default_factory=dict)
    seed: int = SEED


RIGHT = Change()


@dataclass(frozen=True, repr=False)
class Row:
    """A method in a world in a case, and what is wrong with its reference, if anything."""

    method: Method
    world: str
    label: str
    case: Case
    form: str = ""
    change: Change = RIGHT

    def __repr__(self) -> str:
        return f"<{'-'.join(self.name())}: {self.case}, {self.change}>"

    def name(self) -> list[str]:
        """What a test's id is made of."""
        return [part for part in (self.method.name, self.world, self.label, self.form) if part]

    def axes(self) -> list[str]:
        """The row's place in a table of cases: the short run has one row per method."""
        return [self.method.name]


# --- the library -----------------------------------------------------------------------------------------------------


@dataclass
class Ours:
    """What the library did: how it ended, where it started if that was given, and what its server drew."""

    vectors: Vectors = field(default_factory=dict)
    server: Vectors = field(default_factory=dict)
    rows: Rows = field(default_factory=dict)
    cohorts: list[list[int]] = field(default_factory=list)
    probabilities: list[Vector] = field(default_factory=list)
    integers: list[tuple[int, int, int]] = field(default_factory=list)

    def watch(self, clients: Clients) -> None:
        """Note what a round's server draws besides its cohort: other cohorts, and whole numbers."""
        choose, integer = clients.choose, clients.integer

        def choosing(number: int | None = None, probabilities: Any = None) -> Clients:
            chosen = choose(number, probabilities)
            self.cohorts.append(chosen.cohort.tolist())
            if probabilities is not None:
                self.probabilities.append(np.asarray(probabilities).copy())
            return chosen

        def counting(low: int, high: int) -> int:
            self.integers.append((low, high, integer(low, high)))
            return self.integers[-1][2]

        clients.choose, clients.integer = choosing, counting


def steps_a_round(options: Options) -> int:
    """Local steps in a round, as the library counts them."""
    return int(options["steps"]) * (options.get("inner_rounds", 0) + 1) if "steps" in options else 0


def random_state(tensors: dict[str, torch.Tensor], rng: np.random.Generator) -> Vectors:
    """A random state of the server; scales are positive and spread over the size of squared gradients."""
    state = {}
    for name, value in tensors.items():
        if name in ("x", "y", "h.0"):
            state[name] = value.numpy()
        elif name in ("v", "vhat", "a", "b", "weight"):
            state[name] = np.exp(rng.uniform(np.log(1e-3), np.log(5.0), size=tuple(value.shape)))
        elif value.numel():
            state[name] = rng.normal(size=tuple(value.shape))
    return {name: value for name, value in state.items() if value.size}


def run_library(method: Method, world: World, case: Case) -> Ours:
    options = {**method.options, **case.options}
    algorithm = method.build(**options)
    drawing: dict[str, Any] = {"batch_size": case.batch_size, "sampling": case.sampling, "seed": SEED}
    setting = make_setting(world.problem, world.data, oracles=world.oracles, **drawing)
    last = case.first_round + (case.rounds or method.rounds)
    taking_part: dict[str, Any] = {"participation": case.participation, "weighting": case.weighting}
    clients = make_clients(setting, rounds=last, chunk=case.chunk, **taking_part)
    ours, rng = Ours(), np.random.default_rng(4)
    ours.watch(clients)
    with torch.no_grad():
        state = started(algorithm, clients)
        if case.given:
            first = tensors_of(algorithm, state)
            ours.server = random_state(first, rng)
            ours.rows = method.keep(world, replace(case, options=options), ours.server, rng)
            state = state_of(algorithm, first | {key: torch.from_numpy(v) for key, v in ours.server.items()})
            for key, rows in ours.rows.items():
                setting.state.keep(np.array(list(rows)), {key: torch.from_numpy(np.stack(list(rows.values())))})
        if case.first_round:
            clients.progress.iteration = case.first_round * steps_a_round(options)
        for r in range(case.first_round, last):
            clients.begin(r)
            ours.cohorts.append(clients.cohort.tolist())
            state = algorithm.round(state, clients)
    ours.vectors = {key: value.numpy() for key, value in tensors_of(algorithm, state).items() if value.numel()}
    kept = next(setting.state.take_changes(), {})
    for key in [key for key in kept if "." not in key and kept[key].is_floating_point()]:  # stamps are whole numbers
        ours.vectors[f"{key}_k"] = np.zeros((N, *kept[key].shape[1:]))
        ours.vectors[f"{key}_k"][kept[f"{key}.clients"].numpy()] = kept[key].numpy()
    return ours


OURS: dict[str, Ours] = {}


def ours_of(row: Row) -> Ours:
    """What the library does, computed once for all rows that need it."""
    key = f"{row.method.name}, {row.world}, {row.case}"
    if key not in OURS:
        OURS[key] = run_library(row.method, row.method.worlds[row.world](), row.case)
    return OURS[key]


# --- the comparison --------------------------------------------------------------------------------------------------


def distance(ours: Vectors, theirs: Vectors, unseen: tuple[str, ...] = ()) -> float:
    """How far the two are apart in any vector; they must have the same ones."""
    assert set(theirs) <= set(ours) <= {*theirs, *unseen}, (
        f"the library has the vectors {sorted(ours)}, the reference returns {sorted(theirs)}: name what the algorithm "
        "keeps in its case (state='h g_k'; a client's end in _k), and let the reference take and return it"
    )
    for key in theirs:
        assert ours[key].shape == theirs[key].shape, key
    return max(float(np.abs(ours[key] - theirs[key]).max()) for key in theirs)


def in_point(vectors: Vectors) -> Vectors:
    """x and y alone."""
    return {name: vectors[key] for name, key in (("x", "x"), ("x", "h.0"), ("y", "y")) if key in vectors}
