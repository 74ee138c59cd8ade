"""Data spread over clients: the arrays once, plus client boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstrata.data.batch import Batch
from fedstrata.errors import InputError, MissingData, invalid

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
        if targets.dim() == 1 and not targets.is_floating_point():
            owner = np.repeat(np.arange(len(owned)), np.diff(offsets))
            rows = rows[np.lexsort((rows, targets.cpu().numpy()[rows], owner))]
        return Part(arrays, torch.from_numpy(rows), offsets)

    @property
    def sizes(self) -> np.ndarray:
        """Samples of each client."""
        return np.diff(self.offsets)

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
        rows = self.rows.take(index.reshape(-1).clamp_(max=len(self.rows) - 1))
        out = []
        for array in self.arrays:
            flat = array.index_select(0, rows.to(array.device))
            flat = flat if flat.is_floating_point() else flat.long()
            out.append(flat.view(*index.shape, *array.shape[1:]))
        return tuple(out)

    def to(self, device: torch.device, dtype: torch.dtype) -> Part:
        """Return the part with its arrays on ``device`` and its floating arrays in ``dtype``."""
        return replace(self, arrays=tuple(_to(a, device, dtype) for a in self.arrays))


def _to(array: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return array.to(device=device, dtype=dtype if array.is_floating_point() else array.dtype)


@dataclass(frozen=True)
class FederatedData:
    """The data of N clients.

    train:       what clients learn from. With ``support`` present, the outer function draws from here (the query set)
                 and the inner levels draw from ``support``; otherwise both draw from here, independently.
    test:        the pooled test set ``(inputs, targets)``, if there is one.
    client_test: a test part for each client, if there is one.
    classes:     the number of classes, 0 for regression.
    """

    train: Part
    support: Part | None = None
    test: Arrays | None = None
    client_test: Part | None = None
    classes: int = 0
    name: str = "data"

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.train.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        """How many training samples each client has, support and query together."""
        return self.train.sizes if self.support is None else self.train.sizes + self.support.sizes

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
            test=None if self.test is None else move(self.test),
        )

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
    ) -> FederatedData:
        """Build from one ``(inputs, targets)`` pair of arrays or tensors per client."""
        if len(clients) == 0:
            raise InputError("The data have no clients.")
        train = _joined(clients, "client")
        tests = None if client_tests is None else _joined(client_tests, "test data of client", may_be_empty=True)
        pooled = tuple(_tensor(a) for a in test) if test is not None else None
        if pooled is None and tests is not None:
            pooled = tests.arrays
        targets = train.arrays[1]
        if classes is None:
            every = [targets, *([pooled[1]] if pooled is not None else [])]
            labels = not targets.is_floating_point() and targets.dim() == 1
            classes = max(int(t.max()) for t in every) + 1 if labels else 0
        return FederatedData(train, test=pooled, client_test=tests, classes=classes, name=name)

    @staticmethod
    def from_datasets(clients: Sequence[Any], *, test: Any = None, name: str = "datasets") -> FederatedData:
        """Build from one map-style torch data set of ``(input, target)`` samples per client."""
        pairs = [_stack(d, f"client {k}") for k, d in enumerate(clients)]
        return FederatedData.from_arrays(pairs, test=None if test is None else _stack(test, "test data"), name=name)

    @staticmethod
    def from_folder(folder: str | Path) -> FederatedData:
        """Build from a folder with one .npz per client, in the order of their names.

        Each holds ``inputs`` and ``targets`` (``x`` and ``y`` will do), and optionally ``test_inputs`` and
        ``test_targets``. A file called ``test.npz`` with ``inputs`` and ``targets`` is the pooled test set.
        """
        path = Path(folder)
        files = sorted(p for p in path.glob("*.npz") if p.name != "test.npz")
        if not files:
            raise MissingData(f"No client files in {path}. Put one .npz per client there, with inputs and targets.")
        loaded = [_read_npz(f) for f in files]
        tests = [{k[5:]: v for k, v in arrays.items() if k.startswith("test_")} for arrays in loaded]
        has_tests = any(tests)
        pooled = path / "test.npz"
        return FederatedData.from_arrays(
            [_pair(a, f) for a, f in zip(loaded, files, strict=True)],
            client_tests=[_pair(t, f) for t, f in zip(tests, files, strict=True)] if has_tests else None,
            test=_pair(_read_npz(pooled), pooled) if pooled.exists() else None,
            name=path.name,
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


def _tensor(array: Any) -> torch.Tensor:
    tensor = torch.as_tensor(array)
    if tensor.dtype == torch.bool:
        tensor = tensor.long()
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _joined(pairs: Sequence[tuple[Any, Any]], what: str, may_be_empty: bool = False) -> Part:
    arrays = [(_tensor(x), _tensor(y)) for x, y in pairs]
    for k, (x, y) in enumerate(arrays):
        if len(x) != len(y):
            raise invalid(f"number of targets of {what} {k}", len(y), f"{len(x)}, as many as inputs")
        if x.shape[1:] != arrays[0][0].shape[1:] and len(x):
            wanted = tuple(arrays[0][0].shape[1:])
            raise invalid(f"shape of an input of {what} {k}", tuple(x.shape[1:]), f"{wanted}, as for client 0")
        if x.is_floating_point() and not bool(torch.isfinite(x).all()):
            raise InputError(f"The inputs of {what} {k} hold NaN or infinity.")
    sizes = [len(x) for x, _ in arrays]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    owned = [np.arange(a, b) for a, b in pairwise(starts)]
    filled = [a for a, n in zip(arrays, sizes, strict=True) if n] or arrays
    return Part.of((torch.cat([x for x, _ in filled]), torch.cat([y for _, y in filled])), owned, may_be_empty)


def _stack(dataset: Any, what: str) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        samples = [dataset[i] for i in range(len(dataset))]
        inputs = torch.stack([torch.as_tensor(s[0]) for s in samples])
        return inputs, torch.stack([torch.as_tensor(s[1]) for s in samples])
    except (TypeError, IndexError, KeyError, RuntimeError) as error:
        if hasattr(dataset, "__len__") and len(dataset) == 0:
            raise InputError(f"The data set of {what} is empty.") from None
        raise InputError(f"The data set of {what} must have a length and (input, target) samples: {error}") from None


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {k: file[k] for k in file.files}
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"The file {path} is not a readable .npz without pickled objects: {error}") from None


def _pair(arrays: dict[str, np.ndarray], path: Path) -> tuple[np.ndarray, np.ndarray]:
    inputs = arrays.get("inputs", arrays.get("x"))
    targets = arrays.get("targets", arrays.get("y"))
    if inputs is None or targets is None:
        raise InputError(f"The file {path} must hold inputs and targets (or x and y). It holds: {', '.join(arrays)}.")
    return inputs, targets
