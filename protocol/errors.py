"""The error tree, by who acts on it: refuse a frame, drop a peer, skip a round, restart the worker, stop the node.

Every message is one line that says what is wrong and what to do about it.
"""

from __future__ import annotations

from typing import ClassVar


class TscaleError(Exception):
    """The root; never raised itself."""


class RefuseFrame(TscaleError):
    """These bytes are not what the protocol allows. The sender may be honest and old: count it, answer nothing."""


class DropPeer(TscaleError):
    """The peer broke a rule that no honest peer breaks. Close the connection and let it cool down."""


class SkipRound(TscaleError):
    """This round can't be finished here. Keep training and take part in the next one."""


class RestartWorker(TscaleError):
    """The training process is gone or can't go on. The node restarts it with back-off and stays in the swarm."""


class StopNode(TscaleError):
    """The node can't go on. The command prints the message and ends with `exit_code`."""

    exit_code: ClassVar[int] = 1


class BadInput(StopNode):
    """What the person gave (a link, a file, an option, a key) can't be used."""

    exit_code = 2


class StateInUse(StopNode):
    """Another node holds the lock of this state directory."""

    exit_code = 3


class PortInUse(StopNode):
    """Another program listens on the port."""

    exit_code = 4


class DiskFull(StopNode):
    """A write did not fit; what was on disk before is intact."""

    exit_code = 5


class DamagedState(StopNode):
    """Nothing good is left of a file the node needs."""

    exit_code = 6


class VersionRefused(StopNode):
    """No wire version in common with the swarm."""

    exit_code = 7
