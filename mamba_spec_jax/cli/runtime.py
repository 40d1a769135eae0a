"""What every command needs before it can run a model: dtypes for the device, compiled programs kept, a loaded model."""

import math
import os
from pathlib import Path
from typing import Any

import jax
from tokenizers import Tokenizer

from mamba_spec_jax.cli.options import Mode, Precision, Strategy
from mamba_spec_jax.loaded import load
from mamba_spec_jax.modes import CommitStrategy, DTypePolicy, SpeculativeMode
from mamba_spec_jax.text_generation import LoadedModel
from pallas_kernels.dispatch import Device


def choose_policy(precision: Precision) -> DTypePolicy:
    """The dtypes that --dtype asks for; for AUTO those that suit jax's default device."""
    policies = {
        Precision.AUTO: DTypePolicy.for_device,
        Precision.FLOAT32: DTypePolicy.float32,
        Precision.FLOAT16: DTypePolicy.float16,
        Precision.BFLOAT16: DTypePolicy.bfloat16,
    }
    return policies[precision]()


def describe(device: Device) -> str:
    """`NVIDIA H200 (compute capability 9.0)`; `CPU`."""
    if device.capability is None:
        return device.kind.upper() if device.kind == device.platform else f"{device.kind} ({device.platform})"
    return f"{device.kind} (compute capability {device.capability[0]}.{device.capability[1]})"


def model_line(loaded: LoadedModel) -> str:
    """`granitemoehybrid, 4.20 M parameters: 5 Mamba-2 and 1 attention layers`."""
    config = loaded.model.config
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(loaded.params))
    return (
        f"{config.model_type}, {parameters / 1e6:,.2f} M parameters: {len(config.recurrent_layers)} "
        f"{config.recurrent.title} and {len(config.attention_layers)} attention layers"
    )


def cache_directory() -> Path:
    """Where compiled programs are kept: one that jax was told already, else a folder of the user's cache."""
    config: Any = jax.config
    if config.jax_compilation_cache_dir:
        return Path(config.jax_compilation_cache_dir)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mamba-spec-jax" / "compiled"


def keep_compiled_programs() -> None:
    """Turns on jax's persistent compilation cache for this process."""
    jax.config.update("jax_compilation_cache_dir", str(cache_directory()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def open_model(
    name: str,
    precision: Precision,
    mode: Mode = Mode.DECODE,
    strategy: Strategy = Strategy.AUTO,
    batch: int = 1,
    progress: bool | None = False,
) -> tuple[LoadedModel, Tokenizer]:
    """Loads a model and the tokenizer that the commands cannot do without; ValueError if there is none.

    `batch` is how many rows decode at once, for the strategy AUTO. `progress` is `load`'s; most commands show a line of
    their own meanwhile.
    """
    loaded = load(
        name,
        policy=choose_policy(precision),
        speculative_mode=SpeculativeMode(mode.value),
        strategy=CommitStrategy(strategy.value),
        batch=batch,
        progress=progress,
    )
    if loaded.tokenizer is None:
        raise ValueError(f"{loaded.folder} has no tokenizer.json, so text cannot be turned into its tokens")
    return loaded, loaded.tokenizer
