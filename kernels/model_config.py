"""Sizes of the tscale transformer: configuration, presets, attention reach of each layer, parameter layout.

Shapes below: D state width, H heads, q head width, P = H*q, F = P*relu the feed-forward width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from tscale.kernels.layout import Layout, TensorSpec

NARROW_WINDOW_TOKENS = 64
NARROW_SLOPE = 0.5


@dataclass(frozen=True)
class ModelConfig:
    """A transformer of the tscale kind. `window` is the reach of the full-width layers, in tokens.

    `head_dim` is also the width of the normalisation groups, so it divides `width`; RoPE turns pairs inside blocks
    of half a head, so it is a multiple of 4. `relu` is the feed-forward width in units of `heads * head_dim`;
    `combine` is the number of products each attention output enters (a power of two). Raises ValueError.
    """

    kind: str
    width: int
    heads: int
    head_dim: int
    layers: int
    window: int
    vocab: int
    relu: int
    combine: int = 4

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit each other."""
        if self.kind != "tscale":
            raise ValueError(f"unknown model kind {self.kind!r}")
        sizes = (self.width, self.heads, self.head_dim, self.layers, self.window, self.vocab, self.relu, self.combine)
        if min(sizes) < 1:
            raise ValueError("every model size must be at least 1")
        if self.head_dim % 4 or self.width % self.head_dim:
            raise ValueError("head_dim must be a multiple of 4 and divide the width")
        if self.combine & (self.combine - 1) or self.head_dim % self.combine:
            raise ValueError("combine must be a power of two that divides head_dim")

    @property
    def projection_width(self) -> int:
        """P: rows of each of the four attention projections."""
        return self.heads * self.head_dim

    @property
    def relu_width(self) -> int:
        """F: rows of the feed-forward expansion."""
        return self.projection_width * self.relu


@dataclass(frozen=True)
class LayerReach:
    """How far back a layer looks: `window` tokens, with scores falling by ln(2)*`slope` per token of distance."""

    window: int
    slope: float


def layer_reaches(cfg: ModelConfig) -> tuple[LayerReach, ...]:
    """Reach of every layer: the first group(s) of two look one token back, the rest alternate narrow and full."""
    groups = (cfg.layers + 1) // 2
    single = 2 * max(1, groups // 6)
    narrow = LayerReach(min(NARROW_WINDOW_TOKENS, cfg.window), NARROW_SLOPE)
    pair = (narrow, LayerReach(cfg.window, 0.0))
    return tuple(LayerReach(1, 0.0) if i < single else pair[(i - single) % 2] for i in range(cfg.layers))


def model_layout(cfg: ModelConfig) -> Layout:
    """Where each tensor lies in the flat parameter vector.

    Tensors of one kind lie side by side over all layers, so that the optimizer sees each kind as one batch of
    equal matrices without a copy. Rows of `qc`: heads of Q, then of C; rows of `kv`: heads of K, then of V.
    """
    p, d = cfg.projection_width, cfg.width
    kinds = (
        ("qc", (2 * p, d)),
        ("kv", (2 * p, d)),
        ("combine", (d, p * cfg.combine)),
        ("expand", (cfg.relu_width, d)),
        ("contract", (d, cfg.relu_width)),
    )
    matrices = [TensorSpec(f"{kind}.{i}", shape, "matrix") for kind, shape in kinds for i in range(cfg.layers)]
    embed, head = (TensorSpec(name, (cfg.vocab, d), "embedding") for name in ("embed", "head"))
    return Layout((embed, *matrices, head))


def layer_parameters(cfg: ModelConfig) -> int:
    """Parameters inside the layers, without the embedding and the head."""
    return model_layout(cfg).numel - 2 * cfg.vocab * cfg.width


def _sized(width: int, heads: int, layers: int) -> ModelConfig:
    return ModelConfig("tscale", width, heads, 128, layers, 1024, 50258, 1)


PRESETS: MappingProxyType[str, ModelConfig] = MappingProxyType(
    {
        "demo": ModelConfig("tscale", 64, 2, 32, 4, 128, 256, 1),
        "tiny": ModelConfig("tscale", 128, 3, 32, 7, 256, 256, 1),
        "125m": _sized(512, 3, 50),
        "350m": _sized(768, 7, 40),
        "1.5b": _sized(1280, 20, 42),
        "7b": _sized(2304, 36, 64),
    }
)
