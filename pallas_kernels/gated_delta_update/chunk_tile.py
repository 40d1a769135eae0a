"""What one program of the chunked kernels holds of a window, and how the window's decays enter its products.

In the shapes below R is the rows of V of a program, and T the tokens it takes at once; K is cut into parts of C
columns, and a state is a list of parts `[R, C]`. Keys and queries are read part by part, where they are used, as they
are stored: the factors that bring them to unit length are applied to the products.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.chunked import before, decays, dot, grid
from pallas_kernels.compat import triton
from pallas_kernels.gated_delta_update.recurrence import EPS, Tokens
from pallas_kernels.gated_delta_update.tile import Tile
from pallas_kernels.selection import finite, selected

State = list[jax.Array]


class Products(NamedTuple):
    """Of keys or queries x with the state and with the keys.

    Attributes:
        carried: `S_0 (exp(G_t) x_t)`, `[T, R]`.
        scores: `x_t^T diag(exp(G_t - G_j)) k_j` where t (axis 0) sees j (axis 1) and 0 elsewhere, `[T, T]`.
        squares: `|x_t|^2`, `[T]`; None for keys, whose scores have them on the diagonal.
    """

    carried: jax.Array
    scores: jax.Array
    squares: jax.Array | None

    @property
    def unit(self) -> jax.Array:
        """`[T]`, what brings x to unit length."""
        squares = self.squares
        if squares is None:
            t = jnp.arange(self.scores.shape[0], dtype=jnp.int32)
            squares = jnp.sum(jnp.where(t[:, None] == t[None, :], self.scores, 0), axis=1)
        return lax.rsqrt(squares + EPS)


class Window(NamedTuple):
    """Some tokens, all zero where none exists.

    Attributes:
        parts: the program's tiles.
        refs: where the tokens are.
        at: their indices there, the last of it `[T]`.
        num_tokens: how many exist; they come first.
        exist: `[T]`.
        v: `[T, R]`.
        beta: `[T]`.
    """

    parts: Sequence[Tile]
    refs: Tokens
    at: tuple
    num_tokens: jax.Array
    exist: jax.Array
    v: jax.Array
    beta: jax.Array

    @classmethod
    def of(cls, parts: Sequence[Tile], refs: Tokens, at: tuple, num_tokens: jax.Array) -> "Window":
        """The first `num_tokens` of the tokens at `at`."""
        tile, (*where, tokens) = parts[0], at
        exist = jnp.arange(tokens.size, dtype=jnp.int32) < num_tokens
        v_at = refs.v.at[(*where, tokens[:, None], tile.head, tile.rows[None, :])]
        v = triton.load(v_at, mask=grid(exist, tile.has_row), other=0)
        beta = triton.load(refs.beta.at[(*at, tile.head)], mask=exist, other=0)
        return cls(parts, refs, at, num_tokens, exist, v, beta)

    @property
    def per_channel(self) -> bool:
        """Whether each key channel decays by itself."""
        return len(self.refs.g.shape) == len(self.at) + 2

    def load(self, name: str, part: Tile) -> jax.Array:
        """A part of k, q or a g per channel, `[T, C]`."""
        return triton.load(_columns(self.refs, name, part, self.at), mask=grid(self.exist, part.has_column), other=0)

    def load_gates(self) -> jax.Array:
        """The g of a whole head, `[T]`."""
        return triton.load(self.refs.g.at[(*self.at, self.parts[0].head)], mask=self.exist, other=0)

    def keep(self, refs: Tokens, at: tuple) -> None:
        """Writes the program's share of the tokens to `at`; what several programs read, one of them writes."""
        tile, (*where, tokens) = self.parts[0], at
        v_at = refs.v.at[(*where, tokens[:, None], tile.head, tile.rows[None, :])]
        triton.store(v_at, self.v, mask=grid(self.exist, tile.has_row))

        def copy(name):
            for part in self.parts:
                place = _columns(refs, name, part, at)
                triton.store(place, self.load(name, part), mask=grid(self.exist, part.has_column))

        @pl.when(tile.block == 0)
        def _():
            triton.store(refs.beta.at[(*at, tile.head)], self.beta, mask=self.exist)
            if self.per_channel:
                copy("g")
            else:
                triton.store(refs.g.at[(*at, tile.head)], self.load_gates(), mask=self.exist)

        pl.when((tile.block == 0) & tile.leads_key_head)(lambda: copy("k"))


class HeadDecay(NamedTuple):
    """One decay a head: products are taken without it and scaled by it.

    Attributes:
        window: the tokens.
        between: `[T, T]`, to axis 0 from axis 1 where that is seen, else 0.
        since_start: `[T]`.
    """

    window: Window
    between: jax.Array
    since_start: jax.Array

    def products(self, state: Iterable[jax.Array], *names: str) -> tuple[State, list[Products]]:
        """Of the tokens' "k" or "q"; and the state, whose parts are read one after another."""

        def of_part(part, s):
            k = self.window.load("k", part)
            for name in names:
                x = k if name == "k" else self.window.load(name, part)
                yield Products(dot(x, s.T), dot(x, k.T), None if name == "k" else _squares(x))

        state, totals = _over_parts(of_part, self.window.parts, state)
        since_start = self.since_start[:, None]
        return state, [
            Products(since_start * carried, selected(self.between, scores), squares)
            for carried, scores, squares in totals
        ]

    def after(self, step: int | jax.Array, state: State, updates: jax.Array) -> State:
        """The state after token `step`, `S_0 exp(G_t) + sum_j u_j (exp(G_t - G_j) k_j)^T`; updates: `[T, R]`."""
        here = jnp.arange(self.since_start.size, dtype=jnp.int32) == step
        kept = jnp.sum(jnp.where(here, self.since_start, 0))
        weights = jnp.sum(jnp.where(here[:, None], self.between, 0), axis=0)[:, None]
        weighted = selected(weights, updates)
        return [
            kept * s.astype(jnp.float32) + dot(weighted.T, jnp.where(weights != 0, self.window.load("k", part), 0))
            for part, s in zip(self.window.parts, state, strict=True)
        ]


class ChannelDecay(NamedTuple):
    """A decay per key channel: it cannot be taken out of a product, so those of two tokens are taken token by token.

    Attributes:
        window: the tokens.
        visible: `[T, T]`, 1 where axis 0 is on the path to axis 1.
    """

    window: Window
    visible: jax.Array

    def products(self, state: Iterable[jax.Array], *names: str) -> tuple[State, list[Products]]:
        """As `HeadDecay.products`."""
        path, t = self.visible.T.astype(jnp.bfloat16), jnp.arange(self.visible.shape[0], dtype=jnp.int32)

        def of_part(part, s):
            k, g = self.window.load("k", part), self.window.load("g", part)
            # 0, or NaN for the tokens that see a gate which is not finite.
            mark = jnp.sum(selected(self.visible, jnp.sum(g * 0, axis=1)[:, None]), axis=0)
            since_start = jnp.exp(dot(path, finite(g)) + mark[:, None])
            xs = [(k if name == "k" else self.window.load(name, part)).astype(jnp.float32) for name in names]
            carried = [dot(x * since_start, s.T) for x in xs]

            def row(step, scores):
                decayed, here = self._decayed(step, k, g), (t == step)[:, None]

                def score(x):
                    token = jnp.sum(jnp.where(here, x, 0), axis=0)
                    return jnp.where(here, jnp.sum(decayed * token[None, :], axis=1)[None, :], 0)

                return [total + score(x) for total, x in zip(scores, xs, strict=True)]

            scores = lax.fori_loop(0, self.window.num_tokens, row, [jnp.zeros_like(self.visible) for _ in xs])
            squares = [None if name == "k" else _squares(x) for name, x in zip(names, xs, strict=True)]
            return map(Products, carried, scores, squares)

        return _over_parts(of_part, self.window.parts, state)

    def after(self, step: int | jax.Array, state: State, updates: jax.Array) -> State:
        """As `HeadDecay.after`."""
        on_path, result = self._on_path(step)[:, None], []
        for part, s in zip(self.window.parts, state, strict=True):
            k, g = self.window.load("k", part), self.window.load("g", part)
            kept = jnp.exp(jnp.sum(selected(on_path, g), axis=0))[None, :] * s.astype(jnp.float32)
            result.append(kept + dot(selected(on_path, updates).T, self._decayed(step, k, g)))
        return result

    def _decayed(self, step: int | jax.Array, k: jax.Array, g: jax.Array) -> jax.Array:
        """A part of `diag(exp(G_t - G_j)) k_j` for token t = step, 0 where it does not see j: `[T, C]`.

        Summed over the tokens between them: G_t - G_j would cancel where both are large.
        """
        on_path = self._on_path(step)
        between = before(self.visible) * on_path[None, :].astype(jnp.bfloat16)
        to_step = jnp.exp(dot(between, selected(on_path[:, None], g)))
        return selected(on_path[:, None], to_step * k.astype(jnp.float32))

    def _on_path(self, step: int | jax.Array) -> jax.Array:
        """`[T]`, 1 where a token is on the path to token `step`."""
        t = jnp.arange(self.visible.shape[0], dtype=jnp.int32)
        return jnp.sum(jnp.where(t[None, :] == step, self.visible, 0), axis=1)


def decay_of(window: Window, visible: jax.Array) -> HeadDecay | ChannelDecay:
    """The window's decays where `visible [T, T]` is 1: from axis 0, which is on the path to axis 1."""
    if window.per_channel:
        return ChannelDecay(window, visible)
    between, since_start = decays(visible, window.load_gates())
    return HeadDecay(window, between.T, since_start)


def _columns(refs: Tokens, name: str, part: Tile, at: tuple) -> Any:
    *where, tokens = at
    head = part.head if name == "g" else part.key_head
    return getattr(refs, name).at[(*where, tokens[:, None], head, part.columns[None, :])]


def _squares(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(x.astype(jnp.float32)), axis=1)


def _over_parts(of_part: Any, parts: Sequence[Tile], state: Iterable[jax.Array]) -> tuple[State, list[Products]]:
    """The state's parts, and their products summed one after another, so that those of one part are alive at a time."""
    kept: State = []
    totals: list[Products] = []
    for part, s in zip(parts, state, strict=True):
        found = list(of_part(part, s))
        totals = jax.tree.map(operator.add, totals, found) if totals else found
        kept.append(s)
    return kept, totals
