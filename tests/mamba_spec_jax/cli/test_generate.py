"""`mamba-spec generate` against the library, and what it refuses."""

import io
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mamba_spec_jax import generate, load
from mamba_spec_jax.speculative.stop import StopConditions
from mamba_spec_jax.speculative.stream import generated_texts
from tests.mamba_spec_jax.text_model import END

pytestmark = pytest.mark.usefixtures("quick_compilation")

PROMPT = "def f(x):\n    return x"
SAMPLED = ("--temperature", "0.8", "--top-k", "40", "--top-p", "0.95", "--min-p", "0.01", "--seed", "5")
TOKENS = 24


@pytest.fixture(scope="module")
def expected(folder):
    """What the library makes of the prompt, sampled, without drafts."""
    loaded = load(folder)
    ids = loaded.tokenizer.encode(PROMPT).ids
    generation = generate(
        loaded.model,
        loaded.params,
        [ids],
        num_drafts=0,
        temperature=0.8,
        top_k=40,
        top_p=0.95,
        min_p=0.01,
        seeds=5,
        max_new=TOKENS,
        stops=StopConditions.create(loaded.model.config.eos_token_ids),
    )
    return generation.tokens[0], generated_texts(generation, loaded.tokenizer)[0]


def test_text_goes_to_stdout(run, folder, expected):
    out, err = run("generate", PROMPT, "--model", folder, "-n", TOKENS, *SAMPLED)
    assert out == expected[1] + "\n"
    assert err == ""


@pytest.mark.parametrize("options", [("0",), ("3",), ("3", "--strategy", "replay"), ("3", "--mode", "prefill")])
def test_json_and_stdin(run, folder, expected, monkeypatch, options):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode())))
    out, _ = run("generate", "--json", "--model", folder, "-n", TOKENS, *SAMPLED, "--drafts", *options)
    report = json.loads(out)
    assert report["prompt"] == PROMPT
    assert report["tokens"] == expected[0]
    assert report["text"] == expected[1]
    assert report["stop_reason"] == "max_new"
    assert report["new_tokens"] == TOKENS
    histogram = report["acceptance_histogram"]
    assert len(histogram) == int(options[0]) + 1
    assert sum(histogram) == report["passes"]
    assert sum(n * count for n, count in enumerate(histogram, 1)) == TOKENS
    assert report["mean_acceptance_length"] == pytest.approx(TOKENS / report["passes"])
    assert set(report) - {"prompt", "tokens", "text", "stop_reason", "new_tokens", "acceptance_histogram"} == {
        "seconds", "passes", "drafted", "mean_acceptance_length",
    }  # fmt: skip


def test_a_drafter_by_name_changes_nothing_in_the_text(run, folder, expected, tmp_path):
    """A copy of the model drafts for it: nearly all of its drafts come true."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    options = ("--model", folder, "-n", TOKENS, *SAMPLED, "--drafts", 3, "--drafter", copy)
    report = json.loads(run("generate", PROMPT, "--json", *options)[0])
    assert report["tokens"] == expected[0]
    assert report["mean_acceptance_length"] > 3


def test_a_tree_changes_nothing_in_the_text(run, folder, expected):
    report = json.loads(run("generate", PROMPT, "--json", "--model", folder, "-n", TOKENS, *SAMPLED, "--tree", 5)[0])
    assert report["tokens"] == expected[0]


TEMPLATE = """{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.fixture
def chatty(folder, tmp_path):
    """The model with a template, and an end of text that messages end with too."""
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    settings = {"eos_token": END, "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_chat_is_the_rendered_prompt(run, folder, chatty):
    """The template's text, its special tokens read as such, goes to the model that `generate` runs."""
    options = ("-n", 8, "--drafts", 3, "--json")
    chat = ("--chat", "Hi <|end|>?", "--system", "Be brief.")
    report = json.loads(run("generate", *chat, "--model", chatty, *options)[0])
    text = f"<system>Be brief.{END}<user>Hi <|end|>?{END}<assistant>"
    expected = json.loads(run("generate", text, "--model", folder, *options)[0])
    assert report["prompt"] == "Hi <|end|>?"
    assert report["tokens"] == expected["tokens"]
    assert report["text"] == expected["text"]


def test_chats_that_are_refused(fails, folder, chatty):
    assert fails("generate", "--chat", "x", "--model", folder) == (
        f"{folder} has no chat template: it is not a model to chat with, give it text"
    )
    assert "--system was given without --chat" in fails("generate", "x", "--system", "y", "--model", chatty)
    (chatty / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    assert "tries to reach outside its sandbox and is not used: it asks for '__class__' of a str" in fails(
        "generate", "--chat", "x", "--model", chatty
    )


def test_stop_strings_are_not_shown(run, folder, expected):
    _, text = expected
    stop = next(text[at : at + 2] for at in range(4, len(text)) if text[at : at + 2].isalnum())
    cut = text[: text.index(stop)]
    stops = ("--stop", stop, "--stop", "never")
    out, _ = run("generate", PROMPT, "--model", folder, "-n", TOKENS, *SAMPLED, "--drafts", 3, *stops)
    assert out == cut + "\n"


def test_what_is_refused(fails, folder, tmp_path, monkeypatch):
    model = ("--model", folder)
    assert "need a --temperature above 0" in fails("generate", PROMPT, *model, "--top-k", 5)
    assert "top_p is 0.0, expected numbers above 0" in fails("generate", PROMPT, *model, "-t", 1, "--top-p", 0)
    assert "min_new [9] exceeds max_new [8]" in fails("generate", PROMPT, *model, "-n", 8, "--min-new-tokens", 9)
    assert "the prompt is empty: give at least one character" in fails("generate", "", *model)
    assert "--tree 12 was given with --drafts 4" in fails("generate", PROMPT, *model, "--tree", 12, "--drafts", 4)
    assert fails("generate", "\udcff", *model).startswith("prompt 0 is not text: its character 0")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff")))
    assert fails("generate", *model) == "standard input is not text: its byte 1 is 0xff, expected UTF-8"
    assert "--drafter was given with --drafts 0" in fails("generate", PROMPT, *model, "--drafter", "x", "--drafts", 0)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert fails("generate", PROMPT, "--model", tmp_path).startswith(f"{tmp_path} has no tokenizer.json")
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdin", terminal)
    assert fails("generate", *model) == "no prompt: give one as an argument, or pipe it in"


def test_a_model_without_numbers_says_so(run, folder, tmp_path):
    broken = shutil.copytree(folder, tmp_path / "broken")
    (weights,) = broken.glob("*.safetensors")
    damaged = {name: np.full_like(leaf, np.nan) for name, leaf in load_file(weights).items()}
    save_file(damaged, weights, {"format": "pt"})
    out, err = run("generate", PROMPT, "--model", broken, "-n", TOKENS, *SAMPLED)
    assert out == "\n"
    assert "the model's logits are not numbers" in " ".join(err.split())
    out, _ = run("generate", "--json", PROMPT, "--model", broken, "-n", TOKENS, *SAMPLED)
    report = json.loads(out)
    assert (report["stop_reason"], report["tokens"]) == ("no_logits", [])
