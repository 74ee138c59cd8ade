"""Parcels: updates [C, n] as they are sent, packed into named tensors with one row per client.

To add a compression, write a class here and add it to ``PARCELS``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from fedstrata.clients.channel.channel import Channel

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""The shape of one client's row and the dtype of each tensor of a parcel, in order."""


class Parcel(ABC):
    """Packed updates: ``tensors`` by name, with one row per client; ``n`` is the length of an update.

    proportional: the name of the tensor that is proportional to the updates.
    """

    proportional: ClassVar[str] = "values"

    def __init__(self, tensors: dict[str, torch.Tensor], n: int) -> None:
        self.tensors, self.n = tensors, n

    @staticmethod
    @abstractmethod
    def pack(updates: torch.Tensor, channel: Channel) -> Parcel:
        """Pack updates [C, n]."""

    @abstractmethod
    def unpack(self) -> torch.Tensor:
        """Return the updates [C, n] as received."""

    def scaled(self, factors: torch.Tensor | float) -> Parcel:
        """Return the parcel of these updates times ``factors``, a number or [C, 1]."""
        return type(self)({**self.tensors, self.proportional: self.tensors[self.proportional] * factors}, self.n)

    @staticmethod
    @abstractmethod
    def layout(n: int, dtype: torch.dtype, channel: Channel) -> Layout:
        """Return the layout of a parcel of updates of length ``n`` and this dtype."""

    @property
    def nbytes(self) -> int:
        """The size of the parcel in bytes."""
        return sum(t.nbytes for t in self.tensors.values())


class Whole(Parcel):
    """Uncompressed updates."""

    @staticmethod
    def pack(updates: torch.Tensor, channel: Channel) -> Whole:
        """Pack updates [C, n]."""
        return Whole({"values": updates}, updates.shape[1])

    def unpack(self) -> torch.Tensor:
        """Return the updates [C, n] as received."""
        return self.tensors["values"]

    @staticmethod
    def layout(n: int, dtype: torch.dtype, channel: Channel) -> Layout:
        """Return the layout of a parcel."""
        return {"values": ((n,), dtype)}


class TopK(Parcel):
    """The largest entries of each update, and their positions."""

    @staticmethod
    def pack(updates: torch.Tensor, channel: Channel) -> TopK:
        """Pack updates [C, n]."""
        n = updates.shape[1]
        positions = updates.abs().topk(TopK._entries(n, channel), dim=1).indices
        return TopK({"values": updates.gather(1, positions), "places": positions.to(torch.int32)}, n)

    def unpack(self) -> torch.Tensor:
        """Return the updates [C, n] as received."""
        values = self.tensors["values"]
        return values.new_zeros(len(values), self.n).scatter_(1, self.tensors["places"].long(), values)

    @staticmethod
    def layout(n: int, dtype: torch.dtype, channel: Channel) -> Layout:
        """Return the layout of a parcel."""
        entries = TopK._entries(n, channel)
        return {"values": ((entries,), dtype), "places": ((entries,), torch.int32)}

    @staticmethod
    def _entries(n: int, channel: Channel) -> int:
        return min(n, max(1, math.ceil(round(channel.top * n, 9))))


class Quantised(Parcel):
    """Eight bits per entry, scaled by the largest one."""

    proportional = "scale"

    @staticmethod
    def pack(updates: torch.Tensor, channel: Channel) -> Quantised:
        """Pack updates [C, n]."""
        if not updates.shape[1]:  # no largest entry
            return Quantised({"levels": updates.to(torch.int8), "scale": updates}, 0)
        scale = updates.abs().amax(1, keepdim=True) / 127
        levels = torch.where(scale > 0, (updates / scale).round(), torch.zeros_like(updates))
        return Quantised({"levels": levels.to(torch.int8), "scale": scale}, updates.shape[1])

    def unpack(self) -> torch.Tensor:
        """Return the updates [C, n] as received."""
        return self.tensors["levels"].to(self.tensors["scale"].dtype) * self.tensors["scale"]

    @staticmethod
    def layout(n: int, dtype: torch.dtype, channel: Channel) -> Layout:
        """Return the layout of a parcel."""
        return {"levels": ((n,), torch.int8), "scale": ((min(n, 1),), dtype)}


PARCELS: dict[str, type[Parcel]] = {"none": Whole, "top_k": TopK, "quantise": Quantised}
