"""The state that clients keep between exchanges: one row per client that took part, in memory or on disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from fedstrata.core.errors import FedstrataError


class LostState(FedstrataError):
    """Clients have not kept what they should have, or have lost it; ``clients`` are their numbers."""

    def __init__(self, message: str, clients: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.clients = clients


PIECE_BYTES = 16 << 20
"""How many bytes of rows are copied at a time to be saved."""


AT_ONCE = 1 << 30
"""Tables of at most so many bytes have room for all clients from the start: what is not used takes no memory yet."""


@dataclass
class _Table:
    """The rows of one name: ``slot[client]`` is the client's row, -1 if it has none."""

    slot: np.ndarray
    rows: torch.Tensor
    used: int = 0
    changed: set[int] = field(default_factory=set)


class ClientState:
    """Rows of each client, by name; memory grows only with the clients that took part.

    They are in the memory of the host, whatever the device of the run, which holds only the rows of a chunk.

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
                empty = torch.empty(0, *value.shape[1:], dtype=value.dtype)
                table = self._tables[name] = _Table(np.full(self.clients, -1, dtype=np.int64), empty)
            fresh = np.unique(clients[table.slot[clients] < 0])
            if len(fresh):
                self._grow(name, table, table.used + len(fresh))
                table.slot[fresh] = np.arange(table.used, table.used + len(fresh))
                table.used += len(fresh)
            table.rows[torch.from_numpy(table.slot[clients])] = value.cpu()
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

    def take_changes(self, piece_bytes: int = PIECE_BYTES) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the rows written since the last call, as ``name`` and ``name.clients`` tensors, in pieces."""
        changed = {name: np.array(sorted(t.changed), dtype=np.int64) for name, t in self._tables.items()}
        return self._taken(changed, piece_bytes)

    def take_all(self, piece_bytes: int = PIECE_BYTES) -> Iterator[dict[str, torch.Tensor]]:
        """Yield all rows in the same form. State larger than memory can be saved piece by piece."""
        return self._taken({name: np.flatnonzero(t.slot >= 0) for name, t in self._tables.items()}, piece_bytes)

    def _taken(self, clients: dict[str, np.ndarray], piece_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
        for table in self._tables.values():
            table.changed.clear()
        return self._pieces(clients, piece_bytes)

    def _pieces(self, clients: dict[str, np.ndarray], piece_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the rows of these clients; names that fit into a piece together share it."""
        piece: dict[str, torch.Tensor] = {}
        room = piece_bytes
        for name, numbers in clients.items():
            table = self._tables[name]
            row_bytes = max(1, table.rows[:1].nbytes)
            while len(numbers):
                if piece and (name in piece or room < row_bytes * len(numbers)):
                    yield piece
                    piece, room = {}, piece_bytes
                some, numbers = np.split(numbers, [max(1, room // row_bytes)])
                rows = table.rows[torch.from_numpy(table.slot[some])]
                piece |= {name: rows, f"{name}.clients": torch.from_numpy(some)}
                room -= row_bytes * len(some)
        if piece:
            yield piece

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
        row = table.rows.shape[1:]
        row_bytes = row.numel() * table.rows.element_size()
        capacity = min(max(needed, 2 * capacity), self.clients)
        if self.clients * row_bytes <= min(AT_ONCE, self.memory_limit):
            capacity = self.clients
        bytes_needed = capacity * row_bytes
        if bytes_needed <= self.memory_limit:
            rows = table.rows.new_empty(capacity, *row)
            rows[: table.used] = table.rows[: table.used]
        else:
            rows = self._mapped(name, (capacity, *row), table.rows.dtype)
            rows[: table.used] = table.rows[: table.used]
        table.rows = rows

    def _mapped(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in a memory-mapped file, unlinked at once so that nothing is left even after a kill."""
        handle, path = tempfile.mkstemp(prefix=f"fedstrata-{name}-", dir=self._folder)
        os.close(handle)
        try:
            return torch.from_file(path, shared=True, size=int(np.prod(shape)), dtype=dtype).view(shape)
        finally:
            Path(path).unlink()
