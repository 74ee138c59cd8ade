"""The state of a client, on the disk of its node.

Every exchange in which the client keeps something writes a *version* of its state: a file, named after the exchange and
written atomically. The server says which version is current. So a node that was killed or is asked again, or whose
server went back to a checkpoint, starts from the state that matches the server's.
"""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from fedstrata.clients.state import ClientState, LostState
from fedstrata.core.errors import InputError, invalid
from fedstrata.core.files import remove_leftovers, write_atomically
from fedstrata.federation.wire import Version

RUNS_KEPT, OLD = 3, 30 * 24 * 3600.0
"""A new run removes the state of runs that are older than ``OLD`` seconds, but keeps ``RUNS_KEPT`` of them."""

_RUN = re.compile(r"[0-9a-f]{32}")
_VERSION = re.compile(r"state-(\d{8})-(\d{4,})\.safetensors")


class StateFolder:
    """The versions of one client's state in one run, in ``base/run``."""

    def __init__(self, base: Path, run: str) -> None:
        if not _RUN.fullmatch(run):
            raise invalid("id of the run", run, "32 hexadecimal digits")
        self.path = base / run

    def load(
        self, version: Version | None, client: int, clients: int, memory_limit: int, rejoins: bool = False
    ) -> ClientState:
        """Return a version of the state, empty for None; remove later ones, which the server has not accepted.

        If the version is missing, a client that rejoins starts from an empty state.
        """
        state = ClientState(clients, memory_limit)
        remove_leftovers(self.path)
        versions = self._versions()
        if version is not None and version not in versions and not rejoins:
            raise LostState(
                f"The node has lost the state of its client: {self.path / _name(version)} is missing. Restore the "
                "folder, or start a new run."
            )
        for later in versions:
            if version is None or later > version:
                versions[later].unlink(missing_ok=True)
        if version is not None and version in versions:
            rows = _read(versions[version])
            owner = torch.tensor([client])
            state.load({**rows, **{f"{name}.clients": owner for name in rows}})
        return state

    def save(self, version: Version, state: ClientState) -> bool:
        """Write a version of the state if it has changed since it was loaded; return whether it was written."""
        if not list(state.take_changes()):
            return False
        if not self.path.exists():
            self.path.mkdir(parents=True, mode=0o700)
            self._remove_old_runs()
        rows = {name: row.contiguous() for piece in state.take_all() for name, row in piece.items()}
        content = save({name: row for name, row in rows.items() if not name.endswith(".clients")})
        write_atomically(self.path / _name(version), content)
        return True

    def remove_before(self, oldest: Version | None) -> None:
        """Remove the versions that no checkpoint of the server needs any more."""
        for version, file in self._versions().items():
            if oldest is not None and version < oldest:
                file.unlink(missing_ok=True)

    def _versions(self) -> dict[Version, Path]:
        files = self.path.iterdir() if self.path.exists() else ()
        named = ((_VERSION.fullmatch(file.name), file) for file in files)
        return {(int(match[1]), int(match[2])): file for match, file in named if match}

    def _remove_old_runs(self) -> None:
        runs = [p for p in self.path.parent.iterdir() if p.is_dir() and p != self.path and _RUN.fullmatch(p.name)]
        old = sorted((p for p in runs if time.time() - p.stat().st_mtime > OLD), key=lambda path: path.stat().st_mtime)
        for path in old[: max(0, len(old) - RUNS_KEPT + 1)]:
            shutil.rmtree(path, ignore_errors=True)


def _name(version: Version) -> str:
    return f"state-{version[0]:08d}-{version[1]:04d}.safetensors"


def _read(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise InputError(f"The state of the client in {file} cannot be read: {error}") from None
