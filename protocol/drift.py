"""Whether this peer's state after a manifest is the one that the others vouch for."""

from __future__ import annotations

from tscale.protocol.chain import Link, majority_state
from tscale.protocol.view import View


def find_majority(view: View, link: Link) -> bytes | None:
    """The state digest after `link` that most tokens of other peers vouch for, or the sealer of the next manifest.

    Only authors that the chain has taken lately are heard, and only with a contribution that is here and good: a
    claim costs nothing. None when nobody says anything, or when only one peer does and its key is the higher one:
    then it gives way.
    """
    regulars = link.authors | (link.parent.authors if link.parent is not None else frozenset())
    votes = [
        s
        for s in view.pool.with_base(link.digest)
        if s.public != view.own and view.pool.is_good(s.record) and (not regulars or s.public in regulars)
    ]
    majority = majority_state(tuple(votes), link.digest)
    for child in link.children:
        if majority is None and child.signed is not None and not child.invalid and child.signed.public in regulars:
            majority = child.signed.record.parent_state if child.signed.public != view.own else None
    if len(votes) == 1 and view.own < votes[0].public:
        return None
    return majority
