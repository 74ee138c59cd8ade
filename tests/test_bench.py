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
OWN = ("self", "torch")
"""Whose private attributes a benchmark may use."""


@pytest.mark.parametrize("path", BENCH, ids=lambda p: p.stem)
def test_a_benchmark_can_be_imported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location(f"bench_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    monkeypatch.syspath_prepend(str(path.parent))
    spec.loader.exec_module(module)
    assert path.stem in SHARED or callable(module.main)


def private_names(source: str) -> list[str]:
    """Return the private names of the package that a source imports, and the private attributes of its objects."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedstrata"):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id in OWN):
            found.append(node.attr)
    return [name for name in found if name.startswith("_") and not name.startswith("__")]


@pytest.mark.parametrize("path", BENCH, ids=lambda p: p.stem)
def test_a_benchmark_uses_public_names_only(path: Path) -> None:
    assert private_names(path.read_text()) == []


def test_private_names_are_found_wherever_they_are() -> None:
    used = "from fedstrata.clients.state import _Table\nclients._join(x)\nf(a.b()._side.data)\ndel oracles._graphs"
    assert sorted(private_names(used)) == ["_Table", "_graphs", "_join", "_side"]
    assert private_names("self._x = torch._foreach_add_(y, fs.__version__)") == []
