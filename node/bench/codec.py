"""What a contribution costs and how fast it is made and read, beside torch.topk alone, on one thread."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from tscale.kernels.codec import CHUNK, CodecError, Rung, contribution_bits_per_parameter, decode, encode
from tscale.kernels.feedback import accumulate
from tscale.kernels.init import init_state
from tscale.kernels.inner import InnerConfig, InnerTrainer
from tscale.kernels.layout import Layout, TensorSpec
from tscale.kernels.model_config import ModelConfig, model_layout
from tscale.node.data.corpus import ByteCorpus, shipped_book
from tscale.protocol.errors import BadInput

TRAINED_UP_TO = 16_000_000  # parameters; training more takes minutes on a CPU
ROUNDS, STEPS_PER_ROUND = 3, 2
SEED = 1
BETA = 0.9
FEWEST_REPEATS, MOST_REPEATS = 5, 200
TRAINING = InnerConfig(
    batch=1,
    context=64,
    lr_muon=0.02,
    lr_adam=0.01,
    weight_decay=0.0,
    momentum=0.9,
    warmup_tokens=0,
    schedule_tokens=1_000_000,
    final_lr_fraction=0.1,
)


@dataclass(frozen=True)
class Deltas:
    """A residual as it stands before it is encoded (float32 [P]), its layout, and where it came from."""

    residual: np.ndarray
    layout: Layout
    source: str


def run_codec_bench(
    parameters: int = 10_000_000,
    kept_per_chunk: int = 64,
    seconds: float = 10.0,
    *,
    density: float | None = None,
) -> dict[str, Any]:
    """Encodes real deltas of a model of at least `parameters` at one rung; `density` overrides `kept_per_chunk`.

    The deltas come from a few rounds of training on the shipped book up to 16M parameters, and are drawn from a
    heavy-tailed distribution beyond. Encode, decode and torch.topk over the same buffer take turns for about `seconds`;
    the rates are medians, and `encode_vs_topk` is the median of the ratios within a turn. Raises BadInput.
    """
    rung = _rung(kept_per_chunk if density is None else round(density * CHUNK))
    if parameters < 1:
        raise BadInput(f"a model needs at least one parameter, not {parameters}: use a larger --parameters")
    with _one_torch_thread():
        deltas = trained_deltas(parameters, rung) if parameters <= TRAINED_UP_TO else drawn_deltas(parameters)
        blob = encode(deltas.residual.copy(), deltas.layout, rung)
        turns = list(_turns(deltas, rung, seconds))
    numel = deltas.layout.numel
    encode_s, decode_s, topk_s = (median(column) for column in zip(*turns, strict=True))
    return {
        "parameters": numel,
        "kept_per_chunk": rung.kept_per_chunk,
        "deltas": deltas.source,
        "blob_bytes": len(blob),
        "bits_per_parameter": contribution_bits_per_parameter(blob, deltas.layout),
        "encode_params_per_s": numel / encode_s,
        "decode_params_per_s": numel / decode_s,
        "torch_topk_params_per_s": numel // CHUNK * CHUNK / topk_s if topk_s else None,
        "encode_vs_topk": median(turn[2] / turn[0] for turn in turns) if topk_s else None,
        "repeats": len(turns),
        "threads": 1,
    }


def trained_deltas(parameters: int, rung: Rung) -> Deltas:
    """The residual of the last of a few rounds (start minus end of the local parameters, with error feedback)."""
    config = model_of_at_least(parameters)
    layout = model_layout(config)
    corpus = ByteCorpus(shipped_book(), heldout_per_mille=10)
    local = init_state(config, SEED)
    trainer = InnerTrainer(config, TRAINING, local, corpus.counts)
    residual = np.zeros_like(local)
    for round_number in range(ROUNDS):
        if round_number:
            encode(residual, layout, rung)
        start = local.copy()
        for step in range(STEPS_PER_ROUND):
            number = round_number * STEPS_PER_ROUND + step
            trainer.step(corpus.batch(bytes(32), number, TRAINING.batch, TRAINING.context), 1.0)
        accumulate(residual, start - local, BETA)
    return Deltas(residual, layout, "trained")


def model_of_at_least(parameters: int) -> ModelConfig:
    """Wide and shallow, so that few steps move every matrix: the narrowest byte model of two layers that is enough."""
    for heads in range(1, 1000):
        config = ModelConfig("tscale", heads * 64, heads, 64, 2, 128, 256, 1)
        if model_layout(config).numel >= parameters:
            return config
    raise BadInput(f"no model has {parameters} parameters: use a smaller --parameters")


def drawn_deltas(parameters: int) -> Deltas:
    """Student's t with five degrees of freedom, in matrices of 1024 columns whose rows have scales of their own."""
    rows = -(-parameters // 1024)
    layout = Layout((TensorSpec("drawn", (rows, 1024), "matrix"),))
    generator = np.random.default_rng(SEED)
    residual = np.empty(layout.numel, dtype=np.float32)
    view = layout.view(residual, "drawn")
    for first in range(0, rows, 4096):
        part = view[first : first + 4096]
        part[...] = generator.standard_t(5, part.shape) * np.exp(generator.normal(-6, 0.3, (len(part), 1)))
    return Deltas(residual, layout, "drawn")


def _turns(deltas: Deltas, rung: Rung, seconds: float) -> Iterator[tuple[float, float, float]]:
    """Seconds of encode, decode and topk, again and again; the topk is 0 when there is no whole chunk."""
    buffer = np.empty_like(deltas.residual)
    sums = [np.zeros(tensor.numel, dtype=np.float64) for tensor in deltas.layout.tensors]
    chunks = deltas.layout.numel // CHUNK
    magnitudes = torch.from_numpy(np.abs(deltas.residual[: chunks * CHUNK]).reshape(chunks, CHUNK))

    def read(blob: bytes) -> None:
        decoded = decode(blob, deltas.layout)
        for index, sum64 in enumerate(sums):
            decoded.add_to(sum64, index, 1.0)

    begin_s = time.perf_counter()
    for turn in range(MOST_REPEATS):
        if turn >= FEWEST_REPEATS and time.perf_counter() - begin_s > seconds:
            return
        np.copyto(buffer, deltas.residual)
        encode_s, blob = _timed(encode, buffer, deltas.layout, rung)
        decode_s, _ = _timed(read, blob)
        topk_s, _ = _timed(torch.topk, magnitudes, rung.kept_per_chunk) if chunks else (0.0, None)
        yield encode_s, decode_s, topk_s


def _timed(call: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    begin_s = time.perf_counter()
    result = call(*args)
    return time.perf_counter() - begin_s, result


def _rung(kept_per_chunk: int) -> Rung:
    try:
        return Rung(kept_per_chunk)
    except CodecError as error:
        raise BadInput(f"{error}: use a density above 0 and at most 1") from error


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
