"""Randomness as a function of names.

Every random number is ``philox(key, counter)``: the key is a hash of names (seed, purpose, round, exchange, stream),
the counter is (position, client, step). There is no generator state, so the numbers do not depend on chunks, engines,
processes or the order of clients, and a resumed run draws the same ones.

The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
vectorised over NumPy arrays and tested against the published known-answer vectors.
"""

from __future__ import annotations

import math
from functools import lru_cache
from hashlib import blake2b
from numbers import Integral

import numpy as np
import torch

from fedstrata.core.errors import invalid

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MULTIPLIERS = np.array([_M0, _M1], dtype=np.uint64)
_WEYL = np.array([_W0, _W1], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_ZERO = np.zeros(1, dtype=np.uint64)
_ROUNDS = 10

Key = tuple[int, int]

FEW = 256
"""The largest number of counters that are computed as lanes of Python integers."""

MANY = 1 << 16
"""The largest population of which every member gets a random number when some are chosen."""


def philox(counter: tuple[np.ndarray, ...], key: Key) -> np.ndarray:
    """Return four 32-bit words (as uint64, stacked on the last axis) for each 128-bit counter."""
    shape = np.broadcast(*counter).shape
    if math.prod(shape) <= FEW:
        return _philox_of_few(counter, key, shape)
    # Both halves of a counter go through the same operations. A round exchanges them; here their rows stay where they
    # are, and after every other round each stands in the place of the other.
    even, odd = np.empty((2, *shape), dtype=np.uint64), np.empty((2, *shape), dtype=np.uint64)
    even[0], odd[0], even[1], odd[1] = counter
    for multipliers, keys in zip(_multipliers(len(shape)), _round_keys(*key, len(shape)), strict=True):
        products = even * multipliers
        np.right_shift(products, _32, out=even)
        even ^= odd[::-1]
        even ^= keys
        np.bitwise_and(products, _LOW, out=odd)
    words = np.empty((*shape, 4), dtype=np.uint64)
    words[..., 0], words[..., 1], words[..., 2], words[..., 3] = even[0], odd[0], even[1], odd[1]
    return words


def _philox_of_few(counter: tuple[np.ndarray, ...], key: Key, shape: tuple[int, ...]) -> np.ndarray:
    """Return the same words. One integer holds all counters, 64 bits each: few calls, each on all of them."""
    words = np.empty((4, *shape), dtype="<u8")
    words[0], words[1], words[2], words[3] = counter
    size = words.nbytes // 4
    ones = _ones(size)
    low, (k0, k1) = ones * 0xFFFFFFFF, key
    c0, c1, c2, c3 = (int.from_bytes(part, "little") for part in words)
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _M0, c2 * _M1  # a product of 32-bit numbers stays within its 64 bits
        c0, c2 = ((p1 >> 32) & low) ^ c1 ^ (ones * k0), ((p0 >> 32) & low) ^ c3 ^ (ones * k1)
        c1, c3 = p1 & low, p0 & low
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    out = bytearray().join(c.to_bytes(size, "little") for c in (c0, c1, c2, c3))
    return np.frombuffer(out, dtype="<u8").reshape(4, *shape).transpose(*range(1, len(shape) + 1), 0)


@lru_cache(maxsize=FEW)
def _ones(size: int) -> int:
    """Return an integer of ``size`` bytes, with a 1 in every 64 bits."""
    return int.from_bytes((1).to_bytes(8, "little") * (size // 8), "little")


@lru_cache(maxsize=8)
def _multipliers(dimensions: int) -> list[np.ndarray]:
    """Return the multipliers of the ten rounds, for the rows as they stand in each."""
    orders = [_MULTIPLIERS.reshape(2, *[1] * dimensions), _MULTIPLIERS[::-1].reshape(2, *[1] * dimensions)]
    return orders * (_ROUNDS // 2)


@lru_cache(maxsize=64)  # a key is used within one round; keeping more of them slows down large allocations
def _round_keys(k0: int, k1: int, dimensions: int) -> list[np.ndarray]:
    """Return the keys of the ten rounds, for the rows as they stand after each."""
    rounds = np.arange(_ROUNDS, dtype=np.uint64)[:, None]
    keys = (np.array([k0, k1], dtype=np.uint64) + rounds * _WEYL) & _LOW
    keys[0::2] = keys[0::2, ::-1]
    return list(keys.reshape(_ROUNDS, 2, *[1] * dimensions))


def key_of(*names: int | str) -> Key:
    """Hash names, such as ``(seed, "batch", round, exchange, level, stream)``, into a Philox key."""
    return _hashed(tuple(name if type(name) in (int, str) else _plain(name) for name in names))


def _plain(name: object) -> int | str:
    """Return a name as Python's own type: equal names must have the same hash."""
    if isinstance(name, bool) or not isinstance(name, Integral | str):
        raise invalid("name of random numbers", name, "a whole number or a text")
    return str(name) if isinstance(name, str) else int(name)


@lru_cache(maxsize=4096)
def _hashed(names: tuple[int | str, ...]) -> Key:
    digest = blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def words(key: Key, clients: np.ndarray, steps: np.ndarray, count: int) -> np.ndarray:
    """Return ``count`` 32-bit words for each (client, step) of two arrays that broadcast: shape [..., count]."""
    blocks = np.arange((count + 3) // 4, dtype=np.uint64)
    out = philox((blocks, clients[..., None], steps[..., None], _ZERO), key)
    return out.reshape(*out.shape[:-2], -1)[..., :count]


def words_on(device: torch.device, key: Key, clients: np.ndarray, steps: range, count: int) -> torch.Tensor:
    """Return the same words as an int64 tensor [steps, clients, count] on a device, which computes them itself."""
    if device.type == "cpu":
        return torch.from_numpy(words(key, clients, np.arange(steps.start, steps.stop)[:, None], count).view(np.int64))
    blocks = torch.arange((count + 3) // 4, device=device)
    number = torch.from_numpy(clients).to(device)[:, None]
    step = torch.arange(steps.start, steps.stop, device=device)[:, None, None]
    return _philox_of_tensors(blocks, number, step, torch.zeros_like(blocks), *key).flatten(-2)[..., :count]


def words_of_tensors(key: torch.Tensor, salt: tuple[int, int], count: int) -> torch.Tensor:
    """Return ``count`` 32-bit words of Philox4x32-10 as an int64 tensor, for a key [2] that is a tensor itself.

    These are the words of ``philox((block, *salt, 0), key)``. The function uses only tensor operations, so it can be
    traced and mapped over clients.
    """
    c0 = torch.arange((count + 3) // 4, dtype=torch.int64, device=key.device)
    c1, c2, c3 = (torch.full_like(c0, number) for number in (*salt, 0))
    return _philox_of_tensors(c0, c1, c2, c3, key[0], key[1]).reshape(-1)[:count]


def _philox_of_tensors(
    c0: torch.Tensor,
    c1: torch.Tensor,
    c2: torch.Tensor,
    c3: torch.Tensor,
    k0: torch.Tensor | int,
    k1: torch.Tensor | int,
) -> torch.Tensor:
    """Return four words for each counter, stacked on the last axis, as :func:`philox` does; counters may broadcast."""
    low = 0xFFFFFFFF
    for _ in range(_ROUNDS):
        # int64 products wrap around, so their 64 bits are right; a shift copies the sign bit, which the mask removes.
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = ((p1 >> 32) & low) ^ c1 ^ k0, p1 & low, ((p0 >> 32) & low) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + _W0) & low, (k1 + _W1) & low
    return torch.stack((c0, c1, c2, c3), dim=-1)


def uniforms(key: Key, clients: np.ndarray, steps: np.ndarray, count: int) -> np.ndarray:
    """Return ``count`` numbers in [0, 1) with 32 random bits for each (client, step)."""
    return words(key, clients, steps, count) * 2.0**-32


def positions(key: Key, clients: np.ndarray, steps: np.ndarray, count: int, sizes: np.ndarray) -> np.ndarray:
    """Return ``count`` integers in [0, size), with replacement, for each (client, step, size).

    The bias of the multiply-and-shift is at most size / 2**32.
    """
    return ((words(key, clients, steps, count) * sizes.astype(np.uint64)[..., None]) >> _32).astype(np.int64)


def permutations(key: Key, clients: np.ndarray, steps: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return a random permutation of range(size) for each (client, step), padded: shape [clients, largest size]."""
    largest = int(sizes.max())
    bits = words(key, clients, steps, 2 * largest)
    order_by = ((bits[:, 0::2] << np.uint64(31)) ^ bits[:, 1::2]).astype(np.int64)
    order_by[np.arange(largest) >= sizes[:, None]] = np.iinfo(np.int64).max
    return np.argsort(order_by, axis=1, kind="stable")


def permutations_on(
    device: torch.device, key: Key, clients: np.ndarray, steps: np.ndarray, sizes: np.ndarray
) -> torch.Tensor:
    """Return the same permutations as an int64 tensor on a device, which computes them itself."""
    if device.type == "cpu":
        return torch.from_numpy(permutations(key, clients, steps, sizes))
    number, step, size = (torch.from_numpy(numbers).to(device)[:, None] for numbers in (clients, steps, sizes))
    places = torch.arange(int(sizes.max()), device=device)
    blocks = torch.arange((len(places) + 1) // 2, device=device)
    bits = _philox_of_tensors(blocks, number[..., None], step[..., None], torch.zeros_like(blocks), *key)
    bits = bits.reshape(len(clients), -1, 2)[:, : len(places)]
    order_by = (bits[..., 0] << 31) ^ bits[..., 1]
    order_by = order_by.masked_fill(places >= size, torch.iinfo(torch.int64).max)
    return order_by.sort(dim=1, stable=True).indices


def choose(key: Key, population: int, number: int) -> np.ndarray:
    """Return ``number`` different clients out of ``population``, uniformly, in increasing order.

    The cost grows with ``population`` up to ``MANY``, and above it, if few are chosen, only with ``number``.
    """
    if population > MANY and number < population // 4:
        return _choose_few(key, population, number)
    bits = words(key, np.arange(population), np.zeros(1), 2)
    priority = (bits[:, 0] << _32) | bits[:, 1]
    return np.sort(np.argsort(priority, kind="stable")[:number])


def _choose_few(key: Key, population: int, number: int) -> np.ndarray:
    """Draw with replacement, and drop repeats, until there are enough."""
    chosen, step = np.empty(0, dtype=np.int64), 0
    while len(chosen) < number:
        drawn = positions(key, np.zeros(1), np.array([step]), 2 * number, np.array([population]))[0]
        every = np.concatenate([chosen, drawn])
        first = np.sort(np.unique(every, return_index=True)[1])
        chosen, step = every[first][:number], step + 1
    return np.sort(chosen)


def choose_weighted(key: Key, probabilities: np.ndarray, number: int) -> np.ndarray:
    """Return ``number`` clients with replacement, client k with probability proportional to ``probabilities[k]``."""
    cumulative = np.cumsum(probabilities)
    points = uniforms(key, np.zeros(1), np.zeros(1), number)[0]
    chosen: np.ndarray = np.searchsorted(cumulative, points * cumulative[-1], side="right")
    return chosen.clip(max=len(probabilities) - 1)
