"""Keys of draft heads' configurations that change what a head computes, against plain NumPy."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import mamba_spec_jax as ms
from mamba_spec_jax.models.heads.checkpoint import load_head, save_head
from mamba_spec_jax.models.heads.keys import ONE_VALUE, READ, WITHOUT_EFFECT, check_keys
from mamba_spec_jax.models.hf_config import HFConfig
from tests.mamba_spec_jax import tiny
from tests.mamba_spec_jax.heads import head_config, random_module

pytestmark = pytest.mark.usefixtures("quick_compilation")

TARGET = ms.HybridModel.create(tiny.MOE)
PARAMS = tiny.random_params(TARGET)
READ_TOKENS, BLOCK, WINDOW, EPS = 9, 4, 5, 1e-5
HEADS, KV_HEADS, SIZE, ROTATED = 4, 2, 6, 4
ROPE = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 50.0, "partial_rotary_factor": 0.7}
SLIDING = {"sliding_window": WINDOW, "use_sliding_window": True}
DFLASH = ROPE | SLIDING | {"layer_types": ["sliding_attention", "full_attention"], "num_target_layers": 4}
CASES = {
    "dflash": ("dflash", DFLASH),
    "dflash, both ways": ("dflash", DFLASH | {"is_causal": False}),
    "eagle3": ("eagle3", ROPE | SLIDING | {"layer_types": ["sliding_attention"], "norm_before_residual": True}),
}


class Oracle:
    """A head's layers in float64, from its files."""

    def __init__(self, folder):
        self.config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
        self.weights = {name: np.asarray(value, np.float64) for name, value in weights.items()}

    def norm(self, x, name):
        return self.weights[f"{name}.weight"] * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS)

    def linear(self, x, name):
        return x @ self.weights[f"{name}.weight"].T

    def heads(self, x, name, positions):
        """Projected, normed where the head does so, and rotated but for values."""
        x = self.linear(x, f"{name}_proj").reshape(len(x), -1, SIZE)
        if name.endswith("v"):
            return x
        x = self.norm(x, f"{name}_norm") if f"{name}_norm.weight" in self.weights else x
        half = ROTATED // 2
        turns = positions[:, None] * self.config["rope_theta"] ** (-np.arange(half) / half)
        turns = np.exp(1j * turns / self.config["rope_scaling"]["factor"])[:, None]
        turned = (x[..., :half] + 1j * x[..., half:ROTATED]) * turns
        return np.concatenate([turned.real, turned.imag, x[..., ROTATED:]], axis=-1)

    def attend(self, layer, x, positions, before=None):
        """`before` are features, at positions from 0 on, whose keys and values come first."""
        name, number = f"{layer}.self_attn", int(layer.split(".")[1]) if "." in layer else 0
        parts = {part: self.heads(x, f"{name}.{part}", positions) for part in "qkv"}
        if before is not None:
            for part in "kv":
                earlier = self.heads(before, f"{name}.{part}", np.arange(len(before)))
                parts[part] = np.concatenate([earlier, parts[part]])
        back = positions[:, None] - np.arange(len(parts["k"]))
        slides = self.config["layer_types"][number] == "sliding_attention"
        causal = before is None or self.config.get("is_causal", slides)
        visible = (back >= 0) | (not causal)
        visible &= (np.abs(back) < WINDOW) | (not slides)
        mixed = np.zeros_like(parts["q"])
        for head in range(HEADS):
            keys, values = (parts[part][:, head // (HEADS // KV_HEADS)] for part in "kv")
            scores = np.where(visible, np.exp(parts["q"][:, head] @ keys.T / np.sqrt(SIZE)), 0)
            mixed[:, head] = scores @ values / scores.sum(axis=-1, keepdims=True)
        return self.linear(mixed.reshape(len(x), -1), f"{name}.o_proj")

    def mlp(self, layer, x):
        x = self.norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (self.linear(x, f"{layer}.mlp.{name}_proj") for name in ("gate", "up"))
        return self.linear(gate / (1 + np.exp(-gate)) * up, f"{layer}.mlp.down_proj")

    def fill(self, embedded, hidden):
        """DFlash: `[BLOCK, D]` after everything in `hidden` was read."""
        features, x = self.norm(self.linear(hidden, "fc"), "hidden_norm"), embedded
        positions = len(hidden) + np.arange(len(embedded))
        for i in range(2):
            x = x + self.attend(f"layers.{i}", self.norm(x, f"layers.{i}.input_layernorm"), positions, features)
            x = x + self.mlp(f"layers.{i}", x)
        return x

    def run(self, embedded, hidden):
        """EAGLE-3: `[T, D]` of a whole text."""
        normed = self.norm(hidden, "midlayer.hidden_norm")
        x = np.concatenate([self.norm(embedded, "midlayer.input_layernorm"), normed], axis=-1)
        x = (normed if self.config["norm_before_residual"] else hidden) + self.attend("midlayer", x, np.arange(len(x)))
        return x + self.mlp("midlayer", x)


def write(folder, kind, changes):
    config = head_config(kind, TARGET)
    save_head(folder, random_module(kind, config), config, block_size=BLOCK, mask_token=3)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return load_head(folder, TARGET, PARAMS)


def computed(found, tokens, hidden):
    """What the head says, and its embeddings of the tokens."""
    head, params = found.head, found.params
    embedded = params["embedding"][tokens] * head.config.embedding_multiplier
    counts = jnp.asarray([READ_TOKENS], jnp.int32)
    cache = head.init_cache(1, 16)
    if found.block_size:
        pieces = jnp.split(hidden, len(head.config.target_layers), axis=-1)
        cache = head.read(params, tuple(pieces), cache, counts)
        said, _ = head.fill(params, tokens[:, :BLOCK], cache)
        return said[0], embedded[0, :BLOCK]
    said, _ = head.read(params, 0, tokens, hidden, cache, head.window(cache, counts, READ_TOKENS))
    return said[0], embedded[0]


@pytest.mark.parametrize("name", CASES)
def test_layers_are_those_that_the_configuration_describes(name, tmp_path):
    kind, changes = CASES[name]
    found, oracle = write(tmp_path, kind, changes), Oracle(tmp_path)
    rng = np.random.default_rng(4)
    width = TARGET.config.hidden_size * (3 if kind == "dflash" else 1)
    tokens = jnp.asarray(rng.integers(0, 29, (1, READ_TOKENS)), jnp.int32)
    hidden = jnp.asarray(rng.normal(size=(1, READ_TOKENS, width)), jnp.float32)
    said, embedded = jax.jit(lambda: computed(found, tokens, hidden))()
    read = [np.asarray(value, np.float64) for value in (embedded, hidden[0])]
    expect = oracle.fill if kind == "dflash" else oracle.run
    expected = expect(*read)
    np.testing.assert_allclose(said, expected, rtol=1e-4, atol=1e-5)
    # None of the keys is without effect here.
    others = {"layer_types": ["full_attention"] * 2, "rope_theta": 60.0, "rope_scaling": {"factor": 3.0}}
    others |= {"norm_before_residual": False} if kind == "eagle3" else {"is_causal": name == "dflash, both ways"}
    whole = dict(oracle.config)
    for key, value in others.items():
        oracle.config = whole | {key: value}
        assert np.abs(expect(*read) - expected).max() > 1e-4, key


def test_a_head_comes_back_with_these_keys_too(tmp_path):
    kind, changes = CASES["dflash, both ways"]
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    config = write(tmp_path / "first", kind, changes | {"rope_scaling": scaling}).head.config
    assert config.window(0) == WINDOW
    assert config.window(1) is None
    save_head(tmp_path / "second", random_module(kind, config), config, block_size=BLOCK, mask_token=3)
    assert load_head(tmp_path / "second", TARGET, PARAMS).head.config == config


def test_scales_and_blocks_may_stand_in_dflash_config(tmp_path):
    """As some published heads have it."""
    dflash = {"target_layer_ids": [0, 1, 2], "mask_token_id": 7, "block_size": 6}
    scales = {"input_embedding_scale": 3.0, "output_multiplier": 0.5}
    found = write(tmp_path, "dflash", {"block_size": None, "dflash_config": dflash | scales})
    assert (found.block_size, found.mask_token) == (6, 7)
    assert (found.head.config.embedding_multiplier, found.head.config.logits_divisor) == (3.0, 2.0)


def test_without_layer_types_the_later_layers_slide(tmp_path):
    config = write(tmp_path, "dflash", SLIDING | {"max_window_layers": 1}).head.config
    assert config.layer_types == ("full_attention", "sliding_attention")
    assert write(tmp_path, "dflash", {"sliding_window": WINDOW}).head.config.layer_types == ()


def test_every_key_is_of_one_kind():
    assert not READ & WITHOUT_EFFECT
    assert not set(ONE_VALUE) & (READ | WITHOUT_EFFECT)
    check_keys(HFConfig(dict.fromkeys(WITHOUT_EFFECT, "anything")))
    check_keys(HFConfig({key: values[0] for key, values in ONE_VALUE.items()} | {"unheard_of": None}))
    for key in ONE_VALUE:
        with pytest.raises(ValueError, match=f"{key} is 'another', expected one of"):
            check_keys(HFConfig({key: "another"}))
    with pytest.raises(ValueError, match="unheard_of is 1, expected no such key, or null"):
        check_keys(HFConfig({"unheard_of": 1}))
