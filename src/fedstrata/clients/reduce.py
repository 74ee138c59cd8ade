"""From the clients' answers to one: weighted mean, maximum, median, trimmed mean, and noise."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch.utils._pytree import TreeSpec, tree_flatten

from fedstrata.clients.channel import Channel
from fedstrata.clients.engine import Reduced
from fedstrata.clients.exchange import Exchange
from fedstrata.core.errors import InputError, invalid


def means_and_maxima(exchange: Exchange, weights: torch.Tensor, how: tuple[str, ...]) -> Reduced:
    """Take the weighted mean or the maximum of each tensor of the answers, as ``how`` says; one word is for all."""
    total: list[torch.Tensor] | None = None
    shape: TreeSpec | None = None
    kinds = how
    for answer in exchange:
        leaves, shape = tree_flatten(answer.value)
        kinds = how * len(leaves) if len(how) == 1 else how
        if len(kinds) != len(leaves):
            raise invalid("how of combine", how, f"as many words as tensors come back, {len(leaves)}")
        w = weights[torch.from_numpy(answer.places)]
        part = [
            _weighted_sum(leaf, w) if kind == "mean" else leaf.amax(0) for kind, leaf in zip(kinds, leaves, strict=True)
        ]
        if total is None:
            total = part
        else:
            both = zip(kinds, total, part, strict=True)
            total = [t.add_(p) if kind == "mean" else torch.maximum(t, p) for kind, t, p in both]
    share = Reduced(total, shape, kinds, exchange.used, exchange.answered)
    whole = exchange.engine.complete(exchange.request, share)
    if whole.answered.all() or whole.leaves is None:
        return whole
    weight = float(weights[torch.from_numpy(whole.answered)].sum())
    pairs = zip(whole.kinds, whole.leaves, strict=True)
    return replace(whole, leaves=[leaf / weight if kind == "mean" else leaf for kind, leaf in pairs])


def rows(exchange: Exchange) -> Reduced:
    """Return every client's answer, zeros for those that were left out: [cohort, ...] each."""
    out: list[torch.Tensor] | None = None
    shape: TreeSpec | None = None
    for answer in exchange:
        leaves, shape = tree_flatten(answer.value)
        if out is None:
            out = [leaf.new_zeros(len(exchange.request.cohort), *leaf.shape[1:]) for leaf in leaves]
        for row, leaf in zip(out, leaves, strict=True):
            row[torch.from_numpy(answer.places)] = leaf
    share = Reduced(out, shape, ("mean",), exchange.used, exchange.answered)
    return exchange.engine.complete(exchange.request, share)


def robust(channel: Channel, answers: Reduced) -> Reduced:
    """Return the median or trimmed mean of each coordinate of all clients' answers; every client counts once."""
    assert answers.leaves is not None
    answered = torch.from_numpy(answers.answered)
    numbers = (leaf[answered] for leaf in answers.leaves)
    leaves = [_middle(channel, leaf if leaf.is_floating_point() else leaf.double()) for leaf in numbers]
    return replace(answers, leaves=leaves)


def noisy(channel: Channel, mean: Reduced, weights: torch.Tensor, names: tuple[int, ...] | None) -> Reduced:
    """Add Gaussian noise to a mean: its standard deviation is noise * clip * the largest weight of a client in it.

    The noise is drawn by ``names``, so that a simulation can be repeated; without names (None) it is unpredictable.
    """
    assert channel.clip is not None and mean.leaves
    mine = weights[torch.from_numpy(mean.answered)]
    deviation = channel.noise * channel.clip * float(mine.max()) / float(mine.sum())
    sizes = [leaf.numel() for leaf in mean.leaves]
    drawn = torch.from_numpy(np.random.default_rng(names).standard_normal(sum(sizes))).to(mean.leaves[0]) * deviation
    parts = zip(mean.leaves, torch.split(drawn, sizes), strict=True)
    return replace(mean, leaves=[leaf + part.reshape(leaf.shape).to(leaf) for leaf, part in parts])


def _weighted_sum(leaf: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    leaf = leaf if leaf.is_floating_point() else leaf.double()
    total: torch.Tensor = torch.tensordot(weights.to(leaf), leaf, dims=1)
    return total


def _middle(channel: Channel, values: torch.Tensor) -> torch.Tensor:
    ordered = values.sort(dim=0).values
    cut = (len(values) - 1) // 2
    if channel.reduce == "trimmed_mean":
        cut = max(1, math.floor(round(channel.trim * len(values), 9)))
        if 2 * cut >= len(values):
            raise InputError(f"A trimmed mean drops {cut} clients at either end, and only {len(values)} answered.")
    return ordered[cut : len(values) - cut].mean(0)
