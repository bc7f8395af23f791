"""K virtual peers in one process: rounds of training, closing, losing, folding and rebasing, by the production code.

Only what the network and the clock do to a swarm is played here: who does how many steps, which contributions miss
their manifest, when the fold arrives. Replicas, trainers, codec, fold, batches and the learning rate are the product's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from tests.bench.convergence import rules
from tests.bench.convergence.texts import own_part, read_text
from tests.bench.convergence.variant import DENSE, Density, Variant
from tscale.kernels.codec import CodecError, Decoded, Rung, decode, encode, verify
from tscale.kernels.fold import FoldPart, OuterRule, fold
from tscale.kernels.init import init_state
from tscale.kernels.inner import InnerTrainer, lr_scale
from tscale.kernels.replica import OuterState, Replica
from tscale.kernels.screen import Share, mean_weights
from tscale.node.data.corpus import ByteCorpus
from tscale.node.worker.kernel_config import KernelConfig, kernel_config
from tscale.node.worker.session import batch_key
from tscale.protocol.gains import EIGHT, effective_peers, scaled_gain
from tscale.protocol.hashing import BlobRef, blob_ref, digest
from tscale.protocol.presets import preset
from tscale.protocol.spec import NO_OWNER, SwarmSpec

EXACT = Rung(DENSE, 32)
PACKAGES = Path(__file__).parents[1] / "out"
FINISH = 0.9


@dataclass(frozen=True)
class Setting:
    """What the peers of a run have in common."""

    variant: Variant
    spec: SwarmSpec
    kernels: KernelConfig
    corpus: ByteCorpus


@dataclass(eq=False)
class Contribution:
    """What one peer closed a round with."""

    author: int
    decoded: Decoded
    tokens: int
    bits: float
    gain: float
    late: bool = False


@dataclass
class Tally:
    """Sums over a run. `bits_sent` is the mean over the peers that were there from the start."""

    round: int = 0
    tokens_folded: int = 0
    tokens_trained: int = 0
    bits_sent: float = 0.0
    contributions: int = 0
    missed: int = 0
    refused: int = 0
    left_out: int = 0
    shrunk: int = 0
    sent_share: float = 0.0
    largest_rms: float = 0.0


def set_up(variant: Variant) -> Setting:
    """The preset of a variant, with the variant's settings in it, in the kernels' terms. Reads the text."""
    text = read_text(variant.corpus, PACKAGES)
    spec = spec_of(variant, blob_ref(text))
    return Setting(variant, spec, kernel_config(spec), ByteCorpus(text, spec.data.heldout_per_mille))


def spec_of(variant: Variant, text: BlobRef) -> SwarmSpec:
    """The spec of a variant over a text."""
    spec = preset(variant.preset, data=(text,), owner=NO_OWNER, t0_unix_s=0.0, seed=variant.seed)
    given = {name: getattr(variant, name) for name in ("lr_muon", "lr_adam", "batch", "context")}
    inner = replace(spec.inner, **{name: value for name, value in given.items() if value is not None})
    warmup_tokens = min(spec.inner.warmup_tokens, variant.tokens // 10)
    inner = replace(inner, warmup_tokens=warmup_tokens, schedule_tokens=variant.tokens)
    outer = replace(spec.outer, eta=variant.eta, mu=variant.mu, rho=variant.rho, beta=variant.beta)
    caps = spec.caps if variant.max_rms is None else replace(spec.caps, max_rms=variant.max_rms)
    return replace(spec, inner=inner, outer=replace(outer, age_factor=variant.age_factor), caps=caps)


def make_trainer(setting: Setting, local: np.ndarray) -> InnerTrainer:
    """The inner trainer of one peer, over its local parameters [P]."""
    kind = rules.AdamWTrainer if setting.variant.inner == "adamw" else InnerTrainer
    trainer = kind(setting.kernels.model, setting.kernels.inner, local, setting.corpus.counts)
    if setting.variant.polar == "fixed":
        rules.use_fixed_triple(trainer)
    return trainer


class Peer:
    """One virtual peer: its replica, its trainer and its batches."""

    def __init__(self, setting: Setting, index: int, state: OuterState) -> None:
        """A peer that has just got `state`: empty residual, no momentum."""
        self.setting, self.index = setting, index
        variant, kernels = setting.variant, setting.kernels
        self.replica = Replica(kernels.layout, state.anchor, variant.rho, variant.beta, kernels.rule)
        self.replica.load(state)
        self.replica.go_to_start()
        self.trainer = make_trainer(setting, self.replica.local)
        self.corpus = own_part(setting.corpus, index, variant.peers) if variant.own_text else setting.corpus
        self.public = digest("lab peer", index.to_bytes(4, "little"))
        self.progress, self.sent = np.zeros_like(state.anchor), np.zeros_like(state.anchor)
        self._steps_done = self._base_steps = 0
        self._key, self._lr_scale, self._turn = b"", 0.0, 0

    def follow(self, manifest: int, total_tokens: int) -> None:
        """Batches and learning rate of a new base, as the worker takes them (node/worker/session.py)."""
        name = digest("lab manifest", manifest.to_bytes(4, "little", signed=True))
        self._key = batch_key(self.setting.variant.seed, name, self.public)
        self._lr_scale = lr_scale(self.setting.kernels.inner, total_tokens)
        self._base_steps, self._turn = 0, manifest + 1

    def train(self, steps: int) -> None:
        """Inner steps. Raises ArithmeticError when a loss is not finite."""
        inner = self.setting.kernels.inner
        for _ in range(steps):
            tokens_BT = self.corpus.batch(self._key, self._base_steps, inner.batch, inner.context)
            if not math.isfinite(self.trainer.step(tokens_BT, self._lr_scale)):
                raise ArithmeticError("the loss is not finite")
            self._base_steps += 1
        self._steps_done += steps

    def close(self, density: Density) -> Contribution:
        """The contribution of the steps since the last close."""
        variant, layout, inner = self.setting.variant, self.replica.layout, self.setting.kernels.inner
        compressor, kept = _compressor(variant, self._turn), self.replica.residual * np.float32(variant.beta)
        if compressor is None or density.bits == 32:
            blob = self.replica.close(Rung(density.kept, density.bits))
            bits = 8.0 * len(blob)
        else:
            full = decode(self.replica.close(EXACT), layout).dense()
            sent, bits = compressor(full, layout, density.kept)
            np.subtract(full, sent, out=self.replica.residual)
            blob = encode(sent, layout, EXACT)  # so that the production fold takes what only the lab can make
        decoded = decode(blob, layout)
        sent = decoded.dense()
        self.progress += self.replica.residual + sent - kept
        self.sent += sent
        if not variant.error_feedback:
            self.replica.residual.fill(0)
        tokens, self._steps_done = self._steps_done * inner.batch * inner.context, 0
        return Contribution(self.index, decoded, tokens, bits, density.gain)

    def sent_share(self) -> float:
        """How much of its progress so far the peer has sent: the sum of what it sent, projected on the sum of its
        deltas. The rest waits in the residual or has decayed there."""
        return float(self.sent @ self.progress / max(float(self.progress @ self.progress), 1e-30))

    def adopt(self, state: OuterState, manifest: int, total_tokens: int) -> None:
        """A fold that another replica has worked out (states are never changed in place), and the rebase."""
        if state is not self.replica.head:
            self.replica.head, self.replica.parent = state, self.replica.head
        self.replica.rebase()
        self.follow(manifest, total_tokens)


def _compressor(variant: Variant, turn: int) -> rules.Compressor | None:
    if variant.method == "sparseloco":
        return rules.four_bins
    if variant.values == "rotating":
        return partial(rules.rotating, turn=turn)
    return {"codec": None, "one-magnitude": rules.one_magnitude, "float32": rules.keep_largest}[variant.values]


@dataclass
class Swarm:
    """The rounds of a variant. Iterating runs it and yields the anchor after every fold."""

    setting: Setting
    tally: Tally = field(default_factory=Tally)

    def __iter__(self) -> Iterator[np.ndarray]:
        """Runs until the manifests have taken the variant's tokens. Raises ArithmeticError when it diverges."""
        variant = self.setting.variant
        self.head = _genesis(self.setting)
        self.peers: list[Peer] = []
        self._missed: list[Contribution] = []
        pending: list[Contribution] = []
        while self.tally.tokens_folded < variant.tokens:
            self._admit()
            for peer in self.peers:
                peer.train(self._early_steps(peer))
            if pending and self._fold(pending):
                yield self.head.anchor
                if self.tally.tokens_folded >= variant.tokens:
                    return
            closed = []
            for peer in self.peers:
                peer.train(variant.steps[peer.index] - self._early_steps(peer))
                closed.append(peer.close(self._density(peer.index)))
            self._count(closed)
            closed = self._let_in(closed)
            pending = self._arrived(closed)
            self.tally.round += 1
            if not variant.overlap:
                if self._fold(pending):
                    yield self.head.anchor
                pending = []

    def _early_steps(self, peer: Peer) -> int:
        """Steps that a peer does before the fold of the last round reaches it."""
        return round(self.setting.variant.overlap * self.setting.variant.steps[peer.index]) if self.tally.round else 0

    def _density(self, peer: int) -> Density:
        variant = self.setting.variant
        if variant.finish and self.tally.tokens_folded >= FINISH * variant.tokens:
            return variant.finish[peer % len(variant.finish)]
        return variant.density(peer)

    def _let_in(self, closed: list[Contribution]) -> list[Contribution]:
        """What the attackers make of theirs, checked as the worker checks what it fetched (caps.max_rms)."""
        variant, first = self.setting.variant, self.setting.variant.peers - self.setting.variant.attackers
        layout, checked = self.setting.kernels.layout, []
        for contribution in closed:
            if contribution.author >= first:
                draw = np.random.default_rng((variant.seed, self.tally.round, contribution.author))
                density = self._density(contribution.author)
                values = rules.attacked(contribution.decoded.dense(), layout, variant.attack, draw)
                blob = encode(values, layout, Rung(density.kept, density.bits))
                try:
                    verify(blob, layout, self.setting.spec.caps.max_rms)
                except CodecError:
                    self.tally.refused += 1
                    continue
                contribution.decoded = decode(blob, layout)
            checked.append(contribution)
        return checked

    def _gain(self, contribution: Contribution) -> float:
        variant = self.setting.variant
        if variant.late_gain is None:
            return contribution.gain
        done = min(self.tally.tokens_folded / variant.tokens, 1.0)
        return contribution.gain + (variant.late_gain - contribution.gain) * done

    def _admit(self) -> None:
        variant = self.setting.variant
        for index in range(len(self.peers), variant.peers):
            if variant.joins_at(index) <= self.tally.round:
                peer = Peer(self.setting, index, self.head)
                peer.follow(self.tally.round - 1, self.tally.tokens_folded)
                self.peers.append(peer)

    def _count(self, closed: list[Contribution]) -> None:
        tally = self.tally
        founders = len(self.setting.variant.steps) - len(self.setting.variant.joins)
        tally.contributions += len(closed)
        tally.tokens_trained += sum(c.tokens for c in closed)
        tally.bits_sent += sum(c.bits for c in closed if c.author < founders) / founders
        tally.sent_share = self.peers[0].sent_share()
        tally.largest_rms = max([tally.largest_rms, *(float(c.decoded.rms().max()) for c in closed)])

    def _arrived(self, closed: list[Contribution]) -> list[Contribution]:
        """What this round's manifest has: the contributions that were not lost, and the last round's late ones."""
        variant, tally = self.setting.variant, self.tally
        lost = [c for c in closed if _is_lost(variant, tally.round, c.author)]
        arrived = [c for c in closed if c not in lost] + self._missed
        self._missed = []
        tally.missed += len(lost)
        for contribution in lost:
            if variant.late == "fold-next":
                contribution.late = True
                self._missed.append(contribution)
            elif variant.late == "put-back":
                replica = self.peers[contribution.author].replica
                np.add(replica.residual, contribution.decoded.dense(), out=replica.residual)
        return sorted(arrived, key=lambda c: (c.author, not c.late))

    def _fold(self, contributions: list[Contribution]) -> bool:
        """One manifest: shares as protocol/chain.py gives them. Nothing happens when nothing arrived."""
        variant = self.setting.variant
        tokens = [c.tokens * (variant.age_factor if c.late else 1.0) for c in contributions]
        peers = effective_peers(tokens) if variant.scaled else EIGHT
        shares = [
            Share(c.decoded, share, scaled_gain(self._gain(c), peers))
            for c, share in zip(contributions, tokens, strict=True)
            if share
        ]
        if not shares:
            return False
        if variant.method == "sparseloco":
            sent = [c.decoded.dense() for c in contributions]
            self.head = OuterState(rules.mean_over_senders(self.head.anchor, sent, variant.eta), None)
        elif variant.screened:
            verdicts = self.peers[0].replica.fold(shares)
            self.head = self.peers[0].replica.head
            self.tally.left_out += sum(verdict.is_left_out for verdict in verdicts)
            self.tally.shrunk += sum(verdict.is_shrunk for verdict in verdicts)
        else:
            self.head = self._fold_all(shares)
        self.tally.tokens_folded += sum(c.tokens for c in contributions)
        for peer in self.peers:
            peer.adopt(self.head, self.tally.round - 1, self.tally.tokens_folded)
        return True

    def _fold_all(self, shares: list[Share]) -> OuterState:
        """The state after a manifest whose contributions nobody judges (lab only)."""
        means, kernels = mean_weights([share.tokens for share in shares]), self.setting.kernels
        parts = [FoldPart(share.blob, share.gain * mean) for share, mean in zip(shares, means, strict=True)]
        return OuterState(*fold(self.head.anchor, self.head.momentum, parts, kernels.layout, kernels.rule))


@dataclass
class DataParallel:
    """All peers' batches in one step of one optimizer: what the swarm is measured against. Yields as Swarm does."""

    setting: Setting
    tally: Tally = field(default_factory=Tally)

    def __iter__(self) -> Iterator[np.ndarray]:
        """Runs until the tokens are used up. Gradients travel as float32 at every step."""
        setting, variant, tally = self.setting, self.setting.variant, self.tally
        local = init_state(setting.kernels.model, variant.seed)
        trainer = make_trainer(setting, local)
        inner = setting.kernels.inner
        publics = [digest("lab peer", index.to_bytes(4, "little")) for index in range(variant.peers)]
        while tally.tokens_folded < variant.tokens:
            name = digest("lab manifest", (tally.round - 1).to_bytes(4, "little", signed=True))
            keys = [batch_key(variant.seed, name, public) for public in publics]
            for step in range(max(variant.steps)):
                parts = [setting.corpus.batch(key, step, inner.batch, inner.context) for key in keys]
                loss = trainer.step(np.concatenate(parts), lr_scale(inner, tally.tokens_folded))
                if not math.isfinite(loss):
                    raise ArithmeticError("the loss is not finite")
                tally.tokens_folded += len(parts) * inner.batch * inner.context
                tally.bits_sent += 32.0 * local.size
            tally.tokens_trained = tally.tokens_folded
            tally.round += 1
            yield local


def _genesis(setting: Setting) -> OuterState:
    anchor = init_state(setting.kernels.model, setting.variant.seed)
    rule: OuterRule = setting.kernels.rule
    return OuterState(anchor, np.zeros_like(anchor) if rule.mu else None)


def _is_lost(variant: Variant, round_: int, author: int) -> bool:
    draw = digest("lab loss", variant.seed.to_bytes(8, "little"), round_.to_bytes(4, "little"), bytes([author]))
    return int.from_bytes(draw[:8], "little") / 2**64 < variant.lost
