"""How a token is chosen from logits: greedily or drawn, after which filters, and from which noise.

Every draw comes from a key made of (request seed, absolute position of the drawn token, purpose) and of nothing else:
the batch row, the cache slot, the number of nodes in a verify pass and the drafter cannot change it.
"""

import dataclasses
import enum
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32

from mamba_spec_jax.array_types import Array, Bool, Float, Int32, Rows, Seeds
from mamba_spec_jax.speculative.rows import per_row
from pallas_kernels import loops
from pallas_kernels.arithmetic import log_softmax


@dataclasses.dataclass(frozen=True)
class Greedy:
    """The likeliest token; the lowest id wins a tie. Needs no seeds and no temperature."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """A draw from the filtered distribution. Temperature and filters are numbers of each row: see `Filters`."""


Method = Greedy | Sampling


class Purpose(enum.IntEnum):
    """What a draw is for, below 4: draws for different purposes at one position are independent."""

    TOKEN = 0  # the emitted token, drawn from the target
    ACCEPT = 1  # whether a draft is accepted
    DRAFT = 2  # the draft, for drafters that draw theirs


def mask_logits(logits: Float[Array, "*N V"], forbidden: Bool[Array, "*N V"] | None) -> Float[Array, "*N V"]:
    """Logits in float32 with forbidden tokens at -inf; at least one token must be allowed."""
    logits = logits.astype(jnp.float32)
    return logits if forbidden is None else jnp.where(forbidden, -jnp.inf, logits)


@flax.struct.dataclass
class Filters:
    """Which likely tokens each row may draw: numbers in arrays, so that one program serves every combination of them.

    They are applied after the temperature in the order of Hugging Face transformers (`GenerationMixin`'s
    `_get_logits_processor`): top-k, top-p, min-p, each on the renormalised outcome of the one before. A filter is a
    threshold: tokens below it are dropped, and all tokens tied with it stay. Which tokens survive therefore never
    depends on the order of the vocabulary. A filter that is off changes no bit of its row.

    Attributes:
        top_k: `[B]` keeps the `top_k` likeliest tokens; 0 (and less) is off.
        top_p: `[B]` keeps the smallest set of likeliest tokens whose probability reaches `top_p`; 1 (and more) is off.
        min_p: `[B]` keeps the tokens at least `min_p` times as likely as the likeliest, 1 at most; 0 is off.
    """

    top_k: Rows
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]

    @classmethod
    def create(
        cls,
        batch: int,
        top_k: int | Sequence[int] = 0,
        top_p: float | Sequence[float] = 1.0,
        min_p: float | Sequence[float] = 0.0,
    ) -> "Filters":
        """Checks the numbers on the host; each is one for all rows, or one for each. ValueError for any other."""
        top_p_rows = per_row("top_p", top_p, batch, np.float32, least=0, most=1)
        if not np.all(top_p_rows > 0):
            raise ValueError(f"top_p is {top_p!r}, expected numbers above 0, and 1 for rows that take every token")
        return cls(
            top_k=jnp.asarray(per_row("top_k", top_k, batch, np.int32, least=0)),
            top_p=jnp.asarray(top_p_rows),
            min_p=jnp.asarray(per_row("min_p", min_p, batch, np.float32, least=0, most=1)),
        )

    def apply(self, log_probs: Float[Array, "B *N V"], drawn: Bool[Array, "B *ones"]) -> Float[Array, "B *N V"]:
        """Normalised log-probabilities of the tokens that are kept, -inf for the others, in the rows where `drawn`."""
        top_k, top_p, min_p = (_like_rows(rows, log_probs) for rows in (self.top_k, self.top_p, self.min_p))
        on = drawn & (top_k > 0)
        lowest = _lowest_kept(log_probs, jnp.ones_like(log_probs), top_k.astype(jnp.float32), on)
        log_probs = _keep(log_probs, lowest, on)
        # At 1 a float32 sum of all other tokens may round to 1, and would drop the least likely ones.
        on = drawn & (top_p < 1)
        bound = jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny)
        log_probs = _keep(log_probs, _lowest_kept(log_probs, jnp.exp(log_probs), bound, on), on)
        on = drawn & (min_p > 0)
        best = jnp.max(log_probs, axis=-1, keepdims=True)
        return _keep(log_probs, best + jnp.log(jnp.clip(min_p, 0, 1)), on)


def filtered_log_probs(
    logits: Float[Array, "B *N V"],
    temperature: Float[Array, "B"],
    filters: Filters | None = None,
    forbidden: Bool[Array, "B *N V"] | None = None,
) -> Float[Array, "B *N V"]:
    """Log-probabilities in float32 of the distribution that a row draws from; -inf for tokens it cannot draw.

    Args:
        logits: `[B, ..., V]` of any floating dtype.
        temperature: `[B]`; a row at 0 or below is greedy: all mass on the argmax, the lowest id winning a tie.
        filters: of each row; None for none at all.
        forbidden: `[B, ..., V]` tokens that must not be drawn, removed before the temperature and the filters.
    """
    logits = mask_logits(logits, forbidden)
    temperature = _like_rows(temperature.astype(jnp.float32), logits)
    drawn = temperature > 0
    # The maximum goes first: a tiny temperature then gives 0 and -inf rather than inf - inf.
    centred = logits - jnp.max(logits, axis=-1, keepdims=True)
    log_probs = log_softmax(centred / jnp.where(drawn, temperature, 1))
    if filters is not None:
        log_probs = filters.apply(log_probs, drawn)
    best = jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32)
    best = best == jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(drawn, log_probs, jnp.where(best, jnp.float32(0), -jnp.inf))


def draw_keys(seeds: Seeds, positions: Int32[Array, "B *N"], purpose: Purpose) -> Array:
    """The random key of each draw, a function of (seed, position, purpose) alone.

    The generator is pinned to threefry: the one that the process defaults to may give a row bits that depend on the
    batch around it.

    Args:
        seeds: `[B]` of the requests.
        positions: `[B, ...]` absolute position, prompt included, of the token that is drawn; below 2**30.
        purpose: what the draw is for (static).

    Returns:
        `[B, ...]` key array, shaped as `positions`.
    """

    def key_of(seed, position):
        return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), 4 * position + int(purpose))

    rows = seeds.astype(jnp.uint32).reshape(seeds.shape + (1,) * (positions.ndim - 1))
    rows = jnp.broadcast_to(rows, positions.shape)
    return jax.vmap(key_of)(rows.ravel(), positions.ravel()).reshape(positions.shape)


def perturbed(keys: Array, log_probs: Float[Array, "*N V"]) -> Float[Array, "*N V"]:
    """Log-probabilities plus Gumbel noise from each key: the largest is a draw, the n largest n draws without
    replacement (Gumbel 1954; Kool et al. 2019)."""
    uniforms = _uniforms(keys, log_probs.shape[-1], lowest=float(jnp.finfo(jnp.float32).tiny))
    return log_probs - jnp.log(-jnp.log(uniforms))


def draw_tokens(keys: Array, log_probs: Float[Array, "*N V"]) -> Int32[Array, "*N"]:
    """One token per key by the Gumbel-max rule: `argmax(log_probs + noise)`.

    Log-probabilities need not be normalised; a token at -inf is never drawn while another is above it.
    """
    return jnp.argmax(perturbed(keys, log_probs), axis=-1).astype(jnp.int32)


def draw_uniforms(keys: Array) -> Float[Array, "*N"]:
    """One float32 in [0, 1) per key: 0 is possible, 1 is not."""
    return _uniforms(keys, 1)[..., 0]


def _uniforms(keys: Array, number: int, lowest: float = 0.0) -> Float[Array, "*N n"]:
    """Float32 numbers in [lowest, 1): `jax.random.uniform` of each key with jax's default settings.

    That function draws others where `jax_threefry_partitionable` is off; a seed has the same draws in every program.
    """
    low = jnp.arange(number, dtype=jnp.uint32)
    counts = jnp.concatenate([jnp.zeros_like(low), low])

    def bits_of(pair):
        first, second = jnp.split(threefry_2x32((pair[0], pair[1]), counts), 2)
        return first ^ second

    bits = jax.vmap(bits_of)(jax.random.key_data(keys.ravel())).reshape(*keys.shape, number)
    mantissa = (bits >> np.uint32(9)) | np.uint32(0x3F800000)  # of a float in [1, 2)
    return jnp.maximum((jax.lax.bitcast_convert_type(mantissa, jnp.float32) - 1) * (1 - lowest) + lowest, lowest)


@flax.struct.dataclass
class TokenChoice:
    """How the rows of a batch choose their tokens, for drafters that want to choose as the target will.

    A drafter that draws with the target's own noise at the same position draws the target's own token the more often
    the closer their distributions are, at least (1 - TV) / (1 + TV) of the time (Daliri et al. 2024), and its drafts
    count as chosen outright: what is emitted is, token for token, what sampling without speculation would emit.

    Attributes:
        seeds: `[B]`.
        temperature: `[B]`.
        method: static.
        vocab_size: V of the target (static); tokens of a drafter's own beyond it are never chosen. None for any.
        filters: of each row; None for none at all.
    """

    seeds: Seeds
    temperature: Float[Array, "B"]
    method: Method = flax.struct.field(pytree_node=False)
    vocab_size: int | None = flax.struct.field(pytree_node=False, default=None)
    filters: Filters | None = None

    def scores(self, logits: Float[Array, "B *N V"], positions: Int32[Array, "B *N"]) -> Float[Array, "B *N V"]:
        """What the likeliest choices are largest in; the choice itself is the argmax.

        Args:
            logits: `[B, ..., V]`, or more where the drafter's vocabulary is padded.
            positions: `[B, ...]` absolute position of the token that is chosen.
        """
        logits = logits[..., : self.vocab_size]
        if isinstance(self.method, Greedy):
            return mask_logits(logits, None)
        log_probs = filtered_log_probs(logits, self.temperature, self.filters)
        return perturbed(draw_keys(self.seeds, positions, Purpose.TOKEN), log_probs)

    def __call__(self, logits: Float[Array, "B *N V"], positions: Int32[Array, "B *N"]) -> Int32[Array, "B *N"]:
        """The token each row would choose from `logits` at `positions`; arguments as `scores`'."""
        return jnp.argmax(self.scores(logits, positions), axis=-1).astype(jnp.int32)


def _like_rows(rows: Array, values: Float[Array, "B *N V"]) -> Array:
    """`[B]` as `[B, 1, ..., 1]`."""
    return rows.reshape(rows.shape + (1,) * (values.ndim - 1))


def _keep(log_probs: Float[Array, "*N V"], lowest: Float[Array, "*N 1"], on: Bool[Array, "*N 1"]) -> Array:
    kept = jnp.where(log_probs >= lowest, log_probs, -jnp.inf)
    return jnp.where(on, log_softmax(kept), log_probs)


@jax.jit
def _lowest_kept(
    log_probs: Float[Array, "*N V"], weights: Float[Array, "*N V"], bound: Float[Array, "*N 1"], on: Bool[Array, "*N 1"]
) -> Float[Array, "*N 1"]:
    """A threshold that exactly those tokens reach which have less than `bound` weight strictly above them.

    Bisects the float32 numbers instead of sorting the vocabulary, which costs several times as much on a CPU. Floats of
    one sign are ordered as their bits are, so 31 halvings end at the exact value. Rounding cannot mislead them: adding
    a weight to a sum never makes the rounded sum smaller.

    Without a row where `on`, a CPU halves nothing. An accelerator always makes the 31 passes over the vocabulary: a
    loop whose end depends on data would be asked about by the host after every pass.
    """
    surprise = -log_probs  # in 0..inf

    def halve(ends):
        low, high = ends
        middle = low + (high - low) // 2
        above = surprise < jax.lax.bitcast_convert_type(middle, jnp.float32)
        kept = jnp.sum(jnp.where(above, weights, 0), axis=-1, keepdims=True) < bound
        return jnp.where(kept, middle, low), jnp.where(kept, high, middle)

    def while_apart(ends):
        return loops.while_loop(lambda ends: jnp.any(ends[1] - ends[0] > 1), halve, ends)

    def always(ends):
        return loops.fori_loop(0, 31, lambda _, ends: halve(ends), ends)

    infinity = int(np.float32(np.inf).view(np.int32))
    shape = (*log_probs.shape[:-1], 1)
    # Ends one apart have nothing between them: such a row is done.
    ends = jnp.zeros(shape, jnp.int32), jnp.broadcast_to(jnp.where(on, jnp.int32(infinity + 1), 1), shape)
    low, _ = jax.lax.platform_dependent(ends, cpu=while_apart, default=always)
    return -jax.lax.bitcast_convert_type(low, jnp.float32)
