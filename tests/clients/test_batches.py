"""Batches are gathered for several steps at once: how many makes no difference to what a batch holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fedstrata as fs
from clients.small import DECREASING, setting
from fedstrata.clients import batches
from fedstrata.data.part import Part
from fedstrata.data.sampling import Uniform
from support import make_client

Drawn = list[tuple[torch.Tensor, ...]]


EPOCH = fs.Epochs(1)


def drawn(sampling: str, steps: fs.Epochs | int = EPOCH) -> Drawn:
    """Return the arrays of every part of every batch that five unequal clients draw in a loop of two draws."""
    client = make_client(setting(sampling=sampling, batch_size=2), DECREASING)
    k = client.variables(x=torch.zeros(5, 1))
    out: Drawn = []
    for _ in client.loop(steps, k):
        out += [*client.draw().parts, *client.draw(stream=1, batch_size=3).parts]
    out += client.draw().parts
    return out


@pytest.mark.parametrize("sampling", ["uniform", "epochs", "stratified"])
@pytest.mark.parametrize("ahead", [0, 100, 500, 1 << 30])
def test_a_batch_does_not_depend_on_how_many_are_gathered_ahead(
    sampling: str, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = drawn(sampling)
    monkeypatch.setattr(batches, "AHEAD", ahead)
    again = drawn(sampling)
    assert len(again) == len(expected) > 10
    for ours, theirs in zip(again, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def steps_of_calls(owner: type, method: str, argument: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each call of a method adds the length of one of its arguments: its number of steps."""
    steps: list[int] = []
    original = getattr(owner, method)

    def counted(self: Any, *arguments: Any) -> Any:
        steps.append(len(arguments[argument]))
        return original(self, *arguments)

    monkeypatch.setattr(owner, method, counted)
    return steps


def test_a_loop_is_gathered_at_once_and_a_single_draw_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = steps_of_calls(Part, "samples", 0, monkeypatch)
    drawn("uniform", 6)
    assert steps == [6, 6, 1]


def test_a_single_client_holds_one_batch_and_draws_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = steps_of_calls(Uniform, "draw", 0, monkeypatch)
    client = make_client(setting(batch_size=2), [0])
    together = make_client(setting(batch_size=2), DECREASING)
    one, five = client.variables(x=torch.zeros(1, 1)), together.variables(x=torch.zeros(5, 1))
    for _, _ in zip(client.loop(4, one), together.loop(4, five), strict=True):
        assert torch.equal(client.draw().parts[0][0][0], together.draw().parts[0][0][0])
        (draws,) = client._batches._draws.values()
        assert len(draws._ready) == 1
    assert steps == [4, 4]


def test_what_is_gathered_ahead_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    side = setting(batch_size=2)
    client = make_client(side, DECREASING)
    limit = 2 * 5 * 2 * side.data.part(0).sample_bytes
    monkeypatch.setattr(batches, "AHEAD", limit)
    k = client.variables(x=torch.zeros(5, 1))
    for _ in client.loop(5, k):
        client.draw()
        (draws,) = client._batches._draws.values()
        assert sum(a.nbytes for arrays in draws._ready for a in arrays) <= limit


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_a_batch_of_no_samples_is_refused(size: float) -> None:
    client = make_client(setting(), DECREASING)
    with pytest.raises(fs.InputError, match="batch_size of a draw must be a whole number of at least 1"):
        client.draw(batch_size=size)  # type: ignore[arg-type]
