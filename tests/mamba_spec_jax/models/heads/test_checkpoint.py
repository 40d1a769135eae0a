"""Heads on disk: the published layouts, round trips, and what is refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import mamba_spec_jax as ms
from mamba_spec_jax.models.heads.checkpoint import load_head, save_head
from tests.mamba_spec_jax import tiny
from tests.mamba_spec_jax.heads import head_config, random_module

TARGET = ms.HybridModel.create(tiny.MOE)
PARAMS = tiny.random_params(TARGET)
ATTENTION = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
MLP = [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
NORMS = ["input_layernorm.weight", "post_attention_layernorm.weight"]
# The names of published checkpoints of both kinds.
EAGLE3 = {
    "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", "midlayer.hidden_norm.weight",
    *(f"midlayer.{name}" for name in (*ATTENTION, *MLP, *NORMS)),
}  # fmt: skip
HEAD_NORMS = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
DFLASH = {
    "fc.weight", "norm.weight", "hidden_norm.weight",
    *(f"layers.{i}.{name}" for i in range(2) for name in (*ATTENTION, *MLP, *NORMS, *HEAD_NORMS)),
}  # fmt: skip


@pytest.fixture
def saved(tmp_path):
    """Writes a head and returns its folder and its module."""

    def save(kind):
        config = head_config(kind, TARGET)
        module = random_module(kind, config)
        save_head(tmp_path / kind, module, config, block_size=5, mask_token=3)
        return tmp_path / kind, module

    return save


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(("kind", "names"), [("eagle3", EAGLE3), ("dflash", DFLASH)])
def test_names_and_types_are_those_of_published_checkpoints(saved, kind, names):
    folder, _ = saved(kind)
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        types = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118, not a dict
    assert set(types) == names
    assert {name: types.pop(name) for name in ("d2t", "t2d") if name in types} == (
        {"d2t": "I64", "t2d": "BOOL"} if kind == "eagle3" else {}
    )
    assert set(types.values()) == {"BF16"}
    config = json.loads((folder / "config.json").read_text())
    if kind == "eagle3":
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert (config["draft_vocab_size"], config["vocab_size"]) == (17, 29)
    else:
        assert config["architectures"] == ["DFlashDraftModel"]
        assert config["block_size"] == 5
        assert config["dflash_config"] == {"mask_token_id": 3, "target_layer_ids": [0, 1, 2]}


@pytest.mark.parametrize("kind", ["eagle3", "one layer", "three layers", "dflash"])
def test_a_head_comes_back_as_it_was_written(saved, kind):
    folder, module = saved(kind)
    found = load_head(folder, TARGET, PARAMS)
    assert found.head.config == head_config(kind, TARGET)
    assert (found.block_size, found.mask_token) == ((5, 3) if kind == "dflash" else (None, None))
    assert found.params["output"] is None  # tied
    np.testing.assert_array_equal(found.params["embedding"], PARAMS["embed_tokens"]["embedding"][...])
    expected, read = (dict(nnx.to_flat_state(state)) for state in (nnx.state(module), found.params["head"]))
    assert expected.keys() == read.keys()
    for path, leaf in expected.items():
        value = leaf[...]
        rounded = value.astype(jax.numpy.bfloat16).astype(value.dtype) if value.dtype == np.float32 else value
        np.testing.assert_array_equal(read[path][...], rounded, err_msg=str(path))


def test_an_embedding_of_its_own_goes_before_the_targets(saved):
    folder, _ = saved("eagle3")
    path, own = folder / "model.safetensors", np.full((29, 12), 0.5, np.float32)
    save_file(load_file(path) | {"embed_tokens.weight": own}, path)
    np.testing.assert_array_equal(load_head(folder, TARGET, PARAMS).params["embedding"], own)


def test_without_a_word_on_them_the_usual_layers_are_read(saved):
    folder, _ = saved("eagle3")
    edit(folder, eagle_config=None)
    deep = ms.HybridModel.create(dataclasses.replace(tiny.MOE, layer_types=("attention",) + ("mamba",) * 7))
    with pytest.raises(ValueError, match=r"fc\.weight is \[12, 24\], expected \[12, 36\]"):
        load_head(folder, deep, PARAMS)  # three layers instead of two
    with pytest.raises(ValueError, match="names no layers of the target, and the usual ones need at least 6, not 3"):
        load_head(folder, ms.HybridModel.create(tiny.DENSE), tiny.random_params(ms.HybridModel.create(tiny.DENSE)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 16}, "a head for another model: its hidden_size is 16, the target's is 12"),
        ({"vocab_size": 32000}, "a head for another model: its vocab_size is 32000, the target's is 29"),
        ({"architectures": ["LlamaForCausalLM"]}, r"architectures is \['LlamaForCausalLM'\], expected a list of Llama"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 4]}},
            r"eagle_aux_hidden_state_layer_ids is \[0, 4\], expected layers of the target, 0\.\.3",
        ),
        ({"intermediate_size": 11}, r"midlayer\.mlp\.down_proj\.weight is \[12, 10\], expected \[12, 11\]"),
        ({"draft_vocab_size": 30}, r"draft_vocab_size is 30, expected 1\.\.29"),
        ({"num_hidden_layers": 2}, "an EAGLE-3 head has one layer, but its configuration says 2"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected one of silu"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling: low_freq_factor is missing"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "of the rope type dynamic, whose frequencies depend on the length of the text: expected one of default",
        ),
        ({"num_target_layers": 5}, "a head for another model: its num_target_layers is 5, the target's is 4"),
        ({"target_hidden_size": 16}, "a head for another model: its target_hidden_size is 16, the target's is 12"),
        ({"attention_bias": True}, "attention_bias is True, expected one of False"),
        ({"norm_before_fc": True}, "norm_before_fc is True, expected one of False"),
        ({"eagle_config": {"use_last_layernorm": False}}, "eagle_config: use_last_layernorm is False, expected one of"),
        ({"dflash_config": {"fc_layernorm": True}}, "dflash_config: fc_layernorm is True, expected one of False"),
        ({"num_experts": 8}, "num_experts is 8, expected no such key, or null"),
        ({"sliding_attention": True}, "sliding_attention is True, expected no such key, or null"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window is None, expected a number of positions"),
        (
            {"layer_types": ["sliding_attention"], "sliding_window": 4, "use_sliding_window": False},
            "use_sliding_window is False, expected true, or layer_types without sliding_attention",
        ),
        ({"layer_types": ["chunked_attention"]}, "layer_types is .*, expected a list of full_attention, sliding"),
        ({"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "expected 1 of"),
        ({"partial_rotary_factor": 0.5}, "3 dims are rotated, expected an even number up to head_dim=6"),
        ({"num_attention_heads": 3}, "num_attention_heads=3 is not a multiple of num_key_value_heads=2"),
    ],
)
def test_what_does_not_fit_is_refused(saved, changes, message):
    folder, _ = saved("eagle3")
    edit(folder, **changes)
    with pytest.raises(ValueError, match=message):
        load_head(folder, TARGET, PARAMS)


def test_an_embedding_of_another_size_is_refused(saved):
    folder, _ = saved("one layer")
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"embed_tokens.weight": np.zeros((5, 12), np.float32)}, path)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is \[5, 12\], expected \[29, 12\]"):
        load_head(folder, TARGET, PARAMS)


def test_missing_and_surplus_weights_are_named(saved):
    folder, _ = saved("dflash")
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["layers.2.extra.weight"] = weights.pop("layers.1.self_attn.k_norm.weight")
    save_file(weights, path)
    with pytest.raises(ValueError, match=r"k_norm\.weight is missing; layers\.2\.extra\.weight is surplus"):
        load_head(folder, TARGET, PARAMS)


def test_weights_and_drafters_of_another_head_are_refused_by_name(saved):
    eagle, dflash = (load_head(saved(kind)[0], TARGET, PARAMS) for kind in ("eagle3", "dflash"))
    hidden = jax.numpy.zeros((1, 1, 12))
    for params, message in (
        (None, "got a NoneType as weights: pass what load_drafter, or bind, returned"),
        (PARAMS, "as weights: pass what load_drafter, or bind, returned as drafter_params"),
        (dflash.params, "the weights of another head or model: d2t is none, expected .17."),
        (eagle.params | {"embedding": jax.numpy.zeros((5, 12))}, r"embedding is \[5, 12\], expected \[29, 12\]"),
    ):
        with pytest.raises(ValueError, match=message):
            eagle.head.features(params, (hidden, hidden))
    with pytest.raises(
        ValueError, match=r"got hidden states of widths \[12\], expected those .* layers \(0, 2\), 12 wide"
    ):
        eagle.head.features(eagle.params, (hidden,))
    with pytest.raises(ValueError, match="EagleDrafter got a DFlashHead as its head, expected one that is run on"):
        ms.EagleDrafter(dflash.head, 2)
    with pytest.raises(ValueError, match="DFlashDrafter got a EagleHead as its head, expected one that fills blocks"):
        ms.DFlashDrafter(eagle.head, 2, 3)
    with pytest.raises(ValueError, match="EagleTreeDrafter got a HybridModel as its head"):
        ms.EagleTreeDrafter(TARGET, 4)
