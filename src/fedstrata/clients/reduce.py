"""Reduce the clients' answers to one result: weighted mean, maximum, median, trimmed mean, and noise."""

from __future__ import annotations

import math

import numpy as np
import torch

from fedstrata.clients.channel import Channel
from fedstrata.clients.engine import Reduced, Request
from fedstrata.clients.exchange import Exchange
from fedstrata.clients.faults import QuorumError
from fedstrata.core import rng
from fedstrata.core.errors import InputError, invalid
from fedstrata.core.trees import TreeSpec, tree_flatten


def check_rows(channel: Channel, request: Request) -> None:
    """Raise if the channel cannot protect a request whose result shows every client's answer."""
    single = f"{request.label}, which shows the server the answer of every single client"
    if channel.reduce != "mean" and not request.query:
        raise InputError(
            f"A {channel.reduce} cannot protect {single}. Choose an algorithm that takes only means, or use the "
            "channel's bound."
        )
    if channel.noise:
        raise InputError(
            f"The noise of the channel cannot protect {single}. Choose an algorithm that takes only means, or pass the "
            "problem the values that it would ask for."
        )
    stages = " and ".join(
        name for name in ("compress", "clip", "bound") if getattr(channel, name) not in (None, "none")
    )
    if stages and request.pool is not None:
        raise InputError(
            f"A channel with {stages} is for updates: it cannot be used for the collections that {request.label} "
            f"returns to pool. Choose an algorithm that takes only means, or leave out {stages}."
        )


def check_means(channel: Channel, request: Request, how: tuple[str, ...], weighting: str, by_weights: bool) -> None:
    """Raise if the channel cannot protect this reduction; ``by_weights``: whether clients were drawn by weights."""
    what = "noise of the channel" if channel.noise else channel.reduce
    if what != "mean" and "max" in how:
        raise InputError(
            f"The {what} cannot protect the elementwise maximum of what {request.label} returns. Choose an algorithm, "
            "or an option of it, that takes only means."
        )
    if channel.noise and by_weights:
        raise InputError(
            f"The {what} cannot protect {request.label}: its clients are drawn by weights, and may be drawn twice. "
            "Choose an algorithm that draws them uniformly."
        )
    if channel.noise and weighting != "uniform":
        raise invalid("weighting", weighting, "'uniform' if the channel has noise: sizes are private too")


def by_channel(exchange: Exchange, weights: torch.Tensor, how: tuple[str, ...]) -> Reduced:
    """Reduce each tensor of the answers as ``how`` and the channel say, without noise."""
    channel = exchange.engine.channel
    if channel.reduce == "mean":
        return means_and_maxima(exchange, weights, how)
    return robust(channel, rows(exchange))


def means_and_maxima(exchange: Exchange, weights: torch.Tensor, how: tuple[str, ...]) -> Reduced:
    """Return the weighted mean or maximum of each tensor of the answers, as ``how`` says; one word applies to all."""
    total: list[torch.Tensor] | None = None
    shape: TreeSpec | None = None
    kinds = how
    for answer in exchange:
        leaves, shape = tree_flatten(answer.value)
        kinds = how * len(leaves) if len(how) == 1 else how
        if len(kinds) != len(leaves):
            wants = f"one word for each of the {len(leaves)} tensors that {exchange.request.label} returns"
            raise invalid("how of combine", how, wants)
        everyone = answer.places is exchange.request.places
        w = weights if everyone else weights[torch.from_numpy(answer.places)]
        part = [
            _weighted_sum(leaf, w) if kind == "mean" else leaf.amax(0) for kind, leaf in zip(kinds, leaves, strict=True)
        ]
        if total is None:
            total = part
        else:
            both = zip(kinds, total, part, strict=True)
            total = [t.add_(p) if kind == "mean" else torch.maximum(t, p) for kind, t, p in both]
    local = Reduced(total, shape, kinds, exchange.used, exchange.answered)
    whole = exchange.engine.complete(exchange.request, local)
    if whole.answered.all() or whole.leaves is None:
        return whole
    weight = float(weights[torch.from_numpy(whole.answered)].sum())
    pairs = zip(whole.kinds, whole.leaves, strict=True)
    return whole._replace(leaves=[leaf / weight if kind == "mean" else leaf for kind, leaf in pairs])


def rows(exchange: Exchange) -> Reduced:
    """Return every client's answer, with zeros for clients that were left out: [cohort, ...] each."""
    out: list[torch.Tensor] | None = None
    shape: TreeSpec | None = None
    for answer in exchange:
        leaves, shape = tree_flatten(answer.value)
        if out is None:
            out = [leaf.new_zeros(len(exchange.request.cohort), *leaf.shape[1:]) for leaf in leaves]
        for row, leaf in zip(out, leaves, strict=True):
            row[torch.from_numpy(answer.places).to(row.device)] = leaf
    local = Reduced(out, shape, ("mean",), exchange.used, exchange.answered)
    return exchange.engine.complete(exchange.request, local)


def nothing(exchange: Exchange) -> Reduced:
    """Drop the answers; what they used still counts."""
    for _ in exchange:
        pass
    leaves, shape = tree_flatten(())
    local = Reduced(leaves, shape, ("mean",), exchange.used, exchange.answered)
    return exchange.engine.complete(exchange.request, local)


def robust(channel: Channel, answers: Reduced) -> Reduced:
    """Return the median or trimmed mean of each coordinate of all clients' answers; every client counts once."""
    assert answers.leaves is not None
    answered = torch.from_numpy(answers.answered)
    numbers, everyone = (leaf[answered.to(leaf.device)] for leaf in answers.leaves), bool(answered.all())
    leaves = [_middle(channel, leaf if leaf.is_floating_point() else leaf.double(), everyone) for leaf in numbers]
    return answers._replace(leaves=leaves)


def needs_noise(channel: Channel, mean: Reduced) -> bool:
    """Whether the channel adds noise to a mean: an empty mean reveals nothing."""
    return channel.noise > 0 and any(leaf.numel() for leaf in mean.leaves or ())


def with_noise(exchange: Exchange, mean: Reduced, weights: torch.Tensor) -> Reduced:
    """Add the channel's noise to a mean: a function of the exchange's names, unless it must be secret."""
    engine, request = exchange.engine, exchange.request
    names = rng.key_of(engine.side.seed, "noise", request.clock.round, request.exchange + 1)
    return noisy(engine.channel, mean, weights, None if engine.secret_noise else names)


def noisy(channel: Channel, mean: Reduced, weights: torch.Tensor, names: tuple[int, ...] | None) -> Reduced:
    """Add Gaussian noise to a mean: its standard deviation is noise * clip * the largest weight of a client in it.

    The noise is a function of ``names``, so that a simulation can be repeated; with None it is unpredictable.
    """
    assert channel.clip is not None and mean.leaves
    weights = weights[torch.from_numpy(mean.answered)]
    deviation = channel.noise * channel.clip * float(weights.max()) / float(weights.sum())
    sizes = [leaf.numel() for leaf in mean.leaves]
    drawn = torch.from_numpy(np.random.default_rng(names).standard_normal(sum(sizes))).to(mean.leaves[0]) * deviation
    parts = zip(mean.leaves, torch.split(drawn, sizes), strict=True)
    return mean._replace(leaves=[leaf + part.reshape(leaf.shape).to(leaf) for leaf, part in parts])


def _weighted_sum(leaf: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    leaf = leaf if leaf.is_floating_point() else leaf.double()
    if leaf.stride(0) == 0:  # all rows are the same one
        return weights.sum().to(leaf) * leaf[0]
    if leaf.dim() == 2:  # most answers are vectors
        return weights.to(leaf) @ leaf
    return (weights.to(leaf) @ leaf.reshape(len(leaf), -1)).view(leaf.shape[1:])


def _middle(channel: Channel, values: torch.Tensor, everyone: bool) -> torch.Tensor:
    """Return the median or trimmed mean of the rows; ``everyone``: whether all clients of the cohort answered."""
    ordered = values.sort(dim=0).values
    cut = (len(values) - 1) // 2
    if channel.reduce == "trimmed_mean":
        cut = max(1, math.floor(round(channel.trim * len(values), 9)))
        if 2 * cut >= len(values):
            error = InputError if everyone else QuorumError
            raise error(
                f"The trimmed mean of the channel (trim = {channel.trim:g}) drops {cut} of the clients at each end, "
                f"but only {len(values)} answered. Let more clients take part, or choose a smaller trim, a median or a "
                "mean."
            )
    return ordered[cut : len(values) - cut].mean(0)
