"""What clients keep on the disks of their nodes: across restarts, checkpoints and kills, and what if it is lost."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import fedstrata as fs
from cases import repeats
from federation.stand_in import AUC, CANCER, DIGITS, Change, Sent, Site, Tables, made, simulated, site
from fedstrata.clients.privacy import epsilon
from fedstrata.federation.node import state
from fedstrata.federation.server import engine
from fedstrata.federation.server.state import ServerState
from fedstrata.federation.wire import Reply
from fedstrata.training.rounds import LAST_EXCHANGE
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


@repeats("name, every", [(name, every) for every in (2, 1) for name in KEEPING])
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


@repeats("name", ["scaffold", "fgda"])
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


@pytest.mark.slow
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


def test_old_runs_are_removed_from_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_run_without_the_state_of_its_server_cannot_be_resumed(tmp_path: Path) -> None:
    nodes = site(tmp_path, keeping("scaffold"))
    with pytest.raises(Stopped):
        nodes.serve(tmp_path / "run", callbacks=[StopAfter(3)])
    (tmp_path / "run.federation.json").unlink()
    with pytest.raises(fs.InputError, match=r"run\.federation\.json.* is missing"):
        nodes.again().serve(tmp_path / "run", resume=True)
    assert not (tmp_path / "run.federation.json").exists()


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", "null", "3", "[" * 100_000, "\xff"),
        {"run": "../../x"},
        {"run": None},
        {"descriptions": [1, 2, 3]},
        {"descriptions": {}},
        {"releases": "x"},
        {"releases": {"x": 1}},
        {"releases": {"1 of 3": "x"}},
        {"unmeasured": []},
    ],
    ids=lambda text: str(text)[:30],
)
def test_a_damaged_state_of_the_server_is_an_error_that_names_the_file(text: str | Tables, tmp_path: Path) -> None:
    file = tmp_path / "run.federation.json"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").touch()
    good = {"run": "ab" * 16, "descriptions": None, "releases": {}, "unmeasured": {}}
    if isinstance(text, dict):
        text = json.dumps(good | text)
    file.write_text(text, encoding="latin-1")
    with pytest.raises(
        fs.InputError, match=r"run\.federation\.json.* is damaged: .* Restore it from a copy, or choose"
    ):
        ServerState.of(tmp_path / "run", resume=True)


@pytest.mark.slow
def test_noise_covers_repeated_rounds_and_cannot_be_predicted(tmp_path: Path) -> None:
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


@pytest.mark.filterwarnings("ignore:No checkpoint in")
def test_every_noisy_exchange_counts_even_if_no_checkpoint_knows_of_it(tmp_path: Path) -> None:
    noisy = {"algorithm": {"name": "fedavg", "steps": 2}, "channel": {"clip": 0.1, "noise": 2.0}}
    nodes = site(tmp_path, made(DIGITS, noisy, {"train": {"rounds": 3, "checkpoint_every": 10}}))
    for _ in range(2):
        with pytest.raises(Stopped):
            nodes.again().serve(tmp_path / "run", True, [StopAfter(2)])
    run = nodes.again().serve(tmp_path / "run", True)
    assert run.summary["epsilon"] == pytest.approx(epsilon(fs.Channel(clip=0.1, noise=2.0), {"1 of 3": 7}, 3))


def test_a_noisy_mean_is_on_record_before_any_node_can_see_it(tmp_path: Path) -> None:
    def recorded(nodes: Site, sent: Sent, reply: Reply) -> Reply:
        saved = json.loads(file.read_text()) if file.exists() else {"releases": {}}
        counts.append(saved["releases"].get("1 of 3", 0))
        return reply

    file = tmp_path / "run.federation.json"

    counts: list[int] = []
    noisy = {"algorithm": {"name": "fedavg", "steps": 2}, "channel": {"clip": 0.1, "noise": 2.0}}
    nodes = site(tmp_path, made(DIGITS, noisy, {"train": {"rounds": 3, "checkpoint_every": 10}}))
    nodes.again(change=recorded).serve(tmp_path / "run")
    assert counts[3:12] == [0, 0, 0, 1, 1, 1, 2, 2, 2]  # after the descriptions, three nodes in each of three rounds


def test_the_state_of_another_run_or_an_old_copy_of_it_is_refused(tmp_path: Path) -> None:
    noisy = {"algorithm": {"name": "fedavg", "steps": 2}, "channel": {"clip": 0.1, "noise": 2.0}}
    nodes = site(tmp_path, made(DIGITS, noisy, {"train": {"rounds": 3}}))
    file = tmp_path / "run.federation.json"
    with pytest.raises(Stopped):
        nodes.again().serve(tmp_path / "run", False, [StopAfter(3)])
    saved = json.loads(file.read_text())
    others = {
        "it is of another run": [{"run": "ab" * 16}],
        "it is older": [{"releases": {}}, {"releases": {"1 of 3": 1}}],
    }
    for why, changes in others.items():
        for change in changes:
            file.write_text(json.dumps(saved | change))
            with pytest.raises(fs.InputError, match=rf"run\.federation\.json.* does not belong .*: {why}"):
                nodes.again().serve(tmp_path / "run", resume=True)
    file.unlink()
    with pytest.raises(fs.InputError, match="not empty"):
        nodes.again().serve(tmp_path / "run", resume=False)
    assert not file.exists()  # a new one would be taken for that of the run
    file.write_text(json.dumps(saved))
    assert nodes.again().serve(tmp_path / "run", resume=True).summary["round"] == 3


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


@repeats("name", ["scaffold", "fedavg, top_k"])
def test_a_node_that_lost_its_state_is_left_out_instead_of_starting_afresh(name: str, tmp_path: Path) -> None:
    nodes = site(tmp_path, whole(name))
    expected = nodes.again(change=after_first_answer_in(1, gone)).serve(tmp_path / "gone")
    run = nodes.again(change=after_first_answer_in(1, lose)).serve(tmp_path / "lost")
    assert torch.equal(run.x, expected.x)
    assert run.summary["left_out"] == expected.summary["left_out"] and run.summary["left_out"]["node1"] >= 2
    for fault in nodes.faults(tmp_path / "lost"):
        assert (fault["client"], fault["kind"]) == (LOSER, "lost")
        assert "lost the state of its client" in fault["detail"] and "is missing" in fault["detail"]
        assert nodes.here(LOSER)["state"] in fault["detail"]
        assert "Restore the folder, or start a new run" in fault["detail"]


def losing_once(round: int) -> Change:
    """Let node 1 lose its state once it has answered in a round."""
    begun: list[bool] = []

    def change(nodes: Site, sent: Sent, reply: Reply) -> Reply:
        if sent.node == LOSER and sent.is_work(round) and not begun:
            begun.append(True)
            lose(nodes, sent, reply)
        return reply

    return change


@repeats("name", ["fgda", "local_sgdam", "codasca"])
def test_a_node_that_lost_its_state_rejoins_where_the_algorithm_can_make_it_anew(name: str, tmp_path: Path) -> None:
    nodes = site(tmp_path, whole(name))
    run = nodes.again(change=losing_once(1)).serve(tmp_path / "lost")
    faults = nodes.faults(tmp_path / "lost")
    assert faults and {(f["client"], f["kind"]) for f in faults} == {(LOSER, "lost")}
    assert len({f["round"] for f in faults}) == 1, "it takes part again from the next round"
    assert run.summary["left_out"] == {"node1": len(faults)}


@pytest.mark.slow
def test_a_server_that_goes_back_behind_a_loss_ends_with_the_same_bits(tmp_path: Path) -> None:
    nodes = site(tmp_path, whole("fgda"))
    straight = nodes.again(change=losing_once(1)).serve(tmp_path / "straight")
    other = nodes.again(change=losing_once(1))
    with pytest.raises(Stopped):
        other.serve(tmp_path / "run", callbacks=[StopAfter(3)])
    assert_same_bits(other.again().serve(tmp_path / "run", resume=True), straight)


@pytest.mark.slow
def test_a_node_that_missed_the_first_estimates_rejoins_as_in_a_simulation(tmp_path: Path) -> None:
    config = made(whole("fgda").to_toml(), {"faults": {"quorum": 1, "retries": 0, "timeout": 5.0}})

    def absent(_: Site, sent: Sent, reply: Reply) -> Reply:
        return Reply(error="gone") if sent.node == LOSER and sent.is_work(-1) else reply

    nodes = site(tmp_path, config)
    run = nodes.again(change=absent).serve(tmp_path / "run")
    seen = [(f["round"], f["kind"]) for f in nodes.faults(tmp_path / "run")]
    assert {kind for round, kind in seen if round == 1} == {"lost"} and {round for round, _ in seen} == {0, 1}
    with pytest.MonkeyPatch.context() as patch:
        kinds = fs.Inject.kinds
        patch.setattr(fs.Inject, "kinds", lambda s, k, r, *w: kinds(s, k, r, *w) if r < 0 else [None] * len(k))
        dropping = fs.Faults(quorum=1, retries=0, inject=fs.Inject(drop=1.0, clients=(LOSER,)))
        expected = simulated(config, faults=dropping)
    torch.testing.assert_close(run.x, expected.x, atol=1e-6, rtol=1e-6)
    assert run.history[-1]["bytes_up"] == expected.history[-1]["bytes_up"]


STAGES: Tables = {
    "algorithm": {"name": "coda", "steps": 2, "stage_steps": 4, "factor": 1.0, "lr": 0.02},
    "train": {"rounds": 6, "eval_every": 1},
    "faults": {"quorum": 1, "retries": 0, "timeout": 5.0},
    **AUC,
}
"""Two rounds a stage."""


def missing(work: str, round: int, also: Change = lambda nodes, sent, reply: reply) -> Change:
    """Let node 1 miss an exchange of a round; ``also`` changes its other answers."""

    def change(nodes: Site, sent: Sent, reply: Reply) -> Reply | None:
        if sent.node != LOSER or sent.header["kind"] != "work":
            return reply
        missed = sent.is_work(round) and sent.header["work"] == work
        return gone(nodes, sent, reply) if missed else also(nodes, sent, reply)

    return change


@pytest.mark.slow
def test_a_node_that_rejoins_keeps_the_state_that_a_checkpoint_needs(tmp_path: Path) -> None:
    """It takes part in the mean of the stage, but not in the best y, and then rejoins, all in round 2."""
    nodes = site(tmp_path, made(CANCER, STAGES))
    straight = nodes.again(change=missing("local", 1)).serve(tmp_path / "straight")
    other = nodes.again(change=missing("local", 1))
    with pytest.raises(Stopped):
        other.serve(tmp_path / "run", callbacks=[StopAfter(2)])
    run = other.again(change=missing("local", 1)).serve(tmp_path / "run", resume=True)
    assert_same_bits(run, straight)
    assert run.summary["left_out"] == straight.summary["left_out"] == {"node1": 2}


@pytest.mark.slow
def test_a_node_whose_rejoining_fails_still_has_what_it_kept(tmp_path: Path) -> None:
    def no_join(nodes: Site, sent: Sent, reply: Reply) -> Reply:
        return gone(nodes, sent, reply) if sent.header["work"] == "join" else reply

    nodes = site(tmp_path, made(CANCER, STAGES))
    nodes.again(change=missing("local", 2, no_join)).serve(tmp_path / "run")
    rounds = {f["round"] for f in nodes.faults(tmp_path / "run")}
    assert rounds == {3, 4}, "round 5 starts a stage, which needs nothing of the one before"


@pytest.mark.slow
@pytest.mark.parametrize("channel", [{}, {"compress": "top_k", "top": 0.3}], ids=["plain", "top_k"])
def test_a_node_that_rejoins_does_as_in_a_simulation(channel: Tables, tmp_path: Path) -> None:
    config = made(CANCER, STAGES, {"channel": channel} if channel else {})
    run = site(tmp_path, config).again(change=missing("local", 2)).serve(tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        kinds = fs.Inject.kinds
        patch.setattr(
            fs.Inject, "kinds", lambda s, k, r, e, a: kinds(s, k, r, e, a) if (r, e) == (2, 0) else [None] * len(k)
        )
        dropping = fs.Faults(quorum=1, retries=0, inject=fs.Inject(drop=1.0, clients=(LOSER,)))
        expected = simulated(config, faults=dropping)
    torch.testing.assert_close(run.x, expected.x, atol=1e-6, rtol=1e-6)
    assert run.summary["left_out"] == {"node1": expected.summary["left_out"]["client 1"]}


@pytest.mark.slow
@repeats("name", ["fgda", "local_sgdam", "codasca"])
def test_nodes_rejoin_before_a_round_that_has_no_quorum_without_them(name: str, tmp_path: Path) -> None:
    nodes = site(tmp_path, whole(name))
    with pytest.raises(Stopped):
        nodes.serve(tmp_path / "run", callbacks=[StopAfter(3)])
    for lost in (0, 1):
        shutil.rmtree(nodes.here(lost)["state"])
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.copy(tmp_path / "run.federation.json", tmp_path / "again.federation.json")
    run = nodes.again().serve(tmp_path / "run", resume=True)
    faults = nodes.faults(tmp_path / "run")
    assert {(f["round"], f["client"], f["kind"], f["left_out"]) for f in faults} == {
        (3, k, "lost", False) for k in (0, 1)
    }
    assert not run.summary["left_out"] and run.history[-1]["failed"] == 0
    with pytest.raises(Stopped):  # in the round before which they have rejoined
        nodes.again().serve(tmp_path / "again", resume=True, callbacks=[StopAfter(3)])
    assert_same_bits(nodes.again().serve(tmp_path / "again", resume=True), run)


def test_without_a_way_to_rejoin_too_many_lost_states_are_an_error_with_the_remedy(tmp_path: Path) -> None:
    nodes = site(tmp_path, whole("scaffold"))
    with pytest.raises(Stopped):
        nodes.serve(tmp_path / "run", callbacks=[StopAfter(3)])
    for lost in (0, 1):
        shutil.rmtree(nodes.here(lost)["state"])
    with pytest.raises(fs.QuorumError, match="Restore the folder, or start a new run"):
        nodes.again().serve(tmp_path / "run", resume=True)


@repeats("name", ["scaffold", "fedavg, top_k"])
def test_a_server_that_was_restarted_remembers_who_kept_something(name: str, tmp_path: Path) -> None:
    nodes = site(tmp_path, whole(name))
    with pytest.raises(Stopped):
        nodes.serve(tmp_path / "run", callbacks=[StopAfter(3)])
    shutil.rmtree(nodes.here(LOSER)["state"])
    run = nodes.again().serve(tmp_path / "run", resume=True)
    faults = nodes.faults(tmp_path / "run")
    assert {(f["client"], f["kind"]) for f in faults} == {(LOSER, "lost")} and {f["round"] for f in faults} == {3, 4}
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
    config = made(keeping(name, rounds=8).to_toml(), {"train": {"participation": 1}, "problem": {"prior": False}})
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


def test_a_node_keeps_as_much_state_in_memory_as_the_run_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []

    class Watched(state.ClientState):
        def __init__(self, clients: int, memory_limit: int) -> None:
            limits.append(memory_limit)
            super().__init__(clients, memory_limit)

    monkeypatch.setattr(state, "ClientState", Watched)
    config = keeping("scaffold", rounds=2)
    straight = site(tmp_path / "large", config).serve(tmp_path / "large" / "run")
    small = config.replace(train=config.train.replace(state_memory=1))
    run = site(tmp_path / "small", small).serve(tmp_path / "small" / "run")
    assert set(limits) == {config.train.state_memory, 1}
    assert_same_bits(run, straight)


def test_a_version_may_have_any_number_of_an_exchange(tmp_path: Path) -> None:
    """Clients that rejoin before a round do so in an exchange above all others of the previous round."""
    folder = state.StateFolder(tmp_path, "a" * 32)
    for number, exchange in enumerate((0, 9999, 12345, LAST_EXCHANGE)):
        kept = folder.load((3, 0) if number else None, 0, 1, 1 << 20, rejoins=True)
        kept.keep(np.zeros(1, dtype=np.int64), {"x": torch.tensor([[float(number)]])})
        assert folder.save((3, exchange), kept)
        again = folder.load((3, exchange), 0, 1, 1 << 20)
        assert again.recall(np.zeros(1, dtype=np.int64), "x", torch.zeros(1, 1)).item() == number
