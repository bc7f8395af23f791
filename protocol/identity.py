"""Identities: Ed25519 keys, their signatures, their libp2p peer ids and the key file that p2pd reads.

Records hold public keys as 32 raw bytes; the text form (`12D3KooW...`) is only for people and addresses.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from tscale.protocol.errors import BadInput
from tscale.protocol.hashing import digest

PUBLIC_BYTES = 32
SIGNATURE_BYTES = 64
SECRET_BYTES = 32
MAX_KEY_FILE_BYTES = 256

_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_SIGN_PREFIX = b"tscale-signature:"
# protobuf of libp2p's keys: field 1 (type) = 1 (Ed25519), field 2 (data) of 32, 64 or 96 bytes
_PUBLIC_HEAD = bytes.fromhex("08011220")
_SECRET_HEAD_64 = bytes.fromhex("08011240")
_SECRET_HEAD_96 = bytes.fromhex("08011260")
# multihash: code 0 (identity), 36 bytes
_IDENTITY_HASH_HEAD = bytes.fromhex("0024")
_PEER_ID_CHARS = 52


class Identity:
    """A private Ed25519 key. Build it with `from_secret` (32 random bytes) or `parse_key_file`."""

    __slots__ = ("_key", "_secret", "peer_id", "public")

    def __init__(self, secret: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        self._secret = secret
        self.public: bytes = self._key.public_key().public_bytes_raw()
        self.peer_id: str = peer_id(self.public)

    @classmethod
    def from_secret(cls, secret: bytes) -> Identity:
        """The identity of 32 secret bytes (the Ed25519 seed). Raises BadInput for another length."""
        if len(secret) != SECRET_BYTES:
            raise BadInput(f"an Ed25519 secret has 32 bytes, not {len(secret)}")
        return cls(bytes(secret))

    def sign(self, domain: str, body: bytes) -> bytes:
        """64 bytes: the signature of `body` in `domain`."""
        return self._key.sign(signed_message(domain, body))

    def key_file(self) -> bytes:
        """The bytes of the key file: libp2p's protobuf, as p2pd reads it (secret and public key, 68 bytes)."""
        return _SECRET_HEAD_64 + self._secret + self.public

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"


def signed_message(domain: str, body: bytes) -> bytes:
    """What Ed25519 signs: a fixed prefix and the digest of `body` in the domain `sign/<domain>`."""
    return _SIGN_PREFIX + digest("sign/" + domain, body)


def verify(public: bytes, domain: str, body: bytes, signature: bytes) -> bool:
    """Whether `signature` is `public`'s over `body` in `domain`. Never raises for wrong lengths or points."""
    if len(public) != PUBLIC_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, signed_message(domain, body))
    except (InvalidSignature, ValueError):
        return False
    return True


def parse_key_file(data: bytes) -> Identity:
    """The identity in a key file (libp2p protobuf, Ed25519, 64 or 96 bytes of data). Raises BadInput otherwise."""
    if len(data) > MAX_KEY_FILE_BYTES:
        raise BadInput("the key file is too long for an Ed25519 key: give the identity.key of a node")
    secret, rest = data[4 : 4 + SECRET_BYTES], data[4 + SECRET_BYTES :]
    lengths_ok = (data[:4] == _SECRET_HEAD_64 and len(rest) == 32) or (data[:4] == _SECRET_HEAD_96 and len(rest) == 64)
    if not lengths_ok:
        raise BadInput("the key file does not hold an Ed25519 key in libp2p's format: restore it or create a new one")
    identity = Identity(bytes(secret))
    if rest != identity.public * (len(rest) // PUBLIC_BYTES):
        raise BadInput("the key file is damaged, its public key is not the one of its secret: restore it from a backup")
    return identity


def peer_id(public: bytes) -> str:
    """libp2p's text id of a public key: base58 of the identity multihash of its protobuf (`12D3KooW...`)."""
    return _base58_encode(_IDENTITY_HASH_HEAD + _PUBLIC_HEAD + public)


def find_public(text: str) -> bytes | None:
    """The public key in a peer id, or None when the text is not the id of an Ed25519 key."""
    if len(text) != _PEER_ID_CHARS:
        return None
    raw = _base58_decode(text, len(_IDENTITY_HASH_HEAD) + len(_PUBLIC_HEAD) + PUBLIC_BYTES)
    head = _IDENTITY_HASH_HEAD + _PUBLIC_HEAD
    if raw is None or not raw.startswith(head):
        return None
    public = raw[len(head) :]
    return public if peer_id(public) == text else None


def public_from_peer_id(text: str) -> bytes:
    """The 32-byte public key in a peer id. Raises BadInput when it is not the id of an Ed25519 key."""
    public = find_public(text)
    if public is None:
        raise BadInput(f"{text[:64]!r} is not a peer id (12D3KooW... of 52 characters): copy it again in full")
    return public


def _base58_encode(raw: bytes) -> str:
    number = int.from_bytes(raw, "big")
    digits: list[str] = []
    while number:
        number, rest = divmod(number, 58)
        digits.append(_BASE58[rest])
    zeros = len(raw) - len(raw.lstrip(b"\0"))
    return _BASE58[0] * zeros + "".join(reversed(digits))


def _base58_decode(text: str, size_bytes: int) -> bytes | None:
    number = 0
    for char in text:
        value = _BASE58.find(char)
        if value < 0:
            return None
        number = number * 58 + value
    if number.bit_length() > 8 * size_bytes:
        return None
    return number.to_bytes(size_bytes, "big")
