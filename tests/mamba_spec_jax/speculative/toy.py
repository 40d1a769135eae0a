"""A target and drafters small enough that every probability of the loop can be written down."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from mamba_spec_jax.cache.pools import HybridCache, PoolSpec, gather_lengths, slot_index
from mamba_spec_jax.cache.records import RecordSpec, VerifyRecord
from mamba_spec_jax.cache.tree import Tree
from mamba_spec_jax.modes import CommitStrategy, ForwardMode
from mamba_spec_jax.speculative.protocol import ModelOutput, Proposal
from mamba_spec_jax.speculative.sampling import Purpose, draw_keys, draw_tokens
from mamba_spec_jax.speculative.tree import TreeTopology


@dataclasses.dataclass(frozen=True)
class ToyBackend:
    """Commits the state of the last accepted node."""

    @property
    def record_spec(self) -> RecordSpec:
        return RecordSpec(self, ForwardMode.TARGET_VERIFY, CommitStrategy.SNAPSHOT)

    def update_mamba_state_after_mtp_verify(
        self, cache, record, last_correct_step_indices, mamba_track_indices=None, mamba_steps_to_track=None
    ):
        if record.spec != self.record_spec:
            raise ValueError(f"this record was made by {record.spec}, but the commit belongs to {self.record_spec}")
        steps = last_correct_step_indices
        _, counts = record.path_to(steps)
        kept = (steps >= 0) & (steps < record.num_tokens)
        slots = jnp.where(kept, slot_index(record.slots, cache.slots), cache.slots)
        states = record.recurrent[:, jnp.arange(steps.shape[0]), jnp.maximum(steps, 0)]
        return dataclasses.replace(
            cache,
            mamba=dataclasses.replace(cache.mamba, ssm=cache.mamba.ssm.at[:, slots].set(states, mode="drop")),
            lengths=cache.lengths.at[slots].add(counts, mode="drop"),
            awaiting_commit=False,
        )


@dataclasses.dataclass(frozen=True)
class ToyModel:
    """A second-order Markov chain: the next token depends on the last two.

    Its recurrent state is one number, the last committed token plus one (0 before the first); so a commit that is left
    out, or keeps another node, changes the distribution of the next tokens.

    `params` is the logits table `[V + 1, V, V]`: state, last token, next token.
    """

    vocab_size: int

    @property
    def backend(self) -> ToyBackend:
        return ToyBackend()

    @property
    def hidden_layers(self):
        return ()

    def init_cache(self, slots, max_len):
        spec = PoolSpec(recurrent_layers=1, heads=1, head_dim=1, state=1, conv_width=2, conv_channels=1)
        return HybridCache.create(spec, slots, max_len)

    def prefill(self, params, tokens, cache, *, slots, num_tokens):
        before = self._states(cache, slots)
        read = jnp.concatenate([before[:, None], tokens + 1], axis=1)
        after = jnp.take_along_axis(read, num_tokens[:, None], axis=1)[:, 0]
        previous = jnp.take_along_axis(read, jnp.maximum(num_tokens - 1, 0)[:, None], axis=1)[:, 0]
        index = slot_index(slots, cache.slots)
        ssm = cache.mamba.ssm.at[:, index].set(after.astype(jnp.float32)[None, :, None, None, None], mode="drop")
        lengths = cache.lengths.at[index].add(num_tokens, mode="drop")
        cache = dataclasses.replace(cache, mamba=dataclasses.replace(cache.mamba, ssm=ssm), lengths=lengths)
        return ModelOutput(params[previous, jnp.maximum(after - 1, 0)], cache)

    def verify(self, params, draft, cache):
        before = self._states(cache, draft.slots)[:, None]
        if draft.parents is None:
            previous = jnp.concatenate([before, draft.tokens[:, :-1] + 1], axis=1)
        else:
            above = jnp.take_along_axis(draft.tokens, jnp.maximum(draft.parents, 0), axis=1) + 1
            previous = jnp.where(draft.parents >= 0, above, before)
        states = (draft.tokens + 1).astype(jnp.float32)[None, ..., None, None, None]
        record = VerifyRecord(
            slots=draft.slots,
            num_tokens=draft.num_tokens,
            held=gather_lengths(cache, draft.slots),
            recurrent=states,
            conv_inputs=jnp.zeros((1, *draft.tokens.shape, 1)),
            spec=self.backend.record_spec,
            tree=None if draft.parents is None else Tree.create(draft.parents),
        )
        cache = dataclasses.replace(cache, awaiting_commit=True)
        return ModelOutput(params[previous, draft.tokens], cache, record)

    def _states(self, cache, slots):
        index = slot_index(slots, cache.slots)
        return cache.mamba.ssm[0, :, 0, 0, 0].at[index].get(mode="fill", fill_value=0).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class ToyDrafter:
    """Draws drafts from a first-order chain of its own, `table`, with the noise of (row, position).

    `table` holds the probabilities `[V][V]` (last token, next token) as nested tuples, hashable as a drafter must be.
    With `point_mass` it proposes the likeliest token outright.
    """

    table: tuple[tuple[float, ...], ...]
    max_drafts: int
    point_mass: bool = False
    hidden_layers = ()
    proposes_trees = False

    def init(self, batch, max_len):
        return jnp.arange(batch, dtype=jnp.uint32)

    def propose(self, params, state, tokens, lengths, choose, num_drafts):
        table = jnp.asarray(self.table, jnp.float32)
        last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0]
        drafts, probs = [], []
        for k in range(num_drafts):
            q = table[last]
            if self.point_mass:
                last = jnp.argmax(q, axis=-1).astype(jnp.int32)
            else:
                last = draw_tokens(draw_keys(state, lengths + k, Purpose.DRAFT), jnp.log(q))
            drafts.append(last)
            probs.append(q)
        return Proposal(
            tokens=jnp.stack(drafts, axis=1),
            counts=jnp.full(last.shape, num_drafts, jnp.int32),
            state=state,
            probs=None if self.point_mass else jnp.stack(probs, axis=1),
        )

    def update(self, params, state, progress):
        return state


@dataclasses.dataclass(frozen=True)
class ToyTreeDrafter:
    """Draws the siblings of a fixed tree from `ToyDrafter`'s chain, without replacement and in their order.

    With `point_mass` it proposes the likeliest tokens outright.
    """

    table: tuple[tuple[float, ...], ...]
    topology: TreeTopology
    point_mass: bool = False
    hidden_layers = ()
    proposes_trees = True

    @property
    def max_drafts(self):
        return self.topology.T - 1

    def init(self, batch, max_len):
        return jnp.arange(batch, dtype=jnp.uint32)

    def propose(self, params, state, tokens, lengths, choose, num_drafts):
        table = jnp.log(jnp.asarray(self.table, jnp.float32))
        parents, depths = self.topology.parents, self.topology.depths
        nodes = {0: jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0]}
        probs = {}
        for parent in range(num_drafts + 1):
            children = [node for node, above in enumerate(parents) if above == parent]
            q = table[nodes[parent]]
            keys = draw_keys(state, lengths + depths[parent], Purpose.DRAFT)
            keys = jax.vmap(jax.random.fold_in, (0, None))(keys, parent)
            noise = jax.vmap(lambda key: jax.random.gumbel(key, q.shape[1:]))(keys)  # noqa: B023
            order = jnp.argsort(-(q if self.point_mass else q + noise), axis=1).astype(jnp.int32)
            for rank, node in enumerate(children):
                nodes[node], probs[node] = order[:, rank], jnp.exp(q)
        drafted = range(1, num_drafts + 1)
        return Proposal(
            tokens=jnp.stack([nodes[node] for node in drafted], axis=1),
            counts=jnp.full(lengths.shape, num_drafts, jnp.int32),
            state=state,
            probs=None if self.point_mass else jnp.stack([probs[node] for node in drafted], axis=1),
            parents=self.topology.rows(lengths.shape[0]),
        )

    def update(self, params, state, progress):
        return state


def random_tables(seed, vocab, floor):
    """Logits of a target and probabilities of a drafter, no entry of either under about `floor`."""
    rng = np.random.default_rng(seed)
    target, drafter = (
        rng.dirichlet(np.ones(vocab), size) * (1 - vocab * floor) + floor for size in ((vocab + 1, vocab), vocab)
    )
    return jnp.asarray(np.log(target), jnp.float32), tuple(tuple(row) for row in drafter.tolist())
