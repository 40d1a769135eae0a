"""A hybrid model of your own in 60 lines: one Mamba-2 layer, one attention layer, and speculative decoding with both.

The class follows `mamba_spec_jax.SpeculativeModel`, so `generate`, `stream` and every drafter work with it.
Run it with `python examples/own_model.py`; it takes about 20 seconds on a CPU.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

import mamba_spec_jax as ms

HEADS, HEAD_DIM, STATE, WIDTH = 4, 8, 16, 4  # of the recurrence
SIZE = HEADS * HEAD_DIM  # of the hidden states, and of all heads together
MAMBA = ms.Mamba2(heads=HEADS, head_dim=HEAD_DIM, state=STATE, groups=1, conv_width=WIDTH)
C = MAMBA.conv_channels
POOLS = ms.PoolSpec(1, HEADS, HEAD_DIM, STATE, WIDTH, C, attention_layers=1, kv_heads=HEADS, kv_head_dim=HEAD_DIM)


@dataclasses.dataclass(frozen=True)
class OwnModel:
    """What is static about the model. Weights come in as `params`, and what it remembers as `cache`."""

    vocab_size: int = 64
    hidden_layers: ClassVar[tuple[int, ...]] = ()  # no drafter needs hidden states of this model
    backend: ClassVar = ms.HybridLinearAttnBackend(
        num_layers=2, full_attn_layers=(1,), full=ms.FullAttention(HEAD_DIM**-0.5), linear=MAMBA, pool_spec=POOLS
    )

    def init_cache(self, slots, max_len):
        return ms.HybridCache.create(POOLS, slots, max_len)

    def prefill(self, params, tokens, cache, *, slots, num_tokens):
        batch = ms.ForwardBatch.create(ms.ForwardMode.EXTEND, cache, slots, num_tokens, tokens.shape[1])
        logits, cache, _ = self._forward(params, tokens, cache, batch)
        real = jnp.where(slots < 0, cache.slots, slots)  # padding rows change nothing
        cache = dataclasses.replace(cache, lengths=cache.lengths.at[real].add(batch.num_tokens, mode="drop"))
        last = jnp.maximum(batch.num_tokens - 1, 0)
        return ms.ModelOutput(logits[jnp.arange(last.size), last], cache)

    def verify(self, params, draft, cache):
        mode, width = ms.ForwardMode.TARGET_VERIFY, draft.tokens.shape[1]
        batch = ms.ForwardBatch.create(mode, cache, draft.slots, draft.num_tokens, width, parents=draft.parents)
        return ms.ModelOutput(*self._forward(params, draft.tokens, cache, batch))

    def _forward(self, params, tokens, cache, batch):
        x = params["embed"][tokens]
        record = self.backend.init_record(batch)
        gate, mixed, dt = jnp.split(x @ params["into"], [SIZE, SIZE + C], axis=-1)
        inputs = ms.Mamba2Inputs(mixed, dt, params["mamba"])
        y, cache, record = self.backend.forward(0, inputs, cache, record, batch)
        x = x + (y.reshape(gate.shape) * jax.nn.silu(gate)) @ params["out"]
        heads = [part.reshape(*x.shape[:2], HEADS, HEAD_DIM) for part in jnp.split(x @ params["qkv"], 3, axis=-1)]
        y, cache, record = self.backend.forward(1, ms.AttentionInputs(*heads), cache, record, batch)
        return (x + y.reshape(x.shape)) @ params["embed"].T, cache, record


def init(key, vocab_size):
    """Random weights."""
    keys = jax.random.split(key, 5)
    widths = {"into": SIZE + C + HEADS, "out": SIZE, "qkv": 3 * SIZE}
    weights = {
        name: jax.random.normal(key, (SIZE, width)) / SIZE**0.5
        for key, (name, width) in zip(keys[:3], widths.items(), strict=True)
    }
    weights["embed"] = jax.random.normal(keys[3], (vocab_size, SIZE)) / SIZE**0.5
    conv = jax.random.normal(keys[4], (WIDTH, C)) / 2
    A_log = jnp.log(jnp.arange(1.0, HEADS + 1))
    return weights | {"mamba": ms.Mamba2Weights(conv, None, jnp.zeros(HEADS), A_log, jnp.ones(HEADS))}


def main():
    model = OwnModel()
    params = init(jax.random.key(0), model.vocab_size)
    prompts = [[7, 3, 11, 7, 3], [5, 60, 2]]
    fast = ms.generate(model, params, prompts, max_new=48, num_drafts=4)  # prompt lookup drafts
    plain = ms.generate(
        model, params, prompts, max_new=48, num_drafts=4, depth_limit=0
    )  # the same program without drafts
    print("identical to plain decoding:", fast.tokens == plain.tokens)
    print(f"{float(fast.statistics.mean_acceptance_length):.2f} tokens a pass")


if __name__ == "__main__":
    main()
