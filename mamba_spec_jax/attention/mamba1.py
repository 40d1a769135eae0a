"""Mamba-1 as a recurrent backend (Gu and Dao 2023): a decay for every channel and state, computed token by token.

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T,    y_t = h_t C_t + D x_t            h, A: [C, N]; dt, x: [C]

All arithmetic is float32, and the state is rounded to its dtype after every token. There is no chunked form: a decay
that differs between states leaves no products of matrices.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from mamba_spec_jax.array_types import Array, Float, Rows
from mamba_spec_jax.attention.base import ForwardBatch
from mamba_spec_jax.attention.recurrence import Recurrence
from mamba_spec_jax.cache.pools import LeafSpec, slot_index
from pallas_kernels import loops
from pallas_kernels import ring as rings
from pallas_kernels.arithmetic import alike, contract, fenced, rounded
from pallas_kernels.ring import Ring


class Mamba1Tokens(NamedTuple):
    """What the recurrence reads: x and dt `[B, T, C]`, B and C `[B, T, N]`; C None gives no outputs."""

    x: Array
    dt: Array
    B: Array
    C: Any


@flax.struct.dataclass
class Mamba1Weights:
    """What the recurrence needs of a layer's weights.

    Attributes:
        conv_weight: `[W, C]`, the token's own tap last.
        conv_bias: `[C]` or None.
        A_log: `[C, N]`; A = -exp(A_log).
        D: `[C]`.
    """

    conv_weight: Float[Array, "W C"]
    conv_bias: Float[Array, "C"] | None
    A_log: Float[Array, "C N"]
    D: Float[Array, "C"]


@flax.struct.dataclass
class Mamba1Inputs:
    """What a layer hands to its backend.

    Attributes:
        conv_inputs: `[B, T, C]`.
        weights: the layer's.
        parameters: dt `[B, T, C]` in float32 and after softplus, B and C `[B, T, N]`, which the layer makes of the
            convolution's outputs (static).
    """

    conv_inputs: Float[Array, "B T C"]
    weights: Mamba1Weights
    parameters: Callable[[Array], tuple[Array, Array, Array]] = flax.struct.field(pytree_node=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba1(Recurrence):
    """A Mamba-1 recurrence over a pool: H is 1, P the channels; both ways to verify are the step recurrence."""

    heads: int = 1

    inputs_type: ClassVar[type] = Mamba1Inputs

    @property
    def conv_channels(self) -> int:
        return self.head_dim

    def _kept(self, dtype) -> tuple[tuple[LeafSpec, ...], tuple[LeafSpec, ...]]:
        float32 = np.dtype(np.float32)
        inputs = (("x", (self.head_dim,), dtype), ("dt", (self.head_dim,), float32), ("B", (self.state,), dtype))
        return inputs, (("A", (self.head_dim, self.state), float32),)

    def _constants(self, inputs: Mamba1Inputs) -> dict[str, Array]:
        return {"A": fenced(-jnp.exp(inputs.weights.A_log.astype(jnp.float32)))}

    def _tokens(self, mixed: Array, inputs: Mamba1Inputs, batch: ForwardBatch) -> Mamba1Tokens:
        dt, B, C = inputs.parameters(mixed)
        return Mamba1Tokens(x=mixed, dt=jnp.where(batch.is_real[..., None], dt, 0), B=B, C=C)

    def _scan(
        self, index: int, tokens: Mamba1Tokens, inputs: Mamba1Inputs, batch: ForwardBatch, state: Array
    ) -> tuple[Array, Array]:
        at = slot_index(batch.slots, state.shape[1])
        A, D = self._constants(inputs)["A"], inputs.weights.D.astype(jnp.float32)
        y, h, _ = _step_scan(state.at[index, at].get(mode="fill", fill_value=0), tokens, A, D, None, index)
        return y[:, :, None], state.at[index, at].set(h, mode="drop")

    def _update(
        self, index: int, tokens: Mamba1Tokens, inputs: Mamba1Inputs, batch: ForwardBatch, state: Array,
        *, snapshots: Array | None = None, ring: Ring | None = None, fold: Array | None = None,
    ) -> tuple[Array, Array, Array | None, Ring | None]:  # fmt: skip
        at = slot_index(batch.slots, state.shape[1])
        A, D = self._constants(inputs)["A"], inputs.weights.D.astype(jnp.float32)
        h0 = state.at[index, at].get(mode="fill", fill_value=0)
        if ring is not None and fold is not None:
            # Written before the history is read: in the other order XLA copies the ring.
            kept = {"x": tokens.x, "dt": tokens.dt, "B": tokens.B}
            ring = rings.write_tokens(ring, index, batch.slots, kept)
            counts = rings.rows_of(ring.counts, batch.slots)
            h0 = self._fold(h0, rings.read_history(ring, index, batch.slots), {"A": A}, counts)
            state = state.at[index, jnp.where(fold, at, state.shape[1])].set(h0, mode="drop")
        if batch.parents is None:
            y, _, snapshots = _step_scan(h0, tokens, A, D, snapshots, index)
        else:
            y, snapshots = _step_tree(h0, tokens, A, D, batch.parents, snapshots, index)
        return y[:, :, None], state, snapshots, ring

    def _fold(self, h0: Array, kept: dict[str, Array], constants: dict[str, Any], counts: Rows) -> Array:
        tokens = _time_first(Mamba1Tokens(**kept, C=None))

        def step(t, h):
            after = _state_step(h, jax.tree.map(lambda leaf: leaf[t], tokens), constants["A"]).astype(h.dtype)
            return jnp.where((t < counts)[:, None, None, None], after, h)

        most = jnp.minimum(jnp.max(counts, initial=0), kept["dt"].shape[1])
        return loops.fori_loop(jnp.int32(0), most, step, h0)


def _step_scan(
    h0: Array, tokens: Mamba1Tokens, A: Array, D: Array, snapshots: Array | None, index: int
) -> tuple[Array, Array, Array | None]:
    """A chain: outputs `[B, T, C]`, the state after it, and that after every token as layer `index` of the snapshots.

    A scan even for one token, so that the compiled body and its bits are the same for every T.
    """

    def step(carry, per_token):
        h, snapshots = carry
        token, t = per_token
        h, y = _advance(h, token, A, D)
        if snapshots is not None:
            snapshots = snapshots.at[index, :, t].set(h)
        return (h, snapshots), y

    times = jnp.arange(tokens.dt.shape[1], dtype=jnp.int32)
    (h, snapshots), y = loops.scan(step, (h0, snapshots), (_time_first(tokens), times))
    return jnp.moveaxis(y, 0, 1), h, snapshots


def _step_tree(
    h0: Array, tokens: Mamba1Tokens, A: Array, D: Array, parents: Array, snapshots: Array | None, index: int
) -> tuple[Array, Array | None]:
    """A tree: every node from its parent's state as it was stored, a root from h0; outputs and snapshots."""
    B, T = parents.shape
    rows, layer = jnp.arange(B, dtype=jnp.int32), 0 if snapshots is None else index
    states = jnp.zeros((1, B, T, *h0.shape[1:]), h0.dtype) if snapshots is None else snapshots

    def step(states, per_node):
        token, t, parent = per_node
        before = states[layer, rows, jnp.maximum(parent, 0)]
        h, y = _advance(jnp.where((parent < 0)[:, None, None, None], h0, before), token, A, D)
        return states.at[layer, :, t].set(h), y

    states, y = loops.scan(step, states, (_time_first(tokens), jnp.arange(T, dtype=jnp.int32), parents.T))
    return jnp.moveaxis(y, 0, 1), None if snapshots is None else states


def _state_step(h: Array, token: Mamba1Tokens, A: Array) -> Array:
    """One token (no T axis): `h [B, 1, C, N]` in its storage dtype; the result in float32."""
    decay = alike(jnp.exp, rounded(token.dt[..., None] * A[None]))
    injected = (token.dt * token.x)[..., None] * token.B[:, None]
    return rounded(h.astype(jnp.float32) * decay[:, None]) + rounded(injected)[:, None]


def _advance(h: Array, token: Mamba1Tokens, A: Array, D: Array) -> tuple[Array, Array]:
    """The state after one token, rounded to its storage dtype, and the output `[B, C]`, which reads the unrounded."""
    new = _state_step(h, token, A)
    return new.astype(h.dtype), contract(new[:, 0], token.C) + rounded(D[None] * token.x)


def _time_first(tokens: Mamba1Tokens) -> Mamba1Tokens:
    return jax.tree.map(lambda leaf: jnp.moveaxis(leaf.astype(jnp.float32), 1, 0), tokens)
