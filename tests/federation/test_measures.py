"""Measures: on the server's test data, or on the nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from cases import repeats
from federation.stand_in import AUC, CANCER, DIGITS, HELD_OUT, Sent, Site, made, site
from fedstrata.experiments import tables
from fedstrata.experiments.build import Experiment
from fedstrata.federation import wire
from fedstrata.federation.wire import Reply
from support import without_seconds


def measured_by_hand(config: fs.Config, run: fs.Run) -> list[tuple[int, dict[str, float]]]:
    """The measures on each client's test part."""
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
        config = replace(config, evaluate=replace(config.evaluate, own_rows=1))
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


@pytest.mark.parametrize("own_rows", [1, 5, 100])
def test_nodes_tell_their_pairs_and_small_ones_have_no_auc_of_their_own(own_rows: int, tmp_path: Path) -> None:
    uneven = {"partition": {"name": "one_large", "large": 100, "small": 40}}
    config = made(CANCER, HELD_OUT, {"data": uneven, "evaluate": {"own_rows": own_rows}})
    nodes = site(tmp_path, config)
    run = nodes.serve(pooled=False)
    data = Experiment(config).data
    held = replace(data, test=None).to(torch.device("cpu"), run.x.dtype)
    alone = fs.Evaluation(own_rows=own_rows)(run.problem, held, run.x, None)
    row = run.history[-1]
    assert row["auc_within"] == pytest.approx(alone["auc_within"], abs=1e-12)
    assert {n: row.get(n) for n in ("auc_mean", "auc_worst")} == {n: alone.get(n) for n in ("auc_mean", "auc_worst")}
    large = sum(value is not None for value in run.summary["per_client"].get("auc", [None] * 3))
    assert large == {1: 3, 5: 1, 100: 0}[own_rows]
    assert run.summary["measured_on"].get("auc") == {1: None, 5: "1 of 3 sites measured"}.get(own_rows)


def test_with_test_data_on_the_server_the_server_measures_alone(tmp_path: Path) -> None:
    config = made(DIGITS, HELD_OUT)
    nodes = site(tmp_path, config)
    run = nodes.serve()
    assert {m.header["kind"] for m in nodes.sent} == {"describe", "work"}
    data = Experiment(config).data.to(torch.device("cpu"), run.x.dtype)
    expected = fs.Evaluation("none")(run.problem, data, run.x, None)
    assert run.history[-1]["loss"] == pytest.approx(float(expected["loss"]), rel=1e-6)
    assert "loss_worst" not in run.history[-1]


def test_with_test_data_on_the_server_nodes_measure_too_if_configured(tmp_path: Path) -> None:
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


def test_nothing_is_measured_without_test_data_or_if_switched_off(tmp_path: Path) -> None:
    said: list[str] = []
    run = site(tmp_path / "a", made(DIGITS, {"train": {"rounds": 1}})).serve(pooled=False, say=said.append)
    assert "loss" not in run.history[-1] and run.history[-1]["measured_clients"] == 0
    assert run.summary["per_client"] == {} and "no node that replied has test data" in said[-1]
    nodes = site(tmp_path / "b", made(DIGITS, HELD_OUT, {"evaluate": {"clients": "none"}}))
    run = nodes.serve(pooled=False)
    assert {m.header["kind"] for m in nodes.sent} == {"describe", "work"} and "loss" not in run.history[-1]
    assert tables.measured(run.summary) == "Measured on nothing."


def test_nodes_measure_under_attack_if_configured(tmp_path: Path) -> None:
    config = made(DIGITS, HELD_OUT, {"evaluate": {"attack_radius": 0.5, "attack_steps": 2}})
    row = site(tmp_path, config).serve(pooled=False).history[-1]
    assert row["attacked_loss"] > row["loss"]


def test_a_node_with_test_data_refuses_to_hold_out_more(tmp_path: Path) -> None:
    config = made(DIGITS, HELD_OUT)
    nodes = site(tmp_path, config)
    nodes.experiment += "\n[data]\nholdout = 0.2\n"
    refused = r"node0: failed: The node has test data.*data\.holdout"
    with pytest.raises(fs.FedstrataError, match=refused):
        nodes.serve(pooled=False)


def test_a_node_without_test_data_is_not_measured(tmp_path: Path) -> None:
    config = made(DIGITS, HELD_OUT)
    nodes = site(tmp_path, config)
    (Path(nodes.here(1)["data"]) / "test.npz").unlink()
    run = nodes.serve(pooled=False)
    first, _, last = measured_by_hand(config, run)
    mean = (first[0] * first[1]["loss"] + last[0] * last[1]["loss"]) / (first[0] + last[0])
    assert run.history[-1]["loss"] == pytest.approx(mean, rel=1e-6)


@repeats(
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
        {"rows": 0, "measures": {}, "pairs": 4, "ordered": 2.0},
        {"rows": 40, "measures": {}, "pairs": 401, "ordered": 2.0},
        {"rows": 40, "measures": {}, "pairs": True, "ordered": 1.0},
        {"rows": 40, "measures": {}, "pairs": -4, "ordered": -2.0},
        {"rows": 40, "measures": {}, "pairs": 4, "ordered": 4.5},
        {"rows": 40, "measures": {}, "pairs": 4, "ordered": float("nan")},
        {"rows": 40, "measures": {}, "pairs": 4.0, "ordered": 10**400},
        {"rows": 40, "measures": {"loss_worst": -5.0, "auc_mean": 1.0, "gradient_norm": 0.0, "distance": 0.0}},
        {},
    ],
)
def test_invalid_measures_are_dropped(said: dict[str, Any], tmp_path: Path) -> None:
    config = made(DIGITS, HELD_OUT)
    nodes = site(tmp_path, config)

    def change(nodes: Site, sent: Sent, reply: Reply) -> Reply:
        if sent.node != 1 or sent.header["kind"] != "measure":
            return reply
        return nodes.signed(sent.node, {"nonce": sent.header["nonce"], **wire.sender(), **said})

    nodes.change = change
    run = nodes.serve(pooled=False)
    nodes = nodes.again(
        change=lambda n, s, r: Reply(error="no") if s.node == 1 and s.header["kind"] == "measure" else r
    )
    expected = nodes.serve(tmp_path / "other", pooled=False)
    assert without_seconds(run.history) == without_seconds(expected.history)
    assert torch.equal(run.x, expected.x)


@repeats(
    "said, why",
    [
        ({"rows": 40, "measures": {"accuracy": 5.0}}, "reported an impossible accuracy: 5"),
        ({"rows": 40, "measures": {"auc": -0.1}}, "reported an impossible auc: -0.1"),
        ({"rows": 40, "measures": {"loss": 1e31}}, "reported an impossible loss: 1e"),
        ({"rows": 40, "measures": {"loss": "x" * 99}}, "reported an impossible loss: no finite number"),
        ({"rows": 40, "measures": {"auc": 1.0}, "pairs": 400, "ordered": 3.0}, "contradict each other"),
        ({"rows": 10**7, "measures": {"loss": 0.0}}, "reported 10000000 test rows, but no other node more than"),
    ],
)
def test_a_node_with_impossible_measures_is_named(said: dict[str, Any], why: str, tmp_path: Path) -> None:
    def change(nodes: Site, sent: Sent, reply: Reply) -> Reply:
        if sent.node != 1 or sent.header["kind"] != "measure":
            return reply
        return nodes.signed(sent.node, {"nonce": sent.header["nonce"], **wire.sender(), **said})

    lines: list[str] = []
    run = site(tmp_path, made(DIGITS, HELD_OUT)).again(change=change).serve(pooled=False, say=lines.append)
    assert run.summary["not_measured"] == {"node1": 3}
    assert any(line.startswith("Not measured: node1 (") and why in line for line in lines)
