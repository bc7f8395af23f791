"""Daemons without processes: several on a network in memory and a virtual clock, with real training in line."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.helpers.inline_nodes import InlineSwarm, Running, nano_spec
from tests.helpers.virtual_loop import run_virtually
from tscale.node.checkpoint import load_checkpoint
from tscale.node.config import NodeConfig, StorageConfig
from tscale.node.recordfile import RecordFile
from tscale.node.worker.messages import Fold, Verify
from tscale.protocol.errors import BadInput, DiskFull, RestartWorker, StopNode
from tscale.protocol.spec import SwarmSpec

Scenario = Callable[[InlineSwarm], Awaitable[None]]


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable))


def play(folder: Path, scenario: Scenario, spec: SwarmSpec | None = None) -> None:
    async def run() -> None:
        await scenario(InlineSwarm(folder, spec))

    run_virtually(run())


def saved_round(run: Running) -> int:
    found = load_checkpoint(run.state.checkpoint)
    assert found is not None and found.note is None
    return int(found.meta["head"]["round"])


def agree(*runs: Running) -> int:
    """How many rounds several of them have folded; all with the same manifest and state."""
    rounds = set.intersection(*(set(run.rounds) for run in runs))
    for number in rounds:
        assert len({(run.rounds[number]["manifest"], run.rounds[number]["state"]) for run in runs}) == 1
    return len(rounds)


def test_joiners_fetch_spec_and_dataset_and_all_fold_the_same(tmp_path: Path) -> None:
    async def scenario(swarm: InlineSwarm) -> None:
        creator = swarm.start("creator", knows=True)
        await swarm.until(lambda: creator.last_round >= 2, "rounds alone", creator)
        seed = swarm.start("seed", creator, role="seed")
        joiner = swarm.start("joiner", creator)
        await swarm.until(lambda: joiner.last_round >= 8, "rounds together", creator, seed, joiner)
        assert agree(creator, joiner) >= 6
        assert {line["contributors"] for number, line in joiner.rounds.items() if number >= 6} == {2}
        assert [run.shown[-1].activity for run in (creator, seed, joiner)] == ["training", "serving", "training"]
        assert joiner.state.spec.read_bytes() == swarm.spec.to_bytes()
        # its loss curve has the rounds from before it came, with the contributors' losses
        curve = joiner.shown[-1].training.history
        assert [point.round for point in curve] == list(range(curve[-1].round + 1))
        assert all(point.loss_train is not None and 1.0 < point.loss_train < 6.0 for point in curve)
        assert creator.sees(joiner) and joiner.sees(seed) and seed.sees(creator)

        await creator.end()
        assert creator.status.activity == "stopped"
        assert saved_round(creator) == creator.last_round
        # a goodbye is believed at once, without a timeout
        await swarm.until(lambda: not joiner.sees(creator), "the goodbye", joiner, limit_s=2.0)
        last = joiner.last_round
        late = swarm.start("late", seed)
        await swarm.until(lambda: late.last_round > last + 3, "rounds without the creator", joiner, seed, late)
        assert agree(joiner, late) >= 2
        await asyncio.gather(*(run.end() for run in (seed, joiner, late)))

    play(tmp_path, scenario)


def test_a_restart_resumes_the_very_round_also_when_the_chain_was_pruned(tmp_path: Path) -> None:
    async def scenario(swarm: InlineSwarm) -> None:
        first = swarm.start("one", knows=True)
        await swarm.until(lambda: first.last_round >= 2, "rounds", first)
        assert first.node.driver is not None
        first.node.driver.machine.view.chain.keep = 4
        await swarm.until(lambda: first.last_round >= 12, "rounds", first)
        await first.end()
        assert len(RecordFile(first.state.chain).load()) < 10
        last, state = first.last_round, first.rounds[first.last_round]["state"]

        again = swarm.start("one", knows=True)
        await swarm.until(lambda: again.shown and again.shown[-1].round.folded_round >= 0, "the state", again)
        assert (again.shown[-1].round.folded_round, again.shown[-1].round.state_digest) == (last, state)
        await swarm.until(lambda: again.last_round > last + 2, "rounds after it", again)
        assert again.rounds[last]["state"] == state
        assert again.notices == []
        await again.end()

    play(tmp_path, scenario)


def test_a_snapshot_from_before_a_pause_is_good_until_there_is_a_newer_one(tmp_path: Path) -> None:
    async def scenario(swarm: InlineSwarm) -> None:
        first = swarm.start("one", knows=True)
        await swarm.until(lambda: first.last_round >= 12, "rounds", first)
        await first.end()
        before, total_tokens = first.last_round, first.shown[-1].training.tokens_total
        # many rounds later a power cut comes right after the first new fold, before its snapshot
        await asyncio.sleep(100.0)
        cut = swarm.start("one", knows=True)

        def power_cut(command: object) -> None:
            if isinstance(command, Fold) and command.round > before:
                cut.node.on_signal(cut.task)
                cut.node.on_signal(cut.task)

        await swarm.until(lambda: cut.node.trainer is not None and cut.handle.alive, "the worker", cut)
        cut.handle.after = power_cut
        with pytest.raises(asyncio.CancelledError):
            await cut.task
        for path in cut.state.checkpoint.glob("*.tsck"):
            path.write_bytes(path.read_bytes()[:-100])
        last = cut.last_round
        again = swarm.start("one", knows=True)
        await swarm.until(lambda: again.last_round > last + 2, "rounds after the loss", again)
        await again.end()
        tokens = [shown.training.tokens_total for shown in again.shown if shown.round.folded_round >= 0]
        assert tokens == sorted(tokens) and tokens[-1] > total_tokens
        (notice,) = [line for _, line in again.notices]
        assert "is whole (" in notice and "or from the newest snapshot" in notice

    play(tmp_path, scenario)


def test_a_leave_request_ends_a_node_also_one_that_waits_for_its_seed(tmp_path: Path) -> None:
    async def scenario(swarm: InlineSwarm) -> None:
        stays, goes = swarm.start("stays", knows=True), swarm.start("goes", knows=True)
        await swarm.until(lambda: goes.last_round >= 3 and stays.sees(goes), "rounds", stays, goes)
        (goes.state.path / "leave.request").touch()
        await asyncio.wait_for(goes.task, 5.0)
        assert [line for _, line in goes.notices] == ["leaving the swarm: another command asked for it"]
        assert saved_round(goes) == goes.last_round
        await swarm.until(lambda: not stays.sees(goes), "the goodbye", stays, limit_s=2.0)
        await stays.end()

        waits = swarm.start("waits", stays)
        await asyncio.sleep(20.0)
        (waits.state.path / "leave.request").touch()
        await asyncio.wait_for(waits.task, 5.0)
        assert waits.ready == []

    play(tmp_path, scenario)


def test_a_dead_worker_is_replaced_with_growing_waits_and_membership_stays(tmp_path: Path) -> None:
    async def scenario(swarm: InlineSwarm) -> None:
        one, two = swarm.start("one", knows=True), swarm.start("two", knows=True)
        await swarm.until(lambda: two.last_round >= 3 and one.sees(two), "rounds", one, two)
        seen = len(one.shown)
        died_s, died_at = swarm.loop.time(), two.last_round
        swarm.faults += [RestartWorker("it was not ready"), RestartWorker("it was not ready again")]
        two.handle.kill()
        await swarm.until(lambda: two.shown[-1].activity == "starting", "the death", two)
        assert two.shown[-1].reason == "signal 9 ended the worker; the next start is number 2"
        await swarm.until(lambda: two.last_round > died_at + 4, "rounds with a new worker", one, two)
        waits = [(line.split(":")[0], line.split(" in ")[1].split(" s")[0]) for _, line in two.notices]
        assert waits == [
            ("signal 9 ended the worker", "1"),
            ("it was not ready", "2"),
            ("it was not ready again", "4"),
        ]
        times = [at - died_s for at, _ in two.notices]
        assert times[1] - times[0] == pytest.approx(1.0, abs=0.3) and times[2] - times[1] == pytest.approx(2.0, abs=0.3)
        # nobody saw it leave, and it contributes again
        peer = two.identity.peer_id
        assert all(p.alive for shown in one.shown[seen:] for p in shown.peers if p.peer_id == peer)
        await swarm.until(lambda: one.rounds[one.last_round]["contributors"] == 2, "both again", one, two)
        assert agree(one, two) >= 5
        await asyncio.gather(one.end(), two.end())

    play(tmp_path, scenario)


@pytest.mark.parametrize("error", [DiskFull("no space left for x: free some"), BadInput("the text is too short: x")])
def test_what_only_a_person_can_mend_stops_the_node_with_its_reason(tmp_path: Path, error: StopNode) -> None:
    async def scenario(swarm: InlineSwarm) -> None:
        swarm.faults.append(error)
        run = swarm.start("one", knows=True)
        with pytest.raises(type(error), match=str(error)):
            await run.task
        assert run.status.activity == "stopped"

    play(tmp_path, scenario)


def test_the_second_signal_waits_for_nothing(tmp_path: Path) -> None:
    async def scenario(swarm: InlineSwarm) -> None:
        run = swarm.start("one", knows=True)
        await swarm.until(lambda: run.last_round >= 1, "rounds", run)
        handle, begin_s = run.handle, swarm.loop.time()
        run.node.on_signal(run.task)
        run.node.on_signal(run.task)
        with pytest.raises(asyncio.CancelledError):
            await run.task
        assert not handle.alive and handle.saves == 0
        assert swarm.loop.time() - begin_s < 0.5

    play(tmp_path, scenario)


def test_a_worker_that_hangs_does_not_keep_the_node(tmp_path: Path) -> None:
    async def scenario(swarm: InlineSwarm) -> None:
        run = swarm.start("one", knows=True)
        await swarm.until(lambda: run.last_round >= 1, "rounds", run)
        run.handle.hangs, begin_s = True, swarm.loop.time()
        await run.end()
        assert 5.0 < swarm.loop.time() - begin_s < 8.0
        assert run.notices[-1][1] == "the last minutes may not be saved: the worker did not answer Stop within 6 s"

    play(tmp_path, scenario)


def test_a_signal_ends_a_node_that_waits_for_its_seed(tmp_path: Path) -> None:
    async def scenario(swarm: InlineSwarm) -> None:
        gone = swarm.start("gone", knows=True)
        await gone.end()
        run = swarm.start("one", gone)
        await asyncio.sleep(40.0)
        assert [line for _, line in run.notices][0].startswith(
            f"waiting for a seed of {swarm.spec.swarm_id}: none of 1"
        )
        assert 2 <= len(run.notices) <= 4
        await run.end()
        assert run.ready == [] and run.shown == []

    play(tmp_path, scenario)


def test_one_fault_of_a_loop_is_survived_and_a_lasting_one_is_not(tmp_path: Path) -> None:
    async def scenario(swarm: InlineSwarm) -> None:
        run = swarm.start("one", knows=True)
        await swarm.until(lambda: run.ready, "the start", run)
        board = run.node.board
        assert board is not None
        good, board.snapshot = board.snapshot, None  # type: ignore[assignment,method-assign]
        await asyncio.sleep(1.5)
        board.snapshot = good  # type: ignore[method-assign]
        await swarm.until(lambda: run.last_round >= 2, "rounds", run)
        board.snapshot = None  # type: ignore[assignment,method-assign]
        with pytest.raises(StopNode, match=r"an unexpected error stopped the node \(TypeError\): see "):
            await run.task
        # the checkpoint was saved all the same
        assert saved_round(run) == run.last_round

    play(tmp_path, scenario)


def test_an_output_that_is_gone_stops_the_node_in_good_order(tmp_path: Path) -> None:
    async def scenario(swarm: InlineSwarm) -> None:
        run = swarm.start("one", knows=True)
        await swarm.until(lambda: run.last_round >= 1, "rounds", run)

        def closed(_: object) -> None:
            raise BrokenPipeError(32, "Broken pipe")

        run.on_status = closed  # type: ignore[method-assign]
        with pytest.raises(StopNode, match=r"the output can't be written any more \(Broken pipe\)"):
            await run.task
        assert saved_round(run) == run.last_round

    play(tmp_path, scenario)


def test_a_blob_that_is_missing_on_disk_is_fetched_from_another_holder(tmp_path: Path) -> None:
    async def scenario(swarm: InlineSwarm) -> None:
        creator = swarm.start("creator", knows=True)
        seed = swarm.start("seed", creator, role="seed")
        root = swarm.spec.data.shards[0].root.hex()
        await swarm.until(lambda: (seed.state.blobs / root).exists(), "the seed's dataset", creator, seed)
        (creator.state.blobs / root).unlink()
        joiner = swarm.start("joiner", creator)
        await swarm.until(lambda: (joiner.state.blobs / root).exists(), "the joiner's dataset", creator, seed, joiner)
        await swarm.until(lambda: joiner.last_round >= 4, "rounds together", creator, seed, joiner)
        assert agree(creator, joiner) >= 2

        # a contribution that vanishes between its check and its fold costs nobody anything
        dropped: list[Path] = []

        def lose(command: object) -> None:
            if isinstance(command, Verify) and len(dropped) < 3:
                dropped.append(Path(command.path))
                dropped[-1].unlink()

        creator.handle.after = lose
        await swarm.until(lambda: len(dropped) == 3, "three losses", creator, seed, joiner)
        before = creator.last_round
        await swarm.until(lambda: creator.last_round > before + 4, "rounds after it", creator, seed, joiner)
        assert agree(creator, joiner) >= 6
        assert {creator.rounds[number]["contributors"] for number in range(before + 2, before + 4)} == {2}
        await asyncio.gather(creator.end(), seed.end(), joiner.end())

    play(tmp_path, scenario)


def test_a_node_whose_blobs_folder_is_removed_goes_on_and_fetches_the_dataset_again(tmp_path: Path) -> None:
    async def scenario(swarm: InlineSwarm) -> None:
        creator = swarm.start("creator", knows=True)
        joiner = swarm.start("joiner", creator)
        await swarm.until(lambda: joiner.last_round >= 3, "rounds together", creator, joiner)
        dataset = joiner.state.blobs / swarm.spec.data.shards[0].root.hex()
        shutil.rmtree(joiner.state.blobs)
        before, seen = joiner.last_round, len(joiner.shown)
        await swarm.until(dataset.exists, "the dataset once more", creator, joiner, limit_s=20.0)
        assert dataset.stat().st_size == swarm.spec.data.shards[0].size_bytes
        await swarm.until(lambda: joiner.last_round > before + 5, "rounds after the loss", creator, joiner)
        assert agree(creator, joiner) >= 6
        assert {shown.activity for shown in joiner.shown[seen:]} == {"training"}
        (notice,) = [line for _, line in joiner.notices]
        assert "gone from the blobs folder" in notice
        await asyncio.gather(creator.end(), joiner.end())

    play(tmp_path, scenario)


def test_files_and_limits_that_do_not_fit_the_swarm_are_refused(tmp_path: Path) -> None:
    async def scenario(swarm: InlineSwarm) -> None:
        other = tmp_path / "other.txt"
        other.write_text("another text")
        with pytest.raises(BadInput, match=r"other.txt is not a text of this swarm's dataset"):
            await swarm.start("a", knows=True, dataset_files=(other,)).task
        small = NodeConfig(storage=StorageConfig(blob_quota_bytes=1 << 18))
        with pytest.raises(BadInput, match="storage.blob_quota_bytes is 262144: raise it"):
            await swarm.start("b", knows=True, config=small).task
        with pytest.raises(BadInput, match="check the link or the file"):
            await swarm.start("c", knows=True, spec=nano_spec(seed=5)).task

    play(tmp_path, scenario)
