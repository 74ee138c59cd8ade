"""Checkpoints: safetensors and JSON, atomic; the last two are kept, and the last synced one.

Round r has ``round-r.safetensors``, the server's vectors, and ``clients-r-*.safetensors``, the rows that clients wrote
since the previous checkpoint, so its cost depends on what a round changed, not on what all clients hold. Sixteen such
files are merged into one, and sixteen of those into a larger one, so a checkpoint lists few files, however many
checkpoints came before it. Occasionally all rows are rewritten, in pieces. ``round-r.json`` is written last, with the
counts, and the name and SHA-256 of every file it needs. A checkpoint exists once its JSON does; a kill at any moment
leaves the previous one intact.

Syncing to disk after every round would often cost more than the round, so a checkpoint is synced only if thirty
seconds have passed since the last synced one; the logs of the run are synced with it. With a checkpoint after every
round, a kill loses at most the current round, a power failure at most half a minute.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from fedstrata.core.errors import FedstrataError, InputError, is_number
from fedstrata.core.files import sync, write_atomically
from fedstrata.core.version import FORMAT, __version__


def to_safetensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return tensors in the format of a .safetensors file; those that share memory are written once for each name."""
    separate: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return save(separate)


def check_format(what: str, number: object, writer: str) -> None:
    """Raise if this version cannot resume ``what``, in format ``number``; ``writer`` is the version that wrote it."""
    if number != FORMAT:
        raise InputError(
            f"{what} was written by {writer}, in format {number}. This is fedstrata {__version__}, which resumes runs "
            f"of format {FORMAT}. Finish the run with that version, or start a new one."
        )


class Damaged(FedstrataError):
    """A file of a checkpoint is missing or corrupt."""


@dataclass
class Checkpoint:
    """What a run needs to resume: the last finished round, the server's vectors, counts, clients' rows.

    evaluations: a digest of each row that metrics.jsonl has up to this round; None if that is not known.
    faults:      how many rows faults.jsonl has, and a digest of them; None if that is not known.
    """

    round: int
    state: dict[str, torch.Tensor]
    counts: dict[str, Any]
    seconds: float
    rows: Iterable[dict[str, torch.Tensor]] = ()
    evaluations: Sequence[str] | None = None
    faults: tuple[int, str] | None = None


DURABLE_SECONDS = 30.0

FAN = 16
"""How many files of clients' rows are merged into one."""

MERGED_BYTES = 64 << 20
"""The most bytes that are merged; files are not merged if one is more than four times as large as their mean."""

_CLIENTS = ".clients"
"""Ends the name of the numbers of the clients whose rows a tensor holds."""

_WHOLE = -1
"""The level of files with all rows, which are not merged; otherwise it is how often rows were merged."""


class Checkpoints:
    """The checkpoints in one folder; ``logs`` are the files of the run that are synced with a durable one."""

    def __init__(self, folder: Path, logs: Sequence[Path] = ()) -> None:
        self.folder, self.logs = folder, logs
        self._segments: list[dict[str, Any]] = []
        self._saved_rows = 0
        self._synced = -DURABLE_SECONDS

    def wants_all(self, rows: int) -> bool:
        """Whether it is time to rewrite all ``rows`` of the clients, not only those that changed."""
        return self._saved_rows > 2 * rows + 1

    def save(self, checkpoint: Checkpoint, complete: bool) -> None:
        """Write a checkpoint, then remove those older than the last two and the last durable one.

        Its rows are those that changed since the previous checkpoint, or all of them if it is ``complete``.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        now = time.monotonic()
        durable = now - self._synced >= DURABLE_SECONDS
        if complete:
            self._segments = []
        for number, rows in enumerate(checkpoint.rows):
            if rows:
                segment = self._write(f"clients-{checkpoint.round:08d}-{number}", rows, durable)
                self._segments = [*self._segments, segment | {"rows": _count(rows), "level": _WHOLE if complete else 0}]
        self._merge(checkpoint.round, durable)
        self._saved_rows = sum(segment["rows"] for segment in self._segments)
        manifest = {
            "format": FORMAT,
            "round": checkpoint.round,
            "counts": checkpoint.counts,
            "seconds": checkpoint.seconds,
            "evaluations": checkpoint.evaluations,
            "faults": checkpoint.faults,
            "durable": durable,
            "server": self._write(f"round-{checkpoint.round:08d}", checkpoint.state, durable),
            "clients": self._segments,
        }
        path = self.folder / f"round-{checkpoint.round:08d}.json"
        if durable:
            self._sync_others()
            self._synced = now
        write_atomically(path, _with_hash(manifest), durable)
        self._clean()

    def _merge(self, round: int, durable: bool) -> None:
        """Merge the last files while there are ``FAN`` of the same level: a row is rewritten once per level."""
        while len(last := self._segments[-FAN:]) == FAN:
            level = last[0].get("level", _WHOLE)
            if level == _WHOLE or any(segment.get("level") != level for segment in last):
                return
            try:
                sizes = [(self.folder / segment["file"]).stat().st_size for segment in last]
                if sum(sizes) > MERGED_BYTES or max(sizes) * FAN > 4 * sum(sizes):
                    return
                rows = _newest([self._read(segment) for segment in last])
            except (FedstrataError, OSError):  # what is wrong with a file matters only to those who need it
                return
            segment = self._write(f"clients-{round:08d}-merged-{level + 1}", rows, durable)
            self._segments = [*self._segments[:-FAN], segment | {"rows": _count(rows), "level": level + 1}]

    def _sync_others(self) -> None:
        """Sync what was written since the last durable checkpoint: the clients' rows, and the logs of the run."""
        for path in (*(self.folder / segment["file"] for segment in self._segments), *self.logs):
            sync(path)

    def _write(self, name: str, tensors: dict[str, torch.Tensor], durable: bool) -> dict[str, Any]:
        content = to_safetensors(tensors)
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
        """Return the newest intact checkpoint, or None if there is none, and a warning for each newer, damaged one.

        Nothing is removed, and a file that cannot be read is an error.
        """
        damaged: list[str] = []
        for path in sorted(self.folder.glob("round-*.json"), reverse=True):
            try:
                saved = self._load(path)
            except Damaged as error:
                damaged.append(f"Checkpoint {path} is damaged ({error})")
            else:
                return saved, [f"{what}; falling back to the previous one." for what in damaged]
        if damaged:
            raise FedstrataError(
                f"All checkpoints in {self.folder} are damaged: cannot resume the run. {damaged[0]}. Nothing was "
                "removed: restore the directory from a copy, or start a new run in another one."
            )
        return None, []

    def _load(self, path: Path) -> Checkpoint:
        try:
            return self._checked(_read_manifest(path), path)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise Damaged(f"{path.name}: {type(error).__name__} {error}") from None

    def _checked(self, manifest: dict[str, Any], path: Path) -> Checkpoint:
        check_format(f"The checkpoint {path}", manifest.get("format", 1), "another version of fedstrata")
        state = self._read(manifest["server"])
        for segment in manifest["clients"]:
            self._read(segment)  # check all before using any
        self._segments = manifest["clients"]
        self._saved_rows = sum(segment["rows"] for segment in self._segments)
        rows = (self._read(segment) for segment in manifest["clients"])
        evaluations = manifest.get("evaluations")
        evaluations = evaluations if isinstance(evaluations, list) else None
        rows_of_faults, digest = manifest.get("faults") or (0, None)
        faults = None if digest is None else (int(rows_of_faults), str(digest))
        wrong = next((name for name in ("round", "seconds") if not is_number(manifest[name])), None)
        if wrong is not None or not isinstance(manifest["counts"], dict) or not manifest["counts"]:
            raise Damaged(f"{path.name} has no valid {wrong or 'counts'}")
        return Checkpoint(manifest["round"], state, manifest["counts"], manifest["seconds"], rows, evaluations, faults)

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
    return sum(len(value) for name, value in rows.items() if not name.endswith(_CLIENTS))


def _newest(parts: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the rows of all parts, the oldest first; of those of the same client, only the newest."""
    rows: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(name for part in parts for name in part if not name.endswith(_CLIENTS)):
        having = [part for part in parts if name in part]
        clients, values = (torch.cat([part[key] for part in having]) for key in (name + _CLIENTS, name))
        own, last = np.unique(clients.numpy()[::-1], return_index=True)
        newest = torch.from_numpy(len(clients) - 1 - last)
        rows |= {name: values[newest], name + _CLIENTS: torch.from_numpy(own)}
    return rows


def _with_hash(manifest: dict[str, Any]) -> bytes:
    body = json.dumps(manifest, sort_keys=True)
    return json.dumps({"manifest": manifest, "sha256": hashlib.sha256(body.encode()).hexdigest()}, indent=1).encode()


_NEEDED = ("round", "counts", "seconds", "durable", "server", "clients")
"""The keys of every manifest in this format."""


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
        manifest: dict[str, Any] = content["manifest"]
        body = json.dumps(manifest, sort_keys=True)
        if hashlib.sha256(body.encode()).hexdigest() != content["sha256"]:
            raise Damaged(f"{path.name} does not match its checksum")
        missing = [key for key in _NEEDED if key not in manifest]
        if missing and manifest.get("format") == FORMAT:
            raise Damaged(f"{path.name} lacks {', '.join(missing)}")
        return manifest
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path.name}: {error}") from None
    except OSError as error:
        raise FedstrataError(f"The checkpoint file {path} cannot be read: {error}") from None
