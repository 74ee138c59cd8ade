"""Checkpoints: safetensors and JSON, atomic, the last two kept.

Round r has ``round-r.safetensors``, the server's vectors, and ``clients-r-*.safetensors``, the rows that clients kept
since the checkpoint before (so a checkpoint costs what a round changed, not what all clients hold; now and then all
rows are written anew, in pieces). ``round-r.json`` is written last: counts, and the names and SHA-256 of every file it
needs. A checkpoint exists once its JSON does; a kill at any moment leaves the one before.

Waiting for the disk after every round would cost more than many a round, so a checkpoint is forced to the disk only
when thirty seconds have passed since the last one that was; that one is kept too. So a kill loses at most the round
under way, and a power failure at most half a minute.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from fedstrata.core.errors import FedstrataError
from fedstrata.core.files import write_atomically
from fedstrata.core.version import FORMAT


class Damaged(FedstrataError):
    """A checkpoint's file is missing or not what was written."""


@dataclass
class Checkpoint:
    """What a run needs to go on: the round that is done, the server's vectors, counts, clients' rows."""

    round: int
    state: dict[str, torch.Tensor]
    counts: dict[str, Any]
    seconds: float
    rows: Iterable[dict[str, torch.Tensor]] = ()


DURABLE_SECONDS = 30.0


class Checkpoints:
    """The checkpoints in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._segments: list[dict[str, Any]] = []
        self._saved_rows = 0
        self._synced = -DURABLE_SECONDS

    def wants_all(self, rows: int) -> bool:
        """Whether it is time to write all ``rows`` of the clients anew, not only those that changed."""
        return self._saved_rows > 2 * rows + 1

    def save(self, checkpoint: Checkpoint, anew: bool) -> None:
        """Write a checkpoint, then remove those older than the last two and the last durable one.

        Its rows are those that clients changed since the one before, or all of them ``anew``.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        now = time.monotonic()
        durable = now - self._synced >= DURABLE_SECONDS
        if anew:
            self._segments, self._saved_rows = [], 0
        for number, rows in enumerate(checkpoint.rows):
            if rows:
                segment = self._write(f"clients-{checkpoint.round:08d}-{number}", rows, durable)
                segment["rows"] = _count(rows)
                self._segments = [*self._segments, segment]
                self._saved_rows += segment["rows"]
        manifest = {
            "format": FORMAT,
            "round": checkpoint.round,
            "counts": checkpoint.counts,
            "seconds": checkpoint.seconds,
            "durable": durable,
            "server": self._write(f"round-{checkpoint.round:08d}", checkpoint.state, durable),
            "clients": self._segments,
        }
        path = self.folder / f"round-{checkpoint.round:08d}.json"
        if durable:
            self._sync_segments()
            self._synced = now
        write_atomically(path, _with_hash(manifest), durable)
        self._clean()

    def _sync_segments(self) -> None:
        """Force the rows of the checkpoints in between to the disk too."""
        for segment in self._segments:
            with (self.folder / segment["file"]).open("rb") as file:
                os.fsync(file.fileno())

    def _write(self, name: str, tensors: dict[str, torch.Tensor], durable: bool) -> dict[str, Any]:
        content = save({k: v.detach().cpu().contiguous() for k, v in tensors.items()})
        path = self.folder / f"{name}.safetensors"
        write_atomically(path, content, durable)
        return {"file": path.name, "sha256": hashlib.sha256(content).hexdigest()}

    def _clean(self) -> None:
        needed = set()
        durable_kept = False
        for age, path in enumerate(sorted(self.folder.glob("round-*.json"), reverse=True)):
            try:
                manifest = _read_manifest(path)
            except Damaged:
                path.unlink()
                continue
            if age < 2 or (manifest["durable"] and not durable_kept):
                needed |= {manifest["server"]["file"], *(s["file"] for s in manifest["clients"])}
                durable_kept |= manifest["durable"]
            else:
                path.unlink()
        for path in self.folder.iterdir():
            if path.suffix == ".tmp" or (path.suffix == ".safetensors" and path.name not in needed):
                path.unlink(missing_ok=True)

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest good checkpoint, and a warning for each newer one that is damaged.

        None when no checkpoint was ever written. Nothing is removed: a file that cannot be read is an error.
        """
        warnings: list[str] = []
        for path in sorted(self.folder.glob("round-*.json"), reverse=True):
            try:
                return self._load(path), warnings
            except Damaged as error:
                warnings.append(f"Checkpoint {path} is damaged ({error}); falling back to the one before.")
        if warnings:
            raise FedstrataError(f"Every checkpoint in {self.folder} is damaged: the run cannot go on. {warnings[0]}")
        return None, []

    def _load(self, path: Path) -> Checkpoint:
        manifest = _read_manifest(path)
        if manifest.get("format") != FORMAT:
            raise FedstrataError(
                f"The checkpoint {path} has the format {manifest.get('format', 1)}. This version of fedstrata reads "
                f"format {FORMAT}."
            )
        state = self._read(manifest["server"])
        for segment in manifest["clients"]:
            self._read(segment)  # all must be good before any is used
        self._segments = manifest["clients"]
        self._saved_rows = sum(segment["rows"] for segment in self._segments)
        rows = (self._read(segment) for segment in manifest["clients"])
        return Checkpoint(manifest["round"], state, manifest["counts"], manifest["seconds"], rows)

    def _read(self, entry: dict[str, Any]) -> dict[str, torch.Tensor]:
        path = self.folder / entry["file"]
        try:
            content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() != entry["sha256"]:
                raise Damaged(f"{path.name} does not match its checksum")
            return load(content)
        except (FileNotFoundError, SafetensorError) as error:
            raise Damaged(f"{path.name}: {error}") from None
        except OSError as error:
            raise FedstrataError(f"The checkpoint file {path} cannot be read: {error}") from None


def _count(rows: dict[str, torch.Tensor]) -> int:
    return sum(len(value) for name, value in rows.items() if not name.endswith(".clients"))


def _with_hash(manifest: dict[str, Any]) -> bytes:
    body = json.dumps(manifest, sort_keys=True)
    return json.dumps({"manifest": manifest, "sha256": hashlib.sha256(body.encode()).hexdigest()}, indent=1).encode()


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
        manifest: dict[str, Any] = content["manifest"]
        body = json.dumps(manifest, sort_keys=True)
        if hashlib.sha256(body.encode()).hexdigest() != content["sha256"]:
            raise Damaged(f"{path.name} does not match its checksum")
        return manifest
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path.name}: {error}") from None
    except OSError as error:
        raise FedstrataError(f"The checkpoint file {path} cannot be read: {error}") from None
