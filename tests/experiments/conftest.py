"""An experiment file that a test writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write parts of TOML to a file; return its path."""

    def file(*parts: str) -> Path:
        path = tmp_path / "experiment.toml"
        path.write_text("".join(parts))
        return path

    return file
