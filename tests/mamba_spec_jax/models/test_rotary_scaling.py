"""Scaled rotary embeddings against transformers: frequencies of every kind and family, logits, and what is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from mamba_spec_jax.cache.records import Draft
from mamba_spec_jax.layers.rotary_scaling import plain_frequencies
from mamba_spec_jax.loaded import load
from mamba_spec_jax.models.families import config_from_hf
from mamba_spec_jax.models.hybrid_lm import HybridModel
from tests.golden.weights import digest, draw_all

from .goldens import GOLDEN, QUICKLY, assert_close

ROTARY = GOLDEN / "rotary"
TABLE = json.loads((ROTARY / "frequencies.json").read_text())
CASES = sorted(path.stem for path in ROTARY.glob("*.npz"))
KINDS = sorted(TABLE["lfm2"])
BY_LENGTH = ("dynamic", "longrope")


def scaled(kind, length):
    """Whether texts of that length have other frequencies than the original ones."""
    return kind.startswith(BY_LENGTH) and length > 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", sorted(TABLE))
def test_frequencies_are_those_of_transformers(family, kind):
    entry = TABLE[family][kind]
    config = config_from_hf(entry["config"])
    dim = config.rotary_dim or config.head_dim
    for length in (8, 20):
        expected, scaling = entry[str(length)], config.rope_scaling
        if scaling is None:
            assert kind == "default"
            ours, magnitude = plain_frequencies(config.rope_theta, dim), 1.0
        else:
            scaling = scaling.for_length(length) if scaled(kind, length) else scaling
            ours, magnitude = scaling.frequencies(config.rope_theta, dim), scaling.magnitude
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, expected["frequencies"], rtol=3e-6)
        np.testing.assert_allclose(magnitude, expected["magnitude"], rtol=1e-6)


def test_every_kind_and_family_with_rotary_embeddings_is_here():
    assert {case.split("_")[-1] for case in CASES} == {
        "linear", "dynamic", "yarn", "llama3", "longrope", "proportional",
    }  # fmt: skip
    assert all(sorted(TABLE[family]) == KINDS for family in TABLE)
    assert len(TABLE) == 9


@pytest.mark.parametrize("name", CASES)
def test_logits_within_the_original_length_and_beyond(name, tmp_path):
    with np.load(ROTARY / f"{name}.npz") as arrays:
        golden = dict(arrays)
    config, seed = json.loads(str(golden["config"])), int(golden["seed"])
    weights = draw_all(json.loads(str(golden["shapes"])), seed, False, config["model_type"])
    assert digest(weights) == str(golden["weights_sha256"]), "run tests/golden/make_goldens.py rotary"
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "model.safetensors")
    short, long = golden["short"].shape[1], golden["long"].shape[1]
    by_length = name.endswith(BY_LENGTH)
    loaded = load(tmp_path, rotary_length=long if by_length else None)

    def logits(model, tokens):
        B, T = tokens.shape
        draft = Draft(jnp.asarray(tokens), jnp.full(B, T - 1, jnp.int32), jnp.arange(B, dtype=jnp.int32))
        verify = jax.jit(model.verify, compiler_options=QUICKLY)
        return verify(loaded.params, draft, model.init_cache(B, T)).logits

    ours = logits(loaded.model, golden["tokens"])
    assert_close(ours, golden["long"])
    if by_length:
        # Another length is another model of the same weights.
        model = HybridModel.create(config_from_hf(config))
        assert_close(logits(model, golden["tokens"][:, :short]), golden["short"])
        with pytest.raises(ValueError, match=r"a cache of 20 positions .* more than 8 tokens.*rotary_length=20"):
            model.init_cache(2, long)
        cache = loaded.model.init_cache(2, long)
        with pytest.raises(ValueError, match=r"a cache of 20 positions .* more than 8 tokens.*rotary_length=20"):
            model.decode(loaded.params, jnp.zeros(2, jnp.int32), cache, slots=jnp.arange(2))
    else:
        assert_close(ours[:, :short], golden["short"])


def test_a_length_without_effect_is_refused(tmp_path):
    config = TABLE["lfm2"]["linear"]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"rotated as any other by LinearScaling\(factor=2\.5\): leave rotary_length"):
        load(tmp_path, rotary_length=20)
    (tmp_path / "config.json").write_text(json.dumps(TABLE["lfm2"]["default"]["config"]))
    with pytest.raises(ValueError, match="has no rotary embedding that depends on a text's length: leave"):
        load(tmp_path, rotary_length=20)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_type": "su"}, "rope_type is 'su', expected one of default, linear, dynamic, yarn, llama3, longrope"),
        ({"type": "mrope"}, "type is 'mrope', expected one of default"),
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "linear", "factor": 2, "faktor": 3}, "faktor is 3, expected no such key"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention is .*, expected no such key"),
        ({"rope_type": "linear", "factor": 0}, "factor is 0, expected a positive"),
        ({"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, expected"),
        ({"rope_type": "yarn", "factor": 2, "truncate": 1}, "truncate is 1, expected true or false"),
        ({"rope_type": "yarn", "factor": 2, "rope_theta": 1}, "rope_theta is 1.0, expected more than 1"),
        (
            {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4},
            "high_freq_factor is 4, expected more than low_freq_factor",
        ),
        (
            {"rope_type": "longrope", "short_factor": [1.0]},
            "long_factor is None, expected a list of numbers",
        ),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 2},
            "long_factor has 2 numbers, expected 3: one a pair",
        ),
        ({"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": ["a"]}, "long_factor is .*numbers"),
    ],
)
@pytest.mark.parametrize("holder", ["rope_parameters", "rope_scaling"])
def test_refusals_name_the_key(values, message, holder):
    config = TABLE["lfm2"]["default"]["config"] | {"rope_parameters": None}
    with pytest.raises(ValueError, match=message):
        config_from_hf(config | {holder: values})


def test_the_original_length_beside_the_parameters_goes_first():
    values = {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 8}
    config = TABLE["lfm2"]["default"]["config"] | {"rope_parameters": values}
    assert config_from_hf(config).rope_scaling.original_max_position_embeddings == 8
    beside = config_from_hf(config | {"original_max_position_embeddings": 16})
    assert beside.rope_scaling.original_max_position_embeddings == 16
    del values["original_max_position_embeddings"]
    assert config_from_hf(config).rope_scaling.original_max_position_embeddings == 32  # max_position_embeddings
