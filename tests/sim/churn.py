"""A swarm under churn: peers crash and join all the time, messages are lost, and once the network parts and heals."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass, field

from tests.sim.health import Health, check, distance
from tests.sim.simpeer import Disk, SimPeer
from tests.sim.world import Faults, World, sim_spec


@dataclass(frozen=True)
class ChurnPlan:
    """What is done to the swarm. `churn` is the share of peers that crash or join in a round, half and half."""

    peers: int = 32
    rounds: int = 52
    churn: float = 0.30
    loss: float = 0.05
    clock_skew_s: float = 0.3
    part_at: int = 20
    heal_at: int = 25
    return_share: float = 0.5  # of the joining peers are old ones that come back with their disk


@dataclass
class ChurnResult:
    """What was seen. `healing` is the one look that falls into the two rounds after the network has healed."""

    seed: int
    health: list[Health] = field(default_factory=list)
    healing: list[Health] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)
    unjoined_rounds: float = 0.0
    messages: int = 0

    @property
    def share(self) -> float:
        """Over all rounds: the part of the peers in step that have folded before the next close."""
        return sum(h.folded for h in self.health) / max(1, sum(h.in_step for h in self.health))


class Churn:
    """Runs a plan and looks at every round when it has settled."""

    def __init__(self, plan: ChurnPlan, seed: int) -> None:
        self.plan = plan
        self.world = World(sim_spec(), seed, Faults(loss=plan.loss, clock_skew_s=plan.clock_skew_s))
        self.result = ChurnResult(seed)
        self.lost_disks: list[tuple[Disk, int | None]] = []  # and the side they were on, when the network was parted

    def run(self) -> ChurnResult:
        """The whole run; stops at nothing, judging is the caller's."""
        gc.disable()  # nothing here is cyclic garbage, and looking for it takes a sixth of the time
        try:
            self._run()
        finally:
            gc.enable()
        self.result.messages = self.world.messages
        return self.result

    def _run(self) -> None:
        world, plan = self.world, self.plan
        for _ in range(plan.peers):
            world.add()
        world.run_until(world.close_of(0))
        self.result.distances.append(distance(world))
        for round_ in range(1, plan.rounds):
            self._disturb(round_)
            world.run_until(world.close_of(round_))
            self._look(round_ - 1)

    def _disturb(self, round_: int) -> None:
        world, plan, rng = self.world, self.plan, self.world.rng
        if round_ == plan.part_at:
            for i, public in enumerate(sorted(world.peers)):
                world.sides[public] = i % 2
        if round_ == plan.heal_at:
            world.sides.clear()
        count = int(plan.peers * plan.churn / 2 + rng.random())
        for peer in rng.sample([world.peers[p] for p in sorted(world.peers)], min(count, len(world.peers))):
            world.at(world.now + rng.uniform(0, 12), lambda peer=peer: self._crash(peer))
        for _ in range(count):
            world.at(world.now + rng.uniform(0, 12), self._join)

    def _crash(self, peer: SimPeer) -> None:
        if peer.alive:
            self.world.crash(peer)
            self.lost_disks.append((peer.disk, self.world.sides.get(peer.public)))

    def _join(self) -> None:
        world, rng = self.world, self.world.rng
        disk = None
        side = rng.randrange(2) if world.sides else 0
        if rng.random() < self.plan.return_share:
            back = [i for i, (_, of) in enumerate(self.lost_disks) if of is None or not world.sides or of == side]
            disk = self.lost_disks.pop(rng.choice(back))[0] if back else None
        world.add(disk=disk, side=side)

    def _look(self, round_: int) -> None:
        world, plan, result = self.world, self.plan, self.result
        for side in sorted({world.sides.get(p, 0) for p in world.peers}):
            seen = check(world, round_, side)
            healing = round_ == plan.heal_at - 1
            (result.healing if healing else result.health).append(seen)
        result.distances.append(distance(world))
        length_s = world.spec.rounds.length_s
        for peer in world.everyone:
            if peer.alive and peer.first_trained_s is None and peer.worker is not None:
                result.unjoined_rounds = max(result.unjoined_rounds, (world.now - peer.started_s) / length_s)


def main() -> None:
    """Repeat one seed and print every round."""
    seed = int(sys.argv[1])
    result = Churn(ChurnPlan(), seed).run()
    for health in sorted(result.health + result.healing, key=lambda h: (h.round, h.side)):
        print(health)
    print(f"seed {seed}: share {result.share:.4f}, unjoined {result.unjoined_rounds:.2f} rounds")


if __name__ == "__main__":
    main()
