"""The examples in the documentation must run."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.algorithms import ALGORITHMS
from fedstrata.clients.privacy import epsilon
from fedstrata.experiments.build import Experiment
from fedstrata.experiments.config import read
from fedstrata.experiments.describe import KINDS, TABLES, keys_of, with_option_tables
from fedstrata.experiments.runs import run_config

ROOT = Path(__file__).parents[1]


def blocks(path: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), flags=re.S)


@pytest.mark.slow
def test_the_example_of_the_readme_learns():
    names: dict = {}
    exec(blocks("README.md")[0], names)
    assert names["run"].summary["auc"] > 0.95 > 0.9 < names["base"].summary["auc"]
    assert isinstance(names["model"], torch.nn.Module)
    exec(blocks("README.md")[1], names)
    assert names["run"].summary["personal_accuracy_mean"] > 0.8 < names["base"].summary["personal_accuracy_mean"]


def test_the_figures_of_the_configuration_page_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (code,) = (block for block in blocks("docs/configuration.md") if "plot_ranking" in block)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    for name in ("ranking", "search", "response"):
        assert (tmp_path / f"{name}.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.slow
def test_the_custom_problem_of_the_design_page_trains():
    names: dict = {}
    exec(blocks("docs/design.md")[0], names)
    assert names["run"].history[-1]["loss"] < names["run"].history[0]["loss"]
    exec(blocks("docs/design.md")[1], names)
    first, last = names["run"].history[0], names["run"].history[-1]
    assert last["objective"] < first["objective"] and last["gradient_norm"] < first["gradient_norm"]


@pytest.mark.slow
def test_the_custom_minimax_problem_finds_its_saddle():
    torch.manual_seed(0)
    code = blocks("docs/design.md")[2]
    names: dict = {}
    exec(code, names)
    x, y, problem = names["run"].x, names["run"].y, names["problem"]
    assert (x - torch.tensor([1.0, -2.0, 0.5])).norm() < 0.5
    assert y[1] > y[0] > -1e-6 and abs(float(y.sum()) - 1) < 1e-6
    lines = [line for line in code.splitlines() if line and not line.startswith(("import", "print"))]
    assert len(lines) <= 15
    # a saddle: no feasible y does better against x, and x hardly moves against y
    batch = tuple(torch.stack([s[i] for s in names["sites"]]).flatten(0, 1) for i in (0, 1))
    best = max(float(problem.outer(x, torch.tensor([t, 1 - t]), batch)) for t in torch.linspace(0, 1, 101).tolist())
    assert float(problem.outer(x, y, batch)) > best - 0.02
    worse = min(float(problem.outer(x + 0.5 * d, y, batch)) for d in torch.eye(3))
    assert float(problem.outer(x, y, batch)) < worse


@pytest.mark.slow
def test_the_custom_levels_are_solved():
    torch.manual_seed(0)
    names: dict = {}
    exec(blocks("docs/design.md")[3], names)
    rows = [torch.cat(part) for part in zip(*names["sites"], strict=True)]

    def deviation(x):
        found = names["losses"](x, rows)
        return float(found.mean() + (found.var(unbiased=False) + 1e-2).sqrt())

    x = names["run"].x
    nearby = [x + 0.3 * sign * direction for direction in torch.eye(3) for sign in (-1, 1)]
    assert deviation(x) < min(map(deviation, nearby)) < deviation(torch.zeros(3))


@pytest.mark.slow
def test_the_skeletons_of_algorithms_work(tmp_path):
    """The three skeletons of the page: an algorithm, one with its own state, and a preset."""
    module = sys.modules["fedmom"] = ModuleType("fedmom")
    try:
        for block in blocks("docs/add-an-algorithm.md"):
            exec(block, vars(module))
        q = fs.quadratic(clients=4)
        built = fs.algorithm("fedmom", lr=0.01, steps=5)
        run = fs.train(q.problem, q.data, built, rounds=60)
        assert (run.x - q.solution).norm() < 0.2 < (q.problem.x0 - q.solution).norm()
        d = len(q.problem.x0)
        assert run.summary["bytes_up"] == run.summary["bytes_down"] == 60 * 4 * d * 8
        assert (fs.algorithm("heavy_fedmom").beta, fs.algorithm("fedmom").beta) == (0.99, 0.9)
        straight = fs.train(q.problem, q.data, fs.algorithm("server_momentum"), rounds=60)
        for rounds in (20, 60):
            out = {"out": tmp_path / "run", "resume": True}
            again = fs.train(q.problem, q.data, fs.algorithm("server_momentum"), rounds=rounds, **out)
        assert torch.equal(again.x, straight.x)
        assert (straight.x - q.solution).norm() < 0.2
    finally:
        for name in ("fedmom", "heavy_fedmom", "server_momentum"):
            ALGORITHMS.pop(name, None)
        del sys.modules["fedmom"]


@pytest.mark.slow
def test_the_file_of_the_page_on_comparisons_can_be_tuned(tmp_path, monkeypatch, fedstrata):
    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/compare.md").read_text(), flags=re.S)
    monkeypatch.chdir(tmp_path)
    Path("exp.toml").write_text(text)
    words = ("tune", "exp.toml", "--algorithms", "fedavg,scaffold", "--out", "tuned", "--seeds", 2, "--quiet")
    code, printed, err = fedstrata(*words, "--set", "tune.trials=1", "--set", "train.rounds=2")
    assert code == 0, err
    assert "scaffold cannot be" in printed and Path("tuned/best.toml").exists()


@pytest.mark.slow
def test_the_file_of_the_auc_page_runs(tmp_path, monkeypatch):
    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/auc.md").read_text(), flags=re.S)
    monkeypatch.chdir(tmp_path)
    Path("auc.toml").write_text(text)
    Path("sites").mkdir()
    rng = np.random.default_rng(0)
    for site, positives in enumerate([9, 6, 0, 12]):
        targets = (np.arange(80) < positives).astype(np.int64)
        inputs = rng.normal(size=(80, 5)) + 1.5 * targets[:, None]
        np.savez(f"sites/site{site}.npz", inputs=inputs.astype(np.float32), targets=targets)
    config = read("auc.toml", ["train.rounds=20", "model.hidden=[8]"])
    for label in config.variants:
        summary = run_config(config.variant(label), None, False, []).summary
        assert summary["auc"] > 0.8 and summary["per_client"]["auc"][2] is None
        assert ("accuracy" in summary) == (label == "fedavg")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda p: p.stem)
def test_examples_are_valid(path):
    config = read(path)
    assert tomllib.loads(path.read_text())["algorithm"]["name"] == config.algorithm.name
    if config.data.name == "digits" and not config.brings_data:
        assert Experiment(config).data.clients == config.data.clients


def test_every_public_name_has_a_docstring():
    bare = [n for n in fs.__all__ if not (getattr(fs, n).__doc__ or "").strip()]
    assert bare == []


@pytest.mark.parametrize(
    ("noise", "cohort", "clients", "rounds", "said"),
    [(2, 50, 1000, 100, 6.5), (4, 50, 1000, 100, 2.5), (2, 3, 3, 50, 57), (50, 3, 3, 50, 1.2)],
)
def test_the_epsilons_in_the_documentation_are_right(
    noise: float, cohort: int, clients: int, rounds: int, said: float
) -> None:
    found = epsilon(fs.Channel(clip=1.0, noise=noise), {f"1 of {cohort}": rounds}, clients)
    assert found == pytest.approx(said, rel=0.05)
    told = " ".join((ROOT / "docs" / "configuration.md").read_text().split())
    ways = (f"`noise = {noise}` gives an epsilon of {said:g}", f"`noise = {noise}` one of {said:g}.")
    ways += (f"an epsilon of {said:g} needs `noise = {noise}`",)
    assert any(way in told for way in ways)


def test_the_tables_of_options_are_those_of_the_declarations():
    """After a change of an option: python scripts/option_tables.py."""
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert with_option_tables(page) == page
    named = re.findall(r"<!-- options: ([\w.]+) -->", page)
    assert sorted(named) == sorted([*TABLES, *(kind for kind in KINDS if kind != "algorithms")])
    keys = [f"`{key}`" for table in TABLES.values() for key in keys_of(table)]
    assert [key for key in keys if f"| {key} |" not in page] == []
    with pytest.raises(fs.InputError, match=r"Unknown table of options 'chanel'\. Did you mean 'channel'"):
        with_option_tables("<!-- options: chanel -->\n<!-- end -->")
    changed = page.replace("| `rounds` | `100` |", "| `rounds` | `99` |")
    assert changed != page == with_option_tables(changed)


def test_the_python_of_the_guide_to_auc_trains_saves_and_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pictures: None
) -> None:
    random = np.random.default_rng(0)
    (tmp_path / "sites").mkdir()
    for site in range(3):
        targets = (np.arange(60) < 6).astype(np.int64)
        inputs = random.standard_normal((60, 20)) + targets[:, None]
        np.savez(tmp_path / "sites" / f"site{site}.npz", inputs=inputs.astype(np.float32), targets=targets)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    (code,) = blocks("docs/auc.md")
    exec(code, names)
    assert names["run"].summary["auc"] > 0.8 and len(names["scores"]) == 5
