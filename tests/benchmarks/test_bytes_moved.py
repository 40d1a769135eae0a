"""The byte model keeps its bounds, and counting the kernels' accesses gives its bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from benchmarks import byte_counts, byte_model, bytes_moved
from benchmarks.accesses import count_accesses
from benchmarks.published import MODELS, GatedDelta, Mamba2, Model
from pallas_kernels.compat import triton
from pallas_kernels.decode_attention.shapes import AttentionShape

ATTENTION = AttentionShape(layers=1, heads=4, kv_heads=2, head_dim=16)
TINY = {
    "mamba2": Model("mamba2", 1, Mamba2(heads=4, head_dim=8, state=16, groups=2), 64, ATTENTION),
    "delta": Model("delta", 1, GatedDelta(key_heads=1, heads=2, value_dim=8, key_dim=16), 48, ATTENTION),
}
EACH_MODEL = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)


def of_state(model, strategy, tokens, tree=False):
    return byte_model.recurrence(model, strategy, tokens, 4, tree).state / (model.recurrence.state_size * 4)


@EACH_MODEL
def test_replay_keeps_the_bounds(model):
    """On chains and on trees, which put a path in order without moving what is in it."""
    for tree in (False, True):
        assert of_state(model, "replay", 4, tree) <= 1.35
        assert of_state(model, "replay", 16, tree) <= 1.6
    for tokens in (1, 4, 8, 16):
        assert of_state(model, "snapshot", tokens) == tokens + 3
    for itemsize in (4, 2):
        resident = [byte_model.resident(model, strategy, 8, itemsize) for strategy in ("replay", "snapshot")]
        assert resident[0] < resident[1] / 4


def test_the_page_says_which_bounds_are_missed(monkeypatch):
    none = "that are missed:\n\nNone.\n"
    assert none in bytes_moved.page(count=False)
    monkeypatch.setattr(bytes_moved, "LIMITS", {4: 1.34})
    missed = list(bytes_moved.over_limits())
    assert {line.split(",")[0] for line in missed} == {"qwen3-next", "qwen3.5-35b"}
    page = bytes_moved.page(count=False)
    assert none not in page
    assert all(f"- {line}\n" in page for line in missed)


@pytest.mark.parametrize(("tokens", "length"), [(4, 16), (16, 64), (3, 6)])
def test_cursors_come_to_rest_where_the_rule_says(tokens, length):
    """Between two folds a ring takes in what is accepted, no less than it gives out, and never more than it holds."""
    steady = byte_model.steady_state(tokens, length)
    assert steady.accepted == pytest.approx(0.7 * tokens, rel=0.02)
    assert steady.folds == pytest.approx(steady.accepted / (length - 2 * tokens + steady.accepted), rel=0.25)
    assert 0 < steady.history < length - tokens


@pytest.mark.parametrize("model", TINY.values(), ids=TINY)
@pytest.mark.parametrize("strategy", ["snapshot", "replay"])
def test_recurrences_move_what_the_formula_says(model, strategy):
    counted = byte_counts.recurrence(model, strategy, 3, 4)
    assert counted.distinct == pytest.approx(byte_model.recurrence(model, strategy, 3, 4).moved, rel=1e-12)
    assert counted.issued >= counted.distinct


@pytest.mark.parametrize("context", [5, 300])
def test_attention_moves_what_the_formula_says(context):
    """One chunk and several of 128 positions, the last one partly filled."""
    model = TINY["mamba2"]
    counted = byte_counts.attention(model, 3, context, 400)
    formula = byte_model.attention(model, 3, 1, context, 400)
    assert counted.distinct == formula.moved
    assert formula.state > formula.floor - formula.window, "parts are counted"


def test_the_commit_moves_what_the_formula_says():
    model = TINY["mamba2"]
    counted = byte_counts.commit(model, 8, 4)  # long enough that the new window holds none of the old one
    assert counted.distinct == byte_model.commit(model, 8, 4).moved == counted.issued


def gather_kernel(index_ref, source_ref, out_ref):
    """Row `index[i]` of the source, twice; -1 is skipped."""
    i = pl.program_id(0)
    row = index_ref[i]

    @pl.when(row >= 0)
    def _():
        columns = jnp.arange(8, dtype=jnp.int32)
        values = sum(triton.load(source_ref.at[row, columns], mask=columns < 5, other=0) for _ in range(2))
        triton.store(out_ref.at[i, columns], values, mask=columns < 5)


def gathered(index, source):
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        gather_kernel,
        grid=index.shape,
        in_specs=[anywhere] * 2,
        out_specs=anywhere,
        out_shape=jax.ShapeDtypeStruct((index.size, 5), source.dtype),
        compiler_params=triton.CompilerParams(),
    )(index, source)


SOURCE = jax.ShapeDtypeStruct((4, 5), jnp.float32)


def test_counting_follows_indices_masks_and_branches():
    (kernel,) = count_accesses(gathered, {"index": np.array([2, -1, 2], np.int32), "source": SOURCE})
    source, out = kernel.arrays["source"], kernel.arrays[f"{kernel.name} output 0"]
    assert (source.read.issued, source.read.distinct) == (2 * 2 * 20, 20)
    assert (out.written.issued, out.written.distinct, out.read.issued) == (40, 40, 0)
    assert kernel.total() == 20 + 40 + 3 * 4


def test_counting_refuses_what_it_cannot_know():
    with pytest.raises(IndexError, match=r"source \[4, 5\] is accessed at"):
        count_accesses(gathered, {"index": np.array([4], np.int32), "source": SOURCE})
    with pytest.raises(ValueError, match="a branch depends on a value that is no integer argument"):
        count_accesses(gathered, {"index": jax.ShapeDtypeStruct((1,), jnp.int32), "source": SOURCE})
    half = pl.BlockSpec((2, 5), lambda i: (i, 0))
    blocked = pl.pallas_call(
        lambda source_ref, out_ref: None,
        grid=(2,),
        in_specs=[half],
        out_specs=half,
        out_shape=SOURCE,
        compiler_params=triton.CompilerParams(),
    )
    with pytest.raises(NotImplementedError, match="source is cut by a BlockSpec"):
        count_accesses(lambda source: blocked(source), {"source": SOURCE})
