"""The memory plan against what is really allocated, and the refusal of what cannot fit."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from mamba_spec_jax.cache import memory
from mamba_spec_jax.cache.records import Draft
from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.models.hybrid_lm import HybridModel
from mamba_spec_jax.models.memory import plan_memory
from mamba_spec_jax.models.recurrent_config import Mamba2Config
from mamba_spec_jax.modes import CommitStrategy, DTypePolicy

from ..tiny import MADE_UP

CONFIG = HybridConfig(
    model_type="granitemoehybrid",
    vocab_size=61,
    hidden_size=24,
    layer_types=("mamba", "attention", "mamba"),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    attention_scale=0.3,
    recurrent=Mamba2Config(
        heads=4,
        head_dim=8,
        state=16,
        groups=2,
        conv_width=4,
    ),
    shared_intermediate_size=40,
)


def tree_bytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


PLANNED = [
    (CONFIG, strategy, policy)
    for strategy in (CommitStrategy.SNAPSHOT, CommitStrategy.REPLAY)
    for policy in (DTypePolicy.float32(), DTypePolicy.bfloat16())
]
PLANNED += [(config, CommitStrategy.SNAPSHOT, DTypePolicy.bfloat16()) for config in MADE_UP.values()]


@pytest.mark.parametrize(("config", "strategy", "policy"), PLANNED)
def test_plan_is_what_the_model_allocates(config, strategy, policy):
    B, M, T = 3, 320, 5
    model = HybridModel.create(config, policy, strategy=strategy)
    cache = jax.eval_shape(lambda: model.init_cache(B, M))
    rows = jnp.zeros((B,), jnp.int32)
    draft = Draft(jnp.zeros((B, T), jnp.int32), rows, rows)
    params = model.abstract_params()
    output = jax.eval_shape(lambda params, cache: model.verify(params, draft, cache), params, cache)

    plan = plan_memory(config, B, M, T, strategy, policy)
    assert plan.parts == {
        "weights": tree_bytes(params),
        "SSM pool": tree_bytes(cache.mamba.ssm),
        "convolution pool": tree_bytes(cache.mamba.conv),
        "keys and values": tree_bytes(cache.kv),
        "replay ring": 0 if cache.mamba.ring is None else tree_bytes((cache.mamba.ring.inputs, cache.mamba.ring.order)),
        "verify: a state per token": 0 if cache.mamba.ring else tree_bytes(output.record.recurrent),
        "verify: convolution inputs": tree_bytes(output.record.conv_inputs),
        "verify: logits": tree_bytes(output.logits),
        "verify: one attention block": plan.parts["verify: one attention block"],
    }
    assert plan.total == sum(plan.parts.values())


def test_plan_names_a_bad_size():
    with pytest.raises(ValueError, match="plan_memory got num_tokens=0, expected at least 1"):
        plan_memory(CONFIG, 1, 16, 0)


def test_a_cache_that_cannot_fit_is_refused_before_it_is_allocated(monkeypatch):
    model = HybridModel.create(CONFIG)
    slots, max_len = 2, 64
    needed = tree_bytes(model.init_cache(slots, max_len)) - slots * 4
    monkeypatch.setattr(memory, "device_bytes", lambda: needed)
    model.init_cache(slots, max_len)
    monkeypatch.setattr(memory, "device_bytes", lambda: needed - 1)
    monkeypatch.setattr(jnp, "zeros", _no_big_zeros(jnp.zeros))
    with pytest.raises(MemoryError, match=r"a cache of 2 slots of 64 tokens needs .* \(ssm .*\), but the device"):
        model.init_cache(slots, max_len)


def test_inside_a_trace_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(memory, "device_bytes", lambda: 0)
    cache = jax.eval_shape(lambda: HybridModel.create(CONFIG).init_cache(2, 64))
    assert cache.lengths.shape == (2,)


def test_the_device_says_how_much_it_has():
    assert memory.device_bytes() > 2**28


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1610612736, "1.5 GiB"), (2**60, "1024.0 PiB")]
)
def test_format_bytes(size, text):
    assert memory.format_bytes(size) == text


def test_attention_free_models_plan_no_attention():
    plan = plan_memory(dataclasses.replace(CONFIG, layer_types=("mamba",)), 1, 16, 2)
    assert plan.parts["keys and values"] == plan.parts["verify: one attention block"] == 0


def _no_big_zeros(zeros):
    def guarded(shape, *args, **kwargs):
        if shape != ():
            raise AssertionError("allocated before the check")
        return zeros(shape, *args, **kwargs)

    return guarded
