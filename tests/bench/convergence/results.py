"""Results of runs on disk: one JSON per run, found again by what was run and by the code that ran it."""

from __future__ import annotations

import ast
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

from blake3 import blake3

from tests.bench.convergence.swarm import spec_of
from tests.bench.convergence.variant import Variant
from tscale.node.worker.kernel_config import kernel_config
from tscale.protocol.errors import BadInput, DiskFull
from tscale.protocol.hashing import BlobRef

ROOT = Path(__file__).resolve().parents[3]
LAB = "tests/bench/convergence"
CODE = ("kernels/**/*.py", "node/data/corpus.py", f"{LAB}/swarm.py", f"{LAB}/rules.py", f"{LAB}/texts.py")
FORMAT = 2
NAMES = f"*-{'[0-9a-f]' * 16}-{'[0-9a-f]' * 8}.json"
RESERVED_BYTES = 16_384
"""Room on the disk that a run asks for before it begins; a result has 2 kB."""
KINDS: dict[object, type | tuple[type, ...]] = {"int": int, "float": (int, float), "str": str, "dict[str, Any]": dict}

T = TypeVar("T")


@dataclass(frozen=True)
class Point:
    """The state after a fold. `bits` were sent by one peer so far, on average; the loss is in nats per byte."""

    round: int
    tokens: int
    bits: float
    loss: float


@dataclass(frozen=True)
class Result:
    """What a run gave. `loss` is the held-out loss after the last fold; infinite when the run diverged.

    `bits_per_parameter` is what a peer sends in a round; `seconds` went by, `cpu_s` were worked.
    `left_out` and `shrunk` are contributions that the screen found.
    """

    variant: dict[str, Any]
    run: str
    code: str
    date: str
    seconds: float
    parameters: int
    rounds: int
    tokens_trained: int
    tokens_folded: int
    bits_per_parameter: float
    missed: int
    largest_rms: float
    loss: float
    curve: tuple[Point, ...]
    cpu_s: float = 0.0
    refused: int = 0
    left_out: int = 0
    shrunk: int = 0
    sent_share: float = 0.0


def run_key(variant: Variant) -> str:
    """16 hex digits that two runs share only when variant, model and inner settings are equal, whatever their names.

    The text need not be there.
    """
    kernels = kernel_config(spec_of(variant, BlobRef(bytes(32), 1)))
    what = (variant.plain, asdict(kernels.model), asdict(kernels.inner))
    return blake3(json.dumps((FORMAT, what), sort_keys=True).encode()).hexdigest(length=8)


def code_version(root: Path = ROOT) -> str:
    """8 hex digits of the code that decides a run's numbers; comments, docstrings and format don't count."""
    hasher = blake3()
    for path in sorted({path for pattern in CODE for path in root.glob(pattern)}):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [part for part in body if not _is_text(part)]
        hasher.update(f"{path.relative_to(root)}\n{ast.dump(tree)}\n".encode())
    return hasher.hexdigest(length=4)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


class ResultStore:
    """A folder of results. Several labs may use it at once."""

    def __init__(self, folder: Path) -> None:
        """The folder need not be there to look for results."""
        self.folder = folder

    def check(self) -> None:
        """Read every result. Raises BadInput for a file that has a result's name and is none."""
        if self.folder.exists() and not self.folder.is_dir():
            raise BadInput(f"{self.folder} is no folder: give --results the folder of the results")
        for path in self.folder.glob(NAMES):
            read_result(path)

    def make_ready(self) -> None:
        """Make the folder and take away what ended labs left. Raises BadInput when nothing can be written there."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=self.folder):
                pass
            for path in self.folder.glob("*.part"):
                with _held(path):
                    pass
        except OSError as error:
            raise BadInput(f"can't write results to {self.folder}: {error.strerror}") from None

    def find(self, variant: Variant, code: str | None) -> Result | None:
        """The newest result of a variant by this code, or, with None, by any code. Raises BadInput as `check`."""
        found = [read_result(path) for path in self.folder.glob(f"*-{run_key(variant)}-{code or '*'}.json")]
        return max(found, key=lambda result: result.date, default=None)

    def missing(self, variants: Iterable[Variant], code: str | None) -> list[Variant]:
        """Those without a result, each run once."""
        keyed = {run_key(variant): variant for variant in variants}
        return [variant for variant in keyed.values() if self.find(variant, code) is None]

    def keep(self, variant: Variant, code: str, work: Callable[[], Result]) -> Result | None:
        """Do `work`, which runs a variant by this code, and write down its result.

        None, and nothing is done, when another lab is at it or has just done it. Raises DiskFull, if it can before the
        work, when the result does not fit; there is no half of a result then.
        """
        part = self.folder / f"{run_key(variant)}-{code}.part"
        with _held(part) as ours:
            if not ours or self.find(variant, code) is not None:
                return None
            _write(part, bytes(RESERVED_BYTES))
            result = work()
            _write(part, (json.dumps(asdict(result), indent=None) + "\n").encode())
            part.replace(self.folder / _name(result))
        return result


def read_result(path: Path) -> Result:
    """A result from its file. Raises BadInput, which names the file, for anything else."""
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        plain["curve"] = tuple(_typed(Point, point) for point in plain["curve"])
        result = _typed(Result, plain)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise BadInput(f"{path} is no result of this lab, move it away: {type(error).__name__}: {error}") from None
    if path.name != _name(result) or not result.curve:
        raise BadInput(f"{path} is no result of this lab, move it away: it should be {_name(result)} and have a curve")
    return result


def _name(result: Result) -> str:
    """A file's name starts with its day."""
    return f"{result.date[:10]}-{result.run}-{result.code}.json"


def _typed(kind: type[T], plain: dict[str, Any]) -> T:
    """Raises TypeError for a field that is missing, unknown or no number where one belongs."""
    made = kind(**plain)
    for field in fields(made):  # type: ignore[arg-type]
        if field.type in KINDS and not isinstance(getattr(made, field.name), KINDS[field.type]):
            raise TypeError(f"{field.name} is no {field.type}")
    return made


@contextmanager
def _held(path: Path) -> Iterator[bool]:
    """Whether this file is ours, and no other process's, until the end of the block or of this process. Ours is taken
    away at the end."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError):
            ours = False
        try:
            yield ours  # else another has it, or has just ended and taken it away
        finally:
            if ours:
                path.unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise DiskFull(f"can't write {path}: {error.strerror}; make room, the same command goes on") from None
