"""Drafters from checkpoints: each kind becomes its drafter, and what cannot draft for a model is refused."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import mamba_spec_jax as ms
from mamba_spec_jax.models.heads.checkpoint import save_head
from tests.mamba_spec_jax import tiny
from tests.mamba_spec_jax.heads import head_config, random_module
from tests.mamba_spec_jax.models.checkpoints import CONFIG, random_weights, write

TARGET = ms.HybridModel.create(tiny.MOE)
LOADED = ms.LoadedModel(TARGET, tiny.random_params(TARGET), None, Path("tiny"))


@pytest.fixture
def saved(tmp_path):
    def save(kind):
        config = head_config(kind, TARGET)
        save_head(tmp_path / "head", random_module(kind, config), config, block_size=5, mask_token=3, passes=2)
        return tmp_path / "head"

    return save


def assert_drafts_fit(found):
    """The weights are what the drafter computes with, as far as shapes tell."""
    tokens, rows = jnp.zeros((1, 8), jnp.int32), jnp.ones(1, jnp.int32)
    choose = ms.TokenChoice(jnp.zeros(1, jnp.uint32), jnp.ones(1), ms.Greedy())
    drafter, most = found.drafter, found.drafter.max_drafts

    def draft(params):
        return drafter.propose(params, drafter.init(1, 8), tokens, rows, choose, most)

    assert jax.eval_shape(draft, found.params).tokens.shape == (1, most)


@pytest.mark.parametrize(
    ("kind", "drafter", "most"),
    [("eagle3", ms.EagleDrafter, 4), ("three layers", ms.EagleDrafter, 4), ("dflash", ms.DFlashDrafter, 4)],
)
def test_a_head_becomes_its_drafter_and_the_target_returns_what_it_reads(saved, kind, drafter, most):
    found = ms.load_drafter(saved(kind), LOADED)
    assert type(found.drafter) is drafter
    assert found.drafter.max_drafts == most
    assert found.target == dataclasses.replace(TARGET, hidden_layers=head_config(kind, TARGET).target_layers)
    assert_drafts_fit(found)


def test_a_block_holds_so_many_drafts(saved):
    folder = saved("dflash")
    drafter = ms.load_drafter(folder, LOADED, max_drafts=2).drafter
    assert (drafter.max_drafts, drafter.mask_token, drafter.passes) == (2, 3, 2)
    with pytest.raises(ValueError, match="max_drafts is 5, but this DFlash head fills blocks of 4 drafts at most"):
        ms.load_drafter(folder, LOADED, max_drafts=5)


def test_a_smaller_model_becomes_a_draft_model(tmp_path):
    config = CONFIG | {"vocab_size": TARGET.vocab_size}
    found = ms.load_drafter(write(tmp_path / "same", config, random_weights(config)), LOADED, max_drafts=3)
    assert isinstance(found.drafter, ms.DraftModelDrafter)
    assert found.drafter.max_drafts == 3
    assert found.target == TARGET
    other = ms.load_drafter(write(tmp_path / "other", CONFIG, random_weights(CONFIG)), LOADED)
    with pytest.raises(ValueError, match=r"vocabulary of 13.*29"):
        ms.generate(TARGET, LOADED.params, [[1]], drafter=other.drafter, drafter_params=other.params, max_new=2)


def test_a_head_that_is_run_on_drafts_trees_too(saved):
    found = ms.load_drafter(saved("eagle3"), LOADED, max_drafts=5, depth=2)
    assert isinstance(found.drafter, ms.EagleTreeDrafter)
    assert (found.drafter.max_drafts, found.drafter.depth) == (5, 2)
    assert found.target == dataclasses.replace(TARGET, hidden_layers=head_config("eagle3", TARGET).target_layers)
    assert_drafts_fit(found)


def test_trees_of_what_drafts_chains_are_refused(saved, tmp_path):
    with pytest.raises(ValueError, match="holds a DFlash head, which drafts chains, not trees of depth 2"):
        ms.load_drafter(saved("dflash"), LOADED, max_drafts=5, depth=2)
    with pytest.raises(ValueError, match="head of 3 layers, expected one that is run on"):
        ms.load_drafter(saved("three layers"), LOADED, max_drafts=5, depth=2)
    folder = write(tmp_path / "model", CONFIG, random_weights(CONFIG))
    with pytest.raises(ValueError, match="holds a language model, which drafts chains, not trees of depth 2"):
        ms.load_drafter(folder, LOADED, max_drafts=5, depth=2)
