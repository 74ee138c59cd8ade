"""The server's side of a secure sum: it passes messages on, adds masked vectors, and takes the masks off the sum."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedstrata.federation.secure import fields, masks
from fedstrata.federation.secure.messages import (
    Advert,
    Rows,
    SecureError,
    Session,
    purpose,
    survivors_signed,
    transcript,
)
from fedstrata.federation.secure.participant import Verify, pair_mask
from fedstrata.federation.wire import Refused


class TooFew(SecureError):
    """Fewer nodes than the threshold are left, so the sum cannot be had."""


class Collector:
    """One sum. Call the methods in their order; each takes what one client sent, and raises Refused for a bad message.

    about:     what the vectors answer, as the nodes were asked.
    adverts:   the public keys of those who take part: U1.
    sealed:    the encrypted shares that each sent, by receiver: its keys are U2.
    survivors: those whose masked vectors are in the sum: U3.
    signed:    the signatures of the survivors.
    """

    def __init__(self, session: Session, verify: Verify, about: bytes = b"") -> None:
        self.session, self._verify, self._about = session, verify, about
        self.adverts: dict[int, Advert] = {}
        self.sealed: dict[int, Rows] = {}
        self.survivors: tuple[int, ...] = ()
        self.signed: Rows = {}
        self._masked: np.ndarray | None = None
        self._arrived: list[int] = []
        self._opened: dict[int, Rows] = {}
        self._bound = b""

    def take_advert(self, client: int, advert: Advert) -> None:
        """Take the keys of a client."""
        if not self._verify(client, advert.signature, advert.signed(self.session, client)):
            raise Refused("forged", "sent keys for a secure sum without a valid signature")
        if not masks.is_safe(advert.mask_key) or not masks.is_safe(advert.share_key):
            raise Refused("type", "sent a key for a secure sum that is a point of low order")
        known = {key for other in self.adverts.values() for key in (other.mask_key, other.share_key)}
        if {advert.mask_key, advert.share_key} & known or advert.mask_key == advert.share_key:
            raise Refused("type", "sent a key for a secure sum that is not new")
        self.adverts[client] = advert

    def close_adverts(self) -> None:
        """Everybody who sends keys has done so."""
        self._enough(self.adverts, "sent keys")
        self._bound = transcript(self.session, self.adverts)

    def take_shares(self, client: int, sealed: Rows) -> None:
        """Take a client's encrypted shares."""
        if client not in self.adverts or set(sealed) != set(self.adverts) - {client}:
            raise Refused("type", "did not send one share for each of the other nodes")
        self.sealed[client] = sealed

    def inbox_of(self, client: int) -> Rows:
        """Return the encrypted shares for a client, once all have been taken."""
        self._enough(self.sealed, "sent shares")
        return {sender: rows[client] for sender, rows in self.sealed.items() if sender != client}

    def take_masked(self, client: int, vector: np.ndarray) -> None:
        """Add a client's masked vector to the sum; it is not kept."""
        if client not in self.sealed or client in self._arrived:
            raise Refused("type", "sent a masked vector that was not asked for")
        if vector.dtype != np.uint64 or vector.ndim != 1:
            raise Refused("type", f"sent a masked vector of {vector.dtype} with {vector.ndim} axes")
        if self._masked is None:
            self._masked = vector.copy()
        elif self._masked.shape != vector.shape:
            raise Refused("shape", f"sent {len(vector)} masked numbers, and others {len(self._masked)}")
        else:
            self._masked += vector
        self._arrived.append(client)

    def close_masked(self) -> tuple[int, ...]:
        """Everybody who sends a masked vector has done so; return the survivors."""
        self._enough(self._arrived, "sent masked vectors")
        self.survivors = tuple(sorted(self._arrived))
        return self.survivors

    def take_signature(self, client: int, signature: bytes) -> None:
        """Take a survivor's signature of the set of survivors."""
        if client not in self.survivors or not self._verify(client, signature, self._to_sign):
            raise Refused("forged", "sent a signature of the survivors that is not valid")
        self.signed[client] = signature

    def close_signatures(self) -> Rows:
        """Every survivor that signs has done so; return the signatures."""
        self._enough(self.signed, "signed the set of survivors")
        return dict(self.signed)

    def take_opened(self, client: int, shares: Rows) -> None:
        """Take a survivor's shares: of the own masks of survivors, and of the pairwise masks of the others."""
        if client not in self.signed or set(shares) != set(self.sealed):
            raise Refused("type", "did not send one share for each node of the secure sum")
        try:
            for share in shares.values():
                fields.element(share)
        except ValueError:
            raise Refused("type", "sent a share that is none") from None
        self._opened[client] = shares

    def total(self) -> np.ndarray:
        """Return the sum of the survivors' vectors, uint64; the collector cannot be used any more."""
        self._enough(self._opened, "opened their shares")
        holders = sorted(self._opened)[: self.session.threshold]
        weights = fields.weights_at_zero(holder + 1 for holder in holders)
        total, self._masked = self._masked, None
        assert total is not None
        for client in sorted(self.sealed):
            secret = self._secret_of(client, holders, weights)
            if client in self.survivors:
                own = masks.derived(secret, self._bound, purpose(b"own mask", client))
                masks.add_masks(total, (), [own])
            else:
                self._take_off_pairs(total, client, secret)
        return total

    def _secret_of(self, client: int, holders: list[int], weights: Mapping[int, int]) -> bytes:
        shares = {holder + 1: self._opened[holder][client] for holder in holders}
        try:
            secret = fields.recover(shares, weights)
        except ValueError:
            secret = b""
        kept = client in self.survivors
        if not secret or not (kept or masks.public_of(secret) == self.adverts[client].mask_key):
            raise SecureError(
                f"The shares of client {client} do not belong together: a node sent a wrong one. The sum of this "
                "exchange is lost."
            )
        return secret

    def _take_off_pairs(self, total: np.ndarray, client: int, private: bytes) -> None:
        """Take off the masks that survivors share with a client whose vector did not arrive."""
        adverts, salt = self.adverts, self._bound + self._about
        keys = {k: pair_mask(private, adverts[k].mask_key, salt, client, k) for k in self.survivors}
        added = [key for peer, key in keys.items() if peer < client]
        masks.add_masks(total, [key for peer, key in keys.items() if peer > client], added)

    @property
    def _to_sign(self) -> bytes:
        return survivors_signed(self._bound, self.survivors)

    def _enough(self, clients: object, what: str) -> None:
        number = len(clients)  # type: ignore[arg-type]
        if number < self.session.threshold:
            raise TooFew(
                f"Only {number} nodes {what} for a secure sum, fewer than its threshold, {self.session.threshold}."
            )
