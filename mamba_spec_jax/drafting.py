"""A drafter from a checkpoint: where draft heads meet the loop that drafts with them."""

from pathlib import Path
from typing import Any

from mamba_spec_jax.loaded import load
from mamba_spec_jax.models.checkpoint import locate, read_json
from mamba_spec_jax.models.families import FAMILIES
from mamba_spec_jax.models.heads.checkpoint import load_head
from mamba_spec_jax.models.heads.head import DFlashHead, EagleHead
from mamba_spec_jax.models.heads.published import load_published_head
from mamba_spec_jax.models.hf_config import HFConfig
from mamba_spec_jax.speculative.drafters.dflash import DFlashDrafter
from mamba_spec_jax.speculative.drafters.draft_model import DraftModelDrafter
from mamba_spec_jax.speculative.drafters.eagle import EagleDrafter
from mamba_spec_jax.speculative.drafters.eagle_tree import EagleTreeDrafter
from mamba_spec_jax.speculative.protocol import AutoregressiveHead, Drafter
from mamba_spec_jax.text_generation import LoadedDrafter, LoadedModel

DRAFTS = 4  # tokens of a path, where the checkpoint does not say


def load_drafter(
    name_or_folder: str | Path,
    loaded: LoadedModel,
    *,
    max_drafts: int | None = None,
    depth: int | None = None,
    **options: Any,
) -> LoadedDrafter:
    """Loads what drafts for a model that was loaded before, from a folder or the Hugging Face hub.

    Args:
        name_or_folder: an EAGLE-3, multi-token-prediction or DFlash checkpoint, a smaller language model with the same
            vocabulary, or the target's own checkpoint, where that carries a head for multi-token prediction.
        loaded: the target, from `load`.
        max_drafts: most tokens a step, of a tree its nodes; by default 4, and for DFlash what its block holds.
        depth: of a draft tree, for a head that is run on; None drafts a chain.
        **options: revision and local_files_only, as for `load`.

    Raises:
        ValueError: the checkpoint is damaged or was made for another target; for more drafts than a DFlash head's block
            holds, and for a tree of what cannot draft one.
    """
    drafter: Drafter
    most = DRAFTS if max_drafts is None else max_drafts
    folder = locate(name_or_folder, **options)
    if folder.resolve() == loaded.folder.resolve():
        head, params = load_published_head(folder, loaded.model, loaded.params)
        drafter = _run_on(head, most, depth)
        return LoadedDrafter(drafter, params, loaded.model.with_hidden_layers(drafter.hidden_layers))
    hf = HFConfig(read_json(folder / "config.json"), str(folder / "config.json"))
    if any(hf.values.get("model_type") == family for family in FAMILIES):
        smaller = load(folder, policy=loaded.model.policy, speculative_mode=loaded.model.backend.speculative_mode)
        if depth is not None:
            raise ValueError(
                f"{name_or_folder} holds a language model, which drafts chains, not trees of depth {depth}"
            )
        drafter = DraftModelDrafter(smaller.model, most)
        return LoadedDrafter(drafter, smaller.params, loaded.model)
    found = load_head(folder, loaded.model, loaded.params)
    block, mask = found.block_size, found.mask_token
    if isinstance(found.head, DFlashHead) and block is not None and mask is not None:
        fills = block - 1
        if depth is not None:
            raise ValueError(f"{name_or_folder} holds a DFlash head, which drafts chains, not trees of depth {depth}")
        if max_drafts is not None and max_drafts > fills:
            raise ValueError(f"max_drafts is {max_drafts}, but this DFlash head fills blocks of {fills} drafts at most")
        drafter = DFlashDrafter(found.head, fills if max_drafts is None else max_drafts, mask, found.passes)
    elif isinstance(found.head, EagleHead):
        drafter = _run_on(found.head, most, depth)
    else:
        raise ValueError(f"{name_or_folder} holds a {type(found.head).__name__}, for which there is no drafter")
    return LoadedDrafter(drafter, found.params, loaded.model.with_hidden_layers(drafter.hidden_layers))


def _run_on(head: AutoregressiveHead, most: int, depth: int | None) -> Drafter:
    return EagleDrafter(head, most) if depth is None else EagleTreeDrafter(head, most, depth=depth)
