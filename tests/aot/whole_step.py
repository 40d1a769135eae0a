"""A whole model's verify and commit, compiled ahead of time.

No pool and no KV buffer is copied or made anew, and nothing but the kernels writes snapshots.
"""

import math
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

import mamba_spec_jax as ms
from tests.aot.targets import Target

SLOTS, BATCH, T, MAX_LEN = 257, 8, 5, 512
# Forty layers in the pattern of granite-4.0-h, narrow, so that the compiler is soon done.
CONFIG = ms.HybridConfig(
    model_type="granitemoehybrid",
    vocab_size=1024,
    hidden_size=512,
    layer_types=tuple("attention" if layer % 10 == 5 else "mamba" for layer in range(40)),
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    attention_scale=0.125,
    recurrent=ms.Mamba2Config(heads=16, head_dim=64, state=128, groups=1, conv_width=4),
    shared_intermediate_size=512,
)
_WRITES_IN_PLACE = {"parameter", "get-tuple-element", "bitcast", "custom-call", "scatter", "fusion", "while"}
_WRITES_SNAPSHOTS = {"parameter", "get-tuple-element", "bitcast", "custom-call"}
_INSTRUCTION = re.compile(r"= \w+\[([\d,]+)\]\S* ([\w-]+)\(")


def broken_steps(target: Target) -> Iterator[tuple[str, list[str]]]:
    """What is wrong with the step of each strategy on a target: nothing, in an empty list."""
    for strategy in (ms.CommitStrategy.SNAPSHOT, ms.CommitStrategy.REPLAY):
        model = ms.HybridModel.create(CONFIG, ms.DTypePolicy.bfloat16(), strategy=strategy, implementation="triton")
        yield f"whole step of 40 layers, {strategy.value}", _broken(model, _compile(model, target), strategy)


def _compile(model: ms.HybridModel, target: Target):
    place = SingleDeviceSharding(target.device())

    def on_target(tree):
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree)

    def step(params, cache, tokens, rows):
        output = model.verify(params, ms.Draft(tokens, rows, rows), cache)
        return output.logits, model.backend.update_mamba_state_after_mtp_verify(output.cache, output.record, rows)

    rows, tokens = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((BATCH,), (BATCH, T)))
    arguments = on_target((model.abstract_params(), _abstract_cache(model), tokens, rows))
    with target.lowering():
        lowered = jax.jit(step, donate_argnums=1).lower(*arguments)
    return lowered.compile()


def _broken(model: ms.HybridModel, compiled, strategy: ms.CommitStrategy) -> list[str]:
    cache = _abstract_cache(model)
    # What REPLAY knows of the weights is new after each step.
    kept = jax.tree.leaves(cache.replace(mamba=cache.mamba.replace(constants=None)))
    shapes = {",".join(map(str, leaf.shape)) for leaf in kept if leaf.ndim > 2}
    snapshots = ",".join(map(str, _snapshots(model)))
    found = [f"{operation} of [{shape}]" for shape, operation in _INSTRUCTION.findall(compiled.as_text())
             if (shape in shapes and operation not in _WRITES_IN_PLACE)
             or (shape == snapshots and operation not in _WRITES_SNAPSHOTS)]  # fmt: skip
    copies = len(re.findall(r" copy(?:-start)?\(", compiled.as_text()))
    if copies:  # of any size: on a GPU each is a launch, and one outside the command buffer
        found.append(f"{copies} copies")
    memory = compiled.memory_analysis()
    resident = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in kept)
    record = BATCH * T * model.backend.pool_spec.ssm_bytes() if strategy is ms.CommitStrategy.SNAPSHOT else 0
    if memory.alias_size_in_bytes != resident:
        found.append(f"{memory.alias_size_in_bytes} bytes updated in place of {resident}")
    if memory.temp_size_in_bytes > record + 16 * 2**20:
        found.append(f"{memory.temp_size_in_bytes} temporary bytes, of which the record takes {record}")
    return found


def _snapshots(model: ms.HybridModel) -> tuple[int, ...]:
    L, _, *state = _abstract_cache(model).mamba.ssm.shape
    return L, BATCH, T, *state


def _abstract_cache(model: ms.HybridModel):
    return jax.eval_shape(lambda: model.init_cache(SLOTS, MAX_LEN))
