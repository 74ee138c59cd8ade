"""Secure federations: what plain ones compute, and a server that sees no answer of a single node."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from federation.stand_in import CANCER, DIGITS, HELD_OUT, Sent, Site, Tables, headed, made, simulated, site
from fedstrata.algorithms import ALGORITHMS
from fedstrata.federation import keys
from fedstrata.federation.experiment import check_config
from fedstrata.federation.node import answer
from fedstrata.federation.node.secure import SessionFile
from fedstrata.federation.secure.exclusions import single_answers
from fedstrata.federation.secure.messages import Session
from fedstrata.federation.secure.participant import PHASES, Participant
from fedstrata.federation.server.secure import SecureSum
from fedstrata.federation.wire import Reply

SECURE: Tables = {"federation": {"secure": True}}
AUC: Tables = {"problem": {"name": "auc", "score": "none"}}
FIVE: Tables = {"data": {"clients": 5}, "train": {"rounds": 2}}
FEDAVG: Tables = {"algorithm": {"name": "fedavg", "steps": 2}}
SCAFFOLD: Tables = {"algorithm": {"name": "scaffold", "steps": 2}}
SHORT: Tables = {"faults": {"timeout": 0.05, "retries": 1}}


def secure(config: fs.Config) -> fs.Config:
    return config.replace(federation=config.federation.replace(secure=True))


def assert_close(run: fs.Run, expected: fs.Run) -> None:
    """The same up to the rounding of sums, which local steps in float32 carry on."""
    for ours, theirs in ((run.x, expected.x), (run.y, expected.y)):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# --- the same result ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        made(DIGITS, FEDAVG),
        made(DIGITS, SCAFFOLD),
        made(CANCER, AUC, {"algorithm": {"name": "fgda", "steps": 2}}),
        made(DIGITS, FEDAVG, {"train": {"weighting": "samples"}}),
        made(DIGITS, FIVE, SCAFFOLD, {"train": {"participation": 3}}),
        made(DIGITS, FEDAVG, {"channel": {"clip": 0.05}}),
    ],
    ids=["fedavg", "scaffold", "fgda", "by samples", "three of five", "clip"],
)
def test_secure_sums_give_what_plain_means_give(config: fs.Config, tmp_path: Path) -> None:
    nodes = site(tmp_path, secure(config))
    run, plain = nodes.serve(), simulated(config)
    assert not nodes.faults()
    assert_close(run, plain)
    assert bool((run.x != run.problem.x0.to(run.x)).any())
    assert {sent.header["kind"] for sent in nodes.sent} == {"describe", *PHASES}
    ours, theirs = run.history[-1], plain.history[-1]
    assert (ours["steps"], ours["samples"]) == (theirs["steps"], theirs["samples"])
    assert ours["bytes_up"] > theirs["bytes_up"] and ours["bytes_down"] > theirs["bytes_down"]


def test_the_server_does_not_learn_the_sizes_of_the_nodes(tmp_path: Path) -> None:
    config = made(DIGITS, FEDAVG, SECURE, {"train": {"weighting": "samples", "batch_size": None, "rounds": 1}})
    nodes = site(tmp_path, config)
    nodes.serve()
    sizes = {len(np.load(tmp_path / "nodes" / name / "data" / "train.npz")["targets"]) for name in nodes.names}
    assert len(sizes) == 3
    for reply in nodes.replies:
        assert not sizes & {v for v in json.loads(reply.text).values() if isinstance(v, int)}


def test_a_resumed_run_ends_with_the_same_result(tmp_path: Path) -> None:
    config = made(DIGITS, SCAFFOLD, SECURE)
    nodes = site(tmp_path, config)

    class Stop(fs.Callback):
        def on_round(self, round: int, state: Any) -> None:
            if round == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        nodes.serve(callbacks=[Stop()])
    resumed = nodes.again().serve(resume=True)
    assert torch.equal(resumed.x, nodes.again().serve(tmp_path / "whole").x)


def test_secrets_do_not_stay_on_the_disk_of_a_node(tmp_path: Path) -> None:
    nodes = site(tmp_path, made(DIGITS, SCAFFOLD, SECURE, {"train": {"rounds": 1}}))
    seen: list[int] = []

    def look(nodes: Site, sent: Sent, reply: Reply) -> Reply:
        files = list((tmp_path / "nodes" / nodes.names[sent.node] / "state").glob("secure-*"))
        if sent.header["kind"] in PHASES[:-1]:
            seen.extend(file.stat().st_mode & 0o777 for file in files)
        elif sent.header["kind"] == "open":
            assert not files
        return reply

    nodes.change = look
    nodes.serve()
    assert seen and set(seen) == {0o600}


def test_two_processes_of_a_node_do_not_answer_the_same_message(tmp_path: Path) -> None:
    """Each would sign another set of survivors; a stock SuperNode starts a process for every message."""
    session = Session("ab" * 16, 1, 0, 0, 2)
    file, other = (SessionFile(tmp_path / "state", session.run) for _ in range(2))

    def later() -> str:
        with other.alone():
            return other.load()[0].phase

    with ThreadPoolExecutor(1) as pool:
        with file.alone():
            waiting = pool.submit(later)
            assert not wait([waiting], 0.1).done
            file.save(Participant(session, 0, "agree"), {})
        assert waiting.result(5) == "agree"


# --- nodes that leave -----------------------------------------------------------------------------------------------


def lost_in(phase: str, *clients: int, times: int = 1) -> Callable[[Site, Sent, Reply], Reply | None]:
    """Lose what some nodes answer in a phase of the first exchange of round 2."""
    left = dict.fromkeys(clients, times)

    def change(nodes: Site, sent: Sent, reply: Reply) -> Reply | None:
        header = sent.header
        hit = header["kind"] in (phase, "work") and header["round"] == 1 and left.get(sent.node, 0) > 0
        left[sent.node] = left.get(sent.node, 0) - hit
        return None if hit else reply

    return change


@pytest.mark.parametrize("phase", PHASES)
def test_nodes_may_leave_in_every_phase(phase: str, tmp_path: Path) -> None:
    plain = made(DIGITS, FIVE, FEDAVG, SHORT, {"problem": {"prior": False}})
    nodes = site(tmp_path, secure(plain))
    nodes.change = lost_in(phase, 3)
    run = nodes.serve()
    left_out = PHASES.index(phase) < PHASES.index("agree")  # later, the node's answer is in the sum
    assert [(fault["client"], fault["left_out"]) for fault in nodes.faults()] == [(3, left_out)]
    other = dataclasses.replace(nodes.again(), experiment=nodes.experiment.replace("secure = true", "secure = false"))
    other.change = lost_in("work", 3) if left_out else None
    assert_close(run, other.serve(tmp_path / "plain"))


@pytest.mark.parametrize("phase", PHASES)
def test_a_sum_of_too_few_is_tried_again_with_new_keys(phase: str, tmp_path: Path) -> None:
    config = made(DIGITS, FIVE, FEDAVG, SHORT, {"problem": {"prior": False}})
    nodes = site(tmp_path, secure(config))
    nodes.change = lost_in(phase, 1, 3)
    run = nodes.serve()
    assert_close(run, simulated(config))
    assert {fault["attempt"] for fault in nodes.faults()} == {0} and not any(f["left_out"] for f in nodes.faults())
    sent = [r.arrays for s, r in zip(nodes.sent, nodes.replies, strict=True) if s.header["kind"] == "keys"]
    assert len({arrays[1].tobytes() for arrays in sent}) == len(sent)


def test_too_few_nodes_stop_the_run_and_say_why(tmp_path: Path) -> None:
    nodes = site(tmp_path, made(DIGITS, FIVE, FEDAVG, SHORT, SECURE))
    nodes.change = lost_in("masked", 1, 3, times=2)
    with pytest.raises(fs.QuorumError, match=r"Only 3 nodes sent masked vectors .* threshold, 4"):
        nodes.serve()
    kinds = [sent.header["kind"] for sent in nodes.sent if sent.header.get("round") == 1]
    assert "agree" not in kinds and "open" not in kinds, "nothing is opened below the threshold"


def test_a_node_whose_answer_is_not_finite_is_left_out(tmp_path: Path) -> None:
    inject = {"nan": 1.0, "clients": [2]}
    config = made(DIGITS, FIVE, FEDAVG, SECURE, {"faults": {"inject": inject}, "problem": {"prior": False}})
    nodes = site(tmp_path, config)
    run = nodes.serve()
    assert {(f["client"], f["kind"]) for f in nodes.faults()} == {(2, "nan")}
    assert bool(torch.isfinite(run.x).all())


def test_a_node_whose_numbers_are_too_large_says_so(tmp_path: Path) -> None:
    inject = {"scale": 1.0, "factor": 1e13, "clients": [2]}
    config = made(DIGITS, FIVE, FEDAVG, SECURE, {"faults": {"inject": inject}, "problem": {"prior": False}})
    nodes = site(tmp_path, config)
    nodes.serve()
    (detail,) = {fault["detail"] for fault in nodes.faults()}
    assert "must have entries below 4.29e+08 in absolute value" in detail and "federation.bits" in detail


def test_a_node_that_lost_its_state_rejoins_without_showing_its_answer(tmp_path: Path) -> None:
    config = made(CANCER, AUC, {"data": {"clients": 5}, "algorithm": {"name": "fgda", "steps": 2}}, SECURE)
    nodes = site(tmp_path, config)

    def lose(nodes: Site, sent: Sent, reply: Reply) -> Reply:
        if sent.header["kind"] == "masked" and sent.header["round"] == 0 and sent.node == 1:
            for file in (tmp_path / "nodes" / "node1" / "state").glob("*/state-*"):
                file.unlink()
        return reply

    nodes.change = lose
    nodes.serve()
    assert {(f["client"], f["kind"]) for f in nodes.faults()} == {(1, "lost")}
    kept = [r for s, r in zip(nodes.sent, nodes.replies, strict=True) if s.header["kind"] == "keep"]
    assert kept and all(sum(a.size for a in reply.arrays) == 0 for reply in kept)


# --- messages that lie ----------------------------------------------------------------------------------------------


def changed_rows(change: Callable[[list[np.ndarray]], list[np.ndarray]]) -> Callable[[Site, Sent, Reply], Reply]:
    return lambda nodes, sent, reply: nodes.signed(
        sent.node, json.loads(reply.text), change([a.copy() for a in reply.arrays])
    )


def bit_flipped(arrays: list[np.ndarray]) -> list[np.ndarray]:
    arrays[-1].reshape(-1)[-1] ^= 1
    return arrays


def of_client_9(arrays: list[np.ndarray]) -> list[np.ndarray]:
    arrays[0][-1] = 9
    return arrays


LIES: dict[str, tuple[str, str, Callable[[Site, Sent, Reply], Reply]]] = {
    "keys with another signature": ("keys", "without a valid signature", changed_rows(bit_flipped)),
    "keys of another client": ("keys", "not its own", changed_rows(of_client_9)),
    "a share for nobody": ("shares", "one share for each", changed_rows(of_client_9)),
    "a header without steps": (
        "masked",
        "number of steps",
        lambda nodes, sent, reply: nodes.signed(sent.node, headed(reply, steps=None), reply.arrays),
    ),
    "another number of steps": (
        "masked",
        "reported 7 local steps",
        lambda nodes, sent, reply: nodes.signed(sent.node, headed(reply, steps=7), reply.arrays),
    ),
    "another form": (
        "masked",
        "instead of 5 masked numbers",
        lambda nodes, sent, reply: nodes.signed(
            sent.node, headed(reply, like={"array": 0, "shape": [1, 3], "dtype": "float32"}), reply.arrays
        ),
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_node_that_lies_is_left_out_and_named(lie: str, tmp_path: Path) -> None:
    phase, said, change = LIES[lie]
    nodes = site(tmp_path, made(DIGITS, FIVE, FEDAVG, SECURE, SHORT, {"problem": {"prior": False}}))
    nodes.change = lambda nodes, sent, reply: (
        change(nodes, sent, reply)
        if sent.node == 1 and sent.header["kind"] == phase and sent.header["round"] == 1
        else reply
    )
    nodes.serve()
    (fault,) = nodes.faults()
    assert fault["client"] == 1 and said in fault["detail"]


def test_a_wrong_share_stops_only_that_attempt(tmp_path: Path) -> None:
    config = made(DIGITS, FIVE, FEDAVG, SHORT, {"problem": {"prior": False}})
    nodes = site(tmp_path, secure(config))
    nodes.change = lambda nodes, sent, reply: (
        changed_rows(bit_flipped)(nodes, sent, reply)
        if (sent.node, sent.header["kind"]) == (1, "open") and (sent.header["round"], sent.header["attempt"]) == (1, 0)
        else reply
    )
    run = nodes.serve()
    assert all("do not belong together" in fault["detail"] and not fault["left_out"] for fault in nodes.faults())
    assert nodes.faults()
    assert_close(run, simulated(config))


def test_a_message_of_an_earlier_sum_is_refused(tmp_path: Path) -> None:
    nodes = site(tmp_path, made(DIGITS, FEDAVG, SECURE, {"train": {"rounds": 2}, "problem": {"prior": False}}))
    nodes.serve()
    for phase in PHASES[1:]:
        old = next(sent for sent in nodes.sent if sent.header["kind"] == phase)
        assert "has not begun, or has left" in json.loads(nodes.answered(old).text)["error"]
    begun = next(sent for sent in nodes.sent if sent.header["kind"] == "keys")
    assert "error" not in json.loads(nodes.answered(begun).text)
    for phase in ("masked", "agree", "open"):
        old = next(
            s for s in nodes.sent if s.header["kind"] == phase and s.header["exchange"] == begun.header["exchange"]
        )
        assert f"asked for '{phase}'" in json.loads(nodes.answered(old).text)["error"]
    other = dataclasses.replace(old, text=json.dumps(old.header | {"attempt": 1}))
    assert "has not begun" in json.loads(nodes.answered(other).text)["error"]


@pytest.mark.parametrize("field", ["weighting", "iteration"])
def test_a_server_that_asks_nodes_for_different_things_gets_no_sum(field: str, tmp_path: Path) -> None:
    """One node is told another weighting, so that the sum of the weights would show its size, and so on."""
    tables: Tables = {"train": {"rounds": 1}, "problem": {"prior": False}, "faults": {"retries": 0}}
    nodes = site(tmp_path, made(DIGITS, FEDAVG, SECURE, tables))
    other = {"weighting": "samples", "iteration": 5}[field]
    send = nodes.send

    def lying(node: int, text: str, arrays: Sequence[np.ndarray]) -> str:
        header = json.loads(text)
        if node == 101 and header["kind"] == "masked":
            text = json.dumps(header | {field: other})
        return send(node, text, arrays)

    nodes.send = lying  # type: ignore[method-assign]
    with pytest.raises(fs.QuorumError, match="sum of the weights or samples is wrong"):
        nodes.serve()


# --- what a node allows ---------------------------------------------------------------------------------------------


def test_a_node_may_answer_in_secure_sums_only(tmp_path: Path) -> None:
    nodes = site(tmp_path, made(DIGITS, FEDAVG, {"train": {"rounds": 1}}))
    nodes.settings = {"secure": "True"}
    with pytest.raises(fs.QuorumError, match=r"in secure sums only \(secure = true"):
        nodes.serve()
    nodes = site(tmp_path / "b", made(DIGITS, FEDAVG, SECURE, {"train": {"rounds": 1}}))
    nodes.settings = {"secure": "True"}
    nodes.serve()


def test_a_node_may_name_its_peers(tmp_path: Path) -> None:
    nodes = site(tmp_path, made(DIGITS, FEDAVG, SECURE, {"train": {"rounds": 1}}))
    peers = tmp_path / "peers"
    nodes.settings = {"peers": str(peers)}
    peers.write_text("\n".join(["# the nodes", *nodes.public, ""]))
    nodes.serve(tmp_path / "good")
    stranger = keys.make_key(tmp_path / "stranger.key")
    peers.write_text("\n".join([nodes.public[0], nodes.public[1], stranger]))
    with pytest.raises(fs.QuorumError, match=r"key of client 2 is not in the file of this node's peers"):
        nodes.again().serve(tmp_path / "bad")


# --- what is excluded -----------------------------------------------------------------------------------------------


def excluded(*tables: Tables, nodes: int = 3) -> None:
    check_config(made(DIGITS, FEDAVG, SECURE, *tables), nodes)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"channel": {"reduce": "median"}}, "channel.reduce cannot be used"),
        ({"channel": {"reduce": "trimmed_mean"}}, "channel.reduce cannot be used"),
        ({"channel": {"bound": 0.1}}, "channel.bound cannot be used"),
        ({"channel": {"compress": "top_k"}}, "channel.compress cannot be used"),
        ({"algorithm": {"name": "afl", "steps": None}, "problem": {"name": "agnostic"}}, "answers to gradient of afl"),
        ({"algorithm": {"name": "drfa"}, "problem": {"name": "agnostic"}}, "drfa"),
        ({"algorithm": {"name": "fedlalr", "aggregate": "max"}}, "local of fedlalr"),
        ({"federation": {"threshold": 0.5}}, r"threshold must be more than half of the cohort of 4 .* Got 0.5"),
        ({"federation": {"threshold": 2}}, "more than half of the cohort of 4"),
        ({"train": {"participation": 1}}, "more than half of the cohort of 1"),
        ({"federation": {"bits": 60}}, "federation.bits"),
    ],
    ids=str,
)
def test_what_cannot_be_summed_is_refused_before_the_run(tables: Tables, said: str) -> None:
    tables = {k: {n: v for n, v in t.items() if v is not None} for k, t in tables.items()}
    if tables.get("algorithm", {}).get("name") == "afl":
        base = made(DIGITS, SECURE, tables)
        with pytest.raises(fs.InputError, match=said):
            check_config(base, 4)
        return
    with pytest.raises(fs.InputError, match=said):
        excluded(tables, nodes=4)


@pytest.mark.slow
def test_these_algorithms_take_more_than_means() -> None:
    refused = {name for name, kind in ALGORITHMS.items() if single_answers(kind())}
    assert refused == {"afl", "drfa"}


def test_a_problem_that_asks_each_client_is_refused(tmp_path: Path) -> None:
    config = made(DIGITS, {"problem": {"name": "robust", "link": "exp"}}, {"algorithm": {"name": "comfedl"}}, SECURE)
    with pytest.raises(fs.InputError, match="asks every single client for first_loss"):
        site(tmp_path, config).serve()
    assert not (tmp_path / "run").exists()


def test_an_algorithm_that_gathers_unexpectedly_stops_before_it_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstrata.federation.secure.exclusions.single_answers", lambda _: "")
    config = made(DIGITS, {"algorithm": {"name": "fedlalr", "aggregate": "max"}}, SECURE, {"problem": {"prior": False}})
    nodes = site(tmp_path, config)
    with pytest.raises(fs.InputError, match="answers to local of fedlalr are needed of every single one"):
        nodes.serve()
    assert not any(sent.header["kind"] in ("work", *PHASES) for sent in nodes.sent)


# --- what the server sees -------------------------------------------------------------------------------------------

_UNPAD = bytes(byte ^ 0x5A for byte in range(256))


class Needles:
    """The answers of the nodes, kept in a form in which a search of the memory does not find them.

    Of every answer, eight consecutive numbers, as they are and as fixed-point numbers.
    """

    def __init__(self) -> None:
        self.padded: list[bytes] = []

    def add(self, numbers: np.ndarray, bits: int = 32) -> None:
        flat = numbers.reshape(-1)
        start = next(k for k in range(len(flat)) if (np.abs(flat[k : k + 8]) > 1e-6).all())
        eight = flat[start : start + 8]
        fixed = np.rint(eight.astype(np.float64) * 2.0**bits)
        for form in (eight, eight.astype(np.float64), fixed.astype(np.int64), fixed):
            self.padded.append(form.tobytes().translate(_UNPAD))

    def found_in(self, content: bytes) -> bool:
        return len(content) >= 32 and any(needle.translate(_UNPAD) in content for needle in self.padded)


def contents() -> Iterator[tuple[str, bytes]]:
    """Everything in this process that holds bytes, text or numbers: whatever any object refers to, frames too."""
    gc.collect()
    seen: set[int] = set()
    stack = gc.get_objects()
    while stack:
        thing = stack.pop()
        kind = type(thing)
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if kind in (bytes, bytearray):
            yield kind.__name__, bytes(thing)
        elif kind is str:
            yield "str", thing.encode(errors="replace")
        elif kind is np.ndarray and thing.dtype != object:
            yield "ndarray", thing.tobytes()
        elif kind is torch.Tensor and thing.layout == torch.strided:
            yield "Tensor", thing.detach().numpy().tobytes()
        else:
            stack += gc.get_referents(thing)


@pytest.mark.parametrize("masked", [True, False], ids=["secure", "plain"])
def test_the_servers_memory_files_and_log_hold_no_single_answer(
    masked: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Looked for while the sum is opened, and at the end; without secure sums the same search finds the answers."""
    needles, hits, looked = Needles(), list[str](), list[int]()
    work, mean_of = answer.work, SecureSum._mean_of

    def watched(*arguments: Any, **keywords: Any) -> Any:
        header, arrays = work(*arguments, **keywords)
        needles.add(arrays[0])
        return header, arrays

    def look() -> None:
        number = 0
        for kind, content in contents():
            number += 1
            if needles.found_in(content):
                hits.append(kind)
        looked.append(number)

    def opened(self: SecureSum, total: np.ndarray) -> Any:
        look()
        return mean_of(self, total)

    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(answer, "work", watched)
    monkeypatch.setattr(SecureSum, "_mean_of", opened)
    tables = {"train": {"rounds": 1}, "problem": {"prior": False}, "federation": {"secure": masked}}
    nodes = site(tmp_path, made(DIGITS, FEDAVG, tables))
    said: list[str] = []
    run = nodes.serve(say=said.append)
    look()
    printed = capfd.readouterr()
    files = [p for p in tmp_path.rglob("*") if p.is_file() and "nodes" not in p.relative_to(tmp_path).parts]
    logs = [printed.out, printed.err, caplog.text, *said]
    told = [p.read_bytes() for p in files] + [text.encode() for text in logs]
    assert len(files) > 5 and min(looked) > 1000 and len(needles.padded) == 12
    assert bool(hits) != masked, hits
    assert not any(map(needles.found_in, told))
    assert bool((run.x != 0).any())


def test_evaluation_on_nodes_still_works(tmp_path: Path) -> None:
    nodes = site(tmp_path, made(DIGITS, HELD_OUT, SECURE))
    nodes.settings = {"secure": "True"}
    run = nodes.serve(pooled=False)
    assert run.summary["accuracy"] > 0
