"""Writes the pages of the API reference: every public name of both packages once, sorted by what it is for."""

import inspect
import pathlib

import mamba_spec_jax
import pallas_kernels

# Page: its title, what it is about, and the names on it. Public names that are on no page come last, on `more`.
PAGES = {
    "text": (
        "Models and text",
        "Load a checkpoint, and go from text to text.",
        "load LoadedModel TextGeneration load_drafter LoadedDrafter ChatTemplate plan_memory MemoryPlan",
    ),
    "generation": (
        "Generation",
        "From token ids to token ids, with any model that follows the protocol.",
        "generate Generation stream StreamEvent generated_texts StopConditions StopReason StopAutomaton text_stops "
        "token_bytes DraftPolicy FixedDrafts AutoDrafts ChunkCosts GenerationOptions RowOptions",
    ),
    "step": (
        "The step",
        "One step of speculative decoding, for a loop of your own.",
        "Decoder Weights DecodeState Requests Statistics",
    ),
    "acceptance": (
        "Acceptance and sampling",
        "How the target chooses its tokens, and which drafts become part of the text.",
        "accept AcceptResult Greedy Sampling Filters TokenChoice Purpose draw_keys",
    ),
    "drafters": (
        "Drafters",
        "What proposes tokens, and the protocol that it follows.",
        "Drafter Proposal Progress NgramDrafter NgramTreeDrafter EagleDrafter EagleState EagleTreeDrafter "
        "DFlashDrafter DraftModelDrafter DraftModel DraftModelState FallbackDrafter AutoregressiveHead BlockHead "
        "TreeTopology SelectedTree select_best",
    ),
    "models": (
        "Models",
        "What a target model is, and the configurations of those that can be loaded.",
        "SpeculativeModel CommitBackend HybridModel HybridConfig Mamba2Config Mamba1Config GatedDeltaConfig "
        "ShortConvConfig LatentDims SharedBlocks BranchMultipliers RotaryScaling SigmoidRouting choose_strategy "
        "StrategyChoice",
    ),
    "backends": (
        "Backends",
        "What mixes tokens in a layer, and owns the commit.",
        "HybridAttnBackend HybridLinearAttnBackend AttentionBackend ForwardBatch FullAttention AttentionInputs "
        "Recurrence Mamba2 Mamba2Inputs Mamba2Weights Mamba1 Mamba1Inputs Mamba1Weights GatedDelta GatedDeltaInputs "
        "GatedDeltaWeights ShortConv ShortConvInputs ShortConvWeights",
    ),
    "cache": (
        "Cache, records and modes",
        "The buffers that are kept between steps, what goes into a verify pass and comes out of it, and the static "
        "choices.",
        "HybridCache MambaPool KVCache PoolSpec Ring RingSpec Draft Tree VerifyRecord RecordSpec ModelOutput "
        "SlotAllocator reset_slots tracking_steps ForwardMode SpeculativeMode CommitStrategy "
        "ReplayRing DTypePolicy Device",
    ),
    "ops": (
        "Ops",
        "The functions of `pallas_kernels`, which need nothing from the rest of the library.",
        "selective_state_update fold_history StateUpdate gated_delta_update mamba1_state_update causal_conv1d_update "
        "ConvUpdate decode_attention state_commit state_scatter ssd_chunk_scan gated_delta_chunk",
    ),
}


def public_names():
    """Every public name, and its value; the ops' package comes second."""
    for package in (mamba_spec_jax, pallas_kernels):
        for name in package.__all__:
            yield name, package.__name__, getattr(package, name)


def write(folder: pathlib.Path) -> None:
    """Writes one page for each entry of `PAGES`, and an index; a page that has not changed is left as it is."""
    names = {name: (package, value) for name, package, value in public_names()}
    pages = {
        page: (title, about, [n for n in listed.split() if n in names])
        for page, (title, about, listed) in PAGES.items()
    }
    placed = {name for _, _, listed in pages.values() for name in listed}
    rest = [name for name in names if name not in placed]
    if rest:
        pages["more"] = ("More", "Names that are on no other page.", rest)
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.md"):
        if path.stem not in (*pages, "index"):
            path.unlink()  # of an earlier build
    for page, (title, about, listed) in pages.items():
        entries = "\n".join(_entry(name, *names[name]) for name in listed)
        _write(folder / f"{page}.md", f"# {title}\n\n{about}\n\n```{{eval-rst}}\n{entries}```\n")
    index = "".join(f"| [{title}]({page}.md) | {about} |\n" for page, (title, about, _) in pages.items())
    toc = "\n".join(pages)
    _write(
        folder / "index.md",
        "# API reference\n\nEvery public name of `mamba_spec_jax` and `pallas_kernels`, from the docstrings. Capital "
        "letters in shapes are explained in each docstring, and in the [glossary](../glossary.md).\n\n"
        f"| page | about |\n| --- | --- |\n{index}\n```{{toctree}}\n:hidden:\n\n{toc}\n```\n",
    )


def _entry(name: str, package: str, value: object) -> str:
    if not inspect.isclass(value):
        return f".. autofunction:: {package}.{name}\n\n"
    return f".. autoclass:: {package}.{name}\n   :members:\n   :exclude-members: replace\n\n"


def _write(path: pathlib.Path, text: str) -> None:
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
