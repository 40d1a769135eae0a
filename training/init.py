"""Initial weights, with an induction head in place.

Trained from random weights on a few million tokens this model never learns to copy: nothing supplies the previous
token as an attention key, and without it no gradient points there. So the Mamba layer below the attention starts as a
delay line, and the attention starts by matching against it:

- one residual channel is constant, and the embedding stays out of two subspaces, U1 and U2;
- in that Mamba layer channels come in pairs +p, -p of a projection P of the token; their convolution takes the t-1
  tap (or t-2), their gate reads the constant, their dt is tiny. silu(a) - silu(-a) = a, so the output projection
  writes P of token t-1 into U1, and P of token t-2 into U2, unchanged;
- the first key head reads U1 and its queries read P: "where did the token before equal this one". The second reads
  U1 and U2 and its queries P and U1: the same for the last two tokens. Values carry the token found to the residual.
"""

import jax
import numpy as np

from training.model import Params, TinyConfig

GATE = 2.0  # what the delay line's gates see of the constant channel
CONSTANT = 1.0  # value of the constant channel in the residual stream
MATCH_GAIN = 1.4  # scale of the matching queries and keys
COPY_GAIN = 1.0  # scale at which attention writes the token it found


def initial_params(config: TinyConfig, seed: int) -> Params:
    """Random weights for every layer, then the delay line and the matching attention written over their part."""
    rng = np.random.default_rng(seed)
    params = {"model.norm.weight": np.ones(config.hidden_size)}
    basis = np.linalg.qr(rng.standard_normal((config.hidden_size - 1, config.hidden_size - 1)))[0]
    basis = np.concatenate([np.zeros((1, config.hidden_size - 1)), basis])  # columns avoid the constant channel 0
    size = config.head_size
    one_back, two_back = basis[:, :size], basis[:, size : size + size // 2]
    content = basis[:, size + size // 2 :]

    coordinates = rng.standard_normal((config.vocab_size, content.shape[1]))
    embedding = coordinates @ content.T * np.sqrt(config.hidden_size / content.shape[1])
    embedding[:, 0] = CONSTANT
    params["model.embed_tokens.weight"] = embedding / config.embedding_multiplier

    for i, kind in enumerate(config.layer_types):
        layer = f"model.layers.{i}"
        params[f"{layer}.input_layernorm.weight"] = np.ones(config.hidden_size)
        params[f"{layer}.post_attention_layernorm.weight"] = np.ones(config.hidden_size)
        params |= _random_mlp(rng, f"{layer}.shared_mlp", config)
        mixer = _random_mamba(rng, f"{layer}.mamba", config) if kind == "mamba" else {}
        params |= mixer or _random_attention(rng, f"{layer}.self_attn", config)

    attention = config.layer_types.index("attention")
    probe = content[:, :size]
    _write_delay_line(params, f"model.layers.{attention - 1}.mamba", config, probe, one_back, two_back)
    _write_matching(params, f"model.layers.{attention}.self_attn", config, content, one_back, two_back)
    return {name: jax.numpy.asarray(value, jax.numpy.float32) for name, value in params.items()}


def _linear(rng, outputs: int, inputs: int, gain: float = 1.0) -> np.ndarray:
    return rng.standard_normal((outputs, inputs)) * gain / np.sqrt(inputs)


def _random_mlp(rng, prefix: str, config: TinyConfig) -> dict:
    width = config.shared_intermediate_size
    return {
        f"{prefix}.input_linear.weight": _linear(rng, 2 * width, config.hidden_size),
        f"{prefix}.output_linear.weight": _linear(rng, config.hidden_size, width, 0.3),
    }


def _random_attention(rng, prefix: str, config: TinyConfig) -> dict:
    hidden = config.hidden_size
    return {
        f"{prefix}.q_proj.weight": _linear(rng, hidden, hidden),
        f"{prefix}.k_proj.weight": _linear(rng, config.key_value_size, hidden),
        f"{prefix}.v_proj.weight": _linear(rng, config.key_value_size, hidden),
        f"{prefix}.o_proj.weight": _linear(rng, hidden, hidden, 0.3),
    }


def _random_mamba(rng, prefix: str, config: TinyConfig) -> dict:
    heads, inner = config.mamba_n_heads, config.inner_size
    dt = np.exp(np.linspace(np.log(0.003), np.log(0.2), heads))
    return {
        f"{prefix}.in_proj.weight": _linear(rng, inner + config.conv_size + heads, config.hidden_size),
        f"{prefix}.conv1d.weight": _linear(rng, config.conv_size, config.mamba_d_conv)[:, None],
        f"{prefix}.conv1d.bias": np.zeros(config.conv_size),
        f"{prefix}.dt_bias": dt + np.log(-np.expm1(-dt)),  # the inverse of softplus
        f"{prefix}.A_log": np.log(np.linspace(1.0, 4.0, heads)),
        f"{prefix}.D": np.ones(heads),
        f"{prefix}.norm.weight": np.ones(inner),
        f"{prefix}.out_proj.weight": _linear(rng, config.hidden_size, inner, 0.3),
    }


def _write_delay_line(params: dict, prefix: str, config: TinyConfig, probe, one_back, two_back) -> None:
    inner, width = config.inner_size, config.mamba_d_conv
    signed = np.concatenate([probe, probe[:, : two_back.shape[1]]], axis=1)
    targets = np.concatenate([one_back, two_back], axis=1)
    taps = [width - 2] * one_back.shape[1] + [width - 3] * two_back.shape[1]
    for pair, tap in enumerate(taps):
        for channel, sign in ((2 * pair, 1.0), (2 * pair + 1, -1.0)):
            params[f"{prefix}.in_proj.weight"][channel] = 0.0
            params[f"{prefix}.in_proj.weight"][channel, 0] = GATE / CONSTANT
            params[f"{prefix}.in_proj.weight"][inner + channel] = sign * signed[:, pair]
            params[f"{prefix}.conv1d.weight"][channel] = np.arange(width) == tap
            params[f"{prefix}.out_proj.weight"][:, channel] = sign * 0.5 * targets[:, pair] / config.residual_multiplier
    heads = 2 * len(taps) // config.mamba_d_head
    dt_rows = inner + config.conv_size
    params[f"{prefix}.in_proj.weight"][dt_rows : dt_rows + heads] = 0.0
    params[f"{prefix}.dt_bias"][:heads] = -6.0
    params[f"{prefix}.A_log"][:heads] = np.log(16.0)


def _write_matching(params: dict, prefix: str, config: TinyConfig, content, one_back, two_back) -> None:
    size, half = config.head_size, config.head_size // 2
    queries_per_key = config.num_attention_heads // config.num_key_value_heads
    probe = content[:, :size]
    queries = (probe, np.concatenate([probe[:, :half], one_back[:, :half]], axis=1))
    keys = (one_back, np.concatenate([one_back[:, :half], two_back], axis=1))
    for head, (query, key) in enumerate(zip(queries, keys, strict=True)):
        rows = slice(head * size, (head + 1) * size)
        value = content[:, rows]
        params[f"{prefix}.k_proj.weight"][rows] = MATCH_GAIN * key.T
        params[f"{prefix}.v_proj.weight"][rows] = value.T
        for group in range(queries_per_key):
            first = (head * queries_per_key + group) * size
            params[f"{prefix}.q_proj.weight"][first : first + size] = MATCH_GAIN * query.T
            params[f"{prefix}.o_proj.weight"][:, first : first + size] = (
                COPY_GAIN / queries_per_key * value / config.residual_multiplier
            )
