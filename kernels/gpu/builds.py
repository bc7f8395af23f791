"""How each kernel is built and launched: one place for the launches and for ahead-of-time compilation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

BLOCK = 128  # values per scale, and the side of a product's tile
ELEMENTS = 2048  # per program of an element-wise kernel
CHUNK_LANES = 32  # chunks per program of `choose`
BAND = 8  # rows of tiles that a band of the product has


@dataclass(frozen=True)
class Build:
    """One kernel with its constants fixed.

    types: run-time arguments in order, name -> Triton type. aligned: arguments that are multiples of 16 (addresses and
    sizes); the launch finds out by itself, ahead-of-time compilation has to be told. fusion: whether a multiplication
    and an addition may become one operation. fp8_units: whether it needs a card with an fp8 matrix unit.
    """

    module: str
    kernel: str
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...] = ()
    warps: int = 4
    stages: int = 1
    fusion: bool = True
    fp8_units: bool = False
    options: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        options = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": self.fusion}
        object.__setattr__(self, "options", options)

    def function(self) -> Any:
        """The Triton function. Raises ImportError where Triton is missing."""
        return getattr(import_module(self.module), self.kernel)

    def launch(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Runs it on the arguments' device (on the CPU only under Triton's interpreter)."""
        self.function()[grid](*arguments, **self.constants, **self.options)


def encode_build() -> Build:
    """float32 -> codes."""
    return Build(
        module="tscale.kernels.gpu.e4m3_kernels",
        kernel="encode",
        types={"values": "*fp32", "codes": "*u8", "count": "i64"},
        constants={"BLOCK": ELEMENTS},
        aligned=("values", "codes", "count"),
    )


def decode_build() -> Build:
    """Codes -> float32 bits."""
    return Build(
        module="tscale.kernels.gpu.e4m3_kernels",
        kernel="decode",
        types={"codes": "*u8", "values": "*i32", "count": "i64"},
        constants={"BLOCK": ELEMENTS},
        aligned=("codes", "values", "count"),
    )


def quantize_build(bfloat16: bool, square: bool) -> Build:
    """A matrix -> codes as it lies and transposed; square blocks are for weights."""
    pointers = {
        "values": "*i16" if bfloat16 else "*fp32",
        "row_codes": "*u8",
        "row_scales": "*fp32",
        "column_codes": "*u8",
        "column_scales": "*fp32",
    }
    return Build(
        module="tscale.kernels.gpu.quantize_kernels",
        kernel="quantize_dual",
        types={**pointers, "rows": "i32", "columns": "i32"},
        constants={"BFLOAT16": bfloat16, "SQUARE": square},
        aligned=(*pointers, "rows", "columns"),
        warps=8,
    )


def dequantize_build() -> Build:
    """Codes and scales -> bfloat16: fp8 as storage, for cards that compute in bfloat16."""
    pointers = {"codes": "*u8", "scales": "*fp32", "values": "*i16"}
    return Build(
        module="tscale.kernels.gpu.quantize_kernels",
        kernel="dequantize",
        types={**pointers, "rows": "i32", "columns": "i32", "scale_rows": "i32"},
        constants={},
        aligned=(*pointers, "rows", "columns"),
        warps=8,
    )


def product_build(a_rows: int) -> Build:
    """a [P, K] times b [Q, K] transposed; a's rows per scale are 1 or 128. Eight warps, or the tile spills."""
    pointers = {"a_codes": "*fp8e4nv", "a_scales": "*fp32", "b_codes": "*fp8e4nv", "b_scales": "*fp32"}
    sizes = {"P": "i32", "Q": "i32", "K": "i32"}
    return Build(
        module="tscale.kernels.gpu.product_kernels",
        kernel="block_product",
        types={**pointers, "product": "*fp32", **sizes},
        constants={"A_ROWS": a_rows, "SIDE": BLOCK, "BAND": BAND},
        aligned=(*pointers, "product", *sizes),
        warps=8,
        stages=3,
        fp8_units=True,
    )


def select_build() -> Build:
    """Values of chunks -> candidates."""
    pointers = {"values": "*i32", "starts": "*i64", "lengths": "*i32", "keeps": "*i32"}
    return Build(
        module="tscale.kernels.gpu.delta_kernels",
        kernel="select",
        types={**pointers, "positions": "*i16", "kept": "*i32", "found": "*i32", "W": "i32"},
        constants={},
        aligned=(*pointers, "positions", "kept", "found"),
        warps=8,
    )


def choose_build() -> Build:
    """Candidates -> magnitude codes and flags. Float64 sums have to round like the reference's: no fusion."""
    return Build(
        module="tscale.kernels.gpu.delta_kernels",
        kernel="choose",
        types={"kept": "*fp32", "found": "*i32", "codes": "*u8", "flags": "*u8", "chunks": "i32", "W": "i32"},
        constants={"BLOCK": CHUNK_LANES},
        aligned=("kept", "found", "codes", "flags"),
        warps=1,
        fusion=False,
    )


def all_builds() -> dict[str, Build]:
    """Every build that is launched, with the name that tables show."""
    return {
        "e4m3 encode": encode_build(),
        "e4m3 decode": decode_build(),
        "quantize both ways in 1x128, float32": quantize_build(False, False),
        "quantize both ways in 1x128, bfloat16": quantize_build(True, False),
        "quantize in 128x128, float32": quantize_build(False, True),
        "quantize in 128x128, bfloat16": quantize_build(True, True),
        "dequantize to bfloat16": dequantize_build(),
        "product 1x128 by 1x128": product_build(1),
        "product 128x128 by 1x128": product_build(BLOCK),
        "delta select": select_build(),
        "delta magnitudes": choose_build(),
    }
