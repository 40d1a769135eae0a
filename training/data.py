"""Training rows: plain code, repeated code, renamed code and random repeats, drawn deterministically by step.

A row is `T + 1` tokens with a weight for each of its T predictions. Every batch is a function of (seed, step) alone, so
that a resumed run sees what an uninterrupted one would.
"""

import keyword
import re

import numpy as np
from tokenizers import Tokenizer

from training.corpus import DOCUMENT_END_ID, Corpus, encode

SHARE_RANDOM_REPEATS = 0.10
SHARE_CODE_REPEATS = 0.10
SHARE_RENAMES = 0.25

REPEAT_MARK = "\n# again\n"
RENAME_MARK = "\n# rename {old} to {new}\n"
IDENTIFIER = re.compile(r"\b[A-Za-z_][A-Za-z_0-9]{2,}\b")


class Mix:
    """The training mixture over a corpus; `batch` draws from it."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, seed: int):
        self._tokenizer = tokenizer
        self._seed = seed
        self._vocab_size = tokenizer.get_vocab_size()
        self._texts = [text.splitlines(keepends=True) for text in corpus.train.values()]
        lengths = np.array([len(lines) for lines in self._texts], float)
        self._file_odds = lengths / lengths.sum()
        order = np.random.default_rng(seed).permutation(len(self._texts))
        texts = list(corpus.train.values())
        parts = [np.append(encode(tokenizer, texts[i]), DOCUMENT_END_ID) for i in order]
        self.stream = np.concatenate(parts).astype(np.int32)
        names = {name for text in corpus.train.values() for name in identifiers(text)}
        self._identifiers = sorted(name for name in names if len(name) <= 16)

    def batch(self, step: int, rows: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows `[B, T + 1]` int32 and weights `[B, T]` float32 for this step."""
        rng = np.random.default_rng((self._seed, step))
        drawn = [self._row(rng, tokens) for _ in range(rows)]
        return np.stack([row for row, _ in drawn]), np.stack([weight for _, weight in drawn])

    def _row(self, rng, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        kind = rng.random()
        if kind < SHARE_RANDOM_REPEATS:
            return self._random_repeats(rng, tokens)
        kind -= SHARE_RANDOM_REPEATS
        if kind < SHARE_CODE_REPEATS:
            row = self._packed(rng, tokens, self._repeated_code)
        elif kind < SHARE_CODE_REPEATS + SHARE_RENAMES:
            row = self._packed(rng, tokens, self._renamed_code)
        else:
            start = rng.integers(len(self.stream) - tokens - 1)
            row = self.stream[start : start + tokens + 1]
        return row, np.ones(tokens, np.float32)

    def _random_repeats(self, rng, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Random spans, each followed by its copy; only a copy's predictable tokens count."""
        row: list[int] = []
        weights: list[float] = []
        while len(row) <= tokens:
            length = int(rng.integers(8, tokens // 2))
            span = rng.integers(1, self._vocab_size, length)
            row.extend([*span.tolist(), *span.tolist()])
            weights.extend([0.0] * (length + 1) + [1.0] * (length - 1))
        return np.array(row[: tokens + 1], np.int32), np.array(weights[1 : tokens + 1], np.float32)

    def _packed(self, rng, tokens: int, make) -> np.ndarray:
        """Examples one after another, each closed by the document token, cut to the row."""
        row: list[int] = []
        while len(row) <= tokens:
            row.extend(encode(self._tokenizer, make(rng, tokens)).tolist())
            row.append(DOCUMENT_END_ID)
        return np.array(row[: tokens + 1], np.int32)

    def _lines(self, rng, tokens: int) -> str:
        """Consecutive lines of one file, a third of a row or less."""
        lines = self._texts[rng.choice(len(self._texts), p=self._file_odds)]
        budget = rng.uniform(0.1, 0.45) * tokens * 2.6
        first = int(rng.integers(len(lines)))
        last, size = first, 0
        while last < len(lines) and size < budget:
            size += len(lines[last])
            last += 1
        return "".join(lines[first:last]).rstrip("\n")[: int(1.5 * budget)]

    def _repeated_code(self, rng, tokens: int) -> str:
        text = self._lines(rng, tokens)
        return text + (REPEAT_MARK if rng.random() < 0.5 else "\n\n") + text + "\n"

    def _renamed_code(self, rng, tokens: int) -> str:
        text = self._lines(rng, tokens)
        found = identifiers(text)
        if not found:
            return self._repeated_code(rng, tokens)
        old = found[rng.integers(len(found))]
        new = self._identifiers[rng.integers(len(self._identifiers))]
        mark = RENAME_MARK.format(old=old, new=new) if rng.random() < 0.75 else "\n\n"
        return text + mark + rename(text, old, new) + "\n"


def identifiers(text: str) -> list[str]:
    """The names in `text` that a rename may take, each as often as it occurs."""
    return [word for word in IDENTIFIER.findall(text) if not keyword.iskeyword(word)]


def rename(text: str, old: str, new: str) -> str:
    return re.sub(rf"\b{re.escape(old)}\b", new, text)


def held_out_stream(corpus: Corpus, tokenizer: Tokenizer) -> tuple[np.ndarray, int]:
    """The held-out files as one stream of tokens, each closed by the document token, and their size in bytes."""
    parts = [np.append(encode(tokenizer, text), DOCUMENT_END_ID) for text in corpus.held_out.values()]
    return np.concatenate(parts).astype(np.int32), sum(len(text.encode()) for text in corpus.held_out.values())
