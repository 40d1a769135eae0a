"""The training text: Python's own standard library, split by file, and the tokenizer made from it."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

DOCUMENT_END = "<|endoftext|>"
DOCUMENT_END_ID = 0
HELD_OUT_FILES = 32
# Tests repeat themselves, lib2to3 is a second parser for an old Python, the rest are tables and prose.
LEFT_OUT_FOLDERS = {"site-packages", "test", "tests", "lib2to3", "idle_test", "pydoc_data", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Source files by relative name; `held_out` files are never trained on, by the model or the tokenizer."""

    train: dict[str, str]
    held_out: dict[str, str]


def _is_codec_table(path: Path) -> bool:
    """True for the generated encodings, each one a mapping of 256 characters, and their tables elsewhere."""
    return path.parent.name == "encodings" and "decoding_table" in path.read_text(encoding="utf-8", errors="replace")


def load_corpus() -> Corpus:
    """Reads the running interpreter's standard library; which files are held out depends on their names alone."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if LEFT_OUT_FOLDERS.isdisjoint(relative.parts) and not _is_codec_table(path):
            text = path.read_text(encoding="utf-8", errors="replace")
            if text.strip():
                files[relative.as_posix()] = text
    names = np.array(sorted(files))
    held_out = set(np.random.default_rng(0).permutation(names)[:HELD_OUT_FILES].tolist())
    return Corpus(
        train={name: text for name, text in files.items() if name not in held_out},
        held_out={name: files[name] for name in sorted(held_out)},
    )


def train_tokenizer(corpus: Corpus, vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer; token 0 ends a document, and no text is unknown to it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[DOCUMENT_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.train.values(), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
