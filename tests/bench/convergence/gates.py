"""The questions at 0.93M parameters, 100 rounds: the gates with three seeds, and what is beside them with one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.bench.convergence.texts import SPEECHES
from tests.bench.convergence.variant import DENSE, Density
from tests.bench.convergence.variants import (
    ALONE,
    BASE,
    DATA_PARALLEL,
    DENSE2,
    DENSE_MULOCO,
    SIXTEENTH,
    Question,
    peers,
    sparse,
)

SEEDS = (1, 2, 3)
ROUNDS = 100
STEP_TOKENS = 2 * 128


def _swarm(count: int, steps: int = 10, rounds: int = ROUNDS) -> dict[str, Any]:
    """So many peers of the preset `tiny`, each `steps` steps of 2 x 128 bytes a round."""
    tokens = rounds * count * steps * STEP_TOKENS
    return {"steps": peers(count, steps), "batch": 2, "context": 128, "tokens": tokens, "preset": "tiny"}


EIGHT = _swarm(8)
ADAMW = {"inner": "adamw", "lr_adam": 0.01}
DENSE8 = replace(DENSE_MULOCO, name="8 peers: dense float32, Nesterov 0.8/0.7", **{**EIGHT, "eta": 0.8, "mu": 0.7})
SIXTEENTH8 = replace(SIXTEENTH, name="8 peers: 1/16, gain 3", densities=sparse(16, 3.0), **EIGHT)
THIRTYSECOND8 = replace(BASE, name="8 peers: 1/32, gain 4", densities=sparse(32, 4.0), **EIGHT)
SIXTYFOURTH8 = replace(BASE, name="8 peers: 1/64, gain 5", densities=sparse(64, 5.0), **EIGHT)
SIXTEENTH4 = replace(SIXTEENTH, name="4 peers: 1/16", densities=sparse(16, 3.0), scaled=True, **_swarm(4))
TEN = replace(SIXTEENTH, name="10 peers: 1/16", densities=sparse(16, 3.0), scaled=True, **_swarm(10, 5))


def _compression() -> Question:
    """G0 to G3, G10."""
    alone = {**_swarm(1), "tokens": EIGHT["tokens"] // 8}
    variants = (
        DENSE8,
        replace(DATA_PARALLEL, name="8 peers: data-parallel Muon", **EIGHT),
        replace(DENSE8, name="8 peers: dense 2-bit, Nesterov 0.8/0.7", densities=DENSE2),
        SIXTEENTH8,
        THIRTYSECOND8,
        SIXTYFOURTH8,
        replace(ALONE, name="one peer alone, same time", **alone),
    )
    return Question("Compression: eight peers, 100 rounds", DENSE8.name, variants, SEEDS)


def _mishaps() -> Question:
    """G4 to G6."""
    variants = (
        SIXTEENTH4,
        replace(SIXTEENTH4, name="4 peers: 1/16, 30 % lost", lost=0.3),
        replace(SIXTEENTH4, name="4 peers: 1/16, steps 16, 12, 8, 4", steps=(16, 12, 8, 4)),
        replace(SIXTEENTH4, name="4 peers: 1/16, the fold at 30 % of the round", overlap=0.3),
    )
    return Question("What goes wrong: four peers, 100 rounds", SIXTEENTH4.name, variants, SEEDS)


def _attackers() -> Question:
    """G7. The others' names say what one of the ten does."""
    attacked = [replace(TEN, name=f"10 peers: one is {a}", attackers=1, attack=a) for a in ("sign-flip", "times-ten")]
    random = replace(TEN, name="10 peers: one is random", attackers=1, attack="random")
    unscreened = [replace(v, name=f"{v.name}, no screen", screened=False) for v in attacked]
    variants = (TEN, *attacked, random, *unscreened)
    return Question("One attacker in ten, five steps a round, 100 rounds", TEN.name, variants, SEEDS)


def _methods() -> Question:
    """Other methods, and the product's without one of its parts."""
    diloco = replace(DENSE8, name="8 peers: dense DiLoCo, AdamW, Nesterov 0.7/0.9", **{**ADAMW, "eta": 0.7, "mu": 0.9})
    sparseloco = replace(DENSE8, densities=sparse(32, 1.0), method="sparseloco", rho=0.0, eta=1.0, mu=0.0)
    variants = (
        DENSE8,
        diloco,
        replace(sparseloco, name="8 peers: SparseLoCo's rule, 1/32, AdamW", **ADAMW),
        replace(sparseloco, name="8 peers: SparseLoCo's rule, 1/32, inner Muon"),
        replace(SIXTYFOURTH8, name="8 peers: 1/64, gain 5, no error feedback", error_feedback=False),
        replace(SIXTYFOURTH8, name="8 peers: 1/64, gain 5, restart at the anchor", rho=0.0),
        replace(DENSE8, name="8 peers: dense 2-bit, no error feedback", densities=DENSE2, error_feedback=False),
    )
    return Question("Other methods: eight peers, 100 rounds", DENSE8.name, variants)


def _gains() -> Question:
    gains = [(64, 3.0), (64, 4.0), (64, 5.0), (32, 2.0), (32, 3.0), (32, 4.0), (16, 2.0), (16, 3.0)]
    variants = (
        DENSE8,
        replace(DENSE8, name="8 peers: dense float32, Nesterov 0.7/0.6", eta=0.7, mu=0.6),
        replace(DENSE8, name="8 peers: dense float32, Nesterov 1/0.5", eta=1.0, mu=0.5),
        replace(DENSE8, name="8 peers: dense 2-bit, Nesterov 0.7/0.6", densities=DENSE2, eta=0.7, mu=0.6),
        *(replace(SIXTEENTH8, name=f"8 peers: 1/{p}, gain {g:g}", densities=sparse(p, g)) for p, g in gains),
        replace(SIXTYFOURTH8, name="8 peers: 1/64, gain 6, decay 0.9", densities=sparse(64, 6.0), beta=0.9),
    )
    return Question("Gains: eight peers, 100 rounds", DENSE8.name, variants)


def _mixtures() -> Question:
    mixed = tuple(Density(DENSE // part, 2, gain) for part, gain in ((64, 5.0), (32, 4.0), (16, 3.0), (16, 3.0)) * 2)
    variants = (
        SIXTEENTH8,
        replace(SIXTEENTH8, name="8 peers: two each at 1/64 and 1/32, four at 1/16", densities=mixed),
        replace(SIXTEENTH8, name="8 peers: 1/16, two join after half of the rounds", joins=(50, 50)),
        replace(DENSE8, name="8 peers: dense float32, own texts", own_text=True),
        replace(SIXTEENTH8, name="8 peers: 1/16, own texts", own_text=True),
        replace(SIXTYFOURTH8, name="8 peers: 1/64, gain 5, own texts", own_text=True),
    )
    return Question("Mixed densities, joiners, own texts: eight peers, 100 rounds", SIXTEENTH8.name, variants)


def _longer() -> tuple[Question, ...]:
    """G2 and G3 over 100 and 200 rounds of a larger text; the schedule of the rates ends with the run."""
    return tuple(_of_speeches(rounds) for rounds in (100, 200))


def _of_speeches(rounds: int) -> Question:
    longer = {"corpus": SPEECHES, "tokens": _swarm(8, rounds=rounds)["tokens"]}
    variants = tuple(
        replace(variant, name=f"{rounds} rounds: {variant.name.removeprefix('8 peers: ')}", **longer)
        for variant in (DENSE8, THIRTYSECOND8, SIXTYFOURTH8)
    )
    return Question(f"Eight peers, {rounds} rounds of speeches", variants[0].name, variants)


GATES = (_compression(), _mishaps(), _attackers(), _methods(), *_longer(), _gains(), _mixtures())
