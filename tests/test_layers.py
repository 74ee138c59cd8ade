"""The layers: imports go one way, the tree is that of docs/design.md, and the public interface is listed here."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedstrata as fs
from fedstrata.algorithms import ALGORITHMS

PACKAGE = Path(fs.__file__).parent
ORDER = ("core", "data", "models", "problems", "clients", "algorithms", "training", "experiments", "federation", "cli")
"""The layers, lowest first. A layer imports itself and lower ones; data and models do not import each other."""

TOP = {"__init__.py", "__main__.py", "py.typed", *ORDER}

PUBLIC = {
    "FederatedClassifier",
    *("Algorithm", "State", "algorithm", "param", "remote", "Client", "Clients", "Variables"),
    *("Problem", "Quadratic", "adversarial", "agnostic", "auc", "composition", "compositional_auc", "damaml", "erm"),
    *("fair", "maml", "multilevel", "quadratic", "quadratic_saddle", "risk_averse", "robust", "tower"),
    *("train", "Run", "Evaluation", "Channel", "Faults", "Inject", "Diagnostics"),
    *("compare", "Comparison", "tune", "Tuned", "train_local", "LocalRun", "declare_measure"),
    *("Callback", "ShowProgress", "TensorBoard", "Dataset", "FederatedData"),
    *("Epochs", "Interval", "CubeRoot", "Power", "RoundDecay", "StepDecay"),
    *("FedstrataError", "InputError", "MissingData", "Diverged", "QuorumError"),
    *("data", "models", "partition", "problems", "projections", "schedules", "testing"),
    *(kind.__name__ for kind in ALGORITHMS.values()),
}


def imports(source: str, module: str) -> Iterator[tuple[int, str]]:
    """Yield every module of the package that a source imports, lazily or for type checking too, with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            parts = [*base, *([node.module] if node.module else [])]
            if parts == ["fedstrata"]:
                yield from ((node.lineno, f"fedstrata.{name.name}") for name in node.names)
            else:
                yield node.lineno, ".".join(parts)


def upward(source: str, module: str) -> list[str]:
    """Return the imports of a source that go up, or sideways between data and models."""
    mine = ORDER.index(module.split(".")[1])
    wrong = []
    for line, name in imports(source, module):
        parts = name.split(".")
        if parts[0] != "fedstrata" or (parts[1:2] and parts[1] not in ORDER):
            continue
        if not parts[1:]:
            wrong.append(f"line {line}: the whole package")
            continue
        other = ORDER.index(parts[1])
        if other > mine or {parts[1], ORDER[mine]} == {"data", "models"}:
            wrong.append(f"line {line}: {name}")
    return wrong


def module_of(path: Path) -> str:
    return ".".join(["fedstrata", *path.relative_to(PACKAGE).with_suffix("").parts])


FILES = sorted(p for layer in ORDER for p in (PACKAGE / layer).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    wrong = upward(path.read_text(), module_of(path))
    assert not wrong, f"{path.relative_to(PACKAGE)} imports a layer above its own: {'; '.join(wrong)}"


@pytest.mark.parametrize(
    "source",
    [
        "from fedstrata.training.train import train",
        "import fedstrata.cli",
        "from fedstrata import cli",
        "import fedstrata",
        "from ..training import train",
        "def f():\n    from fedstrata.algorithms import FedAvg",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fedstrata.experiments.config import Config",
    ],
)
def test_an_import_upwards_is_found_wherever_it_hides(source: str) -> None:
    assert upward(source, "fedstrata.clients.client")
    assert not upward("from fedstrata.problems.problem import Problem\nimport torch", "fedstrata.clients.client")
    assert upward("from fedstrata.models.flat import Flat", "fedstrata.data.part")


def test_nothing_else_stands_at_the_top() -> None:
    assert {p.name for p in PACKAGE.iterdir() if p.name != "__pycache__"} == TOP


def test_the_public_interface() -> None:
    assert set(fs.__all__) == PUBLIC, "list what is exported on purpose in tests/test_layers.py and in the docs"
    assert len(fs.__all__) == len(set(fs.__all__))


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_is_explained(name: str) -> None:
    thing = getattr(fs, name)
    if inspect.isclass(thing) or inspect.isfunction(thing) or inspect.ismodule(thing):
        assert len((inspect.getdoc(thing) or "").split()) >= 4, (
            f"fs.{name} needs a docstring that a newcomer understands"
        )


def test_the_tree_is_that_of_the_design_page() -> None:
    """Every file stands in the Layers block of docs/design.md, or belongs to what the block describes in words."""
    text = (PACKAGE.parents[1] / "docs" / "design.md").read_text()
    block = text.split("## Layers")[1].split("Imports go one way")[0]
    for layer, words in (("problems", "one file per problem"), ("algorithms", "one file per algorithm box")):
        assert words in block, layer
    for layer in set(ORDER) - {"problems", "algorithms", "cli"}:
        start = block.index(f"    {layer}/")
        end = min(
            (block.index(f"    {other}/") for other in ORDER if block.index(f"    {other}/") > start),
            default=len(block),
        )
        named = set(block[start:end].replace("/", "").split())
        files = {p.stem for p in (PACKAGE / layer).iterdir() if not p.name.startswith("__")}
        assert files <= named, f"docs/design.md, Layers: {layer}/ lacks {', '.join(sorted(files - named))}"
        assert named - {layer} <= files, f"docs/design.md, Layers: {layer}/ has no {sorted(named - files - {layer})}"


def test_training_imports_nothing_that_only_other_commands_need() -> None:
    code = "import sys, fedstrata as fs; fs.train, fs.compare; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "torch" in imported
    assert not imported & {"scipy", "pandas", "matplotlib", "sklearn", "optuna", "flwr", "plotly", "rich", "typer"}
