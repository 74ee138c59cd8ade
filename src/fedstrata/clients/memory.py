"""What clients keep in one exchange, until the server has accepted their answers."""

from __future__ import annotations

import numpy as np
import torch

from fedstrata.clients.client_side import ClientSide
from fedstrata.clients.state import LostState
from fedstrata.core.errors import FedstrataError, listed


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
        else:
            self._side.state.check(name, default, active)
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
            who = listed([self._side.data.name_of(c) for c in missing.tolist()])
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
