"""Files: a byte order mark is read over, and a file that cannot be written is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedstrata.core.errors import FedstrataError, InputError
from fedstrata.core.files import (
    Rows,
    naming,
    read_toml,
    refuse_used,
    remove_leftovers,
    write_atomically,
    writing,
)

FULL = Path("/dev/full")


def test_a_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    file = tmp_path / "experiment.toml"
    file.write_bytes("\ufeffname = 'é'\n".encode())
    assert read_toml(file) == {"name": "é"}


def test_a_directory_in_use_and_a_file_are_refused(tmp_path: Path) -> None:
    refuse_used(tmp_path / "new")
    refuse_used(tmp_path)
    (tmp_path / ".state.1.tmp").write_text("left by a process that was killed")
    refuse_used(tmp_path)
    (tmp_path / "mine").write_text("x")
    used = f"The directory {tmp_path} exists and is not empty. Nothing was overwritten. "
    for remedy in ("Choose another.", "Pass --resume."):
        with pytest.raises(InputError) as error:
            refuse_used(tmp_path, remedy)
        assert str(error.value) == used + remedy
    with pytest.raises(
        InputError, match=r"mine is a file, not a directory\. Nothing was overwritten\. Choose another\.$"
    ):
        refuse_used(tmp_path / "mine", "Pass --resume.")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_that_names_the_file() -> None:
    with pytest.raises(FedstrataError, match=r"^The file /dev/full cannot be written: No space left on device\.$"):
        Rows(FULL).append({"round": 1})


def test_a_failed_write_leaves_the_earlier_file_and_nothing_else(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "state"
    write_atomically(file, b"before")

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(FedstrataError, match="state cannot be written: No space left on device"):
        write_atomically(file, b"after")
    assert file.read_bytes() == b"before" and list(tmp_path.iterdir()) == [file]


def test_rows_are_read_appended_and_kept_up_to_a_round(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl", "round")
    assert rows.read() == rows.keep(3) == [] and not rows.path.exists()
    rows.append({"round": 1, "loss": 0.5}, {"round": 2})
    rows.append({"round": 3})
    with rows.path.open("a") as file:
        file.write('{"round": 4, "lo')  # cut off by a kill
    assert rows.keep(2) == rows.read() == [{"round": 1, "loss": 0.5}, {"round": 2}]
    rows.append({"round": 3})
    assert [row["round"] for row in rows.read()] == [1, 2, 3]


def test_a_row_without_its_whole_numbers_is_named_once_and_dropped(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl", "round")
    rows.append({"round": 1.5}, {"round": 2})
    with pytest.warns(UserWarning, match=r"^Line 1 of .*rows.jsonl is damaged and left out\.$"):
        assert rows.keep() == [{"round": 2}]
    assert rows.read() == [{"round": 2}]


def test_nan_in_a_row_is_refused_unless_allowed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        Rows(tmp_path / "rows.jsonl").append({"loss": float("nan")})
    Rows(tmp_path / "nan.jsonl", allow_nan=True).append({"loss": float("nan")})


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_system_error_that_names_no_file_gets_its_name() -> None:
    def write() -> None:
        with naming(Path("model.pt2")), FULL.open("w") as file:
            file.write("x" * 100_000)

    with pytest.raises(FedstrataError, match=r"^The file model\.pt2 cannot be written: No space left on device\.$"):
        write()


def test_a_file_is_replaced_when_all_of_it_is_written(tmp_path: Path) -> None:
    def write() -> None:
        with writing(file) as stream:
            stream.write(b"half")
            raise KeyboardInterrupt

    file = tmp_path / "arrays"
    file.write_bytes(b"before")
    with pytest.raises(KeyboardInterrupt):
        write()
    assert file.read_bytes() == b"before" and list(tmp_path.iterdir()) == [file]


def test_leftovers_of_one_file_and_of_all_are_removed(tmp_path: Path) -> None:
    names = [".run[1].json.77.tmp", ".run1.json.77.tmp", ".other.7.tmp", "mine.tmp", "run[1].json"]
    for name in names:
        (tmp_path / name).touch()
    remove_leftovers(tmp_path, "run[1].json")
    assert {path.name for path in tmp_path.iterdir()} == {*names[1:]}
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"mine.tmp", "run[1].json"}
