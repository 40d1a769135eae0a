"""How a token is chosen from logits: greedily or drawn, after which filters, and from which noise.

Every draw comes from a key made of (request seed, absolute position of the drawn token, purpose) and of nothing else:
the batch row, the cache slot, the number of nodes in a verify pass and the drafter cannot change it.
"""

import dataclasses
import enum
import math
from typing import Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from mamba_spec_jax.array_types import Array, Bool, Float, Int32, Seeds


@runtime_checkable
class Filter(Protocol):
    """A rule that keeps the likely tokens; frozen and hashable.

    A filter is a threshold: tokens whose log-probability is below it are dropped, and all tokens tied with it stay.
    Which tokens survive therefore never depends on the order of the vocabulary or on a sort's stability.
    """

    def threshold(self, log_probs: Float[Array, "*N V"]) -> Float[Array, "*N 1"]: ...


@dataclasses.dataclass(frozen=True)
class TopK:
    """Keeps the `k` most likely tokens, and all tied with the k-th."""

    k: int

    def __post_init__(self):
        if not isinstance(self.k, int) or isinstance(self.k, bool) or self.k < 1:
            raise ValueError(f"TopK.k is {self.k!r}, expected an integer of at least 1")

    def threshold(self, log_probs: Float[Array, "*N V"]) -> Float[Array, "*N 1"]:
        return _lowest_kept(log_probs, jnp.ones_like(log_probs), float(self.k))


@dataclasses.dataclass(frozen=True)
class TopP:
    """Keeps the smallest set of most likely tokens whose mass reaches `p`, and all tied with the last of them."""

    p: float

    def __post_init__(self):
        if not _is_number(self.p) or not 0 < self.p <= 1:
            raise ValueError(f"TopP.p is {self.p!r}, expected a number with 0 < p <= 1")

    def threshold(self, log_probs: Float[Array, "*N V"]) -> Float[Array, "*N 1"]:
        if self.p == 1:  # a float32 sum of all the rest may round to 1 and would drop the least likely tokens
            return jnp.full_like(log_probs[..., :1], -jnp.inf)
        return _lowest_kept(log_probs, jnp.exp(log_probs), float(self.p))


@dataclasses.dataclass(frozen=True)
class MinP:
    """Keeps the tokens at least `p` times as likely as the likeliest."""

    p: float

    def __post_init__(self):
        if not _is_number(self.p) or not 0 <= self.p <= 1:
            raise ValueError(f"MinP.p is {self.p!r}, expected a number with 0 <= p <= 1")

    def threshold(self, log_probs: Float[Array, "*N V"]) -> Float[Array, "*N 1"]:
        return jnp.max(log_probs, axis=-1, keepdims=True) + (math.log(self.p) if self.p else -math.inf)


@dataclasses.dataclass(frozen=True)
class Greedy:
    """The likeliest token; the lowest id wins a tie. Needs no seeds and no temperature."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """A draw from the filtered distribution, with a temperature per row.

    Attributes:
        filters: applied in the order given, after the temperature, each on the renormalised outcome of the one before.
            Hugging Face transformers' order is `(TopK, TopP, MinP)`.
    """

    filters: tuple[Filter, ...] = ()

    def __post_init__(self):
        if not isinstance(self.filters, tuple) or not all(isinstance(rule, Filter) for rule in self.filters):
            raise ValueError(
                f"Sampling.filters is {self.filters!r}, expected a tuple of TopK, TopP, MinP or other Filter instances"
            )


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


def filtered_log_probs(
    method: Sampling,
    logits: Float[Array, "B *N V"],
    temperature: Float[Array, "B"],
    forbidden: Bool[Array, "B *N V"] | None = None,
) -> Float[Array, "B *N V"]:
    """Log-probabilities in float32 of the distribution that `method` draws from; -inf for tokens it cannot draw.

    Args:
        method: the filters.
        logits: `[B, ..., V]` of any floating dtype.
        temperature: `[B]`; a row at 0 or below is greedy: all mass on the argmax, the lowest id winning a tie.
        forbidden: `[B, ..., V]` tokens that must not be drawn, removed before the temperature and the filters.
    """
    logits = mask_logits(logits, forbidden)
    temperature = temperature.astype(jnp.float32).reshape(temperature.shape + (1,) * (logits.ndim - 1))
    drawn = temperature > 0
    # The maximum goes first: a tiny temperature then gives 0 and -inf rather than inf - inf.
    centred = logits - jnp.max(logits, axis=-1, keepdims=True)
    log_probs = jax.nn.log_softmax(centred / jnp.where(drawn, temperature, 1), axis=-1)
    for rule in method.filters:
        kept = log_probs >= rule.threshold(log_probs)
        log_probs = jax.nn.log_softmax(jnp.where(kept, log_probs, -jnp.inf), axis=-1)
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
    vocab = log_probs.shape[-1]
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32, mode="low"))(keys.ravel())
    return log_probs + noise.reshape(log_probs.shape)


def draw_tokens(keys: Array, log_probs: Float[Array, "*N V"]) -> Int32[Array, "*N"]:
    """One token per key by the Gumbel-max rule: `argmax(log_probs + noise)`.

    Log-probabilities need not be normalised; a token at -inf is never drawn while another is above it.
    """
    return jnp.argmax(perturbed(keys, log_probs), axis=-1).astype(jnp.int32)


def draw_uniforms(keys: Array) -> Float[Array, "*N"]:
    """One float32 in [0, 1) per key: 0 is possible, 1 is not."""
    return jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys.ravel()).reshape(keys.shape)


@flax.struct.dataclass
class TokenChoice:
    """How the rows of a batch choose their tokens, for drafters that want to choose as the target will.

    A drafter that draws with the target's own noise at the same position draws the target's own token the more often
    the closer their distributions are, at least (1 - TV) / (1 + TV) of the time (Daliri et al. 2024), and its drafts
    count as chosen outright: what is emitted is, token for token, what sampling without speculation would emit.

    Attributes:
        method: static.
        seeds: `[B]`.
        temperature: `[B]`.
    """

    seeds: Seeds
    temperature: Float[Array, "B"]
    method: Method = flax.struct.field(pytree_node=False)

    def scores(self, logits: Float[Array, "B *N V"], positions: Int32[Array, "B *N"]) -> Float[Array, "B *N V"]:
        """What the likeliest choices are largest in; the choice itself is the argmax.

        Args:
            logits: `[B, ..., V]`.
            positions: `[B, ...]` absolute position of the token that is chosen.
        """
        if isinstance(self.method, Greedy):
            return mask_logits(logits, None)
        log_probs = filtered_log_probs(self.method, logits, self.temperature)
        return perturbed(draw_keys(self.seeds, positions, Purpose.TOKEN), log_probs)

    def __call__(self, logits: Float[Array, "B *N V"], positions: Int32[Array, "B *N"]) -> Int32[Array, "B *N"]:
        """The token each row would choose from `logits` at `positions`; arguments as `scores`'."""
        return jnp.argmax(self.scores(logits, positions), axis=-1).astype(jnp.int32)


@jax.jit
def _lowest_kept(log_probs: Float[Array, "*N V"], weights: Float[Array, "*N V"], bound: float) -> Float[Array, "*N 1"]:
    """A threshold at or above which lie exactly the tokens with less than `bound` weight strictly above them.

    Bisects the float32 numbers instead of sorting the vocabulary, which costs several times as much on a CPU. Floats of
    one sign are ordered as their bits are, so 31 halvings end at the exact value. Rounding cannot mislead them: adding
    a weight to a sum never makes the rounded sum smaller.
    """
    surprise = -log_probs  # in 0..inf

    def halve(_, ends):
        low, high = ends
        middle = low + (high - low) // 2
        above = surprise < jax.lax.bitcast_convert_type(middle, jnp.float32)
        kept = jnp.sum(jnp.where(above, weights, 0), axis=-1, keepdims=True) < bound
        return jnp.where(kept, middle, low), jnp.where(kept, high, middle)

    infinity = int(np.float32(np.inf).view(np.int32))
    shape = (*log_probs.shape[:-1], 1)
    ends = jnp.zeros(shape, jnp.int32), jnp.full(shape, infinity + 1, jnp.int32)
    return -jax.lax.bitcast_convert_type(jax.lax.fori_loop(jnp.int32(0), jnp.int32(31), halve, ends)[0], jnp.float32)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
