"""Whether this peer's state after a manifest is the one that the others vouch for."""

from __future__ import annotations

from tscale.protocol.chain import Link, majority_state
from tscale.protocol.view import View


def find_majority(view: View, link: Link) -> bytes | None:
    """The state digest after `link` that most tokens of other peers vouch for, or the sealer of the next manifest.

    None when nobody says anything, or when only one peer does and its key is the higher one: then it gives way.
    """
    votes = [s for s in view.pool.with_base(link.digest) if s.public != view.own]
    majority = majority_state(tuple(votes), link.digest)
    for child in link.children:
        if majority is None and child.signed is not None and not child.invalid:
            majority = child.signed.record.parent_state if child.signed.public != view.own else None
    if len(votes) == 1 and view.own < votes[0].public:
        return None
    return majority
