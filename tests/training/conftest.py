"""Figures that tests look at instead of writing them."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Figure]:
    """The figures that a test writes; their files are empty."""
    written: list[Figure] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: written.append(figure))
    return written
