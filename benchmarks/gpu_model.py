"""The model on a device: lossless, and how fast."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mamba_spec_jax as ms
from benchmarks.timing import measure, rounded
from mamba_spec_jax.assets import TINY
from mamba_spec_jax.speculative.chunks import decode_chunks

DRAFTS = 4
FORMS = (
    (ms.SpeculativeMode.DECODE, ms.CommitStrategy.SNAPSHOT),
    (ms.SpeculativeMode.DECODE, ms.CommitStrategy.REPLAY),
    (ms.SpeculativeMode.PREFILL, ms.CommitStrategy.SNAPSHOT),
)
# The bundled model's, for where it cannot be read.
CONFIG = ms.HybridConfig(
    model_type="granitemoehybrid",
    vocab_size=1024,
    hidden_size=256,
    layer_types=("mamba", "mamba", "attention", "mamba"),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    attention_scale=0.125,
    recurrent=ms.Mamba2Config(
        heads=4,
        head_dim=64,
        state=32,
        groups=1,
        conv_width=4,
        chunk_size=64,
    ),
    shared_intermediate_size=512,
    embedding_multiplier=8.0,
    residual_multiplier=0.5,
    logits_divisor=4.0,
    tie_embeddings=True,
)
# Arbitrary tokens, repeated so that prompt lookup finds something.
PATTERN = [280, 350, 12, 91, 407, 33, 268, 7, 510, 19, 77, 302]
Results = Iterator[dict[str, Any]]


def lossless(quick: bool) -> Results:
    """Float32 with exact products: speculative output is plain output, or the logits there were as good as tied."""
    new = 8 if quick else 128
    with jax.default_matmul_precision("highest"):
        config, params, weights = _load(ms.DTypePolicy.float32())
        plain = ms.generate(ms.HybridModel.create(config), params, _prompts(4), num_drafts=0, max_new=new).tokens
        for mode, strategy in FORMS[:1] if quick else FORMS:
            model = ms.HybridModel.create(config, speculative_mode=mode, strategy=strategy)
            generation = ms.generate(model, params, _prompts(4), num_drafts=DRAFTS, max_new=new)
            differences = _differences(model, params, generation.tokens, plain)
            yield {
                "form": f"{mode.value}, {strategy.value}",
                "weights": weights,
                "ok": all(difference["logit_gap"] < 1e-3 for difference in differences),
                "differences": differences,
                "mean_acceptance_length": rounded(generation.statistics.mean_acceptance_length),
            }
        for strategy in (ms.CommitStrategy.REPLAY, ms.CommitStrategy.SNAPSHOT)[: 1 if quick else 2]:
            model = ms.HybridModel.create(config, strategy=strategy)
            plainly, drafting = (_final_state(model, params, limit, new) for limit in (0, DRAFTS))
            same = {
                name: bool(jnp.array_equal(getattr(plainly, name), getattr(drafting, name)))
                for name in ("tokens", "logprobs")
            }
            held = [model.materialize(state.cache, jnp.arange(4)).mamba for state in (plainly, drafting)]
            pools = [jnp.array_equal(getattr(held[0], name), getattr(held[1], name)) for name in ("ssm", "conv")]
            same["states"] = all(map(bool, jax.tree.leaves(pools)))
            yield {
                "check": f"same bits through one compiled step, {strategy.value}",
                "ok": same["tokens"],
                "same": same,
            }


def speed(quick: bool) -> Results:
    """In the dtypes that suit the device; ratios are within one run."""
    new, rounds, widths = (8, 1, (0, DRAFTS)) if quick else (256, 5, (0, 1, DRAFTS, 8, 16))
    gpu = jax.default_backend() == "gpu"
    config, params, weights = _load(ms.DTypePolicy.bfloat16() if gpu else ms.DTypePolicy.float32())
    model = ms.HybridModel.create(config, ms.DTypePolicy.bfloat16() if gpu else None)
    for batch in (1,) if quick else (1, 8):
        cases = {
            drafts: lambda drafts=drafts, batch=batch: (
                lambda: np.asarray(
                    ms.generate(model, params, _prompts(batch), num_drafts=drafts, max_new=new).statistics.passes
                )
            )
            for drafts in ((0, DRAFTS) if quick else (0, DRAFTS, 8, "auto"))
        }
        samples = measure(cases, rounds)
        yield {
            "batch": batch,
            "weights": weights,
            "plain_tokens_per_second": rounded(batch * new / samples.median(0)),
            "speedup": {str(drafts): rounded(samples.ratio(0, drafts)) for drafts in cases if drafts != 0},
        }
        steps = {f"T = {drafts + 1}": _steps(model, params, batch, drafts) for drafts in widths}
        samples = measure(steps, rounds)
        yield {
            "batch": batch,
            "microseconds_per_step": {case: rounded(samples.median(case) / 16 * 1e6) for case in steps},
            "verify_over_decode": {case: rounded(samples.ratio(case, "T = 1")) for case in steps},
        }


def _load(policy: ms.DTypePolicy) -> tuple[ms.HybridConfig, Any, str]:
    try:
        loaded = ms.load(TINY, policy=policy)
    except (ImportError, ValueError) as error:
        model = ms.HybridModel.create(CONFIG, policy)
        return CONFIG, jax.jit(model.init_params, static_argnums=0)(0), f"random, for lack of: {error}"
    return loaded.model.config, loaded.params, "bundled"


def _prompts(rows: int) -> list[list[int]]:
    return [(PATTERN[row % 5 :] + PATTERN[: row % 5]) * (2 + row % 3) for row in range(rows)]


def _final_state(model: ms.HybridModel, params: Any, limit: int, new: int) -> ms.DecodeState:
    decoder, weights = ms.Decoder(model, ms.NgramDrafter(DRAFTS)), ms.Weights(params)
    state = decoder.init(weights, _prompts(4), max_new=new, depth_limit=limit, logprobs=True)
    for newest, _ in decode_chunks(decoder, weights, state):
        state = newest
    return state


def _differences(model: ms.HybridModel, params: Any, tokens: list[list[int]], plain: list[list[int]]) -> list[dict]:
    """The first differing token of each row, with the gap between the two best logits there."""
    found = []
    for row, (mine, theirs) in enumerate(zip(tokens, plain, strict=True)):
        at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
        if at is not None:
            text = _prompts(4)[row] + theirs[:at]
            one, length = jnp.zeros((1,), jnp.int32), jnp.asarray([len(text)], jnp.int32)
            cache = model.init_cache(1, len(text))
            output = model.prefill(params, jnp.asarray([text], jnp.int32), cache, slots=one, num_tokens=length)
            best = np.sort(np.asarray(output.logits)[0])[-2:]
            found.append(
                {"row": row, "at": at, "token": mine[at], "plain": theirs[at], "logit_gap": float(best[1] - best[0])}
            )
    return found


def _steps(model: ms.HybridModel, params: Any, batch: int, drafts: int):
    """Sixteen steps of one width; rows draft nothing, so that only the width differs."""
    decoder, weights = ms.Decoder(model, ms.NgramDrafter(16)), ms.Weights(params)
    state = decoder.init(weights, _prompts(batch), max_new=64, depth_limit=0)
    steps = jax.jit(dataclasses.replace(decoder, num_drafts=drafts).steps, static_argnames="num_steps")
    return lambda: lambda: steps(weights, state, num_steps=16)
