"""A client that has lost what it kept is left out for the rest of the round, and takes part again from the next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from cases import repeats
from fedstrata.clients.faults import Fault
from saddle_worlds import SADDLES
from support import example_for, play, without_seconds

pytestmark = pytest.mark.untraced

LOST = 2
DROP = fs.Faults(quorum=1, retries=0, inject=fs.Inject(drop=1.0, clients=(LOST,)))

STRICT: dict[str, tuple[fs.Algorithm, int, int]] = {
    "fgda": (fs.FGDA(steps=2), -1, 2),
    "fgda, single": (fs.FGDA(steps=2, synchronisation="single"), -1, 1),
    "adafgda": (fs.AdaFGDA(steps=2), -1, 2),
    "mfcgd": (fs.MFCGD(steps=2), -1, 1),
    "adamfcgd, product": (fs.AdaMFCGD(steps=2, jacobian="product"), -1, 1),
    "local_sgdam": (fs.LocalSGDAM(steps=2, average_momentum=False), -1, 1),
    "codasca": (fs.CODASCA(steps=2, stage_rounds=5), 0, 1),
    "codasca, control = false": (fs.CODASCA(steps=2, control=False), 0, 1),
    "coda": (fs.CoDA(steps=2), 0, 1),
    "local_sgda_plus": (fs.LocalSGDAPlus(steps=2, snapshot_every=8), 0, 1),
    "local_sgdam_plus": (fs.LocalSGDAMPlus(steps=2, snapshot_every=8), 0, 1),
}
"""Algorithms, the round in which clients keep what they need later, and how many exchanges of a round need it."""


class Faulty(fs.Callback):
    """Collects the faults: round, kind."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []

    def on_faults(self, faults: Sequence[Fault], names: Sequence[str]) -> None:
        assert all(fault.client == LOST and fault.left_out for fault in faults)
        self.seen += [(fault.round, fault.kind) for fault in faults]


def only_in(monkeypatch: pytest.MonkeyPatch, *wanted: tuple[int, int | None]) -> None:
    """Let injected faults happen in these rounds and exchanges only; None stands for all of a round."""
    real = fs.Inject.kinds

    def kinds(self: fs.Inject, clients: np.ndarray, round: int, exchange: int, attempt: int) -> list[str | None]:
        hit = (round, None) in wanted or (round, exchange) in wanted
        return real(self, clients, round, exchange, attempt) if hit else [None] * len(clients)

    monkeypatch.setattr(fs.Inject, "kinds", kinds)


def train(
    algorithm: fs.Algorithm, rounds: int = 4, example: Any = None, **options: Any
) -> tuple[fs.Run, list[tuple[int, str]]]:
    problem, data = example or example_for(type(algorithm))
    faulty = Faulty()
    how: dict[str, Any] = {"batch_size": 4, "chunk": 3, "faults": DROP, "eval_every": 1, "callbacks": [faulty]}
    return fs.train(problem, data, algorithm, rounds=rounds, **{**how, **options}), faulty.seen


@pytest.mark.parametrize("name", STRICT)
def test_a_client_without_its_state_takes_part_again_from_the_next_round(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, first, exchanges = STRICT[name]
    only_in(monkeypatch, (first, None))
    run, seen = train(algorithm)
    assert seen == [(first, "silent"), *[(first + 1, "lost")] * exchanges]
    assert run.summary["left_out"] == {f"client {LOST}": 1 + exchanges} and run.summary["failed"] == 1 + exchanges
    other, _ = train(algorithm, chunk=7)
    torch.testing.assert_close(run.x, other.x, atol=1e-12, rtol=0)


@pytest.mark.slow
@repeats("name", STRICT)
@pytest.mark.usefixtures("no_pictures")
def test_a_run_in_which_a_client_rejoins_can_be_resumed(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    algorithm, first, _ = STRICT[name]
    only_in(monkeypatch, (first, None))
    straight, _ = train(algorithm)
    for stop in (first + 1, first + 2):  # before the client is lost, and right after it has rejoined
        out = tmp_path / str(stop)
        if stop:
            train(algorithm, stop, out=out)
        resumed, _ = train(algorithm, out=out, resume=stop > 0)
        assert torch.equal(resumed.x, straight.x)
        assert without_seconds(resumed.history) == without_seconds(straight.history)
        assert resumed.summary["left_out"] == straight.summary["left_out"]


def test_a_client_that_does_not_answer_stays_lost_until_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    only_in(monkeypatch, (-1, None), (0, 2), (1, 2))
    run, seen = train(fs.FGDA(steps=2), rounds=5)
    each = [(0, "lost"), (0, "lost"), (0, "silent"), (1, "lost"), (1, "lost"), (1, "silent"), (2, "lost"), (2, "lost")]
    assert seen == [(-1, "silent"), *each]
    assert run.summary["failed"] == 9


MISSED: dict[str, tuple[fs.Algorithm, tuple[int, int], list[int]]] = {
    "fgda, the server's point": (fs.FGDA(steps=2), (1, 1), [2, 2]),
    "fgda, the local steps": (fs.FGDA(steps=2), (1, 0), [1]),
    "fgda, the local steps if there are none": (fs.FGDA(steps=1), (1, 0), [1]),
    "local_sgda_plus, the snapshot": (fs.LocalSGDAPlus(steps=2, snapshot_every=6), (3, 0), [4]),
    "local_sgdam_plus, the snapshot": (fs.LocalSGDAMPlus(steps=2, snapshot_every=6), (3, 0), [4]),
    "codasca, the centre": (fs.CODASCA(steps=2, stage_rounds=2), (1, 2), [2]),
    "coda, the start of the stage": (fs.CoDA(steps=2, stage_steps=6, factor=1.0), (3, 0), [4]),
    "coda, all of the stage": (fs.CoDA(steps=2, stage_steps=2, factor=1.0), (1, 0), [1]),
}
"""Algorithms, the round and exchange that a client misses, and the rounds of the exchanges in which it is then lost."""


@pytest.mark.parametrize("name", MISSED)
def test_a_client_that_missed_an_exchange_does_not_use_what_it_kept_before(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, missed, lost = MISSED[name]
    only_in(monkeypatch, missed)
    _, seen = train(algorithm, rounds=6)
    assert seen == [(missed[0], "silent"), *((round, "lost") for round in lost)]


def test_the_best_y_of_coda_is_a_change_of_the_y_of_this_round(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SADDLES["auc"]()
    only_in(monkeypatch, (1, 0))
    _, seen = train(fs.CoDA(steps=2, stage_steps=4, factor=1.0), 3, (world.problem, world.data))
    assert seen == [(1, "silent"), (1, "lost")]


def test_a_client_that_missed_the_server_s_point_does_not_start_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as if it had taken no part in the round after."""
    runs = []
    for also in ((), ((2, 0), (2, 1))):
        with monkeypatch.context() as patch:
            only_in(patch, (1, 1), *also)
            runs.append(train(fs.FGDA(steps=3), rounds=3)[0])
    torch.testing.assert_close(runs[0].x, runs[1].x, atol=1e-12, rtol=0)


@pytest.mark.usefixtures("no_pictures")
def test_a_lost_client_rejoins_before_a_round_that_has_no_quorum_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One client misses the server's point in round 1, the others but one do not answer in round 2."""
    _, data = example_for(fs.FGDA)
    others = set(range(data.clients)) - {LOST, 0}

    def kinds(self: fs.Inject, clients: np.ndarray, round: int, exchange: int, attempt: int) -> list[str | None]:
        silent = {(1, 1): {LOST}, (2, 0): others}.get((round, exchange), set())
        return ["drop" if client in silent else None for client in clients.tolist()]

    monkeypatch.setattr(fs.Inject, "kinds", kinds)
    how: dict[str, Any] = {"faults": fs.Faults(quorum=2, retries=1, inject=fs.Inject(drop=1.0)), "callbacks": []}
    run, _ = train(fs.FGDA(steps=2), **how)
    left_out = {f"client {k}": 2 for k in sorted(others)} | {f"client {LOST}": 1}
    assert run.summary["left_out"] == dict(sorted(left_out.items()))
    torch.testing.assert_close(train(fs.FGDA(steps=2), chunk=7, **how)[0].x, run.x, atol=1e-12, rtol=0)
    train(fs.FGDA(steps=2), 2, out=tmp_path, **how)
    resumed, _ = train(fs.FGDA(steps=2), out=tmp_path, resume=True, **how)
    assert torch.equal(resumed.x, run.x)
    assert without_seconds(resumed.history) == without_seconds(run.history)


@pytest.mark.slow
@pytest.mark.parametrize(
    "channel",
    [
        fs.Channel(reduce="trimmed_mean", trim=0.2),
        fs.Channel(reduce="median", bound=5.0),
        fs.Channel(clip=1.0, noise=0.1),
        fs.Channel(compress="top_k", top=0.3),
    ],
    ids=lambda channel: channel.reduce if channel.reduce != "mean" else channel.compress,
)
def test_a_channel_does_not_mind_that_few_rejoin(channel: fs.Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trimmed mean of one client would be an error, and its noise a release; what it answers is dropped."""
    if channel.noise:
        pytest.importorskip("dp_accounting")
    runs = []
    for rounds in ((), ((-1, None),)):
        with monkeypatch.context() as patch:
            only_in(patch, *rounds)
            runs.append(train(fs.FGDA(steps=2), channel=channel))
    (well, _), (run, seen) = runs
    assert seen == [(-1, "silent"), (0, "lost"), (0, "lost")]
    assert not torch.equal(well.x, run.x)
    assert well.history[-1].get("epsilon") == run.history[-1].get("epsilon")


def test_what_rejoining_takes_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, _ = example_for(fs.FGDA)
    with monkeypatch.context() as patch:
        only_in(patch)
        well, _ = train(fs.FGDA(steps=2), rounds=2)
    only_in(monkeypatch, (-1, None))
    run, _ = train(fs.FGDA(steps=2), rounds=2)
    point = (len(problem.x0) + len(problem.y0)) * problem.x0.element_size()
    first, second = ([row["bytes_up"] for row in r.history] for r in (well, run))
    assert [b - a for a, b in zip(first, second, strict=True)] == [-point, -point - 3 * point + point, -3 * point]
    assert second[2] - second[1] == first[2] - first[1], "everybody takes part again"
    down = [r.history[-1]["bytes_down"] for r in (well, run)]
    assert down[1] - down[0] == point
    assert run.history[-1]["steps"] == well.history[-1]["steps"]


def test_without_a_policy_a_lost_state_is_an_error() -> None:
    class Forgetful(fs.Algorithm):
        """Recalls what was never kept."""

        name = "forgetful"

        def round(self, s: fs.State, clients: fs.Clients) -> fs.State:
            return s._replace(x=s.x + clients.mean(self.local))

        def rejoin(self, s: fs.State, clients: fs.Clients) -> None:
            raise AssertionError("nobody rejoins")

        @fs.remote
        def local(self, client: fs.Client) -> torch.Tensor:
            return client.recall("x").x

    problem, data = example_for(fs.FedAvg)
    try:
        with pytest.raises(fs.FedstrataError, match="must have kept 'x' in an earlier exchange"):
            fs.train(problem, data, Forgetful(), rounds=1, batch_size=4)
    finally:
        del fs.algorithms.ALGORITHMS["forgetful"]


def test_rounds_without_a_training_loop_let_clients_rejoin(monkeypatch: pytest.MonkeyPatch) -> None:
    only_in(monkeypatch, (-1, None))
    algorithm = fs.FGDA(steps=2)
    run, _ = train(algorithm)
    state, usage = play(algorithm, *example_for(fs.FGDA), 4, batch_size=4, chunk=3, faults=DROP)
    assert usage.failed == run.summary["failed"]
    torch.testing.assert_close(algorithm.solution(state)[0], run.x, atol=1e-12, rtol=0)
