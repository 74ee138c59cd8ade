"""Faults: who is left out of an exchange, what the others' answers become, and what a run reports."""

from __future__ import annotations

import json
import math
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from cases import label
from clients.squares import sparse
from fedstrata.clients import Client, Clients, Simulated
from support import example_for, make_clients, make_setting, sized_data, smooth_example, without_seconds

D, LR, STEPS, N = 6, 0.1, 3, 7
SIZES = [5, 8, 4, 11, 6, 9, 7]
KINDS = ("drop", "delay", "crash", "nan", "garbage")
"""Those that leave a client out, all with the same chance."""
OPTIONS: dict[str, Any] = {"evaluate": lambda *_: {}, "eval_every": 1, "seed": 2}


pytestmark = pytest.mark.usefixtures("no_pictures")


@cache
def squares() -> tuple[fs.Problem, fs.FederatedData]:
    """Least squares whose clients disagree."""
    draw = np.random.default_rng(0)
    pairs = [(draw.normal(size=(n, D)), draw.normal(size=n) + 2 * draw.normal()) for n in SIZES]

    def outer(x: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return 0.5 * ((batch[0] @ x - batch[1]) ** 2).mean()

    x0 = torch.from_numpy(draw.normal(size=D))
    return fs.Problem(outer, x0, name="squares"), fs.FederatedData.from_arrays(pairs, name="squares")


def train(faults: fs.Faults | None, rounds: int = 1, algorithm: fs.Algorithm | None = None, **options: Any) -> fs.Run:
    problem, data = squares()
    algorithm = fs.FedAvg(lr=LR, steps=STEPS) if algorithm is None else algorithm
    return fs.train(problem, data, algorithm, rounds=rounds, faults=faults, **{**OPTIONS, **options})


def always(kind: str, *clients: int, **options: Any) -> fs.Faults:
    """These clients fail in every exchange."""
    return fs.Faults(inject=fs.Inject(clients=clients, **{kind: 1.0}), **{"retries": 0, "timeout": 1.0, **options})


def own_change(client: int, x: np.ndarray, drift: np.ndarray | float = 0.0) -> np.ndarray:
    """What a client's steps add to x."""
    a, b = (t.numpy() for t in squares()[1].train.of_client(client))
    point = x.copy()
    for _ in range(STEPS):
        point = point - LR * (a.T @ (a @ point - b) / len(b) + drift)
    return point - x


def engine(faults: fs.Faults | None, channel: fs.Channel | None = None) -> Clients:
    """Clients that stand at the start of round 0."""
    clients = Clients(Simulated(make_setting(*squares()), 3, channel or fs.Channel(), faults), 10)
    clients.begin(0)
    return clients


def names(client: Client) -> torch.Tensor:
    """Answer with the client's number."""
    return torch.from_numpy(client.ids).double()


# --- who is left out -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_round_is_the_mean_of_those_that_answered(kind: str, weighting: str) -> None:
    x0 = squares()[0].x0.numpy()
    present = [k for k in range(N) if k not in (1, 3)]
    weights = np.array(SIZES)[present] if weighting == "samples" else None
    expected = x0 + np.average([own_change(k, x0) for k in present], axis=0, weights=weights)
    for chunk in (1, 3, 7):
        run = train(always(kind, 1, 3), weighting=weighting, chunk=chunk)
        np.testing.assert_allclose(run.x.numpy(), expected, atol=1e-12)
        assert run.summary["failed"] == 2
        assert run.summary["left_out"] == {"client 1": 1, "client 3": 1}


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("kind", ["drop", "nan", "garbage"])
def test_control_variates_move_by_the_share_that_answered(kind: str, weighting: str) -> None:
    """Two rounds of SCAFFOLD, in the second of which c matters; clients 1 and 3 never answer."""
    sizes = np.array(SIZES) if weighting == "samples" else np.ones(N)
    present = [k for k in range(N) if k not in (1, 3)]
    x, c, own = squares()[0].x0.numpy(), np.zeros(D), np.zeros((N, D))
    for _ in range(2):
        changes = {k: own_change(k, x, c - own[k]) for k in present}
        new = {k: own[k] - c - changes[k] / (STEPS * LR) for k in present}
        dx = np.average([changes[k] for k in present], axis=0, weights=sizes[present])
        dc = np.average([new[k] - own[k] for k in present], axis=0, weights=sizes[present])
        x, c = x + dx, c + sizes[present].sum() / sizes.sum() * dc
        own = np.array([new.get(k, own[k]) for k in range(N)])
    run = train(always(kind, 1, 3), 2, fs.Scaffold(lr=LR, steps=STEPS), weighting=weighting, chunk=3)
    np.testing.assert_allclose(run.x.numpy(), x, atol=1e-12)


@pytest.mark.parametrize("channel", [fs.Channel(), fs.Channel(compress="top_k", top=0.3)], ids=["plain", "top_k"])
def test_a_client_forgets_an_exchange_that_it_was_left_out_of(channel: fs.Channel) -> None:
    """What it kept would not fit what the server knows: with control variates the error would stay for good."""
    algorithm = fs.Scaffold(lr=LR, steps=STEPS)
    silent, *others = (
        train(fs.Faults(quorum=1, retries=0, inject=fs.Inject(**{kind: 0.3})), 5, algorithm, channel=channel)
        for kind in ("drop", "nan", "garbage")
    )
    assert silent.summary["failed"] > 5
    for run in others:
        assert run.summary["left_out"] == silent.summary["left_out"]
        torch.testing.assert_close(run.x, silent.x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["drop", "nan", "garbage"])
def test_a_gathered_row_of_a_client_that_is_left_out_is_the_mean_of_the_others(kind: str) -> None:
    clients = engine(always(kind, 1, 3))
    with torch.no_grad():
        found = clients.gather(names)
    assert found.tolist() == [0, 17 / 5, 2, 17 / 5, 4, 5, 6]
    assert clients.usage.failed == 2


def test_whole_numbers_are_gathered_too() -> None:
    clients = engine(always("nan", 1, 3))
    counts = clients.gather(lambda client: torch.from_numpy(client.ids)[:, None].expand(-1, 2))
    assert counts[[0, 2, 4, 5, 6], 0].tolist() == [0, 2, 4, 5, 6]
    assert 3 <= counts[1, 1] <= 4  # 17 / 5, or a whole number next to it


def test_a_maximum_is_of_those_that_answered() -> None:
    assert engine(always("nan", 5, 6)).max(names) == 4
    assert engine(always("drop", 5, 6)).combine(("max",), names) == 4


@pytest.mark.parametrize(
    "channel", [fs.Channel(reduce="median"), fs.Channel(reduce="trimmed_mean", trim=0.4)], ids=label
)
def test_medians_are_of_those_that_answered(channel: fs.Channel) -> None:
    clients = engine(always("garbage", 0, 6), channel=channel)
    assert clients.mean(lambda client: names(client) ** 2) == 9  # of 1, 4, 9, 16, 25


def test_noise_is_that_of_the_clients_that_answered() -> None:
    """Where six of seven are left out, the seventh has all the weight."""
    problem, _ = squares()
    algorithm = fs.FedAvg(lr=LR, steps=1)
    faults = always("drop", *range(1, 7), quorum=1)
    found = []
    for policy in (faults, None):
        noisy, quiet = (engine(policy, channel=fs.Channel(clip=1.0, noise=noise)) for noise in (1.0, 0.0))
        with torch.no_grad():
            found.append(noisy.mean(algorithm.local, problem.x0) - quiet.mean(algorithm.local, problem.x0))
    torch.testing.assert_close(found[0], 7 * found[1], rtol=1e-9, atol=0)


def test_a_client_that_is_drawn_twice_is_left_out_twice() -> None:
    clients = engine(always("drop", 1))
    drawn = clients.choose(4, probabilities=np.array([0.0, 1e9, 1e9, 0, 0, 0, 0]))
    cohort = drawn.cohort.tolist()
    assert set(cohort) == {1, 2}
    assert drawn.gather(names).tolist() == [2.0] * 4
    assert clients.usage.failed == cohort.count(1)


def test_an_injected_scale_multiplies_the_change_and_leaves_nobody_out() -> None:
    x0 = squares()[0].x0.numpy()
    expected = x0 + np.mean([(-7.0 if k == 2 else 1.0) * own_change(k, x0) for k in range(N)], axis=0)
    faults = fs.Faults(inject=fs.Inject(scale=1.0, factor=-7.0, clients=(2,)))
    for chunk in (1, 7):
        run = train(faults, chunk=chunk)
        np.testing.assert_allclose(run.x.numpy(), expected, atol=1e-12)
        assert run.summary["failed"] == 0 and run.summary["left_out"] == {}


@pytest.mark.parametrize("kind", ["drop", "nan", "garbage", "scale"])
def test_clients_may_fail_when_a_problem_queries_them(kind: str) -> None:
    problem, data = smooth_example()
    assert problem.flat is not None
    faults = fs.Faults(retries=0, inject=fs.Inject(clients=(1,), factor=2.0, **{kind: 1.0}))
    run = fs.train(fs.robust(problem.flat.module, prior=False), data, fs.ComFedL(steps=2), rounds=1, faults=faults)
    # Asked for the first losses, for the first weights, and in the round.
    assert run.summary["failed"] == (0 if kind == "scale" else 3)


# --- faults on purpose -----------------------------------------------------------------------------------------------


EVERY = fs.Inject(drop=0.1, delay=0.05, crash=0.15, nan=0.1, garbage=0.2, scale=0.1, seed=3)


def test_injected_faults_have_their_frequencies() -> None:
    many = np.arange(20_000)
    found = EVERY.kinds(many, 4, 1, 0)
    for kind in (*KINDS, "scale"):
        p = getattr(EVERY, kind)
        assert abs(found.count(kind) / len(many) - p) < 5 * math.sqrt(p * (1 - p) / len(many)), kind
    assert abs(found.count(None) / len(many) - 0.3) < 5 * math.sqrt(0.21 / len(many))


def test_injected_faults_are_of_seed_round_exchange_attempt_and_client() -> None:
    many = np.arange(2000)
    found = EVERY.kinds(many, 4, 1, 0)
    assert EVERY.kinds(many, 4, 1, 0) == found
    assert EVERY.kinds(many[::-1], 4, 1, 0) == found[::-1]
    assert EVERY.kinds(many[5:9], 4, 1, 0) == found[5:9]
    other = fs.Inject(**{**vars(EVERY), "seed": 4})
    for again in (EVERY.kinds(many, 5, 1, 0), EVERY.kinds(many, 4, 2, 0), EVERY.kinds(many, 4, 1, 1)):
        assert 0.1 < np.mean([a == b for a, b in zip(found, again, strict=True)]) < 0.3
    assert other.kinds(many, 4, 1, 0) != found


def test_injected_faults_are_those_of_the_clients_named() -> None:
    some = fs.Inject(drop=0.5, nan=0.5, clients=[3, 1])
    found = some.kinds(np.arange(5), 0, 0, 0)
    assert [k for k, kind in enumerate(found) if kind] == [1, 3]
    assert fs.Inject(drop=1.0).kinds(np.arange(5), 0, 0, 0) == ["drop"] * 5
    assert fs.Inject().kinds(np.arange(5), 0, 0, 0) == [None] * 5


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "faults.jsonl").read_text().splitlines()]


def test_faults_do_not_depend_on_the_chunk(tmp_path: Path) -> None:
    faults = fs.Faults(quorum=1, timeout=1.0, inject=EVERY)
    runs = {c: train(faults, 5, chunk=c, participation=5, out=tmp_path / str(c)) for c in (1, 3, 7)}
    found = [sorted(lines(tmp_path / str(c)), key=str) for c in runs]
    assert found[0] and found[0] == found[1] == found[2]
    for chunk in (3, 7):
        torch.testing.assert_close(runs[chunk].x, runs[1].x, rtol=1e-9, atol=1e-9)
        counted = [{k: v for k, v in r.items() if k != "bytes_up"} for r in without_seconds(runs[chunk].history)]
        assert counted == [{k: v for k, v in r.items() if k != "bytes_up"} for r in without_seconds(runs[1].history)]
        assert runs[chunk].summary["left_out"] == runs[1].summary["left_out"]


def test_a_delay_below_the_timeout_does_nothing() -> None:
    plain = train(None, 2)
    in_time = fs.Inject(delay=1.0, seconds=5.0)
    run = train(fs.Faults(timeout=5.0, inject=in_time), 2)
    assert torch.equal(run.x, plain.x) and run.summary["failed"] == 0
    with pytest.raises(fs.QuorumError, match=r"client 0 \(answered after 5 s\), client 1"):
        train(fs.Faults(timeout=4.9, inject=in_time), 2)


def test_watching_for_faults_changes_nothing_where_there_are_none() -> None:
    plain, watched = train(None, 3, participation=4), train(fs.Faults(), 3, participation=4)
    assert torch.equal(plain.x, watched.x)
    for row, other in zip(without_seconds(plain.history), without_seconds(watched.history), strict=True):
        assert {**row, "failed": 0} == other


@pytest.mark.parametrize("kind", [*KINDS, "scale"])
@pytest.mark.parametrize("compress", ["none", "top_k"])
def test_an_answer_that_is_refused_was_sent_all_the_same(kind: str, compress: str) -> None:
    """No bytes come from a client that is silent; those of a bad answer count."""
    channel = fs.Channel(**sparse(compress, 0.5))
    plain = train(None, channel=channel).summary
    run = train(always(kind, 1, 3), channel=channel, chunk=2).summary
    answered = N if kind in ("nan", "garbage", "scale") else N - 2
    assert run["bytes_up"] * N == plain["bytes_up"] * answered
    assert run["bytes_down"] == plain["bytes_down"]


# --- quorum and retries ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quorum", "needed"),
    [(0.5, [1, 1, 4, 5]), (1.0, [1, 2, 7, 10]), (0.3, [1, 1, 3, 3]), (1, [1, 1, 1, 1]), (6, [1, 2, 6, 6])],
)
def test_a_quorum_is_a_share_or_a_number(quorum: float, needed: list[int]) -> None:
    assert [fs.Faults(quorum=quorum).needed(cohort) for cohort in (1, 2, 7, 10)] == needed


def script(monkeypatch: pytest.MonkeyPatch, *attempts: dict[int, str]) -> list[list[int]]:
    """Let clients fail in each attempt as given; return who is asked, attempt by attempt."""
    asked: list[list[int]] = []

    def kinds(self: fs.Inject, clients: np.ndarray, round: int, exchange: int, attempt: int) -> list[str | None]:
        asked.append(clients.tolist())
        return [attempts[attempt].get(k) for k in clients.tolist()]

    monkeypatch.setattr(fs.Inject, "kinds", kinds)
    return asked


def ask(faults: fs.Faults) -> tuple[torch.Tensor, Clients]:
    """One exchange, with a message of ten bytes to each client."""
    clients = engine(faults)
    message = torch.zeros(10, dtype=torch.uint8)
    return clients.mean(lambda client, _: names(client)[:, None], message), clients


def retrying(quorum: float, retries: int = 3) -> fs.Faults:
    return fs.Faults(quorum=quorum, retries=retries, timeout=1.0, inject=fs.Inject())


def test_only_the_silent_are_asked_again_and_only_below_the_quorum(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = {1: "drop", 2: "nan", 3: "delay", 5: "crash", 6: "garbage"}, {3: "drop", 5: "nan"}
    asked = script(monkeypatch, first, second, {}, {})
    found, clients = ask(retrying(4))
    assert asked == [[0, 1, 2, 3, 4, 5, 6], [1, 3, 5], [3]]
    assert float(found) == pytest.approx((0 + 1 + 3 + 4) / 4)
    assert clients.usage.bytes_down == 10 * (7 + 3 + 1)
    assert clients.usage.failed == 3  # 2, 5 and 6; not those that answered in the end
    logged = [(f.attempt, f.client, f.kind) for f in clients.faults]
    assert sorted(logged[:5], key=lambda t: t[1]) == [
        *((0, 1, "silent"), (0, 2, "nan"), (0, 3, "silent"), (0, 5, "silent"), (0, 6, "shape"))
    ]
    assert sorted(logged[5:], key=lambda t: t[1]) == [(1, 3, "silent"), (1, 5, "nan")]


def test_nobody_is_asked_again_if_the_quorum_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = script(monkeypatch, {1: "drop", 3: "drop", 5: "drop"})
    found, clients = ask(retrying(4))
    assert len(asked) == 1 and clients.usage.failed == 3 and clients.usage.bytes_down == 70
    assert float(found) == pytest.approx((0 + 2 + 4 + 6) / 4)


def test_those_that_answer_badly_are_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = script(monkeypatch, {1: "nan", 3: "garbage"})
    with pytest.raises(fs.QuorumError) as stopped:
        ask(retrying(1.0))
    assert len(asked) == 1
    assert "Only 5 of 7 clients answered" in str(stopped.value) and "times" not in str(stopped.value)


def test_the_error_names_clients_quorum_and_attempts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = script(monkeypatch, {1: "drop", 2: "nan", 4: "delay"}, {1: "crash", 4: "delay"}, {1: "drop"})
    with pytest.raises(fs.QuorumError) as stopped:
        train(retrying(6, retries=2), 2, out=tmp_path / "run")
    assert len(asked) == 3
    assert str(stopped.value) == (
        "Only 5 of 7 clients answered local of fedavg in round 1 after asking 3 times, fewer than the quorum of 6. "
        "Left out: client 1 (did not answer), client 2 (answered with NaN or infinity)."
    )
    logged = sorted((f["attempt"], f["client"]) for f in lines(tmp_path / "run"))
    assert logged == [(0, 1), (0, 2), (0, 4), (1, 1), (1, 4), (2, 1)]
    assert {f["client"]: f["left_out"] for f in lines(tmp_path / "run")} == {1: True, 2: True, 4: False}


def test_the_error_says_where_the_last_checkpoint_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def late(self: fs.Inject, clients: np.ndarray, round: int, *_: int) -> list[str | None]:
        return ["drop" if round == 1 and k < 2 else None for k in clients.tolist()]

    monkeypatch.setattr(fs.Inject, "kinds", late)
    with pytest.raises(fs.QuorumError, match="in round 2") as stopped:
        train(retrying(6, retries=0), 3, out=tmp_path / "run")
    assert str(stopped.value).endswith(f" The last good checkpoint is kept in {tmp_path / 'run'}.")


def test_the_error_names_clients_as_they_are_called() -> None:
    problem, data = squares()
    called = [f"hospital {letter}" for letter in "abcdefg"]
    pairs = [data.train.of_client(k) for k in range(N)]
    data = fs.FederatedData.from_arrays(pairs, client_names=called)
    how = {"rounds": 1, **OPTIONS}
    with pytest.raises(
        fs.QuorumError, match=r"Left out: hospital b \(did not answer\), hospital d \(did not answer\)\.$"
    ):
        fs.train(problem, data, fs.FedAvg(), faults=always("drop", 1, 3, quorum=1.0), **how)
    run = fs.train(problem, data, fs.FedAvg(), faults=always("drop", 1, 3), **how)
    assert run.summary["left_out"] == {"hospital b": 1, "hospital d": 1}
    with pytest.raises(fs.QuorumError, match=r"hospital f .*, hospital g \(did not answer\)\.$"):
        fs.train(problem, data, fs.FedAvg(), faults=always("drop"), **how)


def test_a_long_list_of_names_is_cut_short() -> None:
    data = sized_data([2] * 12)
    with pytest.raises(fs.QuorumError, match=r"client 7 \(did not answer\) and 4 more\.$"):
        fs.train(fs.erm(torch.nn.Linear(3, 2).double()), data, fs.FedAvg(), rounds=1, faults=always("drop"), **OPTIONS)


@pytest.mark.parametrize("channel", [fs.Channel(), fs.Channel(compress="top_k", top=0.3)], ids=["plain", "top_k"])
def test_a_client_that_answers_when_asked_again_is_not_counted_twice(channel: fs.Channel) -> None:
    """If everybody answers in the end, only the bytes sent down differ from a run without faults."""
    algorithm = fs.Scaffold(lr=LR, steps=STEPS)
    faults = fs.Faults(quorum=1.0, retries=20, inject=fs.Inject(drop=0.3, crash=0.2))
    plain, run = (train(f, 4, algorithm, channel=channel, participation=5) for f in (None, faults))
    torch.testing.assert_close(run.x, plain.x, rtol=0, atol=1e-12)
    found = run.summary
    assert found["bytes_down"] > 1.3 * plain.summary["bytes_down"]
    assert found["failed"] == 0 and found["left_out"] == {}
    for what in ("bytes_up", "samples", "steps"):
        assert found[what] == plain.summary[what]


def in_round_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients 0 to 3 do not answer in round 4, client 5 not in round 2."""

    def kinds(self: fs.Inject, clients: np.ndarray, round: int, exchange: int, attempt: int) -> list[str | None]:
        return ["drop" if (round == 3 and k < 4) or (round == 1 and k == 5) else None for k in clients.tolist()]

    monkeypatch.setattr(fs.Inject, "kinds", kinds)


@pytest.mark.parametrize("channel", [fs.Channel(), fs.Channel(compress="top_k", top=0.3)], ids=["plain", "top_k"])
def test_a_run_below_the_quorum_is_resumed_with_a_lower_one(
    channel: fs.Channel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_round_four(monkeypatch)
    algorithm, out = fs.Scaffold(lr=LR, steps=STEPS), tmp_path / "run"
    straight = train(retrying(3, 0), 6, algorithm, channel=channel, out=tmp_path / "straight")
    for again in (False, True):
        with pytest.raises(fs.QuorumError, match=r"Only 3 of 7 .* in round 4.*, fewer than the quorum of 4"):
            train(retrying(0.5, 1 if again else 0), 6, algorithm, channel=channel, out=out, resume=again)
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert without_seconds(rows) == without_seconds(straight.history[:4])
    resumed = train(retrying(3, 0), 6, algorithm, channel=channel, out=out, resume=True)
    assert torch.equal(resumed.x, straight.x)
    assert without_seconds(resumed.history) == without_seconds(straight.history)
    assert without_seconds([resumed.summary]) == without_seconds([straight.summary])
    assert lines(out) == lines(tmp_path / "straight")


def test_a_run_is_not_resumed_with_other_injected_faults(tmp_path: Path) -> None:
    train(always("drop", 1), 1, out=tmp_path / "run")
    with pytest.raises(fs.InputError, match=r"faults\.inject\.clients was \[1\] and is now \[2\]"):
        train(always("drop", 2), 2, out=tmp_path / "run", resume=True)
    train(always("drop", 1, quorum=2, retries=4, timeout=3.0, max_bytes=10**6), 2, out=tmp_path / "run", resume=True)


# --- what a run reports ----------------------------------------------------------------------------------------------


def test_those_left_out_are_in_every_row_in_a_file_and_in_the_summary(tmp_path: Path) -> None:
    run = train(always("nan", 1, 3), 3, out=tmp_path / "run")
    assert [row["failed"] for row in run.history] == [0, 2, 4, 6]
    assert run.summary["failed"] == 6
    assert run.summary["left_out"] == {"client 1": 3, "client 3": 3}
    written = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["failed"] for row in written] == [0, 2, 4, 6]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["left_out"] == run.summary["left_out"]
    assert lines(tmp_path / "run") == [
        {
            **{"round": r, "exchange": 0, "attempt": 0, "client": k, "left_out": True},
            **{"kind": "nan", "detail": "answered with NaN or infinity"},
        }
        for r in (1, 2, 3)
        for k in (3, 1)  # the larger one first
    ]


def test_the_summary_counts_exchanges_as_the_rows_do() -> None:
    """Not attempts: a client that answers when asked again was not left out."""
    run = train(fs.Faults(quorum=6, retries=3, inject=fs.Inject(drop=0.4)), 4)
    assert sum(run.summary["left_out"].values()) == run.summary["failed"] > 0


def test_a_resumed_run_reports_all_its_faults_once(tmp_path: Path) -> None:
    """Also those before the stop, and those of a repeated round once."""

    class Stop(fs.Callback):
        def on_round(self, round: int, state: fs.State) -> None:
            if round == 3:
                raise KeyboardInterrupt

    faults = fs.Faults(quorum=1, retries=0, inject=fs.Inject(drop=0.2, nan=0.2))
    straight = train(faults, 6, out=tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        train(faults, 6, out=tmp_path / "run", checkpoint_every=2, callbacks=[Stop()])
    resumed = train(faults, 6, out=tmp_path / "run", resume=True)
    assert without_seconds([resumed.summary]) == without_seconds([straight.summary])
    assert lines(tmp_path / "run") == lines(tmp_path / "straight")


def test_faults_before_the_first_round_are_reported_once(tmp_path: Path) -> None:
    problem, data = smooth_example()
    assert problem.flat is not None
    how = {**OPTIONS, "faults": always("drop", 1)}
    for rounds in (1, 2):
        out = {"out": tmp_path / "run", "resume": True}
        run = fs.train(
            fs.robust(problem.flat.module, prior=False), data, fs.ComFedL(steps=2), rounds=rounds, **how, **out
        )
    assert [(f["round"], f["exchange"]) for f in lines(tmp_path / "run")] == [(0, 0), (0, 1), (1, 0), (2, 0)]
    assert run.summary["left_out"] == {"client 1": run.summary["failed"]} == {"client 1": 4}


def test_a_client_that_answered_in_the_end_is_reported_as_such(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script(monkeypatch, {1: "drop", 3: "drop"}, {3: "drop"})
    run = train(retrying(6, 1), out=tmp_path / "run")
    logged = [(f["attempt"], f["client"], f["left_out"]) for f in lines(tmp_path / "run")]
    assert logged == [(0, 1, False), (0, 3, True), (1, 3, True)]
    assert run.summary["left_out"] == {"client 3": 1}


def test_callbacks_hear_of_faults() -> None:
    heard = []

    class Hearing(fs.Callback):
        def on_faults(self, faults: Any, names: Any) -> None:
            heard.append([(f.round, f.client, f.kind) for f in faults])

    train(always("drop", 1, 3), 2, callbacks=[Hearing()])
    assert heard == [[(0, 1, "silent"), (0, 3, "silent")], [(1, 1, "silent"), (1, 3, "silent")]]


def rooted(*starts: float) -> tuple[fs.Problem, fs.FederatedData]:
    """A problem whose clients with a negative start have NaN for a gradient."""

    def outer(x: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return -(x + batch[0]).sqrt().sum(1).mean()

    pairs = [(np.full((3, 2), start), np.zeros(3)) for start in starts]
    return fs.Problem(outer, torch.zeros(2, dtype=torch.float64), name="roots"), fs.FederatedData.from_arrays(pairs)


@pytest.mark.parametrize("algorithm", [fs.FedAvg(lr=0.1, steps=2), fs.Scaffold(lr=0.1, steps=2)], ids=lambda a: a.name)
def test_a_client_that_always_answers_with_nan_is_left_out_and_the_others_learn(algorithm: fs.Algorithm) -> None:
    problem, data = rooted(1.0, -50.0, 2.0)
    run = fs.train(problem, data, algorithm, rounds=4, faults=fs.Faults(), **OPTIONS)
    without = fs.train(*rooted(1.0, 2.0), algorithm, rounds=4, **OPTIONS)
    assert run.summary["left_out"] == {"client 1": 4}
    if algorithm.name == "fedavg":
        torch.testing.assert_close(run.x, without.x, rtol=1e-12, atol=0)
    assert bool((run.x > 0.1).all())


def test_without_faults_nan_is_a_run_that_diverged(tmp_path: Path) -> None:
    problem, data = rooted(1.0, -50.0, 2.0)
    with pytest.raises(fs.Diverged, match=r"^fedavg diverged in round 1: 2 of 2 entries of x are NaN or infinite"):
        fs.train(problem, data, fs.FedAvg(), rounds=4, out=tmp_path / "run", **OPTIONS)
    run = train(None, 2, out=tmp_path / "good")
    assert not {"failed", "left_out"} & {*run.summary, *run.history[-1]}
    assert not (tmp_path / "good" / "faults.jsonl").exists()


def test_where_everybody_answers_with_nan_the_rate_is_to_blame() -> None:
    problem, data = smooth_example()
    how: dict[str, Any] = {"rounds": 3, "batch_size": 4, "faults": fs.Faults(retries=4)}
    with pytest.raises(fs.QuorumError) as stopped:
        fs.train(problem, data, fs.FedProx(lr=1e200, mu=1e200, steps=5), **how)
    message = str(stopped.value)
    assert message.startswith("Only 0 of 7 clients answered local of fedprox in round 1, fewer than the quorum of 4.")
    assert "No answer was finite: try a smaller learning rate." in message


# --- learning all the same -------------------------------------------------------------------------------------------

LEARNING = [
    (fs.FedAvg(lr=0.2, steps=5), "erm"),
    (fs.Scaffold(lr=0.2, steps=5), "erm"),
    (fs.LocalSGDA(lr=0.2, dual_lr=0.02, steps=5), "fair"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "kind"), LEARNING, ids=[a.name for a, _ in LEARNING])
def test_digits_are_learned_although_a_third_of_the_clients_fail(
    algorithm: fs.Algorithm, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every exchange each client fails with a chance of 30 %, and client 2 always sends NaN."""
    real = fs.Inject.kinds

    def kinds(self: fs.Inject, clients: np.ndarray, *when: int) -> list[str | None]:
        return ["nan" if k == 2 else f for k, f in zip(clients.tolist(), real(self, clients, *when), strict=True)]

    monkeypatch.setattr(fs.Inject, "kinds", kinds)
    data = fs.data.digits().split(fs.partition.dirichlet(1.0), clients=10, seed=0)
    model = fs.models.model("logreg", (1, 8, 8), 10)
    problem = fs.erm(model) if kind == "erm" else fs.fair(model, classes=10, regularise=5.0)
    faults = fs.Faults(quorum=0.3, inject=fs.Inject(drop=0.1, nan=0.1, garbage=0.1))
    how: dict[str, Any] = {"rounds": 60, "batch_size": 16, "eval_every": 60}
    clean, run = (fs.train(problem, data, algorithm, faults=f, **how) for f in (None, faults))
    assert clean.summary["accuracy"] > 0.9
    assert run.summary["accuracy"] > clean.summary["accuracy"] - 0.02
    exchanges = 60 + 1 + (kind == "fair")  # class counts come first
    assert run.summary["left_out"]["client 2"] == exchanges
    assert 0.25 < (run.summary["failed"] - exchanges) / (9 * exchanges) < 0.35


# --- settings --------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[type, dict[str, Any], str]] = [
    *((fs.Faults, {"quorum": q},
       f"quorum of the faults must be a fraction in (0, 1] or a whole number of at least 1. Got {q!r}.")
      for q in (0, 0.0, -1, 1.5, math.nan, True, "1", None)),
    *((fs.Faults, {"retries": r}, f"retries of the faults must be a whole number of at least 0. Got {r!r}.")
      for r in (-1, 1.0, True, "1")),
    *((fs.Faults, {"timeout": t}, f"timeout of the faults must be a number above 0. Got {t!r}.")
      for t in (0.0, -1.0, math.inf, math.nan, "1", None)),
    *((fs.Faults, {"max_bytes": m},
       f"max_bytes of the faults must be a whole number of at least 1, or left out. Got {m!r}.")
      for m in (0, 1.5, "1", True)),
    *((fs.Inject, {kind: p}, f"{kind} of the injected faults must be a number from 0 to 1. Got {p!r}.")
      for kind, p in (("drop", -0.1), ("nan", 1.1), ("scale", math.nan), ("crash", "1"), ("delay", None))),
    (fs.Inject, {"drop": 0.6, "nan": 0.5}, "sum of the injected faults' probabilities must be at most 1. Got 1.1."),
    *((fs.Inject, {"seconds": t}, f"seconds of the injected faults must be a number of at least 0. Got {t!r}.")
      for t in (-1.0, math.inf, "1")),
    *((fs.Inject, {"factor": f}, f"factor of the injected faults must be a number. Got {f!r}.")
      for f in (math.inf, math.nan, "1")),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "wanted"), REFUSED, ids=[str(options) for _, options, _ in REFUSED])
def test_wrong_settings_are_refused(kind: type, options: dict[str, Any], wanted: str) -> None:
    with pytest.raises(fs.InputError) as refused:
        kind(**options)
    assert str(refused.value) == f"The {wanted}"


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"inject": {"drop": 0.1}}, "inject of the faults"),
        ({"inject": fs.Inject(drop=1.0, clients=(1, 99))}, "clients of the injected faults"),
    ],
    ids=["no Inject", "no such client"],
)
def test_faults_that_no_client_can_have_are_refused(options: dict[str, Any], wanted: str) -> None:
    """Otherwise nothing would be injected."""
    with pytest.raises(fs.InputError, match=f"^The {wanted} must be "):
        train(fs.Faults(**options))


@pytest.mark.parametrize("clients", [3, ("a",), (-1,), (1.0,)], ids=repr)
def test_clients_with_faults_are_whole_numbers(clients: Any) -> None:
    with pytest.raises(fs.InputError, match=r"^The clients of the injected faults must be "):
        fs.Inject(drop=1.0, clients=clients)


@pytest.mark.parametrize("wrong", [True, 0.5, "drop", {"quorum": 1}, fs.Inject()], ids=repr)
def test_a_value_that_is_not_a_faults_policy_is_refused(wrong: Any) -> None:
    wanted = r"^The faults of the run must be Faults, e\.g\. fs\.Faults\(quorum=0\.5\), or left out\. Got "
    with pytest.raises(fs.InputError, match=wanted):
        train(wrong)


# --- in a file -------------------------------------------------------------------------------------------------------

FILE = """
[data]
clients = 4
[model]
name = "logreg"
[problem]
prior = false
[algorithm]
lr = 0.1
steps = 2
[train]
rounds = 2
batch_size = 8
[channel]
compress = "top_k"
top = 0.1
clip = 0.5
[faults]
quorum = 2
retries = 1
[faults.inject]
nan = 1.0
clients = [1]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "e.toml"
    path.write_text(FILE)
    return path


def test_the_tables_of_a_file_reach_the_run(fedstrata: Any, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, printed, progress = fedstrata("run", file, "--out", out, "--json")
    assert code == 0, progress
    summary = json.loads(printed)
    assert summary["left_out"] == {"client 1": 2} and summary["failed"] == 2
    assert summary["bytes_up"] == 2 * 4 * 65 * (4 + 4)  # 650 weights, a tenth of them
    assert "fedavg: round 1: left out: client 1 (answered with NaN or infinity)" in progress
    tables = tomllib.loads((out / "config.toml").read_text())
    assert {**tables["channel"], "compress": "top_k", "top": 0.1, "clip": 0.5} == tables["channel"]
    assert tables["faults"]["quorum"] == 2 and tables["faults"]["retries"] == 1
    assert tables["faults"]["inject"]["clients"] == [1] and tables["faults"]["inject"]["nan"] == 1.0
    data = fs.data.digits().split(fs.partition.iid(), clients=4, seed=0)
    problem = fs.erm(fs.models.model("logreg", (1, 8, 8), 10, seed=0), prior=False)
    channel = fs.Channel(compress="top_k", top=0.1, clip=0.5)
    faults = fs.Faults(quorum=2, retries=1, inject=fs.Inject(nan=1.0, clients=(1,)))
    how: dict[str, Any] = {"rounds": 2, "batch_size": 8, "channel": channel, "faults": faults}
    assert fs.train(problem, data, fs.FedAvg(lr=0.1, steps=2), **how).summary["loss"] == summary["loss"]


def test_the_config_of_a_run_can_be_run_again_and_resumed(fedstrata: Any, file: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert fedstrata("run", file, "--out", first, "--quiet")[0] == 0
    code, _, err = fedstrata("run", first / "config.toml", "--out", second, "--quiet")
    assert code == 0, err
    assert (first / "config.toml").read_text() == (second / "config.toml").read_text()
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    again = ("--out", first, "--quiet", "--resume", "--set", "train.rounds=3")
    for change in ("channel.clip=0.4", "channel.top=0.2", "faults.inject.nan=0.5"):
        code, _, err = fedstrata("run", file, *again, "--set", change)
        assert code == 2 and f"{change.split('=')[0]} was" in err
    code, printed, err = fedstrata("run", file, *again, "--set", "faults.quorum=0.25", "--json")
    assert code == 0, err
    assert json.loads(printed)["failed"] == 3
    assert tomllib.loads((first / "config.toml").read_text())["faults"]["quorum"] == 0.25


def test_a_command_below_the_quorum_ends_in_an_error(fedstrata: Any, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, _, err = fedstrata("run", file, "--out", out, "--set", "faults.quorum=1.0")
    assert code == 1
    assert "Error: Only 3 of 4 clients answered local of fedavg in round 1, fewer than the quorum of 4." in err
    assert "checkpoint" not in err  # there is none yet
    assert not (out / "summary.json").exists()


WRONG = [
    ("channel.clipp=1.0", "Unknown key 'channel.clipp'. Did you mean 'channel.clip'?"),
    ("faults.quorun=1", "Unknown key 'faults.quorun'. Did you mean 'faults.quorum'?"),
    ("faults.inject.dropp=0.1", "Unknown key 'faults.inject.dropp'. Did you mean 'faults.inject.drop'?"),
    ("channel.compress=zip", "The key channel.compress must be 'none', 'top_k' or 'quantise'. Got 'zip'."),
    ("channel.clip=-1.0", "The key channel.clip must be a number above 0, or left out. Got -1.0."),
    ("channel.top=2.0", "The key channel.top must be a number above 0 and at most 1. Got 2.0."),
    ("faults.quorum=0", "The key faults.quorum must be a fraction in (0, 1] or a whole number of at least 1. Got 0."),
    ("faults.quorum=most", "The key faults.quorum must be a fraction in (0, 1]"),
    ("faults.retries=-1", "The key faults.retries must be a whole number of at least 0. Got -1."),
    ("faults.timeout=0.0", "The key faults.timeout must be a number above 0. Got 0.0."),
    ("faults.inject.drop=0.5", "The sum of the injected faults' probabilities must be at most 1. Got 1.5."),
    ("faults.inject.clients=[-1]", "faults.inject.clients"),
    ("faults.inject.clients=[4]", "clients of the injected faults must be "),
]


@pytest.mark.parametrize(("change", "wanted"), WRONG, ids=[c for c, _ in WRONG])
def test_a_wrong_file_is_refused_before_anything_is_written(
    change: str, wanted: str, fedstrata: Any, file: Path, tmp_path: Path
) -> None:
    code, _, err = fedstrata("run", file, "--out", tmp_path / "run", "--set", change)
    assert code == 2
    assert wanted in " ".join(err.split())
    assert not (tmp_path / "run").exists()


def test_what_a_client_should_have_kept_is_never_made_up() -> None:
    """FGDA's model of a client that lost it used to start at a gradient."""
    problem, data = example_for(fs.FGDA)
    clients = make_clients(make_setting(problem, data, batch_size=4))
    empty = problem.x0[:0]
    message = (torch.zeros_like(problem.x0), torch.zeros_like(problem.y0), empty, empty)
    with pytest.raises(
        fs.FedstrataError, match=r"client 6, .* must have kept the state of point 0 .*\(in local of fgda, round 1, "
    ):
        clients.mean(fs.FGDA().local, *message)
