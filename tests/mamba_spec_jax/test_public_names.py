"""Whatever a public signature, field or docstring names is public itself, as is what README and notebooks use."""

import dataclasses
import importlib
import inspect
import json
import pathlib
import pkgutil
import re
import typing

import pytest
import tokenizers

import mamba_spec_jax as ms
import pallas_kernels

ROOT = pathlib.Path(__file__).parents[2]
PUBLIC = {name: getattr(ms, name) for name in ms.__all__}
CLASSES = [value for value in PUBLIC.values() if inspect.isclass(value)]
PACKAGES = (ms, pallas_kernels)
OURS = tuple(package.__name__ for package in PACKAGES)


def defined():
    """Every class and function of the library, by name; the program's own apart."""
    for package in PACKAGES:
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.startswith("mamba_spec_jax.cli"):
                for name, value in vars(importlib.import_module(module.name)).items():
                    if not name.startswith("_") and getattr(value, "__module__", None) == module.name:
                        yield name


DEFINED = set(defined())


def functions(value):
    if inspect.isfunction(value):
        yield value
    elif inspect.isclass(value):
        for name, member in vars(value).items():
            member = getattr(member, "__func__", member)  # of a class or static method
            member = getattr(member, "fget", None) or member  # of a property
            if inspect.isfunction(member) and (name == "__init__" or not name.startswith("_")):
                yield member


def classes(hint):
    if inspect.isclass(hint) and hint.__module__.split(".")[0] in OURS:
        yield hint
    for argument in typing.get_args(hint):
        yield from classes(argument)


@pytest.mark.parametrize("name", ms.__all__)
def test_signatures_and_fields_name_public_classes(name):
    value = PUBLIC[name]
    annotated = [*functions(value), *([value] if dataclasses.is_dataclass(value) else [])]
    # `text` imports tokenizers for the annotation alone.
    names = {"tokenizers": tokenizers}
    hints = [hint for each in annotated for hint in typing.get_type_hints(each, localns=names).values()]
    named = {found for hint in hints for found in classes(hint)}
    assert {found.__name__ for found in named if found not in PUBLIC.values()} == set()


@pytest.mark.parametrize("name", ms.__all__)
def test_docstrings_name_what_is_public(name):
    value = PUBLIC[name]
    texts = [inspect.getdoc(each) or "" for each in (value, *functions(value))]
    words = {word for text in texts for word in re.findall(r"`([A-Za-z_]\w*)(?=[`(.])", text)}
    methods = {
        word for word in words if any(hasattr(owner, word) for owner in PUBLIC.values() if inspect.isclass(owner))
    }
    assert (words & DEFINED) - methods - set(dir(pallas_kernels)) <= set(ms.__all__)


def test_names_are_sorted_and_each_listed_once():
    assert sorted(set(ms.__all__)) == ms.__all__


def examples():
    yield "README.md", (ROOT / "README.md").read_text(encoding="utf-8")
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        yield path.name, "\n".join("".join(cell["source"]) for cell in cells)
    for path in sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]):
        yield path.name, path.read_text(encoding="utf-8")


@pytest.mark.parametrize(("where", "text"), [pytest.param(*example, id=example[0]) for example in examples()])
def test_examples_use_public_names(where, text):
    assert set(re.findall(r"\bms\.(\w+)", text)) <= set(ms.__all__), where


OPTIONS = ms.GenerationOptions.__annotations__
TAKE_OPTIONS = [ms.generate, ms.stream, ms.LoadedModel.generate, ms.LoadedModel.stream, ms.LoadedModel.chat]


@pytest.mark.parametrize("function", TAKE_OPTIONS, ids=lambda function: function.__qualname__)
def test_signatures_name_every_option(function):
    parameters = inspect.signature(function).parameters
    assert {name: parameters[name].default for name in OPTIONS} == {
        "max_new": 128,
        "min_new": 0,
        "depth_limit": None,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seeds": 0,
        "num_drafts": None,
        "logprobs": False,
        "chunk_steps": 16,
    }
    further = [p.name for p in parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    assert further == (["options"] if function is ms.LoadedModel.chat else [])


def test_the_signature_of_init_names_every_option_of_a_row():
    parameters = inspect.signature(ms.Decoder.init).parameters
    assert set(ms.RowOptions.__annotations__) <= set(parameters)
    assert "num_drafts" not in parameters
