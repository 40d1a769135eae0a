"""Tiny generations with every kind of drafter, and a user's own step, for tests of the settings they run under."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

import mamba_spec_jax as ms
from mamba_spec_jax.models.heads.head import DFlashHead, EagleHead
from mamba_spec_jax.speculative.chunks import _chunk
from mamba_spec_jax.speculative.drafters.dflash import DFlashDrafter
from mamba_spec_jax.speculative.drafters.draft_model import DraftModelDrafter
from mamba_spec_jax.speculative.drafters.eagle import EagleDrafter
from mamba_spec_jax.speculative.drafters.eagle_tree import EagleTreeDrafter
from mamba_spec_jax.speculative.drafters.fallback import FallbackDrafter
from mamba_spec_jax.speculative.drafters.ngram_tree import NgramTreeDrafter
from tests.mamba_spec_jax import tiny
from tests.mamba_spec_jax.heads import KINDS, head_config, random_module

PROMPTS = [[3, 9, 4, 3, 9, 4, 3], [5]]
DRAFTS, NEW = 3, 8
METHODS = {"greedy": ms.Greedy(), "sampled": ms.Sampling()}
SAMPLED = {"temperature": 0.8, "seeds": [5, 6], "top_k": 9, "top_p": 0.9, "min_p": 0.01}
TARGET = ms.HybridModel.create(tiny.DENSE)


@dataclasses.dataclass(frozen=True)
class Drafting:
    """A drafter with its weights, and the target as the drafter needs it."""

    drafter: ms.Drafter
    params: object
    target: ms.HybridModel


def head(kind, make):
    module = random_module(kind, head_config(kind, TARGET))
    weights = tiny.random_params(TARGET)
    static = (DFlashHead if kind == "dflash" else EagleHead).create(KINDS[kind][0], head_config(kind, TARGET))
    params = static.bind(
        nnx.split(module)[1], weights["embed_tokens"]["embedding"][...], weights["lm_head"]["kernel"][...]
    )
    drafter = make(static)
    return Drafting(drafter, params, TARGET.with_hidden_layers(drafter.hidden_layers))


def draft_model():
    return Drafting(DraftModelDrafter(TARGET, DRAFTS), tiny.random_params(TARGET, 1), TARGET)


def fallback():
    second = draft_model()
    drafter = FallbackDrafter(ms.NgramDrafter(DRAFTS), second.drafter)
    return Drafting(drafter, (None, second.params), TARGET)


def without_params(drafter, config="dense", **options):
    return Drafting(drafter, None, ms.HybridModel.create((tiny.CONFIGS | tiny.MADE_UP)[config], **options))


REPLAY = {"strategy": ms.CommitStrategy.REPLAY}
DRAFTERS = {
    "prompt lookup": lambda: without_params(ms.NgramDrafter(DRAFTS)),
    "tree of prompt lookup, experts, replay": lambda: without_params(NgramTreeDrafter(DRAFTS), "moe", **REPLAY),
    "eagle": lambda: head("eagle3", lambda static: EagleDrafter(static, DRAFTS)),
    "eagle tree": lambda: head("eagle3", lambda static: EagleTreeDrafter(static, 5, depth=2, width=2)),
    "multi-token prediction": lambda: head("three layers", lambda static: EagleDrafter(static, DRAFTS)),
    "dflash": lambda: head("dflash", lambda static: DFlashDrafter(static, DRAFTS, 7)),
    "draft model": draft_model,
    "fallback": fallback,
}


def generation(name: str, method: str, new: int = NEW):
    """The tokens that `generate` emits."""
    drafting = DRAFTERS[name]()
    options = SAMPLED if method == "sampled" else {}
    return ms.generate(
        drafting.target,
        tiny.random_params(dataclasses.replace(drafting.target, hidden_layers=())),
        PROMPTS,
        drafter=drafting.drafter,
        drafter_params=drafting.params,
        max_new=new,
        logprobs=True,
        chunk_steps=4,
        **options,
    ).tokens


def own_step(model, params, tokens, cache):
    """What a user's own program does: a window is verified, all of it is accepted and committed."""
    B, T = tokens.shape
    slots, drafts = jnp.arange(B, dtype=jnp.int32), jnp.full((B,), T - 1, jnp.int32)
    output = model.verify(params, ms.Draft(tokens, drafts, slots), cache)
    cache = model.backend.update_mamba_state_after_mtp_verify(output.cache, output.record, drafts)
    return jnp.argmax(output.logits, axis=-1), cache


def traced(name: str, method: str):
    """The program of reading the prompts and of a chunk of steps, traced and never compiled."""
    drafting = DRAFTERS[name]()
    options = SAMPLED if method == "sampled" else {}
    decoder = ms.Decoder(drafting.target, drafting.drafter, METHODS[method])

    def program(params, drafter_params):
        weights, stops = ms.Weights(params, drafter_params), ms.StopConditions.create([1])
        state = decoder.init(weights, PROMPTS, stops=stops, max_new=NEW, logprobs=True, **options)
        return _chunk(decoder, weights, state, decoder.num_drafts, 4)

    params = tiny.random_params(dataclasses.replace(drafting.target, hidden_layers=()))
    return jax.make_jaxpr(program)(params, drafting.params)
