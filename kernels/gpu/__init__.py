"""Triton kernels: e4m3 codes, block quantization, the block-scaled fp8 product, the delta encoder's selection.

Importing this package needs no Triton and no GPU. The first call does; `ImportError` says that Triton is missing.
Triton's own interpreter (TRITON_INTERPRET=1, set before the first call) runs every kernel on CPU tensors.

All blocks are 128 values long. Codes are uint8, the bits of torch.float8_e4m3fn. Scales are float32 and a value is
code * scale. A matrix [R, K] has its scales as [R, ceil(K / 128)], one per row and block, or, for weights, as
[ceil(R / 128), ceil(K / 128)], one per square block.
"""

from tscale.kernels.gpu.delta import encode_delta
from tscale.kernels.gpu.fp8 import (
    Coded,
    DualCoded,
    ShapeError,
    block_product,
    decode_e4m3,
    dequantize,
    encode_e4m3,
    quantize_dual,
    quantize_weight,
)

__all__ = [
    "Coded",
    "DualCoded",
    "ShapeError",
    "block_product",
    "decode_e4m3",
    "dequantize",
    "encode_delta",
    "encode_e4m3",
    "quantize_dual",
    "quantize_weight",
]
