"""Writes chat.json: chat templates, conversations, and the texts and tokens that transformers makes of them.

    python chat_goldens.py [--out FILE]

Run with the `oracles` dependency group. The templates use between them what those of published models use: control of
white space, loops that are left early, namespaces, macros, JSON, marks for training, and tools.
"""

import argparse
import json
import pathlib

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

HERE = pathlib.Path(__file__).resolve().parent
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
TURN_TOKENS = ("<|im_start|>", "<|im_end|>")

HELLO = [{"role": "user", "content": 'Grüß dich, "you" & <me>!\n'}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is 2 + 2? "},
    {"role": "assistant", "content": "4", "tool_calls": None},
    {"role": "user", "content": "And 3 + 3?\n\n"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "wetter",
        "description": "How it is in <Zürich>",
        "parameters": {"type": "object", "properties": {"ort": {"type": "string"}}, "required": ["ort"]},
    },
}

TURNS = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
BRACKETS = """\
{{ bos_token }}{% set start = 0 %}
{% if messages[0].role == 'system' %}
  {% set start = 1 %}
  {%- set system = messages[0].content | trim %}
{% endif %}
{% for message in messages[start:] %}
    {% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate: user, assistant, user, ...') }}
    {% endif %}
    {% if message.role == 'user' %}
[INST] {% if system is defined and loop.last %}{{ system }}\n\n{% endif %}{{ message.content.strip() }} [/INST]
    {% elif message.role == 'assistant' %}
{% generation %}{{ message.content + eos_token }}{% endgeneration %}
    {% else %}
        {{ raise_exception('Unknown role: ' + message.role) }}
    {% endif %}
{% endfor %}
"""
TOOLS = """\
{% macro describe(tool, indent=none) %}
- {{ tool.function.name }}: {{ tool | tojson(indent=indent) }}
{% endmacro %}
{% set ns = namespace(last=-1, found=false) %}
{% for message in messages[::-1] %}
    {% if message.role != 'user' %}{% continue %}{% endif %}
    {% set ns.last = messages | length - loop.index %}
    {% set ns.found = true %}
    {% break %}
{% endfor %}
{% if tools %}
Tools ({{ tools | length }}):
{% for tool in tools %}
{{ describe(tool) }}{{ describe(tool, 2) }}
{% endfor %}
{% else %}
No tools, {{ documents | default('no documents', true) }}.
{% endif %}
{% for message in messages %}
    {% if not loop.first %}

    {% endif %}
<{{ message.role }}>{{ message | tojson }}{{ '*' if ns.found and loop.index0 == ns.last }}
{%- endfor %}
{{ '<assistant>' if add_generation_prompt else eos_token }}{{ unknown }}{{ mood | default('calm') }}
{{- {'a': [1, 2.5, true, none]} | tojson(separators=(',', ':'), sort_keys=true) }}
"""
CASES = {
    "turns": (TURNS, TALK, {}),
    "turns of nobody": (TURNS, HELLO, {"add_generation_prompt": False}),
    "brackets": (BRACKETS, TALK, {}),
    "brackets without a system": (BRACKETS, TALK[1:], {}),
    "tools": (TOOLS, TALK, {"tools": [TOOL]}),
    "no tools": (TOOLS, HELLO, {"mood": "überall"}),
    "no prompt": (TOOLS, TALK, {"add_generation_prompt": False}),
}


def make_tokenizer() -> Tokenizer:
    """Of bytes, which begins whatever it encodes by itself with the first special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: token for token, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (*SPECIAL_TOKENS.values(), *TURN_TOKENS)])
    bos = SPECIAL_TOKENS["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "chat.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(), **SPECIAL_TOKENS)
    cases = []
    for name, (template, messages, options) in CASES.items():
        tokenizer.chat_template = template
        options = {"add_generation_prompt": True} | options
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        tokens = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
        cases.append(
            {"name": name, "template": template, "messages": messages, "options": options, "text": text}
            | {"tokens": tokens}
        )
    written = {"special_tokens": SPECIAL_TOKENS, "tokenizer": make_tokenizer().to_str(), "cases": cases}
    parser.parse_args().out.write_text(json.dumps(written, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
