"""The forward pass that is differentiated in training: a whole sequence at once, no caches, plain JAX.

It computes what transformers' granitemoehybrid computes for a dense, NoPE model with one group, on a flat dictionary
of parameters with the names of the Hugging Face state dict, so that exporting a checkpoint renames nothing. Letters:
B batch, T tokens, D hidden, H heads, P head dim, N state, C conv channels, W conv width, Q chunk, V vocabulary.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

Params = dict[str, jax.Array]


@dataclass(frozen=True)
class TinyConfig:
    """The sizes and multipliers of the bundled model, under the names config.json gives them."""

    vocab_size: int = 1024
    hidden_size: int = 256
    layer_types: tuple[str, ...] = ("mamba", "mamba", "attention", "mamba")
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    shared_intermediate_size: int = 512
    mamba_expand: int = 1
    mamba_n_heads: int = 4
    mamba_d_head: int = 64
    mamba_d_state: int = 32
    mamba_d_conv: int = 4
    mamba_chunk_size: int = 64
    embedding_multiplier: float = 8.0
    residual_multiplier: float = 0.5
    attention_multiplier: float = 0.125
    logits_scaling: float = 4.0
    rms_norm_eps: float = 1e-5

    @property
    def inner_size(self) -> int:
        return self.mamba_n_heads * self.mamba_d_head

    @property
    def conv_size(self) -> int:
        return self.inner_size + 2 * self.mamba_d_state

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def key_value_size(self) -> int:
        return self.num_key_value_heads * self.head_size

    @classmethod
    def load(cls, folder: Path) -> "TinyConfig":
        """Reads the fields above from the config.json of `folder`."""
        stored = json.loads((folder / "config.json").read_text())
        return cls(**{name: _hashable(stored[name]) for name in asdict(cls())})


def _hashable(value):
    return tuple(value) if isinstance(value, list) else value


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def causal_conv(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    """Depthwise causal convolution of x `[B, T, C]` by weight `[C, 1, W]`.

    A sum of W shifted products: forward and backward take a twentieth of `lax.conv`'s time on a CPU.
    """
    tokens, width = x.shape[1], weight.shape[-1]
    padded = jnp.pad(x, ((0, 0), (width - 1, 0), (0, 0)))
    return bias + sum(padded[:, k : k + tokens] * weight[:, 0, k] for k in range(width))


def chunked_ssd(x, dt, A, B, C, chunk: int) -> jax.Array:
    """Mamba-2's recurrence h_t = exp(dt_t A) h_(t-1) + dt_t B_t x_t, y_t = C_t h_t in chunks of Q tokens.

    x `[B, T, H, P]`, dt `[B, T, H]`, A `[H]`, B and C `[B, T, N]` (one group); T is a multiple of Q. Within a chunk the
    sum is a masked matrix product, between chunks the state is carried (Dao and Gu 2024, section 6).
    """
    batch, tokens, heads, head_dim = x.shape
    if tokens % chunk:
        raise ValueError(f"chunked_ssd: {tokens} tokens, expected a multiple of the chunk, {chunk}")
    x, dt, B, C = (v.reshape(batch, tokens // chunk, chunk, *v.shape[2:]) for v in (x, dt, B, C))
    decay = jnp.cumsum(dt * A, axis=2)  # [B, c, Q, H], the log of the decay since the chunk's start
    by_head = jnp.moveaxis(decay, 3, 2)  # [B, c, H, Q]
    causal = jnp.tril(jnp.ones((chunk, chunk), bool))
    # Masked before the exponential: above the diagonal it would overflow and make the gradient NaN.
    between = jnp.exp(jnp.where(causal, by_head[..., :, None] - by_head[..., None, :], -jnp.inf))
    weights = jnp.einsum("bcin,bcjn->bcij", C, B)[:, :, None] * between
    scaled = x * dt[..., None]
    within = jnp.einsum("bchij,bcjhp->bcihp", weights, scaled)

    to_end = jnp.exp(decay[:, :, -1:] - decay)
    added = jnp.einsum("bcjn,bcjhp->cbhpn", B, scaled * to_end[..., None])
    whole = jnp.moveaxis(jnp.exp(decay[:, :, -1]), 1, 0)[..., None, None]  # [c, B, H, 1, 1]
    start = jnp.zeros((batch, heads, head_dim, B.shape[-1]), x.dtype)
    _, carried = jax.lax.scan(lambda h, step: (h * step[0] + step[1], h), start, (whole, added))
    across = jnp.einsum("bcin,cbhpn->bcihp", C, carried) * jnp.exp(decay)[..., None]
    return (within + across).reshape(batch, tokens, heads, head_dim)


def mamba_mixer(params: Params, prefix: str, x: jax.Array, config: TinyConfig) -> jax.Array:
    batch, tokens, _ = x.shape
    inner, state = config.inner_size, config.mamba_d_state
    projected = x @ params[f"{prefix}.in_proj.weight"].T
    gate, mixed, dt = jnp.split(projected, (inner, inner + config.conv_size), axis=-1)
    mixed = jax.nn.silu(causal_conv(mixed, params[f"{prefix}.conv1d.weight"], params[f"{prefix}.conv1d.bias"]))
    values, B, C = jnp.split(mixed, (inner, inner + state), axis=-1)
    values = values.reshape(batch, tokens, config.mamba_n_heads, config.mamba_d_head)
    dt = jax.nn.softplus(dt + params[f"{prefix}.dt_bias"])
    y = chunked_ssd(values, dt, -jnp.exp(params[f"{prefix}.A_log"]), B, C, config.mamba_chunk_size)
    y = (y + values * params[f"{prefix}.D"][:, None]).reshape(batch, tokens, inner)
    y = rms_norm(y * jax.nn.silu(gate), params[f"{prefix}.norm.weight"], config.rms_norm_eps)
    return y @ params[f"{prefix}.out_proj.weight"].T


def attention_mixer(params: Params, prefix: str, x: jax.Array, config: TinyConfig) -> jax.Array:
    batch, tokens, _ = x.shape
    kv_heads, size = config.num_key_value_heads, config.head_size
    q, k, v = (x @ params[f"{prefix}.{name}_proj.weight"].T for name in "qkv")
    q = q.reshape(batch, tokens, kv_heads, -1, size)
    k, v = (y.reshape(batch, tokens, kv_heads, size) for y in (k, v))
    scores = jnp.einsum("bikgd,bjkd->bkgij", q, k) * config.attention_multiplier
    scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("bkgij,bjkd->bikgd", jax.nn.softmax(scores, axis=-1), v)
    return mixed.reshape(batch, tokens, -1) @ params[f"{prefix}.o_proj.weight"].T


def shared_mlp(params: Params, prefix: str, x: jax.Array) -> jax.Array:
    gate, up = jnp.split(x @ params[f"{prefix}.input_linear.weight"].T, 2, axis=-1)
    return (jax.nn.silu(gate) * up) @ params[f"{prefix}.output_linear.weight"].T


def hidden_states(params: Params, tokens: jax.Array, config: TinyConfig) -> list[jax.Array]:
    """The output `[B, T, D]` of every layer for tokens `[B, T]`; T is a multiple of the chunk."""
    x = params["model.embed_tokens.weight"][tokens] * config.embedding_multiplier
    outputs = []
    for i, kind in enumerate(config.layer_types):
        layer = f"model.layers.{i}"
        normed = rms_norm(x, params[f"{layer}.input_layernorm.weight"], config.rms_norm_eps)
        if kind == "mamba":
            x = x + mamba_mixer(params, f"{layer}.mamba", normed, config) * config.residual_multiplier
        else:
            x = x + attention_mixer(params, f"{layer}.self_attn", normed, config) * config.residual_multiplier
        normed = rms_norm(x, params[f"{layer}.post_attention_layernorm.weight"], config.rms_norm_eps)
        x = x + shared_mlp(params, f"{layer}.shared_mlp", normed) * config.residual_multiplier
        outputs.append(x)
    return outputs


def logits_of(params: Params, x: jax.Array, config: TinyConfig) -> jax.Array:
    """Logits `[..., V]` from the last layer's output."""
    x = rms_norm(x, params["model.norm.weight"], config.rms_norm_eps)
    return x @ params["model.embed_tokens.weight"].T / config.logits_scaling


def forward(params: Params, tokens: jax.Array, config: TinyConfig) -> jax.Array:
    """Logits `[B, T, V]` for tokens `[B, T]`; T is a multiple of the chunk."""
    return logits_of(params, hidden_states(params, tokens, config)[-1], config)


def token_losses(params: Params, rows: jax.Array, config: TinyConfig) -> jax.Array:
    """Cross-entropy in nats `[B, T]` of each next token in rows `[B, T + 1]`."""
    logits = forward(params, rows[:, :-1], config)
    picked = jnp.take_along_axis(logits, rows[:, 1:, None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked
