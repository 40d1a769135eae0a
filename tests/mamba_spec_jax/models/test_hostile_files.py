"""No file of a checkpoint takes long, fills memory, or fails without saying which file is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .checkpoints import CONFIG, random_weights, write

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="memory is measured by what Linux says of a process"
)

MOST_SECONDS, MOST_BYTES = 2.0, 256 * 2**20
JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json")
DEEP = b"[" * 100_000
HUGE_INTEGERS = (
    "num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_local_experts",
    "mamba_n_heads", "mamba_d_state", "mamba_d_conv",
)  # fmt: skip
# What a template does, in how many ways it does it without end.
TEMPLATES = {
    "loops in loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "loops that write": "{% for a in range(99999) %}{% for b in range(99999) %}text{% endfor %}{% endfor %}",
    "a list that doubles": "{% set ns = namespace(x=[1]) %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}"
    "{% endfor %}",
    "a text that doubles": "{% set ns = namespace(x='ab') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}"
    "{% endfor %}",
    "a block that doubles": "{% set ns = namespace(x='ab') %}{% for a in range(99) %}"
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "joined": "{% set ns = namespace(x='ab') %}{% for a in range(99) %}{% set ns.x = [ns.x, ns.x]|join %}{% endfor %}",
    "replaced": "{% set ns = namespace(x='aa') %}{% for a in range(99) %}{% set ns.x = ns.x|replace('a', 'aa') %}"
    "{% endfor %}",
    "replaced by a method": "{% set ns = namespace(x='aa') %}{% for a in range(99) %}"
    "{% set ns.x = ns.x.replace('a', 'aa') %}{% endfor %}",
    "indented": "{% set ns = namespace(x='a\\n') %}{% for a in range(99) %}{% set ns.x = (ns.x ~ ns.x)|indent(9999) %}"
    "{% endfor %}",
    "written as JSON": "{% set ns = namespace(x='\"') %}{% for a in range(99) %}{% set ns.x = ns.x|tojson %}"
    "{% endfor %}",
    "a macro that calls itself": "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "a recursive loop": "{% for a in [[1]] recursive %}{{ loop([a, a]) }}{{ loop([a, a]) }}{% endfor %}",
    "multiplied text": "{{ 'a' * 10**10 }}",
    "a multiplied list": "{{ ([1] * 10**10)|length }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "powers of powers": "{% set ns = namespace(x=7) %}{% for a in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "a width": "{{ '%1000000000d' % 1 }}",
    "a width that is given": "{{ '%*d' % (10**9, 1) }}",
    "a width of format": "{{ '{:1000000000}'.format(1) }}",
    "a width of a width": "{{ '{:{}}'.format(1, 10**9) }}",
    "the filter format": "{{ '%1000000000d'|format(1) }}",
    "centred": "{{ 'a'|center(10**9) }}",
    "justified": "{{ 'a'.ljust(10**9) }}",
    "filled with zeros": "{{ '1'.zfill(10**9) }}",
    "tabulators": "{{ ('\\t' * 9999).expandtabs(10**7) }}",
    "a range": "{{ range(10**9)|list }}",
    "a range that is summed": "{{ range(10**9)|sum }}",
    "batches": "{{ 'ab'|batch(10**9, 'x')|list }}",
    "slices": "{{ 'ab'|slice(10**9)|list }}",
    "a dictionary that grows": "{% set ns = namespace(x={}) %}{% for a in range(99) %}"
    "{% set ns.x = dict(ns.x, **{'k' ~ a: [ns.x, ns.x]}) %}{% endfor %}{{ ns.x|tojson }}",
    "sorted pairs": "{% for a in range(9999) %}{{ range(9999)|sort|list }}{% endfor %}",
    "unique": "{% for a in range(9999) %}{{ range(9999)|unique|list }}{% endfor %}",
    "mapped": "{% for a in range(9999) %}{{ range(9999)|map('string')|join }}{% endfor %}",
}
HONEST = {
    "honest": "{% set ns = namespace(n=0, text='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.text = ns.text ~ m.role ~ '*' ~ ('%s * %5d, 12345' % (m.content, ns.n)) %}"
    "{% set ns.text = ns.text ~ '{{}} {:>4}'.format(ns.n) %}{% endfor %}{{ ns.text }}",
}


def damaged(root: Path) -> dict[str, str]:
    """Writes one folder for each way to be wrong; what its error must name."""
    weights, expected = random_weights(CONFIG), {}

    def folder(name: str, file: str, **changes) -> Path:
        path = write(root / name, CONFIG | changes, weights)
        expected[name] = file
        return path

    for key in HUGE_INTEGERS:
        for value in (10**9, 10**30):
            folder(f"{key} {value}", "config.json" if value == 10**30 or "layers" in key else "", **{key: value})
    for file in (*JSON_FILES, "tokenizer.json", "chat_template.jinja"):
        bad = {"bytes": b"\xff\xfe{}", "huge": None, "pipe": None, "endless": None, "folder": None}
        if file.endswith(".json"):
            bad |= {"deep": DEEP, "deep objects": b'{"a":' * 100_000, "broken": b"{", "number": b"1"}
        for kind, content in bad.items():
            path = folder(f"{file} {kind}", file) / file
            path.unlink(missing_ok=True)
            if file.endswith("index.json"):
                (path.parent / "model.safetensors").unlink()
            if content is not None:
                path.write_bytes(content)
            elif kind == "huge":
                with path.open("wb") as sparse:
                    sparse.truncate(2**33)
            elif kind == "pipe":
                os.mkfifo(path)
            elif kind == "endless":
                path.symlink_to("/dev/zero")
            else:
                path.mkdir()
    for name in ("../x.safetensors", "/etc/passwd", "absent.safetensors"):
        path = folder(f"index {name.replace('/', '_')}", "model.safetensors.index.json")
        (path / "model.safetensors").unlink()
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    headers = {
        "exabytes": (2**60, {}),
        "offsets outside": (None, {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 2**40]}}),
        "overflow": (None, {"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}}),
        "negative": (None, {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}),
        "dtype": (None, {"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}),
        "no object": (None, [1]),
    }
    for name, (size, header) in headers.items():
        text = json.dumps(header).encode()
        content = (size or len(text)).to_bytes(8, "little") + text + b"\0" * 4
        (folder(f"weights {name}", "model.safetensors") / "model.safetensors").write_bytes(content)
    return expected


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    root = tmp_path_factory.mktemp("hostile")
    expected = damaged(root)
    for name, text in (TEMPLATES | HONEST | {"warm": "{{ messages }}"}).items():
        (root / f"{name}.jinja").write_text(text)
    command = [sys.executable, "-m", "tests.mamba_spec_jax.models.hostile", str(root)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    return expected, json.loads(done.stdout)


def test_files_are_refused_by_name(outcome):
    expected, results = outcome
    wrong = {
        name: results[name]["error"] for name in expected if not _is_refusal(results[name]["error"], expected[name])
    }
    assert not wrong


def _is_refusal(error: list[str] | None, file: str) -> bool:
    return error is not None and error[0] in ("ValueError", "MemoryError") and file in error[1] and "\n" not in error[1]


def test_templates_are_refused_by_name(outcome):
    _, results = outcome
    wrong = {
        name: results[f"{name}.jinja"]["error"]
        for name in TEMPLATES
        if not _is_refusal(results[f"{name}.jinja"]["error"], f"{name}.jinja")
    }
    assert not wrong
    assert results["honest.jinja"]["error"] is None


def test_nothing_takes_long_or_fills_memory(outcome):
    _, results = outcome
    slow = {name: result["seconds"] for name, result in results.items() if result["seconds"] > MOST_SECONDS}
    large = {name: result["bytes"] for name, result in results.items() if result["bytes"] > MOST_BYTES}
    assert not slow
    assert not large
