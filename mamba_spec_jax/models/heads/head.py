"""The static side of draft heads: their modules run over their own cache; weights are passed as `params`."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Self

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from mamba_spec_jax.array_types import Array, Hidden, Rows, Tokens
from mamba_spec_jax.attention.base import AttentionInputs, ForwardBatch
from mamba_spec_jax.attention.full import FullAttention, write_window
from mamba_spec_jax.cache.pools import KVCache
from mamba_spec_jax.models.heads.config import HeadConfig
from mamba_spec_jax.modes import DTypePolicy, ForwardMode

# What makes a head: `Eagle3`, `MultiTokenPrediction` or `DFlash`, called with configuration, dtypes and keys.
HeadModule = Callable[[HeadConfig, DTypePolicy, nnx.Rngs], nnx.Module]


@flax.struct.dataclass
class HeadCache:
    """What a head has read: keys and values of each of its layers, a row for each row of the batch.

    Attributes:
        kv: one buffer a layer; rows past the lengths may hold anything.
        lengths: `[B]` positions read for good.
    """

    kv: KVCache
    lengths: Rows

    @property
    def max_len(self) -> int:
        return self.kv.keys[0].shape[1]


@dataclasses.dataclass(frozen=True)
class DraftHead:
    """A head without weights. Build it with `create`.

    Attributes:
        config: what the head is.
        policy: dtypes.
        graphdef: structure of its flax module, from `nnx.split`.
        shapes: of its weights, by dotted path.
    """

    config: HeadConfig
    policy: DTypePolicy
    graphdef: Any
    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def create(cls, module: HeadModule, config: HeadConfig, policy: DTypePolicy | None = None) -> Self:
        """A head of the kind `module`, such as `Eagle3`; `policy` None is all float32."""
        policy = policy or DTypePolicy()
        graphdef, abstract = nnx.split(nnx.eval_shape(lambda: module(config, policy, nnx.Rngs(0))))
        return cls(config, policy, graphdef, _shapes(abstract))

    def init_params(self, module: HeadModule, seed: int) -> Any:
        """Random weights of the head alone; see `bind`."""
        return jax.jit(lambda: nnx.split(module(self.config, self.policy, nnx.Rngs(seed)))[1])()

    @staticmethod
    def bind(params: Any, embedding: Array, output: Array | None = None) -> dict[str, Any]:
        """The head's weights with what it borrows of its target, for the methods below; nothing is copied.

        Args:
            params: of the head.
            embedding: `[V, D]` the target's.
            output: `[D, V]` the target's output projection, None if that is its embedding too.
        """
        return {"head": params, "embedding": embedding, "output": output}

    def init_cache(self, batch: int, max_len: int) -> HeadCache:
        """An empty cache of `batch` rows of `max_len` positions."""
        config = self.config
        shape = (batch, max_len, config.num_key_value_heads, config.head_dim)
        keys, values = (tuple(jnp.zeros(shape, self.policy.kv) for _ in range(config.num_layers)) for _ in range(2))
        return HeadCache(KVCache(keys, values), jnp.zeros((batch,), jnp.int32))

    @staticmethod
    def window(cache: HeadCache, num_tokens: Rows, width: int, offset: int | Array = 0) -> ForwardBatch:
        """`width` positions of each row, `num_tokens[b]` of them real, starting `offset` after the committed ones."""
        lengths = cache.lengths + offset
        return ForwardBatch(
            slots=jnp.arange(lengths.size, dtype=jnp.int32),
            lengths=lengths,
            num_tokens=num_tokens,
            positions=lengths[:, None] + jnp.arange(width, dtype=jnp.int32)[None],
            mode=ForwardMode.DRAFT_EXTEND,
            kv_len=cache.max_len,
        )

    def features(self, params: Any, hidden: tuple[Hidden, ...]) -> Hidden:
        """`[B, T, D]` what the head's first layer reads of the target's hidden states."""
        widths, layers = [layer.shape[-1] for layer in hidden], self.config.target_layers
        if widths != [self.config.hidden_size] * len(layers):
            raise ValueError(
                f"a draft head got hidden states of widths {widths}, expected those of the target's layers {layers}, "
                f"{self.config.hidden_size} wide: generate with the target that load_drafter returned, or "
                "with_hidden_layers of the model that this head was made for"
            )
        return self._module(params).features(tuple(layer.astype(self.policy.activations) for layer in hidden))

    def logits(self, params: Any, hidden: Hidden) -> Array:
        """`[..., V]` float32 of the token after each hidden state; -inf for tokens the head cannot propose."""
        borrowed = self._checked(params)
        output = borrowed["embedding"].T if borrowed["output"] is None else borrowed["output"]
        return self._module(params).logits(hidden, output.astype(self.policy.activations))

    def _embed(self, params: Any, tokens: Tokens) -> Hidden:
        embedded = self._checked(params)["embedding"][jnp.maximum(tokens, 0)].astype(self.policy.activations)
        return embedded * self.config.embedding_multiplier

    def _module(self, params: Any) -> Any:
        return nnx.merge(self.graphdef, self._checked(params)["head"])

    def _checked(self, params: Any) -> dict[str, Any]:
        """The bound weights; ValueError if they are not those of such a head."""
        if not isinstance(params, dict) or set(params) != {"head", "embedding", "output"}:
            raise ValueError(
                f"a draft head got {_described(params)} as weights: pass what load_drafter, or bind, returned as "
                "drafter_params"
            )
        embedding = (self.config.vocab_size, self.config.hidden_size)
        found = dict(_shapes(params["head"])) | {"embedding": tuple(params["embedding"].shape)}
        wanted = dict(self.shapes) | {"embedding": embedding}
        for name in sorted({*found, *wanted}):
            if found.get(name) != wanted.get(name):
                came, due = (
                    "none" if shape is None else str(list(shape)) for shape in (found.get(name), wanted.get(name))
                )
                raise ValueError(
                    f"a draft head got the weights of another head or model: {name} is {came}, expected {due}"
                )
        return params


class EagleHead(DraftHead):
    """The static side of `Eagle3` and `MultiTokenPrediction`.

    Fulfils `mamba_spec_jax.speculative.protocol.AutoregressiveHead`.
    """

    def read(
        self, params: Any, layer: int, tokens: Tokens, hidden: Hidden, cache: HeadCache, batch: ForwardBatch
    ) -> tuple[Hidden, HeadCache]:
        """One layer over a window, whose keys and values are written; lengths stay.

        Args:
            params: from `bind`.
            layer: which (static).
            tokens: `[B, T]` the newest token at each position; negative ones are padding.
            hidden: `[B, T, D]` what the layer reads beside each.
            cache: of the head.
            batch: the window, from `window` for a chain.

        Returns:
            `[B, T, D]` its hidden states, and the cache.
        """
        attend = _Attention(self.config, layer, cache.kv, batch)
        module = self._module(params).layer(layer)
        hidden = module(self._embed(params, tokens), hidden, batch.positions, attend)
        return hidden, dataclasses.replace(cache, kv=attend.kv)


class DFlashHead(DraftHead):
    """The static side of `DFlash`.

    Fulfils `mamba_spec_jax.speculative.protocol.BlockHead`.
    """

    def read(self, params: Any, hidden: tuple[Hidden, ...], cache: HeadCache, num_tokens: Rows) -> HeadCache:
        """Projects what the target has read, `num_tokens[b]` positions of each row, to every layer's keys and values.

        Args:
            params: from `bind`.
            hidden: `[B, T, D]` of each target layer that is read.
            cache: of the head; its lengths advance.
            num_tokens: `[B]`.
        """
        features = self.features(params, hidden)
        batch = self.window(cache, num_tokens, features.shape[1])
        kv = cache.kv
        for index, layer in enumerate(self._module(params).layers):
            key, value = layer.self_attn.key_value(features, batch.positions)
            kv = write_window(index, key, value, kv, batch)
        return HeadCache(kv, cache.lengths + num_tokens)

    def fill(self, params: Any, tokens: Tokens, cache: HeadCache) -> tuple[Hidden, HeadCache]:
        """`[B, T, D]` hidden states of a block that follows the committed positions.

        Args:
            params: from `bind`.
            tokens: `[B, T]` the block: its first token, then masks.
            cache: of the head; the block's keys and values are written after its `lengths`, which do not change.
        """
        B, T = tokens.shape
        batch = self.window(cache, jnp.full((B,), T, jnp.int32), T)
        both_ways = dataclasses.replace(batch, ancestors=jnp.ones((B, T, T), bool))  # all of the block sees all of it
        x, kv = self._embed(params, tokens), cache.kv
        for index, layer in enumerate(self._module(params).layers):
            mixed = _Attention(self.config, index, kv, batch if self.config.fills_causally(index) else both_ways)
            x = layer(x, batch.positions, mixed)
            kv = mixed.kv
        return x, dataclasses.replace(cache, kv=kv)


def _shapes(params: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((".".join(map(str, path)), tuple(leaf.shape)) for path, leaf in nnx.to_flat_state(params))


def _described(params: Any) -> str:
    return f"a dict of {sorted(map(str, params))}" if isinstance(params, dict) else f"a {type(params).__name__}"


class _Attention:
    """What a module's layer calls to attend: keeps the cache that attention returns beside its result."""

    def __init__(self, config: HeadConfig, index: int, kv: KVCache, batch: ForwardBatch):
        self.kv = kv
        full = FullAttention(scale=1 / math.sqrt(config.head_dim), sliding_window=config.window(index))
        self._forward = functools.partial(full.forward, index)
        self._batch = batch

    def __call__(self, inputs: AttentionInputs) -> Array:
        mixed, self.kv = self._forward(inputs, self.kv, self._batch)
        return mixed
