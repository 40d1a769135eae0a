"""The ways in which the families' weights may be stored, which all give the same model."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mamba_spec_jax.loaded import load
from mamba_spec_jax.models.families import FAMILIES
from mamba_spec_jax.models.hf_config import HFConfig
from mamba_spec_jax.modes import DTypePolicy
from tests.golden.family_cases import BASES, FAMILY_CASES

from .checkpoints import CONFIG
from .goldens import QUICKLY, write_checkpoint

CASES = {f"{case.family}/{case.name}": case for case in FAMILY_CASES}


def stored(name, tmp_path):
    """A checkpoint's folder, its weights, and a function that writes other weights in their place."""
    golden = write_checkpoint(CASES[name], tmp_path / "model")
    path = golden.folder / "model.safetensors"
    return golden, load_file(path), lambda weights: save_file(weights, path)


def assert_same_params(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_experts_whole_or_one_by_one(tmp_path):
    golden, weights, write = stored("nemotron_h/switches", tmp_path)
    apart = [name for name in weights if re.search(r"\.experts\.\d+\.", name)]
    assert len(apart) == 2 * 2 * 9
    whole = {name: value for name, value in weights.items() if name not in apart}
    for layer, projection in ((1, "up_proj"), (1, "down_proj"), (5, "up_proj"), (5, "down_proj")):
        prefix = f"backbone.layers.{layer}.mixer.experts"
        whole[f"{prefix}.{projection}"] = np.stack(
            [weights[f"{prefix}.{expert}.{projection}.weight"] for expert in range(9)]
        )
    write(whole)
    assert_same_params(load(golden.folder).params, golden.params)
    np.testing.assert_array_equal(
        golden.params["layers"][1]["moe"]["up_proj"][4], weights["backbone.layers.1.mixer.experts.4.up_proj.weight"].T
    )


def test_newer_names_and_heads_for_drafting(tmp_path):
    golden, weights, write = stored("nemotron_h/plain", tmp_path)
    newer = {name.replace("backbone.", "model."): value for name, value in weights.items()}
    write(newer | {"mtp.layers.0.eh_proj.weight": np.zeros((3, 2), np.float32)})
    assert_same_params(load(golden.folder).params, golden.params)


def test_the_text_part_of_a_vision_model(tmp_path):
    golden, weights, write = stored("qwen3_5_text/plain", tmp_path)
    text = json.loads((golden.folder / "config.json").read_text())
    whole = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 3}}
    (golden.folder / "config.json").write_text(json.dumps(whole))
    nested = {name.replace("model.", "model.language_model."): value for name, value in weights.items()}
    write(nested | {"model.visual.blocks.0.attn.qkv.weight": np.zeros((3, 2), np.float32)})
    assert_same_params(load(golden.folder).params, golden.params)


def test_experts_and_convolutions_as_transformers_holds_them(tmp_path):
    """Stacked, whole and under newer names, where the golden's are those of released checkpoints."""
    golden, weights, write = stored("kimi_linear/plain", tmp_path)
    newer = {
        re.sub(r"self_attn\.(f_[ab]_proj|dt_bias|A_log)", r"self_attn.forget_gate.\1", name).replace(
            "block_sparse_moe", "mlp"
        ): value
        for name, value in weights.items()
        if not re.search(r"_conv1d\.|\.experts\.", name)
    }
    for layer in (0, 2):
        prefix = f"model.layers.{layer}.self_attn"
        newer[f"{prefix}.conv1d.weight"] = np.concatenate([weights[f"{prefix}.{x}_conv1d.weight"] for x in "qkv"])
    for layer in (1, 2):
        ours, theirs = f"model.layers.{layer}.mlp.experts", f"model.layers.{layer}.block_sparse_moe.experts"
        halves = [np.concatenate([weights[f"{theirs}.{e}.{half}.weight"] for half in ("w1", "w3")]) for e in range(6)]
        newer[f"{ours}.gate_up_proj"] = np.stack(halves)
        newer[f"{ours}.down_proj"] = np.stack([weights[f"{theirs}.{e}.w2.weight"] for e in range(6)])
    write(newer)
    assert_same_params(load(golden.folder).params, golden.params)


WRAPPERS = ("", "base_model.model.", "language_model.", "module.", "_orig_mod.module.")


@pytest.mark.parametrize("family", FAMILIES)
def test_names_with_and_without_what_wrappers_put_before_them(family):
    """Of every family: each name is found again, whatever all names, or those of the base model, begin with."""
    values = CONFIG if family == "granitemoehybrid" else BASES.get(family) or BASES[f"{family}_text"]
    family = FAMILIES[family]
    weights = list(family.weights(family.read_config(HFConfig(values))))
    names = [name for weight in weights for name in weight.parts or (weight.name,)]
    embedding = next(weight.name for weight in weights if weight.path == "embed_tokens.embedding")
    assert family.canonical_names(names, embedding) == {name: name for name in names}
    for tied in (True, False):
        kept = [name for name in names if not name.startswith("lm_head.")] + ["lm_head.weight"] * (not tied)
        for wrapper in WRAPPERS:
            wrapped = [wrapper + name for name in kept]
            assert list(family.canonical_names(wrapped, embedding).values()) == kept
        for base in ("", "model.language_model.", "language_model.model.", "transformer."):
            renamed = [base + name.removeprefix(family.base) if name.startswith(family.base) else name for name in kept]
            assert list(family.canonical_names(renamed, embedding).values()) == kept
    with pytest.raises(ValueError, match=r"there are several embeddings, expected one: .*, other\."):
        family.canonical_names([*names, "other." + embedding], embedding)


@pytest.mark.parametrize("family", ["nemotron_h", "lfm2", "mamba2"])
def test_names_without_a_prefix_and_constants_beside_the_weights(family, tmp_path):
    golden, weights, write = stored(f"{family}/plain", tmp_path)
    base = "model." if family == "lfm2" else "backbone."
    bare = {name.removeprefix(base).replace("embeddings.", "embedding."): value for name, value in weights.items()}
    constants = {
        "layers.1.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32),
        "rotary_emb.original_inv_freq": np.ones(3, np.float32),
        "layers.1.attention.bias": np.tril(np.ones((1, 1, 8, 8), bool)),
        "layers.1.attention.masked_bias": np.zeros((), np.float32),
        "embeddings.position_ids": np.arange(8)[None],
    }
    assert len({**bare, **constants}) == len(weights) + len(constants)
    write(bare | constants)
    assert_same_params(load(golden.folder).params, golden.params)
    write({name: value for name, value in bare.items() if "norm" not in name})
    with pytest.raises(ValueError, match=r"missing: .*norm"):
        load(golden.folder)


def test_an_embedding_in_the_singular_as_merged_adapters_have_it(tmp_path):
    golden, weights, write = stored("nemotron_h/plain", tmp_path)
    write({name.replace(".embeddings.", ".embedding."): value for name, value in weights.items()})
    assert_same_params(load(golden.folder).params, golden.params)


@pytest.mark.parametrize("family", ["olmo_hybrid", "kimi_linear"])
def test_convolutions_in_thirds_as_transformers_saves_them(family, tmp_path):
    """It cuts them by `torch.chunk`, however wide queries, keys and values are."""
    golden, weights, write = stored(f"{family}/plain", tmp_path)
    firsts = [name for name in weights if name.endswith("q_conv1d.weight")]
    for first in firsts:
        names = [first.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        whole = np.concatenate([weights[name] for name in names])
        most = -(-len(whole) // 3)
        weights |= {name: whole[i * most : (i + 1) * most] for i, name in enumerate(names)}
    if family == "olmo_hybrid":
        assert [len(weights[name]) for name in names] == [22, 22, 20]
    write(weights)
    assert_same_params(load(golden.folder).params, golden.params)
    write(weights | {names[0]: weights[names[0]][:3]})
    with pytest.raises(ValueError, match=r"misshapen: .*conv1d\.weight is"):
        load(golden.folder)


def test_parts_of_unequal_size_are_checked_one_by_one(tmp_path):
    golden, weights, write = stored("olmo_hybrid/plain", tmp_path)
    weights["model.layers.0.linear_attn.v_proj.weight"] = np.zeros((16, 24), np.float32)
    write(weights)
    with pytest.raises(ValueError, match=r"linear_attn\.v_proj\.weight is \[16, 24\], expected \[32, 24\]$"):
        load(golden.folder)


def test_time_steps_are_clamped_in_mamba2_alone(tmp_path):
    golden, _, _ = stored("lfm2/plain", tmp_path)
    with pytest.raises(ValueError, match=r"got a time_step_limit, but .* has no Mamba-2 layers"):
        load(golden.folder, time_step_limit=(0.0, 1.0))


def test_parts_that_are_missing_or_misshapen_are_named(tmp_path):
    golden, weights, write = stored("bamba/plain", tmp_path)
    del weights["model.layers.0.feed_forward.up_proj.weight"]
    weights["model.layers.1.feed_forward.gate_proj.weight"] = np.zeros((3, 24), np.float32)
    write(weights)
    message = (
        r"1 missing: model\.layers\.0\.feed_forward\.up_proj\.weight; "
        r"1 misshapen: model\.layers\.1\.feed_forward\.gate_proj\.weight is \[3, 24\], expected \[20, 24\]$"
    )
    with pytest.raises(ValueError, match=message):
        load(golden.folder)


def test_shared_blocks_may_be_repeated_if_they_are_the_same(tmp_path):
    golden, weights, write = stored("zamba2/switches", tmp_path)
    original, use = "model.layers.1.shared_transformer", "model.layers.3.shared_transformer"
    assert not any(name.startswith(use) for name in weights)
    copies = {name.replace(original, use): value for name, value in weights.items() if name.startswith(original)}
    write(weights | copies)
    assert_same_params(load(golden.folder).params, golden.params)
    name = f"{use}.self_attn.q_proj.weight"
    write(weights | copies | {name: copies[name] + 1})
    with pytest.raises(ValueError, match=f"says that {name} is {original}.self_attn.q_proj.weight, but they differ"):
        load(golden.folder)


def test_routers_stay_float32_in_16_bit_models(tmp_path):
    golden, weights, _ = stored("nemotron_h/plain", tmp_path)
    loaded = load(golden.folder, policy=DTypePolicy.bfloat16())
    moe = loaded.params["layers"][1]["moe"]
    assert moe["up_proj"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(moe["router"]["kernel"][...], weights["backbone.layers.1.mixer.gate.weight"].T)


@pytest.mark.parametrize(
    "name", [name for name in CASES if name.endswith("/plain") and not name.startswith(("qwen3_5", "olmo", "kimi"))]
)
def test_16_bit_models_run_and_stay_near(name, tmp_path):
    """Every family in bfloat16, where mamba2 sums its layers in float32."""
    golden = write_checkpoint(CASES[name], tmp_path / "model")
    loaded = load(golden.folder, policy=DTypePolicy.bfloat16())
    B, T = golden.tokens.shape
    cache, slots = loaded.model.init_cache(B, T), jnp.arange(B, dtype=jnp.int32)
    output = jax.jit(loaded.model.prefill, compiler_options=QUICKLY)(
        loaded.params, jnp.asarray(golden.tokens), cache, slots=slots, num_tokens=jnp.full(B, T, jnp.int32)
    )
    assert output.logits.dtype == jnp.float32
    error = np.asarray(output.logits) - golden.logits[:, -1]
    assert 1e-4 < np.sqrt(np.mean(np.square(error))) < 0.15 * golden.logits.std()
