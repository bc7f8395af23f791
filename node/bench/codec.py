"""What a contribution costs and how fast it is made and read, beside torch.topk alone and the memory's own speed."""

import hashlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import lgamma, log
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from tscale.kernels.codec import CHUNK, CodecError, Decoded, Rung, contribution_bits_per_parameter, decode, encode
from tscale.node.bench.deltas import TRAINED_UP_TO, Deltas, drawn_deltas, trained_deltas
from tscale.node.bench.room import require_memory
from tscale.node.bench.single_thread import one_torch_thread
from tscale.protocol.errors import BadInput

FEWEST_REPEATS, MOST_REPEATS = 5, 200
VALUE_BITS = 2
BYTES_A_PARAMETER = 28
"""The deltas, two copies, their magnitudes, sums of float64 and a blob, about."""
HASHED_BYTES = 16 << 20  # as much work as encoding ten million parameters, and almost none for the memory


class Turn(NamedTuple):
    """Seconds of one turn (topk: 0 without a whole chunk), and what a second thread gained at reading and computing."""

    encode: float
    encode_two: float
    decode: float
    topk: float
    read: float
    read_two_vs_one: float
    cores_two_vs_one: float


def run_codec_bench(
    parameters: int = 10_000_000,
    kept_per_chunk: int = 64,
    seconds: float = 10.0,
    *,
    density: float | None = None,
) -> dict[str, Any]:
    """Encodes real deltas of a model of at least `parameters` at one rung; `density` overrides `kept_per_chunk`.

    The deltas come from a few rounds of training on the shipped book up to 16M parameters, and are drawn from a
    heavy-tailed distribution beyond. All that is timed takes turns for about `seconds`: rates are medians, ratios are
    medians of the ratios within a turn. `bits_vs_bound` compares with the entropy of uniform positions and two bits for
    each value that the rung allows, `bits_vs_bound_of_sent` with that of the values that were sent.
    `two_cores_vs_one` is what the machine gave a second thread in the same turns, by hashing: beside other work less
    than 2, and no encoder can do better. Raises BadInput.
    """
    rung = _rung(kept_per_chunk if density is None else round(density * CHUNK))
    if parameters < 1:
        raise BadInput(f"a model needs at least one parameter, not {parameters}: use a larger --parameters")
    require_memory(float(BYTES_A_PARAMETER) * parameters, "a smaller --parameters")
    with one_torch_thread():
        deltas = trained_deltas(parameters, rung) if parameters <= TRAINED_UP_TO else drawn_deltas(parameters)
        blob = encode(deltas.residual.copy(), deltas.layout, rung)
        turns = list(_turns(deltas, rung, seconds))
    numel = deltas.layout.numel
    bits = contribution_bits_per_parameter(blob, deltas.layout)
    bound, bound_of_sent = entropy_bounds(decode(blob, deltas.layout))
    return {
        "parameters": numel,
        "kept_per_chunk": rung.kept_per_chunk,
        "deltas": deltas.source,
        "blob_bytes": len(blob),
        "bits_per_parameter": bits,
        "bits_vs_bound": bits / bound,
        "bits_vs_bound_of_sent": bits / bound_of_sent,
        **_speeds(turns, numel),
        "repeats": len(turns),
        "threads": 1,
    }


def _speeds(turns: list[Turn], numel: int) -> dict[str, float | None]:
    typical = Turn(*(median(column) for column in zip(*turns, strict=True)))
    return {
        "encode_params_per_s": numel / typical.encode,
        "encode_two_threads_params_per_s": numel / typical.encode_two,
        "two_threads_vs_one": median(turn.encode / turn.encode_two for turn in turns),
        "two_cores_vs_one": typical.cores_two_vs_one,
        "decode_params_per_s": numel / typical.decode,
        "torch_topk_params_per_s": numel // CHUNK * CHUNK / typical.topk if typical.topk else None,
        "encode_vs_topk": median(turn.topk / turn.encode for turn in turns) if typical.topk else None,
        "encode_bytes_per_s": 4 * numel / typical.encode,
        "memory_read_bytes_per_s": 4 * numel / typical.read,
        "memory_read_two_threads_vs_one": typical.read_two_vs_one,
        "encode_vs_memory_read": median(turn.read / turn.encode for turn in turns),
    }


def entropy_bounds(decoded: Decoded) -> tuple[float, float]:
    """Bits per parameter of uniform positions and two bits a value: of all the rung allows, and of what was sent."""
    if decoded.streams is None:
        raise ValueError("an exact contribution has no positions")
    plan, numel = decoded.plan, decoded.layout.numel
    small_bits = 16 * plan.small_numel
    allowed = sum(map(_chunk_bits, plan.lengths_C.tolist(), plan.keep_C.tolist()))
    sent = sum(map(_chunk_bits, plan.lengths_C.tolist(), decoded.streams.counts_C.tolist()))
    return (allowed + small_bits) / numel, (sent + small_bits) / numel


def _chunk_bits(length: int, kept: int) -> float:
    """log2 of (length choose kept), and the values' bits."""
    ways = lgamma(length + 1) - lgamma(kept + 1) - lgamma(length - kept + 1)
    return ways / log(2) + VALUE_BITS * kept


def _turns(deltas: Deltas, rung: Rung, seconds: float) -> Iterator[Turn]:
    """Measures everything, again and again, for about `seconds`."""
    buffer = np.empty_like(deltas.residual)
    sums = [np.zeros(tensor.numel, dtype=np.float64) for tensor in deltas.layout.tensors]
    chunks = deltas.layout.numel // CHUNK
    magnitudes = torch.from_numpy(np.abs(deltas.residual[: chunks * CHUNK]).reshape(chunks, CHUNK))
    words = deltas.residual[: len(deltas.residual) // 2 * 2].view(np.int64)
    hashed = bytes(HASHED_BYTES)

    def encode_on(threads: int) -> tuple[float, bytes]:
        np.copyto(buffer, deltas.residual)
        return _timed(lambda: encode(buffer, deltas.layout, rung, threads=threads))

    def read(blob: bytes) -> None:
        decoded = decode(blob, deltas.layout)
        for index, sum64 in enumerate(sums):
            decoded.add_to(sum64, index, 1.0)

    begin_s = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        for turn in range(MOST_REPEATS):
            if turn >= FEWEST_REPEATS and time.perf_counter() - begin_s > seconds:
                return
            encode_s, blob = encode_on(1)
            yield Turn(
                encode=encode_s,
                encode_two=encode_on(2)[0],
                decode=_timed(partial(read, blob))[0],
                topk=_timed(lambda: torch.topk(magnitudes, rung.kept_per_chunk))[0] if chunks else 0.0,
                read=_timed(lambda: np.add.reduce(words))[0],
                read_two_vs_one=_two_vs_one(pool, lambda: np.add.reduce(words)),
                cores_two_vs_one=_two_vs_one(pool, lambda: hashlib.sha256(hashed)),
            )


def _two_vs_one(pool: ThreadPoolExecutor, call: Callable[[], object]) -> float:
    """How much sooner two threads have done `call` twice than one: 2 where a second thread costs nothing."""
    alone_s, _ = _timed(lambda: (call(), call()))
    together_s, _ = _timed(lambda: [one.result() for one in (pool.submit(call), pool.submit(call))])
    return alone_s / together_s


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin_s = time.perf_counter()
    result = call()
    return time.perf_counter() - begin_s, result


def _rung(kept_per_chunk: int) -> Rung:
    try:
        return Rung(kept_per_chunk)
    except CodecError as error:
        raise BadInput(f"{error}: use a density above 0 and at most 1") from error
