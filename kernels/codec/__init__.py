"""The delta codec: top-k with sign and magnitude bits, entropy-coded positions."""

from tscale.kernels.codec.decode import Decoded, contribution_bits_per_parameter, decode, verify
from tscale.kernels.codec.encode import encode
from tscale.kernels.codec.errors import CodecError
from tscale.kernels.codec.rung import CHUNK, Rung

__all__ = ["CHUNK", "CodecError", "Decoded", "Rung", "contribution_bits_per_parameter", "decode", "encode", "verify"]
