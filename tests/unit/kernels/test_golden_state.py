"""Committed contributions, digests and batches keep their meaning."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.state_vectors import LAYOUT, RUNGS, batch_vectors, meaning, ramp, state_vectors
from tests.helpers.wire_vectors import GOLDEN
from tscale.kernels.codec import decode, encode


def golden(name: str) -> Any:
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("rung", sorted(RUNGS))
def test_a_committed_contribution_means_what_it_meant(rung: str) -> None:
    vector = golden("contribution_v1")[rung]
    assert meaning(bytes.fromhex(vector["hex"])).items() <= vector.items()
    assert vector["hex"].startswith(vector["start"])


@pytest.mark.parametrize("impl", ["reference", "numba"])
@pytest.mark.parametrize("rung", sorted(RUNGS))
def test_todays_encoders_send_the_same_values(rung: str, impl: str) -> None:
    """The bytes may differ with another zstd, what they say may not."""
    vector = golden("contribution_v1")[rung]
    residual = ramp()
    blob = encode(residual, LAYOUT, RUNGS[rung], impl)
    assert meaning(blob)["dense_digest"] == vector["dense_digest"]
    assert (decode(blob, LAYOUT).dense() + residual).tobytes() == ramp().tobytes()


def test_states_have_their_committed_digests() -> None:
    assert state_vectors() == golden("state_v1")


def test_batches_have_their_committed_key_and_places() -> None:
    assert batch_vectors() == golden("batch_v1")
