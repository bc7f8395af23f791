"""Everything that needs a GPU to be known, in one run of less than eight minutes.

`python -m tests.bench.gpu` prints one JSON object: whether each kernel equals its CPU reference, how fast products,
quantization and the delta encoder are, and step times and peak memory of training. It writes docs/results/gpu.md too.
Exit code 2 without a GPU, 1 when a kernel differs from its reference. What fails is reported and the rest goes on;
what would begin after seven minutes is left out and said.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.bench.gpu_training import train_1_5b, train_125m
from tscale.kernels.codec import Rung, encode
from tscale.kernels.gpu import Coded, decode_e4m3, dequantize, encode_delta, encode_e4m3
from tscale.kernels.gpu.backend import TritonBackend
from tscale.kernels.layout import Layout, TensorSpec
from tscale.kernels.precision.backends import BlockEmulation

PAGE = Path(__file__).parents[2] / "docs" / "results" / "gpu.md"
LAST_START_S = 420.0
TIMED_S = 0.3  # per figure of a product
# weight shapes [N, K] of the 1.5B model: width 1280, 20 heads of 128, four products per attention output
SHAPES_1_5B = {
    "qc": (5120, 1280),
    "kv": (5120, 1280),
    "combine": (1280, 10240),
    "expand": (2560, 1280),
    "contract": (1280, 2560),
}


@dataclass(frozen=True)
class Size:
    """How much is computed. `side` of the square product, `tokens` of a layer's product, `chunks` of the encoder."""

    values: int = 1 << 24
    side: int = 4096
    tokens: int = 8192
    chunks: int = 16384


def correctness(size: Size, device: str) -> dict[str, Any]:
    """Each kernel against its CPU reference: the number of codes or bytes that differ, and the product's error."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (size.values,), generator=generator).to(torch.int32)
    # half of them anywhere, half where e4m3 has values
    bits[::2] = (bits[::2] & ~0x7F800000) | ((bits[::2] >> 8 & 15) + 114 << 23)
    floats = bits.view(torch.float32)
    codes = torch.arange(256, dtype=torch.uint8)
    decoded = decode_e4m3(codes.to(device)).cpu().view(torch.int32)
    result: dict[str, Any] = {
        "e4m3 encode": _differing(encode_e4m3(floats.to(device)), floats.to(torch.float8_e4m3fn).view(torch.uint8)),
        "e4m3 decode": _differing(decoded, codes.view(torch.float8_e4m3fn).float().view(torch.int32)),
    }
    for dtype in (torch.float32, torch.bfloat16):
        tile = torch.randn(1040, 784, generator=generator) * torch.randn(1040, 1, generator=generator).mul(5).exp()
        tile = tile.to(dtype)
        for name in ("both_ways", "weight"):
            pairs = zip(
                getattr(TritonBackend(), name)(tile.to(device)), getattr(BlockEmulation(), name)(tile), strict=True
            )
            result[f"quantize {name}, {dtype}"] = sum(
                _differing(ours.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
                + _differing(ours.scales, theirs.scales)
                for ours, theirs in pairs
            )
    result["product, relative error"] = _product_error(device, generator)
    result["delta encoder"] = delta_bytes_differ(size.chunks)
    return result


def _product_error(device: str, generator: torch.Generator) -> float:
    weight, x = torch.randn(1040, 784, generator=generator), torch.randn(784, 528, generator=generator)
    emulation, kernels = BlockEmulation(), TritonBackend()
    expected = emulation.multiply(emulation.weight(weight)[0], emulation.both_ways(x)[1])
    product = kernels.multiply(kernels.weight(weight.to(device))[0], kernels.both_ways(x.to(device))[1])
    return float((product.cpu() - expected).abs().max() / expected.abs().max())


def delta_bytes_differ(chunks: int) -> int:
    """0 when contributions and residuals have the CPU codec's bytes, at a sparse and at a masked rung."""
    layout = Layout((TensorSpec("a", (chunks - 1, 4096), "matrix"), TensorSpec("b", (3000,), "matrix")))
    generator, differ = np.random.default_rng(0), 0
    for rung in (Rung(64), Rung(1024)):
        ours = (generator.standard_t(3, layout.numel) * 0.01).astype(np.float32)
        theirs = ours.copy()
        differ += encode_delta(ours, layout, rung) != encode(theirs, layout, rung)
        differ += ours.tobytes() != theirs.tobytes()
    return differ


def failures(found: dict[str, Any]) -> list[str]:
    """The names of what is not equal to its reference. Hopper's unit sums with few bits: hence the product's bound."""
    bounds = {"product, relative error": 1e-3}
    return [name for name, value in found.items() if not value <= bounds.get(name, 0)]


def products(size: Size) -> dict[str, Any]:
    """TFLOP/s of fp8, int8 and bf16 products at `side` cubed, and at the 1.5B model's shapes with `tokens` columns."""
    shapes = {f"{size.side} cubed": (size.side, size.side, size.side)}
    shapes |= {name: (n, size.tokens, k) for name, (n, k) in SHAPES_1_5B.items()}
    return {name: _product_speeds(*shape) for name, shape in shapes.items()}


def _product_speeds(n: int, m: int, k: int) -> dict[str, Any]:
    weight, x = torch.randn(n, k, device="cuda"), torch.randn(k, m, device="cuda")
    backend = TritonBackend()
    weight8, x8 = backend.weight(weight)[0], backend.both_ways(x)[1]
    weight16, x16 = weight.bfloat16(), x.bfloat16()
    whole_weight, whole_x = weight.to(torch.int8), x.t().contiguous().to(torch.int8)
    works: dict[str, Callable[[], object]] = {
        "fp8 blocks": partial(backend.multiply, weight8, x8),
        "fp8 with quantization": lambda: backend.multiply(backend.weight(weight)[0], backend.both_ways(x)[1]),
        "int8": lambda: torch._int_mm(whole_weight, whole_x.t()),
        "bf16": lambda: torch.mm(weight16, x16),
    }
    return {
        name: _or_error(lambda work=work: round(2e-12 * n * m * k / _seconds(work), 1)) for name, work in works.items()
    }


def throughput(size: Size) -> dict[str, Any]:
    """Quantization and dequantization in GB/s of memory moved; the encoder in millions of parameters a second."""
    side = size.side
    tile = torch.randn(side, side, device="cuda")
    backend = TritonBackend()
    rows = backend.both_ways(tile)[0]
    coded = Coded(rows.codes, rows.scales)
    layout = Layout((TensorSpec("a", (size.chunks, 4096), "matrix"),))
    residual = np.random.default_rng(0).standard_normal(layout.numel, dtype=np.float32)
    encode_delta(residual.copy(), layout, Rung(64))
    started = time.perf_counter()
    encode_delta(residual.copy(), layout, Rung(64))
    encoder_s = time.perf_counter() - started
    return {
        "quantize both ways, float32, GB/s": round(6e-9 * side**2 / _seconds(lambda: backend.both_ways(tile))),
        "dequantize, bfloat16, GB/s": round(3e-9 * side**2 / _seconds(lambda: dequantize(coded))),
        "delta encoder with packing, Mparam/s": round(1e-6 * layout.numel / encoder_s),
    }


def _differing(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    return int((ours.cpu() != theirs).sum())


def _seconds(work: Callable[[], object]) -> float:
    """Median time of one call, from events on the stream."""
    work()
    torch.cuda.synchronize()
    times: list[float] = []
    while sum(times) < TIMED_S and len(times) < 50:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _or_error(work: Callable[[], Any]) -> Any:
    """What `work` returns, or the first line of what went wrong: one failure must not cost the other figures."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]}


def report(size: Size) -> dict[str, Any]:
    """All sections, each with the seconds it took."""
    started = time.perf_counter()
    properties = torch.cuda.get_device_properties(0)
    result: dict[str, Any] = {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "torch": torch.__version__,
    }
    sections: dict[str, Callable[[], Any]] = {
        "correctness": partial(correctness, size, "cuda"),
        "products, TFLOP/s": partial(products, size),
        "throughput": partial(throughput, size),
        "training 125m": train_125m,
        "training 1.5b": train_1_5b,
    }
    for name, section in sections.items():
        begun = time.perf_counter()
        late = begun - started > LAST_START_S
        found = {"error": "left out: no time left"} if late else _or_error(section)
        result[name] = {**found, "seconds": round(time.perf_counter() - begun, 1)}
        torch.cuda.empty_cache()
    result["seconds"] = round(time.perf_counter() - started, 1)
    return result


def page(result: dict[str, Any], date: str) -> str:
    """docs/results/gpu.md with the figures."""
    return (
        f"# On a GPU\n\nMeasured on {date} by `python -m tests.bench.gpu` on one {result['device']} "
        f"(compute capability {result['capability']}), torch {result['torch']}.\n\n"
        f"```json\n{json.dumps(result, indent=2)}\n```\n"
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--no-page", action="store_true", help="don't write docs/results/gpu.md")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: this script measures one. It needs a CUDA card and a torch with CUDA.", file=sys.stderr)
        sys.exit(2)
    result = report(Size())
    print(json.dumps(result, indent=2))
    if not arguments.no_page:
        PAGE.write_text(page(result, time.strftime("%Y-%m-%d", time.gmtime())))
    found = {name: value for name, value in result["correctness"].items() if name != "seconds"}
    wrong = ["correctness did not run"] if "error" in found else failures(found)
    if wrong:
        print("differs from its reference: " + ", ".join(wrong), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
