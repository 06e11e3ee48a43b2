"""Errors of the HTTP API, in the body shape that vLLM and OpenAI clients know."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec

#: `type` of the error body by HTTP status, as vLLM names them.
TYPES = {
    400: "BadRequestError", 401: "AuthenticationError", 403: "PermissionDeniedError",
    404: "NotFoundError", 405: "MethodNotAllowedError", 408: "RequestTimeoutError",
    409: "ConflictError", 413: "RequestTooLargeError", 415: "UnsupportedMediaTypeError",
    429: "RateLimitError", 500: "InternalServerError", 502: "BadGatewayError",
    503: "ServiceUnavailableError", 504: "GatewayTimeoutError",
}  # fmt: skip

#: `type` of the error 500 of a request whose own content made the engine fail: the worker is well,
#: and sending the request to another changes nothing.
REQUEST_FAILED = "RequestFailedError"
#: `type` of the error of a request that was under way when several workers ended.
SUSPECT = "SuspectRequestError"
#: Tells the SDKs of OpenAI and Anthropic not to send a request again.
NO_RETRY = {"x-should-retry": "false"}
#: Server-side collections that would leak between keys.
STORED_COLLECTIONS = ("files", "batches", "conversations", "vector_stores", "uploads", "containers",
                       "threads", "assistants", "fine_tuning", "evals")  # fmt: skip
_ATTACH = "attach a server that has it (pigou serve --attach URL)"
#: Routes of OpenAI's, Anthropic's and vLLM's APIs that Pigou's workers lack, and what to do.
_ABSENT_ROUTES = {
    "complete": "use /v1/completions",
    "engines": "use the paths without /engines/NAME, and name the model in the body",
    **dict.fromkeys(("embeddings", "audio", "rerank", "score", "pooling", "classify", "images",
                     "videos", "moderations", "realtime", *STORED_COLLECTIONS), _ATTACH),
}  # fmt: skip

#: Refused fields of other servers: the remedy, and values beside null that ask for nothing.
REFUSED: dict[str, tuple[str, *tuple[Any, ...]]] = {
    "best_of": ("it is not supported; ask for n completions and choose among them", 1),
    "use_beam_search": ("beam search is not supported; remove it", False),
    "length_penalty": ("it belongs to beam search, which is not supported; remove it", 1),
    "suffix": ("insertion is not supported; remove it", ""),
    "functions": ("it is deprecated; use tools", []),
    "function_call": ("it is deprecated; use tool_choice", "none", "auto"),
    **{f"guided_{name}": (f"it is deprecated; use structured_outputs.{name}",)
       for name in ("json", "regex", "grammar", "json_object")},
    "guided_choice": ("it is deprecated; use structured_outputs.choice", []),
    **dict.fromkeys(("guided_decoding_backend", "guided_whitespace_pattern"),
                    ("it is deprecated; remove it",)),
    "chat_template": ("a request may not bring its own template; set it on the server", ""),
    "documents": ("they reach the template as chat_template_kwargs.documents; send them there", []),
    "echo": ("it belongs to completions; remove it", False),
    "prompt_embeds": ("prompts are text or token ids; use prompt",),
    "audio": ("output is text only; remove it", {}),
    "modalities": ("output is text only; remove it", ["text"], []),
    "prediction": ("predicted outputs are not supported; remove it",),
    "web_search_options": ("web search is not supported; remove it",),
    "moderation": ("moderation is not supported; remove it",),
    "allowed_token_ids": ("it is not supported; use structured_outputs or logit_bias", []),
    "bad_words": ("it is not supported; use logit_bias with the ids of their tokens", []),
    "early_stopping": ("it belongs to beam search, which is not supported; remove it", False),
    "logits_processors":
        ("code in requests is not supported; use logit_bias or structured_outputs", []),
    "vllm_xargs": ("there are no extensions to pass it to; remove it", {}),
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"),
                    ("the model reads text only; remove it", {})),
    "thinking_token_budget": ("it is not supported; use max_tokens",),
    "repetition_detection":
        ("it is not supported; use frequency_penalty or repetition_penalty", {}),
    "truncation_side": ("truncate_prompt_tokens keeps the end; remove it", "left"),
    "return_tokens_as_token_ids": ("it is not supported; use return_token_ids", False),
}  # fmt: skip

_NAMED = re.compile(r"Object (?P<fault>contains unknown|missing required) field `(?P<field>.*?)`"
                    r"(?: - at `(?P<path>.*)`)?$")  # fmt: skip
_WRONG = re.compile(r"(?P<what>.*?) - at `(?P<path>.*)`$")
_PATH_STEP = re.compile(r"[.\[]")
#: Errors raised by decoding JSON.
DECODING_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_T = TypeVar("_T")
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")


class APIError(Exception):
    """A refusal or failure, as the client gets it; the message names field, value and remedy."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        *,
        type: str | None = None,
        code: int | str | None = None,
        retry_after: int | None = None,
        final: bool = False,
        details: Mapping[str, Any] | None = None,
        extra_headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.type = type or TYPES.get(status, HTTPStatus(status).phrase.replace(" ", "") + "Error")
        self.code = status if code is None else code
        self.retry_after = retry_after  # seconds; sent as `Retry-After`
        self.final = final  # retries are useless; sent as `X-Should-Retry`
        self.details = details or {}  # further fields of the body
        self.extra_headers = extra_headers or {}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response beside its body."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.final:
            headers |= NO_RETRY
        headers |= self.extra_headers
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})

    def body(self) -> bytes:
        """Return the JSON body, `{"error": {message, type, param, code}}`."""
        return error_body(self.message, self.type, self.param, self.code, self.details)


def bad_request(message: str, param: str | None = None) -> APIError:
    """Return error 400 for an invalid request."""
    return APIError(400, message, param)


def bad_field(path: str, text: str) -> APIError:
    """Return the error 400 for a field, whose path (`a.b[2]`) begins the message."""
    return bad_request(f"{path} {text}", _PATH_STEP.split(path, maxsplit=1)[0])


def bad_kind(path: str, kind: Any, remedy: str) -> APIError:
    """Return the error 400 for a field whose value names an unknown kind."""
    return bad_field(path, f"is {str(kind)[:40]!r}; {remedy}.")


def check_count(path: str, count: int, limit: int, noun: str, remedy: str = "work") -> None:
    """Raise the error 400 if a field has more than `limit` of something."""
    if count > limit:
        raise bad_field(path, f"has {count} {noun}; at most {limit} {remedy}.")


def unknown_field(field: str) -> APIError:
    """Return the error for an unknown field."""
    return bad_request(f"Unknown field {field[:80]}: remove it, or check its spelling.", field[:80])


def http_error(status: int, method: str, path: str, reason: str = "") -> APIError:
    """Return the error of an unrouted request, by HTTP status."""
    if status == 404:
        return absent_route(method, path, ())
    if status == 405:
        return APIError(405, f"{path} does not take {method}.")
    return APIError(status, reason)


def absent_route(method: str, path: str, available: Sequence[str]) -> APIError:
    """Return error 404 for an absent route, with the remedy for known ones."""
    parts = [*path.split("/"), "", ""]
    remedy = _ABSENT_ROUTES.get(parts[2] if parts[1] in ("v1", "v2") else parts[1])
    listed = f" Available here: {', '.join(available)}." if available else ""
    if remedy is None:
        return APIError(404, f"There is no path {path[:200]}.{listed}", final=True)
    return APIError(404, f"{method} {path[:200]} is not served here: {remedy}.{listed}", final=True)


def too_large(max_bytes: int) -> APIError:
    """Return the error 413 for a body of more than `max_bytes` bytes."""
    return APIError(413, f"The body has more than {max_bytes} bytes.")


def error_body(
    message: str, type: str, param: str | None, code: int | str,
    details: Mapping[str, Any] | None = None,
) -> bytes:  # fmt: skip
    """Encode an error body."""
    error = {"message": message, "type": type, "param": param, "code": code}
    return msgspec.json.encode({"error": error | dict(details or {})})


def decoded(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    """Decode JSON; raise the error 400 that names the fault."""
    try:
        return decoder.decode(body)
    except DECODING_ERRORS as error:
        raise decode_error(error, body) from None


def decode_error(error: Exception, body: bytes) -> APIError:
    """Translate msgspec's error into field, value and remedy."""
    text = str(error)
    if isinstance(error, msgspec.ValidationError):
        return _field_error(text, body)
    if isinstance(error, UnicodeDecodeError) or "utf-8" in text.lower():
        return bad_request("The body is not valid UTF-8; encode it as UTF-8.")
    if isinstance(error, RecursionError):
        return bad_request("The body is nested too deeply.")
    if (field := _surrogate_field(body)) is not None:
        return bad_field(field, "has half a surrogate pair (U+D800 to U+DFFF alone): remove it.")
    return bad_request(f"The body is not valid JSON: {text}.")


def _surrogate_field(body: bytes) -> str | None:
    """Return the field whose text has half a surrogate pair, if that is the only fault."""
    try:
        fields = json.loads(body)
        for name, value in fields.items() if isinstance(fields, dict) else ():
            try:
                json.dumps([name, value], ensure_ascii=False).encode()
            except UnicodeEncodeError:
                return str(name)[:80].encode("ascii", "replace").decode()
    except (ValueError, RecursionError):
        pass  # there are other faults
    return None


def _field_error(text: str, body: bytes) -> APIError:
    if match := _NAMED.match(text):
        field = _join(match["path"], match["field"])
        if match["fault"] == "missing required":
            return bad_request(f"{field} is required, and missing.", field)
        if field in REFUSED:
            return bad_request(f"{field} is refused: {REFUSED[field][0]}.", field)
        return unknown_field(field)
    match = _WRONG.match(text)
    field = _join(match["path"], "") if match else ""
    if match is None or not field:
        return bad_request(f"The body must be a JSON object: {_lower(text)}.")
    value = _shown(_value_at(body, match["path"]))
    param = field.split("[")[0]
    return bad_request(f"{field} has a wrong value{value}: {_lower(match['what'])[:200]}.", param)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _join(path: str | None, field: str) -> str:
    parts = (path or "$").removeprefix("$").removeprefix(".")
    return ".".join(part for part in (parts, field) if part)


def _value_at(body: bytes, path: str) -> Any:
    """Return the value at msgspec's path (`$.a.b[2]`), or its nearest parent; UNSET for none."""
    try:
        value = msgspec.json.decode(body)
    except DECODING_ERRORS:
        return msgspec.UNSET
    for name, index in _STEP.findall(path):
        try:
            value = value[name] if name else value[int(index)]
        except (KeyError, IndexError, TypeError, ValueError):
            return value
    return value


def _shown(value: Any) -> str:
    if value is msgspec.UNSET:
        return ""
    text = msgspec.json.encode(value).decode()
    return ", " + (text if len(text) <= 80 else text[:77] + "...")
