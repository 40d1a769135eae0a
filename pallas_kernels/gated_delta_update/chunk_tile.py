"""What one program of the chunked kernel holds of a window, and how the window's decays enter its products.

In the shapes below R is the rows of V of a program, and T the tokens it takes at once; K is cut into parts of C
columns, and a list has one array a part. A state is such a list of `[R, C]`, keys and queries are lists of `[T, C]` as
they are stored, neither of unit length: `unit` is what brings them there, and stands outside of the products.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.chunked import before, decays, dot, grid
from pallas_kernels.compat import triton
from pallas_kernels.gated_delta_update.recurrence import EPS, Tokens
from pallas_kernels.gated_delta_update.tile import Tile

Parts = list[jax.Array]


class Window(NamedTuple):
    """Tokens as they are stored, all zero where none exists.

    Attributes:
        k, q: parts `[T, C]`; q None where no outputs are wanted.
        v: `[R, T]`.
        g: `[T]`, or parts `[T, C]` of a decay per key channel.
        beta: `[T]`.
        count: how many tokens come first before there are none.
        exist: `[T]`.
    """

    k: Parts
    v: jax.Array
    g: Any
    beta: jax.Array
    count: jax.Array
    exist: jax.Array
    q: Any = None

    @classmethod
    def load(cls, parts: Sequence[Tile], refs: Tokens, at: tuple, count: jax.Array) -> "Window":
        """The first `count` of the tokens at `at`, of which the last index is `[T]`."""
        tile, (*where, tokens) = parts[0], at
        exist = jnp.arange(tokens.size, dtype=jnp.int32) < count

        def channels(ref, head):
            return [
                triton.load(
                    ref.at[(*where, tokens[:, None], head, part.columns[None, :])],
                    mask=grid(exist, part.has_column),
                    other=0,
                )
                for part in parts
            ]

        def scalars(ref):
            return triton.load(ref.at[(*at, tile.head)], mask=exist, other=0)

        v_at = refs.v.at[(*where, tokens[None, :], tile.head, tile.rows[:, None])]
        return cls(
            k=channels(refs.k, tile.key_head),
            v=triton.load(v_at, mask=grid(tile.has_row, exist), other=0),
            g=channels(refs.g, tile.head) if len(refs.g.shape) == len(at) + 2 else scalars(refs.g),
            beta=scalars(refs.beta),
            count=count,
            exist=exist,
            q=None if refs.q is None else channels(refs.q, tile.key_head),
        )

    def keep(self, parts: Sequence[Tile], refs: Tokens, at: tuple) -> None:
        """Writes the program's share of the tokens to `at`; what several programs have read, one of them writes."""
        tile, (*where, tokens) = parts[0], at
        v_at = refs.v.at[(*where, tokens[None, :], tile.head, tile.rows[:, None])]
        triton.store(v_at, self.v, mask=grid(tile.has_row, self.exist))

        def keep_channels(ref, head, leaf):
            for part, values in zip(parts, leaf, strict=True):
                place = ref.at[(*where, tokens[:, None], head, part.columns[None, :])]
                triton.store(place, values, mask=grid(self.exist, part.has_column))

        def keep_gates():
            if isinstance(self.g, list):
                keep_channels(refs.g, tile.head, self.g)
            else:
                triton.store(refs.g.at[(*at, tile.head)], self.g, mask=self.exist)
            triton.store(refs.beta.at[(*at, tile.head)], self.beta, mask=self.exist)

        pl.when(tile.block == 0)(keep_gates)
        pl.when((tile.block == 0) & tile.leads_key_head)(lambda: keep_channels(refs.k, tile.key_head, self.k))

    def decay(self, visible: jax.Array) -> "HeadDecay | ChannelDecay":
        """Of these tokens where `visible [T, T]` is 1: from axis 0, which is on the path to axis 1."""
        if isinstance(self.g, list):
            return ChannelDecay(self.g, visible, self.count)
        return HeadDecay(*decays(visible, self.g))


class HeadDecay(NamedTuple):
    """One decay a head, which stands outside of every product.

    Attributes:
        between: `[T, T]`, from axis 0 to axis 1 where that sees it, else 0.
        since_start: `[T]`.
    """

    between: jax.Array
    since_start: jax.Array

    def carried(self, state: Parts, x: Parts) -> jax.Array:
        """`S_0 (exp(G_t) x_t)`, `[R, T]`."""
        return self.since_start[None, :] * _total(dot(s, part.T) for s, part in zip(state, x, strict=True))

    def scores(self, k: Parts, *xs: Parts) -> tuple[jax.Array, ...]:
        """For each x, `k_j^T diag(exp(G_t - G_j)) x_t` where t (axis 1) sees j (axis 0) and 0 elsewhere, `[T, T]`."""
        return tuple(self.between * _total(dot(key, part.T) for key, part in zip(k, x, strict=True)) for x in xs)

    def after(self, step: jax.Array, state: Parts, updates: jax.Array, k: Parts) -> Parts:
        """The state after token `step`, `S_0 exp(G_t) + sum_j u_j (exp(G_t - G_j) k_j)^T`; updates: `[R, T]`."""
        here = jnp.arange(self.since_start.size, dtype=jnp.int32) == step
        kept = jnp.sum(jnp.where(here, self.since_start, 0))
        weighted = updates * jnp.sum(jnp.where(here[None, :], self.between, 0), axis=1)[None, :]
        return [kept * s.astype(jnp.float32) + dot(weighted, key) for s, key in zip(state, k, strict=True)]


class ChannelDecay(NamedTuple):
    """A decay per key channel, which stands inside the products: those of two tokens are taken token by token.

    Attributes:
        g: parts `[T, C]`.
        visible: `[T, T]`, 1 where axis 0 is on the path to axis 1.
        count: how many tokens there are.
    """

    g: Parts
    visible: jax.Array
    count: jax.Array

    def carried(self, state: Parts, x: Parts) -> jax.Array:
        """As `HeadDecay.carried`."""
        path = self.visible.T.astype(jnp.bfloat16)
        return _total(
            dot(s, (part.astype(jnp.float32) * jnp.exp(dot(path, g))).T)
            for s, part, g in zip(state, x, self.g, strict=True)
        )

    def scores(self, k: Parts, *xs: Parts) -> tuple[jax.Array, ...]:
        """As `HeadDecay.scores`."""
        t = jnp.arange(self.visible.shape[0], dtype=jnp.int32)

        def column(step, totals):
            decayed = self._decayed(step, k)
            here = t == step

            def score(x):
                token = [jnp.sum(jnp.where(here[:, None], part.astype(jnp.float32), 0), axis=0) for part in x]
                return _total(jnp.sum(key * part[None, :], axis=1) for key, part in zip(decayed, token, strict=True))

            return tuple(
                total + jnp.where(here[None, :], score(x)[:, None], 0) for total, x in zip(totals, xs, strict=True)
            )

        return lax.fori_loop(0, self.count, column, tuple(jnp.zeros_like(self.visible) for _ in xs))

    def after(self, step: jax.Array, state: Parts, updates: jax.Array, k: Parts) -> Parts:
        """As `HeadDecay.after`."""
        on_path = self._on_path(step)[:, None]
        return [
            jnp.exp(jnp.sum(on_path * g, axis=0))[None, :] * s.astype(jnp.float32) + dot(updates, key)
            for s, g, key in zip(state, self.g, self._decayed(step, k), strict=True)
        ]

    def _decayed(self, step: jax.Array, k: Parts) -> Parts:
        """`diag(exp(G_t - G_j)) k_j` for token t = step, 0 where it does not see j: parts `[T, C]`.

        Summed over the tokens between them: G_t - G_j would cancel where both are large.
        """
        on_path = self._on_path(step)
        between = before(self.visible) * on_path[None, :].astype(jnp.bfloat16)
        return [
            on_path[:, None] * jnp.exp(dot(between, g)) * key.astype(jnp.float32)
            for g, key in zip(self.g, k, strict=True)
        ]

    def _on_path(self, step: jax.Array) -> jax.Array:
        """`[T]`, 1 where a token is on the path to token `step`."""
        t = jnp.arange(self.visible.shape[0], dtype=jnp.int32)
        return jnp.sum(jnp.where(t[None, :] == step, self.visible, 0), axis=1)


def unit(x: Parts) -> jax.Array:
    """`[T]`, what brings tokens to unit length."""
    return lax.rsqrt(_total(jnp.sum(jnp.square(part.astype(jnp.float32)), axis=1) for part in x) + EPS)


def _total(values) -> jax.Array:
    return functools.reduce(operator.add, values)
