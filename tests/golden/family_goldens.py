"""Writes what transformers computes for tiny models of the other families; a part of `make_goldens.py`."""

import json
import pathlib
import shutil
import tempfile
from typing import Any

import family_cases
import numpy as np
import torch
import weights
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

STEP_TOLERANCE = 1e-5
# How far float32 may be from float64: some random models magnify every rounding.
ROUNDING = 1e-5
# Closer scores than this could route a token to another expert when the sums are merely ordered differently.
ROUTER_GAP = 1e-4


def write_family_case(case: family_cases.FamilyCase, folder: pathlib.Path) -> dict[str, Any]:
    """`config.json` and `golden.npz` of one model; returns a line of the table."""
    config = AutoConfig.for_model(case.family, **case.config)
    with tempfile.TemporaryDirectory() as scratch:
        whole = pathlib.Path(scratch)
        AutoModelForCausalLM.from_config(config).save_pretrained(whole)
        with safe_open(whole / "model.safetensors", framework="numpy") as file:
            saved = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118, not a dict
        shapes = as_released(saved)
        drawn = weights.draw_all(shapes, case.seed, case.trained_dt, case.family)
        save_file(drawn, whole / "model.safetensors", metadata={"format": "pt"})
        model = load(whole)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(whole / "config.json", folder)

    tokens = np.random.default_rng(case.seed).integers(0, config.vocab_size, (2, case.length))
    logits = full_forward(model, tokens)
    gap = router_gap(model, tokens)
    if gap < ROUTER_GAP:
        raise RuntimeError(f"{folder}: two experts' scores are {gap:.1e} apart; choose another seed")
    error = float(np.abs(step_by_step(model, tokens) - logits).max())
    # Its one-token step leaves time steps unclamped: where they are clamped, the two must differ.
    clamps = clamped_steps(model, tokens)
    if (error > STEP_TOLERANCE) != clamps:
        raise RuntimeError(f"{folder}: decoding step by step is off by {error:.1e}, clamped time steps: {clamps}")
    rounding = float(np.abs(full_forward(model.double(), tokens) - logits).max())
    if rounding > ROUNDING:
        raise RuntimeError(f"{folder}: float32 is off by {rounding:.1e}, too much to compare with; choose another seed")
    np.savez(
        folder / "golden.npz",
        **({"logits_unclamped": unclamped_forward(model.float(), tokens)} if case.trained_dt and clamps else {}),
        tokens=tokens.astype(np.int32),
        logits=logits,
        num_parameters=np.int64(sum(np.prod(shape) for shape in shapes.values())),
        shapes=np.array(json.dumps(shapes)),
        weights_sha256=np.array(weights.digest(drawn)),
    )
    return {
        "case": f"{case.family}/{case.name}",
        "parameters": sum(int(np.prod(shape)) for shape in shapes.values()),
        "kB": sum(path.stat().st_size for path in folder.iterdir()) // 1000,
        "logits std": f"{logits.std():.2f}",
        "rounding": f"{rounding:.1e}",
        "router gap": f"{gap:.1e}" if np.isfinite(gap) else "-",
        "step error": f"{error:.1e}" + (" (its steps do not clamp)" if clamps else ""),
    }


def as_released(shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    """transformers saves thirds of a convolution of queries, keys and values; released files, the part of each."""
    return {
        name: [shapes[name.replace("_conv1d.", "_proj.")][0], *shape[1:]] if "_conv1d." in name else shape
        for name, shape in shapes.items()
    }


def load(folder: pathlib.Path) -> torch.nn.Module:
    """The model of a folder in float32, with the plainest implementations; every weight found, none left over."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    complaints = {kind: keys for kind, keys in info.items() if keys}
    if complaints:
        raise RuntimeError(f"{folder.name}: transformers cannot load it whole: {complaints}")
    return model.eval()


@torch.no_grad()
def full_forward(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    """Logits `[B, T, V]` of one pass over everything."""
    return model(input_ids=torch.from_numpy(tokens), **position_ids(model, tokens), use_cache=False).logits.numpy()


@torch.no_grad()
def step_by_step(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    """Logits `[B, T, V]` of decoding one token at a time."""
    cache, ids, positions = DynamicCache(config=model.config), torch.from_numpy(tokens), position_ids(model, tokens)
    steps = [
        model(
            input_ids=ids[:, t : t + 1],
            **{name: value[:, t : t + 1] for name, value in positions.items()},
            cache=cache,
            use_cache=True,
        ).logits
        for t in range(tokens.shape[1])
    ]
    return torch.cat(steps, dim=1).numpy()


def unclamped_forward(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    """Logits `[B, T, V]` with time steps as they come, whatever the model does to them."""
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))
    return full_forward(model, tokens)


@torch.no_grad()
def router_gap(model: torch.nn.Module, tokens: np.ndarray) -> float:
    """How near any token came to another expert, or to another group of them."""
    gaps = [float("inf")]

    def between(scores, chosen):
        if chosen < scores.shape[-1]:
            ordered = scores.sort(dim=-1, descending=True).values
            gaps.append(float((ordered[:, chosen - 1] - ordered[:, chosen]).min()))

    def observe_softmax(router, _, output):
        between(output[0], router.top_k)

    def observe(router, _, output):
        choice = output[0].sigmoid() + router.e_score_correction_bias
        grouped = choice.view(len(choice), router.num_group, -1)
        best = grouped.topk(2, dim=-1).values.sum(-1)
        between(best, router.topk_group)
        kept = best >= best.topk(router.topk_group).values[:, -1:]
        between(grouped.masked_fill(~kept[..., None], -1e9).flatten(1), router.top_k)

    routers = [module for module in model.modules() if hasattr(module, "e_score_correction_bias")]
    hooks = [router.register_forward_hook(observe) for router in routers]
    others = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks += [router.register_forward_hook(observe_softmax) for router in others if router not in routers]
    full_forward(model, tokens)
    for hook in hooks:
        hook.remove()
    return min(gaps)


@torch.no_grad()
def clamped_steps(model: torch.nn.Module, tokens: np.ndarray) -> bool:
    """Whether any time step of a full forward reaches the clamp of its layer."""
    reached = []

    def observe(mixer, _, projected):
        scaled = projected * getattr(mixer, "mup_vector", 1)  # Falcon-H1's multipliers
        steps = torch.nn.functional.softplus(scaled[..., -mixer.num_heads :] + mixer.dt_bias)
        low, high = mixer.time_step_limit
        reached.append(bool(((steps < low) | (steps > high)).any()))

    mixers = [module for module in model.modules() if hasattr(module, "time_step_limit")]
    hooks = [
        mixer.in_proj.register_forward_hook(lambda _, inputs, output, mixer=mixer: observe(mixer, inputs, output))
        for mixer in mixers
    ]
    full_forward(model, tokens)
    for hook in hooks:
        hook.remove()
    return any(reached)


def position_ids(model: torch.nn.Module, tokens: np.ndarray) -> dict[str, torch.Tensor]:
    """Explicit positions from 0, for models that take any."""
    if model.config.model_type == "mamba2":
        return {}
    return {"position_ids": torch.arange(tokens.shape[1]).expand(tokens.shape[0], -1)}
