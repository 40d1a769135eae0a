"""Which keys of a draft head's `config.json` are read, which change nothing, and which must hold one value.

A key of none of these kinds may change what the head computes, so that its drafts would be accepted less and less with
nothing to say why; it is refused.
"""

from collections.abc import Mapping
from typing import Any

from mamba_spec_jax.models.hf_config import HFConfig

READ = frozenset({
    "architectures", "hidden_size", "target_hidden_size", "vocab_size", "draft_vocab_size", "intermediate_size",
    "num_hidden_layers", "num_target_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor",
    "max_position_embeddings", "original_max_position_embeddings", "layer_types", "sliding_window",
    "use_sliding_window", "max_window_layers", "is_causal", "norm_before_residual", "eagle_config", "dflash_config",
    "eagle_aux_hidden_state_layer_ids", "target_layer_ids", "mask_token_id", "block_size", "input_embedding_scale",
    "output_multiplier",
})  # fmt: skip
# Of training, of generation with other software, and of the file itself.
WITHOUT_EFFECT = frozenset({
    "model_type", "auto_map", "transformers_version", "dtype", "torch_dtype", "tokenizer_class", "_name_or_path",
    "_attn_implementation_autoset", "attn_implementation", "initializer_range", "attention_dropout", "hidden_dropout",
    "resid_pdrop", "embd_pdrop", "pretraining_tp", "use_cache", "output_attentions", "output_hidden_states",
    "return_dict", "torchscript", "gradient_checkpointing", "is_decoder", "id2label", "label2id",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id",
    "model_max_length", "draft_arch", "tie_word_embeddings", "target_model_type", "target_model_name_or_path",
    "speculators_version", "speculators_model_type", "eagle_decoder_type", "num_aux_hidden_states",
})  # fmt: skip
# Null and an absent key mean the first value.
ONE_VALUE: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "qkv_bias": (False,),
    "mlp_bias": (False,),
    "norm_before_fc": (False,),
    "fc_norm": (False,),
    "fc_layernorm": (False,),
    "norm_output": (False,),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "has_lm_head": (True,),
    "parallel_draft_step": (1,),
    "sliding_window_non_causal": (False,),
    "final_logit_softcapping": (0, 0.0),
    "quantization_config": ({},),
}
# What a nested object may hold.
NESTED: Mapping[str, frozenset[str]] = {
    "dflash_config": frozenset({
        "target_layer_ids", "mask_token_id", "block_size", "passes", "input_embedding_scale", "output_multiplier",
    }),
    "eagle_config": frozenset({"eagle_aux_hidden_state_layer_ids"}),
}  # fmt: skip


def check_keys(hf: HFConfig) -> None:
    """Raises ValueError naming a key of a head's `config.json` that is not honoured."""
    _check(hf, READ)
    for name, read in NESTED.items():
        _check(hf.nested(name), read)


def _check(hf: HFConfig, read: frozenset[str]) -> None:
    for key in hf.values:
        if key in ONE_VALUE:
            if hf.has(key):
                hf.choice(key, None, ONE_VALUE[key])
        elif key not in read and key not in WITHOUT_EFFECT and hf.has(key):
            raise hf.refusal(key, "no such key, or null: what it means for a draft head is unknown here")
