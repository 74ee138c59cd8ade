"""The privacy budget: epsilon of client-level differential privacy, computed by dp-accounting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from fedstrata.clients.channel import Channel
from fedstrata.core.errors import InputError


class Ledger:
    """The noisy releases so far: ``releases`` counts cohorts by noisy exchanges and size, e.g. "3 of 50"."""

    def __init__(self) -> None:
        self.releases: dict[str, int] = {}

    def add(self, exchanges: int, clients: int) -> None:
        """Record the ``exchanges``-th noisy exchange with a cohort of ``clients``."""
        previous, current = f"{exchanges - 1} of {clients}", f"{exchanges} of {clients}"
        if exchanges > 1:
            self.releases[previous] -= 1
            if not self.releases[previous]:
                del self.releases[previous]
        self.releases[current] = self.releases.get(current, 0) + 1

    def restore(self, releases: Mapping[str, int]) -> None:
        """Resume from the releases of a checkpoint."""
        self.releases = dict(releases)


def exchanges_of(releases: Mapping[str, int]) -> int:
    """Return the number of noisy exchanges in ``releases``."""
    return sum(int(kind.partition(" of ")[0]) * times for kind, times in releases.items())


def epsilon(channel: Channel, releases: Mapping[str, int], clients: int) -> float:
    """Return the epsilon of all releases so far, at the channel's delta, bounded by Renyi divergences.

    ``releases`` counts cohorts: "3 of 50" are those of 50 clients with three noisy exchanges. Neighbouring sets of
    clients differ in the replacement of one client, which changes a sum of clipped updates by up to twice the clip, so
    the effective noise multiplier is half the channel's. A cohort is drawn from all ``clients`` without replacement;
    its E exchanges involve the same clients, which is equivalent to one exchange with 1 / sqrt(E) of the noise.
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
    """Raise if the channel adds noise but dp-accounting is not installed."""
    if channel.noise:
        _library()


def _library() -> tuple[Any, Any]:
    try:
        import dp_accounting
        from dp_accounting import rdp
    except ImportError:
        raise InputError("Noise needs the package dp-accounting: pip install 'fedstrata[privacy]'.") from None
    return dp_accounting, rdp
