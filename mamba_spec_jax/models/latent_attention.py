"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1) without positions, as in Kimi Linear."""

import functools

import jax.numpy as jnp
from flax import nnx

from mamba_spec_jax.array_types import Hidden
from mamba_spec_jax.attention.base import AttentionBackend, AttentionInputs, ForwardBatch
from mamba_spec_jax.cache.pools import HybridCache
from mamba_spec_jax.cache.records import VerifyRecord
from mamba_spec_jax.layers.norms import RMSNorm
from mamba_spec_jax.layers.projections import Linear
from mamba_spec_jax.models.config import HybridConfig, LatentDims
from mamba_spec_jax.models.mixers import Mixed
from mamba_spec_jax.modes import DTypePolicy

_NORM_EPS = 1e-6  # of the latent norms, whatever the model's is


class LatentAttention(nnx.Module):
    """Attention in the latent space: all heads read one key a token, the latent and a part that is shared as it is.

    The projection from the latent to keys is applied to the queries, that to values after attention, so that the
    cache holds `rank + shared` numbers a token, as keys and once more as values, whatever the number of heads.
    """

    def __init__(self, config: HybridConfig, policy: DTypePolicy, rngs: nnx.Rngs):
        dims: LatentDims = config.latent  # type: ignore[assignment]  # the layer is made only if there is one
        self.dims = dims
        self.heads = config.num_attention_heads
        H, D = self.heads, config.hidden_size
        linear = functools.partial(Linear, dtype=policy.activations, param_dtype=policy.params, rngs=rngs)
        norm = functools.partial(RMSNorm, eps=_NORM_EPS, param_dtype=policy.params)
        query_size = H * (dims.key + dims.shared)
        self.q_a_proj = linear(D, dims.query_rank, use_bias=config.attention_bias) if dims.query_rank else None
        self.q_a_norm = norm(dims.query_rank) if dims.query_rank else None
        self.q_proj = linear(dims.query_rank or D, query_size, use_bias=False)
        self.kv_a_proj = linear(D, dims.rank + dims.shared, use_bias=config.attention_bias)
        self.kv_a_norm = norm(dims.rank)
        self.kv_b_proj = linear(dims.rank, H * (dims.key + dims.value), use_bias=False)
        self.o_proj = linear(H * dims.value, D, use_bias=config.attention_bias)

    def __call__(
        self, layer_id: int, x: Hidden, backend: AttentionBackend, cache: HybridCache, record: VerifyRecord | None,
        batch: ForwardBatch,
    ) -> Mixed:  # fmt: skip
        dims = self.dims
        latent, shared = jnp.split(self.kv_a_proj(x), [dims.rank], axis=-1)
        key = jnp.concatenate([self.kv_a_norm(latent), shared], axis=-1)[:, :, None]
        if self.q_a_proj is not None and self.q_a_norm is not None:
            x = self.q_a_norm(self.q_a_proj(x))
        query = self.q_proj(x).reshape(*x.shape[:2], self.heads, -1)
        expand = self.kv_b_proj.kernel[...].astype(x.dtype).reshape(dims.rank, self.heads, -1)
        to_key, to_value = jnp.split(expand, [dims.key], axis=-1)
        query = jnp.concatenate(
            [jnp.einsum("bthk,rhk->bthr", query[..., : dims.key], to_key), query[..., dims.key :]], axis=-1
        )
        mixed, cache, record = backend.forward(layer_id, AttentionInputs(query, key, key), cache, record, batch)
        values = jnp.einsum("bthr,rhv->bthv", mixed[..., : dims.rank], to_value)
        return self.o_proj(values.reshape(*x.shape[:2], -1)), cache, record
