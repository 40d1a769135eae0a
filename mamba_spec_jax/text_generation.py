"""A loaded model: text in, text out."""

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from tokenizers import Tokenizer

from mamba_spec_jax.models.chat import ChatTemplate
from mamba_spec_jax.models.hybrid_lm import HybridModel
from mamba_spec_jax.speculative.generate import Generation, generate
from mamba_spec_jax.speculative.protocol import Drafter
from mamba_spec_jax.speculative.requests import GenerationOptions, named_options
from mamba_spec_jax.speculative.stream import StreamEvent, generated_texts, stream, text_stops
from mamba_spec_jax.speculative.text import utf8

Prompts = str | Sequence[int] | Sequence[str | Sequence[int]]
Messages = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class TextGeneration(Generation):
    """What was generated, each field a list with one entry a prompt.

    Attributes:
        texts: the new text of each row, without special tokens and without the stop string that ended it.
    """

    texts: list[str] = dataclasses.field(kw_only=True)


@dataclasses.dataclass(frozen=True)
class LoadedDrafter:
    """A drafter, and the target as it needs it.

    Attributes:
        drafter: the static side.
        params: its weights.
        target: the target's static side, which returns the hidden states that the drafter reads; its weights are the
            same as before.
    """

    drafter: Drafter
    params: Any
    target: HybridModel


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A checkpoint, ready to run.

    Attributes:
        model: the static side; `model.config.eos_token_ids` are the tokens that end a text.
        params: the weights, for `model`'s methods.
        tokenizer: from `tokenizer.json`, None if the checkpoint has none.
        folder: the checkpoint's.
        chat_template: from `chat_template.jinja` or `tokenizer_config.json`, None if the checkpoint has none.
    """

    model: HybridModel
    params: Any
    tokenizer: Tokenizer | None
    folder: Path
    chat_template: ChatTemplate | None = None

    @named_options(generate)
    def generate(
        self,
        prompts: Prompts,
        *,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        drafter: LoadedDrafter | Drafter | None = None,
        progress: bool | None = None,
        **options: Unpack[GenerationOptions],
    ) -> TextGeneration:
        """Continues one prompt or several.

        Args:
            prompts: a text or the token ids of one, or a list of either. A text becomes tokens as the tokenizer has it,
                with the special tokens that it adds to texts.
            stop: text that ends a row, or several such; it is not part of the row's text.
            ignore_eos: do not stop at the checkpoint's own end tokens.
            drafter: prompt lookup by default; from `load_drafter`, or a drafter without weights.
            progress: show progress bars on stderr; None shows them if that is a terminal.
            **options: such as `max_new`, `temperature` and `num_drafts`: see `GenerationOptions`.

        Returns:
            Texts, tokens, reasons and statistics, one entry a row, for a single prompt too.

        Raises:
            ValueError: as `generate` of this package; there is no tokenizer; the drafter is for another model.
        """
        target, drafting = self._drafting(drafter)
        tokenizer, stops = self._tokenizer(), _strings(stop)
        generation = generate(
            target,
            self.params,
            self._token_ids(prompts),
            stops=text_stops(tokenizer, target.vocab_size, self._end_tokens(ignore_eos), stops),
            progress=progress,
            **drafting,
            **options,
        )
        return TextGeneration(**vars(generation), texts=generated_texts(generation, tokenizer, stops))

    @named_options(stream)
    def stream(
        self,
        prompts: Prompts,
        *,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        drafter: LoadedDrafter | Drafter | None = None,
        progress: bool | None = False,
        **options: Unpack[GenerationOptions],
    ) -> Generator[StreamEvent, None, TextGeneration]:
        """Yields the text that `generate` returns, piece by piece as it arrives; arguments as there.

        A chat is streamed by `stream(loaded.chat_prompt(messages))`.

        Args:
            prompts, stop, ignore_eos, drafter, **options: as for `generate`.
            progress: show a progress bar on stderr while the prompts are read, not after; None if that is a terminal.

        Returns:
            What `generate` returns, as the generator's value: `generation = yield from loaded.stream(...)`.
        """
        target, drafting = self._drafting(drafter)
        ids = self._token_ids(prompts)
        events = stream(
            target,
            self.params,
            ids,
            self._tokenizer(),
            stop_strings=_strings(stop),
            eos_ids=self._end_tokens(ignore_eos),
            progress=progress,
            **drafting,
            **options,
        )
        return _with_texts(events, len(ids))

    @named_options(generate)
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        *,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        drafter: LoadedDrafter | Drafter | None = None,
        progress: bool | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> TextGeneration:
        """Answers one conversation or several.

        Args:
            messages: a conversation, such as `[{"role": "user", "content": "Hello"}]`, or a list of conversations.
            stop, ignore_eos, drafter, progress: as for `generate`.
            add_generation_prompt, tools: of the template, see `ChatTemplate.render`.
            **options: those of `GenerationOptions`, as for `generate`; all others are variables of the template, such
                as `enable_thinking=False`.

        Returns:
            As `generate`; `texts` are the answers.

        Raises:
            ValueError: as `generate` and `chat_prompt`.
        """
        several = isinstance(messages, Sequence) and bool(messages) and not isinstance(messages[0], Mapping | str)
        conversations: Any = messages if several else [messages]
        given = {name: options.pop(name) for name in GenerationOptions.__optional_keys__ & options.keys()}
        template = {"add_generation_prompt": add_generation_prompt, "tools": tools, **options}
        return self.generate(
            [self.chat_prompt(conversation, **template) for conversation in conversations],
            stop=stop,
            ignore_eos=ignore_eos,
            drafter=drafter,
            progress=progress,
            **given,
        )

    def chat_prompt(self, messages: Messages, **options: Any) -> list[int]:
        """The token ids of a conversation by the checkpoint's chat template, which writes all special tokens itself.

        Args:
            messages: such as `[{"role": "user", "content": "Hello"}]`.
            **options: as for `ChatTemplate.render`.

        Raises:
            ValueError: there is no chat template or no tokenizer, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError(f"{self.folder} has no chat template: it is not a model to chat with, give it text")
        text = self.chat_template.render(messages, **options)
        return self._encode(text, "a chat", add_special_tokens=False)

    def _token_ids(self, prompts: Prompts) -> list[Sequence[int]]:
        """Of each row; a single text, or a list of numbers, is one."""
        if isinstance(prompts, str):
            rows: list[Any] = [prompts]
        elif isinstance(prompts, Sequence | np.ndarray):
            single = len(prompts) > 0 and not isinstance(prompts[0], str) and np.ndim(prompts[0]) == 0
            rows = [prompts] if single else list(prompts)
        else:
            raise ValueError(f"prompts are {prompts!r}, expected a text, its token ids, or a list of either")
        return [self._encode(each, f"prompt {row}") if isinstance(each, str) else each for row, each in enumerate(rows)]

    def _encode(self, text: str, name: str, add_special_tokens: bool = True) -> list[int]:
        utf8(text, name)
        return self._tokenizer().encode(text, add_special_tokens=add_special_tokens).ids

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(
                f"{self.folder} has no tokenizer.json, so text cannot be turned into its tokens: "
                "mamba_spec_jax.generate goes from token ids to token ids"
            )
        return self.tokenizer

    def _end_tokens(self, ignored: bool) -> tuple[int, ...]:
        return () if ignored else self.model.config.eos_token_ids

    def _drafting(self, drafter: LoadedDrafter | Drafter | None) -> tuple[HybridModel, dict[str, Any]]:
        """The target that returns what the drafter reads, and the drafter as `generate` and `stream` take it."""
        if not isinstance(drafter, LoadedDrafter):
            read = () if drafter is None else drafter.hidden_layers
            return self.model.with_hidden_layers(read or self.model.hidden_layers), {
                "drafter": drafter,
                "drafter_params": None,
            }
        same = self.model.with_hidden_layers(drafter.target.hidden_layers)
        if drafter.target != same:
            raise ValueError(
                f"the drafter was loaded for another model than {self.folder}, expected load_drafter(..., loaded) with "
                "the one that generates"
            )
        return drafter.target, {"drafter": drafter.drafter, "drafter_params": drafter.params}


def _strings(stop: str | Sequence[str]) -> Sequence[str]:
    return [stop] if isinstance(stop, str) else stop


def _with_texts(
    events: Generator[StreamEvent, None, Generation], rows: int
) -> Generator[StreamEvent, None, TextGeneration]:
    texts = [""] * rows
    while True:
        try:
            event = next(events)
        except StopIteration as end:
            return TextGeneration(**vars(end.value), texts=texts)
        texts[event.row] += event.text
        yield event
