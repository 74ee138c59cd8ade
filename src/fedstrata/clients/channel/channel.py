"""Channels: the stages between a client's update and the server's mean.

A client answers with an update (a change of the model, a gradient, a number), never with a point, so a channel applies
to answers directly. The stages, all optional, in this order:

    compress   the client sends the largest entries (top-k) or 8 bits per entry, and adds the error to its next update
               (error feedback)
    clip       the client scales its update down to a norm
    bound      the server scales updates down to a norm, in case a client does not clip
    reduce     the mean or, against bad clients, the coordinate-wise median or trimmed mean
    noise      Gaussian noise on the mean, for client-level differential privacy

Norms are over all tensors of an answer together. The last two stages are in ``clients/reduce.py``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch

from fedstrata.clients.channel.parcels import PARCELS, Parcel
from fedstrata.core.errors import FedstrataError, InputError, invalid, within
from fedstrata.core.options import Options, options_of, param
from fedstrata.core.trees import tree_flatten, tree_leaves, tree_unflatten

if TYPE_CHECKING:
    from fedstrata.clients.client import Client


class Channel(Options, owner="the channel"):
    """Clipping, compression, robust reduction and noise between the clients' updates and the server's mean."""

    words: ClassVar[str] = "a Channel, e.g. fs.Channel(clip=1.0)"
    compress: str = param(
        "none",
        "send all of an update, its largest entries, or 8 bits per entry; the error is added to the next update",
        choices=PARCELS,
    )
    top: float = param(0.01, "fraction of the entries that top_k sends", above=0, most=1, only={"compress": ("top_k",)})
    clip: float | None = param(None, "largest norm of a client's update, over all its tensors", above=0)
    bound: float | None = param(None, "the same limit, enforced by the server, for clients that do not clip", above=0)
    reduce: Literal["mean", "median", "trimmed_mean"] = param(
        "mean",
        "how the server combines updates, coordinate by coordinate; medians and trimmed means resist bad clients",
    )
    trim: float = param(
        0.1,
        "fraction of the clients that trimmed_mean drops at each end, at least one client",
        above=0,
        below=0.5,
        only={"reduce": ("trimmed_mean",)},
    )
    noise: float = param(0.0, "standard deviation of Gaussian noise on the sum of updates, in units of clip", least=0)
    delta: float = param(1e-5, "delta of client-level (epsilon, delta) differential privacy", above=0, below=1)

    def __post_init__(self) -> None:
        if self.noise and self.clip is None:
            raise InputError(
                "The noise of the channel is in units of its clip: set clip too. "
                f"Got noise = {self.noise!r} without a clip."
            )
        if not self.noise and self.delta != options_of(Channel)["delta"].default:
            raise InputError(
                "The delta of the channel applies only with noise above 0: without noise there is no differential "
                f"privacy. Got {self.delta!r} with noise = {self.noise!r}."
            )
        if self.noise and self.reduce != "mean":
            wants = "'mean' if there is noise: epsilon is known only for the mean"
            raise invalid("reduce of the channel", self.reduce, wants)

    @property
    def on_clients(self) -> bool:
        """Whether clients compress or clip their updates."""
        return self.compress != "none" or self.clip is not None

    def send(self, client: Client, name: str, answer: Any) -> Packed:
        """Pack the answer [C, ...] of the clients' method ``name``; keep the compression error for the next one."""
        packing, flat = PARCELS[self.compress], FlatAnswer(answer)
        updates = flat.updates
        if self.compress == "none":
            parcel = packing.pack(updates, self)
        else:
            with within(f"the channel compresses: all answers of {name} must have one size and dtype", FedstrataError):
                unsent = client.kept(f"unsent.{name}", torch.zeros_like(updates))
            updates = updates + unsent
            parcel = packing.pack(updates, self)
            error = updates - parcel.unpack()
            finite = torch.isfinite(error).all(1, keepdim=True)  # a diverged answer must not corrupt later ones
            kept = {f"unsent.{name}": torch.where(finite, error, unsent)}
            client.keep(None, **kept)
        if self.clip is not None:
            parcel = parcel.scaled(shortening(parcel.unpack(), self.clip))
        return Packed(flat, parcel)

    def receive(self, answer: Any) -> Any:
        """Scale the answers [C, ...] down to the bound, on the server."""
        if self.bound is None or not tree_leaves(answer):
            return answer
        flat = FlatAnswer(answer)
        return flat.restore(flat.updates * shortening(flat.updates, self.bound))


PLAIN = Channel()


def shortening(updates: torch.Tensor, norm: float) -> torch.Tensor:
    """Return the factors [C, 1] that scale updates [C, n] down to at most this norm."""
    factors: torch.Tensor = norm / updates.norm(dim=1, keepdim=True).clamp(min=norm)
    return factors


class FlatAnswer:
    """An answer, tensors [C, ...], flattened into one matrix ``updates`` [C, n]."""

    def __init__(self, answer: Any) -> None:
        leaves, self._shape = tree_flatten(answer)
        self._forms = [(leaf.shape[1:], leaf.dtype) for leaf in leaves]
        dtypes = {leaf.dtype if leaf.is_floating_point() else torch.float64 for leaf in leaves}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float64
        self.updates = torch.cat([leaf.reshape(len(leaf), -1).to(dtype) for leaf in leaves], 1)

    def restore(self, updates: torch.Tensor) -> Any:
        """Return updates [C, n] in the form of the answer; whole numbers that a channel has scaled are floats."""
        parts = torch.split(updates, [math.prod(size) for size, _ in self._forms], 1)
        pairs = zip(parts, self._forms, strict=True)
        leaves = [
            part.reshape(len(updates), *size).to(dtype if dtype.is_floating_point else part.dtype)
            for part, (size, dtype) in pairs
        ]
        return tree_unflatten(leaves, self._shape)


class Packed(NamedTuple):
    """An answer as packed for a channel: its form, and the parcel that is sent."""

    flat: FlatAnswer
    parcel: Parcel

    @property
    def received(self) -> Any:
        """The answer as it arrives at the server."""
        return self.flat.restore(self.parcel.unpack())
