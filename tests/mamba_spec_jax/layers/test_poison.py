"""A row of NaN or inf changes no other row of a layer, whatever the layer does with rows: routing above all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mamba_spec_jax.layers.mlp import MLP, GatedMLP, SparseMoE
from mamba_spec_jax.layers.norms import RMSNorm
from mamba_spec_jax.layers.projections import Linear
from mamba_spec_jax.layers.routing import SigmoidRouting

SIZE, ROWS, POISONED = 6, 11, 4
SIGNALLING = np.uint32(0x7F800001).view(np.float32)
POISONS = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "signalling nan": SIGNALLING, "overflow": 3e38}
FLOAT32 = {"dtype": jnp.float32, "param_dtype": jnp.float32}


def routed(**options):
    return lambda rngs: SparseMoE(SIZE, 5, 6, 2, **options, **FLOAT32, rngs=rngs)


LAYERS = {
    "dense": lambda rngs: GatedMLP(SIZE, 5, **FLOAT32, rngs=rngs),
    "plain": lambda rngs: MLP(SIZE, 5, activation="relu2", **FLOAT32, rngs=rngs),
    "one column": lambda rngs: Linear(SIZE, 1, use_bias=False, **FLOAT32, rngs=rngs),
    "norm": lambda rngs: RMSNorm(SIZE, eps=1e-6, param_dtype=jnp.float32),
    "softmax over the chosen": routed(),
    "softmax over all": routed(over_chosen=False),
    "sigmoid in groups": routed(routing=SigmoidRouting(groups=3, top_groups=2)),
    "latent": routed(latent=3, gated=False, activation="relu2"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_other_rows_keep_their_bits(name):
    graphdef, weights = nnx.split(LAYERS[name](nnx.Rngs(0)))
    layer = jax.jit(lambda x: nnx.merge(graphdef, weights)(x))
    clean = np.random.default_rng(0).normal(size=(ROWS, SIZE)).astype(np.float32)
    expected = np.asarray(layer(clean[None]))[0]
    others = np.arange(ROWS) != POISONED
    for poison in POISONS.values():
        for columns in ([2], list(range(SIZE))):
            rows = clean.copy()
            rows[POISONED, columns] = poison
            found = np.asarray(layer(rows[None]))[0]
            assert found[others].tobytes() == expected[others].tobytes(), poison
