"""What clients keep from one exchange to a later one."""

from __future__ import annotations

import numpy as np
import torch

from fedstrata.clients.setting import Setting
from fedstrata.clients.state import LostState


class Memory:
    """What the clients ``ids`` keep: stored at once or, if deferred, when the server has taken their answers.

    A client whose answer was dropped must not continue from something that the server knows nothing of.
    """

    def __init__(self, setting: Setting, ids: np.ndarray) -> None:
        self._setting, self._ids = setting, ids
        self._kept: dict[str, list[torch.Tensor]] = {}

    def keep(self, active: int, values: dict[str, torch.Tensor]) -> None:
        """Keep rows of the first ``active`` clients."""
        if not self._setting.deferred:
            self._setting.state.keep(self._ids[:active], values)
            return
        for name, value in values.items():
            wider = [rows for rows in self._kept.get(name, []) if len(rows) > len(value)]
            self._kept[name] = [*wider, value.clone()]

    def recall(self, active: int, name: str, default: torch.Tensor | None) -> torch.Tensor:
        """Return what the first ``active`` clients kept; without a ``default``, a client that has not is an error."""
        ids, kept = self._ids[:active], self._kept.get(name, [])
        if default is None:
            self._check(name, ids[len(kept[0]) if kept else 0 :])
            default = kept[0].new_empty(len(ids), *kept[0].shape[1:]) if kept else self._setting.oracles.problem.x0
        rows = self._setting.state.recall(ids, name, default)
        if not kept:
            return rows
        rows = rows.clone(memory_format=torch.contiguous_format)
        for newer in kept:  # from the widest to the latest: some clients may have left the loop in between
            rows[: len(newer)] = newer[: len(ids)]
        return rows

    def _check(self, name: str, ids: np.ndarray) -> None:
        missing = self._setting.state.missing(ids, name)
        if len(missing):
            names = self._setting.data.client_names
            who = ", ".join(names[c] if names else f"client {c}" for c in missing[:8].tolist())
            lost = tuple(missing.tolist())
            raise LostState(f"{who} must have kept {name!r} in an earlier exchange, but has not, or has lost it.", lost)

    def commit(self, taken: np.ndarray) -> None:
        """Store what those clients kept whose answers the server has taken: a mask [C]."""
        for name, kept in self._kept.items():
            for value in kept:
                rows = np.flatnonzero(taken[: len(value)])
                if len(rows):
                    self._setting.state.keep(self._ids[rows], {name: value[torch.from_numpy(rows).to(value.device)]})
        self._kept = {}
