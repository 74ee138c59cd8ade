"""The measures of each client, and what may be concluded from clients with few rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedstrata.training.metrics.measures import Measures, Pairs, over_clients


class OfClients(NamedTuple):
    """The measures of C clients.

    values: each measure by name, [C]; NaN for a client without samples to measure on.
    sizes:  how many samples each client has: [C].
    pairs:  how the samples of each client are ranked, if the outputs rank those of two classes.
    """

    values: dict[str, np.ndarray]
    sizes: np.ndarray
    pairs: Pairs | None

    def over(self, own_rows: int) -> Measures:
        """Return the measures over clients.

        A client with fewer samples than ``own_rows`` cannot be the worst one. One with fewer of either class has no AUC
        of its own, but its pairs count in ``auc_within``.
        """
        measures: Measures = {}
        present = self.sizes > 0
        for name, values in self.values.items():
            measures |= over_clients(name, values[present], self.sizes[present] >= own_rows)
        if self.pairs is not None:
            measures |= over_clients("auc", self.pairs.areas[self.pairs.large(own_rows)])
            if self.pairs.counts.any():
                measures["auc_within"] = self.pairs.within
        return measures

    def own(self, own_rows: int) -> dict[str, np.ndarray]:
        """Return the measures of each client by itself, [C]; NaN where it has too few samples."""
        own = {name: np.where(self.sizes >= own_rows, values, math.nan) for name, values in self.values.items()}
        if self.pairs is not None:
            own["auc"] = np.where(self.pairs.large(own_rows), self.pairs.areas, math.nan)
        return own


def measured_alone(each: Mapping[str, Sequence[float | None]]) -> dict[str, str]:
    """Say how many clients have an AUC of their own, and how many can be the worst one; empty if all do.

    each: ``per_client`` of a summary, with None for clients with too few samples.
    """
    words = {}
    for name, measure in (("auc", "auc"), ("worst", "loss")):
        values = each.get(measure, ())
        count = sum(value is not None for value in values)
        if count < len(values):
            words[name] = f"{count:,} of {len(values):,} sites measured"
    return words
