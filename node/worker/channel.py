"""The worker's end of its pipes to the node: blocking frames, and an end of life tied to the node's."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

from tscale.node.worker.messages import BadMessage, decode_body, encode_frame, frame_length

_PR_SET_PDEATHSIG = 1


class Channel:
    """Frames over two blocking binary files. One thread reads; any thread may send."""

    def __init__(self, incoming: BinaryIO, outgoing: BinaryIO) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._sending = threading.Lock()

    def receive(self) -> tuple[int, Any]:
        """The next (call id, message).

        Raises:
            EOFError: the node closed the pipe, or is gone.
            BadMessage: the bytes are no message; the pipe is useless afterwards.
        """
        return decode_body(self._exactly(frame_length(self._exactly(4))))

    def send(self, call_id: int, message: object) -> None:
        """Write one frame. Raises BrokenPipeError when the node is gone."""
        frame = encode_frame(call_id, message)
        with self._sending:
            self._outgoing.write(frame)
            self._outgoing.flush()

    def _exactly(self, size_bytes: int) -> bytes:
        data = self._incoming.read(size_bytes)
        if len(data) != size_bytes:
            raise EOFError("the node closed the pipe")
        return data


def take_standard_streams() -> Channel:
    """The channel on stdin and stdout, which are then closed to everybody else.

    Anything a library prints goes to stderr, where it can't break a frame.
    """
    sys.stdout.flush()
    incoming, outgoing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    if sys.platform == "win32":
        import msvcrt

        msvcrt.setmode(incoming, os.O_BINARY)
        msvcrt.setmode(outgoing, os.O_BINARY)
    return Channel(os.fdopen(incoming, "rb"), os.fdopen(outgoing, "wb"))


def die_with_parent(parent_pid: int) -> None:
    """Linux: ask the kernel to kill this process with its parent. Elsewhere the end of the pipe does it."""
    if sys.platform == "win32":
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def lower_priority(nice: int) -> None:
    """Let everything else on the machine go first; `nice` as in nice(1), 0 changes nothing.

    Linux shares a desktop's processor between sessions (autogroup), so a process that leads a session of its own gives
    way to a game only when the session's priority is lowered too: nice(2) then counts within the session alone.
    """
    if nice <= 0:
        return
    if sys.platform == "win32":
        import psutil

        psutil.Process().nice(psutil.BELOW_NORMAL_PRIORITY_CLASS)
    else:
        os.nice(nice)
        if os.getsid(0) == os.getpid():
            with contextlib.suppress(OSError):  # another system, or a kernel without autogroup
                Path("/proc/self/autogroup").write_text(str(nice))


__all__ = ["BadMessage", "Channel", "die_with_parent", "lower_priority", "take_standard_streams"]
