"""The generator is Philox as published, its numbers are uniform, and they depend on their names only."""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from itertools import permutations as all_orders
from typing import Any

import numpy as np
import pytest
import torch

from fedstrata.core import rng
from fedstrata.core.errors import InputError

KEY = rng.key_of(0, "test")


def chi_square(counts: np.ndarray, expected: np.ndarray | float) -> float:
    """Return how many standard deviations the chi-square statistic lies from its mean."""
    degrees = counts.size - 1
    statistic = float((((counts - expected) ** 2) / expected).sum())
    return (statistic - degrees) / (2 * degrees) ** 0.5


@pytest.mark.parametrize("count", [1, rng.FEW, rng.FEW + 1])
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0, 0, 0, 0], (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_words(counter: list[int], key: rng.Key, expected: str, count: int) -> None:
    for out in rng.philox(tuple(np.full(count, c) for c in counter), key):
        assert " ".join(f"{int(word):08x}" for word in out) == expected


def test_philox_is_the_same_for_one_counter_and_for_many() -> None:
    blocks = np.arange(rng.FEW + 1)
    many = rng.philox((blocks, np.array([7]), np.array([2**32 - 1]), np.zeros(1)), KEY)
    assert np.array_equal(
        many[:100], rng.philox((blocks[:100], np.array([7]), np.array([2**32 - 1]), np.zeros(1)), KEY)
    )
    for block in blocks:
        one = rng.philox((np.array([block]), np.array([7]), np.array([2**32 - 1]), np.zeros(1)), KEY)
        assert np.array_equal(many[block], one[0])


def test_keys_are_32_bit_words_that_tell_names_apart() -> None:
    names = [(0, "a", 1), (0, "a", 2), (0, "b", 1), (1, "a", 1), (0, "a", "1"), (0, "a", 11), (0, "a", 1, 0)]
    keys = [rng.key_of(*n) for n in names]
    assert len(set(keys)) == len(names)
    assert all(0 <= word < 2**32 for key in keys for word in key)
    assert rng.key_of(0, "batch", 3) == rng.key_of(0, "batch", 3)


def test_keys_are_the_same_in_every_process() -> None:
    """If this number changes, so do the batches of all recorded runs."""
    assert rng.key_of(0, "batch", 0, 0, 0, 0) == (648670297, 3849963756)


def test_a_number_of_numpy_has_the_key_of_the_number_whichever_is_asked_for_first() -> None:
    digest = blake2b(repr((7001, "first", 3)).encode(), digest_size=8).digest()
    assert rng.key_of(np.int64(7001), np.str_("first"), np.uint8(3)) == tuple(np.frombuffer(digest, "<u4").tolist())


@pytest.mark.parametrize("name", [True, 1.0, np.float64(1), None, (1, 2), b"a"], ids=repr)
def test_other_names_than_whole_numbers_and_texts_are_refused(name: Any) -> None:
    assert rng.key_of(1)
    with pytest.raises(InputError, match=r"^The name of random numbers must be a whole number or a text"):
        rng.key_of(name)


@pytest.mark.parametrize("axis", ["client", "step", "position"])
def test_uniforms_are_uniform_along_every_axis(axis: str) -> None:
    count = 40_000
    zero = np.zeros(1)
    numbers = {
        "client": lambda: rng.uniforms(KEY, np.arange(count), zero, 1)[:, 0],
        "step": lambda: rng.uniforms(KEY, zero, np.arange(count), 1)[:, 0],
        "position": lambda: rng.uniforms(KEY, zero, zero, count)[0],
    }[axis]()
    assert numbers.shape == (count,)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(chi_square(np.histogram(numbers, 100, (0, 1))[0], count / 100)) < 4
    pairs = np.histogram2d(numbers[:-1], numbers[1:], bins=10, range=((0, 1), (0, 1)))[0]
    assert abs(chi_square(pairs, (count - 1) / 100)) < 4


def test_words_do_not_depend_on_what_else_is_drawn() -> None:
    clients, steps = np.array([3, 9, 4])[:, None], np.arange(6)[None]
    everything = rng.words(KEY, clients, steps, 10)
    assert everything.shape == (3, 6, 10)
    for c, client in enumerate((3, 9, 4)):
        for step in range(6):
            alone = rng.words(KEY, np.array([client]), np.array([step]), 10)[0]
            assert np.array_equal(everything[c, step], alone)
            fewer = rng.words(KEY, np.array([client]), np.array([step]), 3)[0]
            assert np.array_equal(alone[:3], fewer)
    assert len(np.unique(everything)) == everything.size


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_positions_are_uniform_and_in_range(size: int) -> None:
    drawn = rng.positions(KEY, np.arange(300), np.zeros(1), 100, np.full(300, size))
    assert drawn.dtype == np.int64
    assert drawn.min() >= 0
    assert drawn.max() < size
    if size > 1:
        assert abs(chi_square(np.bincount(drawn.ravel(), minlength=size), drawn.size / size)) < 4


def test_positions_of_clients_with_different_sizes() -> None:
    sizes = np.array([1, 5, 1000])
    drawn = rng.positions(KEY, np.arange(3), np.zeros(1), 500, sizes)
    assert (drawn < sizes[:, None]).all()
    assert [len(np.unique(row)) for row in drawn[:2]] == [1, 5]


def test_permutations_are_permutations() -> None:
    sizes = np.array([1, 5, 17, 64])
    orders = rng.permutations(KEY, np.arange(4), np.zeros(4), sizes)
    assert orders.shape == (4, 64)
    for order, size in zip(orders, sizes, strict=True):
        assert sorted(order[:size]) == list(range(size))


def test_permutations_of_four_are_uniform() -> None:
    trials = 24_000
    orders = rng.permutations(KEY, np.arange(trials), np.zeros(trials), np.full(trials, 4))
    counts = Counter(map(tuple, orders.tolist()))
    assert set(counts) == set(all_orders(range(4)))
    assert abs(chi_square(np.array(list(counts.values())), trials / 24)) < 4


def test_permutations_change_with_client_and_step() -> None:
    sizes = np.full(4, 30)
    orders = rng.permutations(KEY, np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1]), sizes)
    assert len({tuple(order) for order in orders.tolist()}) == 4


def test_a_permutation_does_not_depend_on_its_neighbours() -> None:
    """Large clients: every bit that decides the order must be the client's own."""
    size, larger = 50_000, 70_000
    for step in range(6):
        steps = np.full(1, step)
        alone = rng.permutations(KEY, np.array([3]), steps, np.array([size]))[0]
        beside = rng.permutations(KEY, np.array([3, 4]), np.full(2, step), np.array([size, larger]))[0, :size]
        assert np.array_equal(alone, beside)


def test_chosen_clients_are_different_sorted_and_uniform() -> None:
    counts = np.zeros(20)
    for r in range(2000):
        chosen = rng.choose(rng.key_of(0, "cohort", r), 20, 5)
        assert len(set(chosen.tolist())) == 5
        assert (np.diff(chosen) > 0).all()
        counts[chosen] += 1
    assert counts.sum() == 10_000
    spread = (counts - 500) / (2000 * 0.25 * 0.75) ** 0.5
    assert np.abs(spread).max() < 4
    assert np.array_equal(rng.choose(KEY, 7, 7), np.arange(7))


def test_weighted_choice_follows_the_probabilities() -> None:
    probabilities = np.array([0.0, 3.0, 1.0, 0.0, 4.0, 0.0])
    drawn = rng.choose_weighted(KEY, probabilities, 40_000)
    counts = np.bincount(drawn, minlength=6)
    assert counts[[0, 3, 5]].tolist() == [0, 0, 0]
    wanted = probabilities / 8
    assert np.abs(counts / 40_000 - wanted).max() < 4 * (0.25 / 40_000) ** 0.5
    assert np.array_equal(drawn, rng.choose_weighted(KEY, 10 * probabilities, 40_000))
    assert (rng.choose_weighted(KEY, np.array([0.0, 1.0]), 5) == 1).all()


def test_few_of_many_are_chosen_at_a_cost_of_the_few(monkeypatch: pytest.MonkeyPatch) -> None:
    population, number = 1_000_000, 500
    drawn: list[int] = []
    original = rng.words
    monkeypatch.setattr(rng, "words", lambda *a: drawn.append(original(*a).size) or original(*a))
    chosen = rng.choose(KEY, population, number)
    assert sum(drawn) <= 8 * number
    assert len(chosen) == len(np.unique(chosen)) == number and (np.diff(chosen) > 0).all()
    assert chosen.min() >= 0 and chosen.max() < population
    assert np.array_equal(chosen, rng.choose(KEY, population, number))
    assert not np.array_equal(chosen, rng.choose(rng.key_of(1, "test"), population, number))


def test_every_member_of_a_large_population_is_chosen_equally_often() -> None:
    population, bins = 200_000, 20
    counts = sum(
        np.bincount(rng.choose(rng.key_of(seed, "many"), population, 1000) * bins // population, minlength=bins)
        for seed in range(50)
    )
    assert abs(chi_square(counts, counts.sum() / bins)) < 5
    ends = np.concatenate([rng.choose(rng.key_of(seed, "ends"), rng.MANY + 1, rng.MANY // 5) for seed in range(60)])
    assert ends.min() == 0 and ends.max() == rng.MANY


@pytest.mark.parametrize("count", [1, 4, 10])
def test_an_accelerator_computes_the_same_words(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none here: its operations run on the CPU."""
    clients, steps = np.array([5, 2**20, 7, 2**31 - 1]), range(3, 9)
    expected = rng.words(KEY, clients, np.arange(3, 9)[:, None], count).astype(np.int64)
    assert np.array_equal(rng.words_on(torch.device("cpu"), KEY, clients, steps, count), expected)
    for name in ("arange", "zeros_like"):
        monkeypatch.setattr(torch, name, _on_the_host(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor)
    words = rng.words_on(torch.device("cuda"), KEY, clients, steps, count)
    assert words.dtype == torch.int64 and np.array_equal(words, expected)


@pytest.mark.parametrize("sizes", [[5, 1, 8, 3], [7, 7, 7, 7]], ids=str)
def test_an_accelerator_computes_the_same_permutations(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = KEY, np.array([5, 2**20, 7, 2**31 - 1]), np.array([0, 3, 9, 1]), np.array(sizes)
    expected = rng.permutations(*arguments)
    assert np.array_equal(rng.permutations_on(torch.device("cpu"), *arguments), expected)
    for name in ("arange", "zeros_like"):
        monkeypatch.setattr(torch, name, _on_the_host(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor)
    orders = rng.permutations_on(torch.device("cuda"), *arguments)
    assert orders.dtype == torch.int64 and np.array_equal(orders, expected)


def _on_the_host(function: Any) -> Any:
    return lambda *args, device=None, **options: function(*args, **options)
