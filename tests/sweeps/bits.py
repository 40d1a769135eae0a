"""Hashes of what tiny models and recurrences compute on this CPU: a change that must keep the bits keeps them equal.

    python -m tests.sweeps.bits            # compares with results/bits.json; exits non-zero where a hash differs
    python -m tests.sweeps.bits --record   # writes it; --only NAME for the cases whose name has NAME in it

Bits differ between processors and versions of jax: record and compare on one machine. Takes some minutes.

What is hashed, each over a few verify passes with commits in between, and rings that fold:
- recurrences: every kind x strategy x chain or tree, compiled as users have it: outputs, pools, rings; and some of
  the chunked form;
- kernels: the passes of each op's Triton kernel, in the interpreter;
- models: every family x strategy x chain or tree: log-probabilities, pools and rings.
"""

import argparse
import functools
import hashlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from mamba_spec_jax.cache.records import Draft
from mamba_spec_jax.loaded import load
from mamba_spec_jax.models.hybrid_lm import HybridModel
from mamba_spec_jax.modes import CommitStrategy, ForwardMode, ReplayRing, SpeculativeMode
from pallas_kernels.arithmetic import log_softmax
from tests.mamba_spec_jax.attention import recurrent
from tests.mamba_spec_jax.cli.families import CASES, write_family
from tests.pallas_kernels import delta_rule, ssm
from tests.pallas_kernels import test_gated_delta_update as delta
from tests.pallas_kernels import test_selective_state_update as mamba2

RESULTS = Path(__file__).parent / "results" / "bits.json"
QUICKLY = {"xla_backend_optimization_level": 0}
STRATEGIES = (CommitStrategy.SNAPSHOT, CommitStrategy.REPLAY)
FORMS = (SpeculativeMode.DECODE, SpeculativeMode.PREFILL)
SLOTS = np.array([2, 0, 3], np.int32)
PARENTS = np.array([[-1, 0, 0, 1], [-1, 0, 1, 1], [-1, 0, 0, 2]], np.int32)
# The passes of an op that differ with a decay per key channel.
KDA = (("ring", True), ("fold", False))
STEPS = ([3, 0, 2], [1, 3, -1], [2, 2, 3], [0, 1, 3])  # nodes that are committed, pass by pass
KINDS = {
    "mamba2": {"kind": "mamba2"},
    "mamba2 bf16": {"kind": "mamba2", "ssm_dtype": "bfloat16", "conv_dtype": "bfloat16", "activations": "bfloat16"},
    "gdn": {"kind": "gated_delta"},
    "kda": {"kind": "gated_delta", "channel_decay": True, "ssm_dtype": "bfloat16"},
    "mamba1": {"kind": "mamba1"},
    "mamba1 bf16": {"kind": "mamba1", "ssm_dtype": "bfloat16", "conv_dtype": "bfloat16", "activations": "bfloat16"},
}


def main() -> int:
    """Runs every case; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the hashes instead of comparing with them")
    parser.add_argument("--only", default="", help="run only cases whose name has this in it")
    arguments = parser.parse_args()
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for name, function in every_case(Path(folder)):
            if arguments.only in name:
                found[name] = function()
                print(name, flush=True)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if arguments.record:
        kept = {name: hashes for name, hashes in kept.items() if arguments.only not in name} | found
        RESULTS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
        return 0
    recorded = {name: hashes for name, hashes in kept.items() if arguments.only in name}
    differing = sorted(name for name in recorded | found if recorded.get(name) != found.get(name))
    print(*(f"DIFFERS {name}" for name in differing), f"{len(found)} cases, {len(differing)} differ", sep="\n")
    return 1 if differing else 0


def every_case(folder: Path) -> Iterator[tuple[str, functools.partial]]:
    """Each case's name and what computes its hashes."""
    for kind, strategy, form, tree in itertools.product(KINDS, STRATEGIES, FORMS, (False, True)):
        if form is FORMS[0] or (tree == (strategy is STRATEGIES[0]) and not kind.startswith("mamba1")):
            name = f"recurrence/{kind}/{strategy.name}/{form.name}/{'tree' if tree else 'chain'}"
            yield name, functools.partial(recurrence, kind, strategy, form, tree)
    for op, form in itertools.product(("mamba2", "gdn", "kda"), ("step", "chunk")):
        for keep, tree in (*mamba2.KEPT, ("fold", False)) if op != "kda" else KDA:
            name = f"kernel/{op}/{form}/{keep}{'/tree' if tree else ''}"
            yield name, functools.partial(kernel, op, form, keep, tree)
    for family, strategy, tree in itertools.product(("granitemoehybrid", *CASES), STRATEGIES, (False, True)):
        name = f"model/{family}/{strategy.name}/{'tree' if tree else 'chain'}"
        yield name, functools.partial(model, folder, family, strategy, tree)


def digest(tree) -> str:
    """A hash of every byte of a pytree."""
    leaves = [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(tree)]
    return hashlib.sha256(
        b"".join(f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes() for leaf in leaves)
    ).hexdigest()


@functools.cache
def family_model(folder: Path, family: str):
    """A family's tiny model."""
    return load(write_family(family, folder / family))


def model(folder, family, strategy, tree) -> dict[str, str]:
    """A prompt, verify passes with commits, and more of the prompt, which settles a ring."""
    loaded = family_model(folder, family)
    replay = ReplayRing(length=10, window=PARENTS.shape[1])
    served = HybridModel.create(loaded.model.config, strategy=strategy, replay=replay)
    rng = np.random.default_rng(7)

    def tokens(count):
        return jnp.asarray(rng.integers(0, min(26, served.vocab_size), (len(SLOTS), count)), jnp.int32)

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def step(params, draft, cache, steps):
        output = served.verify(params, draft, cache)
        cache = served.backend.update_mamba_state_after_mtp_verify(output.cache, output.record, steps)
        return log_softmax(output.logits), cache

    prefill = jax.jit(served.prefill, compiler_options=QUICKLY)
    cache, counts, slots = served.init_cache(5, 48), jnp.array([5, 3, 4], jnp.int32), jnp.asarray(SLOTS)
    output = prefill(loaded.params, tokens(5), cache, slots=slots, num_tokens=counts)
    logits, cache, caches = [output.logits], output.cache, []
    lengths, parents = jnp.array([3, 3, 3], jnp.int32), jnp.asarray(PARENTS) if tree else None
    for steps in STEPS:
        draft = Draft(tokens(PARENTS.shape[1]), lengths, slots, parents=parents)
        log_probs, cache = step(loaded.params, draft, cache, jnp.asarray(steps, jnp.int32))
        logits.append(log_probs)
        caches.append(cache.mamba)
    output = prefill(loaded.params, tokens(5), cache, slots=slots, num_tokens=counts)
    return {"log-probabilities": digest([logits, output.logits]), "states": digest([caches, output.cache.mamba])}


def recurrence(kind, strategy, form, tree) -> dict[str, str]:
    """Verify passes of a recurrence's backend with commits and tracked states; a ring is then settled by a prompt."""
    backend = recurrent.make_backend(strategy, form, **KINDS[kind])
    dtype = KINDS[kind].get("activations", "float32")
    weights, T = recurrent.make_weights(backend, dtype=dtype), PARENTS.shape[1]
    parents = jnp.asarray(PARENTS) if tree else None
    cache = recurrent.occupied(backend, SLOTS, np.array([3, 1, 5], np.int32))
    slots, num_tokens = jnp.asarray(SLOTS), jnp.array([T, T - 1, T], jnp.int32)
    outputs, pools = [], []
    for number, steps in enumerate(STEPS):
        inputs = recurrent.make_inputs(backend, len(SLOTS), T, seed=number, dtype=dtype)
        y, cache, record = recurrent.forward(
            backend, ForwardMode.TARGET_VERIFY, cache, weights, slots, num_tokens, *inputs, parents=parents
        )
        track = jnp.array([5, -1, 6], jnp.int32), jnp.array([1, 0, 3], jnp.int32)
        cache = recurrent.commit(backend, cache, record, jnp.asarray(steps, jnp.int32), *track)
        outputs.append(y[:, [0, 2]])  # the second row has a token less
        pools.append(cache.mamba)
    if strategy is CommitStrategy.SNAPSHOT or tree:
        return {"outputs": digest(outputs), "states": digest(pools)}
    pools.append(recurrent.held(backend, cache, slots))
    inputs = recurrent.make_inputs(backend, len(SLOTS), T, seed=9, dtype=dtype)
    y, cache, _ = recurrent.forward(backend, ForwardMode.EXTEND, cache, weights, slots, num_tokens, *inputs)
    return {"outputs": digest([outputs, y]), "states": digest([pools, cache.mamba])}


def kernel(op, form, keep, tree) -> dict[str, str]:
    """One pass of an op, or a fold of its histories."""
    if op == "mamba2":
        scene = ssm.scene(ssm.Dims(), "float32", "bfloat16")
        counts, to_slots = np.array([4, 2, 0, 1, 1], np.int32), np.array([4, 3, 5, 1, -1], np.int32)
        if keep == "fold":
            given = ssm.arrays([scene.state, scene.ring, scene.A, ssm.SLOTS, counts, to_slots])
            return {"states": digest(mamba2.fold(*given, form=form, run="triton"))}
        parents = ssm.PARENTS if tree else None
        given = ssm.arrays([scene.inputs, scene.A, scene.D, scene.state, scene.snapshots, scene.ring, parents])
        result = mamba2.update(*given, keep=keep, form=form, run="triton")
        return {"outputs": digest(result.y), "states": digest(result[1:])}
    rng = np.random.default_rng(3)
    given = delta_rule.random_pass(rng, np.float32, op == "kda")
    counts, starts = np.array([2, 0, 5, 1, 0, 3, 4], np.int32), np.array([8, 0, 2, 7, 0, 5, 1], np.int32)
    ring = delta_rule.on_device(delta_rule.random_ring(rng, given, counts, starts))
    state, rows = jnp.array(given.state), {"slots": jnp.array(given.slots)}
    options = {"layer": delta_rule.LAYER, "form": form, **delta.RUNS["triton"]}
    if keep == "fold":
        call = functools.partial(delta.fold_history, **options)
        return {"states": digest(jax.jit(call, compiler_options=QUICKLY)(state, ring, **rows))}
    kept = {
        "state": {},
        "ring": {"ring": ring, "fold": jnp.array([True, True, False, True, True])},
        "snapshots": {"snapshots": jnp.zeros((2, delta_rule.B, delta_rule.T, *state.shape[2:]), state.dtype)},
    }[keep]
    call = jax.jit(functools.partial(delta.gated_delta_update, **options), compiler_options=QUICKLY)
    arrays = delta_rule.on_device(given.inputs) | rows | kept | {"num_tokens": jnp.array(given.num_tokens)}
    result = call(state, **arrays, parents=jnp.array(given.parents) if tree else None)
    return {"outputs": digest(result.y), "states": digest(result[1:])}


if __name__ == "__main__":
    sys.exit(main())
