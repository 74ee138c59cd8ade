"""One thread for every test: small tensors are fastest that way, and sums run in one order. Commands in process."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from cases import short_run
from fedstrata.cli.app import invoke
from fedstrata.experiments.describe import KINDS
from fedstrata.problems.graphs.compiler import Compiler
from fedstrata.problems.problem import Problem
from fedstrata.problems.runner import Runner

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --full: every combination of every product of cases (see cases.py), and slow tests; --compile; --kills."""
    parser.addoption("--full", action="store_true", help="run slow tests, and every combination of products of cases")
    parser.addoption("--compile", action="store_true", help="compile every graph, as compile = true does")
    parser.addoption("--kills", type=int, default=3, help="how often tests/test_kill_tune.py kills a search")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip slow tests, unless they are asked for."""
    stacked = {item for function in _by_function(items) for item in _beyond_the_short_run(function)}
    short, left_out = [], []
    for item in items:
        (left_out if _left_out(item, config, item in stacked) else short).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = short


def _by_function(items: list[pytest.Item]) -> Iterable[list[pytest.Function]]:
    """Return the cases of each parametrised test."""
    cases: dict[tuple[object, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            cases.setdefault((item.parent, item.originalname), []).append(item)
    return cases.values()


def _beyond_the_short_run(cases: list[pytest.Function]) -> list[pytest.Function]:
    """Return the cases of stacked ``parametrize`` decorators that repeat what a few of them already cover."""
    axes = [
        [" ".join(str(id(case.callspec.params[name])) for name in _names(mark)) for case in cases]
        for mark in cases[0].iter_markers("parametrize")
    ]
    if len(axes) < 2:
        return []
    axes.sort(key=lambda axis: -len(set(axis)))
    short = short_run(list(zip(*axes, strict=True)))
    return [case for i, case in enumerate(cases) if i not in short]


def _names(mark: pytest.Mark) -> list[str]:
    names = mark.args[0]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def _left_out(item: pytest.Item, config: pytest.Config, stacked: bool) -> bool:
    expression = config.getoption("markexpr") or ""
    if any(item.get_closest_marker(name) and name not in expression for name in ("flower", "fuzz")):
        return True
    long = next((name for name in ("slow", "full") if item.get_closest_marker(name)), None)
    if (long is None and not stacked) or config.getoption("full") or (long and long in expression):
        return False
    return not any(item.nodeid in argument for argument in config.args)


UNTRACED = {
    *(
        "test_channels",
        "test_diagnostics",
        "test_faults",
        "test_nodes",
        "test_parity",
        "test_pretrain",
        "test_reproduce",
    ),
    *("test_train", "test_variants"),
}
"""Files whose runs are so short that tracing a graph takes longer than it saves; the other files test graphs."""


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """A model that a test makes starts the same every time."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _short_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    marked = request.node.get_closest_marker("untraced") is not None
    if (request.path.stem in UNTRACED or marked) and request.node.get_closest_marker("traced") is None:
        monkeypatch.setattr(Runner, "tracing", False)


@pytest.fixture(autouse=True)
def _compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --compile, compile the graphs of runs that do not ask for it."""
    if not request.config.getoption("compile"):
        return
    prepare, compiler = Runner.__init__, Compiler()

    def with_compiler(self: Runner, problem: Problem, own: Compiler | None, autocast: torch.dtype | None) -> None:
        prepare(self, problem, own or compiler, autocast)

    monkeypatch.setattr(Runner, "__init__", with_compiler)


@pytest.fixture
def registries() -> Iterator[None]:
    """Forget what a test registers."""
    kinds = [(registry, dict(registry)) for registry in KINDS.values()]
    yield
    for registry, before in kinds:
        registry.clear()
        registry.update(before)


@pytest.fixture
def own(tmp_path: Path, registries: None) -> Path:
    """Return a folder with the files of docs/add-your-own.md: mine.py with something of every kind, and mine.toml."""
    page = (Path(__file__).parents[1] / "docs" / "add-your-own.md").read_text()
    blocks = {kind: re.findall(rf"```{kind}\n(.*?)```", page, flags=re.S) for kind in ("python", "toml")}
    (tmp_path / "mine.py").write_text("\n\n".join(blocks["python"]))
    (tmp_path / "mine.toml").write_text("\n".join(blocks["toml"]))
    return tmp_path


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plot nothing: a plot takes longer than the run it shows."""
    for name in ("plot", "plot_ranking", "plot_search", "plot_response"):
        monkeypatch.setattr(f"fedstrata.training.plots.{name}", lambda *_, **__: None)


@pytest.fixture
def fedstrata(capsys):
    """Run a command; return (exit code, stdout, stderr)."""

    def run(*words: object) -> tuple[int, str, str]:
        code = invoke([str(w) for w in words])
        out, err = capsys.readouterr()
        return code, out, err

    return run
