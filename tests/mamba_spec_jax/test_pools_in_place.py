"""The compiled step updates donated pools where they lie: no pool-sized copy, rewrite or temporary.

Compiled for a cache far larger than anything else in the step, which is never allocated.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from mamba_spec_jax.cache.records import Draft
from mamba_spec_jax.models.hybrid_lm import HybridModel
from mamba_spec_jax.modes import CommitStrategy, ForwardMode, SpeculativeMode

from .tiny import DENSE, MADE_UP, MOE

SLOTS, MAX_LEN, B, T = 4096, 2048, 2, 3
ROWS = jax.ShapeDtypeStruct((B,), jnp.int32)
TOKENS = jax.ShapeDtypeStruct((B, T), jnp.int32)
# What may have a pool's shape: names for a buffer, and writes of a part into it.
IN_PLACE = {
    "parameter", "get-tuple-element", "tuple", "while", "bitcast", "dynamic-update-slice", "scatter", "fusion",
}  # fmt: skip


def abstract_cache(model):
    return jax.eval_shape(lambda: model.init_cache(SLOTS, MAX_LEN))


def verify_and_commit(model, track=False):
    def step(params, cache, tokens, slots, lengths, steps, track_slots, parents=None):
        output = model.verify(params, Draft(tokens, lengths, slots, parents=parents), cache)
        tracked = (track_slots, steps) if track else ()
        return output.logits, model.backend.update_mamba_state_after_mtp_verify(
            output.cache, output.record, steps, *tracked
        )

    return step, (TOKENS, ROWS, ROWS, ROWS, ROWS)


def tree(model):
    step, arguments = verify_and_commit(model, track=True)
    return step, (*arguments, TOKENS)


def decode(model):
    def step(params, cache, tokens, slots):
        output = model.decode(params, tokens, cache, slots=slots)
        return output.logits, output.cache

    return step, (ROWS, ROWS)


def prefill(model):
    def step(params, cache, tokens, slots, num_tokens):
        output = model.prefill(params, tokens, cache, slots=slots, num_tokens=num_tokens, mode=ForwardMode.EXTEND)
        return output.logits, output.cache

    return step, (TOKENS, ROWS, ROWS)


def compiled(model, step, arguments, donate=True):
    jitted = jax.jit(step, donate_argnums=1 if donate else ())
    lowered = jitted.lower(model.abstract_params(), abstract_cache(model), *arguments)
    # Buffers are assigned before machine code is made, and nobody runs it: no need to make it well.
    return lowered.compile(compiler_options={"xla_backend_optimization_level": 0})


def rewritten(program, model) -> list[str]:
    """Instructions whose result has a pool's shape and that do more than write a part of it."""
    shapes = {
        str(list(leaf.shape)).replace(" ", "") for leaf in jax.tree.leaves(abstract_cache(model)) if leaf.ndim > 2
    }
    found = re.findall(r"= \w+(\[[\d,]+\])\S* ([\w-]+)\(", program.as_text())
    assert len(found) > 100, "the compiler's text has another form than this test reads"
    return [f"{operation} {shape}" for shape, operation in found if shape in shapes and operation not in IN_PLACE]


def allowed_temporaries(model) -> int:
    """Bytes of what a step works on: attention's blocks and scores, the record twice over, states, activations."""
    config, spec = model.config, model.backend.pool_spec
    block = B * 256 * (3 * 2 * spec.kv_heads * spec.kv_head_dim + 2 * T * config.num_attention_heads) * 4
    record = B * T * (spec.ssm_bytes() + spec.conv_bytes())
    widths = config.vocab_size + config.recurrent.conv_channels + 2 * config.shared_intermediate_size
    activations = B * T * 4 * 8 * widths
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(model.abstract_params()))
    return block + 2 * record + activations + weights


def assert_in_place(program, model):
    cache = abstract_cache(model)
    kept = dataclasses.replace(cache, mamba=cache.mamba.replace(constants=None))  # a few numbers, new after each step
    pools = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept)]
    memory = program.memory_analysis()
    assert rewritten(program, model) == []
    assert memory.alias_size_in_bytes == sum(pools)
    assert memory.temp_size_in_bytes < allowed_temporaries(model) < min(pools[:2]) / 4


def tracked(model):
    return verify_and_commit(model, track=True)


STEPS = {
    "decode": (decode, DENSE, {}),
    "decode of rotary attention and experts": (decode, MOE, {}),
    "tracked verify": (tracked, DENSE, {}),
    "replayed tracked verify": (tracked, DENSE, {"strategy": CommitStrategy.REPLAY}),
    "tracked tree": (tree, DENSE, {}),
    "replayed tracked tree, attention last": (tree, MOE, {"strategy": CommitStrategy.REPLAY}),
    "chunked verify": (verify_and_commit, DENSE, {"speculative_mode": SpeculativeMode.PREFILL}),
    "prefill": (prefill, DENSE, {}),
    **{f"verify of {name} layers": (verify_and_commit, config, {}) for name, config in MADE_UP.items()},
}


@pytest.mark.parametrize("name", list(STEPS))
def test_a_step_allocates_its_window_only(name):
    make, config, options = STEPS[name]
    model = HybridModel.create(config, **options)
    assert_in_place(compiled(model, *make(model)), model)


def test_the_check_sees_a_copy_a_rewrite_and_a_temporary():
    model = HybridModel.create(DENSE)
    step, arguments = decode(model)
    kept = compiled(model, step, arguments, donate=False)
    assert {name.split()[0] for name in rewritten(kept, model)} == {"copy"}
    assert len(rewritten(kept, model)) == 4, "ssm, conv, keys and values"

    def rewrites(params, cache, tokens, slots):
        logits, new = step(params, cache, tokens, slots)
        kv = jax.tree.map(lambda new, old: jnp.where(slots[0] >= 0, new, old), new.kv, cache.kv)
        conv = new.mamba.conv * jnp.where(slots[0] >= 0, 1.0, 2.0)
        return logits, dataclasses.replace(new, kv=kv, mamba=new.mamba.replace(conv=conv))

    program = compiled(model, rewrites, arguments)
    operations = {name.split()[0] for name in rewritten(program, model)}
    assert {"select", "multiply"} <= operations
    assert program.memory_analysis().temp_size_in_bytes > allowed_temporaries(model)
