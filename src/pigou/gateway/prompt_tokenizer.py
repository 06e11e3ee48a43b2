"""The prompt tokenizer: turns a request's prompt into token ids, as its worker will."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pigou.config import ConfigError
from pigou.gateway.gateway_request import BodyFields
from pigou.gateway.request_tenure import digest
from pigou.text.chat_template import ChatError, ChatTemplate, parse_call
from pigou.text.model_files import find_tokenizer
from pigou.text.tokenizer import Tokenizer, TokenizerError
from pigou.wire.errors import APIError
from pigou.wire.request_validation import check_messages

_messages = msgspec.json.Decoder(list[dict[str, Any]])


class NotTokenizable(ValueError):
    """What a prompt's tokens are is for the worker to say, or to refuse."""


class PromptTokenizer:
    """A tokenizer and its chat template.

    Attributes:
        template: for chats; None where the model has none.
        version: digest of the template; empty where there is none.
        allow_special_tokens: what clients type in chats may become special tokens.
    """

    allow_special_tokens = False

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, version: str = ""
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.version = version

    @classmethod
    def load(cls, folder: Path) -> PromptTokenizer:
        """Read a model folder.

        Raises:
            ConfigError: its tokenizer or its template cannot be used.
        """
        try:
            tokenizer = Tokenizer.load(folder)
            template = ChatTemplate.choose(tokenizer.templates, tokenizer.names)
        except (TokenizerError, ValueError, OSError, KeyError, TypeError) as error:
            raise ConfigError(f"the tokenizer of {folder} cannot be used: {error}") from error
        return cls(tokenizer, template, digest(template.identity.encode()) if template else "")

    @classmethod
    def named(cls, name: str) -> PromptTokenizer:
        """Find a tokenizer by folder or hub id, which is asked when its cache has it not.

        Raises:
            ConfigError: it cannot be had or used.
        """
        folder = find_tokenizer(name, download=True)
        if folder is None:
            raise ConfigError(
                f"tokenizer is {name!r}; it must be a folder with a tokenizer.json, or a "
                "Hugging Face hub id that can be had"
            )
        return cls.load(folder)

    @property
    def max_token_bytes(self) -> int:
        """Most bytes of any token."""
        return self.tokenizer.vocabulary.max_token_bytes

    def encode(self, text: str | list[int], fields: BodyFields, *, chat: bool) -> list[int]:
        """Return the token ids of what `prompt_of` returned, all of them.

        Raises:
            NotTokenizable: it is no text.
        """
        if isinstance(text, list):
            return text
        special = fields.add_special_tokens
        try:
            return self.tokenizer.encode(text, bool(special) if chat else special is not False)
        except (ValueError, TypeError) as error:
            raise NotTokenizable(str(error)) from error

    def prompt_of(self, fields: BodyFields, *, chat: bool, stock: bool) -> str | list[int]:
        """Return the prompt's text, or its ids; of several prompts, the first.

        Args:
            fields: of the request's body.
            chat: whether it came to the chat route.
            stock: it is for a server that is not Pigou's own: that shows tools to the template
                also where none may be called.

        Raises:
            NotTokenizable: it cannot be rendered here.
        """
        if not chat:
            return first_prompt(fields.prompt)
        if fields.prompt_token_ids and not stock:
            return fields.prompt_token_ids
        if self.template is None or fields.chat_template is not None:
            raise NotTokenizable("there is no template, or one of the request's own")
        variables = dict(fields.chat_template_kwargs or {})
        if {"messages", "add_generation_prompt"} & variables.keys():
            raise NotTokenizable("the template's variables are fields of their own")
        if fields.reasoning_effort is not None:
            variables["reasoning_effort"] = fields.reasoning_effort
        if fields.tools and (stock or fields.tool_choice != "none"):
            variables["tools"] = fields.tools
        try:
            messages = _messages.decode(fields.messages)
            check_messages(messages)
            if stock:  # which reads special tokens wherever they stand
                messages = [_parsed(message) for message in messages]
            elif not self.allow_special_tokens:
                messages = self.tokenizer.guard(messages)
                variables = self.tokenizer.guard(variables)
            return self.template.render(
                messages,
                add_generation_prompt=fields.add_generation_prompt is not False,
                continue_final_message=bool(fields.continue_final_message),
                variables=variables,
            )
        except (APIError, ChatError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise NotTokenizable(str(error)) from error
        except (KeyError, TypeError, AttributeError) as error:
            raise NotTokenizable(f"messages: {error!r}") from error


def first_prompt(prompt: Any) -> str | list[int]:
    """Return the first prompt of a completion, text or ids.

    Raises:
        NotTokenizable: it is neither.
    """
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return prompt
    raise NotTokenizable("prompt is neither text nor token ids")


def _parsed(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as vLLM shows it to templates: null content as "", arguments as objects."""
    if message.get("content") is None:
        message = {**message, "content": ""}
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    try:
        return {**message, "tool_calls": [parse_call(call) for call in calls]}
    except ValueError as error:
        raise NotTokenizable(f"tool_calls: {error}") from error
