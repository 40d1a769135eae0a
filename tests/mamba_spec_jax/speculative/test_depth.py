"""Automatic depth on synthetic costs: it follows what pays, and hardly pays for what does not."""

import pytest

from mamba_spec_jax.speculative.depth import AutoDepth, ChunkCosts, FixedDepth


def simulate(policy, ratio, tokens, chunks):
    """Seconds per token relative to plain decoding; `tokens(chunk)` is what a full-depth pass emits then."""
    spent = emitted = 0.0
    chosen = []
    for chunk in range(chunks):
        depth = policy.choose()
        chosen.append(depth)
        cost, gained = (ratio, tokens(chunk)) if depth else (1.0, 1.0)
        spent, emitted = spent + cost, emitted + gained
        policy.observe(ChunkCosts(depth, cost, gained, None if depth else tokens(chunk)))
    return spent / emitted, chosen


@pytest.mark.parametrize("ratio", [1.5, 2.5, 4.0])
@pytest.mark.parametrize("tokens", [1.0, 1.3, 1.9])
def test_useless_drafts_cost_nothing(ratio, tokens):
    relative, chosen = simulate(AutoDepth(8), ratio, lambda _: tokens, 8)
    if tokens < ratio:
        assert relative == 1.0
        assert set(chosen) == {0}


def test_useful_drafts_are_taken_after_one_plain_chunk():
    relative, chosen = simulate(AutoDepth(8), 2.0, lambda _: 4.0, 40)
    assert chosen[0] == 0
    assert set(chosen[1:]) == {8}
    assert relative < 0.55


def test_a_promise_that_is_not_kept_costs_one_chunk():
    _, chosen = simulate(AutoDepth(8), 3.0, lambda _: 2.2, 20)
    assert chosen.count(8) == 1


def test_it_follows_the_text_both_ways():
    policy = AutoDepth(8)
    _, chosen = simulate(policy, 2.0, lambda chunk: 4.0 if 10 <= chunk < 30 else 1.0, 50)
    assert set(chosen[:10]) == {0}
    assert set(chosen[14:30]) == {8}
    assert set(chosen[36:]) == {0}


def test_a_slow_outlier_does_not_stick():
    policy = AutoDepth(4)
    policy.observe(ChunkCosts(0, 50.0, 1.0, 3.0))
    policy.observe(ChunkCosts(0, 1.0, 1.0, 3.0))
    policy.observe(ChunkCosts(4, 2.0, 3.0, None))
    assert policy.cost_ratio == 2.0
    assert policy.choose() == 4


def test_chunks_that_say_nothing_change_nothing():
    policy = AutoDepth(4)
    policy.observe(ChunkCosts(0, None, None, None))
    assert policy.choose() == 0
    assert policy.cost_ratio is None


def test_fixed_depth_is_fixed():
    policy = FixedDepth(3)
    policy.observe(ChunkCosts(3, 9.0, 1.0, None))
    assert policy.choose() == 3


def test_automatic_depth_needs_drafts():
    with pytest.raises(ValueError, match=r"AutoDepth\.max_drafts is 0, expected at least 1"):
        AutoDepth(0)
