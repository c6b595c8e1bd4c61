"""Signatures of certificates: Ed25519 over `SHA256SUMS`, made and checked by the package `cryptography`.

SHA256SUMS.sig   the 64 bytes of the signature
SHA256SUMS.pub   the public key that belongs to it, as PEM

`openssl pkeyutl -verify -rawin -pubin -inkey SHA256SUMS.pub -in SHA256SUMS -sigfile SHA256SUMS.sig` checks the same.
The key in the folder does not identify the signer: only a key from another source does.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from conformance.errors import ReportError
from conformance.report.folder import CHECKSUMS, PUBLIC_KEY, SIGNATURE
from conformance.report.plain_file import read_plain, write_plain

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey


def sign(folder: Path, key_file: Path) -> str:
    """Sign the checksums in `folder` with the private key in `key_file` (PEM) and return the key's fingerprint.

    Raises:
        ReportError: `cryptography` is not installed, the file holds no Ed25519 key, or something cannot be written.

    """
    key = _private_key(key_file)
    write_plain(folder / SIGNATURE, key.sign(read_plain(folder / CHECKSUMS, follow=False)))
    write_plain(folder / PUBLIC_KEY, _pem(key.public_key()))
    return fingerprint(key.public_key())


def signer(folder: Path, trusted: Path | None) -> str:
    """Return the fingerprint of the key that signed the checksums in `folder`, nothing if they are not signed.

    Raises:
        ReportError: the signature is wrong, or is not by the `trusted` public key (PEM); `cryptography` is missing.

    """
    if not any((folder / name).exists() for name in (SIGNATURE, PUBLIC_KEY)):
        if trusted is not None:
            raise ReportError(f"{folder} is not signed, but a signature by {trusted} is asked for")
        return ""
    key = _public_key(folder / PUBLIC_KEY)
    if trusted is not None and (wanted := fingerprint(_public_key(trusted))) != fingerprint(key):
        raise ReportError(f"{folder} is signed by {fingerprint(key)}, not by {trusted}, which is {wanted}")
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(read_plain(folder / SIGNATURE, follow=False), read_plain(folder / CHECKSUMS, follow=False))
    except InvalidSignature as error:
        raise ReportError(f"the signature of {folder} is not by the key beside it, or of other checksums") from error
    return fingerprint(key)


def fingerprint(key: Ed25519PublicKey) -> str:
    """Return a short name of a public key, in the notation of ssh: SHA256 over its 32 bytes."""
    digest = hashlib.sha256(key.public_bytes_raw()).digest()
    return "ed25519 SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def _pem(key: Ed25519PublicKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _private_key(path: Path) -> Ed25519PrivateKey:
    _need_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(read_plain(path), None)
    except (ValueError, TypeError) as error:
        raise ReportError(
            f"{path} is no private key in PEM without a passphrase; make one with `openssl genpkey -algorithm ed25519`"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ReportError(f"{path} holds another kind of key than Ed25519")
    return key


def _public_key(path: Path) -> Ed25519PublicKey:
    _need_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(read_plain(path))
    except ValueError as error:
        raise ReportError(f"{path} is no public key in PEM; `openssl pkey -in KEY -pubout` gives one") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ReportError(f"{path} holds another kind of key than Ed25519")
    return key


def _need_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise ReportError(
            "signatures need the package cryptography: pip install 'ddp-conformance[signatures]'"
        ) from error
