"""Chat templates: from messages to the text of a prompt, in a sandbox."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

#: Marks the end of a final message that is to be continued. Its own trailing space shows whether
#: the template trims messages.
_END = "CONTINUE_FINAL_MESSAGE_TAG "
#: What OpenAI's newer clients call the role `system`.
_DEVELOPER = "developer"


class ChatError(ValueError):
    """Messages that the template refuses; the text is meant for the client."""


class _Generation(Extension):
    """Reads `{% generation %}...{% endgeneration %}`, a mark for training, as its contents."""

    tags = {"generation"}  # noqa: RUF012 (the type of the base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the nodes between the marks."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled chat template, as Hugging Face tokenizers publish them."""

    def __init__(self, source: str, names: dict[str, str]) -> None:
        """Compile a template.

        Args:
            source: Jinja2 text.
            names: special tokens (`bos_token`, ...), which templates use.

        Raises:
            ValueError: it is not valid Jinja2.
        """
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise
        env.globals["strftime_now"] = _now
        try:
            self._template = env.from_string(source)
        except TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid Jinja2: {error}") from None
        self._names = names
        self._knows_developer = _DEVELOPER in source

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """Return the prompt.

        Args:
            messages: checked by `pigou.wire.checks.check_messages`; lists of text parts are
                joined with line breaks. The role `developer` is `system` for a template that
                does not name it.
            add_generation_prompt: open the assistant's turn at the end.
            continue_final_message: end within the final message, for the model to go on; its
                trailing space stays if the template keeps it.
            variables: further variables of the template.

        Raises:
            ChatError: the template refuses the messages, or fails on them.
        """
        flat = [
            message | {"content": _flat(message.get("content")), "role": self._role(message)}
            for message in messages
        ]
        if continue_final_message:
            flat[-1]["content"] += _END
        try:
            text: str = self._template.render(
                **self._names,
                **(variables or {}),
                messages=flat,
                add_generation_prompt=add_generation_prompt,
            )
        except ChatError:
            raise
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise ChatError(f"the chat template failed on these messages: {error}") from None
        return _within(text) if continue_final_message else text

    def _role(self, message: dict[str, Any]) -> Any:
        role = message.get("role")
        return "system" if role == _DEVELOPER and not self._knows_developer else role


def _flat(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part if isinstance(part, str) else _part(part) for part in content)


def _part(part: dict[str, Any]) -> str:
    text: str = part["refusal"] if part["type"] == "refusal" else part["text"]
    return text


def _within(text: str) -> str:
    """Cut what the template puts after the final message, as transformers does."""
    at = text.rfind(_END.strip())
    if at < 0:
        raise ChatError("continue_final_message: the template does not show the final message")
    return text[:at] if text.startswith(_END, at) else text[:at].rstrip()


def _raise(message: str) -> NoReturn:
    raise ChatError(f"the chat template refuses these messages: {message}")


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
