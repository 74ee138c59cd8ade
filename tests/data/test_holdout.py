"""Rows that are held out, as test data or as a support set: random, and the same fraction of every class."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import fedstrata as fs
from fedstrata.data.federated import Part
from fedstrata.data.part import _stratified

COUNTS = [[40, 10, 3], [1, 30, 2], [1, 1, 1], [7, 0, 0], [0, 1, 0]]
"""Rows of each class, for five clients."""


def data(counts: list[list[int]] = COUNTS, kind: type = int) -> fs.FederatedData:
    """Clients with these rows of each class, shuffled; the input of a row is its number."""
    rng, pairs, start = np.random.default_rng(0), [], 0
    for sizes in counts:
        targets = rng.permutation(np.repeat(np.arange(len(sizes)), sizes)).astype(kind)
        pairs.append((np.arange(start, start + len(targets), dtype=float)[:, None], targets))
        start += len(targets)
    return fs.FederatedData.from_arrays(pairs, classes=len(counts[0]))


def held_out(whole: fs.FederatedData, share: float, seed: int = 0) -> Part:
    part = whole.with_holdout(share, seed).client_test
    assert part is not None
    return part


def counts_of(part: Part) -> np.ndarray:
    return np.array([np.bincount(part.of_client(k)[1].long().numpy(), minlength=3) for k in range(len(part.sizes))])


@pytest.mark.parametrize("share", [0.1, 0.2, 0.3, 0.5, 0.8])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_class_keeps_its_share_up_to_rounding(share: float, seed: int) -> None:
    divided = data().with_holdout(share, seed)
    assert divided.client_test is not None
    held, kept, exact = counts_of(divided.client_test), counts_of(divided.train), share * np.array(COUNTS)
    assert np.array_equal(held + kept, COUNTS)
    assert np.all(np.abs(held - exact) < 1)
    assert np.all(kept[np.array(COUNTS) > 0] >= 1), "a class of one row stays in training"
    for client in (0, 3):  # enough rows in every class for the exact number
        assert held[client].sum() == round(share * sum(COUNTS[client]))


def test_a_rare_class_is_divided() -> None:
    """Of two rare positives in fifty rows, half are held out: never both, and never none."""
    whole = data([[48, 2, 0]] * 40)
    assert counts_of(held_out(whole, 0.5))[:, 1].tolist() == [1] * 40


def test_rows_are_random_and_follow_the_seed() -> None:
    whole = data([[10, 10, 10]])
    rows = [held_out(whole, 0.3, seed).rows.tolist() for seed in range(20)]
    assert rows[3] == held_out(whole, 0.3, 3).rows.tolist()
    assert len({tuple(r) for r in rows}) > 15
    assert len({row for r in rows for row in r}) > 25, "every row may be chosen"
    odd = [tuple(counts_of(held_out(data([[5, 5, 5]]), 0.3, seed))[0]) for seed in range(30)]
    assert set(odd) == {(1, 1, 2), (1, 2, 1), (2, 1, 1)}, "equal classes take turns"


@pytest.mark.parametrize("share", [0.2, 0.25, 0.5, 0.9])
def test_regression_is_not_stratified(share: float) -> None:
    inputs, targets = np.arange(25.0)[:, None], np.repeat(np.linspace(0, 2, 5), 5)
    whole = fs.FederatedData.from_arrays([(inputs, targets), (inputs[:1], targets[:1])])
    held, rng = held_out(whole, share, 7), np.random.default_rng(7)
    expected = [rng.permutation(25)[: round(share * 25)].tolist(), rng.permutation([25])[:0].tolist()]
    assert held.rows.tolist() == expected[0] + expected[1]
    several = [np.unique(held_out(whole, 0.2, s).of_client(0)[1].numpy()).size for s in range(10)]
    assert min(several) < 5


def test_validation_is_stratified_too() -> None:
    held = data([[48, 2, 0]] * 40).validation(0.5)
    assert held.client_test is not None and counts_of(held.client_test)[:, 1].tolist() == [1] * 40
    assert held.test is not None and int(held.test[1].sum()) == 40


def test_float_labels_are_stratified() -> None:
    whole = data([[48, 2]] * 40, kind=float)
    assert counts_of(held_out(whole, 0.5))[:, 1].tolist() == [1] * 40


def test_a_support_set_has_its_share_of_every_class() -> None:
    divided = data([[48, 2, 0], [9, 6, 3]]).with_support(1 / 3)
    assert divided.support is not None
    assert counts_of(divided.support)[1].tolist() == [3, 2, 1]
    assert abs(counts_of(divided.support)[0] - np.array([16, 2 / 3, 0])).max() < 1


def test_a_support_set_may_have_the_only_row_of_a_class() -> None:
    """As support and query rows are both training data, clients with one row of each class can be divided."""
    divided = data([[1, 1, 1]] * 3).with_support(0.5)
    assert divided.support is not None
    assert divided.support.sizes.tolist() == [2, 2, 2] and divided.train.sizes.tolist() == [1, 1, 1]
    with pytest.raises(fs.InputError, match=r"Client 1 has 1 training rows, too few for 0\.5 of them as support\."):
        data([[1, 1, 1], [0, 1, 0]]).with_support(0.5)


@pytest.mark.parametrize("cut", [fs.FederatedData.with_holdout, fs.FederatedData.with_support], ids=["test", "support"])
def test_a_client_always_keeps_a_row(cut: Callable[..., fs.FederatedData]) -> None:
    for share in (0.5, 0.99, 1 - 1e-12):
        assert (cut(data([[2, 0, 0], [1, 1, 0], [50, 9, 2]]), share).train.sizes >= 1).all()


def test_quotas_add_up() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        labels, share, keep = (
            rng.integers(6, size=rng.integers(1, 60)),
            float(rng.uniform(0.01, 0.99)),
            int(rng.integers(2)),
        )
        sizes = np.bincount(labels, minlength=6)
        held = np.bincount(labels[_stratified(labels, share, keep)], minlength=6)
        assert np.all(np.abs(held - share * sizes) < 1)
        assert np.all(held <= np.maximum(0, sizes - keep))
        total = min(round(share * len(labels)), len(labels) - 1)
        assert held.sum() == total if keep == 0 else held.sum() <= total


def test_a_share_that_holds_out_no_row_is_refused() -> None:
    with pytest.raises(fs.InputError, match=r"'digits' have too few samples per client to hold out a share of 0\.02"):
        fs.data.digits().split("iid", clients=100, holdout=0.02)


# --- two classes: sites with few positives, or none ------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.1, 0.2, 0.3, 0.5])
def test_sites_with_few_positives_hold_out_their_share_of_them_together(share: float) -> None:
    counts = [[11, 1], [10, 2], [12, 0], [1, 0], [0, 1], [1, 1], [0, 12], [2, 10]]
    whole = data(counts * 500)
    held, kept = held_out(whole, share).class_counts, whole.with_holdout(share).train.class_counts
    assert np.array_equal(held + kept, counts * 500) and (kept.sum(1) >= 1).all()
    total = np.minimum(np.round(share * whole.sizes), whole.sizes - 1)
    assert np.array_equal(held.sum(1), total)
    assert not held[3::8].any() and not held[4::8].any(), "a single row is for training"
    assert not held[2::8, 1].any() and not held[6::8, 0].any()
    due = total[:, None] * whole.train.class_counts / whole.sizes[:, None]
    assert np.all(np.abs(held - due) <= 1)
    of_sites = (a.reshape(500, 8, 2).mean(0) for a in (held, due))
    np.testing.assert_allclose(*of_sites, rtol=0, atol=0.1, err_msg="right on average, at every kind of site")


@pytest.mark.parametrize("share", [0.7, 0.9, 0.99])
def test_large_shares_leave_a_row_too(share: float) -> None:
    kept = data([[11, 1], [1, 1], [1, 0], [2, 1]] * 50).with_holdout(share).train
    assert (kept.sizes >= 1).all()


def test_enough_positives_are_held_out_as_ever() -> None:
    """Where at least one row of both classes is due, the split is the same as with more than two classes."""
    counts = [[40, 10], [9, 30], [17, 5]]
    two, three = held_out(data(counts), 0.3), held_out(data([[*c, 0] for c in counts]), 0.3)
    assert two.rows.tolist() == three.rows.tolist()


def test_validation_rows_are_chosen_anew() -> None:
    """A site whose only positive was not held out may have it among the validation rows."""
    whole = data([[11, 1]] * 2000).with_holdout(0.3, seed=0)
    held = whole.validation(0.3, seed=0).client_test
    assert held is not None
    left = whole.train.class_counts[:, 1] == 1
    assert held.class_counts[left, 1].mean() == pytest.approx(2 / 8, abs=0.03)


def test_sites_that_share_a_seed_do_not_all_hold_out_their_only_positive() -> None:
    alone = data([[11, 1]])
    held = [alone.train.hold_out(0.3, 0, site=f"site{k}", by_chance=True)[1].class_counts[0] for k in range(200)]
    positives = [len(c) > 1 and c[1] for c in held]
    assert np.mean(positives) == pytest.approx(4 / 12, abs=0.1)


def test_only_sites_of_one_row_or_class_can_be_held_out_too() -> None:
    assert held_out(data([[12, 0], [0, 3], [1, 0]]), 0.3).sizes.tolist() == [4, 1, 0]
    with pytest.raises(fs.InputError, match="too few samples per client"):
        data([[1, 0], [0, 1]]).with_holdout(0.5)
