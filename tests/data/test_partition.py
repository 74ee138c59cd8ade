"""Every partition deals each row at most once, in the promised sizes and class proportions."""

from __future__ import annotations

import time
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from fedstrata.core.errors import InputError
from fedstrata.data.partitions import PARTITIONS, ByKey, Dirichlet, Dominant, OneLarge, Partition, partition_named

ROWS, CLASSES = 3000, 10
TARGETS = np.random.default_rng(7).integers(CLASSES, size=ROWS)
KEYS = np.random.default_rng(8).integers(60, size=ROWS)

CASES: dict[str, tuple[Partition, bool]] = {
    "iid": (partition_named("iid"), True),
    "dirichlet": (partition_named("dirichlet", alpha=0.3), True),
    "dominant": (partition_named("dominant", share=0.7), False),
    "one_large": (partition_named("one_large", large=500, small=7), False),
    "shards": (partition_named("shards", per_client=3), True),
    "class_groups": (partition_named("class_groups"), True),
    "by_key": (partition_named("by_key"), False),
}


def divide(chosen: Partition, clients: int, seed: int = 0, targets: np.ndarray = TARGETS) -> list[np.ndarray]:
    keys = KEYS if targets is TARGETS else None
    return chosen(targets, keys, clients, np.random.default_rng(seed))


def test_every_partition_has_a_case() -> None:
    assert set(CASES) == set(PARTITIONS)
    assert all(PARTITIONS[name].name == name for name in PARTITIONS)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("clients", [1, 3, 10, 37])
def test_rows_are_disjoint_sorted_and_in_range(name: str, clients: int) -> None:
    chosen, uses_all = CASES[name]
    dealt = divide(chosen, clients)
    together = np.concatenate(dealt)
    assert len(dealt) == clients
    assert all(rows.dtype == np.int64 and len(rows) > 0 and np.all(np.diff(rows) > 0) for rows in dealt)
    assert len(np.unique(together)) == len(together)
    assert together.min() >= 0
    assert together.max() < ROWS
    if uses_all:
        assert len(together) == ROWS


@pytest.mark.parametrize("name", CASES)
def test_the_seed_decides(name: str) -> None:
    chosen, _ = CASES[name]
    first, again, other = (divide(chosen, 20, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_sixty_thousand_rows_and_a_thousand_clients_are_fast(name: str) -> None:
    targets = np.arange(60_000) % 10
    options = {"large": 5000, "small": 20} if name == "one_large" else {}
    start = time.perf_counter()
    dealt = partition_named(name, **options)(targets, np.arange(60_000) // 60, 1000, np.random.default_rng(0))
    assert len(dealt) == 1000
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize("name", CASES)
def test_partitions_are_frozen(name: str) -> None:
    with pytest.raises(FrozenInstanceError):
        CASES[name][0].remedy = "none"  # type: ignore[misc]


def test_iid_sizes_differ_by_at_most_one() -> None:
    sizes = [len(rows) for rows in divide(partition_named("iid"), 7)]
    assert max(sizes) - min(sizes) == 1


def skew(alpha: float) -> float:
    """Mean share of the most frequent class of a client."""
    dealt = divide(Dirichlet(alpha), 20)
    return float(np.mean([np.bincount(TARGETS[rows]).max() / len(rows) for rows in dealt]))


def test_dirichlet_is_more_skewed_for_smaller_alpha() -> None:
    assert skew(0.1) > 0.5 > skew(1.0) > skew(1000.0)
    assert skew(1000.0) < 0.2


def test_dirichlet_shares_have_the_variance_of_the_distribution() -> None:
    alpha, clients = 0.5, 20
    targets = np.zeros(100_000, np.int64)
    sizes = [
        len(rows) / len(targets)
        for seed in range(40)
        for rows in Dirichlet(alpha)(targets, None, clients, np.random.default_rng(seed))
    ]
    expected = (1 / clients) * (1 - 1 / clients) / (alpha * clients + 1)
    assert np.var(sizes) == pytest.approx(expected, rel=0.25)


def small_classes() -> np.ndarray:
    """Divide 100 classes of 50 rows, as in a part of CIFAR-100, over 100 clients; counts [seeds, clients, classes]."""
    targets = np.repeat(np.arange(100), 50)
    divisions = [Dirichlet(0.3)(targets, None, 100, np.random.default_rng(seed)) for seed in range(200)]
    return np.array([[np.bincount(targets[rows], minlength=100) for rows in dealt] for dealt in divisions])


def assert_same_mean(*samples: np.ndarray) -> None:
    """Check that samples, one per seed, have means within five standard errors of the first one's."""
    first, *others = samples
    for other in others:
        error = np.sqrt((first.var() + other.var()) / len(first))
        assert abs(first.mean() - other.mean()) < 5 * error


def test_dirichlet_favours_no_client() -> None:
    counts = small_classes()
    rows, classes = counts.sum(axis=2), (counts > 0).sum(axis=2)
    for held in (rows, classes):
        assert_same_mean(held[:, 0], held[:, 50], held[:, -1])
    assert rows.sum() == 200 * 5000


def test_dirichlet_favours_no_pair_of_clients() -> None:
    """With one order of the clients for all classes, neighbours would have a sixth fewer classes in common."""
    held = small_classes() > 0
    common = [(held & np.roll(held, distance, axis=1)).sum(axis=2).mean(axis=1) for distance in (50, 1, 2)]
    assert_same_mean(*common)


def test_dirichlet_rounds_shares_down_or_up() -> None:
    """With a huge alpha every share is 1 / clients."""
    targets = np.repeat(np.arange(6), [7, 10, 23, 1, 41, 30])
    seen = set()
    for seed in range(20):
        for rows in Dirichlet(1e12)(targets, None, 10, np.random.default_rng(seed)):
            counts = np.bincount(targets[rows], minlength=6)
            assert np.all(np.abs(counts - np.array([0.7, 1.0, 2.3, 0.1, 4.1, 3.0])) < 1 + 1e-6)
            seen |= set(enumerate(counts.tolist()))
    assert {(0, 0), (0, 1), (2, 2), (2, 3), (3, 0), (3, 1), (4, 4), (4, 5)} <= seen


def test_dirichlet_respects_min_samples() -> None:
    assert min(len(rows) for rows in divide(Dirichlet(0.5, min_samples=60), 20)) >= 60


def test_the_error_of_dirichlet_has_a_remedy() -> None:
    with pytest.raises(
        InputError, match=r"3000 rows in 100 tries .* 50 clients at least 59.*Raise alpha, lower min_samples"
    ):
        divide(Dirichlet(0.01, min_samples=59), 50)
    with pytest.raises(InputError, match="there are 3000 rows"):
        divide(Dirichlet(min_samples=100), 31)


@pytest.mark.parametrize("clients", [1, 4, 10, 23])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.83, 1.0])
def test_dominant_has_its_share_of_the_main_class(clients: int, share: float) -> None:
    dealt = divide(Dominant(share), clients)
    size = len(dealt[0])
    for client, rows in enumerate(dealt):
        counts = np.bincount(TARGETS[rows], minlength=CLASSES)
        own, others = counts[client % CLASSES], np.delete(counts, client % CLASSES)
        assert len(rows) == size
        assert abs(own - share * size) <= 0.5
        assert others.max() - others.min() <= 1


@pytest.mark.parametrize("seed", range(12))
def test_dominant_is_as_large_as_the_data_allow(seed: int) -> None:
    rng = np.random.default_rng(seed)
    classes, clients = int(rng.integers(2, 7)), int(rng.integers(1, 12))
    totals = rng.integers(10, 120, size=classes)
    targets = np.repeat(np.arange(classes), totals)
    chosen = Dominant(float(rng.choice([0.0, 0.2, 0.5, 0.9, 1.0])))
    fits = [
        size
        for size in range(1, len(targets) // clients + 1)
        if np.all(chosen._counts(size, clients, classes).sum(axis=0) <= totals)
    ]
    assert len(divide(chosen, clients, targets=targets)[0]) == max(fits)


def test_dominant_uses_nearly_all_of_balanced_data() -> None:
    targets = np.arange(50_000) % 10
    assert sum(map(len, divide(Dominant(0.5), 50, targets=targets))) == 50_000


def test_dominant_errors() -> None:
    with pytest.raises(InputError, match="at least 2 classes"):
        divide(Dominant(), 2, targets=np.zeros(50, np.int64))
    with pytest.raises(InputError, match="cannot give each of 30 clients a row: the smallest class has 2 rows"):
        divide(Dominant(1.0), 30, targets=np.array([0] * 200 + [1] * 2))


def test_one_large_has_exactly_the_sizes() -> None:
    sizes = sorted(len(rows) for rows in divide(OneLarge(large=900, small=11), 50))
    assert sizes == [11] * 49 + [900]
    largest = {int(np.argmax([len(rows) for rows in divide(OneLarge(900, 11), 50, seed)])) for seed in range(8)}
    assert len(largest) > 3
    with pytest.raises(InputError, match=r"needs 5020 rows .* there are 3000"):
        divide(OneLarge(), 2)


def test_shards_give_few_classes() -> None:
    targets = np.repeat(np.arange(10), 300)[np.random.default_rng(0).permutation(3000)]
    dealt = divide(partition_named("shards", per_client=2), 50, targets=targets)
    assert {len(rows) for rows in dealt} == {60}
    assert all(len(np.unique(targets[rows])) <= 2 for rows in dealt)


def test_a_client_without_data_is_named() -> None:
    with pytest.raises(InputError, match=r"'iid' leaves client 3 without data \(2 of 5 clients, 3 rows\)\. Use fewer"):
        divide(partition_named("iid"), 5, seed=0, targets=np.zeros(3, np.int64))
    with pytest.raises(InputError, match=r"'shards' leaves client \d+ without data .*larger per_client"):
        divide(partition_named("shards", per_client=1), 5, targets=np.arange(4))


def test_class_groups_are_disjoint_and_dealt_evenly() -> None:
    held = [set(TARGETS[rows]) for rows in divide(partition_named("class_groups"), 4)]
    assert held == [{0, 1, 2}, {3, 4, 5}, {6, 7}, {8, 9}]
    dealt = divide(partition_named("class_groups"), 23)
    assert [set(TARGETS[rows]) for rows in dealt] == [{client % 10} for client in range(23)]
    for group in range(10):
        sizes = [len(rows) for rows in dealt[group::10]]
        assert max(sizes) - min(sizes) <= 1
    pairs = divide(partition_named("class_groups", groups=2), 6)
    assert [set(TARGETS[rows]) for rows in pairs] == [{0, 1, 2, 3, 4}, {5, 6, 7, 8, 9}] * 3
    with pytest.raises(InputError, match=r"number of clients \(3\) and of classes \(10\)\. Got 4"):
        divide(partition_named("class_groups", groups=4), 3)


ORIGINS = np.random.default_rng(9).choice(CLASSES, size=ROWS, p=np.repeat([0.02, 0.18], 5))
BINARY = (ORIGINS < 5).astype(np.int64)


def divide_binary(
    chosen: Partition, clients: int, targets: np.ndarray = BINARY, origins: np.ndarray = ORIGINS
) -> list[np.ndarray]:
    return chosen(targets, None, clients, np.random.default_rng(0), origins)


@pytest.mark.parametrize(
    ("groups", "held"),
    [
        (5, [{0, 5}, {1, 6}, {2, 7}, {3, 8}, {4, 9}]),
        (3, [{0, 1, 5, 6}, {2, 3, 7, 8}, {4, 9}]),
        (2, [{0, 1, 2, 5, 6, 7}, {3, 4, 8, 9}]),
        (1, [set(range(10))]),
    ],
)
@pytest.mark.parametrize("clients", [5, 12])
def test_class_groups_of_a_binary_task_have_both_sides(groups: int, held: list[set[int]], clients: int) -> None:
    dealt = divide_binary(partition_named("class_groups", groups=groups), clients)
    assert sorted(np.concatenate(dealt)) == list(range(ROWS))
    for group in range(groups):
        own = np.concatenate(dealt[group::groups])
        assert set(ORIGINS[own]) == held[group]
        assert set(BINARY[own]) == {0, 1}
        sizes = [len(rows) for rows in dealt[group::groups]]
        assert max(sizes) - min(sizes) <= 1


def test_class_groups_of_a_binary_task_by_default_and_on_uneven_sides() -> None:
    held = [set(ORIGINS[rows]) for rows in divide_binary(partition_named("class_groups"), 5)]
    assert held == [{0, 5}, {1, 6}, {2, 7}, {3, 8}, {4, 9}]
    some = np.isin(ORIGINS, [1, 3, 5, 6, 7, 8, 9])  # two positive classes are left
    dealt = divide_binary(partition_named("class_groups"), 5, BINARY[some], ORIGINS[some])
    assert [set(ORIGINS[some][rows]) for rows in dealt[:2]] == [{1, 5, 6, 7}, {3, 8, 9}]
    assert all(set(ORIGINS[some][rows]) <= {1, 5, 6, 7} for rows in dealt[::2])


def test_class_groups_of_a_binary_task_errors() -> None:
    with pytest.raises(InputError, match=r"clients \(8\) and of original classes on the smaller side \(5\)\. Got 6"):
        divide_binary(partition_named("class_groups", groups=6), 8)
    with pytest.raises(InputError, match=r"groups of the class_groups partition .* clients \(3\) and of .*Got 4\."):
        divide_binary(partition_named("class_groups", groups=4), 3)
    with pytest.raises(InputError, match=r"number of origins must be the number of rows \(3000\)"):
        divide_binary(partition_named("class_groups"), 3, origins=ORIGINS[1:])
    with pytest.raises(InputError, match="original classes whose rows all have the same target"):
        divide_binary(partition_named("class_groups"), 3, origins=np.arange(ROWS) % 7)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("class_groups", "by_key")])
def test_other_partitions_ignore_original_classes(name: str) -> None:
    dealt, plain = divide_binary(CASES[name][0], 4), divide(CASES[name][0], 4, targets=BINARY)
    assert all(np.array_equal(a, b) for a, b in zip(dealt, plain, strict=True))


def test_by_key_gives_whole_keys() -> None:
    sizes = np.bincount(KEYS)
    least = int(np.median(sizes))
    dealt = divide(ByKey(min_samples=least), 15)
    owners = [np.unique(KEYS[rows]) for rows in dealt]
    assert all(len(owner) == 1 for owner in owners)
    assert len({int(owner[0]) for owner in owners}) == 15
    assert all(len(rows) == sizes[owner[0]] >= least for rows, owner in zip(dealt, owners, strict=True))


def test_by_key_errors() -> None:
    with pytest.raises(InputError, match="60 keys with at least 1 rows, too few for 61 clients"):
        divide(ByKey(), 61)
    with pytest.raises(InputError, match="needs a data set with keys"):
        divide(ByKey(), 2, targets=np.arange(9))
    with pytest.raises(InputError, match=r"number of keys must be the number of rows \(3000\)"):
        ByKey()(TARGETS, KEYS[:-1], 2, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dirichlet", {"alpha": 0}),
        ("dirichlet", {"alpha": float("nan")}),
        ("dirichlet", {"alpha": float("inf")}),
        ("dirichlet", {"alpha": "0.5"}),
        ("dirichlet", {"min_samples": 0}),
        ("dominant", {"share": 1.01}),
        ("dominant", {"share": -0.1}),
        ("one_large", {"large": 0}),
        ("one_large", {"small": 2.5}),
        ("shards", {"per_client": 0}),
        ("class_groups", {"groups": 0}),
        ("by_key", {"min_samples": True}),
    ],
)
def test_a_wrong_option_is_refused(name: str, options: dict[str, object]) -> None:
    option, value = next(iter(options.items()))
    with pytest.raises(InputError) as caught:
        partition_named(name, **options)
    assert f"The {option} of the {name} partition must be" in str(caught.value)
    assert f"Got {value!r}." in str(caught.value)


def test_the_error_for_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match=r"Unknown partition 'dirichlett'. Did you mean 'dirichlet'"):
        partition_named("dirichlett")
    with pytest.raises(InputError, match=r"Unknown option of the dirichlet partition 'alfa'. Did you mean 'alpha'"):
        partition_named("dirichlet", alfa=1)


def test_wrong_arguments_of_the_call() -> None:
    with pytest.raises(InputError, match=r"number of clients must be a whole number of at least 1. Got 0"):
        divide(partition_named("iid"), 0)
    with pytest.raises(InputError, match="targets must be one number per row"):
        divide(partition_named("iid"), 2, targets=np.zeros((4, 1), np.int64))
    with pytest.raises(InputError, match=r"'dirichlet' needs class numbers as targets. Got float64"):
        divide(Dirichlet(), 2, targets=np.linspace(0, 1, 50))
