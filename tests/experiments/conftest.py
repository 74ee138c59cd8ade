"""An experiment file that a test writes, and searches that run a formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedstrata.experiments.config_methods import ConfigMethod
from fedstrata.training.metrics.catalogue import DECLARED
from scripted import Script


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write parts of TOML to a file; return its path."""

    def file(*parts: str) -> Path:
        path = tmp_path / "experiment.toml"
        path.write_text("".join(parts))
        return path

    return file


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Replace the runs of methods by a formula."""
    script = Script()
    monkeypatch.setattr(ConfigMethod, "run", lambda self, *rest: script.run(self, *rest))
    monkeypatch.setattr(ConfigMethod, "measures", lambda self, *rest: script.measured or [script.measure])
    return script


@pytest.fixture(autouse=True)
def _undeclared() -> Iterator[None]:
    """Forget the measures that a test has declared."""
    yield
    DECLARED.clear()
