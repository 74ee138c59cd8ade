"""What the server must keep about a run besides its checkpoints, in a file next to the run directory."""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from fedstrata.clients.privacy import Ledger, exchanges_of
from fedstrata.core.errors import InputError
from fedstrata.core.files import remove_leftovers, write_atomically
from fedstrata.federation.server.inbox import is_description
from fedstrata.training.rundir import RunDirectory


@dataclass
class ServerState:
    """The server's state in one run.

    run:          the id under which nodes store the state of this run.
    descriptions: the nodes' descriptions of their data, from the start of the run.
    releases:     the noisy exchanges so far, including those of rounds that were repeated.
    unmeasured:   how many evaluations each node was missing from.
    """

    path: Path
    run: str
    descriptions: list[dict[str, Any]] | None = None
    releases: dict[str, int] = dataclasses.field(default_factory=dict)
    unmeasured: dict[str, int] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(out: Path, resume: bool) -> ServerState:
        """Return the state of the run in ``out``; a new one if there is no run yet."""
        path = out.with_name(out.name + ".federation.json")
        remove_leftovers(path.parent, path.name)
        if path.exists() and out.is_dir() and any(out.iterdir()):
            return ServerState(path, **_read(path))
        if not resume:
            RunDirectory(out).refuse_if_used()
        elif (out / "config.toml").exists():
            raise InputError(
                f"The run in {out} cannot be resumed: {path}, which identifies its state on the nodes, is missing. "
                "Restore it, or choose another directory for a new run."
            )
        return ServerState(path, secrets.token_hex(16))  # written once all nodes have described their data

    @property
    def identity(self) -> str:
        """A digest of what never changes in a run, by which a checkpoint recognises the file."""
        return blake2b(json.dumps([self.run, self.descriptions]).encode(), digest_size=16).hexdigest()

    def check(self, identity: str | None, releases: Mapping[str, int]) -> None:
        """Raise if this is not the state with which a checkpoint was written, or an older copy of it."""
        if identity not in (None, self.identity):
            why = "it is of another run"
        elif exchanges_of(self.releases) < exchanges_of(releases):
            why = "it is older, and lacks noisy exchanges that were made since"
        else:
            return
        raise InputError(
            f"{self.path}, which identifies the state of the run on the nodes, does not belong to the checkpoint: "
            f"{why}. Restore it from a copy, or choose another directory for a new run."
        )

    def update(self, **changes: Any) -> None:
        """Change some fields, and write the file."""
        for name, value in changes.items():
            setattr(self, name, value)
        table = {name: value for name, value in dataclasses.asdict(self).items() if name != "path"}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps(table).encode())


def _read(path: Path) -> dict[str, Any]:
    """Return the saved fields; raise if :meth:`ServerState.update` cannot have written one of them."""
    checks: dict[str, Callable[[Any], bool]] = {
        "run": lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None,
        "descriptions": lambda value: value is None or (isinstance(value, list) and all(map(is_description, value))),
        "releases": lambda value: _are_counts(value) and all(re.fullmatch(r"\d+ of \d+", kind) for kind in value),
        "unmeasured": _are_counts,
    }
    try:
        saved = json.loads(path.read_text())
        wrong = [name for name, check in checks.items() if not check(saved[name])]
        problem = f"its {wrong[0]} cannot be used" if wrong else ""
    except (OSError, ValueError, RecursionError) as error:
        problem = str(error)
    except (TypeError, KeyError, IndexError):
        problem = f"it must be a table with {', '.join(checks)}"
    if problem:
        raise InputError(
            f"{path}, which identifies the state of the run on the nodes, is damaged: {problem}. Restore it from a "
            "copy, or choose another directory for a new run."
        )
    return {name: saved[name] for name in checks}


def _are_counts(value: Any) -> bool:
    return isinstance(value, dict) and all(type(count) is int and count >= 0 for count in value.values())


class SavedLedger(Ledger):
    """A ledger that never goes back to a checkpoint: what was released stays released."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self.releases = dict(state.releases)

    def add(self, exchanges: int, clients: int) -> None:
        """Record the ``exchanges``-th noisy exchange with a cohort of ``clients``."""
        super().add(exchanges, clients)
        self._state.update(releases=self.releases)

    def restore(self, releases: Mapping[str, int]) -> None:
        """Restore the saved releases, which may be more than those of the checkpoint."""
        super().restore(self._state.releases)
