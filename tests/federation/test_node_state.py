"""What clients keep on the disks of their nodes: across restarts, checkpoints and kills, and what if it is lost."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch

import fedstrata as fs
from federation.stand_in import AUC, CANCER, DIGITS, Change, Sent, Site, Tables, made, site
from fedstrata.clients.privacy import epsilon
from fedstrata.federation.messages import Reply
from fedstrata.federation.node import state
from fedstrata.federation.server import engine
from support import without_seconds


class Stopped(Exception):
    """The process of the server is gone."""


def stopping_in(round: int, message: int) -> Change:
    """Let the server die in a round, after so many of its messages were answered."""
    count = itertools.count(1)

    def change(_: Site, sent: Sent, reply: Reply) -> Reply:
        if sent.is_work(round) and next(count) == message:
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
    for round, message in ((2, 2), (3, last)):  # in the middle of a round, and at its end
        with pytest.raises(Stopped):
            nodes.again(change=stopping_in(round, message)).serve(out, resume=True)
    assert_same_bits(nodes.again().serve(out, resume=True), straight)


@pytest.mark.parametrize("name", ["scaffold", "fgda"])
def test_a_round_that_was_not_saved_is_repeated_from_the_state_before_it(name: str, tmp_path: Path) -> None:
    nodes = site(tmp_path, keeping(name, every=2))
    straight = nodes.serve(tmp_path / "straight")
    for round in (3, 4):  # 4 would have been saved
        with pytest.raises(Stopped):
            nodes.again().serve(tmp_path / "run", True, [StopAfter(round)])
    assert_same_bits(nodes.again().serve(tmp_path / "run", True), straight)


def test_nodes_follow_a_server_that_falls_back_from_a_damaged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "DURABLE_SECONDS", 0.0)
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
    config = made(keeping("scaffold", rounds=7).to_toml(), {"train": {"participation": 3}})
    nodes = site(tmp_path, config)
    nodes.serve(tmp_path / "a")
    assert len(versions(nodes, 0)) == 7  # a power failure may lose checkpoints of the last half minute
    monkeypatch.setattr(engine, "DURABLE_SECONDS", 0.0)
    nodes = site(tmp_path / "other", config)
    nodes.serve()
    # In round 7 the checkpoints of 5 and 6 are there: so are the state after 5, and everything later.
    assert versions(nodes, 0) == [f"state-{r:08d}-0000.safetensors" for r in (5, 6, 7)]


def test_runs_of_long_ago_are_removed_from_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = site(tmp_path, keeping("scaffold", rounds=1))
    folder = Path(nodes.here(0)["state"])
    (folder / "not a run").mkdir(parents=True)
    for number in range(state.RUNS_KEPT + 2):
        nodes.serve(tmp_path / f"run-{number}")
    assert len(list(folder.iterdir())) == 1 + state.RUNS_KEPT + 2  # none of them is old
    monkeypatch.setattr(state, "OLD", -1.0)
    nodes.serve(tmp_path / "last")
    assert len(list(folder.iterdir())) == 1 + state.RUNS_KEPT and (folder / "not a run").exists()


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
    config = made(keeping("scaffold").to_toml(), {"train": {"participation": 3}})
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
    assert f"The state of the client in {folder}/state-" in said and "cannot be read" in said


def test_a_new_run_in_a_used_directory_is_refused_and_does_no_harm(tmp_path: Path) -> None:
    nodes = site(tmp_path, keeping("scaffold"))
    straight = nodes.serve(tmp_path / "straight")
    with pytest.raises(Stopped):
        nodes.again().serve(tmp_path / "run", False, [StopAfter(3)])
    with pytest.raises(fs.InputError, match="not empty"):
        nodes.again().serve(tmp_path / "run", False)
    assert_same_bits(nodes.again().serve(tmp_path / "run", True), straight)


def test_a_run_without_its_notes_cannot_be_resumed(tmp_path: Path) -> None:
    nodes = site(tmp_path, keeping("scaffold"))
    with pytest.raises(Stopped):
        nodes.serve(tmp_path / "run", callbacks=[StopAfter(3)])
    (tmp_path / "run.federation.json").unlink()
    with pytest.raises(fs.InputError, match=r"run\.federation\.json.* is missing"):
        nodes.again().serve(tmp_path / "run", resume=True)
    assert not (tmp_path / "run.federation.json").exists()


def test_noise_covers_rounds_that_are_repeated_and_cannot_be_foretold(tmp_path: Path) -> None:
    noisy = {"algorithm": {"name": "fedavg", "steps": 2}, "channel": {"clip": 0.1, "noise": 2.0}}
    nodes = site(tmp_path, made(DIGITS, noisy, {"train": {"rounds": 4}}))
    straight = nodes.serve(tmp_path / "straight")
    with pytest.raises(Stopped):
        nodes.again().serve(tmp_path / "run", callbacks=[StopAfter(3)])
    run = nodes.again().serve(tmp_path / "run", resume=True)
    channel = fs.Channel(clip=0.1, noise=2.0)
    assert straight.history[-1]["epsilon"] == pytest.approx(epsilon(channel, {"1 of 3": 4}, 3))
    assert run.history[-1]["epsilon"] == pytest.approx(epsilon(channel, {"1 of 3": 5}, 3))
    assert not torch.equal(run.x, straight.x)


# --- lost state -------------------------------------------------------------------------------------------------------

LOSER = 1


def whole(name: str) -> fs.Config:
    """An experiment in which every client takes part in every round."""
    return made(keeping(name).to_toml(), {"train": {"participation": 1.0}})


def after_first_answer_in(round: int, act: Change) -> Change:
    """Do something to node 1 once it has answered in a round; from then on ``act`` decides what it answers."""
    begun: list[bool] = []

    def change(nodes: Site, sent: Sent, reply: Reply) -> Reply | None:
        if sent.node != LOSER or sent.header["kind"] != "work":
            return reply
        if begun:
            return act(nodes, sent, reply)
        if sent.is_work(round):
            begun.append(True)
            act(nodes, sent, reply)
        return reply

    return change


def lose(nodes: Site, sent: Sent, reply: Reply) -> Reply:
    shutil.rmtree(nodes.here(LOSER)["state"], ignore_errors=True)
    return reply


def gone(nodes: Site, sent: Sent, reply: Reply) -> Reply:
    return Reply(error="gone")


@pytest.mark.parametrize("name", KEEPING)
def test_a_node_that_lost_its_state_is_left_out_instead_of_starting_afresh(name: str, tmp_path: Path) -> None:
    nodes = site(tmp_path, whole(name))
    expected = nodes.again(change=after_first_answer_in(1, gone)).serve(tmp_path / "gone")
    run = nodes.again(change=after_first_answer_in(1, lose)).serve(tmp_path / "lost")
    assert torch.equal(run.x, expected.x)
    assert run.summary["left_out"] == expected.summary["left_out"] and run.summary["left_out"]["node1"] >= 2
    for fault in nodes.faults(tmp_path / "lost"):
        assert (fault["client"], fault["kind"]) == (LOSER, "error")
        assert "lost the state of its client" in fault["detail"] and "is missing" in fault["detail"]
        assert nodes.here(LOSER)["state"] in fault["detail"]
        assert "Restore the folder, or start a new run" in fault["detail"]


@pytest.mark.parametrize("name", ["scaffold", "fgda", "fedavg, top_k"])
def test_a_server_that_was_restarted_remembers_who_kept_something(name: str, tmp_path: Path) -> None:
    nodes = site(tmp_path, whole(name))
    with pytest.raises(Stopped):
        nodes.serve(tmp_path / "run", callbacks=[StopAfter(3)])
    shutil.rmtree(nodes.here(LOSER)["state"])
    run = nodes.again().serve(tmp_path / "run", resume=True)
    faults = nodes.faults(tmp_path / "run")
    assert {(f["client"], f["kind"]) for f in faults} == {(LOSER, "error")} and {f["round"] for f in faults} == {3, 4}
    assert all("lost the state" in f["detail"] for f in faults) and set(run.summary["left_out"]) == {"node1"}


def test_a_node_whose_state_is_restored_takes_part_again(tmp_path: Path) -> None:
    nodes = site(tmp_path, whole("scaffold"))
    folder = Path(nodes.here(LOSER)["state"])

    def change(nodes: Site, sent: Sent, reply: Reply) -> Reply:
        if sent.is_work(0) and sent.node == 2:
            folder.rename(tmp_path / "elsewhere")
        if sent.is_work(1) and sent.node == 2:
            (tmp_path / "elsewhere").rename(folder)
        return reply

    nodes.again(change=change).serve(tmp_path / "run")
    assert {(f["client"], f["round"]) for f in nodes.faults(tmp_path / "run")} == {(LOSER, 2)}


@pytest.mark.parametrize("name", ["scaffold", "fedavg, top_k"])
def test_a_node_that_never_took_part_needs_no_state(name: str, tmp_path: Path) -> None:
    config = made(keeping(name, rounds=8).to_toml(), {"train": {"participation": 1}})
    nodes = site(tmp_path, config)
    nodes.serve()
    assert not nodes.faults()
    kept: dict[int, list[object]] = {}
    for sent in nodes.sent:
        if sent.header["kind"] == "work":
            kept.setdefault(sent.node, []).append(sent.header["kept"])
    assert len(kept) == 3 and all(first is None and None not in later for first, *later in kept.values())


def test_the_state_of_an_answer_that_was_dropped_is_not_required(tmp_path: Path) -> None:
    def change(nodes: Site, sent: Sent, reply: Reply) -> Reply:
        dropped = sent.is_work(0) and sent.node == LOSER
        return gone(nodes, sent, lose(nodes, sent, reply)) if dropped else reply

    nodes = site(tmp_path, whole("scaffold"))
    run = nodes.again(change=change).serve()
    assert run.summary["left_out"] == {"node1": 1}
