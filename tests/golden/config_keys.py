"""Writes config_keys.json: every key of a `config.json` that transformers knows, for each type of model.

    python config_keys.py [--out FILE]

Run with the `oracles` dependency group. For each type: the fields of its configuration class with their defaults, the
attributes that its initialisation derives (a file that holds one overrides it), its properties, the aliases of its
`attribute_map`, the older names that its initialisation still takes, and what else the model's code asks for. `base`
has what every class takes.
"""

import argparse
import ast
import dataclasses
import importlib
import inspect
import json
import pathlib
import textwrap
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, masking_utils
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

HERE = pathlib.Path(__file__).resolve().parent
INITIALISATION = ("__post_init__", "convert_rope_params_to_dict")
MODEL_TYPES = (
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2",
    "mamba2",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "zamba2",
)


def keys_of(model_type: str) -> dict[str, Any]:
    """What the class of `model_type` takes beyond `PreTrainedConfig`."""
    kind = CONFIG_MAPPING[model_type]
    base = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    fields = {field.name: field.default for field in dataclasses.fields(kind) if field.name not in base}
    derived = set(vars(AutoConfig.for_model(model_type))) - set(fields) - set(vars(PreTrainedConfig()))
    return {
        "fields": {name: PreTrainedConfig._encode_special_floats(fields[name]) for name in sorted(fields)},
        "aliases": dict(sorted(kind.attribute_map.items())),
        "legacy": sorted(_taken(kind) - _taken(PreTrainedConfig)),
        "derived": sorted(name for name in derived if not name.startswith("_")),
        "properties": sorted(_properties(kind) - _properties(PreTrainedConfig)),
        "asked_by_the_model": sorted(_asked(kind)),
    }


def base_keys() -> dict[str, list[str]]:
    """What every class takes."""
    return {
        "fields": sorted(field.name for field in dataclasses.fields(PreTrainedConfig)),
        "legacy": sorted(_taken(PreTrainedConfig)),
        "asked_by_the_mask": sorted(_asked_in(masking_utils.create_causal_mask)),
        "generation": sorted(GenerationConfig._get_default_generation_params()),
    }


def _taken(kind: type) -> set[str]:
    """The names that the class looks up among the further keywords of its initialisation."""
    steps = [vars(owner)[name] for owner in kind.__mro__ for name in INITIALISATION if name in vars(owner)]
    nodes = [node for step in steps for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(step))))]
    return {name for node in nodes for name in _looked_up(node, "kwargs") if not name.startswith("_")}


def _looked_up(node: ast.AST, mapping: str) -> set[str]:
    """The constant that `node` looks up in `mapping`, by a method, an index or `in`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_name(node.func.value, mapping):
        return _texts(node.args[:1])
    if isinstance(node, ast.Subscript) and _is_name(node.value, mapping):
        return _texts([node.slice])
    if isinstance(node, ast.Compare) and _is_name(node.comparators[0], mapping):
        return _texts([node.left])
    return set()


def _asked(kind: type) -> set[str]:
    """The names that the model's code gives to `getattr` of a configuration: a file may hold them without a field."""
    module = kind.__module__.replace(".configuration_", ".modeling_")
    return _asked_in(importlib.import_module(module))


def _asked_in(code: Any) -> set[str]:
    """The same of one module or function."""
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(code))):
        if isinstance(node, ast.Call) and _is_name(node.func, "getattr") and "config" in ast.unparse(node.args[0]):
            found |= _texts(node.args[1:2])
    return found


def _properties(kind: type) -> set[str]:
    return {name for name, value in inspect.getmembers(kind) if isinstance(value, property) and name[0] != "_"}


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _texts(nodes: list[ast.expr]) -> set[str]:
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "config_keys.json", help="what to write")
    found = {"base": base_keys()} | {model_type: keys_of(model_type) for model_type in MODEL_TYPES}
    parser.parse_args().out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
