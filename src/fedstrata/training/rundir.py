"""A run directory: config.toml, metrics.jsonl, summary.json, model.safetensors, checkpoint/, plot.png.

If clients were left out, ``faults.jsonl`` says which, when and why. A run that diverged has ``diverged.json``
instead of a summary, a model and a plot. The run directory of a ``[pretrain]`` stage is ``pretrain/``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import tomli_w
import torch

from fedstrata.core.errors import invalid
from fedstrata.core.files import (
    Row,
    Rows,
    lock,
    make_folder,
    read_toml,
    refuse_used,
    remove_leftovers,
    write_atomically,
)
from fedstrata.core.version import FORMAT, __version__
from fedstrata.training.checkpoint import Checkpoints, check_format, to_safetensors
from fedstrata.training.fingerprint import refuse_other_settings

_STARTED = ".started-by"


def started_by() -> str:
    """Return the id of the ``torchrun`` that started this process; empty without one."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


class RunDirectory:
    """The files of one run; another run never overwrites them.

    metrics: one row per evaluation.
    faults:  one row for each client that was left out: when and why.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics = Rows(self.path / "metrics.jsonl", "round", numbers=True)
        self.faults = Rows(self.path / "faults.jsonl", "round", "exchange", "client", "left_out")
        self.checkpoints = Checkpoints(self.path / "checkpoint", (self.metrics.path, self.faults.path))
        self._handle: int | None = None

    def open(self, config: dict[str, Any], resume: bool) -> None:
        """Start a new run in this directory, or prepare to resume the run in it."""
        settings = self.path / "config.toml"
        if self.path.is_dir():
            self._lock()
        if settings.exists() and resume:
            remove_leftovers(self.path)
            remove_leftovers(self.path / "model")
            old = read_toml(settings)
            _check_format(old, self.path)
            refuse_other_settings(old, config, self.path)
            self._diverged.unlink(missing_ok=True)
            return
        self.refuse_if_used()
        make_folder(self.path)
        self._lock()
        if started_by():
            write_atomically(self.path / _STARTED, started_by().encode())
        self.write_config(config)

    def refuse_if_used(self) -> None:
        """Raise if the path is a file, or a directory that is not empty."""
        remedy = "Choose another, or pass --resume (resume=True) to resume the run in it."
        if not (self.path / "config.toml").exists():
            remedy = "It contains no fedstrata run. Choose another."
        refuse_used(self.path, remedy)

    def is_ours(self) -> bool:
        """Whether this ``torchrun`` started the run: a process that it restarts then resumes it."""
        path = self.path / _STARTED
        return path.exists() and path.read_text() == started_by() != ""

    def close(self) -> None:
        """Release the lock."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _lock(self) -> None:
        """Lock the run against other processes; the system releases the lock when this process ends."""
        if self._handle is None:
            self._handle = lock(self.path, "run directory")

    def write_config(self, config: dict[str, Any]) -> None:
        """Write config.toml, with the version that wrote it."""
        config = {**config, "written_by": {"version": __version__, "format": FORMAT}}
        write_atomically(self.path / "config.toml", tomli_w.dumps(config).encode())

    @property
    def _diverged(self) -> Path:
        return self.path / "diverged.json"

    @property
    def diverged(self) -> bool:
        """Whether the run diverged when it last ran."""
        return self._diverged.exists()

    def write_diverged(self, round: int, error: str) -> None:
        """Write diverged.json: the round in which the run diverged, and the message."""
        write_atomically(self._diverged, json.dumps({"round": round, "error": error}, indent=2).encode())

    def write_summary(self, summary: Row) -> None:
        """Write summary.json."""
        write_atomically(self.path / "summary.json", json.dumps(summary, indent=2).encode())

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write a file."""
        write_atomically(self.path / name, content)

    def write_tensors(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Write a .safetensors file: the solution, or the model."""
        write_atomically(self.path / name, to_safetensors(tensors))


def _check_format(config: dict[str, Any], path: Path) -> None:
    """Raise if another version wrote the run in another format."""
    writer = config.get("written_by", {"version": "0.1.0", "format": 1})
    if not isinstance(writer, dict) or not {"version", "format"} <= set(writer):
        wants = "a table with the version that wrote the run, and its format"
        raise invalid("key written_by", writer, wants, f"{path / 'config.toml'}")
    check_format(f"The run in {path}", writer["format"], f"fedstrata {writer['version']}")
