"""The families of checkpoints that can be loaded, by `model_type`; a new one is a file here and a line below."""

from collections.abc import Mapping
from typing import Any

from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.models.families import (
    bamba,
    falcon_h1,
    granitemoehybrid,
    jamba,
    kimi_linear,
    lfm2,
    mamba2,
    nemotron_h,
    olmo_hybrid,
    qwen3_5,
    qwen3_next,
    zamba2,
)
from mamba_spec_jax.models.families.base import Family
from mamba_spec_jax.models.hf_config import HFConfig

FAMILIES = {
    "bamba": bamba.FAMILY,
    "falcon_h1": falcon_h1.FAMILY,
    "granitemoehybrid": granitemoehybrid.FAMILY,
    "jamba": jamba.FAMILY,
    "kimi_linear": kimi_linear.FAMILY,
    "lfm2": lfm2.FAMILY,
    "mamba2": mamba2.FAMILY,
    "nemotron_h": nemotron_h.FAMILY,
    "olmo_hybrid": olmo_hybrid.FAMILY,
    "qwen3_5": qwen3_5.FAMILY,
    "qwen3_5_moe": qwen3_5.MOE_FAMILY,
    "qwen3_5_moe_text": qwen3_5.MOE_FAMILY,
    "qwen3_5_text": qwen3_5.FAMILY,
    "qwen3_next": qwen3_next.FAMILY,
    "zamba2": zamba2.FAMILY,
}


def family_of(hf: HFConfig) -> Family:
    """The family that a `config.json` belongs to; ValueError if it is not one of `FAMILIES`."""
    return FAMILIES[hf.choice("model_type", None, FAMILIES)]


def config_from_hf(values: Mapping[str, Any]) -> HybridConfig:
    """The model that a parsed `config.json` describes; ValueError naming the key that cannot be honoured."""
    hf = HFConfig(values)
    return family_of(hf).config(hf)
