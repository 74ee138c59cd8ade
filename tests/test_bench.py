"""The benchmarks: they can be imported, use public names only, and their peers compute the same."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.algorithms.algorithm import ALGORITHMS

FOLDER = Path(__file__).parents[1] / "bench"
PEERS = FOLDER / "peers"
BENCH = sorted([*FOLDER.glob("*.py"), *PEERS.glob("*.py")])
SHARED = ("common", "levels_by_hand", "protocol", "torch_models", "jax_models", "flower_client")
"""Files that are not benchmarks themselves."""
OWN = ("self", "torch")
"""Whose private attributes a benchmark may use."""

FOREIGN = ("jax_models", "flower_client", "peer_fedjax", "peer_pfl", "peer_flower", "peer_fedlab")
"""Files that need packages of another environment."""


def load(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a file of the benchmarks, with its folder on the path."""
    spec = importlib.util.spec_from_file_location(f"bench_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    monkeypatch.syspath_prepend(str(path.parent))
    known = set(ALGORITHMS)
    spec.loader.exec_module(module)
    for name in set(ALGORITHMS) - known:  # a benchmark's own algorithms
        del ALGORITHMS[name]
    return module


@pytest.mark.parametrize("path", [p for p in BENCH if p.stem not in FOREIGN], ids=lambda p: p.stem)
def test_a_benchmark_can_be_imported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(path, monkeypatch)
    assert path.stem in SHARED or path.stem.startswith("peer_") or callable(module.main)


def test_every_peer_has_a_program_and_every_other_simulator_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    compare = load(PEERS / "compare.py", monkeypatch)
    assert {f"peer_{peer.partition('-')[0]}.py" for peer in compare.PEERS} == {p.name for p in PEERS.glob("peer_*.py")}
    assert set(compare.PEERS) - set(compare.OWN) == {p.stem for p in PEERS.glob("requirements/*.txt")}


@pytest.mark.parametrize("job", ["logreg", "trivial-10", "lenet5"])
def test_the_hand_written_loops_and_fedstrata_compute_the_same(
    job: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(PEERS))
    import jobs

    monkeypatch.setattr(jobs, "FOLDER", tmp_path)
    work = jobs.read(jobs.write(jobs.JOBS[job].small()))
    found = []
    for name in ("Bare", "Stacked", "Fedstrata"):
        peer = getattr(load(PEERS / f"peer_{name.lower()}.py", monkeypatch), name)(work)
        peer.run(2)
        found.append(np.concatenate([value.ravel() for value in peer.weights()]))
    start = np.concatenate([value.ravel() for value in work.start.values()])
    for other in found[1:]:
        assert np.linalg.norm(other - found[0]) < 1e-4 * np.linalg.norm(found[0] - start)


def test_the_models_of_the_jobs_are_those_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    build = load(PEERS / "torch_models.py", monkeypatch).build
    for name, shape in (("logreg", (1, 28, 28)), ("lenet5", (1, 28, 28)), ("resnet20", (3, 32, 32))):
        ours, theirs = build(name), fs.models.model(name, shape, 10)
        theirs.load_state_dict(ours.state_dict())
        images = torch.randn(2, *shape)
        assert torch.equal(ours(images), theirs(images))
    assert sum(value.numel() for value in build("cnn").parameters()) == 1_663_370


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
