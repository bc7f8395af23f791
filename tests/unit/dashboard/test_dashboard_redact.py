"""Text from strangers: no addresses, nothing that turns the line around, but HTML stays the text it is."""

import dataclasses
import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tscale.dashboard.redact import inert_text, public_snapshot
from tscale.protocol.status import StatusSnapshot

EXAMPLE = (Path(__file__).parents[2] / "helpers" / "status_example.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("can't reach /ip4/192.0.2.9/tcp/4001/p2p/12D3KooWx", "can't reach [address]"),
        ("peer at 192.0.2.9:4001 is slow", "peer at [address]:4001 is slow"),
        ("via 192.0.2.9, then 198.51.100.7.", "via [address], then [address]."),
        ("dialled 2001:db8::1 twice", "dialled [address] twice"),
        ("dialled [fe80::1ff:fe23:4567:890a]:4001", "dialled [[address]]:4001"),
        ("/dns4/home.example.org/tcp/4001 gone", "[address] gone"),
        ("round 12 closed at 12:34:56", "round 12 closed at 12:34:56"),
        ("version 0.1.0 and loss 1.234", "version 0.1.0 and loss 1.234"),
        ("<img src=x onerror=alert(1)>", "<img src=x onerror=alert(1)>"),
        ("a\u202egnp.exe\u202c b", "agnp.exe b"),
        ("two\nlines\tand\x00nul", "two lines andnul"),
        ("zero\u200bwidth\ufeff", "zerowidth"),
        ("z" + "\u0300" * 30, "z" + "\u0300" * 2),
        ("lone \ud800 surrogate", "lone surrogate"),
        ("naïve Ωmega 鯨", "naïve Ωmega 鯨"),
    ],
)
def test_inert_text(text: str, shown: str) -> None:
    assert inert_text(text) == shown


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.text(max_size=400), st.integers(1, 80))
def test_inert_text_keeps_its_promises_for_any_text(text: str, max_chars: int) -> None:
    shown = inert_text(text, max_chars)
    assert len(shown) <= max_chars
    assert not any(unicodedata.category(char) in {"Cc", "Cf", "Cs", "Zl", "Zp"} for char in shown)
    shown.encode()
    json.dumps(shown)


def test_a_public_snapshot_is_still_a_valid_one() -> None:
    snapshot = StatusSnapshot.from_json(EXAMPLE)
    peer = dataclasses.replace(snapshot.peers[1], name="call me 192.0.2.9 or 192.0.2.8")
    hostile = dataclasses.replace(
        snapshot,
        peers=(*snapshot.peers[:1], peer),
        reason="dialling /ip6/2001:db8::7/tcp/1",
        warnings=("x" * 5000, "seed 198.51.100.3 is down"),
    )
    public = public_snapshot(hostile)
    assert StatusSnapshot.from_json(public.to_json()) == public
    assert public.peers[1].name == "call me [address] or [address]"
    assert public.reason == "dialling [address]"
    assert [len(warning) for warning in public.warnings] == [300, len("seed [address] is down")]
    assert public.training == snapshot.training
    assert public.round == snapshot.round
