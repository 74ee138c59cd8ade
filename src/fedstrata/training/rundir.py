"""A run directory: config.toml, metrics.jsonl, summary.json, model.safetensors, checkpoint/, plot.png.

Where clients were left out, ``faults.jsonl`` says which, when and why.
Where ``[pretrain]`` comes first, ``pretrain/`` in it is the run directory of that.
"""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import tomli_w
import torch
from safetensors.torch import save

from fedstrata.core.errors import InputError
from fedstrata.training.checkpoint import Checkpoints, write_atomically

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

Row = dict[str, Any]

FREE_TO_CHANGE = {
    *("train.rounds", "train.threads", "train.checkpoint_every", "train.state_memory", "data.directory"),
    *("faults.quorum", "faults.retries", "faults.timeout", "faults.max_bytes"),
}
"""Settings that a resumed run may change without becoming another run."""

_START = "digest.start"


_STARTED = ".started-by"


def started_by() -> str:
    """Return what tells the processes of one ``torchrun`` from those of another; nothing without it."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


class RunDirectory:
    """Reads and writes one run's files; nothing there is ever overwritten by another run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = Checkpoints(self.path / "checkpoint")
        self.metrics = self.path / "metrics.jsonl"
        self._handle: int | None = None

    def open(self, config: dict[str, Any], resume: bool) -> None:
        """Start a new run here, or get ready to go on with the one that is here."""
        settings = self.path / "config.toml"
        if self.path.is_dir():
            self._lock()
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"The run directory {self.path} is a file. Nothing was overwritten.")
        if settings.exists() and resume:
            refuse_other_settings(read_toml(settings), config, self.path)
            return
        self.refuse_if_used()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock()
        if started_by():
            write_atomically(self.path / _STARTED, started_by().encode())
        self.write_config(config)

    def refuse_if_used(self) -> None:
        """Refuse a folder that holds anything."""
        if self.path.exists() and any(p.suffix != ".tmp" for p in self.path.iterdir()):
            how = "Choose another, or pass --resume (resume=True) to go on with the run there."
            if not (self.path / "config.toml").exists():
                how = "It holds no fedstrata run. Choose another."
            raise InputError(f"The run directory {self.path} exists and is not empty. Nothing was overwritten. {how}")

    def is_ours(self) -> bool:
        """Whether this very ``torchrun`` started the run here: then a process that it starts again goes on with it."""
        path = self.path / _STARTED
        return path.exists() and path.read_text() == started_by() != ""

    def close(self) -> None:
        """Let other processes work here again."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _lock(self) -> None:
        """Make sure that no other process writes to this run; the system undoes it when the process ends, however."""
        if self._handle is not None or fcntl is None:
            return
        handle = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise InputError(
                f"Another process is at work on the run in {self.path}. Wait for it, or stop it."
            ) from None
        except OSError:  # a file system without locks
            os.close(handle)
            return
        self._handle = handle

    def write_config(self, config: dict[str, Any]) -> None:
        """Write config.toml."""
        write_atomically(self.path / "config.toml", tomli_w.dumps(config).encode())

    def rows(self) -> list[Row]:
        """Return the rows of metrics.jsonl; a line cut off by a kill is left out."""
        return read_rows(self.metrics)

    def faults(self) -> list[Row]:
        """Return the lines of faults.jsonl: who was left out, when and why."""
        return read_rows(self.path / "faults.jsonl")

    def truncate(self, rows: list[Row]) -> None:
        """Make metrics.jsonl hold just these rows."""
        write_atomically(self.metrics, "".join(_line(r) for r in rows).encode())

    def append(self, row: Row) -> None:
        """Add a row to metrics.jsonl."""
        with self.metrics.open("a") as file:
            file.write(_line(row))

    def append_faults(self, rows: list[Row]) -> None:
        """Add lines to faults.jsonl: who was left out, when and why."""
        with (self.path / "faults.jsonl").open("a") as file:
            file.write("".join(_line(row) for row in rows))

    def truncate_faults(self, rounds: int) -> list[Row]:
        """Make faults.jsonl end with this round; return what is left."""
        path = self.path / "faults.jsonl"
        rows = [row for row in self.faults() if row["round"] <= rounds]
        if path.exists():
            write_atomically(path, "".join(_line(r) for r in rows).encode())
        return rows

    def write_summary(self, summary: Row) -> None:
        """Write summary.json."""
        write_atomically(self.path / "summary.json", json.dumps(summary, indent=2).encode())

    def write_model(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write model.safetensors."""
        content = save({k: v.detach().cpu().contiguous() for k, v in tensors.items()})
        write_atomically(self.path / "model.safetensors", content)


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a .jsonl file; a line cut off by a kill is left out."""
    rows: list[Row] = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; a wrong one is an :class:`InputError` that names the place."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"There is no file {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The file {path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"The file {path} is not valid TOML: {error}") from None


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested configuration as dotted keys."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            out.update(flatten(value, f"{prefix}{key}."))
        else:
            out[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return out


def refuse_other_settings(old: dict[str, Any], new: dict[str, Any], path: Path) -> None:
    """Refuse to go on with the run in ``path``, which has ``old`` settings, with ``new`` ones that make it another."""
    before, now = flatten(old), flatten(new)
    free = set(FREE_TO_CHANGE)
    if _START not in before or _START not in now:  # pre-training is still to find the start
        free.add(_START)
    for key in sorted(before.keys() | now.keys(), key=lambda k: (k.startswith("digest."), k)):
        if key.startswith("diagnostics."):  # what is written down of a run does not change it
            continue
        if key not in free and before.get(key) != now.get(key):
            raise InputError(
                f"The run in {path} cannot be resumed with other settings: {key} was {_told(before, key)} there and is "
                f"{_told(now, key)} now. Choose another directory for a new run."
            )


def _told(settings: dict[str, Any], key: str) -> str:
    """Return a setting in words; one that is a table in the one run and none in the other as that table."""
    if key not in settings:
        inside = {k[len(key) + 1 :]: v for k, v in settings.items() if k.startswith(f"{key}.")}
        outside = next((f"{k} = {v!r}" for k, v in settings.items() if key.startswith(f"{k}.")), None)
        return str(inside) if inside else f"not there ({outside})" if outside else "None"
    return repr(settings[key])
