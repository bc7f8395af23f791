"""The table of what a round costs on the wire, and that the presets it is made of fit each other."""

from dataclasses import replace

import pytest

from tests.bench.convergence import wire
from tscale.kernels.model_config import PRESETS
from tscale.node.worker.kernel_config import kernel_config
from tscale.protocol.hashing import BlobRef
from tscale.protocol.presets import preset
from tscale.protocol.spec import NO_OWNER, SwarmSpec


def spec_of(name: str) -> SwarmSpec:
    return preset(name, data=(BlobRef(bytes(32), 1),), owner=NO_OWNER, t0_unix_s=0.0)


@pytest.mark.parametrize("name", wire.SIZES)
def test_a_preset_has_the_kernels_model_over_bytes_and_room_for_its_blobs(name: str) -> None:
    spec = spec_of(name)
    kernels = kernel_config(spec)
    assert kernels.model == replace(PRESETS[name], vocab=256)
    state_bytes, dense_bytes = 4 * kernels.layout.numel, 9 * kernels.layout.numel // 32
    exact = any(rung.bits == 32 for rung in spec.codec.rungs)
    assert spec.caps.max_blob_bytes > (state_bytes if exact else dense_bytes)
    assert spec.caps.max_snapshot_bytes > 1.5 * state_bytes


def test_a_contribution_of_the_largest_model_is_as_large_as_calculated() -> None:
    rows = [line.strip("| ").split(" | ") for line in wire.table().splitlines()[2:]]
    (row,) = [row for row in rows if row[0] == "1.5b" and row[3] == "1/64"]
    assert row[1:6] == ["1.377B", "600 s", "1/64", "0.152", "26.2 MB"]
    assert row[6] == "10 s" and row[7] == "28"


def test_a_rung_for_lone_peers_is_never_sent() -> None:
    lone = [line for line in wire.table().splitlines() if "dense32" in line]
    assert lone and all("never sent" in line for line in lone)
