"""The worker process: `python -m tscale.node.worker.process <pid of the node>`, frames on stdin and stdout.

Three threads: the main one trains, one reads frames (and ends the process with the node), one does the jobs that must
not stop training: compress, fold, verify, snapshot, checkpoint. They meet in a StepGate, between two steps.
"""

import logging
import os
import queue
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from tscale.node.worker.channel import Channel, die_with_parent, lower_priority, take_standard_streams
from tscale.node.worker.gate import StepGate
from tscale.node.worker.messages import EVENT, BadMessage, Failed, Stop, Stopped, WorkerConfig
from tscale.protocol.errors import BadInput, DamagedState, DiskFull, RefuseFrame, RestartWorker, SkipRound, TscaleError

if TYPE_CHECKING:
    from tscale.node.worker.session import Session

logger = logging.getLogger(__name__)
MAX_JOBS = 64
IDLE_S = 0.5
Jobs = queue.Queue[tuple[int, Any]]


def failure(error: BaseException) -> Failed:
    """The answer that carries an error of the tree to the node; anything else is a crash."""
    kinds = {
        SkipRound: "skip_round",
        RefuseFrame: "refused",
        DiskFull: "disk_full",
        DamagedState: "damaged",
        BadInput: "bad_input",
        RestartWorker: "device",
    }
    for kind, name in kinds.items():
        if isinstance(error, kind):
            return Failed(name, str(error))
    # torch is loaded by now, or the error is another one
    from tscale.kernels.offload.errors import DeviceLost, OutOfDeviceMemory

    if isinstance(error, DeviceLost | OutOfDeviceMemory):
        return Failed("device", str(error)[:2000])
    return Failed("crash", f"{type(error).__name__}: {error}"[:2000])


def read_commands(channel: Channel, jobs: Jobs) -> None:
    """Reader thread: queue what the node asks for; without a node there is nothing to live for."""
    try:
        while True:
            jobs.put_nowait(channel.receive())
    except (EOFError, OSError):
        os._exit(0)
    except (BadMessage, queue.Full) as error:
        logger.error("worker.bad_pipe reason=%s", error)
        os._exit(1)


def do_jobs(session: "Session", channel: Channel, jobs: Jobs, gate: StepGate) -> None:
    """Job thread: one command after the other. An error that is not in the tree ends the worker."""
    while True:
        call_id, command = jobs.get()
        try:
            if isinstance(command, Stop):
                channel.send(call_id, _stopped(session, command))
                gate.stop()
                return
            channel.send(call_id, session.handle(command))
            _follow_up(session, channel)
        except TscaleError as error:
            channel.send(call_id, failure(error))
        except Exception as error:  # noqa: BLE001 - the boundary of this thread
            _crash(channel, call_id, error)


def _follow_up(session: "Session", channel: Channel) -> None:
    try:
        session.after_command()
    except TscaleError as error:
        channel.send(EVENT, failure(error))


def _stopped(session: "Session", command: Stop) -> Stopped:
    if not command.save:
        return Stopped(False, "not asked to save")
    try:
        session.save()
    except TscaleError as error:
        return Stopped(False, str(error))
    return Stopped(True, "")


def _crash(channel: Channel, call_id: int, error: BaseException) -> None:
    logger.error("worker.crash", exc_info=error)
    try:
        channel.send(call_id, failure(error))
    finally:
        os._exit(1)


def train(session: "Session", gate: StepGate) -> None:
    """Main thread: step, and between steps whatever the job thread needs."""
    while not gate.stopping:
        gate.serve()
        if session.may_step():
            session.step()
            session.evaluate_a_little()
        else:
            gate.sleep(IDLE_S)
        session.report()


def run(channel: Channel) -> int:
    """Live until told to stop. Returns the exit code."""
    jobs: Jobs = queue.Queue(MAX_JOBS)
    _, config = channel.receive()
    if not isinstance(config, WorkerConfig):
        raise BadMessage("the first frame must be a WorkerConfig")
    lower_priority(config.nice)
    threading.Thread(target=read_commands, args=(channel, jobs), name="reader", daemon=True).start()
    gate = StepGate()
    try:
        from tscale.node.worker.resume import open_session

        session, ready = open_session(config, gate.run, lambda event: channel.send(EVENT, event))
    except Exception as error:
        if not isinstance(error, TscaleError):
            logger.error("worker.start", exc_info=error)
        channel.send(EVENT, failure(error))
        return 1
    channel.send(EVENT, ready)
    threading.Thread(target=do_jobs, args=(session, channel, jobs, gate), name="jobs", daemon=True).start()
    try:
        train(session, gate)
    except Exception as error:  # noqa: BLE001 - the boundary of this thread
        _crash(channel, EVENT, error)
    return 0


def main() -> None:
    """Entry point. Ctrl-C is the node's business; SIGTERM ends the worker at once, unsaved."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(int(sys.argv[1]))
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="worker %(levelname)s %(message)s")
    channel = take_standard_streams()
    code = 1
    try:
        code = run(channel)
    except (EOFError, BrokenPipeError):
        code = 0
    except Exception:
        logger.exception("worker.main")
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
