"""Weights spread over a mesh by rules about their names."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mamba_spec_jax.loaded import load
from mamba_spec_jax.models.placement import place_all
from tests.mamba_spec_jax.models.checkpoints import CONFIG, random_weights, write

REPOSITORY = Path(__file__).parents[3]
SHAPES = {"layers.0.mixer.in_proj.kernel": (8, 52), "layers.0.moe.gate_up_proj": (3, 8, 12), "norm.weight": (8,)}
MESH = Mesh(np.asarray(jax.devices()[:1]), ("model",))
TWO_DEVICES = """
import sys
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
from jax.sharding import Mesh, PartitionSpec as P
from mamba_spec_jax import load

mesh = Mesh(np.asarray(jax.devices()), ("model",))
split = ("in_proj.kernel", "q_proj.kernel", "embed_tokens.embedding", "gate_up_proj")
try:
    load(sys.argv[1], mesh=mesh, rules=[("router", P(None, "model"))])
    raise SystemExit("the scores of 5 experts were split in two")
except ValueError as error:
    assert "layers.0.moe.router.kernel [36, 5]" in str(error), error
loaded = load(sys.argv[1], mesh=mesh, rules=[(f"({'|'.join(split)})$", P(None, "model"))])
alone = load(sys.argv[1])

for (path, leaf), whole in zip(jax.tree.leaves_with_path(loaded.params), jax.tree.leaves(alone.params), strict=True):
    name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
    assert len(leaf.devices()) == 2, name
    assert leaf.addressable_shards[1].data.size == leaf.size // (2 if name.endswith(split) else 1), name
    np.testing.assert_array_equal(leaf, whole)

with np.load(sys.argv[1] + "/golden.npz") as golden:
    tokens, logits = golden["tokens"], golden["logits"]
B, T = tokens.shape
prefill = jax.jit(loaded.model.prefill, compiler_options={"xla_backend_optimization_level": 0})
rows, counts = jnp.arange(B, dtype=jnp.int32), jnp.full(B, T, jnp.int32)
cache = loaded.model.init_cache(B, T)
output = prefill(loaded.params, jnp.asarray(tokens), cache, slots=rows, num_tokens=counts)
np.testing.assert_allclose(output.logits, logits[:, -1], rtol=0, atol=3e-5)
print("done")
"""


def test_two_devices_share_a_model():
    """They compute what transformers does."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", TWO_DEVICES, str(REPOSITORY / "tests" / "golden" / "moe")]
    ended = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert ended.stdout.split() == ["done"], ended.stderr


def test_the_first_rule_that_concerns_a_weight_counts():
    rules = [("kernel$", P(None, "model")), ("layers", P("model"))]
    specs = {path: place.spec for path, place in place_all(SHAPES, mesh=MESH, rules=rules).items()}
    assert specs == dict(zip(SHAPES, (P(None, "model"), P("model"), P()), strict=True))
    assert {place.spec for place in place_all(SHAPES, mesh=MESH).values()} == {P()}


def test_without_a_mesh_all_weights_go_to_one_device():
    assert place_all(SHAPES) == dict.fromkeys(SHAPES)
    device = jax.devices()[0]
    assert place_all(SHAPES, device) == dict.fromkeys(SHAPES, device)


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no weight is split by the rules \['mixr'\]: paths are such as layers\.0"):
        place_all(SHAPES, mesh=MESH, rules=[("mixr", P("model")), ("norm", P())])
    for spec in (P(None, "model"), P("other")):
        with pytest.raises(ValueError, match=r"'norm' cannot split norm\.weight \[8\] by .* a mesh of {'model': 1}: "):
            place_all(SHAPES, mesh=MESH, rules=[("norm", spec)])
    with pytest.raises(ValueError, match="got both a device and a mesh"):
        place_all(SHAPES, jax.devices()[0], MESH)
    explicit = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Explicit,))
    with pytest.raises(ValueError, match="whose axes are Explicit, expected Auto ones"):
        place_all(SHAPES, mesh=explicit)
    folder = write(tmp_path / "model", CONFIG, random_weights(CONFIG))
    with pytest.raises(ValueError, match="got rules without a mesh"):
        load(folder, rules=[("norm", P())])
