"""The error tree: one root, one exit code per way of stopping."""

from __future__ import annotations

import pytest

from tscale.protocol import errors


def test_each_way_of_stopping_has_its_own_exit_code() -> None:
    own = [kind for kind in errors.StopNode.__subclasses__() if kind.__module__ == errors.__name__]
    codes = {kind.__name__: kind.exit_code for kind in own}
    assert codes == {
        "BadInput": 2,
        "StateInUse": 3,
        "PortInUse": 4,
        "DiskFull": 5,
        "DamagedState": 6,
        "VersionRefused": 7,
    }


@pytest.mark.parametrize("kind", [errors.RefuseFrame, errors.DropPeer, errors.SkipRound, errors.RestartWorker])
def test_what_the_node_survives_is_not_a_stop(kind: type[errors.TscaleError]) -> None:
    assert issubclass(kind, errors.TscaleError)
    assert not issubclass(kind, errors.StopNode)
