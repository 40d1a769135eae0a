"""Trains a draft head on the bundled model's hidden states: `python -m training.train_head eagle3 --steps 1500`.

The target is frozen; its distributions are the labels, on the corpus and, as often, on text that it wrote itself.
Resumes from the run's folder when there is one; the learning rate depends on the step and on `--steps` alone, so a run
that must end early is resumed with a smaller `--steps`. `--export FOLDER` writes the head there at every checkpoint, in
the layout of published ones.
"""

import argparse
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax.contrib
from flax import nnx
from tokenizers import Tokenizer
from tqdm import tqdm

from mamba_spec_jax.assets import TINY
from mamba_spec_jax.models.heads.checkpoint import save_head
from mamba_spec_jax.models.heads.config import HeadConfig
from mamba_spec_jax.models.heads.dflash import DFlash
from mamba_spec_jax.models.heads.eagle import Eagle3, MultiTokenPrediction
from mamba_spec_jax.modes import DTypePolicy
from training.corpus import DOCUMENT_END_ID, load_corpus
from training.data import Mix
from training.export import read_folder
from training.head_losses import autoregressive_loss, block_loss
from training.model import Params, TinyConfig, hidden_states, logits_of
from training.self_text import self_text
from training.train_tiny import learning_rate, save_checkpoint

ROWS, OWN_ROWS, TOKENS = 4, 2, 256  # of a batch, and those among them that the target wrote
SELF_TEXT_ROWS = 3072
BLOCKS, BLOCK_TOKENS = 64, 8
FURTHER_PASSES = 0.5  # share of the blocks of which something is filled already
FILLING = {"block_size": BLOCK_TOKENS + 1, "mask_token": DOCUMENT_END_ID, "passes": 2}
DRAFT_STEPS = 4
DRAFT_VOCABULARY = 768  # of EAGLE-3's head: the most frequent tokens


@dataclass(frozen=True)
class Kind:
    """A kind of head, and the sizes it has for the bundled model."""

    module: type[nnx.Module]
    sizes: dict[str, Any]


KINDS = {
    "eagle3": Kind(
        Eagle3, {"target_layers": (0, 2, 3), "intermediate_size": 384, "draft_vocab_size": DRAFT_VOCABULARY}
    ),
    "mtp": Kind(MultiTokenPrediction, {"target_layers": (3,), "intermediate_size": 320, "num_layers": 2}),
    "dflash": Kind(DFlash, {"target_layers": (0, 1, 2, 3), "intermediate_size": 320, "num_layers": 4}),
}


def head_config(kind: Kind, target: TinyConfig) -> HeadConfig:
    return HeadConfig(
        hidden_size=target.hidden_size,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=target.vocab_size,
        embedding_multiplier=target.embedding_multiplier,
        logits_divisor=target.logits_scaling,
        **kind.sizes,
    )


def create_head(kind: Kind, config: HeadConfig, target: Params, stream: np.ndarray, seed: int) -> nnx.Module:
    """A head with random weights.

    EAGLE-3's can propose the tokens that are frequent in `stream`. The last norm begins as the target's, and so does
    the output projection, which kinds other than EAGLE-3 borrow.
    """
    head = kind.module(config, DTypePolicy(), nnx.Rngs(seed))
    head.norm.weight[...] = jnp.array(target["model.norm.weight"])  # a copy: training donates it
    if isinstance(head, Eagle3):
        counts = np.bincount(stream, minlength=config.vocab_size)
        frequent = np.sort(np.argsort(-counts, kind="stable")[: config.draft_vocab_size])
        head.d2t[...] = jnp.asarray(frequent - np.arange(frequent.size), jnp.int32)
        head.t2d[...] = jnp.asarray(np.isin(np.arange(config.vocab_size), frequent))
        head.lm_head.kernel[...] = target["model.embed_tokens.weight"][frequent].T / config.logits_divisor
    return head


def make_loss(config: HeadConfig, target_config: TinyConfig):
    """The loss of a head on rows `[B, T + 1]`, from the frozen target."""

    def loss_fn(head, target, rows, rng):
        tokens = rows[:, :-1]
        layers = hidden_states(target, tokens, target_config)
        # What token t + 1 is, as the target sees it at position t.
        probs = jax.nn.softmax(logits_of(target, layers[-1], target_config), axis=-1)
        hidden = [layers[i] for i in config.target_layers]
        table = target["model.embed_tokens.weight"]
        output, embed = table.T, lambda ids: table[ids] * target_config.embedding_multiplier
        if isinstance(head, DFlash):
            shape = rows.shape[0], BLOCKS
            where, whether, how_many = jax.random.split(rng, 3)
            starts = jax.random.randint(where, shape, 8, TOKENS - BLOCK_TOKENS, jnp.int32)
            # The first pass over a block knows its root alone, a further one also what those before it filled.
            known = jax.random.randint(how_many, shape, 1, BLOCK_TOKENS, jnp.int32)
            known = jnp.where(jax.random.bernoulli(whether, FURTHER_PASSES, shape), known, 0)
            behind = starts[..., None] + jnp.arange(BLOCK_TOKENS + 1)
            take = jax.vmap(lambda row, at: row[at])
            block, wanted = embed(take(tokens, behind)), take(probs, behind[..., :-1])
            return block_loss(head, hidden, block, embed(DOCUMENT_END_ID), known, starts, wanted, output)
        hidden = [layer[:, :-1] for layer in hidden]
        following, wanted = embed(tokens[:, 1:]), probs[:, 1:]
        return autoregressive_loss(head, config.num_layers, hidden, following, wanted, output, DRAFT_STEPS)

    return loss_fn


def make_step(graphdef: Any, rest: Any, loss_fn, optimizer: optax.GradientTransformation):
    def step(params, state, target, rows, rng, rate):
        def loss(params):
            return loss_fn(nnx.merge(graphdef, params, rest), target, rows, rng)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return jax.tree.map(lambda p, u: p + rate * u, params, updates), state, value

    return jax.jit(step, donate_argnums=(0, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--run", type=Path, default=None, help="default: training/runs/KIND")
    parser.add_argument("--export", type=Path, default=None, help="also write the head here at every checkpoint")
    parser.add_argument("--checkpoint-every", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    run = options.run or Path("training/runs") / options.kind
    run.mkdir(parents=True, exist_ok=True)
    checkpoint = run / "checkpoint.pickle"

    kind = KINDS[options.kind]
    target_config, target, _ = read_folder(TINY)
    config = head_config(kind, target_config)
    mix = Mix(load_corpus(), Tokenizer.from_file(str(TINY / "tokenizer.json")), options.seed)
    head = create_head(kind, config, target, mix.stream, options.seed)
    own_text = self_text(run / "self_text.npy", mix, SELF_TEXT_ROWS, TOKENS, options.seed)
    graphdef, params, rest = nnx.split(head, nnx.Param, ...)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.contrib.muon(1.0, consistent_rms=0.2, adam_b2=0.98))
    first, state = 0, optimizer.init(params)
    if checkpoint.exists():
        stored, leaves, state = jax.tree.map(jnp.asarray, pickle.loads(checkpoint.read_bytes()))
        first, params = int(stored), jax.tree.unflatten(jax.tree.structure(params), leaves)
        state = jax.tree.unflatten(jax.tree.structure(optimizer.init(params)), state)
    print(f"{sum(p.size for p in jax.tree.leaves(params)):,} parameters, from step {first}")

    train_step = make_step(graphdef, rest, make_loss(config, target_config), optimizer)
    bar = tqdm(range(first, options.steps), initial=first, total=options.steps, mininterval=5.0)
    recent: list[jax.Array] = []
    for step in bar:
        rows, _ = mix.batch(step, ROWS - OWN_ROWS, TOKENS)
        own = own_text[np.random.default_rng((options.seed, step)).integers(len(own_text), size=OWN_ROWS)]
        rows = np.concatenate([rows, own])
        rate = learning_rate(options.learning_rate, step, options.steps)
        params, state, loss = train_step(params, state, target, rows, jax.random.key(step), rate)
        recent.append(loss)
        done = step + 1
        if done % options.checkpoint_every == 0 or done == options.steps:
            bar.set_postfix(loss=f"{np.mean(jax.device_get(recent)):.3f}")
            recent.clear()
            save_checkpoint(checkpoint, done, jax.tree.leaves(params), jax.tree.leaves(state))
            if options.export:
                trained = nnx.merge(graphdef, params, rest)
                save_head(options.export, trained, config, **FILLING if kind.module is DFlash else {})


if __name__ == "__main__":
    main()
