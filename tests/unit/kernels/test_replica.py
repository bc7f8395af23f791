"""The round arithmetic of one peer, against formulas written out here."""

import numpy as np
import pytest

from tscale.kernels.codec import CodecError, Rung, decode
from tscale.kernels.digest import state_digest
from tscale.kernels.fold import OuterRule
from tscale.kernels.layout import Layout, TensorSpec
from tscale.kernels.replica import Diverged, OuterState, Replica
from tscale.kernels.screen import Share

LAYOUT = Layout(
    (TensorSpec("a", (70, 100), "matrix"), TensorSpec("b", (5000,), "embedding"), TensorSpec("c", (9,), "small"))
)
DENSE, SPARSE = Rung(4096, 32), Rung(64, 2)
GAIN = 1.75


def vector(seed: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(LAYOUT.numel) * scale).astype(np.float32)


def replica(mu: float = 0.0, rho: float = 0.5, beta: float = 0.95) -> Replica:
    return Replica(LAYOUT, vector(0), rho, beta, OuterRule(0.9, mu))


def train(peer: Replica, seed: int) -> np.ndarray:
    """What stands for inner steps: a change in place that is not a multiple of anything nice."""
    change = vector(seed, 0.01)
    peer.local -= change
    return change


def outer_step(anchor: np.ndarray, momentum: np.ndarray, delta: np.ndarray, mu: float) -> tuple[np.ndarray, np.ndarray]:
    """The round's arithmetic, spelled out for one contribution of weight GAIN."""
    g = (GAIN * delta.astype(np.float64)).astype(np.float32)
    mu32, eta32 = np.float32(mu), np.float32(0.9)
    u = mu32 * momentum + g
    return anchor - eta32 * (g + mu32 * u), u


@pytest.mark.parametrize("mu", [0.0, 0.6])
def test_alone_and_dense_is_the_plain_outer_loop_to_the_bit(mu: float) -> None:
    peer = replica(mu)
    anchor, momentum = vector(0), np.zeros(LAYOUT.numel, np.float32)
    local = anchor.copy()
    for r in range(6):
        local -= train(peer, 10 + r)
        blob = peer.close(DENSE)
        peer.fold([Share(blob, 1.0, GAIN)])
        peer.rebase()
        anchor, momentum = outer_step(anchor, momentum, anchor - local, mu)
        local = anchor.copy()
        assert peer.local.tobytes() == local.tobytes()
        assert peer.anchor.tobytes() == anchor.tobytes()
        assert not peer.residual.any()
    assert peer.head.momentum is None if mu == 0 else peer.head.momentum.tobytes() == momentum.tobytes()


def test_progress_between_close_and_fold_is_kept_and_counted_once() -> None:
    peer = replica()
    anchor, zero = vector(0), np.zeros(LAYOUT.numel, np.float32)
    local, start = anchor.copy(), anchor.copy()
    for r in range(5):
        local -= train(peer, 10 + r)
        blob = peer.close(DENSE)
        end = local.copy()
        local -= train(peer, 100 + r)
        peer.fold([Share(blob, 1.0, GAIN)])
        peer.rebase()
        anchor, _ = outer_step(anchor, zero, start - end, 0.0)
        local, start = anchor + (local - end), anchor.copy()
        assert peer.local.tobytes() == local.tobytes()
        assert peer.anchor.tobytes() == anchor.tobytes()


def test_what_is_not_sent_stays_in_the_residual_and_half_of_it_applied() -> None:
    peer = replica(rho=0.5, beta=0.95)
    residual, start = np.zeros(LAYOUT.numel, np.float32), vector(0)
    for r in range(4):
        train(peer, 20 + r)
        before = np.float32(0.95) * residual + (start - peer.local)
        blob = peer.close(SPARSE)
        sent = decode(blob, LAYOUT, SPARSE).dense()
        assert np.array_equal(sent + peer.residual, before)
        assert 0 < np.count_nonzero(sent) < LAYOUT.numel / 10
        residual = peer.residual.copy()
        peer.fold([Share(blob, 1.0, GAIN)])
        peer.rebase()
        start = peer.anchor - np.float32(0.5) * residual
        assert peer.local.tobytes() == start.tobytes()
        assert peer.start.tobytes() == start.tobytes()


def test_a_fold_after_the_next_close_follows_the_same_rule() -> None:
    peer = replica()
    train(peer, 1)
    first = peer.close(SPARSE)
    train(peer, 2)
    peer.close(SPARSE)
    end = peer.local.copy()
    train(peer, 3)
    local, residual = peer.local.copy(), peer.residual.copy()
    peer.fold([Share(first, 1.0, GAIN)])
    peer.rebase()
    target = peer.anchor - np.float32(0.5) * residual
    assert peer.start.tobytes() == target.tobytes()
    assert peer.local.tobytes() == (target + (local - end)).tobytes()


def test_a_fork_of_one_round_is_refolded_from_the_parent() -> None:
    peer, straight = replica(0.6), replica(0.6)
    blobs = []
    for seed in (1, 2, 3):
        other = replica(0.6)
        train(other, seed)
        blobs.append(other.close(SPARSE))
    for each in (peer, straight):
        each.fold([Share(blobs[0], 1.0, GAIN)])
        each.rebase()
    train(peer, 9)
    peer.fold([Share(blobs[1], 1.0, GAIN)])
    peer.rebase()
    peer.fold([Share(blobs[1], 1.0, 0.5), Share(blobs[2], 1.0, 0.5)], onto_parent=True)
    peer.rebase()
    straight.fold([Share(blobs[1], 1.0, 0.5), Share(blobs[2], 1.0, 0.5)])
    assert digest(peer.head) == digest(straight.head)
    assert peer.parent is not None and straight.parent is not None
    assert digest(peer.parent) == digest(straight.parent)


def test_peers_that_fold_the_same_manifest_agree_whatever_they_trained() -> None:
    peers = [replica(0.6) for _ in range(3)]
    for r in range(3):
        parts = []
        for i, peer in enumerate(peers):
            train(peer, 10 * r + i)
            parts.append(Share(peer.close(SPARSE), 1.0, GAIN))
            train(peer, 100 + 10 * r + i)
        for peer in peers:
            peer.fold(parts)
            peer.rebase()
        assert len({digest(peer.head) for peer in peers}) == 1
        assert len({peer.local.tobytes() for peer in peers}) == 3


def test_a_bad_contribution_changes_nothing() -> None:
    peer = replica(0.6)
    train(peer, 1)
    blob = peer.close(SPARSE)
    before = (digest(peer.head), peer.local.tobytes(), peer.residual.tobytes(), peer.start.tobytes())
    with pytest.raises(CodecError):
        peer.fold([Share(blob, 1.0, GAIN), Share(blob[:-3], 1.0, GAIN)])
    with pytest.raises(ValueError, match="not there"):
        peer.fold([Share(blob, 1.0, GAIN)], onto_parent=True)
    assert (digest(peer.head), peer.local.tobytes(), peer.residual.tobytes(), peer.start.tobytes()) == before
    assert peer.parent is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_progress_that_is_not_finite_is_never_encoded(bad: float) -> None:
    peer = replica()
    train(peer, 1)
    peer.fold([Share(peer.close(SPARSE), 1.0, GAIN)])
    peer.rebase()
    peer.local[77] = bad
    with pytest.raises(Diverged):
        peer.close(SPARSE)
    peer.restart()
    peer.go_to_start()
    assert peer.local.tobytes() == peer.anchor.tobytes()
    assert not peer.residual.any()
    change = train(peer, 2)
    sent = decode(peer.close(DENSE), LAYOUT).dense()
    assert np.allclose(sent, change, atol=1e-6)


def test_a_loaded_state_starts_with_an_empty_residual() -> None:
    peer = replica()
    train(peer, 1)
    peer.close(SPARSE)
    assert peer.residual.any()
    peer.load(OuterState(vector(5), None))
    peer.go_to_start()
    assert peer.local.tobytes() == vector(5).tobytes()
    assert not peer.residual.any() and peer.parent is None


def digest(state: OuterState) -> bytes:
    return state_digest(LAYOUT, state.anchor, state.momentum)
