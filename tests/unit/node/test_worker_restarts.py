"""How long the node waits before it starts a worker again."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from tests.helpers.virtual_loop import run_virtually
from tests.helpers.worker_bench import worker_config
from tscale.node.blobs import BlobStore
from tscale.node.trainer import Trainer, TrainerHooks
from tscale.node.worker.messages import Failed
from tscale.protocol.errors import RestartWorker


class Mortal(Trainer):
    """Workers that live as long as `lives_s` says, one after the other, and then end."""

    lives_s: tuple[float, ...] = ()
    lived = 0

    async def _one_life(self) -> str:
        life_s = self.lives_s[self.lived] if self.lived < len(self.lives_s) else 1e9
        self.lived += 1
        await asyncio.sleep(life_s)
        raise RestartWorker("the device was lost: CUDA error: it fell off the bus")


def ignore(_: object) -> None:
    """For hooks that nobody looks at."""


def waits_s(folder: Path, *lives_s: float) -> list[float]:
    """The waits after workers of these lives."""
    notices: list[str] = []

    async def scenario() -> None:
        hooks = TrainerHooks(ignore, ignore, ignore, ignore, ignore, notices.append, ignore)
        trainer = Mortal(worker_config(folder), BlobStore(folder / "blobs", 1 << 24), hooks)
        trainer.lives_s = lives_s
        trainer.start()
        await asyncio.sleep(1e6)
        await trainer.stop(0.0)

    run_virtually(scenario())
    assert all(line.startswith("the device was lost: CUDA error: it fell off the bus: a new") for line in notices)
    return [float(re.findall(r"starts in ([0-9.]+) s", line)[0]) for line in notices]


def test_the_wait_grows_to_a_minute_and_is_short_again_after_a_steady_life(tmp_path: Path) -> None:
    found = waits_s(tmp_path, *([5.0] * 9), 600.0, 5.0)
    assert found == [1, 2, 4, 8, 15, 30, 60, 60, 60, 1, 2]


def test_steps_that_were_left_out_are_said_to_the_person(tmp_path: Path) -> None:
    notices: list[str] = []
    hooks = TrainerHooks(ignore, ignore, ignore, ignore, ignore, notices.append, ignore)
    trainer = Trainer(worker_config(tmp_path), BlobStore(tmp_path / "blobs", 1 << 24), hooks)
    trainer._on_event(Failed("skip_round", "a step was left out"))
    trainer._on_event(Failed("crash", "that is told where the worker ends"))
    assert notices == ["a step was left out"]
