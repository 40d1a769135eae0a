"""mamba2, such as Mamba-Codestral: Mamba-2 layers and nothing else."""

import math
from collections.abc import Iterator

from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.models.families import keys, pieces
from mamba_spec_jax.models.families.base import Family, Weight
from mamba_spec_jax.models.hf_config import HFConfig
from mamba_spec_jax.models.recurrent_config import Mamba2Config


def read_config(hf: HFConfig) -> HybridConfig:
    """The model of a `config.json`; absent keys have transformers' defaults."""
    hidden_size = hf.integer("hidden_size", 4096, minimum=1)
    heads, head_dim = hf.integer("num_heads", 128, minimum=1), hf.integer("head_dim", 64, minimum=1)
    inner = hf.integer("expand", 2, minimum=1) * hidden_size
    if heads * head_dim != inner:
        raise hf.refusal("num_heads", f"expand * hidden_size / head_dim = {inner} / {head_dim}")
    bias = hf.flag("use_bias", False)
    return HybridConfig(
        model_type="mamba2",
        vocab_size=hf.integer("vocab_size", 32768, minimum=1),
        hidden_size=hidden_size,
        layer_types=("mamba",) * hf.integer("num_hidden_layers", 64, minimum=1),
        separate_feed_forward=True,
        recurrent=Mamba2Config(
            heads=heads,
            head_dim=head_dim,
            state=hf.integer("state_size", 128, minimum=1),
            groups=hf.integer("n_groups", 8, minimum=1),
            conv_width=hf.integer("conv_kernel", 4, minimum=2),
            conv_bias=hf.flag("use_conv_bias", True),
            proj_bias=bias,
            out_bias=bias,
            chunk_size=hf.integer("chunk_size", 256, minimum=1),
            time_step_limit=hf.limits("time_step_limit", (0.0, math.inf)),
        ),
        norm_eps=hf.number("layer_norm_epsilon", 1e-5, positive=True),
        residual_in_fp32=hf.flag("residual_in_fp32", True),
        tie_embeddings=hf.flag("tie_word_embeddings", False),
        eos_token_ids=hf.token_ids("eos_token_id", 2),
    )


def weights(config: HybridConfig) -> Iterator[Weight]:
    """Every weight of a mamba2 checkpoint."""
    yield Weight("backbone.embeddings.weight", "embed_tokens.embedding")
    for i in range(len(config.layer_types)):
        stored, ours = f"backbone.layers.{i}", f"layers.{i}"
        yield Weight(f"{stored}.norm.weight", f"{ours}.input_norm.weight")
        yield from pieces.mamba(f"{stored}.mixer", f"{ours}.mixer", config)
    yield Weight("backbone.norm_f.weight", "norm.weight")
    yield from pieces.output_head("backbone.embeddings.weight", config)


FAMILY = Family(
    read_config=read_config,
    weights=weights,
    without_effect=keys.UNROTATED
    | {"is_causal", "time_step_floor", "time_step_max", "time_step_min", "time_step_rank"},
    # transformers 5.24 rescales the loaded weights of this family too, not only those that it draws.
    only={"hidden_act": keys.SILU, "layer_types": (None,), "rescale_prenorm_residual": (False,)},
    base="backbone.",
    renames=(("backbone.embedding.", "backbone.embeddings."),),
)
