"""Training: exact resume, damaged checkpoints, run directories that are never overwritten, and every bad argument."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedstrata as fs
from fedstrata.algorithms import ALGORITHMS
from fedstrata.core.files import Rows
from fedstrata.data.federated import Part
from fedstrata.training import checkpoint
from fedstrata.training.rundir import RunDirectory
from support import example_for, mixture_of, sized_data, smooth_example, softmax_problem, without_seconds

SCAFFOLD = fs.Scaffold(lr=0.2, steps=3)
OPTIONS: dict[str, Any] = {"batch_size": 4, "participation": 3, "chunk": 2, "eval_every": 1, "seed": 5}


def train(rounds: int, algorithm: fs.Algorithm = SCAFFOLD, **options: Any) -> fs.Run:
    problem, data = smooth_example()
    return fs.train(problem, data, algorithm, rounds=rounds, **{**OPTIONS, **options})


@pytest.fixture(autouse=True)
def _draw_nothing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing the curve costs more than these runs; one test looks at it."""
    if "everything" not in request.node.name:
        monkeypatch.setattr("fedstrata.training.plots.plot", lambda *_, **__: None)


@pytest.fixture(scope="module")
def straight() -> fs.Run:
    """Six rounds without a stop, and without graphs, like the other tests of this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedstrata.problems.runner.Runner.tracing", False)
        return train(6)


def assert_same(run: fs.Run, expected: fs.Run) -> None:
    assert torch.equal(run.x, expected.x)
    assert without_seconds(run.history) == without_seconds(expected.history)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# --- resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stops", [(1,), (5,), (6,), (1, 2, 3, 4, 5)], ids=str)
def test_resume_is_exact_with_client_state_and_partial_participation(
    straight: fs.Run, tmp_path: Path, stops: tuple[int, ...]
) -> None:
    for rounds in stops:
        train(rounds, out=tmp_path / "run", resume=True)
    run = train(6, out=tmp_path / "run", resume=True)
    assert_same(run, straight)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert without_seconds([json.loads(line) for line in lines]) == without_seconds(straight.history)


@pytest.mark.parametrize("checkpoint_every", [1, 2, 4])
def test_rounds_after_the_last_checkpoint_are_run_again(
    straight: fs.Run, tmp_path: Path, checkpoint_every: int
) -> None:
    class Stop(fs.Callback):
        def on_round(self, round: int, state: fs.State) -> None:
            if round == 6:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(6, out=tmp_path / "run", checkpoint_every=checkpoint_every, callbacks=[Stop()])
    seen: list[int] = []

    class Watch(fs.Callback):
        def on_start(self, title: str, done: int, rounds: int, note: str) -> None:
            seen.append(done)

    run = train(6, out=tmp_path / "run", checkpoint_every=checkpoint_every, resume=True, callbacks=[Watch()])
    assert seen == [5 - 5 % checkpoint_every]
    assert_same(run, straight)


def test_state_in_a_mapped_file_resumes_to_the_same_bits(straight: fs.Run, tmp_path: Path) -> None:
    train(3, out=tmp_path / "run", state_memory=1)
    assert_same(train(6, out=tmp_path / "run", state_memory=1, resume=True), straight)


@pytest.mark.slow
def test_compacting_the_client_rows_changes_nothing(tmp_path: Path) -> None:
    """Over many rounds more rows are written than are in use, so all of them are rewritten."""
    run = train(40, out=tmp_path / "run", eval_every=40)
    segments = sorted((tmp_path / "run" / "checkpoint").glob("clients-*.safetensors"))
    assert 0 < len(segments) < 20
    resumed = train(44, out=tmp_path / "run", resume=True, eval_every=40)
    assert torch.equal(resumed.x, train(44, eval_every=40).x)
    assert not torch.equal(resumed.x, run.x)


def test_a_finished_run_may_be_resumed_and_stays(straight: fs.Run, tmp_path: Path) -> None:
    train(6, out=tmp_path / "run")
    before = contents(tmp_path / "run")
    assert_same(train(6, out=tmp_path / "run", resume=True), straight)
    after = contents(tmp_path / "run")
    assert before["model.safetensors"] == after["model.safetensors"]
    assert before["metrics.jsonl"] == after["metrics.jsonl"]


def test_resume_in_a_new_directory_starts(straight: fs.Run, tmp_path: Path) -> None:
    assert_same(train(6, out=tmp_path / "new" / "run", resume=True), straight)


def test_resume_in_a_directory_without_its_config_starts(straight: fs.Run, tmp_path: Path) -> None:
    """A kill between creating the directory and its config.toml leaves only a temporary file."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.toml.123.tmp").write_text("half")
    assert_same(train(6, out=tmp_path / "run", resume=True), straight)


@pytest.mark.filterwarnings("ignore:No checkpoint in .* starting at round 0")
def test_resume_before_the_first_checkpoint_starts_again(straight: fs.Run, tmp_path: Path) -> None:
    class Stop(fs.Callback):
        def on_round(self, round: int, state: fs.State) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(6, out=tmp_path / "run", callbacks=[Stop()])
    assert_same(train(6, out=tmp_path / "run", resume=True), straight)


def test_a_line_of_metrics_cut_off_by_a_kill_is_left_out(straight: fs.Run, tmp_path: Path) -> None:
    train(4, out=tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"round": 5, "steps": 1')
    assert_same(train(6, out=tmp_path / "run", resume=True), straight)


DAMAGED_LINES = {
    "half": b"{",
    "a number": b"123",
    "empty": b"{}",
    "a word": b'{"round": "x"}',
    "binary": b"\xff\xfe",
    "blank": b"",
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("line", DAMAGED_LINES.values(), ids=DAMAGED_LINES)
def test_a_damaged_line_of_metrics_is_named_and_the_others_are_kept(
    straight: fs.Run, tmp_path: Path, line: bytes
) -> None:
    train(4, out=tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:2], line, *lines[3:]]))
    with pytest.warns(UserWarning, match=r"metrics\.jsonl") as caught:
        run = train(6, out=tmp_path / "run", resume=True)
    messages = [str(warning.message) for warning in caught]
    assert messages[0] == f"Line 3 of {path} is damaged and left out."
    assert messages[1:] == [f"{path} lacks 1 of the 5 rows that were written up to round 4: resuming without them."]
    assert [row["round"] for row in run.history] == [0, 1, 3, 4, 5, 6]
    assert torch.equal(run.x, straight.x)
    train(6, out=tmp_path / "run", resume=True)  # without a warning: what was lost is lost


@pytest.mark.parametrize("kept", [0, 1, 4])
def test_lost_rows_of_metrics_are_counted(straight: fs.Run, tmp_path: Path, kept: int) -> None:
    train(6, out=tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)[:kept]
    path.write_text("".join(lines)) if kept else path.unlink()
    message = f"metrics.jsonl lacks {7 - kept} of the 7 rows that were written up to round 6: resuming"
    with pytest.warns(UserWarning, match=message):
        run = train(6, out=tmp_path / "run", resume=True)
    assert [row["round"] for row in run.history] == [*range(kept), 6]
    assert without_seconds(run.history)[-1] == without_seconds(straight.history)[-1]
    assert run.summary["round"] == 6


def test_logs_are_synced_with_a_durable_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        synced.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        real(handle)

    train(1, out=tmp_path / "run", faults=fs.Faults(quorum=0.1, inject=fs.Inject(drop=0.3)))
    assert (tmp_path / "run" / "faults.jsonl").exists()
    monkeypatch.setattr(checkpoint, "DURABLE_SECONDS", 0.0)
    monkeypatch.setattr(os, "fsync", fsync)
    train(2, out=tmp_path / "run", faults=fs.Faults(quorum=0.1, inject=fs.Inject(drop=0.3)), resume=True)
    assert {"metrics.jsonl", "faults.jsonl"} <= set(synced)


def test_config_tells_the_rounds_of_the_resumed_run(tmp_path: Path) -> None:
    train(3, out=tmp_path / "run")
    train(6, out=tmp_path / "run", resume=True)
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["train"]["rounds"] == 6


def test_resume_without_a_directory_is_refused() -> None:
    with pytest.raises(fs.InputError, match="resume"):
        train(2, resume=True)


OTHER_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"seed": 6}, r"train\.seed was 5 and is now 6"),
    ({"batch_size": 5}, r"train\.batch_size was 4 and is now 5"),
    ({"participation": 4}, r"train\.participation was 3 and is now 4"),
    ({"weighting": "samples"}, r"train\.weighting was 'uniform' and is now 'samples'"),
    ({"sampling": "epochs"}, r"train\.sampling was 'uniform' and is now 'epochs'"),
    ({"algorithm": fs.Scaffold(lr=0.3, steps=3)}, r"algorithm\.lr was 0\.2 and is now 0\.3"),
    ({"algorithm": fs.FedAvg(lr=0.2, steps=3)}, r"algorithm\.name was 'scaffold' and is now 'fedavg'|option"),
]


@pytest.mark.parametrize(("changes", "message"), OTHER_SETTINGS, ids=[str(next(iter(c))) for c, _ in OTHER_SETTINGS])
def test_resume_with_other_settings_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    train(2, out=tmp_path / "run")
    before = contents(tmp_path / "run")
    with pytest.raises(fs.InputError, match=message):
        train(4, out=tmp_path / "run", resume=True, **changes)
    assert contents(tmp_path / "run") == before


def test_resume_with_other_data_is_refused(tmp_path: Path) -> None:
    problem, _ = smooth_example()
    train(2, out=tmp_path / "run")
    other = sized_data([9, 9, 9, 9, 9, 9, 9], features=4, classes=3)
    with pytest.raises(fs.InputError, match="data"):
        fs.train(problem, other, SCAFFOLD, rounds=4, out=tmp_path / "run", resume=True, **OPTIONS)


def test_resume_with_fewer_rounds_than_done_is_refused(tmp_path: Path) -> None:
    train(4, out=tmp_path / "run")
    before = contents(tmp_path / "run")
    with pytest.raises(fs.InputError, match="rounds"):
        train(2, out=tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == before


# --- before the first round ------------------------------------------------------------------------------------------


PREPARED: dict[str, fs.Algorithm] = {
    "robust, comfedl": fs.ComFedL(lr=0.2, steps=2),
    "robust, adamfcgd": fs.AdaMFCGD(gamma=0.02, steps=2, average=True),
    "agnostic, afl": fs.AFL(lr=0.2, dual_lr=0.2),
    "agnostic, drfa": fs.DRFA(lr=0.2, dual_lr=0.2, steps=2),
}


def prepared(case: str, rounds: int, **options: Any) -> fs.Run:
    """A problem or an algorithm that asks the clients something before the first round."""
    plain, data = smooth_example()
    assert plain.flat is not None
    problem = fs.robust(plain.flat.module, gamma=0.4) if case.startswith("robust") else mixture_of(plain, data.clients)
    algorithm = PREPARED[case]
    partial = {} if algorithm.full_participation else {"participation": 3}
    options = {"batch_size": 4, "chunk": 2, "eval_every": 1, "seed": 5, **partial, **options}
    return fs.train(problem, data, algorithm, rounds=rounds, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "options"), [*((case, {}) for case in PREPARED), ("robust, adamfcgd", {"state_memory": 1})]
)
def test_a_resumed_run_prepares_again_and_counts_once(case: str, options: dict[str, Any], tmp_path: Path) -> None:
    straight = prepared(case, 4)
    for rounds in (1, 4):
        run = prepared(case, rounds, out=tmp_path / "run", resume=True, **options)
    assert_same(run, straight)
    if straight.y is not None:
        assert torch.equal(run.y, straight.y)
    counts = [{k: row[k] for k in ("samples", "bytes_up", "bytes_down", "steps")} for row in run.history]
    assert counts == [{k: row[k] for k in counts[0]} for row in straight.history]
    assert (counts[0]["bytes_down"] > 0) == case.startswith("robust")
    if case.startswith("robust"):
        u = torch.linspace(0.1, 3.0, 5, dtype=torch.float64)
        assert [run.problem.outer(v.reshape(1), ()) for v in u] == [
            straight.problem.outer(v.reshape(1), ()) for v in u
        ], "the shift is the same"


def test_what_was_asked_before_the_first_round_is_counted() -> None:
    run = prepared("robust, adamfcgd", 2)
    d, clients = len(run.x), 7
    first = run.history[0]
    assert first["bytes_down"] == clients * 8 * 2 * d, "x for the losses, x for the first estimates"
    assert first["bytes_up"] == clients * 8 * (3 + 1 + d), "class counts, a loss, and w_1"
    assert first["samples"] == clients * 4 * (1 + 2), "a batch, and two batches' worth"
    assert (first["round"], first["steps"]) == (0, 0)


def test_a_run_killed_before_its_first_checkpoint_prepares_from_scratch(tmp_path: Path) -> None:
    class Stop(fs.Callback):
        def on_round(self, round: int, state: fs.State) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared("robust, adamfcgd", 3, out=tmp_path / "run", callbacks=[Stop()])
    run = prepared("robust, adamfcgd", 3, out=tmp_path / "run", resume=True)
    assert_same(run, prepared("robust, adamfcgd", 3))


def test_resuming_a_problem_with_another_gamma_is_refused(tmp_path: Path) -> None:
    plain, data = smooth_example()
    assert plain.flat is not None
    fs.train(fs.robust(plain.flat.module, gamma=0.4), data, fs.ComFedL(), rounds=1, out=tmp_path / "run")
    other = fs.robust(plain.flat.module, gamma=0.5)
    with pytest.raises(fs.InputError, match=r"gamma was 0\.4 and is now 0\.5"):
        fs.train(other, data, fs.ComFedL(), rounds=2, out=tmp_path / "run", resume=True)


# --- the solution ----------------------------------------------------------------------------------------------------


class Iterates(fs.Callback):
    """What the server had after each round."""

    def __init__(self) -> None:
        self.states: list[fs.State] = []

    def on_round(self, round: int, state: fs.State) -> None:
        self.states.append(state)


AVERAGING = [fs.MFCGD(steps=2, average=True), fs.AdaMFCGD(steps=2, average=True), fs.AFL(average=True)]


@pytest.mark.parametrize("algorithm", AVERAGING, ids=lambda a: a.name)
def test_averaging_returns_the_mean_of_the_servers_iterates(algorithm: fs.Algorithm, tmp_path: Path) -> None:
    problem, data = example_for(type(algorithm))
    iterates, seen = Iterates(), []

    def evaluate(
        problem: fs.Problem, data: fs.FederatedData, x: torch.Tensor, y: torch.Tensor | None
    ) -> dict[str, float]:
        seen.append((x.clone(), y))
        return {"loss": float(x.norm())}

    options: dict[str, Any] = {"batch_size": 4, "evaluate": evaluate, "eval_every": 1}
    run = fs.train(problem, data, algorithm, rounds=4, callbacks=[iterates], **options)
    mean = torch.stack([s.x for s in iterates.states]).mean(0)
    torch.testing.assert_close(run.x, mean, atol=1e-12, rtol=0)
    assert not torch.equal(run.x, iterates.states[-1].x)
    assert torch.equal(seen[0][0], problem.x0), "before the first round it is the start"
    assert torch.equal(seen[-1][0], run.x), "what is measured is the solution"
    torch.testing.assert_close(seen[2][0], torch.stack([s.x for s in iterates.states[:2]]).mean(0), atol=1e-12, rtol=0)
    if problem.dual:
        torch.testing.assert_close(run.y, torch.stack([s.y for s in iterates.states]).mean(0), atol=1e-12, rtol=0)
    last = fs.train(problem, data, replace(algorithm, average=False), rounds=4, batch_size=4)
    assert torch.equal(last.x, iterates.states[-1].x)


def test_the_saved_model_is_the_solution(tmp_path: Path) -> None:
    run = prepared("agnostic, afl", 3, out=tmp_path / "run")
    saved = load_file(tmp_path / "run" / "model.safetensors")
    for name, weights in run.model().state_dict().items():
        assert torch.equal(saved[name], weights)
    flat = torch.cat([saved[name].flatten() for name in run.model().state_dict()])
    assert torch.equal(flat, run.x)
    assert run.summary["per_client"]["loss"] == pytest.approx(
        [float(smooth_example()[0].outer(run.x, smooth_example()[1].train.of_client(k))) for k in range(7)]
    )


# --- damaged checkpoints ---------------------------------------------------------------------------------------------


def _truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 0x40
    path.write_bytes(bytes(content))


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _other_json(path: Path) -> None:
    path.write_text("{}")


def _without_counts(path: Path) -> None:
    manifest = json.loads(path.read_text())["manifest"]
    manifest.pop("counts")
    path.write_bytes(checkpoint._with_hash(manifest))


def _list(path: Path) -> None:
    path.write_bytes(checkpoint._with_hash([1]))  # type: ignore[arg-type]


DAMAGES: list[tuple[str, Callable[[Path], None]]] = [
    ("round-00000004.safetensors", _truncate),
    ("round-00000004.safetensors", _flip),
    ("round-00000004.safetensors", Path.unlink),
    ("round-00000004.safetensors", _empty),
    ("clients-00000004-0.safetensors", _truncate),
    ("clients-00000004-0.safetensors", _flip),
    ("clients-00000004-0.safetensors", Path.unlink),
    ("round-00000004.json", _truncate),
    ("round-00000004.json", _flip),
    ("round-00000004.json", _empty),
    ("round-00000004.json", _other_json),
    ("round-00000004.json", _without_counts),
    ("round-00000004.json", _list),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES, ids=[f"{d.__name__} {n}" for n, d in DAMAGES])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    straight: fs.Run, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    train(4, out=tmp_path / "run")
    damage(tmp_path / "run" / "checkpoint" / name)
    with pytest.warns(UserWarning, match=r"round-00000004\.json is damaged .*falling back"):
        run = train(6, out=tmp_path / "run", resume=True)
    assert_same(run, straight)
    assert_same(train(6, out=tmp_path / "run", resume=True), straight)


def test_a_damaged_digit_in_the_counts_is_noticed(straight: fs.Run, tmp_path: Path) -> None:
    train(4, out=tmp_path / "run")
    path = tmp_path / "run" / "checkpoint" / "round-00000004.json"
    text = path.read_text()
    steps = json.loads(text)["manifest"]["counts"]["steps"]
    path.write_text(text.replace(f'"steps": {steps}', f'"steps": {steps + 1}'))
    with pytest.warns(UserWarning, match="does not match its checksum"):
        run = train(6, out=tmp_path / "run", resume=True)
    assert_same(run, straight)


def checkpoints(folder: Path) -> list[int]:
    """The rounds that have a checkpoint."""
    return sorted(int(p.stem.removeprefix("round-")) for p in (folder / "checkpoint").glob("round-*.json"))


def test_without_any_good_checkpoint_the_run_stops_and_nothing_is_removed(tmp_path: Path) -> None:
    train(4, out=tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoint").glob("*.json"):
        _empty(path)
    before = contents(tmp_path / "run")
    with pytest.raises(
        fs.FedstrataError, match=r"All checkpoints in .* are damaged: .* restore the directory from a copy, or start"
    ):
        train(6, out=tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == before


def test_a_checkpoint_that_cannot_be_read_now_is_not_a_damaged_one(
    straight: fs.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(4, out=tmp_path / "run")
    before = contents(tmp_path / "run")
    read = Path.read_bytes

    def too_many_files(path: Path) -> bytes:
        if "checkpoint" in str(path):
            raise OSError(24, "Too many open files")
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", too_many_files)
        with pytest.raises(fs.FedstrataError, match=r"cannot be read: .*Too many open files"):
            train(6, out=tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == before
    assert_same(train(6, out=tmp_path / "run", resume=True), straight)


def test_a_second_process_is_kept_out_of_a_run(tmp_path: Path) -> None:
    train(2, out=tmp_path / "run")
    first = RunDirectory(tmp_path / "run")
    first._lock()
    with pytest.raises(fs.InputError, match="Another process is using the run directory"):
        train(4, out=tmp_path / "run", resume=True)
    first.close()
    assert train(4, out=tmp_path / "run", resume=True).summary["round"] == 4


def test_a_first_row_cut_off_by_a_kill_is_replaced(tmp_path: Path) -> None:
    train(2, out=tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoint").iterdir():
        path.unlink()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"round": 0, "ste')
    run = train(2, out=tmp_path / "run", resume=True)
    assert RunDirectory(tmp_path / "run").metrics.read() == run.history


def test_a_run_of_another_format_is_not_resumed(tmp_path: Path) -> None:
    """Neither one of an older version, which wrote no format down, nor one of a newer."""
    train(2, out=tmp_path / "run")
    path = tmp_path / "run" / "config.toml"
    text = path.read_text()
    assert 'version = "0.2.0"\nformat = 2\n' in text
    for other, wanted in (("format = 7", "fedstrata 0.2.0, in format 7"), ("", "fedstrata 0.1.0, in format 1")):
        old = text.partition("[written_by]")[0] if not other else text.replace("format = 2", other)
        path.write_text(old)
        with pytest.raises(fs.InputError, match=f"was written by {wanted}. .* resumes runs of format 2"):
            train(4, out=tmp_path / "run", resume=True)
        assert path.read_text() == old
    path.write_text(text)
    assert train(4, out=tmp_path / "run", resume=True).history[-1]["round"] == 4


@pytest.mark.parametrize("wrong", ["written_by = 3", "[written_by]\nversion = '0.2.0'", "[written_by]\nformat = 2"])
def test_a_config_without_its_format_is_named(tmp_path: Path, wrong: str) -> None:
    train(1, out=tmp_path / "run")
    path = tmp_path / "run" / "config.toml"
    tables = path.read_text().partition("[written_by]")[0]
    path.write_text(f"{tables}\n{wrong}" if "[" in wrong else f"{wrong}\n{tables}")
    with pytest.raises(fs.InputError, match=r"The key written_by must be a table .*config.toml"):
        train(2, out=tmp_path / "run", resume=True)


@pytest.mark.parametrize("line", ["{}", '{"round": 1}', "7"])
def test_a_damaged_line_of_faults_is_named(tmp_path: Path, line: str) -> None:
    faults = fs.Faults(quorum=0.1, inject=fs.Inject(drop=0.3))
    train(3, out=tmp_path / "run", faults=faults)
    path = tmp_path / "run" / "faults.jsonl"
    good = path.read_text()
    path.write_text(f"{line}\n{good}")
    with pytest.warns(UserWarning, match=r"Line 1 of .*faults.jsonl is damaged and left out"):
        train(3, out=tmp_path / "run", faults=faults, resume=True)
    assert path.read_text() == good


FAULTY = fs.Faults(quorum=0.1, inject=fs.Inject(drop=0.4))

DAMAGES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "emptied": lambda lines: [],
    "cut within a line": lambda lines: [*lines[:2], lines[2][:9]],
    "cut after a line": lambda lines: lines[:2],
    "without its first line": lambda lines: lines[1:],
    "without a line": lambda lines: [*lines[:1], *lines[2:]],
    "with a line twice": lambda lines: [*lines[:2], *lines[1:]],
    "with two lines exchanged": lambda lines: [lines[1], lines[0], *lines[2:]],
    "with another round": lambda lines: [lines[0].replace(b'"round": ', b'"round": 1'), *lines[1:]],
    "with another number": lambda lines: [*lines[:-1], re.sub(rb"(\d)([,}])", rb"\g<1>1\2", lines[-1], count=2)],
}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four rounds that left clients out."""
    folder = tmp_path_factory.mktemp("faulty") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedstrata.training.plots.plot", lambda *_, **__: None)
        train(4, out=folder, faults=FAULTY)
    return folder


@pytest.mark.parametrize(
    ("damage", "name"), [(damage, name) for damage in DAMAGES for name in ("metrics.jsonl", "faults.jsonl")]
)
def test_a_log_that_was_changed_is_restored_or_named(damage: str, name: str, faulty: Path, tmp_path: Path) -> None:
    shutil.copytree(faulty, tmp_path / "run")
    path = tmp_path / "run" / name
    good = path.read_bytes()
    path.write_bytes(b"".join(DAMAGES[damage](good.splitlines(keepends=True))))
    assert path.read_bytes() != good
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(4, out=tmp_path / "run", faults=FAULTY, resume=True)
    said = [str(warning.message) for warning in caught]
    assert path.read_bytes() == good or any(str(path) in line for line in said), said


def test_a_client_that_does_not_exist_is_not_counted_as_left_out(faulty: Path, tmp_path: Path) -> None:
    shutil.copytree(faulty, tmp_path / "run")
    path = tmp_path / "run" / "faults.jsonl"
    row = json.loads(path.read_text().splitlines()[0])
    path.write_text(json.dumps(row | {"client": 10**6}) + "\n" + json.dumps(row | {"client": -1}) + "\n")
    with pytest.warns(UserWarning, match=r"faults\.jsonl was changed: it has 2 rows up to round 4, but other ones"):
        run = train(4, out=tmp_path / "run", faults=FAULTY, resume=True)
    assert run.summary["left_out"] == {}


def test_a_resumed_run_says_after_which_round_and_what_it_dropped(tmp_path: Path) -> None:
    class Listener(fs.Callback):
        def on_start(self, title: str, done: int, rounds: int, note: str) -> None:
            notes.append(note)

        def on_round(self, round: int, state: Any) -> None:
            if round == 5 and len(notes) == 1:
                raise KeyboardInterrupt

    notes: list[str] = []
    options = {"checkpoint_every": 2, "eval_every": 1, "out": tmp_path / "run", "callbacks": [Listener()]}
    with pytest.raises(KeyboardInterrupt):
        train(6, **options)
    Rows(tmp_path / "run" / "metrics.jsonl").append({"round": 5, "loss": 1.0})
    train(6, **options, resume=True)
    assert "resumed" not in notes[0] and notes[1].endswith(", resumed after round 4 (1 later row dropped)")


def test_what_a_kill_left_half_written_is_removed(tmp_path: Path) -> None:
    train(2, out=tmp_path / "run")
    (tmp_path / "run" / ".metrics.jsonl.123.tmp").write_text("half")
    train(3, out=tmp_path / "run", resume=True)
    assert not list((tmp_path / "run").rglob("*.tmp"))


def test_an_overflowed_loss_is_a_divergence_though_x_is_finite(tmp_path: Path) -> None:
    q = fs.quadratic()
    with pytest.raises(fs.Diverged, match=r"fedavg diverged in round \d+: the loss is NaN or infinite"):
        fs.train(q.problem, q.data, fs.FedAvg(lr=0.9), rounds=60, eval_every=1)


class Trace(NamedTuple):
    x: torch.Tensor
    last: tuple[torch.Tensor, ...]


def test_a_state_with_tuples_is_resumed(tmp_path: Path) -> None:
    """Twelve vectors in a tuple, which files sort by name: 0, 1, 10, 11, 2."""

    class Traces(fs.Algorithm):
        name = "traces"

        def start(self, x: torch.Tensor, y: torch.Tensor, clients: fs.Clients) -> Trace:
            return Trace(x, tuple(x[:1] + i for i in range(12)))

        def round(self, s: Trace, clients: fs.Clients) -> Trace:
            return Trace(s.x + s.last[3], (*s.last[1:], s.x[:1]))

    try:
        q = fs.quadratic(clients=2)
        straight = fs.train(q.problem, q.data, Traces(), rounds=9)
        for rounds in (4, 9):
            run = fs.train(q.problem, q.data, Traces(), rounds=rounds, out=tmp_path / "run", resume=True)
        assert torch.equal(run.x, straight.x)
    finally:
        ALGORITHMS.pop("traces")


class Longer(NamedTuple):
    x: torch.Tensor
    trace: torch.Tensor


def _another_state(self, x, y, clients) -> Longer:  # type: ignore[no-untyped-def]
    return Longer(x, x)


def _half(self, s):  # type: ignore[no-untyped-def]
    return s.x[:2], None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"start": _another_state}, r"has fields x, y, but the state of odd has trace, x\."),
        ({"solution": _half}, r"has a solution x of 2 numbers, but x of the problem quadratic has 5\."),
    ],
)
def test_a_checkpoint_of_another_state_says_what_differs(
    changed: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd(fs.Algorithm):
        name = "odd"

        def round(self, s: Any, clients: fs.Clients) -> Any:
            return s

    q = fs.quadratic(clients=2, dimension=5)
    try:
        fs.train(q.problem, q.data, Odd(), rounds=2, out=tmp_path / "run")
        for name, method in changed.items():
            monkeypatch.setattr(Odd, name, method)
        with pytest.raises(fs.InputError, match=rf"^The checkpoint {message} .* start a new run.*run\)$"):
            fs.train(q.problem, q.data, Odd(), rounds=3, out=tmp_path / "run", resume=True)
    finally:
        ALGORITHMS.pop("odd")


def test_warnings_of_a_resumed_run_point_at_its_caller(tmp_path: Path) -> None:
    train(2, out=tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    problem, data = smooth_example()
    with pytest.warns(UserWarning, match="lacks 3 of the 3 rows") as caught:
        fs.train(problem, data, SCAFFOLD, rounds=2, out=tmp_path / "run", resume=True, **OPTIONS)
    assert [warning.filename for warning in caught] == [__file__]


def test_tensors_that_share_memory_are_written_under_each_name(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    tensors = {"a": base, "b": base, "c": base[2:4], "d": base.view(2, 3).T, "empty": base[:0], "none": base[:0]}
    (tmp_path / "file").write_bytes(checkpoint.to_safetensors(tensors))
    saved = load_file(tmp_path / "file")
    assert saved.keys() == tensors.keys() and all(torch.equal(saved[name], tensors[name]) for name in tensors)


class Unannotated(NamedTuple):
    x: torch.Tensor
    parts: tuple[torch.Tensor, ...] = ()


def _no_annotation(self, x, y, clients):  # type: ignore[no-untyped-def]
    return Unannotated(x, (x,))


def _wrong_annotation(self, x, y, clients) -> fs.State:  # type: ignore[no-untyped-def]
    return Unannotated(x, (x,))  # type: ignore[return-value]


def _unknown_annotation(self, x, y, clients) -> Nowhere:  # type: ignore[no-untyped-def, name-defined]  # noqa: F821
    return Unannotated(x, (x,))


def _empty_tuple(self, x, y, clients) -> Unannotated:  # type: ignore[no-untyped-def]
    return Unannotated(x)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (_no_annotation, r"def start\(self, x, y, clients\) -> Unannotated\. Got no annotation\."),
        (_wrong_annotation, r"def start\(self, x, y, clients\) -> Unannotated\. Got State\."),
        (_unknown_annotation, r"The annotations of start of odd cannot be read: name 'Nowhere' is not defined\."),
        (_empty_tuple, "The tuple parts in the state of odd is empty"),
    ],
)
def test_a_state_that_a_checkpoint_cannot_restore_is_refused_at_the_start(
    start: Any, message: str, tmp_path: Path
) -> None:
    class Odd(fs.Algorithm):
        name = "odd"

        def round(self, s: Any, clients: fs.Clients) -> Any:
            return s

    Odd.start = start  # type: ignore[method-assign]
    try:
        q = fs.quadratic(clients=2)
        fs.train(q.problem, q.data, Odd(), rounds=1)  # without a directory there are no checkpoints
        with pytest.raises(fs.FedstrataError, match=message):
            fs.train(q.problem, q.data, Odd(), rounds=1, out=tmp_path / "run")
    finally:
        ALGORITHMS.pop("odd")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda s: s._replace(x=s.x[:2]), r"round of odd must return a State of \{'x': \(5,\).* Got \{'x': \(2,\)"),
        (lambda s: s.x, "The state of odd must be a NamedTuple of tensors. Got Tensor"),
        (lambda s: s._replace(x=1.0), r"must be a NamedTuple of tensors. Got \{'x': 'float'"),
        (
            lambda s: s._replace(x=s.x.float()),
            r"^round of odd must return a State whose x is torch.float64. Got torch.float32.*\(round 1\)$",
        ),
        (
            lambda s: s._replace(x=s.x.long()),
            r"^round of odd must return a State whose x is torch.float64. Got torch.int64",
        ),
    ],
)
def test_a_round_must_return_the_state_that_it_got(wrong: Any, message: str) -> None:
    class Odd(fs.Algorithm):
        name = "odd"

        def round(self, s: fs.State, clients: fs.Clients) -> Any:
            return wrong(s)

    try:
        q = fs.quadratic(clients=2, dimension=5)
        with pytest.raises(fs.FedstrataError, match=message):
            fs.train(q.problem, q.data, Odd(), rounds=2)
    finally:
        ALGORITHMS.pop("odd")


def test_a_start_must_have_the_dtype_of_the_problem() -> None:
    class Odd(fs.Algorithm):
        name = "odd"

        def start(self, x: torch.Tensor, y: torch.Tensor, clients: fs.Clients) -> fs.State:
            return fs.State(x.float(), y)

        def round(self, s: fs.State, clients: fs.Clients) -> Any:
            return s

    try:
        q = fs.quadratic(clients=2, dimension=5)
        with pytest.raises(
            fs.FedstrataError, match=r"^start of odd must return a State whose x is torch.float64. Got torch.float32"
        ):
            fs.train(q.problem, q.data, Odd(), rounds=2)
    finally:
        ALGORITHMS.pop("odd")


def test_a_method_without_a_mark_is_named_once() -> None:
    class Odd(fs.Algorithm):
        name = "odd"

        def round(self, s: fs.State, clients: fs.Clients) -> fs.State:
            return s._replace(
                x=s.x - 0.1 * clients.choose(1).mean(self.local, s.x) - 0.1 * clients.mean(self.local, s.x)
            )

        def local(self, client: fs.Client, x: torch.Tensor) -> torch.Tensor:
            return client.grads(x, client.draw())

    try:
        with pytest.warns(UserWarning, match="mark it with @fs.remote, or nodes will refuse to run it") as caught:
            train(3, Odd())
        assert [str(w.message).partition(":")[0] for w in caught] == ["local of odd runs on clients"]
    finally:
        ALGORITHMS.pop("odd")


ODD_ANSWERS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "double": (torch.Tensor.double, r"dtype of x, torch.float32, or .* Got torch.float64. \(in local of odd, round 1"),
    "half": (torch.Tensor.half, r"dtype of x, torch.float32, or .* Got torch.float16. \(in local of odd, round 1"),
    "complex": (lambda x: x + 0j, r"dtype of x, torch.float32, or .* Got torch.complex64. \(in local of odd, round 1"),
    "integers": (
        torch.Tensor.long,
        r"^round of odd .* whose x is torch.float32. Got torch.float64. The mean of whole numbers",
    ),
    "bools": (
        torch.Tensor.bool,
        r"^round of odd .* whose x is torch.float32. Got torch.float64. The mean of whole numbers",
    ),
}


@pytest.mark.parametrize("policy", [None, fs.Faults()], ids=["plain", "watched"])
@pytest.mark.parametrize("case", ODD_ANSWERS)
def test_an_answer_has_the_dtype_of_the_vector(case: str, policy: fs.Faults | None) -> None:
    convert, message = ODD_ANSWERS[case]

    class Odd(fs.Algorithm):
        name = "odd"

        def round(self, s: fs.State, clients: fs.Clients) -> fs.State:
            return s._replace(x=s.x + clients.mean(self.local, s.x))

        @fs.remote
        def local(self, client: fs.Client, x: torch.Tensor) -> torch.Tensor:
            return convert(client.grads(x, client.draw()))

    try:
        problem, data = example_for(fs.FedAvg, torch.float32)
        with pytest.raises(fs.FedstrataError, match=message):
            fs.train(problem, data, Odd(), rounds=2, batch_size=4, faults=policy)
    finally:
        ALGORITHMS.pop("odd")


@pytest.mark.parametrize("what", ["data", "test data", "start"])
def test_another_run_of_the_same_shape_is_not_resumed(what: str, tmp_path: Path) -> None:
    def run(change: bool, **options: object) -> None:
        torch.manual_seed(1 if change and what == "start" else 0)
        shift = 1.0 if change and what == "data" else 0.0
        test = (np.full((3, 2), float(change and what == "test data")), np.array([0, 1, 0]))
        data = fs.FederatedData.from_arrays([(np.ones((4, 2)) + shift, np.arange(4) % 2)], test=test)
        fs.train(fs.erm(torch.nn.Linear(2, 2)), data, fs.FedAvg(), rounds=2, out=tmp_path / "run", **options)

    run(False)
    run(False, resume=True)
    with pytest.raises(fs.InputError, match=r"cannot be resumed with other settings: digest\."):
        run(True, resume=True)


def test_classes_are_needed_for_stratified_batches() -> None:
    q = fs.quadratic()
    with pytest.raises(fs.InputError, match="'stratified' needs classes"):
        fs.train(q.problem, q.data, fs.FedAvg(), rounds=1, batch_size=4, sampling="stratified")


def test_balanced_batches_need_a_problem_that_takes_weights_and_classes_and_room_for_them(tmp_path: Path) -> None:
    q = fs.quadratic()
    options: dict[str, Any] = {"rounds": 1, "sampling": "balanced"}
    wants = r"must be one of uniform, epochs, stratified: the problem quadratic takes no sample weights\. Got 'balan"
    with pytest.raises(fs.InputError, match=wants):
        fs.train(q.problem, q.data, fs.FedAvg(), batch_size=4, **options)
    regression = fs.FederatedData.from_arrays([(np.ones((4, 2)), np.ones(4))])
    with pytest.raises(fs.InputError, match="'balanced' needs classes"):
        fs.train(fs.erm(nn.Linear(2, 1), "squared"), regression, fs.FedAvg(), batch_size=4, **options)
    inputs = np.random.default_rng(0).normal(size=(40, 2))
    data = fs.Dataset.from_arrays(inputs, np.arange(40) % 2).split("iid", clients=2)
    one_class = replace(data, support=Part.of(data.train.arrays, [np.arange(0, 40, 2)] * 2))
    # Robust learning draws nothing for its outer function, and its level draws from the support rows.
    fs.train(fs.robust(nn.Linear(2, 2)), one_class, fs.ComFedL(), batch_size=1, **options)
    for problem, these in ((fs.maml(nn.Linear(2, 2)), one_class), (fs.robust(nn.Linear(2, 2)), data)):
        with pytest.raises(fs.InputError, match=r"batch_size must be at least 2, the number of classes of client 0"):
            fs.train(problem, these, fs.ComFedL(), batch_size=1, out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def repeated_rows(counts: list[list[int]]) -> fs.FederatedData:
    """Clients with so many rows of each class, all rows of a class the same: a balanced batch has all of them."""
    generator = np.random.default_rng(0)
    pairs = []
    for own in counts:
        inputs, targets = generator.normal(size=(len(own), 3)), np.arange(len(own))
        pairs.append((np.repeat(inputs, own, axis=0), np.repeat(targets, own)))
    return fs.FederatedData.from_arrays(pairs, classes=3)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("name", ["erm", "robust", "maml", "damaml", "agnostic"])
def test_weights_undo_what_balanced_batches_do(name: str, chunk: int) -> None:
    module = softmax_problem(classes=3).flat.module  # type: ignore[union-attr]
    comfedl = fs.ComFedL()
    problem, algorithm = {
        "erm": (fs.erm(module), fs.FedAvg(lr=0.5, steps=3)),
        "robust": (fs.robust(module), comfedl),
        "maml": (fs.maml(module, 0.3, steps=2), comfedl),
        "damaml": (fs.damaml(module, 0.3), comfedl),
        "agnostic": (fs.agnostic(module, 4), fs.AFL(lr=0.5)),
    }[name]
    data = repeated_rows([[30, 1, 2], [5, 5, 1], [0, 9, 0], [1, 1, 1]])
    runs = [
        fs.train(problem, data, algorithm, rounds=4, chunk=chunk, **options)
        for options in ({"batch_size": 5, "sampling": "balanced"}, {"batch_size": None}, {"batch_size": 5})
    ]
    torch.testing.assert_close(runs[0].x, runs[1].x, atol=1e-12, rtol=0)
    assert (runs[1].x - runs[2].x).abs().max() > 1e-4
    assert (runs[1].x - problem.x0).abs().max() > 1e-2


def test_an_evaluation_that_cannot_be_made_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    q = fs.quadratic()
    problem, data, algorithm = q.problem, q.data, fs.FedAvg()
    with pytest.raises(fs.InputError, match="no held-out test data"):
        fs.train(problem, data, algorithm, rounds=1, evaluate=fs.Evaluation("test"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Shaky(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = torch.nn.Linear(2, 2), kind
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.kind == "random numbers":
            inputs = torch.nn.functional.dropout(inputs, 0.5)
        else:
            self.calls += 1
        return self.linear(inputs)


@pytest.mark.parametrize("kind", ["random numbers", "buffers"])
def test_a_model_that_is_not_a_pure_function_is_refused(kind: str) -> None:
    data = fs.FederatedData.from_arrays([(np.ones((4, 2)), np.arange(4) % 2)])
    with pytest.raises(fs.InputError, match=f"{kind}, so it is not a pure function of its weights"):
        fs.train(fs.erm(Shaky(kind)), data, fs.FedAvg(), rounds=1)


def test_a_loss_that_averages_by_itself_is_refused() -> None:
    data = fs.FederatedData.from_arrays([(np.ones((4, 2)), np.arange(4) % 2)])
    with pytest.raises(fs.InputError, match="one number per sample: pass reduction='none' to torch losses"):
        fs.train(fs.erm(torch.nn.Linear(2, 2), torch.nn.CrossEntropyLoss()), data, fs.FedAvg(), rounds=1)
    fs.train(fs.erm(torch.nn.Linear(2, 2), torch.nn.CrossEntropyLoss(reduction="none")), data, fs.FedAvg(), rounds=1)


def test_the_last_checkpoint_that_reached_the_disk_is_the_last_resort(straight: fs.Run, tmp_path: Path) -> None:
    """A power failure may take all that was not forced to the disk; the first checkpoint always is."""
    train(5, out=tmp_path / "run")
    for name in ("round-00000005.safetensors", "round-00000004.safetensors"):
        _empty(tmp_path / "run" / "checkpoint" / name)
    with pytest.warns(UserWarning, match="is damaged") as caught:
        run = train(6, out=tmp_path / "run", resume=True)
    assert len(caught) == 2
    assert_same(run, straight)


@pytest.mark.parametrize(("seconds", "kept"), [(0.0, [5, 6]), (1e9, [1, 5, 6])], ids=["each forced", "first forced"])
def test_two_checkpoints_and_the_last_durable_one_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, kept: list[int]
) -> None:
    monkeypatch.setattr(checkpoint, "DURABLE_SECONDS", seconds)
    train(6, fs.FedAvg(lr=0.1, steps=2), out=tmp_path / "run")
    assert checkpoints(tmp_path / "run") == kept
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoint").iterdir())
    assert names == [f"round-0000000{r}.{kind}" for r in kept for kind in ("json", "safetensors")]


def test_a_trimmed_mean_of_too_few_answers_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    faults = fs.Faults(quorum=1, inject=fs.Inject(drop=0.6))
    channel = fs.Channel(reduce="trimmed_mean")
    message = (
        r"drops 1 of the clients at each end, but only [12] answered.*The last good checkpoint is kept in .*run\.$"
    )
    with pytest.raises(fs.QuorumError, match=message):
        train(30, fs.FedAvg(), channel=channel, faults=faults, participation=1.0, out=tmp_path / "run")
    with pytest.raises(fs.InputError, match="but only 2 answered"):
        train(1, fs.FedAvg(), channel=channel, faults=fs.Faults(), participation=2)


# --- the run directory -----------------------------------------------------------------------------------------------


def test_the_run_directory_holds_everything(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = train(3, out=folder)
    assert {p.name for p in folder.iterdir()} == {
        "config.toml",
        "metrics.jsonl",
        "summary.json",
        "model.safetensors",
        "solution.safetensors",
        "checkpoint",
        "plot.png",
    }
    config = tomllib.loads((folder / "config.toml").read_text())
    assert config["train"]["rounds"] == 3
    assert config["train"]["participation"] == 3
    assert config["algorithm"] == SCAFFOLD.to_table()
    assert config["data"]["clients"] == 7
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows == run.history
    assert {"round", "steps", "samples", "bytes_up", "bytes_down", "seconds", "loss", "accuracy"} <= set(rows[0])
    assert rows[0]["steps"] == rows[0]["samples"] == rows[0]["bytes_up"] == 0
    assert [r["steps"] for r in rows] == [0, 3, 6, 9]
    assert [r["samples"] for r in rows] == [0, 36, 72, 108]  # 3 clients, 3 steps, batches of 4
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == run.summary
    assert summary["status"] == "finished"
    assert summary["loss"] == rows[-1]["loss"]
    assert summary["measured_on"] == {"pooled": "training data", "clients": "training data"}
    assert len(summary["per_client"]["loss"]) == 7
    assert np.mean(summary["per_client"]["loss"]) == pytest.approx(rows[-1]["loss_mean"])
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_saved_model_loads_into_the_module(tmp_path: Path) -> None:
    model = nn.Linear(4, 3, dtype=torch.float64)
    _, data = smooth_example()
    run = fs.train(fs.erm(model), data, fs.FedAvg(), rounds=2, out=tmp_path / "run")
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    assert torch.equal(torch.cat([p.detach().reshape(-1) for p in model.parameters()]), run.x)
    trained = run.model()
    inputs = torch.ones(2, 4, dtype=torch.float64)
    assert torch.equal(trained(inputs), model(inputs))


class Tied(nn.Module):
    """Layers that share trainable weights, frozen weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.d, self.out = nn.Linear(4, 4, bias=False), nn.Linear(4, 3)
        self.b.weight = self.a.weight
        self.c.weight.requires_grad_(False)
        self.d.weight = self.c.weight
        self.register_buffer("scale", self.c.weight[0])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.b(self.a(inputs).relu())
        out: torch.Tensor = self.out(self.d(self.c(hidden)) * self.scale)
        return out


def test_a_model_with_tied_weights_is_saved_and_resumed(tmp_path: Path) -> None:
    problem, data = fs.erm(Tied().double()), smooth_example()[1]
    for rounds in (1, 2):
        run = fs.train(
            problem, data, fs.FedAvg(steps=1), rounds=rounds, batch_size=4, out=tmp_path / "run", resume=True
        )
    model = Tied().double()
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    expected = run.model().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.b.weight, model.a.weight) and not torch.equal(model.a.weight, problem.x0[:16].view(4, 4))


@pytest.mark.parametrize("algorithm", [SCAFFOLD, fs.MFCGD(average=True, gamma=0.02), fs.LocalSGDA()])
def test_a_problem_without_a_model_saves_its_solution(algorithm: fs.Algorithm, tmp_path: Path) -> None:
    make = {"scaffold": fs.quadratic, "mfcgd": fs.composition, "local_sgda": fs.quadratic_saddle}[algorithm.name]
    q = make(clients=3)
    run = fs.train(q.problem, q.data, algorithm, rounds=3, out=tmp_path / "run")
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.equal(saved.pop("x"), run.x)
    assert torch.equal(saved.pop("y"), run.y) if run.y is not None else "y" not in saved
    assert not saved
    with pytest.raises(fs.InputError, match="has no model"):
        run.model()


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    train(2, out=tmp_path / "run")
    before = contents(tmp_path / "run")
    with pytest.raises(fs.InputError, match=r"exists and is not empty. Nothing was overwritten. .*resume=True"):
        train(3, out=tmp_path / "run")
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_of_something_else_is_not_touched(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(fs.InputError, match="contains no fedstrata run"):
        train(2, out=tmp_path, resume=resume)
    assert contents(tmp_path) == {"thesis.tex": b"years of work"}


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(fs.InputError, match="is a file"):
        train(2, out=tmp_path / "run")
    assert (tmp_path / "run").read_text() == "a file"


def test_an_empty_directory_may_be_used(straight: fs.Run, tmp_path: Path) -> None:
    assert_same(train(6, out=tmp_path), straight)


@pytest.mark.parametrize(
    "algorithm",
    [*(kind() for kind in ALGORITHMS.values()), fs.FedAvg(lr=fs.StepDecay(0.1, at=(0.5, 9)), steps=fs.Epochs(1.5))],
    ids=lambda a: a.name,
)
def test_a_described_algorithm_can_be_built_again(algorithm: fs.Algorithm) -> None:
    table = json.loads(json.dumps(algorithm.to_table()))
    assert fs.algorithm(table.pop("name"), **table) == algorithm


# --- divergence ------------------------------------------------------------------------------------------------------


def exploding() -> tuple[fs.Problem, fs.FederatedData]:
    """A quartic: gradient descent from 2 with rate 1 leaves every bound within a few rounds."""

    def outer(x: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return (x**4).sum() + 0 * batch[0].sum()

    problem = fs.Problem(outer, torch.full((3,), 2.0, dtype=torch.float64), name="quartic")
    return problem, fs.FederatedData.from_arrays([(np.zeros((2, 1)), np.zeros((2, 1)))] * 2)


def test_divergence_names_the_round_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    problem, data = exploding()
    algorithm = fs.FedAvg(lr=1.0, steps=1)
    x, good = 2.0, 0
    while np.isfinite(x):
        with np.errstate(over="ignore"):
            x = float(x - 4 * np.float64(x) ** 3)
        good += 1
    ended: list[object] = []

    class Watch(fs.Callback):
        def on_end(self, run: fs.Run | None) -> None:
            ended.append(run)

    with pytest.raises(fs.Diverged) as diverged:
        fs.train(problem, data, algorithm, rounds=50, out=tmp_path / "run", callbacks=[Watch()])
    assert f"fedavg diverged in round {good}: 3 of 3 entries of x are NaN or infinite" in str(diverged.value)
    assert str(diverged.value).endswith(f"The last good checkpoint is kept in {tmp_path / 'run'}.")
    assert ended == [None]
    newest = max((tmp_path / "run" / "checkpoint").glob("*.json"))
    assert newest.name == f"round-{good - 1:08d}.json"
    assert torch.isfinite(load_file(newest.with_suffix(".safetensors"))["x"]).all()
    marker = tmp_path / "run" / "diverged.json"
    assert json.loads(marker.read_text()) == {"round": good, "error": str(diverged.value)}
    assert RunDirectory(tmp_path / "run").diverged
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


# --- callbacks and evaluation ----------------------------------------------------------------------------------------


def test_callbacks_hear_everything_in_order() -> None:
    heard: list[tuple[Any, ...]] = []

    class Listen(fs.Callback):
        def on_start(self, title: str, done: int, rounds: int, note: str) -> None:
            heard.append(("start", title, done, rounds, note))

        def on_round(self, round: int, state: fs.State) -> None:
            heard.append(("round", round, float(state.x.sum())))

        def on_evaluation(self, row: dict[str, Any]) -> None:
            heard.append(("evaluation", row["round"]))

        def on_end(self, run: fs.Run | None) -> None:
            assert run is not None
            heard.append(("end", float(run.x.sum())))

    run = train(3, eval_every=2, callbacks=[Listen()])
    assert [h[:2] for h in heard[:-1]] == [
        ("start", "scaffold"),
        ("evaluation", 0),
        ("round", 1),
        ("round", 2),
        ("evaluation", 2),
        ("round", 3),
        ("evaluation", 3),
    ]
    assert heard[0][2:4] == (0, 3)
    assert "7 clients" in heard[0][4]
    assert "2 at a time" in heard[0][4]
    assert heard[-1] == ("end", float(run.x.sum()))
    assert heard[-3][2] == float(run.x.sum())


def test_an_exception_in_a_callback_stops_the_run_and_ends_it() -> None:
    ended: list[object] = []

    class Fail(fs.Callback):
        def on_round(self, round: int, state: fs.State) -> None:
            raise RuntimeError("enough")

        def on_end(self, run: fs.Run | None) -> None:
            ended.append(run)

    with pytest.raises(RuntimeError, match="enough"):
        train(3, callbacks=[Fail()])
    assert ended == [None]


def test_a_custom_evaluation_is_what_is_recorded(tmp_path: Path) -> None:
    def evaluate(
        problem: fs.Problem, data: fs.FederatedData, x: torch.Tensor, y: torch.Tensor | None
    ) -> dict[str, float]:
        assert y is None
        assert data.clients == 7
        return {"norm": float(x.norm()), "nothing": float("nan"), "too much": float("inf")}

    run = train(3, evaluate=evaluate, out=tmp_path / "run")
    assert run.history[-1]["norm"] == float(run.x.norm())
    assert {"nothing", "too much", "loss"}.isdisjoint(run.history[-1])
    assert "measured_on" not in run.summary


BAD_MEASURES: list[tuple[Any, str]] = [
    (None, r"The result of evaluate must be a table of numbers by name, \{'loss': 0\.5\}\. Got 'NoneType'\."),
    ({"loss": "low"}, r"The measure 'loss' of evaluate must be a number\. Got 'low'\."),
    ({"loss": torch.ones(2)}, r"The measure 'loss' of evaluate must be a number\. Got tensor"),
    ({1: 0.5}, r"The result of evaluate must be a table of numbers by name"),
    ({"round": 7.5}, r"The name of a measure must be different from those of the row: round, .* Got 'round'\."),
    ({"seconds": 7.5}, r"Got 'seconds'\. \(evaluate\)"),
]


@pytest.mark.parametrize(("measures", "message"), BAD_MEASURES)
def test_what_is_not_a_measure_is_refused(measures: Any, message: str) -> None:
    with pytest.raises(fs.InputError, match=message):
        train(2, evaluate=lambda *_: measures)


def test_a_measure_may_be_anything_that_is_one_number() -> None:
    measures = {"a": np.float32(0.5), "b": torch.tensor(0.5), "c": True, "finite": 3}
    row = train(1, evaluate=lambda *_: measures).history[-1]
    assert {name: row[name] for name in measures} == {"a": 0.5, "b": 0.5, "c": 1.0, "finite": 3.0}


def test_settings_that_are_none_are_the_defaults(straight: fs.Run) -> None:
    assert_same(train(6, settings=None), straight)


@pytest.mark.parametrize(
    ("rounds", "eval_every", "expected"),
    [(1, None, [0, 1]), (7, 3, [0, 3, 6, 7]), (40, None, list(range(0, 41, 2)))],
)
def test_when_evaluations_are_made(rounds: int, eval_every: int | None, expected: list[int]) -> None:
    q = fs.quadratic(clients=2, dimension=2, samples=2)
    run = fs.train(q.problem, q.data, fs.FedAvg(lr=0.01, steps=1), rounds=rounds, eval_every=eval_every)
    assert [row["round"] for row in run.history] == expected


def test_threads_are_set_for_the_run_only() -> None:
    seen: list[int] = []

    class Watch(fs.Callback):
        def on_round(self, round: int, state: fs.State) -> None:
            seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    train(1, threads=2, callbacks=[Watch()])
    assert seen == [2]
    assert torch.get_num_threads() == before


def test_the_callers_problem_and_data_are_left_alone() -> None:
    problem, data = smooth_example(torch.float32)
    x0, inputs = problem.x0.clone(), data.train.arrays[0].clone()
    weights = [p.clone() for p in problem.flat.module.parameters()]
    run = fs.train(problem, data, SCAFFOLD, rounds=2, **OPTIONS)
    assert run.x.dtype == torch.float32
    assert torch.equal(problem.x0, x0)
    assert torch.equal(data.train.arrays[0], inputs)
    assert all(torch.equal(a, b) for a, b in zip(problem.flat.module.parameters(), weights, strict=True))


# --- the same seed ---------------------------------------------------------------------------------------------------


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[2])
from support import smooth_example
import fedstrata as fs
problem, data = smooth_example()
fs.train(problem, data, fs.Scaffold(lr=0.2, steps=3), rounds=6, batch_size=4, participation=3, chunk=2, eval_every=1,
         seed=5, threads=1, out=sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.traced
def test_another_process_with_the_same_seed_writes_the_same_metrics(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), str(Path(__file__).parent)]
    subprocess.run(arguments, check=True, env={**os.environ, "PYTHONHASHSEED": "7"}, timeout=100)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert without_seconds([json.loads(line) for line in lines]) == without_seconds(train(6).history)


def test_another_seed_gives_another_run(straight: fs.Run) -> None:
    assert not torch.equal(train(6, seed=6).x, straight.x)


def test_the_global_random_state_neither_matters_nor_moves(straight: fs.Run) -> None:
    problem, data = smooth_example()
    torch.manual_seed(1)
    np.random.seed(1)
    before, numpy_before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    assert_same(fs.train(problem, data, SCAFFOLD, rounds=6, **OPTIONS), straight)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)


# --- bad arguments ---------------------------------------------------------------------------------------------------


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"rounds": 0}, r"The rounds of the run must be a whole number of at least 1\. Got 0\."),
    ({"rounds": 2.0}, r"The rounds of the run must be a whole number of at least 1\. Got 2\.0\."),
    ({"rounds": True}, r"The rounds of the run must be a whole number of at least 1\. Got True\."),
    ({"rounds": None}, r"The rounds of the run must be a whole number of at least 1\. Got None\."),
    ({"batch_size": 0}, r"The batch_size of the run must be a whole number of at least 1, or left out\. Got 0\."),
    ({"batch_size": 1.5}, r"The batch_size of the run must be a whole number of at least 1, or left out\. Got 1\.5\."),
    ({"threads": 0}, r"The threads of the run must be a whole number from 1 to 1024, or left out\. Got 0\."),
    ({"eval_every": 0}, r"The eval_every of the run must be a whole number of at least 1, or left out\. Got 0\."),
    ({"checkpoint_every": 0}, r"The checkpoint_every of the run must be a whole number of at least 1\. Got 0\."),
    ({"checkpoint_every": None}, r"The checkpoint_every of the run must be a whole number"),
    ({"state_memory": -1}, r"The state_memory of the run must be a whole number of at least 1\. Got -1\."),
    ({"seed": -1}, r"The seed of the run must be a whole number of at least 0\. Got -1\."),
    ({"seed": 0.5}, r"The seed of the run must be a whole number of at least 0\. Got 0\.5\."),
    ({"seed": None}, r"The seed of the run must be a whole number of at least 0\. Got None\."),
    (
        {"participation": 0},
        r"The participation of the run must be a fraction in \(0, 1\] or a whole number of at least 1",
    ),
    ({"participation": 8}, r"The participation must be .* from 1 to 7\. Got 8\."),
    ({"participation": 0.0}, r"The participation of the run must be .* Got 0\.0\."),
    ({"participation": -1}, r"The participation of the run must be .* Got -1\."),
    ({"participation": -0.5}, r"The participation of the run must be .* Got -0\.5\."),
    ({"participation": 1.5}, r"The participation of the run must be .* Got 1\.5\."),
    ({"participation": float("nan")}, r"The participation of the run must be .* Got nan\."),
    ({"participation": "half"}, r"The participation of the run must be .* Got 'half'\."),
    ({"participation": True}, r"The participation of the run must be .* Got True\."),
    ({"participation": None}, r"The participation of the run must be .* Got None\."),
    ({"weighting": "size"}, r"The weighting of the run must be 'uniform' or 'samples'\. Got 'size'\."),
    ({"weighting": None}, r"The weighting of the run must be 'uniform' or 'samples'\. Got None\."),
    ({"sampling": "epoch"}, r"The sampling of the run must be 'uniform', .* Got 'epoch'\. Did you mean 'epochs'\?"),
    ({"sampling": "balanced", "batch_size": 2}, r"batch_size must be at least 3, the number of classes .* Got 2\."),
    ({"sampling": None}, r"The sampling of the run must be 'uniform', .* Got None\."),
    ({"chunk": 0}, r"The chunk of the run must be a whole number of at least 1, or 'auto'\. Got 0\."),
    ({"chunk": True}, r"The chunk of the run must be a whole number of at least 1, or 'auto'\. Got True\."),
    ({"chunk": "large"}, r"The chunk of the run must be a whole number of at least 1, or 'auto'\. Got 'large'\."),
    ({"chunk": 2.5}, r"The chunk of the run must be a whole number of at least 1, or 'auto'\. Got 2\.5\."),
    ({"chunk": None}, r"The chunk of the run must be a whole number of at least 1, or 'auto'\. Got None\."),
    ({"device": "abacus"}, r"The device 'abacus' cannot be used"),
    ({"device": None}, r"The device of the run must be text"),
    ({"algorithm": fs.FedAvg}, r"The algorithm must be an Algorithm, e\.g\. fs\.FedAvg\(lr=0\.1\)"),
    ({"algorithm": "fedavg"}, r"The algorithm must be an Algorithm"),
    ({"problem": nn.Linear(4, 3)}, r"The problem must be a fedstrata Problem, e\.g\. fs\.erm\(model\)\. Got 'Linear'"),
    ({"evaluate": 3}, r"The evaluate must be a function \(problem, data, x, y\) .* Got 'int'\."),
    ({"evaluate": fs.Evaluation}, r"The evaluate must be a function .* Got 'the class Evaluation'\."),
    ({"data": [1, 2]}, r"The data must be FederatedData: call \.split\(\.\.\.\) on a data set first\. Got 'list'"),
]


def case_name(changes: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v}" if not isinstance(v, nn.Module) else k for k, v in changes.items())[:40]


@pytest.mark.parametrize(("changes", "message"), BAD_OPTIONS, ids=[case_name(c) for c, _ in BAD_OPTIONS])
def test_a_bad_argument_is_refused_before_anything_is_written(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    problem, data = smooth_example()
    arguments = {"problem": problem, "data": data, "algorithm": SCAFFOLD, "rounds": 2, **changes}
    with pytest.raises(fs.InputError, match=message):
        fs.train(**arguments, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_settings_must_be_settings() -> None:
    problem, data = smooth_example()
    with pytest.raises(fs.InputError, match=r"The settings must be a Settings .*, or left out\. Got 'dict'\."):
        fs.train(problem, data, SCAFFOLD, settings={"rounds": 2})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_accelerator_is_refused() -> None:
    with pytest.raises(fs.InputError, match="The device 'cuda' cannot be used"):
        train(1, device="cuda")


def arrays(inputs: Any, targets: Any, **options: Any) -> fs.FederatedData:
    return fs.FederatedData.from_arrays([(np.asarray(inputs), np.asarray(targets))], **options)


ONES = np.ones((3, 4))
BAD_DATA: list[tuple[str, fs.FederatedData, str, str]] = [
    (
        "label too large",
        arrays(ONES, [0, 1, 3]),
        "cross_entropy",
        r"The labels of the data must be between 0 and 2: the model Linear has 3 outputs\. Got '0 to 3'",
    ),
    ("label below zero", arrays(ONES, [0, -1, 2]), "cross_entropy", r"between 0 and 2.*Got '-1 to 2'"),
    (
        "label too large in the test set",
        arrays(ONES, [0, 1, 2], test=(ONES, np.array([0, 1, 7]))),
        "cross_entropy",
        r"between 0 and 2.*Got '0 to 7'",
    ),
    (
        "label too large in a client's test set",
        arrays(ONES, [0, 1, 2], test=(ONES, np.array([0, 1, 2])), client_tests=[(ONES, np.array([0, 1, 7]))]),
        "cross_entropy",
        r"between 0 and 2.*Got '0 to 7'",
    ),
    ("inputs too wide", arrays(np.ones((3, 5)), [0, 1, 2]), "cross_entropy", r"cannot take inputs of shape \(5,\)"),
    (
        "float targets",
        arrays(ONES, [0.5, 1.0, 2.0]),
        "cross_entropy",
        r"targets of cross_entropy must be one class number",
    ),
    (
        "many targets",
        arrays(ONES, np.ones((3, 2), dtype=int)),
        "cross_entropy",
        r"must be one class number per sample",
    ),
    ("three logits", arrays(ONES, [0, 1, 1]), "binary_cross_entropy", r"must be one number per sample"),
    ("one target, three outputs", arrays(ONES, [0.0, 1.0, 1.0]), "squared", r"must be of the shape of the targets"),
]


@pytest.mark.parametrize(("data", "loss", "message"), [b[1:] for b in BAD_DATA], ids=[b[0] for b in BAD_DATA])
def test_data_that_do_not_fit_the_model_are_refused(data: fs.FederatedData, loss: str, message: str) -> None:
    problem = fs.erm(nn.Linear(4, 3, dtype=torch.float64), loss)
    with pytest.raises(fs.InputError, match=message):
        fs.train(problem, data, fs.FedAvg(), rounds=1)


def test_binary_labels_are_checked() -> None:
    problem = fs.erm(nn.Linear(4, 1, dtype=torch.float64), "binary_cross_entropy")
    with pytest.raises(fs.InputError, match="between 0 and 1: the loss is binary_cross_entropy"):
        fs.train(problem, arrays(ONES, [0, 1, 2]), fs.FedAvg(), rounds=1)


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(fs.InputError, match=r"The loss of the erm .* Did you mean 'cross_entropy'"):
        fs.erm(nn.Linear(2, 2), "cross_entrpy")


@pytest.mark.slow
def test_batch_statistics_of_one_feature_vector_per_sample_can_be_trained() -> None:
    """A BatchNorm1d layer has no statistics of one sample; the check of the model must not trip over that."""
    _, data = smooth_example()
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()
    run = fs.train(fs.erm(model, batchnorm="batch"), data, fs.FedAvg(lr=0.1), rounds=20, batch_size=8)
    assert run.history[-1]["loss"] < run.history[0]["loss"]


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [("binary_cross_entropy", 1, [0, 1, 1]), ("squared", 1, [0.5, 1.0, 2.0]), ("squared", 2, np.eye(3)[:, :2])],
)
def test_other_losses_go_down(loss: str, outputs: int, targets: Any) -> None:
    inputs = np.random.default_rng(0).normal(size=(3, 4))
    problem = fs.erm(nn.Linear(4, outputs, dtype=torch.float64), loss)
    run = fs.train(problem, arrays(inputs, targets), fs.FedAvg(lr=0.1), rounds=20)
    assert run.history[-1]["loss"] < 0.5 * run.history[0]["loss"]


def test_a_custom_loss_is_used() -> None:
    def absolute(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs[:, 0] - targets).abs()

    data = arrays([[1.0], [1.0]], [3.0, 5.0])
    run = fs.train(fs.erm(nn.Linear(1, 1), absolute), data, fs.FedAvg(lr=0.1, steps=5), rounds=20)
    assert run.history[-1]["loss"] == pytest.approx(1.0, abs=1e-5)  # every number between 3 and 5 is a median


def test_a_run_with_one_client_works(tmp_path: Path) -> None:
    problem = softmax_problem()
    run = fs.train(problem, sized_data([9]), fs.Scaffold(lr=0.3), rounds=3, out=tmp_path / "run")
    assert run.history[-1]["loss"] < run.history[0]["loss"]


@pytest.mark.parametrize(
    ("outer", "size", "message"),
    [
        (
            lambda x, y, b: x @ y - y @ y,
            4,
            r"outer function of the problem own fails, given x of 3 numbers, y of 4",
        ),
        (lambda x, y, b: x * y, 3, r"value of the outer function .* must be a single number.* Got 'shape \(3,\)'"),
        (lambda x, y, b: 1.0, 3, r"value of the outer function .* Got 'float'"),
        (lambda x, b: x.sum(), 3, "outer function of the problem own fails, given"),
    ],
)
def test_functions_of_ones_own_are_tried_before_training(outer: Any, size: int, message: str) -> None:
    data = fs.FederatedData.from_arrays([(torch.ones(4, 3), torch.ones(4)) for _ in range(2)])
    problem = fs.Problem(outer, torch.ones(3), y0=torch.ones(size), name="own")
    with pytest.raises(fs.InputError, match=message):
        fs.train(problem, data, fs.LocalSGDA(), rounds=1)
