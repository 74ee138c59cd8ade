"""``fs.testing``, for somebody who writes an algorithm in a package of their own.

Sent: up d, down d.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import fedstrata as fs
from cases import repeats
from fedstrata.algorithms import ALGORITHMS
from fedstrata.core.options import options_of
from fedstrata.core.schedules import Rate, Steps
from support import play, shared_oracles, sized_data, softmax_problem

pytestmark = [pytest.mark.untraced, pytest.mark.usefixtures("no_pictures")]


@pytest.fixture(autouse=True)
def _leave_the_registry_alone() -> Iterator[None]:
    before = dict(ALGORITHMS)
    yield
    ALGORITHMS.clear()
    ALGORITHMS.update(before)


class Base:
    """Local SGD; tests make an algorithm of it with one mistake."""

    name = "mine"
    lr: Rate = fs.param(0.1, "learning rate", above=0)
    steps: Steps = fs.param(2, "local steps")

    def round(self, s: fs.State, clients: fs.Clients) -> fs.State:
        return s._replace(x=s.x + clients.mean(self.local, s.x))

    @fs.remote
    def local(self, client: fs.Client, x: torch.Tensor) -> torch.Tensor:
        k = client.variables(x=x)
        for _ in client.loop(self.steps, k):
            k.x = k.x - client.rate(self.lr) * client.grads(k.x, client.draw())
        return k.x - x


def made(**mistakes: Any) -> type[fs.Algorithm]:
    for name, value in mistakes.items():
        if inspect.isfunction(value):
            value.__name__ = name
    parts = {**{k: v for k, v in vars(Base).items() if not k.startswith("__")}, **mistakes}
    parts["__annotations__"] = {"lr": Rate, "steps": Steps, **mistakes.get("__annotations__", {})}
    return type("Mine", (fs.Algorithm,), {"__doc__": "Mine.", "__module__": __name__, **parts})


@pytest.mark.slow
def test_a_good_algorithm_passes() -> None:
    fs.testing.check_algorithm(made())
    fs.testing.check_algorithm(made(), steps=3, lr=0.05)


@repeats("name", ["scaffold", *sorted(set(ALGORITHMS) - {"scaffold"})])
def test_our_own_pass(name: str) -> None:
    """All parts of it are in the tests of algorithms; here it is the whole."""
    kind = ALGORITHMS[name]
    fs.testing.check_algorithm(kind, **({"steps": 2} if "steps" in options_of(kind) else {}))


@fs.remote
def over_clients(self: Any, client: fs.Client, x: torch.Tensor) -> torch.Tensor:
    g = client.grads(x, client.draw())
    return -self.lr * g / g.norm(dim=0)


@fs.remote
def stale(self: Any, client: fs.Client, x: torch.Tensor) -> torch.Tensor:
    k = client.variables(x=x)
    for _ in client.loop(self.steps, k):
        k.x = k.x - self.lr * (client.grads(k.x, client.draw()) + 0.1 * (k.x - x))
    return k.x - x


@fs.remote
def twice(self: Any, client: fs.Client, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    g = -self.lr * client.grads(x, client.draw())
    return g, g


def unmarked(self: Any, client: fs.Client, x: torch.Tensor) -> torch.Tensor:
    return -self.lr * client.grads(x, client.draw())


def first_of_two(self: Any, s: fs.State, clients: fs.Clients) -> fs.State:
    return s._replace(x=s.x + clients.mean(self.local, s.x)[0])


def exploding(self: Any, s: fs.State, clients: fs.Clients) -> fs.State:
    return s._replace(x=s.x / 0)


def idle(self: Any, s: fs.State, clients: fs.Clients) -> fs.State:
    clients.mean(self.local, s.x)
    return s


def modifying(self: Any, s: fs.State, clients: fs.Clients) -> fs.State:
    s.x.add_(clients.mean(self.local, s.x))
    return s


def saying(what: Any) -> dict[str, Any]:
    """A round whose message has something else in it."""

    def round(self: Any, s: fs.State, clients: fs.Clients) -> fs.State:
        return s._replace(x=s.x + clients.mean(self.local, s.x, (1, what)))

    @fs.remote
    def local(self: Any, client: fs.Client, x: torch.Tensor, more: Any) -> torch.Tensor:
        return -self.lr * client.grads(x, client.draw())

    return {"round": round, "local": local}


@fs.remote
def one_row(self: Any, client: fs.Client, x: torch.Tensor) -> torch.Tensor:
    client.keep(z=x[:1])
    return -self.lr * client.grads(x, client.draw())


@fs.remote
def shrinking(self: Any, client: fs.Client, x: torch.Tensor) -> torch.Tensor:
    client.keep(z=x[:, :1] if client.clock.round else x)
    return -self.lr * client.grads(x, client.draw())


MEMORY: list[float] = []


def remembering(self: Any, s: fs.State, clients: fs.Clients) -> fs.State:
    if clients.clock.round == 0:
        MEMORY.clear()
    MEMORY.append(clients.rate(self.lr))
    return s._replace(x=s.x + sum(MEMORY) * clients.mean(self.local, s.x))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a reduction over clients": ({"local": over_clients}, r"^Mine, chunks, float64: x differs by .* chunks of 1 and 3"),
    "a tensor of the message": (
        {"local": stale},
        r"^Mine, chunks, epochs: The variable x of a local loop must have one row ",
    ),
    "a second vector": (
        {"local": twice, "round": first_of_two},
        r"^Mine, bytes: in a round a client sends 30 numbers and gets 15\. The docstring says up d, down d: 15 and 15",
    ),
    "no mark": ({"local": unmarked}, r"^Mine, state: local of mine runs on clients: make it a method marked @remote"),
    "infinite": ({"round": exploding}, r"^Mine, state: x is NaN or infinite after 2 rounds"),
    "idle": ({"round": idle}, r"^Mine, chunks, float64: x has moved by only 0 after three rounds"),
    "in place": ({"round": modifying}, r"^Mine, state: round modifies x of the state in place: return a new tensor"),
    "an array": (
        saying(np.ones(3)),
        r"^Mine, state: The message to local of mine must be made of .*\. Got a ndarray\.",
    ),
    "a NumPy number": (saying(np.float32(3)), r"^Mine, state: The message to local of mine .*\. Got a float32\."),
    "a table": (saying({"a": 1}), r"^Mine, state: The message to local of mine must be made of .*\. Got a dict\."),
    "a function": (saying(len), r"^Mine, state: The message to local of mine .*\. Got a builtin_function_or_method\."),
    "one row is kept": (
        {"local": one_row},
        r"^Mine, state: The variable z that clients keep must be a tensor with one",
    ),
    "a narrower row is kept": (
        {"local": shrinking},
        r"^Mine, state: The variable z that clients keep .*, as before\. ",
    ),
    "a global": ({"round": remembering}, r"^Mine, resuming: x of a resumed run differs: is something kept outside"),
    "no description": (
        {"extra": 1.0, "__annotations__": {"extra": float}},
        r"^Mine, options: extra has no description: extra = param\(default, 'what it is'\)",
    ),
    "any problem": (
        {"check": lambda *_: None},
        r"^Mine, problems of other classes: a problem that it does not solve was accepted: ",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_found(mistake: str) -> None:
    parts, message = WRONG[mistake]
    with pytest.raises(AssertionError, match=message):
        fs.testing.check_algorithm(made(**parts))


def test_an_algorithm_without_a_problem_is_named() -> None:
    nothing = made(levels=range(0), dual=None)
    with pytest.raises(AssertionError, match="solves no problem"):
        fs.testing.check_algorithm(nothing)


def test_an_algorithm_or_its_class_can_be_checked() -> None:
    kind = made(round=modifying)
    for wrong in (kind, kind(lr=0.2)):
        with pytest.raises(AssertionError, match="Mine, state: round modifies x"):
            fs.testing.check_algorithm(wrong, steps=1)
    fs.testing.check_equations(made(), fedavg)
    for other in (int, 3):
        with pytest.raises(fs.InputError, match="The algorithm must be an algorithm or its class"):
            fs.testing.check_algorithm(other)  # type: ignore[arg-type]
        with pytest.raises(fs.InputError, match="The algorithm must be an algorithm or its class"):
            fs.testing.check_equations(other, fedavg)  # type: ignore[arg-type]


# --- equations -------------------------------------------------------------------------------------------------------


def fedavg(x: np.ndarray, y: np.ndarray, clients: list[fs.testing.NumpyClient], rounds: int) -> np.ndarray:
    for _ in range(rounds):
        ends = []
        for client in clients:
            z = x
            for _ in range(2):
                z = z - 0.1 * client.grads(z)[0]
            ends.append(z)
        x = np.mean(ends, axis=0)
    return x


def gda(x: np.ndarray, y: np.ndarray, clients: list[fs.testing.NumpyClient], rounds: int) -> tuple[np.ndarray, ...]:
    for _ in range(rounds):
        steps = [client.grads(x, y) for client in clients]
        x, y = x - 0.1 * np.mean([g for g, _ in steps], 0), y + 0.1 * np.mean([g for _, g in steps], 0)
    return x, y


def composed(x: np.ndarray, y: np.ndarray, clients: list[fs.testing.NumpyClient], rounds: int) -> np.ndarray:
    for _ in range(rounds):
        slopes = [client.g_vjp(1, x, client.grads(client.g(1, x))[0]) for client in clients]
        x = x - 0.1 * np.mean(slopes, axis=0)
    return x


def test_equations_agree() -> None:
    fs.testing.check_equations(fs.FedAvg(lr=0.1, steps=2), fedavg)
    fs.testing.check_equations(fs.LocalSGDA(steps=1), gda)
    fs.testing.check_equations(fs.ComFedL(steps=1), composed)
    data = fs.testing.example_for(fs.FedAvg)[1]
    assert fs.testing.NumpyClient(*fs.testing.example_for(fs.FedAvg), 1).size == data.sizes[1]


def test_other_equations_are_an_error() -> None:
    with pytest.raises(AssertionError, match=r"^fedavg: x differs from the reference by nan after 1 rounds"):
        fs.testing.check_equations(fs.FedAvg(), lambda x, *_: x * np.nan)
    with pytest.raises(AssertionError, match=r"^fedprox: x differs from the reference by .* after 1 rounds, more than"):
        fs.testing.check_equations(fs.FedProx(lr=0.1, steps=2), fedavg)
    with pytest.raises(AssertionError, match=r"^local_sgda: y differs from the reference"):
        fs.testing.check_equations(fs.LocalSGDA(steps=1, dual_lr=0.2), lambda *a: gda(*a[:3], 1), rounds=1)


def test_rounds_follow_a_schedule_inside_the_problem_as_training_does() -> None:
    data = sized_data([6, 9, 12])
    problem = fs.problems.maml(softmax_problem().model(softmax_problem().x0), inner_lr=fs.RoundDecay(0.5, 0.1))
    algorithm = fs.LocalMOML(steps=2)
    run = fs.train(problem, data, algorithm, rounds=3, batch_size=4)
    state, _ = play(algorithm, problem, data, 3, batch_size=4)
    torch.testing.assert_close(algorithm.solution(state)[0], run.x, atol=1e-12, rtol=0)


def test_graphs_of_an_example_are_shared_and_go_with_it() -> None:
    problem = softmax_problem()
    oracles = weakref.ref(shared_oracles(problem))
    assert shared_oracles(problem) is oracles()
    assert shared_oracles(replace(problem)) is not oracles()
    del problem
    gc.collect()
    assert oracles() is None


class Point(NamedTuple):
    """A state that has no x."""

    point: torch.Tensor


def test_a_state_need_not_have_an_x_to_be_resumed() -> None:
    def start(self: Any, x: torch.Tensor, y: torch.Tensor, clients: fs.Clients) -> Point:
        return Point(x)

    def round(self: Any, s: Point, clients: fs.Clients) -> Point:
        return Point(s.point + clients.mean(self.local, s.point))

    def solution(self: Any, s: Point) -> tuple[torch.Tensor, None]:
        return s.point, None

    kind = made(start=start, round=round, solution=solution)
    fs.testing.check_resume(kind(), *fs.testing.example_for(kind))
