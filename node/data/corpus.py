"""Training text as bytes: reading a file, holding out a part, and drawing batches that anyone can recompute."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

import numpy as np
from blake3 import blake3

from tscale.protocol.errors import BadInput

VOCAB = 256
HELDOUT_BLOCK_BYTES = 4096
"""The text is held out in whole blocks of this size, spread evenly over it."""
_SNIFF_BYTES = 1 << 16
_TEXT_CONTROLS = frozenset(b"\t\n\r\f\x1b\x08\x07")


class ByteCorpus:
    """A text split into training bytes and held-out bytes; every byte is a token.

    Every `1000 / heldout_per_mille`-th block of `HELDOUT_BLOCK_BYTES` is held out (a text too short for whole blocks
    loses its end instead). The split depends on the length and the share alone, so all peers agree on it. Batches
    never cross from one training stretch into the next.
    """

    def __init__(self, data: bytes | np.ndarray, heldout_per_mille: int) -> None:
        text = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
        if not 0 <= heldout_per_mille < 1000:
            raise BadInput("heldout_per_mille must be in 0 .. 999")
        self._text = text
        self._heldout = _heldout_stretches(text.size, heldout_per_mille)
        self._train = _gaps(text.size, self._heldout)
        self.train_bytes = int((self._train[:, 1] - self._train[:, 0]).sum())
        self.heldout_bytes = text.size - self.train_bytes
        self.counts = np.zeros(VOCAB, np.int64)
        for start, stop in self._train:
            self.counts += np.bincount(text[start:stop], minlength=VOCAB)

    def batch(self, key: bytes, step: int, batch: int, context: int) -> np.ndarray:
        """Training sequences int64 [batch, context+1] for one step of the peer whose PRF key is `key` (32 bytes).

        The offsets come from keyed BLAKE3 of the step, uniform over all places where a sequence fits. Raises
        BadInput when no training stretch is long enough.
        """
        raw = blake3(step.to_bytes(8, "little"), key=key).digest(length=8 * batch)
        return self._cut(self._train, np.frombuffer(raw, "<u8"), context)

    def heldout(self, windows: int, context: int) -> np.ndarray:
        """`windows` held-out sequences int64 [windows, context+1], evenly spread: always the same ones.

        Raises BadInput when no held-out stretch is long enough.
        """
        places = _places(self._heldout, context).sum()
        picks = np.arange(windows, dtype=np.uint64) * np.uint64(max(int(places), 1)) // np.uint64(max(windows, 1))
        return self._cut(self._heldout, picks, context)

    def _cut(self, stretches: np.ndarray, picks: np.ndarray, context: int) -> np.ndarray:
        places = _places(stretches, context)
        ends = np.cumsum(places)
        if not ends.size or ends[-1] == 0:
            raise BadInput(f"the text is too short for sequences of {context + 1} bytes: use a longer text")
        # the modulo's bias is below 2**-32 for any text shorter than 4 GiB
        place = (picks % np.uint64(ends[-1])).astype(np.int64)
        stretch = np.searchsorted(ends, place, side="right")
        offset = stretches[stretch, 0] + place - (ends[stretch] - places[stretch])
        sequences: np.ndarray = self._text[offset[:, None] + np.arange(context + 1)].astype(np.int64)
        return sequences


def _places(stretches: np.ndarray, context: int) -> np.ndarray:
    """How many sequences of context+1 bytes start in each stretch."""
    places: np.ndarray = np.maximum(stretches[:, 1] - stretches[:, 0] - context, 0)
    return places


def _heldout_stretches(size_bytes: int, per_mille: int) -> np.ndarray:
    """Held-out [start, stop) pairs, int64 [S, 2]."""
    if per_mille == 0 or size_bytes == 0:
        return np.zeros((0, 2), np.int64)
    blocks = size_bytes // HELDOUT_BLOCK_BYTES
    count = blocks * per_mille // 1000
    if count == 0:
        return np.array([[size_bytes - size_bytes * per_mille // 1000, size_bytes]], np.int64)
    # the middle block of each of `count` equal parts
    first = (2 * np.arange(count, dtype=np.int64) + 1) * blocks // (2 * count)
    return np.stack((first * HELDOUT_BLOCK_BYTES, (first + 1) * HELDOUT_BLOCK_BYTES), axis=1)


def _gaps(size_bytes: int, heldout: np.ndarray) -> np.ndarray:
    """What is left of [0, size_bytes) between the held-out stretches, int64 [S, 2], without empty ones."""
    starts = np.concatenate(([0], heldout[:, 1])).astype(np.int64)
    stops = np.concatenate((heldout[:, 0], [size_bytes])).astype(np.int64)
    return np.stack((starts, stops), axis=1)[stops > starts]


def load_text_file(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a text file. Raises BadInput when it is missing, unreadable, a directory, empty or binary."""
    file = Path(path)
    try:
        if file.is_dir():
            raise BadInput(f"{file} is a directory: give a text file")
        if file.exists() and not file.is_file():
            raise BadInput(f"{file} is a device or a pipe: give a text file")
        data = file.read_bytes()
    except FileNotFoundError:
        raise BadInput(f"{file} does not exist: check the path of the text file") from None
    except OSError as error:
        raise BadInput(f"cannot read {file}: {error.strerror or error}") from None
    if not data:
        raise BadInput(f"{file} is empty: give a text file with some text in it")
    if _looks_binary(data[:_SNIFF_BYTES]):
        raise BadInput(f"{file} is not a text file: tscale trains on plain text (UTF-8 or an 8-bit encoding)")
    return data


def _looks_binary(head: bytes) -> bool:
    """A zero byte, or more than one control character in a hundred that text does not use."""
    controls = sum(1 for byte in head if byte < 32 and byte not in _TEXT_CONTROLS)
    return 0 in head or controls * 100 > len(head)


def shipped_book() -> bytes:
    """The text of Moby-Dick that comes with the package (MOBY_DICK.md says from where)."""
    return (files("tscale.node.data") / "moby_dick.txt").read_bytes()
