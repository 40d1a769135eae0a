"""Chat templates: the texts and tokens that transformers makes of them, a sandbox that holds, and what is refused."""

import dataclasses
import datetime
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from mamba_spec_jax.loaded import load
from mamba_spec_jax.models.chat import ChatTemplate, read_chat_template
from tests.mamba_spec_jax.models.checkpoints import CONFIG, random_weights, write

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "chat.json").read_text())
CASES = {case["name"]: case for case in GOLDEN["cases"]}
HELLO = [{"role": "user", "content": "hello"}]


def render(text, messages=HELLO, **options):
    return ChatTemplate({"default": text}).render(messages, **options)


def fails(text, messages=HELLO):
    with pytest.raises(ValueError, match=r"^the chat template of ") as error:
        render(text, messages)
    return str(error.value)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder of a model with the goldens' tokenizer, without a template."""
    config = CONFIG | {"vocab_size": 261, "num_local_experts": 0, "num_experts_per_tok": 0}
    folder = write(tmp_path_factory.mktemp("chat") / "model", config, random_weights(config))
    (folder / "tokenizer.json").write_text(GOLDEN["tokenizer"])
    return folder


@pytest.mark.parametrize("name", CASES)
def test_text_is_that_of_transformers(name):
    case = CASES[name]
    template = ChatTemplate({"default": case["template"]}, GOLDEN["special_tokens"])
    assert template.render(case["messages"], **case["options"]) == case["text"]


def test_tokens_are_those_of_transformers(model):
    """Also where the tokenizer would put a token before the text that the template has written already."""
    loaded = load(model)
    bos = Tokenizer.from_str(GOLDEN["tokenizer"]).token_to_id(GOLDEN["special_tokens"]["bos_token"])
    for case in CASES.values():
        template = ChatTemplate({"default": case["template"]}, GOLDEN["special_tokens"])
        loaded = dataclasses.replace(loaded, chat_template=template)
        tokens = loaded.chat_prompt(case["messages"], **case["options"])
        assert tokens == case["tokens"]
        assert tokens.count(bos) == case["text"].count("<s>") <= 1
        assert loaded.tokenizer.encode(case["text"]).ids == [bos, *tokens]


def test_time_is_the_local_one():
    year = datetime.datetime.now().year
    assert render("{{ strftime_now('%Y') }}") in (str(year), str(year + 1))


# Where it is found


def test_places(tmp_path):
    assert read_chat_template(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": None, "chat_template": None}))
    assert read_chat_template(tmp_path) is None
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "add_bos_token": True}
    config.write_text(json.dumps(tokens | {"chat_template": "{{ bos_token }}old{{ eos_token }}{{ pad_token }}"}))
    assert read_chat_template(tmp_path).render(HELLO) == "<s>old</s>"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}new")
    assert read_chat_template(tmp_path).render(HELLO) == "<s>new"


def test_named_templates(tmp_path):
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools[0].name }}"}]
    config.write_text(json.dumps({"chat_template": named}))
    template = read_chat_template(tmp_path)
    assert template.render(HELLO) == "plain"
    assert template.render(HELLO, tools=[{"name": "hammer"}]) == "with hammer"
    config.write_text(json.dumps({"chat_template": named[1:]}))
    with pytest.raises(ValueError, match=r"has templates called \['tool_use'\], expected one called default"):
        read_chat_template(tmp_path).render(HELLO)


@pytest.mark.parametrize("stored", [3, [], {"default": "x"}, [{"name": "default"}], [{"name": "a", "template": 1}]])
def test_what_is_no_template(tmp_path, stored):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": stored}))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: chat_template is .*, expected a template, or a"):
        read_chat_template(tmp_path)


def test_what_is_no_token(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": 1}')
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: bos_token is 1, expected a token's text"):
        read_chat_template(tmp_path)


def test_models_without_a_template_or_a_tokenizer(tmp_path):
    folder = write(tmp_path / "model", CONFIG, random_weights(CONFIG))
    assert load(folder).chat_template is None
    with pytest.raises(ValueError, match="has no chat template: it is not a model to chat with"):
        load(folder).chat_prompt(HELLO)
    (folder / "chat_template.jinja").write_text("x")
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        load(folder).chat_prompt(HELLO)


# What is refused


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ joiner.__init__.__globals__['os'].popen('id').read() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ dict.mro() }}",
        "{{ self._TemplateReference__context }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages.append('x') }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__class__=1) }}",
    ],
)
def test_the_sandbox_holds(text):
    assert "tries to reach outside its sandbox and is not used: " in fails(text)


def test_templates_see_plain_values_alone():
    class Text(str):
        def leak(self):
            raise AssertionError("a method of the caller's object was called")

    assert "fails on these messages: UndefinedError" in fails(
        "{{ messages[0].content.leak() }}", [{"role": "user", "content": Text("x")}]
    )
    with pytest.raises(ValueError, match=r"are to be plain JSON: Object of type [A-Za-z]*Path is not"):
        render("x", [{"role": "user", "content": Path()}])
    with pytest.raises(ValueError, match="are to be plain JSON"):
        render("x", mood=object())


def test_no_file_is_read():
    for text in ("{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{% extends 'x' %}"):
        assert "fails on these messages: TypeError: no loader for this environment" in fails(text)


def test_what_the_template_says_is_passed_on():
    text = "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('No ' + m.role + 's') }}{% endif %}"
    message = fails(text + "{% endfor %}", [{"role": "robot", "content": "x"}])
    assert message == "the chat template of chat_template.jinja refuses these messages: No robots"


def test_damaged_templates():
    assert "is damaged, line 3: " in fails("a\nb\n{% if %}")
    assert "is damaged, line 1: Encountered unknown tag 'import_all'" in fails("{% import_all %}")
    assert "fails on these messages: UndefinedError: 'x' is undefined" in fails("{{ x.y }}")
    assert "fails on these messages: ZeroDivisionError" in fails("{{ 1 / 0 }}")
    assert "fails on these messages: OverflowError: Range too big" in fails("{% for i in range(10**9) %}{% endfor %}")


@pytest.mark.parametrize(
    "messages", [None, "hello", [], {"role": "user"}, ["hello"], [{"content": "x"}], [{"role": 1}]]
)
def test_what_are_no_messages(messages):
    with pytest.raises(ValueError, match=r"(messages are|a message is) .*, expected .* a role and a content"):
        render("x", messages)
