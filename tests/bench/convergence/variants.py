"""The questions of the lab and the variants that answer them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tests.bench.convergence.variant import DENSE, LATE, Density, Variant


@dataclass(frozen=True)
class Question:
    """A part of the table. Losses are compared with that of the variant named `against`, seed by seed."""

    title: str
    against: str
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...] = (1,)

    @property
    def runs(self) -> tuple[Variant, ...]:
        """Every variant with every seed."""
        return tuple(variant.seeded(seed) for seed in self.seeds for variant in self.variants)


def sparse(part: int, gain: float = 2.0) -> tuple[Density, ...]:
    """1/part of the values, two bits each."""
    return (Density(DENSE // part, 2, gain),)


DENSE32 = (Density(DENSE, 32, 1.0),)
DENSE2 = (Density(DENSE, 2, 1.0),)
TOKENS = 1_228_800
NESTEROV = {"eta": 0.7, "mu": 0.6}


def peers(count: int, steps: int = 10) -> tuple[int, ...]:
    """Equal step counts."""
    return (steps,) * count


BASE = Variant("1/64, gain 2, local residual", densities=sparse(64))
SIXTEENTH = replace(BASE, name="1/16, gain 2, local residual", densities=sparse(16))
DENSE_MULOCO = Variant("dense float32, Nesterov 0.7/0.6", densities=DENSE32, **NESTEROV)
ALONE = Variant("one peer alone, same time", peers(1), DENSE32, tokens=TOKENS // 4)
DATA_PARALLEL = Variant("data-parallel Muon", method="data-parallel", densities=DENSE32)

KEY = (
    DENSE_MULOCO,
    DATA_PARALLEL,
    replace(DENSE_MULOCO, name="dense 2-bit, Nesterov 0.7/0.6", densities=DENSE2),
    BASE,
    replace(BASE, name="1/64, gain 2, restart at the anchor", rho=0.0),
    replace(BASE, name="1/64, gain 2, no error feedback", error_feedback=False),
    SIXTEENTH,
    ALONE,
)


def key_question(seeds: tuple[int, ...]) -> Question:
    """The row that decides whether the product's promise holds."""
    return Question("The promise: dense, compressed, alone", DENSE_MULOCO.name, KEY, seeds)


def decisive(size: Variant, seeds: tuple[int, ...]) -> tuple[Question, ...]:
    """The questions that decide the defaults, with `size`'s model, tokens and corpus, most urgent first."""
    questions = (
        key_question(seeds),
        Question("Data-parallel Muon and other methods", DENSE_MULOCO.name, (DENSE_MULOCO, *_others()), seeds),
        Question("Local residual and error feedback at 1/16", SIXTEENTH.name, _sixteenths(), seeds),
        Question("Gain and outer momentum", BASE.name, _gains(), seeds),
        Question("Losses and late contributions", SIXTEENTH.name, _losses(), seeds),
        Question("Overlapped rounds: when the fold arrives", SIXTEENTH.name, _overlaps(), seeds),
        Question("Uneven steps, mixed densities, joining", SIXTEENTH.name, _uneven(), seeds),
        Question("More densities", DENSE_MULOCO.name, _densities(), seeds),
        Question("How many peers", DENSE_MULOCO.name, _counts(), seeds),
        Question("Residual decay", SIXTEENTH.name, _decays(), seeds),
        Question("What a kept value travels as", SIXTEENTH.name, _values(), seeds),
        Question("One peer in ten attacks", "10 peers, 1/16", _attacks(), seeds),
        Question("Every peer has a text of its own", DENSE_MULOCO.name, _own_texts(), seeds),
        Question("Newton-Schulz: minimax against one fixed triple", DATA_PARALLEL.name, _polar(), seeds),
        Question("The same bytes: fewer values often or more values seldom", DENSE_MULOCO.name, _often(), seeds),
    )
    return tuple(replace(q, variants=tuple(_sized(v, size) for v in q.variants)) for q in questions)


def _sized(variant: Variant, size: Variant) -> Variant:
    """`variant` with the model, the corpus and the number of tokens of `size`; shares of the tokens stay shares."""
    tokens = size.tokens * variant.tokens // TOKENS
    return replace(variant, preset=size.preset, corpus=size.corpus, tokens=tokens)


def _others() -> tuple[Variant, ...]:
    adamw = Variant("dense DiLoCo: AdamW, Nesterov 0.7/0.9", densities=DENSE32, inner="adamw", eta=0.7, mu=0.9)
    sparseloco = Variant("SparseLoCo's rule, 1/32, AdamW", densities=sparse(32, 1.0), method="sparseloco", rho=0.0)
    return (
        *(replace(DATA_PARALLEL, name=f"data-parallel Muon, rates x {x}", **_rates(x)) for x in (0.5, 2)),
        *(replace(adamw, name=f"{adamw.name}, rate {rate}", lr_adam=rate) for rate in (0.01, 0.03)),
        replace(adamw, name="dense DiLoCo: AdamW, Nesterov 0.7/0.6, rate 0.01", mu=0.6, lr_adam=0.01),
        replace(sparseloco, name="SparseLoCo's rule, 1/32, inner Muon"),
        replace(sparseloco, name="SparseLoCo's rule, 1/64, inner Muon", densities=sparse(64, 1.0)),
        replace(sparseloco, inner="adamw", lr_adam=0.01),
        replace(BASE, name="1/32, gain 2, local residual", densities=sparse(32)),
    )


def _rates(times: float) -> dict[str, float]:
    return {"lr_muon": 0.07 * times, "lr_adam": 0.03 * times}


def _sixteenths() -> tuple[Variant, ...]:
    return (
        SIXTEENTH,
        replace(SIXTEENTH, name="1/16, gain 2, restart at the anchor", rho=0.0),
        replace(SIXTEENTH, name="1/16, gain 2, local residual whole", rho=1.0),
        replace(SIXTEENTH, name="1/16, gain 2, no error feedback", error_feedback=False),
        replace(SIXTEENTH, name="1/16, Nesterov 0.7/0.6, local residual", densities=sparse(16, 1.0), **NESTEROV),
        replace(BASE, name="1/64, gain 2, local residual whole", rho=1.0),
    )


def _gains() -> tuple[Variant, ...]:
    return (
        BASE,
        *(replace(BASE, name=f"1/64, gain {g}, local residual", densities=sparse(64, g)) for g in (1.0, 1.5, 3.0)),
        replace(BASE, name="1/64, Nesterov 0.7/0.6, local residual", densities=sparse(64, 1.0), **NESTEROV),
        *(replace(SIXTEENTH, name=f"1/16, gain {g}, local residual", densities=sparse(16, g)) for g in (1.0, 1.5)),
        *(
            replace(DENSE_MULOCO, name=f"dense float32, gain {g}", densities=(Density(DENSE, 32, g),), eta=1.0, mu=0.0)
            for g in (1.0, 1.5)
        ),
        replace(DENSE_MULOCO, name="dense float32, Nesterov 0.9/0.8", eta=0.9, mu=0.8),
    )


def _losses() -> tuple[Variant, ...]:
    lost = replace(SIXTEENTH, lost=0.3)
    return (
        SIXTEENTH,
        *(replace(lost, name=f"1/16, 30 % lost: {late}", late=late) for late in ("let-go", "fold-next", "put-back")),
        replace(DENSE_MULOCO, name="dense float32, 30 % lost: let-go", lost=0.3),
        DENSE_MULOCO,
    )


def _overlaps() -> tuple[Variant, ...]:
    shares = (0.1, 0.3, 0.5, 0.9)
    return (
        SIXTEENTH,
        *(replace(SIXTEENTH, name=f"1/16, the fold at {100 * s:.0f} % of the round", overlap=s) for s in shares),
        replace(DENSE_MULOCO, name="dense float32, the fold at 30 % of the round", overlap=0.3),
    )


def _uneven() -> tuple[Variant, ...]:
    mixed = tuple(Density(kept, 2, 2.0) for kept in (64, 64, 256, 512))
    return (
        SIXTEENTH,
        replace(SIXTEENTH, name="1/16, steps 16, 12, 8, 4", steps=(16, 12, 8, 4)),
        replace(SIXTEENTH, name="two peers send 1/64, one 1/16, one 1/8", densities=mixed),
        replace(SIXTEENTH, name="1/16, a peer joins after half of the rounds", joins=(30,)),
    )


def _densities() -> tuple[Variant, ...]:
    return (
        DENSE_MULOCO,
        *(replace(BASE, name=f"1/{p}, gain 1.5, local residual", densities=sparse(p, 1.5)) for p in (32, 8, 4)),
        *(
            replace(DENSE_MULOCO, name=f"dense 2-bit, gain {g}", densities=(Density(DENSE, 2, g),), eta=1.0, mu=0.0)
            for g in (1.0, 1.5, 2.0)
        ),
        replace(DENSE_MULOCO, name="dense 2-bit, no error feedback", densities=DENSE2, error_feedback=False),
    )


def _counts() -> tuple[Variant, ...]:
    counts = (1, 2, 8, 16)
    swarms = [(f"{k} peers, 1/16", replace(SIXTEENTH, steps=peers(k))) for k in counts]
    dense = [(f"{k} peers, dense, Nesterov 0.7/0.6", replace(DENSE_MULOCO, steps=peers(k))) for k in counts]
    return (DENSE_MULOCO, SIXTEENTH, *(replace(variant, name=name) for name, variant in [*swarms, *dense]))


def _decays() -> tuple[Variant, ...]:
    return (SIXTEENTH, *(replace(SIXTEENTH, name=f"1/16, residual decay {b}", beta=b) for b in (0.9, 1.0)))


def _values() -> tuple[Variant, ...]:
    return (
        SIXTEENTH,
        replace(SIXTEENTH, name="1/16, one magnitude", values="one-magnitude"),
        replace(SIXTEENTH, name="1/16, float32 values", values="float32"),
    )


def _attacks() -> tuple[Variant, ...]:
    ten = replace(SIXTEENTH, name="10 peers, 1/16", steps=peers(10, 5), batch=2, tokens=40 * 10 * 5 * 2 * 128)
    large = replace(ten, attackers=1, attack="times-ten", max_rms=1.0)
    attacks = ("sign-flip", "times-ten", "random")
    return (
        ten,
        *(replace(ten, name=f"10 peers, 1/16, one attacks: {a}", attackers=1, attack=a) for a in attacks),
        replace(large, name="10 peers, 1/16, one attacks: times-ten, max_rms 1"),
    )


def _own_texts() -> tuple[Variant, ...]:
    own = {"own_text": True}
    return (
        replace(DENSE_MULOCO, name="dense float32, Nesterov 0.7/0.6, own texts", **own),
        replace(SIXTEENTH, name="1/16, gain 2, own texts", **own),
        replace(SIXTEENTH, name="1/16, gain 2, own texts, restart at the anchor", rho=0.0, **own),
        replace(BASE, name="1/64, gain 2, own texts", **own),
        replace(BASE, name="1/64, gain 2, own texts, restart at the anchor", rho=0.0, **own),
        DENSE_MULOCO,
        SIXTEENTH,
        BASE,
    )


def _polar() -> tuple[Variant, ...]:
    fixed = {"polar": "fixed"}
    return (
        DATA_PARALLEL,
        replace(DATA_PARALLEL, name="data-parallel Muon, fixed triple", **fixed),
        SIXTEENTH,
        replace(SIXTEENTH, name="1/16, gain 2, fixed triple", **fixed),
    )


def _cheap(variant: Variant) -> Variant:
    """`variant` with 2 x 128 tokens a step: half the cost."""
    return replace(variant, name=f"4 x 2: {variant.name}", batch=2, tokens=variant.tokens // 2)


def key_small(seeds: tuple[int, ...]) -> Question:
    """The promise, with small batches."""
    return Question("The promise at half the cost", _cheap(DENSE_MULOCO).name, tuple(map(_cheap, KEY)), seeds)


def small_batches(seeds: tuple[int, ...]) -> tuple[Question, ...]:
    """Four peers of 2 x 128 tokens a step, 10 steps a round, 60 rounds."""
    dense, sixteenth, base = map(_cheap, (DENSE_MULOCO, SIXTEENTH, BASE))
    return (
        key_small(seeds),
        Question("What might mend 1/64", dense.name, (dense, base, *_mends(base)), seeds),
        Question("One seed: denser rungs", dense.name, (dense, sixteenth, *_denser(dense, base))),
        Question("One seed: time", sixteenth.name, (sixteenth, *_uneven_times(sixteenth))),
    )


def _mends(base: Variant) -> tuple[Variant, ...]:
    whole = {"rho": 1.0, "beta": 1.0}
    return (
        *(
            replace(
                base, name=f"4 x 2: 1/64, gain {g}, local residual whole, no decay", densities=sparse(64, g), **whole
            )
            for g in (1.0, 2.0)
        ),
        replace(base, name="4 x 2: 1/64, gain 2, the last tenth at 1/8", finish=sparse(8)),
        replace(base, name="4 x 2: 1/64, 20 steps a round", steps=peers(4, 20)),
        replace(base, name="4 x 2: 1/64, gain 1.5, decay 0.99", densities=sparse(64, 1.5), beta=0.99),
        replace(base, name="4 x 2: 1/64, gain 3", densities=sparse(64, 3.0)),
        replace(base, name="4 x 2: 1/64, gain 3, the last tenth at 1/8", densities=sparse(64, 3.0), finish=sparse(8)),
        replace(base, name="4 x 2: 1/64, gain from 3 to 1", densities=sparse(64, 3.0), late_gain=1.0),
        replace(base, name="4 x 2: 1/64, Nesterov 0.7/0.6", densities=sparse(64, 1.0), **NESTEROV),
        *(
            replace(
                base,
                name=f"4 x 2: every 13th value in turns, gain {g}",
                densities=(Density(315, 2, g),),
                values="rotating",
                **whole,
            )
            for g in (1.0, 1.5)
        ),
        replace(base, name="4 x 2: 1/64, rates x 0.7", **_rates(0.7)),
    )


def _denser(dense: Variant, base: Variant) -> tuple[Variant, ...]:
    two_bit = replace(dense, eta=1.0, mu=0.0)
    return (
        *(
            replace(two_bit, name=f"4 x 2: dense 2-bit, gain {g}", densities=(Density(DENSE, 2, g),))
            for g in (1.0, 1.5)
        ),
        replace(base, name="4 x 2: 1/4, gain 1.5", densities=sparse(4, 1.5)),
        replace(base, name="4 x 2: 1/4, gain 2", densities=sparse(4, 2.0)),
        replace(base, name="4 x 2: 1/8, gain 2", densities=sparse(8, 2.0)),
    )


def _uneven_times(sixteenth: Variant) -> tuple[Variant, ...]:
    lost = replace(sixteenth, lost=0.3)
    return (
        replace(sixteenth, name="4 x 2: 1/16, steps 16, 12, 8, 4", steps=(16, 12, 8, 4)),
        replace(sixteenth, name="4 x 2: 1/16, the fold at 30 % of the round", overlap=0.3),
        *(replace(lost, name=f"4 x 2: 1/16, 30 % lost: {late}", late=late) for late in LATE),
        replace(sixteenth, name="4 x 2: 1/16, fixed triple", polar="fixed"),
        replace(sixteenth, name="4 x 2: 1/16, a peer joins after half of the rounds", joins=(30,)),
    )


def _often() -> tuple[Variant, ...]:
    return (
        DENSE_MULOCO,
        replace(BASE, name="1/64, 5 steps a round", steps=peers(4, 5)),
        replace(BASE, name="1/64, 20 steps a round", steps=peers(4, 20)),
        replace(SIXTEENTH, name="1/16, 20 steps a round", steps=peers(4, 20)),
        replace(SIXTEENTH, name="1/16, 40 steps a round", steps=peers(4, 40)),
        replace(BASE, name="1/32, 20 steps a round", densities=sparse(32), steps=peers(4, 20)),
        *(replace(DENSE_MULOCO, name=f"dense, {h} steps a round", steps=peers(4, h)) for h in (5, 20, 40)),
        BASE,
        SIXTEENTH,
    )


def gates(size: Variant, seeds: tuple[int, ...]) -> Question:
    """Eight peers of 2 x 128 tokens a step, 10 steps a round, 100 rounds: what the gates of the page are judged by."""
    swarm = _eight(size)
    dense, sixteenth = replace(DENSE_MULOCO, **swarm), replace(SIXTEENTH, **swarm)
    parallel = replace(DATA_PARALLEL, **swarm)
    best = {"eta": 1.0, "mu": 0.5}
    variants = (
        replace(dense, name="8 x 2: dense float32, Nesterov 0.7/0.6"),
        replace(dense, name="8 x 2: dense float32, Nesterov 1/0.5", **best),
        replace(dense, name="8 x 2: dense float32, Nesterov 0.8/0.7", eta=0.8, mu=0.7),
        replace(parallel, name="8 x 2: data-parallel Muon"),
        replace(dense, name="8 x 2: dense 2-bit, Nesterov 0.7/0.6", densities=DENSE2),
        replace(dense, name="8 x 2: dense 2-bit, Nesterov 1/0.5", densities=DENSE2, **best),
        *(replace(sixteenth, name=f"8 x 2: 1/16, gain {g:g}", densities=sparse(16, g)) for g in (2.0, 2.5)),
        *(replace(sixteenth, name=f"8 x 2: 1/32, gain {g:g}", densities=sparse(32, g)) for g in (2.0, 3.0)),
        *(replace(sixteenth, name=f"8 x 2: 1/64, gain {g:g}", densities=sparse(64, g)) for g in (2.0, 3.0, 4.0, 5.0)),
        replace(ALONE, name="8 x 2: one peer alone, same time", **{**_eight(size, 1), "tokens": swarm["tokens"] // 8}),
    )
    return Question("Eight peers, 100 rounds", variants[0].name, variants, seeds)


def _eight(size: Variant, count: int = 8) -> dict[str, Any]:
    """The swarm of the gates, with a size's model and text."""
    what = {"preset": size.preset, "corpus": size.corpus, "context": None if size.preset == "demo" else 128}
    return {"steps": peers(count), "batch": 2, "tokens": 100 * 8 * 10 * 2 * 128, **what}


def mishaps(size: Variant, seeds: tuple[int, ...]) -> tuple[Question, ...]:
    """What goes wrong in a swarm of eight, and other methods, in the setting of the gates."""
    swarm = _eight(size)
    dense, sixteenth = replace(DENSE_MULOCO, **swarm), replace(SIXTEENTH, name="8 x 2: 1/16, gain 2", **swarm)
    base = replace(BASE, name="8 x 2: 1/64, gain 3", densities=sparse(64, 3.0), **swarm)
    dense_named = replace(dense, name="8 x 2: dense float32, Nesterov 0.7/0.6")
    adamw = {"inner": "adamw", "lr_adam": 0.01}
    sparseloco = replace(dense, densities=sparse(32, 1.0), method="sparseloco", rho=0.0, eta=1.0, mu=0.0)
    others = (
        base,
        replace(dense, name="8 x 2: dense DiLoCo: AdamW, Nesterov 0.7/0.9", **{**adamw, "mu": 0.9}),
        replace(sparseloco, name="8 x 2: SparseLoCo's rule, 1/32, AdamW", **adamw),
        replace(sparseloco, name="8 x 2: SparseLoCo's rule, 1/32, inner Muon"),
        replace(base, name="8 x 2: 1/64, gain 3, no error feedback", error_feedback=False),
        replace(dense, name="8 x 2: dense 2-bit, no error feedback", densities=DENSE2, error_feedback=False),
        replace(DATA_PARALLEL, name="8 x 2: data-parallel Muon, rates x 2", **{**swarm, **_rates(2)}),
    )
    uneven = (20, 20, 14, 14, 10, 10, 5, 5)
    mixed = tuple(Density(kept, 2, gain) for kept, gain in ((64, 3.0), (128, 2.0), (256, 2.0), (256, 2.0)) * 2)
    wrong = (
        sixteenth,
        replace(sixteenth, name="8 x 2: 1/16, gain 2, 30 % lost", lost=0.3),
        replace(sixteenth, name="8 x 2: 1/16, 30 % lost, folded by the next", lost=0.3, late="fold-next"),
        replace(sixteenth, name="8 x 2: 1/16, steps 20, 14, 10, 5, two each", steps=uneven),
        replace(sixteenth, name="8 x 2: 1/16, the fold at 30 % of the round", overlap=0.3),
        replace(sixteenth, name="8 x 2: mixed 1/64, 1/32, 1/16, 1/16", densities=mixed),
        replace(sixteenth, name="8 x 2: 1/16, two peers join after half of the rounds", joins=(50, 50)),
        replace(sixteenth, name="8 x 2: 1/16, own texts", own_text=True),
        replace(base, name="8 x 2: 1/64, gain 3, own texts", own_text=True),
        replace(dense, name="8 x 2: dense float32, own texts", own_text=True),
    )
    return (
        Question("Eight peers: methods and gains", dense_named.name, (dense_named, *others), seeds),
        Question("Eight peers: what goes wrong", sixteenth.name, wrong, seeds),
    )


QUICK = (key_small((1,)),)
TINY = replace(BASE, preset="tiny", tokens=8_192_000)
SEEDS = (1, 2, 3)
GATES = (gates(BASE, SEEDS), *mishaps(BASE, (1,)))
TINY_GATES = (gates(TINY, SEEDS), *mishaps(TINY, (1,)))
FIRST = (*GATES, *small_batches(SEEDS), *decisive(BASE, SEEDS))
LISTS = {"gates": GATES, "quick": QUICK, "demo": FIRST, "tiny-gates": TINY_GATES, "tiny": decisive(TINY, SEEDS)}
