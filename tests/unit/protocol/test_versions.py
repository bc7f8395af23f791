"""Version ranges: the highest in common, or a reason for each end."""

from __future__ import annotations

import pytest

from tscale.protocol.versions import OURS, WIRE_VERSION, Agreed, Refused, VersionRange, negotiate


@pytest.mark.parametrize(
    ("here", "there", "version"),
    [((1, 1), (1, 1), 1), ((1, 3), (2, 5), 3), ((2, 5), (1, 3), 3), ((1, 4), (2, 2), 2), ((3, 3), (1, 3), 3)],
)
def test_the_highest_common_version(here: tuple[int, int], there: tuple[int, int], version: int) -> None:
    assert negotiate(VersionRange(*here), VersionRange(*there)) == Agreed(version)


def test_the_older_end_is_told_to_update_and_the_newer_that_the_other_must() -> None:
    old, new = VersionRange(1, 2), VersionRange(3, 3)
    seen_by_old = Refused(
        reason_here="this node speaks wire versions 1 to 2, the other one version 3: update this node",
        reason_there="this node speaks wire version 3, the other one versions 1 to 2: the other one must update",
    )
    assert negotiate(old, new) == seen_by_old
    assert negotiate(new, old) == Refused(seen_by_old.reason_there, seen_by_old.reason_here)


def test_this_wire_version_is_one() -> None:
    assert WIRE_VERSION == 1
    assert VersionRange(1, 1) == OURS
