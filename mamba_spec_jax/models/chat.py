"""A checkpoint's chat template: from messages to the text that the model was trained to go on from."""

import dataclasses
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.utils import Namespace

from mamba_spec_jax.models.checkpoint import read_json, read_text
from mamba_spec_jax.models.hf_config import HFConfig
from mamba_spec_jax.models.template_limits import MOST_TEXT, LimitedSandbox, LimitExceeded, limited, limited_filter

_FILE = "chat_template.jinja"
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
_SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A template of a checkpoint, rendered in a sandbox that gives it what transformers gives templates.

    Attributes:
        templates: texts by name; "default", and "tool_use" where there is another one for tools.
        special_tokens: the variables `bos_token`, `eos_token` and so on.
        source: what messages call it.
    """

    templates: Mapping[str, str]
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    source: str = _FILE

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: each with a "role" and, for most roles, a "content"; keys whose value is None are left out.
            add_generation_prompt: whether to begin the model's own message.
            tools: JSON schemas of functions that the model may call.
            **variables: more of what the template reads, such as `enable_thinking=False`.

        Raises:
            ValueError: the messages are none, or the template refuses them; it does not read one of the variables; the
                template is no template, fails, or tries to reach outside its sandbox.
        """
        plain = _plain({"messages": _check_messages(messages), "tools": tools} | variables)
        name = _WITH_TOOLS if tools is not None and _WITH_TOOLS in self.templates else _DEFAULT
        if name not in self.templates:
            raise ValueError(f"{self.source} has templates called {sorted(self.templates)}, expected one called {name}")
        given = set(variables) | ({"tools"} if tools is not None and name == _DEFAULT else set())
        if not add_generation_prompt:
            given.add("add_generation_prompt")
        try:
            self._require_read(given, self.templates[name])
            with limited() as charge:
                values = {"documents": None, "add_generation_prompt": add_generation_prompt, **self.special_tokens}
                pieces = []
                for piece in _compile(self.templates[name]).generate(values | plain):
                    charge(len(piece))
                    pieces.append(piece)
            return "".join(pieces)
        except _Unread as error:
            raise ValueError(str(error)) from None
        except TemplateSyntaxError as error:
            raise ValueError(f"the chat template of {self.source} is damaged, line {error.lineno}: {error}") from error
        except SecurityError as error:
            raise ValueError(
                f"the chat template of {self.source} tries to reach outside its sandbox and is not used: {error}"
            ) from error
        except LimitExceeded as error:
            raise ValueError(f"the chat template of {self.source} is not used: {error}") from error
        except _Refusal as error:
            raise ValueError(f"the chat template of {self.source} refuses these messages: {error}") from error
        except Exception as error:  # a template can fail in any way
            raise ValueError(
                f"the chat template of {self.source} fails on these messages: {type(error).__name__}: {error}"
            ) from error

    def _require_read(self, given: set[str], text: str) -> None:
        """A variable that the template does not read would change nothing, and is most often misspelt."""
        read = _variables(text)
        if unread := sorted(given - read):
            raise _Unread(f"the chat template of {self.source} does not read {', '.join(unread)}, only {sorted(read)}")


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """The template in `chat_template.jinja`, else in `tokenizer_config.json`; None if the checkpoint has none."""
    path = folder / "tokenizer_config.json"
    config = HFConfig(read_json(path) if path.exists() else {}, str(path))
    special = {name: _token(config, name) for name in _SPECIAL_TOKENS if config.has(name)}
    file = folder / _FILE
    if file.exists():
        return ChatTemplate({_DEFAULT: read_text(file)}, special, str(file))
    if not config.has("chat_template"):
        return None
    return ChatTemplate(_named_templates(config), special, str(path))


def _named_templates(config: HFConfig) -> dict[str, str]:
    """By name: a single template, or a list of `{"name": ..., "template": ...}`."""
    stored = config.values["chat_template"]
    pairs = [{"name": _DEFAULT, "template": stored}] if isinstance(stored, str) else stored
    try:
        templates = {pair["name"]: pair["template"] for pair in pairs}
    except (TypeError, KeyError):
        templates = {}
    if not templates or not all(isinstance(text, str) for pair in templates.items() for text in pair):
        raise config.refusal("chat_template", "a template, or a list of objects with a name and a template")
    return templates


def _token(config: HFConfig, name: str) -> str:
    """A special token: its text, or an object that has it as content."""
    stored = config.values[name]
    text = stored.get("content") if isinstance(stored, Mapping) else stored
    if not isinstance(text, str):
        raise config.refusal(name, "a token's text")
    return text


def _check_messages(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages are {messages!r}, expected a list of at least one, each with a role and a content")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"a message is {message!r}, expected an object with a role and a content")
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _plain(variables: dict[str, Any]) -> dict[str, Any]:
    """The same, made of plain JSON values: a template must not get hold of objects that can do more."""
    try:
        return json.loads(json.dumps(variables))
    except (TypeError, ValueError) as error:
        raise ValueError(f"messages, tools and variables of a chat template are to be plain JSON: {error}") from error


class _Unread(Exception):
    """A variable was given that the template does not read."""


class _Refusal(TemplateError):
    """What a template raises by `raise_exception`."""


class _Sandbox(LimitedSandbox):
    """Unsafe access is an error at once; by itself the sandbox renders a mere mention of it as nothing."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        raise SecurityError(f"it asks for {attribute!r} of a {type(obj).__name__}")


class _SafeNamespace(Namespace):
    """The one value that a template may write to, for names that Python gives no meaning to."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # so that a template may call a name `self`
        names = dict(*rest, **kwargs)
        for name in names:
            _check_name(name)
        Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Generation(Extension):
    """`{% generation %}`, which marks what a model says for training on it, and changes nothing in the text."""

    tags = {"generation"}  # noqa: RUF012, jinja2's own form

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # In its own scope: what the block sets is not visible outside it.
        return nodes.Scope(body).set_lineno(line)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"it writes {name!r} to a namespace")


@functools.lru_cache(maxsize=16)
def _variables(text: str) -> frozenset[str]:
    """The names that a template reads and does not set, functions that it is given apart."""
    environment = _environment()
    return frozenset(meta.find_undeclared_variables(environment.parse(text)) - environment.globals.keys())


@functools.lru_cache(maxsize=16)
def _compile(text: str) -> Any:
    if len(text) > MOST_TEXT:
        raise LimitExceeded(f"it has {len(text)} characters, expected {MOST_TEXT} at most")
    return _environment().from_string(text)


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = limited_filter("tojson", _to_json)
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _SafeNamespace,
    }
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike jinja2's own, which is for web pages, this escapes nothing."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
