"""What configurations and passes refuse, while tracing and by name."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from mamba_spec_jax.cache.records import Draft
from mamba_spec_jax.layers.mlp import SparseMoE
from mamba_spec_jax.layers.norms import GatedRMSNorm
from mamba_spec_jax.models.hybrid_lm import HybridModel
from mamba_spec_jax.modes import DTypePolicy, ForwardMode

from ..tiny import APART, DENSE, MAMBA, MOE, SHARED

CONFIG_ERRORS = [
    (
        DENSE,
        {"layer_types": ("mamba", "rwkv")},
        r"layer_types has \['rwkv'\], expected each to be one of \('mamba', 'att",
    ),
    (DENSE, {"layer_types": ()}, "layer_types has no layers, expected each to be one of"),
    *(
        (DENSE, {name: 0}, f"{name} is 0, expected at least 1")
        for name in (
            "vocab_size",
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "shared_intermediate_size",
        )
    ),
    (DENSE, {"num_key_value_heads": 3}, "num_attention_heads is 4, expected a multiple of num_key_value_heads = 3"),
    *(
        (MAMBA, {name: 0}, f"Mamba2Config.{name} is 0, expected at least 1")
        for name in ("heads", "head_dim", "state", "groups", "chunk_size")
    ),
    (MAMBA, {"groups": 2}, "Mamba2Config.heads is 3, expected a multiple of groups = 2"),
    (MOE, {"head_dim": 5}, "head_dim is 5, expected an even one for rotary embedding"),
    (MOE, {"rotary_dim": 3}, "rotary_dim is 3, expected an even number up to head_dim=6"),
    (MOE, {"rotary_dim": 8}, "rotary_dim is 8, expected an even number up to head_dim=6"),
    (APART, {"mlp_intermediate_size": 0}, "mlp_intermediate_size is 0, expected at least 1"),
    (APART, {"num_experts": 0}, "num_experts is 0, expected at least 1"),
    (APART, {"mlp_activation": "tanh"}, r"mlp_activation is 'tanh', expected one of \('silu', 'gelu', 'relu2'\)"),
    (SHARED, {"shared_intermediate_size": 0}, "shared_intermediate_size is 0, expected at least 1"),
    (SHARED, {"shared_blocks": None}, "shared_blocks is None, expected them if and only if a layer is shared"),
    (MAMBA, {"norm": "after"}, r"norm is 'after', expected one of \('gated', 'before_gate', 'none'\)"),
    (MAMBA, {"time_step_limit": (0.2, 0.1)}, r"time_step_limit is \(0\.2, 0\.1\), expected two numbers in ascending"),
]


@pytest.mark.parametrize(("config", "changes", "message"), CONFIG_ERRORS)
def test_configurations(config, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **changes)


def test_an_odd_head_without_rotary_embedding_is_fine():
    assert dataclasses.replace(MOE, head_dim=5, rope_theta=None).head_dim == 5


def test_layers():
    with pytest.raises(ValueError, match=r"SparseMoE routes to top_k=5 of 4 experts, expected 1\.\.4"):
        SparseMoE(4, 4, 4, 5, dtype=jnp.float32, param_dtype=jnp.float32, rngs=None)
    with pytest.raises(ValueError, match="GatedRMSNorm of size 10 cannot be split into 4 equal groups"):
        GatedRMSNorm(10, groups=4, eps=1e-6, param_dtype=jnp.float32)


def test_hidden_layers_that_do_not_exist():
    with pytest.raises(ValueError, match=r"hidden_layers \[-1, 3\] do not exist, expected 0\.\.2"):
        HybridModel.create(DENSE, hidden_layers=(0, -1, 3))


MODEL = HybridModel.create(DENSE)
B, T = 2, 3
TOKENS, ROWS = jnp.zeros((B, T), jnp.int32), jnp.zeros(B, jnp.int32)


def trace(call, cache=None, **options):
    cache = jax.eval_shape(lambda: MODEL.init_cache(4, 8)) if cache is None else cache
    return jax.eval_shape(lambda params, cache: call(params, cache, **options), MODEL.abstract_params(), cache)


def prefill(params, cache, tokens=TOKENS, slots=ROWS, num_tokens=ROWS, **options):
    return MODEL.prefill(params, tokens, cache, slots=slots, num_tokens=num_tokens, **options)


def verify(params, cache, tokens=TOKENS, counts=ROWS, slots=ROWS, **options):
    return MODEL.verify(params, Draft(tokens, counts, slots), cache, **options)


def decode(params, cache, tokens=ROWS, slots=ROWS, **options):
    return MODEL.decode(params, tokens, cache, slots=slots, **options)


CALL_ERRORS = [
    (prefill, {"mode": ForwardMode.DECODE}, "prefill got mode DECODE, expected EXTEND, DRAFT_EXTEND or IDLE"),
    (prefill, {"mode": ForwardMode.TARGET_VERIFY}, "prefill got mode TARGET_VERIFY, expected EXTEND, DRAFT_EXTEND or"),
    (verify, {"mode": ForwardMode.EXTEND}, "verify got mode EXTEND, expected TARGET_VERIFY or DECODE"),
    (verify, {"mode": ForwardMode.IDLE}, "verify got mode IDLE, expected TARGET_VERIFY or DECODE"),
    (prefill, {"tokens": ROWS}, r"prefill got tokens int32\[2\], expected int32\[B, T\]"),
    (prefill, {"tokens": TOKENS[:, :0]}, r"prefill got tokens int32\[2, 0\], expected T of at least 1"),
    (
        verify,
        {"tokens": TOKENS.astype(jnp.float32)},
        r"verify got draft.tokens float32\[2, 3\], expected int32",
    ),
    (prefill, {"slots": ROWS[:1]}, r"prefill got slots int32\[1\], expected int32\[2\]"),
    (prefill, {"num_tokens": TOKENS}, r"prefill got num_tokens int32\[2, 3\], expected int32\[2\]"),
    (verify, {"slots": ROWS.astype(jnp.float32)}, r"verify got draft.slots float32\[2\], expected int32\[2\]"),
    (prefill, {"kv_len": 9}, r"kv_len is 9, expected 1\.\.8 \(the cache's max_len\)"),
    (verify, {"kv_len": 0}, r"kv_len is 0, expected 1\.\.8 \(the cache's max_len\)"),
]


@pytest.mark.parametrize(("call", "options", "message"), CALL_ERRORS)
def test_passes(call, options, message):
    with pytest.raises(ValueError, match=message):
        trace(call, **options)


@pytest.mark.parametrize(("call", "mode"), [(prefill, "EXTEND"), (verify, "TARGET_VERIFY"), (decode, "DECODE")])
def test_a_forgotten_commit_is_refused_by_the_next_pass(call, mode):
    waiting = trace(verify).cache
    with pytest.raises(ValueError, match=f"mode {mode} got a cache that still awaits the commit of a verify pass"):
        trace(call, cache=waiting)


def test_weights_of_another_model_are_named():
    wider = HybridModel.create(dataclasses.replace(DENSE, hidden_size=14)).abstract_params()
    shorter = HybridModel.create(dataclasses.replace(DENSE, layer_types=("mamba", "attention"))).abstract_params()
    cache = jax.eval_shape(lambda: MODEL.init_cache(4, 8))
    for params, message in (
        (None, r"prefill got params of type NoneType that are not this model's: .* is missing, expected \[29, 12\]"),
        ({}, "got params of type dict that are not this model's: .*embed_tokens.* is missing, expected"),
        (wider, r"embed_tokens.* is \[29, 14\], expected \[29, 12\].* and \d+ more. Pass what load or init_params of"),
        (shorter, r"layers.*2.*input_norm.* is missing, expected \[12\]"),
    ):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(prefill, params, cache)
    for call in (verify, decode):
        with pytest.raises(ValueError, match="verify got params of type NoneType that are not this model's"):
            jax.eval_shape(call, None, cache)


def test_what_is_no_array_or_draft_is_named():
    cache = MODEL.init_cache(4, 8)
    for call, message in (
        (lambda: prefill(None, cache, tokens=[[1, 2]]), r"prefill got tokens of type list, expected int32\[B, T\]"),
        (lambda: prefill(None, cache, slots=[0, 1]), r"prefill got slots of type list, expected int32\[2\]"),
        (lambda: verify(None, cache, tokens=[[1]]), "verify got draft.tokens of type list, expected int32"),
        (lambda: verify(None, cache, counts=None), r"verify got draft.counts of type NoneType, expected int32\[2\]"),
        (lambda: decode(None, cache, tokens=[1, 2]), r"decode got tokens of type list, expected int32\[B\]"),
        (lambda: MODEL.verify(None, (TOKENS, ROWS), cache), "verify got a draft of type tuple, expected a Draft"),
        (lambda: prefill(MODEL.abstract_params(), None), "in mode EXTEND got a cache of type NoneType, expected a Hyb"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_shapes_and_dtypes_of_every_pass():
    for policy in (DTypePolicy(), DTypePolicy.bfloat16()):
        model = HybridModel.create(DENSE, policy)
        cache = jax.eval_shape(lambda model=model: model.init_cache(4, 8))
        params = model.abstract_params()
        verified = jax.eval_shape(
            lambda p, c, model=model: model.verify(p, Draft(TOKENS, ROWS, ROWS), c), params, cache
        )
        assert (verified.logits.shape, verified.logits.dtype) == ((B, T, DENSE.vocab_size), jnp.float32)
        assert jax.tree.leaves(verified.cache) == jax.tree.leaves(cache)
        assert (verified.cache.awaiting_commit, verified.record.spec.mode) == (True, ForwardMode.TARGET_VERIFY)
        decoded = jax.eval_shape(lambda p, c, model=model: model.decode(p, ROWS, c, slots=ROWS), params, cache)
        assert (decoded.logits.shape, decoded.record) == ((B, DENSE.vocab_size), None)
        assert jax.tree.structure(decoded.cache) == jax.tree.structure(cache)
        assert jax.tree.leaves(decoded.cache) == jax.tree.leaves(cache)
