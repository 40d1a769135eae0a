"""Mamba-2's recurrence (Dao and Gu 2024), token by token and in the chunked (state-space dual) form.

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T,    y_t = h_t C_t + D x_t            h: [P, N] per head

In the shapes below B is the batch, T tokens, H heads, P head dim, N state, G groups; head h reads group h // (H/G).
All arithmetic is float32. A token with dt = 0 leaves the state as it is.
"""

import flax.struct
import jax
import jax.numpy as jnp

from mamba_spec_jax.array_types import Ancestors, Array, Float, Rows, SSMStates
from mamba_spec_jax.attention.arithmetic import fenced, rounded

Sums = tuple[Array, Array]  # of a path's dt A, and what rounding took from them

_EXACT = jax.lax.Precision.HIGHEST  # a GPU would otherwise compute float32 products in TF32


@flax.struct.dataclass
class SSMInputs:
    """What the recurrence reads of a window.

    Attributes:
        x: `[B, T, H, P]`.
        dt: `[B, T, H]` time steps, after softplus and clamp.
        B: `[B, T, G, N]`.
        C: `[B, T, G, N]`.
    """

    x: Float[Array, "B T H P"]
    dt: Float[Array, "B T H"]
    B: Float[Array, "B T G N"]
    C: Float[Array, "B T G N"]


def state_step(h: Array, token: SSMInputs, decay: Array) -> Array:
    """One token (no T axis): `h [B, H, P, N]` in its storage dtype, `decay [B, H]`; the result in float32."""
    injected = (token.dt[..., None] * token.x)[..., None] * _per_head(token.B, h.shape[1])[:, :, None, :]
    return rounded(h.astype(jnp.float32) * decay[..., None, None]) + rounded(injected)


def advance(h: Array, token: SSMInputs, decay: Array, D: Array) -> tuple[Array, Array]:
    """One token: the state after it, rounded to its storage dtype, and the output, which reads the unrounded one."""
    h_new = state_step(h, token, decay)
    y = _contract(h_new, _per_head(token.C, h.shape[1])) + rounded(D[:, None] * token.x)
    return h_new.astype(h.dtype), y


def _contract(h: Array, C: Array) -> Array:
    """`h_t C_t [B, H, P]`, with bits that depend neither on T nor on a row's place in the batch.

    Summed pairwise, halves onto halves: a library's product may add in another order for another row, and a plain sum
    over the innermost axis is not vectorised on a CPU.
    """
    terms = rounded(h * C[:, :, None, :])
    while (n := terms.shape[-1]) > 1:
        pairs = terms[..., : n // 2] + terms[..., n // 2 : n // 2 * 2]
        terms = jnp.concatenate([pairs, terms[..., n // 2 * 2 :]], axis=-1) if n % 2 else pairs
    return terms[..., 0]


def _per_head(grouped: Array, heads: int) -> Array:
    """`[B, G, N]` to `[B, H, N]`."""
    return jnp.repeat(grouped, heads // grouped.shape[1], axis=1)


def scanned_tokens(inputs: SSMInputs, A: Array) -> tuple[SSMInputs, Array, Array]:
    """What a scan over tokens reads: inputs and decays, time first, and each token's index."""
    inputs = jax.tree.map(lambda leaf: jnp.moveaxis(leaf.astype(jnp.float32), 1, 0), inputs)
    return inputs, fenced(jnp.exp(inputs.dt * A)), jnp.arange(inputs.x.shape[0])


def step_scan(
    h0: SSMStates,
    inputs: SSMInputs,
    A: Float[Array, "H"],
    D: Float[Array, "H"],
    snapshots: Float[Array, "L B T H P N"] | None,
    index: int,
) -> tuple[Float[Array, "B T H P"], Float[Array, "L B T H P N"] | None]:
    """The recurrence token by token: every output, and the state after every token as layer `index` of `snapshots`.

    The state is rounded to its storage dtype after every token, as if each had been decoded on its own. It is a scan
    even for one token: the compiled body is then the same for every T, and so are the bits. States go straight from
    the scan into `snapshots`, which saves copying all of them; None keeps none.
    """

    def step(carry, per_token):
        h, snapshots = carry
        token, decay, t = per_token
        h_new, y = advance(h, token, decay, D)
        if snapshots is not None:
            snapshots = snapshots.at[index, :, t].set(h_new)
        return (h_new, snapshots), y

    (_, snapshots), y = jax.lax.scan(step, (h0, snapshots), scanned_tokens(inputs, A))
    return jnp.moveaxis(y, 0, 1), snapshots


def fold(h0: SSMStates, inputs: SSMInputs, A: Float[Array, "H"], num_tokens: Rows) -> SSMStates:
    """The state after each row's first `num_tokens[b]` tokens, with the bits of `step_scan`."""

    def step(h, per_token):
        token, decay, t = per_token
        h_new = state_step(h, token, decay).astype(h.dtype)
        return jnp.where((t < num_tokens)[:, None, None, None], h_new, h), None

    h, _ = jax.lax.scan(step, h0, scanned_tokens(inputs, A))
    return h


def chunk_scan(
    h0: SSMStates, inputs: SSMInputs, A: Float[Array, "H"], D: Float[Array, "H"], chunk_size: int
) -> tuple[Float[Array, "B T H P"], Float[Array, "B H P N"]]:
    """The recurrence in chunks: every output, and the final state in float32; the last chunk may be short."""
    T = inputs.x.shape[1]
    chunk = min(chunk_size, T)
    padded = jax.tree.map(lambda leaf: _pad_time(leaf.astype(jnp.float32), -T % chunk), inputs)
    chunks = jax.tree.map(
        lambda leaf: jnp.moveaxis(leaf.reshape(leaf.shape[0], -1, chunk, *leaf.shape[2:]), 1, 0), padded
    )

    def step(h, window):
        y, decay_to_end = _chunk_outputs(h, window, A, D)
        weighted = (decay_to_end * window.dt)[..., None] * window.x
        B = _heads(window.B, h.shape[1])
        c_end = jnp.exp(jnp.sum(window.dt * A, axis=1))
        h = h * c_end[..., None, None] + jnp.einsum("bjhp,bjhn->bhpn", weighted, B, precision=_EXACT)
        return h, y

    h, y = jax.lax.scan(step, h0.astype(jnp.float32), chunks)
    y = jnp.moveaxis(y, 0, 1)
    return y.reshape(y.shape[0], -1, *y.shape[3:])[:, :T], h


def window_scan(
    h0: SSMStates,
    inputs: SSMInputs,
    A: Float[Array, "H"],
    D: Float[Array, "H"],
    snapshots: Float[Array, "L B T H P N"] | None,
    index: int,
) -> tuple[Float[Array, "B T H P"], Float[Array, "L B T H P N"] | None]:
    """One verify window in the chunked form; arguments and results as `step_scan`'s."""
    inputs = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), inputs)
    h = h0.astype(jnp.float32)
    y, _ = _chunk_outputs(h, inputs, A, D)
    if snapshots is None:
        return y, None
    states = window_states(h, inputs, _running_sums(rounded(inputs.dt * A)))
    return y, snapshots.at[index].set(states.astype(snapshots.dtype))


def window_outputs(h: Array, window: SSMInputs, D: Array, sums: Sums, visible: Ancestors | None = None) -> Array:
    """Outputs `[B, T, H, P]` of one window in float32.

    Args:
        h: `[B, H, P, N]` before the window.
        window: its tokens.
        D: `[H]`.
        sums: `[B, T, H]` of dt A up to each token, along its path.
        visible: `[B, T, T]` the tokens each token sees; None is itself and all before it.
    """
    H = h.shape[1]
    scores = jnp.einsum("btgn,bjgn->btjg", window.C, window.B, precision=_EXACT)
    weights = jnp.repeat(scores, H // scores.shape[-1], axis=-1) * _decay(sums, visible) * window.dt[:, None]
    y = jnp.einsum("btjh,bjhp->bthp", weights, window.x, precision=_EXACT)
    carried = jnp.einsum("bhpn,bthn->bthp", h, _heads(window.C, H), precision=_EXACT)
    return y + jnp.exp(sums[0])[..., None] * carried + D[:, None] * window.x


def window_states(h: Array, window: SSMInputs, sums: Sums, visible: Ancestors | None = None) -> Array:
    """States `[B, T, H, P, N]` after each token of one window in float32; arguments as `window_outputs`'s."""
    weights = _decay(sums, visible) * window.dt[:, None]  # [B, T, T, H]
    B = _heads(window.B, h.shape[1])
    states = jnp.einsum("btjh,bjhp,bjhn->bthpn", weights, window.x, B, precision=_EXACT)
    return states + jnp.exp(sums[0])[..., None, None] * h[:, None]


def _chunk_outputs(h: Array, window: SSMInputs, A: Array, D: Array) -> tuple[Array, Array]:
    """Outputs of one chunk from the state before it, and each token's decay up to the chunk's end `[B, T, H]`."""
    sums = _running_sums(rounded(window.dt * A))
    y = window_outputs(h, window, D, sums)
    return y, jnp.exp(_difference([c[:, -1:] for c in sums], sums))


def _running_sums(a: Array) -> Sums:
    """`c_t = a_1 + .. + a_t` along axis 1, and what rounding took from it, so that differences of c keep their digits.

    A decay from token j to t is exp(c_t - c_j), and c may have grown a thousandfold of that difference.
    """
    return jax.lax.associative_scan(add_sums, (a, jnp.zeros_like(a)), axis=1)


def add_sums(x: Sums, y: Sums) -> Sums:
    """The sum of two sums, with what rounding took from it (Knuth's two-sum)."""
    total = x[0] + y[0]
    added = total - x[0]
    return total, x[1] + y[1] + ((x[0] - (total - added)) + (y[0] - added))


def _difference(sums, others) -> Array:
    return (sums[0] - others[0]) + (sums[1] - others[1])


def _decay(sums: Sums, visible: Ancestors | None) -> Array:
    """`exp(c_t - c_j)` where t sees j and 0 elsewhere, `[B, T, T, H]` (t before j)."""
    T = sums[0].shape[1]
    seen = jnp.tril(jnp.ones((T, T), bool))[None, :, :, None] if visible is None else visible[..., None]
    between = _difference([c[:, :, None] for c in sums], [c[:, None] for c in sums])
    # Masked before the exponential: elsewhere the difference may be positive and overflow.
    return jnp.exp(jnp.where(seen, between, -jnp.inf))


def _heads(grouped: Array, heads: int) -> Array:
    """`[B, T, G, N]` to `[B, T, H, N]`."""
    return jnp.repeat(grouped, heads // grouped.shape[2], axis=2)


def _pad_time(leaf: Array, amount: int) -> Array:
    return jnp.pad(leaf, [(0, 0), (0, amount)] + [(0, 0)] * (leaf.ndim - 2))
