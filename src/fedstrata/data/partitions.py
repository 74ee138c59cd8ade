"""Partitions: how the rows of one data set are divided over clients.

A partition is a frozen value that is called with the targets (and keys) of the training rows; it answers with
one array of row numbers per client. The same seed gives the same division, and no row goes to two clients.

    >>> rows = partition("dirichlet", alpha=0.1)(targets, None, clients=100, rng=np.random.default_rng(0))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from numbers import Integral
from typing import Any, ClassVar

import numpy as np

from fedstrata.core.errors import InputError, invalid
from fedstrata.core.options import Options, build, param
from fedstrata.core.registry import Registry

UNUSED = -1

PARTITIONS: Registry[type[Partition]] = Registry("partition")
"""Every partition by its name in a configuration file."""


class Partition(Options, ABC):
    """A rule that divides rows over clients; subclasses say which client owns each row.

    ``name`` is the name on the command line, ``remedy`` what to do when a client would be left without data.
    """

    name: ClassVar[str]
    remedy: ClassVar[str] = "Use fewer clients or more data."
    family = ("name", PARTITIONS)

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(owner=f"the {cls.name} partition", **more)
        PARTITIONS[cls.name] = cls

    def __call__(
        self,
        targets: np.ndarray,
        keys: np.ndarray | None,
        clients: int,
        rng: np.random.Generator,
        origins: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        """Divide the rows: a list of ``clients`` sorted int64 arrays of row numbers, no row in two of them.

        ``targets`` has one entry per row; ``keys``, where the data set has them, names the owner of each row, and
        ``origins`` the class that it had before the task was made binary.
        A client that would hold no row is an error.
        """
        if not isinstance(clients, Integral) or isinstance(clients, bool) or clients < 1:
            raise invalid("number of clients", clients, "a whole number of at least 1", f"partition {self.name!r}")
        if targets.ndim != 1 or len(targets) == 0:
            raise invalid("targets", targets.shape, "one number per row, at least one row", f"partition {self.name!r}")
        if origins is None:
            owners = self._owners(targets, keys, clients, rng)
        else:
            owners = self._owners_by_origin(targets, origins, keys, clients, rng)
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
    def _owners(
        self, targets: np.ndarray, keys: np.ndarray | None, clients: int, rng: np.random.Generator
    ) -> np.ndarray:
        """Return the client number of each row, or ``UNUSED``."""

    def _owners_by_origin(
        self,
        targets: np.ndarray,
        origins: np.ndarray,
        keys: np.ndarray | None,
        clients: int,
        rng: np.random.Generator,
    ) -> np.ndarray:
        """Return the same for rows that had other classes once, which only some partitions look at."""
        return self._owners(targets, keys, clients, rng)


class Iid(Partition):
    """Every client a random sample: rows shuffled, sizes equal up to one row, every row used."""

    name: ClassVar[str] = "iid"

    def _owners(
        self, targets: np.ndarray, keys: np.ndarray | None, clients: int, rng: np.random.Generator
    ) -> np.ndarray:
        return rng.permutation(np.arange(len(targets)) % clients)


class Dirichlet(Partition):
    """Skewed classes: each class is spread over the clients in proportions drawn from Dirichlet(alpha).

    For every class c, p_c ~ Dir(alpha, ..., alpha) over the clients, and client i gets the share p_c[i] of the
    rows of class c. Small ``alpha`` gives each client few classes and very different sizes, large ``alpha``
    approaches ``iid``. Every row is used. Proportions are drawn again, at most 100 times, until every client
    has ``min_samples`` rows.

    The form of Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019;
    Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
    2019, draw instead one vector of class proportions per client.
    """

    name: ClassVar[str] = "dirichlet"
    tries: ClassVar[int] = 100
    alpha: float = param(0.5, "concentration: the smaller, the fewer classes a client has", above=0)
    min_samples: int = param(1, "rows that every client must have", least=1)

    def _owners(
        self, targets: np.ndarray, keys: np.ndarray | None, clients: int, rng: np.random.Generator
    ) -> np.ndarray:
        labels, totals = _classes(targets, self.name)
        if clients * self.min_samples > len(targets):
            raise InputError(
                f"Partition 'dirichlet' cannot give {clients} clients at least {self.min_samples} rows each: "
                f"there are {len(targets)} rows. Lower min_samples or use fewer clients."
            )
        for _ in range(self.tries):
            shares = np.cumsum(rng.dirichlet(np.full(clients, self.alpha), size=len(totals)), axis=1)
            cuts = np.floor(shares * totals[:, None]).astype(np.int64)
            cuts[:, -1] = totals  # the last share may be 1 - 1e-16
            counts = np.diff(cuts, axis=1, prepend=0).T
            if counts.sum(axis=1).min() >= self.min_samples:
                return _deal(labels, counts, rng)
        raise InputError(
            f"Partition 'dirichlet' with alpha = {self.alpha} found no division in {self.tries} tries that gives each "
            f"of {clients} clients at least {self.min_samples} of {len(targets)} rows. "
            "Raise alpha, lower min_samples or use fewer clients."
        )


class Dominant(Partition):
    """One main class per client: a share ``share`` of client i's rows is of class i mod classes.

    The rest is spread evenly over the other classes. All clients have the same number of rows, the largest for
    which no row is needed twice; rows left over are not used. ``share = 1`` gives single-class clients,
    ``share = 1 / classes`` balanced ones. Only classes that occur are counted.
    """

    name: ClassVar[str] = "dominant"
    share: float = param(0.5, "share of a client's rows that are of its main class", least=0, most=1)

    def _owners(
        self, targets: np.ndarray, keys: np.ndarray | None, clients: int, rng: np.random.Generator
    ) -> np.ndarray:
        labels, totals = _classes(targets, self.name)
        if len(totals) < 2:
            raise InputError("Partition 'dominant' needs rows of at least 2 classes. Use partition 'iid'.")
        main = np.bincount(np.arange(clients) % len(totals), minlength=len(totals))
        # Rows of each class that are needed per row of client size, but for rounding.
        need = main * self.share + (clients - main) * (1 - self.share) / (len(totals) - 1)
        with np.errstate(divide="ignore"):
            # Rounding moves the need of a class by less than two rows per client.
            bound = np.min((totals + 2 * clients) / need)
        for size in range(int(min(bound, len(targets) // clients)), 0, -1):
            counts = self._counts(size, clients, len(totals))
            if np.all(counts.sum(axis=0) <= totals):
                return _deal(labels, counts, rng)
        raise InputError(
            f"Partition 'dominant' with share = {self.share} cannot give every one of {clients} clients a row: "
            f"the smallest class has {totals.min()} rows. Use fewer clients, another share or partition 'dirichlet'."
        )

    def _counts(self, size: int, clients: int, classes: int) -> np.ndarray:
        """Rows of each class for each client, when every client has ``size`` rows."""
        client = np.arange(clients)
        main = client % classes
        own = int(np.floor(self.share * size + 0.5))
        base, extra = divmod(size - own, classes - 1)
        counts = np.full((clients, classes), base)
        # Rows that do not divide evenly go to a few classes, others for the next client of the same main class.
        turn = ((client // classes) * extra)[:, None] + np.arange(extra)
        counts[client[:, None], (main[:, None] + 1 + turn % (classes - 1)) % classes] += 1
        counts[client, main] = own
        return counts


class OneLarge(Partition):
    """One random client has ``large`` rows, every other client ``small``; all drawn at random, the rest unused."""

    name: ClassVar[str] = "one_large"
    large: int = param(5000, "rows of the large client", least=1)
    small: int = param(20, "rows of every other client", least=1)

    def _owners(
        self, targets: np.ndarray, keys: np.ndarray | None, clients: int, rng: np.random.Generator
    ) -> np.ndarray:
        sizes = np.full(clients, self.small)
        sizes[rng.integers(clients)] = self.large
        if sizes.sum() > len(targets):
            raise InputError(
                f"Partition 'one_large' needs {sizes.sum()} rows (one client with {self.large}, {clients - 1} with "
                f"{self.small}), there are {len(targets)}. Lower large or small, or use fewer clients."
            )
        owners = np.full(len(targets), UNUSED)
        owners[: sizes.sum()] = np.repeat(np.arange(clients), sizes)
        return rng.permutation(owners)


class Shards(Partition):
    """Few classes per client: rows sorted by target are cut into shards, each client gets ``per_client`` at random.

    The rows are sorted by target (rows of equal target stay in order) and cut into clients * per_client
    consecutive shards of equal size, up to one row; every row is used. From McMahan et al.,
    "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
    """

    name: ClassVar[str] = "shards"
    remedy: ClassVar[str] = "Use fewer clients, a larger per_client or more data."
    per_client: int = param(2, "shards of each client", least=1)

    def _owners(
        self, targets: np.ndarray, keys: np.ndarray | None, clients: int, rng: np.random.Generator
    ) -> np.ndarray:
        shards = clients * self.per_client
        dealt = rng.permutation(np.repeat(np.arange(clients), self.per_client))
        owners = np.empty(len(targets), np.int64)
        owners[np.argsort(targets, kind="stable")] = dealt[np.arange(len(targets)) * shards // len(targets)]
        return owners


class ClassGroups(Partition):
    """Disjoint classes: the classes are cut into groups, and a client holds rows of one group only.

    The classes that occur, in increasing order, are cut into ``groups`` consecutive groups whose sizes differ by
    at most one class (the first are the larger ones). Client i belongs to group i mod groups. The rows of a group
    are dealt at random over its clients, in sizes equal up to one row; every row is used. Without ``groups`` there
    are as many groups as clients, or as classes if these are fewer: with 10 classes, 5 clients hold the classes
    {0, 1}, {2, 3}, ..., and of 20 clients numbers 0 and 10 share class 0.

    Of a binary task made out of more classes (``imbalance``) the original classes are cut, the positive ones into
    ``groups`` groups and the negative ones likewise, and group g holds the g-th of both: every group has positives and
    negatives, and no original class is in two. Of 10 classes, 5 groups hold {0, 5}, {1, 6}, ..., {4, 9}. Without
    ``groups`` there are as many as clients, or as classes on the side that has fewer.
    """

    name: ClassVar[str] = "class_groups"
    groups: int | None = param(None, "number of groups; by default as many as clients and classes allow", least=1)

    def _owners(
        self, targets: np.ndarray, keys: np.ndarray | None, clients: int, rng: np.random.Generator
    ) -> np.ndarray:
        labels, totals = _classes(targets, self.name)
        groups = self._number(clients, len(totals), "classes")
        return _deal_groups(_consecutive(len(totals), groups)[labels], groups, clients, rng)

    def _owners_by_origin(
        self,
        targets: np.ndarray,
        origins: np.ndarray,
        keys: np.ndarray | None,
        clients: int,
        rng: np.random.Generator,
    ) -> np.ndarray:
        if len(origins) != len(targets):
            raise invalid(
                "number of origins", len(origins), f"the number of rows ({len(targets)})", "partition 'class_groups'"
            )
        sides, _ = _classes(targets, self.name)
        labels, totals = _classes(origins, self.name)
        side_of = np.empty(len(totals), np.int64)
        side_of[labels] = sides
        if np.any(side_of[labels] != sides):
            raise InputError("Partition 'class_groups' needs original classes whose rows all have the same target.")
        sizes = np.bincount(side_of)
        groups = self._number(clients, int(sizes.min()), "original classes on the smaller side")
        group_of = np.empty(len(totals), np.int64)
        for side, size in enumerate(sizes):
            group_of[side_of == side] = _consecutive(size, groups)
        return _deal_groups(group_of[labels], groups, clients, rng)

    def _number(self, clients: int, classes: int, what: str) -> int:
        """Return the number of groups, by default as many as there can be."""
        most = min(clients, classes)
        groups = most if self.groups is None else self.groups
        if groups > most:
            wants = f"at most the number of clients ({clients}) and of {what} ({classes})"
            raise invalid("groups of the class_groups partition", groups, wants)
        return groups


class ByKey(Partition):
    """The division the data came with: one client per key (a speaking role, an alphabet).

    Of the keys with at least ``min_samples`` rows, as many as there are clients are drawn in random order. The
    rows of the other keys are not used.
    """

    name: ClassVar[str] = "by_key"
    min_samples: int = param(1, "rows that a key must have", least=1)

    def _owners(
        self, targets: np.ndarray, keys: np.ndarray | None, clients: int, rng: np.random.Generator
    ) -> np.ndarray:
        if keys is None:
            raise InputError("Partition 'by_key' needs a data set with keys, such as 'shakespeare' or 'omniglot'.")
        if len(keys) != len(targets):
            raise invalid("number of keys", len(keys), f"the number of rows ({len(targets)})", "partition 'by_key'")
        _, number, sizes = np.unique(keys, return_inverse=True, return_counts=True)
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
    """Build a partition by name, for instance ``partition_named("dirichlet", alpha=0.1)``."""
    built: Partition = build(PARTITIONS.find(name), options)
    return built


def _classes(targets: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the class of each row, counting only classes that occur (0, 1, ...), and the size of each class."""
    if not np.issubdtype(targets.dtype, np.integer):
        raise InputError(
            f"Partition {name!r} needs class numbers as targets. Got {targets.dtype}: use partition 'iid' or 'shards'."
        )
    _, labels, totals = np.unique(targets, return_inverse=True, return_counts=True)
    return labels, totals


def _consecutive(classes: int, groups: int) -> np.ndarray:
    """Return the group of each class: consecutive classes, sizes equal up to one, the larger groups first."""
    size, larger = divmod(classes, groups)
    return np.repeat(np.arange(groups), np.where(np.arange(groups) < larger, size + 1, size))


def _deal_groups(member: np.ndarray, groups: int, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Give the rows of each group at random to its clients, those whose number mod ``groups`` is the group's."""
    members = np.bincount(np.arange(clients) % groups, minlength=groups)
    order = rng.permutation(len(member))
    order = order[np.argsort(member[order], kind="stable")]
    starts = np.concatenate([[0], np.cumsum(np.bincount(member, minlength=groups))])
    place = np.arange(len(member)) - starts[member[order]]
    owners = np.empty(len(member), np.int64)
    owners[order] = member[order] + groups * (place % members[member[order]])
    return owners


def _deal(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Give client i ``counts[i, c]`` random rows of class c, for every i and c."""
    owners = np.full(len(labels), UNUSED)
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    start = 0
    for label, total in enumerate(np.bincount(labels)):
        dealt = np.repeat(np.arange(len(counts)), counts[:, label])
        owners[order[start : start + len(dealt)]] = dealt
        start += total
    return owners
