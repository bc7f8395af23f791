"""What the node costs: a real node's training speed beside the bare training loop's, in turns within one run.

The node is the production daemon, alone in its swarm: libp2p, state machine, status files, a spawned worker that
closes, folds, evaluates and saves. The bare loop is the worker's own InnerTrainer and nothing else, in a process of
its own with the worker's priority and threads. While one side runs, the other is suspended.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import psutil

from tscale.node.specs import demo_spec, shipped_book_path, with_length
from tscale.node.worker.messages import Progress
from tscale.protocol.errors import SkipRound
from tscale.protocol.spec import SwarmSpec
from tscale.protocol.status import StatusSnapshot

if TYPE_CHECKING:
    from tscale.node.daemon import Node
    from tscale.node.data.corpus import ByteCorpus

WARM_UP_STEPS = 3
NICE = 5
START_LIMIT_S = 180.0


@dataclass(frozen=True)
class BareSpeed:
    """What a bare loop did after its warm-up."""

    tokens: int
    steps: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """The rate, 0 when nothing was done."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class BareLoop:
    """The worker's own InnerTrainer, stepping: no rounds, no node, no evaluation. Sets torch's threads to one."""

    def __init__(self, spec: SwarmSpec, corpus: ByteCorpus) -> None:
        import torch

        from tscale.kernels.init import init_state
        from tscale.kernels.inner import InnerTrainer, lr_scale
        from tscale.node.worker.kernel_config import kernel_config
        from tscale.node.worker.session import batch_key

        torch.set_num_threads(1)
        kernels = kernel_config(spec)
        self._corpus = corpus
        self._inner = kernels.inner
        self._trainer = InnerTrainer(kernels.model, kernels.inner, init_state(kernels.model, spec.seed), corpus.counts)
        self._key, self._scale = batch_key(spec.seed, bytes(32), bytes(32)), lr_scale(kernels.inner, 0)
        self._steps = 0
        for _ in range(WARM_UP_STEPS):
            self._step()

    def run(self, seconds: float) -> BareSpeed:
        """Train for `seconds`."""
        begin_s, before = time.monotonic(), self._steps
        while time.monotonic() - begin_s < seconds:
            self._step()
        done = self._steps - before
        return BareSpeed(done * self._inner.batch * self._inner.context, done, time.monotonic() - begin_s)

    def _step(self) -> None:
        batch = self._corpus.batch(self._key, self._steps, self._inner.batch, self._inner.context)
        self._trainer.step(batch, self._scale)
        self._steps += 1


@dataclass(frozen=True)
class OverheadConfig:
    """`blocks` turns of `block_s` seconds for each side; `round_s` is the length of the node's rounds."""

    blocks: int = 5
    block_s: float = 12.0
    round_s: float = 20.0


def benched_spec(round_s: float) -> SwarmSpec:
    """The demo's model and data, with rounds of this length from the beginning of time."""
    spec = demo_spec()
    return replace(spec, name="bench", rounds=with_length(spec.rounds, round_s))


def run_overhead_bench(
    config: OverheadConfig | None = None, say: Callable[[str], None] = lambda line: None
) -> dict[str, float | int | list[float]]:
    """Measure. Returns node_tokens_per_s and bare_tokens_per_s (medians over the blocks), their ratio (median of the
    blocks' ratios) and the ratios themselves. `say` gets a line of progress now and then. Raises SkipRound when the
    node does not come to train."""
    return asyncio.run(_measure(config or OverheadConfig(), say))


async def _measure(config: OverheadConfig, say: Callable[[str], None]) -> dict[str, float | int | list[float]]:
    say("starting the bare loop and a node")
    with tempfile.TemporaryDirectory(prefix="tscale-bench-") as folder:
        bare = await _start_bare(config)
        try:
            node, task = await _start_node(config, Path(folder))
            try:
                return await _take_turns(config, node, bare, say)
            finally:
                node.on_signal(None)
                await task
        finally:
            bare.kill()
            await bare.wait()


async def _take_turns(
    config: OverheadConfig, node: Node, bare: asyncio.subprocess.Process, say: Callable[[str], None]
) -> dict[str, float | int | list[float]]:
    node_speeds, bare_speeds = [], []
    assert node.trainer is not None and node.trainer.pid is not None
    worker = psutil.Process(node.trainer.pid)
    for number in range(config.blocks):
        say(f"turn {number + 1} of {config.blocks}: {config.block_s:g} s the node, {config.block_s:g} s the bare loop")
        node_speeds.append(await _node_block(node, config.block_s))
        worker.suspend()
        try:
            bare_speeds.append(await _bare_block(bare, config.block_s))
        finally:
            worker.resume()
    ratios = [n / b for n, b in zip(node_speeds, bare_speeds, strict=True)]
    return {
        "node_tokens_per_s": median(node_speeds),
        "bare_tokens_per_s": median(bare_speeds),
        "ratio": median(ratios),
        "ratios": [round(r, 4) for r in ratios],
        "blocks": config.blocks,
        "block_s": config.block_s,
        "round_s": config.round_s,
    }


async def _start_bare(config: OverheadConfig) -> asyncio.subprocess.Process:
    command = (sys.executable, "-P", "-m", "tscale.node.bench.bare", str(NICE), str(config.round_s))
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(START_LIMIT_S):
        await process.stdout.readline()
    return process


async def _bare_block(process: asyncio.subprocess.Process, seconds: float) -> float:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{seconds}\n".encode())
    await process.stdin.drain()
    async with asyncio.timeout(10.0 * seconds + 60.0):
        line = await process.stdout.readline()
    return BareSpeed(**json.loads(line)).tokens_per_s


class _Silent:
    def on_ready(self, link: str, addrs: list[str]) -> None: ...

    def on_status(self, snapshot: StatusSnapshot) -> None: ...

    def on_notice(self, line: str) -> None: ...


async def _start_node(config: OverheadConfig, folder: Path) -> tuple[Node, asyncio.Task[None]]:
    from tscale.node.config import NodeConfig
    from tscale.node.daemon import Node, NodeOptions

    spec = benched_spec(config.round_s)
    options = NodeOptions(
        swarm_id=spec.swarm_id,
        spec=spec,
        swarm_dir=folder,
        role="trainer",
        seeds=(),
        host="127.0.0.1",
        port=0,
        name="",
        config=NodeConfig(),
        dataset_files=(shipped_book_path(),),
    )
    node = Node(options, _Silent())
    task = asyncio.create_task(node.run())
    try:
        async with asyncio.timeout(START_LIMIT_S):
            while node.board is None or node.board.progress is None or node.board.progress.tokens == 0:
                if task.done():
                    task.result()
                    raise SkipRound("the node stopped before it trained")
                await asyncio.sleep(0.2)
    except BaseException:
        node.on_signal(None)
        await asyncio.gather(task, return_exceptions=True)  # it still uses its folder
        raise
    return node, task


async def _node_block(node: Node, seconds: float) -> float:
    """Tokens per second of the worker's own wall clock, between two of its reports."""
    first = await _next_progress(node, None)
    begin_s = time.monotonic()
    last = first
    while time.monotonic() - begin_s < seconds:
        last = await _next_progress(node, last)
    return (last.tokens - first.tokens) / (last.wall_s - first.wall_s)


async def _next_progress(node: Node, before: Progress | None) -> Progress:
    assert node.board is not None
    before = before or node.board.progress
    async with asyncio.timeout(START_LIMIT_S):
        while node.board.progress is before or node.board.progress is None:
            await asyncio.sleep(0.01)
    return node.board.progress
