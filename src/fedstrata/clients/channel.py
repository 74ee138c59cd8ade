"""Channels: what happens to answers on their way from the clients to the server's mean.

An answer is looked at as a change: what a client returns, less what the server sent it (``answers`` of an algorithm
says which of its arguments that is, or zero). In this order, each step being optional:

    compress   a client sends the largest entries (top-k) or 8 bits an entry, and adds what it left out to its next
               change (error feedback)
    clip       a client shortens its change to a norm
    bound      the server shortens changes to a norm: against clients that do not clip
    reduce     the mean, or against bad clients the coordinates' median or trimmed mean
    noise      Gaussian noise on the mean, for differential privacy of clients; an accountant says what it is worth

A norm is that of all the tensors of an answer together.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fedstrata.core.errors import InputError, invalid
from fedstrata.core.options import Options, param
from fedstrata.problems.queries import is_question

Parcel = dict[str, torch.Tensor]


class Channel(Options, owner="the channel"):
    """What answers go through on their way to the server."""

    words: ClassVar[str] = "a Channel, e.g. fs.Channel(clip=1.0)"
    compress: Literal["none", "top_k", "quantise"] = param(
        "none",
        "what is sent of an update: all, the largest entries, or 8 bits per entry; the rest is added to the next one",
    )
    top: float = param(0.01, "share of the entries that top_k sends", above=0, most=1)
    clip: float | None = param(None, "largest norm of a client's update, all its tensors together", above=0)
    bound: float | None = param(None, "the same, enforced by the server, against clients that do not clip", above=0)
    reduce: Literal["mean", "median", "trimmed_mean"] = param(
        "mean",
        "how the server combines updates, coordinate by coordinate; medians and trimmed means resist bad clients",
    )
    trim: float = param(
        0.1, "share of the clients that trimmed_mean drops at each end, at least one", above=0, below=0.5
    )
    noise: float = param(0.0, "standard deviation of Gaussian noise on the sum of updates, in units of clip", least=0)
    delta: float = param(1e-5, "delta of (epsilon, delta) differential privacy of clients", above=0, below=1)

    def __post_init__(self) -> None:
        if self.noise and self.clip is None:
            raise InputError("The noise of the channel is in units of its clip: set clip too.")
        if self.noise and self.reduce != "mean":
            raise invalid("reduce of the channel", self.reduce, "'mean' where there is noise: its worth is known there")

    @property
    def on_clients(self) -> bool:
        """Whether clients do something to their answers before they send them."""
        return self.compress != "none" or self.clip is not None

    @property
    def of_changes(self) -> bool:
        """Whether it matters what an answer is a change of: it does for norms and for what is left out."""
        return self.on_clients or self.bound is not None


PLAIN = Channel()


# --- answers as changes -----------------------------------------------------------------------------------------------


class Changes:
    """Answers [C, ...] as one matrix [C, n] of changes, and back."""

    def __init__(self, work: Callable[..., Any], message: tuple[Any, ...], value: Any) -> None:
        leaves, self._shape = tree_flatten(value)
        self._forms = [(leaf.shape[1:], leaf.dtype) for leaf in leaves]
        clients = len(leaves[0])
        kinds = {leaf.dtype for leaf in leaves}
        self._dtype = kinds.pop() if len(kinds) == 1 else torch.float64
        self._base = [
            torch.zeros(1, leaf[0].numel(), dtype=self._dtype, device=leaf.device)
            if base is None
            else base.reshape(len(base), -1).to(self._dtype)
            for base, leaf in zip(_bases(work, message, value), leaves, strict=True)
        ]
        parts = zip(leaves, self._base, strict=True)
        self.matrix = torch.cat([leaf.reshape(clients, -1).to(self._dtype) - base for leaf, base in parts], 1)

    def answers(self, matrix: torch.Tensor) -> Any:
        """Return the answers that make these changes."""
        parts = torch.split(matrix, [math.prod(size) for size, _ in self._forms], 1)
        triples = zip(parts, self._base, self._forms, strict=True)
        leaves = [(part + base).reshape(len(matrix), *size).to(dtype) for part, base, (size, dtype) in triples]
        return tree_unflatten(leaves, self._shape)


def _bases(work: Callable[..., Any], message: tuple[Any, ...], value: Any) -> list[torch.Tensor | None]:
    """Return what each tensor of an answer is a change of: tensors of the message, or None for zero."""
    elements = value if isinstance(value, tuple) else (value,)
    found: list[Any] = []
    for word in words_of(work):
        found += [None] if word in ("zero", "point") else _argument(work, message, word)
    if len(found) < len(elements):
        raise InputError(
            f"answers of {named(work)} must say what each thing that it returns is near to. Got {len(found)} words for "
            f"{len(elements)} things."
        )
    bases: list[torch.Tensor | None] = []
    for element, base in zip(elements, found, strict=False):
        leaves = tree_leaves(element)
        starts: list[torch.Tensor | None] = [None] * len(leaves) if base is None else tree_leaves(base)
        for leaf, start in zip(leaves, starts, strict=True):
            if start is not None and start.shape[1:] != leaf.shape[1:]:
                raise InputError(
                    f"answers of {named(work)} names an argument of shape {tuple(start.shape[1:])} for a tensor of "
                    f"shape {tuple(leaf.shape[1:])}."
                )
            bases.append(start)
    return bases


def _argument(work: Callable[..., Any], message: tuple[Any, ...], word: str) -> list[Any]:
    """Return the part of the message that a method calls ``word``: one thing, or several where it ends in *word."""
    parameters = list(inspect.signature(work).parameters.values())[1:]
    for place, parameter in enumerate(parameters):
        if parameter.name == word:
            several = parameter.kind is inspect.Parameter.VAR_POSITIONAL
            return list(message[place:]) if several else [message[place]]
    raise InputError(f"answers of {named(work)} names {word!r}, which is none of its arguments, zero or point.")


def words_of(work: Callable[..., Any]) -> list[str]:
    """Return what a method's answers are near to, as its algorithm says it."""
    table = getattr(getattr(work, "__self__", None), "answers", {})
    name = getattr(work, "__name__", "")
    if is_question(work):
        return ["zero"]
    if name not in table:
        raise InputError(
            f"A channel must know what {named(work)} answers with. Say it in the algorithm: answers = {{{name!r}: 'x'}}"
            " when that is near its argument x, 'zero' when it is a change or a gradient."
        )
    words: list[str] = table[name].split()
    return words


def check_channel(channel: Channel, algorithm: Any) -> None:
    """Refuse a channel that an algorithm's answers cannot go through, before anything is done."""
    if not channel.of_changes:
        return
    for method, words in algorithm.answers.items():
        if "point" in words.split():
            raise InputError(
                f"A channel of changes (clip, bound, compress, noise) cannot go through {method} of {algorithm.name}: "
                "the clients answer with points there, whose start the server does not send along. Channels that only "
                "reduce (median, trimmed_mean) can; an option of the algorithm may change what is sent: see "
                "[channel] in docs/configuration.md."
            )


def named(work: Callable[..., Any]) -> str:
    """Return what a method is called in messages."""
    owner = getattr(getattr(work, "__self__", None), "name", None)
    name = str(getattr(work, "__name__", work))
    return f"{name} of {owner}" if owner else name


# --- on the client ----------------------------------------------------------------------------------------------------


def compressed(channel: Channel, changes: torch.Tensor) -> Parcel:
    """Return what is sent of changes [C, n]: every tensor has a row for each client."""
    n = changes.shape[1]
    if channel.compress == "top_k" and n:
        places = changes.abs().topk(entries(channel, n), dim=1).indices
        return {"values": changes.gather(1, places), "places": places.to(torch.int32)}
    if channel.compress == "quantise" and n:
        scale = changes.abs().amax(1, keepdim=True) / 127
        levels = torch.where(scale > 0, (changes / scale).round(), torch.zeros_like(changes))
        return {"levels": levels.to(torch.int8), "scale": scale}
    return {"values": changes}


def clipped(parcel: Parcel, arrives: torch.Tensor, norm: float) -> Parcel:
    """Return a parcel of which ``arrives`` [C, n] would arrive, shortened to a norm."""
    of = "scale" if "scale" in parcel else "values"
    return {**parcel, of: parcel[of] * factors(arrives, norm)}


def factors(changes: torch.Tensor, norm: float) -> torch.Tensor:
    """Return by what each of the changes [C, n] must be multiplied to be of at most this norm: [C, 1]."""
    found: torch.Tensor = norm / changes.norm(dim=1, keepdim=True).clamp(min=norm)
    return found


def unpacked(parcel: Parcel, n: int) -> torch.Tensor:
    """Return the changes [C, n] that a parcel holds."""
    if "places" in parcel:
        values = parcel["values"]
        return values.new_zeros(len(values), n).scatter_(1, parcel["places"].long(), values)
    if "levels" in parcel:
        return parcel["levels"].to(parcel["scale"].dtype) * parcel["scale"]
    return parcel["values"]


def entries(channel: Channel, n: int) -> int:
    """Return how many of n entries are sent."""
    return min(n, max(1, math.ceil(round(channel.top * n, 9)))) if channel.compress == "top_k" else n


def bytes_of(parcel: Parcel) -> int:
    """Return how many bytes a parcel has."""
    return sum(t.numel() * t.element_size() for t in parcel.values())


def send(channel: Channel, client: Any, work: Callable[..., Any], changes: torch.Tensor) -> Parcel:
    """Return what clients send of their changes [C, n]; what compression leaves out they keep for the next time."""
    name = f"unsent.{getattr(work, '__name__', 'work')}"
    before = client.recall(name, torch.zeros_like(changes)) if channel.compress != "none" else None
    changes = changes if before is None else changes + before
    parcel = compressed(channel, changes)
    arrives = unpacked(parcel, changes.shape[1])
    if before is not None:
        left = changes - arrives
        sound = torch.isfinite(left).all(1, keepdim=True)  # an answer that diverged must not spoil those after it
        client.keep(**{name: torch.where(sound, left, before)})
    return parcel if channel.clip is None else clipped(parcel, arrives, channel.clip)


# --- on the server ----------------------------------------------------------------------------------------------------


def robust(channel: Channel, rows: torch.Tensor) -> torch.Tensor:
    """Return the median, or trimmed mean, of each coordinate of rows [clients, ...]: every client counts once."""
    ordered = rows.sort(dim=0).values
    cut = (len(rows) - 1) // 2
    if channel.reduce == "trimmed_mean":
        cut = max(1, math.floor(round(channel.trim * len(rows), 9)))
        if 2 * cut >= len(rows):
            raise InputError(f"A trimmed mean leaves out {cut} clients at either end, and only {len(rows)} answered.")
    return ordered[cut : len(rows) - cut].mean(0)


def noise(channel: Channel, weight: float, n: int, names: tuple[int, ...] | None, like: torch.Tensor) -> torch.Tensor:
    """Return the noise on a mean in which no client weighs more than ``weight``: n of N(0, (noise clip weight)^2).

    They are drawn by names, so that a simulation can be repeated; without names (None) nobody can foretell them.
    """
    assert channel.clip is not None
    drawn = np.random.default_rng(names).standard_normal(n)
    return torch.from_numpy(drawn).to(like) * (channel.noise * channel.clip * weight)
