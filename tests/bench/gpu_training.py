"""Step time and peak memory of training on a GPU: bf16 and fp8 with all layers resident, fp8 with two slots."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch

from tscale.kernels.inner import InnerConfig
from tscale.kernels.model_config import PRESETS, ModelConfig, model_layout
from tscale.kernels.offload.cuda import CudaTransfer
from tscale.kernels.offload.plan import OffloadPlan
from tscale.kernels.offload.trainer import OffloadParts, OffloadTrainer
from tscale.kernels.offload.transfer import Transfer
from tscale.kernels.precision.products import product_for
from tscale.kernels.precision.select import Backend, PrecisionPath

STEPS = 3  # timed, after one that compiles
CHECK_BYTES = 1 << 28  # of a copy that measures the bus


@dataclass(frozen=True)
class Run:
    """One way to train: `slots` of weights on the card (None: every layer resident)."""

    name: str
    path: PrecisionPath
    backend: Backend
    slots: int | None


RUNS = (
    Run("bf16, resident", PrecisionPath.BF16, Backend.TORCH, None),
    Run("fp8, resident", PrecisionPath.FP8_BLOCK, Backend.TRITON, None),
    Run("fp8, 2 slots", PrecisionPath.FP8_BLOCK, Backend.TRITON, 2),
)


@dataclass(frozen=True)
class Work:
    """A model and what a step of it is: `rows` sequences of `context` tokens, `micro_rows` at a time."""

    model: ModelConfig
    rows: int
    micro_rows: int
    context: int


def train(work: Work, transfer: Transfer, run: Run, flat: np.ndarray) -> dict[str, Any]:
    """Median seconds of a step, tokens a second, copied bytes a step and (CUDA) peak memory. Changes `flat` [P]."""
    cfg, layers = work.model, work.model.layers
    resident = run.slots is None
    plan = OffloadPlan(layers + 2 if resident else run.slots, work.micro_rows, "device" if resident else "host")
    inner = InnerConfig(
        batch=work.rows,
        context=work.context,
        lr_muon=1e-3,
        lr_adam=1e-4,
        weight_decay=0.0,
        momentum=0.95,
        warmup_tokens=0,
        schedule_tokens=1,
        final_lr_fraction=1.0,
    )
    counts = np.ones(cfg.vocab, dtype=np.int64)
    parts = OffloadParts(plan, transfer, product_for(run.path, run.backend))
    trainer = OffloadTrainer(cfg, inner, flat, counts, parts)
    tokens = np.random.default_rng(0).integers(0, cfg.vocab, (work.rows, work.context + 1))
    on_cuda = transfer.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    losses, times = [trainer.step(tokens, 1.0)], []
    before = transfer.traffic.to_device_bytes, transfer.traffic.to_host_bytes
    for _ in range(STEPS):
        begun = time.perf_counter()
        losses.append(trainer.step(tokens, 1.0))
        transfer.finish()
        if on_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    step_s = statistics.median(times)
    result: dict[str, Any] = {
        "step_s": round(step_s, 4),
        "tokens_per_s": round(work.rows * work.context / step_s),
        "to_device_bytes": (transfer.traffic.to_device_bytes - before[0]) // STEPS,
        "to_host_bytes": (transfer.traffic.to_host_bytes - before[1]) // STEPS,
        "losses": [round(loss, 4) for loss in losses],
    }
    if on_cuda:
        result["peak_bytes"] = torch.cuda.max_memory_allocated()
    return result


def overlap(resident: dict[str, Any], offloaded: dict[str, Any], bus_bytes_per_s: float) -> dict[str, Any]:
    """How much of the copying was hidden: 1 when offloading costs nothing, 0 when every copy was waited for.

    The two directions run at the same time, so the busier one counts.
    """
    copy_s = max(offloaded["to_device_bytes"], offloaded["to_host_bytes"]) / bus_bytes_per_s
    waited_s = max(offloaded["step_s"] - resident["step_s"], 0.0)
    hidden = max(0.0, 1.0 - waited_s / copy_s) if copy_s else 1.0
    slowdown = offloaded["step_s"] / resident["step_s"]
    return {"copy_s": round(copy_s, 4), "hidden": round(hidden, 3), "times_resident": round(slowdown, 3)}


def compare(work: Work) -> dict[str, Any]:
    """All of RUNS on the card from equal parameters, and the overlap of the last. Needs CUDA."""
    layout = model_layout(work.model)
    boundary = 2 * work.rows * work.context * work.model.width * (work.model.layers + 1)
    need = 4 * (4 * layout.numel + boundary)  # parameters, their copy, momentum, moments; states and their gradients
    if need > psutil.virtual_memory().available:
        return {"error": f"needs {need >> 30} GiB of main memory"}
    start = torch.empty(layout.numel).normal_(0, 0.5, generator=torch.Generator().manual_seed(0)).numpy()
    bus = bus_bytes_per_s()
    result: dict[str, Any] = {"parameters": layout.numel, "bus_bytes_per_s": round(bus)}
    for run in RUNS:
        flat, transfer = start.copy(), CudaTransfer()
        try:
            result[run.name] = train(work, transfer, run, flat)
        except (RuntimeError, ValueError, ImportError) as error:
            result[run.name] = {"error": str(error).splitlines()[0][:300]}
        transfer.close()
        torch.cuda.empty_cache()
    if "step_s" in result["fp8, resident"] and "step_s" in result["fp8, 2 slots"]:
        result["overlap"] = overlap(result["fp8, resident"], result["fp8, 2 slots"], bus)
    return result


def bus_bytes_per_s() -> float:
    """Pinned host memory to the card."""
    host, card = torch.empty(CHECK_BYTES // 4, pin_memory=True), torch.empty(CHECK_BYTES // 4, device="cuda")
    card.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(4):
        card.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return 4 * CHECK_BYTES / (time.perf_counter() - begun)


train_125m = partial(compare, Work(PRESETS["125m"], rows=16, micro_rows=8, context=1024))
train_1_5b = partial(compare, Work(PRESETS["1.5b"], rows=16, micro_rows=4, context=1024))
