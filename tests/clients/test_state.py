"""What clients keep: rows of those that took part, in memory or in a mapped file, and through a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedstrata.clients.state import ClientState


def ids(*clients: int) -> np.ndarray:
    return np.array(clients)


def rows(*values: float, width: int = 3) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None].expand(len(values), width)


LIMITS = [pytest.param(1 << 30, id="in memory"), pytest.param(0, id="mapped"), pytest.param(50, id="moved to a file")]


@pytest.mark.parametrize("limit", LIMITS)
def test_what_is_kept_is_recalled(limit: int, tmp_path: Path) -> None:
    state = ClientState(10, limit, tmp_path)
    default = rows(-1, -1, -1)
    assert torch.equal(state.recall(ids(1, 2, 3), "c", default), default)
    state.keep(ids(7, 2), {"c": rows(70, 20)})
    assert torch.equal(state.recall(ids(2, 7), "c", rows(0, 0)), rows(20, 70))
    assert torch.equal(state.recall(ids(1, 2, 3), "c", default), rows(-1, 20, -1))
    assert torch.equal(state.recall(ids(1), "c", rows(-5)), rows(-5))
    state.keep(ids(2, 3, 4), {"c": rows(21, 31, 41), "other": rows(1, 2, 3, width=1)})
    assert torch.equal(state.recall(ids(4, 3, 2, 7), "c", rows(0, 0, 0, 0)), rows(41, 31, 21, 70))
    assert torch.equal(state.recall(ids(3), "other", rows(0, width=1)), rows(2, width=1))


def test_clients_that_have_kept_nothing_are_missing() -> None:
    state = ClientState(10, 1 << 30)
    assert state.missing(ids(3, 1), "c").tolist() == [3, 1]
    state.keep(ids(7, 2), {"c": rows(70, 20)})
    assert state.missing(ids(3, 7, 1, 2), "c").tolist() == [3, 1]
    assert state.missing(ids(2, 7), "c").tolist() == []
    assert state.missing(ids(2), "other").tolist() == [2]


def test_rows_are_copies() -> None:
    state = ClientState(4, 1 << 30)
    value = torch.ones(2, 3)
    state.keep(ids(0, 1), {"c": value})
    value.zero_()
    recalled = state.recall(ids(0, 1), "c", torch.zeros(2, 3))
    assert recalled.sum() == 6
    recalled.zero_()
    assert state.recall(ids(0, 1), "c", torch.zeros(2, 3)).sum() == 6
    default = torch.zeros(1, 3).expand(2, 3)
    state.recall(ids(1, 2), "c", default)[0, 0] = 9
    assert default.sum() == 0


@pytest.mark.parametrize("limit", [1 << 30, 0])
def test_many_rounds_in_a_file_equal_those_in_memory(limit: int, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    state = ClientState(50, limit, tmp_path)
    expected: dict[int, torch.Tensor] = {}
    for _ in range(30):
        cohort = generator.permutation(50)[:7]
        values = torch.from_numpy(generator.normal(size=(7, 4)))
        state.keep(cohort, {"c": values})
        expected.update(zip(cohort.tolist(), values, strict=True))
    everyone = state.recall(np.arange(50), "c", torch.zeros(50, 4, dtype=torch.float64))
    for k in range(50):
        assert torch.equal(everyone[k], expected.get(k, torch.zeros(4, dtype=torch.float64)))


def test_memory_grows_with_clients_that_took_part_only() -> None:
    state = ClientState(1_000_000, 1 << 30)
    state.keep(ids(999_999, 5), {"c": torch.ones(2, 1000)})
    for _ in range(3):
        state.keep(ids(5, 999_999), {"c": torch.ones(2, 1000)})
    assert state.count() == 2
    assert len(state._tables["c"].rows) == 2
    state.keep(ids(6), {"c": torch.ones(1, 1000)})
    assert state.count() == 3
    assert len(state._tables["c"].rows) <= 4


def test_a_client_named_twice_has_one_row_and_keeps_the_last_value() -> None:
    state = ClientState(2, 1 << 30)
    state.keep(ids(1, 1, 1), {"c": rows(5, 5, 5)})
    assert state.count() == 1
    state.keep(ids(0, 1), {"c": rows(7, 8)})
    assert torch.equal(state.recall(ids(1, 0, 1), "c", rows(0, 0, 0)), rows(8, 7, 8))
    assert state.count() == 2


@pytest.mark.parametrize("limit", LIMITS)
def test_changes_rebuild_the_state(limit: int, tmp_path: Path) -> None:
    state, copy = ClientState(9, limit, tmp_path), ClientState(9, 1 << 30)
    state.keep(ids(3, 1), {"c": rows(3, 1), "d": rows(30, 10, width=2)})
    (first,) = state.take_changes()
    assert first["c.clients"].tolist() == [1, 3]
    assert torch.equal(first["c"], rows(1, 3))
    assert list(state.take_changes()) == []
    state.keep(ids(8, 1), {"c": rows(8, 11)})
    (second,) = state.take_changes()
    assert set(second) == {"c", "c.clients"}
    assert second["c.clients"].tolist() == [1, 8]
    for changes in (first, second):
        copy.load(changes)
    assert list(copy.take_changes()) == []
    for name, width in (("c", 3), ("d", 2)):
        default = rows(*[-1.0] * 9, width=width)
        assert torch.equal(copy.recall(np.arange(9), name, default), state.recall(np.arange(9), name, default))
    pieces = list(state.take_all(piece_bytes=1))
    assert [p["c.clients"].tolist() for p in pieces if "c.clients" in p] == [[1], [3], [8]]
    size = sum(len(values) * rows(0, width=width).nbytes for values, width in (((1, 3, 8), 3), ((1, 3), 2)))
    assert [set(p) for p in state.take_all(piece_bytes=size)] == [{"c", "c.clients", "d", "d.clients"}]
    assert [sorted(p) for p in state.take_all(piece_bytes=size - 1)] == [["c", "c.clients"], ["d", "d.clients"]]
    fresh = ClientState(9, 1 << 30)
    for piece in pieces:
        fresh.load(piece)
    assert fresh.count() == state.count() == 5
    assert torch.equal(fresh.recall(ids(3), "c", rows(0)), state.recall(ids(3), "c", rows(0)))


@pytest.mark.parametrize(("limit", "files"), [(1 << 30, 0), (50, 1), (0, 2)])
def test_large_state_is_mapped_and_leaves_nothing_behind(
    limit: int, files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped: list[str] = []
    original = torch.from_file

    def from_file(name: str, **options: Any) -> torch.Tensor:
        mapped.append(name)
        return original(name, **options)

    monkeypatch.setattr(torch, "from_file", from_file)
    state = ClientState(10, limit, tmp_path)
    state.keep(ids(1), {"c": rows(1)})
    state.keep(ids(2, 3), {"c": rows(2, 3)})
    assert len(mapped) == files
    assert all(Path(name).parent == tmp_path for name in mapped)
    assert not list(tmp_path.iterdir()), "the file has lost its name, so that even a kill leaves nothing"
    assert torch.equal(state.recall(ids(3, 1, 2), "c", rows(0, 0, 0)), rows(3, 1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_a_mapped_file_keeps_the_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    state = ClientState(10, 0, tmp_path)
    value = torch.arange(6).reshape(2, 3).to(dtype)
    state.keep(ids(4, 2), {"c": value})
    recalled = state.recall(ids(4, 2), "c", torch.zeros(2, 3, dtype=dtype))
    assert recalled.dtype == dtype
    assert torch.equal(recalled, value)


def test_what_is_kept_while_changes_are_saved_is_saved_next_time() -> None:
    state = ClientState(3, 1 << 30)
    state.keep(ids(0), {"c": rows(1), "d": rows(2)})
    pieces = state.take_changes(piece_bytes=1)
    next(pieces)
    state.keep(ids(1), {"d": rows(3)})
    list(pieces)
    (later,) = state.take_changes()
    assert later["d.clients"].tolist() == [1]


def test_a_table_that_fits_has_room_for_all_clients_at_once() -> None:
    state = ClientState(1000, 1 << 30)
    state.keep(ids(5), {"c": rows(1)})
    first = state._tables["c"].rows.data_ptr()
    state.keep(np.arange(1000), {"c": rows(*range(1000))})
    assert state._tables["c"].rows.data_ptr() == first
