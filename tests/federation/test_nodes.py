"""Nodes: what they send, what they do and refuse to do, and which of them cannot take part."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from federation.stand_in import AUC, CANCER, DIGITS, FEDAVG, HELD_OUT, Sent, Site, Tables, headed, made, site
from fedstrata.clients import remote
from fedstrata.experiments.build import Experiment
from fedstrata.federation import app, keys, wire
from fedstrata.federation.deploy import save_arrays
from fedstrata.federation.experiment import check_config
from fedstrata.federation.node.data import NodeData, federated_view
from fedstrata.federation.server import data as server_data
from fedstrata.federation.server.data import data_of_nodes
from fedstrata.federation.server.nodes import Roster
from fedstrata.federation.wire import Call, Reply
from support import without_seconds


def test_nodes_describe_their_data_without_the_number_of_samples(tmp_path: Path) -> None:
    for weighting in ("uniform", "samples"):
        config = made(DIGITS, {"algorithm": {"name": "fedavg"}, "train": {"weighting": weighting, "rounds": 1}})
        nodes = site(tmp_path / weighting, config)
        nodes.serve()
        sizes = Experiment(config).data.sizes.tolist()
        for k in range(3):
            said = json.loads(nodes.replies[k].text)
            said = {name: value for name, value in said.items() if name not in ("nonce", *wire.sender())}
            rows = sizes[k] if weighting == "samples" else 1
            classes = said.pop("classes")
            assert said == {"shapes": [[1, 8, 8], []], "dtypes": ["float32", "int64"], "rows": rows}
            assert 1 <= classes <= 10


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fgda"])
def test_no_message_and_no_reply_holds_the_data(name: str, tmp_path: Path) -> None:
    base, over = (CANCER, AUC) if name == "fgda" else (DIGITS, {})
    config = made(base, over, {"algorithm": {"name": name, "steps": 2}, "train": {"rounds": 2}})
    nodes = site(tmp_path, config)
    nodes.serve(pooled=False)
    inputs = Experiment(config).data.train.arrays[0].flatten(1).numpy().astype(np.float32)
    rows = {row.tobytes() for row in inputs}
    width = inputs.shape[1]
    for arrays in [m.arrays for m in nodes.sent] + [list(r.arrays) for r in nodes.replies]:
        for array in arrays:
            assert array.dtype.kind == "f" or array.size <= 2, "whole numbers could be targets"
            flat = array.astype(np.float32).ravel()
            windows = np.lib.stride_tricks.sliding_window_view(flat, width) if len(flat) >= width else []
            assert not any(window.tobytes() in rows for window in windows)
    for sent, reply in zip(nodes.sent, nodes.replies, strict=True):
        said = set(json.loads(reply.text)) - {"nonce", *wire.sender()}
        kinds: dict[str, set[str]] = {
            "describe": {"shapes", "dtypes", "classes", "rows"},
            "work": {"form", "samples", "steps", "kept"},
            "measure": {"rows", "measures"},
        }
        assert said == kinds[sent.header["kind"]] and not reply.error


def call(nodes: Site, **changes: Any) -> dict[str, Any]:
    """The header of a node's answer to a call of the test, without the fields of every header."""
    form, arrays = wire.pack((torch.zeros(650),))
    table = json.loads(Call("work", "ab" * 16, "n", clients=3, classes=10, work="local").text(form))
    reply = nodes.answered(Sent(0, json.dumps(table | changes), arrays))
    if reply.error:
        return {"error": reply.error}
    header: dict[str, Any] = json.loads(reply.text)
    assert header.pop("nonce") == "n" and {name: header.pop(name) for name in wire.sender()} == wire.sender()
    return header


@pytest.mark.parametrize(
    "work",
    [
        *("__init__", "__class__", "__post_init__", "round", "check", "init", "start", "solution", "solves", "name"),
        *("_private", "", "local.__globals__", "query:local", "query:", "query:__init__", "class_counts"),
    ],
)
def test_only_queries_and_methods_that_are_marked_as_remote_can_be_asked_for(
    work: str, sites: Callable[[Tables], Site], capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = sites(FEDAVG)
    assert call(nodes)["steps"] == 2
    assert set(call(nodes, work=work)) == {"error"}
    assert "Known: local, query:class_counts, query:class_shares, query:column_statistics" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "shell"}, "kind of call"),
        ({"kind": ""}, "kind of call"),
        ({"run": "../../outside"}, "id of the run"),
        ({"run": ""}, "id of the run"),
        ({"run": "ab" * 17}, "id of the run"),
        ({"form": {"array": 5, "shape": [650], "dtype": "float32"}}, "no array number 5"),
        ({"form": "os.system"}, "malformed"),
        ({"kept": "../x"}, "Error"),
    ],
)
def test_invalid_calls_are_refused(
    changes: dict[str, Any], said: str, sites: Callable[[Tables], Site], capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(call(sites(FEDAVG), **changes)) == {"error"}
    assert said in capsys.readouterr().err


def test_a_node_says_that_it_has_lost_its_state(sites: Callable[[Tables], Site]) -> None:
    answer = call(sites(FEDAVG), kept=[1, 0])
    assert set(answer) == {"lost"} and "lost the state" in answer["lost"]


@pytest.mark.parametrize("missing", ["data", "key", "state"])
def test_a_node_configuration_must_be_complete(
    missing: str, sites: Callable[[Tables], Site], capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = sites(FEDAVG)
    there = nodes.here(0)
    nodes.here = lambda _: {k: v for k, v in there.items() if k != missing}  # type: ignore[method-assign]
    said = str(call(nodes)["error"]) + capsys.readouterr().err
    assert "The node configuration must name" in said


def test_two_nodes_with_the_same_key_are_refused(tmp_path: Path) -> None:
    public = keys.make_key(tmp_path / "key")
    with pytest.raises(fs.InputError, match="The nodes a and b have the same public key"):
        Roster.read(json.dumps({"a": public, "b": f"{public} a comment"}))


@pytest.mark.parametrize("text", ["", "[]", "{}", "{", '{"a": "ssh-rsa AAAA"}', '{"a": 3}'])
def test_an_invalid_list_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(fs.InputError):
        Roster.read(text)


# --- nodes that cannot take part --------------------------------------------------------------------------------------


def written(nodes: Site, client: int, *arrays: np.ndarray, part: str = "train") -> None:
    save_arrays(Path(nodes.here(client)["data"]) / f"{part}.npz", tuple(map(torch.from_numpy, arrays)))


ROWS, LABELS = np.ones((4, 1, 8, 8), dtype=np.float32), np.arange(4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda n: written(n, 1, ROWS[:, 0, 0], LABELS),
            r"data of node1 must be like those of most nodes.*\[\[8\], \[\]\]",
        ),
        (
            lambda n: written(n, 1, ROWS.astype("f8"), LABELS),
            r"data of node1 must be like those of most nodes.*float64",
        ),
        (lambda n: written(n, 1, ROWS, np.zeros((4, 2))), r"data of node1 must be like those of most nodes.*\[2\]"),
        (
            lambda n: written(n, 1, ROWS, ROWS, LABELS),
            r"data of node1 must be like those of most nodes.*\[1, 8, 8\], \[1, 8, 8\]",
        ),
        (
            lambda n: written(n, 1, ROWS, ROWS, LABELS, part="test"),
            r"test.npz must be 2, as for the training data\. Got 3",
        ),
        (
            lambda n: written(n, 1, ROWS[..., 0], LABELS, part="support"),
            r"support.npz must be .*as for the training data",
        ),
        (lambda n: written(n, 1, ROWS[:0], LABELS[:0]), r"There are no samples"),
        (lambda n: written(n, 1, ROWS * np.nan, LABELS), r"contain NaN"),
        (lambda n: (Path(n.here(1)["data"]) / "train.npz").unlink(), r"must contain train.npz"),
        (lambda n: (Path(n.here(1)["data"]) / "train.npz").write_bytes(b"no"), r"not a readable .npz"),
        (lambda n: Path(n.here(1)["data"]).rename(n.folder / "elsewhere"), r"There is no .*data"),
        (lambda n: Path(n.here(1)["key"]).write_text("no key"), r"node.key cannot be read"),
        (lambda n: Path(n.here(1)["key"]).write_bytes(Path(n.here(0)["key"]).read_bytes()), "a valid signature"),
    ],
)
def test_bad_data_and_keys_are_errors_that_name_the_node(
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
        {"shapes": [[2**31 - 1] * 3, []]},
        {"shapes": [[0, 2**31 - 1, 2**31 - 1], []]},
        {"shapes": [[2**14, 2**14], []]},
        {"shapes": [[1]] * 3},
        {"shapes": [[1]] * 17, "dtypes": ["float32"] * 17},
        {"dtypes": ["float32", "object"]},
        {"dtypes": [["float32"], "int64"]},
        {"classes": "ten"},
        {"classes": 10**12},
        {"rows": 10**12},
        {"rows": None},
    ],
    ids=str,
)
def test_a_node_with_an_invalid_description_is_named(
    said: dict[str, Any], sites: Callable[[Tables], Site], tmp_path: Path
) -> None:
    def change(nodes: Site, sent: Sent, reply: Reply) -> Reply:
        return nodes.signed(sent.node, headed(reply, **said)) if sent.node == 1 else reply

    with pytest.raises(fs.InputError, match="node1 did not describe its data properly"):
        sites(FEDAVG).again(change=change).serve(tmp_path / "run")


def test_data_that_all_nodes_describe_as_enormous_are_refused(sites: Callable[[Tables], Site], tmp_path: Path) -> None:
    def change(nodes: Site, sent: Sent, reply: Reply) -> Reply:
        return nodes.signed(sent.node, headed(reply, shapes=[[2**31 - 1] * 3, []]))

    with pytest.raises(fs.InputError, match="node0 did not describe its data properly"):
        sites(FEDAVG).again(change=change).serve(tmp_path / "run")


@pytest.mark.parametrize("pooled", [True, False])
def test_a_node_with_many_more_classes_than_the_others_is_named(
    pooled: bool, sites: Callable[[Tables], Site], tmp_path: Path
) -> None:
    def change(nodes: Site, sent: Sent, reply: Reply) -> Reply:
        lies = sent.node == 1 and sent.header["kind"] == "describe"
        return nodes.signed(sent.node, headed(reply, classes=65536)) if lies else reply

    with pytest.raises(fs.InputError, match="node1 has labels of 65536 classes, but the other nodes"):
        sites(FEDAVG).again(change=change).serve(tmp_path / "run", pooled=pooled)


def test_a_node_that_is_not_connected_at_the_start_is_named(
    sites: Callable[[Tables], Site], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_data.time, "sleep", lambda _: None)
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
    assert torch.equal(other.x, run.x) and without_seconds(other.history) == without_seconds(run.history)


def test_a_problem_with_data_of_its_own_and_a_pretraining_are_refused(tmp_path: Path) -> None:
    with pytest.raises(fs.InputError, match="brings its own data"):
        check_config(made({"problem": {"name": "tower"}}), 3)
    with pytest.raises(fs.InputError, match="does not pre-train"):
        check_config(made(DIGITS, {"pretrain": {"rounds": 1}}), 3)


def test_a_node_holds_its_share_of_every_class_out() -> None:
    targets = torch.from_numpy(np.random.default_rng(0).permutation(np.repeat([0, 1], [48, 2])))
    own = NodeData((torch.arange(50.0)[:, None], targets), None, None)
    call = Call("work", "run", client=1, clients=3, classes=2)
    data = federated_view(own, call, made(CANCER, {"data": {"holdout": 0.5, "support": 0.5}}))
    assert data.client_test is not None and data.support is not None
    assert data.client_test.class_counts.tolist() == [[0, 0], [24, 1], [0, 0]]
    assert data.sizes.tolist() == [0, 25, 0] and data.support.sizes.tolist() == [0, 12, 0]


def test_a_site_that_is_too_small_to_hold_rows_out_takes_part_and_measures_nothing(tmp_path: Path) -> None:
    """A simulation accepts such a client too: only if no client has test rows is the share too small."""
    nodes = site(tmp_path, made(DIGITS, FEDAVG))
    nodes.experiment += "\n[data]\nholdout = 0.1\n"
    written(nodes, 1, ROWS, LABELS)
    run = nodes.serve(pooled=False)
    assert not nodes.faults() and run.history[-1]["measured_clients"] == 2
    assert run.summary["per_client"]["loss"][1] is None
    own = NodeData((torch.from_numpy(ROWS), torch.from_numpy(LABELS)), None, None)
    call = Call("work", "run", client=1, clients=3, classes=10)
    data = federated_view(own, call, made(DIGITS, {"data": {"holdout": 0.1}}))
    assert data.client_test is None and data.test is None and data.sizes.tolist() == [0, 4, 0]


def test_rows_that_nodes_only_declare_take_no_memory(
    sites: Callable[[Tables], Site], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hostile node may declare 10**8 of them, and their numbers would be 0.8 GB; here it would be 80 TB."""
    described: list[fs.FederatedData] = []

    def declared(*arguments: Any) -> fs.FederatedData:
        data = data_of_nodes(*arguments)
        offsets = np.array([0, 1, 10**13, 10**13 + 1])
        rows = data.train.rows[:1].expand(int(offsets[-1]))
        described.append(replace(data, train=replace(data.train, rows=rows, offsets=offsets)))
        return described[-1]

    monkeypatch.setattr(app, "data_of_nodes", declared)
    balanced = {"weighting": "samples", "sampling": "balanced", "batch_size": 20, "rounds": 1}
    sites({**FEDAVG, "train": balanced}).serve(tmp_path / "run")
    assert described[0].train.class_counts.tolist() == [[1], [10**13 - 1], [1]]


@pytest.mark.slow
def test_labels_may_be_floats_even_where_a_node_has_one_class(tmp_path: Path) -> None:
    """A node with only zeros cannot know that they are labels; together the nodes do."""
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


# --- versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"protocol": 1, "version": "0.1.0"}, {"protocol": 99, "version": "9.9.9"}])
def test_a_node_refuses_a_server_with_another_message_format_and_names_both_versions(
    changes: dict[str, Any], sites: Callable[[Tables], Site], capsys: pytest.CaptureFixture[str]
) -> None:
    said = call(sites(FEDAVG), **changes)["error"]
    theirs = f"The server runs fedstrata {changes['version']} (message format {changes['protocol']})"
    ours = f"this node runs fedstrata {fs.__version__} (message format {wire.PROTOCOL})"
    assert theirs in said and ours in said and "Install the same version" in said
    assert theirs in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "theirs"),
    [
        ({"protocol": 1, "version": "0.1.0"}, r"0\.1\.0 \(message format 1\)"),
        ({"protocol": None, "version": None}, r"of an older version \(message format 1\)"),
    ],
)
def test_a_server_refuses_nodes_with_another_message_format_and_names_them(
    changes: dict[str, Any], theirs: str, sites: Callable[[Tables], Site], tmp_path: Path
) -> None:
    def change(nodes: Site, sent: Sent, reply: Reply) -> Reply:
        return nodes.signed(sent.node, headed(reply, **changes), reply.arrays) if sent.node == 1 else reply

    ours = rf"{re.escape(fs.__version__)} \(message format {wire.PROTOCOL}\)"
    refused = rf"node1: the node runs fedstrata {theirs}, but the server runs fedstrata {ours}\. Install the same"
    with pytest.raises(fs.FedstrataError, match=refused) as error:
        sites(FEDAVG).again(change=change).serve(tmp_path / "run")
    assert "node0" not in str(error.value) and "node2" not in str(error.value)


def test_a_node_of_another_version_with_the_same_message_format_takes_part_and_is_named(
    sites: Callable[[Tables], Site], tmp_path: Path
) -> None:
    def change(nodes: Site, sent: Sent, reply: Reply) -> Reply:
        other = headed(reply, version="0.0.7")
        return nodes.signed(sent.node, other, reply.arrays) if sent.node == 1 else reply

    said: list[str] = []
    sites(FEDAVG).again(change=change).serve(tmp_path / "run", say=said.append)
    assert said == [f"node1 runs fedstrata 0.0.7, but the server runs fedstrata {fs.__version__}"]
    assert not sites(FEDAVG).faults(tmp_path / "run")


# --- collections to pool ----------------------------------------------------------------------------------------------

NO_POOL = "This node does not send collections to be pooled (pool = false in its configuration)"


@pytest.fixture
def pooling(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """FedAvg that pools two numbers of each client; returns the pools."""
    pools: list[torch.Tensor] = []

    @remote(pool=True)
    def local(self: fs.FedAvg, client: fs.Client, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[:, 0], client.sizes.to(x)], 1)

    def round(self: fs.FedAvg, s: Any, clients: fs.Clients) -> Any:
        pools.append(clients.pool(self.local, s.x, limit=2))
        return s

    monkeypatch.setattr(fs.FedAvg, "local", local)
    monkeypatch.setattr(fs.FedAvg, "round", round)
    return pools


@pytest.mark.parametrize("setting", [None, True, "True", False, "False"], ids=str)
def test_a_node_may_refuse_to_send_collections(
    setting: Any, pooling: list[torch.Tensor], sites: Callable[[Tables], Site], tmp_path: Path
) -> None:
    nodes = sites(FEDAVG)
    here = nodes.here
    own = {} if setting is None else {"pool": setting}
    nodes.here = lambda node: here(node) | (own if node == 1 else {})  # type: ignore[method-assign]
    nodes.serve(tmp_path / "run")
    refuses = str(setting) == "False"
    assert [len(pool) for pool in pooling] == [4 if refuses else 6] * 2
    faults = nodes.faults(tmp_path / "run")
    assert [(fault["name"], fault["kind"]) for fault in faults] == [("node1", "error")] * (2 if refuses else 0)
    assert all(f"{NO_POOL}, but local of fedavg returns them." in fault["detail"] for fault in faults)


@pytest.mark.parametrize("pool", [None, 2, 0, 10**9], ids=str)
def test_the_method_and_not_the_server_says_that_a_node_sends_a_collection(
    pool: int | None, pooling: list[torch.Tensor], sites: Callable[[Tables], Site]
) -> None:
    nodes = sites(FEDAVG)
    here = nodes.here(0)
    nodes.here = lambda _: here | {"pool": False}  # type: ignore[method-assign]
    assert call(nodes, pool=pool) == {"error": f"{NO_POOL}, but local of fedavg returns them."}


def test_a_node_answers_as_the_method_is_marked(pooling: list[torch.Tensor], sites: Callable[[Tables], Site]) -> None:
    answer = call(sites(FEDAVG))
    assert set(answer) == {"error"} and "local of fedavg is marked @remote(pool=True)" in answer["error"]
    answer = call(sites(FEDAVG), work="query:class_counts", pool=100)
    assert set(answer) == {"error"} and "class_counts returns collections to pool: mark it" in answer["error"]


def test_a_node_sends_no_collection_above_the_limit(
    pooling: list[torch.Tensor], sites: Callable[[Tables], Site]
) -> None:
    assert set(call(sites(FEDAVG), pool=2)) >= {"form", "steps"}
    answer = call(sites(FEDAVG), pool=1, name="node0")
    wanted = "The size of the collections that local of fedavg returns to pool must be at most 1 numbers per client."
    assert answer == {"error": f"{wanted} Got 2. (in local of fedavg, round 1, client node0)"}


@pytest.mark.parametrize("channel", [{}, {"clip": 1.0}], ids=["plain", "clip"])
def test_a_node_checks_its_answer_as_a_simulation_does(
    channel: Tables, sites: Callable[[Tables], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    @remote
    def local(self: fs.FedAvg, client: fs.Client, x: torch.Tensor) -> torch.Tensor:
        return x[0]

    monkeypatch.setattr(fs.FedAvg, "local", local)
    wanted = "local of fedavg must return tensors with a leading client axis of 1. Got (650,). (in local of fedavg, "
    assert call(sites({**FEDAVG, "channel": channel}))["error"].startswith(wanted)


# --- errors in a client's work ----------------------------------------------------------------------------------------


def test_an_error_in_a_clients_work_names_method_round_and_client_but_not_what_it_quotes(
    sites: Callable[[Tables], Site],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    original = fs.FedAvg.local

    @remote
    def local(self: fs.FedAvg, client: fs.Client, *message: Any) -> Any:
        if client.ids.tolist() == [1] and client.clock.round == 1:
            raise ValueError("could not convert 'Jane Doe'")
        return original(self, client, *message)

    monkeypatch.setattr(fs.FedAvg, "local", local)
    nodes = sites(FEDAVG)
    nodes.serve(tmp_path / "run")
    (fault,) = nodes.faults(tmp_path / "run")
    assert (fault["client"], fault["name"], fault["round"], fault["kind"]) == (1, "node1", 2, "error")
    assert "ValueError in local of fedavg, round 2, client node1" in fault["detail"]
    assert "Jane" not in fault["detail"] and "Jane Doe" in capsys.readouterr().err
