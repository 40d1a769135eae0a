"""Trains the bundled models: `python -m training.train_tiny --steps 5000`, and with `--size draft` one that drafts.

Resumes from the run's folder when there is one. The learning rate depends on the step and on `--steps` alone: it is
constant for 40 % of the steps and falls linearly to zero over the rest, so a run that must end early is resumed with a
smaller `--steps` and decays from where it stands. `--export FOLDER` writes the model there at every checkpoint.
"""

import argparse
import json
import pickle
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer
from tqdm import tqdm

from mamba_spec_jax.assets import TINY
from training.corpus import load_corpus, train_tokenizer
from training.data import Mix, held_out_stream
from training.export import write_folder
from training.init import initial_params
from training.model import TinyConfig, token_losses

SIZES = {
    "tiny": TinyConfig(),
    "draft": TinyConfig(
        hidden_size=128, layer_types=("mamba", "attention"), shared_intermediate_size=256, mamba_n_heads=2,
        attention_multiplier=32**-0.5,
    ),
}  # fmt: skip
WARMUP_STEPS = 100
DECAY_FROM = 0.4
LONG_ROWS_FROM = 0.6
SHORT_BATCH, LONG_BATCH = (4, 256), (2, 512)
HELD_OUT_WINDOWS = 16


def learning_rate(peak: float, step, steps: int):
    """Warm-up, a constant part, then a linear fall to zero at `steps`."""
    warm = (step + 1) / WARMUP_STEPS
    fall = (steps - step) / (steps * (1 - DECAY_FROM))
    return peak * jnp.clip(jnp.minimum(warm, fall), 0.0, 1.0)


def make_optimizer() -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.98),
        optax.add_decayed_weights(0.01, mask=lambda params: {name: value.ndim == 2 for name, value in params.items()}),
    )


def make_step(config: TinyConfig, optimizer: optax.GradientTransformation):
    def loss_fn(params, rows, weights):
        losses = token_losses(params, rows, config)
        return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)

    def step(params, state, rows, weights, rate):
        loss, gradients = jax.value_and_grad(loss_fn)(params, rows, weights)
        updates, state = optimizer.update(gradients, state, params)
        params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
        return params, state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def probes(params, losses_fn, stream: np.ndarray, bytes_per_token: float, vocab_size: int) -> dict[str, float]:
    """Two numbers to watch: held-out bits a byte on a few windows, and the loss of random spans' second copy."""
    starts = np.linspace(0, len(stream) - 514, HELD_OUT_WINDOWS).astype(int)
    rows = np.stack([stream[s : s + 513] for s in starts])
    plain = np.mean([losses_fn(params, rows[i : i + 4]).mean() for i in range(0, len(rows), 4)])
    spans = np.random.default_rng(1).integers(1, vocab_size, (4, 257))
    copies = losses_fn(params, np.concatenate([spans, spans], axis=1)[:, :513])
    return {"bits_per_byte": float(plain / np.log(2) / bytes_per_token), "copy_loss": float(copies[:, 264:].mean())}


def save_checkpoint(path: Path, step: int, params, state) -> None:
    """Replaces the checkpoint in one move, so that a run stopped while writing leaves the last one whole."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(pickle.dumps((step, jax.device_get(params), jax.device_get(state))))
    partial.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--size", choices=sorted(SIZES), default="tiny", help="draft: a model that drafts for the other"
    )
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--run", type=Path, default=None, help="default: training/runs/SIZE")
    parser.add_argument("--export", type=Path, default=None, help="also write the model here at every checkpoint")
    parser.add_argument("--checkpoint-every", type=int, default=250)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    run = options.run or Path("training/runs") / options.size
    run.mkdir(parents=True, exist_ok=True)

    config, corpus = SIZES[options.size], load_corpus()
    tokenizer_file, checkpoint = run / "tokenizer.json", run / "checkpoint.pickle"
    if options.size == "draft":
        tokenizer_file = TINY / "tokenizer.json"  # a draft model speaks its target's tokens
    elif not tokenizer_file.exists():
        train_tokenizer(corpus, config.vocab_size).save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    mix = Mix(corpus, tokenizer, options.seed)
    stream, held_out_bytes = held_out_stream(corpus, tokenizer)

    optimizer = make_optimizer()
    first, params = 0, initial_params(config, options.seed)
    state = optimizer.init(params)
    if checkpoint.exists():
        first, params, state = jax.tree.map(jnp.asarray, pickle.loads(checkpoint.read_bytes()))
        first = int(first)
    print(f"{sum(p.size for p in params.values()):,} parameters, {len(mix.stream):,} tokens, from step {first}")

    train_step = make_step(config, optimizer)
    losses_fn = jax.jit(lambda params, rows: token_losses(params, rows, config))
    started, log = time.time(), (run / "log.jsonl").open("a")
    bar = tqdm(range(first, options.steps), initial=first, total=options.steps, mininterval=5.0)
    recent: list[jax.Array] = []
    for step in bar:
        rows, tokens = LONG_BATCH if step >= LONG_ROWS_FROM * options.steps else SHORT_BATCH
        batch = mix.batch(step, rows, tokens)
        params, state, loss = train_step(
            params, state, *batch, learning_rate(options.learning_rate, step, options.steps)
        )
        recent.append(loss)
        done = step + 1
        if done % options.checkpoint_every == 0 or done == options.steps or step == first:
            entry = {"step": done, "loss": float(np.mean(jax.device_get(recent))), "seconds": time.time() - started}
            entry |= probes(params, losses_fn, stream, held_out_bytes / len(stream), config.vocab_size)
            log.write(json.dumps(entry) + "\n")
            log.flush()
            bar.set_postfix({name: f"{entry[name]:.3f}" for name in ("loss", "bits_per_byte", "copy_loss")})
            recent.clear()
            save_checkpoint(checkpoint, done, params, state)
            if options.export:
                write_folder(options.export, config, params, tokenizer)


if __name__ == "__main__":
    main()
