"""Replies: which ones the server accepts, and which ones it drops."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import fedstrata as fs
from cases import one_per, repeats
from federation.stand_in import FEDAVG, SCAFFOLD, Change, Sent, Site, Tables, headed
from fedstrata.federation.wire import Reply
from fedstrata.training.callbacks import ShowProgress

SPOILT = 1
PACKED: Tables = {**FEDAVG, "channel": {"compress": "top_k", "top": 0.1, "clip": 1.0}}
QUANTISED: Tables = {**FEDAVG, "channel": {"compress": "quantise"}}


def in_round(number: int, change: Change) -> Change:
    """Change what node 1 answers in one round."""

    def changed(nodes: Site, sent: Sent, reply: Reply) -> Reply | None:
        return change(nodes, sent, reply) if sent.node == SPOILT and sent.is_work(number) else reply

    return changed


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
    """Another array, announced correctly or as something else."""

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
    "a forged envelope": ("forged", lambda n, s, r: Reply(error="is from another node", kind="forged")),
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
    "more steps than the others": ("type", another_header(steps=3)),
    "fewer steps than the others": ("type", another_header(steps=0)),
    "impossibly many steps": ("type", another_header(steps=2**31 - 1)),
    "no word on what it kept": ("type", another_header(kept=None)),
    "a number of what it kept": ("type", another_header(kept=1)),
    "another format": ("error", another_header(protocol=1)),
    "no format": ("error", another_header(protocol=None, version=None)),
}


DROPPED: dict[tuple[str, int], fs.Run] = {}
"""Runs in which a node was dropped in one round, by the folder of the site."""


def unharmed(nodes: Site, change: Change, out: Path, number: int) -> tuple[fs.Run, list[dict[str, Any]]]:
    """Run with one node's answer in a round changed; the result must be that of a run in which it was dropped."""
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


@one_per(lambda name: REFUSED[name][0], "name", REFUSED)
def test_a_reply_that_cannot_be_used_is_left_out_and_named(
    name: str, sites: Callable[[Tables], Site], tmp_path: Path
) -> None:
    kind, change = REFUSED[name]
    _, (fault,) = unharmed(sites(FEDAVG), change, tmp_path, 1)
    assert fault["kind"] == kind
    assert len(fault["detail"]) <= 500 and fault["detail"].isprintable()


@pytest.mark.parametrize("name", ["the wrong shape", "another precision", "two things"])
def test_without_an_earlier_answer_the_most_frequent_shape_counts(
    name: str, sites: Callable[[Tables], Site], tmp_path: Path
) -> None:
    _, (fault,) = unharmed(sites(SCAFFOLD), REFUSED[name][1], tmp_path, 0)
    assert fault["kind"] in ("shape", "type")


def test_a_tie_between_shapes_goes_to_the_one_that_fits_the_message(
    sites: Callable[[Tables], Site], tmp_path: Path
) -> None:
    nodes = sites({**FEDAVG, "data": {"clients": 2}})
    run = nodes.again(change=in_round(0, REFUSED["the wrong shape"][1])).serve(tmp_path / "run")
    assert run.summary["left_out"] == {"node1": 1}
    assert [(f["client"], f["kind"]) for f in nodes.faults(tmp_path / "run")] == [(SPOILT, "shape")]


def test_the_shape_of_earlier_answers_counts_even_if_most_nodes_change_it(
    sites: Callable[[Tables], Site], tmp_path: Path
) -> None:
    def change(nodes: Site, sent: Sent, reply: Reply) -> Reply:
        if not sent.is_work(1) or sent.node == 0:
            return reply
        arrays = [a[:, :3].copy() for a in reply.arrays]
        form = [{"array": i, "shape": [1, 3], "dtype": "float32"} for i in range(2)]
        return nodes.signed(sent.node, headed(reply, form=form), arrays)

    nodes = sites({**SCAFFOLD, "faults": {"quorum": 1}})
    run = nodes.again(change=change).serve(tmp_path / "run")
    assert run.summary["left_out"] == {"node1": 1, "node2": 1}


@pytest.mark.parametrize(
    ("steps", "alone"),
    [({"epochs": 1}, False), ({"epochs": 1}, True), (2, False), ({"initial": 2, "base": 2.0}, False)],
    ids=["epochs", "epochs of one node alone", "number", "interval"],
)
def test_no_node_can_hurry_the_clock_of_a_schedule(
    steps: Any, alone: bool, sites: Callable[[Tables], Site], tmp_path: Path
) -> None:
    """A rate by iterations counts local steps, of the node with the most."""
    rate = {"schedule": "cube_root", "k": 0.5, "n": 1.0}
    tables = {
        "algorithm": {"name": "fedavg", "steps": steps, "lr": rate},
        "train": {"rounds": 2, "weighting": "samples"},
        "faults": {"quorum": 1, "retries": 0, "timeout": 0.3},
    }
    lie = another_header(steps=2**31 - 1)

    def change(nodes: Site, sent: Sent, reply: Reply) -> Reply | None:
        if sent.is_work(0) and sent.node == SPOILT:
            return lie(nodes, sent, reply)
        return Reply(error="gone") if alone and sent.is_work(0) else reply

    nodes = sites(tables)
    if alone:
        with pytest.raises(fs.QuorumError, match=r"node1 \(reported 2147483647 local steps, more than \d+\)"):
            nodes.again(change=change).serve(tmp_path / "run")
        return
    run = nodes.again(change=change).serve(tmp_path / "run")
    assert run.summary["left_out"] == {"node1": 1} and run.summary["steps"] < 1000
    (fault,) = nodes.faults(tmp_path / "run")
    assert fault["kind"] == "type" and "reported 2147483647 local steps" in fault["detail"]


@pytest.mark.parametrize("steps", [2, {"epochs": 0.1}], ids=["number", "epochs"])
def test_the_steps_of_a_loop_need_not_be_an_option(
    steps: Any, sites: Callable[[Tables], Site], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @fs.remote
    def local(self: fs.FedAvg, client: fs.Client, x: torch.Tensor) -> torch.Tensor:
        k = client.variables(x=x)
        for _ in client.loop(50, k):
            k.x = k.x - 0.01 * client.grads(k.x, client.draw())
        return k.x - x

    monkeypatch.setattr(fs.FedAvg, "local", local)
    tables = {**FEDAVG, "algorithm": {"name": "fedavg", "steps": steps}, "train": {"rounds": 1, "weighting": "samples"}}
    nodes = sites(tables)
    assert nodes.serve(tmp_path / "run").summary["steps"] == 50 and not nodes.faults(tmp_path / "run")


ASKED: dict[str, Callable[[fs.FedAvg, fs.Clients, torch.Tensor], Any]] = {
    "vectors of several lengths": lambda f, clients, x: [clients.mean(f.local, x[:n], 0) for n in (3, 5)],
    "whole numbers": lambda f, clients, x: [clients.mean(f.local, x[:3], n) for n in (0, 2)],
    "collections": lambda f, clients, x: [clients.pool(f.pooled, x)],
}


@pytest.mark.parametrize("asked", ASKED)
def test_a_method_may_be_asked_for_answers_of_several_forms(
    asked: str, sites: Callable[[Tables], Site], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's answer has the form that the message asks for, not the one that the first message asked for."""

    @fs.remote
    def local(self: fs.FedAvg, client: fs.Client, x: torch.Tensor, more: int) -> torch.Tensor:
        return x.new_ones(len(client), x.shape[1] + more)

    @fs.remote(pool=True)
    def pooled(self: fs.FedAvg, client: fs.Client, x: torch.Tensor) -> torch.Tensor:
        return x.new_ones(len(client), 2 + client.clock.round)

    def round(self: fs.FedAvg, s: Any, clients: fs.Clients) -> Any:
        ASKED[asked](self, clients, s.x)
        return s

    monkeypatch.setattr(fs.FedAvg, "local", local)
    monkeypatch.setattr(fs.FedAvg, "pooled", pooled, raising=False)
    monkeypatch.setattr(fs.FedAvg, "round", round)
    nodes = sites(FEDAVG)
    nodes.serve(tmp_path / "run")
    assert not nodes.faults(tmp_path / "run")


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
    "an answer around the channel": ("type", PACKED, parcel(names=None, like=None)),
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


@repeats("name", BAD_PARCELS)
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


@pytest.mark.parametrize("max_bytes", [None, 10**7], ids=["by default", "set"])
def test_the_largest_answer_of_a_channel_can_be_set(
    max_bytes: int | None, sites: Callable[[Tables], Site], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @fs.remote
    def local(self: fs.FedAvg, client: fs.Client, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(client), 600_000)

    monkeypatch.setattr(fs.FedAvg, "local", local)
    monkeypatch.setattr(fs.FedAvg, "round", lambda self, s, clients: (clients.mean(self.local, s.x), s)[1])
    faults = {"timeout": 0.3, "retries": 0} | ({} if max_bytes is None else {"max_bytes": max_bytes})
    nodes = sites({**FEDAVG, "channel": {"compress": "top_k", "top": 0.1}, "faults": faults})
    if max_bytes is None:
        with pytest.raises(fs.QuorumError, match="announced an answer that is too large"):
            nodes.serve(tmp_path / "run")
    else:
        nodes.serve(tmp_path / "run")
        assert not nodes.faults(tmp_path / "run")


def test_the_largest_packed_answer_may_be_smaller_than_the_unpacked_one(
    sites: Callable[[Tables], Site], tmp_path: Path
) -> None:
    nodes = sites({**PACKED, "faults": {"timeout": 0.3, "retries": 0, "max_bytes": 2000}})
    nodes.serve(tmp_path / "run")
    assert not nodes.faults(tmp_path / "run")


@pytest.mark.slow
def test_a_node_that_is_not_connected_is_left_out_until_it_is_back(
    sites: Callable[[Tables], Site], tmp_path: Path
) -> None:
    def change(nodes: Site, sent: Sent, reply: Reply) -> Reply:
        nodes.offline = {SPOILT} if sent.is_work(0) and sent.node == 2 else set()
        return reply

    tables = {**FEDAVG, "train": {"rounds": 3}}
    nodes = sites(tables)
    run = nodes.again(change=change).serve(tmp_path / "run")
    (fault,) = nodes.faults(tmp_path / "run")
    assert (fault["round"], fault["client"], fault["kind"]) == (2, SPOILT, "silent")
    assert fault["detail"] == "is not connected"
    expected = nodes.again(change=in_round(1, lambda n, s, r: None)).serve(tmp_path / "dropped")
    assert torch.equal(run.x, expected.x)


# --- claims -----------------------------------------------------------------------------------------------------------


def lying(kind: str, **changes: Any) -> Change:
    """Let node 1 claim something else in every answer to a kind of call."""

    def change(nodes: Site, sent: Sent, reply: Reply) -> Reply:
        lies = sent.node == SPOILT and sent.header["kind"] == kind and not sent.header["work"].startswith("query:")
        return nodes.signed(sent.node, headed(reply, **changes), reply.arrays) if lies else reply

    return change


def test_undeclared_rows_explain_no_number_of_steps(sites: Callable[[Tables], Site], tmp_path: Path) -> None:
    rate = {"schedule": "cube_root", "k": 0.5, "n": 1.0}
    nodes = sites({**FEDAVG, "algorithm": {"name": "fedavg", "steps": {"epochs": 1}, "lr": rate}})
    honest = nodes.serve(tmp_path / "honest")
    run = nodes.again(change=lying("work", steps=10**7)).serve(tmp_path / "run")
    assert run.summary["left_out"] == {"node1": 2} and run.summary["steps"] <= honest.summary["steps"]
    assert "reported 10000000 local steps, but no other node more than" in nodes.faults(tmp_path / "run")[0]["detail"]


def test_no_node_can_spend_the_budget_of_samples(sites: Callable[[Tables], Site], tmp_path: Path) -> None:
    nodes = sites({**FEDAVG, "train": {"rounds": 2, "max_samples": 10**6}})
    run = nodes.again(change=lying("work", samples=2**31 - 1)).serve(tmp_path / "run")
    assert run.summary["round"] == 2 and "stopped_by" not in run.summary
    assert run.summary["left_out"] == {"node1": 2}
    (_, fault) = nodes.faults(tmp_path / "run")
    assert fault["detail"] == "reported 2147483647 samples, but no other node more than 16"


def test_no_node_takes_over_a_weighted_mean_unnoticed(sites: Callable[[Tables], Site], tmp_path: Path) -> None:
    nodes = sites({**FEDAVG, "train": {"rounds": 1, "weighting": "samples"}})
    with pytest.raises(fs.InputError, match=r"node1 declares 100000000 rows, but no other .* weighting = 'uniform'"):
        nodes.again(change=lying("describe", rows=10**8)).serve(tmp_path / "run")
    said: list[str] = []
    nodes.again(change=lying("describe", rows=10**5)).serve(tmp_path / "other", say=said.append)
    assert any(re.fullmatch(r"node1 declares 100000 of \d+ rows, and has 100 % of the weight", line) for line in said)


def test_rows_that_need_not_be_declared_do_not_count(sites: Callable[[Tables], Site], tmp_path: Path) -> None:
    nodes = sites({**FEDAVG, "algorithm": {"name": "fedavg", "steps": {"epochs": 1}}})
    run = nodes.again(change=lying("describe", rows=10**8)).serve(tmp_path / "run")
    assert run.summary["left_out"] == {}
    assert torch.equal(run.x, nodes.again().serve(tmp_path / "honest").x)


@pytest.mark.parametrize("value", [-1.0, 10**9 + 0.0, np.nan])
def test_impossible_class_counts_are_left_out(value: float, sites: Callable[[Tables], Site], tmp_path: Path) -> None:
    def change(nodes: Site, sent: Sent, reply: Reply) -> Reply:
        if sent.node != SPOILT or not sent.header["work"].startswith("query:"):
            return reply
        arrays = [np.full_like(array, value) for array in reply.arrays]
        return nodes.signed(sent.node, reply.text, arrays)

    nodes = sites({**FEDAVG, "problem": {"name": "fair"}, "algorithm": {"name": "local_sgda", "steps": 2}})
    run = nodes.again(change=change).serve(tmp_path / "run")
    assert {(f["client"], f["round"]) for f in nodes.faults(tmp_path / "run")} == {(SPOILT, 0)}
    assert torch.isfinite(run.x).all()


@pytest.mark.parametrize("number", [3e38, -3e38, 2e15])
def test_a_number_whose_square_would_overflow_is_left_out(
    number: float, sites: Callable[[Tables], Site], tmp_path: Path
) -> None:
    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array[0, 7] = number
        return array

    _, (fault,) = unharmed(sites(FEDAVG), another_array(change), tmp_path, 1)
    assert fault["kind"] == "nan" and fault["detail"] == f"answered with numbers up to {abs(number):.0e}"


def test_a_run_that_fails_names_the_node_with_much_larger_numbers(
    sites: Callable[[Tables], Site], tmp_path: Path
) -> None:
    poison, nan = (another_array(lambda a, value=value: np.full_like(a, value)) for value in (9e14, np.nan))

    def change(nodes: Site, sent: Sent, reply: Reply) -> Reply | None:
        return nan(nodes, sent, reply) if sent.is_work(1) else in_round(0, poison)(nodes, sent, reply)

    with pytest.raises(fs.QuorumError, match=r"In round 1 node1 answered with numbers up to 9e.14, the others up to"):
        sites(FEDAVG).again(change=change).serve(tmp_path / "run")


def test_nodes_whose_data_differ_from_most_are_named(sites: Callable[[Tables], Site], tmp_path: Path) -> None:
    def another(*liars: int) -> Change:
        def change(nodes: Site, sent: Sent, reply: Reply) -> Reply:
            lies = sent.node in liars and sent.header["kind"] == "describe"
            return nodes.signed(sent.node, headed(reply, shapes=[[3], []])) if lies else reply

        return change

    nodes = sites(FEDAVG)
    for liar in (0, 1):
        with pytest.raises(fs.InputError, match="like those of most nodes") as found:
            nodes.again(change=another(liar)).serve(tmp_path / "run")
        assert [name for name in nodes.names if name in str(found.value)] == [f"node{liar}"]
    pair = sites({**FEDAVG, "data": {"clients": 2}})
    with pytest.raises(fs.InputError, match="data of node0 and node1 must be of one form"):  # nobody knows who is wrong
        pair.again(change=another(0)).serve(tmp_path / "run")


def test_an_error_in_square_brackets_is_text(
    sites: Callable[[Tables], Site], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rich takes square brackets for markup."""
    said = io.StringIO()
    progress = ShowProgress(Console(file=said, force_terminal=True, width=200))
    nodes = sites(FEDAVG).again(change=in_round(1, another_header(error="[/nope]")))
    run = nodes.serve(tmp_path / "run", callbacks=[progress])
    assert run.summary["left_out"] == {"node1": 1} and "failed: [/nope]" in said.getvalue()


def test_a_version_that_wants_to_write_on_the_terminal_is_text(sites: Callable[[Tables], Site], tmp_path: Path) -> None:
    said: list[str] = []
    sites(FEDAVG).again(change=lying("describe", version="\x1b[2J[/x]")).serve(tmp_path / "run", say=said.append)
    assert any("node1 runs fedstrata  [2J[/x]" in line for line in said) and all(map(str.isprintable, said))
