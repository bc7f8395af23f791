"""A worker's session without its process: the test is both of its threads."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from tscale.node.data.corpus import shipped_book
from tscale.node.worker import messages as m
from tscale.node.worker.resume import open_session
from tscale.node.worker.session import Session
from tscale.protocol.hashing import BlobRef
from tscale.protocol.presets import preset
from tscale.protocol.spec import SwarmSpec

PUBLIC, GENESIS = b"k" * 32, b"g" * 32
BOOK = shipped_book()[:60_000]
SPARSE, DENSE = 0, 3


def tiny(mu: float = 0.0, book: bytes = BOOK) -> SwarmSpec:
    spec = preset("nano", data=(BlobRef(b"r" * 32, len(book)),), owner=bytes(32), t0_unix_s=0.0)
    return replace(spec, outer=replace(spec.outer, mu=mu, eta=0.9 if mu else 1.0))


def manifest(r: int) -> bytes:
    return blake3(r.to_bytes(4, "little")).digest()


@dataclass
class Bench:
    """A session whose two threads are one: the test."""

    session: Session
    ready: m.Ready
    events: list[Any]
    folder: Path

    def steps(self, count: int) -> list[float]:
        return [self.session.step() for _ in range(count)]

    def close(self, r: int, base: bytes, rung: int = SPARSE) -> m.Closed:
        return self.session.handle(m.Close(r, base, rung))

    def fold(self, r: int, parent: bytes, *parts: tuple[str, float], tokens: int = 0) -> m.Folded:
        """Of (path, weight), each with the same share."""
        shares = tuple((path, 1.0, weight * len(parts)) for path, weight in parts)
        return self.session.handle(m.Fold(manifest(r), parent, shares, tokens, r))

    def digests(self) -> tuple[bytes, ...]:
        replica = self.session.replica
        arrays = [replica.anchor, replica.local, replica.start, replica.residual]
        inner = self.session.trainer.state_arrays()
        return tuple(blake3(a.tobytes()).digest() for a in [*arrays, *(inner[name] for name in sorted(inner))])


def worker_config(folder: Path, spec: SwarmSpec | None = None, **changes: Any) -> m.WorkerConfig:
    """A config over the first part of the shipped book; `changes` replace its fields."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "book").write_bytes(BOOK)
    config = m.WorkerConfig(
        spec=(spec or tiny()).to_bytes(),
        public=PUBLIC,
        genesis=GENESIS,
        genesis_round=-1,
        data=(str(folder / "book"),),
        checkpoint_dir=str(folder / "checkpoint"),
        scratch_dir=str(folder / "scratch"),
    )
    return replace(config, **changes)


def open_bench(folder: Path, spec: SwarmSpec | None = None, **changes: Any) -> Bench:
    """The session that a worker with this config would have."""
    events: list[Any] = []
    session, ready = open_session(worker_config(folder, spec, **changes), lambda work: work(), events.append)
    return Bench(session, ready, events, folder)


def run_rounds(bench: Bench, first: int, last: int, base: bytes) -> tuple[list[float], bytes]:
    losses = []
    for r in range(first, last):
        losses += bench.steps(3)
        path = bench.close(r, base).path
        losses += bench.steps(2)
        bench.fold(r, base, (path, 2.0), tokens=(r + 1) * 384)
        base = manifest(r)
    return losses, base
