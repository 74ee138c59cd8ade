"""Checkpoints: safetensors and JSON, atomic, the last two kept.

A checkpoint of round r is three files. ``round-r.safetensors`` holds the server's vectors. ``clients-r.safetensors``
holds the rows that clients kept since the checkpoint before (so a checkpoint costs what a round changed, not what all
clients hold). ``round-r.json`` is written last: counts, and the names and SHA-256 of every file it needs. A checkpoint
exists once its JSON does; a kill at any moment leaves the one before.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from fedstrata.clients.state import ClientState
from fedstrata.errors import FedstrataError


@dataclass
class Checkpoint:
    """What a run needs to go on: the round that is done, the server's vectors, counts, clients' rows."""

    round: int
    state: dict[str, torch.Tensor]
    counts: dict[str, int]
    seconds: float
    rows: list[dict[str, torch.Tensor]] = field(default_factory=list)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it is either there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class Checkpoints:
    """The checkpoints in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._segments: list[dict[str, Any]] = []
        self._saved_rows = 0

    def save(self, checkpoint: Checkpoint, clients: ClientState) -> None:
        """Write a checkpoint, then remove those older than the last two."""
        self.folder.mkdir(parents=True, exist_ok=True)
        compact = self._saved_rows > 2 * clients.count() + 1
        changes = clients.take_changes(everything=compact)
        if compact:
            self._segments, self._saved_rows = [], 0
        if changes:
            rows = sum(len(v) for k, v in changes.items() if not k.endswith(".clients"))
            self._segments = [*self._segments, self._write(f"clients-{checkpoint.round:08d}", changes)]
            self._saved_rows += rows
        manifest = {
            "round": checkpoint.round,
            "counts": checkpoint.counts,
            "seconds": checkpoint.seconds,
            "server": self._write(f"round-{checkpoint.round:08d}", checkpoint.state),
            "clients": self._segments,
        }
        path = self.folder / f"round-{checkpoint.round:08d}.json"
        write_atomically(path, _with_hash(manifest))
        self._clean()

    def _write(self, name: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        content = save({k: v.detach().cpu().contiguous() for k, v in tensors.items()})
        path = self.folder / f"{name}.safetensors"
        write_atomically(path, content)
        return {"file": path.name, "sha256": hashlib.sha256(content).hexdigest()}

    def _clean(self) -> None:
        manifests = sorted(self.folder.glob("round-*.json"))
        for old in manifests[:-2]:
            old.unlink()
        needed = set()
        for path in manifests[-2:]:
            try:
                manifest = _read_manifest(path)
            except FedstrataError:
                continue
            needed |= {manifest["server"]["file"], *(s["file"] for s in manifest["clients"])}
        for path in self.folder.iterdir():
            if path.suffix == ".tmp" or (path.suffix == ".safetensors" and path.name not in needed):
                path.unlink(missing_ok=True)

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest good checkpoint, and a warning for each newer one that is not."""
        warnings = []
        for path in sorted(self.folder.glob("round-*.json"), reverse=True):
            try:
                checkpoint = self._load(path)
            except FedstrataError as error:
                warnings.append(f"Checkpoint {path} is damaged ({error}); falling back to the one before.")
                path.unlink(missing_ok=True)
                continue
            return checkpoint, warnings
        return None, warnings

    def _load(self, path: Path) -> Checkpoint:
        manifest = _read_manifest(path)
        state = self._read(manifest["server"])
        rows = [self._read(segment) for segment in manifest["clients"]]
        self._segments = manifest["clients"]
        self._saved_rows = sum(len(v) for r in rows for k, v in r.items() if not k.endswith(".clients"))
        return Checkpoint(manifest["round"], state, manifest["counts"], manifest["seconds"], rows)

    def _read(self, entry: dict[str, Any]) -> dict[str, torch.Tensor]:
        path = self.folder / entry["file"]
        try:
            content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() != entry["sha256"]:
                raise FedstrataError(f"{path.name} does not match its checksum")
            return load(content)
        except (OSError, SafetensorError) as error:
            raise FedstrataError(f"{path.name}: {error}") from None


def _with_hash(manifest: dict[str, Any]) -> bytes:
    body = json.dumps(manifest, sort_keys=True)
    return json.dumps({"manifest": manifest, "sha256": hashlib.sha256(body.encode()).hexdigest()}, indent=1).encode()


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
        manifest: dict[str, Any] = content["manifest"]
        body = json.dumps(manifest, sort_keys=True)
        if hashlib.sha256(body.encode()).hexdigest() != content["sha256"]:
            raise FedstrataError(f"{path.name} does not match its checksum")
        return manifest
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedstrataError(f"{path.name} cannot be read: {error}") from None
