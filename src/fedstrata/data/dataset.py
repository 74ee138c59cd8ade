"""A data set before it is split over clients."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch

from fedstrata.core.errors import InputError, invalid
from fedstrata.core.options import options, param
from fedstrata.data import intake
from fedstrata.data.batch import Arrays
from fedstrata.data.federated import FederatedData, Part
from fedstrata.data.partitions import Partition, partition_named

HOLDOUT = param(0.0, "fraction of each client's rows, class by class, held out as its test data", least=0, below=1)
SUPPORT = param(0.0, "fraction of the rest, class by class, that only the inner levels draw from", least=0, below=1)
AUXILIARY = param(
    0, "training rows of each class that the server gets instead of the clients; `local_sgdm_rl` needs some", least=0
)
IMBALANCE = param(
    None, "make a binary task, some classes against the others, with this fraction of positives", above=0, below=1
)
POSITIVES = param(
    None, "classes that are positive after `imbalance`; by default the first half, or class 1 of two", least=0
)
CLIENTS = param(..., "number of clients", least=1)
SEED = param(0, "seed of all random choices", least=0)
_AUXILIARY = 9
"""Separates the random choice of an auxiliary set from others with the same seed."""


@dataclass(frozen=True, repr=False)
class Dataset:
    """Training and test arrays of one data set, to be split over clients.

    name:         the name of the set in messages and tables.
    inputs:       floats, or integers (tokens), which become int64 in a batch.
    targets:      class numbers (integers, or floats 0 and 1), or floats for regression.
    test_inputs:  the inputs of the test set; empty if there is none.
    test_targets: the targets of the test set.
    classes:      the number of classes, 0 for regression.
    keys:         the owner of each training row (a speaking role, an alphabet), for the partition ``by_key``.
    origins:      the class that each training row had before :meth:`imbalance` made the task binary, for the partition
                  ``class_groups``; None for a set with its original classes.
    more_inputs:  further inputs of the model, if a sample has several.
    more_test_inputs: those of the test set.
    """

    name: str
    inputs: torch.Tensor
    targets: torch.Tensor
    test_inputs: torch.Tensor
    test_targets: torch.Tensor
    classes: int
    keys: np.ndarray | None = None
    origins: np.ndarray | None = None
    more_inputs: Arrays = ()
    more_test_inputs: Arrays = ()

    @property
    def train_arrays(self) -> Arrays:
        """All inputs of the training rows, and their targets."""
        return (self.inputs, *self.more_inputs, self.targets)

    @property
    def test_arrays(self) -> Arrays:
        """All inputs of the test rows, and their targets."""
        return (self.test_inputs, *self.more_test_inputs, self.test_targets)

    def __post_init__(self) -> None:
        intake.check_classes(self.classes, f"the data set {self.name}")
        train = intake.checked(self.train_arrays, f"the data set {self.name}", classes=self.classes)
        what = f"the test part of {self.name}"
        test = intake.checked(self.test_arrays, what, train, "the training part", self.classes)
        if len(train[0]) == 0:
            raise InputError(f"The data set {self.name} has no rows.")
        for label, values in (("keys", self.keys), ("origins", self.origins)):
            if values is not None and len(values) != len(train[0]):
                wants = f"{len(train[0])}, one per training row"
                raise invalid(f"number of {label} of {self.name}", len(values), wants)
        for prefix, (inputs, *more, targets) in (("", train), ("test_", test)):
            fields = {f"{prefix}inputs": inputs, f"more_{prefix}inputs": tuple(more), f"{prefix}targets": targets}
            for field, value in fields.items():
                object.__setattr__(self, field, value)

    @staticmethod
    def from_arrays(
        *arrays: Any,
        test: Sequence[Any] | None = None,
        keys: np.ndarray | None = None,
        classes: int | None = None,
        name: str = "arrays",
    ) -> Dataset:
        """Build a data set from your own arrays or tensors, to be split over clients.

        arrays:  the training inputs and targets, ``from_arrays(inputs, targets)``; the first axis runs over samples.
                 If the model takes several inputs, the targets come last: ``from_arrays(inputs, mask, targets)``.
        test:    a test set of such arrays, ``(inputs, targets)``, if there is one.
        keys:    the owner of each training row, for the partition ``by_key``.
        classes: the number of classes, 0 for regression. By default targets are classes if they are integers, or floats
                 that are 0 and 1, and the number of classes is the highest label plus 1. Set it if the last class may
                 be missing from the data, or if class labels are floats such as 0.0, 1.0, 2.0.
        name:    the name of the set in messages and tables.
        """
        inputs, *more, targets = intake.several(arrays, f"the data set {name}")
        none: Any = ((),) * len(arrays)
        tests = none if test is None else intake.several(test, f"the test part of {name}")
        test_inputs, *more_tests, test_targets = tests
        data = Dataset(
            name,
            inputs,
            targets,
            test_inputs,
            test_targets,
            0 if classes is None else classes,
            keys,
            more_inputs=tuple(more),
            more_test_inputs=tuple(more_tests),
        )
        if classes is not None:
            return data
        return data._with(classes=intake.count_classes(data.targets, data.test_targets))

    @options("the imbalance")
    def imbalance(
        self,
        share: float = replace(IMBALANCE, default=...),
        seed: int = SEED,
        positives: Sequence[int] | None = POSITIVES,
    ) -> Self:
        """Return a binary task with this fraction of positives in the training data.

        The classes in ``positives`` become class 1, the others class 0. By default the first half of the classes is
        positive, as in the AUC papers, and a binary set keeps its labels. Random positives are dropped from the
        training rows to reach ``share``, or random negatives if there are too few positives. Test rows are relabelled,
        and all of them are kept. The ``origins`` of the result are the original classes of its training rows.
        """
        if self.classes < 2:
            raise InputError(f"The data set {self.name} has no classes, so it cannot be made imbalanced.")
        targets, test_targets, origins = self.targets, self.test_targets, self.origins
        if self.classes > 2:
            origins = targets.numpy()
        if self.classes > 2 or positives is not None:
            chosen = torch.tensor(self._positive_classes(positives))
            targets, test_targets = (torch.isin(t.long(), chosen).long() for t in (targets, test_targets))
        labels = targets.numpy()
        positive, negative = np.flatnonzero(labels == 1), np.flatnonzero(labels == 0)
        for name, rows in (("positive", positive), ("negative", negative)):
            if len(rows) == 0:
                raise InputError(f"The data set {self.name} has no {name} rows, so it cannot be made imbalanced.")
        generator = np.random.default_rng(seed)
        wanted = round(len(negative) * share / (1 - share))
        if wanted <= len(positive):
            positive = generator.choice(positive, max(1, wanted), replace=False)
        else:
            negative = generator.choice(negative, max(1, round(len(positive) * (1 - share) / share)), replace=False)
        binary = self._with(targets=targets, test_targets=test_targets, classes=2, origins=origins)
        return binary._rows(np.sort(np.concatenate([positive, negative])))

    def _positive_classes(self, positives: Sequence[int] | None) -> Sequence[int]:
        """Return the classes of the set that are positive in a binary task: these, or the first half."""
        if positives is None:
            return range(self.classes // 2)
        distinct = set(positives)
        if not 0 < len(distinct) == len(positives) < self.classes or max(distinct) >= self.classes:
            wants = f"different classes from 0 to {self.classes - 1}, at least one and not all"
            raise invalid("positives of the imbalance", list(positives), wants, f"data set {self.name}")
        return positives

    def subset(self, samples: int, seed: int = 0) -> Self:
        """Return the set with ``samples`` of its training rows, chosen at random, and all its test rows."""
        if isinstance(samples, bool) or not isinstance(samples, int) or not 0 < samples <= len(self.inputs):
            wants = f"a whole number from 1 to {len(self.inputs)}"
            raise invalid("number of samples of the subset", samples, wants)
        return self._rows(np.sort(np.random.default_rng(seed).choice(len(self.inputs), samples, replace=False)))

    @options("the split")
    def split(
        self,
        partition: Partition | str,
        *,
        clients: int = CLIENTS,
        seed: int = SEED,
        holdout: float = HOLDOUT,
        support: float = SUPPORT,
        auxiliary: int = AUXILIARY,
    ) -> FederatedData:
        """Split the training rows over clients; the test rows stay one pooled test set.

        partition: how to split, e.g. ``fs.partition.dirichlet(0.3)`` or ``"iid"``.
        clients:   number of clients.
        seed:      seed of all random choices.
        holdout:   fraction of each client's rows held out as its test part (see :meth:`FederatedData.with_holdout`).
        support:   fraction of the remaining rows that the inner levels draw from; the outer function then draws from
                   the others (see :meth:`FederatedData.with_support`).
        auxiliary: training rows of each class that go to the server instead of the clients, for methods that need them.
        """
        if auxiliary:
            server, rest = self._split_off(auxiliary, seed)
            data = rest.split(partition, clients=clients, seed=seed, holdout=holdout, support=support)
            return data.with_auxiliary(*server.train_arrays)
        if isinstance(partition, str):
            partition = partition_named(partition)
        if not isinstance(partition, Partition):
            raise invalid("partition", partition, "a partition such as fs.partition.iid(), or its name")
        targets = (self.targets.long() if self.classes else self.targets).numpy()
        owned = partition(targets, self.keys, clients, np.random.default_rng(seed), self.origins)
        test = self.test_arrays if len(self.test_inputs) else None
        train = Part.of(self.train_arrays, owned)
        data = FederatedData(train, test=test, classes=self.classes, name=self.name)
        return data.reserve(holdout, support, seed)

    def _split_off(self, per_class: int, seed: int) -> tuple[Self, Self]:
        """Return ``per_class`` random training rows of each class, and the others."""
        if not self.classes:
            raise InputError(f"An auxiliary set needs classes, but the data set {self.name} has none.")
        generator = np.random.default_rng([seed, _AUXILIARY])
        labels = self.targets.numpy()
        rows = [np.flatnonzero(labels == c) for c in range(self.classes)]
        fewest = min(map(len, rows))
        if fewest <= per_class:
            raise invalid("auxiliary", per_class, f"fewer rows per class than the smallest class has, {fewest}")
        chosen = np.sort(np.concatenate([generator.choice(r, per_class, replace=False) for r in rows]))
        return self._rows(chosen), self._rows(np.setdiff1d(np.arange(len(labels)), chosen))

    def _rows(self, rows: np.ndarray) -> Self:
        keep = torch.from_numpy(rows)
        keys, origins = (None if values is None else values[rows] for values in (self.keys, self.origins))
        inputs, *more, targets = (a[keep] for a in self.train_arrays)
        return self._with(inputs=inputs, more_inputs=tuple(more), targets=targets, keys=keys, origins=origins)

    def _with(self, **changes: Any) -> Self:
        """Return a copy with these changes, unchecked: their arrays come from this set, which has been checked."""
        changed = copy.copy(self)
        for field, value in changes.items():
            object.__setattr__(changed, field, value)
        return changed

    def __len__(self) -> int:
        return len(self.inputs)

    def __repr__(self) -> str:
        kind = f"{self.classes} classes" if self.classes else "regression"
        return f"<Dataset {self.name}: {len(self)} training and {len(self.test_inputs)} test rows, {kind}>"
