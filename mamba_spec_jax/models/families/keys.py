"""What every family's `config.json` may hold: keys that change no logits, and keys that may have one value only.

Which keys there are is taken from the configuration classes of transformers 5.24, which `tests/golden/config_keys.json`
lists; a test requires that each of them is read by its family, or is listed here or in the family's file.
"""

from typing import Any

# Of every class. Dtype keys say how weights were saved: here the caller's `DTypePolicy` decides.
_COMMON = {
    "architectures",
    "attn_implementation",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "experts_implementation",
    "id2label",
    "ignore_keys_at_rope_validation",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
# Dropout and losses act in training alone; the rest is asked for by single classes and changes nothing there.
_TRAINING = {"attention_dropout", "output_router_logits", "router_aux_loss_coef"}
# Settings of generation in older files: `generation_config.json` has them today.
_GENERATION = {
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "suppress_tokens",
    "target_lookbehind",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
}
# Of models without rotary embedding.
UNROTATED = frozenset({"partial_rotary_factor", "rope_scaling", "rope_theta"})
WITHOUT_EFFECT = frozenset(_COMMON | _TRAINING | _GENERATION)

# The values that are computed here, the default first. `swish` is another name of silu.
ONLY: dict[str, tuple[Any, ...]] = {"is_causal": (True,), "per_layer_config": (None,)}
SILU = ("silu", "swish")
