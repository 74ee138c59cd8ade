"""Nothing is drawn or traced, nobody waits for the disk: for rounds as few as these that takes longer than them."""

from __future__ import annotations

import os

import pytest

import fedstrata.training.plots
from fedstrata.problems import oracles


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedstrata.training.plots, "plot", lambda *_, **__: None)
    monkeypatch.setattr(oracles, "trace", lambda *_: None)
    monkeypatch.setattr(os, "fsync", lambda _: None)
