"""The demo's verdict: whether what its nodes wrote down agrees, and how well the final model predicts and writes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tscale.node.checkpoint import load_checkpoint
from tscale.node.specs import read_spec, shipped_book_path
from tscale.protocol.errors import BadInput, StopNode
from tscale.protocol.spec import SwarmSpec

if TYPE_CHECKING:
    import numpy as np

    from tscale.kernels.inner import InnerTrainer
    from tscale.node.data.corpus import ByteCorpus

MAX_LOSS_RATIO = 0.55
HELDOUT_WINDOWS = 96
SAMPLE_PROMPT = "The whale "
SAMPLE_TOKENS = 200

_ANCHOR = "head/anchor"
"""The worker's name for the last folded state in its checkpoint."""


@dataclass(frozen=True)
class FoldLine:
    """What a node wrote into rounds.jsonl for one fold; digests in hex."""

    round: int
    manifest: str
    state: str
    tokens_total: int


@dataclass(frozen=True)
class DemoFacts:
    """What was seen while the demo ran. `rounds` are each node's folds; `problems` are failures noticed on the way.

    `live` names the nodes that ran to the end, `killed` and `joiner` the two special ones (None when there was none).
    Rounds up to `judged_round` were settled before the nodes were stopped; later ones may be cut off anywhere.
    """

    spec: SwarmSpec
    rounds: Mapping[str, Mapping[int, FoldLine]]
    live: tuple[str, ...]
    killed: str | None
    joiner: str | None
    judged_round: int
    peers_max: int
    bits_per_parameter: float | None
    seconds: float
    problems: tuple[str, ...]


@dataclass(frozen=True)
class ModelFacts:
    """The final model: held-out losses in nats per byte before and after, its size, and a text it wrote."""

    loss_first: float
    loss_last: float
    parameters: int
    sample: str


@dataclass(frozen=True)
class DemoReport:
    """The last line of the demo. `rounds` counts the rounds that were compared, and `tokens` is the swarm's count
    at the last of them. The losses and the sample are of the final model, some rounds later. `seconds` is from the
    first process to the last."""

    rounds: int
    peers_max: int
    digests_equal: bool
    digests_compared: int
    loss_first: float | None
    loss_last: float | None
    bits_per_parameter: float | None
    tokens: int
    seconds: float
    sample: str
    parameters: int
    swarm_id: str
    killed: str | None
    joiner: str | None
    ok: bool
    failures: tuple[str, ...]

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=True)


def read_rounds(path: Path) -> dict[int, FoldLine]:
    """The folds in a rounds.jsonl by round; a later line for a round replaces the earlier one.

    A missing file is no folds. A last line without its end (the node was killed) is left out; any other line that is
    not a fold raises ValueError.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    complete, _, _ = text.rpartition("\n")
    folds: dict[int, FoldLine] = {}
    for line in complete.splitlines():
        entry = json.loads(line)
        fold = FoldLine(int(entry["round"]), entry["manifest"], entry["state"], int(entry["tokens_total"]))
        folds[fold.round] = fold
    return folds


def settled(folds: Mapping[int, FoldLine]) -> dict[int, FoldLine]:
    """The folds of a killed node without its last: it may have died on the losing side of a fork of one round."""
    last = max(folds, default=None)
    return {number: fold for number, fold in folds.items() if number != last}


def compare_rounds(rounds: Mapping[str, Mapping[int, FoldLine]]) -> tuple[int, list[str]]:
    """Check that all nodes with a fold of a round have the same manifest and state for it.

    Returns how many folds were compared with another node's, and one line for every difference.
    """
    first: dict[int, tuple[str, FoldLine]] = {}
    compared, differences = 0, []
    for node, folds in rounds.items():
        for number, fold in folds.items():
            other, expected = first.setdefault(number, (node, fold))
            if other == node:
                continue
            compared += 1
            if fold.manifest != expected.manifest:
                differences.append(f"round {number}: {node} and {other} folded different manifests")
            elif fold.state != expected.state:
                differences.append(f"round {number}: {node} and {other} have different states after the same manifest")
    return compared, differences


def build_report(facts: DemoFacts, model: ModelFacts | None) -> DemoReport:
    """The verdict. `model` None means that no checkpoint could be read, which is a failure of its own."""
    rounds = _judged(facts)
    compared, differences = compare_rounds(rounds)
    folds = [fold for name in facts.live for fold in rounds[name].values()]
    failures = [*facts.problems, *differences[:5], *_missing_folds(facts, rounds), *_model_failures(model)]
    if facts.bits_per_parameter is None:
        failures.append("no contribution was seen that travelled to another node")
    if not compared:
        failures.append("no round was folded by two nodes, so nothing could be compared")
    return DemoReport(
        rounds=len({fold.round for fold in folds}),
        peers_max=facts.peers_max,
        digests_equal=compared > 0 and not differences,
        digests_compared=compared,
        loss_first=None if model is None else round(model.loss_first, 4),
        loss_last=None if model is None else round(model.loss_last, 4),
        bits_per_parameter=None if facts.bits_per_parameter is None else round(facts.bits_per_parameter, 4),
        tokens=max((fold.tokens_total for fold in folds), default=0),
        seconds=round(facts.seconds, 1),
        sample="" if model is None else model.sample,
        parameters=0 if model is None else model.parameters,
        swarm_id=facts.spec.swarm_id,
        killed=facts.killed,
        joiner=facts.joiner,
        ok=not failures,
        failures=tuple(failures),
    )


def _judged(facts: DemoFacts) -> dict[str, dict[int, FoldLine]]:
    """The folds that must agree: settled rounds, and of the killed node all but its last."""
    return {
        name: {
            number: fold
            for number, fold in (settled(folds) if name == facts.killed else folds).items()
            if number <= facts.judged_round
        }
        for name, folds in facts.rounds.items()
    }


def _missing_folds(facts: DemoFacts, rounds: Mapping[str, Mapping[int, FoldLine]]) -> Iterable[str]:
    if facts.killed is not None and not facts.rounds[facts.killed]:
        yield f"{facts.killed} folded no round"
    for name in facts.live:
        if not rounds[name]:
            yield f"{name} folded no round"
    for name in facts.live:
        last = max(rounds[name], default=facts.judged_round)
        if facts.judged_round - last > 2:
            yield f"{name} stayed behind: its last fold is round {last}, the newest one is round {facts.judged_round}"


def _model_failures(model: ModelFacts | None) -> Iterable[str]:
    if model is None:
        yield "no node left a checkpoint that can be read"
    elif not model.loss_last <= MAX_LOSS_RATIO * model.loss_first:
        yield (
            f"the held-out loss fell from {model.loss_first:.3f} to {model.loss_last:.3f} only, "
            f"not to {MAX_LOSS_RATIO} of it"
        )


def measure_model(swarm_dirs: Iterable[Path], spec: SwarmSpec) -> ModelFacts | None:
    """Losses, size and a sample of the newest model that the nodes left in their checkpoints; None if there is none."""
    found = [found for path in swarm_dirs if (found := _final_anchor(path)) is not None]
    if not found:
        return None
    _, anchor = max(found, key=lambda item: item[0])
    bench = _Workbench(spec)
    return ModelFacts(
        loss_first=bench.heldout_loss(bench.initial),
        loss_last=bench.heldout_loss(anchor),
        parameters=int(anchor.size),
        sample=bench.write(anchor),
    )


def generate_sample(swarm_dir: Path) -> str:
    """Text that the model of a node's last checkpoint writes after a fixed prompt.

    The swarm must train on the shipped book. Raises BadInput without spec or checkpoint, DamagedState when
    no checkpoint is whole.
    """
    checkpoint = load_checkpoint(swarm_dir / "checkpoint")
    if checkpoint is None:
        raise BadInput(f"{swarm_dir} has no checkpoint yet: let the node train for a while")
    return _Workbench(read_spec(swarm_dir / "spec.bin")).write(checkpoint.arrays[_ANCHOR])


class _Workbench:
    """The initial and any other state of a spec, evaluated on the held-out windows of the shipped book."""

    def __init__(self, spec: SwarmSpec) -> None:
        import torch

        from tscale.kernels.init import init_state
        from tscale.kernels.inner import InnerTrainer
        from tscale.node.data.corpus import ByteCorpus, load_text_file
        from tscale.node.worker.kernel_config import kernel_config

        torch.set_num_threads(1)  # two threads on a busy machine of two cores are ten times slower
        kernels = kernel_config(spec)
        self.initial: np.ndarray = init_state(kernels.model, spec.seed)
        self._corpus: ByteCorpus = ByteCorpus(load_text_file(shipped_book_path()), spec.data.heldout_per_mille)
        counts = self._corpus.counts
        self._trainer: InnerTrainer = InnerTrainer(kernels.model, kernels.inner, self.initial.copy(), counts)
        self._context = spec.inner.context

    def heldout_loss(self, flat: np.ndarray) -> float:
        """Mean over HELDOUT_WINDOWS windows, nats per byte; the same windows for every state."""
        return self._trainer.evaluate(flat, self._corpus.heldout(HELDOUT_WINDOWS, self._context))

    def write(self, flat: np.ndarray) -> str:
        """SAMPLE_TOKENS bytes after SAMPLE_PROMPT, as text."""
        import numpy as np

        prompt = np.frombuffer(SAMPLE_PROMPT.encode(), np.uint8).astype(np.int64)
        tokens = self._trainer.generate(flat, prompt, SAMPLE_TOKENS, 0.7, 1)
        return SAMPLE_PROMPT + bytes(tokens.astype(np.uint8)).decode("utf-8", errors="replace")


def _final_anchor(swarm_dir: Path) -> tuple[int, np.ndarray] | None:
    """The round and the anchor of a node's checkpoint, or None when it left none that is good."""
    try:
        checkpoint = load_checkpoint(swarm_dir / "checkpoint")
    except StopNode:
        return None
    return None if checkpoint is None else (int(checkpoint.meta["head"]["round"]), checkpoint.arrays[_ANCHOR])
