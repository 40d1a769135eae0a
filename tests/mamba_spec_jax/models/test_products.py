"""Nothing that a verify pass, or a draft head, computes gives a token other bits at another index."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mamba_spec_jax.cache.records import Draft
from mamba_spec_jax.models.families import FAMILIES, config_from_hf
from mamba_spec_jax.models.heads.dflash import DFlash
from mamba_spec_jax.models.heads.head import DFlashHead, EagleHead
from mamba_spec_jax.models.hybrid_lm import HybridModel
from mamba_spec_jax.modes import CommitStrategy, ReplayRing
from pallas_kernels import dispatch
from tests.golden.family_cases import FAMILY_CASES

from .. import tiny
from ..heads import KINDS, head_config, random_module
from ..products import ROWS, TOKENS, Product, depend_on_place, leftovers_of, products_of
from .checkpoints import CONFIG

PLAIN = [case for case in FAMILY_CASES if case.name == "plain"]
TEXTS = {case.family: case.config | {"model_type": case.family} for case in PLAIN} | {"granitemoehybrid": CONFIG}


@pytest.fixture(autouse=True)
def no_promoted_ranks():
    jax.config.update("jax_numpy_rank_promotion", "raise")
    yield
    jax.config.update("jax_numpy_rank_promotion", "allow")


def trace_verify(config, strategy: CommitStrategy = CommitStrategy.SNAPSHOT, tree: bool = False):
    """A pass over one row of `TOKENS` tokens, traced without weights."""
    model = HybridModel.create(config, strategy=strategy, replay=ReplayRing(length=3 * TOKENS, window=TOKENS))
    cache = jax.eval_shape(lambda: model.init_cache(1, 24))
    row = jax.ShapeDtypeStruct((1,), jnp.int32)
    window = jax.ShapeDtypeStruct((1, TOKENS), jnp.int32)
    draft = Draft(window, row, row, parents=window if tree else None)
    return jax.make_jaxpr(model.verify)(model.abstract_params(), draft, cache).jaxpr


def trace_head(kind: str):
    """Reading a target's hidden states, and what a head computes from them."""
    target = HybridModel.create(tiny.DENSE)
    config = head_config(kind, target)
    module = KINDS[kind][0]
    head = (DFlashHead if module is DFlash else EagleHead).create(module, config)
    D, V = config.hidden_size, target.vocab_size
    params = nnx.split(random_module(kind, config))[1]

    def run(embedding, tokens, hidden):
        bound = head.bind(params, embedding)
        cache = head.init_cache(1, 24)
        if isinstance(head, DFlashHead):
            cache = head.read(bound, hidden, cache, jnp.full((1,), TOKENS))
            return head.logits(bound, head.fill(bound, tokens, cache)[0])
        read = head.features(bound, hidden)
        for layer in range(config.num_layers):
            batch = head.window(cache, jnp.full((1,), TOKENS), TOKENS)
            read, cache = head.read(bound, layer, tokens, read, cache, batch)
        return head.logits(bound, read)

    states = tuple(jax.ShapeDtypeStruct((1, TOKENS, D), jnp.float32) for _ in config.target_layers)
    tokens = jax.ShapeDtypeStruct((1, TOKENS), jnp.int32)
    return jax.make_jaxpr(run)(jax.ShapeDtypeStruct((V, D), jnp.float32), tokens, states).jaxpr


@pytest.fixture(scope="module")
def products() -> list[Product]:
    traces = [*(trace_verify(config_from_hf(values)) for values in TEXTS.values()), *map(trace_head, KINDS)]
    return sorted({product for trace in traces for product in products_of(trace)}, key=str)


@pytest.mark.parametrize(("strategy", "tree"), [(CommitStrategy.SNAPSHOT, True), (CommitStrategy.REPLAY, False)])
@pytest.mark.parametrize("family", TEXTS)
def test_functions_leave_nothing_over(family, strategy, tree):
    assert list(leftovers_of(trace_verify(config_from_hf(TEXTS[family]), strategy, tree))) == []


@pytest.mark.parametrize("family", TEXTS)
def test_kernels_promote_no_ranks(family, monkeypatch):
    monkeypatch.setattr(dispatch, "target", lambda: dispatch.Device("gpu", "H100", (9, 0)))
    assert "pallas_call" in str(trace_verify(config_from_hf(TEXTS[family]), CommitStrategy.REPLAY, tree=True))


@pytest.mark.parametrize("kind", KINDS)
def test_functions_of_heads_leave_nothing_over(kind):
    assert list(leftovers_of(trace_head(kind))) == []


def test_every_family_is_traced():
    assert {family.removesuffix("_text") for family in TEXTS} == {family.removesuffix("_text") for family in FAMILIES}


@pytest.mark.parametrize("rows", ROWS)
def test_tokens_keep_their_bits_wherever_they_stand(products, rows):
    assert len(products) > 40
    assert depend_on_place(products, rows) == []


def test_a_product_of_one_column_is_found():
    """XLA's CPU product sums the last rows of one column in another order."""
    unsafe = products_of(jax.make_jaxpr(jnp.matmul)(jnp.zeros((1, TOKENS, 20)), jnp.zeros((20, 1))).jaxpr)
    assert [product.right for product in depend_on_place(list(unsafe), 13)] == [(20, 1)]
