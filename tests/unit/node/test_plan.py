"""The planner on made-up machines: what fits, what does not and why, and figures that agree with each other."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tscale.kernels.model_config import PRESETS, ModelConfig, model_layout
from tscale.kernels.offload.memory import StepShape, device_memory
from tscale.node.planning.machine import Given, Machine, parse_bits_per_s, parse_bytes, with_given
from tscale.node.planning.measured import MeasuredRate, find_rate, with_rate
from tscale.node.planning.models import wanted_model
from tscale.node.planning.planner import RESERVE_BYTES, TrainingPlan, Wish, make_plan
from tscale.node.planning.report import as_json, find_round_fault, gigabytes, missing_as_line, plan_traffic
from tscale.node.planning.storage import SPILL_ALL, SPILL_ROUND, SPILLS, DoesNotFit, Memory, find_memory, vectors_of
from tscale.node.planning.work import muon_flops, step_flops
from tscale.protocol.errors import BadInput
from tscale.protocol.status import StatusSnapshot

GB = 10**9
SHAPE = StepShape(4, 64)
SMALL = ModelConfig("tscale", 64, 2, 32, 6, 128, 256, 1)


def machine(vram_gb: float | None, ram_gb: float, disk_gb: float | None = None) -> Machine:
    card = None if vram_gb is None else int(vram_gb * GB)
    disk = None if disk_gb is None else int(disk_gb * GB)
    return Machine("test", card, int(ram_gb * GB), disk, 40e12, 12e9, 20e6, "made up")


def check(plan: TrainingPlan, here: Machine, cfg: ModelConfig, shape: StepShape) -> None:
    """What every plan that fits must satisfy."""
    assert here.device_bytes is not None and plan.device is not None
    assert plan.memory.device_bytes + RESERVE_BYTES <= here.device_bytes
    assert plan.memory.ram_bytes <= here.ram_bytes
    assert here.disk_bytes is None or plan.memory.disk_bytes <= here.disk_bytes
    assert 2 <= plan.offload.slots <= cfg.layers + 2
    assert 1 <= plan.offload.micro_rows <= shape.rows
    plan.offload.check(cfg.layers)
    step = plan.step
    assert step.seconds >= step.compute_s == step_flops(cfg, shape, recompute=plan.offload.recompute) / here.flops_per_s
    assert plan.memory.disk_bytes >= vectors_of(cfg, False).stored_bytes


@cache
def planned(model: str, vram_gb: float, ram_gb: float) -> TrainingPlan | DoesNotFit:
    wanted = wanted_model(model, None)
    return make_plan(wanted.config, wanted.shape, machine(vram_gb, ram_gb))


@pytest.mark.parametrize(
    ("model", "vram_gb", "ram_gb", "spilled"), [("1.5b", 12, 32, SPILL_ROUND), ("7b", 24, 64, SPILL_ALL)]
)
def test_cards_that_must_do(model: str, vram_gb: float, ram_gb: float, spilled: str) -> None:
    here, wanted = machine(vram_gb, ram_gb), wanted_model(model, None)
    plan = planned(model, vram_gb, ram_gb)
    assert isinstance(plan, TrainingPlan), plan
    check(plan, here, wanted.config, wanted.shape)
    assert plan.memory.spilled == spilled
    assert plan.parameters == model_layout(wanted.config).numel
    traffic = plan_traffic(wanted.spec, plan, here, 8)
    assert traffic.contribution_bytes * 8 / here.upload_bits_per_s == traffic.upload_s
    assert traffic.round_bytes == 7 * traffic.contribution_bytes


def test_less_memory_is_never_faster_and_a_plan_is_exact() -> None:
    fast_bus = replace(machine(8, 8), bus_bytes_per_s=1e15)
    roomy = make_plan(SMALL, SHAPE, fast_bus)
    assert isinstance(roomy, TrainingPlan) and roomy.device is not None
    assert not roomy.offload.recompute and roomy.offload.micro_rows == SHAPE.rows
    seconds = [roomy.step.seconds]
    for share in (0.9, 0.3):
        here = replace(fast_bus, device_bytes=RESERVE_BYTES + int(share * roomy.device.total_bytes))
        plan = make_plan(SMALL, SHAPE, here)
        assert isinstance(plan, TrainingPlan), plan
        check(plan, here, SMALL, SHAPE)
        assert plan.device == device_memory(SMALL, plan.offload, SHAPE)
        seconds.append(plan.step.seconds)
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]


def test_a_card_that_is_too_small_is_told_what_it_lacks() -> None:
    found = make_plan(SMALL, SHAPE, replace(machine(8, 8), device_bytes=RESERVE_BYTES + 1_000_000))
    assert isinstance(found, DoesNotFit)
    assert found.what == "memory of the card" and found.needed_bytes > found.available_bytes
    advice = "are there: take a smaller model, a shorter context, or a card with more memory"
    assert missing_as_line(found).endswith(advice)
    enough = replace(machine(8, 8), device_bytes=found.needed_bytes)
    plan = make_plan(SMALL, SHAPE, enough)
    assert isinstance(plan, TrainingPlan) and (plan.offload.slots, plan.offload.micro_rows) == (2, 1)


def test_main_memory_and_disk_are_named_with_advice() -> None:
    ram = find_memory(SMALL, machine(8, 1.2), 0, False)
    assert isinstance(ram, DoesNotFit)
    assert (ram.what, ram.available_bytes) == ("main memory", int(1.2 * GB)) and "add memory" in ram.advice
    enough = find_memory(SMALL, replace(machine(8, 1.2), ram_bytes=ram.needed_bytes), 0, False)
    assert isinstance(enough, Memory) and enough.spilled == SPILL_ALL
    disk = find_memory(SMALL, machine(8, 8, 0.001), 0, False)
    assert isinstance(disk, DoesNotFit)
    assert disk.what == "disk" and "--state-dir" in disk.advice
    assert isinstance(find_memory(SMALL, replace(machine(8, 8), disk_bytes=disk.needed_bytes), 0, False), Memory)


def test_a_slow_uplink_is_a_problem_of_the_round() -> None:
    wanted = wanted_model("1.5b", None)
    slow = replace(machine(12, 32), upload_bits_per_s=1e4)
    plan = planned("1.5b", 12, 32)
    assert isinstance(plan, TrainingPlan)
    fault = find_round_fault(plan, plan_traffic(wanted.spec, plan, slow, 8))
    assert (
        fault.startswith("sending a contribution takes")
        and "a round 600 s: make rounds longer (--round-seconds of `tscale-node create`), or find" in fault
    )
    crawling = replace(plan, step=replace(plan.step, compute_s=700.0))
    assert find_round_fault(crawling, plan_traffic(wanted.spec, plan, slow, 8)) != ""
    assert "shorter than one step (7" in find_round_fault(crawling, plan_traffic(wanted.spec, crawling, slow, 8))


def test_a_processor_does_all_at_once_until_memory_is_short() -> None:
    shape = StepShape(16, 128)
    roomy = make_plan(SMALL, shape, machine(None, 8))
    assert isinstance(roomy, TrainingPlan) and roomy.device is None
    assert (roomy.layer_major, roomy.offload.recompute, roomy.offload.micro_rows) == (False, False, 16)
    tight = make_plan(SMALL, shape, replace(machine(None, 8), ram_bytes=roomy.memory.ram_bytes - 1))
    assert isinstance(tight, TrainingPlan) and tight.memory.ram_bytes < roomy.memory.ram_bytes
    forced = make_plan(SMALL, shape, machine(None, 8), Wish(slots=3))
    assert isinstance(forced, TrainingPlan) and (forced.layer_major, forced.offload.slots) == (True, 3)


def test_main_memory_gives_way_to_the_disk_in_the_order_of_use() -> None:
    vectors = vectors_of(SMALL, outer_momentum=False)
    ram_bytes, seen, steps = 8 * GB, [], []
    while isinstance(memory := find_memory(SMALL, replace(machine(8, 8), ram_bytes=ram_bytes), 0, False), Memory):
        seen.append(memory.spilled)
        steps.append(memory.step_disk_bytes)
        ram_bytes = memory.ram_bytes - 1
    assert tuple(seen) == SPILLS and steps == sorted(steps) and steps[1] == 0
    assert steps[2] == 2 * vectors.optimizer_bytes
    with_momentum = vectors_of(SMALL, outer_momentum=True)
    assert with_momentum.round_bytes - vectors.round_bytes == 2 * 4 * model_layout(SMALL).numel


def test_operations_are_counted_per_token_and_matrix() -> None:
    shape = StepShape(2, 128)
    fixed = muon_flops(SMALL)
    once, again = (step_flops(SMALL, shape, recompute=how) - fixed for how in (False, True))
    head = 6 * SMALL.vocab * SMALL.width * 256
    assert (once - head) * 8 == pytest.approx((again - head) * 6)
    assert 6 * 256 * model_layout(SMALL).numel * 0.9 < once < 6 * 256 * model_layout(SMALL).numel * 2


@pytest.mark.parametrize(
    ("text", "value"), [("12GB", 12e9), ("24 GiB", 24 * 2**30), ("800mb", 8e8), ("1.5t", 1.5e12), ("4194304", 4194304)]
)
def test_sizes(text: str, value: float) -> None:
    assert parse_bytes(text, "--vram") == int(value)


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "12XB", "1e9", "0GB", "nan", "12", "1001TB", "9" * 400 + "GB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(BadInput, match="--vram is"):
        parse_bytes(text, "--vram")


@pytest.mark.parametrize(("text", "value"), [("20Mbit", 2e7), ("1.5Gbit/s", 1.5e9), ("500kbps", 5e5), ("9600", 9600.0)])
def test_rates(text: str, value: float) -> None:
    assert parse_bits_per_s(text, "--upload") == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, "--upload is a rate like 20Mbit, not") for text in ("", "0", "20MB", "-5Mbit", "fast")),
        ("20", "--upload is a rate with its unit, like 20Mbit, not '20'"),
        ("9" * 400 + "Mbit", "--upload is a rate of at most 1000Gbit, not '9{32}\\.\\.\\.'"),
    ],
)
def test_rates_that_are_none(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        parse_bits_per_s(text, "--upload")


@pytest.mark.parametrize("tflops", [0.0, -1.0, float("nan"), float("inf"), 1e-9, 1e9])
def test_speeds_that_are_none(tflops: float) -> None:
    with pytest.raises(BadInput, match="--tflops is "):
        with_given(machine(None, 16), Given(tflops=tflops))


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [(2160, "2.16 kB"), (3_440_640, "3.44 MB"), (733_000_000, "0.733 GB"), (10**12, "1,000 GB")],
)
def test_sizes_are_shown_in_a_unit_that_can_be_read(size_bytes: int, shown: str) -> None:
    assert gigabytes(size_bytes) == shown


def test_another_machine_has_assumed_speeds_and_an_unknown_disk() -> None:
    here = machine(None, 16, 100)
    assert with_given(here, Given()) == here and Given().is_here
    other = with_given(here, Given(vram_bytes=12 * GB))
    assert (other.device_bytes, other.disk_bytes, other.ram_bytes) == (12 * GB, None, 16 * GB)
    assert other.name == "a card with 12 GB" and other.rates.startswith("assumed")
    faster = with_given(here, Given(vram_bytes=12 * GB, disk_bytes=GB, tflops=80.0))
    assert (faster.flops_per_s, faster.rates, faster.disk_bytes) == (80e12, "given", GB)
    with pytest.raises(BadInput, match="--tflops is a number above 0, not -1"):
        with_given(here, Given(tflops=-1.0))


def test_presets_bring_their_own_batch_and_round_and_unknown_names_a_hint() -> None:
    large = wanted_model("1.5b", None)
    assert (large.shape.rows, large.shape.context) == (large.spec.inner.batch, large.spec.inner.context)
    assert large.spec.rounds.length_s == 600.0
    assert wanted_model("1.5b", 512).shape == StepShape(large.shape.rows * large.shape.context // 512, 512)
    assert wanted_model("7b", None).config == PRESETS["7b"]
    with pytest.raises(BadInput, match="there is no model '1.6b': did you mean 1.5b"):
        wanted_model("1.6b", None)
    with pytest.raises(BadInput, match="choose one of"):
        wanted_model("gpt", None)


def test_a_rate_that_was_measured_here_takes_the_place_of_the_estimate(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "helpers" / "status_example.json").read_text()
    example = StatusSnapshot.from_json(text)
    parameters = example.model.parameters
    for number, (name, rate, updated_unix_s) in enumerate(
        (("old", 10.0, 1.0), ("new", 640.0, 2.0), ("still", 0.0, 3.0))
    ):
        folder = tmp_path / f"{example.swarm_id}{'' if number == 0 else f'-{number + 1}'}"
        folder.mkdir()
        training = replace(example.training, tokens_per_s=rate)
        snapshot = replace(example, training=training, swarm_name=name, updated_unix_s=updated_unix_s)
        (folder / "status.json").write_text(snapshot.to_json())
    (tmp_path / f"{example.swarm_id}-9").mkdir()
    (tmp_path / f"{example.swarm_id}-9" / "status.json").write_text("{}")
    found = find_rate(tmp_path, parameters)
    assert found == MeasuredRate(640.0, "new") and find_rate(tmp_path, parameters + 1) is None
    plan = planned("1.5b", 12, 32)
    assert isinstance(plan, TrainingPlan) and found is not None
    assert with_rate(plan, SHAPE, found).step.seconds == 4 * 64 / 640.0


def test_the_json_has_every_figure() -> None:
    wanted = wanted_model("demo", None)
    here = machine(None, 8, 8)
    plan = make_plan(wanted.config, wanted.shape, here)
    assert isinstance(plan, TrainingPlan)
    found = as_json(plan, plan_traffic(wanted.spec, plan, here, 8), here, wanted.shape)
    assert found["tokens_per_s"] == wanted.shape.rows * wanted.shape.context / found["step_s"]
    assert found["fits"] and found["problem"] == "" and found["device_bytes"] == 0
    assert set(found) >= {"slots", "micro_batch", "ram_bytes", "disk_bytes", "contribution_bytes", "round_s", "rates"}
