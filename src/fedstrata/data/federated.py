"""Data spread over clients: the arrays once, plus client boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstrata.core.errors import InputError, MissingData, invalid
from fedstrata.data import intake
from fedstrata.data.batch import Batch

Arrays = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Part:
    """Rows of shared arrays, grouped by client; within a client they stand in class order.

    arrays:  tensors whose first axis runs over all rows, ``(inputs, targets)``.
    rows:    row numbers, one client's after another's.
    offsets: client k owns ``rows[offsets[k]:offsets[k + 1]]``.
    """

    arrays: Arrays
    rows: torch.Tensor
    offsets: np.ndarray

    @staticmethod
    def of(arrays: Arrays, owned: Sequence[np.ndarray], may_be_empty: bool = False) -> Part:
        """Build a part from the row numbers that each client owns."""
        for client, rows in enumerate(owned):
            if len(rows) == 0 and not may_be_empty:
                raise InputError(f"Client {client} has no data. Every client needs at least one sample.")
        offsets = np.concatenate([[0], np.cumsum([len(r) for r in owned])]).astype(np.int64)
        rows = np.concatenate([np.asarray(r, dtype=np.int64) for r in owned])
        targets = arrays[-1]
        if _are_labels(targets):
            owner = np.repeat(np.arange(len(owned)), np.diff(offsets))
            rows = rows[np.lexsort((rows, targets.cpu().numpy()[rows], owner))]
        return Part(arrays, torch.from_numpy(rows), offsets)

    @property
    def sizes(self) -> np.ndarray:
        """Samples of each client."""
        return np.diff(self.offsets)

    @cached_property
    def class_counts(self) -> np.ndarray:
        """Samples of each client and class, [clients, classes], up to the last class that occurs."""
        targets = self.arrays[-1]
        if not _are_labels(targets):
            raise invalid("targets", f"{targets.dtype} of shape {tuple(targets.shape)}", "class numbers, one per row")
        labels = targets.cpu().numpy()[self.rows.numpy()]
        if labels.min() < 0:
            raise invalid("labels of the data", int(labels.min()), "class numbers from 0 on")
        owner = np.repeat(np.arange(len(self.sizes)), self.sizes)
        shape = (len(self.sizes), int(labels.max()) + 1)
        return np.bincount(owner * shape[1] + labels, minlength=shape[0] * shape[1]).reshape(shape)

    def of_client(self, client: int) -> Arrays:
        """Return one client's samples."""
        rows = self.rows[self.offsets[client] : self.offsets[client + 1]]
        return tuple(a[rows.to(a.device)] for a in self.arrays)

    def gather(self, clients: np.ndarray, positions: np.ndarray, lengths: np.ndarray | None, traced: bool) -> Batch:
        """Return the samples at ``positions`` [C, B] of each client: one gather for all of them."""
        index = torch.from_numpy(self.offsets[clients][:, None] + positions)
        if lengths is None:
            return Batch((self._take(index),), traced=traced)
        where = [np.flatnonzero(lengths == n) for n in np.unique(lengths)]
        parts = [self._take(index[torch.from_numpy(w), : int(lengths[w[0]])]) for w in where]
        return Batch(tuple(parts), tuple(torch.from_numpy(w) for w in where), traced=False)

    def _take(self, index: torch.Tensor) -> Arrays:
        rows = self.rows.take(index.reshape(-1))
        out = []
        for array in self.arrays:
            flat = array.index_select(0, rows if array.device == rows.device else rows.to(array.device))
            flat = flat if flat.is_floating_point() else flat.long()
            out.append(flat.view(*index.shape, *array.shape[1:]))
        return tuple(out)


def _are_labels(targets: torch.Tensor) -> bool:
    return targets.dim() == 1 and not targets.is_floating_point()


def _to(array: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return array.to(device=device, dtype=dtype if array.is_floating_point() else array.dtype)


@dataclass(frozen=True, repr=False)
class FederatedData:
    """The data of N clients.

    train:       what clients learn from. With ``support`` present, the outer function draws from here (the query set)
                 and the inner levels draw from ``support``; otherwise both draw from here, independently.
    test:        the pooled test set ``(inputs, targets)``, if there is one.
    client_test: a test part for each client, if there is one.
    classes:     the number of classes, 0 for regression.
    client_names: what the clients are called, if anything.
    auxiliary:   what the server has itself, grouped by class as the others are by client, if anything.
    """

    train: Part
    support: Part | None = None
    test: Arrays | None = None
    client_test: Part | None = None
    classes: int = 0
    name: str = "data"
    client_names: tuple[str, ...] = ()
    auxiliary: Part | None = None

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.train.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        """How many training samples each client has, support and query together."""
        return self.train.sizes if self.support is None else self.train.sizes + self.support.sizes

    def __repr__(self) -> str:
        sizes = self.sizes
        return f"<FederatedData {self.name}: {self.clients} clients with {sizes.min()} to {sizes.max()} training rows>"

    def part(self, level: int) -> Part:
        """Return what level ``level`` draws from; level 0 is the outer function."""
        return self.support if level > 0 and self.support is not None else self.train

    def to(self, device: torch.device, dtype: torch.dtype) -> FederatedData:
        """Return the data on ``device``, floating arrays in ``dtype``; arrays shared by parts stay shared."""
        moved: dict[int, torch.Tensor] = {}

        def move(arrays: Arrays) -> Arrays:
            return tuple(moved.setdefault(id(a), _to(a, device, dtype)) for a in arrays)

        def part(p: Part | None) -> Part | None:
            return None if p is None else replace(p, arrays=move(p.arrays))

        return replace(
            self,
            train=replace(self.train, arrays=move(self.train.arrays)),
            support=part(self.support),
            client_test=part(self.client_test),
            auxiliary=part(self.auxiliary),
            test=None if self.test is None else move(self.test),
        )

    def with_support(self, share: float, seed: int = 0) -> FederatedData:
        """Return the same clients with ``share`` of each one's training rows as its support set.

        The inner levels then draw from the support rows, the outer function from the others (the query set).
        """
        kept, support = _hold_out(_owned(self.train), share, np.random.default_rng(seed))
        arrays = self.train.arrays
        return replace(self, train=Part.of(arrays, kept), support=Part.of(arrays, support))

    def with_holdout(self, share: float, seed: int = 0) -> FederatedData:
        """Return the same clients with ``share`` of each one's training rows as its own test part."""
        if self.client_test is not None:
            raise InputError(f"The clients of {self.name!r} have test data already, so none is held out.")
        kept, held = _hold_out(_owned(self.train), share, np.random.default_rng(seed))
        arrays = self.train.arrays
        return replace(self, train=Part.of(arrays, kept), client_test=Part.of(arrays, held, may_be_empty=True))

    def with_auxiliary(self, inputs: Any, targets: Any) -> FederatedData:
        """Return the same clients with these samples on the server, some of every class: for methods that need them."""
        if not self.classes:
            raise InputError(
                f"An auxiliary set has samples of every class, and the data {self.name!r} have no classes."
            )
        first: Any = tuple(a[:1] for a in self.train.arrays)
        arrays = intake.pair(inputs, targets, "the auxiliary set", first)
        if not _are_labels(arrays[1]):
            raise invalid("targets of the auxiliary set", str(arrays[1].dtype), "class numbers, one per row")
        labels = arrays[1].numpy()
        owned = [np.flatnonzero(labels == c) for c in range(self.classes)]
        missing = [c for c, rows in enumerate(owned) if len(rows) == 0]
        if missing or sum(map(len, owned)) < len(labels):
            got = f"none of class {missing[0]}" if missing else f"labels from {labels.min()} to {labels.max()}"
            raise invalid("auxiliary set", got, f"samples of every class, 0 to {self.classes - 1}, and of no other")
        return replace(self, auxiliary=Part.of(arrays, owned))

    def validation(self, share: float = 0.2, seed: int = 0) -> FederatedData:
        """Return the same clients with ``share`` of each one's training rows as the test data: for tuning.

        The real test data are not in the result at all. A client with one sample keeps it for training.
        """
        kept, held = _hold_out(_owned(self.train), share, np.random.default_rng(seed))
        arrays = self.train.arrays
        pooled = torch.from_numpy(np.concatenate(held))
        if len(pooled) == 0:
            raise InputError(f"The data {self.name!r} have too few samples per client for a validation split.")
        return replace(
            self,
            train=Part.of(arrays, kept),
            test=tuple(a[pooled.to(a.device)] for a in arrays),
            client_test=Part.of(arrays, held, may_be_empty=True),
        )

    @staticmethod
    def from_arrays(
        clients: Sequence[tuple[Any, Any]],
        *,
        test: tuple[Any, Any] | None = None,
        client_tests: Sequence[tuple[Any, Any]] | None = None,
        classes: int | None = None,
        name: str = "arrays",
        client_names: Sequence[str] = (),
    ) -> FederatedData:
        """Build from one ``(inputs, targets)`` pair of arrays or tensors per client.

        ``test`` is a pooled test set, ``client_tests`` one for each client (an empty pair where it has none).
        """
        if isinstance(clients, dict) or not all(isinstance(c, tuple | list) and len(c) == 2 for c in clients):
            raise invalid("clients", type(clients).__name__, "a list with one (inputs, targets) pair per client")
        if len(clients) == 0:
            raise InputError("The data have no clients.")
        called = [f"client {k}" + (f" ({client_names[k]})" if client_names else "") for k in range(len(clients))]
        pairs = [intake.pair(*clients[0], called[0])]
        pairs += [intake.pair(*c, what, pairs[0]) for c, what in zip(clients[1:], called[1:], strict=True)]
        for (x, _), what in zip(pairs, called, strict=True):
            if len(x) == 0:
                raise InputError(f"{what.capitalize()} has no data. Every client needs at least one sample.")
        train = Part.of(*intake.joined(pairs))
        pooled = None if test is None else intake.pair(*test, "the test set", pairs[0])
        if pooled is not None and len(pooled[0]) == 0:
            raise InputError("The test set is empty. Leave it out if there is none.")
        tests = None
        if client_tests is not None:
            if len(client_tests) != len(clients):
                raise invalid("number of clients' test sets", len(client_tests), f"{len(clients)}, one per client")
            own = [
                intake.pair(*c, f"the test data of {what}", pairs[0])
                for c, what in zip(client_tests, called, strict=True)
            ]
            if any(len(x) for x, _ in own):
                tests = Part.of(*intake.joined(own), may_be_empty=True)
                pooled = (tests.arrays[0], tests.arrays[1]) if pooled is None else pooled
        if classes is None:
            every = [p.arrays[1] for p in (train, tests) if p is not None] + ([] if pooled is None else [pooled[1]])
            labels = not any(t.is_floating_point() or t.dim() > 1 for t in every)
            classes = max(int(t.max()) for t in every) + 1 if labels else 0
        return FederatedData(train, None, pooled, tests, classes, name, tuple(client_names))

    @staticmethod
    def from_datasets(clients: Sequence[Any], *, test: Any = None, name: str = "datasets") -> FederatedData:
        """Build from one map-style torch data set of ``(input, target)`` samples per client."""
        pairs = [intake.stacked(d, f"client {k}") for k, d in enumerate(clients)]
        pooled = None if test is None else intake.stacked(test, "test data")
        return FederatedData.from_arrays(pairs, test=pooled, name=name)

    @staticmethod
    def from_folder(folder: str | Path) -> FederatedData:
        """Build from a folder with one .npz per client, in the order of their names.

        Each holds ``inputs`` and ``targets`` (``x`` and ``y`` will do), and optionally ``test_inputs`` and
        ``test_targets``. A file called ``test.npz`` with ``inputs`` and ``targets`` is the pooled test set.
        """
        path = Path(folder).expanduser()
        files = sorted(p for p in path.glob("*.npz") if p.name != "test.npz")
        if not files:
            raise MissingData(f"No client files in {path}. Put one .npz per client there, with inputs and targets.")
        arrays = [intake.read_npz(f) for f in files]
        pairs = [intake.named(a, f) for a, f in zip(arrays, files, strict=True)]
        tests = [
            intake.named(a, f, "test_") if any(k.startswith("test_") for k in a) else (p[0][:0], p[1][:0])
            for a, f, p in zip(arrays, files, pairs, strict=True)
        ]
        pooled = path / "test.npz"
        return FederatedData.from_arrays(
            pairs,
            client_tests=tests,
            test=intake.named(intake.read_npz(pooled), pooled) if pooled.exists() else None,
            name=path.name,
            client_names=[f.stem for f in files],
        )


def _owned(part: Part) -> list[np.ndarray]:
    return np.split(part.rows.numpy(), part.offsets[1:-1])


def _hold_out(
    owned: Sequence[np.ndarray], share: float, generator: np.random.Generator
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Cut ``share`` of each client's rows off; a client always keeps at least one."""
    if not 0 < share < 1:
        raise invalid("share to hold out", share, "between 0 and 1, exclusive")
    kept, held = [], []
    for rows in owned:
        shuffled = generator.permutation(rows)
        count = min(round(share * len(rows)), len(rows) - 1)
        kept.append(shuffled[count:])
        held.append(shuffled[:count])
    return kept, held
