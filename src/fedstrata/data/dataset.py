"""A data set before it is split over clients: training arrays, test arrays, and who wrote what."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedstrata.core.errors import InputError, invalid
from fedstrata.data import intake

if TYPE_CHECKING:
    from fedstrata.data.federated import FederatedData
    from fedstrata.data.partitions import Partition


_AUXILIARY = 9
"""Tells the random choice of an auxiliary set from the others of the same seed."""


@dataclass(frozen=True, repr=False)
class Dataset:
    """Training and test arrays of one data set.

    ``inputs`` are floats ready for a model, or small integers (tokens) that become int64 when drawn.
    ``targets`` are class numbers (int64), or floats for regression (``classes = 0``).
    ``keys`` names the owner of each training row (a speaking role, an alphabet), for the ``by_key`` partition.
    ``origins`` is the class of each training row before :meth:`imbalance` made a binary task of more classes, for the
    ``class_groups`` partition; None for a set that is as it came.
    """

    name: str
    inputs: torch.Tensor
    targets: torch.Tensor
    test_inputs: torch.Tensor
    test_targets: torch.Tensor
    classes: int
    keys: np.ndarray | None = None
    origins: np.ndarray | None = None

    def __post_init__(self) -> None:
        train = intake.pair(self.inputs, self.targets, f"the data set {self.name}")
        test = intake.pair(self.test_inputs, self.test_targets, f"the test part of {self.name}", train)
        if len(train[0]) == 0:
            raise InputError(f"The data set {self.name} has no rows.")
        for label, values in (("keys", self.keys), ("origins", self.origins)):
            if values is not None and len(values) != len(train[0]):
                raise invalid(
                    f"number of {label} of {self.name}", len(values), f"{len(train[0])}, one per training row"
                )
        for field, tensor in zip(("inputs", "targets", "test_inputs", "test_targets"), (*train, *test), strict=True):
            object.__setattr__(self, field, tensor)

    @staticmethod
    def from_arrays(
        inputs: Any,
        targets: Any,
        *,
        test: tuple[Any, Any] | None = None,
        keys: np.ndarray | None = None,
        classes: int | None = None,
        name: str = "arrays",
    ) -> Dataset:
        """Build from your own arrays or tensors, to be split over clients; ``test`` is the test part, if any."""
        x, y = intake.pair(inputs, targets, f"the data set {name}")
        tests = (x[:0], y[:0]) if test is None else intake.pair(*test, f"the test part of {name}", (x, y))
        if classes is None:
            labels = y.dim() == 1 and not y.is_floating_point()
            classes = max(int(t.max()) for t in (y, tests[1]) if len(t)) + 1 if labels and len(y) else 0
        return Dataset(name, x, y, *tests, classes, keys)

    def imbalance(self, share: float, seed: int = 0) -> Dataset:
        """Return the binary task with this share of positives in the training data; test rows are only relabelled.

        The first half of the classes is positive (1), the second half negative (0), as in the AUC papers; a set that
        is binary already keeps its labels. Positives of the training data are thinned out at random to ``share``, or
        negatives where there are too few positives. The test set keeps all its samples. ``origins`` of the result are
        the classes that its training rows had.
        """
        if not 0 < share < 1:
            raise invalid("share of positives", share, "between 0 and 1, exclusive")
        if self.classes < 2:
            raise InputError(f"The data set {self.name} has no classes, so it cannot be made imbalanced.")
        targets, test_targets, origins = self.targets, self.test_targets, self.origins
        if self.classes > 2:
            origins = targets.numpy()
            targets = (targets < self.classes // 2).long()
            test_targets = (test_targets < self.classes // 2).long()
        labels = targets.numpy()
        positive, negative = np.flatnonzero(labels == 1), np.flatnonzero(labels == 0)
        generator = np.random.default_rng(seed)
        wanted = round(len(negative) * share / (1 - share))
        if wanted <= len(positive):
            positive = generator.choice(positive, max(1, wanted), replace=False)
        else:
            negative = generator.choice(negative, max(1, round(len(positive) * (1 - share) / share)), replace=False)
        rows = np.sort(np.concatenate([positive, negative]))
        keep = torch.from_numpy(rows)
        return replace(
            self,
            inputs=self.inputs[keep],
            targets=targets[keep],
            test_targets=test_targets,
            classes=2,
            keys=None if self.keys is None else self.keys[rows],
            origins=None if origins is None else origins[rows],
        )

    def subset(self, samples: int, seed: int = 0) -> Dataset:
        """Return the same set with only ``samples`` training rows, chosen at random."""
        if not 0 < samples <= len(self.inputs):
            raise invalid("number of samples of the subset", samples, f"between 1 and {len(self.inputs)}")
        return self._rows(np.sort(np.random.default_rng(seed).choice(len(self.inputs), samples, replace=False)))

    def split(
        self,
        partition: Partition | str,
        *,
        clients: int,
        seed: int = 0,
        holdout: float = 0.0,
        support: float = 0.0,
        auxiliary: int = 0,
    ) -> FederatedData:
        """Spread the training rows over ``clients`` clients, e.g. by ``fs.partition.dirichlet(0.3)`` or ``"iid"``.

        ``holdout`` is the share of each client's rows kept as its own test part. ``support`` is the share of the rest
        that only the inner levels draw from; the outer function then draws from the other rows (the query set).
        ``auxiliary`` is how many training rows of each class the server gets instead of the clients, for methods that
        need some there. The set's own test rows stay pooled.
        """
        if auxiliary:
            server, rest = self._taken(auxiliary, seed)
            options: Any = {"clients": clients, "seed": seed, "holdout": holdout, "support": support}
            return rest.split(partition, **options).with_auxiliary(server.inputs, server.targets)
        from fedstrata.data.federated import FederatedData, Part
        from fedstrata.data.partitions import Partition, partition_named

        if isinstance(partition, str):
            partition = partition_named(partition)
        if not isinstance(partition, Partition):
            raise invalid("partition", partition, "a partition such as fs.partition.iid(), or its name")
        if isinstance(clients, bool) or not isinstance(clients, int) or clients < 1:
            raise invalid("number of clients", clients, "a whole number of at least 1")
        owned = partition(self.targets.numpy(), self.keys, clients, np.random.default_rng(seed), self.origins)
        test = (self.test_inputs, self.test_targets) if len(self.test_inputs) else None
        train = Part.of((self.inputs, self.targets), owned)
        data = FederatedData(train, test=test, classes=self.classes, name=self.name)
        data = data.with_holdout(holdout, seed) if holdout else data
        return data.with_support(support, seed) if support else data

    def _taken(self, per_class: int, seed: int) -> tuple[Dataset, Dataset]:
        """Return so many training rows of each class, chosen at random, and the others."""
        if isinstance(per_class, bool) or not isinstance(per_class, int) or per_class < 0:
            raise invalid("auxiliary", per_class, "a whole number, of rows per class")
        if not self.classes:
            raise InputError(f"An auxiliary set has rows of every class, and the data {self.name} have no classes.")
        generator = np.random.default_rng([seed, _AUXILIARY])
        labels = self.targets.numpy()
        rows = [np.flatnonzero(labels == c) for c in range(self.classes)]
        few = min(map(len, rows))
        if few <= per_class:
            raise invalid("auxiliary", per_class, f"fewer rows per class than the smallest class has, {few}")
        chosen = np.sort(np.concatenate([generator.choice(r, per_class, replace=False) for r in rows]))
        return self._rows(chosen), self._rows(np.setdiff1d(np.arange(len(labels)), chosen))

    def _rows(self, rows: np.ndarray) -> Dataset:
        keep = torch.from_numpy(rows)
        keys, origins = (None if values is None else values[rows] for values in (self.keys, self.origins))
        return replace(self, inputs=self.inputs[keep], targets=self.targets[keep], keys=keys, origins=origins)

    def __len__(self) -> int:
        return len(self.inputs)

    def __repr__(self) -> str:
        kind = f"{self.classes} classes" if self.classes else "regression"
        return f"<Dataset {self.name}: {len(self)} training and {len(self.test_inputs)} test rows, {kind}>"
