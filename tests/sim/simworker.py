"""The worker of a simulated peer: the production `Replica` on a tiny vector; only the training itself is a toy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tscale.kernels.codec import CodecError, Rung, decode, encode
from tscale.kernels.digest import state_digest
from tscale.kernels.fold import OuterRule
from tscale.kernels.layout import Layout, TensorSpec
from tscale.kernels.replica import OuterState, Replica
from tscale.kernels.screen import Share
from tscale.protocol import effects as fx
from tscale.protocol import events as ev
from tscale.protocol.chain import genesis_digest
from tscale.protocol.hashing import BlobRef
from tscale.protocol.spec import SwarmSpec

LAYOUT = Layout(
    (TensorSpec("a", (64, 48), "matrix"), TensorSpec("b", (30, 40), "matrix"), TensorSpec("n", (16,), "small"))
)
PULL = 0.05  # of the way to the target that one step goes
NOISE = 0.01
TOKENS_PER_STEP = 100
BOOT_S = 1.0
SPOT_CHECKS = 0.05  # share of the folds that are computed again and compared
DURATIONS_S: dict[type[Any], float] = {
    fx.MakeContribution: 0.15,
    fx.VerifyBlob: 0.02,
    fx.Fold: 0.1,
    fx.WriteSnapshot: 0.1,
    fx.LoadSnapshot: 0.2,
}


class Store(Protocol):
    """The blob store of a peer, as its worker sees it."""

    def put_blob(self, data: bytes) -> tuple[BlobRef, tuple[bytes, ...]]: ...

    def read_blob(self, root: bytes) -> bytes | None: ...


class Kernels:
    """Decoding a blob and folding a manifest are functions of bytes, so a simulated swarm does each once.

    The fold's result is shared only between peers whose states before it are equal to the bit (their digests say so);
    a drifted peer folds by itself. The arrays are never changed in place.
    """

    def __init__(self) -> None:
        self._decoded: dict[bytes, Any] = {}
        self._folded: dict[tuple[bytes, bytes], tuple[OuterState, bytes]] = {}

    def decoded(self, root: bytes, blob: bytes) -> Any:
        """The decoded contribution. Raises CodecError."""
        if root not in self._decoded:
            self._decoded[root] = decode(blob, LAYOUT)
            if len(self._decoded) > 400:
                del self._decoded[next(iter(self._decoded))]
        return self._decoded[root]

    def folded(self, manifest: bytes, base: bytes) -> tuple[OuterState, bytes] | None:
        """The state after a manifest on a base state (by digest), and its digest, if someone folded it already."""
        return self._folded.get((manifest, base))

    def keep_fold(self, manifest: bytes, base: bytes, state: OuterState, state_digest_: bytes) -> None:
        """Remember the result of a fold."""
        self._folded[(manifest, base)] = (state, state_digest_)
        if len(self._folded) > 64:
            del self._folded[next(iter(self._folded))]


@dataclass(frozen=True)
class Checkpoint:
    """What the worker finds after a restart."""

    manifest: bytes
    before: bytes | None
    state: OuterState
    parent: OuterState | None


class SimWorker:
    """One command at a time, each taking virtual time. `flip` is a fault: added to one value after the next fold.
    `attacks`: it sends the opposite of what it did."""

    def __init__(self, spec: SwarmSpec, store: Store, kernels: Kernels, seed: int) -> None:
        self.spec = spec
        self.store = store
        self.kernels = kernels
        self.rng = np.random.default_rng(seed)
        rule = OuterRule(spec.outer.eta, spec.outer.mu)
        self.replica = Replica(LAYOUT, np.zeros(LAYOUT.numel, np.float32), spec.outer.rho, spec.outer.beta, rule)
        self.manifest = genesis_digest(spec.swarm_id)
        self.before: bytes | None = None
        self.digest = self._compute_digest()
        self.parent_digest: bytes | None = None
        self.speed = 1 + int(self.rng.integers(4))
        self.flip = 0.0
        self.attacks = False
        self.left_out: list[bytes] = []  # by the folds it did itself

    def boot(self, saved: Checkpoint | None) -> ev.WorkerReady:
        """Start from a checkpoint, or from the initial model."""
        if saved is not None:
            self.manifest, self.before = saved.manifest, saved.before
            self.replica.load(saved.state, saved.parent)
            self.replica.go_to_start()
            self.digest = self._compute_digest()
            self.parent_digest = None
            if saved.parent is not None:
                self.parent_digest = state_digest(LAYOUT, saved.parent.anchor, saved.parent.momentum)
        return ev.WorkerReady(self.manifest, self.digest, self.before)

    def checkpoint(self) -> Checkpoint:
        """What survives a crash."""
        return Checkpoint(self.manifest, self.before, self.replica.head, self.replica.parent)

    def distance(self) -> float:
        """Root mean square distance of the agreed parameters to what training pulls them to."""
        return float(np.sqrt(np.mean((self.replica.anchor - target()) ** 2)))

    def do(self, effect: fx.Effect) -> ev.Event:
        """Execute a command now; the peer has let its virtual time pass."""
        actions: dict[type[Any], Callable[[Any], ev.Event]] = {
            fx.MakeContribution: self._contribute,
            fx.VerifyBlob: self._verify,
            fx.Fold: self._fold,
            fx.WriteSnapshot: self._snapshot,
            fx.LoadSnapshot: self._load,
        }
        return actions[type(effect)](effect)

    def _compute_digest(self) -> bytes:
        return state_digest(LAYOUT, self.replica.head.anchor, self.replica.head.momentum)

    def _contribute(self, effect: fx.MakeContribution) -> ev.Event:
        w = self.replica.local
        for _ in range(self.speed):
            w += np.float32(PULL) * (target() - w) + self.rng.normal(0, NOISE, w.size).astype(np.float32)
        rung = self.spec.codec.rungs[effect.rung]
        coded = Rung(rung.kept_per_chunk, rung.bits)
        blob = self.replica.close(coded)
        if self.attacks:
            blob = encode(-decode(blob, LAYOUT).dense(), LAYOUT, coded)
        ref, hashes = self.store.put_blob(blob)
        tokens = TOKENS_PER_STEP * self.speed
        return ev.ContributionMade(effect.round, self.manifest, ref, hashes, tokens, self.speed, 1.0, effect.rung)

    def _verify(self, effect: fx.VerifyBlob) -> ev.Event:
        root, rung = effect.claim.blob.root, self.spec.codec.rungs[effect.claim.rung]
        blob = self.store.read_blob(root)
        if blob is None:
            return ev.BlobMissing(root)
        try:
            if self.kernels.decoded(root, blob).rung != Rung(rung.kept_per_chunk, rung.bits):
                raise CodecError("it is of another rung")
        except CodecError as error:
            return ev.BlobVerified(effect.claim, False, str(error))
        return ev.BlobVerified(effect.claim, True, "")

    def _fold(self, effect: fx.Fold) -> ev.Event:
        onto_parent = effect.parent == self.before
        if effect.parent != self.manifest and not onto_parent:
            return ev.FoldFailed(effect.manifest, "no such state", False)
        base_digest = self.parent_digest if onto_parent else self.digest
        base = self.replica.parent if onto_parent else self.replica.head
        assert base is not None and base_digest is not None  # `before` says so
        known = self.kernels.folded(effect.manifest, base_digest)
        if known is not None and self.rng.random() >= SPOT_CHECKS:
            self.replica.head, self.replica.parent = known[0], base
        else:
            blobs = [(root, self.store.read_blob(root), share, gain) for root, share, gain in effect.parts]
            missing = [root for root, blob, _, _ in blobs if blob is None]
            if missing:
                return ev.FoldFailed(effect.manifest, "a blob is gone", False)
            shares = [Share(self.kernels.decoded(r, b), s, g) for r, b, s, g in blobs if b is not None]
            verdicts = self.replica.fold(shares, onto_parent=onto_parent)
            self.left_out += [root for (root, *_), v in zip(blobs, verdicts, strict=True) if v.is_left_out]
            if known is not None:
                assert self._compute_digest() == known[1], "two peers folded one manifest to different bits"
        self._settle_fold(effect, base_digest, None if known is None else known[1])
        return ev.Folded(effect.manifest, self.digest)

    def _settle_fold(self, effect: fx.Fold, base_digest: bytes, known_digest: bytes | None) -> None:
        flipped = self.flip != 0.0
        if flipped:
            anchor = self.replica.head.anchor.copy()
            anchor[3] += np.float32(self.flip)
            self.replica.head = OuterState(anchor, self.replica.head.momentum)
            self.flip, known_digest = 0.0, None
        self.replica.rebase()
        self.before, self.manifest = effect.parent, effect.manifest
        self.parent_digest = base_digest
        self.digest = known_digest or self._compute_digest()
        if known_digest is None and not flipped:
            self.kernels.keep_fold(effect.manifest, base_digest, self.replica.head, self.digest)

    def _snapshot(self, effect: fx.WriteSnapshot) -> ev.Event:
        if effect.manifest != self.manifest:
            return ev.Tick()
        ref, hashes = self.store.put_blob(self.replica.head.anchor.tobytes())
        return ev.SnapshotReady(self.manifest, effect.round, self.digest, ref, hashes)

    def _load(self, effect: fx.LoadSnapshot) -> ev.Event:
        data = self.store.read_blob(effect.root)
        if data is None or len(data) != LAYOUT.numel * 4:
            return ev.SnapshotRefused(effect.manifest, effect.root, "wrong size")
        self.replica.load(OuterState(np.frombuffer(data, np.float32).copy(), None))
        self.replica.go_to_start()
        self.manifest, self.before, self.parent_digest = effect.manifest, None, None
        self.digest = self._compute_digest()
        return ev.SnapshotLoaded(self.manifest, self.digest)


def target() -> np.ndarray:
    """What the training of all peers pulls their parameters to."""
    return _TARGET


_TARGET = np.linspace(-1.0, 1.0, LAYOUT.numel, dtype=np.float32)
_TARGET.setflags(write=False)
