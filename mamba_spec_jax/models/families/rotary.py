"""The rotary embedding that a `config.json` describes, in `rope_parameters` or, in older files, in `rope_scaling`."""

import math
from typing import Any

from mamba_spec_jax.layers.rotary_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RotaryScaling,
    YarnScaling,
)
from mamba_spec_jax.models.hf_config import HFConfig

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
# Every key of transformers' `RopeParameters`. Those that a type does not read are ignored, as there. The sections of
# multimodal embeddings rotate by different positions only where there are images.
ROPE_KEYS = (
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor",
    "low_freq_factor", "high_freq_factor", "mrope_section", "mrope_interleaved",
)  # fmt: skip


def rotary(
    hf: HFConfig, head_dim: int, *, max_length: int, theta: float = 10_000.0, fraction: float | None = None
) -> dict[str, Any]:
    """`rope_theta`, `rotary_dim` and `rope_scaling` of a model or head.

    Args:
        hf: the file, or the part of it that describes the text model.
        head_dim: Dh.
        max_length: `max_position_embeddings` where the file does not say.
        theta: the base where the file does not say.
        fraction: of a head that is rotated where the rope parameters do not say; None for families that always rotate
            whole heads.

    Raises:
        ValueError: a type, key or value that transformers does not know or cannot compute, by name.
    """
    # A `rope_theta` beside them is what files had before `rope_parameters`.
    rope = rope_parameters(hf)
    for key in rope.values:
        if key not in ROPE_KEYS:
            raise rope.refusal(key, f"no such key: known are {', '.join(ROPE_KEYS)}")
    kind = rope.choice("rope_type" if rope.has("rope_type") else "type", "default", ROPE_TYPES)
    base = rope.number("rope_theta", hf.number("rope_theta", theta, positive=True), positive=True)
    dim = _rotary_dim(hf, rope, kind, head_dim, fraction)
    return {"rope_theta": base, "rotary_dim": dim, "rope_scaling": _scaling(hf, rope, kind, head_dim, max_length)}


def rope_parameters(hf: HFConfig) -> HFConfig:
    """The object that describes the rotary embedding; the older name goes before the newer one."""
    older = hf.nested("rope_scaling")
    return older if older.values else hf.nested("rope_parameters")


def _rotary_dim(hf: HFConfig, rope: HFConfig, kind: str, head_dim: int, fraction: float | None) -> int | None:
    if kind == "proportional":
        return None
    if fraction is not None:
        dim = int(head_dim * rope.number("partial_rotary_factor", fraction, positive=True))
        return None if dim == head_dim else dim
    # Without scaling, transformers' models that rotate whole heads ignore the factor; with it, they fail.
    for holder in (rope, hf):
        if kind != "default" and holder.has("partial_rotary_factor"):
            holder.choice("partial_rotary_factor", 1.0, [1.0])
    return None


def _scaling(hf: HFConfig, rope: HFConfig, kind: str, head_dim: int, max_length: int) -> RotaryScaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(rope.number("factor", positive=True))
    if kind == "proportional":
        fraction = rope.number("partial_rotary_factor", hf.number("partial_rotary_factor", 1.0), positive=True)
        return ProportionalScaling(int(fraction * head_dim // 2), rope.number("factor", 1.0, positive=True))
    longest = hf.integer("max_position_embeddings", max_length, minimum=1)
    if kind == "dynamic":
        return DynamicScaling(rope.number("factor", positive=True), longest)
    # Beside the rope parameters it goes before the one among them.
    holder = hf if hf.has("original_max_position_embeddings") else rope
    original = holder.integer("original_max_position_embeddings", longest, minimum=1)
    if kind == "llama3":
        return _llama3(rope, original)
    return _yarn(rope, longest, original) if kind == "yarn" else _longrope(rope, longest, original)


def _llama3(rope: HFConfig, original: int) -> RotaryScaling:
    low, high = (rope.number(f"{name}_freq_factor", positive=True) for name in ("low", "high"))
    if high <= low:
        raise rope.refusal("high_freq_factor", f"more than low_freq_factor = {low}")
    return Llama3Scaling(rope.number("factor", positive=True), low, high, original)


def _yarn(rope: HFConfig, longest: int, original: int) -> RotaryScaling:
    # A factor of null is the ratio of the lengths; transformers does not take a missing one so.
    ratio = "factor" in rope.values and not rope.has("factor")
    factor = longest / original if ratio else rope.number("factor", positive=True)
    if rope.has("attention_factor"):
        attention = rope.number("attention_factor", positive=True)
    elif _or(rope, "mscale", 0) and _or(rope, "mscale_all_dim", 0):
        attention = _mscale(factor, rope.number("mscale")) / _mscale(factor, rope.number("mscale_all_dim"))
    else:
        attention = _mscale(factor, 1.0)
    return YarnScaling(
        factor,
        original,
        attention,
        beta_fast=_or(rope, "beta_fast", 0) or 32.0,
        beta_slow=_or(rope, "beta_slow", 0) or 1.0,
        truncate=rope.flag("truncate", True),
    )


def _longrope(rope: HFConfig, longest: int, original: int) -> RotaryScaling:
    factors: list[tuple[float, ...]] = []
    for name in ("short_factor", "long_factor"):
        given = rope.values.get(name)
        if not isinstance(given, list | tuple) or not given:
            raise rope.refusal(name, "a list of numbers, one for each pair that is rotated")
        factors.append(rope.numbers(name, (1.0,) * len(given)))
    factor = _or(rope, "factor", longest / original)
    if rope.has("attention_factor"):
        attention = rope.number("attention_factor", positive=True)
    else:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short, long = factors
    return LongRopeScaling(short, long, original, attention)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _or(rope: HFConfig, key: str, default: float) -> float:
    """A number, where null means the default too."""
    return rope.number(key) if rope.has(key) else default
