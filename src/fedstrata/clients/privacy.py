"""What noise is worth: the epsilon of differential privacy for clients, by the library dp-accounting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from fedstrata.clients.channel import Channel
from fedstrata.core.errors import InputError


class Ledger:
    """What noise has been added to: ``releases`` counts cohorts by size and noisy exchanges, e.g. "3 of 50"."""

    def __init__(self) -> None:
        self.releases: dict[str, int] = {}

    def add(self, exchanges: int, clients: int) -> None:
        """Record a noisy exchange with a cohort of ``clients``, its ``exchanges``-th one."""
        before, after = f"{exchanges - 1} of {clients}", f"{exchanges} of {clients}"
        if exchanges > 1:
            self.releases[before] -= 1
            if not self.releases[before]:
                del self.releases[before]
        self.releases[after] = self.releases.get(after, 0) + 1

    def restore(self, releases: Mapping[str, int]) -> None:
        """Continue from the releases of a checkpoint."""
        self.releases = dict(releases)


def epsilon(channel: Channel, releases: Mapping[str, int], clients: int) -> float:
    """Return the epsilon, at the channel's delta, of everything that was released.

    ``releases`` counts cohorts by what they did: "3 of 50" those of 50 clients with three noisy exchanges. Two sets of
    clients are neighbours when one client is exchanged for another: that moves a sum of clipped changes by up to twice
    the clip, so the noise multiplier that counts is half the channel's. A cohort is drawn out of all ``clients``
    without replacement; its E exchanges see the same clients, which is worth one exchange with 1 / sqrt(E) of the
    noise. The bound is by Renyi divergences.
    """
    return _epsilon(channel.noise, channel.delta, tuple(sorted(releases.items())), clients)


@lru_cache(maxsize=64)
def _epsilon(noise: float, delta: float, releases: tuple[tuple[str, int], ...], clients: int) -> float:
    dp, rdp = _library()
    accountant = rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    for kind, times in releases:
        exchanges, sampled = (int(word) for word in kind.split(" of "))
        event = dp.GaussianDpEvent(noise / 2 / math.sqrt(exchanges))
        if sampled < clients:
            event = dp.SampledWithoutReplacementDpEvent(clients, sampled, event)
        accountant.compose(event, times)
    return float(accountant.get_epsilon(delta)) if releases else 0.0


def check_privacy(channel: Channel) -> None:
    """Refuse noise where there is nobody to say what it is worth."""
    if channel.noise:
        _library()


def _library() -> tuple[Any, Any]:
    try:
        import dp_accounting
        from dp_accounting import rdp
    except ImportError:
        raise InputError("Noise needs an accountant: pip install 'fedstrata[privacy]'.") from None
    return dp_accounting, rdp
