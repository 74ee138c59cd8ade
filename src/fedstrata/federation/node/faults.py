"""Injected faults on a node: the same ones as in a simulation."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedstrata.clients.channel.parcels import Parcel
from fedstrata.clients.faults import Inject
from fedstrata.core.trees import tree_map
from fedstrata.federation.wire import Call


class NoAnswer(Exception):
    """An injected fault: the client does not answer."""


@dataclass(frozen=True)
class InjectedFault:
    """The fault of a client in one attempt; its ``kind`` is None if there is none."""

    inject: Inject
    kind: str | None

    @staticmethod
    def of(inject: Inject | None, call: Call) -> InjectedFault:
        """Return the fault of this client in this attempt."""
        if inject is None:
            return InjectedFault(Inject(), None)
        kind = inject.kinds(np.array([call.client]), call.round, call.exchange, call.attempt)[0]
        return InjectedFault(inject, kind)

    def before_work(self) -> None:
        """Raise :class:`NoAnswer` if the client must not answer."""
        if self.kind == "drop":
            raise NoAnswer

    def after_work(self) -> None:
        """Delay the answer, or kill the process."""
        if self.kind == "delay":
            time.sleep(self.inject.seconds)
        if self.kind == "crash":
            os._exit(1)

    def spoil(self, value: Any) -> Any:
        """Return an answer with the fault applied."""
        if self.kind is None:
            return value
        value, wrong = self.inject.spoil(value, [self.kind])
        return _garbage(value) if wrong.any() else value

    def spoil_parcel(self, parcel: Parcel) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a packed answer with the fault applied to its update."""
        tensors = tuple(parcel.scaled(self.inject.factor_of(self.kind)).tensors.values())
        return tuple(_garbage(tensors)) if self.kind == "garbage" else tensors


def _garbage(value: Any) -> Any:
    """Return tensors of the wrong shape."""
    return tree_map(lambda leaf: torch.zeros(1, 3, dtype=leaf.dtype), value)
