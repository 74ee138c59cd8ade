"""Secure sums: exact, whoever leaves as long as enough stay; lies and damaged messages are refused."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.secure_sums import Sum, flipped, other_advert, session, sign, vectors, verify
from fedstrata.core.errors import FedstrataError
from fedstrata.federation.secure import fields, fixedpoint, masks
from fedstrata.federation.secure.collector import Collector, TooFew
from fedstrata.federation.secure.messages import Advert, SecureError, fixed_signature, pack_rows, read_rows
from fedstrata.federation.secure.participant import PHASES, Participant
from fedstrata.federation.wire import Refused

LOW_ORDER = [
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0100000000000000000000000000000000000000000000000000000000000000",
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
]
"""Points of low order on Curve25519 (RFC 7748, section 6.1, and D. J. Bernstein's list)."""


# --- exact sums -----------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_sums_are_exact_whoever_leaves(data: st.DataObject) -> None:
    clients = data.draw(st.lists(st.integers(0, 11), min_size=2, max_size=7, unique=True))
    least = max(2, len(clients) // 2 + 1)
    threshold = data.draw(st.integers(least, len(clients)))
    leaving = data.draw(st.permutations(clients))[: len(clients) - threshold]
    gone: dict[str, list[int]] = {}
    for client in leaving:
        gone.setdefault(data.draw(st.sampled_from(PHASES)), []).append(client)
    entries = data.draw(st.sampled_from((1, 2, 7, masks.BLOCK + 3)))
    one = Sum(vectors(clients, entries, data.draw(st.integers(0, 99))), threshold, gone)
    np.testing.assert_array_equal(one.total(), one.expected())
    before = [k for phase in ("keys", "shares", "masked") for k in gone.get(phase, ())]
    assert set(one.collector.survivors) == set(clients) - set(before)


@pytest.mark.parametrize("phase", PHASES)
def test_too_few_nodes_are_an_error_that_names_the_phase(phase: str) -> None:
    one = Sum(vectors(range(5)), 4, {phase: [1, 3]})
    said = {"keys": "sent keys", "shares": "sent shares", "masked": "sent masked", "agree": "signed", "open": "opened"}
    with pytest.raises(TooFew, match=f"Only 3 nodes {said[phase]}.*threshold, 4"):
        one.total()


def test_the_masked_vectors_and_the_sum_before_it_is_opened_look_random() -> None:
    one = Sum({k: np.zeros(20_000, np.uint64) for k in range(4)}, 3).until("shares")
    seen = [node.masked(one.collector.inbox_of(k), one.vectors[k]) for k, node in one.nodes.items()]
    for numbers in (*seen, sum(seen)):
        assert isinstance(numbers, np.ndarray)
        for shift in (0, 24, 56):
            counts = np.bincount((numbers >> np.uint64(shift)).astype(np.uint8), minlength=256)
            assert counts.max() < 200 and counts.min() > 20, "each byte about 78 times"
    assert len({numbers.tobytes() for numbers in seen}) == 4


def test_every_attempt_has_other_masks() -> None:
    same = {k: np.zeros(10, np.uint64) for k in range(3)}
    first, second = (Sum(same, 2).until("shares") for _ in range(2))
    a, b = (s.nodes[0].masked(s.collector.inbox_of(0), same[0]) for s in (first, second))
    assert not (a == b).any()


# --- lies of the server ---------------------------------------------------------------------------------------------


def test_a_server_cannot_have_both_kinds_of_shares_of_a_node() -> None:
    one = Sum(vectors(range(4)), 3).until("agree")
    signatures = one.collector.close_signatures()
    opened = one.nodes[0].opened(signatures, verify)
    with pytest.raises(SecureError, match=r"asked for 'open' .* after 'open'.*once"):
        one.nodes[0].opened(signatures, verify)
    with pytest.raises(SecureError, match=r"asked for 'agree' .* after 'open'"):
        one.nodes[0].agree([0, 1, 2], lambda content: sign(0, content))
    seeds = one.nodes[0].own[fields.SHARE :]
    assert opened[0] == seeds and seeds != one.nodes[0].own[: fields.SHARE]


def test_a_server_that_names_different_survivors_to_different_nodes_learns_nothing() -> None:
    one = Sum(vectors(range(4)), 3).until("masked")
    told = {0: (0, 1, 2, 3), 1: (0, 1, 2), 2: (0, 1, 2), 3: (0, 1, 2, 3)}
    signed = {k: node.agree(told[k], lambda content, k=k: sign(k, content)) for k, node in one.nodes.items()}
    for k, node in one.nodes.items():
        for named in ({*signed}, {0, 3}, {1, 2}):
            trial = Participant.from_json(node.to_json())
            with pytest.raises(SecureError, match=r"signature|needs 3"):
                trial.opened({j: signed[j] for j in named}, verify)
        assert k in told[k]


@pytest.mark.parametrize(
    ("survivors", "said"),
    [
        ((1, 2, 3), "did not all take part"),
        ((0, 1, 2, 7), "did not all take part"),
        ((0, 1), "needs 3 survivors. Got 2"),
    ],
)
def test_a_node_signs_no_wrong_survivors(survivors: tuple[int, ...], said: str) -> None:
    one = Sum(vectors(range(4)), 3).until("masked")
    with pytest.raises(SecureError, match=said):
        one.nodes[0].agree(survivors, lambda content: sign(0, content))


def test_a_server_that_asks_one_node_something_else_gets_no_sum() -> None:
    one = Sum({k: np.zeros(1000, np.uint64) for k in range(4)}, 3).until("shares")
    for k, node in one.nodes.items():
        about = b"another model" if k == 2 else b""
        one.collector.take_masked(k, node.masked(one.collector.inbox_of(k), one.vectors[k], about))
    one.collector.close_masked()
    one.agree()
    one.open()
    total = one.collector.total()
    assert len(np.unique(total)) == 1000 and np.count_nonzero(total >> np.uint64(56)) > 950, "random numbers, not zeros"


def test_a_node_masks_no_second_vector_with_the_same_masks() -> None:
    one = Sum(vectors(range(3)), 2).until("masked")
    with pytest.raises(SecureError, match=r"asked for 'masked' .* after 'masked'"):
        one.nodes[0].masked(one.collector.inbox_of(0), one.vectors[0] + np.uint64(1))


@pytest.mark.parametrize("phase", PHASES[2:])
def test_a_phase_cannot_be_left_out(phase: str) -> None:
    node = Participant(session(2), 0)
    ask: dict[str, Callable[[], object]] = {
        "masked": lambda: node.masked({}, np.zeros(1, np.uint64)),
        "agree": lambda: node.agree([0, 1], lambda content: b""),
        "open": lambda: node.opened({}, verify),
    }
    with pytest.raises(SecureError, match=f"asked for '{phase}' .* after 'keys'"):
        ask[phase]()


def adverts_of(one: Sum) -> dict[int, Advert]:
    return dict(one.until("keys").collector.adverts)


def signed_by(k: int, advert: Advert, about: Any) -> Advert:
    return replace(advert, signature=fixed_signature(sign(k, advert.signed(about, k))))


def test_a_node_refuses_false_keys_of_its_peers() -> None:
    def told(change: Callable[[dict[int, Advert]], dict[int, Advert]], threshold: int = 3) -> None:
        one = Sum(vectors(range(4)), threshold)
        one.nodes[0].shares(change(adverts_of(one)), verify)

    now = session(3)
    told(lambda a: a)
    lies: list[tuple[str, Callable[[dict[int, Advert]], dict[int, Advert]]]] = [
        ("client 2 are not signed", lambda a: a | {2: other_advert(a[2], mask_key=secrets.token_bytes(32))}),
        ("client 2 are not signed", lambda a: a | {2: other_advert(a[2], signature=flipped(a[2].signature))}),
        ("client 2 are not signed", lambda a: a | {2: signed_by(2, a[2], replace(now, attempt=1))}),
        ("client 2 are not signed", lambda a: a | {2: signed_by(2, a[2], replace(now, run="cd" * 16))}),
        ("are the same", lambda a: a | {2: a[3]}),
        ("are the same", lambda a: a | {2: signed_by(2, other_advert(a[2], mask_key=a[2].share_key), now)}),
        ("other keys than this node sent", lambda a: a | {0: Participant(now, 0).advert(lambda c: sign(0, c))}),
        ("other keys than this node sent", lambda a: {k: v for k, v in a.items() if k}),
        ("needs 3 nodes. Got 2", lambda a: {k: a[k] for k in (0, 1)}),
    ]
    for point in LOW_ORDER:
        low = bytes.fromhex(point)
        lies += [("low order", lambda a, low=low: a | {2: signed_by(2, other_advert(a[2], share_key=low), now)})]
    for said, lie in lies:
        with pytest.raises(SecureError, match=said):
            told(lie)


@pytest.mark.parametrize("threshold", [1, 2])
def test_a_threshold_of_half_the_nodes_is_refused(threshold: int) -> None:
    one = Sum(vectors(range(4)), threshold)
    with pytest.raises(SecureError, match="more than half"):
        one.nodes[0].shares(adverts_of(one), verify)


def test_a_node_refuses_shares_that_were_changed_or_exchanged_or_of_another_sum() -> None:
    other = Sum(vectors(range(4)), 3).until("shares").collector

    def told(change: Callable[[Sum, dict[int, bytes]], dict[int, bytes]]) -> None:
        one = Sum(vectors(range(4)), 3).until("shares")
        one.nodes[0].masked(change(one, one.collector.inbox_of(0)), one.vectors[0])

    told(lambda one, rows: rows)
    lies: list[tuple[str, Callable[[Sum, dict[int, bytes]], dict[int, bytes]]]] = [
        ("client 1 are not those", lambda one, rows: rows | {1: flipped(rows[1])}),
        ("client 1 are not those", lambda one, rows: rows | {1: flipped(rows[1], 0)}),
        ("client 1 are not those", lambda one, rows: rows | {1: rows[2]}),
        ("client 1 are not those", lambda one, rows: rows | {1: one.collector.sealed[1][2]}),
        ("client 1 are not those", lambda one, rows: rows | {1: other.inbox_of(0)[1]}),
        ("do not take part", lambda one, rows: rows | {9: rows[1]}),
        ("do not take part", lambda one, rows: rows | {0: rows[1]}),
        ("needs 3 nodes. Got 2", lambda one, rows: {1: rows[1]}),
    ]
    for said, lie in lies:
        with pytest.raises(SecureError, match=said):
            told(lie)


# --- bad messages of a node -----------------------------------------------------------------------------------------


def test_the_server_refuses_bad_messages_of_a_node() -> None:
    def collected(last: str) -> Collector:
        return Sum(vectors(range(4)), 3).until(last).collector

    fresh = Participant(session(3), 4).advert(lambda content: sign(4, content))
    low = signed_by(4, other_advert(fresh, mask_key=bytes.fromhex(LOW_ORDER[1])), session(3))
    with pytest.raises(Refused, match="valid signature"):
        collected("keys").take_advert(5, fresh)
    with pytest.raises(Refused, match="low order"):
        collected("keys").take_advert(4, low)
    one = collected("keys")
    with pytest.raises(Refused, match="not new"):
        one.take_advert(4, signed_by(4, other_advert(fresh, mask_key=one.adverts[1].mask_key), session(3)))
    with pytest.raises(Refused, match="one share for each"):
        collected("keys").take_shares(1, {0: b"", 2: b""})
    with pytest.raises(Refused, match="not asked for"):
        collected("masked").take_masked(1, np.zeros(50, np.uint64))
    with pytest.raises(Refused, match="not asked for"):
        collected("shares").take_masked(7, np.zeros(50, np.uint64))
    with pytest.raises(Refused, match="of int64"):
        collected("shares").take_masked(1, np.zeros(50, np.int64))
    part = Sum(vectors(range(4)), 3).until("shares").collector
    part.take_masked(0, np.zeros(50, np.uint64))
    with pytest.raises(Refused, match="sent 49 masked numbers, and others 50"):
        part.take_masked(1, np.zeros(49, np.uint64))
    with pytest.raises(Refused, match="survivors that is not valid"):
        collected("masked").take_signature(1, bytes(132))
    with pytest.raises(Refused, match="one share for each"):
        collected("agree").take_opened(1, {1: bytes(66)})
    with pytest.raises(Refused, match="share that is none"):
        collected("agree").take_opened(1, dict.fromkeys(range(4), b"\xff" * 66))


@pytest.mark.parametrize("left", [True, False])
def test_a_wrong_share_spoils_no_sum_without_an_error(left: bool) -> None:
    one = Sum(vectors(range(5)), 3, {"masked": [4]} if left else {}).until("agree")
    signatures = one.collector.close_signatures()
    for k in sorted(one.there):
        opened = one.nodes[k].opened(signatures, verify)
        about = 4 if left else 2
        one.collector.take_opened(k, opened | ({about: flipped(opened[about])} if k == 1 else {}))
    with pytest.raises(SecureError, match=f"shares of client {4 if left else 2} do not belong together"):
        one.collector.total()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "not two tensors"),
        ((torch.zeros(2),), "not two tensors"),
        ((torch.zeros(2), torch.zeros(2, 3, dtype=torch.uint8)), "of torch.float32"),
        ((torch.tensor([0, 1]), torch.zeros(2, 3)), "of torch.int64 and torch.float32"),
        ((torch.tensor([0, 1]), torch.zeros(2, 4, dtype=torch.uint8)), r"shapes \(2,\) and \(2, 4\)"),
        ((torch.tensor([[0, 1]]), torch.zeros(2, 3, dtype=torch.uint8)), "shapes"),
        ((torch.tensor([0, 0]), torch.zeros(2, 3, dtype=torch.uint8)), "different"),
        ((torch.tensor([1, 0]), torch.zeros(2, 3, dtype=torch.uint8)), "different"),
        ((torch.tensor([-1, 0]), torch.zeros(2, 3, dtype=torch.uint8)), "different"),
    ],
)
def test_rows_are_checked(content: Any, said: str) -> None:
    with pytest.raises(Refused, match=said):
        read_rows(content, 3, "keys")


def test_rows_go_there_and_back() -> None:
    rows = {5: b"abc", 0: b"xyz", 3: b"123"}
    assert read_rows(pack_rows(rows, 3), 3, "keys") == rows
    assert read_rows(pack_rows({}, 3), 3, "keys") == {}


def test_a_participant_shows_no_secret() -> None:
    node = Sum(vectors(range(3)), 2).until("shares").nodes[0]
    text = repr(node)
    for secret in (node.mask_key, node.share_key, node.seed, node.own):
        assert secret.hex() not in text and repr(secret) not in text
    assert json.loads(node.to_json())["seed"] == node.seed.hex()


# --- parts ----------------------------------------------------------------------------------------------------------


@given(st.binary(min_size=32, max_size=32), st.integers(1, 9), st.data())
def test_any_threshold_of_the_shares_recovers_a_secret(secret: bytes, threshold: int, data: st.DataObject) -> None:
    points = data.draw(st.lists(st.integers(1, 1 << 20), min_size=threshold, max_size=12, unique=True))
    shares = fields.split(secret, threshold, points)
    chosen = data.draw(st.permutations(points))[:threshold]
    assert fields.recover({p: shares[p] for p in chosen}, fields.weights_at_zero(chosen)) == secret


def test_fewer_shares_than_the_threshold_tell_nothing() -> None:
    """For every other secret there is a polynomial through the same two of three shares."""
    shares = fields.split(b"\x07" * 32, 3, [1, 2, 3])
    a, b = fields.element(shares[1]), fields.element(shares[2])
    other = int.from_bytes(b"\x09" * 32 + hashlib.sha256(b"\x09" * 32).digest(), "big")
    third = (3 * b - 3 * a + other) % fields.PRIME  # the value at 3 of the parabola through (0, other), (1, a), (2, b)
    found = {1: shares[1], 2: shares[2], 3: third.to_bytes(fields.SHARE, "big")}
    assert fields.recover(found, fields.weights_at_zero([1, 2, 3])) == b"\x09" * 32


@pytest.mark.parametrize("points", [[1, 1, 2], [0, 1, 2], [-1, 1, 2], [fields.PRIME, 1, 2]])
def test_points_of_shares_are_checked(points: list[int]) -> None:
    with pytest.raises(ValueError, match="points"):
        fields.split(bytes(32), 2, points)


def test_shares_of_no_secret_are_refused() -> None:
    weights = fields.weights_at_zero([1, 2])
    with pytest.raises(ValueError, match="one secret"):
        fields.recover({1: b"\x01" + bytes(65), 2: bytes(66)}, weights)
    for share in (b"\xff" * 66, bytes(65), fields.PRIME.to_bytes(66, "big")):
        with pytest.raises(ValueError, match="not a share"):
            fields.recover({1: share, 2: bytes(66)}, weights)
    with pytest.raises(ValueError, match="points"):
        fields.recover({1: bytes(66)}, weights)


def test_the_masks_are_those_of_chacha20() -> None:
    """The keystream of RFC 8439, A.1, test vector 1: key 0, nonce 0, counter 0."""
    vector = np.zeros(2, np.uint64)
    masks.add_masks(vector, [bytes(32)], ())
    assert vector.tobytes().hex() == "76b8e0ada0f13d90405d6ae55386bd28"
    masks.add_masks(vector, (), [bytes(32)])
    assert not vector.any()


def test_a_long_mask_is_one_stream() -> None:
    n = 2 * masks.BLOCK + 5
    long, short = np.zeros(n, np.uint64), np.zeros(7, np.uint64)
    for vector in (long, short):
        masks.add_masks(vector, [b"k" * 32], ())
    np.testing.assert_array_equal(long[:7], short)
    assert len(np.unique(long)) == n


@pytest.mark.parametrize("point", LOW_ORDER)
def test_points_of_low_order_are_unsafe(point: str) -> None:
    assert not masks.is_safe(bytes.fromhex(point))
    with pytest.raises(ValueError):
        masks.agreed(b"k" * 32, bytes.fromhex(point), b"", b"")


def test_keys_depend_on_their_purpose() -> None:
    a, b = secrets.token_bytes(32), secrets.token_bytes(32)
    one = masks.agreed(a, masks.public_of(b), b"salt", b"purpose")
    assert one == masks.agreed(b, masks.public_of(a), b"salt", b"purpose")
    assert (
        len(
            {
                one,
                masks.agreed(a, masks.public_of(b), b"", b"purpose"),
                masks.agreed(a, masks.public_of(b), b"salt", b""),
            }
        )
        == 3
    )


@given(st.lists(st.lists(st.floats(-1e5, 1e5), min_size=3, max_size=3), min_size=1, max_size=20), st.integers(8, 40))
def test_a_sum_of_fixed_point_numbers_is_within_its_rounding(rows: list[list[float]], bits: int) -> None:
    total = np.zeros(3, np.uint64)
    for row in rows:
        total += fixedpoint.encoded(np.array(row), bits, len(rows))
    exact = np.array([_exact_sum(column) for column in zip(*rows, strict=True)])
    assert np.abs(fixedpoint.decoded(total, bits) - exact).max() <= len(rows) * 2.0 ** -(bits + 1) + 1e-9


def _exact_sum(values: Iterable[float]) -> float:
    return float(sum(map(Fraction, values), Fraction(0)))


def test_numbers_outside_the_range_are_an_error() -> None:
    limit = 2.0**31 / 64
    fixedpoint.encoded(np.array([limit * 0.999, -limit * 0.999]), 32, 64)
    for value in (limit, -limit, 1e30):
        with pytest.raises(FedstrataError, match=r"64 nodes with federation.bits = 32 .* below 3.36e\+07"):
            fixedpoint.encoded(np.array([0.0, value]), 32, 64)
    for value in (np.nan, np.inf):
        with pytest.raises(fixedpoint.NotFinite):
            fixedpoint.encoded(np.array([value]), 32, 2)


def test_the_largest_numbers_do_not_overflow() -> None:
    terms = 3
    for sign_of in (1.0, -1.0):
        value = np.array([sign_of * (fixedpoint.largest(terms) - 1024.0)])
        total = sum((fixedpoint.encoded(value, 0, terms) for _ in range(terms)), np.zeros(1, np.uint64))
        assert fixedpoint.decoded(total, 0)[0] == pytest.approx(3 * value[0], rel=1e-15)
