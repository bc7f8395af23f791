"""Checks of this machine before it joins a swarm: each gives a verdict, what was seen, and what to do about it."""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import importlib.metadata
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import psutil

from tscale.node.config import ComputeConfig
from tscale.node.netaddr import require_free_port
from tscale.node.specs import shipped_book_path
from tscale.node.statedir import nearest_folder
from tscale.protocol.errors import TscaleError
from tscale.protocol.identity import Identity
from tscale.protocol.presets import PRESET_NAMES

BOOK_SHA256 = "fe282a57094ed62e7144fb7c804a9748fc1c909bf3b49d06e7276015f9f67240"
MIN_FREE_BYTES = 200 << 20
GOOD_FREE_BYTES = 2 << 30
OLDEST_UNIX_S = 1_767_225_600.0
"""No correct clock shows a time before this program was written."""

_SLOWER = "training works, but slower than it could: look for a newer driver, torch or triton"
_TIMEX_BYTES = 512
_TIME_ERROR = 5

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Verdict:
    """`seen` is what was found; `advice` is empty when the level is ok."""

    check: str
    level: Level
    seen: str
    advice: str = ""


@dataclass(frozen=True)
class DoctorOptions:
    """Where the nodes' files are, where a node would listen (port 0: anywhere), and what it should train with."""

    state_dir: Path
    host: str
    port: int
    precision: str = "auto"
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    model: str = PRESET_NAMES[0]


def run_doctor(options: DoctorOptions) -> Iterator[Verdict]:
    """All checks in order, each as soon as it is done; a check that breaks is a failed one."""
    checks: tuple[tuple[str, Callable[[], Verdict]], ...] = (
        ("python", check_python),
        ("state folder", lambda: check_state_dir(options.state_dir)),
        ("disk", lambda: check_disk(options.state_dir)),
        ("clock", check_clock),
        ("port", lambda: check_port(options.host, options.port)),
        ("data", check_data),
        ("torch", check_torch),
        ("precision", lambda: check_precision(options.precision, options.compute.device)),
        ("gpu", check_gpu),
        ("limits", lambda: check_limits(options.compute)),
        ("training", lambda: check_training(options)),
        ("codec", check_codec),
        ("network", lambda: check_network(options.host)),
    )
    for name, check in checks:
        try:
            yield check()
        except TscaleError as error:
            yield Verdict(name, "fail", str(error), "follow the message")
        except MemoryError:
            yield Verdict(name, "fail", "there is not enough memory", "end other programs, or raise the limit (ulimit)")
        except OSError as error:
            seen = f"{type(error).__name__}: {error}"
            yield Verdict(name, "fail", seen, "check that the file or folder is there and that you may use it")
        except Exception as error:  # noqa: BLE001 - whatever breaks in here is what the person needs to know
            yield Verdict(name, "fail", f"{type(error).__name__}: {error}", "install again: make clean, then make test")


def check_python() -> Verdict:
    """The interpreter and this program's version."""
    version = ".".join(map(str, sys.version_info[:3]))
    return Verdict("python", "ok", f"Python {version}, tscale-node {importlib.metadata.version('tscale-node')}")


def check_state_dir(state_dir: Path) -> Verdict:
    """Whether files can be written there."""
    advice = "give a folder you may write to with --state-dir"
    blocking = next((path for path in (state_dir, *state_dir.parents) if path.exists() and not path.is_dir()), None)
    if blocking is not None:
        return Verdict("state folder", "fail", f"{state_dir}: {blocking} is a file, not a folder", advice)
    try:
        with tempfile.TemporaryFile(dir=nearest_folder(state_dir)) as stream:  # a check makes no folder
            stream.write(b"tscale")
            stream.flush()
    except OSError as error:
        return Verdict("state folder", "fail", f"{state_dir}: {error.strerror or error}", advice)
    return Verdict("state folder", "ok", str(state_dir))


def check_disk(state_dir: Path) -> Verdict:
    """Free space where the state is."""
    free_bytes = shutil.disk_usage(nearest_folder(state_dir)).free
    seen = f"{free_bytes / 1e9:.1f} GB free"
    if free_bytes < MIN_FREE_BYTES:
        return Verdict("disk", "fail", seen, f"free at least {MIN_FREE_BYTES >> 20} MB, or use --state-dir")
    if free_bytes < GOOD_FREE_BYTES:
        return Verdict("disk", "warn", seen, "enough for small models only: free 2 GB or more")
    return Verdict("disk", "ok", seen)


def check_clock(now_unix_s: float | None = None) -> Verdict:
    """Whether the clock is plausible, and on Linux whether the system keeps it right."""
    now = time.time() if now_unix_s is None else now_unix_s
    seen = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < OLDEST_UNIX_S:
        return Verdict("clock", "fail", seen, "the clock is wrong: switch on the system's time synchronisation")
    if _clock_is_synchronised() is False:
        advice = "the system does not synchronise it: switch that on, swarms need it right to a second"
        return Verdict("clock", "warn", seen, advice)
    return Verdict("clock", "ok", seen)


def check_port(host: str, port: int) -> Verdict:
    """Whether the node could listen there. Raises PortInUse with what to do."""
    require_free_port(host, port)
    return Verdict("port", "ok", f"{host} port {port} is free" if port else f"{host}, any free port")


def check_data() -> Verdict:
    """Whether the shipped text is complete."""
    found = hashlib.sha256(shipped_book_path().read_bytes()).hexdigest()
    if found != BOOK_SHA256:
        return Verdict("data", "fail", f"the shipped text has sha256 {found[:16]}...", "install again")
    return Verdict("data", "ok", "the shipped text is complete")


def check_torch() -> Verdict:
    """Whether torch computes: a product whose result is known."""
    import torch

    values = torch.arange(1024, dtype=torch.float32).reshape(32, 32)
    product = values @ torch.eye(32)
    gpu = "with a GPU" if torch.cuda.is_available() else "on the CPU"
    seen = f"torch {torch.__version__} {gpu}"
    if not torch.equal(product, values):
        return Verdict("torch", "fail", f"{seen} computes wrong products", "install torch again")
    return Verdict("torch", "ok", seen)


def check_precision(wish: str, device: str = "auto") -> Verdict:
    """Where and in what the model would be trained here, and what failed its self-test before it."""
    from tscale.kernels.precision.selftest import choose
    from tscale.node.worker.kernel_config import training_machine

    precision, _ = choose(training_machine(device), wish)
    if precision.steps:
        return Verdict("precision", "warn", precision.text, _SLOWER)
    if not precision.granted:
        return Verdict("precision", "warn", precision.text, 'write precision = "auto" below [training] in the config')
    return Verdict("precision", "ok", precision.text)


def check_gpu() -> Verdict:
    """Which GPU there is, and the fastest precision that is right on it."""
    from tscale.kernels.precision.capabilities import probe
    from tscale.kernels.precision.select import int8_is_faster
    from tscale.kernels.precision.selftest import choose

    machine = probe()
    if machine.device == "cpu":
        return Verdict("gpu", "ok", "none that torch can use")
    precision, _ = choose(machine)
    if precision.steps:
        return Verdict("gpu", "warn", precision.text, _SLOWER)
    hint = '; precision = "int8" may be faster' if int8_is_faster(machine) else ""
    return Verdict("gpu", "ok", precision.text + hint)


def check_limits(compute: ComputeConfig) -> Verdict:
    """Whether the settings of [compute] are this machine's: its memory, its card, a spill folder that takes files."""
    from tscale.node.suitability import require_folder
    from tscale.node.worker.kernel_config import training_machine

    machine = training_machine(compute.device)
    ram_bytes = int(psutil.virtual_memory().total)
    doubts = []
    if compute.ram_bytes > ram_bytes:
        doubts.append(f"ram_bytes is {compute.ram_bytes / 1e9:,.3g} GB and the machine has {ram_bytes / 1e9:,.3g} GB")
    if compute.vram_bytes and machine.device == "cpu":
        doubts.append("vram_bytes is set and no card is used")
    elif machine.memory_bytes and compute.vram_bytes > machine.memory_bytes:
        card_gb = machine.memory_bytes / 1e9
        doubts.append(f"vram_bytes is {compute.vram_bytes / 1e9:,.3g} GB and the card has {card_gb:,.3g} GB")
    seen = "no spill folder is set"
    if compute.spill_dir:
        folder = Path(compute.spill_dir).expanduser()
        seen = f"{folder} can be written, {require_folder(folder) / 1e9:,.3g} GB free"
    if doubts:
        return Verdict("limits", "warn", "; ".join(doubts), "correct it below [compute] in the config")
    return Verdict("limits", "ok", seen)


def check_training(options: DoctorOptions) -> Verdict:
    """Whether and how a model would be trained here with the settings, and whether the disks hold what that takes."""
    from tscale.node.planning.models import wanted_model
    from tscale.node.planning.report import gigabytes
    from tscale.node.suitability import require_suitable
    from tscale.node.worker.kernel_config import kernel_config

    wanted = wanted_model(options.model, None)
    kernels = kernel_config(wanted.spec)
    inner = replace(kernels.inner, batch=wanted.shape.rows, context=wanted.shape.context)
    found = require_suitable(replace(kernels, model=wanted.config, inner=inner), options.compute, options.state_dir)
    seen = f"{options.model} on {found.arrangement.text}"
    if found.arrangement.warning:
        return Verdict("training", "warn", f"{seen}; {found.arrangement.warning}", "see `tscale-node plan`")
    place, spill = nearest_folder(options.state_dir), nearest_folder(found.spill_dir)
    needed_bytes = found.stored_bytes + (found.spill_bytes if place.stat().st_dev == spill.stat().st_dev else 0)
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < needed_bytes:
        seen = f"{seen}: {gigabytes(needed_bytes)} of disk are needed, {gigabytes(free_bytes)} are free"
        return Verdict("training", "fail", seen, "free space, or take another --state-dir or compute.spill_dir")
    return Verdict("training", "ok", seen)


def check_codec() -> Verdict:
    """Whether the fast codec and the plain one give equal bytes here."""
    import numpy as np

    from tscale.kernels.codec import Rung, encode
    from tscale.kernels.layout import Layout, TensorSpec

    layout = Layout((TensorSpec("matrix", (96, 100), "matrix"), TensorSpec("small", (300,), "small")))
    values = np.random.default_rng(1).standard_normal(layout.numel).astype(np.float32)
    blobs, rests = [], []
    for name in ("reference", "numba"):
        rest = values.copy()
        blobs.append(encode(rest, layout, Rung(64, 2), impl=name))
        rests.append(rest)
    if blobs[0] != blobs[1] or not np.array_equal(rests[0], rests[1]):
        return Verdict("codec", "fail", "the fast codec gives other bytes than the plain one", "report this machine")
    return Verdict("codec", "ok", f"fast and plain codec agree ({len(blobs[0])} bytes)")


def check_network(host: str) -> Verdict:
    """Whether the network process starts, listens and stops."""
    from tscale.node.transport.p2p import P2PConfig, P2PTransport

    async def start_and_stop(key_file: Path) -> list[str]:
        transport = P2PTransport(P2PConfig(key_file=key_file, swarm_id="doctor", host=host))
        try:
            await transport.start()
            return transport.own_addrs()
        finally:
            await transport.close()

    with tempfile.TemporaryDirectory(prefix="tscale-doctor-") as folder:
        key_file = Path(folder) / "identity.key"
        key_file.touch(mode=0o600)
        key_file.write_bytes(Identity.from_secret(hashlib.sha256(folder.encode()).digest()).key_file())
        addrs = asyncio.run(start_and_stop(key_file))
    if not addrs:
        return Verdict("network", "warn", "it starts, but no address was found", "is there a network connection?")
    return Verdict("network", "ok", f"others would dial {addrs[0].split('/p2p/')[0]}")


def _clock_is_synchronised() -> bool | None:
    """The kernel's word on it; None where it can't be asked."""
    if sys.platform != "linux":
        return None
    try:
        # struct timex all zero: modes 0 reads the state and sets nothing
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _TIME_ERROR
