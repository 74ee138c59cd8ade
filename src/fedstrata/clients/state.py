"""The state that clients keep between exchanges: one row per client that took part, in memory or on disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedstrata.core.errors import FedstrataError, listed

if TYPE_CHECKING:
    from fedstrata.clients.client_side import ClientSide


class LostState(FedstrataError):
    """Clients have not kept what they should have, or have lost it; ``clients`` are their numbers."""

    def __init__(self, message: str, clients: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.clients = clients


@dataclass
class _Table:
    """The rows of one name: ``slot[client]`` is the client's row, -1 if it has none."""

    slot: np.ndarray
    rows: torch.Tensor
    used: int = 0
    changed: set[int] = field(default_factory=set)


class ClientState:
    """Rows of each client, by name; memory grows only with the clients that took part.

    If the rows of a name exceed ``memory_limit`` bytes, they move to a memory-mapped file in ``folder`` (by default the
    system's temporary folder), so the state may be larger than memory.
    """

    def __init__(self, clients: int, memory_limit: int, folder: Path | None = None) -> None:
        self.clients = clients
        self.memory_limit = memory_limit
        self._folder = folder
        self._tables: dict[str, _Table] = {}

    def keep(self, clients: np.ndarray, values: dict[str, torch.Tensor]) -> None:
        """Store a row [C, ...] of each name for these clients."""
        for name, value in values.items():
            self.check(name, value, len(clients))
            table = self._tables.get(name)
            if table is None:
                empty = value.new_empty(0, *value.shape[1:])
                table = self._tables[name] = _Table(np.full(self.clients, -1, dtype=np.int64), empty)
            fresh = np.unique(clients[table.slot[clients] < 0])
            if len(fresh):
                self._grow(name, table, table.used + len(fresh))
                table.slot[fresh] = np.arange(table.used, table.used + len(fresh))
                table.used += len(fresh)
            table.rows[torch.from_numpy(table.slot[clients])] = value.to(table.rows.device)
            table.changed.update(clients.tolist())

    def check(self, name: str, value: object, clients: int) -> None:
        """Raise unless a value has a row for each of ``clients`` clients, in the form already kept under this name."""
        wants = f"The variable {name} that clients keep must be a tensor with one row for each of {clients} clients"
        if not isinstance(value, torch.Tensor) or value.shape[:1] != (clients,):
            got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise FedstrataError(f"{wants}. Got {got}.")
        table = self._tables.get(name)
        if table is not None and (value.shape[1:] != table.rows.shape[1:] or value.dtype != table.rows.dtype):
            before = f"shape {(clients, *table.rows.shape[1:])} and {table.rows.dtype}, as before"
            raise FedstrataError(f"{wants}, of {before}. Got shape {tuple(value.shape)} and {value.dtype}.")

    def recall(self, clients: np.ndarray, name: str, default: torch.Tensor) -> torch.Tensor:
        """Return the rows [C, ...] of these clients, with ``default`` for those that have none."""
        table = self._tables.get(name)
        if table is None:
            return default
        slots = table.slot[clients]
        if (slots >= 0).all():
            return table.rows[torch.from_numpy(slots)].to(default.device)
        out = default.clone(memory_format=torch.contiguous_format)
        stored = np.flatnonzero(slots >= 0)
        if len(stored):
            out[torch.from_numpy(stored)] = table.rows[torch.from_numpy(slots[stored])].to(default.device)
        return out

    def missing(self, clients: np.ndarray, name: str) -> np.ndarray:
        """Return which of these clients have no row of ``name``."""
        table = self._tables.get(name)
        return clients if table is None else clients[table.slot[clients] < 0]

    def take_changes(self) -> dict[str, torch.Tensor]:
        """Return the rows written since the last call, as ``name`` and ``name.clients`` tensors."""
        out: dict[str, torch.Tensor] = {}
        for name, table in self._tables.items():
            out |= _rows_of(name, table, np.array(sorted(table.changed), dtype=np.int64))
            table.changed.clear()
        return out

    def take_all(self, piece_bytes: int = 64 << 20) -> Iterator[dict[str, torch.Tensor]]:
        """Yield all rows in pieces of at most ``piece_bytes``, so that state larger than memory can be saved."""
        for name, table in self._tables.items():
            table.changed.clear()
            clients = np.flatnonzero(table.slot >= 0)
            per_piece = max(1, piece_bytes // max(1, table.rows[:1].nbytes))
            for start in range(0, len(clients), per_piece):
                yield _rows_of(name, table, clients[start : start + per_piece])

    def load(self, rows: dict[str, torch.Tensor], mine: np.ndarray | None = None) -> None:
        """Store rows that :meth:`take_changes` returned; if a mask ``mine`` is given, only those of its clients."""
        for name, value in rows.items():
            if not name.endswith(".clients"):
                clients = rows[f"{name}.clients"].numpy()
                selected = np.arange(len(clients)) if mine is None else np.flatnonzero(mine[clients])
                if len(selected):
                    self.keep(clients[selected], {name: value[torch.from_numpy(selected)]})
        for table in self._tables.values():
            table.changed.clear()

    def count(self) -> int:
        """Return the number of stored rows over all names."""
        return sum(t.used for t in self._tables.values())

    def _grow(self, name: str, table: _Table, needed: int) -> None:
        capacity = len(table.rows)
        if needed <= capacity:
            return
        capacity = min(max(needed, 2 * capacity), self.clients)
        row = table.rows.shape[1:]
        bytes_needed = capacity * row.numel() * table.rows.element_size()
        if bytes_needed <= self.memory_limit:
            rows = table.rows.new_empty(capacity, *row)
            rows[: table.used] = table.rows[: table.used]
        else:
            rows = self._mapped(name, (capacity, *row), table.rows.dtype)
            rows[: table.used] = table.rows[: table.used].cpu()
        table.rows = rows

    def _mapped(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in a memory-mapped file, unlinked at once so that nothing is left even after a kill."""
        handle, path = tempfile.mkstemp(prefix=f"fedstrata-{name}-", dir=self._folder)
        os.close(handle)
        try:
            return torch.from_file(path, shared=True, size=int(np.prod(shape)), dtype=dtype).view(shape)
        finally:
            Path(path).unlink()


class Memory:
    """What the clients ``ids`` keep in an exchange: stored at once or, if deferred, once their answers are accepted.

    A client whose answer was dropped must not continue from a state that the server does not know.
    """

    def __init__(self, side: ClientSide, ids: np.ndarray) -> None:
        self._side, self._ids = side, ids
        self._kept: dict[str, list[torch.Tensor]] = {}

    def keep(self, active: int, values: dict[str, torch.Tensor]) -> None:
        """Keep rows [active, ...] of the first ``active`` clients."""
        if not self._side.deferred:
            self._side.state.keep(self._ids[:active], values)
            return
        for name, value in values.items():
            self._side.state.check(name, value, active)
            earlier = self._kept.get(name)
            if earlier and (value.shape[1:], value.dtype) != (earlier[0].shape[1:], earlier[0].dtype):
                raise FedstrataError(
                    f"The variable {name} that clients keep must have the same shape and dtype each time. Got rows of "
                    f"shape {tuple(value.shape[1:])} and {value.dtype}, but earlier in this exchange of shape "
                    f"{tuple(earlier[0].shape[1:])} and {earlier[0].dtype}."
                )
            wider = [rows for rows in self._kept.get(name, []) if len(rows) > len(value)]
            self._kept[name] = [*wider, value.clone()]

    def recall(self, active: int, name: str, default: torch.Tensor | None) -> torch.Tensor:
        """Return what the first ``active`` clients kept; without a ``default``, raise if one of them kept nothing."""
        ids, kept = self._ids[:active], self._kept.get(name, [])
        if default is None:
            self._check(name, ids[len(kept[0]) if kept else 0 :])
            default = kept[0].new_empty(len(ids), *kept[0].shape[1:]) if kept else self._side.oracles.problem.x0
        rows = self._side.state.recall(ids, name, default)
        if not kept:
            return rows
        rows = rows.clone(memory_format=torch.contiguous_format)
        for newer in kept:  # widest and oldest first: some clients may have left the loop in between
            rows[: len(newer)] = newer[: len(ids)]
        return rows

    def _check(self, name: str, ids: np.ndarray) -> None:
        self.refuse(self._side.state.missing(ids, name), repr(name))

    def refuse(self, missing: np.ndarray, what: str) -> None:
        """Raise if any clients have not kept ``what``."""
        if len(missing):
            names = self._side.data.client_names
            who = listed([names[c] if names else f"client {c}" for c in missing.tolist()])
            has = "has" if len(missing) == 1 else "have"
            message = f"{who} must have kept {what} in an earlier exchange, but {has} not, or {has} lost it."
            raise LostState(message, tuple(missing.tolist()))

    def commit(self, accepted: np.ndarray) -> None:
        """Store what clients kept, for those whose answers the server has accepted; ``accepted`` is a mask [C]."""
        for name, kept in self._kept.items():
            for value in kept:
                rows = np.flatnonzero(accepted[: len(value)])
                if len(rows):
                    self._side.state.keep(self._ids[rows], {name: value[torch.from_numpy(rows).to(value.device)]})
        self._kept = {}


def _rows_of(name: str, table: _Table, clients: np.ndarray) -> dict[str, torch.Tensor]:
    if len(clients) == 0:
        return {}
    rows = table.rows[torch.from_numpy(table.slot[clients])]
    return {name: rows, f"{name}.clients": torch.from_numpy(clients)}
