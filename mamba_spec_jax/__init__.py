"""Speculative decoding for hybrid recurrent language models in JAX, with exact state commits."""

import importlib
from typing import TYPE_CHECKING, Any

from mamba_spec_jax.attention.base import AttentionInputs, ForwardBatch
from mamba_spec_jax.attention.full import FullAttention
from mamba_spec_jax.attention.hybrid import HybridAttnBackend
from mamba_spec_jax.attention.hybrid_linear import HybridLinearAttnBackend
from mamba_spec_jax.attention.mamba2 import Mamba2, Mamba2Inputs, Mamba2Weights
from mamba_spec_jax.attention.recurrence import Recurrence
from mamba_spec_jax.cache.pools import HybridCache, KVCache, MambaPool, PoolSpec, RingSpec
from mamba_spec_jax.cache.records import Draft, ModelOutput, VerifyRecord
from mamba_spec_jax.cache.slots import SlotAllocator, reset_slots, tracking_steps
from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.models.hybrid_lm import HybridModel
from mamba_spec_jax.models.memory import MemoryPlan, plan_memory
from mamba_spec_jax.models.recurrent_config import Mamba2Config
from mamba_spec_jax.models.strategy import StrategyChoice, choose_strategy
from mamba_spec_jax.modes import CommitStrategy, DTypePolicy, ForwardMode, ReplayRing, SpeculativeMode
from mamba_spec_jax.speculative.acceptance import AcceptResult, accept
from mamba_spec_jax.speculative.decode import (
    DecodeState,
    decode_steps,
    decode_until_finished,
    speculative_decode_step,
)
from mamba_spec_jax.speculative.depth import AutoDepth, FixedDepth
from mamba_spec_jax.speculative.drafters.dflash import DFlashDrafter
from mamba_spec_jax.speculative.drafters.draft_model import DraftModelDrafter
from mamba_spec_jax.speculative.drafters.eagle import EagleDrafter
from mamba_spec_jax.speculative.drafters.eagle_tree import EagleTreeDrafter
from mamba_spec_jax.speculative.drafters.fallback import FallbackDrafter
from mamba_spec_jax.speculative.drafters.ngram import NgramDrafter
from mamba_spec_jax.speculative.drafters.ngram_tree import NgramTreeDrafter
from mamba_spec_jax.speculative.generate import Generation, generate
from mamba_spec_jax.speculative.prompts import init_decode
from mamba_spec_jax.speculative.protocol import Drafter, Progress, Proposal, SpeculativeModel
from mamba_spec_jax.speculative.sampling import Filters, Greedy, Sampling, TokenChoice
from mamba_spec_jax.speculative.stop import StopConditions, StopReason
from mamba_spec_jax.speculative.stream import StreamEvent, generated_texts, stream, text_stops
from mamba_spec_jax.speculative.tree import SelectedTree, TreeTopology, select_best

if TYPE_CHECKING:
    from mamba_spec_jax.drafting import LoadedDrafter, load_drafter
    from mamba_spec_jax.models.chat import ChatTemplate
    from mamba_spec_jax.models.loading import LoadedModel, load

__version__ = "0.1.0"

__all__ = [
    "AcceptResult",
    "AttentionInputs",
    "AutoDepth",
    "ChatTemplate",
    "CommitStrategy",
    "DFlashDrafter",
    "DTypePolicy",
    "DecodeState",
    "Draft",
    "DraftModelDrafter",
    "Drafter",
    "EagleDrafter",
    "EagleTreeDrafter",
    "FallbackDrafter",
    "Filters",
    "FixedDepth",
    "ForwardBatch",
    "ForwardMode",
    "FullAttention",
    "Generation",
    "Greedy",
    "HybridAttnBackend",
    "HybridCache",
    "HybridConfig",
    "HybridLinearAttnBackend",
    "HybridModel",
    "KVCache",
    "LoadedDrafter",
    "LoadedModel",
    "Mamba2",
    "Mamba2Config",
    "Mamba2Inputs",
    "Mamba2Weights",
    "MambaPool",
    "MemoryPlan",
    "ModelOutput",
    "NgramDrafter",
    "NgramTreeDrafter",
    "PoolSpec",
    "Progress",
    "Proposal",
    "Recurrence",
    "ReplayRing",
    "RingSpec",
    "Sampling",
    "SelectedTree",
    "SlotAllocator",
    "SpeculativeMode",
    "SpeculativeModel",
    "StopConditions",
    "StopReason",
    "StrategyChoice",
    "StreamEvent",
    "TokenChoice",
    "TreeTopology",
    "VerifyRecord",
    "accept",
    "choose_strategy",
    "decode_steps",
    "decode_until_finished",
    "generate",
    "generated_texts",
    "init_decode",
    "load",
    "load_drafter",
    "plan_memory",
    "reset_slots",
    "select_best",
    "speculative_decode_step",
    "stream",
    "text_stops",
    "tracking_steps",
]


# Loading needs the packages that read checkpoints; everything else runs without them.
_LOADING = {
    "ChatTemplate": "mamba_spec_jax.models.chat",
    "LoadedDrafter": "mamba_spec_jax.drafting",
    "LoadedModel": "mamba_spec_jax.models.loading",
    "load": "mamba_spec_jax.models.loading",
    "load_drafter": "mamba_spec_jax.drafting",
}


def __getattr__(name: str) -> Any:
    if name in _LOADING:
        return getattr(importlib.import_module(_LOADING[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
