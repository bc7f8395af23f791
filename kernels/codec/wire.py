"""A contribution's bytes: a fixed header, then the streams, each capped before anything is allocated.

Header, little-endian, 80 bytes: magic `TSCD`, version u8, bits u8, kept_per_chunk u16, parameters u64, layout
fingerprint 16 bytes, sent values N u64, place bytes G u64, then the sizes u64 of the four zstd frames that follow:
counts (u16 per chunk), magnitude codes (lower of all chunks, then upper of all chunks), places (G bytes: gaps, or a
mask from 1024 kept per chunk on), magnitude bits. Then N sign bits and the small tensors as float16. An exact blob
(bits 32) has zeros in the last six fields, then P float32.
Each frame holds one stream whose size the receiver knows beforehand; an empty stream has no frame.
"""

import struct
from dataclasses import dataclass

import numpy as np
import zstandard

from tscale.kernels.codec.errors import CodecError
from tscale.kernels.codec.plan import ChunkPlan
from tscale.kernels.codec.rung import CHUNK, Rung
from tscale.kernels.codec.streams import ESCAPE, Streams
from tscale.kernels.layout import FINGERPRINT_BYTES, Layout

MAGIC = b"TSCD"
VERSION = 1
HEADER = struct.Struct(f"<4sBBHQ{FINGERPRINT_BYTES}s6Q")
ZSTD_LEVEL = 1  # higher levels gain nothing: the streams have no repeats, only skewed bytes
SMALLEST_WINDOW_BYTES = 1 << 10


@dataclass(frozen=True)
class Header:
    """The checked header of a blob."""

    rung: Rung
    values: int
    place_bytes: int
    frame_bytes: tuple[int, int, int, int]


def pack_exact(values: np.ndarray, layout: Layout) -> bytes:
    """float32 [P] -> an exact blob."""
    return _header(Rung(CHUNK, 32), layout, (0,) * 6) + values.astype("<f4", copy=False).tobytes()


def pack_streams(streams: Streams, small: np.ndarray, layout: Layout, rung: Rung) -> bytes:
    """The streams, and the small tensors as float16 -> a two-bit blob."""
    frames = [
        _compress(streams.counts_C.astype("<u2", copy=False).tobytes()),
        _compress(np.ascontiguousarray(streams.codes_C2.T).tobytes()),
        _compress(streams.places.tobytes()),
        _compress(streams.uppers.tobytes()),
    ]
    values = int(streams.counts_C.sum(dtype=np.int64))
    sizes = (values, len(streams.places), *map(len, frames))
    tail = [streams.signs.tobytes(), small.astype("<f2", copy=False).tobytes()]
    return b"".join([_header(rung, layout, sizes), *frames, *tail])


def read_header(blob: bytes, layout: Layout) -> Header:
    """Checks everything that the header says against the layout. Raises CodecError."""
    if len(blob) < HEADER.size:
        raise CodecError(f"a blob has at least {HEADER.size} bytes, not {len(blob)}")
    magic, version, bits, kept, numel, fingerprint, *sizes = HEADER.unpack_from(blob)
    if magic != MAGIC:
        raise CodecError("not a contribution blob")
    if version != VERSION:
        raise CodecError(f"codec version {version}, this node reads {VERSION}")
    rung = Rung(kept, bits)
    if numel != layout.numel or fingerprint != layout.fingerprint:
        raise CodecError(f"made for another model ({numel} parameters, this one has {layout.numel})")
    if rung.exact and any(sizes):
        raise CodecError("an exact blob has no streams")
    values, place_bytes, *frame_bytes = sizes
    return Header(rung, values, place_bytes, tuple(frame_bytes))


def unpack_exact(blob: bytes, layout: Layout) -> np.ndarray:
    """Read-only float32 [P] over the blob's own memory; all finite."""
    if len(blob) != HEADER.size + 4 * layout.numel:
        raise CodecError(f"an exact blob of {layout.numel} parameters can't have {len(blob)} bytes")
    values = np.frombuffer(blob, dtype="<f4", offset=HEADER.size)
    if not np.isfinite(values).all():
        raise CodecError("a value isn't finite")
    return values


def unpack_streams(blob: bytes, header: Header, plan: ChunkPlan) -> tuple[Streams, np.ndarray]:
    """The streams and the small tensors of a two-bit blob, each of the size that the plan implies, or CodecError."""
    if plan.masked:
        least = most = (plan.chunked_numel + 7) // 8
    else:
        least, most = header.values, header.values + int((plan.lengths_C // ESCAPE).sum())
    if header.values > int(plan.keep_C.sum()) or not least <= header.place_bytes <= most:
        raise CodecError(f"{header.values} values placed by {header.place_bytes} bytes are not what the rung allows")
    flag_bytes = (header.values + 7) // 8
    ends = np.cumsum([HEADER.size, *map(min, header.frame_bytes, [len(blob)] * 4), flag_bytes, 2 * plan.small_numel])
    if int(ends[-1]) != len(blob):
        raise CodecError(f"the parts add up to {int(ends[-1])} bytes, the blob has {len(blob)}")
    parts = [memoryview(blob)[ends[i] : ends[i + 1]] for i in range(6)]
    streams = Streams(
        counts_C=np.frombuffer(_decompress(parts[0], 2 * plan.chunks), dtype="<u2"),
        codes_C2=np.frombuffer(_decompress(parts[1], 2 * plan.chunks), dtype=np.uint8).reshape(2, -1).T,
        places=np.frombuffer(_decompress(parts[2], header.place_bytes), dtype=np.uint8),
        uppers=np.frombuffer(_decompress(parts[3], flag_bytes), dtype=np.uint8),
        signs=np.frombuffer(parts[4], dtype=np.uint8),
    )
    _check_streams(streams, header, plan)
    small = np.frombuffer(parts[5], dtype="<f2")
    if not np.isfinite(small).all():
        raise CodecError("a small tensor has a value that isn't finite")
    return streams, small


def _check_streams(streams: Streams, header: Header, plan: ChunkPlan) -> None:
    if np.any(streams.counts_C > plan.keep_C):
        raise CodecError("a chunk sends more values than its rung allows")
    if int(streams.counts_C.sum(dtype=np.int64)) != header.values:
        raise CodecError("the chunks' counts don't add up to the header's")
    if np.any(streams.codes_C2[:, 0] > streams.codes_C2[:, 1]):
        raise CodecError("a chunk's lower magnitude is above its upper one")
    flags = [(streams.signs, header.values), (streams.uppers, header.values)]
    flags += [(streams.places, plan.chunked_numel)] if plan.masked else []
    if any(count % 8 and int(packed[-1]) >> (count % 8) for packed, count in flags):
        raise CodecError("padding bits aren't zero")


def _header(rung: Rung, layout: Layout, sizes: tuple[int, ...]) -> bytes:
    return HEADER.pack(MAGIC, VERSION, rung.bits, rung.kept_per_chunk, layout.numel, layout.fingerprint, *sizes)


def _compress(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(data) if data else b""


def _decompress(frame: memoryview, size_bytes: int) -> bytes:
    """Exactly one frame that says and has `size_bytes` of content, with a window no larger than that."""
    if size_bytes == 0:
        if len(frame):
            raise CodecError("an empty stream has no frame")
        return b""
    try:
        says = zstandard.get_frame_parameters(frame)
        if says.content_size != size_bytes or says.dict_id or says.window_size > max(size_bytes, SMALLEST_WINDOW_BYTES):
            raise CodecError(f"a frame of {says.content_size} bytes where the layout implies {size_bytes}")
        content = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"damaged zstd frame: {error}") from error
    if len(content) != size_bytes:
        raise CodecError("a frame is shorter than it says")
    return content
