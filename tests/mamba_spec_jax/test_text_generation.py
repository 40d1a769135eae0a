"""Text in, text out: `LoadedModel.generate`, `stream` and `chat` against the interface of token ids below them."""

import dataclasses
import json

import chex
import jax
import numpy as np
import pytest
import tokenizers

import mamba_spec_jax as ms
from mamba_spec_jax.models.chat import ChatTemplate
from mamba_spec_jax.models.heads.checkpoint import save_head
from mamba_spec_jax.speculative import chunks, text
from tests.mamba_spec_jax.heads import head_config, random_module
from tests.mamba_spec_jax.text_model import END, write_text_model

pytestmark = pytest.mark.usefixtures("quick_compilation")

PROMPTS = ["def f(x):", "import os"]
OPTIONS = {"max_new": 12, "num_drafts": 2}
TEMPLATE = """{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% if enable_thinking is false %}<empty>{% endif %}{% endif %}"""
HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def free(tmp_path_factory):
    """What the model writes after each prompt if nothing ends it, and a checkpoint whose end token is among that."""
    folder = write_text_model(tmp_path_factory.mktemp("text") / "model")
    loaded = ms.load(folder)
    generation = loaded.generate(PROMPTS, ignore_eos=True, **OPTIONS)
    end = next(token for token in generation.tokens[0][3:] if token not in generation.tokens[0][:3])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 256]}))
    return folder, generation, end


@pytest.fixture(scope="module")
def loaded(free):
    template = ChatTemplate({"default": TEMPLATE}, {"eos_token": END})
    return dataclasses.replace(ms.load(free[0]), chat_template=template)


@pytest.fixture(scope="module")
def generation(loaded):
    return loaded.generate(PROMPTS, **OPTIONS)


def streamed(events, rows):
    """The texts that the pieces add up to, and the generator's value."""
    texts = [""] * rows
    while True:
        try:
            event = next(events)
        except StopIteration as end:
            return texts, end.value
        texts[event.row] += event.text


def test_it_stops_at_the_checkpoints_own_end_tokens(free, generation):
    _, unstopped, end = free
    tokens = unstopped.tokens[0]
    assert generation.tokens[0] == tokens[: tokens.index(end) + 1]
    assert generation.reasons[0] is ms.StopReason.EOS
    assert unstopped.reasons == [ms.StopReason.MAX_NEW] * 2
    assert [len(tokens) for tokens in unstopped.tokens] == [12, 12]


def test_it_is_the_interface_of_ids(loaded, generation):
    ids = [loaded.tokenizer.encode(text).ids for text in PROMPTS]
    stops = ms.StopConditions.create(loaded.model.config.eos_token_ids)
    below = ms.generate(loaded.model, loaded.params, ids, stops=stops, **OPTIONS)
    assert generation.tokens == below.tokens
    assert generation.reasons == below.reasons
    assert generation.texts == ms.generated_texts(below, loaded.tokenizer)
    assert int(generation.statistics.passes[0]) == int(below.statistics.passes[0])


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("kind", ["text", "ids", "array"])
def test_texts_and_ids_one_or_many(loaded, generation, kind, many):
    def prompt(text):
        ids = loaded.tokenizer.encode(text).ids
        return {"text": text, "ids": ids, "array": np.asarray(ids)}[kind]

    given = [prompt(PROMPTS[0]), PROMPTS[1]] if many else prompt(PROMPTS[0])
    found = loaded.generate(given, **OPTIONS)
    assert found.texts == generation.texts[: len(found.texts)]
    assert len(found.texts) == len(found.tokens) == len(found.reasons) == (2 if many else 1)


def test_a_stream_shows_the_same_texts(loaded, generation):
    texts, value = streamed(loaded.stream(PROMPTS, **OPTIONS), 2)
    assert texts == value.texts == generation.texts
    assert value.tokens == generation.tokens


def test_requests_with_other_options_share_one_program_and_one_byte_table(loaded, monkeypatch):
    """Drawing requests, by `generate` and by `stream`."""
    chunk = chex.assert_max_traces(n=1)(chunks._chunk)
    monkeypatch.setattr(chunks, "_run_chunk", jax.jit(chunk, static_argnums=(3, 4), donate_argnums=2))
    tables, build = [], text._all_token_bytes
    monkeypatch.setattr(text, "_all_token_bytes", lambda *args: tables.append(1) or build(*args))
    fresh = dataclasses.replace(loaded, tokenizer=tokenizers.Tokenizer.from_str(loaded.tokenizer.to_str()))
    for n in range(20):
        options = (
            OPTIONS
            | {
                "max_new": 5 + n % 3,  # one size of the cache
                "min_new": n % 5,
                "temperature": 0.3 + 0.1 * n,
                "top_k": n % 7,
                "top_p": 1 - 0.04 * n,
                "min_p": 0.01 * n,
                "seeds": n,
                "stop": ["x" * (1 + n % 4), "\n"][: n % 3],
                "ignore_eos": n % 2 == 0 and n % 5 == 0,
            }
        )
        found = fresh.generate(PROMPTS, **options)
        assert streamed(fresh.stream(PROMPTS, **options), 2)[0] == found.texts
    assert len(tables) == 1


def test_stop_strings(loaded, free):
    _, unstopped, _ = free
    text = unstopped.texts[1]
    stop = next(letter for at, letter in enumerate(text) if at > 1 and letter.isascii() and letter not in text[:at])
    options = OPTIONS | {"ignore_eos": True}
    found = loaded.generate(PROMPTS[1], stop=stop, **options)
    assert found.texts == [text[: text.index(stop)]]
    assert found.reasons == [ms.StopReason.STOP_STRING]
    assert streamed(loaded.stream(PROMPTS[1], stop=[stop, "never"], **options), 1)[0] == found.texts


def test_a_drafter_brings_the_target_that_it_needs(loaded, generation, tmp_path):
    config = dataclasses.replace(head_config("eagle3", loaded.model), target_layers=(0, 1))
    save_head(tmp_path / "head", random_module("eagle3", config), config)
    found = ms.load_drafter(tmp_path / "head", loaded)
    assert found.target != loaded.model
    assert loaded.generate(PROMPTS, drafter=found, **OPTIONS).texts == generation.texts
    assert loaded.generate(PROMPTS, drafter=ms.NgramDrafter(2), max_new=12).texts == generation.texts
    other = dataclasses.replace(found, target=ms.HybridModel.create(loaded.model.config, ms.DTypePolicy.bfloat16()))
    with pytest.raises(ValueError, match="the drafter was loaded for another model than "):
        loaded.generate(PROMPTS, drafter=other)


def test_chat(loaded):
    prompt = f"<user>Hi{END}<assistant>"
    found = loaded.chat(HELLO, **OPTIONS)
    assert found.texts == loaded.generate(loaded.chat_prompt(HELLO), **OPTIONS).texts
    assert loaded.chat_prompt(HELLO) == loaded.tokenizer.encode(prompt, add_special_tokens=False).ids
    several = loaded.chat([HELLO, HELLO[:1] * 2], enable_thinking=False, **OPTIONS)
    quiet = loaded.chat_prompt(HELLO, enable_thinking=False)
    assert several.texts[0] == loaded.generate(quiet, **OPTIONS).texts[0]
    assert len(several.texts) == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda loaded: loaded.chat(HELLO, temprature=1), "does not read temprature, only .*'enable_thinking'"),
        (lambda loaded: loaded.chat(HELLO, tools=[{"name": "hammer"}]), "does not read tools, only"),
        (lambda loaded: loaded.generate(None), "prompts are None, expected a text, its token ids, or a list of either"),
        (lambda loaded: loaded.generate([]), "got no prompts"),
        (lambda loaded: loaded.generate(["a", "\ud800"]), "prompt 1 is not text: its character 0 is no Unicode"),
        (lambda loaded: loaded.generate("a", top_p=0.9), "top_p"),
        (lambda loaded: loaded.generate("a", progress=1), "progress is 1, expected True, False, or None"),
        (
            lambda loaded: dataclasses.replace(loaded, tokenizer=None).generate([[1]]),
            "has no tokenizer.json, so text cannot be turned into its tokens: mamba_spec_jax.generate goes from token",
        ),
    ],
)
def test_what_is_refused(loaded, call, message):
    with pytest.raises(ValueError, match=message):
        call(loaded)


def test_an_unknown_option_is_no_option(loaded):
    with pytest.raises(TypeError, match="temprature"):
        loaded.generate("a", temprature=1.0)


def test_progress_of_prompts_and_new_tokens(loaded, capsys, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    loaded.generate(PROMPTS, **OPTIONS)
    assert capsys.readouterr() == ("", "")  # no terminal
    loaded.generate(PROMPTS, progress=True, ignore_eos=True, **OPTIONS)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Reading prompts" in err
    assert "16/16 tokens" in err  # all but the last of each prompt's nine
    assert "24/24 tokens" in err
    streamed(loaded.stream(PROMPTS, progress=True, **OPTIONS), 2)
    err = capsys.readouterr().err
    assert "Reading prompts" in err
    assert "Generating" not in err
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    streamed(loaded.stream(PROMPTS, **OPTIONS), 2)
    assert capsys.readouterr() == ("", "")
    loaded.generate(PROMPTS, **OPTIONS)
    assert "Generating" in capsys.readouterr().err
