"""Who is in the swarm: peer records, who is alive, and whom to talk to next.

A peer record costs its signer nothing, so a peer that is only told of is a stranger: it is tried, and counts as alive
once it has spoken for itself or the chain has taken a contribution of it. Else invented peers would be waited for and
pushed to.
"""

from __future__ import annotations

from dataclasses import dataclass

from tscale.protocol.dice import Dice
from tscale.protocol.records import PeerRecord, SignedRecord

MAX_CONTACTS = 4096
MEET_CHANCE = 0.5  # with which a gossip goes to a stranger who has not been tried yet, too
MEET_HEARTBEATS = 0.25  # between two dials of strangers, however many there are: a record may name eight addresses
MAX_MEET_FAILURES = 3  # a stranger that could not be dialled so often is forgotten once its record is not fresh
STALE_CHANCE = 0.15  # with which one goes to a silent peer or a bootstrap contact, too, so that partitions heal
FORGET_AFTER_S = 86400.0
SUSPECT_HEARTBEATS = 0.2  # how long a peer may owe an answer before others are asked instead
ALIVE_HEARTBEATS = 2.5  # without a word for so long, a peer counts as gone
PROVEN_HEARTBEATS = 20.0  # a peer that has not spoken to this one for so long is a stranger again
RECORD_HEARTBEATS = 20.0  # how long a record is good for, whatever it says
STRIKES_HALVE_S = 300.0


@dataclass
class Contact:
    """One peer as this peer sees it. Times are swarm time."""

    public: bytes
    addrs: tuple[str, ...] = ()
    signed: SignedRecord[PeerRecord] | None = None
    record: PeerRecord | None = None
    heard_unix_s: float = 0.0
    failures: int = 0
    retry_unix_s: float = 0.0
    asked_s: float = 0.0  # local time of the oldest request it has not answered, 0 when there is none
    bootstrap: bool = False
    strikes: int = 0
    have: bytes = b""  # short ids of the blobs it can serve, one after the other


class Membership:
    """Contacts by public key. A peer is alive while its signed heartbeat, or a direct word from it, is fresh.

    `vouched` are the authors that the chain has taken lately: they are real, though they may never have spoken here.
    """

    def __init__(self, own: bytes, heartbeat_s: float) -> None:
        self.own = own
        self.heartbeat_s = heartbeat_s
        self.contacts: dict[bytes, Contact] = {}
        self.vouched: frozenset[bytes] = frozenset()
        self._halved_unix_s: float | None = None
        self._met_s = float("-inf")  # when a stranger was dialled last
        self._alive: tuple[int, list[Contact]] | None = None  # of the current eighth of a heartbeat
        self._trainers: set[bytes] = set()
        self._version = 0

    def contact(self, public: bytes) -> Contact:
        """The contact of this key, made when new."""
        found = self.contacts.get(public)
        if found is None:
            if len(self.contacts) >= MAX_CONTACTS:
                self._drop_stranger()
            found = self.contacts[public] = Contact(public)
        return found

    def _drop_stranger(self) -> None:
        """Of those that only dialled in and have no record, the one not heard of for longest goes."""
        strangers = [c for c in self.contacts.values() if c.record is None and not c.bootstrap]
        if strangers:
            del self.contacts[min(strangers, key=lambda c: c.heard_unix_s).public]

    def bootstrap(self, public: bytes, addrs: tuple[str, ...]) -> None:
        """A peer named by the user, a link, a cache or this machine."""
        if public != self.own:
            contact = self.contact(public)
            contact.bootstrap = True
            contact.addrs = contact.addrs or addrs

    def learn(self, signed: SignedRecord[PeerRecord], now: float) -> bool:
        """Take a signed peer record that is newer than the one known. False when it is old, expired or one's own."""
        record = signed.record
        if signed.public == self.own:
            return False
        if self.is_expired(record, now) or record.issued_unix_s > now + self.heartbeat_s + 5.0:
            return False
        if signed.public not in self.contacts and not self._make_room(now):
            return False
        contact = self.contact(signed.public)
        if contact.record is not None and contact.record.issued_unix_s >= record.issued_unix_s:
            return False
        if contact.record is None or record.leaving:
            self._alive = None
        contact.signed, contact.record = signed, record
        if record.addrs:
            contact.addrs = record.addrs
        return True

    def is_expired(self, record: PeerRecord, now: float) -> bool:
        """Whether a record is too old to be passed on. An honest one is good for RECORD_HEARTBEATS by its own word."""
        return min(record.expires_unix_s, record.issued_unix_s + RECORD_HEARTBEATS * self.heartbeat_s) < now

    def vouch(self, authors: frozenset[bytes]) -> None:
        """The chain has taken contributions of these authors lately."""
        if authors != self.vouched:
            self.vouched = authors
            self._alive = None

    def heard(self, public: bytes, now: float) -> None:
        """A direct word from a peer: it is reachable and alive."""
        contact = self.contacts.get(public)
        if contact is not None:
            if not self.is_proven(contact, now):
                self._alive = None
            contact.heard_unix_s, contact.failures, contact.retry_unix_s, contact.asked_s = now, 0, 0.0, 0.0

    def failed(self, public: bytes, now: float) -> None:
        """A request to a peer came to nothing: back off from it, up to half a minute."""
        contact = self.contacts.get(public)
        if contact is not None:
            contact.failures = min(contact.failures + 1, 10)
            contact.asked_s = 0.0
            contact.retry_unix_s = now + min(self.heartbeat_s * 0.25 * 2**contact.failures, 30.0)

    def is_proven(self, contact: Contact, now: float) -> bool:
        """Whether there is more of this peer than a record that says so."""
        if contact.bootstrap or contact.public in self.vouched:
            return True
        return contact.heard_unix_s > now - PROVEN_HEARTBEATS * self.heartbeat_s

    def is_stranger(self, public: bytes, now: float) -> bool:
        """Whether nothing shows that there is more of this key than what it signs."""
        contact = self.contacts.get(public)
        return public not in self.vouched and (contact is None or not self.is_proven(contact, now))

    def is_alive(self, contact: Contact, now: float) -> bool:
        """Whether the peer is no stranger, its heartbeat is fresh, and it has not said goodbye."""
        record = contact.record
        if record is None or record.leaving or not self.is_proven(contact, now):
            return False
        return max(record.issued_unix_s, contact.heard_unix_s) > now - ALIVE_HEARTBEATS * self.heartbeat_s

    def asked(self, public: bytes, now: float) -> None:
        """A request goes out to a peer."""
        contact = self.contacts.get(public)
        if contact is not None and contact.asked_s == 0.0:
            contact.asked_s = now

    def is_ready(self, contact: Contact, now: float) -> bool:
        """Whether a peer may be talked to: it did not fail just now, and does not owe an answer for long."""
        if contact.retry_unix_s > now:
            return False
        return contact.asked_s == 0.0 or now - contact.asked_s <= SUSPECT_HEARTBEATS * self.heartbeat_s

    def version(self, now: float) -> int:
        """Changes when the answer of `alive` may have changed."""
        if self._alive is None:
            self.alive(now)
        return self._version + (int(now * 8.0 / self.heartbeat_s) << 20)

    def alive(self, now: float) -> list[Contact]:
        """All living contacts, in a fixed order."""
        key = int(now * 8.0 / self.heartbeat_s)
        if self._alive is None or self._alive[0] != key:
            self._version += self._alive is None
            self._alive = (key, [c for _, c in sorted(self.contacts.items()) if self.is_alive(c, now)])
            self._trainers = {c.public for c in self._alive[1] if c.record is not None and c.record.role == "trainer"}
        return self._alive[1]

    def alive_trainers(self, now: float) -> set[bytes]:
        """Keys of the living peers that train."""
        self.alive(now)
        return self._trainers

    def gossip_targets(self, dice: Dice, now: float, count: int) -> list[bytes]:
        """Up to `count` living peers to talk to, after a stranger, or now and then a silent or bootstrap one.

        A stranger comes on top: most of them don't answer where peers come and go, and what is new must not wait for
        that. When no living one is ready, one that only owes an answer is better than a stranger.
        """
        alive = self.alive(now)
        living = [c.public for c in alive if self.is_ready(c, now)] or [
            c.public for c in alive if c.retry_unix_s <= now
        ]
        silent = self._list_silent({c.public for c in alive}, now)
        untried = [p for p in silent if self._is_untried(self.contacts[p], now)]
        for group, chance in ((untried, MEET_CHANCE), (silent, STALE_CHANCE)):
            if group and (not living or dice.unit() < chance):
                chosen = dice.choice(group)
                if not self.contacts[chosen].bootstrap:
                    self._met_s = now
                return [chosen, *dice.sample(living, count)]
        return dice.sample(living, count)

    def _list_silent(self, alive: set[bytes], now: float) -> list[bytes]:
        """Who may be tried of those that don't count as alive; of strangers not more than one at a time."""
        may_meet = not 0.0 <= now - self._met_s < MEET_HEARTBEATS * self.heartbeat_s
        return [
            public
            for public, c in sorted(self.contacts.items())
            if public not in alive
            and c.retry_unix_s <= now
            and (c.bootstrap or (may_meet and c.addrs and (c.heard_unix_s > 0.0 or self._is_fresh(c, now))))
        ]

    def _is_fresh(self, contact: Contact, now: float) -> bool:
        record = contact.record
        return record is not None and record.issued_unix_s > now - ALIVE_HEARTBEATS * self.heartbeat_s

    def _is_untried(self, contact: Contact, now: float) -> bool:
        record = contact.record
        if record is None or record.leaving or contact.failures or self.is_proven(contact, now):
            return False
        return self._is_fresh(contact, now)

    def push_targets(self, dice: Dice, now: float, count: int) -> list[bytes]:
        """Living peers that can be dialled, for eager pushes."""
        ready = [c.public for c in self.alive(now) if self.is_ready(c, now)]
        return dice.sample(ready, count)

    def _make_room(self, now: float) -> bool:
        if len(self.contacts) < MAX_CONTACTS:
            return True
        dead = [c for c in self.contacts.values() if not c.bootstrap and not self.is_alive(c, now)]
        if not dead:
            return False
        oldest = min(dead, key=lambda c: max(c.heard_unix_s, c.record.issued_unix_s if c.record else 0.0))
        del self.contacts[oldest.public]
        return True

    def sweep(self, now: float) -> None:
        """Forget peers a day after their last word, strangers with their records, and strikes by and by."""
        self._halve_strikes(now)
        for public, contact in list(self.contacts.items()):
            if contact.record and self.is_expired(contact.record, now):
                contact.signed = None
            last = max(contact.heard_unix_s, contact.record.issued_unix_s if contact.record else 0.0)
            if not contact.bootstrap and (last < now - FORGET_AFTER_S or self._is_given_up(contact, now)):
                del self.contacts[public]

    def _is_given_up(self, contact: Contact, now: float) -> bool:
        """Whether a peer that never spoke has no record any more, or could not be dialled and gives no sign of life."""
        if contact.heard_unix_s > 0.0 or contact.record is None or contact.public in self.vouched:
            return False
        return contact.signed is None or (contact.failures >= MAX_MEET_FAILURES and not self._is_fresh(contact, now))

    def _halve_strikes(self, now: float) -> None:
        if self._halved_unix_s is None or now < self._halved_unix_s:
            self._halved_unix_s = now
        halvings = int((now - self._halved_unix_s) / STRIKES_HALVE_S)
        if halvings:
            self._halved_unix_s += halvings * STRIKES_HALVE_S
            for contact in self.contacts.values():
                contact.strikes >>= min(halvings, 64)
