"""The files of checkpoints: what clients keep is restored from merged files, and their number stays small."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedstrata.clients.state import ClientState
from fedstrata.training import checkpoint as module
from fedstrata.training.checkpoint import FAN, Checkpoint, Checkpoints

CLIENTS, COHORT = 3000, 20


def save(checkpoints: Checkpoints, round: int, state: ClientState) -> None:
    whole = checkpoints.wants_all(state.count())
    rows = state.take_all() if whole else state.take_changes()
    checkpoints.save(Checkpoint(round, {"x": torch.zeros(3)}, {"steps": round}, 0.0, rows), whole)


def keep(state: ClientState, draw: np.random.Generator, round: int) -> None:
    """Let a cohort keep c, and every third one m as well."""
    cohort = draw.choice(CLIENTS, COHORT, replace=False)
    state.keep(cohort, {"c": torch.from_numpy(cohort + round / 1000)[:, None].repeat(1, 4)})
    if round % 3 == 0:
        state.keep(cohort[:7], {"m": torch.full((7, 2), round)})


def everything(state: ClientState) -> dict[str, torch.Tensor]:
    clients = np.arange(CLIENTS)
    absent = {"c": torch.full((CLIENTS, 4), -1.0, dtype=torch.float64), "m": torch.full((CLIENTS, 2), -1)}
    return {name: state.recall(clients, name, default) for name, default in absent.items()}


def restored(folder: Path) -> dict[str, torch.Tensor]:
    saved, warnings = Checkpoints(folder).latest()
    assert saved is not None and not warnings
    state = ClientState(CLIENTS, 1 << 30)
    for rows in saved.rows:
        state.load(rows)
    return everything(state)


def run(folder: Path, rounds: int) -> ClientState:
    draw, state, checkpoints = np.random.default_rng(0), ClientState(CLIENTS, 1 << 30), Checkpoints(folder)
    state.keep(np.arange(CLIENTS), {"c": torch.arange(CLIENTS * 4, dtype=torch.float64).reshape(-1, 4)})
    for round in range(rounds):
        save(checkpoints, round, state)
        if round % 7 == 0:  # the run is resumed
            checkpoints = Checkpoints(folder)
            checkpoints.latest()
        keep(state, draw, round)
    save(checkpoints, rounds, state)
    return state


@pytest.mark.parametrize("rounds", [FAN - 1, FAN, 3 * FAN + 5, FAN * FAN + 20])
def test_what_clients_keep_is_restored_from_merged_files(rounds: int, tmp_path: Path) -> None:
    expected, found = everything(run(tmp_path, rounds)), restored(tmp_path)
    for name, rows in expected.items():
        assert torch.equal(found[name], rows), name


def test_a_checkpoint_lists_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FAN", 4)
    expected = everything(run(tmp_path, 120))
    files = list(tmp_path.glob("clients-*"))
    assert len(files) < 2 * 4 * 4
    assert any("merged-3" in path.name for path in files)
    for name, rows in restored(tmp_path).items():
        assert torch.equal(expected[name], rows), name


def test_all_rows_and_large_files_are_not_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MERGED_BYTES", 0)
    run(tmp_path, 2 * FAN)
    assert not list(tmp_path.glob("*merged*"))


def test_a_damaged_file_is_not_merged_and_found_when_it_is_needed(tmp_path: Path) -> None:
    draw, state, checkpoints = np.random.default_rng(0), ClientState(CLIENTS, 1 << 30), Checkpoints(tmp_path)
    for round in range(1, FAN + 3):
        keep(state, draw, round)
        save(checkpoints, round, state)
        if round == 2:
            (tmp_path / "clients-00000002-0.safetensors").write_bytes(b"damaged")
    assert (tmp_path / "clients-00000002-0.safetensors").exists()
    saved, warnings = Checkpoints(tmp_path).latest()
    assert saved is not None and saved.round == 1, "the last one that was synced to disk, and needs no damaged file"
    assert len(warnings) == 2 and "clients-00000002-0.safetensors does not match its checksum" in warnings[0]
