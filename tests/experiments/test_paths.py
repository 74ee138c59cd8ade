"""Paths that cannot be written are refused before anything runs, in Python and on the command line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedstrata as fs

METHODS: dict[str, Any] = {"a": (lambda seed: fs.erm(nn.Linear(3, 2)), fs.FedAvg())}
HOW: dict[str, Any] = {"rounds": 1, "batch_size": 4, "threads": 1}


def never(*_: Any) -> dict[str, float]:
    raise AssertionError("a run has started")


def sites() -> fs.FederatedData:
    return fs.FederatedData.from_arrays([(torch.ones(8, 3), torch.arange(8) % 2) for _ in range(2)])


def in_python(call: str, out: Any) -> None:
    problem, algorithm = METHODS["a"][0](0), fs.FedAvg()
    if call == "train":
        fs.train(problem, sites(), algorithm, out=out, evaluate=never, **HOW)
    elif call == "train_local":
        fs.train_local(problem, sites(), algorithm, out=out, evaluate=never, **HOW)
    elif call == "save":
        fs.Run(problem.x0, None, [{"round": 0}], {}, problem).save(out)
    else:
        getattr(fs, call)(METHODS, sites(), seeds=1, out=out, evaluate=never, **HOW)


BAD: dict[str, tuple[Callable[[Path], str], str]] = {
    "empty": (lambda folder: "", "the path of a directory. Got ''"),
    "file": (lambda folder: str(folder / "file"), "file is a file, not a directory"),
    "below a file": (lambda folder: str(folder / "file" / "a" / "b"), "file is a file, not a directory"),
    "long": (lambda folder: str(folder / ("x" * 300)), "File name too long"),
    "long, below a new one": (lambda folder: str(folder / "new" / ("x" * 300)), "longer than 255 bytes"),
    "very long": (lambda folder: str(folder / "/".join("x" * 3000)), "File name too long"),
    "no text": (lambda folder: str(folder / "a\0b"), "embedded null"),
    "not writable": (lambda folder: str(folder / "closed" / "new"), "No permission to write in"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a file, and with a directory that is not writable even for a superuser."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "closed").mkdir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "closed" and access(path, mode))
    return tmp_path


def untouched(folder: Path) -> bool:
    return sorted(p.name for p in folder.rglob("*")) == ["closed", "file"] and (folder / "file").read_text() == "mine"


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("call", ["compare", "tune", "train", "train_local", "save"])
def test_python_refuses_a_path_that_cannot_be_written(call: str, case: str, folder: Path) -> None:
    path, message = BAD[case]
    with pytest.raises(fs.InputError, match=message):
        in_python(call, path(folder))
    assert untouched(folder)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("case", [case for case in BAD if case != "no text"])  # no shell can pass a null byte
@pytest.mark.parametrize("command", ["run", "compare", "tune"])
def test_commands_refuse_a_path_that_cannot_be_written(
    command: str, case: str, resume: bool, folder: Path, fedstrata: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("config") / "e.toml"
    file.write_text("[train]\nrounds = 1\n")
    path, message = BAD[case]
    chosen = [] if command == "run" else ["--algorithms", "fedavg"]
    code, _, err = fedstrata(command, file, *chosen, "--out", path(folder), *["--resume"] * resume)
    wanted = "The path is empty" if case == "empty" else message
    assert code == 2 and wanted in " ".join(err.split()).replace("│ ", "") and untouched(folder)


@pytest.mark.parametrize("name", ["", ".", "no-suffix", "x.foo", "new/x.png", "file/x.png", "x" * 300 + ".png"])
@pytest.mark.parametrize("command", ["plot", "partition", "demo"])
def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_read(
    command: str, name: str, folder: Path, fedstrata: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    words = [] if command == "demo" else ["nothing here"]
    code, _, err = fedstrata(command, *words, "--out", name)
    assert code == 2 and ("The path" in err or "file, not a directory" in err) and untouched(folder)


def test_a_run_is_not_plotted_to_nowhere(folder: Path) -> None:
    problem = METHODS["a"][0](0)
    run = fs.Run(problem.x0, None, [{"round": 0, "loss": 1.0}], {"algorithm": "fedavg"}, problem)
    for path in ("", folder / "plot", folder / "new" / "x.png"):
        with pytest.raises(fs.InputError, match="path of a plot"):
            run.plot(path)
    assert untouched(folder)
