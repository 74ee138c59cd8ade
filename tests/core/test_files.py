"""Files: a byte order mark is read over, and a file that cannot be written is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedstrata.core.errors import FedstrataError
from fedstrata.core.files import append_rows, read_toml, write_atomically

FULL = Path("/dev/full")


def test_a_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    file = tmp_path / "experiment.toml"
    file.write_bytes("\ufeffname = 'é'\n".encode())
    assert read_toml(file) == {"name": "é"}


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_that_names_the_file() -> None:
    with pytest.raises(FedstrataError, match=r"^The file /dev/full cannot be written: No space left on device\.$"):
        append_rows(FULL, [{"round": 1}])


def test_a_failed_write_leaves_the_earlier_file_and_nothing_else(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "state"
    write_atomically(file, b"before")

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(FedstrataError, match="state cannot be written: No space left on device"):
        write_atomically(file, b"after")
    assert file.read_bytes() == b"before" and list(tmp_path.iterdir()) == [file]
