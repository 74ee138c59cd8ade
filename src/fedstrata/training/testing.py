"""Checks for an algorithm of your own: ``fs.testing.check_algorithm(MyAlgorithm, steps=2)``.

They run the algorithm on a small problem of its class, with clients of unequal sizes and data, and raise an
AssertionError that says what is wrong and where. :func:`check_algorithm` runs all of them; :func:`check_equations`
compares the algorithm with a NumPy version.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fedstrata.algorithms.algorithm import Algorithm
from fedstrata.algorithms.sent import sent, sent_by
from fedstrata.clients.clients import Clients
from fedstrata.clients.engine import Answer, Engine, Request, Usage
from fedstrata.clients.faults import Fault
from fedstrata.clients.work import is_remote
from fedstrata.core.errors import FedstrataError, InputError
from fedstrata.core.options import options_of
from fedstrata.core.schedules import Epochs
from fedstrata.core.trees import tree_leaves
from fedstrata.data.federated import FederatedData
from fedstrata.problems.problem import Problem
from fedstrata.training.equations import NumpyClient, built, check_equations
from fedstrata.training.examples import (
    example_for,
    layered,
    play,
    run_rounds,
    simulated_clients,
    sized_example,
    started,
)
from fedstrata.training.metrics.catalogue import TIMES
from fedstrata.training.rounds import one_round
from fedstrata.training.settings import Settings
from fedstrata.training.states import check_restorable, state_of, tensors_of
from fedstrata.training.train import train

__all__ = [
    "NumpyClient",
    "check_algorithm",
    "check_chunks",
    "check_equations",
    "check_options",
    "check_refusals",
    "check_resume",
    "check_sent",
    "check_state",
    "example_for",
    "sized_example",
]

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10}
"""How much runs with different chunks may differ."""


def check_algorithm(algorithm: Algorithm | type[Algorithm], **options: Any) -> None:
    """Check an algorithm as the library's own are checked; raise an AssertionError that says what is wrong.

    algorithm: the algorithm, or its class.
    options:   hyperparameters for the runs; few local steps make them short.

    Checks that options are documented and survive a configuration file, that problems of other classes are refused,
    that what clients run is marked ``@remote``, that messages can be sent, that states can be saved and are not
    modified in place, that results do not depend on how many clients advance together (in single and double precision,
    with some of the clients and with epochs, where the algorithm allows them), that the bytes sent are those of the
    docstring's *Sent* line, and that a run resumes exactly.
    """
    algorithm = built(algorithm, **options)
    kind = type(algorithm)
    checks: dict[str, Callable[[], None]] = {
        "options": lambda: check_options(kind),
        "problems of other classes": lambda: check_refusals(algorithm),
        "state": lambda: check_state(algorithm, *example_for(kind)),
        "chunks, float64": lambda: check_chunks(algorithm, *example_for(kind)),
        "chunks, float32": lambda: check_chunks(algorithm, *example_for(kind, torch.float32)),
        "bytes": lambda: check_sent(algorithm, *sized_example(kind), variant_of(kind)),
        "resuming": lambda: check_resume(algorithm, *example_for(kind)),
    }
    with contextlib.suppress(ValueError, TypeError):  # steps that cannot be epochs, or no steps at all
        epochs = algorithm.replace(steps=Epochs(1))
        checks["chunks, epochs"] = lambda: check_chunks(epochs, *example_for(kind))
    for name, check in checks.items():
        try:
            check()
        except Exception as error:
            raise AssertionError(f"{kind.__name__}, {name}: {error}") from error


def check_options(kind: type[Algorithm]) -> None:
    """Check that every hyperparameter is documented, and that a configuration file can hold them."""
    algorithm = kind()
    for option in options_of(kind).values():
        _expect(bool(option.doc), f"{option.name} has no description: {option.name} = param(default, 'what it is').")
    _expect(kind() == algorithm, "two instances with the same hyperparameters are not equal.")
    table = algorithm.to_table()
    _expect(Algorithm.from_table(table) == algorithm, f"the table {table} builds a different algorithm.")
    with _refused(InputError, "an unknown option was accepted."):
        kind(**{"no_such_option": 1})


def check_refusals(algorithm: Algorithm) -> None:
    """Check that problems which the algorithm does not solve are refused, and cohorts if it needs every client."""
    problem, data = example_for(type(algorithm))
    _expect(algorithm.solves(problem), f"its own example, {problem.kind}, is not solved.")
    for levels, dual, mean in itertools.product(range(4), (False, True), ("local", "global")):
        other = layered(levels, dual, mean if levels else "local", torch.float64)
        if not algorithm.solves(other):
            with _refused(InputError, f"a problem that it does not solve was accepted: {other.kind}."):
                algorithm.check(other, 1.0, data.clients)
    if algorithm.full_participation:
        with _refused(InputError, "a cohort was accepted, but full_participation is set."):
            algorithm.check(problem, 0.5, data.clients)


def check_state(algorithm: Algorithm, problem: Problem, data: FederatedData) -> None:
    """Check two rounds: methods of clients are ``@remote``, and messages to them can be sent to another computer.

    States are finite, keep their shapes, are not modified in place, and can be saved.
    """
    clients = simulated_clients(problem, data, 2, batch_size=4)
    requests, shapes = _recorded(clients.engine), []
    for rounds in (0, 2):
        state, _ = run_rounds(algorithm, clients, rounds)
        tensors = tensors_of(algorithm, state)
        check_restorable(algorithm, state)
        again = state_of(algorithm, tensors)
        same = all(a is b for a, b in zip(tree_leaves(again), tree_leaves(state), strict=True))
        _expect(same, "a state rebuilt from its named tensors has other values: are its fields tensors, or tuples?")
        for name, tensor in tensors.items():
            _expect(bool(torch.isfinite(tensor).all()), f"{name} is NaN or infinite after {rounds} rounds.")
        shapes.append({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    _expect(shapes[0] == shapes[1], f"round returns a state of {shapes[1]}, but start one of {shapes[0]}.")
    _check_in_place(algorithm, problem, data)
    for request in requests:
        own = getattr(type(algorithm), request.name, None) is getattr(request.work, "__func__", ...)
        _expect(own and is_remote(request.work), f"{request.label} runs on clients: make it a method marked @remote.")


def check_chunks(
    algorithm: Algorithm,
    problem: Problem,
    data: FederatedData,
    sampling: str = "epochs",
) -> None:
    """Check that three rounds do not depend on how many clients advance together, and that x moves.

    Five clients take part in a round, unless the algorithm needs all.
    """
    how: dict[str, Any] = {"batch_size": 4, "sampling": sampling}
    how["participation"] = 1.0 if algorithm.full_participation else 5
    dtype, ends = problem.x0.dtype, {}
    for chunk in (1, 3, data.clients):
        state, _ = play(algorithm, problem, data, 3, chunk=chunk, **how)
        ends[chunk] = tensors_of(algorithm, state)
    moved = float((algorithm.solution(state)[0] - problem.x0).abs().max())
    _expect(moved > 1e-6, f"x has moved by only {moved:.1g} after three rounds.")
    for name, alone in ends[1].items():
        _expect(alone.dtype == dtype, f"{name} is {alone.dtype}, but x is {dtype}.")
        for chunk, end in ends.items():
            if not torch.allclose(end[name], alone, TOLERANCES[dtype], TOLERANCES[dtype]):
                apart = float((end[name] - alone).abs().max())
                what = f"{name} differs by {apart:.1g} between chunks of 1 and {chunk} clients"
                raise AssertionError(f"{what}: does a reduction go over dim 0, the clients, instead of dim 1?")


def check_sent(
    algorithm: Algorithm,
    problem: Problem,
    data: FederatedData,
    variant: str = "",
    participation: int | float = 1.0,
) -> None:
    """Check that the counted bytes of two rounds, and those before, are those of the docstring's *Sent* line.

    variant: the class of the problem, if the table of the docstring has rows for several. The sizes of x, y and the
             levels should differ (:func:`sized_example`), so that no two letters stand for the same number.
    """
    share = 1.0 if algorithm.full_participation else participation
    before, during, clients = counted(algorithm, problem, data, participation=share)
    sizes = sizes_of(algorithm, clients)
    for usage, messages, first in ((before, data.clients, True), (during, 2 * len(clients), False)):
        row, unit = sent_by(algorithm, variant, first), messages * problem.x0.element_size()
        got, wants = (usage.bytes_up / unit, usage.bytes_down / unit), row.numbers(**sizes)
        when = "before the first round" if first else "in a round"
        letters = ", ".join(f"{letter} = {size}" for letter, size in sizes.items())
        _expect(
            got == wants,
            f"{when} a client sends {got[0]:g} numbers and gets {got[1]:g}. The docstring says up {row.up}, down "
            f"{row.down}: {wants[0]} and {wants[1]} with {letters}.",
        )
    _expect(before.steps == 0, "local steps were taken before the first round: use a plain loop in start's exchanges.")


def variant_of(kind: type[Algorithm]) -> str:
    """Return the variant of the docstring's table that the algorithm's example belongs to: none, or the first."""
    variants = [row.variant for row in sent(kind)]
    return "" if "" in variants else variants[0]


def counted(
    algorithm: Algorithm, problem: Problem, data: FederatedData, rounds: int = 2, **settings: Any
) -> tuple[Usage, Usage, Clients]:
    """Return what was used before the first round and in the rounds after it, and the clients."""
    clients = simulated_clients(problem, data, rounds, **{"batch_size": 4, "chunk": 2, **settings})
    _, before = run_rounds(algorithm, clients, rounds)
    total, first = dataclasses.asdict(clients.usage), dataclasses.asdict(before)
    return before, Usage(**{name: total[name] - first[name] for name in total}), clients


def sizes_of(algorithm: Algorithm, clients: Clients) -> dict[str, int]:
    """Return what the letters of a *Sent* line stand for."""
    problem = clients.problem
    return {
        "d": len(problem.x0),
        "p": 0 if problem.y0 is None else len(problem.y0),
        "K": len(problem.levels),
        "r": clients.inner_sizes[-1] if problem.levels else 0,
        "R": sum(clients.inner_sizes),
        "C": clients.classes,
        "T": getattr(algorithm, "inner_rounds", 0),
    }


def check_resume(algorithm: Algorithm, problem: Problem, data: FederatedData) -> None:
    """Check that a run of six rounds that is resumed after three ends with the same bits as one that is not."""
    share = 1.0 if algorithm.full_participation else 3
    half, whole = (
        Settings(rounds=rounds, batch_size=4, sampling="epochs", participation=share, chunk=2, eval_every=1)
        for rounds in (3, 6)
    )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        train(problem, data, algorithm, settings=half, out=out)
        straight = train(problem, data, algorithm, settings=whole)  # in between, to disturb any state kept elsewhere
        resumed = train(problem, data, algorithm, settings=whole, out=out, resume=True)
    for name, a, b in (("x", resumed.x, straight.x), ("y", resumed.y, straight.y)):
        same = a is b is None or (a is not None and b is not None and torch.equal(a, b))
        _expect(same, f"{name} of a resumed run differs: is something kept outside the state and client.keep?")
    histories = [[{**row, **dict.fromkeys(TIMES, 0)} for row in run.history] for run in (resumed, straight)]
    _expect(histories[0] == histories[1], "the history of a resumed run differs.")


# --- helpers ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _check_in_place(algorithm: Algorithm, problem: Problem, data: FederatedData) -> None:
    """Check that a round does not change the state that it gets: a checkpoint or a caller may still hold it."""
    clients = simulated_clients(problem, data, 1, batch_size=4)
    state = started(algorithm, clients)
    before = {name: tensor.clone() for name, tensor in tensors_of(algorithm, state).items()}
    one_round(algorithm, state, clients, 0)
    for name, tensor in tensors_of(algorithm, state).items():
        _expect(torch.equal(tensor, before[name]), f"round modifies {name} of the state in place: return a new tensor.")


def _recorded(engine: Engine) -> list[Request]:
    """Return a list to which the engine will add every request."""
    requests: list[Request] = []
    answers = engine.answers

    def recorded(request: Request) -> Iterator[Answer | Fault]:
        requests.append(request)
        return answers(request)

    engine.answers = recorded  # type: ignore[method-assign]
    return requests


def _expect(holds: bool, otherwise: str) -> None:
    """Raise an AssertionError unless something holds; an assert would vanish with ``python -O``."""
    if not holds:
        raise AssertionError(otherwise)


@contextlib.contextmanager
def _refused(error: type[FedstrataError], otherwise: str) -> Iterator[None]:
    try:
        yield
    except error:
        return
    raise AssertionError(otherwise)
