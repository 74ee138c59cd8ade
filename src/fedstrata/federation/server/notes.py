"""What the server must remember of a run besides its checkpoints, in a file next to the run directory."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstrata.clients.privacy import Ledger
from fedstrata.core.errors import InputError
from fedstrata.core.files import write_atomically


@dataclass
class Notes:
    """The notes of one run.

    run:          the name under which nodes keep what belongs to the run.
    descriptions: what the nodes' data look like, as they said at the start.
    releases:     what noise must cover, rounds that were repeated included.
    unmeasured:   how often each node was missing when all were asked for measures.
    """

    path: Path
    run: str
    descriptions: list[dict[str, Any]] | None = None
    releases: dict[str, int] = dataclasses.field(default_factory=dict)
    unmeasured: dict[str, int] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(out: Path, resume: bool) -> Notes:
        """Return the notes of the run in ``out``; new ones if there is none."""
        path = out.with_name(out.name + ".federation.json")
        if path.exists() and out.is_dir() and any(out.iterdir()):
            names = {field.name for field in dataclasses.fields(Notes)}
            return Notes(path, **{name: value for name, value in json.loads(path.read_text()).items() if name in names})
        if resume and (out / "config.toml").exists():
            raise InputError(
                f"The run in {out} cannot be resumed: {path}, which says where nodes keep its state, is missing. "
                "Restore it, or choose another directory for a new run."
            )
        notes = Notes(path, secrets.token_hex(16))
        path.parent.mkdir(parents=True, exist_ok=True)
        notes.write()
        return notes

    def write(self, **changes: Any) -> None:
        """Change some notes, and write all of them."""
        for name, value in changes.items():
            setattr(self, name, value)
        table = {name: value for name, value in dataclasses.asdict(self).items() if name != "path"}
        write_atomically(self.path, json.dumps(table).encode())


class NotedLedger(Ledger):
    """A ledger that survives a server that goes back to a checkpoint: what was released stays released."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self.releases = dict(notes.releases)

    def add(self, exchanges: int, clients: int) -> None:
        """Record a noisy exchange with a cohort of ``clients``, its ``exchanges``-th one."""
        super().add(exchanges, clients)
        self._notes.write(releases=self.releases)

    def restore(self, releases: Mapping[str, int]) -> None:
        """Continue from the notes, which know more than a checkpoint."""
        super().restore(self._notes.releases or releases)
