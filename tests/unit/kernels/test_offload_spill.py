"""The optimizer's state in a file: the same training, resumed after every kind of end, and never a torn state."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.fake_transfer import FakeTransfer
from tests.helpers.offload_samples import COUNTS, INNER, LAYERS, MODEL, batch, start, trained
from tscale.kernels.model_config import ModelConfig
from tscale.kernels.offload.pieces import model_places
from tscale.kernels.offload.plan import OffloadPlan
from tscale.kernels.offload.spill import (
    SpilledOptimizer,
    SpillMismatch,
    SpillTorn,
    create_spill,
    resume_spill,
    scratch_memory,
)
from tscale.kernels.offload.trainer import OffloadParts, OffloadTrainer

PLACES = model_places(MODEL)
BOOT, NEXT_BOOT = b"boot 1".ljust(16), b"boot 2".ljust(16)
PLAN = OffloadPlan(2, 2)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def on(optimizer: SpilledOptimizer, local: np.ndarray, scratch: Path) -> OffloadTrainer:
    parts = OffloadParts(PLAN, FakeTransfer(), optimizer=optimizer, scratch=scratch_memory(scratch))
    return OffloadTrainer(MODEL, INNER, local, COUNTS, parts)


def spilled(path: Path, local: np.ndarray, steps: int = 1) -> SpilledOptimizer:
    optimizer = create_spill(path, PLACES, BOOT)
    trainer = on(optimizer, local, path.parent)
    for step in range(steps):
        trainer.step(batch(step), 1.0)
    return optimizer


def assert_equal_states(one, other) -> None:
    for name, array in other.state_arrays().items():
        assert np.array_equal(one.state_arrays()[name], array), name


def test_training_from_a_file_is_training_from_memory_also_after_a_restart(tmp_path: Path) -> None:
    expected, weights, _ = trained(PLAN, FakeTransfer(), steps=3)
    local = start()
    spilled(tmp_path / "state", local, steps=2).close()
    again = resume_spill(tmp_path / "state", PLACES, NEXT_BOOT)
    on(again, local, tmp_path).step(batch(2), 1.0)
    assert np.array_equal(local, weights) and again.restarted_units == ()
    assert_equal_states(again, expected)
    assert os.listdir(tmp_path) == ["state"]


def test_a_killed_process_leaves_a_state_to_go_on_with(tmp_path: Path) -> None:
    left = spilled(tmp_path / "state", start(), steps=2)
    state = left.state_arrays()
    # killed: nothing was closed, the same boot goes on
    again = resume_spill(tmp_path / "state", PLACES, BOOT)
    assert again.restarted_units == () and again.adam_steps == 2
    assert all(np.array_equal(again.state_arrays()[name], array) for name, array in state.items())


@pytest.mark.parametrize("unit", [0, LAYERS - 1, LAYERS, LAYERS + 1])
def test_what_was_being_changed_when_the_process_died_begins_again(tmp_path: Path, unit: int) -> None:
    left = spilled(tmp_path / "state", start())
    before = left.state_arrays()
    left.begin_update(unit)
    again = resume_spill(tmp_path / "state", PLACES, BOOT)
    assert again.restarted_units == (unit,)
    after = again.state_arrays()
    if unit < LAYERS:
        for index in range(LAYERS):
            pieces = [before["muon_momentum"][where] for where in PLACES.layers[index].momentum]
            now = [after["muon_momentum"][where] for where in PLACES.layers[index].momentum]
            for old, new in zip(pieces, now, strict=True):
                assert np.array_equal(new, old * (index != unit)) and old.any()
        assert np.array_equal(after["adam_second"], before["adam_second"])
    else:
        lost = PLACES.moments("embed" if unit == LAYERS else "head")
        kept = PLACES.moments("head" if unit == LAYERS else "embed")
        for name in ("adam_first", "adam_second"):
            assert not after[name][lost].any() and np.array_equal(after[name][kept], before[name][kept])
        assert np.array_equal(after["muon_momentum"], before["muon_momentum"])
    assert resume_spill(tmp_path / "state", PLACES, BOOT).restarted_units == ()


def test_a_step_marks_every_unit_while_it_changes_and_none_afterwards(tmp_path: Path) -> None:
    optimizer, order = create_spill(tmp_path / "state", PLACES, BOOT), []
    begin, end = optimizer.begin_update, optimizer.end_update
    optimizer.begin_update = lambda unit: (order.append((unit, True)), begin(unit))  # type: ignore[method-assign]
    optimizer.end_update = lambda unit: (order.append((unit, False)), end(unit))  # type: ignore[method-assign]
    on(optimizer, start(), tmp_path).step(batch(), 1.0)
    units = [LAYERS + 1, *reversed(range(LAYERS)), LAYERS]
    assert [unit for unit, begins in order if begins] == [unit for unit, begins in order if not begins] == units
    assert resume_spill(tmp_path / "state", PLACES, BOOT).restarted_units == ()


def test_a_machine_that_went_down_leaves_a_torn_file(tmp_path: Path) -> None:
    spilled(tmp_path / "state", start())
    with pytest.raises(SpillTorn, match="machine went down"):
        resume_spill(tmp_path / "state", PLACES, NEXT_BOOT)


@pytest.mark.parametrize("place", [-1, -4000, 8192, 4096])
def test_a_closed_file_with_a_flipped_bit_is_torn(tmp_path: Path, place: int) -> None:
    path = tmp_path / "state"
    spilled(path, start()).close()
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)
    with pytest.raises(SpillTorn, match="not those that were written"):
        resume_spill(path, PLACES, BOOT)


@pytest.mark.parametrize("size", [-1, 5000, 70, 3])
def test_a_cut_file_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "state"
    spilled(path, start()).close()
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises((SpillTorn, SpillMismatch)):
        resume_spill(path, PLACES, BOOT)


def test_every_byte_of_the_header_counts(tmp_path: Path) -> None:
    path = tmp_path / "state"
    spilled(path, start()).close()
    good = path.read_bytes()
    for place in range(16 + 16 + 24 + 1 + 16 + 32 + 16):
        path.write_bytes(good[:place] + bytes([good[place] ^ 0x11]) + good[place + 1 :])
        with pytest.raises((SpillTorn, SpillMismatch)):
            resume_spill(path, PLACES, BOOT)


def test_another_models_file_is_not_taken(tmp_path: Path) -> None:
    spilled(tmp_path / "state", start()).close()
    other = model_places(ModelConfig("tscale", 16, 2, 8, LAYERS + 1, 12, 11, 2))
    with pytest.raises(SpillMismatch, match="another layout"):
        resume_spill(tmp_path / "state", other, BOOT)
    with pytest.raises(FileNotFoundError):
        resume_spill(tmp_path / "nothing", PLACES, BOOT)
    assert not create_spill(tmp_path / "state", other, BOOT).momentum.any()


def test_loading_and_forgetting_a_state_reach_the_file(tmp_path: Path) -> None:
    expected, _, _ = trained(PLAN, FakeTransfer(), steps=2)
    optimizer = create_spill(tmp_path / "state", PLACES, BOOT)
    optimizer.load_state_arrays(expected.state_arrays())
    optimizer.close()
    again = resume_spill(tmp_path / "state", PLACES, BOOT)
    assert_equal_states(again, expected)
    again.reset()
    assert not any(array.any() for array in resume_spill(tmp_path / "state", PLACES, BOOT).state_arrays().values())
