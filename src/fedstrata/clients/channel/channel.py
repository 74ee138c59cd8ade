"""Channels: what happens to a client's update on its way to the server's mean.

A client answers with an update (a change of the model, a gradient, a number), never with a point, so a channel works on
answers as they are. In this order, each stage being optional:

    compress   the client sends the largest entries (top-k) or 8 bits per entry, and adds what it left out to its next
               update (error feedback)
    clip       the client scales its update down to a norm
    bound      the server scales updates down to a norm, in case a client does not clip
    reduce     the mean or, against bad clients, the coordinates' median or trimmed mean
    noise      Gaussian noise on the mean, for client-level differential privacy

A norm is taken over all tensors of an answer together. The last two stages are in ``clients/reduce.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from fedstrata.clients.channel.parcels import PARCELS, Parcel
from fedstrata.core.errors import InputError, invalid, is_number

if TYPE_CHECKING:
    from fedstrata.clients.client import Client

REDUCTIONS = ("mean", "median", "trimmed_mean")


@dataclass(frozen=True)
class Channel:
    """What answers go through on their way to the server.

    compress: "none", "top_k" (the share ``top`` of entries, the largest ones) or "quantise" (8 bits an entry).
    top:      the share of entries that "top_k" sends.
    clip:     the largest norm of a client's change; None for any.
    bound:    the same, seen to by the server.
    reduce:   "mean", "median" or "trimmed_mean" (without the share ``trim`` at either end of every coordinate).
    trim:     the share that "trimmed_mean" leaves out at either end; at least one client.
    noise:    the standard deviation of the noise on the sum of changes, in units of ``clip``.
    delta:    the delta of (epsilon, delta) privacy.
    """

    compress: str = "none"
    top: float = 0.01
    clip: float | None = None
    bound: float | None = None
    reduce: str = "mean"
    trim: float = 0.1
    noise: float = 0.0
    delta: float = 1e-5

    def __post_init__(self) -> None:
        for name, known in (("compress", tuple(PARCELS)), ("reduce", REDUCTIONS)):
            if getattr(self, name) not in known:
                raise invalid(f"{name} of the channel", getattr(self, name), " or ".join(map(repr, known)))
        for name in ("clip", "bound"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and 0 < value < math.inf):
                raise invalid(f"{name} of the channel", value, "a number above 0")
        numbers = {name: getattr(self, name) for name in ("top", "trim", "delta", "noise")}
        sound = {name: value if is_number(value) else math.nan for name, value in numbers.items()}
        for name, good, wants in (
            ("top", 0 < sound["top"] <= 1, "a share above 0 and at most 1"),
            ("trim", 0 < sound["trim"] < 0.5, "a share above 0 and below 0.5"),
            ("delta", 0 < sound["delta"] < 1, "a number above 0 and below 1"),
            ("noise", 0 <= sound["noise"] < math.inf, "a number of at least 0"),
        ):
            if not good:
                raise invalid(f"{name} of the channel", numbers[name], wants)
        if self.noise and self.clip is None:
            raise InputError("The noise of the channel is in units of its clip: set clip too.")
        if self.noise and self.reduce != "mean":
            raise invalid("reduce of the channel", self.reduce, "'mean' where there is noise: its worth is known there")

    @property
    def on_clients(self) -> bool:
        """Whether clients pack their updates before they send them."""
        return self.compress != "none" or self.clip is not None

    def send(self, client: Client, name: str, updates: torch.Tensor) -> Parcel:
        """Pack the updates [C, n] of the clients' method ``name``; what compression drops is kept for the next time."""
        kind = PARCELS[self.compress]
        if self.compress == "none":
            parcel = kind.pack(updates, self)
        else:
            unsent = client.kept(f"unsent.{name}", torch.zeros_like(updates))
            updates = updates + unsent
            parcel = kind.pack(updates, self)
            left = updates - parcel.unpack()
            finite = torch.isfinite(left).all(1, keepdim=True)  # a diverged answer must not spoil the next ones
            kept = {f"unsent.{name}": torch.where(finite, left, unsent)}
            client.keep(None, **kept)
        return parcel if self.clip is None else parcel.scaled(shortening(parcel.unpack(), self.clip))

    def receive(self, answer: Any) -> Any:
        """Return the answers [C, ...] scaled down to the bound, on the server."""
        if self.bound is None:
            return answer
        flat = FlatAnswer(answer)
        return flat.restore(flat.updates * shortening(flat.updates, self.bound))


PLAIN = Channel()


def shortening(updates: torch.Tensor, norm: float) -> torch.Tensor:
    """Return the factors [C, 1] that scale updates [C, n] down to at most this norm."""
    factors: torch.Tensor = norm / updates.norm(dim=1, keepdim=True).clamp(min=norm)
    return factors


class FlatAnswer:
    """An answer, tensors [C, ...], as one matrix ``updates`` [C, n], and back."""

    def __init__(self, answer: Any) -> None:
        leaves, self._shape = tree_flatten(answer)
        self._forms = [(leaf.shape[1:], leaf.dtype) for leaf in leaves]
        dtypes = {leaf.dtype if leaf.is_floating_point() else torch.float64 for leaf in leaves}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float64
        self.updates = torch.cat([leaf.reshape(len(leaf), -1).to(dtype) for leaf in leaves], 1)

    def restore(self, updates: torch.Tensor) -> Any:
        """Return the answer that these updates make."""
        parts = torch.split(updates, [math.prod(size) for size, _ in self._forms], 1)
        pairs = zip(parts, self._forms, strict=True)
        leaves = [part.reshape(len(updates), *size).to(dtype) for part, (size, dtype) in pairs]
        return tree_unflatten(leaves, self._shape)
