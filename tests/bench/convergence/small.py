"""The questions at 0.2M parameters: everything that is too much for a larger model here, mostly with one seed."""

from __future__ import annotations

from dataclasses import replace

from tests.bench.convergence.texts import SPEECHES
from tests.bench.convergence.variant import DENSE, Density, Variant
from tests.bench.convergence.variants import (
    ALONE,
    BASE,
    DATA_PARALLEL,
    DENSE2,
    DENSE32,
    DENSE_MULOCO,
    KEY,
    NESTEROV,
    SIXTEENTH,
    Question,
    peers,
    sparse,
)


def _questions() -> tuple[Question, ...]:
    """Four peers of 4 x 128 tokens a step, 10 steps a round, 60 rounds; the most urgent first."""
    return (
        Question("The promise: dense, compressed, alone", DENSE_MULOCO.name, KEY),
        Question("Data-parallel Muon and other methods", DENSE_MULOCO.name, (DENSE_MULOCO, *_others())),
        Question("Local residual and error feedback at 1/16", SIXTEENTH.name, _sixteenths()),
        Question("Gain and outer momentum", BASE.name, _gains()),
        Question("Losses and late contributions", SIXTEENTH.name, _losses()),
        Question("Overlapped rounds: when the fold arrives", SIXTEENTH.name, _overlaps()),
        Question("Uneven steps, mixed densities, joining", SIXTEENTH.name, _uneven()),
        Question("More densities", DENSE_MULOCO.name, _densities()),
        Question("How many peers", DENSE_MULOCO.name, _counts()),
        Question("Residual decay", SIXTEENTH.name, _decays()),
        Question("What a kept value travels as", SIXTEENTH.name, _values()),
        Question("Every peer has a text of its own", DENSE_MULOCO.name, _own_texts()),
        Question("A larger text, ordered by date", f"speeches: {DENSE_MULOCO.name}", _speeches()),
        Question("Newton-Schulz: minimax against one fixed triple", DATA_PARALLEL.name, _polar()),
        Question("The same bytes: fewer values often or more values seldom", DENSE_MULOCO.name, _often()),
    )


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
    sparser = [
        (f"{k} peers, 1/64, gain {g}", replace(BASE, steps=peers(k), densities=sparse(64, g)))
        for k, g in ((2, 2.0), (2, 4.0), (4, 4.0), (16, 4.0))
    ]
    dense = [(f"{k} peers, dense, Nesterov 0.7/0.6", replace(DENSE_MULOCO, steps=peers(k))) for k in counts]
    named = (replace(variant, name=name) for name, variant in [*swarms, *sparser, *dense])
    return (DENSE_MULOCO, SIXTEENTH, BASE, *named)


def _decays() -> tuple[Variant, ...]:
    return (SIXTEENTH, *(replace(SIXTEENTH, name=f"1/16, residual decay {b}", beta=b) for b in (0.9, 1.0)))


def _values() -> tuple[Variant, ...]:
    return (
        SIXTEENTH,
        replace(SIXTEENTH, name="1/16, one magnitude", values="one-magnitude"),
        replace(SIXTEENTH, name="1/16, float32 values", values="float32"),
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


def _speeches() -> tuple[Variant, ...]:
    """Peers that have a part of their own have other centuries."""
    all_of_it = (
        DENSE_MULOCO,
        DATA_PARALLEL,
        SIXTEENTH,
        BASE,
        replace(BASE, name="1/64, gain 4", densities=sparse(64, 4.0)),
    )
    own = tuple(
        replace(v, name=f"{v.name}, own texts", own_text=True) for v in (DENSE_MULOCO, SIXTEENTH, all_of_it[-1])
    )
    bare = replace(own[-1], name=f"{own[-1].name}, restart at the anchor", rho=0.0)
    return tuple(replace(v, name=f"speeches: {v.name}", corpus=SPEECHES) for v in (*all_of_it, *own, bare))


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


def _small_batches() -> tuple[Question, ...]:
    """Four peers of 2 x 128 tokens a step, 10 steps a round, 60 rounds."""
    dense, base = _cheap(DENSE_MULOCO), _cheap(BASE)
    return (key_small((1, 2)), Question("What might mend 1/64", dense.name, (dense, base, *_mends(base)), (1, 2)))


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
        replace(base, name="4 x 2: 1/64, gain 3", densities=sparse(64, 3.0)),
        replace(base, name="4 x 2: 1/64, Nesterov 0.7/0.6", densities=sparse(64, 1.0), **NESTEROV),
        replace(
            base,
            name="4 x 2: every 13th value in turns, gain 1.5",
            densities=(Density(315, 2, 1.5),),
            values="rotating",
            **whole,
        ),
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


def _eight() -> Question:
    """Eight peers of 2 x 128 tokens a step, 10 steps a round, 100 rounds: gain and decay at 1/64, outer steps dense."""
    swarm = {"steps": peers(8), "batch": 2, "tokens": 100 * 8 * 10 * 2 * 128}
    dense = replace(DENSE_MULOCO, name="8 x 2: dense float32, Nesterov 0.7/0.6", **swarm)
    base, outer = replace(BASE, **swarm), ((1.0, 0.5), (0.8, 0.7), (0.9, 0.8))
    tried = {0.95: (2.0, 3.0, 4.0, 5.0), 0.98: (3.0,), 0.9: (4.0, 5.0, 6.0, 7.0), 0.8: (4.0, 5.0)}
    momenta = ((64, 2.0, 0.6), (64, 1.5, 0.7), (32, 1.5, 0.6), (16, 1.2, 0.6))
    gains = [(gain, decay) for decay, some in tried.items() for gain in some]
    variants = (
        dense,
        *(replace(dense, name=f"8 x 2: dense float32, Nesterov {eta:g}/{mu:g}", eta=eta, mu=mu) for eta, mu in outer),
        replace(DATA_PARALLEL, name="8 x 2: data-parallel Muon", **swarm),
        *(replace(base, name=f"8 x 2: 1/64, gain {g:g}, decay {b}", densities=sparse(64, g), beta=b) for g, b in gains),
        replace(base, name="8 x 2: 1/64, gain 3, rho 0.75", densities=sparse(64, 3.0), rho=0.75),
        *(
            replace(base, name=f"8 x 2: 1/{p}, gain {g:g}, decay 0.95", densities=sparse(p, g))
            for p, g in ((32, 4.0), (16, 3.0))
        ),
        *(
            replace(base, name=f"8 x 2: 1/{p}, gain {g:g}, mu {mu}", densities=sparse(p, g), mu=mu)
            for p, g, mu in momenta
        ),
        replace(base, name="8 x 2: 1/64, gain from 3 to 5", densities=sparse(64, 3.0), late_gain=5.0),
        replace(ALONE, name="8 x 2: one peer alone, same time", steps=peers(1), batch=2, tokens=swarm["tokens"] // 8),
    )
    return Question("Eight peers, 100 rounds", dense.name, variants)


def _longer() -> tuple[Question, ...]:
    """The same swarm over 100 and 300 rounds; the schedule of the rates ends with the run."""
    return tuple(_of_rounds(rounds) for rounds in (100, 300))


def _of_rounds(rounds: int) -> Question:
    tokens = rounds * 8 * 10 * 2 * 128
    swarm = {"steps": peers(8), "batch": 2, "tokens": tokens, "corpus": SPEECHES}
    variants = (
        replace(
            DENSE_MULOCO, name=f"{rounds} rounds: dense float32, Nesterov 0.8/0.7", **{**swarm, "eta": 0.8, "mu": 0.7}
        ),
        replace(DATA_PARALLEL, name=f"{rounds} rounds: data-parallel Muon", **swarm),
        replace(BASE, name=f"{rounds} rounds: 1/64, gain 4", densities=sparse(64, 4.0), **swarm),
    )
    return Question(f"The larger text, eight peers, {rounds} rounds", variants[0].name, variants)


GAINS = {
    2: {16: (1.0, 1.5, 2.0, 3.0), 64: (1.5, 2.5, 4.0)},
    4: {16: (1.5, 2.0, 3.0), 64: (2.5, 3.5, 5.0)},
    8: {16: (2.0, 3.0, 4.0), 64: (3.5, 5.0, 7.0)},
    16: {16: (3.0, 4.0, 6.0), 64: (5.0, 7.0, 10.0)},
}
"""Which gains were tried: peers, then 1/density."""


def _gains_of_counts() -> tuple[Question, ...]:
    """So many peers of 2 x 128 tokens a step, 60 rounds: does the best gain grow with the number of peers?"""
    return tuple(_gains_of(count, parts) for count, parts in GAINS.items())


def _gains_of(count: int, parts: dict[int, tuple[float, ...]]) -> Question:
    swarm = {"steps": peers(count), "batch": 2, "tokens": 60 * count * 10 * 2 * 128}
    variants = tuple(
        replace(BASE, name=f"{count} x 2: 1/{part}, gain {gain:g}", densities=sparse(part, gain), **swarm)
        for part, gains in parts.items()
        for gain in gains
    )
    return Question(f"Gains with {count} peers, 60 rounds", variants[0].name, variants)


SMALL = (_eight(), *_gains_of_counts(), *_longer(), *_small_batches(), *_questions())
