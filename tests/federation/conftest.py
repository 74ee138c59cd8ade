"""No plots, no traced graphs, no syncing to disk: in such short runs they would take longer than the rounds."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest

import fedstrata.training.plots
from federation.stand_in import DIGITS, Site, Tables, made, site
from fedstrata.federation.server import nodes
from fedstrata.problems.runner import Runner


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedstrata.training.plots, "plot", lambda *_, **__: None)
    monkeypatch.setattr(Runner, "tracing", False)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(nodes, "POLL", 0.01)


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Tables], Site]:
    """Nodes for an experiment with the digits; the tests of a file share their data and keys."""
    known: dict[str, Site] = {}

    def of(tables: Tables) -> Site:
        name = json.dumps(tables, sort_keys=True)
        if name not in known:
            known[name] = site(tmp_path_factory.mktemp("site"), made(DIGITS, tables))
        return known[name].again()

    return of
