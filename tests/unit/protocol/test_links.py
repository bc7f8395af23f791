"""Swarm links, and what a person is told about a wrong one."""

from __future__ import annotations

import pytest

from tests.helpers.protocol_samples import ALICE, BOB, SEED_ADDR, sample_link
from tscale.protocol.errors import BadInput
from tscale.protocol.links import SwarmLink, format_link, parse_link

ID = "ours-" + "a2" * 13
OTHER = f"/dns/seed.example/tcp/4001/p2p/{ALICE.peer_id}"


def test_a_link_is_readable_and_comes_back() -> None:
    assert format_link(SwarmLink(ID, (SEED_ADDR, OTHER))) == f"tscale://{ID}?seed={SEED_ADDR}&seed={OTHER}"
    for link in (SwarmLink(ID, ()), SwarmLink(ID, (SEED_ADDR,)), SwarmLink(ID, (SEED_ADDR, OTHER)), sample_link()):
        assert parse_link(format_link(link)) == link


def test_what_people_paste() -> None:
    assert parse_link(f"  tscale://{ID}?seed={SEED_ADDR}\n") == SwarmLink(ID, (SEED_ADDR,))
    assert parse_link(ID) == SwarmLink(ID, ())
    assert parse_link(f"{ID}?seed={SEED_ADDR}") == SwarmLink(ID, (SEED_ADDR,))
    assert parse_link(f"tscale://{ID}?seed={SEED_ADDR.replace('/', '%2F')}") == SwarmLink(ID, (SEED_ADDR,))
    assert parse_link(f"tscale://{ID}?seed={SEED_ADDR}&seed={SEED_ADDR}") == SwarmLink(ID, (SEED_ADDR,))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not a swarm id"),
        ("demo", "is not a swarm id"),
        (f"tscale://{ID[:-1]}", "is not a swarm id"),
        (f"tscale://{ID}/", "is not a swarm id"),
        (f"http://{ID}", "starts with tscale://"),
        (f"TSCALE://{ID}", "starts with tscale://"),
        (f"tscale://{ID}?seed={SEED_ADDR[:-4]}", "wrong peer id"),
        (f"tscale://{ID}?seed={SEED_ADDR}{OTHER}", "two addresses pasted as one"),
        (f"tscale://{ID}?seed={SEED_ADDR},{OTHER}", "two addresses pasted as one"),
        (f"tscale://{ID}tscale://{ID}", "two links pasted as one"),
        (f"tscale://{ID} tscale://{ID}", "spaces"),
        (f"tscale://{ID}?seed=203.0.113.5:4001", "not a multiaddr"),
        (f"tscale://{ID}?seed=/ip4/203.0.113.5/tcp/4001", "names no peer"),
        (f"tscale://{ID}?seed=/ip4/203.0.113.5/udp/4001/quic-v1/p2p/{BOB.peer_id}", "only TCP"),
        (f"tscale://{ID}?peer={SEED_ADDR}", "unknown part"),
        (f"tscale://{ID}?seed=%ff", "characters that no address has"),
        (f"tscale://{ID}?", ""),
        (f"tscale://{ID}?&", "unknown part"),
        ("tscale://" + "a" * 9000, "longer than 8192"),
        (
            f"tscale://{ID}?" + "&".join(f"seed=/ip4/1.2.3.4/tcp/{n}/p2p/{BOB.peer_id}" for n in range(1, 18)),
            "16 seeds",
        ),
        (f"tscale://é{ID}", "characters that no link has"),
        (f"tscale://{ID}\x00", "characters that no link has"),
    ],
)
def test_a_wrong_link_gets_one_clear_line(text: str, why: str) -> None:
    if not why:
        assert parse_link(text) == SwarmLink(ID, ())
        return
    with pytest.raises(BadInput, match=why) as caught:
        parse_link(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
