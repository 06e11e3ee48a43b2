"""What the gateway itself reads of a body; the rest is the worker's to judge."""

from __future__ import annotations

from typing import Any

import msgspec

from pigou.gateway.chunks import ABSENT


class StreamOptions(msgspec.Struct):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Format(msgspec.Struct):
    """`response_format`, as far as it matters here."""

    type: str = "text"


class Asked(msgspec.Struct):
    """A body of either route; `None` means that a field was not given."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    response_format: Format | None = None
    structured_outputs: Any = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    priority: int | None = None
    deadline_ms: int | None = None
    # What the prompt's tokens are made of.
    prompt: Any = None
    messages: msgspec.Raw = ABSENT
    prompt_token_ids: list[int] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Any = None
    tools: list[Any] | None = None
    tool_choice: Any = None

    def scores_prompt(self, chat: bool) -> bool:
        """Whether the prompt's log-probabilities are wanted.

        Then the worker that decodes must compute all of it, cached or not.
        """
        if self.prompt_logprobs is not None:
            return True
        return not chat and bool(self.echo) and self.logprobs not in (None, False)
