"""The screen in a worker: what it leaves out of a fold, what it says of it, and that all peers do the same."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.worker_bench import GENESIS, SPARSE, Bench, manifest, open_bench, tiny
from tscale.kernels.codec import Rung, decode, encode
from tscale.node.worker import messages as m

GAIN = 2.0


@dataclass
class Round:
    """Four peers that have trained a round from genesis, and their contributions as (path, share, gain)."""

    peers: list[Bench]
    parts: list[tuple[str, float, float]]

    def turn_round(self, place: int, factor: float) -> None:
        """Replace a contribution by `factor` times what its author sent."""
        layout = self.peers[0].session.replica.layout
        path, rung = Path(self.parts[place][0]), tiny().codec.rungs[SPARSE]
        values = decode(path.read_bytes(), layout).dense() * np.float32(factor)
        path.write_bytes(encode(values, layout, Rung(rung.kept_per_chunk, rung.bits)))

    def fold(self, peer: Bench, places: list[int]) -> m.Folded:
        parts = tuple(self.parts[place] for place in places)
        return peer.session.handle(m.Fold(manifest(0), GENESIS, parts, 1000, 0))


@pytest.fixture
def trained(tmp_path: Path) -> Round:
    peers = [open_bench(tmp_path / str(i), public=bytes([65 + i]) * 32) for i in range(5)]
    parts = []
    for i, peer in enumerate(peers[:4]):
        peer.steps(3 + i)
        closed = peer.close(0, GENESIS)
        parts.append((closed.path, float(closed.tokens), GAIN))
    return Round(peers, parts)


def test_honest_contributions_are_all_folded(trained: Round) -> None:
    folded = trained.fold(trained.peers[0], [0, 1, 2, 3])
    assert (folded.left_out, folded.shrunk) == ((), ())


def test_one_that_is_turned_round_is_left_out_by_all_and_its_share_is_nobodys(trained: Round) -> None:
    trained.turn_round(2, -1.0)
    folded = [trained.fold(peer, [0, 1, 2, 3]) for peer in trained.peers[:4]]
    assert {(one.left_out, one.shrunk) for one in folded} == {((2,), ())}
    (state,) = {one.state_digest for one in folded}
    assert state == trained.fold(trained.peers[4], [0, 1, 3]).state_digest


def test_one_that_is_far_too_large_is_made_smaller(trained: Round) -> None:
    trained.turn_round(1, 20.0)
    folded = [trained.fold(peer, [0, 1, 2, 3]) for peer in trained.peers[:2]]
    assert {(one.left_out, one.shrunk) for one in folded} == {((), (1,))}
    assert len({one.state_digest for one in folded}) == 1
