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

        A client with fewer samples than ``own_rows`` cannot have the worst accuracy. One with fewer of either class has
        no AUC of its own, but its pairs count in ``auc_within``. A loss counts in any case: objectives are about it.
        """
        measures: Measures = {}
        present = self.sizes > 0
        for name, values in self.values.items():
            measures |= over_clients(name, values[present], large(name, self.sizes[present], own_rows))
        if self.pairs is not None:
            measures |= over_clients("auc", self.pairs.areas[self.pairs.large(own_rows)])
            if self.pairs.counts.any():
                measures["auc_within"] = self.pairs.within
        return measures

    def own(self, own_rows: int) -> dict[str, np.ndarray]:
        """Return the measures of each client by itself, [C]; NaN where it has too few samples."""
        own = {n: np.where(large(n, self.sizes, own_rows), values, math.nan) for n, values in self.values.items()}
        if self.pairs is not None:
            own["auc"] = np.where(self.pairs.large(own_rows), self.pairs.areas, math.nan)
        return own


def large(name: str, sizes: np.ndarray, own_rows: int) -> np.ndarray:
    """Return which clients have enough samples, [C], for a loss or an accuracy of their own: [C]."""
    enough: np.ndarray = sizes >= (own_rows if name.endswith("accuracy") else 1)
    return enough


def measured_alone(each: Mapping[str, Sequence[float | None]]) -> dict[str, str]:
    """Say how many clients have an AUC of their own, and how many an accuracy; empty if all do.

    each: ``per_client`` of a summary, with None for clients with too few samples.
    """
    words = {}
    for name in ("auc", "accuracy"):
        values = each.get(name, ())
        count = sum(value is not None for value in values)
        if count < len(values):
            words[name] = f"{count:,} of {len(values):,} sites measured"
    return words
