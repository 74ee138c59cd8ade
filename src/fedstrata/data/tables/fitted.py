"""A preparation whose statistics are known: it turns raw values into the inputs of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from fedstrata.core.errors import invalid

if TYPE_CHECKING:
    from fedstrata.data.tables.preparation import Plan


@dataclass(frozen=True)
class Fitted:
    """A preparation whose statistics are known.

    vector: the statistics as one vector, for checkpoints and messages.
    """

    plan: Plan
    vector: np.ndarray

    def __post_init__(self) -> None:
        p, k = len(self.plan.columns), sum(self.plan.columns[j].size for j in self.plan.encoded)
        if self.vector.shape != (3 * p + 2 * k,):
            raise invalid("statistics of the preparation", self.vector.shape, f"a vector of {3 * p + 2 * k} numbers")

    @staticmethod
    def of(plan: Plan, learned: Sequence[torch.Tensor | None]) -> Fitted:
        """Return the preparation with the statistics that a run has learned first."""
        statistics = learned[0]
        assert statistics is not None
        return Fitted(plan, statistics.double().cpu().numpy())

    @staticmethod
    def neutral(plan: Plan) -> Fitted:
        """Return a preparation that knows no statistics: it neither centres nor scales, and fills with 0."""
        p, k = len(plan.columns), sum(plan.columns[j].size for j in plan.encoded)
        return Fitted(plan, np.concatenate([np.zeros(2 * p), np.ones(p), np.zeros(2 * k)]))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the inputs of the model."""
        return self.plan.names

    def transform(self, values: np.ndarray) -> np.ndarray:
        """Return the inputs of the model for raw values: [n, p] -> [n, d]."""
        with torch.no_grad():
            inputs: np.ndarray = self.module(torch.from_numpy(np.asfortranarray(values))).numpy()
        return inputs

    @cached_property
    def module(self) -> Prepare:
        """The preparation as a module, on raw values of float64."""
        return Prepare(self)


class Prepare(nn.Module):
    """A fitted preparation as a module: raw values [n, p], with NaN for missing cells, to inputs [n, d]."""

    fill: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    centre: torch.Tensor
    scale: torch.Tensor
    category: torch.Tensor
    weights: torch.Tensor
    numbers: torch.Tensor
    owner: torch.Tensor
    indicated: torch.Tensor
    order: torch.Tensor

    def __init__(self, fitted: Fitted) -> None:
        super().__init__()
        plan, p = fitted.plan, len(fitted.plan.columns)
        columns, encoded = plan.columns, plan.encoded
        k = sum(columns[j].size for j in encoded)
        fill, centre, scale, shares, rare = np.split(fitted.vector, np.cumsum([p, p, p, k]))
        clips = [
            c.bounds if plan.how.clip and c.kind in ("numeric", "date") else (-math.inf, math.inf) for c in columns
        ]
        numbers = [j for j in range(p) if j not in encoded]
        owner = [j for j in encoded for _ in range(columns[j].size)]
        code = [c for j in encoded for c in range(columns[j].size)]
        group = np.array([[float(j == o) for j in encoded] for o in owner]).reshape(k, len(encoded))
        if plan.how.encode == "frequency":
            weights = shares[:, None] * group
        elif plan.how.rare > 1:
            weights = np.concatenate([np.diag(1 - rare), rare[:, None] * group], axis=1)
        else:
            weights = np.zeros((0, 0))  # each category is an input
        indicated = [j for j in range(p) if columns[j].indicator]
        tensors: dict[str, Sequence[float] | np.ndarray] = {
            "fill": fill, "low": [c[0] for c in clips], "high": [c[1] for c in clips],
            "centre": centre[numbers], "scale": scale[numbers], "category": code, "weights": weights,
        }  # fmt: skip
        places: dict[str, list[int]] = {
            "numbers": numbers, "owner": owner, "indicated": indicated,
            "order": _order(plan, numbers, indicated),
        }  # fmt: skip
        for name, entries in {**tensors, **places}.items():
            kind = torch.int64 if name in places else torch.float64
            tensor = torch.as_tensor(np.asarray(entries)).to(kind)
            if tensor.numel():  # a program of torch.export cannot store empty buffers
                self.register_buffer(name, tensor)
            else:
                setattr(self, name, tensor)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the model, column by column: a column is then one piece of memory."""
        columns = values.t()
        missing = columns.isnan()
        within = torch.minimum(torch.maximum(columns, self.low[:, None]), self.high[:, None])
        filled = torch.where(missing, self.fill[:, None], within)
        parts = []
        if len(self.numbers):
            numbers = filled.index_select(0, self.numbers)
            parts.append((numbers - self.centre[:, None]) / self.scale[:, None])
        if len(self.owner):
            one_hot = filled.index_select(0, self.owner).eq(self.category[:, None]).to(values.dtype)
            parts.append(self.weights.t() @ one_hot if len(self.weights) else one_hot)
        if len(self.indicated):
            parts.append(missing.index_select(0, self.indicated).to(values.dtype))
        return torch.cat(parts).index_select(0, self.order).t().contiguous()


def _order(plan: Plan, numbers: list[int], indicated: list[int]) -> list[int]:
    """Return, for each input of the model, its place among numbers, categories, others and indicators."""
    one_hot = plan.how.encode == "one_hot"
    widths = [plan.columns[j].size if one_hot else 1 for j in plan.encoded]
    others = plan.encoded if one_hot and plan.how.rare > 1 else []
    blocks = [*((j, 1) for j in numbers), *zip(plan.encoded, widths, strict=True)]
    blocks += [*((j, 1) for j in others), *((j, 1) for j in indicated)]
    places: dict[int, list[int]] = {}
    start = 0
    for j, width in blocks:
        places.setdefault(j, []).extend(range(start, start + width))
        start += width
    return [place for j in range(len(plan.columns)) for place in places[j]]
