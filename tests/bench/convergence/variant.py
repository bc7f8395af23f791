"""What one run of the convergence lab is: a frozen, declarative variant."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from tests.bench.convergence.texts import TEXTS

METHODS = ("swarm", "data-parallel", "sparseloco")
INNER = ("muon", "adamw")
VALUES = ("codec", "one-magnitude", "float32", "rotating")
LATE = ("let-go", "fold-next", "put-back")
ATTACKS = ("sign-flip", "times-ten", "random")
POLAR = ("minimax", "fixed")
DENSE = 4096


CHOICES = {
    "method": METHODS,
    "inner": INNER,
    "values": VALUES,
    "late": LATE,
    "attack": ATTACKS,
    "polar": POLAR,
    "corpus": TEXTS,
}


@dataclass(frozen=True)
class Density:
    """What a peer sends: `kept` of 4096 values with `bits` (2 or 32) each, folded with `gain`."""

    kept: int
    bits: int = 2
    gain: float = 2.0


@dataclass(frozen=True)
class Variant:
    """One run. The number of peers is the length of `steps`: how many inner steps each of them does in a round.

    method       "swarm": the production rules. "data-parallel": no rounds, one optimizer on the batches of all peers.
                 "sparseloco": that paper's published rule (rules.py).
    densities    one per peer, or one for all.
    values       what a kept value travels as: the codec's two magnitudes, or, for comparison only, one magnitude per
                 chunk or its float32; "rotating": not the largest values but all in turns, two bits each.
    overlap      the fold arrives when this share of the next round's steps is done (0: everybody waits for it).
    lost         this share of the contributions misses its manifest. "let-go": never folded. "fold-next": the next
                 manifest has them, with `age_factor`. "put-back": back into the residual whole (lab only).
    attackers    this many peers, the last ones, send their honest contribution turned round ("sign-flip"), ten times as
                 large, or its values at random places of each tensor. What the product's check refuses is not folded.
    screened     the fold leaves out, or makes smaller, what its screen finds (lab only: False folds all as it came).
    joins        rounds at whose start the last peers of `steps` join, one each; the others are there from the start.
    own_text     every peer trains on a part of the text of its own; else on all of it.
    scaled       gains are those of eight equal peers, and scaled with their number as the product does. Else they are
                 what is folded.
    late_gain    the gain goes from its density's to this, linearly over the run (lab only).
    finish       densities of the last tenth of the run, instead of `densities`.
    polar        the inner Newton-Schulz steps: "minimax", or "fixed" for one published triple (rules.py).
    tokens       the run ends when the manifests have taken this many, and the learning rate's schedule with it.
    lr_muon, lr_adam, batch, context, max_rms: None for the preset's.
    """

    name: str
    steps: tuple[int, ...] = (10, 10, 10, 10)
    densities: tuple[Density, ...] = (Density(64),)
    eta: float = 1.0
    mu: float = 0.0
    rho: float = 0.5
    beta: float = 0.95
    age_factor: float = 0.5
    error_feedback: bool = True
    values: str = "codec"
    overlap: float = 0.0
    lost: float = 0.0
    late: str = "let-go"
    attackers: int = 0
    attack: str = "sign-flip"
    max_rms: float | None = None
    screened: bool = True
    joins: tuple[int, ...] = ()
    own_text: bool = False
    scaled: bool = False
    late_gain: float | None = None
    finish: tuple[Density, ...] = ()
    polar: str = "minimax"
    method: str = "swarm"
    inner: str = "muon"
    lr_muon: float | None = None
    lr_adam: float | None = None
    batch: int | None = None
    context: int | None = None
    tokens: int = 1_228_800
    preset: str = "demo"
    corpus: str = "moby-dick"
    seed: int = 1

    def __post_init__(self) -> None:
        """Refuse what the lab can't run. Raises ValueError."""
        for field, known in CHOICES.items():
            if getattr(self, field) not in known:
                raise ValueError(f"{self.name}: {getattr(self, field)!r} is none of {known}")
        if not self.steps or min(self.steps) < 1 or len(self.densities) not in (1, len(self.steps)):
            raise ValueError(f"{self.name}: needs steps for every peer, and one density or one for each peer")
        if not 0 <= self.attackers < len(self.steps):
            raise ValueError(f"{self.name}: somebody must be honest")
        if not 0 <= self.overlap < 1 or not 0 <= self.lost < 1 or len(self.joins) >= len(self.steps):
            raise ValueError(f"{self.name}: overlap and lost are in [0, 1), and somebody must be there from the start")
        if self.joins != tuple(sorted(self.joins)) or self.tokens < 1:
            raise ValueError(f"{self.name}: joins are in order, and there are tokens")
        if self.method == "sparseloco" and self.mu:
            raise ValueError(f"{self.name}: SparseLoCo has no outer momentum")

    @property
    def peers(self) -> int:
        """K."""
        return len(self.steps)

    def density(self, peer: int) -> Density:
        """What a peer sends before the last tenth of the run."""
        return self.densities[peer % len(self.densities)]

    def joins_at(self, peer: int) -> int:
        """The round at whose start a peer is there."""
        late = peer - (self.peers - len(self.joins))
        return self.joins[late] if late >= 0 else 0

    @property
    def plain(self) -> dict[str, Any]:
        """Everything that is not at its default, but the name, as JSON values."""
        default = asdict(Variant(self.name))
        return json.loads(json.dumps({key: value for key, value in asdict(self).items() if value != default[key]}))

    def seeded(self, seed: int) -> Variant:
        """The same with another seed: other starting parameters, batches and losses."""
        return replace(self, seed=seed)
