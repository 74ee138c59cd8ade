"""The cost of secure sums: bytes and processor seconds per exchange, beside the work itself.

    python bench/secure.py [--nodes 4,16,64] [--entries 1000,100000,1000000] [--leave 0.1]

All nodes do the same, so the time of a node is measured on the first one; the masked vectors of the others are random
numbers if there are more than 100,000 entries, which takes the server as long. Otherwise the sum is checked. The last
column is the server's time if a share of the nodes leaves before its answer has arrived.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from fedstrata.federation.secure import fixedpoint
from fedstrata.federation.secure.collector import Collector
from fedstrata.federation.secure.fields import SHARE
from fedstrata.federation.secure.messages import ADVERT, SEALED, SIGNATURE, Session, usual_signature
from fedstrata.federation.secure.participant import Participant, Verify

T = TypeVar("T")

NUMBER = 8
"""The bytes of the number of a client, which precedes its row in a message."""

CHECKED = 100_000
"""Up to so many entries, all nodes mask their vectors, and the sum is checked."""


class Timer:
    """Adds up the processor seconds of calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, call: Callable[[], T]) -> T:
        """Return the result of a call."""
        begun = time.process_time()
        result = call()
        self.seconds += time.process_time() - begun
        return result


def one_sum(nodes: int, entries: int, leaving: int) -> tuple[float, float]:
    """Return the processor seconds of the first node, and of the server, for one sum."""
    private = [ec.generate_private_key(ec.SECP384R1()) for _ in range(nodes)]
    public = [key.public_key() for key in private]

    def signer(k: int) -> Callable[[bytes], bytes]:
        return lambda content: private[k].sign(content, ec.ECDSA(hashes.SHA256()))

    def verify(k: int, signature: bytes, content: bytes) -> bool:
        try:
            public[k].verify(usual_signature(signature), content, ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            return False
        return True

    def checks(k: int) -> Verify:
        return verify if k == 0 else lambda *_: True  # the time of the others is not measured

    session = Session("ab" * 16, 0, 0, 0, math.ceil(0.67 * nodes))
    first, others, server = Timer(), Timer(), Timer()
    timers = [first, *[others] * (nodes - 1)]
    collector = Collector(session, verify)
    people = [Participant(session, k) for k in range(nodes)]
    for k, node in enumerate(people):
        advert = timers[k](lambda node=node, k=k: node.advert(signer(k)))
        server(lambda k=k, advert=advert: collector.take_advert(k, advert))
    server(collector.close_adverts)
    adverts = dict(collector.adverts)
    for k, node in enumerate(people):
        sealed = timers[k](lambda node=node, k=k: node.shares(adverts, checks(k)))
        server(lambda k=k, sealed=sealed: collector.take_shares(k, sealed))
    random = np.random.default_rng(0)
    expected = np.zeros(entries)
    for k, node in list(enumerate(people))[: nodes - leaving]:
        values = random.standard_normal(entries)
        inbox = server(lambda k=k: collector.inbox_of(k))
        expected += values
        if k == 0 or entries <= CHECKED:
            masked = timers[k](
                lambda node=node, inbox=inbox, v=values: node.masked(inbox, fixedpoint.encoded(v, 32, nodes))
            )
        else:
            node.masked(inbox, np.zeros(1, np.uint64))
            masked = random.integers(0, 1 << 64, entries, dtype=np.uint64)
        server(lambda k=k, masked=masked: collector.take_masked(k, masked))
    survivors = server(collector.close_masked)
    for k in survivors:
        signature = timers[k](lambda k=k: people[k].agree(survivors, signer(k)))
        server(lambda k=k, signature=signature: collector.take_signature(k, signature))
    signatures = server(collector.close_signatures)
    for k in survivors:
        shares = timers[k](lambda k=k: people[k].opened(signatures, checks(k)))
        server(lambda k=k, shares=shares: collector.take_opened(k, shares))
    total = fixedpoint.decoded(server(collector.total), 32)
    assert entries > CHECKED or np.abs(total - expected).max() <= nodes * 2.0**-32
    return first.seconds, server.seconds


def bytes_of(nodes: int, entries: int) -> tuple[int, int]:
    """Return the bytes of arrays that a node sends, and receives beside the message of the exchange."""
    up = (NUMBER + ADVERT) + (nodes - 1) * (NUMBER + SEALED) + 8 * (2 + entries)
    up += NUMBER + SIGNATURE + nodes * (NUMBER + SHARE)
    down = nodes * (NUMBER + ADVERT) + (nodes - 1) * (NUMBER + SEALED) + NUMBER * nodes + nodes * (NUMBER + SIGNATURE)
    return up, down


def numbers(text: str) -> list[int]:
    """Return whole numbers separated by commas."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Print a table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--nodes", type=numbers, default=[4, 16, 64])
    options.add_argument("--entries", type=numbers, default=[1_000, 100_000, 1_000_000])
    options.add_argument("--leave", type=float, default=0.1)
    chosen = options.parse_args()
    one_sum(4, 10, 0)
    print("nodes    entries   up, bytes   plain up   more down   node, s   server, s   server if some leave, s")
    for nodes in chosen.nodes:
        for entries in chosen.entries:
            up, down = bytes_of(nodes, entries)
            node, server = one_sum(nodes, entries, 0)
            _, left = one_sum(nodes, entries, math.ceil(chosen.leave * nodes))
            sizes = f"{nodes:5d} {entries:10,d} {up:11,d} {4 * entries:10,d} {down:11,d}"
            print(f"{sizes} {node:9.3f} {server:11.3f} {left:24.3f}", flush=True)


if __name__ == "__main__":
    main()
