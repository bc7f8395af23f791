"""Chains of manifests for one machine, and somebody who serves their blobs."""

from __future__ import annotations

from tests.helpers.solo import GENESIS, LENGTH_S, T0, Solo, announce, blob_of, manifest, other
from tscale.protocol import effects as fx
from tscale.protocol import events as ev
from tscale.protocol.hashing import blob_ref
from tscale.protocol.identity import Identity
from tscale.protocol.messages import BlobsReply, ChunkReply, GetBlobs, GetChunk
from tscale.protocol.records import Manifest, SignedRecord

ALICE, BOB, CAROL = other(1), other(2), other(3)
Signed = SignedRecord[Manifest]


def chain_of(count: int, sealer: Identity = ALICE, tokens: int = 100) -> list[Signed]:
    """Rounds 0 .. count-1, each with one contribution of its sealer."""
    made: list[Signed] = []
    parent = GENESIS
    for round_ in range(count):
        part = announce(sealer, round_, parent, tokens=tokens)
        made.append(manifest(sealer, round_, [part], parent, before=tokens * round_))
        parent = made[-1].digest
    return made


def root_of(signed: Signed) -> bytes:
    return signed.contributions[0].record.blob.root


def serve_blobs(solo: Solo, *authors: Identity) -> set[bytes]:
    """Answer every request for contributions of these authors, until none is asked for; the roots that were fetched."""
    data = {blob_ref(blob_of(who, r)).root: blob_of(who, r) for who in authors for r in range(60)}
    got: set[bytes] = set()
    while True:
        asked = [pair for pair in solo.requests() if isinstance(pair[1], (GetChunk, GetBlobs))]
        if not asked:
            return got
        for request, message in asked:
            if isinstance(message, GetChunk):
                found = [message.root] if message.root in data else []
                if found:
                    solo.reply(request, ChunkReply(message.root, 0), data[message.root])
            else:
                roots = [message.roots[i : i + 32] for i in range(0, len(message.roots), 32)]
                found = [root for root in roots if root in data]
                solo.reply(request, BlobsReply(b"".join(found)), b"".join(data[root] for root in found))
            for root in found:
                got.add(root)
            for effect in solo.take(fx.VerifyBlob):
                solo.feed(ev.BlobVerified(effect.claim, True, ""))


def joining(rounds: float) -> Solo:
    """A fresh trainer that met ALICE after this many rounds."""
    return Solo().boot().at(T0 + LENGTH_S * rounds).meet(ALICE)
