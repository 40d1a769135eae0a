"""The heads that published checkpoints carry against their definition, written down again here in plain NumPy."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mamba_spec_jax as ms
from mamba_spec_jax.modes import ForwardMode
from mamba_spec_jax.speculative.protocol import Progress
from tests.golden.family_cases import BASES, FAMILY_CASES
from tests.golden.weights import draw_all

from ..goldens import write_checkpoint

pytestmark = pytest.mark.usefixtures("quick_compilation")

WIDTH = BASES["qwen3_5_text"]["intermediate_size"]
D, EPS = 20, {"qwen3_next": 1e-6, "qwen3_5_text": 1e-6, "nemotron_h": 1e-5}
QWEN_ATTENTION = {
    "mtp.fc.weight": (D, 2 * D),
    "mtp.pre_fc_norm_embedding.weight": (D,),
    "mtp.pre_fc_norm_hidden.weight": (D,),
    "mtp.norm.weight": (D,),
    "mtp.layers.0.input_layernorm.weight": (D,),
    "mtp.layers.0.post_attention_layernorm.weight": (D,),
    "mtp.layers.0.self_attn.q_proj.weight": (2 * 4 * 8, D),
    "mtp.layers.0.self_attn.k_proj.weight": (2 * 8, D),
    "mtp.layers.0.self_attn.v_proj.weight": (2 * 8, D),
    "mtp.layers.0.self_attn.o_proj.weight": (D, 4 * 8),
    "mtp.layers.0.self_attn.q_norm.weight": (8,),
    "mtp.layers.0.self_attn.k_norm.weight": (8,),
}
QWEN = {
    **QWEN_ATTENTION,
    "mtp.layers.0.mlp.gate.weight": (5, D),
    "mtp.layers.0.mlp.shared_expert_gate.weight": (1, D),
    **{
        f"mtp.layers.0.mlp.{part}.{name}_proj.weight": shape
        for part, width in (("shared_expert", 11), *((f"experts.{expert}", 9) for expert in range(5)))
        for name, shape in (("gate", (width, D)), ("up", (width, D)), ("down", (D, width)))
    },
}
QWEN_DENSE = QWEN_ATTENTION | {
    f"mtp.layers.0.mlp.{name}_proj.weight": shape
    for name, shape in (("gate", (WIDTH, D)), ("up", (WIDTH, D)), ("down", (D, WIDTH)))
}
NEMOTRON = {
    "mtp.layers.0.eh_proj.weight": (D, 2 * D),
    "mtp.layers.0.enorm.weight": (D,),
    "mtp.layers.0.hnorm.weight": (D,),
    "mtp.layers.0.norm.weight": (D,),
    "mtp.layers.0.mixer.q_proj.weight": (4 * 5, D),
    "mtp.layers.0.mixer.k_proj.weight": (2 * 5, D),
    "mtp.layers.0.mixer.v_proj.weight": (2 * 5, D),
    "mtp.layers.0.mixer.o_proj.weight": (D, 4 * 5),
    "mtp.layers.1.norm.weight": (D,),
    "mtp.layers.1.final_layernorm.weight": (D,),
    "mtp.layers.1.mixer.gate.weight": (5, D),
    "mtp.layers.1.mixer.gate.e_score_correction_bias": (5,),
    **{
        f"mtp.layers.1.mixer.{part}.{name}_proj.weight": shape
        for part, width in (("shared_experts", 11), *((f"experts.{expert}", 9) for expert in range(5)))
        for name, shape in (("up", (width, D)), ("down", (D, width)))
    },
}
SHAPES = {"qwen3_next": QWEN, "nemotron_h": NEMOTRON, "qwen3_5_text": QWEN_DENSE}
OTHERS = ["qwen3_next", "nemotron_h"]  # Qwen3.5's is made of the same parts


class Oracle:
    """One head, in float64."""

    def __init__(self, family, weights):
        self.family = family
        self.weights = {name: value.astype(np.float64) for name, value in weights.items()}
        self.keys, self.values = [], []

    def w(self, name):
        return self.weights[name + ".weight"]

    def norm(self, x, name):
        weight = self.w(name) + self.family.startswith("qwen")
        return weight * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS[self.family])

    def linear(self, x, name):
        return self.w(name) @ x

    def attend(self, query, key, value):
        self.keys.append(key)
        self.values.append(value)
        keys, values = np.stack(self.keys), np.stack(self.values)
        heads, size = query.shape
        mixed = []
        for head in range(heads):
            shared = head // (heads // keys.shape[1])
            scores = np.exp(keys[:, shared] @ query[head] / np.sqrt(size))
            mixed.append(scores @ values[:, shared] / scores.sum())
        return np.array(mixed)

    def qwen(self, x, position):
        layer = "mtp.layers.0."
        read = self.norm(x, layer + "input_layernorm")
        query, gate = np.split(self.linear(read, layer + "self_attn.q_proj").reshape(4, 16), 2, axis=-1)
        key, value = (self.linear(read, f"{layer}self_attn.{name}_proj").reshape(2, 8) for name in "kv")
        query, key = (
            rotated(self.norm(part, f"{layer}self_attn.{name}_norm"), position)
            for part, name in ((query, "q"), (key, "k"))
        )
        mixed = self.attend(query, key, value) * sigmoid(gate)
        x = x + self.linear(mixed.reshape(-1), layer + "self_attn.o_proj")
        read = self.norm(x, layer + "post_attention_layernorm")
        fed = self.experts(read) if self.family == "qwen3_next" else self.gated(read, layer + "mlp")
        return self.norm(x + fed, "mtp.norm")

    def experts(self, read):
        layer = "mtp.layers.0."
        scores = self.linear(read, layer + "mlp.gate")
        chosen = np.argsort(-scores)[:2]
        shares = np.exp(scores[chosen]) / np.exp(scores[chosen]).sum()
        given = sum(s * self.gated(read, f"{layer}mlp.experts.{e}") for s, e in zip(shares, chosen, strict=True))
        shared = sigmoid(self.linear(read, layer + "mlp.shared_expert_gate")) * self.gated(
            read, layer + "mlp.shared_expert"
        )
        return given + shared

    def nemotron_h(self, x, position):
        read = self.norm(x, "mtp.layers.0.norm")
        sizes = {"q": (4, 5), "k": (2, 5), "v": (2, 5)}
        inputs = (self.linear(read, f"mtp.layers.0.mixer.{n}_proj").reshape(size) for n, size in sizes.items())
        x = x + self.linear(self.attend(*inputs).reshape(-1), "mtp.layers.0.mixer.o_proj")
        read = self.norm(x, "mtp.layers.1.norm")
        scores = sigmoid(self.linear(read, "mtp.layers.1.mixer.gate"))
        chosen = np.argsort(-(scores + self.weights["mtp.layers.1.mixer.gate.e_score_correction_bias"]))[:2]
        shares = scores[chosen] / scores[chosen].sum()
        given = sum(
            s * self.squared(read, f"mtp.layers.1.mixer.experts.{e}") for s, e in zip(shares, chosen, strict=True)
        )
        return self.norm(
            x + given + self.squared(read, "mtp.layers.1.mixer.shared_experts"), "mtp.layers.1.final_layernorm"
        )

    def gated(self, x, name):
        gate = self.linear(x, name + ".gate_proj")
        return self.linear(gate * sigmoid(gate) * self.linear(x, name + ".up_proj"), name + ".down_proj")

    def squared(self, x, name):
        return self.linear(np.maximum(self.linear(x, name + ".up_proj"), 0) ** 2, name + ".down_proj")

    def step(self, token, hidden):
        """The head at the next position: what it says of the token after `token`, as the hidden state it gives."""
        if self.family == "nemotron_h":
            layers, embedding, fc = self.nemotron_h, "backbone.embeddings", "mtp.layers.0.eh_proj"
            names = "mtp.layers.0.enorm", "mtp.layers.0.hnorm"
        else:
            layers, embedding, fc = self.qwen, "model.embed_tokens", "mtp.fc"
            names = "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"
        read = [self.norm(x, name) for x, name in zip((self.w(embedding)[token], hidden), names, strict=True)]
        return layers(self.linear(np.concatenate(read), fc), len(self.keys))

    def token(self, hidden):
        return int(np.argmax(self.linear(hidden, "lm_head")))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rotated(x, position):
    """A quarter of eight dims: one pair, which turns by `position`."""
    cos, sin = np.cos(position), np.sin(position)
    return np.concatenate([x[:, :1] * cos - x[:, 1:2] * sin, x[:, 1:2] * cos + x[:, :1] * sin, x[:, 2:]], axis=-1)


@pytest.fixture(scope="module", params=list(SHAPES))
def carried(request, tmp_path_factory):
    """A checkpoint that carries a head, loaded, and all its weights."""
    family = request.param
    (case,) = (case for case in FAMILY_CASES if (case.family, case.name) == (family, "plain"))
    folder = tmp_path_factory.mktemp("carried") / family
    write_checkpoint(case, folder)
    weights = load_file(folder / "model.safetensors") | draw_all(SHAPES[family], 3, False, family)
    save_file(weights, folder / "model.safetensors")
    return family, ms.load(folder), weights


def test_drafts_are_those_of_the_definition(carried):
    family, loaded, weights = carried
    found = ms.load_drafter(loaded.folder, loaded, max_drafts=3)
    assert type(found.drafter) is ms.EagleDrafter
    text = np.random.default_rng(0).integers(0, loaded.model.vocab_size, 9)
    one = jnp.ones(1, jnp.int32)
    output = jax.jit(found.target.prefill)(
        loaded.params, jnp.asarray(text[None, :-1], jnp.int32), found.target.init_cache(1, 16),
        slots=0 * one, num_tokens=8 * one,
    )  # fmt: skip
    oracle = Oracle(family, weights)
    final = "backbone.norm_f" if family == "nemotron_h" else "model.norm"
    read = [oracle.norm(hidden.astype(np.float64), final) for hidden in np.asarray(output.hidden[0][0])]
    for token, hidden in zip(text[1:], read, strict=True):
        says = oracle.step(token, hidden)

    drafter = found.drafter
    progress = Progress(
        tokens=jnp.asarray(text[None, :-1], jnp.int32),
        following=jnp.asarray(text[None, 1:], jnp.int32),
        hidden=output.hidden,
        counts=8 * one,
        mode=ForwardMode.EXTEND,
    )
    state = jax.jit(drafter.update)(found.params, drafter.init(1, 16), progress)
    np.testing.assert_allclose(state.hidden[0, 0], says, rtol=2e-4, atol=2e-5)
    proposal = jax.jit(
        lambda params, state: drafter.propose(
            params, state, None, 9 * one, lambda logits, at: jnp.argmax(logits, axis=-1).astype(jnp.int32), 3
        )
    )(found.params, state)
    drafts = [oracle.token(says)]
    while len(drafts) < 3:
        says = oracle.step(drafts[-1], says)
        drafts.append(oracle.token(says))
    assert proposal.tokens[0].tolist() == drafts


@pytest.mark.parametrize("carried", OTHERS, indirect=True)
def test_speculation_with_the_head_loses_nothing(carried):
    """Drafts or none through the same compiled steps: the same tokens, and the same bits behind them."""
    _, loaded, _ = carried
    found = ms.load_drafter(loaded.folder, loaded, max_drafts=2)

    decoder = ms.Decoder(found.target, found.drafter, num_drafts=2)
    weights = ms.Weights(loaded.params, found.params)
    decode = jax.jit(decoder.until_finished)

    def run(limit):
        return decode(weights, decoder.init(weights, [[1, 2, 3], [4, 5]], max_new=24, depth_limit=limit))

    plain, speculative = run(0), run(2)
    assert int(plain.statistics.drafted.sum()) == 0
    assert int(speculative.statistics.drafted.sum()) > 24
    np.testing.assert_array_equal(speculative.tokens, plain.tokens)
    jax.tree.map(np.testing.assert_array_equal, speculative.cache.mamba, plain.cache.mamba)


@pytest.mark.parametrize("carried", OTHERS, indirect=True)
def test_what_carries_no_head_or_another_one_is_refused(carried, tmp_path):
    family, loaded, weights = carried
    config = json.loads((loaded.folder / "config.json").read_text())

    def checkpoint(weights):
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(weights, tmp_path / "model.safetensors")
        return ms.load_drafter(tmp_path, ms.LoadedModel(loaded.model, loaded.params, None, tmp_path))

    with pytest.raises(ValueError, match=r"has 0 weights named mtp\.: it cannot draft for itself"):
        checkpoint({name: value for name, value in weights.items() if not name.startswith("mtp.")})
    name = "mtp.fc.weight" if family == "qwen3_next" else "mtp.layers.0.eh_proj.weight"
    with pytest.raises(ValueError, match=f"1 missing: {name}; 1 surplus: mtp.layers.9.norm.weight"):
        checkpoint(
            {n: w for n, w in weights.items() if n != name} | {"mtp.layers.9.norm.weight": np.ones(D, np.float32)}
        )
