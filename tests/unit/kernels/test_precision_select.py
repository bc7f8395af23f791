"""Which precision a machine gets: the table of cards, the wishes, and the ladder down."""

import subprocess
import sys

import pytest
import torch

from tscale.kernels.precision.capabilities import Capabilities, probe
from tscale.kernels.precision.select import WISHES, Backend, PrecisionPath, int8_is_faster, select

P = PrecisionPath
GB = 1 << 30


def nvidia(name: str, major: int, minor: int, triton: bool = True) -> Capabilities:
    return Capabilities("cuda", name, major, minor, "", triton, 12 * GB, major >= 8)


def amd(arch: str, bf16: bool = True) -> Capabilities:
    return Capabilities("rocm", "Radeon", 0, 0, arch, True, 16 * GB, bf16)


RTX2080, A100 = nvidia("RTX 2080", 7, 5), nvidia("A100", 8, 0)
RTX3060, RTX4090, RTX5090 = nvidia("RTX 3060", 8, 6), nvidia("RTX 4090", 8, 9), nvidia("RTX 5090", 12, 0)
H100, B200, LATER = nvidia("H100", 9, 0), nvidia("B200", 10, 0), nvidia("not built yet", 15, 1)
APPLE, OLD_APPLE = Capabilities("mps", "Apple GPU", bf16=True), Capabilities("mps", "Apple GPU")

TABLE = [
    (nvidia("GTX 1080", 6, 1), [P.FP32]),
    (RTX2080, [P.FP16, P.FP32]),
    (RTX3060, [P.FP8_STORAGE, P.BF16, P.FP32]),
    (A100, [P.BF16, P.FP32]),
    (RTX4090, [P.FP8_BLOCK, P.FP8_TENSOR, P.BF16, P.FP32]),
    (nvidia("RTX 4090", 8, 9, triton=False), [P.FP8_TENSOR, P.BF16, P.FP32]),
    (RTX5090, [P.FP8_BLOCK, P.FP8_TENSOR, P.BF16, P.FP32]),
    (H100, [P.FP8_BLOCK, P.FP8_TENSOR, P.BF16, P.FP32]),
    (B200, [P.FP8_BLOCK, P.FP8_TENSOR, P.BF16, P.FP32]),
    (LATER, [P.FP8_BLOCK, P.FP8_TENSOR, P.BF16, P.FP32]),
    (amd("gfx1030", bf16=False), [P.FP32]),
    (amd("gfx1100"), [P.BF16, P.FP32]),
    (amd("gfx1201"), [P.FP8_TENSOR, P.BF16, P.FP32]),
    (amd("gfx942"), [P.BF16, P.FP32]),
    (APPLE, [P.BF16, P.FP32]),
    (OLD_APPLE, [P.FP32]),
    (Capabilities(), [P.FP32]),
]


@pytest.mark.parametrize(("machine", "paths"), TABLE, ids=lambda v: v.name if isinstance(v, Capabilities) else "")
def test_every_machine_gets_its_path_and_the_steps_below_it(machine: Capabilities, paths: list[PrecisionPath]) -> None:
    selection = select(machine)
    assert [candidate.path for candidate in selection.ladder] == paths
    assert selection.path == paths[0] and machine.name in selection.reason


def test_who_computes_a_path() -> None:
    assert [c.backend for c in select(RTX4090).ladder] == [
        Backend.TRITON,
        Backend.SCALED_MM,
        Backend.TORCH,
        Backend.TORCH,
    ]
    assert select(amd("gfx1201")).ladder[0].backend == Backend.SCALED_MM
    assert [c.backend for c in select(Capabilities(), "fp8").ladder] == [Backend.EMULATION] * 3 + [Backend.TORCH]


@pytest.mark.parametrize(
    ("machine", "wish", "path"),
    [
        (RTX4090, "int8", P.INT8_FORWARD),
        (RTX2080, "int8", P.INT8_FORWARD),
        (RTX4090, "bf16", P.BF16),
        (RTX4090, "fp32", P.FP32),
        (RTX4090, "fp8", P.FP8_BLOCK),
        (RTX3060, "fp8", P.FP8_STORAGE),
        (amd("gfx1201"), "fp8", P.FP8_TENSOR),
        (Capabilities(), "fp8", P.FP8_BLOCK),
        (Capabilities(), "int8", P.INT8_FORWARD),
        (Capabilities(), "bf16", P.BF16),
    ],
)
def test_a_wish_is_granted_where_the_hardware_can(machine: Capabilities, wish: str, path: PrecisionPath) -> None:
    ladder = select(machine, wish).ladder
    assert ladder[0].path == path
    assert ladder[-1].path == P.FP32


@pytest.mark.parametrize(
    ("machine", "wish", "path"),
    [
        (RTX2080, "fp8", P.FP16),
        (RTX2080, "bf16", P.FP16),
        (APPLE, "fp8", P.BF16),
        (APPLE, "int8", P.BF16),
        (amd("gfx1100"), "int8", P.BF16),
        (OLD_APPLE, "bf16", P.FP32),
    ],
)
def test_a_wish_without_units_gets_the_automatic_choice_and_says_so(
    machine: Capabilities, wish: str, path: PrecisionPath
) -> None:
    selection = select(machine, wish)
    assert selection.path == path
    assert f"no units for {wish}" in selection.reason


def test_an_unknown_wish_is_refused() -> None:
    with pytest.raises(ValueError, match="auto, fp32, bf16, fp8, int8"):
        select(RTX4090, "fp4")


def test_int8_is_faster_than_fp8_on_the_rtx_40_only() -> None:
    faster = [machine.name for machine in (RTX2080, RTX3060, A100, RTX4090, H100, RTX5090) if int8_is_faster(machine)]
    assert faster == ["RTX 4090"]


def test_no_ladder_repeats_a_step_or_ends_elsewhere_than_in_float32() -> None:
    for machine in (row[0] for row in TABLE):
        for wish in WISHES:
            ladder = [candidate.path for candidate in select(machine, wish).ladder]
            assert len(set(ladder)) == len(ladder) and ladder[-1] == P.FP32


def test_the_probe_survives_a_torch_whose_driver_is_half_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> bool:
        raise RuntimeError("CUDA driver initialization failed")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    assert probe() == Capabilities()


def test_the_probe_reads_what_torch_says_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, total_memory, gcnArchName = "Radeon RX 7900", 24 * GB, "gfx1100:sramecc-:xnack-"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    seen = probe()
    assert (seen.device, seen.major, seen.minor, seen.bf16, seen.memory_bytes) == ("cuda", 7, 5, False, 24 * GB)
    monkeypatch.setattr(torch.version, "hip", "6.3")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    seen = probe()
    assert (seen.device, seen.arch, seen.torch_device) == ("rocm", "gfx1100", "cuda")


def test_choosing_and_testing_imports_no_triton() -> None:
    code = (
        "import sys; from tscale.kernels.precision.selftest import choose;"
        "from tscale.kernels.precision.capabilities import probe; choose(probe(), 'fp8');"
        "sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False, timeout=120).returncode == 0
