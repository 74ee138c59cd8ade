"""Figures that tests look at instead of writing them."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that a test writes."""
    written: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: written.append(figure))
    return written
