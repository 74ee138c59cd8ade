"""Secure sums without a network: nodes and a server in this process, with faults on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from fedstrata.federation.secure.collector import Collector
from fedstrata.federation.secure.messages import Advert, Rows, Session, usual_signature
from fedstrata.federation.secure.participant import PHASES, Participant

KEYS = [ec.generate_private_key(ec.SECP256R1()) for _ in range(12)]


def sign(client: int, content: bytes) -> bytes:
    return KEYS[client].sign(content, ec.ECDSA(hashes.SHA256()))


def verify(client: int, signature: bytes, content: bytes) -> bool:
    try:
        KEYS[client].public_key().verify(usual_signature(signature), content, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def session(threshold: int, **changes: int) -> Session:
    return Session("ab" * 16, **{"round": 3, "exchange": 1, "attempt": 0, "threshold": threshold, **changes})


@dataclass
class Sum:
    """A sum of some clients' vectors; ``gone`` names for each phase the clients that never answer in it."""

    vectors: dict[int, np.ndarray]
    threshold: int
    gone: dict[str, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.session = session(self.threshold)
        self.collector = Collector(self.session, verify)
        self.nodes = {k: Participant(self.session, k) for k in self.vectors}
        self.there = set(self.vectors)

    def leave(self, phase: str) -> list[int]:
        """Let the clients leave that are gone from this phase on; return the others, as after a restart of each."""
        self.there -= set(self.gone.get(phase, ()))
        self.nodes = {k: Participant.from_json(node.to_json()) for k, node in self.nodes.items()}
        return sorted(self.there)

    def keys(self) -> None:
        for k in self.leave("keys"):
            self.collector.take_advert(k, self.nodes[k].advert(lambda content, k=k: sign(k, content)))
        self.collector.close_adverts()

    def shares(self) -> None:
        for k in self.leave("shares"):
            self.collector.take_shares(k, self.nodes[k].shares(self.collector.adverts, verify))

    def masked(self) -> None:
        for k in self.leave("masked"):
            self.collector.take_masked(k, self.nodes[k].masked(self.collector.inbox_of(k), self.vectors[k]))
        self.collector.close_masked()

    def agree(self) -> None:
        for k in self.leave("agree"):
            signed = self.nodes[k].agree(self.collector.survivors, lambda content, k=k: sign(k, content))
            self.collector.take_signature(k, signed)

    def open(self) -> None:
        signatures = self.collector.close_signatures()
        for k in self.leave("open"):
            self.collector.take_opened(k, self.nodes[k].opened(signatures, verify))

    def until(self, last: str) -> Sum:
        """Go through the phases up to one, included."""
        for phase in PHASES[: PHASES.index(last) + 1]:  # type: ignore[arg-type]
            getattr(self, phase)()
        return self

    def total(self) -> np.ndarray:
        return self.until("open").collector.total()

    def expected(self) -> np.ndarray:
        """The sum of the survivors' vectors, modulo 2^64."""
        out = np.zeros_like(next(iter(self.vectors.values())))
        for k in self.collector.survivors:
            out += self.vectors[k]
        return out


def vectors(clients: Sequence[int], entries: int = 50, seed: int = 0) -> dict[int, np.ndarray]:
    """A random vector of each client, over the whole range of the modulus."""
    generator = np.random.default_rng(seed)
    return {k: generator.integers(0, 1 << 64, entries, dtype=np.uint64) for k in clients}


Change = Callable[[Rows], Rows]


def flipped(row: bytes, place: int = -1) -> bytes:
    """A row with one bit changed."""
    out = bytearray(row)
    out[place] ^= 1
    return bytes(out)


def other_advert(advert: Advert, **changes: bytes) -> Advert:
    return Advert(
        **{"mask_key": advert.mask_key, "share_key": advert.share_key, "signature": advert.signature, **changes}
    )
