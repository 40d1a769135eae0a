"""From a checkpoint to a model that is ready to run."""

import dataclasses
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from mamba_spec_jax.models.chat import read_chat_template
from mamba_spec_jax.models.checkpoint import CONFIGS, locate, open_weights
from mamba_spec_jax.models.hybrid_lm import HybridModel
from mamba_spec_jax.models.loading import read_config, read_params, read_tokenizer
from mamba_spec_jax.models.placement import Rules, first_device
from mamba_spec_jax.models.recurrent_config import Mamba2Config
from mamba_spec_jax.modes import CommitStrategy, DTypePolicy, ReplayRing, SpeculativeMode
from mamba_spec_jax.text_generation import LoadedModel
from pallas_kernels.dispatch import Implementation, of_device


def load(
    name_or_folder: str | Path,
    *,
    policy: DTypePolicy | None = None,
    speculative_mode: SpeculativeMode = SpeculativeMode.DECODE,
    strategy: CommitStrategy = CommitStrategy.SNAPSHOT,
    replay: ReplayRing = ReplayRing(),  # noqa: B008, frozen
    batch: int | None = None,
    hidden_layers: tuple[int, ...] = (),
    implementation: Implementation | None = None,
    device: Any = None,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    progress: bool | None = None,
    time_step_limit: tuple[float, float] | None = None,
    rotary_length: int | None = None,
) -> LoadedModel:
    """Loads `config.json`, safetensors weights and `tokenizer.json`, from a folder or from the Hugging Face hub.

    Weights are read one at a time, the largest first, cast to `policy.params` and placed, so that little more memory
    is needed than they take. Missing, surplus and misshapen ones are found in the files' headers, before any is read.
    Of a hub model the configuration is looked at before the weights are downloaded; no code of it is ever run.

    Args:
        name_or_folder: a folder, or a hub id such as `ibm-granite/granite-4.0-h-350m`.
        policy: dtypes; None is what suits the device, see `DTypePolicy.for_device`.
        speculative_mode, strategy, replay, batch, hidden_layers, implementation: as for `HybridModel.create`.
        device: a jax device or sharding for the weights; None is the default device.
        mesh: devices that share the weights instead, with Auto axes.
        rules: for a mesh, pairs of a regular expression and a `PartitionSpec`: the first whose expression occurs in a
            parameter's dotted path, such as `layers.0.mixer.in_proj.kernel`, splits it. All others are on every device.
        revision: branch, tag or commit on the hub.
        local_files_only: use what an earlier call downloaded.
        progress: show a progress bar on stderr; None shows it if that is a terminal.
        time_step_limit: clamp of Mamba-2's time steps in every pass; None is what transformers' full forward does,
            which for some families is not what their `config.json` says.
        rotary_length: tokens of the longest texts, for the rope types dynamic and longrope, whose rotary embedding is
            another in longer texts: all positions are rotated as in a text of that length. None is the length up to
            which the checkpoint rotates plainly (dynamic) or by its short factors (longrope).

    Raises:
        ValueError: the checkpoint cannot be found, is damaged, or is not what this library can run; says which part.
        MemoryError: the weights cannot fit.
    """
    found: dict[str, Any] = {"revision": revision, "local_files_only": local_files_only}
    read_config(locate(name_or_folder, files=CONFIGS, **found))  # or gigabytes are downloaded of what is refused then
    folder = locate(name_or_folder, **found)
    family, config = read_config(folder)
    if time_step_limit is not None:
        if not isinstance(config.recurrent, Mamba2Config):
            raise ValueError(f"load got a time_step_limit, but {folder} has no Mamba-2 layers: leave it out")
        recurrent = dataclasses.replace(config.recurrent, time_step_limit=time_step_limit)
        config = dataclasses.replace(config, recurrent=recurrent)
    if rotary_length is not None:
        if config.rope_scaling is None:
            raise ValueError(
                f"{folder} has no rotary embedding that depends on a text's length: leave rotary_length out"
            )
        config = dataclasses.replace(config, rope_scaling=config.rope_scaling.for_length(rotary_length))
    if policy is None:
        runs_on = first_device(device, mesh)
        policy = DTypePolicy.for_device(None if runs_on is None else of_device(runs_on))
    model = HybridModel.create(
        config,
        policy,
        speculative_mode=speculative_mode,
        strategy=strategy,
        replay=replay,
        batch=batch,
        hidden_layers=hidden_layers,
        implementation=implementation,
    )
    with open_weights(folder) as files:
        params = read_params(model, family, files, folder, (device, mesh, rules), progress)
    return LoadedModel(model, params, read_tokenizer(folder), folder, read_chat_template(folder))
