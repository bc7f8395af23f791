"""The built-in specs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.protocol_samples import ALICE, BOOK
from tscale.protocol.errors import BadInput
from tscale.protocol.presets import PRESET_NAMES, preset
from tscale.protocol.spec import SwarmSpec

GIVEN: dict[str, Any] = {"data": (BOOK,), "owner": ALICE.public, "t0_unix_s": 0.0}


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_a_preset_is_valid_and_named_after_itself(name: str) -> None:
    spec = preset(name, **GIVEN)
    assert SwarmSpec.from_bytes(spec.to_bytes()) == spec
    assert spec.swarm_id.startswith(name.replace(".", "-") + "-")
    assert spec.model.vocab == 256


def test_the_same_inputs_give_the_same_swarm() -> None:
    """`join --swarm demo` finds others because every node builds the same spec."""
    assert preset("demo", **GIVEN).swarm_id == preset("demo", **GIVEN).swarm_id
    assert preset("demo", **GIVEN).swarm_id != preset("nano", **GIVEN, name="demo").swarm_id


def test_a_lone_peer_may_fold_dense_float32_and_nobody_sends_it() -> None:
    dense = [rung for rung in preset("demo", **GIVEN).codec.rungs if rung.bits == 32]
    assert [(rung.kept_per_chunk, rung.gain, rung.lone_only) for rung in dense] == [(4096, 1.0, True)]


def test_fields_can_be_replaced() -> None:
    spec = preset("demo", **GIVEN, name="ours", seed=5)
    assert (spec.name, spec.seed) == ("ours", 5)


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("huge", {}, "choose one of demo, tiny"),
        ("demo", {"lr": 1}, "no field 'lr'"),
        ("demo", {"name": "A"}, "its name"),
    ],
)
def test_bad_input(name: str, more: dict[str, Any], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        preset(name, **GIVEN, **more)
