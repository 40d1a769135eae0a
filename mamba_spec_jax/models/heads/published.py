"""The heads for multi-token prediction that published checkpoints carry, as `mtp.` weights.

Those of Qwen3-Next and Qwen3.5, and that of Nemotron-H.

At position t such a head reads the embedding of token t + 1 and the target's final hidden state of token t, both
normed; a projection of the two goes through layers of the target's own kind. Their normed output predicts token t + 2,
and is what the head reads in the place of the target's hidden state one token further on.
"""

import dataclasses
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_spec_jax.array_types import Array, Hidden, Tokens
from mamba_spec_jax.attention.base import AttentionInputs, ForwardBatch
from mamba_spec_jax.attention.full import FullAttention
from mamba_spec_jax.cache.pools import KVCache
from mamba_spec_jax.layers.norms import RMSNorm
from mamba_spec_jax.layers.projections import Linear, matmul
from mamba_spec_jax.models.checkpoint import open_weights, read_json
from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.models.families import family_of
from mamba_spec_jax.models.heads.config import HeadConfig
from mamba_spec_jax.models.heads.head import DraftHead, HeadCache
from mamba_spec_jax.models.hf_config import HFConfig
from mamba_spec_jax.models.hybrid_lm import HybridModel
from mamba_spec_jax.models.loading import check_weights, read_weight
from mamba_spec_jax.models.network import HybridLayer, norm_options
from mamba_spec_jax.modes import DTypePolicy

_PREFIX = "mtp."


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedConfig(HeadConfig):
    """A head that a checkpoint carries.

    Attributes:
        layers: its layers, described as those of a model; one of them attends.
    """

    layers: HybridConfig


class PublishedPrediction(nnx.Module):
    """The head's own weights, and the target's final norm, which what it reads of the target has gone through."""

    def __init__(self, config: HeadConfig, policy: DTypePolicy, rngs: nnx.Rngs):
        layers, D = cast(PublishedConfig, config).layers, config.hidden_size
        norm = norm_options(layers, policy)
        self.target_norm = RMSNorm(D, **norm)
        self.embedding_norm = RMSNorm(D, **norm)
        self.hidden_norm = RMSNorm(D, **norm)
        self.fc = Linear(2 * D, D, use_bias=False, dtype=policy.activations, param_dtype=policy.params, rngs=rngs)
        self.layers = nnx.List([HybridLayer(layers, i, policy, rngs) for i in range(len(layers.layer_types))])
        self.norm = RMSNorm(D, **norm)
        self.residual_in_fp32 = layers.residual_in_fp32
        self.logits_divisor = config.logits_divisor

    def features(self, hidden: tuple[Hidden, ...]) -> Hidden:
        return self.target_norm(hidden[0])

    def __call__(
        self, embedded: Hidden, hidden: Hidden, attention: "_Attention", kv: KVCache, batch: ForwardBatch
    ) -> tuple[Hidden, KVCache]:
        x = self.fc(jnp.concatenate([self.embedding_norm(embedded), self.hidden_norm(hidden)], axis=-1))
        x = x.astype(jnp.float32) if self.residual_in_fp32 else x
        cache: Any = kv
        backend: Any = attention
        for layer in self.layers:
            x, cache, _ = layer(x, backend, cache, None, batch)
        return self.norm(x).astype(embedded.dtype), cache

    def logits(self, hidden: Hidden, output: Array) -> Array:
        product = matmul(hidden, output, dtype=jnp.float32)
        return product / self.logits_divisor


class PublishedHead(DraftHead):
    """The static side of `PublishedPrediction`.

    Fulfils `mamba_spec_jax.speculative.protocol.AutoregressiveHead`.
    """

    def read(
        self, params: Any, layer: int, tokens: Tokens, hidden: Hidden, cache: HeadCache, batch: ForwardBatch
    ) -> tuple[Hidden, HeadCache]:
        """The head over a window, whose keys and values are written; lengths stay. As `EagleHead.read`, `layer` 0."""
        config = cast(PublishedConfig, self.config)
        attention = _Attention(FullAttention(config.layers.attention_scale))
        hidden, kv = self._module(params)(self._embed(params, tokens), hidden, attention, cache.kv, batch)
        return hidden, dataclasses.replace(cache, kv=kv)


@dataclasses.dataclass(frozen=True)
class _Attention:
    """What the head's layers take for their backend: attention over keys and values of the only one that attends."""

    full: FullAttention

    def forward(self, layer_id: int, inputs: AttentionInputs, cache: KVCache, record: None, batch: ForwardBatch):
        mixed, kv = self.full.forward(0, inputs, cache, batch)
        return mixed, kv, record


def load_published_head(folder: Path, target: HybridModel, target_params: Any) -> tuple[PublishedHead, Any]:
    """The head that a target's own checkpoint carries, and its weights bound to the target's.

    Args:
        folder: of the checkpoint.
        target: the model of that checkpoint, whose dtypes the head takes.
        target_params: its weights: embedding, output projection and final norm are the head's too.

    Raises:
        ValueError: the checkpoint carries no head, one of an unknown kind, or a damaged one; says which part.
    """
    hf = HFConfig(read_json(folder / "config.json"), str(folder / "config.json"))
    family = family_of(hf)
    with open_weights(folder) as files:
        stored = {family.canonical(name): name for name in files.shapes if name.startswith(_PREFIX)}
        if not stored or family.prediction is None:
            known = (
                "" if family.prediction else f", and the form of such a head in {target.config.model_type} is unknown"
            )
            raise ValueError(f"{folder} has {len(stored)} weights named {_PREFIX}{known}: it cannot draft for itself")
        config = _head_config(family.prediction.config(hf, target.config), target.config)
        head = PublishedHead.create(PublishedPrediction, config, target.policy)
        abstract = nnx.to_flat_state(_abstract(head))
        leaves = {".".join(map(str, path)): leaf for path, leaf in abstract}
        shapes = {path: leaf.shape for path, leaf in leaves.items() if not path.startswith("target_norm.")}
        weights = list(family.prediction.weights(config.layers))
        check_weights(weights, shapes, {name: files.shapes[stored[name]] for name in stored}, folder)
        values = {weight.path: read_weight(weight, files, stored, leaves[weight.path]) for weight in weights}
    borrowed = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(target_params)}
    values["target_norm.weight"] = borrowed["norm.weight"]
    params = nnx.from_flat_state(
        [(path, leaf.replace(jnp.asarray(values[".".join(map(str, path))]))) for path, leaf in abstract]
    )
    return head, head.bind(params, borrowed["embed_tokens.embedding"], borrowed.get("lm_head.kernel"))


def _head_config(layers: HybridConfig, target: HybridConfig) -> PublishedConfig:
    return PublishedConfig(
        hidden_size=layers.hidden_size,
        intermediate_size=layers.shared_intermediate_size or layers.expert_intermediate_size,
        num_attention_heads=layers.num_attention_heads,
        num_key_value_heads=layers.num_key_value_heads,
        head_dim=layers.head_dim,
        vocab_size=layers.vocab_size,
        target_layers=(len(target.layer_types) - 1,),
        rope_theta=None,  # its layers rotate by themselves
        norm_eps=layers.norm_eps,
        embedding_multiplier=layers.embedding_multiplier,
        logits_divisor=layers.logits_divisor,
        layers=layers,
    )


def _abstract(head: PublishedHead) -> Any:
    return jax.eval_shape(lambda: nnx.split(PublishedPrediction(head.config, head.policy, nnx.Rngs(0)))[1])
