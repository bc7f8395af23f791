"""The worker as a real process: what the node sees of it when it works, hangs, babbles, dies, or loses the node."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.worker_bench import GENESIS, manifest, worker_config
from tscale.node.worker import messages as m
from tscale.node.worker.supervisor import LaunchConfig, WorkerDied, WorkerHandle
from tscale.protocol.errors import BadInput, RestartWorker, SkipRound

pytestmark = pytest.mark.process

CONFIG = m.WorkerConfig(b"", b"k" * 32, b"g" * 32, -1, (), "", "")
SAVE = m.Save()
_PRELUDE = """
import os, sys, time
from tscale.node.worker import messages as m
def receive():
    prefix = sys.stdin.buffer.read(4)
    if len(prefix) < 4: sys.exit(0)
    return m.decode_body(sys.stdin.buffer.read(m.frame_length(prefix)))
def send(call_id, message):
    sys.stdout.buffer.write(m.encode_frame(call_id, message)); sys.stdout.buffer.flush()
receive()
ready = m.Ready(b"g", -1, b"s", 0, None, "", False, 1, 4)
"""


def fake(script: str) -> LaunchConfig:
    """A worker that is a few lines of Python."""
    return LaunchConfig((sys.executable, "-P", "-c", _PRELUDE + script), start_timeout_s=30)


async def started(script: str) -> tuple[WorkerHandle, list[m.Event]]:
    events: list[m.Event] = []
    handle = WorkerHandle(events.append, fake(script))
    assert (await handle.start(CONFIG)).manifest == b"g"
    return handle, events


def gone(pid: int) -> bool:
    """Whether the process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_gone(pid: int, within_s: float) -> float:
    begin_s = time.monotonic()
    while not gone(pid):
        assert time.monotonic() - begin_s < within_s, f"process {pid} is still there after {within_s} s"
        time.sleep(0.02)
    return time.monotonic() - begin_s


def test_answers_find_their_calls_in_any_order() -> None:
    async def scenario() -> None:
        script = """
send(0, ready); send(0, m.Progress(1, 2, None, 3.0, 4.0, 5.0))
first, second = receive(), receive()
send(second[0], m.Saved(b"second", "")); send(77, m.Saved(b"nobody", "")); send(first[0], m.Saved(b"first", ""))
receive(); time.sleep(60)
"""
        handle, events = await started(script)
        one, two = await asyncio.gather(handle.call(SAVE, 30), handle.call(SAVE, 30))
        assert (one.manifest, two.manifest) == (b"first", b"second")
        assert events == [m.Progress(1, 2, None, 3.0, 4.0, 5.0)]
        await handle.stop(0)

    asyncio.run(scenario())


def test_a_death_ends_every_pending_call_at_once() -> None:
    async def scenario() -> None:
        handle, _ = await started("send(0, ready); receive(); receive(); os.kill(os.getpid(), 9)")
        begin_s = time.monotonic()
        outcomes = await asyncio.gather(handle.call(SAVE, 60), handle.call(SAVE, 60), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [WorkerDied, WorkerDied]
        assert time.monotonic() - begin_s < 10
        assert await handle.wait_dead() == "signal 9 ended the worker"
        assert not handle.alive
        with pytest.raises(WorkerDied):
            await handle.call(SAVE, 1)
        assert await handle.stop(1) == "signal 9 ended the worker"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("script", "error", "text"),
    [
        ("send(0, m.Failed('bad_input', 'no such book')); sys.exit(1)", BadInput, "no such book"),
        ("sys.exit(3)", WorkerDied, "exit code 3"),
        ("sys.stdout.buffer.write(bytes([255]) * 8); sys.stdout.flush(); time.sleep(60)", WorkerDied, "garbage"),
        ("send(0, m.Failed('crash', 'oh')); sys.exit(1)", RestartWorker, "oh"),
    ],
)
def test_a_failed_start_says_why_and_leaves_no_process(script: str, error: type[Exception], text: str) -> None:
    async def scenario() -> None:
        handle = WorkerHandle(lambda event: None, fake(script))
        with pytest.raises(error, match=text):
            await handle.start(CONFIG)
        assert handle.pid is not None and gone(handle.pid)

    asyncio.run(scenario())


def test_a_call_without_an_answer_times_out_and_a_late_answer_is_dropped() -> None:
    async def scenario() -> None:
        script = """
send(0, ready)
late, _ = receive(); now, _ = receive()
send(late, m.Saved(b"late", "")); send(now, m.Saved(b"now", "")); receive()
"""
        handle, _ = await started(script)
        with pytest.raises(RestartWorker, match="did not answer Save within 0.1 s"):
            await handle.call(SAVE, 0.1)
        assert (await handle.call(SAVE, 30)).manifest == b"now"
        await handle.stop(0)

    asyncio.run(scenario())


def test_errors_of_the_tree_and_wrong_answers_come_back_as_such() -> None:
    async def scenario() -> None:
        script = """
send(0, ready)
send(receive()[0], m.Failed("skip_round", "diverged")); send(receive()[0], m.Generated("hm")); receive()
"""
        handle, _ = await started(script)
        with pytest.raises(SkipRound, match="diverged"):
            await handle.call(SAVE, 30)
        with pytest.raises(RestartWorker, match="Generated"):
            await handle.call(SAVE, 30)
        await handle.stop(0)

    asyncio.run(scenario())


def test_a_worker_that_ignores_stop_is_killed() -> None:
    async def scenario() -> None:
        handle, _ = await started("send(0, ready)\nwhile True: time.sleep(60)")
        begin_s = time.monotonic()
        note = await handle.stop(0.3)
        assert "did not answer Stop" in note
        assert handle.pid is not None and gone(handle.pid)
        assert time.monotonic() - begin_s < 5

    asyncio.run(scenario())


def test_the_worker_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    """With the real entry point, and before it had a config: nothing but the pipe and the kernel ends it."""
    parent = """
import subprocess, sys, os, time
child = subprocess.Popen([sys.executable, "-P", "-m", "tscale.node.worker.process", str(os.getpid())],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
print(child.pid, flush=True)
time.sleep(120)
"""
    process = subprocess.Popen([sys.executable, "-P", "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    wait_gone(pid, 10)


def test_a_worker_started_by_a_stranger_does_not_live() -> None:
    wrong_parent = str(os.getppid())
    command = [sys.executable, "-P", "-m", "tscale.node.worker.process", wrong_parent]
    done = subprocess.run(command, stdin=subprocess.PIPE, capture_output=True, timeout=60)
    assert done.returncode == 1 and done.stdout == b""


_PRIORITY = """
import os
from tscale.node.worker.channel import lower_priority
group = lambda: open("/proc/self/autogroup").read().split()[-1:] or ["none"]
before = group()
lower_priority(7)
print(os.nice(0), *before, *group())
"""


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="no autogroup here")
@pytest.mark.parametrize("leads", [True, False])
def test_a_worker_gives_way_to_other_sessions_too_and_changes_only_its_own(leads: bool) -> None:
    """Some containers have the file and no group in it: there is nothing to lower, and `nice` is set all the same."""
    command = [sys.executable, "-P", "-c", _PRIORITY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, start_new_session=leads)
    nice, before, after = done.stdout.split() or ["", "", done.stderr]
    assert nice == str(os.nice(0) + 7), done.stderr
    assert after == ("7" if leads and before != "none" else before)


class Real:
    """The real worker on the tiny model, and what it said unasked."""

    def __init__(self, folder: Path) -> None:
        self.events: list[m.Event] = []
        self._news = asyncio.Event()
        self.config = worker_config(folder)
        self.handle = WorkerHandle(self._hear, LaunchConfig(log=folder / "log"))

    def _hear(self, event: m.Event) -> None:
        self.events.append(event)
        self._news.set()

    async def progress(self, seen: int = 0) -> m.Progress:
        """The next Progress after `seen` steps."""
        while True:
            for event in reversed(self.events):
                if isinstance(event, m.Progress) and event.steps > seen:
                    return event
            self._news.clear()
            async with asyncio.timeout(60):
                await self._news.wait()

    def process(self) -> psutil.Process:
        assert self.handle.pid is not None
        return psutil.Process(self.handle.pid)


def test_a_round_a_kill_and_a_resume(tmp_path: Path) -> None:
    async def scenario() -> None:
        first = Real(tmp_path)
        ready = await first.handle.start(first.config)
        assert (ready.manifest, ready.resumed) == (GENESIS, False)
        early = await first.progress()
        closed = await first.handle.call(m.Close(0, GENESIS, 0), 60)
        assert closed.steps >= early.steps
        assert await first.handle.call(m.Verify(closed.path, 0), 60) == m.Verified(True, "")
        fold = m.Fold(manifest(0), GENESIS, ((closed.path, 1.0, 2.0),), closed.tokens, 0)
        folded = await first.handle.call(fold, 60)
        assert (await first.handle.call(m.Save(), 60)).manifest == manifest(0)
        late = await first.progress(early.steps)
        assert late.wall_s >= late.training_s > 0 and late.tokens == late.steps * 128
        # it says what it was trained from, whatever the node took for the head
        assert (await first.handle.call(m.Close(1, GENESIS, 0), 60)).base == manifest(0)
        first.process().kill()
        assert await first.handle.wait_dead() == "signal 9 ended the worker"

        second = Real(tmp_path)
        ready = await second.handle.start(second.config)
        assert (ready.manifest, ready.round, ready.resumed) == (manifest(0), 0, True)
        assert (ready.state_digest, ready.previous_manifest) == (folded.state_digest, GENESIS)
        assert ready.total_tokens == closed.tokens
        assert (await second.progress()).tokens > closed.tokens
        assert await second.handle.stop(60, save=True) == ""
        assert second.handle.pid is not None and gone(second.handle.pid)
        assert await second.handle.wait_dead() == "the worker ended with exit code 0"

    asyncio.run(scenario())


def test_signals_and_pause(tmp_path: Path) -> None:
    async def scenario() -> None:
        worker = Real(tmp_path)
        await worker.handle.start(worker.config)
        seen = (await worker.progress()).steps
        worker.process().send_signal(signal.SIGINT)
        assert (await worker.progress(seen)).steps > seen, "Ctrl-C is for the node to decide"
        assert await worker.handle.call(m.SetPaused(True), 60) == m.Paused(True)
        before, begin_s = worker.process().cpu_times(), time.monotonic()
        worker.events.clear()
        while sum(isinstance(event, m.Progress) for event in worker.events) < 3:
            worker._news.clear()
            async with asyncio.timeout(60):
                await worker._news.wait()
        after, wall_s = worker.process().cpu_times(), time.monotonic() - begin_s
        assert len({event.steps for event in worker.events[1:] if isinstance(event, m.Progress)}) == 1
        assert after.user + after.system - before.user - before.system < 0.3 * wall_s
        await worker.handle.call(m.SetPaused(False), 60)
        await worker.progress(max(event.steps for event in worker.events if isinstance(event, m.Progress)))
        worker.process().terminate()
        assert await worker.handle.wait_dead() == "signal 15 ended the worker"
        assert not list(tmp_path.glob("checkpoint/*")), "SIGTERM is the quick way out"

    asyncio.run(scenario())


def test_a_training_worker_ends_with_its_node(tmp_path: Path) -> None:
    config = worker_config(tmp_path)
    parent = f"""
import asyncio
from pathlib import Path
from tscale.node.worker import messages as m
from tscale.node.worker.supervisor import LaunchConfig, WorkerHandle
async def main():
    handle = WorkerHandle(lambda event: None, LaunchConfig(log=Path({str(tmp_path / "log")!r})))
    await handle.start(m.{config!r})
    print(handle.pid, flush=True)
    await asyncio.sleep(120)
asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-P", "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    wait_gone(pid, 10)


def test_a_bad_config_is_told_and_not_a_crash(tmp_path: Path) -> None:
    async def scenario() -> None:
        worker = Real(tmp_path)
        (tmp_path / "book").unlink()
        with pytest.raises(BadInput, match="book can't be read"):
            await worker.handle.start(worker.config)

    asyncio.run(scenario())
