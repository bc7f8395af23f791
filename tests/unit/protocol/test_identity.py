"""Keys, signatures, peer ids and the key file."""

from __future__ import annotations

import pytest

from tests.helpers.protocol_samples import ALICE, BOB
from tscale.protocol.errors import BadInput
from tscale.protocol.identity import (
    Identity,
    find_public,
    parse_key_file,
    peer_id,
    public_from_peer_id,
    verify,
)


def test_the_key_pair_is_ed25519() -> None:
    """RFC 8032, section 7.1, test 1."""
    secret = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    assert (
        Identity.from_secret(secret).public.hex() == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    )


def test_a_signature_holds_for_its_key_domain_and_body_only() -> None:
    signature = ALICE.sign("record/x", b"body")
    assert len(signature) == 64
    assert verify(ALICE.public, "record/x", b"body", signature)
    assert not verify(BOB.public, "record/x", b"body", signature)
    assert not verify(ALICE.public, "record/y", b"body", signature)
    assert not verify(ALICE.public, "record/x", b"bodY", signature)
    assert not verify(ALICE.public, "record/x", b"body", signature[:-1] + bytes([signature[-1] ^ 1]))


@pytest.mark.parametrize(("public", "signature"), [(b"", bytes(64)), (bytes(33), bytes(64)), (b"\xff" * 32, b"")])
def test_verify_never_raises(public: bytes, signature: bytes) -> None:
    assert not verify(public, "d", b"", signature)
    assert not verify(b"\xff" * 32, "d", b"", b"\xff" * 64)


def test_peer_id_is_libp2ps() -> None:
    """The vector of the libp2p peer id specification for an Ed25519 key."""
    public = bytes.fromhex("1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")
    assert peer_id(public) == "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"
    assert ALICE.peer_id == "12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"
    assert public_from_peer_id(ALICE.peer_id) == ALICE.public


@pytest.mark.parametrize(
    "text",
    [
        "",
        ALICE.peer_id[:-1],
        ALICE.peer_id + "1",
        ALICE.peer_id.replace("K", "0"),
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        "z" * 52,
        "1" * 52,
        "é" * 52,
    ],
)
def test_other_text_is_no_peer_id(text: str) -> None:
    assert find_public(text) is None
    with pytest.raises(BadInput, match="is not a peer id"):
        public_from_peer_id(text)


def test_the_key_file_is_libp2ps_protobuf() -> None:
    data = ALICE.key_file()
    assert data == bytes.fromhex("08011240") + bytes(range(32)) + ALICE.public
    assert parse_key_file(data).public == ALICE.public
    assert parse_key_file(bytes.fromhex("08011260") + bytes(range(32)) + ALICE.public * 2).public == ALICE.public


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "does not hold an Ed25519 key"),
        (b"-----BEGIN OPENSSH PRIVATE KEY-----\n", "does not hold an Ed25519 key"),
        (ALICE.key_file()[:-1], "does not hold an Ed25519 key"),
        (ALICE.key_file() + b"\n", "does not hold an Ed25519 key"),
        (bytes.fromhex("08001240") + ALICE.key_file()[4:], "does not hold an Ed25519 key"),
        (ALICE.key_file()[:36] + BOB.public, "is damaged"),
        (bytes.fromhex("08011260") + bytes(range(32)) + ALICE.public + BOB.public, "is damaged"),
        (bytes(10_000), "too long"),
    ],
)
def test_another_key_file_is_bad_input(data: bytes, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        parse_key_file(data)


def test_a_secret_has_32_bytes_and_is_never_shown() -> None:
    with pytest.raises(BadInput, match="not 31"):
        Identity.from_secret(bytes(31))
    assert repr(ALICE) == f"Identity({ALICE.peer_id})"
