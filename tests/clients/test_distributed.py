"""Distributed clients: several ranks do what a process alone does, hold the same bits, write once, and survive kills.

The ranks are forked once, and go through everything in distributed_worker.py; torchrun itself starts the command.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import clients.distributed_worker as worker
import fedstrata as fs
from cases import one_per
from clients.distributed_worker import BIG, CASES, CHAINS, PROBES, ROUNDS, STOP, UNDIVIDED, WIDE, Outcome
from fedstrata.algorithms import ALGORITHMS
from fedstrata.clients.distributed import digit_bits, digits, from_digits, shared_out
from fedstrata.clients.ranks import ALONE, joined
from fedstrata.experiments.config import read
from fedstrata.experiments.runs import run_config
from fedstrata.training.metrics.catalogue import TIMES
from fedstrata.training.settings import Settings
from fedstrata.training.waiting import divides
from saddle_worlds import SADDLES
from support import smooth_example, without_seconds

USED = ("steps", "samples", "bytes_up", "bytes_down")

NO_FAULTS = {"failed": 0, "releases": {}}


@dataclass
class Launch:
    """What every rank found: JSON by task, and tensors by task, kind and name."""

    folder: Path
    found: list[dict[str, Any]]
    tensors: list[dict[str, torch.Tensor]]

    def of(self, task: str) -> list[dict[str, Any]]:
        """What the ranks that took part found, all of them without an error."""
        each = [f[task] for f in self.found if task in f]
        errors = [
            f"rank {r}: {e['error']}: {e['message']}\n{e.get('trace', '')}" for r, e in enumerate(each) if "error" in e
        ]
        assert not errors, "\n".join(errors)
        return each

    def refused(self, task: str) -> list[dict[str, Any]]:
        """The errors of the ranks that took part."""
        return [f[task] for f in self.found if task in f]

    def server(self, task: str) -> dict[str, torch.Tensor]:
        return _below(self.tensors[0], f"{task}/server/")

    def rows(self, task: str) -> list[dict[str, torch.Tensor]]:
        return [_below(t, f"{task}/rows/") for t in self.tensors]


def _below(tensors: dict[str, torch.Tensor], start: str) -> dict[str, torch.Tensor]:
    return {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}


@pytest.fixture(scope="module")
def launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Run what the selected tests need: their cases, and with --full all other tasks."""
    names = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    others = any(
        "launch" in getattr(item, "fixturenames", ()) and item.get_closest_marker("slow")
        for item in request.session.items
    )
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "runs").mkdir()
    (folder / "runs" / "pretrained.toml").write_text(worker.FILE + worker.PRETRAIN)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fedstrata", "fedstrata.training.plots", "torch._dynamo"])
    ranks = [
        context.Process(target=worker.work, args=(rank, folder, names & set(CASES), others))
        for rank in range(worker.LARGEST)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + 900
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0] * worker.LARGEST
    found = [json.loads((folder / f"rank-{r}.json").read_text()) for r in range(worker.LARGEST)]
    return Launch(folder, found, [load_file(folder / f"rank-{r}.safetensors") for r in range(worker.LARGEST)])


# --- every algorithm -------------------------------------------------------------------------------------------------


def kept(parts: list[dict[str, torch.Tensor]]) -> dict[str, dict[int, torch.Tensor]]:
    """Rows by name and client; no client has a row in two parts."""
    out: dict[str, dict[int, torch.Tensor]] = {}
    for part in parts:
        for name in (k for k in part if not k.endswith(".clients")):
            table = out.setdefault(name, {})
            for client, row in zip(part[f"{name}.clients"].tolist(), part[name], strict=True):
                assert client not in table
                table[client] = row
    return out


@pytest.mark.slow
@one_per(lambda name: CASES[name].name, "name", CASES)
def test_ranks_do_what_a_process_alone_does(name: str, launch: Launch) -> None:
    case = CASES[name]
    ranks = launch.of(name)
    alone = worker.play_case(case, ALONE)
    tolerance = 1e-5 if case.dtype == torch.float32 else 1e-10
    assert [rank["counts"] for rank in ranks] == [alone.counts] * case.ranks
    server = launch.server(name)
    assert server.keys() == alone.server.keys()
    for vector, expected in alone.server.items():
        assert server[vector].dtype == expected.dtype
        torch.testing.assert_close(server[vector], expected, atol=tolerance, rtol=tolerance)
    ours, theirs = kept(launch.rows(name)), kept([alone.rows])
    assert {k: sorted(v) for k, v in ours.items()} == {k: sorted(v) for k, v in theirs.items()}
    for table, client in ((t, c) for t in theirs for c in theirs[t]):
        torch.testing.assert_close(ours[table][client], theirs[table][client], atol=tolerance, rtol=tolerance)


@pytest.mark.slow
@one_per(lambda name: CASES[name].name, "name", CASES)
def test_all_ranks_hold_the_same_bits_after_every_round(name: str, launch: Launch) -> None:
    first, *others = (rank["digests"] for rank in launch.of(name))
    assert len(others) == CASES[name].ranks - 1 and len(first) == CASES[name].rounds + 1
    assert all(before != after for before, after in itertools.pairwise(first))
    assert all(other == first for other in others)


def untimed(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the counts of a checkpoint without the seconds."""
    return {name: count for name, count in manifest["counts"].items() if name != "trained"}


@pytest.mark.slow
def test_clients_keep_their_state_on_their_own_rank(launch: Launch) -> None:
    name = next(n for n, c in CASES.items() if c.name == "scaffold" and c.ranks == 3 and c.rounds == 8)
    rank_of = shared_out(CASES[name].build()[1].train.sizes, 3)
    for rank, rows in enumerate(launch.rows(name)):
        assert rows["c.clients"].tolist() == np.flatnonzero(rank_of == rank).tolist()


def test_every_algorithm_runs_on_ranks() -> None:
    assert {case.name for case in CASES.values() if case.ranks == 2} == set(ALGORITHMS)


@pytest.mark.parametrize("ranks", [1, 2, 256, 257, 2000])
def test_counts_are_exact_on_any_number_of_ranks(ranks: int) -> None:
    bits = digit_bits(ranks)
    total = torch.zeros_like(digits([0, 0], bits), dtype=torch.float32)
    for _ in range(ranks):
        total += digits([(1 << 48) - 1, 7], bits)
    assert from_digits(total, bits) == [ranks * ((1 << 48) - 1), ranks * 7]


# --- the verbs -------------------------------------------------------------------------------------------------------


def probed(launch: Launch, name: str, cohort: str, ranks: int) -> tuple[Outcome, Outcome]:
    """Return the result of the ranks, checked to be the same on all, and that of a process alone."""
    task = f"{name} {cohort} {ranks}"
    first, *others = launch.of(task)
    assert all((o["digests"], o["counts"]) == (first["digests"], first["counts"]) for o in others)
    ours = Outcome(launch.server(task), {}, first["counts"], first["digests"])
    return ours, worker.play_probe(name, cohort, ALONE)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("cohort", ["all", "one"])
@pytest.mark.parametrize("name", [p for p in PROBES if p != "big_counts"])
def test_the_verbs_do_what_they_do_in_a_process_alone(name: str, cohort: str, ranks: int, launch: Launch) -> None:
    ours, alone = probed(launch, name, cohort, ranks)
    assert ours.counts == alone.counts
    assert ours.server.keys() == alone.server.keys()
    for part, expected in alone.server.items():
        assert (ours.server[part].dtype, ours.server[part].shape) == (expected.dtype, expected.shape)
        torch.testing.assert_close(ours.server[part], expected, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_gathered_stands_in_the_order_of_the_cohort(ranks: int, launch: Launch) -> None:
    found, _ = probed(launch, "gather", "all", ranks)
    who = torch.arange(7)
    assert torch.equal(found.server["gathered.0"], who + 0.25)
    assert torch.equal(found.server["gathered.1.0"], 10 * who[:, None, None] + torch.arange(6).reshape(2, 3))
    assert found.server["gathered.1.1.0"].tolist() == [True, False] * 3 + [True]
    assert torch.equal(found.server["gathered.1.1.1"], who.double() + 0.25)
    assert found.server["gathered.1.2"].shape == (7, 0)
    assert torch.equal(found.server["gathered.2"], who.short())
    assert found.counts == {
        "steps": 0,
        "samples": 0,
        "bytes_up": 7 * (4 + 6 * 8 + 1 + 8 + 2),
        "bytes_down": 0,
        "iteration": 0,
        **NO_FAULTS,
    }


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_means_and_maxima_are_those_of_the_whole_cohort(ranks: int, launch: Launch) -> None:
    sizes = torch.tensor([5 + 3 * k for k in range(7)]).double()
    by_samples = float((sizes / sizes.sum()) @ torch.arange(7).double())
    means = probed(launch, "mean", "all", ranks)[0].server
    assert means["uniform.0"].tolist() == pytest.approx([3.5, 1.0]) and means["uniform.1.0"] == pytest.approx(3)
    assert means["samples.1.0"].item() == pytest.approx(by_samples, rel=1e-12) and by_samples > 3.5
    largest = probed(launch, "max", "all", ranks)[0].server
    assert largest["largest.0"] == -1 and largest["largest.1.0"].tolist() == [0, 6]
    both = probed(launch, "combine", "all", ranks)[0].server
    assert both["a.0"] == 6 and both["a.1"].tolist() == pytest.approx([3, -3]) and both["a.2"] == 36
    assert both["b.0"] == pytest.approx(3) and both["b.1"].tolist() == [6, 0] and both["b.2"] == pytest.approx(13)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_without_a_client_in_the_cohort_add_nothing(ranks: int, launch: Launch) -> None:
    whole, alone = probed(launch, "max_of_integers", "one", ranks)
    (chosen,) = (-1 - alone.server["largest.0"]).reshape(1).tolist()
    assert whole.server["largest.0"] == -1 - chosen and whole.server["largest.1"].tolist() == [chosen] * 3


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_one_client_with_nan_makes_the_maximum_nan(ranks: int, launch: Launch) -> None:
    found, _ = probed(launch, "max_of_nan", "all", ranks)
    assert found.server["largest"].isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_client_chosen_three_times_answers_three_times(ranks: int, launch: Launch) -> None:
    found = probed(launch, "choose", "all", ranks)[0].server
    assert found["thrice"].tolist() == [1, 1, 1] and found["mean of thrice"] == 1
    assert torch.equal(found["two"], found["two.cohort"]) and len(set(found["two"].tolist())) == 2
    assert found["all"].tolist() == list(range(7))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_samples_on_the_server_count_once(ranks: int, launch: Launch) -> None:
    found, _ = probed(launch, "server", "all", ranks)
    assert found.server["who"].tolist() == [0, 1, 2]
    assert found.counts["samples"] == 4 * 3 + 4 * 7
    assert found.counts["bytes_up"] == 7 * (15 * 4 + 8)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_counts_that_float32_cannot_hold_are_exact(ranks: int, launch: Launch) -> None:
    found, alone = probed(launch, "big_counts", "all", ranks)
    for number in (BIG + 4, 3 * BIG + 6, 3 * 4 * WIDE):
        assert int(torch.tensor(number, dtype=torch.float32)) != number
    up = 3 * 4 * (1 + WIDE)
    used = {"steps": BIG + 4, "iteration": BIG + 4, "samples": 3 * BIG + 6, "bytes_up": up, "bytes_down": 0}
    assert found.counts == {**used, **NO_FAULTS}
    assert found.counts == alone.counts and found.server["wide"].tolist() == pytest.approx([1, 1])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_pooled_stands_in_the_order_of_the_cohort(ranks: int, launch: Launch) -> None:
    found, _ = probed(launch, "pool", "all", ranks)
    expected = [10 * k + i for k in range(7) for i in range(3)]
    assert found.server["pooled.0"].tolist() == expected
    assert found.server["pooled.1.0"].tolist() == [[n, -n] for n in expected]
    assert found.server["pooled.1.1"].tolist() == [n % 2 == 0 for n in expected]
    assert found.server["two.0"].shape == (2,)
    assert found.counts["bytes_up"] == (7 * 3 + 2) * (4 + 16 + 1)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_client_drawn_twice_keeps_once(ranks: int, launch: Launch) -> None:
    found = probed(launch, "keep", "all", ranks)[0].server
    assert [found[f"{i}"].tolist() for i in range(3)] == [[i] * 9 for i in range(3)]
    assert set(found["all"].tolist()) == {0, 3}


# --- errors and faults -----------------------------------------------------------------------------------------------


def of_rank(rank: int) -> list[int]:
    """The clients of one of two ranks, in the order in which they are worked on."""
    sizes = smooth_example()[1].train.sizes
    mine = np.flatnonzero(shared_out(sizes, 2) == rank)
    return mine[np.argsort(-sizes[mine], kind="stable")].tolist()


@pytest.mark.slow
def test_an_error_in_the_work_of_clients_is_named_on_their_rank(launch: Launch) -> None:
    for rank, found in enumerate(launch.refused("failing plain")):
        who = ", ".join(map(str, of_rank(rank)))
        assert (found["error"], found["cause"]) == ("WorkError", "ZeroDivisionError")
        assert found["message"] == f"ZeroDivisionError in local of failing, round 3, clients {who}: no"
    for rank, found in enumerate(launch.refused("failing input")):
        who = ", ".join(map(str, of_rank(rank)))
        assert (found["error"], found["cause"]) == ("InputError", "InputError")
        assert found["message"] == f"no\nmore (in local of failing, round 3, clients {who})"


@pytest.mark.slow
def test_an_error_on_one_rank_stops_all(launch: Launch) -> None:
    where = next(rank for rank in (0, 1) if 2 in of_rank(rank))
    found = launch.refused("failing one")
    assert found[where]["error"] == "WorkError" and found[1 - where]["error"] == "RuntimeError"
    assert found[where]["message"].startswith("ValueError in local of failing, round 3, clients ")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_stop_below_the_quorum(ranks: int, launch: Launch) -> None:
    found = launch.refused(f"no quorum {ranks}")
    assert [f["error"] for f in found] == ["QuorumError"] * ranks
    message = (
        "Only 5 of 7 clients answered ids in round 1 after asking 3 times, fewer than the quorum of 6. Left out: "
        "client 1 (did not answer), client 4 (did not answer)."
    )
    assert [f["message"] for f in found] == [message] * ranks


@pytest.mark.slow
def test_clients_were_asked_again_on_ranks(launch: Launch) -> None:
    """Otherwise the cases above would prove little."""
    for name, case in CASES.items():
        if case.faults is worker.RETRIES:
            attempts = {int(fault.split()[2]) for fault in launch.of(name)[0]["counts"]["faults"]}
            assert attempts >= {0, 1}, name


# --- whose clients ---------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 9))
def test_clients_are_shared_out_evenly(sizes: list[int], ranks: int) -> None:
    found = shared_out(np.array(sizes), ranks)
    assert found.shape == (len(sizes),) and set(found.tolist()) <= set(range(ranks))
    loads = np.bincount(found, weights=sizes, minlength=ranks)
    assert loads.max() - loads.min() <= max(sizes)
    if len(sizes) >= ranks:
        assert loads.min() > 0
    assert np.array_equal(found, shared_out(np.array(sizes), ranks))


def test_the_largest_clients_are_shared_out_first() -> None:
    assert shared_out(np.array([1, 1, 1, 1, 4]), 2).tolist() == [1, 1, 1, 1, 0]
    assert shared_out(np.array([3, 3, 2, 2, 2]), 2).tolist() == [0, 1, 0, 1, 0]
    assert shared_out(np.array([7, 7]), 3).tolist() == [0, 1]


# --- training --------------------------------------------------------------------------------------------------------


def files(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir() if not p.name.startswith(".")}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_rows(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], tolerance: float) -> None:
    """Histories that agree: counts exactly, measures to rounding, seconds aside."""
    assert len(ours) == len(theirs)
    for a, b in zip(without_seconds(ours), without_seconds(theirs), strict=True):
        assert {k: a[k] for k in ("round", *USED)} == {k: b[k] for k in ("round", *USED)}
        assert a == pytest.approx(b, rel=tolerance, abs=tolerance)


def assert_same_run(ours: Path, theirs: Path, tolerance: float) -> None:
    """Run directories that agree: metrics, summary and model."""
    assert files(ours) == files(theirs)
    assert_same_rows(rows_of(ours), rows_of(theirs), tolerance)
    a, b = (json.loads((folder / "summary.json").read_text()) for folder in (ours, theirs))
    assert a.keys() == b.keys() and a["per_client"].keys() == b["per_client"].keys()
    for measure, values in a.pop("per_client").items():
        numbers = [[-1.0 if v is None else v for v in each] for each in (values, b["per_client"][measure])]
        assert numbers[0] == pytest.approx(numbers[1], rel=tolerance, abs=tolerance)
    a, b = ({k: v for k, v in s.items() if k not in (*TIMES, "per_client", "pretrain")} for s in (a, b))
    exact, near = ([{k: v for k, v in s.items() if isinstance(v, float) == n} for s in (a, b)] for n in (False, True))
    assert exact[0] == exact[1]
    assert near[0] == pytest.approx(near[1], rel=tolerance, abs=tolerance)
    ours_model, theirs_model = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
    torch.testing.assert_close(ours_model, theirs_model, atol=tolerance, rtol=tolerance)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of a process alone."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch, worker.untraced():
        patch.setattr("fedstrata.training.plots.plot", lambda *_, **__: None)  # drawing costs more than these runs
        worker.train_scaffold(folder / "straight", ROUNDS)
        worker.train_auc(folder / "auc")
        for name in ("fgda", "codasca", "fgda, early"):
            worker.train_rejoining(name, folder / f"rejoining {name}")
        (folder / "pretrained.toml").write_text(worker.FILE + worker.PRETRAIN)
        worker.pretrained(folder / "pretrained")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["straight", "auc", "pretrained", "rejoining fgda", "rejoining codasca", "rejoining fgda, early"]
)
def test_training_with_ranks_ends_as_it_does_alone(name: str, launch: Launch, alone: Path) -> None:
    first, second = (found["run"] for found in launch.of(name))
    assert_same_run(launch.folder / "runs" / name, alone / name, 1e-5 if name == "pretrained" else 1e-10)
    assert first["history"] == second["history"] == rows_of(launch.folder / "runs" / name)
    assert first["x"] == second["x"]
    assert first["summary"] == second["summary"]
    assert first["summary"] == json.loads((launch.folder / "runs" / name / "summary.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "left_out"), [("fgda", [3, 6]), ("codasca", [2, 5])])
def test_clients_of_ranks_rejoin(name: str, left_out: list[int], launch: Launch) -> None:
    for found in launch.of(f"rejoining {name}"):
        assert list(found["run"]["summary"]["left_out"].values()) == left_out
    who = [shared_out(SADDLES["auc, prepared, scaled"]().data.train.sizes, 2)[k] for k in (0, 1)]
    assert who == [0, 1] or who == [1, 0], "clients of different ranks"


@pytest.mark.slow
def test_a_pretraining_with_ranks_ends_as_it_does_alone(launch: Launch, alone: Path) -> None:
    launch.of("pretrained")
    assert_same_run(launch.folder / "runs" / "pretrained" / "pretrain", alone / "pretrained" / "pretrain", 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["straight", "auc", *(f"from {a} to {b}" for a, b in CHAINS)])
def test_only_the_first_rank_writes_and_is_listened_to(name: str, launch: Launch) -> None:
    first, *others = launch.of(name)
    written = {Path(path).name.strip(".").split(".")[0] for path in first["written"]}
    assert {"metrics", "summary", "model", "config"} <= written
    assert [other["written"] for other in others] == [[]] * len(others)
    if name == "straight":
        assert first["run"]["called"] == list(range(1, ROUNDS + 1)) and others[0]["run"]["called"] == []


@pytest.mark.slow
def test_ranks_that_do_not_divide_the_clients_do_what_a_process_alone_does(launch: Launch, alone: Path) -> None:
    """Bit for bit: the first one computes all clients, and the other returns its run."""
    first, second = launch.of("auc, undivided")
    folder = launch.folder / "runs" / "auc, undivided"
    assert_same_run(folder, alone / "auc", 0.0)
    assert (folder / "model.safetensors").read_bytes() == (alone / "auc" / "model.safetensors").read_bytes()
    assert first["run"] == second["run"] and second["written"] == []


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), UNDIVIDED)
def test_a_run_is_resumed_with_and_without_a_division(first: str, then: str, launch: Launch, alone: Path) -> None:
    name = f"from {first} to {then}"
    before, after = ([found["run"] for found in launch.of(task)] for task in (f"start {name}", name))
    assert before[0]["history"] == after[0]["history"][: STOP + 1]
    assert (after[0]["x"], after[0]["history"]) == (after[1]["x"], after[1]["history"])
    assert_same_run(launch.folder / "runs" / name, alone / "straight", 1e-10)
    ours, theirs = (saved(folder) for folder in (launch.folder / "runs" / name, alone / "straight"))
    assert ours["clients"].keys() == theirs["clients"].keys()


@pytest.mark.parametrize(
    ("model", "clients", "steps", "divided"),
    [
        ("logreg", 10, 6, False),
        ("logreg", 100, 6, True),
        ("logreg", 10, 600, True),
        ("logreg", 10, fs.schedules.Epochs(1), False),
        ("logreg", 10, fs.schedules.Epochs(100), True),
        ("lenet5", 2, 1, True),
    ],
)
def test_small_jobs_are_not_divided(model: str, clients: int, steps: Any, divided: bool) -> None:
    data = fs.FederatedData.from_arrays([(torch.zeros(60, 1, 28, 28), torch.arange(60) % 10)] * clients)
    problem = fs.erm(fs.models.model(model, (1, 28, 28), 10))
    assert divides(problem, data, fs.FedAvg(steps=steps), Settings(batch_size=10)) is divided
    assert divides(problem, data, fs.FedAvg(steps=steps), Settings(divide="always"))
    assert not divides(problem, data, fs.FedAvg(steps=steps), Settings(divide="never"))


@pytest.mark.slow
def test_all_ranks_diverge_together(launch: Launch) -> None:
    for task, why in (
        ("diverged, undivided", "diverged in round 1: 15 of 15 entries of x"),
        ("diverged", "diverged in round 1: 15 of 15 entries of x"),
        ("measured nan", "round 2: the loss"),
    ):
        found = launch.refused(task)
        assert [f.get("error") for f in found] == ["Diverged"] * 2
        assert all(why in f["message"] for f in found)
    saved = launch.folder / "runs" / "measured nan"
    assert [row["round"] for row in rows_of(saved)] == [0, 1]
    assert "checkpoint" in files(saved) and "summary.json" not in files(saved)


@pytest.mark.slow
def test_all_ranks_refuse_diagnostics_of_local_steps(launch: Launch) -> None:
    found = launch.refused("listening")
    assert [f["error"] for f in found] == ["InputError"] * 2
    assert all("one process only" in f["message"] for f in found)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), CHAINS)
def test_a_run_is_resumed_with_another_number_of_ranks(first: int, then: int, launch: Launch, alone: Path) -> None:
    name = f"from {first} to {then}"
    before, after = ([found["run"] for found in launch.of(task)] for task in (f"start {name}", name))
    assert (len(before), len(after)) == (first, then)
    assert before[0]["history"] == after[0]["history"][: STOP + 1]
    assert after[0]["history"][-1]["round"] == ROUNDS
    assert all((run["x"], run["history"]) == (after[0]["x"], after[0]["history"]) for run in after)
    assert_same_run(launch.folder / "runs" / name, alone / "straight", 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["straight", *(f"from {a} to {b}" for a, b in CHAINS)])
def test_checkpoints_of_ranks_hold_what_those_of_a_process_alone_hold(name: str, launch: Launch, alone: Path) -> None:
    """The rows of all clients were written again on the way, so there are fewer pieces than rounds."""
    launch.of(name)
    ours, theirs = (saved(folder) for folder in (launch.folder / "runs" / name, alone / "straight"))
    assert ours["round"] == theirs["round"] == ROUNDS and untimed(ours) == untimed(theirs)
    torch.testing.assert_close(ours["server"], theirs["server"], atol=1e-10, rtol=1e-10)
    assert ours["clients"].keys() == theirs["clients"].keys()
    for key, row in theirs["clients"].items():
        torch.testing.assert_close(ours["clients"][key], row, atol=1e-10, rtol=1e-10)
    assert ours["rounds"] < set(range(1, ROUNDS + 1))


def saved(run: Path) -> dict[str, Any]:
    """The last checkpoint: the server's vectors, and each client's rows as they are after all pieces."""
    folder = run / "checkpoint"
    manifest = json.loads(max(folder.glob("round-*.json")).read_text())["manifest"]
    rows: dict[tuple[str, int], torch.Tensor] = {}
    for piece in manifest["clients"]:
        held = load_file(folder / piece["file"])
        for name in (n for n in held if not n.endswith(".clients")):
            rows |= {(name, k): row for k, row in zip(held[f"{name}.clients"].tolist(), held[name], strict=True)}
    rounds = {int(piece["file"].split("-")[1]) for piece in manifest["clients"]}
    server = load_file(folder / manifest["server"]["file"])
    return {**manifest, "server": server, "clients": rows, "rounds": rounds}


# --- the command -----------------------------------------------------------------------------------------------------

COMMAND_ROUNDS = 40
COMMAND = worker.FILE.replace("rounds = 3", f"rounds = {COMMAND_ROUNDS}\neval_every = 1\nthreads = 1").replace(
    "lr = 0.1", 'name = "scaffold"\nlr = 0.1'
)


def torchrun(folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start the command with two ranks."""
    (folder / "experiment.toml").write_text(COMMAND)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options, "-m", "fedstrata", "run"]
    words += [str(folder / "experiment.toml"), "--out", str(folder / "run"), "--json", "--quiet"]
    return subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str], seconds: float = 120) -> tuple[int, str, str]:
    """Wait for a command's end; stop all its processes if it does not come."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        for _, rank in processes_of(process.pid):  # ranks have sessions of their own
            os.kill(rank, signal.SIGKILL)
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
    return process.returncode, out, err


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("torchrun")
    code, out, err = ended(torchrun(folder))
    assert code == 0, err
    return folder, out


@pytest.mark.slow
def test_the_command_runs_with_the_ranks_of_torchrun(
    uninterrupted: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, printed = uninterrupted
    assert json.loads(printed) == json.loads((folder / "run" / "summary.json").read_text())  # one rank prints
    assert {"plot.png", "config.toml", "checkpoint"} <= files(folder / "run")
    monkeypatch.setattr("fedstrata.training.plots.plot", lambda _, path, **__: path.touch())
    run_config(read(folder / "experiment.toml"), tmp_path / "run", False, [])
    assert_same_run(folder / "run", tmp_path / "run", 1e-4)
    assert (folder / "run/config.toml").read_text() == (tmp_path / "run/config.toml").read_text()


@pytest.mark.slow
def test_a_command_that_the_first_rank_refuses_ends_on_all(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").touch()
    code, _, err = ended(torchrun(tmp_path))
    assert code != 0 and "Error: The directory" in err
    # The other rank says that another one stopped, unless torchrun ends it first.
    assert "RuntimeError" not in err


def test_only_errors_of_the_network_are_another_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("init_process_group", "destroy_process_group")
    for name in names:
        monkeypatch.setattr(torch.distributed, name, lambda *_, **__: None)
    monkeypatch.setattr(
        "fedstrata.clients.ranks.rendezvous", lambda *_, **__: iter([(torch.distributed.HashStore(), 0, 2)])
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RuntimeError, match="igloo"), joined():
        raise RuntimeError("cannot open /home/igloo/data")
    lost = "[/build/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"
    with pytest.raises(fs.FedstrataError, match=r"stopped or cannot be reached \(Connection closed"), joined():
        raise RuntimeError(lost)


def processes_of(parent: int) -> Iterator[tuple[int, int]]:
    """The ranks that torchrun runs, and their process numbers."""
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        try:
            environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for entry in environment:
            if entry.startswith(b"RANK="):
                yield int(entry[5:]), int(child)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="a rank is found in /proc")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_changes_nothing(rank: int, uninterrupted: tuple[Path, str], tmp_path: Path) -> None:
    straight = uninterrupted[0] / "run"
    process = torchrun(tmp_path, "--max-restarts", "2")
    folder = tmp_path / "run"
    try:
        deadline = time.monotonic() + 240
        while not (folder / "metrics.jsonl").exists() or len(rows_of_now(folder)) < COMMAND_ROUNDS // 4:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.001)
        os.kill(dict(processes_of(process.pid))[rank], signal.SIGKILL)
        before = rows_of_now(folder)[: COMMAND_ROUNDS // 4]
        assert not (folder / "summary.json").exists(), "the run ended before it could be killed"
        assert len(rows_of_now(folder)) < COMMAND_ROUNDS
    finally:
        code, out, err = ended(process)
    assert code == 0, err
    assert (folder / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()
    rows = rows_of(folder)
    assert rows[: len(before) - 1] == before[:-1]  # seconds too: the rounds before the kill were not done again
    assert without_seconds(rows) == without_seconds(rows_of(straight))
    assert json.loads(out)["status"] == "finished"
    assert not list(folder.rglob("*.tmp"))


def rows_of_now(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run that is under way; the last line may be cut off."""
    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
