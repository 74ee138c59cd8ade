"""The benchmarks: all of them can be imported, and none uses a private name of the package."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

BENCH = sorted((Path(__file__).parents[1] / "bench").glob("*.py"))
SHARED = ("common", "levels_by_hand")
"""Files that are not benchmarks themselves."""


@pytest.mark.parametrize("path", BENCH, ids=lambda p: p.stem)
def test_a_benchmark_can_be_imported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location(f"bench_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    monkeypatch.syspath_prepend(str(path.parent))
    spec.loader.exec_module(module)
    assert path.stem in SHARED or callable(module.main)


@pytest.mark.parametrize("path", BENCH, ids=lambda p: p.stem)
def test_a_benchmark_uses_public_names_only(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedstrata"):
            private = [name.name for name in node.names if name.name.startswith("_")]
            assert not private, f"{path.name} imports {', '.join(private)} of {node.module}"
