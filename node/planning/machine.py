"""The machine that a plan is made for: asked of the system, measured in a moment, or given by the person."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import psutil
import torch

from tscale.kernels.precision.capabilities import Capabilities, probe
from tscale.protocol.errors import BadInput

ASSUMED_CARD_FLOPS_PER_S = 40e12
"""Products with bf16 inputs and float32 sums on a card of the 12 to 16 GB class, at two thirds of the data sheet."""
ASSUMED_BUS_BYTES_PER_S = 12e9
"""PCIe 4.0 x16 from pinned memory reaches 25, but many cards sit in x8 slots."""
ASSUMED_DISK_BYTES_PER_S = 1.5e9
"""A solid-state disk on PCIe, read and written in long runs."""
DEFAULT_UPLOAD_BITS_PER_S = 20e6
SMALLEST_BARE_BYTES = 1 << 20
"""Of a number without a unit: fewer bytes are no memory, so a unit was forgotten."""
LARGEST_BYTES = 10**15
SMALLEST_BITS_PER_S, LARGEST_BITS_PER_S = 1e3, 1e12
"""Between these is an uplink; less is a forgotten unit."""
SMALLEST_TFLOPS, LARGEST_TFLOPS = 1e-3, 1e5
PROBE_SIZE = 512
PROBE_S = 0.2
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}


@dataclass(frozen=True)
class Machine:
    """Sizes in bytes, rates per second. `device_bytes` is None where the processor computes, from main memory, and
    `disk_bytes` where nobody has said how much is free. `rates` says where the speeds come from.
    """

    name: str
    device_bytes: int | None
    ram_bytes: int
    disk_bytes: int | None
    flops_per_s: float
    bus_bytes_per_s: float
    upload_bits_per_s: float
    rates: str
    disk_bytes_per_s: float = ASSUMED_DISK_BYTES_PER_S


def parse_bytes(text: str, option: str) -> int:
    """`12GB`, `24 GiB`, `800MB` or plain bytes. Raises BadInput."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if found is None:
        raise BadInput(f"{option} is a size like 12GB or 24GiB, not {_shortened(text)}")
    size = float(found[1]) * _UNITS[found[2] or ""]
    if size < 1 or (found[2] is None and size < SMALLEST_BARE_BYTES):
        raise BadInput(f"{option} is a size with its unit, like 12GB or 24GiB, not {text!r}")
    if size > LARGEST_BYTES:
        raise BadInput(f"{option} is a size of at most {LARGEST_BYTES // 10**12} TB, not {_shortened(text)}")
    return int(size)


def parse_bits_per_s(text: str, option: str) -> float:
    """`20Mbit`, `1.5Gbit`, or plain bits per second from a thousand on. Raises BadInput."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmg])?(?:bit(?:/s|ps)?|bps)?\s*", text.lower())
    rate = float(found[1]) * _UNITS[found[2] or ""] if found is not None else 0.0
    if rate <= 0.0:
        raise BadInput(f"{option} is a rate like 20Mbit, not {_shortened(text)}")
    if rate < SMALLEST_BITS_PER_S:
        raise BadInput(f"{option} is a rate with its unit, like 20Mbit, not {_shortened(text)}")
    if rate > LARGEST_BITS_PER_S:
        raise BadInput(f"{option} is a rate of at most {LARGEST_BITS_PER_S / 1e9:g}Gbit, not {_shortened(text)}")
    return rate


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 32 else f"{text[:32]}...")


def this_machine(
    disk_bytes: int | None,
    upload_bits_per_s: float = DEFAULT_UPLOAD_BITS_PER_S,
    found: Capabilities | None = None,
) -> Machine:
    """What is here, with the device `found` (None: the best). Speeds are measured with a product of some hundred rows,
    which takes a fraction of a second."""
    found = found or probe()
    ram_bytes = int(psutil.virtual_memory().total)
    device = torch.device(found.torch_device)
    flops = _measured_flops_per_s(device, found)
    if found.device == "cpu":
        return Machine("the processor", None, ram_bytes, disk_bytes, flops, 0.0, upload_bits_per_s, "measured")
    bus = _measured_bus_bytes_per_s(device)
    memory_bytes = found.memory_bytes or ram_bytes
    return Machine(found.name, memory_bytes, ram_bytes, disk_bytes, flops, bus, upload_bits_per_s, "measured")


@dataclass(frozen=True)
class Given:
    """What a person says of another machine; None is not said."""

    vram_bytes: int | None = None
    ram_bytes: int | None = None
    disk_bytes: int | None = None
    tflops: float | None = None

    @property
    def is_here(self) -> bool:
        """Whether nothing was said, so that this machine is meant."""
        return self == Given()


def with_given(machine: Machine, given: Given) -> Machine:
    """The machine with what the person says of another one. A card that is not here has assumed speeds.

    The disk of a machine that is not this one is unknown unless it is given. Raises BadInput.
    """
    if given.vram_bytes is not None or given.ram_bytes is not None or given.disk_bytes is not None:
        machine = replace(machine, ram_bytes=given.ram_bytes or machine.ram_bytes, disk_bytes=given.disk_bytes)
    if given.vram_bytes is not None and given.vram_bytes != machine.device_bytes:
        machine = replace(
            machine,
            name=f"a card with {given.vram_bytes / 1e9:.3g} GB",
            device_bytes=given.vram_bytes,
            flops_per_s=ASSUMED_CARD_FLOPS_PER_S,
            bus_bytes_per_s=ASSUMED_BUS_BYTES_PER_S,
            rates="assumed: give --tflops for yours",
        )
    if given.tflops is not None:
        if not given.tflops > 0.0:
            raise BadInput(f"--tflops is a number above 0, not {given.tflops}")
        if not SMALLEST_TFLOPS <= given.tflops <= LARGEST_TFLOPS:
            limits = f"from {SMALLEST_TFLOPS:g} to {LARGEST_TFLOPS:,.0f}"
            raise BadInput(f"--tflops is {limits} (TFLOP/s; a laptop's processor has 0.1), not {given.tflops:g}")
        machine = replace(machine, flops_per_s=given.tflops * 1e12, rates="given")
    return machine


def _measured_flops_per_s(device: torch.device, found: Capabilities) -> float:
    size = PROBE_SIZE if device.type == "cpu" else 8 * PROBE_SIZE
    dtype = torch.bfloat16 if device.type != "cpu" and found.bf16 else torch.float32
    a = torch.ones(size, size, dtype=dtype, device=device)
    return 2.0 * float(size**3) * _per_second(lambda: torch.mm(a, a), device)


def _measured_bus_bytes_per_s(device: torch.device) -> float:
    host = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty_like(host, device=device)
    return float(host.numel()) * _per_second(lambda: target.copy_(host, non_blocking=True), device)


def _per_second(call: Callable[[], object], device: torch.device) -> float:
    """How often a call runs in a second, after one that does not count."""
    done, begin_s = -1, 0.0
    while done < 1 or time.perf_counter() - begin_s < PROBE_S:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        done += 1
        if done == 0:
            begin_s = time.perf_counter()
    return done / (time.perf_counter() - begin_s)
