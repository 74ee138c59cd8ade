"""Local steps are ready for an accelerator: after a loop has drawn its batches, nothing moves between host and device.

There is no such device here, so every call that would read a tensor's values, or make a tensor from numbers of the
host, is an error while a step runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

import fedstrata as fs
from augmented import augmented
from clients.every import CASES, play
from fedstrata.clients.client import Client
from fedstrata.clients.variables import Variables

READS = {
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.cpu,
    torch.Tensor.__bool__,
    torch.Tensor.__float__,
    torch.Tensor.__int__,
    torch.Tensor.__index__,
    torch.Tensor.__array__,
    torch.Tensor.nonzero,
}
MAKES = {torch.from_numpy, torch.tensor, torch.as_tensor}


class OnDevice(TorchFunctionMode):
    """Raises an error for what a device would have to wait for, while ``stepping``."""

    stepping = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.stepping and func in READS | MAKES:
            raise AssertionError(f"{func.__name__} in a local step")
        return func(*args, **(kwargs or {}))


def guarded(mode: OnDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the mode see every step but the first two of a local loop: some algorithms draw in the second one first."""
    loop, from_numpy = Client.loop, torch.from_numpy

    def steps(self: Client, steps: fs.Epochs | int, k: Variables) -> Iterator[int]:
        for step in loop(self, steps, k):
            mode.stepping = step > 1
            yield step
            mode.stepping = False

    def made(array: np.ndarray) -> torch.Tensor:  # not seen by a mode, since it takes no tensor
        if mode.stepping:
            raise AssertionError("from_numpy in a local step")
        return from_numpy(array)

    monkeypatch.setattr(Client, "loop", steps)
    monkeypatch.setattr(torch, "from_numpy", made)


@pytest.mark.parametrize("chunk", [7, 1])
@pytest.mark.parametrize("name", CASES)
def test_a_local_step_stays_on_the_device(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mode = OnDevice()
    guarded(mode, monkeypatch)
    with mode:
        play(CASES[name], fs.Channel(), chunk)


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"sampling": "stratified"},
        {"sampling": "balanced"},
        {"sampling": "epochs", "batch_size": 200},
        {"faults": fs.Faults()},
        {"autocast": "bfloat16"},
    ],
    ids=str,
)
def test_a_step_of_a_run_stays_on_the_device(
    options: dict[str, Any], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = fs.data.digits().split(fs.partition.iid(), clients=3, seed=0)
    problem = fs.erm(augmented(torch.float32))
    mode = OnDevice()
    guarded(mode, monkeypatch)
    with mode:
        fs.train(problem, data, fs.FedAvg(lr=0.1, steps=7), rounds=2, chunk=chunk, **{"batch_size": 16, **options})


@pytest.mark.usefixtures("registries")
def test_a_step_that_reads_a_value_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reads(fs.Algorithm):
        """Reads a number in every step."""

        name = "reads"

        def round(self, s: fs.State, clients: fs.Clients) -> fs.State:
            return s._replace(x=s.x + clients.mean(self.local, s.x))

        @fs.remote
        def local(self, client: Client, x: torch.Tensor) -> torch.Tensor:
            k = client.variables(x=x)
            for _ in client.loop(4, k):
                k.x = k.x - 0.01 * float(k.x.sum()) * client.grads(k.x, client.draw())
            return k.x - x

    mode = OnDevice()
    guarded(mode, monkeypatch)
    example = fs.quadratic(clients=3)
    with mode, pytest.raises(fs.FedstrataError, match="__float__ in a local step"):
        fs.train(example.problem, example.data, Reads(), rounds=1, batch_size=2)
