"""The loop of a node: how often it asks, and what it does when the server or its worker fails; the worker itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from federation.stand_in import DIGITS, Site, made, site
from fedstrata.core.errors import InputError
from fedstrata.federation import keys, wire
from fedstrata.federation.node import loop, runs, worker
from fedstrata.federation.node.answer import Answers
from fedstrata.federation.node.connection import Denied, RunOver, Unreachable, Unreadable
from fedstrata.federation.node.data import read_data
from fedstrata.federation.node.loop import LOAD, OFTEN, SELDOM, SHARE, Loop
from fedstrata.federation.node.worker import Died, Failed, Worker
from fedstrata.federation.packet import Packet
from fedstrata.federation.wire import Reply

# --- the loop, without a server ---------------------------------------------------------------------------------------


class Clock:
    """Time that passes only when somebody waits."""

    def __init__(self) -> None:
        self.now, self.waits = 100.0, []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


class End(Exception):
    """No more is scripted."""


class Scripted:
    """A connection that does one thing after another: return a value, or raise an error."""

    def __init__(self, **script: Sequence[Any]) -> None:
        self.script = {name: list(values) for name, values in script.items()}
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*values: Any) -> Any:
            self.calls.append((name, *values))
            if name not in self.script:
                return None
            if not self.script[name]:
                raise End
            value = self.script[name].pop(0)
            if isinstance(value, BaseException):
                raise value
            return value

        return call

    def named(self, *names: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] in names]


def message(run: int = 5, ttl: float = 100.0) -> Any:
    return SimpleNamespace(metadata=SimpleNamespace(run_id=run, ttl=ttl))


ASK, ANSWER = Packet("ask"), Packet("answer", b"s")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    own = Clock()
    monkeypatch.setattr(loop, "time", own)
    monkeypatch.setattr(loop, "random", SimpleNamespace(uniform=lambda low, high: 1.0))
    return own


def ran(asked: Sequence[Any] = (ANSWER,), **script: Sequence[Any]) -> tuple[Scripted, Scripted, list[str]]:
    """Run a loop with a connection that does this, and a worker that answers this, until the script ends."""
    said: list[str] = []
    usual = {"open": [7], "experiment": ["[model]"] * 9, "content": [ASK] * 9}
    own, work = Scripted(**usual | script), Scripted(ask=list(asked))
    with pytest.raises(End):
        Loop(own, work, said.append).run()  # type: ignore[arg-type]
    assert own.calls[-1] == ("close",) and work.calls[0] == ("start",) and work.calls[-1] == ("end",)
    return own, work, said


def test_a_node_asks_often_while_a_run_is_active_and_seldom_when_idle(clock: Clock) -> None:
    ran(receive=[None] * 600)
    often = [wait for wait in clock.waits if wait == OFTEN]
    assert sum(often) == pytest.approx(OFTEN / SHARE, abs=2 * OFTEN)
    assert sorted(clock.waits) == clock.waits and clock.waits[-1] == SELDOM
    clock.waits.clear()
    ran([ANSWER], receive=[None] * 200 + [message(), None])
    assert clock.waits[-2] > OFTEN == clock.waits[-1]


def test_a_server_that_takes_long_is_asked_less_often(clock: Clock) -> None:
    def slowly() -> None:
        clock.now += 0.2

    own = Scripted(open=[7])
    own.receive = slowly  # type: ignore[attr-defined]
    work = Scripted()
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise End

    clock.sleep = sleep  # type: ignore[method-assign]
    with pytest.raises(End):
        Loop(own, work, print).run()  # type: ignore[arg-type]
    assert waits == pytest.approx([LOAD * 0.2] * 3)


def test_messages_are_answered_and_the_experiment_is_fetched_once(clock: Clock) -> None:
    messages = [message(), message(), message(6)]
    own, work, said = ran([ANSWER] * 3, receive=messages)
    assert own.named("send") == [("send", m, ANSWER, 0.0) for m in messages] and not own.named("fail")
    assert own.named("experiment") == [("experiment", 5), ("experiment", 6)]
    assert work.named("ask") == [("ask", ASK, "[model]", 100.0)] * 3
    assert said == [
        "Connected to the server, as node 7. Waiting for work.",
        "Run 5 asks this node for the first time.",
        "Run 6 asks this node for the first time.",
    ]
    assert clock.waits == []


@pytest.mark.parametrize("error", [Died("The process that did the work was ended by SIGKILL."), Failed("KeyError")])
def test_work_that_fails_is_reported_and_the_node_goes_on(error: Exception, clock: Clock) -> None:
    first, second = message(), message()
    own, work, said = ran([error, ANSWER], receive=[first, second])
    assert own.named("send", "fail") == [("fail", first, str(error), 0.0), ("send", second, ANSWER, 0.0)]
    assert f"Run 5: {error}" in said
    assert len(work.named("start")) == (2 if isinstance(error, Died) else 1)


@pytest.mark.parametrize("where", ["experiment", "content"])
def test_what_cannot_be_read_is_reported_and_never_reaches_the_worker(where: str, clock: Clock) -> None:
    own, work, _ = ran([], receive=[message()], **{where: [Unreadable("no app of ours")]})
    assert [call[2] for call in own.named("fail")] == ["no app of ours"] and not work.named("ask")


@pytest.mark.parametrize("where", ["experiment", "content", "send"])
def test_a_run_that_has_ended_is_left_alone(where: str, clock: Clock) -> None:
    own, _, said = ran([ANSWER], receive=[message(), None], **{where: [RunOver("the run has ended")]})
    assert not own.named("fail") and "Run 5 has ended; its last message needs no answer." in said


GONE = Unreachable("Connection refused")


def test_a_network_that_fails_is_waited_for_and_named_once(clock: Clock) -> None:
    own, _, said = ran(receive=[None, *[GONE] * 9, None])
    assert clock.waits[1:10] == [0.5, 1, 2, 4, 5, 5, 5, 5, 5]
    assert said[1:] == [
        "The server cannot be reached: Connection refused. Trying again until it answers.",
        "The server answers again, after 32 s.",
    ]
    assert own.named("beat") == [("beat",)]


def test_an_answer_is_sent_again_after_a_failure_of_the_network(clock: Clock) -> None:
    own, work, _ = ran([ANSWER], receive=[message()], content=[GONE, ASK], send=[GONE, GONE, None])
    assert len(work.named("ask")) == 1 and len(own.named("send")) == 3


def test_an_answer_that_the_server_no_longer_waits_for_is_dropped(clock: Clock) -> None:
    own, _, said = ran([ANSWER], receive=[message(ttl=5.0), None], send=[GONE] * 9)
    assert len(own.named("send")) == 4 and "Run 5: no answer could be sent: Connection refused." in said
    assert own.named("receive")


def test_a_node_that_is_refused_says_why_and_tries_until_it_is_registered(clock: Clock) -> None:
    _, _, said = ran(open=[*[Denied("Failed to activate SuperNode")] * 2, 7], receive=[])
    assert said == [
        "The server refuses this node: Failed to activate SuperNode. Trying again until it accepts it.",
        "The server answers again, after 2 s.",
        "Connected to the server, as node 7. Waiting for work.",
    ]


def test_a_server_that_has_forgotten_the_node_is_told_again(clock: Clock) -> None:
    own, _, _ = ran(open=[7, 8], receive=[Denied("not registered"), None])
    assert [call[0] for call in own.calls][:4] == ["open", "receive", "open", "receive"]


# --- a worker ---------------------------------------------------------------------------------------------------------


def alive(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(done: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.02)
    return done()


def with_fault(nodes: Site, **inject: Any) -> str:
    """The experiment with a fault that hits every client."""
    return nodes.experiment + "\n[faults.inject]\n" + "".join(f"{name} = {value}\n" for name, value in inject.items())


def work_for(nodes: Site) -> Packet:
    form, arrays = wire.pack((torch.zeros(650),))
    call = wire.Call("work", "ab" * 16, "n", clients=3, name="node0", classes=10, work="local")
    return Reply(call.text(form), b"", tuple(arrays)).packet()


@pytest.mark.slow
def test_a_worker_answers_and_whatever_ends_it_the_next_one_answers_the_same(tmp_path: Path) -> None:
    nodes = site(tmp_path, made(DIGITS, {"algorithm": {"name": "fedavg", "steps": 2}}))
    packet, plain = work_for(nodes), nodes.experiment
    expected = Answers(nodes.here(0)).answer(packet, plain)
    own = Worker(nodes.here(0))
    try:
        own.start()
        first = own.number
        answers = [own.ask(packet, plain, 60.0) for _ in range(2)]
        assert own.number == first
        with pytest.raises(Died, match="ended by itself, with code 1"):
            own.ask(packet, with_fault(nodes, crash=1.0), 60.0)
        assert first is not None and not alive(first)
        answers.append(own.ask(packet, plain, 60.0))
        second = own.number
        assert second is not None and second != first
        with pytest.raises(Died, match="took longer than the server waits"):
            own.ask(packet, with_fault(nodes, delay=1.0, seconds=60.0), 0.5)
        assert not alive(second)
        own.start()
        kill = threading.Timer(0.3, lambda: os.kill(own.number or 0, signal.SIGKILL))
        kill.start()
        with pytest.raises(Died, match=r"was ended by SIGKILL \(the machine may be out of memory\)"):
            own.ask(packet, with_fault(nodes, delay=1.0, seconds=60.0), 60.0)
    finally:
        own.end()
    for answer in answers:
        assert (answer.text, answer.body) == (expected.text, answers[0].body)
        reply = Reply.of(answer)
        assert keys.is_signed(nodes.public[0], reply.signature, wire.digest(reply.text, reply.arrays))
        np.testing.assert_allclose(reply.arrays[0], Reply.of(expected).arrays[0], rtol=1e-5, atol=1e-7)


def test_a_worker_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = (
        "from fedstrata.federation.node.worker import *; w = Worker({}); w.start(); print(w.number); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        number = int(parent.stdout.readline())
        assert alive(number)
        parent.kill()
    assert until(lambda: not alive(number))


def test_a_worker_that_cannot_be_started_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", full)
    own = Worker({})
    with pytest.raises(Died, match="cannot be started: Cannot allocate memory"):
        own.ask(ASK, "", 1.0)
    own.end()


def test_what_a_worker_cannot_answer_is_a_failure_without_the_words_of_others() -> None:
    def answering(error: Exception) -> tuple[bytes, ...]:
        return worker._answered(Scripted(answer=[error]), ASK, "")

    assert answering(ValueError("row 3 is 0.123"))[0] == b"ValueError"
    assert answering(InputError("There is no data."))[0] == b"There is no data."
    assert worker._answered(Scripted(answer=[Packet("t", b"s", b"b")]), ASK, "") == (b"", b"t", b"s", b"b")


# --- what a node keeps of a run ---------------------------------------------------------------------------------------


def test_a_node_reads_its_data_once_and_again_if_the_file_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = site(tmp_path, made(DIGITS, {"algorithm": {"name": "fedavg", "steps": 2}}))
    read: list[str] = []
    monkeypatch.setattr(runs, "read_data", lambda *given: read.append(given[2]) or read_data(*given))
    answers, packet = Answers(nodes.here(0)), work_for(nodes)
    bodies = [answers.answer(packet, nodes.experiment).body for _ in range(3)]
    assert read == ["node0"] and bodies[0] == bodies[1] == bodies[2]
    file = tmp_path / "nodes" / "node0" / "data" / "train.npz"
    with np.load(file) as data:
        arrays = dict(data)
    np.savez(file, **{name: value[::-1] for name, value in arrays.items()})
    assert answers.answer(packet, nodes.experiment).body != bodies[0]
    assert read == ["node0"] * 2
    answers.forget()
    answers.answer(packet, nodes.experiment)
    assert read == ["node0"] * 3


def test_a_node_keeps_two_runs_apart(tmp_path: Path) -> None:
    nodes = site(tmp_path, made(DIGITS, {"algorithm": {"name": "fedavg", "steps": 2}}))
    other = nodes.experiment.replace("steps = 2", "steps = 3")
    assert other != nodes.experiment
    answers, packet = Answers(nodes.here(0)), work_for(nodes)
    alone = [Answers(nodes.here(0)).answer(packet, text).body for text in (nodes.experiment, other)]
    assert alone[0] != alone[1]
    for _ in range(2):
        assert [answers.answer(packet, text).body for text in (nodes.experiment, other)] == alone
