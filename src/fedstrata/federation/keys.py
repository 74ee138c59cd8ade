"""Keys and certificates: a node proves its identity with its key, the server with its certificate."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedstrata.core.errors import InputError
from fedstrata.core.files import naming

SERVER_DAYS, AUTHORITY_DAYS = 397, 3650
"""How many days certificates are valid. Every node has a copy of the authority's certificate, so it must last."""

_PEM = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()


def make_key(path: Path) -> str:
    """Write a node's private key to ``path`` and its public key to ``path.pub``; return the public key."""
    key = ec.generate_private_key(ec.SECP384R1())
    kinds = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    _write(path, key.private_bytes(*kinds), private=True)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write(path.with_name(path.name + ".pub"), public + b"\n")
    return public.decode()


def make_certificates(folder: Path, hosts: Sequence[str]) -> None:
    """Write a certificate authority (ca.crt, ca.key) and a server certificate for these names and addresses.

    ca.crt goes to every node, server.pem and server.key stay on the server, and ca.key belongs in a safe place.
    """
    folder.mkdir(parents=True, exist_ok=True)
    authority = ec.generate_private_key(ec.SECP256R1())
    root = _certificate("fedstrata CA", "fedstrata CA", authority.public_key(), authority, ())
    _write(folder / "ca.key", authority.private_bytes(*_PEM), private=True)
    _write(folder / "ca.crt", root.public_bytes(serialization.Encoding.PEM))
    _write_server(folder, authority, hosts)


def renew_certificate(folder: Path, ca_key: Path) -> datetime.datetime:
    """Replace the server's certificate with one for the same names, and keep the old one; return the expiry date."""
    try:
        authority = serialization.load_pem_private_key(ca_key.read_bytes(), None)
        root = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        old = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
        names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, UnsupportedAlgorithm, x509.ExtensionNotFound) as error:
        raise InputError(f"The certificate in {folder} cannot be renewed with the key {ca_key}: {error}") from None
    if not isinstance(authority, ec.EllipticCurvePrivateKey) or authority.public_key() != root.public_key():
        raise InputError(f"The key {ca_key} does not belong to the authority {folder / 'ca.crt'}.")
    for name in ("server.key", "server.pem"):
        (folder / name).replace(folder / f"{name}.old")
    return _write_server(folder, authority, [str(name.value) for name in names])


def _write_server(folder: Path, authority: ec.EllipticCurvePrivateKey, hosts: Sequence[str]) -> datetime.datetime:
    server = ec.generate_private_key(ec.SECP256R1())
    leaf = _certificate(hosts[0], "fedstrata CA", server.public_key(), authority, hosts)
    _write(folder / "server.key", server.private_bytes(*_PEM), private=True)
    _write(folder / "server.pem", leaf.public_bytes(serialization.Encoding.PEM))
    return leaf.not_valid_after_utc


def private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a node's private key."""
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"The node's key {path} cannot be read: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError(
            f"The node's key {path} must be an elliptic-curve key. Make one with 'fedstrata federate key'."
        )
    return key


def sign(path: Path, content: bytes) -> bytes:
    """Sign ``content`` with the private key in a file."""
    return private_key(path).sign(content, ec.ECDSA(hashes.SHA256()))


def is_signed(public: str, signature: bytes, content: bytes) -> bool:
    """Return whether the owner of this public key signed ``content``."""
    try:
        _read_public(public).verify(signature, content, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def canonical(public: str | bytes) -> str:
    """Return a public key, given as OpenSSH or PEM, in the form in which keys are compared."""
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    return _read_public(public).public_bytes(*form).decode()


def check_distinct(public: Mapping[str, str]) -> None:
    """Raise if two nodes have the same public key; keys are by name, in canonical form."""
    owners: dict[str, str] = {}
    for name, key in public.items():
        if key in owners:
            raise InputError(
                f"The nodes {owners[key]} and {name} have the same public key. Each needs its own: make one with "
                "'fedstrata federate key'."
            )
        owners[key] = name


def _read_public(public: str | bytes) -> ec.EllipticCurvePublicKey:
    content = public.encode() if isinstance(public, str) else public
    try:
        if content.lstrip().startswith(b"-----BEGIN"):
            key = serialization.load_pem_public_key(content)
        else:
            words = content.split()
            key = serialization.load_ssh_public_key(b" ".join(words[:2]))  # without the comment
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(
            f"A node's public key cannot be read: {error}. It is the line in the node's .pub file."
        ) from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise InputError("A node's public key must be an elliptic-curve key. Make one with 'fedstrata federate key'.")
    return key


def _certificate(
    subject: str,
    issuer: str,
    public: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str],
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    authority = not hosts
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=AUTHORITY_DAYS if authority else SERVER_DAYS))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(_usage(authority), critical=True)
    )
    if hosts:
        names = x509.SubjectAlternativeName([_host(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return builder.sign(signer, hashes.SHA256())


def _usage(authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(path: Path, content: bytes, private: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644)
    with naming(path), os.fdopen(handle, "wb") as file:
        file.write(content)
