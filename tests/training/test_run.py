"""A finished run: frames, plots, saving and loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import fedstrata as fs


def trained(**options: object) -> tuple[fs.Problem, fs.Run]:
    data = fs.data.digits().imbalance(0.3).split(fs.partition.iid(), clients=3, seed=0)
    problem = fs.auc(fs.models.model("logreg", (1, 8, 8), 1, seed=0))
    how = {"rounds": 3, "batch_size": 8, "eval_every": 1, "threads": 1, **options}
    return problem, fs.train(problem, data, fs.FGDA(steps=3), **how)  # type: ignore[arg-type]


def test_a_history_is_a_frame() -> None:
    pytest.importorskip("pandas")
    _, run = trained()
    frame = run.frame()
    assert list(frame["round"]) == [0, 1, 2, 3] and frame["auc"].iloc[-1] == run.summary["auc"]


def test_a_run_is_saved_and_loaded(tmp_path: Path) -> None:
    problem, run = trained(out=tmp_path / "directory")
    saved = run.save(tmp_path / "saved")
    for folder in (saved, tmp_path / "directory"):
        again = fs.Run.load(folder, problem)
        assert torch.equal(again.x, run.x) and again.y is not None and run.y is not None
        assert torch.equal(again.y, run.y)
        assert again.history == run.history and again.summary == json.loads(json.dumps(run.summary))
        inputs = torch.rand(5, 1, 8, 8)
        assert torch.equal(again.model()(inputs), run.model()(inputs))
    with pytest.raises(fs.InputError, match="not empty"):
        run.save(saved)


def test_what_is_not_a_run_of_the_problem_is_refused(tmp_path: Path) -> None:
    problem, run = trained()
    with pytest.raises(fs.InputError, match=r"no finished run in .*: solution\.safetensors is missing"):
        fs.Run.load(tmp_path, problem)
    saved = run.save(tmp_path / "saved")
    other = fs.auc(fs.models.model("logreg", (4,), 1))
    with pytest.raises(fs.InputError, match=r"shape of x in .* must be \(7,\), that of the problem auc\. Got \(67,\)"):
        fs.Run.load(saved, other)
    plain = fs.erm(fs.models.model("mlp", (1, 8, 8), 1, hidden=[1]), "binary_cross_entropy")
    assert len(plain.x0) == 67
    with pytest.raises(fs.InputError, match=r"shape of y in .* must be None"):
        fs.Run.load(saved, plain)
    for content in (b"", b"not tensors", (saved / "solution.safetensors").read_bytes()[:40]):
        (saved / "solution.safetensors").write_bytes(content)
        with pytest.raises(fs.InputError, match="cannot be read"):
            fs.Run.load(saved, problem)


DAMAGE: dict[str, tuple[str, Any, str]] = {
    "no JSON": ("summary.json", "{", "cannot be read"),
    "deep": ("summary.json", "[" * 100_000, "cannot be read"),
    "not text": ("summary.json", b"\xff\xfe\x00", "cannot be read"),
    "a list": ("summary.json", [1], "whose status is 'finished'. Got 'list'"),
    "of something else": ("summary.json", {"name": "x"}, "whose status is 'finished'. Got None"),
    "unfinished": ("summary.json", {"status": "running"}, "Got 'running'"),
    "no algorithm": ("summary.json", {"status": "finished"}, "algorithm in .* must be a name. Got None"),
    "wrong type": ("summary.json", {"algorithm": 3}, "algorithm in .* must be a name. Got 3"),
    "text for a number": ("summary.json", {"auc": "high"}, "auc in .* must be a finite number"),
    "a number that is not one": ("summary.json", {"auc": float("nan")}, "auc in .* must be a finite number"),
    "a huge number": ("summary.json", {"auc": 10**400}, "auc in .* must be a finite number"),
    "a list for a number": ("summary.json", {"seconds": [1]}, "seconds in .* must be a finite number"),
    "no rows": ("metrics.jsonl", "", "metrics.jsonl is missing or has no rows"),
    "infinite": ("metrics.jsonl", '{"round": 0, "auc": Infinity}\n', "auc in .* must be a finite number"),
    "null": ("metrics.jsonl", '{"round": 0, "auc": null}\n', "auc in .* must be a finite number"),
    "huge round": ("metrics.jsonl", f'{{"round": {10**400}}}\n', "round in .* must be a finite number"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_record_is_refused(case: str, tmp_path: Path) -> None:
    problem = fs.erm(fs.models.model("logreg", (2,), 1, seed=0), "binary_cross_entropy")
    summary = {"status": "finished", "algorithm": "fedavg", "problem": "erm", "data": "mine", "auc": 0.5, "seconds": 1}
    run = fs.Run(problem.x0, None, [{"round": 0, "auc": 0.5, "seconds": 1}], summary, problem)
    folder = run.save(tmp_path / "run")
    assert repr(fs.Run.load(folder, problem)) == repr(run)
    file, content, message = DAMAGE[case]
    if isinstance(content, dict) and case not in ("of something else", "unfinished", "no algorithm"):
        content = summary | content
    content = json.dumps(content) if isinstance(content, dict | list) else content
    (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(fs.InputError, match=message):
        fs.Run.load(folder, problem)
    (folder / file).unlink()
    (folder / file).mkdir()
    with pytest.raises(fs.InputError, match="cannot be read"):
        fs.Run.load(folder, problem)


def test_a_solution_that_is_not_finite_or_of_another_type_is_refused(tmp_path: Path) -> None:
    problem, run = trained()
    damaged = run.x.clone()
    damaged[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    for x, message in (
        (run.x.double(), r"x in .* must be numbers of type torch.float32. Got 'torch.float64'"),
        (damaged, rf"3 of {len(run.x)} entries of x are NaN or infinite"),
    ):
        saved = fs.Run(x, run.y, run.history, run.summary, problem).save(tmp_path / str(x.dtype))
        with pytest.raises(fs.InputError, match=message):
            fs.Run.load(saved, problem)


def test_a_run_is_plotted(tmp_path: Path) -> None:
    _, run = trained()
    assert run.plot(tmp_path / "run.svg", axis="samples").read_text().startswith("<?xml")


def test_a_notebook_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(force_jupyter=False, force_terminal=False, quiet=True)
    started = []
    monkeypatch.setattr("rich.progress.Progress.start", lambda self: started.append(self))
    for notebook in (False, True):
        console.is_jupyter = notebook
        trained(callbacks=[fs.ShowProgress(console)])
        assert len(started) == notebook
