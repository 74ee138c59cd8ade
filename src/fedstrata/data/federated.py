"""Data spread over clients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstrata.core.errors import InputError, MissingData, Unsolvable, invalid
from fedstrata.data import intake
from fedstrata.data.batch import Arrays as Arrays
from fedstrata.data.part import Part as Part
from fedstrata.data.tables.fitted import Fitted
from fedstrata.data.tables.preparation import Plan, Preparation
from fedstrata.data.tables.schema import Schema
from fedstrata.data.tables.statistics import class_counts


@dataclass(frozen=True, repr=False)
class FederatedData:
    """The data of N clients.

    Build it from your own data with :meth:`from_arrays`, :meth:`from_datasets` or :meth:`from_folder`, or split a
    :class:`Dataset` with :meth:`Dataset.split`. A sample is ``(inputs, targets)``, or several inputs, which all go to
    the model, and the targets: ``(inputs, mask, targets)``.

    train:        training samples. With ``support``, only the outer function draws from here (the query set) and the
                  inner levels draw from ``support``; without it, both draw from here, independently.
    support:      training samples of the inner levels, if they have their own.
    test:         the pooled test set, arrays like those of a client, if there is one.
    client_test:  a test part for each client, if there is one.
    classes:      the number of classes, 0 for regression.
    name:         the name of the data in messages and tables.
    client_names: the names of the clients, if they have any.
    auxiliary:    samples on the server, grouped by class, if there are any.
    plan:         for tables whose inputs are still raw values: how they become inputs of a model, once the clients have
                  told the statistics that it needs.
    fitted:       for tables, the preparation that made their inputs.
    separate:     if these are the rows of several clients in one place, so that nothing is sent: the data of each, on
                  which a model is measured.
    """

    train: Part
    support: Part | None = None
    test: Arrays | None = None
    client_test: Part | None = None
    classes: int = 0
    name: str = "data"
    client_names: tuple[str, ...] = ()
    auxiliary: Part | None = None
    plan: Plan | None = None
    fitted: Fitted | None = None
    separate: FederatedData | None = None

    @property
    def one_place(self) -> bool:
        """Whether these are the rows of several clients in one place."""
        return self.separate is not None

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.train.offsets) - 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an input of a model, for :func:`fedstrata.models.model`."""
        return tuple(self.train.arrays[0].shape[1:]) if self.plan is None else (len(self.plan.names),)

    def name_of(self, client: int) -> str:
        """Return what messages call a client."""
        return client_name(self.client_names, client)

    @property
    def sizes(self) -> np.ndarray:
        """Number of training samples of each client, support and query together."""
        return self.train.sizes if self.support is None else self.train.sizes + self.support.sizes

    def __repr__(self) -> str:
        sizes = self.sizes
        return f"<FederatedData {self.name}: {self.clients} clients with {sizes.min()} to {sizes.max()} training rows>"

    def part(self, level: int) -> Part:
        """Return the samples that level ``level`` draws from; level 0 is the outer function."""
        return self.support if level > 0 and self.support is not None else self.train

    def only(self, clients: np.ndarray) -> FederatedData:
        """Return the data of these clients, by number; the pooled test set and the server's samples stay."""

        def part(p: Part | None) -> Part | None:
            return None if p is None else p.only(clients)

        return replace(
            self,
            train=self.train.only(clients),
            support=part(self.support),
            client_test=part(self.client_test),
            client_names=tuple(self.client_names[k] for k in clients) if self.client_names else (),
        )

    def alone(self, client: int) -> FederatedData:
        """Return the data of a client that trains alone: it prepares its own table, and tells nobody of its counts."""
        plan = None if self.plan is None else self.plan.of_one_site()
        return replace(self.only(np.array([client])), plan=plan)

    def pooled(self) -> FederatedData:
        """Return the data with all clients joined into one: what training would have if all rows were in one place."""

        def part(p: Part | None) -> Part | None:
            return None if p is None else p.joined()

        return replace(
            self,
            train=self.train.joined(),
            support=part(self.support),
            client_test=part(self.client_test),
            client_names=("all clients",) if self.client_names else (),
            separate=self,
        )

    def to(self, device: torch.device, dtype: torch.dtype) -> FederatedData:
        """Return the data on ``device``, floating-point arrays as ``dtype``; shared arrays stay shared.

        The raw values of tables stay as they are: they are prepared first.
        """
        if self.plan is not None:
            return self
        moved: dict[int, torch.Tensor] = {}

        def move(arrays: Arrays) -> Arrays:
            return tuple(
                moved.setdefault(id(a), a.to(device, dtype if a.is_floating_point() else a.dtype)) for a in arrays
            )

        return self._with_arrays(move)

    def _with_arrays(self, change: Callable[[Arrays], Arrays]) -> FederatedData:
        """Return the data with other arrays, in which rows have the same numbers."""

        def part(p: Part | None) -> Part | None:
            return None if p is None else replace(p, arrays=change(p.arrays))

        return replace(
            self,
            train=replace(self.train, arrays=change(self.train.arrays)),
            support=part(self.support),
            client_test=part(self.client_test),
            auxiliary=part(self.auxiliary),
            test=None if self.test is None else change(self.test),
            separate=None if self.separate is None else self.separate._with_arrays(change),
        )

    def prepared(self, fitted: Fitted) -> FederatedData:
        """Return the data with the inputs that a preparation makes of the raw values of tables."""
        made: dict[int, torch.Tensor] = {}

        def change(arrays: Arrays) -> Arrays:
            values, *others = arrays
            if id(values) not in made:
                made[id(values)] = torch.from_numpy(fitted.transform(values.cpu().numpy())).to(values.device)
            return (made[id(values)], *others)

        return replace(self._with_arrays(change), plan=None, fitted=fitted)

    def statistics(self, client: int) -> np.ndarray:
        """Return what a client tells of the raw values of its training rows, for the preparation."""
        assert self.plan is not None
        parts = [p for p in (self.train, self.support) if p is not None]
        values = [p.arrays[0].cpu().numpy()[p.rows[p.offsets[client] : p.offsets[client + 1]].numpy()] for p in parts]
        return self.plan.answer(np.concatenate(values))

    def class_counts(self, client: int, minimum: int) -> np.ndarray:
        """Return what a client tells of the number of its training rows of each class: [classes].

        minimum: the smallest count that leaves a site.
        """
        counts = np.zeros(self.classes, np.int64)
        own = self.train.class_counts[client]
        counts[: len(own)] = own
        small = ((counts > 0) & (counts < minimum)).any()
        return class_counts(counts, minimum, self._every_row(client) if small else np.zeros(0))

    def _every_row(self, client: int) -> np.ndarray:
        """Return the inputs of a client in the order of its table, whatever share of them is held out, by any seed.

        If a number of chance followed from the training rows alone, it would be another one for every seed, and the
        mean of what a client tells in several runs would be the number that it hides.
        """
        parts = [p for p in (self.train, self.support, self.client_test) if p is not None]
        same = [p for p in parts if p.arrays[0] is self.train.arrays[0]]
        rows = np.unique(np.concatenate([p.rows[p.offsets[client] : p.offsets[client + 1]].numpy() for p in same]))
        values: np.ndarray = self.train.arrays[0][torch.from_numpy(rows)].cpu().numpy()
        return values

    def with_support(self, share: float, seed: int = 0) -> FederatedData:
        """Return the data with ``share`` of each client's training rows as its support set.

        The inner levels then draw from the support set, the outer function from the other rows (the query set). The
        rows are chosen at random and stratified by class, up to rounding.
        """
        query, support = self.train.hold_out(share, seed, keep=0)
        for client, (rows, size) in enumerate(zip(self.train.sizes, support.sizes, strict=True)):
            if size == 0:
                raise InputError(f"Client {client} has {rows} training rows, too few for {share:g} of them as support.")
        return replace(self, train=query, support=support)

    def with_holdout(self, share: float, seed: int = 0) -> FederatedData:
        """Return the data with ``share`` of each client's training rows held out as its own test part.

        The rows are chosen at random and stratified by class, up to rounding. Of n rows of a client, round(share * n)
        are held out, but never all: a client with a single row has no test part.

        With two classes and less than one row of the rarer one due, as at a site with a single positive, one is held
        out with that probability: the test parts of many small sites together then have their share of positives. If
        it always stayed in training, they would have too few. A site may be left without positives to train on. With
        more classes, one with a single row stays in training. Regression targets are not stratified.
        """
        if self.client_test is not None:
            raise InputError(f"The clients of {self.name!r} already have test data: leave out holdout.")
        if self.separate is not None:
            return self.separate.with_holdout(share, seed).pooled()
        train, held = self.train.hold_out(share, seed, by_chance=self.classes == 2)
        if not held.sizes.any():
            raise Unsolvable(
                f"The data {self.name!r} have too few samples per client to hold out a share of {share:g}: choose a "
                "larger share."
            )
        return replace(self, train=train, client_test=held)

    def reserve(self, holdout: float, support: float, seed: int = 0) -> FederatedData:
        """Return the data with held-out test rows, then a support set from the rest; a share of 0 reserves none."""
        data = self.with_holdout(holdout, seed) if holdout else self
        return data.with_support(support, seed) if support else data

    def validation(self, share: float = 0.2, seed: int = 0) -> FederatedData:
        """Return the data with ``share`` of each client's training rows as its test data, for tuning.

        The rows are chosen as by :meth:`with_holdout`. The result does not contain the real test data.
        """
        if self.separate is not None:
            return self.separate.validation(share, seed).pooled()
        data = replace(self, client_test=None).with_holdout(share, seed)
        held = data.client_test
        assert held is not None
        return replace(data, test=tuple(a[held.rows.to(a.device)] for a in held.arrays))

    def with_auxiliary(self, *arrays: Any) -> FederatedData:
        """Return the data with samples on the server, at least one of each class, for methods that need them.

        ``with_auxiliary(inputs, targets)`` takes arrays like those of the clients.
        """
        if not self.classes:
            raise InputError(f"An auxiliary set needs classes, but the data {self.name!r} have none.")
        samples = intake.checked(arrays, "the auxiliary set", self.train.arrays)
        targets = samples[-1]
        if not intake.are_labels(targets):
            raise invalid("targets of the auxiliary set", str(targets.dtype), "class numbers, one per row")
        labels = targets.numpy()
        owned = [np.flatnonzero(labels == c) for c in range(self.classes)]
        missing = [c for c, rows in enumerate(owned) if len(rows) == 0]
        if missing or sum(map(len, owned)) < len(labels):
            got = f"none of class {missing[0]}" if missing else f"labels from {labels.min()} to {labels.max()}"
            raise invalid("auxiliary set", got, f"samples of every class, 0 to {self.classes - 1}, and of no other")
        return replace(self, auxiliary=Part.of(samples, owned))

    @staticmethod
    def from_arrays(
        clients: Sequence[Sequence[Any]],
        *,
        test: Sequence[Any] | None = None,
        client_tests: Sequence[Sequence[Any] | None] | None = None,
        classes: int | None = None,
        name: str = "arrays",
        client_names: Sequence[str] = (),
    ) -> FederatedData:
        """Build from the arrays or tensors of each client: ``(inputs, targets)``, or several inputs and the targets.

        clients:      the training data, e.g. ``[(x0, y0), (x1, y1)]``. The first axis of an array runs over samples;
                      the inputs of all clients have the same shape, and so do the targets. If a model takes several
                      inputs, ``model(x, mask)``, then ``[(x0, mask0, y0), (x1, mask1, y1)]``: the last array is the
                      target. Integers become int64, booleans in inputs stay booleans.
        test:         a pooled test set, arrays like those of a client, if there is one.
        client_tests: a test set for each client, if there are any; None or empty arrays for a client without one.
                      Without ``test``, they also form the pooled test set.
        classes:      the number of classes, 0 for regression. By default targets are classes if they are integers, or
                      floats that are 0 and 1, and the number of classes is the highest label plus 1. Set it if the last
                      class may be missing from the data, or if class labels are floats such as 0.0, 1.0, 2.0.
        name:         the name of the data in messages and tables.
        client_names: the names of the clients.
        """
        if isinstance(clients, dict):
            raise invalid("clients", "dict", "a list with one (inputs, targets) pair per client")
        if len(clients) == 0:
            raise InputError("The data have no clients.")
        if client_names and len(client_names) != len(clients):
            raise invalid("number of client names", len(client_names), f"{len(clients)}, one per client")
        seen: set[object] = set()
        for client in client_names:
            if not isinstance(client, str) or not client or client in seen:
                raise invalid("name of a client", client, "a non-empty text that no other client has")
            seen.add(client)
        titles = [f"client {k}" + (f" ({client_names[k]})" if client_names else "") for k in range(len(clients))]
        declared = intake.check_classes(classes, f"the data {name!r}")
        all_rows = intake.together(clients, declared)
        if all_rows is None:
            all_rows = intake.joined(_each_checked(clients, titles, declared))
        train, like = Part.of(*all_rows), all_rows[0]
        pooled = None if test is None else intake.checked(test, "the test set", like, classes=declared)
        if pooled is not None and len(pooled[0]) == 0:
            raise InputError("The test set is empty. Leave it out if there is none.")
        tests = None
        if client_tests is not None:
            if len(client_tests) != len(clients):
                raise invalid("number of clients' test sets", len(client_tests), f"{len(clients)}, one per client")
            none = tuple(a[:0] for a in like)
            own = [
                none if arrays is None else intake.checked(arrays, f"the test data of {title}", like, classes=declared)
                for title, arrays in zip(titles, client_tests, strict=True)
            ]
            if any(len(arrays[0]) for arrays in own):
                tests = Part.of(*intake.joined(own))
                pooled = tests.arrays if pooled is None else pooled
        if classes is None:
            targets = [p.arrays[-1] for p in (train, tests) if p is not None]
            classes = intake.count_classes(*targets, *([] if pooled is None else [pooled[-1]]))
        return FederatedData(train, None, pooled, tests, classes, name, tuple(client_names))

    @staticmethod
    def from_datasets(
        clients: Sequence[Any], *, test: Any = None, classes: int | None = None, name: str = "datasets"
    ) -> FederatedData:
        """Build from one map-style torch data set per client, whose samples are ``(input, target)`` pairs.

        A sample may have several inputs, which all go to the model: ``(input, mask, target)``. The samples of each set
        are read once and stacked, so transforms are applied once. ``test`` is a data set for the pooled test set;
        ``classes`` and ``name`` are those of :meth:`from_arrays`.
        """
        arrays = [intake.stacked(d, f"client {k}") for k, d in enumerate(clients)]
        pooled = None if test is None else intake.stacked(test, "test data")
        return FederatedData.from_arrays(arrays, test=pooled, classes=classes, name=name)

    @staticmethod
    def from_tables(
        source: Any,
        schema: Schema | str | Path,
        *,
        features: Sequence[str] = (),
        drop: Sequence[str] = (),
        prepare: Preparation | None = None,
        holdout: float = 0.0,
        support: float = 0.0,
        seed: int = 0,
        name: str = "tables",
    ) -> FederatedData:
        """Build from one table per site: ``FederatedData.from_tables("sites/*.csv", "schema.toml", holdout=0.3)``.

        Every table is checked against the schema, and what is wrong is named with its site, column and rows. Inputs
        are raw values until a run prepares them, by statistics of the training rows that the sites tell.

        source:   a pattern, a path or a list of paths of CSV or Parquet files; pandas or polars frames, as a list or by
                  the names of their sites; or one table, if the schema names the column of the sites.
        schema:   the schema, or its file; ``fedstrata describe`` drafts one.
        features: the columns to use, by default all of the schema; ``drop`` names those to leave out.
        prepare:  how raw values become inputs.
        holdout, support, seed: as in :meth:`with_holdout` and :meth:`with_support`.
        name:     the name of the data in messages and tables.
        """
        from fedstrata.data.tables.checking import read_checked

        chosen = schema if isinstance(schema, Schema) else Schema.read(schema)
        chosen = chosen.select(features, drop) if features or drop else chosen
        tables, doubts = read_checked(source, chosen)
        for doubt in doubts:
            warnings.warn(str(doubt), stacklevel=2)
        every = tuple(torch.from_numpy(np.concatenate([getattr(t, a) for t in tables])) for a in ("values", "targets"))
        ends = np.cumsum([len(table) for table in tables])
        owned = [np.arange(end - len(table), end) for end, table in zip(ends, tables, strict=True)]
        data = FederatedData(
            Part.of(every, owned),
            classes=chosen.target.size,
            name=name,
            client_names=tuple(table.name for table in tables),
            plan=Plan(chosen, prepare or Preparation()),
        )
        return data.reserve(holdout, support, seed)

    @staticmethod
    def from_folder(folder: str | Path, *, classes: int | None = None) -> FederatedData:
        """Build from a folder with one .npz file per client, e.g. ``sites/berlin.npz`` and ``sites/paris.npz``.

        Each file holds the arrays ``inputs`` and ``targets`` (or ``x`` and ``y``) with one row per sample, as written
        by ``numpy.savez("sites/berlin.npz", inputs=inputs, targets=targets)``, and optionally ``test_inputs`` and
        ``test_targets``, the client's own test data. A file ``test.npz`` with ``inputs`` and ``targets`` is the pooled
        test set. If a model takes several inputs, the others are ``inputs_1``, ``inputs_2`` and so on (and
        ``test_inputs_1``, ...), in this order. Clients are ordered and named by their file names; ``classes`` is that
        of :meth:`from_arrays`.
        """
        path = Path(folder).expanduser()
        files = sorted(p for p in path.glob("*.npz") if p.name != "test.npz")
        if not files:
            raise MissingData(f"No client files in {path}. Put one .npz per client there, with inputs and targets.")
        parts = [intake.read_parts(f, "test") for f in files]
        pooled = path / "test.npz"
        return FederatedData.from_arrays(
            [own["train"] for own in parts],
            client_tests=[own.get("test") for own in parts],
            test=intake.read_parts(pooled)["train"] if pooled.exists() else None,
            classes=classes,
            name=path.name,
            client_names=[f.stem for f in files],
        )


def client_name(names: Sequence[str], client: int) -> str:
    """Return what messages call a client: its name or, if ``names`` is empty, its number."""
    return names[client] if names else f"client {client}"


def _each_checked(clients: Sequence[Any], titles: Sequence[str], classes: int) -> list[Arrays]:
    """Return the arrays of each client, checked; errors name the client."""
    done: list[Arrays] = []
    for title, arrays in zip(titles, clients, strict=True):
        done.append(intake.checked(arrays, title, done[0] if done else None, classes=classes))
        if len(done[-1][0]) == 0:
            raise InputError(f"{title.capitalize()} has no data. Every client needs at least one sample.")
    return done
