"""Every key of transformers' configuration classes is read, known to change no logits, or may have one value only."""

import json
from pathlib import Path

import pytest

from mamba_spec_jax.models.families import FAMILIES, keys
from mamba_spec_jax.models.hf_config import HFConfig
from tests.golden.family_cases import FAMILY_CASES
from tests.mamba_spec_jax.models.test_family_configs import SPELLINGS

KNOWN = json.loads((Path(__file__).parents[2] / "golden" / "config_keys.json").read_text())
EFFECTS = json.loads((Path(__file__).parents[2] / "golden" / "config_effects.json").read_text())
# A vision model's file has its language model's keys in a part of it; these are the keys beside that part.
OUTER = ("qwen3_5", "qwen3_5_moe")
# Configurations that reach what the models of the goldens and the spellings leave out.
FURTHER = {"granitemoehybrid": {"position_embedding_type": "rope"}, "zamba2": {"use_mem_rope": True}}
SCALED = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}


class Recorded(dict):
    """A parsed file that remembers which keys it was asked for."""

    def __init__(self, values, asked):
        super().__init__(values)
        self.asked = asked

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)


def known_keys(model_type):
    of_class, base = KNOWN[model_type], KNOWN["base"]
    found = {*of_class["fields"], *of_class["aliases"], *of_class["aliases"].values()}
    found.update(*(of_class[part] for part in ("legacy", "derived", "properties", "asked_by_the_model")))
    return found.union(base["fields"], base["legacy"], base["generation"], base["asked_by_the_mask"])


def keys_read(model_type):
    configs = [{}, SCALED | FURTHER.get(model_type, {})]
    configs += [case.config for case in FAMILY_CASES if case.family == model_type]
    configs += [values for family, values, *_ in SPELLINGS if family == model_type]
    asked: set[str] = set()
    for values in configs:
        FAMILIES[model_type].config(HFConfig(Recorded({"model_type": model_type} | values, asked)))
    return asked


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name not in OUTER])
def test_every_known_key_is_of_one_kind(model_type):
    family, known = FAMILIES[model_type], known_keys(model_type)
    only = set(keys.ONLY) - family.without_effect | set(family.only)
    without_effect = keys.WITHOUT_EFFECT | family.without_effect
    read = keys_read(model_type) - only
    assert known - read - without_effect - only == set(), "forgotten"
    assert read & without_effect == set()
    assert only & without_effect == set()
    assert family.without_effect - known == set(), "transformers does not know them"
    print(f"{model_type}: {len(known & read)} read, {len(known & without_effect)} without effect, {len(only)} fixed")


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name not in OUTER])
def test_without_effect_is_what_transformers_shows(model_type):
    """`config_sweep.py` tried other values of each key: its logits had the same bits, or transformers refused them."""
    without_effect = keys.WITHOUT_EFFECT | FAMILIES[model_type].without_effect
    assert [key for key in without_effect if EFFECTS[model_type].get(key) == "effect"] == []


@pytest.mark.parametrize("model_type", OUTER)
def test_keys_beside_the_text_part(model_type):
    asked: set[str] = set()
    FAMILIES[model_type].config(HFConfig(Recorded({"model_type": model_type, "text_config": {}}, asked)))
    assert asked == {"text_config", "tie_word_embeddings"}
