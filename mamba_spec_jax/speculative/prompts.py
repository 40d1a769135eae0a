"""Prompts: checked, and cut into the pieces that a prefill reads."""

from collections.abc import Iterator, Sequence

import numpy as np

from mamba_spec_jax.progress_bar import TOKENS, Bar, progress_bar

PREFILL_CHUNK = 256


def pieces(
    tokens: np.ndarray, counts: np.ndarray, progress: bool | None = False
) -> Iterator[tuple[np.ndarray, np.ndarray, Bar]]:
    """Cuts the first `counts[b]` columns of each row into power-of-two pieces: one trace a size.

    Args:
        tokens: `[B, M]`.
        counts: `[B]`.
        progress: show a bar on stderr, which advances when the next piece is asked for; None shows it if that is a
            terminal.

    Yields:
        `[B, T + 1]` the piece's tokens and the one after them, the `[B]` number of real ones of T, and the bar.
    """
    start, longest = 0, int(counts.max())
    padded = np.pad(tokens, ((0, 0), (0, PREFILL_CHUNK + 1)))
    with progress_bar("Reading prompts", int(counts.sum()), TOKENS, progress) as bar:
        while start < longest:
            size = min(PREFILL_CHUNK, next_power_of_two(longest - start))
            num_tokens = np.clip(counts - start, 0, size).astype(np.int32)
            yield padded[:, start : start + size + 1], num_tokens, bar
            start += size
            bar.advance(int(num_tokens.sum()))


def next_power_of_two(n: int) -> int:
    """The least power of two that is not below `n`, 1 for what is below 1."""
    return 1 << max(n - 1, 0).bit_length()


def check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> np.ndarray:
    """`[B]` int32 lengths of the prompts; ValueError for what is not one list of token ids a row, or no row."""
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
