"""Serving through slots: requests come and go while one compiled step decodes all that are running.

A slot is a row of the cache pools. A request gets a free slot, its prompt is read into that slot, and it decodes there,
whatever the other slots do. When it has finished, the slot is free for the next request. The step is always the same
program: which slots it works on, and how many tokens are drafted in each, are arrays.
Run it with `python examples/slots.py`; it takes about 30 seconds on a CPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import mamba_spec_jax as ms
from mamba_spec_jax.assets import TINY

SLOTS, ROWS, DRAFTS, MAX_LEN, CHUNK = 4, 3, 4, 128, 16
REQUESTS = {  # a prompt, and how many tokens to generate after it
    "def area(width, height):": 24,
    "class Stack:\n    def __init__(self):": 40,
    "import os\n": 12,
    "for name in names:\n": 32,
    "class Point:\n    def __init__(self, x, y):": 20,
}
loaded = ms.load(TINY)
model, params, drafter = loaded.model, loaded.params, ms.NgramDrafter(DRAFTS)


@functools.partial(jax.jit, donate_argnums=1)
def prefill(params, cache, tokens, slots, num_tokens):
    """Reads at most CHUNK tokens into each row's slot."""
    return model.prefill(params, tokens, cache, slots=slots, num_tokens=num_tokens).cache


@functools.partial(jax.jit, donate_argnums=1)
def step(params, cache, tokens, lengths, slots, limit):
    """Drafts at most `limit` tokens, verifies and commits. `tokens [B, M]` are the texts; slot -1 is an idle row."""
    proposal = drafter.propose(None, (), tokens, lengths, None, DRAFTS)
    root = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)
    draft = ms.Draft(jnp.concatenate([root, proposal.tokens], axis=1), jnp.minimum(proposal.counts, limit), slots)
    output = model.verify(params, draft, cache)
    result = ms.accept(ms.Greedy(), output.logits, draft)
    cache = model.backend.update_mamba_state_after_mtp_verify(
        output.cache, output.record, result.last_correct_step_indices
    )
    return cache, result.tokens, result.accept_lens


def admit(cache, slot, prompt):
    """Clears a slot and reads a prompt into it, but for its last token: that is the root of the first step."""
    slots = jnp.array([slot], jnp.int32)
    cache = ms.reset_slots(cache, slots)
    for start in range(0, len(prompt) - 1, CHUNK):
        piece = prompt[start : min(start + CHUNK, len(prompt) - 1)]
        tokens = jnp.array([piece + [0] * (CHUNK - len(piece))], jnp.int32)
        cache = prefill(params, cache, tokens, slots, jnp.array([len(piece)], jnp.int32))
    return cache


def serve(requests, limit):
    """The new tokens of all requests, and how many steps they took."""
    waiting, running, done, steps = list(requests), {}, {}, 0
    allocator, cache = ms.SlotAllocator(SLOTS), model.init_cache(SLOTS, MAX_LEN)
    while waiting or running:
        while waiting and len(running) < ROWS:
            prompt = waiting.pop(0)
            (slot,) = allocator.allocate(1)
            ids = loaded.tokenizer.encode(prompt).ids
            cache = admit(cache, slot, ids)
            running[slot] = (prompt, ids, len(ids) + requests[prompt])
        tokens = np.zeros((ROWS, MAX_LEN), np.int32)
        lengths, slots = np.ones(ROWS, np.int32), np.full(ROWS, -1, np.int32)
        for row, (slot, (_, text, _)) in enumerate(running.items()):
            tokens[row, : len(text)], lengths[row], slots[row] = text, len(text), slot
        arrays = [jnp.asarray(each) for each in (tokens, lengths, slots)]
        cache, emitted, counts = step(params, cache, *arrays, limit)
        emitted, counts, steps = np.asarray(emitted), np.asarray(counts), steps + 1
        for row, (slot, (prompt, text, end)) in enumerate(list(running.items())):
            text += emitted[row, : counts[row]].tolist()
            if len(text) >= end:
                done[prompt] = text[end - requests[prompt] : end]
                del running[slot]
                allocator.free([slot])
    return done, steps


def main():
    done, steps = serve(REQUESTS, DRAFTS)
    plain, plain_steps = serve(REQUESTS, 0)  # the same program without drafts
    print(f"{len(REQUESTS)} requests in {ROWS} rows: {steps} steps, {plain_steps} without drafts")
    print("identical to plain decoding:", done == plain)


if __name__ == "__main__":
    main()
