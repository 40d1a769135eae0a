"""Two backends, one selector: which child runs a pass also owns what that pass left to commit."""

import inspect
from typing import Any

import flax.struct

from mamba_spec_jax.array_types import Array
from mamba_spec_jax.attention.base import AttentionBackend, ForwardBatch
from mamba_spec_jax.cache.pools import HybridCache, PoolSpec
from mamba_spec_jax.cache.records import CommitBackend, VerifyRecord, require_record
from mamba_spec_jax.modes import ForwardMode, SpeculativeMode

_COMMIT = "update_mamba_state_after_mtp_verify"
_COMMIT_PARAMETERS = tuple(inspect.signature(getattr(CommitBackend, _COMMIT)).parameters)[1:]


@flax.struct.dataclass
class HybridAttnBackend:
    """One backend for prefill and one for decoding; `speculative_mode` says which of them verifies.

    A pytree of static specs without arrays. Build it with `create`, which checks that the children fit.

    Attributes:
        prefill: verifies in the chunked form under SpeculativeMode.PREFILL.
        decode: verifies with the step recurrence under SpeculativeMode.DECODE.
        speculative_mode: static.
    """

    prefill: AttentionBackend
    decode: AttentionBackend
    speculative_mode: SpeculativeMode = flax.struct.field(pytree_node=False, default=SpeculativeMode.DECODE)

    @classmethod
    def create(
        cls,
        prefill: AttentionBackend,
        decode: AttentionBackend,
        speculative_mode: SpeculativeMode = SpeculativeMode.DECODE,
    ) -> "HybridAttnBackend":
        """Checks the children and pairs them.

        Raises:
            TypeError: a child is no backend, one that has to commit lacks the commit or has another signature, or the
                children work on different pools.
        """
        backend = cls(prefill, decode, speculative_mode)
        verifier = backend.select(ForwardMode.TARGET_VERIFY)
        for name, child in (("prefill", prefill), ("decode", decode)):
            for needed in ("pool_spec", "init_record", "forward"):
                if not hasattr(child, needed):
                    raise TypeError(f"the {name} child, {type(child).__name__}, has no {needed}: it is no backend")
            # DECODE defers its state too, so the decode child always commits.
            if child is verifier or child is decode:
                _check_commit(name, child)
        if prefill.pool_spec != decode.pool_spec:
            raise TypeError(
                "the children must share one PoolSpec, since they work on one cache: prefill has "
                f"{prefill.pool_spec}, decode has {decode.pool_spec}"
            )
        return backend

    @property
    def pool_spec(self) -> PoolSpec:
        return self.decode.pool_spec

    def select(self, mode: ForwardMode) -> AttentionBackend:
        """The child backend that runs `mode` and commits its records: the only place that chooses."""
        if mode in (ForwardMode.DECODE, ForwardMode.IDLE):
            return self.decode
        if mode is ForwardMode.TARGET_VERIFY and self.speculative_mode is SpeculativeMode.DECODE:
            return self.decode
        return self.prefill

    def init_record(self, batch: ForwardBatch) -> VerifyRecord | None:
        return self.select(batch.mode).init_record(batch)

    def forward(
        self, layer_id: int, inputs: object, cache: HybridCache, record: VerifyRecord | None, batch: ForwardBatch
    ) -> tuple[Array, HybridCache, VerifyRecord | None]:
        """Mixes one layer's tokens in the child that runs `batch.mode`."""
        return self.select(batch.mode).forward(layer_id, inputs, cache, record, batch)

    def update_mamba_state_after_mtp_verify(
        self, cache: HybridCache, record: VerifyRecord, *nodes: Any, **options: Any
    ) -> HybridCache:
        """The commit of the child that verified; arguments as `CommitBackend`'s, and that child's options."""
        child = self.select(require_record(_COMMIT, record).spec.mode)
        return child.update_mamba_state_after_mtp_verify(cache, record, *nodes, **options)


def _check_commit(name: str, child: object) -> None:
    commit = getattr(child, _COMMIT, None)
    if not callable(commit):
        raise TypeError(
            f"the {name} child, {type(child).__name__}, verifies but has no {_COMMIT}: it could never commit"
        )
    signature = inspect.signature(commit).parameters.values()
    options = [each for each in signature if each.kind is each.KEYWORD_ONLY and each.default is not each.empty]
    parameters = tuple(each.name for each in signature if each not in options)
    if parameters != _COMMIT_PARAMETERS:
        raise TypeError(
            f"the {name} child, {type(child).__name__}, has {_COMMIT}({', '.join(parameters)}), expected "
            f"({', '.join(_COMMIT_PARAMETERS)})"
        )
