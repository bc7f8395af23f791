"""The SwarmSpec: its bytes, its id, and every value that is refused."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import pytest
from blake3 import blake3

from tests.helpers.protocol_samples import ALICE, BOB, SEED_ADDR, sample_spec
from tscale.protocol.canonical import pack, unpack
from tscale.protocol.errors import BadInput, RefuseFrame
from tscale.protocol.hashing import BlobRef
from tscale.protocol.spec import MAX_SPEC_BYTES, NO_OWNER, SwarmSpec

SPEC = sample_spec()


def changed(path: str, value: Any) -> SwarmSpec:
    """SPEC with one field, `part.field` or `field`, replaced."""
    part, _, name = path.rpartition(".")
    if not part:
        return replace(SPEC, **{name: value})
    return replace(SPEC, **{part: replace(getattr(SPEC, part), **{name: value})})


def test_bytes_round_trip() -> None:
    data = SPEC.to_bytes()
    assert SwarmSpec.from_bytes(data) == SPEC
    assert SwarmSpec.from_bytes(data).to_bytes() == data
    assert list(unpack(data, MAX_SPEC_BYTES)) == sorted(SwarmSpec.__dataclass_fields__)


def test_the_swarm_id_is_the_name_and_the_hash() -> None:
    head, data = b"tscale/1/spec", SPEC.to_bytes()
    hashed = blake3(len(head).to_bytes(8, "little") + head + len(data).to_bytes(8, "little") + data).digest()
    assert SPEC.swarm_id == "ours-" + base64.b32encode(hashed).decode().lower()[:26]


@pytest.mark.parametrize("path", ["seed", "model.width", "outer.eta", "rounds.t0_unix_s", "owner", "seeds"])
def test_every_field_is_in_the_id(path: str) -> None:
    values = {"seed": 2, "model.width": 64, "outer.eta": 0.5, "rounds.t0_unix_s": 5.0, "owner": NO_OWNER, "seeds": ()}
    other = changed(path, values[path])
    other.validate()
    assert other.swarm_id != SPEC.swarm_id


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        ("version", 2, "update the older one"),
        ("name", "Ours", "its name must be"),
        ("name", "", "its name must be"),
        ("name", "-x", "its name must be"),
        ("name", "x" * 33, "its name must be"),
        ("seed", -1, "seed is -1"),
        ("seed", True, "seed must be of type int"),
        ("model", None, "model must be a map"),
        ("model.kind", "llama", "is unknown"),
        ("model.width", 0, "model.width is 0"),
        ("model.vocab", 1 << 21, "model.vocab"),
        ("data.format", "csv", "is unknown"),
        ("data.shards", (), "data.shards is empty"),
        ("data.shards", (BlobRef(bytes(31), 1),), "must be 32 bytes"),
        ("data.shards", (BlobRef(bytes(32), 0),), "size of a shard"),
        ("data.shards", (BlobRef(bytes(32), 1 << 30),), "larger than caps.max_dataset_bytes"),
        ("data.shards", (BlobRef(bytes(32), 1),) * 1025, "at most 1024"),
        ("data.heldout_per_mille", 501, "heldout_per_mille"),
        ("inner.batch", 0, "inner.batch"),
        ("inner.lr_muon", 1, "inner.lr_muon must be of type float"),
        ("inner.lr_muon", float("nan"), "finite"),
        ("inner.lr_adam", -0.1, "inner.lr_adam"),
        ("inner.momentum", 1.0, "inner.momentum"),
        ("outer.eta", 0.0, "outer.eta"),
        ("outer.mu", 1.0, "outer.mu"),
        ("outer.rho", 1.5, "outer.rho"),
        ("outer.age_factor", -0.5, "outer.age_factor"),
        ("codec.rungs", (), "1 to 16 densities"),
        ("codec.rungs", SPEC.codec.rungs[-1:], "one of them not lone_only"),
        ("codec.rungs", SPEC.codec.rungs[:1] * 2, "the same name"),
        ("codec.rungs", (replace(SPEC.codec.rungs[0], bits=32),), "bits must be 2, or 32"),
        ("codec.rungs", (replace(SPEC.codec.rungs[0], bits=8),), "bits must be 2, or 32"),
        ("codec.rungs", (replace(SPEC.codec.rungs[0], kept_per_chunk=4097),), "kept_per_chunk"),
        ("codec.rungs", (replace(SPEC.codec.rungs[0], gain=0.0),), "gain"),
        ("codec.rungs", (replace(SPEC.codec.rungs[0], name="\n"),), "name of a rung"),
        ("rounds.length_s", 0.0, "rounds.length_s"),
        ("rounds.grace_min_s", 0.0, "grace_min_s"),
        ("rounds.grace_min_s", 0.6, "at most rounds.grace_max_s"),
        ("rounds.step_min_s", 0.3, "at most rounds.step_max_s"),
        ("rounds.step_max_s", 0.3, "its times can't nest: grace_max_s \\+ 4 \\* step_max_s is 1.7 s"),
        ("rounds.snapshot_every", 0, "snapshot_every"),
        ("rounds.max_contributions", 1025, "max_contributions"),
        ("caps.max_blob_bytes", 0, "max_blob_bytes"),
        ("caps.max_rms", 0.0, "max_rms"),
        ("admission.open", False, "must be open, or list"),
        ("admission.keys", (ALICE.public,), "must be open, or list"),
        ("admission.keys", (bytes(31),), "32 bytes"),
        ("admission.keys", (b"\2" * 32, b"\1" * 32), "sorted and different"),
        ("owner", b"", "32 bytes"),
        ("seeds", ("/ip4/1.2.3.4/tcp/1",), "names no peer"),
        ("seeds", (SEED_ADDR, SEED_ADDR), "at most 16 different"),
        ("seeds", (SEED_ADDR[:-1],), "wrong peer id"),
    ],
)
def test_what_is_refused(path: str, value: Any, why: str) -> None:
    spec = changed(path, value)
    with pytest.raises(BadInput, match=why):
        spec.validate()
    with pytest.raises(RefuseFrame):
        SwarmSpec.from_bytes(spec.to_bytes())


def test_times_that_just_nest_are_taken() -> None:
    changed("rounds.step_max_s", 0.275).validate()


def test_a_closed_swarm_lists_its_keys() -> None:
    keys = tuple(sorted((ALICE.public, BOB.public)))
    spec = replace(SPEC, admission=replace(SPEC.admission, open=False, keys=keys))
    assert SwarmSpec.from_bytes(spec.to_bytes()).admission.keys == keys


def test_unknown_and_missing_fields_are_refused() -> None:
    plain = unpack(SPEC.to_bytes(), MAX_SPEC_BYTES)
    with pytest.raises(RefuseFrame, match="unknown field 'extra'"):
        SwarmSpec.from_bytes(pack({**plain, "extra": 1}))
    with pytest.raises(RefuseFrame, match="model has the unknown field 'dropout'"):
        SwarmSpec.from_bytes(pack({**plain, "model": {**plain["model"], "dropout": 0.0}}))
    with pytest.raises(RefuseFrame, match="lacks 'caps'"):
        SwarmSpec.from_bytes(pack({name: value for name, value in plain.items() if name != "caps"}))
    with pytest.raises(RefuseFrame, match="must be a map"):
        SwarmSpec.from_bytes(pack(1))
    with pytest.raises(RefuseFrame, match="more than the cap"):
        SwarmSpec.from_bytes(bytes(MAX_SPEC_BYTES + 1))
