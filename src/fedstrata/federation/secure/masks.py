"""Masks: secrets that two nodes agree on by X25519 and HKDF, expanded by ChaCha20 to whole numbers modulo 2^64."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY, TAG = 32, 16
"""The bytes of a key, and by how many an encrypted message is longer than the plain one."""

BLOCK = 1 << 16
"""How many entries of a mask are made at once: they stay in the processor's cache."""


def public_of(private: bytes) -> bytes:
    """Return the public key of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agreed(private: bytes, public: bytes, salt: bytes, purpose: bytes) -> bytes:
    """Return the secret that the owners of two keys share for a purpose; raise ValueError for an unsafe public key.

    A point of low order would make the secret known to everybody.
    """
    shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    return derived(shared, salt, purpose)


def is_safe(public: bytes) -> bool:
    """Whether a public key is a point that secrets may be agreed with: none of low order."""
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        return False
    return True


def derived(secret: bytes, salt: bytes, purpose: bytes) -> bytes:
    """Return the key that a secret gives for a purpose (HKDF with SHA-256)."""
    return HKDF(hashes.SHA256(), KEY, salt, purpose).derive(secret)


def sealed(key: bytes, content: bytes, about: bytes) -> bytes:
    """Encrypt a message (ChaCha20-Poly1305) with a key that is used for no other one; ``about`` is authenticated."""
    return ChaCha20Poly1305(key).encrypt(bytes(12), content, about)


def unsealed(key: bytes, content: bytes, about: bytes) -> bytes:
    """Decrypt a message of :func:`sealed`; raises cryptography's InvalidTag if anything about it is different."""
    return ChaCha20Poly1305(key).decrypt(bytes(12), content, about)


def add_masks(vector: np.ndarray, plus: Iterable[bytes], minus: Iterable[bytes]) -> None:
    """Add masks to a vector of uint64 in place, modulo 2^64, and subtract others; each is that of a key used once."""
    for keys, subtract in ((plus, False), (minus, True)):
        for key in keys:
            _add_mask(vector, key, subtract)


def _add_mask(vector: np.ndarray, key: bytes, subtract: bool) -> None:
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    zeros, made = bytes(8 * BLOCK), bytearray(8 * BLOCK)
    numbers = np.frombuffer(made, dtype="<u8")
    combine = np.subtract if subtract else np.add
    for start in range(0, len(vector), BLOCK):
        part = vector[start : start + BLOCK]
        stream.update_into(zeros[: 8 * len(part)] if len(part) < BLOCK else zeros, made)
        combine(part, numbers[: len(part)], out=part)
