"""Hostile frames: the parser ends in a message or a refusal, and a live machine goes on as if nothing had come.

Normal runs use 20,000 mutated frames each; TSCALE_FUZZ_N changes the number.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from functools import partial
from random import Random

import pytest

from tests.helpers.message_samples import sample_frame, sample_messages
from tests.helpers.mutate import mutations, packed_mutations, runs
from tests.helpers.solo import (
    GENESIS,
    SPEC,
    T0,
    Solo,
    announce,
    blob_of,
    manifest,
    other,
    peer_record,
    snapshot_record,
)
from tscale.protocol import effects as fx
from tscale.protocol import events as ev
from tscale.protocol.errors import RefuseFrame
from tscale.protocol.hashing import chunk_hashes
from tscale.protocol.messages import (
    Ack,
    BlobsReply,
    ChainReply,
    ChunkReply,
    GetBlobs,
    GetChain,
    GetChunk,
    GetHashes,
    GetSpec,
    Gossip,
    GossipReply,
    HashesReply,
    Message,
    Push,
    PutChunk,
    Refused,
    SpecReply,
    decode,
    encode,
    with_bulk,
)
from tscale.protocol.records import open_record

ALICE, BOB, CAROL = other(1), other(2), other(3)


def mutated_frames(samples: tuple[bytes, ...], seed: int, count: int) -> Iterator[bytes]:
    """Half of them changed anywhere, half with a changed value in a header that fits its length again."""
    rng = Random(seed)
    heads = tuple(frame[4 : 4 + int.from_bytes(frame[:4], "little")] for frame in samples)
    bulks = (b"", b"", b"aaa", bytes(100))
    anywhere = mutations(samples, seed + 1, count)
    inside = packed_mutations(heads, seed + 2, count)
    for raw, head in zip(anywhere, inside, strict=True):
        yield raw if rng.random() < 0.5 else len(head).to_bytes(4, "little") + head + rng.choice(bulks)


def test_mutated_frames_end_in_a_message_or_a_refusal() -> None:
    samples = tuple(sample_frame(name) for name in sample_messages())
    kinds = {type(message) for message, _ in sample_messages().values()}
    taken: dict[type, int] = {}
    refused = 0
    for frame in mutated_frames(samples, 5, runs()):
        try:
            envelope = decode(frame)
        except RefuseFrame as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 300
            continue
        taken[type(envelope.message)] = taken.get(type(envelope.message), 0) + 1
        again = with_bulk(encode(envelope.swarm, envelope.message, envelope.sent_unix_s), envelope.bulk)
        assert again == frame, frame.hex()
    assert refused + sum(taken.values()) == runs()
    assert refused > runs() // 4 and set(taken) == kinds


def trusting(public: bytes, domain: str, body: bytes, signature: bytes) -> bool:
    """A hostile peer can sign whatever it likes, so every mutated record counts as signed."""
    return True


FIRST = manifest(ALICE, 0, [announce(ALICE, 0), announce(BOB, 0)])


def hostile_samples() -> tuple[bytes, ...]:
    """Frames of every kind that mean something to the machine under test."""
    late = announce(CAROL, 1, FIRST.digest)
    second = manifest(BOB, 1, [late], FIRST.digest, before=200)
    records = (
        peer_record(ALICE, T0 + 25.0).bytes,
        late.bytes,
        FIRST.bytes,
        snapshot_record(BOB, FIRST, b"state").bytes,
    )
    data = blob_of(CAROL, 1)
    root, hashes = late.record.blob.root, b"".join(chunk_hashes(data))
    messages: tuple[tuple[Message, bytes], ...] = (
        (Gossip(late.digest[:8] + FIRST.digest[:8], root[:8]), b""),
        (GossipReply(late.digest[:8], root[:8], records), b""),
        *((Push((record,)), b"") for record in records),
        (Push(records), b""),
        (GetChunk(announce(ALICE, 0).record.blob.root, 0), b""),
        (ChunkReply(root, 0), data),
        (GetHashes(announce(ALICE, 0).record.blob.root), b""),
        (HashesReply(root, hashes), b""),
        (PutChunk(late.bytes, hashes, 0), data),
        (GetChain((FIRST.digest, GENESIS)), b""),
        (ChainReply((FIRST.bytes, second.bytes), False), b""),
        (ChainReply((second.bytes,), True), b""),
        (GetSpec(), b""),
        (SpecReply(SPEC.to_bytes()), b""),
        (Ack(), b""),
        (Refused("not here"), b""),
        (GetBlobs(announce(ALICE, 0).record.blob.root + root), b""),
        (BlobsReply(root), data),
    )
    return tuple(with_bulk(encode(SPEC.swarm_id, message, T0 + 25.0), bulk) for message, bulk in messages)


def live_machine(role: str) -> Solo:
    """A machine that has folded one manifest and is two rounds in."""
    solo = Solo(role=role, open_record=partial(open_record, verify=trusting)).boot()
    solo.ask(ALICE, Push((peer_record(ALICE, solo.now).bytes, peer_record(BOB, solo.now).bytes)))
    for who in (ALICE, BOB):
        solo.hold(who, announce(who, 0))
    solo.at(T0 + 12.2)
    solo.ask(ALICE, Push((FIRST.bytes,)))
    if role == "trainer":
        solo.fold()
    return solo.at(T0 + 26.0)


def is_sound(solo: Solo, asker: int) -> None:
    """The machine still answers an honest stranger, and its head is a valid manifest."""
    stranger = other(asker)
    reply = solo.ask(stranger, GetSpec())
    assert reply == SpecReply(SPEC.to_bytes())
    chain = solo.ask(stranger, GetChain((GENESIS,)))
    assert isinstance(chain, ChainReply)
    head = solo.machine.head
    assert head is not None and not head.invalid


@pytest.mark.parametrize("role", ["trainer", "seed"])
def test_hostile_frames_never_stop_a_live_machine(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of every kind and answers to the machine's own requests, all mutated, all signed."""
    monkeypatch.setattr("tscale.protocol.identity.verify", trusting)  # what a machine seals, it checks
    solo, samples = live_machine(role), hostile_samples()
    senders = [other(100 + i).public for i in range(40)]
    rng, answered, replied = Random(9), 0, 0
    count = runs()
    for i, frame in enumerate(mutated_frames(samples, 11, count)):
        solo.now += 0.001
        sender = rng.choice(senders)
        solo.machine.view.members.contact(sender).strikes = 0
        if i % 100 == 0:
            for who in (ALICE, BOB):  # somebody to gossip with and to fetch from
                solo.machine.view.members.learn(peer_record(who, solo.now), solo.now)
                solo.machine.view.members.heard(who.public, solo.now)
            solo.now += 0.5
            solo.feed(ev.Tick())
        if i % 3 == 0 and solo.machine.view.pending:
            replied += 1
            token = rng.choice(list(solo.machine.view.pending))
            effects = solo.feed(ev.Replied(token, frame))
        else:
            reply = solo.answer(sender, frame).message
            answered += not isinstance(reply, Refused)
            effects = solo.effects
        for asked in effects:
            if isinstance(asked, fx.Fold):
                solo.feed(ev.Folded(asked.manifest, b"\1" * 32))
        solo.effects.clear()
        if i % (count // 10) == 0:
            solo.feed(ev.Tick())
            is_sound(solo, 5000 + i)
    assert answered > count // 20 and replied > count // 200  # 0.9 % at 100,000 frames
    is_sound(solo, 4999)
    view = solo.machine.view
    assert len(view.pending) < 500
    assert len(view.chain.links) < 1000 + count // 20


def test_strikes_end_the_service_for_one_peer_only() -> None:
    solo = live_machine("seed")
    for _ in range(40):
        assert isinstance(solo.answer(CAROL.public, b"\0\0\0\0garbage").message, Refused)
    assert solo.ask(CAROL, GetSpec()) == Refused("too many malformed frames from this peer")
    assert isinstance(solo.ask(ALICE, GetSpec()), SpecReply)


def test_what_a_hostile_peer_can_make_a_machine_keep_is_bounded() -> None:
    """Gossip at its caps from a dozen senders."""
    solo = live_machine("seed")
    rng = Random(3)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for i in range(24):
        gossip = Gossip(rng.randbytes(8 * 8192), rng.randbytes(8 * 8192))
        solo.ask(other(200 + i % 12), gossip)
        solo.effects.clear()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 8 << 20
