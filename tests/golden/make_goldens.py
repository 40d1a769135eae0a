"""Writes what transformers computes for tiny random models: granitemoehybrid as folders it can load itself, and others.

    python make_goldens.py [cases] [families] [rotary] [published] [bundled] [--out FOLDER] [--checkpoint FOLDER]

Run with the `oracles` dependency group; all parts by default. Weights come from NumPy's generators and torch runs
on one thread, so the same machine writes the same bytes: `--out` elsewhere and `diff -r` to see it.
"""

import argparse
import hashlib
import json
import pathlib
from typing import Any

import cases
import family_cases
import family_goldens
import numpy as np
import rotary_cases
import rotary_goldens
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    PreTrainedConfig,
    logging,
)

HERE = pathlib.Path(__file__).resolve().parent
CHECKPOINT = HERE.parents[1] / "mamba_spec_jax" / "assets" / "tiny"
PARTS = ("cases", "families", "rotary", "published", "bundled")
STEP_TOLERANCE = 1e-5
# Closer logits than this could route a token to another expert when the sums are merely ordered differently.
ROUTER_GAP = 1e-4
# A default that the released files predate, or state under an older name.
NOT_IN_PUBLISHED = ("time_step_limit", "rope_parameters", "dtype")
TEXT = '''
def read_lines(path, encoding="utf-8"):
    """Yield the lines of a file, without their line ends."""
    with open(path, encoding=encoding) as stream:
        for line in stream:
            yield line.rstrip("\\n")


class Counter(dict):
    def __missing__(self, key):
        return 0
'''
TEXT_TOKENS = 48


def write_case(case: cases.Case, folder: pathlib.Path) -> dict[str, Any]:
    """One model's folder and its golden; returns a line of the table."""
    rng = np.random.default_rng(case.seed)
    model = GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**case.config))
    randomise(model, rng, case.trained_dt)
    save(model, case, folder)

    model = load(folder)
    tokens = rng.integers(0, model.config.vocab_size, (2, case.length))
    logits, hidden, gap = full_forward(model, tokens)
    if gap < ROUTER_GAP:
        raise RuntimeError(f"{case.name}: two experts' logits are {gap:.1e} apart; choose another seed")
    steps = check_steps(case.name, model, tokens, logits)
    np.savez(folder / "golden.npz", tokens=tokens.astype(np.int32), logits=logits, hidden=hidden,
             num_parameters=np.int64(model.num_parameters()))  # fmt: skip
    return {
        "case": case.name,
        "parameters": model.num_parameters(),
        "kB": sum(path.stat().st_size for path in folder.iterdir()) // 1000,
        "hidden std": f"{hidden.std():.2f}",
        "logits std": f"{logits.std():.2f}",
        "router gap": f"{gap:.1e}" if np.isfinite(gap) else "-",
        "step error": steps,
    }


@torch.no_grad()
def randomise(model: torch.nn.Module, rng: np.random.Generator, trained_dt: bool) -> None:
    """Weights that keep activations of order one, and no parameter at a value that would hide a mistake."""
    for name, parameter in sorted(model.named_parameters()):
        parameter.copy_(torch.from_numpy(draw(name, tuple(parameter.shape), rng, trained_dt).astype(np.float32)))


def draw(name: str, shape: tuple[int, ...], rng: np.random.Generator, trained_dt: bool) -> np.ndarray:
    """One parameter's values."""
    if name.endswith("A_log"):
        return np.log(rng.uniform(1, 16, shape))
    if name.endswith("dt_bias"):
        if trained_dt:
            return rng.uniform(-9, 1, shape)
        return np.log(np.expm1(np.exp(rng.uniform(np.log(1e-2), np.log(0.5), shape))))
    if name.endswith(".D"):
        return rng.normal(0.8, 0.3, shape)
    if "norm" in name:
        return rng.uniform(0.5, 1.5, shape)
    if name.endswith(".bias"):
        return rng.normal(0, 0.3, shape)
    return rng.normal(0, shape[-1] ** -0.5, shape)


def save(model: GraniteMoeHybridForCausalLM, case: cases.Case, folder: pathlib.Path) -> None:
    """The folder, as transformers writes it but for what the case asks for."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    model.save_pretrained(folder, max_shard_size="60KB" if case.sharded else "1GB")
    if case.names_in_memory:
        # As the module calls them: newer names of the experts, and a tied head written out once more.
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if case.published_style:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        rope = config["rope_parameters"]
        config = {key: value for key, value in config.items() if key not in NOT_IN_PUBLISHED}
        config |= {"layer_types": case.config["layer_types"], "rope_theta": rope["rope_theta"], "rope_scaling": None}
        config |= {"torch_dtype": "float32", "normalization_function": "rmsnorm"}
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load(folder: pathlib.Path) -> GraniteMoeHybridForCausalLM:
    """The model of a folder in float32, with the plainest implementations; every weight found, none left over."""
    model, info = GraniteMoeHybridForCausalLM.from_pretrained(
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
def full_forward(model: GraniteMoeHybridForCausalLM, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Logits `[B, T, V]`, the final norm's output `[B, T, D]`, and how near any token came to another expert."""
    gaps: list[float] = [float("inf")]

    def observe(router, _, output):
        ordered = output[0].sort(dim=-1, descending=True).values
        if router.top_k < router.num_experts:
            gaps.append(float((ordered[:, router.top_k - 1] - ordered[:, router.top_k]).min()))

    routers = [module for name, module in model.named_modules() if name.endswith(".router")]
    hooks = [router.register_forward_hook(observe) for router in routers]
    inputs = {"input_ids": torch.from_numpy(tokens), "position_ids": positions(tokens), "use_cache": False}
    hidden = model.model(**inputs).last_hidden_state
    logits = model(**inputs).logits
    for hook in hooks:
        hook.remove()
    return logits.numpy(), hidden.numpy(), min(gaps)


@torch.no_grad()
def step_by_step(model: GraniteMoeHybridForCausalLM, tokens: np.ndarray) -> np.ndarray:
    """Logits `[B, T, V]` of decoding one token at a time."""
    cache = DynamicCache(config=model.config)
    ids, position_ids = torch.from_numpy(tokens), positions(tokens)
    steps = [
        model(input_ids=ids[:, t : t + 1], position_ids=position_ids[:, t : t + 1], cache=cache, use_cache=True).logits
        for t in range(tokens.shape[1])
    ]
    return torch.cat(steps, dim=1).numpy()


def check_steps(name: str, model: GraniteMoeHybridForCausalLM, tokens: np.ndarray, logits: np.ndarray) -> str:
    """How far transformers' decoding is from its own full forward, having made sure that it is as expected."""
    if "full_attention" not in model.config.layer_types:
        return "- (its cache needs an attention layer)"
    error = float(np.abs(step_by_step(model, tokens) - logits).max())
    # Its one-token step leaves time steps unclamped: with limits, the two must differ, or the limits do nothing here.
    clamps = model.config.time_step_limit != (0.0, float("inf"))
    if (error > STEP_TOLERANCE) != clamps:
        raise RuntimeError(f"{name}: decoding step by step is off by {error:.1e}, clamped time steps: {clamps}")
    return f"{error:.1e}" + (" (its steps do not clamp)" if clamps else "")


def positions(tokens: np.ndarray) -> torch.Tensor:
    return torch.arange(tokens.shape[1]).expand(tokens.shape[0], -1)


def write_bundled(checkpoint: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """The bundled checkpoint's logits for the first tokens of `TEXT`; returns a line of the table."""
    model = load(checkpoint)
    ids = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(TEXT).ids
    if len(ids) < TEXT_TOKENS:
        raise RuntimeError(f"the text is {len(ids)} tokens long, expected at least {TEXT_TOKENS}")
    tokens = np.array([ids[:TEXT_TOKENS]])
    logits, _, _ = full_forward(model, tokens)
    steps = check_steps("bundled", model, tokens, logits)
    digest = hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()
    np.savez(out / "bundled_tiny.npz", tokens=tokens.astype(np.int32), logits=logits,
             num_parameters=np.int64(model.num_parameters()), weights_sha256=np.array(digest))  # fmt: skip
    loss = -torch.log_softmax(torch.from_numpy(logits[0, :-1]), -1)[range(TEXT_TOKENS - 1), tokens[0, 1:]].mean()
    return {
        "checkpoint": digest[:12],
        "parameters": model.num_parameters(),
        "logits std": f"{logits.std():.2f}",
        "nats a token": f"{loss:.2f}",
        "step error": steps,
    }


def write_published(out: pathlib.Path) -> list[dict[str, Any]]:
    """Fills in the parameter counts of `published.json` with no weights allocated; returns the table."""
    models = json.loads((HERE / "published.json").read_text())
    for model in models:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config_of(model["config"]))
        # Experts are chosen with the help of buffers, which are stored and trained like parameters.
        stored = [buffer.numel() for name, buffer in built.named_buffers() if name in built.state_dict()]
        model["num_parameters"] = built.num_parameters() + sum(stored)
        model["tied"] = built.config.tie_word_embeddings
    (out / "published.json").write_text(json.dumps(models, indent=1) + "\n")
    return [{key: model[key] for key in ("name", "num_parameters", "tied")} for model in models]


def config_of(values: dict[str, Any]) -> PreTrainedConfig:
    return AutoConfig.for_model(**{"model_type": "granitemoehybrid"} | values)


def print_table(rows: list[dict[str, Any]]) -> None:
    texts = [list(rows[0])] + [[str(value) for value in row.values()] for row in rows]
    widths = [max(len(row[column]) for row in texts) for column in range(len(texts[0]))]
    for row in texts:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), help="what to write")
    parser.add_argument("--out", type=pathlib.Path, default=HERE, help="where to write")
    parser.add_argument("--checkpoint", type=pathlib.Path, default=CHECKPOINT, help="folder of the bundled model")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {sorted(unknown)}, expected some of {PARTS}")

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    if "cases" in arguments.parts:
        print_table([write_case(case, arguments.out / case.name) for case in cases.CASES])
    if "families" in arguments.parts:
        rows = [
            family_goldens.write_family_case(case, arguments.out / case.family / case.name)
            for case in family_cases.FAMILY_CASES
        ]
        print_table(rows)
    if "rotary" in arguments.parts:
        rotary_goldens.write_frequencies(arguments.out / "rotary")
        print_table([rotary_goldens.write_case(case, arguments.out / "rotary") for case in rotary_cases.CASES])
    if "published" in arguments.parts:
        print_table(write_published(arguments.out))
    if "bundled" in arguments.parts:
        print_table([write_bundled(arguments.checkpoint, arguments.out)])


if __name__ == "__main__":
    main()
