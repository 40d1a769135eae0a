"""Automatic depth on synthetic costs and texts: it follows what pays, and hardly pays for what does not."""

import numpy as np
import pytest

from mamba_spec_jax.speculative.draft_policy import AutoDrafts, ChunkCosts, FixedDrafts

CHUNK_STEPS, LOOKS = 16, 4


def costs(depth, seconds, tokens, passes, remaining=100, steps=0):
    rows = np.broadcast_arrays(*(np.atleast_1d(np.asarray(value, float)) for value in (tokens, passes, remaining)))
    return ChunkCosts(depth, steps, seconds, *rows)


def started(rows=1, remaining=100, **options):
    policy = AutoDrafts(8, **options)
    policy.start(np.full(rows, remaining))
    return policy


def simulate(policy, ratio, rates, new_tokens=512):
    """How many times sooner a batch is done than with plain steps, and the depth of every chunk.

    `rates(position)` are the tokens `[B]` that a full-depth pass of each row emits at a position of the slowest row.
    """
    position = np.zeros(len(rates(0)))
    spent, chosen = 0.0, []
    policy.start(np.full(position.shape, new_tokens))
    while position.min() < new_tokens:
        depth = policy.choose()
        chosen.append(depth)
        active = position < new_tokens
        rate, steps = rates(position.min()), policy.steps(depth, CHUNK_STEPS)
        if not depth:
            steps = min(steps, int(np.ceil((new_tokens - position).max())))
        spent += steps * (ratio if depth else 1.0)
        position = np.where(active, position + steps * (rate if depth else 1), position)
        passes = np.where(active, steps if depth else LOOKS, 0)
        remaining = np.maximum(new_tokens - position, 0)
        policy.observe(costs(depth, ratio if depth else 1.0, passes * rate, passes, remaining, steps))
    return new_tokens / spent, chosen


@pytest.mark.parametrize("ratio", [1.3, 2.0, 3.5])
def test_useless_drafts_cost_nothing(ratio):
    sooner, chosen = simulate(AutoDrafts(8), ratio, lambda _: np.array([1.1]), new_tokens=2048)
    assert sooner == 1
    assert set(chosen) == {0}


@pytest.mark.parametrize(("ratio", "least"), [(1.1, 1.1), (3.5, 0.98)])
def test_modest_drafts_are_tried_once_a_try_weighs_little(ratio, least):
    sooner, chosen = simulate(AutoDrafts(8), ratio, lambda _: np.array([1.3]), new_tokens=1024)
    tried = chosen.index(8)
    assert 8 <= tried <= 16
    assert set(chosen[tried:]) == ({8} if ratio < 1.3 else {0, 8})
    assert sooner > least


def test_useful_drafts_are_taken_up_soon():
    sooner, chosen = simulate(AutoDrafts(8), 2.0, lambda _: np.array([5.0]))
    assert chosen[0] == 0
    assert set(chosen[1:]) == {8}
    assert sooner > 2


@pytest.mark.parametrize("rate", [2.2, 2.6])
def test_a_promise_that_is_not_kept_costs_little(rate):
    sooner, chosen = simulate(AutoDrafts(8), 3.5, lambda _: np.array([rate]))
    assert chosen.count(8) == 1
    assert sooner > 0.97


@pytest.mark.parametrize("new_tokens", [64, 128, 512])
@pytest.mark.parametrize("ratio", [1.2, 2.0, 3.5])
def test_losses_stay_within_the_stake_whatever_the_drafts_do(ratio, new_tokens):
    """The worst text there is: drafts look right in hindsight, and never are when they are verified."""
    policy = AutoDrafts(8)
    policy.start(np.array([new_tokens]))
    done = spent = 0.0
    tried = 0
    while done < new_tokens:
        depth = policy.choose()
        steps = min(policy.steps(depth, CHUNK_STEPS), new_tokens - done)
        tried += depth > 0
        done, spent = done + steps, spent + steps * (ratio if depth else 1)
        policy.observe(costs(depth, ratio if depth else 1.0, 8 * LOOKS, LOOKS, new_tokens - done, steps))
    assert tried
    first_try = ratio - 1  # before the cost of drafts is known, one step
    assert spent <= new_tokens + max(policy.stake * new_tokens, first_try)


def test_what_was_won_may_be_lost():
    policy = started(remaining=1000, stake=0.0)
    policy.observe(costs(0, 1.0, 36, 4, 984, 16))
    assert policy.choose() == 0  # nothing may be lost, and nothing is known of the cost
    policy = started(remaining=1000, stake=0.01)
    policy.observe(costs(0, 1.0, 36, 4, 984, 16))
    assert policy.choose() == 8
    policy.observe(costs(8, 6.0, 9, 1, 975, 1))  # won 3 steps, which with the stake cover two bets of 5
    policy.observe(costs(8, 6.0, 8, 1, 974, 1))
    assert policy.choose() == 8
    policy.observe(costs(8, 6.0, 8, 1, 973, 1))
    assert policy.choose() == 0


def test_it_follows_the_text_both_ways():
    policy = AutoDrafts(8)
    simulate(policy, 2.0, lambda _: np.array([5.0]))  # an earlier generation, from which it knows the cost
    _, chosen = simulate(policy, 2.0, lambda at: np.array([5.0 if 300 <= at < 900 else 1.0]), new_tokens=1200)
    changes = [i for i in range(1, len(chosen)) if chosen[i] != chosen[i - 1]]
    assert len(changes) == 2
    assert 300 / CHUNK_STEPS <= changes[0] <= 300 / CHUNK_STEPS + 4
    assert changes[1] - changes[0] <= 600 / 5 + 24  # passes of the good stretch, and a few to be sure
    assert (chosen[0], chosen[-1]) == (0, 0)


def test_the_slowest_row_decides():
    """The mean rate of 5.7 is far above the cost, but the batch is done when its last row is."""
    sooner, chosen = simulate(AutoDrafts(8), 3.0, lambda _: np.array([1.1, 8.0, 8.0]))
    assert chosen.count(8) <= 2  # the first chunk says too little of the row by itself
    assert sooner > 0.96
    # Once that row has little left, it no longer does.
    policy = started(3)
    policy.observe(costs(0, 1.0, [4.4, 32, 32], [4, 4, 4], [5, 100, 100]))
    assert policy.choose() == 8


def test_few_passes_say_little():
    policy = started()
    policy.observe(costs(8, 2.0, 4.0, 4.0))
    for _ in range(4):
        policy.observe(costs(0, 1.0, 4.0, 4.0))
    policy.observe(costs(0, 1.0, 9.0, 1.0))
    assert policy.choose() == 0
    for _ in range(3):
        policy.observe(costs(0, 1.0, 36.0, 4.0))
    assert policy.choose() == 8


def test_a_slow_outlier_does_not_stick():
    policy = started()
    policy.observe(costs(0, 50.0, 16.0, 4.0))
    policy.observe(costs(0, 1.0, 16.0, 4.0))
    assert policy.cost_ratio is None
    policy.observe(costs(8, 2.0, 16.0, 4.0))
    assert policy.cost_ratio == 2.0
    assert policy.choose() == 8


def test_chunks_that_say_nothing_change_nothing():
    policy = started()
    policy.observe(costs(0, None, 0.0, 0.0))
    assert policy.choose() == 0
    policy.observe(costs(0, 1.0, 16.0, 4.0))
    assert policy.choose() == 8
    assert policy.cost_ratio is None
    policy.observe(costs(8, None, 0.0, 0.0, remaining=0.0))  # compiled first, and every row finished
    assert policy.choose() == 8
    assert policy.cost_ratio is None


def test_another_generation_starts_afresh_but_knows_the_cost():
    policy = started()
    policy.observe(costs(0, 1.0, 32.0, 4.0))
    policy.observe(costs(8, 2.0, 32.0, 4.0))
    assert policy.choose() == 8
    policy.start(np.array([100, 100]))
    assert policy.choose() == 0
    assert policy.cost_ratio == 2.0
    policy.observe(costs(0, 1.0, [4.0, 4.0], [4.0, 4.0]))
    assert policy.choose() == 0


def test_chunks_at_full_depth_are_short():
    policy = AutoDrafts(8)
    assert [policy.steps(depth, 64) for depth in (0, 8)] == [64, 4]
    assert policy.steps(8, 1) == 1


def test_fixed_depth_is_fixed():
    policy = FixedDrafts(3)
    policy.start(np.array([100]))
    policy.observe(costs(3, 9.0, 1.0, 1.0))
    assert policy.choose() == 3
    assert policy.steps(3, 16) == 16


def test_automatic_depth_needs_drafts():
    with pytest.raises(ValueError, match=r"AutoDrafts\.max_drafts is 0, expected at least 1"):
        AutoDrafts(0)
