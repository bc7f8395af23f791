"""Damaged and hostile blobs: every one is refused or is a well-formed contribution. TSCALE_FUZZ_N sets how many."""

import os
import random
import struct
import tracemalloc

import numpy as np
import pytest
import zstandard

from tscale.kernels.codec import CodecError, Decoded, Rung, decode, encode
from tscale.kernels.codec.wire import HEADER
from tscale.kernels.layout import Layout, TensorSpec

LAYOUT = Layout(
    (TensorSpec("a", (60, 70), "matrix"), TensorSpec("gain", (9,), "small"), TensorSpec("b", (900,), "matrix")),
    small_numel=16,
)
RUNGS = [Rung(64), Rung(300), Rung(1024), Rung(4096), Rung(4096, 32)]
RUNS = int(os.environ.get("TSCALE_FUZZ_N", "20000"))
PLACE_BYTES = 7  # fields of the header
FRAME_SIZES = slice(8, 12)


def seeds() -> list[bytes]:
    generator = np.random.default_rng(0)
    blobs = []
    for rung in RUNGS:
        for scale in (1e-3, 1.0):
            values = (generator.standard_normal(LAYOUT.numel) * scale).astype(np.float32)
            values[: generator.integers(1, 4000)] = 0
            blobs.append(encode(values, LAYOUT, rung))
    return blobs


def split(blob: bytes) -> tuple[list, list[bytes], bytes]:
    """Header fields, the four frames, the rest."""
    fields, at, frames = list(HEADER.unpack_from(blob)), HEADER.size, []
    for size in fields[FRAME_SIZES]:
        frames.append(blob[at : at + size])
        at += size
    return fields, frames, blob[at:]


def join(fields: list, frames: list[bytes], tail: bytes) -> bytes:
    fields[FRAME_SIZES] = [len(frame) for frame in frames]
    return HEADER.pack(*fields) + b"".join(frames) + tail


def flip_bits(blob: bytes, dice: random.Random) -> bytes:
    damaged = bytearray(blob)
    for _ in range(dice.choice((1, 1, 1, 2, 8))):
        damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
    return bytes(damaged)


def set_header_field(blob: bytes, dice: random.Random) -> bytes:
    damaged = bytearray(blob)
    at, width = dice.choice([(4, 1), (5, 1), (6, 2), (8, 8), *((32 + 8 * i, 8) for i in range(6))])
    old = int.from_bytes(damaged[at : at + width], "little")
    new = dice.choice((0, 1, old + 1, old - 1, old + 8, old * 2, 2**31, 2**63, 2**64 - 1)) % 256**width
    damaged[at : at + width] = new.to_bytes(width, "little")
    return bytes(damaged)


def cut_or_grow(blob: bytes, dice: random.Random) -> bytes:
    if dice.random() < 0.5:
        return blob[: dice.randrange(len(blob))]
    return blob + dice.randbytes(dice.randrange(1, 20))


def splice(blob: bytes, dice: random.Random) -> bytes:
    at, length, source = (dice.randrange(len(blob)) for _ in range(3))
    length %= 40
    return blob[:at] + blob[source : source + length] + blob[at + length :]


def damage_inside_a_frame(blob: bytes, dice: random.Random) -> bytes:
    """Well-formed zstd around wrong contents: what bit flips rarely reach."""
    fields, frames, tail = split(blob)
    which = dice.randrange(4)
    if not frames[which]:
        return flip_bits(blob, dice)
    contents = bytearray(zstandard.ZstdDecompressor().decompress(frames[which]))
    for _ in range(dice.choice((1, 1, 2, 6))):
        contents[dice.randrange(len(contents))] = dice.choice((0, 1, 254, 255, dice.randrange(256)))
    if dice.random() < 0.2:
        contents += dice.randbytes(dice.randrange(1, 4))
        fields[PLACE_BYTES] += dice.choice((0, len(contents) - fields[PLACE_BYTES])) if which == 2 else 0
    frames[which] = zstandard.ZstdCompressor(level=1).compress(bytes(contents))
    return join(fields, frames, tail)


MUTATIONS = [flip_bits, set_header_field, cut_or_grow, splice, damage_inside_a_frame, damage_inside_a_frame]


def outcome(blob: bytes, impl: str) -> bytes | None:
    """The values that a reader takes from the blob, or None when it refuses."""
    try:
        decoded = decode(blob, LAYOUT, impl=impl)
    except CodecError:
        return None
    assert isinstance(decoded, Decoded)
    dense = decoded.dense()
    assert dense.shape == (LAYOUT.numel,)
    assert np.isfinite(dense).all()
    assert np.isfinite(decoded.rms()).all()
    return dense.tobytes()


def test_mutated_blobs_are_refused_cleanly_or_well_formed_and_both_readers_agree():
    blobs = seeds()
    refused = 0
    for number in range(RUNS):
        dice = random.Random(number)
        blob = dice.choice(MUTATIONS)(dice.choice(blobs), dice)
        try:
            values = outcome(blob, "numba")
            if number % 4 == 0:
                assert outcome(blob, "reference") == values
        except Exception:
            print(f"seed {number}: {blob.hex()}")
            raise
        refused += values is None
    assert RUNS * 0.5 < refused < RUNS * 0.95, refused  # some damage only changes a sign or a value


@pytest.mark.parametrize("blob", [b"", b"TSCD", bytes(80), bytes(500), b"\xff" * 500])
def test_nonsense(blob):
    with pytest.raises(CodecError):
        decode(blob, LAYOUT)


def frame_that_says(size_bytes: int) -> bytes:
    """A zstd frame whose header promises `size_bytes` of zeros, in RLE blocks of 128 KiB."""
    blocks = size_bytes // 131072
    block = struct.pack("<I", (131072 << 3) | (1 << 1))[:3] + b"\0"
    last = struct.pack("<I", (131072 << 3) | (1 << 1) | 1)[:3] + b"\0"
    return bytes.fromhex("28b52ffd") + b"\xe0" + size_bytes.to_bytes(8, "little") + block * (blocks - 1) + last


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("bomb_kind", ["says", "unknown_size", "truncated", "window", "skippable", "two_frames"])
def test_a_zstd_bomb_is_refused_without_being_unpacked(which, bomb_kind):
    giant = 1 << 30
    fields, frames, tail = split(seeds()[0])
    honest = zstandard.get_frame_parameters(frames[which]).content_size
    bombs = {
        "says": frame_that_says(giant),
        # no content size: a frame header with a window of 128 MiB and endless RLE blocks
        "unknown_size": bytes.fromhex("28b52ffd") + b"\0\x88" + frame_that_says(giant)[13:],
        "truncated": frames[which][: len(frames[which]) // 2],
        # a window of 64 MiB beside the right content size (4 bytes), cut short so that it could not be read in one go
        "window": bytes.fromhex("28b52ffd") + b"\x80\x80" + honest.to_bytes(4, "little") + b"\x01\0\0",
        "skippable": bytes.fromhex("502a4d18") + honest.to_bytes(4, "little") + bytes(honest),
        "two_frames": frames[which] + frame_that_says(giant),
    }
    frames[which] = bombs[bomb_kind]
    blob = join(fields, frames, tail)
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            decode(blob, LAYOUT)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_a_place_stream_larger_than_the_layout_implies_is_refused_before_it_is_unpacked():
    fields, frames, tail = split(seeds()[0])
    fields[PLACE_BYTES] = 1 << 30
    frames[2] = frame_that_says(1 << 30)
    with pytest.raises(CodecError, match="not what the rung allows"):
        decode(join(fields, frames, tail), LAYOUT)


def rewritten(blob: bytes, which: int, change) -> bytes:
    fields, frames, tail = split(blob)
    contents = bytearray(zstandard.ZstdDecompressor().decompress(frames[which]))
    change(contents)
    frames[which] = zstandard.ZstdCompressor(level=1).compress(bytes(contents))
    return join(fields, frames, tail)


def swap_codes(codes: bytearray) -> None:
    half = len(codes) // 2
    codes[:] = codes[half:] + codes[:half]


@pytest.mark.parametrize(
    "which,change,says",
    [
        (0, lambda counts: counts.__setitem__(slice(0, 2), b"\xff\xff"), "more values than its rung"),
        (0, lambda counts: counts.__setitem__(0, counts[0] - 1), "add up"),
        (1, swap_codes, "above its upper"),
        (1, lambda codes: codes.__setitem__(slice(None), bytes(len(codes))), "magnitude zero"),
        (2, lambda gaps: gaps.__setitem__(slice(0, 60), b"\xfe" * 60), "outside its chunk"),
        (2, lambda gaps: gaps.__setitem__(-1, 255), "end before"),
        (2, lambda gaps: gaps.append(0), "frame of"),
    ],
)
@pytest.mark.parametrize("impl", ["reference", "numba"])
def test_each_rule_of_the_format(which, change, says, impl):
    layout = Layout((TensorSpec("a", (8192,), "matrix"),))
    values = np.random.default_rng(1).standard_normal(8192).astype(np.float32)
    blob = encode(values, layout, Rung(64))
    with pytest.raises(CodecError, match=says):
        decode(rewritten(blob, which, change), layout, impl=impl)


def test_a_value_that_is_not_finite_is_refused_on_every_path():
    exact = bytearray(encode(np.ones(LAYOUT.numel, np.float32), LAYOUT, Rung(4096, 32)))
    exact[HEADER.size + 2 : HEADER.size + 4] = b"\x80\x7f"
    half = bytearray(encode(np.ones(LAYOUT.numel, np.float32), LAYOUT, Rung(64)))
    half[-2:] = b"\x00\x7c"
    for blob in (exact, half):
        with pytest.raises(CodecError, match="finite"):
            decode(bytes(blob), LAYOUT)
