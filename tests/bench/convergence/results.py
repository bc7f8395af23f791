"""Results of runs on disk: one JSON per run, found again by what was run and by the code that ran it."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from tests.bench.convergence.swarm import spec_of
from tests.bench.convergence.variant import Variant
from tscale.node.worker.kernel_config import kernel_config
from tscale.protocol.hashing import BlobRef

ROOT = Path(__file__).resolve().parents[3]
LAB = "tests/bench/convergence"
CODE = ("kernels/**/*.py", "node/data/corpus.py", f"{LAB}/swarm.py", f"{LAB}/rules.py", f"{LAB}/texts.py")
FORMAT = 2


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
    """A folder of results."""

    def __init__(self, folder: Path) -> None:
        """The folder is made when something is written."""
        self.folder = folder

    def find(self, variant: Variant, code: str | None) -> Result | None:
        """The newest result of a variant by this code, or, with None, by any code."""
        found = [read_result(path) for path in self.folder.glob(f"*-{run_key(variant)}-{code or '*'}.json")]
        return max(found, key=lambda result: result.date, default=None)

    def missing(self, variants: Iterable[Variant], code: str | None) -> list[Variant]:
        """Those without a result, each run once."""
        keyed = {run_key(variant): variant for variant in variants}
        return [variant for variant in keyed.values() if self.find(variant, code) is None]

    def write(self, result: Result) -> Path:
        """Keep a result; the file's name starts with its day."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{result.date[:10]}-{result.run}-{result.code}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(result), indent=None) + "\n")
        part.replace(path)
        return path


def read_result(path: Path) -> Result:
    """A result from its file."""
    plain = json.loads(path.read_text())
    plain["curve"] = tuple(Point(**point) for point in plain["curve"])
    return Result(**plain)
