"""The node's side of a secure sum. A participant answers each kind of message once, in their order."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from cryptography.exceptions import InvalidTag

from fedstrata.federation.secure import fields, masks
from fedstrata.federation.secure.messages import (
    Advert,
    Rows,
    SecureError,
    Session,
    fixed_signature,
    purpose,
    survivors_signed,
    transcript,
)

Sign = Callable[[bytes], bytes]
"""Signs some bytes with the node's own key."""

Verify = Callable[[int, bytes, bytes], bool]
"""Whether the node of a client signed: the client, the signature as it is sent, and what was signed."""

Phase = Literal["keys", "shares", "masked", "agree", "open"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""The kinds of messages, in their order."""


@dataclass
class Participant:
    """A node in one session. What it holds must never leave the node.

    phase:     the last message that it answered.
    mask_key:  the private key of the masks that it shares with each peer.
    share_key: the private key for the encryption of shares.
    seed:      the seed of its own mask.
    adverts:   the public keys of everybody who takes part: U1.
    own:       its shares of its own two secrets.
    inbox:     the shares that each peer has sent it, still encrypted: those of U2 except its own.
    survivors: the set that it has signed: U3.
    """

    session: Session
    client: int
    phase: Phase = "keys"
    mask_key: bytes = field(default_factory=lambda: os.urandom(masks.KEY), repr=False)
    share_key: bytes = field(default_factory=lambda: os.urandom(masks.KEY), repr=False)
    seed: bytes = field(default_factory=lambda: os.urandom(fields.SECRET), repr=False)
    adverts: dict[int, Advert] = field(default_factory=dict)
    own: bytes = field(default=b"", repr=False)
    inbox: Rows = field(default_factory=dict, repr=False)
    survivors: tuple[int, ...] = ()

    def advert(self, sign: Sign) -> Advert:
        """Return the public keys, signed."""
        keys = Advert(masks.public_of(self.mask_key), masks.public_of(self.share_key), b"")
        return dataclasses.replace(keys, signature=fixed_signature(sign(keys.signed(self.session, self.client))))

    def shares(self, adverts: Mapping[int, Advert], verify: Verify) -> Rows:
        """Check everybody's keys; return the shares of the own secrets for each peer, encrypted for it."""
        self._next("shares")
        self._check_adverts(adverts, verify)
        self.adverts = dict(adverts)
        points = [client + 1 for client in sorted(adverts)]
        of_key, of_seed = (fields.split(s, self.session.threshold, points) for s in (self.mask_key, self.seed))
        both = {client: of_key[client + 1] + of_seed[client + 1] for client in adverts}
        self.own = both.pop(self.client)
        return {
            peer: masks.sealed(self._key_of(peer, self.client, peer), content, self._bound)
            for peer, content in both.items()
        }

    def masked(self, inbox: Rows, vector: np.ndarray, about: bytes = b"") -> np.ndarray:
        """Take the encrypted shares of the peers; return the vector, uint64, under the own mask and those of peers.

        about: what the vector answers. The masks of two nodes cancel only if they were asked the same.
        """
        self._next("masked")
        self._check_inbox(inbox)
        self.inbox = dict(inbox)
        salt = self._bound + about
        public = {peer: self.adverts[peer].mask_key for peer in inbox}
        keys = {peer: pair_mask(self.mask_key, public[peer], salt, self.client, peer) for peer in inbox}
        out = vector.astype(np.uint64, copy=True)
        own = masks.derived(self.seed, self._bound, purpose(b"own mask", self.client))
        plus = [own, *(key for peer, key in keys.items() if peer > self.client)]
        masks.add_masks(out, plus, [key for peer, key in keys.items() if peer < self.client])
        return out

    def agree(self, survivors: Collection[int], sign: Sign) -> bytes:
        """Sign the set of those whose masked vectors arrived, once."""
        self._next("agree")
        chosen = set(survivors)
        if self.client not in chosen or not chosen <= {self.client, *self.inbox}:
            raise SecureError("The server named survivors of the secure sum that did not all take part in it.")
        self._enough(len(chosen), "survivors")
        self.survivors = tuple(sorted(chosen))
        return fixed_signature(sign(survivors_signed(self._bound, self.survivors)))

    def opened(self, signatures: Rows, verify: Verify) -> Rows:
        """Return a share for everybody in U2: of the own mask of a survivor, and of the pairwise masks of the others.

        signatures: those of survivors, by which they agree with the same set of survivors.
        """
        self._next("open")
        content = survivors_signed(self._bound, self.survivors)
        for client, signature in signatures.items():
            if client not in self.survivors or not verify(client, signature, content):
                raise SecureError(f"The signature of the survivors by client {client} is not valid.")
        self._enough(len(signatures), "signatures of the survivors")
        return {peer: self._share_of(peer) for peer in sorted({self.client, *self.inbox})}

    # --- checks ---

    def expect(self, phase: str) -> None:
        """Raise if a message of this phase was answered already, or comes too early."""
        if phase not in PHASES or PHASES.index(phase) != PHASES.index(self.phase) + 1:
            raise SecureError(
                f"The server asked for {phase!r} of a secure sum after {self.phase!r}. A node answers each message of "
                f"a sum once, in the order {', '.join(PHASES)}."
            )

    def _next(self, phase: Phase) -> None:
        self.expect(phase)
        self.phase = phase

    def _enough(self, number: int, what: str) -> None:
        if number < self.session.threshold:
            raise SecureError(f"A secure sum needs {self.session.threshold} {what}. Got {number}.")

    def _check_adverts(self, adverts: Mapping[int, Advert], verify: Verify) -> None:
        threshold, own = self.session.threshold, adverts.get(self.client)
        if not len(adverts) / 2 < threshold or threshold < 2:
            raise SecureError(
                f"The threshold of a secure sum must be more than half of its nodes, and at least 2. Got {threshold} "
                f"for {len(adverts)} nodes."
            )
        self._enough(len(adverts), "nodes")
        if own is None or (own.mask_key, own.share_key) != tuple(map(masks.public_of, (self.mask_key, self.share_key))):
            raise SecureError("The server passed on other keys than this node sent.")
        public = [key for advert in adverts.values() for key in (advert.mask_key, advert.share_key)]
        if len(set(public)) != len(public):
            raise SecureError("Two of the keys of a secure sum are the same.")
        for client, advert in adverts.items():
            if not verify(client, advert.signature, advert.signed(self.session, client)):
                raise SecureError(f"The keys of client {client} are not signed by its node.")
            if not masks.is_safe(advert.mask_key) or not masks.is_safe(advert.share_key):
                raise SecureError(f"A key of client {client} is a point of low order.")

    def _check_inbox(self, inbox: Rows) -> None:
        if not set(inbox) < set(self.adverts) or self.client in inbox:
            raise SecureError("The server passed on shares of nodes that do not take part in the secure sum.")
        self._enough(1 + len(inbox), "nodes")
        for peer, content in inbox.items():
            self._unsealed(peer, content)

    # --- secrets ---

    @property
    def _bound(self) -> bytes:
        return transcript(self.session, self.adverts)

    def _key_of(self, peer: int, sender: int, receiver: int) -> bytes:
        public = self.adverts[peer].share_key
        return masks.agreed(self.share_key, public, self._bound, purpose(b"share", sender, receiver))

    def _unsealed(self, peer: int, content: bytes) -> bytes:
        try:
            return masks.unsealed(self._key_of(peer, peer, self.client), content, self._bound)
        except InvalidTag:
            raise SecureError(f"The shares of client {peer} are not those that its node encrypted.") from None

    def _share_of(self, peer: int) -> bytes:
        both = self.own if peer == self.client else self._unsealed(peer, self.inbox[peer])
        return both[fields.SHARE :] if peer in self.survivors else both[: fields.SHARE]

    # --- between two messages ---

    def to_json(self) -> str:
        """Return the participant as text, for a file that only the node can read."""
        table = {
            "session": dataclasses.asdict(self.session),
            "client": self.client,
            "phase": self.phase,
            **{name: getattr(self, name).hex() for name in _SECRETS},
            "adverts": {str(client): advert.row.hex() for client, advert in self.adverts.items()},
            "inbox": {str(client): row.hex() for client, row in self.inbox.items()},
            "survivors": list(self.survivors),
        }
        return json.dumps(table)

    @staticmethod
    def from_json(text: str) -> Participant:
        """Return the participant of :meth:`to_json`."""
        table: dict[str, Any] = json.loads(text)
        return Participant(
            Session(**table["session"]),
            table["client"],
            table["phase"],
            **{name: bytes.fromhex(table[name]) for name in _SECRETS},
            adverts={int(client): Advert.of(bytes.fromhex(row)) for client, row in table["adverts"].items()},
            inbox={int(client): bytes.fromhex(row) for client, row in table["inbox"].items()},
            survivors=tuple(table["survivors"]),
        )


_SECRETS = ("mask_key", "share_key", "seed", "own")


def pair_mask(private: bytes, public: bytes, salt: bytes, client: int, peer: int) -> bytes:
    """Return the key of the mask that two clients share; the one with the smaller number adds it."""
    return masks.agreed(private, public, salt, purpose(b"pair mask", min(client, peer), max(client, peer)))
