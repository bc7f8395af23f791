"""32 peers, 30 % of them crashing or joining a round, 5 % message loss, skewed clocks, a network that parts and heals.

`health` says what a settled round is and who is looked at. A failing seed is repeated with `python -m tests.sim.churn`
and the seed: everything random comes from it.
"""

from __future__ import annotations

import pytest

from tests.sim.churn import Churn, ChurnPlan, ChurnResult

PLAN = ChurnPlan()
SHARE = 0.95
MAX_UNJOINED_ROUNDS = 3.0
FAST, USUAL = 1, 6  # seeds that `make test-fast` and `make test` run; `make test-churn` runs all


def marks(seed: int) -> tuple[pytest.MarkDecorator, ...]:
    if seed <= FAST:
        return ()
    return (pytest.mark.slow,) if seed <= USUAL else (pytest.mark.slow, pytest.mark.full)


SEEDS = [pytest.param(seed, marks=marks(seed)) for seed in range(1, 21)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_swarm_under_churn_stays_one_swarm(seed: int) -> None:
    result = Churn(PLAN, seed).run()
    assert len({h.round for h in result.health + result.healing}) >= 50
    problems = find_problems(result)
    assert not problems, f"seed {seed}: " + "; ".join(problems)


def find_problems(result: ChurnResult) -> list[str]:
    """What is wrong with a run: every promise that it broke, with the round."""
    found = []
    for health in result.health:
        if health.views != 1:
            found.append(f"round {health.round} side {health.side}: {health.views} different states")
        if health.in_step - health.folded > max(1.0, (1.0 - SHARE) * health.in_step):
            found.append(f"round {health.round} side {health.side}: {health.folded} of {health.in_step} have folded it")
        if health.contributions == 0:
            found.append(f"round {health.round} side {health.side}: nobody sealed it")
    if result.share < SHARE:
        found.append(f"only {result.share:.3f} have folded before the next close")
    if result.unjoined_rounds > MAX_UNJOINED_ROUNDS:
        found.append(f"a peer was not in step {result.unjoined_rounds:.1f} rounds after its start")
    if not result.distances[-1] < 0.1 * result.distances[0]:
        found.append(f"the model did not learn: {result.distances[0]:.3f} -> {result.distances[-1]:.3f}")
    return found
