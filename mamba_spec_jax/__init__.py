"""Speculative decoding for hybrid recurrent language models in JAX, with exact state commits."""

import importlib
from typing import TYPE_CHECKING, Any

from mamba_spec_jax.attention.base import AttentionBackend, AttentionInputs, ForwardBatch
from mamba_spec_jax.attention.full import FullAttention
from mamba_spec_jax.attention.gated_delta import GatedDelta, GatedDeltaInputs, GatedDeltaWeights
from mamba_spec_jax.attention.hybrid import HybridAttnBackend
from mamba_spec_jax.attention.hybrid_linear import HybridLinearAttnBackend
from mamba_spec_jax.attention.mamba1 import Mamba1, Mamba1Inputs, Mamba1Weights
from mamba_spec_jax.attention.mamba2 import Mamba2, Mamba2Inputs, Mamba2Weights
from mamba_spec_jax.attention.recurrence import Recurrence
from mamba_spec_jax.attention.short_conv import ShortConv, ShortConvInputs, ShortConvWeights
from mamba_spec_jax.cache.pools import HybridCache, KVCache, MambaPool, PoolSpec, RingSpec
from mamba_spec_jax.cache.records import CommitBackend, Draft, ModelOutput, RecordSpec, VerifyRecord
from mamba_spec_jax.cache.slots import SlotAllocator, reset_slots, tracking_steps
from mamba_spec_jax.cache.tree import Tree
from mamba_spec_jax.layers.rotary_scaling import RotaryScaling
from mamba_spec_jax.layers.routing import SigmoidRouting
from mamba_spec_jax.models.config import BranchMultipliers, HybridConfig, LatentDims, SharedBlocks
from mamba_spec_jax.models.hybrid_lm import HybridModel
from mamba_spec_jax.models.memory import MemoryPlan, plan_memory
from mamba_spec_jax.models.recurrent_config import GatedDeltaConfig, Mamba1Config, Mamba2Config, ShortConvConfig
from mamba_spec_jax.models.strategy import StrategyChoice, choose_strategy
from mamba_spec_jax.modes import CommitStrategy, DTypePolicy, ForwardMode, ReplayRing, SpeculativeMode
from mamba_spec_jax.speculative.acceptance import AcceptResult, accept
from mamba_spec_jax.speculative.decoder import Decoder
from mamba_spec_jax.speculative.draft_policy import AutoDrafts, ChunkCosts, DraftPolicy, FixedDrafts
from mamba_spec_jax.speculative.drafters.dflash import DFlashDrafter
from mamba_spec_jax.speculative.drafters.draft_model import DraftModel, DraftModelDrafter, DraftModelState
from mamba_spec_jax.speculative.drafters.eagle import EagleDrafter, EagleState
from mamba_spec_jax.speculative.drafters.eagle_tree import EagleTreeDrafter
from mamba_spec_jax.speculative.drafters.fallback import FallbackDrafter
from mamba_spec_jax.speculative.drafters.ngram import NgramDrafter
from mamba_spec_jax.speculative.drafters.ngram_tree import NgramTreeDrafter
from mamba_spec_jax.speculative.generate import Generation, generate
from mamba_spec_jax.speculative.protocol import (
    AutoregressiveHead,
    BlockHead,
    Drafter,
    Progress,
    Proposal,
    SpeculativeModel,
)
from mamba_spec_jax.speculative.requests import GenerationOptions, Requests, RowOptions
from mamba_spec_jax.speculative.sampling import (
    Filters,
    Greedy,
    Purpose,
    Sampling,
    TokenChoice,
    draw_keys,
)
from mamba_spec_jax.speculative.state import DecodeState, Statistics, Weights
from mamba_spec_jax.speculative.stop import StopAutomaton, StopConditions, StopReason
from mamba_spec_jax.speculative.stream import StreamEvent, generated_texts, stream, text_stops
from mamba_spec_jax.speculative.text import token_bytes
from mamba_spec_jax.speculative.tree import SelectedTree, TreeTopology, select_best
from pallas_kernels.dispatch import Device
from pallas_kernels.ring import Ring

if TYPE_CHECKING:
    from mamba_spec_jax.drafting import load_drafter
    from mamba_spec_jax.loaded import load
    from mamba_spec_jax.models.chat import ChatTemplate
    from mamba_spec_jax.text_generation import LoadedDrafter, LoadedModel, TextGeneration

__version__ = "0.1.0"

__all__ = [
    "AcceptResult",
    "AttentionBackend",
    "AttentionInputs",
    "AutoDrafts",
    "AutoregressiveHead",
    "BlockHead",
    "BranchMultipliers",
    "ChatTemplate",
    "ChunkCosts",
    "CommitBackend",
    "CommitStrategy",
    "DFlashDrafter",
    "DTypePolicy",
    "DecodeState",
    "Decoder",
    "Device",
    "Draft",
    "DraftModel",
    "DraftModelDrafter",
    "DraftModelState",
    "DraftPolicy",
    "Drafter",
    "EagleDrafter",
    "EagleState",
    "EagleTreeDrafter",
    "FallbackDrafter",
    "Filters",
    "FixedDrafts",
    "ForwardBatch",
    "ForwardMode",
    "FullAttention",
    "GatedDelta",
    "GatedDeltaConfig",
    "GatedDeltaInputs",
    "GatedDeltaWeights",
    "Generation",
    "GenerationOptions",
    "Greedy",
    "HybridAttnBackend",
    "HybridCache",
    "HybridConfig",
    "HybridLinearAttnBackend",
    "HybridModel",
    "KVCache",
    "LatentDims",
    "LoadedDrafter",
    "LoadedModel",
    "Mamba1",
    "Mamba1Config",
    "Mamba1Inputs",
    "Mamba1Weights",
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
    "Purpose",
    "RecordSpec",
    "Recurrence",
    "ReplayRing",
    "Requests",
    "Ring",
    "RingSpec",
    "RotaryScaling",
    "RowOptions",
    "Sampling",
    "SelectedTree",
    "SharedBlocks",
    "ShortConv",
    "ShortConvConfig",
    "ShortConvInputs",
    "ShortConvWeights",
    "SigmoidRouting",
    "SlotAllocator",
    "SpeculativeMode",
    "SpeculativeModel",
    "Statistics",
    "StopAutomaton",
    "StopConditions",
    "StopReason",
    "StrategyChoice",
    "StreamEvent",
    "TextGeneration",
    "TokenChoice",
    "Tree",
    "TreeTopology",
    "VerifyRecord",
    "Weights",
    "accept",
    "choose_strategy",
    "draw_keys",
    "generate",
    "generated_texts",
    "load",
    "load_drafter",
    "plan_memory",
    "reset_slots",
    "select_best",
    "stream",
    "text_stops",
    "token_bytes",
    "tracking_steps",
]


# Loading needs the packages that read checkpoints; everything else runs without them.
_LOADING = {
    "ChatTemplate": "mamba_spec_jax.models.chat",
    "LoadedDrafter": "mamba_spec_jax.text_generation",
    "LoadedModel": "mamba_spec_jax.text_generation",
    "TextGeneration": "mamba_spec_jax.text_generation",
    "load": "mamba_spec_jax.loaded",
    "load_drafter": "mamba_spec_jax.drafting",
}


def __getattr__(name: str) -> Any:
    if name in _LOADING:
        return getattr(importlib.import_module(_LOADING[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
