"""Fixed identities, records, a spec, a link and a status: what the golden vectors and the parser tests start from."""

from __future__ import annotations

from tscale.protocol.hashing import BlobRef, blob_ref, digest
from tscale.protocol.identity import Identity
from tscale.protocol.links import SwarmLink
from tscale.protocol.records import Announcement, Manifest, PeerRecord, SignedRecord, SnapshotRecord, seal_record
from tscale.protocol.spec import (
    AdmissionSpec,
    CapsSpec,
    CodecSpec,
    DataSpec,
    InnerSpec,
    ModelSpec,
    OuterSpec,
    RoundSpec,
    RungSpec,
    SwarmSpec,
)
from tscale.protocol.status import (
    CreditStatus,
    LossPoint,
    ModelStatus,
    NodeStatus,
    PeerStatus,
    RoundStatus,
    ScreenStatus,
    StatusSnapshot,
    TrainingStatus,
    TransferStatus,
)

ALICE = Identity.from_secret(bytes(range(32)))
BOB = Identity.from_secret(bytes(range(32, 64)))
T0_UNIX_S = 1_750_000_000.0
BOOK = BlobRef(digest("test", b"book"), 1_204_997)
SEED_ADDR = f"/ip4/203.0.113.5/tcp/4001/p2p/{BOB.peer_id}"


def sample_spec() -> SwarmSpec:
    """A swarm over a made-up book, owned by ALICE, with one seed. Part of the golden vectors: never change it."""
    rungs = (RungSpec("1/64", 64, 2, 2.0, lone_only=False), RungSpec("dense32", 4096, 32, 1.0, lone_only=True))
    return SwarmSpec(
        version=1,
        name="ours",
        seed=1,
        model=ModelSpec("tscale", width=96, heads=3, head_dim=32, layers=6, window=128, vocab=256, relu=1, combine=4),
        data=DataSpec("bytes", (BOOK,), heldout_per_mille=20),
        inner=InnerSpec(8, 128, 0.02, 0.004, 0.0, 0.95, 20_000, 3_000_000, 0.1),
        outer=OuterSpec(eta=1.0, mu=0.0, rho=0.5, beta=0.95, age_factor=0.5),
        codec=CodecSpec(rungs, small_numel=1024),
        rounds=RoundSpec(T0_UNIX_S, 2.0, 0.15, 0.5, 0.1, 0.25, snapshot_every=5, max_contributions=64),
        caps=CapsSpec(8 << 20, 1_000_000, 1.0, 256 << 20, 32 << 20),
        admission=AdmissionSpec(open=True, keys=()),
        owner=ALICE.public,
        seeds=(SEED_ADDR,),
    )


def sample_peer() -> SignedRecord[PeerRecord]:
    """ALICE with a name and two addresses."""
    record = PeerRecord(
        swarm=sample_spec().swarm_id,
        role="trainer",
        addrs=(f"/ip4/198.51.100.7/tcp/4001/p2p/{ALICE.peer_id}", "/dns/alice.example/tcp/443"),
        name="Alice's PC",
        wire_min=1,
        wire_max=1,
        issued_unix_s=T0_UNIX_S + 10.0,
        expires_unix_s=T0_UNIX_S + 310.0,
        leaving=False,
    )
    return seal_record(ALICE, record)


def sample_announcement(identity: Identity, round_number: int = 7, tokens: int = 8192) -> SignedRecord[Announcement]:
    """A contribution at 1/64 of a blob of 17000 bytes."""
    record = Announcement(
        swarm=sample_spec().swarm_id,
        round=round_number,
        base=digest("test", b"base"),
        base_state=digest("test", b"base state"),
        blob=BlobRef(digest("test", b"blob", identity.public), 17_000),
        tokens=tokens,
        steps=8,
        loss=2.5,
        rung=0,
    )
    return seal_record(identity, record)


def sample_manifest() -> SignedRecord[Manifest]:
    """ALICE seals her own contribution and BOB's."""
    parts = sorted((sample_announcement(ALICE), sample_announcement(BOB, tokens=4096)), key=lambda part: part.public)
    record = Manifest(
        swarm=sample_spec().swarm_id,
        round=7,
        parent=digest("test", b"base"),
        parent_state=digest("test", b"base state"),
        total_tokens=100_000,
        contributions=tuple(part.bytes for part in parts),
    )
    return seal_record(ALICE, record)


def sample_snapshot() -> SignedRecord[SnapshotRecord]:
    """The state after `sample_manifest`."""
    record = SnapshotRecord(
        swarm=sample_spec().swarm_id,
        manifest=sample_manifest().digest,
        round=7,
        state=digest("test", b"state"),
        blob=blob_ref(b"snapshot"),
    )
    return seal_record(ALICE, record)


def sample_link() -> SwarmLink:
    """The link of `sample_spec` with its seed."""
    return SwarmLink(sample_spec().swarm_id, (SEED_ADDR,))


def sample_status() -> StatusSnapshot:
    """A node that trains with one other peer."""
    peers = (
        PeerStatus(ALICE.peer_id, "Alice's PC", "trainer", True, 0.0, "0.1.0", 8192, True),
        PeerStatus(BOB.peer_id, "", "trainer", False, 12.5, "0.1.0", 4096, False),
    )
    history = (LossPoint(0, 0, None, 5.5), LossPoint(7, 100_000, 2.5, None))
    return StatusSnapshot(
        schema=2,
        updated_unix_s=T0_UNIX_S + 15.5,
        swarm_id=sample_spec().swarm_id,
        swarm_name="ours",
        node=NodeStatus(
            ALICE.peer_id, "trainer", "0.1.0", 4242, T0_UNIX_S, ("/ip4/127.0.0.1/tcp/4001",), "/srv/tscale"
        ),
        activity="training",
        reason="",
        round=RoundStatus(8, T0_UNIX_S + 18.0, 2.0, 7, sample_manifest().digest.hex(), "ab" * 32, 2),
        training=TrainingStatus(8192, 100_000, 4000.5, 64, 2.5, None, 0.97, "the processor", "fp32", history),
        peers=peers,
        transfer=TransferStatus(17_000, 34_000, 8_500.0, 17_000.0, 17_000, 0.151, "1/64"),
        model=ModelStatus("tscale", 900_000),
        credit=CreditStatus(8192, 1, 0, ""),
        screen=ScreenStatus(0, 0),
        warnings=(),
    )
