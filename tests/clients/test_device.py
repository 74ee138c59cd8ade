"""Local steps are ready for an accelerator: nothing in a step moves between host and device, or waits for a value.

Every local step from the second round on is watched, from the first step of a loop (graphs have been traced by then):
the operations that reach PyTorch's kernels, the functions that Python calls, and which memory is the host's
(``on_device.py`` says how). Reading a value, a NumPy round trip, a tensor made of numbers, and host memory in an
operation (a pageable copy) fail the test. So does drawing batches more than once in a loop, unless clients have left.

What this cannot show without a device: how long anything takes, what a kernel of the device does inside, whether the
copies around a loop overlap with its steps, and the code that only runs where ``device.type`` is not "cpu" (the random
words of a device, which test_rng.py compares with those of the host). A tensor that is made in one step without any
host memory counts as the device's, whatever device it was made for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from augmented import augmented
from cases import product
from clients.every import CASES, play
from clients.on_device import guarded
from fedstrata.clients.client import Client


@pytest.mark.parametrize("chunk", [7, 1])
@pytest.mark.parametrize("name", CASES)
def test_a_local_step_stays_on_the_device(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with guarded(monkeypatch) as guard:
        play(CASES[name], fs.Channel(), chunk)
    assert guard.steps


SIZES = [16, 9, 5, 12, 7]
BATCH = 4

RUNS: dict[str, tuple[Callable[[], fs.Problem], fs.Algorithm]] = {
    "fedavg": (lambda: fs.erm(net(2)), fs.FedAvg(steps=5)),
    "fedavg with random layers": (lambda: fs.erm(augmented(torch.float32, 4, 2)), fs.FedAvg(steps=5)),
    "fedavg in epochs": (lambda: fs.erm(net(2)), fs.FedAvg(steps=fs.Epochs(2))),
    "scaffold": (lambda: fs.erm(net(2)), fs.Scaffold(steps=5)),
    "fedlalr": (lambda: fs.erm(net(2)), fs.FedLALR(steps=5)),
    "fgda": (lambda: fs.auc(net(1)), fs.FGDA(steps=5)),
    "local_smcgdam": (lambda: fs.compositional_auc(net(1), 2), fs.LocalSMCGDAM(steps=5)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "stratified": {"sampling": "stratified"},
    "balanced": {"sampling": "balanced"},
    "epochs": {"sampling": "epochs"},
    "all data": {"batch_size": None},
    "faults": {"faults": fs.Faults(inject=fs.Inject(drop=0.1, nan=0.1, scale=0.1), quorum=1)},
    "bfloat16": {"autocast": "bfloat16"},
}


def net(outputs: int) -> torch.nn.Module:
    return fs.models.model("mlp", (1, 4, 4), outputs, hidden=[6], seed=0)


def images(sizes: list[int]) -> fs.FederatedData:
    """Two classes, and clients of these sizes."""
    numbers = np.random.default_rng(0)
    return fs.FederatedData.from_arrays([(numbers.random((n, 1, 4, 4), np.float32), np.arange(n) % 2) for n in sizes])


def train(name: str, options: dict[str, Any], **more: Any) -> fs.Run:
    problem, algorithm = RUNS[name]
    kept = {"rounds": 3, "batch_size": BATCH, "evaluate": fs.Evaluation("none"), **options, **more}
    return fs.train(problem(), images(SIZES), algorithm, **kept)


@product(
    *("name, options, chunk", RUNS, OPTIONS, [1, 3, 7]),
    where=lambda name, options, chunk: options == "epochs" or name != "fedavg in epochs",
)
def test_a_step_of_a_run_stays_on_the_device(
    name: str, options: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with guarded(monkeypatch) as guard:
        train(name, OPTIONS[options], chunk=chunk)
    assert guard.steps >= 8


# --- the guard sees what it should -----------------------------------------------------------------------------------

HOST = np.ones(3, np.float32)


def from_host() -> torch.Tensor:
    """Return three numbers in the memory of the host."""
    return torch.from_numpy(HOST)


MOVES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "item": lambda x, host: x.sum().item(),
    "float": lambda x, host: float(x.sum()),
    "int": lambda x, host: int(x.sum()),
    "bool": lambda x, host: bool(x.sum() > 0),
    "cpu": lambda x, host: x.cpu(),
    "numpy": lambda x, host: x.numpy(),
    "np.asarray": lambda x, host: np.asarray(x),
    "tolist": lambda x, host: x.tolist(),
    "nonzero": lambda x, host: x.nonzero(),
    "where": lambda x, host: torch.where(x > 0),
    "a mask": lambda x, host: x[x > 0],
    "masked_select": lambda x, host: x.masked_select(x > 0),
    "unique": lambda x, host: x.unique(),
    "equal": lambda x, host: torch.equal(x, x),
    "repeat_interleave": lambda x, host: x[0, :3].repeat_interleave(torch.ones_like(x[0, :3]).long()),
    "tensor": lambda x, host: torch.tensor(1.0),
    "new_tensor": lambda x, host: x.new_tensor([1.0]),
    "from_numpy": lambda x, host: torch.from_numpy(HOST),
    "as_tensor": lambda x, host: torch.as_tensor(HOST),
    "an index of numbers": lambda x, host: x[:, [0, 2]],
    "an index of NumPy": lambda x, host: x[:, np.array([0, 2])],
    "zeros": lambda x, host: torch.zeros(3),
    "arange": lambda x, host: torch.arange(3),
    "to another device": lambda x, host: x.to("cpu"),
    "to the device": lambda x, host: host.to(x.device),
    "to the like of x": lambda x, host: host.to(x),
    "copy_ of host memory": lambda x, host: torch.empty_like(x[0, :3]).copy_(host),
    "a sum with host memory": lambda x, host: x[:, :3] + host,
    "a sum with a view of host memory": lambda x, host: x[:, :2] + host[1:],
    "writing to host memory": lambda x, host: host.copy_(x[0, :3]),
}
STAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "arithmetic": lambda x, host: (2 * x + 1).exp().sum(),
    "where": lambda x, host: torch.where(x > 0, x, 0.0),
    "a copy": lambda x, host: torch.empty_like(x).copy_(x),
    "another dtype": lambda x, host: x.to(torch.float64).float(),
    "zeros there": lambda x, host: torch.zeros(3, device=x.device) + x[0, :3],
    "slices": lambda x, host: x[:, 1:3].clone(),
    "to where it is": lambda x, host: x.to(x.device),
}


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize("name", [*MOVES, *(f"stays: {name}" for name in STAYS)])
def test_what_moves_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    move = MOVES.get(name) or STAYS[name.removeprefix("stays: ")]

    class Moves(fs.Algorithm):
        """Does something in every step."""

        name = "moves"

        def round(self, s: fs.State, clients: fs.Clients) -> fs.State:
            return s._replace(x=s.x + clients.mean(self.local, s.x))

        @fs.remote
        def local(self, client: Client, x: torch.Tensor) -> torch.Tensor:
            k, host = client.variables(x=x.clone()), from_host()
            for _ in client.loop(2, k):
                move(k.x, host)
                client.descend(k.x, client.draw(), 0.01)
            return k.x - x

    rounds: list[int] = []
    run = {"rounds": 2, "batch_size": 2, "callbacks": [_Counts(rounds)], "evaluate": fs.Evaluation("none")}
    with guarded(monkeypatch):
        if name in MOVES:
            with pytest.raises(fs.FedstrataError, match="in a local step"):
                fs.train(fs.erm(net(2)), images(SIZES), Moves(), **run)
            assert rounds == [1], "the first round is not watched"
        else:
            fs.train(fs.erm(net(2)), images(SIZES), Moves(), **run)


class _Counts(fs.Callback):
    def __init__(self, rounds: list[int]) -> None:
        self.rounds = rounds

    def on_round(self, round: int, state: Any) -> None:
        self.rounds.append(round)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedlalr", "fgda", "local_smcgdam"])
@pytest.mark.parametrize("move", ["item", "cpu", "numpy", "to the device"])
def test_every_algorithm_that_moves_something_is_noticed(name: str, move: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, host = Client.draw, torch.ones(3)

    def changed(self: Client, *names: Any, **more: Any) -> Any:
        batch = draw(self, *names, **more)
        MOVES[move](batch.parts[0][0], host)
        return batch

    monkeypatch.setattr(Client, "draw", changed)
    with guarded(monkeypatch) as guard:
        guard.to_host(host)
        with pytest.raises(fs.FedstrataError, match="in a local step"):
            train(name, {})


def test_drawing_in_every_step_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstrata.clients.batches.POSITIONS_AHEAD", 1)
    with guarded(monkeypatch), pytest.raises(fs.FedstrataError, match="drawing again"):
        train("fedavg", {})
