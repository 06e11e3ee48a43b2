"""Bodies of OpenAI's routes: their fields, and what is refused (`REFUSED`), dropped or unknown."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from pigou.wire.errors import (
    DECODING_ERRORS,
    REFUSED,
    bad_field,
    decode_error,
    decoded,
    unknown_field,
)
from pigou.wire.sse import BOM

#: Response header that lists a request's unknown fields.
HEADER = "X-Pigou-Unknown-Fields"
#: Modes for unknown fields.
MODES = ("warn", "refuse")
#: Maximum names in the header, and characters of each.
_MAX_NAMES, _MAX_CHARS = 16, 64
_UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.\[\]-]")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
#: Text, several texts, token ids, or several lists of them; told apart by
#: `pigou.wire.request_validation`.
Prompt: TypeAlias = str | list[str | int | list[int]]
NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]
_B = TypeVar("_B", bound="_OpenAIBody")


def neutral(name: str, value: Any, n: Any = None) -> bool:
    """Return whether a refused field's value asks for nothing; `n` is the request's choices."""
    if value is None:
        return True
    if name == "best_of" and n is not None and type(value) is int and value == n:
        return True  # every choice that is computed is returned
    # 1 and 1.0 are the same in JSON, 1 and true are not.
    same_kind = (item for item in REFUSED.get(name, ())[1:]
                 if isinstance(value, bool) == isinstance(item, bool))  # fmt: skip
    return value in same_kind


def _known_part(body: bytes, known: Collection[str], unknown: list[str]) -> bytes:
    """Return a body without unknown and neutral fields; `unknown` collects their paths."""
    parts = _fields.decode(body)
    n = _value(parts.get("n"))
    for name in [name for name in parts if name in REFUSED and name not in known]:
        if not neutral(name, _value(parts.pop(name)), n):
            raise bad_field(name, f"is refused: {REFUSED[name][0]}.")
    return bytes(_pruned(msgspec.Raw(msgspec.json.encode(parts)), "", known, unknown))


def _pruned(
    raw: msgspec.Raw, prefix: str, known: Collection[str], unknown: list[str]
) -> msgspec.Raw:
    """Return an object's `known` fields; other JSON stays as it is."""
    try:
        parts = _fields.decode(raw)
    except msgspec.ValidationError:
        return raw
    for name in [name for name in parts if name not in known]:
        if bytes(parts.pop(name)) != b"null":
            unknown.append(prefix + name)
    for name in parts:
        if (inner := _NESTED.get(prefix + name)) is not None:
            parts[name] = _pruned(parts[name], f"{prefix}{name}.", inner, unknown)
    return msgspec.Raw(msgspec.json.encode(parts))


def header_value(names: Iterable[str]) -> str:
    """Return the value of `X-Pigou-Unknown-Fields`: printable names, cut, with commas."""
    shown = list(dict.fromkeys(printable(name) for name in names))
    rest = len(shown) - _MAX_NAMES
    return ", ".join(shown[:_MAX_NAMES] + ([f"{rest} more"] if rest > 0 else []))


def printable(name: str) -> str:
    """Return a field's name as it may stand in a header or a log line."""
    return _UNPRINTABLE.sub("?", name[:_MAX_CHARS]) or "?"


class UnknownFields:
    """Refuses unknown fields, or warns of each name once."""

    #: Maximum logged names; beyond it nothing more is logged.
    MAX_LOGGED = 256

    def __init__(self, mode: str, log: Callable[[str, str], None]) -> None:
        """Go by `mode`, one of `MODES`; `log` takes a message with one `%s`, and its value."""
        self._refuses = mode == "refuse"
        self._log = log
        self._logged: set[str] = set()

    def judge(self, names: Iterable[str]) -> dict[str, str]:
        """Return response headers about unknown fields; raises APIError."""
        names = list(names)
        if not names:
            return {}
        if self._refuses:
            raise unknown_field(names[0])
        for name in map(printable, names):
            if name not in self._logged and len(self._logged) < self.MAX_LOGGED:
                self._logged.add(name)
                self._log("requests have the unknown field %s, which has no effect", name)
        return {HEADER: header_value(names)}


def _value(raw: msgspec.Raw | None) -> Any:
    return None if raw is None else msgspec.json.decode(raw)


class _OpenAIBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON object that refuses unknown fields."""


class StreamOptions(_OpenAIBody):
    """Extra contents of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(_OpenAIBody):
    """`json_schema` of a response format; `strict` is always on, output never leaves the schema."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(_OpenAIBody):
    """OpenAI's way to ask for structured output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(_OpenAIBody):
    """vLLM's way to ask for structured output: exactly one of the first five."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    # How JSON is written; these may also stand beside `response_format`.
    # write JSON compactly; false allows white space between its parts.
    disable_any_whitespace: bool | None = None
    # objects have the properties that the schema names only.
    disable_additional_properties: bool | None = None
    # regular expression of the white space between JSON's parts.
    whitespace_pattern: str | None = None


class _UnusedFields(_OpenAIBody, kw_only=True):
    """Fields that clients send and Pigou accepts without using them."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    spaces_between_special_tokens: bool | None = None


class GenerationRequest(_UnusedFields, kw_only=True):
    """Fields shared by completions and chat requests."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # How the server treats it.
    priority: int | None = None
    deadline_ms: int | None = None
    request_id: NonEmpty | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    resume_tokens: int | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of `POST /v1/completions`."""

    prompt: Prompt
    logprobs: int | bool | None = None
    echo: bool | None = None


class PoolingRequest(CompletionRequest, kw_only=True):
    """Prompts whose hidden states are pooled; nothing is generated."""

    pooling: str


class _PooledBody(_OpenAIBody, kw_only=True):
    """Fields shared by requests that pool hidden states."""

    #: Fields passed to the prompts.
    SHARED: ClassVar = ("model", "truncate_prompt_tokens", "add_special_tokens", "priority",
                        "cache_salt", "request_id")  # fmt: skip
    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: NonEmpty | None = None


class EmbeddingsRequest(_PooledBody, kw_only=True):
    """Body of `POST /v1/embeddings`."""

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class ScoreRequest(_PooledBody, kw_only=True):
    """Body of `POST /v1/score`: two texts, or lists of them, by any of their names."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None


class RerankRequest(_PooledBody, kw_only=True):
    """Body of `POST /v1/rerank`."""

    query: NonEmpty
    documents: list[str | dict[str, Any]]
    top_n: int | None = None
    return_documents: bool | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    # as in the OpenAI API; further keys of a message reach the chat template.
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None  # false: reasoning is parsed, and not sent
    # the rendered and tokenized messages; a gateway that sends them spares the worker both.
    prompt_token_ids: list[int] | None = None
    verbosity: str | None = None  # accepted and ignored
    parallel_tool_calls: bool | None = None


class TokenizeRequest(_OpenAIBody, kw_only=True):
    """Body of `POST /tokenize`: `prompt`, or `messages` that the template renders first."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_OpenAIBody, kw_only=True):
    """Body of `POST /detokenize`."""

    tokens: list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]]
    model: str | None = None


#: Objects within a request, and the names of their fields.
_NESTED = {
    "stream_options": StreamOptions.__struct_fields__,
    "response_format": ResponseFormat.__struct_fields__,
    "response_format.json_schema": JsonSchema.__struct_fields__,
    "structured_outputs": StructuredOutputs.__struct_fields__,
}
_DECODERS: dict[type[_OpenAIBody], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind, strict=False)
    for kind in (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest,
                 EmbeddingsRequest, ScoreRequest, RerankRequest)
}  # fmt: skip


class Known(NamedTuple, Generic[_B]):
    """A decoded request."""

    request: _B
    body: bytes
    unknown: list[str]  # unknown fields of the body, nested ones as paths


def known(kind: type[_B], body: bytes) -> Known[_B]:
    """Decode a body apart from unknown fields; raise `APIError` 400 that names the fault."""
    body = without_bom(body)
    try:
        return Known(_DECODERS[kind].decode(body), body, [])
    except DECODING_ERRORS as error:
        if "unknown field" not in str(error):
            raise decode_error(error, body) from None
    unknown: list[str] = []
    try:
        body = _known_part(body, set(kind.__struct_fields__), unknown)
    except DECODING_ERRORS as error:
        raise decode_error(error, body) from None
    return Known(decode(kind, body), body, unknown)


def decode(kind: type[_B], body: bytes) -> _B:
    """Decode a body; raise `APIError` 400 that names the fault, an unknown field too."""
    request: _B = decoded(_DECODERS[kind], without_bom(body))
    return request


def decode_generation(body: bytes) -> CompletionRequest | ChatRequest:
    """Decode a body of completions or chats; raise `APIError` 400 that names the fault."""
    is_chat = "messages" in decoded(_fields, without_bom(body))
    parsed: Known[CompletionRequest] | Known[ChatRequest]
    parsed = known(ChatRequest, body) if is_chat else known(CompletionRequest, body)
    if parsed.unknown:
        raise unknown_field(parsed.unknown[0])
    return parsed.request


def without_bom(body: bytes) -> bytes:
    """Return a body without a UTF-8 byte order mark."""
    return body.removeprefix(BOM)
