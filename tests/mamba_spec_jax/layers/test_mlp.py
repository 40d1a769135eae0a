"""Routed experts against a loop over tokens and experts in float64, and the dense MLP they share their form with."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mamba_spec_jax.layers.mlp import MLP, GatedMLP, SparseMoE
from mamba_spec_jax.layers.projections import LowRank
from mamba_spec_jax.layers.routing import SigmoidRouting

SIZE, INTERMEDIATE = 5, 7
FLOAT32 = {"dtype": jnp.float32, "param_dtype": jnp.float32}


@functools.partial(jax.jit, static_argnums=0)
def apply(graphdef, weights, x):
    return nnx.merge(graphdef, weights)(x)


def run(module: nnx.Module, x: np.ndarray) -> jax.Array:
    return apply(*nnx.split(module), x)


def make(kind: type[nnx.Module], *shape: int, seed: int = 0):
    """A module with random weights."""
    module = nnx.eval_shape(lambda: kind(*shape, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0)))
    graphdef, weights = nnx.split(module)
    rng = np.random.default_rng(seed)
    scaled = lambda leaf: jnp.asarray(rng.normal(0, leaf.shape[-2] ** -0.5, leaf.shape), leaf.dtype)  # noqa: E731
    return nnx.merge(graphdef, jax.tree.map(scaled, weights))


def make_moe(experts: int, top_k: int) -> SparseMoE:
    return make(SparseMoE, SIZE, INTERMEDIATE, experts, top_k, seed=experts)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def moe_by_loops(moe: SparseMoE, x: np.ndarray) -> np.ndarray:
    router, gate_up, down = (
        np.asarray(weight[...], np.float64) for weight in (moe.router.kernel, moe.gate_up_proj, moe.down_proj)
    )
    output = np.zeros_like(x, np.float64)
    for index in np.ndindex(x.shape[:-1]):
        token = x[index].astype(np.float64)
        logits = token @ router
        chosen = np.argsort(-logits)[: moe.top_k]
        weights = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
        for weight, expert in zip(weights, chosen, strict=True):
            gate, up = np.split(token @ gate_up[expert], 2)
            output[index] += weight * ((silu(gate) * up) @ down[expert])
    return output


@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (3, 3), (1, 1)])
def test_experts(experts, top_k):
    moe = make_moe(experts, top_k)
    x = np.random.default_rng(experts).normal(size=(2, 4, SIZE)).astype(np.float32)
    np.testing.assert_allclose(run(moe, x), moe_by_loops(moe, x), rtol=1e-5, atol=1e-6)


def test_everybody_may_choose_the_same_expert():
    moe = make_moe(4, 1)
    moe.router.kernel[...] = jnp.asarray(np.eye(4, dtype=np.float32)[[2] * SIZE])
    x = np.random.default_rng(0).uniform(1, 2, (3, 2, SIZE)).astype(np.float32)
    expected = moe_by_loops(moe, x)
    others = np.array(moe.gate_up_proj[...])
    others[[0, 1, 3]] = 1e6
    moe.gate_up_proj[...] = jnp.asarray(others)
    np.testing.assert_allclose(run(moe, x), expected, rtol=1e-5, atol=1e-6)


def test_a_token_gets_the_same_bits_among_any_others():
    moe = make_moe(4, 2)
    x = np.random.default_rng(0).normal(size=(1, 6, SIZE)).astype(np.float32)
    order = np.array([3, 0, 5, 1, 4, 2])
    np.testing.assert_array_equal(np.asarray(run(moe, x))[:, order], run(moe, x[:, order]))


def test_top_k_beyond_the_experts():
    with pytest.raises(ValueError, match=r"SparseMoE routes to top_k=4 of 3 experts, expected 1\.\.3"):
        make_moe(3, 4)


def erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf)(x)


ACTIVATED = {"silu": silu, "gelu": lambda x: x * (1 + erf(x / 2**0.5)) / 2, "relu2": lambda x: np.maximum(x, 0) ** 2}


@pytest.mark.parametrize("name", list(ACTIVATED))
def test_plain_with_every_activation(name):
    mlp = MLP(SIZE, INTERMEDIATE, activation=name, bias=True, **FLOAT32, rngs=nnx.Rngs(0))
    mlp.up_proj.bias[...] = jnp.arange(INTERMEDIATE, dtype=jnp.float32) / 7
    mlp.down_proj.bias[...] = jnp.arange(SIZE, dtype=jnp.float32) / 5
    x = np.random.default_rng(0).normal(size=(2, 3, SIZE)).astype(np.float32)
    up, down = (np.asarray(layer.kernel[...], np.float64) for layer in (mlp.up_proj, mlp.down_proj))
    expected = ACTIVATED[name](x @ up + np.arange(INTERMEDIATE) / 7) @ down + np.arange(SIZE) / 5
    np.testing.assert_allclose(mlp(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-6)


def test_gated_with_multipliers_and_an_adapter():
    mlp = GatedMLP(SIZE, INTERMEDIATE, gate_multiplier=0.7, multiplier=1.4, **FLOAT32, rngs=nnx.Rngs(0))
    adapter = LowRank(SIZE, 2 * INTERMEDIATE, rank=2, **FLOAT32, rngs=nnx.Rngs(1))
    x = np.random.default_rng(0).normal(size=(2, 3, SIZE)).astype(np.float32)
    whole = np.asarray(mlp.input_linear.kernel) + np.asarray(adapter.down.kernel) @ np.asarray(adapter.up.kernel)
    gate, up = np.split(x @ whole, 2, axis=-1)
    expected = 1.4 * (silu(0.7 * gate) * up) @ np.asarray(mlp.output_linear.kernel[...])
    np.testing.assert_allclose(mlp(jnp.asarray(x), adapter), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("latent", [0, 3])
def test_plain_experts_chosen_by_sigmoid(latent):
    routing = SigmoidRouting(groups=3, top_groups=2, scale=2.5)
    moe = SparseMoE(
        SIZE, INTERMEDIATE, 9, 3, gated=False, activation="relu2", routing=routing, latent=latent, **FLOAT32,
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    moe.router.correction[...] = jnp.linspace(-0.2, 0.2, 9)
    x = np.random.default_rng(0).normal(size=(2, 4, SIZE)).astype(np.float32)
    output = np.zeros_like(x, np.float64)
    for index in np.ndindex(x.shape[:-1]):
        scores = 1 / (1 + np.exp(-x[index].astype(np.float64) @ np.asarray(moe.router.kernel[...])))
        choice = (scores + np.linspace(-0.2, 0.2, 9)).reshape(3, 3)
        worst_group = np.argmin(np.sort(choice, axis=-1)[:, 1:].sum(-1))
        choice[worst_group] = -np.inf
        chosen = np.argsort(-choice.reshape(-1))[:3]
        token = x[index] if not latent else x[index] @ np.asarray(moe.latent_in.kernel[...])
        total = sum(
            2.5 * scores[e] / scores[chosen].sum()
            * (np.maximum(token @ np.asarray(moe.up_proj[e]), 0) ** 2 @ np.asarray(moe.down_proj[e]))
            for e in chosen
        )  # fmt: skip
        output[index] = total if not latent else total @ np.asarray(moe.latent_out.kernel[...])
    np.testing.assert_allclose(moe(jnp.asarray(x)), output, rtol=1e-5, atol=1e-6)


def test_groups_that_the_experts_do_not_fill():
    for experts, groups in ((9, 2), (3, 3)):
        with pytest.raises(
            ValueError, match=f"{experts} experts do not make {groups} groups of equally many, at least"
        ):
            SparseMoE(SIZE, 4, experts, 1, routing=SigmoidRouting(groups=groups), **FLOAT32, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="a token is routed to 3 of the 2 experts in its best 1 of 3 groups"):
        SparseMoE(SIZE, 4, 6, 3, routing=SigmoidRouting(groups=3), **FLOAT32, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"top_groups=4, expected 1\.\.3 \(groups\)"):
        SigmoidRouting(groups=3, top_groups=4)


def test_dense():
    mlp = make(GatedMLP, SIZE, INTERMEDIATE)
    x = np.random.default_rng(0).normal(size=(2, 3, SIZE)).astype(np.float32)
    gate, up = np.split(x @ np.asarray(mlp.input_linear.kernel[...]), 2, axis=-1)
    expected = (silu(gate) * up) @ np.asarray(mlp.output_linear.kernel[...])
    np.testing.assert_allclose(run(mlp, x), expected, rtol=1e-5, atol=1e-6)
