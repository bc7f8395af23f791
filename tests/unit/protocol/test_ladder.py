"""As dense as the links allow: which rung is taken for a number of peers and an uplink."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.solo import solo_spec
from tscale.protocol.ladder import UPLINK_SHARE, bits_per_parameter, choose_rung
from tscale.protocol.spec import RungSpec

SPEC = solo_spec()
NAMES = [rung.name for rung in SPEC.codec.rungs]
PARAMETERS = 1_000_000


def chosen(peers: int, upload_bps: float) -> str:
    return NAMES[choose_rung(SPEC, PARAMETERS, peers, upload_bps)]


def needed_bps(name: str, peers: int) -> float:
    rung = SPEC.codec.rungs[NAMES.index(name)]
    return bits_per_parameter(rung) * PARAMETERS * peers / (SPEC.rounds.length_s * UPLINK_SHARE)


@pytest.mark.parametrize(
    ("kept", "bits", "low", "high"),
    [(64, 2, 0.145, 0.155), (128, 2, 0.26, 0.28), (256, 2, 0.46, 0.48), (4096, 2, 2.0, 2.01), (4096, 32, 32.0, 32.0)],
)
def test_expected_sizes(kept: int, bits: int, low: float, high: float) -> None:
    """The entropy bound of the positions plus two bits a value, as the codec comes to within a percent or two."""
    assert low <= bits_per_parameter(RungSpec("x", kept, bits, 1.0, lone_only=False)) <= high


def test_a_lone_peer_takes_the_densest_whatever_its_line() -> None:
    assert chosen(1, 1.0) == chosen(0, 1.0) == "dense32"


def test_lone_rungs_are_never_shared() -> None:
    assert chosen(2, 1e15) == "1/16"


@pytest.mark.parametrize("peers", [2, 4, 40])
@pytest.mark.parametrize("name", ["1/64", "1/32", "1/16"])
def test_the_densest_that_fits_is_taken(name: str, peers: int) -> None:
    assert chosen(peers, 1.001 * needed_bps(name, peers)) == name


def test_when_nothing_fits_it_is_the_sparsest() -> None:
    assert chosen(1000, 1.0) == "1/64"


def test_more_peers_or_a_slower_line_never_give_a_denser_rung() -> None:
    order = {"1/64": 0, "1/32": 1, "1/16": 2, "dense32": 3}
    by_peers = [order[chosen(peers, 3e6)] for peers in range(1, 60)]
    by_line = [order[chosen(6, 1e5 * 1.3**i)] for i in range(30)]
    assert by_peers == sorted(by_peers, reverse=True) and len(set(by_peers)) > 2
    assert by_line == sorted(by_line) and len(set(by_line)) == 3


def test_the_order_of_the_ladder_does_not_matter() -> None:
    turned = replace(SPEC, codec=replace(SPEC.codec, rungs=SPEC.codec.rungs[::-1]))
    for peers in (1, 2, 4, 40):
        rung = turned.codec.rungs[choose_rung(turned, PARAMETERS, peers, 3e6)]
        assert rung.name == chosen(peers, 3e6)
