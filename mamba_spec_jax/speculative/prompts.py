"""From prompts to a decode state: checks, a cache of the right size, and the prefill."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mamba_spec_jax.array_types import Rows
from mamba_spec_jax.cache.pools import HybridCache
from mamba_spec_jax.modes import ForwardMode
from mamba_spec_jax.progress_bar import TOKENS, progress_bar
from mamba_spec_jax.speculative.decode import DecodeState, Requests, Statistics
from mamba_spec_jax.speculative.drafts import require_fitting, update_drafter
from mamba_spec_jax.speculative.protocol import Drafter, Progress, SpeculativeModel
from mamba_spec_jax.speculative.rows import per_row, seed_rows
from mamba_spec_jax.speculative.sampling import Filters
from mamba_spec_jax.speculative.stop import StopReason

PREFILL_CHUNK = 256


def init_decode(
    model: SpeculativeModel,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    drafter: Drafter,
    max_drafts: int,
    max_new: int | Sequence[int] = 128,
    min_new: int | Sequence[int] = 0,
    draft_limit: int | Sequence[int] | None = None,
    seeds: int | Sequence[int] = 0,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    logprobs: bool = False,
    drafter_params: Any = None,
    progress: bool | None = False,
) -> DecodeState:
    """Checks the prompts, makes a cache that holds prompt and output, and prefills all but each row's last token.

    For a drafter that proposes trees the cache has room for one more of them, which is written node by node.

    Args:
        model, params, prompts, drafter: as for `generate`.
        max_drafts: the most drafts a step will ask for.
        max_new: tokens to emit, for all rows or each.
        min_new: tokens before the one that may stop a row: see `StopConditions`.
        draft_limit: most drafts a step; None is `max_drafts`.
        seeds: of each row's draws, 0..2**32 - 1; a single number is counted up from row to row.
        temperature: used by `Sampling`; 0 is greedy.
        top_k, top_p, min_p: see `Filters`; 0, 1 and 0 are off.
        logprobs: whether to keep each emitted token's log-probability.
        drafter_params: the drafter's weights, if it has any.
        progress: show a bar on stderr; None shows it if that is a terminal.

    Raises:
        ValueError: for prompts, lengths or options that do not fit, and for an option of the draws where no row draws.
    """
    require_fitting(drafter, model)
    lengths = _check_prompts(prompts, model.vocab_size)
    B = len(prompts)
    max_new_rows = per_row("max_new", max_new, B, np.int32, least=0)
    min_new_rows = per_row("min_new", min_new, B, np.int32, least=0)
    limit_rows = per_row("draft_limit", max_drafts if draft_limit is None else draft_limit, B, np.int32, least=0)
    temperature_rows = per_row("temperature", temperature, B, np.float32, least=0)
    seeds_rows, filters = seed_rows(seeds, B), Filters.create(B, top_k, top_p, min_p)
    if not np.any(temperature_rows > 0):
        _refuse_draws(seeds, seeds_rows, top_k=top_k, top_p=top_p, min_p=min_p)
    if np.any(min_new_rows > max_new_rows):
        raise ValueError(f"min_new {min_new_rows.tolist()} exceeds max_new {max_new_rows.tolist()}")
    longest = int(np.max(lengths.astype(np.int64) + max_new_rows))
    max_len = _next_power_of_two(longest + (max_drafts if drafter.proposes_trees else 0))
    tokens = np.zeros((B, max_len), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    slots = jnp.arange(B, dtype=jnp.int32)
    cache, drafter_state = model.init_cache(B, max_len), drafter.init(B, max_len)
    cache, drafter_state = prefill_prompts(
        model, params, cache, drafter, drafter_params, drafter_state, tokens, lengths - 1, slots, progress
    )
    return DecodeState(
        cache=cache,
        drafter=drafter_state,
        tokens=jnp.asarray(tokens),
        lengths=jnp.asarray(lengths),
        prompt_lengths=jnp.asarray(lengths),
        reasons=jnp.asarray(np.where(max_new_rows > 0, StopReason.NONE, StopReason.MAX_NEW).astype(np.int32)),
        stop_states=jnp.zeros((B,), jnp.int32),
        requests=Requests(
            slots=slots,
            max_new=jnp.asarray(max_new_rows),
            min_new=jnp.asarray(min_new_rows),
            draft_limit=jnp.asarray(limit_rows),
            seeds=jnp.asarray(seeds_rows),
            temperature=jnp.asarray(temperature_rows),
            filters=filters,
        ),
        statistics=Statistics(
            passes=jnp.zeros((B,), jnp.int32),
            drafted=jnp.zeros((B,), jnp.int32),
            histogram=jnp.zeros((B, max_drafts + 1), jnp.int32),
        ),
        logprobs=jnp.zeros((B, max_len), jnp.float32) if logprobs else None,
    )


def prefill_prompts(
    model: SpeculativeModel,
    params: Any,
    cache: HybridCache,
    drafter: Drafter,
    drafter_params: Any,
    drafter_state: Any,
    tokens: np.ndarray,
    counts: np.ndarray,
    slots: Rows,
    progress: bool | None = False,
) -> tuple[HybridCache, Any]:
    """Prefills the first `counts[b]` columns of each row in power-of-two chunks, one trace a chunk size.

    Cache and drafter state are consumed; the drafter follows chunk by chunk.
    """
    start, longest = 0, int(counts.max())
    padded = np.pad(tokens, ((0, 0), (0, PREFILL_CHUNK + 1)))
    with progress_bar("Reading prompts", int(counts.sum()), TOKENS, progress) as bar:
        while start < longest:
            size = min(PREFILL_CHUNK, _next_power_of_two(longest - start))
            num_tokens = np.clip(counts - start, 0, size).astype(np.int32)
            window = jnp.asarray(padded[:, start : start + size + 1])
            cache, drafter_state = _prefill(
                model, params, window, cache, slots, jnp.asarray(num_tokens), drafter, drafter_params, drafter_state
            )
            start += size
            if bar.shown:  # chunks are enqueued faster than they are read
                jax.block_until_ready(cache)
            bar.advance(int(num_tokens.sum()))
    return cache, drafter_state


def _prefill_chunk(model, params, window, cache, slots, num_tokens, drafter, drafter_params, drafter_state):
    tokens, following = window[:, :-1], window[:, 1:]
    output = model.prefill(params, tokens, cache, slots=slots, num_tokens=num_tokens)
    progress = Progress(tokens, following, output.hidden, num_tokens, ForwardMode.EXTEND)
    return output.cache, update_drafter(drafter, drafter_params, drafter_state, progress, before=drafter_state)


_prefill = jax.jit(_prefill_chunk, static_argnums=(0, 6), donate_argnums=(3, 8))


def _next_power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> np.ndarray:
    if isinstance(prompts, str | bytes) or not hasattr(prompts, "__len__"):
        raise ValueError(f"prompts are {prompts!r}, expected a list of token ids for each row: [[1, 2], [3]]")
    if len(prompts) == 0:
        raise ValueError("generate got no prompts, expected at least one row")
    for row, prompt in enumerate(prompts):
        if isinstance(prompt, str | bytes) or not hasattr(prompt, "__len__"):
            raise ValueError(f"prompt {row} is {prompt!r}, expected a list of token ids for each row: [[1, 2], [3]]")
        if len(prompt) == 0:
            raise ValueError(
                f"prompt {row} is empty, expected at least one token: start with a beginning-of-text token"
            )
        ids = _ids(prompt)
        if not np.issubdtype(ids.dtype, np.integer) or ids.ndim != 1:
            raise ValueError(f"prompt {row} is {prompt!r:.60}, expected a list of token ids, which are integers")
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise ValueError(f"prompt {row} has token ids {ids.min()}..{ids.max()}, expected 0..{vocab_size - 1}")
    return np.asarray([len(prompt) for prompt in prompts], np.int32)


def _ids(prompt: Sequence[int]) -> np.ndarray:
    """The prompt as an array; one without columns for a list of lists of different lengths."""
    try:
        return np.asarray(prompt)
    except ValueError:
        return np.asarray(None)


def _refuse_draws(seeds: Any, seeds_rows: np.ndarray, **filters: Any) -> None:
    """Raises ValueError for the first option of the draws that is not at its default: greedy rows draw nothing."""
    off = {"top_k": 0, "top_p": 1, "min_p": 0}
    changed = {name: value for name, value in filters.items() if np.any(np.asarray(value) != off[name])}
    if np.any(seeds_rows != seed_rows(0, len(seeds_rows))):
        changed["seeds"] = seeds
    for name, value in changed.items():
        raise ValueError(
            f"{name} is {value}, but every temperature is 0, where the likeliest token is taken and nothing is drawn: "
            f"give a temperature above 0, or leave {name} out"
        )
