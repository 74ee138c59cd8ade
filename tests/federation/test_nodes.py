"""Nodes: what they keep on disk, which replies the server takes, what crosses, what they measure and refuse."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.supercore.date import now

import fedstrata as fs
from federation.stand_in import CANCER, DIGITS, Change, Sent, Site, Tables, made, site
from fedstrata.experiments import tables
from fedstrata.experiments.build import Experiment
from fedstrata.federation import app, keys, node, server
from fedstrata.federation.deploy import _save
from fedstrata.federation.server import Nodes, Reply
from support import without_seconds

AUC: Tables = {"problem": {"name": "auc", "score": "none"}}


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "POLL", 0.01)


# --- what clients keep ------------------------------------------------------------------------------------------------


class Stopped(Exception):
    """The server's process is gone."""


def stopping_in(round: int, message: int) -> Change:
    """Let the server die in a round, when so many of its messages have been answered."""
    count = itertools.count(1)

    def change(_: Site, sent: Sent, reply: Reply) -> Reply:
        if sent.header["kind"] == "work" and sent.header["round"] == round and next(count) == message:
            raise Stopped
        return reply

    return change


class StopAfter(fs.Callback):
    """Dies after a round, before its checkpoint."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_round(self, round: int, state: fs.State) -> None:
        if round == self.round:
            raise Stopped


KEEPING: dict[str, Tables] = {
    "scaffold": {"algorithm": {"name": "scaffold", "steps": 2, "lr": 0.1}, "train": {"participation": 2}},
    "fgda": {"algorithm": {"name": "fgda", "steps": 2, "gamma": 0.1, "lam": 0.1}, **AUC},
    "local_sgdam": {"algorithm": {"name": "local_sgdam", "steps": 2, "average_momentum": False}, **AUC},
    "codasca": {"algorithm": {"name": "codasca", "steps": 2, "stage_rounds": 2, "lr": 0.05}, **AUC},
    "fedavg, top_k": {"algorithm": {"name": "fedavg", "steps": 2}, "channel": {"compress": "top_k", "top": 0.1}},
}


def keeping(name: str, every: int = 1, rounds: int = 4) -> fs.Config:
    base = DIGITS if name.startswith(("scaffold", "fedavg")) else CANCER
    return made(base, KEEPING[name], {"train": {"rounds": rounds, "checkpoint_every": every, "eval_every": 1}})


def assert_same_bits(run: fs.Run, straight: fs.Run) -> None:
    assert torch.equal(run.x, straight.x)
    assert (run.y is None) == (straight.y is None) and (run.y is None or torch.equal(run.y, straight.y))
    assert without_seconds(run.history) == without_seconds(straight.history)


def versions(nodes: Site, client: int) -> list[str]:
    return sorted(p.name for p in Path(nodes.here(client)["state"]).rglob("state-*.safetensors"))


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", KEEPING)
def test_a_server_that_goes_back_to_its_checkpoint_ends_with_the_same_bits(
    name: str, every: int, tmp_path: Path
) -> None:
    nodes = site(tmp_path, keeping(name, every))
    straight = nodes.serve(tmp_path / "straight")
    out = tmp_path / "run"
    last = sum(m.header["round"] == 3 for m in nodes.sent)
    for round, message in ((2, 2), (3, last)):  # with one more to come, and with none
        with pytest.raises(Stopped):
            nodes.again(change=stopping_in(round, message)).serve(out, resume=True)
    assert_same_bits(nodes.again().serve(out, resume=True), straight)


@pytest.mark.parametrize("name", ["scaffold", "fgda"])
def test_a_round_that_was_done_but_not_saved_is_done_again_from_what_was_there_before_it(
    name: str, tmp_path: Path
) -> None:
    nodes = site(tmp_path, keeping(name, every=2))
    straight = nodes.serve(tmp_path / "straight")
    for round in (3, 4):  # 4 would have been saved
        with pytest.raises(Stopped):
            nodes.again().serve(tmp_path / "run", True, [StopAfter(round)])
    assert_same_bits(nodes.again().serve(tmp_path / "run", True), straight)


def test_a_damaged_checkpoint_goes_back_to_the_one_before_and_so_do_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "DURABLE_SECONDS", 0.0)
    nodes = site(tmp_path, keeping("scaffold"))
    straight = nodes.serve(tmp_path / "straight")
    with pytest.raises(Stopped):
        nodes.again().serve(tmp_path / "run", True, [StopAfter(4)])
    newest = sorted((tmp_path / "run" / "checkpoint").glob("round-*.safetensors"))[-1]
    newest.write_bytes(newest.read_bytes()[:-8])
    with pytest.warns(UserWarning, match="damaged"):
        run = nodes.again().serve(tmp_path / "run", True)
    assert_same_bits(run, straight)


def test_versions_that_no_checkpoint_needs_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = made(keeping("scaffold", rounds=7).to_table(), {"train": {"participation": 3}})
    nodes = site(tmp_path, config)
    nodes.serve(tmp_path / "a")
    assert len(versions(nodes, 0)) == 7  # a power failure may lose checkpoints of the last half minute
    monkeypatch.setattr(server, "DURABLE_SECONDS", 0.0)
    nodes = site(tmp_path / "other", config)
    nodes.serve()
    # Round 7 was under way, 6 and 5 were saved: what was there after 5, and what came then.
    assert versions(nodes, 0) == [f"state-{r:08d}-0000.safetensors" for r in (5, 6, 7)]


def wrong(reply: Reply) -> str:
    """What a node says went wrong, if anything."""
    return reply.error or json.loads(reply.text).get("error", "")


def test_runs_of_long_ago_are_removed_from_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = site(tmp_path, keeping("scaffold", rounds=1))
    state = Path(nodes.here(0)["state"])
    (state / "not a run").mkdir(parents=True)
    for number in range(node.RUNS_KEPT + 2):
        nodes.serve(tmp_path / f"run-{number}")
    assert len(list(state.iterdir())) == 1 + node.RUNS_KEPT + 2  # they are of today
    monkeypatch.setattr(node, "OLD", -1.0)
    nodes.serve(tmp_path / "last")
    assert len(list(state.iterdir())) == 1 + node.RUNS_KEPT and (state / "not a run").exists()


def test_an_algorithm_without_client_state_writes_none(tmp_path: Path) -> None:
    nodes = site(tmp_path, made(DIGITS, {"algorithm": {"name": "fedavg"}}))
    nodes.serve()
    assert [versions(nodes, k) for k in range(3)] == [[], [], []]


def test_a_file_that_a_kill_left_half_written_does_no_harm(tmp_path: Path) -> None:
    nodes = site(tmp_path, keeping("scaffold"))
    straight = nodes.serve(tmp_path / "straight")
    with pytest.raises(Stopped):
        nodes.again().serve(tmp_path / "run", True, [StopAfter(3)])
    for k in range(3):
        for folder in Path(nodes.here(k)["state"]).iterdir():
            (folder / ".state-00000009-0000.safetensors.77.tmp").write_bytes(b"cut")
            (folder / "state-00000099-0000.safetensors").write_bytes(b"a round that never was")
    assert_same_bits(nodes.again().serve(tmp_path / "run", True), straight)


def test_a_truncated_version_is_a_clear_error_that_names_the_node_and_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = made(keeping("scaffold").to_table(), {"train": {"participation": 3}})
    nodes = site(tmp_path, config)
    with pytest.raises(Stopped):
        nodes.serve(tmp_path / "run", True, [StopAfter(3)])
    (folder,) = Path(nodes.here(1)["state"]).iterdir()
    for file in sorted(folder.glob("state-*")):
        file.write_bytes(file.read_bytes()[:50])
    run = nodes.again().serve(tmp_path / "run", True)
    faults = nodes.faults(tmp_path / "run")
    assert run.summary["left_out"] == {"node1": 2}
    assert {(f["client"], f["kind"]) for f in faults} == {(1, "error")}
    said = capsys.readouterr().err
    assert f"What the node kept in {folder}/state-" in said and "cannot be read" in said


def test_a_new_run_where_one_is_already_leaves_the_name_of_that_one_alone(tmp_path: Path) -> None:
    nodes = site(tmp_path, keeping("scaffold"))
    straight = nodes.serve(tmp_path / "straight")
    with pytest.raises(Stopped):
        nodes.again().serve(tmp_path / "run", False, [StopAfter(3)])
    with pytest.raises(fs.InputError, match="not empty"):
        nodes.again().serve(tmp_path / "run", False)
    assert_same_bits(nodes.again().serve(tmp_path / "run", True), straight)


# --- replies that are refused ---------------------------------------------------------------------------------------

SPOILT = 1
FEDAVG: Tables = {"algorithm": {"name": "fedavg", "steps": 2}, "train": {"rounds": 2}, "faults": {"timeout": 0.3}}
SCAFFOLD: Tables = {**FEDAVG, "algorithm": {"name": "scaffold", "steps": 2}}
PACKED: Tables = {**FEDAVG, "channel": {"compress": "top_k", "top": 0.1, "clip": 1.0}}
QUANTISED: Tables = {**FEDAVG, "channel": {"compress": "quantise"}}


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Tables], Site]:
    known: dict[str, Site] = {}

    def of(tables: Tables) -> Site:
        name = json.dumps(tables, sort_keys=True)
        if name not in known:
            known[name] = site(tmp_path_factory.mktemp("site"), made(DIGITS, tables))
        return known[name].again()

    return of


def in_round(number: int, change: Change) -> Change:
    """Change what node 1 answers in one round."""

    def changed(nodes: Site, sent: Sent, reply: Reply) -> Reply | None:
        header = sent.header
        hit = sent.node == SPOILT and header["kind"] == "work" and header["round"] == number
        return change(nodes, sent, reply) if hit else reply

    return changed


def headed(reply: Reply, **changes: Any) -> dict[str, Any]:
    """The header of a reply with some things changed; None leaves them out."""
    table = json.loads(reply.text) | changes
    return {k: v for k, v in table.items() if v is not None}


def another_header(**changes: Any) -> Change:
    return lambda nodes, sent, reply: nodes.signed(sent.node, headed(reply, **changes), reply.arrays)


def another_text(text: str) -> Change:
    return lambda nodes, sent, reply: nodes.signed(sent.node, text, reply.arrays)


def another_form(form: Callable[[dict[str, Any]], Any]) -> Change:
    """Another form of the first array."""

    def change(nodes: Site, sent: Sent, reply: Reply) -> Reply:
        return nodes.signed(sent.node, headed(reply, form=form(json.loads(reply.text)["form"])), reply.arrays)

    return change


def another_array(array: Callable[[np.ndarray], np.ndarray], announced: dict[str, Any] | None = None) -> Change:
    """Other numbers, announced as they are, or as something else."""

    def change(nodes: Site, sent: Sent, reply: Reply) -> Reply:
        new = array(reply.arrays[0])
        form = {"array": 0, "shape": list(new.shape), "dtype": str(new.dtype), **(announced or {})}
        return nodes.signed(sent.node, headed(reply, form=form), [new])

    return change


def replayed(nodes: Site, sent: Sent, reply: Reply) -> Reply:
    pairs = zip(nodes.sent, nodes.replies, strict=True)
    return next(r for s, r in pairs if s.node == sent.node and s.header["kind"] == "work")


def of_another_node(nodes: Site, sent: Sent, reply: Reply) -> Reply:
    other = nodes.signed(2, reply.text, reply.arrays)
    return replace(reply, signature=other.signature)


REFUSED: dict[str, tuple[str, Change]] = {
    "no signature": ("forged", lambda n, s, r: replace(r, signature=b"")),
    "a signature that is none": ("forged", lambda n, s, r: replace(r, signature=b"\x30" * 100)),
    "the signature of another node": ("forged", of_another_node),
    "another text than was signed": ("forged", lambda n, s, r: replace(r, text=r.text.replace("16", "17"))),
    "other numbers than were signed": ("forged", lambda n, s, r: replace(r, arrays=(r.arrays[0] + 1,))),
    "an array more than was signed": ("forged", lambda n, s, r: replace(r, arrays=(*r.arrays, *r.arrays))),
    "a reply of the round before": ("stale", replayed),
    "no nonce": ("stale", another_header(nonce=None)),
    "an error": ("error", lambda n, s, r: Reply(error="failed (out of memory)")),
    "an error that wants to write on the terminal": ("error", lambda n, s, r: Reply(error="\x1b[2J\n" + "x" * 10**6)),
    "a forged envelope": ("forged", lambda n, s, r: Reply(error="forged: the reply claims to be from another node")),
    "nothing": ("silent", lambda n, s, r: None),
    "a text that is not JSON": ("type", another_text("{]")),
    "an empty text": ("type", another_text("")),
    "a list": ("type", another_text("[1, 2]")),
    "a number with a hundred thousand digits": ("type", another_text('{"nonce": ' + "7" * 100_000 + "}")),
    "brackets, a hundred thousand deep": ("type", another_text("[" * 100_000 + "]" * 100_000)),
    "too many bytes": ("size", another_array(lambda a: np.zeros((1, 400_000), dtype=np.float32))),
    "too long a header": ("size", another_header(more="x" * 2_000_000)),
    "the wrong shape": ("shape", another_array(lambda a: a[:, :-1].copy())),
    "a longer vector": ("shape", another_array(lambda a: np.concatenate([a, a], 1))),
    "two clients' rows": ("shape", another_array(lambda a: np.concatenate([a, a], 0))),
    "no client's row": ("shape", another_array(lambda a: a[:0].copy())),
    "a single number": ("shape", another_array(lambda a: np.array(1.0, dtype=np.float32))),
    "another precision": ("shape", another_array(lambda a: a.astype(np.float64))),
    "whole numbers": ("shape", another_array(lambda a: a.astype(np.int64))),
    "another shape than announced": ("shape", another_array(lambda a: a, {"shape": [1, 3]})),
    "another kind than announced": ("type", another_array(lambda a: a, {"dtype": "float64"})),
    "an unknown kind": ("type", another_array(lambda a: a.astype(np.float16))),
    "complex numbers": ("type", another_array(lambda a: a.astype(np.complex64))),
    "objects": ("type", another_array(lambda a: a.astype(object))),
    "objects announced as numbers": ("type", another_array(lambda a: a.astype(object), {"dtype": "float32"})),
    "numbers announced as objects": ("type", another_array(lambda a: a, {"dtype": "object"})),
    "the bytes the other way round": ("type", another_array(lambda a: a.astype(">f4"))),
    "text": ("type", another_array(lambda a: a.astype("U8"))),
    "a kind that is a list": ("type", another_array(lambda a: a, {"dtype": ["float32"]})),
    "a kind that is a table": ("type", another_array(lambda a: a, {"dtype": {}})),
    "a shape that is text": ("shape", another_array(lambda a: a, {"shape": "(1, 650)"})),
    "an array that is not there": ("type", another_array(lambda a: a, {"array": 1})),
    "an array from the end": ("type", another_array(lambda a: a, {"array": -1})),
    "an array called true": ("type", another_array(lambda a: a, {"array": True})),
    "no form": ("type", another_header(form=None)),
    "a form that is text": ("type", another_header(form="x")),
    "a form with something more": ("type", another_form(lambda form: {**form, "more": 1})),
    "a form nested too deeply": ("type", another_form(lambda form: [[[[[[[[[[[form]]]]]]]]]]])),
    "a form of too many parts": ("type", another_form(lambda form: [form] * 5000)),
    "the same array a thousand times": ("type", another_form(lambda form: [form] * 1000)),
    "a number instead of an array": ("type", another_form(lambda form: {"value": 3.0})),
    "a table as a number": ("type", another_form(lambda form: {"value": {}})),
    "nothing in the form": ("type", another_form(lambda form: [])),
    "two things": ("type", another_form(lambda form: [form, form])),
    "arrays that belong nowhere": ("type", lambda n, s, r: n.signed(s.node, r.text, [*r.arrays, np.zeros(3)])),
    "no arrays at all": ("type", lambda n, s, r: n.signed(s.node, r.text, [])),
    "nothing, and no arrays": ("shape", lambda n, s, r: n.signed(s.node, headed(r, form=[]), [])),
    "NaN": ("nan", another_array(lambda a: np.full_like(a, np.nan))),
    "an infinite entry": ("nan", another_array(lambda a: np.where(np.arange(a.shape[1]) == 7, np.inf, a).astype("f4"))),
    "no counts": ("type", another_header(samples=None, steps=None)),
    "a negative count": ("type", another_header(samples=-5)),
    "an endless count": ("type", another_header(steps=10**30)),
    "a count that is NaN": ("type", another_header(samples=float("nan"))),
    "a count that is true": ("type", another_header(steps=True)),
}


DROPPED: dict[tuple[str, int], fs.Run] = {}
"""Runs that a node was dropped from in a round, by the folder of the site."""


def unharmed(nodes: Site, change: Change, out: Path, number: int) -> tuple[fs.Run, list[dict[str, Any]]]:
    """Run with what one node answers in a round changed; the result is that of a run that it was dropped from."""
    which = str(nodes.folder), number
    if which not in DROPPED:
        gone = nodes.again(change=in_round(number, lambda n, s, r: Reply(error="gone")))
        DROPPED[which] = gone.serve(out / "dropped")
    run = nodes.again(change=in_round(number, change)).serve(out / "run")
    faults = nodes.faults(out / "run")
    assert {(f["client"], f["round"]) for f in faults} == {(SPOILT, number + 1)}
    assert torch.equal(run.x, DROPPED[which].x)
    assert run.summary["left_out"] == {"node1": 1} and run.history[-1]["failed"] == 1
    return run, faults


@pytest.mark.parametrize("name", REFUSED)
def test_a_reply_that_cannot_be_used_is_left_out_and_named(
    name: str, sites: Callable[[Tables], Site], tmp_path: Path
) -> None:
    kind, change = REFUSED[name]
    _, (fault,) = unharmed(sites(FEDAVG), change, tmp_path, 1)
    assert fault["kind"] == kind
    assert len(fault["detail"]) <= 500 and fault["detail"].isprintable()


@pytest.mark.parametrize("name", ["the wrong shape", "another precision", "two things"])
def test_where_nothing_says_the_shape_that_of_most_counts(
    name: str, sites: Callable[[Tables], Site], tmp_path: Path
) -> None:
    _, (fault,) = unharmed(sites(SCAFFOLD), REFUSED[name][1], tmp_path, 0)
    assert fault["kind"] in ("shape", "type")


def test_the_shape_that_all_answered_before_counts_even_when_most_answer_with_another(
    sites: Callable[[Tables], Site], tmp_path: Path
) -> None:
    def change(nodes: Site, sent: Sent, reply: Reply) -> Reply:
        header = sent.header
        if header["kind"] != "work" or header["round"] != 1 or sent.node == 0:
            return reply
        arrays = [a[:, :3].copy() for a in reply.arrays]
        form = [{"array": i, "shape": [1, 3], "dtype": "float32"} for i in range(2)]
        return nodes.signed(sent.node, headed(reply, form=form), arrays)

    nodes = sites({**SCAFFOLD, "faults": {"quorum": 1}})
    run = nodes.again(change=change).serve(tmp_path / "run")
    assert run.summary["left_out"] == {"node1": 1, "node2": 1}


def parcel(**parts: Any) -> Change:
    """Another parcel: arrays by name, or what the header says of them."""

    def change(nodes: Site, sent: Sent, reply: Reply) -> Reply:
        header = json.loads(reply.text)
        arrays = dict(zip(header["names"], reply.arrays, strict=True))
        for name, part in parts.items():
            if callable(part):
                arrays[name] = part(arrays[name])
            else:
                header[name] = part
        form = [{"array": i, "shape": list(a.shape), "dtype": str(a.dtype)} for i, a in enumerate(arrays.values())]
        return nodes.signed(sent.node, {**header, "form": form}, list(arrays.values()))

    return change


def like(shape: Any, dtype: Any = "float32", array: Any = 0) -> dict[str, Any]:
    return {"array": array, "shape": shape, "dtype": dtype}


BAD_PARCELS: dict[str, tuple[str, Tables, Change]] = {
    "places beyond the end": ("shape", PACKED, parcel(places=lambda a: a + 650)),
    "places before the start": ("shape", PACKED, parcel(places=lambda a: -a - 1)),
    "places of another kind": ("type", PACKED, parcel(places=lambda a: a.astype(np.int64))),
    "places that are fractions": ("type", PACKED, parcel(places=lambda a: a.astype(np.float32))),
    "too few places": ("shape", PACKED, parcel(places=lambda a: a[:, :-1].copy())),
    "too many entries": ("shape", PACKED, parcel(values=lambda a: np.tile(a, 2), places=lambda a: np.tile(a, 2))),
    "values of another kind": ("type", PACKED, parcel(values=lambda a: a.astype(np.float64))),
    "values that are NaN": ("nan", PACKED, parcel(values=lambda a: a * np.nan)),
    "another channel": ("type", PACKED, parcel(names=["levels", "scale"])),
    "names in another order": ("type", PACKED, parcel(names=["places", "values"])),
    "names that are none": ("type", PACKED, parcel(names=3)),
    "an answer around the channel": ("type", PACKED, parcel(packed=False)),
    "a form of nothing": ("type", PACKED, parcel(like=None)),
    "an empty form": ("shape", PACKED, parcel(like=[])),
    "a form of too many": ("shape", PACKED, parcel(like=[like([1, 650]), like([1, 650])])),
    "the form of something else": ("shape", PACKED, parcel(like=like([1, 649]))),
    "the form of two clients": ("type", PACKED, parcel(like=like([2, 650]))),
    "the form of no client": ("type", PACKED, parcel(like=like([0, 650]))),
    "an enormous form": ("size", PACKED, parcel(like=like([1, 1 << 30]))),
    "enormous forms, each for itself allowed": ("size", PACKED, parcel(like=[like([1, 250_000])] * 9)),
    "an impossible form": ("size", PACKED, parcel(like=like([1] + [1 << 30] * 5))),
    "a form of half numbers": ("type", PACKED, parcel(like=like([1, 0.5]))),
    "a form of objects": ("type", PACKED, parcel(like=like([1, 650], "object"))),
    "a form of lists": ("type", PACKED, parcel(like=like([1, 650], ["float32"]))),
    "a form nested too deeply": ("type", PACKED, parcel(like=json.loads("[" * 500 + "]" * 500))),
    "levels of another kind": ("type", QUANTISED, parcel(levels=lambda a: a.astype(np.float32))),
    "a scale for every entry": ("shape", QUANTISED, parcel(scale=lambda a: np.tile(a, 650))),
    "a scale that is infinite": ("nan", QUANTISED, parcel(scale=lambda a: a * np.inf)),
}


@pytest.mark.parametrize("name", BAD_PARCELS)
def test_a_parcel_that_cannot_be_opened_is_left_out_and_named(
    name: str, sites: Callable[[Tables], Site], tmp_path: Path
) -> None:
    kind, tables, change = BAD_PARCELS[name]
    _, (fault,) = unharmed(sites(tables), change, tmp_path, 1)
    assert fault["kind"] == kind


def test_the_largest_answer_can_be_set(sites: Callable[[Tables], Site], tmp_path: Path) -> None:
    nodes = sites({**FEDAVG, "faults": {"max_bytes": 1000, "retries": 0}})
    with pytest.raises(fs.QuorumError, match="more than 1,000"):
        nodes.serve(tmp_path / "run")
    assert {f["kind"] for f in nodes.faults(tmp_path / "run")} == {"size"}


def test_a_node_that_is_not_connected_is_left_out_until_it_is_there_again(
    sites: Callable[[Tables], Site], tmp_path: Path
) -> None:
    def change(nodes: Site, sent: Sent, reply: Reply) -> Reply:
        gone = sent.header["kind"] == "work" and sent.header["round"] == 0 and sent.node == 2
        nodes.offline = {SPOILT} if gone else set()
        return reply

    tables = {**FEDAVG, "train": {"rounds": 3}}
    nodes = sites(tables)
    run = nodes.again(change=change).serve(tmp_path / "run")
    (fault,) = nodes.faults(tmp_path / "run")
    assert (fault["round"], fault["client"], fault["kind"]) == (2, SPOILT, "silent")
    assert fault["detail"] == "is not connected"
    expected = nodes.again(change=in_round(1, lambda n, s, r: None)).serve(tmp_path / "dropped")
    assert torch.equal(run.x, expected.x)


def test_two_nodes_with_the_same_key_are_refused(tmp_path: Path) -> None:
    public = keys.make_key(tmp_path / "key")
    with pytest.raises(fs.InputError, match="same public key"):
        Nodes.read(json.dumps({"a": public, "b": f"{public} a comment"}))


@pytest.mark.parametrize("text", ["", "[]", "{}", "{", '{"a": "ssh-rsa AAAA"}', '{"a": 3}'])
def test_a_list_of_nodes_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(fs.InputError):
        Nodes.read(text)


# --- what Flower brings ---------------------------------------------------------------------------------------------


def brought(content: RecordDict | None = None, source: int = 7, to: str = "ticket", **error: Any) -> Reply:
    """What becomes of a reply that Flower brings to a question of node 7."""
    about = Metadata(1, "reply", source, 1, to, "0", now().timestamp(), 100.0, "query")
    message = make_message(metadata=about, content=content, error=Error(**error) if error else None)
    reply = app.FlowerPost(SimpleNamespace(pull_messages=lambda _: [message]), 60.0).fetch("ticket", 7)
    assert reply is not None
    return reply


HEADER = ConfigRecord({"text": "{}", "signature": b""})


def test_a_reply_of_the_node_that_was_asked_is_taken_as_it_is() -> None:
    numbers = np.arange(6, dtype=np.int8).reshape(2, 3)
    reply = brought(app._records("{}", b"s", [numbers, numbers[:1]]))
    assert (reply.text, reply.signature, reply.error) == ("{}", b"s", "")
    assert [a.tolist() for a in reply.arrays] == [numbers.tolist(), numbers[:1].tolist()]
    assert reply.arrays[0].dtype == np.int8


@pytest.mark.parametrize(("source", "to"), [(8, "ticket"), (7, "another"), (8, "another"), (0, "ticket")])
def test_a_reply_that_claims_to_be_something_else_is_forged(source: int, to: str) -> None:
    assert brought(app._records("{}", b"", []), source, to).error.startswith("forged")


def test_an_error_that_flower_tells_is_told() -> None:
    assert (
        brought(None, 1, code=8, reason="ClientApp stopped responding.").error
        == "failed (ClientApp stopped responding.)"
    )


def raw(**changes: Any) -> RecordDict:
    """Records with an array as a node could write it by hand."""
    whole = Array(np.zeros(3, dtype=np.float32))
    array = Array(**{"dtype": "float32", "shape": (3,), "stype": whole.stype, "data": whole.data, **changes})
    return RecordDict({"header": HEADER, "arrays": ArrayRecord({"000000": array})})


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + data


@pytest.mark.parametrize(
    "content",
    [
        RecordDict({}),
        RecordDict({"header": HEADER}),
        RecordDict({"header": HEADER, "arrays": ConfigRecord({"a": "b"})}),
        RecordDict({"header": ArrayRecord({}), "arrays": ArrayRecord({})}),
        RecordDict({"header": ConfigRecord({"text": "{}"}), "arrays": ArrayRecord({})}),
        RecordDict({"header": ConfigRecord({"text": b"{}", "signature": b""}), "arrays": ArrayRecord({})}),
        RecordDict({"header": ConfigRecord({"text": 3, "signature": b""}), "arrays": ArrayRecord({})}),
        raw(data=b""),
        raw(data=b"\x93NUMPY"),
        raw(data=b"garbage" * 9),
        raw(stype="pickle"),
        raw(data=npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"cos\nsystem\n")),
        raw(data=npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000000,), }")),
        raw(data=npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-4,), }", b"1234")),
        raw(data=npy("__import__('os').system('true')")),
    ],
)
def test_whatever_else_a_node_sends_is_an_error_of_that_node(content: RecordDict) -> None:
    assert brought(content).error.startswith("sent something that is not an answer")


# --- what crosses ---------------------------------------------------------------------------------------------------


def test_nodes_say_what_their_data_look_like_and_not_how_many_there_are(tmp_path: Path) -> None:
    for weighting in ("uniform", "samples"):
        config = made(DIGITS, {"algorithm": {"name": "fedavg"}, "train": {"weighting": weighting, "rounds": 1}})
        nodes = site(tmp_path / weighting, config)
        nodes.serve()
        sizes = Experiment(config).data.sizes.tolist()
        for k in range(3):
            said = json.loads(nodes.replies[k].text)
            said.pop("nonce")
            rows = sizes[k] if weighting == "samples" else 1
            classes = said.pop("classes")
            assert said == {"shapes": [[1, 8, 8], []], "dtypes": ["float32", "int64"], "rows": rows}
            assert 1 <= classes <= 10


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fgda"])
def test_no_message_and_no_reply_holds_the_data(name: str, tmp_path: Path) -> None:
    over = KEEPING.get(name, {"algorithm": {"name": name, "steps": 2}})
    config = made(CANCER if name == "fgda" else DIGITS, over, {"train": {"rounds": 2}})
    nodes = site(tmp_path, config)
    nodes.serve(pooled=False)
    inputs = Experiment(config).data.train.arrays[0].numpy().astype(np.float32)
    rows = {row.tobytes() for row in inputs}
    width = inputs.shape[1]
    for arrays in [m.arrays for m in nodes.sent] + [list(r.arrays) for r in nodes.replies]:
        for array in arrays:
            assert array.dtype.kind == "f" or array.size <= 2, "whole numbers could be targets"
            flat = array.astype(np.float32).ravel()
            windows = np.lib.stride_tricks.sliding_window_view(flat, width) if len(flat) >= width else []
            assert not any(window.tobytes() in rows for window in windows)
    for sent, reply in zip(nodes.sent, nodes.replies, strict=True):
        said = set(json.loads(reply.text)) - {"nonce"}
        kinds: dict[str, set[str]] = {
            "hello": {"shapes", "dtypes", "classes", "rows"},
            "work": {"form", "packed", "samples", "steps"},
            "measure": {"rows", "measures"},
        }
        assert said == kinds[sent.header["kind"]]
        assert not wrong(reply)


def call(nodes: Site, **changes: Any) -> dict[str, Any]:
    """The header of what a node answers to a call of one's own."""
    x = torch.zeros(650)
    form, arrays = server.wire.taken_apart((x,))
    table = {"kind": "work", "run": "ab" * 16, "nonce": "n", "clients": 3, "classes": 10, "work": "local", "form": form}
    reply = nodes.answered(Sent(0, json.dumps(table | changes), arrays))
    found: dict[str, Any] = json.loads(reply.text) if not reply.error else {"error": reply.error}
    return found


@pytest.mark.parametrize(
    "work",
    [
        *("__init__", "__class__", "__post_init__", "round", "check", "init", "start", "solution", "solves", "name"),
        *("_private", "", "local.__globals__", "question:local", "question:", "question:__init__", "class_counts"),
    ],
)
def test_only_what_an_algorithm_declares_can_be_asked_for(
    work: str, sites: Callable[[Tables], Site], capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = sites(FEDAVG)
    assert call(nodes)["steps"] == 2
    assert set(call(nodes, work=work)) == {"error", "nonce"}
    assert "The work must be one of local" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "shell"}, "kind of call"),
        ({"kind": ""}, "kind of call"),
        ({"run": "../../outside"}, "name of the run"),
        ({"run": ""}, "name of the run"),
        ({"run": "ab" * 17}, "name of the run"),
        ({"form": {"array": 5, "shape": [650], "dtype": "float32"}}, "no array number 5"),
        ({"form": "os.system"}, "not one"),
    ],
)
def test_calls_that_make_no_sense_are_refused(
    changes: dict[str, Any], said: str, sites: Callable[[Tables], Site], capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(call(sites(FEDAVG), **changes)) == {"error", "nonce"}
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["data", "key", "state"])
def test_a_node_configuration_must_be_whole(
    missing: str, sites: Callable[[Tables], Site], capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = sites(FEDAVG)
    there = nodes.here(0)
    nodes.here = lambda _: {k: v for k, v in there.items() if k != missing}  # type: ignore[method-assign]
    said = str(call(nodes)["error"]) + capsys.readouterr().err
    assert "The node configuration must name" in said


# --- measures -------------------------------------------------------------------------------------------------------

HELD_OUT: Tables = {"algorithm": {"name": "fedavg", "lr": 0.1}, "data": {"holdout": 0.3}, "train": {"rounds": 2}}


def measured_by_hand(config: fs.Config, run: fs.Run) -> list[tuple[int, dict[str, float]]]:
    """What each client's test part gives."""
    data = Experiment(config).data
    assert data.client_test is not None
    found = []
    for k in range(data.clients):
        own = replace(data, test=data.client_test.of_client(k))
        own = own.to(torch.device("cpu"), run.x.dtype)
        measures = fs.Evaluation("none", adapt_steps=0)(run.problem, own, run.x, run.y)
        found.append((len(own.test[0]), {k: float(v) for k, v in measures.items()}))
    return found


@pytest.mark.parametrize("problem", ["erm", "auc"])
def test_without_test_data_on_the_server_nodes_measure_on_their_own(problem: str, tmp_path: Path) -> None:
    config = made(DIGITS, HELD_OUT)
    if problem == "auc":
        uneven = {"partition": {"name": "one_large", "large": 100, "small": 40}}
        config = made(CANCER, HELD_OUT, AUC, {"algorithm": {"name": "local_sgda", "lr": 0.05}, "data": uneven})
    nodes = site(tmp_path, config)
    run = nodes.serve(pooled=False)
    row = run.history[-1]
    found = measured_by_hand(config, run)
    total = sum(rows for rows, _ in found)
    assert len({rows for rows, _ in found}) > 1
    for name in ("loss", "accuracy") if problem == "erm" else ("loss", "auc"):
        each = [measures[name] for _, measures in found]
        mean = sum(rows * value for (rows, _), value in zip(found, each, strict=True)) / total
        assert row[name] == pytest.approx(mean, rel=1e-6)
        assert row[f"{name}_worst"] == pytest.approx(max(each) if name == "loss" else min(each), rel=1e-6)
        assert row[f"{name}_mean"] == pytest.approx(np.mean(each), rel=1e-6)
        assert run.summary["per_client"][name] == pytest.approx(each, rel=1e-6)
    assert row["measured_clients"] == len(found)
    assert tables.measured(run.summary) == "Measured per client on its test data."


def test_with_test_data_on_the_server_the_server_measures_alone(tmp_path: Path) -> None:
    config = made(DIGITS, HELD_OUT)
    nodes = site(tmp_path, config)
    run = nodes.serve()
    assert {m.header["kind"] for m in nodes.sent} == {"hello", "work"}
    data = Experiment(config).data.to(torch.device("cpu"), run.x.dtype)
    expected = fs.Evaluation("none")(run.problem, data, run.x, None)
    assert run.history[-1]["loss"] == pytest.approx(float(expected["loss"]), rel=1e-6)
    assert "loss_worst" not in run.history[-1]


def test_with_test_data_on_the_server_nodes_measure_too_where_that_is_asked_for(tmp_path: Path) -> None:
    config = made(DIGITS, HELD_OUT, {"evaluate": {"clients": "test"}})
    run = site(tmp_path, config).serve()
    data = Experiment(config).data.to(torch.device("cpu"), run.x.dtype)
    pooled = fs.Evaluation("none")(run.problem, data, run.x, None)
    each = [measures["loss"] for _, measures in measured_by_hand(config, run)]
    assert run.history[-1]["loss"] == pytest.approx(float(pooled["loss"]), rel=1e-6)
    assert run.history[-1]["loss_worst"] == pytest.approx(max(each), rel=1e-6)
    assert run.summary["per_client"]["loss"] == pytest.approx(each, rel=1e-6)
    assert run.summary["measured_on"] == {"pooled": "test data of the server", "clients": "test data"}


def test_nodes_that_could_not_measure_are_named_and_counted(tmp_path: Path) -> None:
    nodes = site(tmp_path, made(DIGITS, HELD_OUT))

    def change(nodes: Site, sent: Sent, reply: Reply) -> Reply:
        return Reply(error="failed") if sent.node == 1 and sent.header["kind"] == "measure" else reply

    nodes.change = change
    run = nodes.serve(pooled=False)
    assert run.summary["not_measured"] == {run.summary["client_names"][1]: len(run.history)}
    assert run.history[-1]["measured_clients"] == 2
    assert run.summary["per_client"]["loss"][1] is None
    again = nodes.again(change=None).serve(resume=True, pooled=False)  # nothing is left to do, but all is said again
    assert again.summary["not_measured"] == run.summary["not_measured"]
    assert again.summary["per_client"]["loss"][::2] == run.summary["per_client"]["loss"][::2]


def test_nothing_is_measured_where_nobody_has_test_data_or_nobody_wants_to(tmp_path: Path) -> None:
    said: list[str] = []
    run = site(tmp_path / "a", made(DIGITS, {"train": {"rounds": 1}})).serve(pooled=False, say=said.append)
    assert "loss" not in run.history[-1] and run.history[-1]["measured_clients"] == 0
    assert run.summary["per_client"] == {} and "no node that answered has test data" in said[-1]
    nodes = site(tmp_path / "b", made(DIGITS, HELD_OUT, {"evaluate": {"clients": "none"}}))
    run = nodes.serve(pooled=False)
    assert {m.header["kind"] for m in nodes.sent} == {"hello", "work"} and "loss" not in run.history[-1]
    assert tables.measured(run.summary) == "Measured on nothing."


def test_nodes_measure_under_attack_where_that_is_asked_for(tmp_path: Path) -> None:
    config = made(DIGITS, HELD_OUT, {"evaluate": {"attack_radius": 0.5, "attack_steps": 2}})
    row = site(tmp_path, config).serve(pooled=False).history[-1]
    assert row["attacked_loss"] > row["loss"]


def test_holding_out_beside_test_data_is_refused_by_the_node(tmp_path: Path) -> None:
    config = made(DIGITS, HELD_OUT)
    nodes = site(tmp_path, config)
    nodes.experiment += "\n[data]\nholdout = 0.2\n"
    refused = r"node0: failed: The data of this node have a test part.*data\.holdout"
    with pytest.raises(fs.FedstrataError, match=refused):
        nodes.serve(pooled=False)


def test_a_node_holds_its_share_of_every_class_out() -> None:
    targets = torch.from_numpy(np.random.default_rng(0).permutation(np.repeat([0, 1], [48, 2])))
    own = node._Own((torch.arange(50.0)[:, None], targets), None, None)
    call = node.Call("work", "run", "nonce", client=1, clients=3, classes=2)
    data = node._placed(own, call, made(CANCER, {"data": {"holdout": 0.5, "support": 0.5}}))
    assert data.client_test is not None and data.support is not None
    assert data.client_test.class_counts.tolist() == [[0, 0], [24, 1], [0, 0]]
    assert data.sizes.tolist() == [0, 25, 0] and data.support.sizes.tolist() == [0, 12, 0]


def test_labels_may_be_floats_even_where_a_node_has_one_class(tmp_path: Path) -> None:
    """A node with zeros alone cannot know that they are labels; together the nodes do."""
    rng = np.random.default_rng(0)
    inputs, targets = rng.normal(size=(3, 20, 30)).astype("f4"), rng.integers(2, size=(3, 20))
    targets[1] = 0
    config = made(CANCER, AUC, {"algorithm": {"name": "local_sgda", "lr": 0.05}})
    runs = []
    for kind in ("f4", "i8"):
        data = fs.FederatedData.from_arrays(list(zip(inputs, targets.astype(kind), strict=True)))
        assert data.classes == 2
        runs.append(site(tmp_path / kind, config, data).serve(pooled=False))
    assert torch.equal(runs[0].x, runs[1].x)


def test_a_node_without_test_data_is_not_measured(tmp_path: Path) -> None:
    config = made(DIGITS, HELD_OUT)
    nodes = site(tmp_path, config)
    (Path(nodes.here(1)["data"]) / "test.npz").unlink()
    run = nodes.serve(pooled=False)
    first, _, last = measured_by_hand(config, run)
    mean = (first[0] * first[1]["loss"] + last[0] * last[1]["loss"]) / (first[0] + last[0])
    assert run.history[-1]["loss"] == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize(
    "said",
    [
        {"rows": 0, "measures": {"loss": 1.0}},
        {"rows": -40, "measures": {"loss": 1.0}},
        {"rows": "many", "measures": {"loss": 1.0}},
        {"rows": 10**40, "measures": {"loss": 1.0}},
        {"rows": True, "measures": {"loss": 1.0}},
        {"rows": 40, "measures": [1.0]},
        {"rows": 40, "measures": {"loss": "nan"}},
        {"rows": 40, "measures": {"loss": float("nan"), "accuracy": float("inf")}},
        {"rows": 40, "measures": {"loss": 10**400}},
        {"rows": 40, "measures": {"loss": None}},
        {"rows": 40, "measures": {"round": -1, "steps": 0, "seconds": 0, "\x1b[2J": 1.0}},
        {"rows": 40, "measures": {"loss_worst": -5.0, "auc_mean": 1.0, "gradient_norm": 0.0, "distance": 0.0}},
        {},
    ],
    ids=lambda v: str(v)[:60],
)
def test_measures_that_are_none_change_nothing(said: dict[str, Any], tmp_path: Path) -> None:
    config = made(DIGITS, HELD_OUT)
    nodes = site(tmp_path, config)

    def change(nodes: Site, sent: Sent, reply: Reply) -> Reply:
        if sent.node != SPOILT or sent.header["kind"] != "measure":
            return reply
        return nodes.signed(sent.node, {"nonce": sent.header["nonce"], **said})

    nodes.change = change
    run = nodes.serve(pooled=False)
    nodes = nodes.again(
        change=lambda n, s, r: Reply(error="no") if s.node == 1 and s.header["kind"] == "measure" else r
    )
    expected = nodes.serve(tmp_path / "other", pooled=False)
    assert without_seconds(run.history) == without_seconds(expected.history)
    assert torch.equal(run.x, expected.x)


# --- nodes that cannot take part --------------------------------------------------------------------------------------


def written(nodes: Site, client: int, inputs: np.ndarray, targets: np.ndarray) -> None:
    _save(Path(nodes.here(client)["data"]) / "train.npz", (torch.from_numpy(inputs), torch.from_numpy(targets)))


ROWS, LABELS = np.ones((4, 1, 8, 8), dtype=np.float32), np.arange(4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda n: written(n, 1, ROWS[:, 0, 0], LABELS), r"data of node1 must be like those of node0.*\[\[8\], \[\]\]"),
        (lambda n: written(n, 1, ROWS.astype("f8"), LABELS), r"data of node1 must be like those of node0.*float64"),
        (lambda n: written(n, 1, ROWS, np.zeros((4, 2))), r"data of node1 must be like those of node0.*\[2\]"),
        (lambda n: written(n, 1, ROWS[:0], LABELS[:0]), r"There are no samples"),
        (lambda n: written(n, 1, ROWS * np.nan, LABELS), r"contain NaN"),
        (lambda n: (Path(n.here(1)["data"]) / "train.npz").unlink(), r"must hold train.npz"),
        (lambda n: (Path(n.here(1)["data"]) / "train.npz").write_bytes(b"no"), r"not a readable .npz"),
        (lambda n: Path(n.here(1)["data"]).rename(n.folder / "elsewhere"), r"There is no .*data"),
        (lambda n: Path(n.here(1)["key"]).write_text("no key"), r"node.key cannot be read"),
        (lambda n: Path(n.here(1)["key"]).write_bytes(Path(n.here(0)["key"]).read_bytes()), "without its signature"),
    ],
)
def test_data_and_keys_that_will_not_do_are_errors_that_name_the_node(
    change: Callable[[Site], object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = site(tmp_path, made(DIGITS, FEDAVG))
    change(nodes)
    with pytest.raises(fs.FedstrataError, match="node1") as found:
        nodes.serve()
    assert "node2" not in str(found.value)
    assert re.search(said, str(found.value) + capsys.readouterr().err)  # what is in the data, in the node's log only


@pytest.mark.parametrize(
    "said",
    [
        {"shapes": None},
        {"shapes": [[64]]},
        {"shapes": [[64], ["x"]]},
        {"shapes": [[-64], []]},
        {"dtypes": ["float32", "object"]},
        {"dtypes": [["float32"], "int64"]},
        {"classes": "ten"},
        {"classes": 10**12},
        {"rows": 10**12},
        {"rows": None},
    ],
    ids=str,
)
def test_a_node_that_says_nonsense_about_its_data_is_named(
    said: dict[str, Any], sites: Callable[[Tables], Site], tmp_path: Path
) -> None:
    def change(nodes: Site, sent: Sent, reply: Reply) -> Reply:
        return nodes.signed(sent.node, headed(reply, **said)) if sent.node == SPOILT else reply

    with pytest.raises(fs.InputError, match="node1 did not say what its data look like"):
        sites(FEDAVG).again(change=change).serve(tmp_path / "run")


def test_a_node_that_is_not_there_at_the_start_is_named(
    sites: Callable[[Tables], Site], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.time, "sleep", lambda _: None)
    with pytest.raises(fs.QuorumError, match=r"Not connected within 0.3 s: node0, node2"):
        sites(FEDAVG).again(offline={0, 2}).serve(tmp_path / "run")


def test_one_file_may_hold_all_parts_of_a_nodes_data(tmp_path: Path) -> None:
    config = made(DIGITS, HELD_OUT)
    nodes = site(tmp_path, config)
    run = nodes.serve(tmp_path / "a", pooled=False)
    for k in range(3):
        folder = Path(nodes.here(k)["data"])
        parts = {"": np.load(folder / "train.npz"), "test_": np.load(folder / "test.npz")}
        np.savez(folder.with_suffix(".npz"), **{f"{p}{n}": file[n] for p, file in parts.items() for n in file.files})
    here = nodes.here
    nodes = nodes.again()
    nodes.here = lambda k: here(k) | {"data": here(k)["data"] + ".npz"}  # type: ignore[method-assign]
    other = nodes.serve(tmp_path / "b", pooled=False)
    assert_same_bits(other, run)


def test_a_problem_with_data_of_its_own_and_a_pretraining_are_refused(tmp_path: Path) -> None:
    with pytest.raises(fs.InputError, match="brings its own data"):
        server.check_config(made({"problem": {"name": "tower"}}), 3)
    with pytest.raises(fs.InputError, match="does not pre-train"):
        server.check_config(made(DIGITS, {"pretrain": {"rounds": 1}}), 3)
