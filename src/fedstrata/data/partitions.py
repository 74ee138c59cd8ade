"""Partitions: rules that divide the rows of a data set among clients.

A partition is immutable. Called with the targets and keys of the training rows, it returns an array of row numbers
for each client. The same seed gives the same division, and no row goes to two clients.

    >>> rows = dirichlet(alpha=0.1)(targets, None, clients=100, rng=np.random.default_rng(0))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from numbers import Integral
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fedstrata.core.errors import InputError, invalid
from fedstrata.core.options import Options, build, param
from fedstrata.core.registry import YOUR_OWN, Registry
from fedstrata.data.dealing import UNUSED, class_of_each, consecutive, deal, deal_groups


class Rows(NamedTuple):
    """Training rows to divide: their targets and, if the data set has them, their keys and original classes."""

    targets: np.ndarray
    keys: np.ndarray | None = None
    origins: np.ndarray | None = None


PARTITIONS: Registry[type[Partition]] = Registry("partition", hint=YOUR_OWN)
"""Every partition by its name in a configuration file."""


class Partition(Options, ABC):
    """A rule that divides rows among clients; subclasses choose the owner of each row, and are registered.

    name:   its name in files and on the command line.
    remedy: what the error message for a client without data suggests.
    """

    name: ClassVar[str]
    remedy: ClassVar[str] = "Use fewer clients or more data."
    family = ("name", PARTITIONS)

    def __init_subclass__(cls, **more: Any) -> None:
        if not isinstance(vars(cls).get("name"), str):
            raise TypeError(f"{cls.__name__} must have a name for files: name = '...'.")
        super().__init_subclass__(owner=f"the {cls.name} partition", **more)
        PARTITIONS.add(cls.name, cls)

    def __call__(
        self,
        targets: np.ndarray,
        keys: np.ndarray | None,
        clients: int,
        rng: np.random.Generator,
        origins: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        """Return the row numbers of each client, sorted, as int64; a client without rows is an error.

        targets: one number per row.
        keys:    the owner of each row, if the data set has owners.
        clients: number of clients.
        rng:     source of all random choices.
        origins: the class of each row before the task was made binary, if it was.
        """
        if not isinstance(clients, Integral) or isinstance(clients, bool) or clients < 1:
            raise invalid("number of clients", clients, "a whole number of at least 1", f"partition {self.name!r}")
        if targets.ndim != 1 or len(targets) == 0:
            raise invalid("targets", targets.shape, "one number per row, at least one row", f"partition {self.name!r}")
        for what, values in (("keys", keys), ("origins", origins)):
            if values is not None and len(values) != len(targets):
                wants = f"the number of rows ({len(targets)})"
                raise invalid(f"number of {what}", len(values), wants, f"partition {self.name!r}")
        owners = self.owners(Rows(targets, keys, origins), clients, rng)
        # A stable sort keeps the rows of each client in increasing order; unused rows come first.
        order = np.argsort(owners, kind="stable").astype(np.int64, copy=False)
        sizes = np.bincount(owners - UNUSED, minlength=clients + 1)
        empty = np.flatnonzero(sizes[1:] == 0)
        if len(empty):
            raise InputError(
                f"Partition {self.name!r} leaves client {empty[0]} without data "
                f"({len(empty)} of {clients} clients, {len(targets)} rows). {self.remedy}"
            )
        return np.split(order, np.cumsum(sizes)[:-1])[1:]

    @abstractmethod
    def owners(self, rows: Rows, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the client number of each row, from 0, or ``UNUSED``."""


class Iid(Partition):
    """Random rows for every client: sizes differ by at most one row, and every row is used."""

    name: ClassVar[str] = "iid"

    def owners(self, rows: Rows, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the client number of each row."""
        return rng.permutation(np.arange(len(rows.targets)) % clients)


class Dirichlet(Partition):
    """Skewed classes: each class is divided among the clients in proportions drawn from Dirichlet(alpha).

    For every class c, p_c ~ Dir(alpha, ..., alpha) over the clients, and client i gets the fraction p_c[i] of the rows
    of class c, rounded down or up at random so that its mean is exact; every row is used. No client is favoured for
    its number. With a small ``alpha`` each client has few classes and sizes differ widely; a large ``alpha`` approaches
    ``iid``. Proportions are redrawn, up to 100 times, until every client has ``min_samples`` rows.

    This is the form of Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019.
    Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019,
    draw one vector of class proportions per client instead.
    """

    name: ClassVar[str] = "dirichlet"
    tries: ClassVar[int] = 100
    alpha: float = param(0.5, "concentration; a smaller value gives each client fewer classes", above=0)
    min_samples: int = param(1, "minimum number of rows of a client", least=1)

    def owners(self, rows: Rows, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the client number of each row."""
        labels, totals = class_of_each(rows.targets, self.name)
        if clients * self.min_samples > len(labels):
            raise InputError(
                f"Partition 'dirichlet' cannot give {clients} clients at least {self.min_samples} rows each: "
                f"there are {len(labels)} rows. Lower min_samples or use fewer clients."
            )
        for _ in range(self.tries):
            counts = self._counts(totals, clients, rng)
            if counts.sum(axis=1).min() >= self.min_samples:
                return deal(labels, counts, rng)
        raise InputError(
            f"Partition 'dirichlet' with alpha = {self.alpha} found no division of {len(labels)} rows in {self.tries} "
            f"tries that gives each of {clients} clients at least {self.min_samples}. "
            "Raise alpha, lower min_samples or use fewer clients."
        )

    def _counts(self, totals: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return how many rows of each class each client gets, [clients, classes]."""
        shares = rng.dirichlet(np.full(clients, self.alpha), size=len(totals))
        # With one random offset per class, the mean of every count is its share; without it, the last client would get
        # what the others lose by rounding, a row of nearly every class.
        ends = np.cumsum(shares, axis=1) * totals[:, None] + rng.random((len(totals), 1))
        cuts = np.minimum(np.floor(ends).astype(np.int64), totals[:, None])
        cuts[:, -1] = totals  # the sum of the shares may be 1 - 1e-16
        # Neighbours in a row of cuts rarely get a row of the same small class, so each class has its own order.
        return rng.permuted(np.diff(cuts, axis=1, prepend=0), axis=1).T


class Dominant(Partition):
    """One main class per client: a fraction ``share`` of the rows of client i is of class i mod classes.

    The rest is spread evenly over the other classes. All clients have the same number of rows, as many as possible
    without using a row twice; leftover rows are not used. ``share = 1`` gives each client a single class, ``share = 1 /
    classes`` equal numbers of all classes. Classes without rows do not count.
    """

    name: ClassVar[str] = "dominant"
    share: float = param(0.5, "fraction of a client's rows that are of its main class", least=0, most=1)

    def owners(self, rows: Rows, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the client number of each row."""
        labels, totals = class_of_each(rows.targets, self.name)
        if len(totals) < 2:
            raise InputError("Partition 'dominant' needs rows of at least 2 classes. Use partition 'iid'.")
        main = np.bincount(np.arange(clients) % len(totals), minlength=len(totals))
        # Rows of each class needed per row of a client, up to rounding.
        need = main * self.share + (clients - main) * (1 - self.share) / (len(totals) - 1)
        with np.errstate(divide="ignore"):
            # Rounding changes the need of a class by less than two rows per client.
            bound = np.min((totals + 2 * clients) / need)
        for size in range(int(min(bound, len(labels) // clients)), 0, -1):
            counts = self._counts(size, clients, len(totals))
            if np.all(counts.sum(axis=0) <= totals):
                return deal(labels, counts, rng)
        raise InputError(
            f"Partition 'dominant' with share = {self.share} cannot give each of {clients} clients a row: "
            f"the smallest class has {totals.min()} rows. Use fewer clients, another share or partition 'dirichlet'."
        )

    def _counts(self, size: int, clients: int, classes: int) -> np.ndarray:
        """Return how many rows of each class each client gets, [clients, classes], if every client has ``size``."""
        client = np.arange(clients)
        main = client % classes
        own = int(np.floor(self.share * size + 0.5))
        base, extra = divmod(size - own, classes - 1)
        counts = np.full((clients, classes), base)
        # Rows that do not divide evenly go to a few classes; the next client with the same main class gets others.
        turn = ((client // classes) * extra)[:, None] + np.arange(extra)
        counts[client[:, None], (main[:, None] + 1 + turn % (classes - 1)) % classes] += 1
        counts[client, main] = own
        return counts


class OneLarge(Partition):
    """One large client: a random client gets ``large`` random rows, each other ``small``; the rest is not used."""

    name: ClassVar[str] = "one_large"
    large: int = param(5000, "rows of the large client", least=1)
    small: int = param(20, "rows of each other client", least=1)

    def owners(self, rows: Rows, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the client number of each row."""
        sizes = np.full(clients, self.small)
        sizes[rng.integers(clients)] = self.large
        if sizes.sum() > len(rows.targets):
            raise InputError(
                f"Partition 'one_large' needs {sizes.sum()} rows (one client with {self.large}, {clients - 1} with "
                f"{self.small}), but there are {len(rows.targets)}. Lower large or small, or use fewer clients."
            )
        owners = np.full(len(rows.targets), UNUSED)
        owners[: sizes.sum()] = np.repeat(np.arange(clients), sizes)
        return rng.permutation(owners)


class Shards(Partition):
    """Few classes per client: rows sorted by target are cut into shards, and each client gets ``per_client`` of them.

    Rows are sorted by target (a stable sort) and cut into clients * per_client consecutive shards, whose sizes differ
    by at most one row; every row is used. From McMahan et al., "Communication-Efficient Learning of
    Deep Networks from Decentralized Data", AISTATS 2017.
    """

    name: ClassVar[str] = "shards"
    remedy: ClassVar[str] = "Use fewer clients, a larger per_client or more data."
    per_client: int = param(2, "shards per client", least=1)

    def owners(self, rows: Rows, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the client number of each row."""
        shards = clients * self.per_client
        dealt = rng.permutation(np.repeat(np.arange(clients), self.per_client))
        size = len(rows.targets)
        owners = np.empty(size, np.int64)
        owners[np.argsort(rows.targets, kind="stable")] = dealt[np.arange(size) * shards // size]
        return owners


class ClassGroups(Partition):
    """Disjoint classes: the classes are divided into groups, and each client has rows of a single group.

    The classes that occur, in increasing order, are cut into ``groups`` consecutive groups whose sizes differ by at
    most one class, the larger ones first. Client i belongs to group i mod groups. The rows of a group are dealt at
    random to its clients, in sizes that differ by at most one row; every row is used. Without ``groups`` there are as
    many groups as clients or classes, whichever is fewer. With 10 classes, 5 clients have {0, 1}, {2, 3}, ...; of 20
    clients, 0 and 10 share class 0.

    In a binary task made from more classes (``imbalance``), the original classes are divided: the positive ones into
    ``groups`` groups, the negative ones likewise, and group g gets the g-th of each. So every group has positives and
    negatives, and no original class is in two groups: with 10 classes, 5 groups have {0, 5}, {1, 6}, ..., {4, 9}.
    By default there are as many groups as clients, or as original classes on the smaller side, whichever is fewer.
    """

    name: ClassVar[str] = "class_groups"
    groups: int | None = param(None, "number of groups; by default as many as the clients and classes allow", least=1)

    def owners(self, rows: Rows, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the client number of each row."""
        binary = rows.origins is not None
        labels, totals = class_of_each(rows.targets if rows.origins is None else rows.origins, self.name)
        sides = class_of_each(rows.targets, self.name)[0] if binary else np.zeros_like(labels)
        side_of = np.empty(len(totals), np.int64)
        side_of[labels] = sides
        if np.any(side_of[labels] != sides):
            raise InputError("Partition 'class_groups' needs original classes whose rows all have the same target.")
        sizes = np.bincount(side_of)
        most = min(clients, sizes.min())
        groups = most if self.groups is None else self.groups
        if groups > most:
            what = "original classes on the smaller side" if binary else "classes"
            wants = f"at most the number of clients ({clients}) and of {what} ({sizes.min()})"
            raise invalid("groups of the class_groups partition", groups, wants)
        group_of = np.empty(len(totals), np.int64)
        for side, size in enumerate(sizes):
            group_of[side_of == side] = consecutive(size, groups)
        return deal_groups(group_of[labels], groups, clients, rng)


class ByKey(Partition):
    """One client per key, the owner of a row in the data set (a speaking role, an alphabet).

    Keys are chosen at random among those with at least ``min_samples`` rows; the rows of other keys are not used.
    """

    name: ClassVar[str] = "by_key"
    min_samples: int = param(1, "minimum number of rows of a key", least=1)

    def owners(self, rows: Rows, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the client number of each row."""
        if rows.keys is None:
            raise InputError("Partition 'by_key' needs a data set with keys, such as 'shakespeare' or 'omniglot'.")
        _, number, sizes = np.unique(rows.keys, return_inverse=True, return_counts=True)
        enough = np.flatnonzero(sizes >= self.min_samples)
        if len(enough) < clients:
            raise InputError(
                f"Partition 'by_key' has {len(enough)} keys with at least {self.min_samples} rows, too few for "
                f"{clients} clients. Use at most {len(enough)} clients or lower min_samples."
            )
        client_of = np.full(len(sizes), UNUSED)
        client_of[rng.permutation(enough)[:clients]] = np.arange(clients)
        return client_of[number]


iid = Iid
dirichlet = Dirichlet
dominant = Dominant
one_large = OneLarge
shards = Shards
class_groups = ClassGroups
by_key = ByKey


def partition_named(name: str, **options: Any) -> Partition:
    """Build a partition by name, e.g. ``partition_named("dirichlet", alpha=0.1)``."""
    built: Partition = build(PARTITIONS.find(name), options)
    return built
