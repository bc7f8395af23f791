"""A worker whose device is lost: it sends nothing of that round, a new one starts, and training goes on."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.helpers.worker_bench import GENESIS, worker_config
from tscale.node.blobs import BlobStore
from tscale.node.trainer import Trainer, TrainerHooks
from tscale.node.worker.messages import Progress, WorkerConfig
from tscale.node.worker.supervisor import LaunchConfig, WorkerHandle
from tscale.protocol import effects as fx
from tscale.protocol import events as ev

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

WORKER = """
import os, sys
from tscale.kernels.offload.transfer import DirectTransfer
from tscale.node.worker import process, trainers

class LosesDevice(DirectTransfer):
    loads = 0
    def to_device(self, hosts, slot, after=()):
        self.loads += 1
        if self.loads > 60 and not os.path.exists({marker!r}):
            open({marker!r}, "w").close()
            raise RuntimeError("CUDA error: unspecified launch failure")
        return super().to_device(hosts, slot, after)

trainers.make_transfer = lambda machine: LosesDevice()
process.main()
"""


class Node:
    """The node's side of training, and what it hears."""

    def __init__(self, folder: Path, config: WorkerConfig) -> None:
        self.events: list[ev.Event] = []
        self.notices: list[str] = []
        self.steps = 0
        self._news = asyncio.Event()
        hooks = TrainerHooks(
            feed=self._heard(self.events),
            on_ready=lambda ready: None,
            on_progress=self._progressed,
            on_evaluated=lambda event: None,
            on_trouble=lambda line: None,
            on_notice=self._heard(self.notices),
            on_fatal=self._heard(self.notices),
        )
        self.trainer = _Trainer(config, BlobStore(folder / "blobs", 1 << 24), hooks, folder / "log")

    def _heard(self, heard: list):
        def hear(item: object) -> None:
            heard.append(item)
            self._news.set()

        return hear

    def _progressed(self, progress: Progress) -> None:
        self.steps = progress.steps
        self._news.set()

    def kinds(self) -> list[type[ev.Event]]:
        return [type(event) for event in self.events]

    async def until(self, holds) -> None:
        async with asyncio.timeout(120):
            while not holds():
                self._news.clear()
                await self._news.wait()


class _Trainer(Trainer):
    def _make_handle(self) -> WorkerHandle:
        return WorkerHandle(self._on_event, LaunchConfig(command=self.command, log=self._log))

    command: tuple[str, ...] = ()


def test_a_lost_device_costs_its_round_and_nothing_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        node = Node(tmp_path, worker_config(tmp_path, offload_slots=2))
        node.trainer.command = (sys.executable, "-P", "-c", WORKER.format(marker=str(tmp_path / "lost")))
        node.trainer.start()
        node.trainer.take(fx.SetTraining(True, ""))
        try:
            await lose_and_resume(node)
        finally:
            note = await node.trainer.stop(30)
        assert note == ""

    asyncio.run(scenario())


async def lose_and_resume(node: Node) -> None:
    await node.until(lambda: ev.WorkerDied in node.kinds())
    lost = "the device was lost: CUDA error: unspecified launch failure"
    assert node.events[-1] == ev.WorkerDied(lost)
    assert node.kinds().count(ev.WorkerReady) == 1
    # there is no worker now: what is asked for is lost
    node.trainer.take(fx.MakeContribution(0, GENESIS, 0))
    await node.until(lambda: node.kinds().count(ev.WorkerReady) == 2)
    assert f"{lost}: a new one starts in 1 s" in node.notices
    node.steps = 0
    await node.until(lambda: node.steps > 0)
    assert not set(node.kinds()) & {ev.ContributionMade, ev.ContributionFailed}
    node.trainer.take(fx.MakeContribution(1, GENESIS, 0))
    await node.until(lambda: ev.ContributionMade in node.kinds())
    made = node.events[-1]
    assert isinstance(made, ev.ContributionMade) and made.round == 1 and made.steps > 0
